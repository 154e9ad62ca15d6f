"""A crash stops everything of a host between two awaits, and nothing cleans up."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from headgate.errors import InvalidSettingError
from headgate.testing import (
    DeadlockError,
    Host,
    HostCrashedError,
    SimulatedLoop,
    UnhandledError,
    simulate,
)
from headgate.testing.simulation import KEPT_SIMULATIONS


def test_work_on_a_host_returns_its_result() -> None:
    async def add(left: int, right: int) -> int:
        await asyncio.sleep(1)
        return left + right

    async def main(loop: SimulatedLoop) -> int:
        return await Host(loop, "a").spawn(add(2, 3))

    assert simulate(main).result == 5


def test_an_exception_on_a_host_reaches_whoever_awaits_it() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    async def main(loop: SimulatedLoop) -> None:
        await Host(loop, "a").spawn(fail())

    with pytest.raises(LookupError, match="gone"):
        simulate(main)


def test_an_exception_on_a_host_that_nobody_awaits_fails_the_simulation() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    async def main(loop: SimulatedLoop) -> None:
        Host(loop, "a").spawn(fail())
        await asyncio.sleep(1)

    with pytest.raises(UnhandledError):
        simulate(main)


def test_cancelling_the_outcome_cancels_the_work_which_may_clean_up() -> None:
    async def work(loop: SimulatedLoop) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            loop.record("cleaned up")

    async def main(loop: SimulatedLoop) -> None:
        outcome = Host(loop, "a").spawn(work(loop))
        await asyncio.sleep(1)
        outcome.cancel()
        await asyncio.sleep(10)

    trace = simulate(main).trace
    assert [(event.host, event.event) for event in trace] == [("a", "cleaned up")]


def test_a_crash_runs_no_cleanup_code_of_any_kind() -> None:
    ran: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(100)
        finally:
            ran.append("generator")

    async def child() -> None:
        try:
            await asyncio.sleep(100)
        except BaseException:
            ran.append("except")
            raise
        finally:
            ran.append("finally")
            await asyncio.sleep(0)
            ran.append("finally, after an await")

    async def work(loop: SimulatedLoop) -> None:
        loop.call_later(5, ran.append, "timer")
        task = asyncio.create_task(child())
        task.add_done_callback(lambda _: ran.append("callback"))
        async with asyncio.TaskGroup() as group:
            group.create_task(child(), context=contextvars.Context())
            async for _ in numbers():
                await child()

    async def main(loop: SimulatedLoop) -> None:
        host = Host(loop, "a")
        host.spawn(work(loop))
        await asyncio.sleep(1)
        host.crash()
        await asyncio.sleep(1000)

    simulate(main)
    gc.collect()
    assert ran == []


def test_a_task_that_never_started_is_dropped_without_a_warning() -> None:
    ran: list[str] = []

    async def work() -> None:
        ran.append("started")

    async def main(loop: SimulatedLoop) -> None:
        host = Host(loop, "a")
        host.spawn(work())
        host.crash()
        await asyncio.sleep(1)

    simulate(main)
    assert ran == []


def test_awaiting_work_of_a_crashed_host_raises_and_other_hosts_go_on() -> None:
    async def work() -> str:
        await asyncio.sleep(10)
        return "done"

    async def main(loop: SimulatedLoop) -> tuple[str, float]:
        lost, kept = Host(loop, "lost"), Host(loop, "kept")
        lost_work, kept_work = lost.spawn(work()), kept.spawn(work())
        loop.call_later(3, lost.crash)
        with pytest.raises(HostCrashedError, match="host lost crashed"):
            await lost_work
        at_seconds = loop.time()
        return await kept_work, at_seconds

    assert simulate(main).result == ("done", 3.0)


def test_a_crashed_host_starts_again_with_the_next_spawn() -> None:
    async def work(loop: SimulatedLoop) -> None:
        loop.record("started")
        await asyncio.sleep(10)
        loop.record("finished")

    async def main(loop: SimulatedLoop) -> tuple[int, int]:
        host = Host(loop, "a")
        host.spawn(work(loop))
        await asyncio.sleep(1)
        host.crash()
        assert host.steps == 0
        await host.spawn(work(loop))
        return host.crashes, host.steps

    simulation = simulate(main)
    events = [(event.at_seconds, event.event) for event in simulation.trace]
    assert events == [(0, "started"), (1, "crash"), (1, "started"), (11, "finished")]
    assert simulation.result == (1, 3)


def test_a_task_that_crashes_its_own_host_ends_at_its_next_await() -> None:
    ran: list[str] = []

    async def child() -> None:
        ran.append("child")

    async def work(host: Host) -> None:
        host.crash()
        task = asyncio.create_task(child())
        await task
        ran.append("resumed")

    async def fails(host: Host) -> None:
        host.crash()
        raise LookupError("after the crash")

    async def has_a_child_that_fails(host: Host) -> None:
        await asyncio.create_task(fails(host))

    async def main(loop: SimulatedLoop) -> None:
        host = Host(loop, "a")
        for program in (work, fails, has_a_child_that_fails):
            with pytest.raises(HostCrashedError):
                await host.spawn(program(host))
        await asyncio.sleep(1)

    simulate(main)
    assert ran == []


def test_a_timer_of_a_crashed_host_neither_moves_time_nor_hides_a_deadlock() -> None:
    async def main(loop: SimulatedLoop) -> None:
        host = Host(loop, "a")
        host.spawn(asyncio.sleep(100))
        await asyncio.sleep(1)
        host.crash()
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="after 1 s"):
        simulate(main)


def test_no_crash_falls_into_the_end_of_the_simulation() -> None:
    async def work(loop: SimulatedLoop) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(10)
            loop.record("cleaned up")

    async def main(loop: SimulatedLoop) -> None:
        host = Host(loop, "a")
        host.crash_after(2)
        host.spawn(work(loop))
        loop.call_later(5, host.crash)
        await asyncio.sleep(1)

    assert [event.event for event in simulate(main).trace] == ["cleaned up"]


PROGRAM_STEPS = 7


async def _transfer(accounts: dict[str, int]) -> None:
    """Move money in two writes with an undo in between: correct, unless it crashes."""

    async def write(name: str, amount: int) -> None:
        await asyncio.sleep(1)
        accounts[name] += amount

    await write("left", -10)
    try:
        await asyncio.create_task(write("right", 10))
    except BaseException:
        accounts["left"] += 10
        raise
    accounts["transfers"] += 1


@pytest.mark.parametrize("steps", range(PROGRAM_STEPS + 1))
@pytest.mark.parametrize("seed", range(3))
def test_a_crash_can_fall_between_any_two_awaits(steps: int, seed: int) -> None:
    accounts = {"left": 10, "right": 0, "transfers": 0}

    async def main(loop: SimulatedLoop) -> int:
        host = Host(loop, "a")
        host.crash_after(steps)
        host.spawn(_transfer(accounts))
        await asyncio.sleep(60)
        return host.crashes

    assert simulate(main, seed=seed).result == 1
    reached = tuple(accounts.values())
    expected = {
        range(3): (10, 0, 0),
        range(3, 6): (0, 0, 0),
        range(6, 7): (0, 10, 0),
        range(7, 8): (0, 10, 1),
    }
    assert reached == next(state for when, state in expected.items() if steps in when)


def test_the_small_program_has_the_steps_that_the_crashes_cover() -> None:
    async def main(loop: SimulatedLoop) -> int:
        host = Host(loop, "a")
        await host.spawn(_transfer({"left": 10, "right": 0, "transfers": 0}))
        return host.steps

    assert simulate(main).result == PROGRAM_STEPS


def test_a_random_crash_is_repeated_by_its_seed() -> None:
    async def work(loop: SimulatedLoop) -> None:
        for number in range(50):
            loop.record("worked", number=number)
            await asyncio.sleep(1)

    async def main(loop: SimulatedLoop) -> None:
        host = Host(loop, "a")
        host.crash_after(loop.random.randrange(100))
        host.spawn(work(loop))
        await asyncio.sleep(100)

    lengths = [len(simulate(main, seed=seed).trace) for seed in range(20)]
    assert lengths == [len(simulate(main, seed=seed).trace) for seed in range(20)]
    assert len(set(lengths)) > 5


def test_a_crash_cannot_be_set_for_the_past() -> None:
    async def main(loop: SimulatedLoop) -> None:
        Host(loop, "a").crash_after(-1)

    with pytest.raises(InvalidSettingError, match="steps"):
        simulate(main)


async def _awkward() -> None:
    never_awaited = asyncio.sleep(1)
    try:
        await asyncio.sleep(100)
    finally:
        for _ in range(3):
            await asyncio.sleep(0)
        raise LookupError("clean-up failed")
    await never_awaited


async def _swallows() -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def _fails_while_waited_for() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    task = asyncio.create_task(fail())
    await asyncio.sleep(100)
    await task


@pytest.mark.parametrize("work", [_awkward, _swallows, _fails_while_waited_for])
def test_discarding_the_remains_makes_no_noise(
    work: Callable[[], Coroutine[Any, Any, None]],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        host = Host(loop, "a")
        host.spawn(work())
        await asyncio.sleep(1)
        host.crash()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(KEPT_SIMULATIONS + 2):
            simulate(main)
        gc.collect()
    assert (seen, capsys.readouterr().err, caplog.records) == ([], "", [])
