"""What every ledger keeps over time and between callers: leases, finished ids, a shared ledger."""

from __future__ import annotations

import asyncio

import pytest

from budgets.support import A_DAY_SECONDS, TrackerFactory, assert_ledger_is_right, usd
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import ReserveRequest
from headgate.core.budgets.reservations import NO_LEASE_END, Reservation, ReservationState
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.money import MicroUsd, Tokens
from headgate.errors import BudgetExceededError, IllegalSettlementError

SESSION = "session:eval"
FLOW = "session:eval/workflow:w1"
CALLERS = 200
ROOM_FOR = 37


async def test_a_lease_ends_at_its_second_and_not_before(tracker_factory: TrackerFactory) -> None:
    clock = tracker_factory.clock
    async with tracker_factory() as tracker:
        await tracker.reserve(FLOW, "0.10", lease_seconds=10)
        await tracker.reserve(FLOW, "0.01", lease_seconds=10, dispatched=True)
        clock.advance(9.5)
        assert await usd(tracker, FLOW) == (0, 110_000, 0)
        clock.advance(0.5)
        assert await usd(tracker, FLOW) == (10_000, 0, 0)
        await assert_ledger_is_right(tracker)


async def test_sweep_expires_what_is_due_and_counts_it(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        for number in range(250):
            await tracker.reserve(FLOW, "0.01", lease_seconds=10, dispatched=number % 2 == 0)
        await tracker.reserve(FLOW, "0.01", lease_seconds=100)
        assert await tracker.ledger.sweep() == 0
        tracker_factory.clock.advance(10)
        assert await tracker.ledger.sweep() == 250
        assert await tracker.ledger.sweep() == 0
        assert await usd(tracker, FLOW) == (1_250_000, 10_000, 0)
        await assert_ledger_is_right(tracker)


async def test_a_renewed_lease_holds_and_is_never_shortened(
    tracker_factory: TrackerFactory,
) -> None:
    clock = tracker_factory.clock
    started = clock()
    async with tracker_factory() as tracker:
        token = await tracker.reserve(FLOW, "0.10", lease_seconds=10)
        clock.advance(9)
        assert (await tracker.extend(token, 10)).lease_until == started + 19
        assert (await tracker.extend(token, 2)).lease_until == started + 19
        clock.advance(9)
        assert await usd(tracker, FLOW) == (0, 100_000, 0)
        assert (await tracker.extend(token, 5)).lease_until == started + 23
        clock.advance(5)
        assert await usd(tracker, FLOW) == (0, 0, 0)
        with pytest.raises(IllegalSettlementError, match="its lease ended"):
            await tracker.extend(token)


async def test_a_dispatched_reservation_keeps_the_lease_it_had(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        token = await tracker.reserve(FLOW, "0.10", lease_seconds=10)
        tracker_factory.clock.advance(9)
        assert (await tracker.dispatched(token)).lease_until == token.lease_until
        tracker_factory.clock.advance(1)
        assert await usd(tracker, FLOW) == (100_000, 0, 0)


async def test_no_refusal_while_due_leases_hold_the_room(tracker_factory: TrackerFactory) -> None:
    held = 250
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "2.50")
        for _ in range(held):
            await tracker.reserve(FLOW, "0.01", lease_seconds=10)
        with pytest.raises(BudgetExceededError):
            await tracker.reserve(FLOW, "2.50")
        tracker_factory.clock.advance(10)
        await tracker.reserve(FLOW, "2.50")
        assert await usd(tracker, SESSION) == (0, 2_500_000, 0)
        await assert_ledger_is_right(tracker)


async def test_a_late_call_finds_its_lease_ended(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        held = await tracker.reserve(FLOW, "0.10", lease_seconds=10, reservation_id="held")
        sent = await tracker.reserve(FLOW, "0.10", lease_seconds=10, dispatched=True)
        tracker_factory.clock.advance(11)
        with pytest.raises(IllegalSettlementError, match="do not call the provider"):
            await tracker.dispatched(held)
        again = await tracker.reserve(FLOW, "0.10", lease_seconds=10, reservation_id="held")
        assert again.state is ReservationState.EXPIRED
        assert not again.is_live
        with pytest.raises(IllegalSettlementError, match="commit the actual"):
            await tracker.extend(sent)
        await tracker.commit(sent, "0.03")
        assert await usd(tracker, FLOW) == (30_000, 0, 0)


async def test_a_finished_id_is_remembered_for_a_day_and_then_forgotten(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        live = await tracker.reserve(FLOW, "0.50", lease_seconds=3 * A_DAY_SECONDS)
        done = await tracker.reserve(FLOW, "0.10", reservation_id="done")
        await tracker.commit(done, "0.04")
        tracker_factory.clock.advance(A_DAY_SECONDS - 1)
        await tracker.ledger.sweep()
        await tracker.commit("done", "0.04")
        assert not (await tracker.reserve(FLOW, "0.10", reservation_id="done")).is_live
        tracker_factory.clock.advance(2)
        await tracker.ledger.sweep()
        with pytest.raises(IllegalSettlementError, match="unknown"):
            await tracker.commit("done", "0.04")
        assert (await tracker.reserve(FLOW, "0.10", reservation_id="done")).is_live
        await tracker.release(live)
        assert await usd(tracker, FLOW) == (40_000, 100_000, 0)
        await assert_ledger_is_right(tracker)


async def test_everybody_on_the_same_ledger_sees_the_same(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory.two() as (one, other):
        await one.set_budget(SESSION, "0.10")
        token = await one.reserve(FLOW, "0.08")
        with pytest.raises(BudgetExceededError):
            await other.reserve(FLOW, "0.03")
        assert (await other.dispatched(token.id)).state is ReservationState.DISPATCHED
        await other.commit(token.id, "0.05")
        await one.commit(token, "0.05")
        assert await one.status() == await other.status()
        assert list(await one.journal()) == list(await other.journal())
        await other.set_budget(SESSION, "0.06")
        with pytest.raises(BudgetExceededError):
            await one.reserve(FLOW, "0.02")
        await assert_ledger_is_right(other)


async def test_concurrent_reserves_admit_exactly_as_many_as_fit(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory.two() as pair:
        await pair[0].set_budget(SESSION, f"{ROOM_FOR / 100:.2f}")
        answers = await asyncio.gather(
            *(pair[number % 2].reserve(FLOW, "0.01") for number in range(CALLERS)),
            return_exceptions=True,
        )
        refused = [answer for answer in answers if isinstance(answer, BudgetExceededError)]
        assert (len(answers) - len(refused), len(refused)) == (ROOM_FOR, CALLERS - ROOM_FOR)
        assert await usd(pair[1], SESSION) == (0, ROOM_FOR * 10_000, 0)
        await assert_ledger_is_right(pair[0])


async def test_the_same_id_from_many_callers_is_booked_once(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory.two() as pair:
        tokens = await asyncio.gather(
            *(pair[n % 2].reserve(FLOW, "0.10", reservation_id="one") for n in range(50))
        )
        assert {token.id for token in tokens} == {"one"}
        assert await usd(pair[0], FLOW) == (0, 100_000, 0)
        await asyncio.gather(*(pair[n % 2].commit("one", "0.07") for n in range(50)))
        assert await usd(pair[0], FLOW) == (70_000, 0, 0)
        assert len(await pair[1].journal()) == 2


async def lifecycle(tracker: LedgerTracker, number: int) -> None:
    token = await tracker.reserve(FLOW, "0.02", dispatched=number % 3 == 0)
    if number % 2:
        await tracker.commit(token, "0.01")
    else:
        await tracker.release(token)


async def test_concurrent_lifecycles_leave_what_they_spent(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory.two() as pair:
        await asyncio.gather(*(lifecycle(pair[n % 2], n) for n in range(CALLERS)))
        assert await usd(pair[0], SESSION) == (CALLERS // 2 * 10_000, 0, 0)
        await assert_ledger_is_right(pair[1])


async def test_a_bad_call_does_not_spoil_those_beside_it(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "0.50")
        answers = await asyncio.gather(
            tracker.reserve(FLOW, "0.10", reservation_id="good"),
            tracker.commit("never made", "0.10"),
            tracker.reserve(FLOW, "0.60"),
            tracker.reserve(FLOW, "0.20"),
            return_exceptions=True,
        )
        kinds = [type(answer).__name__ for answer in answers]
        assert kinds == [
            "ReservationToken",
            "IllegalSettlementError",
            "BudgetExceededError",
            "ReservationToken",
        ]
        assert await usd(tracker, SESSION) == (0, 300_000, 0)


async def test_a_cancelled_caller_breaks_nobody_and_its_money_comes_back(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        callers = [
            asyncio.create_task(tracker.reserve(FLOW, "0.01", lease_seconds=10))
            for _ in range(CALLERS)
        ]
        await asyncio.sleep(0)
        for caller in callers[::2]:
            caller.cancel()
        answers = await asyncio.gather(*callers, return_exceptions=True)
        failed = [answer for answer in answers[1::2] if isinstance(answer, BaseException)]
        assert failed == []
        reserved = (await usd(tracker, FLOW)).reserved
        assert CALLERS // 2 * 10_000 <= reserved <= CALLERS * 10_000
        await assert_ledger_is_right(tracker)
        tracker_factory.clock.advance(10)
        assert await usd(tracker, FLOW) == (0, 0, 0)
        await tracker.reserve(FLOW, "0.01")
        await assert_ledger_is_right(tracker)


async def test_the_ledger_outlives_a_tracker(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget(SESSION, "1.00", 500, "week@Europe/Berlin")
        await tracker.reserve(FLOW, "0.10", reservation_id="r", lease_seconds=10)
        before = await tracker.status()
    async with tracker_factory() as tracker:
        assert await tracker.status() == before
        tracker_factory.clock.advance(10)
        assert await usd(tracker, SESSION) == (0, 0, 0)
        await assert_ledger_is_right(tracker)


async def test_money_without_a_lease_is_held_until_it_is_settled(
    tracker_factory: TrackerFactory,
) -> None:
    """A task store ends it with the attempt that holds it; time alone never does."""
    clock = tracker_factory.clock
    async with tracker_factory() as tracker:
        ledger = tracker.ledger
        for number, dispatched in enumerate((False, True, True)):
            made = await ledger.reserve(
                ReserveRequest(
                    reservation_id=f"task:{number}",
                    scopes=(ROOT, Scope(SESSION)),
                    micro_usd=MicroUsd(100_000),
                    tokens=Tokens(0),
                    lease_seconds=None,
                    dispatched=dispatched,
                )
            )
            assert isinstance(made, Reservation)
            assert made.lease_until == NO_LEASE_END
        clock.advance(365 * A_DAY_SECONDS)
        assert await ledger.sweep() == 0
        assert await usd(tracker, SESSION) == (0, 300_000, 0)
        extended = await tracker.extend("task:0", 60)
        assert extended.lease_until == NO_LEASE_END, "a lease is never shortened"
        await tracker.commit("task:1", "0.04")
        await tracker.release("task:2")
        assert await usd(tracker, SESSION) == (40_000, 100_000, 0)
        await assert_ledger_is_right(tracker)
