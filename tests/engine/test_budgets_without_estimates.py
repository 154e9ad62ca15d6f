"""Budgets hold for tasks that nobody gave an estimate, at the defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine.one_service import Service, play
from engine.simulated_work import always, in_turn
from headgate.budgets.local import LocalLedger
from headgate.core.budgets.ledger import Balance, Clock, Ledger, Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import TargetEstimate
from headgate.core.estimates import Basis
from headgate.core.lifecycle import Failed, Outcome, Succeeded, Usage
from headgate.core.money import MicroUsd, Tokens
from headgate.core.reasons import FirstOfKind
from headgate.core.task import TaskRecord, TaskStatus
from headgate.core.why import reasons
from headgate.storage.ledger import accounts

SESSION = Scope("session:eval")
HALF_A_DOLLAR = {SESSION: Limit(limit_micro_usd=MicroUsd(500_000))}
COST = 2_250_000
WAITS_FOR_THE_FIRST = (
    "the cost of this kind of work is unknown until the first one ends;"
    " set `estimate_usd` on the target to run more at once"
)
LEDGERS: list[Callable[[Clock], Ledger] | None] = [None, lambda clock: LocalLedger(clock=clock)]


def costs(micro_usd: int | None, tokens: int | None = None, model: str | None = None) -> Succeeded:
    return Succeeded(usage=Usage(micro_usd=micro_usd, tokens=tokens, model=model))


async def submit(service: Service, **fields: Any) -> str:
    fields = {"estimate_tokens": None, "scopes": (SESSION,), "target": "t"} | fields
    return await service.submit(**fields)


async def submit_all(service: Service, count: int, **fields: Any) -> list[str]:
    return [await submit(service, **fields) for _ in range(count)]


async def ended_all(service: Service, task_ids: list[str]) -> list[TaskRecord]:
    return [await service.ended(task_id) for task_id in task_ids]


async def balance(service: Service, scope: Scope = SESSION) -> Balance:
    if service.ledger is not None:
        return (await service.ledger.accounts(scope, most=1))[0].balance
    store = service.new_store()
    await store.open()
    found = await store.writer.submit(
        lambda transaction: accounts(transaction, scope, service.now(), most=1)
    )
    return found[0].balance


def most_at_once(service: Service) -> int:
    return service.executor.most_running


@pytest.mark.parametrize("new_ledger", LEDGERS, ids=["own", "outside"])
def test_ten_dear_tasks_spend_the_budget_once_and_not_ten_times(new_ledger: Any) -> None:
    async def scenario(service: Service) -> tuple[list[TaskRecord], Balance, int]:
        records = await ended_all(service, await submit_all(service, 10))
        await asyncio.sleep(1.0)
        return records, await balance(service), most_at_once(service)

    records, booked, at_once = play(
        scenario, always(1.0, costs(COST)), budgets=HALF_A_DOLLAR, new_ledger=new_ledger
    )
    done = [record for record in records if record.task.status is TaskStatus.DONE]
    assert len(done) == 1
    assert (booked.spent_micro_usd, booked.overrun_micro_usd) == (50_000, COST - 50_000)
    assert booked.reserved_micro_usd == 0
    assert at_once == 1


@pytest.mark.parametrize("new_ledger", LEDGERS, ids=["own", "outside"])
def test_the_first_of_a_kind_runs_alone_and_then_more_and_more(new_ledger: Any) -> None:
    async def scenario(service: Service) -> tuple[list[TaskRecord], list[int], int]:
        task_ids = await submit_all(service, 40)
        counts: list[int] = []
        while not all([(await service.get(task_id)).is_terminal for task_id in task_ids]):
            counts.append(service.executor.running)
            await asyncio.sleep(1.0)
        return await ended_all(service, task_ids), counts, most_at_once(service)

    limit = {SESSION: Limit(limit_micro_usd=MicroUsd(100_000_000))}
    records, counts, at_once = play(
        scenario, always(1.0, costs(10_000)), budgets=limit, new_ledger=new_ledger
    )
    assert {record.task.status for record in records} == {TaskStatus.DONE}
    assert max(counts[:1]) == 1
    assert at_once > 5
    first, last = records[0].progress, records[-1].progress
    assert first.hold is not None
    assert last.hold is not None
    assert first.hold.micro_usd.basis is Basis.PROBE
    assert first.reserved_micro_usd == 10_000_000
    assert last.hold.micro_usd.basis is Basis.LEARNED
    assert 10_000 <= last.reserved_micro_usd <= 20_000


def test_those_behind_the_first_say_so() -> None:
    async def scenario(service: Service) -> list[Any]:
        task_ids = await submit_all(service, 100)
        await service.running(task_ids[0])
        await asyncio.sleep(0.5)
        state = service.engine.dispatcher.dispatch_state
        assert state is not None
        found = [reasons(state, task_id, service.now()) for task_id in task_ids[1:]]
        for task_id in reversed(task_ids):
            await service.engine.cancel_soon(task_id)
        await ended_all(service, task_ids)
        return found

    found = play(scenario, always(1_000.0), budgets=HALF_A_DOLLAR)
    assert len(found) == 99
    for one in found:
        assert any(isinstance(reason.detail, FirstOfKind) for reason in one), one
        assert WAITS_FOR_THE_FIRST in [reason.message for reason in one]


def test_a_task_that_waits_says_what_it_would_hold() -> None:
    async def scenario(service: Service) -> list[Any]:
        found: list[Any] = []
        for count in (3, 10):
            task_ids = await submit_all(service, count)
            await service.running(task_ids[0])
            await asyncio.sleep(0.5)
            found.append(await service.engine.why(task_ids[-1]))
            await ended_all(service, task_ids)
            found.append(await service.engine.why(task_ids[-1]))
        return found

    limit = {SESSION: Limit(limit_micro_usd=MicroUsd(1_000_000))}
    first, _, second, ended = play(scenario, always(1.0, costs(10_000)), budgets=limit)
    # Tokens are not limited, so a probe of them holds nothing.
    (usd,) = first.would_hold
    assert (usd.unit, usd.basis, usd.amount) == ("usd", Basis.PROBE, None)
    (usd,) = second.would_hold
    assert (usd.basis, usd.samples, usd.amount) == (Basis.LEARNED, 3, 0.02)
    assert usd.text == "would reserve $0.02, twice the highest cost of 3 of its kind"
    assert ended.would_hold == ()


def test_without_a_limit_all_run_at_once_and_nothing_is_held() -> None:
    async def scenario(service: Service) -> tuple[list[TaskRecord], int]:
        return await ended_all(service, await submit_all(service, 20)), most_at_once(service)

    records, at_once = play(scenario, always(1.0, Succeeded()))
    assert at_once == 20
    for record in records:
        assert (record.progress.reserved_micro_usd, record.progress.reserved_tokens) == (0, 0)
        assert record.progress.hold is None
        assert not record.progress.is_unpriced


def test_a_default_of_the_target_runs_them_in_parallel() -> None:
    async def scenario(service: Service) -> tuple[list[TaskRecord], int]:
        return await ended_all(service, await submit_all(service, 5)), most_at_once(service)

    records, at_once = play(
        scenario,
        always(1.0, Succeeded()),
        budgets=HALF_A_DOLLAR,
        target_estimates={"t": TargetEstimate(micro_usd=100_000)},
    )
    assert at_once == 5
    # Nothing was reported, so what its operator says is booked, as assumed.
    assert [record.progress.assumed_micro_usd for record in records] == [100_000] * 5


def test_work_that_never_says_what_it_used_runs_in_parallel_after_three() -> None:
    async def scenario(service: Service) -> tuple[list[TaskRecord], Balance, list[Any]]:
        records = await ended_all(service, await submit_all(service, 20))
        state = service.engine.dispatcher.dispatch_state
        assert state is not None
        return records, await balance(service), state.estimates.silent_kinds()

    records, booked, silent = play(scenario, always(1.0, Succeeded()), budgets=HALF_A_DOLLAR)
    assert booked == Balance()
    ends = sorted({round(record.progress.completed_at or 0.0) for record in records})
    assert len(ends) == 4
    assert all(record.progress.is_unpriced for record in records)
    assert [kind.name for kind, _ in silent] == ["t"]


@pytest.mark.parametrize(
    ("outcome", "spent", "assumed", "is_unpriced"),
    [
        (costs(None, 900_000, "unheard-of"), 50_000, 50_000, True),
        (costs(None, 900_000), 0, 0, True),
        (costs(20_000, 900_000, "small"), 20_000, 0, False),
        (costs(0, 0), 0, 0, False),
        (Failed(error="it broke"), 50_000, 50_000, False),
        (Failed(error="it broke", usage=Usage(micro_usd=7)), 7, 0, False),
    ],
)
def test_what_a_probe_books(outcome: Outcome, spent: int, assumed: int, is_unpriced: bool) -> None:
    async def scenario(service: Service) -> tuple[TaskRecord, Balance]:
        record = await service.ended(await submit(service))
        return record, await balance(service)

    record, booked = play(scenario, always(1.0, outcome), budgets=HALF_A_DOLLAR)
    progress = record.progress
    assert (booked.spent_micro_usd, progress.assumed_micro_usd) == (spent, assumed)
    assert progress.is_unpriced == is_unpriced


def test_work_of_an_unknown_model_stays_a_probe_and_is_never_booked_at_nothing() -> None:
    async def scenario(service: Service) -> tuple[list[TaskRecord], Balance]:
        records = await ended_all(service, await submit_all(service, 8))
        return records, await balance(service)

    unknown = always(1.0, costs(None, 900_000, "unheard-of"))
    records, booked = play(scenario, unknown, budgets=HALF_A_DOLLAR)
    assert [record.micro_usd for record in records] == [50_000] * 8
    assert all(record.progress.is_unpriced for record in records)
    assert booked.spent_micro_usd == 400_000


def test_an_action_that_nobody_has_seen_is_not_free_because_others_are_silent() -> None:
    async def scenario(service: Service) -> tuple[list[TaskRecord], int]:
        await ended_all(service, await submit_all(service, 5, action="ping"))
        service.executor.work = always(1.0, costs(COST))
        service.executor.most_running = 0
        records = await ended_all(service, await submit_all(service, 10, action="analyze"))
        return records, most_at_once(service)

    records, at_once = play(scenario, always(1.0, Succeeded()), budgets=HALF_A_DOLLAR)
    assert sum(record.task.status is TaskStatus.DONE for record in records) == 1
    assert at_once == 1


def test_a_dear_action_is_not_held_at_what_cheap_ones_have_cost() -> None:
    async def scenario(service: Service) -> tuple[list[TaskRecord], int]:
        await ended_all(service, await submit_all(service, 30, action="prepare"))
        service.executor.work = always(1.0, costs(COST))
        service.executor.most_running = 0
        records = await ended_all(service, await submit_all(service, 10, action="analyze"))
        return records, most_at_once(service)

    limit = {SESSION: Limit(limit_micro_usd=MicroUsd(5_000_000))}
    records, at_once = play(scenario, always(1.0, costs(1_000)), budgets=limit)
    assert at_once == 1
    assert sum(record.progress.used_micro_usd for record in records) <= 5_000_000


def test_a_lost_probe_books_what_it_held_as_assumed() -> None:
    async def scenario(service: Service) -> tuple[TaskRecord, Balance]:
        task_id = await submit(service)
        await service.running(task_id)
        service.engine.runner.abandon()
        service.away.add(0)
        service.engine = await service.start_another()
        async with asyncio.timeout(120):
            while not (await service.get(task_id)).progress.losses:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
        booked = await balance(service)
        await service.engine.cancel_soon(task_id)
        record = await service.ended(task_id)
        service.away.clear()
        return record, booked

    record, booked = play(scenario, always(1_000.0), budgets=HALF_A_DOLLAR)
    assert booked.spent_micro_usd == 50_000
    assert record.progress.assumed_micro_usd >= 50_000


def test_what_was_learned_outlives_the_dispatcher() -> None:
    async def scenario(service: Service) -> TaskRecord:
        await ended_all(service, await submit_all(service, 25))
        await service.engine.stop(drain_seconds=1.0)
        again = await service.start_another()
        service.engine = again
        return await service.ended(await submit(service))

    limit = {SESSION: Limit(limit_micro_usd=MicroUsd(100_000_000), limit_tokens=Tokens(10**9))}
    record = play(scenario, always(1.0, costs(10_000, 300)), budgets=limit)
    assert record.progress.hold is not None
    assert record.progress.hold.micro_usd.samples == 25
    assert record.progress.hold.tokens.basis is Basis.LEARNED


def test_shares_are_counted_apart_from_budgets_and_usage() -> None:
    async def scenario(service: Service) -> tuple[TaskRecord, int]:
        record = await service.ended(await submit(service, target="u", weight=3.0))
        state = service.engine.dispatcher.dispatch_state
        assert state is not None
        return record, state.usage.tokens["x"]

    record, share = play(scenario, always(1.0, Succeeded()), free_targets=frozenset({"u"}))
    assert share == 300
    assert (record.tokens, record.progress.used_tokens, record.progress.assumed_tokens) == (0, 0, 0)


def test_a_first_one_that_cost_nothing_does_not_let_others_start_at_nothing() -> None:
    """A response from a cache costs nothing, and says nothing of the next."""

    async def scenario(service: Service) -> tuple[list[TaskRecord], Balance, int]:
        records = await ended_all(service, await submit_all(service, 10))
        return records, await balance(service), most_at_once(service)

    work = in_turn((1.0, costs(0)), (1.0, costs(COST)))
    records, booked, at_once = play(scenario, work, budgets=HALF_A_DOLLAR)
    assert [record.micro_usd for record in records[:2]] == [0, COST]
    assert (booked.spent_micro_usd, booked.overrun_micro_usd) == (50_000, COST - 50_000)
    assert at_once == 1


def test_after_three_that_cost_nothing_a_kind_is_known_to_cost_nothing() -> None:
    async def scenario(service: Service) -> list[TaskRecord]:
        return await ended_all(service, await submit_all(service, 10))

    records = play(scenario, always(1.0, costs(0)), budgets=HALF_A_DOLLAR)
    assert [record.progress.reserved_micro_usd for record in records] == [50_000] * 3 + [0] * 7
