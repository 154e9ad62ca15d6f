"""What somebody leaves behind who gives up: nothing, except what was submitted."""

from __future__ import annotations

import asyncio

import pytest

from headgate import Agent, Grant, LoadScheduler, SharedResource, Task, acquire_all
from headgate.errors import InvalidFieldError, InvalidSettingError, PermitTimeoutError
from headgate.testing import SimulatedLoop, simulate


async def settled() -> None:
    """Let everything run that is ready: time jumps only when nothing is."""
    await asyncio.sleep(0.01)


async def reserved(scheduler: LoadScheduler, agent: str, weight: float | None = None) -> Grant:
    task = None if weight is None else Task(weight=weight)
    async with scheduler.acquire(agent, task=task) as grant:
        return grant


def test_a_task_that_is_handed_back_goes_to_who_asked_after_it_and_nothing_is_counted_twice() -> (
    None
):
    async def main(loop: SimulatedLoop) -> None:
        scheduler = LoadScheduler(None, SharedResource("llm"))
        for weight in (5.0, 7.0, 0.25):
            await scheduler.submit_task("b", Task(weight=weight))
            permit = await scheduler.acquire("x")
            first = asyncio.create_task(reserved(scheduler, "b"))
            await settled()
            second = asyncio.create_task(reserved(scheduler, "b"))
            await settled()
            await scheduler.release(permit)
            first.cancel()
            assert (await second).weight == weight
            assert scheduler.queued == 0
            assert scheduler.explain().lanes == ()
        assert scheduler.resource.in_use == 0

    simulate(main)


def test_nobody_has_the_age_of_one_who_gave_up() -> None:
    async def main(loop: SimulatedLoop) -> list[tuple[str, int]]:
        scheduler = LoadScheduler(None, SharedResource("llm"), alpha=0.0)
        served: list[Grant] = []

        async def ask(agent: str) -> None:
            served.append(await scheduler.acquire(agent))

        async def asked(agent: str) -> asyncio.Task[None]:
            task = asyncio.create_task(ask(agent))
            await settled()
            return task

        for _ in range(5):
            await asked("x")
        await scheduler.release(served[-1])
        await settled()
        gone = await asked("late")
        await scheduler.release(served[-1])
        await settled()
        await asked("early")
        await scheduler.release(served[-1])
        await settled()
        await asked("late")
        gone.cancel()
        for _ in range(3):
            await scheduler.release(served[-1])
            await settled()
        return [(grant.agent_id, grant.wait_ticks) for grant in served]

    assert simulate(main).result[-2:] == [("early", 3), ("late", 3)]


def test_waits_of_grants_that_were_handed_back_are_not_in_the_stats() -> None:
    async def main(loop: SimulatedLoop) -> None:
        scheduler = LoadScheduler(None, SharedResource("llm"))
        permit = await scheduler.acquire("x")
        waiting = asyncio.create_task(reserved(scheduler, "b"))
        await asyncio.sleep(1)
        await scheduler.release(permit)
        waiting.cancel()
        await asyncio.wait({waiting})
        stats = {one.agent_id: one for one in scheduler.stats()}["b"]
        assert (stats.grants, stats.mean_wait_ticks, stats.mean_wait_seconds) == (0, 0, 0)

    simulate(main)


def test_a_grant_is_released_where_it_was_granted() -> None:
    async def main(loop: SimulatedLoop) -> None:
        ours, theirs = (LoadScheduler(None, SharedResource(name)) for name in "ab")
        grant = await theirs.acquire("x")
        mine = await ours.acquire("x")
        with pytest.raises(InvalidFieldError, match="another scheduler"):
            await ours.release(grant)
        assert ours.resource.in_use == theirs.resource.in_use == 1
        await ours.release(mine)
        await theirs.release(grant)
        assert ours.resource.in_use == theirs.resource.in_use == 0

    simulate(main)


def test_another_thread_is_told_that_it_is_one() -> None:
    async def main() -> None:
        scheduler = LoadScheduler(None, SharedResource("llm"))
        async with scheduler.acquire("x") as grant:
            for work in (scheduler.submit_task("x", Task()), scheduler.release(grant)):
                with pytest.raises(InvalidSettingError, match="another event loop"):
                    await asyncio.to_thread(asyncio.run, work)

    asyncio.run(main())


def test_what_a_closed_loop_left_behind_holds_no_permit() -> None:
    scheduler = LoadScheduler(None, SharedResource("llm"))

    async def leave() -> Grant:
        await scheduler.submit_task("y", Task(weight=3))
        return await scheduler.acquire("x")

    async def go_on(left: Grant) -> float:
        async with scheduler.acquire("y", timeout=0) as grant:
            await scheduler.release(left)
            assert scheduler.resource.in_use == 1
            return grant.weight

    assert asyncio.run(go_on(asyncio.run(leave()))) == 3
    assert scheduler.resource.in_use == scheduler.queued == 0


def test_how_many_permits_there_are_does_not_change() -> None:
    resource = SharedResource("llm")
    with pytest.raises(AttributeError):
        resource.capacity = 2  # type: ignore[misc]


def test_a_timeout_names_the_whole_wait_and_what_was_full() -> None:
    async def main(loop: SimulatedLoop) -> None:
        first = LoadScheduler(None, SharedResource("first"))
        second = LoadScheduler([Agent(id="x")], SharedResource("second", 3))
        permit = await first.acquire("x")
        await second.acquire("x")
        loop.call_later(1, lambda: first.hand_back(permit))
        with pytest.raises(PermitTimeoutError, match=r"within 2 seconds.*all its 1 .*its capacity"):
            async with acquire_all([first, second], "x", timeout=2):
                raise AssertionError

    simulate(main)


def test_the_first_of_an_explanation_is_who_goes_next_also_when_overdue() -> None:
    async def main(loop: SimulatedLoop) -> None:
        scheduler = LoadScheduler(None, SharedResource("llm"), alpha=0.5, max_wait_ticks=2)
        order: list[str] = []

        async def ask(agent: str) -> None:
            async with scheduler.acquire(agent):
                order.append(agent)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(ask("x"))
            await asyncio.sleep(0.5)
            for agent in ("one", "two", *("deep",) * 10):
                group.create_task(ask(agent))
                await settled()
            await asyncio.sleep(2)
            assert order == ["x", "deep", "one"]
            first, second = scheduler.explain().lanes[:2]
            assert (first.load or 0) < (second.load or 0)
            assert first.reason == "goes before all others, because the oldest has waited 2 ticks"
            await asyncio.sleep(1)
            assert order[-1] == first.agent_id == "two"

    simulate(main)
