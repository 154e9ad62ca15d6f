"""What nobody gave a figure for is booked as it was held, and shown as assumed."""

from __future__ import annotations

import asyncio

import pytest

from headgate.cli.doctor_checks import Finding, claim_findings
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import ROOT, Scope, Tenant
from headgate.core.lifecycle import NOTHING_USED, UNKNOWN_USAGE, Usage
from headgate.core.money import MicroUsd
from headgate.core.task import TaskRecord, Terms
from headgate.core.task_view import snapshot_of
from headgate.storage.sql_store import StoreLedger
from headgate.storage.store import Overdue, Visit
from headgate.storage.transaction import Transaction
from storage.scene import AGAIN, AWAY, DONE, FAILED, HERE, LEASE_SECONDS, Place, Scene

WORKER = "worker-1"
FOUNDERS = 20


def booked(record: TaskRecord) -> tuple[int, int, int, int]:
    progress = record.progress
    return (
        progress.used_tokens,
        progress.used_micro_usd,
        progress.assumed_tokens,
        progress.assumed_micro_usd,
    )


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (Usage(tokens=70, micro_usd=7), (70, 7, 0, 0)),
        (UNKNOWN_USAGE, (100, 10, 100, 10)),
        (Usage(tokens=70), (70, 10, 0, 10)),
        (Usage(micro_usd=7), (100, 7, 100, 0)),
        (NOTHING_USED, (0, 0, 0, 0)),
        (Usage(tokens=0), (0, 10, 0, 10)),
    ],
)
async def test_only_figures_that_nobody_gave_are_assumed(
    place: Place, cost: Usage, expected: tuple[int, int, int, int]
) -> None:
    async with place.scene() as scene:
        for step, task_id in ((DONE, "t1"), (FAILED, "t2")):
            await scene.run(task_id)
            (record,) = await scene.settle(task_id, step, cost=cost)
            assert booked(record) == expected
            assert booked(await scene.get(task_id)) == expected


async def test_assumptions_of_all_attempts_add_up(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await scene.settle("t1", AGAIN, cost=UNKNOWN_USAGE)
        await scene.assign("t1", attempt=2)
        await scene.settle("t1", AGAIN, attempt=2, cost=Usage(tokens=5, micro_usd=3))
        await scene.assign("t1", attempt=3)
        await scene.settle("t1", attempt=3, cost=Usage(tokens=1))
        assert booked(await scene.get("t1")) == (106, 23, 100, 20)


async def test_nothing_is_assumed_where_nothing_was_held(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1")
        await scene.assign("t1", tokens=0, micro_usd=0)
        (record,) = await scene.settle("t1", cost=UNKNOWN_USAGE)
        assert booked(record) == (0, 0, 0, 0)
        usage = snapshot_of(record).usage
        assert usage is not None
        assert (usage.assumed_tokens, usage.assumed_usd) == (None, None)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_lost_attempt_that_had_begun_is_assumed(place: Place, has_begun: bool) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        if has_begun:
            await scene.store.collect(AWAY)
        await scene.let_time_pass(LEASE_SECONDS / 2)
        await scene.let_time_pass(LEASE_SECONDS / 2 + 1)
        await scene.store.recover(scene.epoch, ["t1"])
        record = await scene.get("t1")
        assert record.task.status.value == "queued"
        assert booked(record) == ((100, 10, 100, 10) if has_begun else (0, 0, 0, 0))


async def test_a_repeated_settlement_assumes_nothing_twice(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        for _ in range(3):
            (record,) = await scene.settle("t1", cost=UNKNOWN_USAGE)
            assert booked(record) == (100, 10, 100, 10)


async def test_an_attempt_at_a_worker_past_its_own_time_is_given_up_and_tried_again(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await visit(scene, joins=True)
        terms = Terms(attempt_seconds=5.0, max_attempts=2)
        await scene.submit("t1", terms=terms)
        await scene.assign("t1", node_id=WORKER)
        await wait(scene, 6.0)
        assert await give_up(scene, attempt=1) == ["assigned"], "its time has not begun"
        await visit(scene)
        await wait(scene, 4.0)
        assert await give_up(scene, attempt=1) == ["running"]
        await wait(scene, 1.0)
        assert await give_up(scene, attempt=1) == ["queued"]
        record = await scene.get("t1")
        assert (record.error, record.progress.failures) == ("timed out after 5 s", 1)
        assert booked(record) == (100, 10, 100, 10)
        await wait(scene, 60.0)
        await visit(scene, joins=True)
        await scene.assign("t1", attempt=2, node_id=WORKER)
        await visit(scene)
        await wait(scene, 5.0)
        assert await give_up(scene, attempt=2) == ["failed"]
        assert booked(await scene.get("t1")) == (200, 20, 200, 20)


async def test_a_cancelled_attempt_that_times_out_is_cancelled_and_not_tried_again(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await visit(scene, joins=True)
        await scene.submit("t1", terms=Terms(attempt_seconds=5.0, max_attempts=9))
        await scene.assign("t1", node_id=WORKER)
        await visit(scene)
        await scene.cancel("t1")
        await wait(scene, 5.0)
        assert await give_up(scene, attempt=1) == ["cancelled"]


async def test_a_task_shows_what_is_assumed_of_its_usage(place: Place) -> None:
    async with place.scene() as scene:
        await scene.submit("t1", terms=Terms(attempt_seconds=2.5))
        await scene.assign("t1", micro_usd=70_000)
        (record,) = await scene.settle("t1", FAILED, cost=Usage(tokens=3))
        shown = snapshot_of(record)
        assert shown.timeout_seconds == 2.5
        assert shown.usage is not None
        assert (shown.usage.tokens, shown.usage.usd) == (3, 0.07)
        assert (shown.usage.assumed_tokens, shown.usage.assumed_usd) == (None, 0.07)


async def test_the_ledger_of_a_store_creates_a_limit_once(place: Place) -> None:
    async with place.scene() as scene:
        ledger, session = StoreLedger(scene.store), Scope("session:s")
        limits = [Limit(limit_micro_usd=MicroUsd(n + 1)) for n in range(FOUNDERS)]
        seen = await asyncio.gather(*(ledger.create_limit(session, limit) for limit in limits))
        assert len({limit.limit_micro_usd for limit in seen}) == 1
        (account,) = await ledger.accounts(session, most=1)
        assert account.limit == seen[0]


async def visit(scene: Scene, *, joins: bool = False) -> None:
    """Let the worker come, say that it runs nothing new, and take what is there."""
    await scene.store.visit(
        Visit(
            worker_id=WORKER,
            agent_id="coder",
            capacity=4,
            running={},
            lease_seconds=100.0,
            takes=True,
            joins=joins,
            node_id=HERE,
        )
    )


async def wait(scene: Scene, seconds: float) -> None:
    for _ in range(round(seconds)):
        await scene.let_time_pass(1.0)


async def give_up(scene: Scene, *, attempt: int) -> list[str]:
    overdue = [Overdue(task_id="t1", attempt=attempt)]
    records = await scene.store.give_up(scene.epoch, overdue)
    return [record.task.status.value for record in records]


@pytest.mark.parametrize("limit", [None, 40])
async def test_what_a_worker_claims_of_others_budgets_waits_for_an_operator(
    place: Place, limit: int | None
) -> None:
    tenant = Tenant(project_id="search")
    async with place.scene() as scene:
        ledger = StoreLedger(scene.store)
        if limit is not None:
            await ledger.set_limit(Scope("project:search"), Limit(limit_micro_usd=MicroUsd(limit)))
        await scene.run("t1")
        await scene.settle("t1", cost=Usage(tokens=100, micro_usd=1_000), tenant=tenant)
        found = {account.scope: account.balance for account in await ledger.accounts(ROOT)}
        counted = 0 if limit is None else limit - 10
        for scope in (ROOT, Scope("session:s")):
            assert found[scope].spent_micro_usd == 10
            assert found[scope].overrun_micro_usd == counted
            assert found[scope].unaccepted_micro_usd == 990 - counted
        assert found[Scope("project:search")].overrun_micro_usd == 990
        findings = await scene.store.run(claims)
        assert [one.verdict for one in findings] == ["warn", "warn"]
        assert "headgate budget adjust root --accept" in findings[0].advice


def claims(transaction: Transaction, _: float) -> list[Finding]:
    return list(claim_findings(transaction))


async def test_a_ledger_outside_is_told_whose_claim_a_cost_is(place: Place) -> None:
    async with place.scene(keeps_ledger=False) as scene:
        for name, tenant in (
            ("t1", None),
            ("t2", Tenant(agent_id="coder")),
            ("t3", Tenant(project_id="search", agent_id="coder")),
            ("t4", Tenant()),
        ):
            await scene.run(name)
            await scene.settle(name, tenant=tenant)
        told = await scene.store.outbox(limit=9)
        assert [one.tenant for one in told] == [
            None,
            Tenant(agent_id="coder"),
            Tenant(project_id="search", agent_id="coder"),
            Tenant(),
        ]
