"""What the calls of a running task have used is booked once, with the end of its attempt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import Limit, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.call import CallRecord, CallState
from headgate.core.lifecycle import Usage
from headgate.core.money import MicroUsd, Tokens
from headgate.core.task_money import TASK_TOKEN_PREFIX, OpenCalls
from headgate.storage.call_rows import CallStore, EndedCall, first_call_id_at
from headgate.storage.sql_store import StoreLedger
from headgate.storage.store import Settled
from headgate.storage.task_calls import (
    TaskCallStore,
    TaskPart,
    TaskToken,
    read_task_token,
    task_token,
)
from headgate.storage.tokens import UNBOUND
from headgate.storage.usage import UsageReports
from storage.scene import AGAIN, AWAY, DONE, LEASE_SECONDS, Place, Scene

SECRET = b"s" * 32
SCOPES = (ROOT, Scope("project:search"))


def call(scene: Scene, number: int, task_id: str = "t1", **fields: Any) -> CallRecord:
    """Make a call of a task that was done."""
    now = scene.clock()
    given: dict[str, Any] = {
        "id": f"{first_call_id_at(now)[:-6]}{number:06}",
        "project_id": "search",
        "agent_id": "coder",
        "model": "large",
        "state": CallState.DONE,
        "task_id": task_id,
        "created_at": now,
        "started_at": now,
        "ended_at": now,
        "tokens": 30,
        "micro_usd": 3,
    }
    return CallRecord(**given | fields)


async def finish(scene: Scene, *records: CallRecord, attempt: int = 1) -> None:
    """Write the ends of calls that drew on their task alone."""
    part = TaskPart(attempt)
    await CallStore(scene.store).finish(
        [
            EndedCall(record=one, of_task=part, share=Amounts(one.micro_usd or 0, one.tokens or 0))
            for one in records
        ]
    )


async def settle(scene: Scene, open_calls: OpenCalls | None, **fields: Any) -> Any:
    """Settle the first attempt of a task that could make calls."""
    settlement = scene.settlement("t1", **fields)
    answer = await scene.store.settle(msgspec.structs.replace(settlement, open_calls=open_calls))
    assert isinstance(answer, Settled)
    progress = answer.records[0].progress
    return (
        progress.used_tokens,
        progress.used_micro_usd,
        progress.assumed_tokens,
        progress.assumed_micro_usd,
    )


async def spent(scene: Scene) -> tuple[int, int, int]:
    """Return what is spent, passed and held in tokens."""
    (account,) = await StoreLedger(scene.store).accounts(ROOT, most=1)
    found = account.balance
    return found.spent_tokens, found.overrun_tokens, found.reserved_tokens


async def test_a_task_costs_what_its_calls_used_and_not_what_it_reports(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await finish(scene, call(scene, 1), call(scene, 2, model="small", slot="key"))
        await finish(scene, call(scene, 1), call(scene, 3))
        cost = Usage(tokens=999, micro_usd=999)
        assert await settle(scene, OpenCalls(), cost=cost) == (90, 9, 0, 0)
        assert await spent(scene) == (90, 0, 0)
        report = await UsageReports(scene.store).report(
            "model", since=0.0, until=scene.clock() + 1.0, bounds=UNBOUND
        )
        used = {one.key: (one.tokens, one.calls) for one in report.rows if one.tokens}
        assert used == {"large": (60, 2), "small": (30, 1)}


async def test_without_any_call_a_task_costs_what_it_reports(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        assert await settle(scene, OpenCalls(), cost=Usage(tokens=7, micro_usd=1)) == (7, 1, 0, 0)


async def test_what_was_held_beside_the_task_is_booked_once(place: Place) -> None:
    async with place.scene() as scene:
        await scene.store.set_limits({ROOT: Limit(limit_tokens=Tokens(1_000))})
        await scene.run("t1")
        ledger = StoreLedger(scene.store)
        request = ReserveRequest(
            reservation_id="c1",
            scopes=SCOPES,
            micro_usd=MicroUsd(5),
            tokens=Tokens(50),
            lease_seconds=60.0,
            dispatched=True,
        )
        assert isinstance(await ledger.reserve(request), Reservation)
        commit = SettleRequest(
            reservation_id="c1", call=Call.COMMIT, micro_usd=MicroUsd(2), tokens=Tokens(20)
        )
        record = call(scene, 1, tokens=120, micro_usd=12)
        part = TaskPart(1, Amounts(micro_usd=2, tokens=20))
        ended = EndedCall(record=record, settle=commit, of_task=part)
        await CallStore(scene.store).finish([ended])
        assert await spent(scene) == (20, 0, 100)
        assert await settle(scene, OpenCalls()) == (120, 12, 0, 0)
        assert await spent(scene) == (120, 0, 0)


async def test_calls_still_under_way_are_booked_at_what_they_have_drawn(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await finish(scene, call(scene, 1))
        assert await settle(scene, OpenCalls(Amounts(micro_usd=4, tokens=40), has_called=True)) == (
            70,
            7,
            40,
            4,
        )
        assert await spent(scene) == (70, 0, 0)


@pytest.mark.parametrize(("tokens", "whole"), [(30, 100), (130, 130)])
async def test_an_attempt_whose_calls_are_partly_unknown_is_booked_at_what_it_held(
    place: Place, tokens: int, whole: int
) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await finish(scene, call(scene, 1, tokens=tokens))
        open_calls = OpenCalls(Amounts(tokens=10), has_called=True, is_partly_unknown=True)
        found = await settle(scene, open_calls, cost=Usage(tokens=1))
        assert (found[0], found[2]) == (whole, whole - tokens)
        assert sum(await spent(scene)) == whole


async def test_an_attempt_of_which_no_call_is_known_costs_what_it_reports(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        found = await settle(scene, OpenCalls(is_partly_unknown=True), cost=Usage(tokens=7))
        assert (found[0], found[2]) == (7, 0)


async def test_another_attempt_begins_without_the_calls_of_the_first(place: Place) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        await finish(scene, call(scene, 1))
        assert await settle(scene, OpenCalls(), step=AGAIN) == (30, 3, 0, 0)
        await scene.assign("t1", attempt=2)
        await finish(scene, call(scene, 2, tokens=5, micro_usd=1), attempt=2)
        assert await settle(scene, OpenCalls(), step=DONE, attempt=2) == (35, 4, 0, 0)
        assert await spent(scene) == (35, 0, 0)


@pytest.mark.parametrize(("tokens", "whole"), [(30, 100), (130, 130)])
async def test_a_lost_attempt_is_booked_at_what_it_held_and_its_calls_at_least(
    place: Place, tokens: int, whole: int
) -> None:
    async with place.scene() as scene:
        await scene.join_away()
        await scene.submit("t1")
        await scene.assign("t1", node_id=AWAY)
        await scene.store.collect(AWAY)
        await finish(scene, call(scene, 1, tokens=tokens))
        await scene.let_time_pass(LEASE_SECONDS / 2)
        await scene.let_time_pass(LEASE_SECONDS / 2 + 1)
        await scene.store.recover(scene.epoch, ["t1"])
        progress = (await scene.get("t1")).progress
        assert (progress.used_tokens, progress.assumed_tokens) == (whole, whole - tokens)
        assert sum((await spent(scene))[:2]) == whole
        await finish(scene, call(scene, 2, tokens=40, scopes=("project:search",)))
        assert sum(await spent(scene)) == whole, "what it held has paid for it"
        report = await UsageReports(scene.store).report(
            "project", since=0.0, until=scene.clock() + 1.0, bounds=UNBOUND
        )
        assert sum(one.tokens for one in report.rows) == whole


@pytest.mark.parametrize("has_earlier", [True, False])
async def test_a_call_that_is_written_after_the_end_of_its_task_is_booked_by_itself(
    place: Place, *, has_earlier: bool
) -> None:
    async with place.scene() as scene:
        await scene.run("t1")
        if has_earlier:
            await finish(scene, call(scene, 1, scopes=("project:search",)))
        earlier = 30 if has_earlier else 0
        cost = await settle(scene, OpenCalls(has_called=True))
        assert cost == (earlier, earlier // 10, 0, 0)
        late = call(scene, 2, scopes=("project:search",))
        for _ in range(2):
            await finish(scene, late)
        spent_tokens, overrun_tokens, reserved_tokens = await spent(scene)
        assert (spent_tokens + overrun_tokens, reserved_tokens) == (earlier + 30, 0)


async def test_what_a_call_cost_beyond_its_task_is_booked_at_once_in_an_exhausted_scope(
    place: Place,
) -> None:
    async with place.scene() as scene:
        await scene.store.set_limits({ROOT: Limit(limit_tokens=Tokens(120))})
        await scene.run("t1")
        over = Amounts(tokens=50)
        for number in (1, 2):
            record = call(scene, number, tokens=90, micro_usd=0, scopes=("project:search",))
            ended = EndedCall(record=record, of_task=TaskPart(1, over), over=over)
            for _ in range(2):
                await CallStore(scene.store).finish([ended])
            assert await spent(scene) == (0, 50 * number, 100)
        assert await settle(scene, OpenCalls()) == (180, 0, 0, 0)
        assert await spent(scene) == (80, 100, 0)
        late = call(scene, 3, tokens=7, micro_usd=0, scopes=("project:search",))
        await finish(scene, late)
        assert sum(await spent(scene)) == 187


async def test_all_nodes_have_the_same_secret(place: Place) -> None:
    async with place.scene() as scene:
        first = await TaskCallStore(scene.store).secret()
        assert len(first) == 32
        assert await TaskCallStore(scene.store).secret() == first


def test_a_token_says_which_attempt_it_is_of_and_cannot_be_changed() -> None:
    token = task_token("tsk_01", 3, SECRET)
    assert token.startswith(TASK_TOKEN_PREFIX)
    assert read_task_token(token, SECRET) == TaskToken("tsk_01", 3)
    assert read_task_token(token, b"t" * 32) is None
    assert read_task_token(token.replace(".3.", ".4."), SECRET) is None
    assert read_task_token(token[:-1], SECRET) is None
    for text in ("", "hg_task_", "hg_task_.", "hg_task_é.1.x", "hg_0123456789ab_secret"):
        assert read_task_token(text, SECRET) is None
