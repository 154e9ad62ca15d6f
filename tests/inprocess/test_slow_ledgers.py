"""Ledgers that are slow, hang or fail: permits go on, money is booked, nobody waits without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headgate import Budget, Estimate, LoadScheduler, SharedResource, Task, acquire_all
from headgate.budgets.local import LocalBudgetTracker
from headgate.errors import (
    InvalidFieldError,
    InvalidScopeError,
    LedgerUnavailableError,
    PermitTimeoutError,
    TooManyWaitingError,
)
from headgate.inprocess.budget import BudgetPassed
from headgate.testing import SimulatedLoop, simulate

T = TypeVar("T")
ONE = Estimate(usd=1)


class SlowTracker(LocalBudgetTracker):
    """A ledger whose responses take their time, or never come."""

    reserve_seconds = 0.0
    refusal_seconds = 0.0
    commit_seconds = 0.0
    failure: LedgerUnavailableError | None = None

    async def reserve(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self.reserve_seconds)
        if self.failure is not None:
            raise self.failure
        try:
            return await super().reserve(*args, **kwargs)
        except Exception:
            await asyncio.sleep(self.refusal_seconds)
            raise

    async def commit(self, *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(self.commit_seconds)
        return await super().commit(*args, **kwargs)


def run(scenario: Callable[[SlowTracker, SimulatedLoop], Awaitable[T]]) -> T:
    async def main(loop: SimulatedLoop) -> T:
        async with SlowTracker(clock=loop.clock) as tracker:
            return await scenario(tracker, loop)

    return simulate(main).result


def scheduler_of(budget: Budget, capacity: int = 1, max_waiters: int = 1_000) -> LoadScheduler:
    resource = SharedResource("llm", capacity)
    return LoadScheduler(None, resource, budget=budget, max_waiters=max_waiters)


async def use(scheduler: LoadScheduler, agent: str, seconds: float, usd: float = 1) -> float:
    async with scheduler.acquire(agent, estimate=Estimate(usd=usd)) as grant:
        await asyncio.sleep(seconds)
        grant.charge(0)
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("timeout", "error", "after"),
    [
        (1.0, PermitTimeoutError, 1.0),
        (0.0, PermitTimeoutError, 1.0),
        (None, LedgerUnavailableError, 10),
    ],
)
def test_a_ledger_that_hangs_is_waited_for_in_bounds_and_its_permit_goes_on(
    timeout: float | None, error: type[Exception], after: float
) -> None:
    async def scenario(tracker: SlowTracker, loop: SimulatedLoop) -> None:
        tracker.reserve_seconds = 1e6
        scheduler = scheduler_of(Budget(tracker, default=ONE))
        with pytest.raises(error):
            await scheduler.acquire("a", timeout=timeout)
        assert loop.time() == after
        assert scheduler.resource.in_use == 0
        await scheduler.shutdown()

    run(scenario)


def test_who_is_cancelled_while_the_ledger_hangs_is_free_at_once_and_keeps_no_money() -> None:
    async def scenario(tracker: SlowTracker, loop: SimulatedLoop) -> None:
        tracker.reserve_seconds = 5.0
        scheduler = scheduler_of(Budget(tracker, default=ONE, limits={"agent:a": 1}))
        asking = asyncio.create_task(use(scheduler, "a", 1))
        await asyncio.sleep(1)
        asking.cancel()
        await asyncio.wait({asking})
        assert (loop.time(), scheduler.resource.in_use) == (1, 0)
        assert await scheduler.shutdown() == 0
        status = await tracker.status("agent:a")
        assert (status.reserved_micro_usd, status.spent_micro_usd) == (0, 0)

    run(scenario)


@pytest.mark.parametrize("patience", [None, 1.0])
def test_shutdown_waits_for_what_is_being_booked_and_closes_the_ledger_after_it(
    patience: float | None,
) -> None:
    async def scenario(tracker: SlowTracker, _loop: SimulatedLoop) -> None:
        budget = Budget(tracker, default=ONE)
        scheduler = scheduler_of(budget)
        tracker.commit_seconds = 5.0

        async def reserved() -> None:
            async with scheduler.acquire("a"):
                await asyncio.sleep(1)

        holder = asyncio.create_task(reserved())
        await asyncio.sleep(0.5)
        await scheduler.shutdown(patience)
        assert scheduler.is_busy == (patience is not None)
        await holder
        await asyncio.sleep(1)
        assert await tracker.get_spent("agent:a") == 1
        assert not scheduler.is_busy
        assert not budget.is_open

    run(scenario)


def test_the_ledger_of_two_schedulers_is_closed_with_the_last(tmp_path: Path) -> None:
    async def main() -> None:
        budget = Budget(f"sqlite:///{tmp_path / 'ledger.db'}", default=ONE)
        first, second = (LoadScheduler(None, SharedResource(n), budget=budget) for n in "ab")
        async with second.acquire("x"):
            pass
        async with first.acquire("x"):
            await second.shutdown()
        assert await budget.tracker.get_spent("agent:x") == 2
        await first.shutdown()
        assert not budget.is_open

    asyncio.run(main())


def test_several_resources_are_paid_once_so_one_of_them_has_the_budget() -> None:
    async def scenario(tracker: SlowTracker, _loop: SimulatedLoop) -> float:
        budget = Budget(tracker)
        payers = [LoadScheduler(None, SharedResource(n), budget=budget) for n in ("llm", "web")]
        with pytest.raises(InvalidFieldError, match="more than one has a budget"):
            async with acquire_all(payers, "x", estimate=ONE):
                raise AssertionError
        free = LoadScheduler(None, SharedResource("gpu"))
        async with acquire_all([payers[0], free], "x", estimate=ONE) as grants:
            assert set(grants) == {"gpu", "llm"}
        assert payers[0].resource.in_use == free.resource.in_use == 0
        return await tracker.get_spent("agent:x")

    assert run(scenario) == 1


def test_nobody_waits_for_money_with_a_permit_of_another_resource() -> None:
    async def scenario(tracker: SlowTracker, loop: SimulatedLoop) -> float:
        budget = Budget(tracker, mode="wait", session="s", limits={"session:s": 2})
        payer = LoadScheduler(None, SharedResource("a", 5), budget=budget)
        other = LoadScheduler(None, SharedResource("b", 2))

        async def work(agent: str) -> None:
            async with acquire_all([payer, other], agent, estimate=Estimate(usd=2)) as grants:
                await asyncio.sleep(1)
                grants["a"].charge(0)

        first, second = (asyncio.create_task(work(name)) for name in "xy")
        await asyncio.sleep(0.5)
        assert (payer.resource.in_use, other.resource.in_use, payer.waiting_for_budget) == (1, 1, 1)
        await asyncio.gather(first, second)
        return loop.time()

    assert run(scenario) == 2


def test_calls_that_wait_for_money_are_counted_shown_and_bounded() -> None:
    async def scenario(tracker: SlowTracker, _loop: SimulatedLoop) -> None:
        budget = Budget(tracker, mode="wait", limits={"agent:a": 1})
        scheduler = scheduler_of(budget, capacity=2, max_waiters=5)
        tasks = []
        for _ in range(8):
            tasks.append(asyncio.create_task(use(scheduler, "a", 1_000)))
            await asyncio.sleep(0.01)
        assert (scheduler.waiting_for_budget, scheduler.queued, scheduler.is_busy) == (5, 0, True)
        assert [type(task.exception()) for task in tasks[6:]] == [TooManyWaitingError] * 2
        assert "5 wait for money" in str(scheduler.explain())
        assert scheduler.stats()[0].waiting_for_budget == 5
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert scheduler.waiting_for_budget == 0

    run(scenario)


def test_room_that_comes_while_the_ledger_refuses_is_not_missed() -> None:
    async def scenario(tracker: SlowTracker, _loop: SimulatedLoop) -> float:
        tracker.refusal_seconds = 0.1
        scheduler = scheduler_of(Budget(tracker, mode="wait", limits={"agent:a": 1}), capacity=2)
        first = asyncio.create_task(use(scheduler, "a", 1))
        await asyncio.sleep(0.95)
        second = asyncio.create_task(use(scheduler, "a", 0))
        await first
        return await second

    assert run(scenario) < 1.2


def test_many_large_calls_do_not_keep_a_small_one_from_being_tried() -> None:
    async def scenario(tracker: SlowTracker, _loop: SimulatedLoop) -> float:
        budget = Budget(tracker, mode="wait", session="s", limits={"session:s": 10})
        scheduler = scheduler_of(budget, capacity=200)
        large = [asyncio.create_task(use(scheduler, "long", 1_000, 9))]
        room = asyncio.create_task(use(scheduler, "short", 1, 1))
        await asyncio.sleep(0.1)
        large += [asyncio.create_task(use(scheduler, "large", 1, 5)) for _ in range(160)]
        await asyncio.sleep(0.1)
        ended = await use(scheduler, "small", 1, 1)
        for task in (*large, room):
            task.cancel()
        await asyncio.wait(large)
        return ended

    assert run(scenario) == 2


def test_who_is_unregistered_while_it_waits_for_money_is_refused_at_once() -> None:
    async def scenario(tracker: SlowTracker, loop: SimulatedLoop) -> None:
        scheduler = scheduler_of(Budget(tracker, mode="wait", limits={"agent:a": 1}), capacity=2)
        holder = asyncio.create_task(use(scheduler, "a", 100))
        await asyncio.sleep(0.1)
        waiting_for_budget = asyncio.create_task(use(scheduler, "a", 1))
        await asyncio.sleep(0.1)
        assert scheduler.waiting_for_budget == 1
        scheduler.unregister("a")
        with pytest.raises(InvalidFieldError, match="not registered"):
            await waiting_for_budget
        assert loop.time() < 1
        await holder

    run(scenario)


def test_a_ledger_that_fails_leaves_a_submitted_task_queued() -> None:
    async def scenario(tracker: SlowTracker, _loop: SimulatedLoop) -> None:
        tracker.failure = LedgerUnavailableError("the ledger is away")
        scheduler = scheduler_of(Budget(tracker, default=ONE))
        await scheduler.submit_task("a", Task(weight=5))
        with pytest.raises(LedgerUnavailableError):
            await scheduler.acquire("a")
        tracker.failure = None
        assert scheduler.queued == 1
        async with scheduler.acquire("a") as grant:
            assert grant.weight == 5

    run(scenario)


def test_a_listener_that_fails_does_not_cost_the_call_its_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(passed: BudgetPassed) -> None:
        raise RuntimeError(str(passed))

    async def scenario(tracker: SlowTracker, _loop: SimulatedLoop) -> None:
        limits = {"agent:a": Decimal("0.5")}
        budget = Budget(tracker, mode="alert", on_alert=fail, limits=limits, default=ONE)
        async with scheduler_of(budget).acquire("a"):
            pass

    run(scenario)
    assert "on_alert failed" in caplog.text


@pytest.mark.parametrize("agent", ["analyst 1", "a/b", "a/team:x", "röd"])
def test_an_agent_that_cannot_have_a_budget_is_refused_before_it_gets_a_permit(agent: str) -> None:
    async def scenario(tracker: SlowTracker, _loop: SimulatedLoop) -> None:
        scheduler = scheduler_of(Budget(tracker, default=ONE))
        with pytest.raises(InvalidScopeError):
            await scheduler.acquire(agent)
        with pytest.raises(InvalidScopeError):
            scheduler.register(agent)
        assert scheduler.agents == ()

    run(scenario)
