"""Waiting for money: at the defaults nobody is refused whom reservations in flight may serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.budgets.local import LocalBudgetTracker, LocalLedger
from headgate.budgets.tracker import LedgerTracker, reserved
from headgate.budgets.waiting import LONGEST_PAUSE_SECONDS, queue_of
from headgate.core.budgets.ledger import Refused, ReserveRequest
from headgate.core.budgets.reservations import Reservation
from headgate.errors import BudgetExceededError, InvalidFieldError
from headgate.testing import SimulatedLoop, simulate

T = TypeVar("T")

SCOPE = "session:eval"
CALLS = 60


def run(scenario: Callable[[LedgerTracker, SimulatedLoop], Awaitable[T]], seed: int = 0) -> T:
    """Run a scenario in virtual time, on a fresh ledger with one dollar."""

    async def main(loop: SimulatedLoop) -> T:
        async with LocalBudgetTracker(clock=loop.clock) as tracker:
            await tracker.set_budget(SCOPE, limit_usd=1)
            return await scenario(tracker, loop)

    return simulate(main, seed=seed).result


async def call(
    tracker: LedgerTracker,
    estimate: str = "0.05",
    *,
    costs: str = "0.01",
    seconds: float = 1.0,
    **fields: Any,
) -> None:
    """Call a provider that takes its time, and costs less than its estimate."""
    async with reserved(tracker, SCOPE, estimate, **fields) as held:
        await asyncio.sleep(seconds)
        held.charge(costs)


def test_sixty_parallel_calls_all_run_inside_a_budget_that_holds_twenty() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> float:
        calls = [call(tracker, seconds=loop.random.uniform(0.5, 3)) for _ in range(CALLS)]
        await asyncio.gather(*calls)
        status = await tracker.status(SCOPE)
        assert (status.spent_micro_usd, status.reserved_micro_usd) == (CALLS * 10_000, 0)
        assert len(queue_of(tracker)) == 0
        return loop.time()

    for seed in range(5):
        # Woken by each settlement, they need a few rounds of three seconds and not of the poll.
        assert run(scenario, seed) < 12


def test_whoever_comes_first_is_served_first() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> list[int]:
        served: list[int] = []

        async def numbered(number: int) -> None:
            async with reserved(tracker, SCOPE, "0.50") as held:
                served.append(number)
                await asyncio.sleep(loop.random.uniform(0.5, 3))
                held.charge("0.01")

        tasks = []
        for number in range(20):
            tasks.append(asyncio.create_task(numbered(number)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)
        return served

    assert run(scenario) == list(range(20))


def test_small_calls_do_not_pass_a_large_one_for_ever() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> float:
        async def small() -> None:
            for _ in range(30):
                await call(tracker, "0.30", costs="0", seconds=1.0)

        others = [asyncio.create_task(small()) for _ in range(4)]
        await asyncio.sleep(0.5)
        await call(tracker, "0.90", costs="0", seconds=0.1)
        waited = loop.time()
        await asyncio.gather(*others)
        return waited

    assert run(scenario) < 3


def test_who_waits_for_a_window_lets_others_pass() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> list[tuple[str, float]]:
        await tracker.set_budget(SCOPE, limit_usd=1, window="rolling:1h")
        await call(tracker, "0.50", costs="0.50")
        order: list[tuple[str, float]] = []

        async def noted(name: str, estimate: str) -> None:
            await call(tracker, estimate, costs="0.01")
            order.append((name, loop.time()))

        await asyncio.gather(noted("large", "0.90"), noted("one", "0.40"), noted("two", "0.40"))
        return order

    order = run(scenario)
    assert [name for name, _ in order] == ["one", "two", "large"]
    assert order[1][1] < 10
    assert order[2][1] > 3_000


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [({"on_exhausted": "reject"}, 0.0), ({"max_wait_seconds": 0}, 0.0),
     ({"max_wait_seconds": 7}, 7.0)],
)  # fmt: skip
def test_the_wait_is_bounded_by_whoever_asks(fields: dict[str, Any], seconds: float) -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> tuple[float, int]:
        other = asyncio.create_task(call(tracker, "0.90", seconds=100.0))
        await asyncio.sleep(1)
        began = loop.time()
        with pytest.raises(BudgetExceededError) as refusal:
            await call(tracker, "0.50", **fields)
        waited = loop.time() - began
        await other
        return waited, refusal.value.reserved

    waited, held = run(scenario)
    assert held == 900_000
    assert waited == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("field", "value"), [("on_exhausted", "hope"), ("max_wait_seconds", -1),
                         ("max_wait_seconds", float("nan"))],
)  # fmt: skip
def test_a_bound_that_is_none_is_refused(field: str, value: object) -> None:
    async def scenario(tracker: LedgerTracker, _: SimulatedLoop) -> None:
        with pytest.raises(InvalidFieldError, match=field):
            await call(tracker, **{field: value})  # type: ignore[arg-type]

    run(scenario)


def test_what_no_settlement_can_make_room_for_is_refused_at_once() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> float:
        await call(tracker, "0.90", costs="0.90")
        began = loop.time()
        for estimate in ("0.20", "1.50"):
            with pytest.raises(BudgetExceededError, match="waiting does not help"):
                await call(tracker, estimate)
        return loop.time() - began

    assert run(scenario) == 0


def test_a_call_is_refused_when_what_it_waited_for_was_spent() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> float:
        other = asyncio.create_task(call(tracker, "0.90", costs="0.90", seconds=5.0))
        await asyncio.sleep(1)
        with pytest.raises(BudgetExceededError, match="waiting does not help"):
            await call(tracker, "0.50")
        await other
        return loop.time()

    assert run(scenario) == pytest.approx(5.0)


def test_a_call_does_not_wait_for_itself() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> list[float]:
        times = []
        async with reserved(tracker, SCOPE, "0.90"):
            for seconds in (None, 3.0):
                began = loop.time()
                with pytest.raises(BudgetExceededError):
                    await call(tracker, "0.50", max_wait_seconds=seconds)
                times.append(loop.time() - began)
        await call(tracker, "0.05")
        return times

    assert run(scenario) == [0.0, pytest.approx(3.0)]


def test_another_process_is_asked_with_a_pause_that_grows() -> None:
    class Counting(LocalLedger):
        asked = 0

        async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
            self.asked += 1
            return await super().reserve(request)

    async def main(loop: SimulatedLoop) -> tuple[int, float]:
        ledger = Counting(clock=loop.clock)
        here, elsewhere = LedgerTracker(ledger), LedgerTracker(ledger)
        async with here:
            await here.set_budget(SCOPE, limit_usd=1)
            other = asyncio.create_task(call(elsewhere, "0.90", seconds=600.0))
            await asyncio.sleep(1)
            await asyncio.gather(*[call(here, "0.50") for _ in range(10)])
            await other
            return ledger.asked, loop.time()

    asked, ended = simulate(main).result
    assert asked < 600 / LONGEST_PAUSE_SECONDS + 10 * 8
    assert ended < 600 + LONGEST_PAUSE_SECONDS + 10


def test_a_release_by_hand_wakes_those_who_wait() -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> float:
        token = await tracker.reserve(SCOPE, "0.90", lease_seconds=600.0)
        waiting = asyncio.create_task(call(tracker, "0.50", seconds=0.0))
        await asyncio.sleep(100)
        await tracker.release(token)
        before = loop.time()
        await waiting
        return loop.time() - before

    assert run(scenario) == 0


@given(seed=st.integers(0, 2**16), calls=st.integers(1, 40))
def test_whoever_is_cancelled_leaves_nothing_behind(seed: int, calls: int) -> None:
    async def scenario(tracker: LedgerTracker, loop: SimulatedLoop) -> None:
        draws = Random(seed)
        tasks = []
        for _ in range(calls):
            estimate = draws.choice(["0.05", "0.30", "0.60", "1.00"])
            work = call(
                tracker,
                estimate,
                costs="0",
                seconds=draws.uniform(0, 2),
                max_wait_seconds=draws.choice([None, None, 1.0, 5.0]),
            )
            tasks.append(asyncio.create_task(work))
            await asyncio.sleep(draws.choice([0.0, 0.0, 0.3]))
            if draws.random() < 0.3:
                draws.choice(tasks).cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, BudgetExceededError):
                await task
        assert (await tracker.status(SCOPE)).reserved_micro_usd == 0
        assert len(queue_of(tracker)) == 0
        assert not queue_of(tracker).lines
        assert loop.time() < 3 * calls + 5

    run(scenario, seed)
