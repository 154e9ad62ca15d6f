"""Faults that schedulers of this kind are known for, each as a test that it is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from headgate import Budget, Estimate, LoadScheduler, SharedResource, Task, acquire_all
from headgate.errors import (
    BudgetExceededError,
    InvalidFieldError,
    InvalidSettingError,
    PermitTimeoutError,
    SchedulerClosedError,
    TooManyWaitingError,
)
from headgate.testing import SimulatedLoop, simulate

T = TypeVar("T")


def run(scenario: Callable[[], Awaitable[T]], *, seed: int | None = 0) -> T:
    async def main(loop: SimulatedLoop) -> T:
        return await scenario()

    return simulate(main, seed=seed).result


def one_permit(**options: object) -> LoadScheduler:
    return LoadScheduler(None, SharedResource("llm"), **options)  # type: ignore[arg-type]


async def reserved(scheduler: LoadScheduler, agent: str, seconds: float = 1.0) -> str:
    async with scheduler.acquire(agent):
        await asyncio.sleep(seconds)
    return agent


def test_a_holder_that_raises_frees_its_permit_for_the_next() -> None:
    async def scenario() -> str:
        scheduler = one_permit()

        async def fails() -> None:
            async with scheduler.acquire("a"):
                await asyncio.sleep(1)
                raise LookupError

        failing = asyncio.create_task(fails())
        await asyncio.sleep(0.5)
        waiting = asyncio.create_task(reserved(scheduler, "b"))
        with pytest.raises(LookupError):
            await failing
        return await waiting

    assert run(scenario) == "b"


@pytest.mark.parametrize("seed", range(20))
def test_a_timeout_at_the_moment_of_the_grant_gives_one_holder_or_none(seed: int) -> None:
    async def scenario() -> None:
        scheduler = one_permit()
        holders = 0

        async def ask(number: int) -> str:
            nonlocal holders
            try:
                async with scheduler.acquire(f"a{number}", timeout=1.0):
                    holders += 1
                    assert holders == 1
                    await asyncio.sleep(1.0)
                    holders -= 1
            except PermitTimeoutError:
                return "late"
            return "held"

        # Each is released exactly when the next one's time is over.
        outcomes = await asyncio.gather(*(ask(number) for number in range(4)))
        assert outcomes.count("held") in {1, 2}
        assert scheduler.resource.in_use == scheduler.queued == 0

    run(scenario, seed=seed)


def test_several_resources_under_contention_come_to_an_end() -> None:
    async def scenario() -> int:
        llm, database, gpu = (
            LoadScheduler(None, SharedResource(name)) for name in ("llm", "database", "gpu")
        )
        done = 0

        async def work(number: int) -> None:
            nonlocal done
            wanted = ([llm, database], [database, gpu], [gpu, llm])[number % 3]
            async with acquire_all(wanted, f"a{number}") as grants:
                assert set(grants) == {one.resource.name for one in wanted}
                await asyncio.sleep(1)
                done += 1

        await asyncio.gather(*(work(number) for number in range(30)))
        return done

    assert run(scenario) == 30


def test_five_parallel_calls_do_not_pass_a_budget_of_three() -> None:
    async def scenario() -> tuple[int, int, float]:
        budget = Budget(limits={"agent:a": 3}, default=Estimate(usd=1))
        scheduler = LoadScheduler(None, SharedResource("llm", 5), budget=budget)
        ran = 0

        async def call() -> None:
            nonlocal ran
            async with scheduler.acquire("a") as grant:
                ran += 1
                await asyncio.sleep(1)
                grant.charge(1)

        outcomes = await asyncio.gather(*(call() for _ in range(5)), return_exceptions=True)
        refused = sum(isinstance(outcome, BudgetExceededError) for outcome in outcomes)
        return ran, refused, await budget.tracker.get_spent("agent:a")

    assert run(scenario) == (3, 2, 3.0)


def test_a_refused_task_leaves_the_queue_to_the_affordable_ones_behind_it() -> None:
    async def scenario() -> list[str]:
        budget = Budget(limits={"agent:a": 2})
        scheduler = one_permit(budget=budget)
        outcomes: list[str] = []

        async def call(usd: int) -> None:
            try:
                async with scheduler.acquire("a", estimate=Estimate(usd=usd)):
                    await asyncio.sleep(1)
                outcomes.append(f"ran {usd}")
            except BudgetExceededError:
                outcomes.append(f"refused {usd}")

        async with asyncio.TaskGroup() as group:
            for usd in (1, 5, 1):
                group.create_task(call(usd))
                await asyncio.sleep(0.1)
        return sorted(outcomes)

    assert run(scenario) == ["ran 1", "ran 1", "refused 5"]


def test_acquiring_without_a_queued_task_queues_one_of_weight_one() -> None:
    async def scenario() -> float:
        scheduler = one_permit()
        async with scheduler.acquire("b"):
            waiting = asyncio.create_task(reserved(scheduler, "a"))
            await asyncio.sleep(1)
            (lane,) = [lane for lane in scheduler.explain().lanes if lane.agent_id == "a"]
        await waiting
        return lane.queue_depth

    assert run(scenario) == 1.0


def test_shutdown_refuses_whoever_waits_and_leaks_no_permit() -> None:
    async def scenario() -> None:
        scheduler = one_permit()
        holder = asyncio.create_task(reserved(scheduler, "a", 5))
        await asyncio.sleep(0.5)
        waiting = asyncio.create_task(reserved(scheduler, "b"))
        await asyncio.sleep(0.5)
        assert await scheduler.shutdown(timeout=1) == 1
        with pytest.raises(SchedulerClosedError):
            await waiting
        assert await scheduler.shutdown() == 0
        assert await holder == "a"
        assert scheduler.resource.in_use == scheduler.queued == 0
        with pytest.raises(SchedulerClosedError):
            await scheduler.acquire("a")
        with pytest.raises(SchedulerClosedError):
            await scheduler.submit_task("a", Task())

    run(scenario)


def test_a_cancel_before_the_first_step_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        scheduler = one_permit()
        async with scheduler.acquire("a"):
            waiting = asyncio.create_task(reserved(scheduler, "b"))
            waiting.cancel()
            await asyncio.wait({waiting})
            assert scheduler.queued == 0

    run(scenario)


def test_a_cancel_while_waiting_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        scheduler = one_permit()
        async with scheduler.acquire("a"):
            waiting = asyncio.create_task(reserved(scheduler, "b"))
            await asyncio.sleep(1)
            assert scheduler.queued == 1
            waiting.cancel()
            await asyncio.wait({waiting})
            assert scheduler.queued == 0
        assert scheduler.resource.in_use == 0

    run(scenario)


def test_a_cancel_after_the_grant_passes_the_permit_on_without_a_tick() -> None:
    async def scenario() -> str:
        scheduler = one_permit()
        grant = await scheduler.acquire("a")
        cancelled = asyncio.create_task(reserved(scheduler, "b"))
        await asyncio.sleep(1)
        following = asyncio.create_task(reserved(scheduler, "c"))
        await asyncio.sleep(1)
        await scheduler.release(grant)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert cancelled.cancelled()
        assert scheduler.tick == 1
        assert await following == "c"
        assert scheduler.resource.in_use == 0
        return "c"

    assert run(scenario) == "c"


def test_a_submitted_task_whose_taker_was_cancelled_after_the_grant_is_queued_where_it_was() -> (
    None
):
    async def scenario() -> list[float]:
        scheduler = one_permit()
        for weight in (2.0, 3.0):
            await scheduler.submit_task("b", Task(weight=weight))
        grant = await scheduler.acquire("a")
        cancelled = asyncio.create_task(reserved(scheduler, "b"))
        await asyncio.sleep(1)
        await scheduler.release(grant)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        served = []
        for _ in range(3):
            async with scheduler.acquire("b") as taken:
                served.append(taken.weight)
        return served

    assert run(scenario) == [2.0, 3.0, 1.0]


def test_a_task_in_service_neither_ages_nor_counts_as_queued() -> None:
    async def scenario() -> None:
        scheduler = LoadScheduler(None, SharedResource("llm", 2))
        await scheduler.submit_task("a", Task(weight=5))
        async with scheduler.acquire("a"):
            for _ in range(3):
                async with scheduler.acquire("b"):
                    pass
            (lane,) = [lane for lane in scheduler.explain().lanes if lane.agent_id == "a"]
            assert (lane.queue_depth, lane.oldest_wait_ticks, lane.in_flight) == (0.0, 0, 1)

    run(scenario)


def test_a_permit_that_is_released_twice_is_freed_once() -> None:
    async def scenario() -> None:
        scheduler = LoadScheduler(None, SharedResource("llm", 2))
        other = await scheduler.acquire("b")
        async with scheduler.acquire("a") as grant:
            await scheduler.release(grant)
            await scheduler.release(grant)
            assert scheduler.resource.in_use == 1
        assert (scheduler.resource.in_use, scheduler.tick) == (1, 1)
        await scheduler.release(other)

    run(scenario)


def test_no_more_than_max_waiters_are_queued() -> None:
    async def scenario() -> None:
        scheduler = one_permit(max_waiters=2)
        async with scheduler.acquire("a"):
            waiting = [asyncio.create_task(reserved(scheduler, "b")) for _ in range(2)]
            await asyncio.sleep(1)
            with pytest.raises(TooManyWaitingError):
                await scheduler.acquire("c")
            with pytest.raises(TooManyWaitingError):
                await scheduler.submit_task("c", Task())
        await asyncio.gather(*waiting)

    run(scenario)


def test_timeout_zero_takes_a_free_permit_and_waits_for_none() -> None:
    async def scenario() -> None:
        scheduler = one_permit()
        async with scheduler.acquire("a", timeout=0):
            with pytest.raises(PermitTimeoutError):
                await scheduler.acquire("b", timeout=0)
        assert scheduler.queued == 0

    run(scenario)


def test_an_agent_that_is_unregistered_is_refused_and_keeps_what_it_has() -> None:
    async def scenario() -> None:
        scheduler = LoadScheduler(["a", "b"], SharedResource("llm"))
        grant = await scheduler.acquire("a")
        waiting = asyncio.create_task(reserved(scheduler, "a"))
        await scheduler.submit_task("a", Task())
        await asyncio.sleep(1)
        scheduler.unregister("a")
        with pytest.raises(InvalidFieldError, match="not registered"):
            await waiting
        with pytest.raises(InvalidFieldError, match="not registered"):
            await scheduler.acquire("a")
        assert (scheduler.queued, scheduler.resource.in_use) == (0, 1)
        scheduler.register("a")
        await scheduler.release(grant)
        assert await reserved(scheduler, "a") == "a"

    run(scenario)


def test_a_resource_belongs_to_one_scheduler() -> None:
    resource = SharedResource("llm")
    LoadScheduler(None, resource)
    with pytest.raises(InvalidSettingError, match="has a scheduler already"):
        LoadScheduler(None, resource)


def test_a_scheduler_moves_from_a_loop_that_is_closed_to_the_next() -> None:
    scheduler = one_permit()

    async def scenario() -> None:
        await reserved(scheduler, "a")

    run(scenario)
    run(scenario)
    grant = run(lambda: scheduler.acquire("a"))
    run(scenario)
    run(lambda: scheduler.release(grant))
    run(scenario)
    assert scheduler.resource.in_use == 0


def test_a_request_is_used_once_because_what_it_left_in_the_queue_would_come_alive_again() -> None:
    async def scenario() -> None:
        scheduler = one_permit()
        async with scheduler.acquire("a"):
            request = scheduler.acquire("b", timeout=1)
            with pytest.raises(PermitTimeoutError):
                await request
            with pytest.raises(InvalidFieldError, match="call it again"):
                await request

    run(scenario)
