"""Virtual time, deadlocks, limits, and asyncio's own tools on the simulated loop."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator

import pytest

from headgate.testing import (
    DEFAULT_START,
    DeadlockError,
    NotSimulatedError,
    SimulatedLoop,
    StepLimitError,
    UnhandledError,
    simulate,
)


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def main(loop: SimulatedLoop) -> list[tuple[float, str]]:
        fired: list[tuple[float, str]] = []
        for delay in (3.0, 1.0, 2.0, 1.0):
            loop.call_later(delay, lambda: fired.append((loop.time(), "timer")))
        await asyncio.sleep(10)
        return fired

    assert [at for at, _ in simulate(main).result] == [1.0, 1.0, 2.0, 3.0]


def test_wall_clock_and_loop_time_move_together() -> None:
    async def main(loop: SimulatedLoop) -> tuple[float, float]:
        await asyncio.sleep(90)
        return loop.time(), loop.clock()

    assert simulate(main).result == (90.0, DEFAULT_START + 90.0)


def test_a_simulated_day_of_five_second_ticks_takes_no_time() -> None:
    async def main(loop: SimulatedLoop) -> int:
        rounds = 0
        while loop.time() < 86_400:
            await asyncio.sleep(5)
            rounds += 1
        return rounds

    began = time.process_time()
    day = simulate(main)
    assert time.process_time() - began < 5  # about 0.2 s
    assert (day.result, day.seconds) == (17_280, 86_400.0)


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main(loop: SimulatedLoop) -> float:
        timer = asyncio.create_task(asyncio.sleep(1))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not timer.done()
        return loop.time()

    assert simulate(main).result == 0.0


def test_waiting_for_what_nobody_will_do_is_a_deadlock() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await asyncio.sleep(7)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"deadlock after 7 s.*waiting: Task-") as caught:
        simulate(main)
    assert (caught.value.at_seconds, len(caught.value.waiting)) == (7.0, 1)


def test_a_cancelled_timer_or_an_endless_one_does_not_hide_a_deadlock() -> None:
    async def main(loop: SimulatedLoop) -> None:
        loop.call_later(5, lambda: None).cancel()
        loop.call_later(math.inf, lambda: None)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="after 0 s"):
        simulate(main)


def test_a_deadlock_names_at_most_ten_tasks() -> None:
    async def main(loop: SimulatedLoop) -> None:
        event = asyncio.Event()
        await asyncio.gather(*(event.wait() for _ in range(20)))

    with pytest.raises(DeadlockError, match="and 11 more"):
        simulate(main)


def test_a_loop_that_never_waits_meets_the_step_limit() -> None:
    async def main(loop: SimulatedLoop) -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(StepLimitError, match="more than 500 steps"):
        simulate(main, max_steps=500)


def test_a_task_that_also_ignores_cancelling_still_ends_in_the_step_limit() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                continue

    async def main(loop: SimulatedLoop) -> None:
        await stubborn()

    with pytest.raises(StepLimitError):
        simulate(main, max_steps=200)


def test_setting_and_cancelling_timeouts_does_not_pile_up_timers() -> None:
    async def main(loop: SimulatedLoop) -> int:
        for _ in range(2000):
            async with asyncio.timeout(3600):
                await asyncio.sleep(0)
        return len(loop._timers)

    assert simulate(main).result < 500


def test_asyncio_timeout_expires_at_its_virtual_time() -> None:
    async def main(loop: SimulatedLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return loop.time()

    assert simulate(main).result == 2.5


def test_task_group_cancels_the_others_when_one_fails() -> None:
    ended: list[float] = []

    async def sleeper(loop: SimulatedLoop) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(loop.time())

    async def failing() -> None:
        await asyncio.sleep(1)
        raise LookupError("gone")

    async def main(loop: SimulatedLoop) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper(loop))
            group.create_task(sleeper(loop))
            group.create_task(failing())

    with pytest.raises(ExceptionGroup) as caught:
        simulate(main)
    assert caught.group_contains(LookupError, match="gone")
    assert ended == [1.0, 1.0]


def test_queue_event_lock_and_future_work() -> None:
    async def main(loop: SimulatedLoop) -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        lock, ready, future = asyncio.Lock(), asyncio.Event(), loop.create_future()

        async def produce() -> None:
            await ready.wait()
            for number in range(3):
                async with lock:
                    await queue.put(number)
            future.set_result(3)

        producer = asyncio.create_task(produce())
        loop.call_later(1, ready.set)
        received = [await queue.get() for _ in range(3)] + [await future]
        await producer
        return received

    assert simulate(main).result == [0, 1, 2, 3]


def test_an_exception_of_main_propagates() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await asyncio.sleep(1)
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        simulate(main)


def test_an_exception_in_a_callback_fails_the_simulation() -> None:
    def broken() -> None:
        raise LookupError("gone")

    async def main(loop: SimulatedLoop) -> None:
        loop.call_later(1, broken)
        await asyncio.sleep(10)

    with pytest.raises(UnhandledError) as caught:
        simulate(main)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_task_that_fails_unseen_fails_the_simulation() -> None:
    async def broken() -> None:
        raise LookupError("gone")

    async def main(loop: SimulatedLoop) -> None:
        asyncio.create_task(broken())  # noqa: RUF006
        await asyncio.sleep(10)

    with pytest.raises(UnhandledError) as caught:
        simulate(main)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_failed_task_that_is_still_referenced_at_the_end_fails_the_simulation() -> None:
    kept: list[asyncio.Task[None]] = []

    async def broken() -> None:
        raise LookupError("gone")

    async def main(loop: SimulatedLoop) -> None:
        kept.append(asyncio.create_task(broken()))
        await asyncio.sleep(10)

    with pytest.raises(UnhandledError, match="nobody looked"):
        simulate(main)


def test_an_exception_handler_of_the_program_is_respected() -> None:
    def broken() -> None:
        raise LookupError("gone")

    async def main(loop: SimulatedLoop) -> list[str]:
        seen: list[str] = []
        loop.set_exception_handler(lambda _, context: seen.append(str(context["exception"])))
        loop.call_soon(broken)
        await asyncio.sleep(1)
        return seen

    assert simulate(main).result == ["gone"]


def test_threads_are_refused_with_a_reason() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await asyncio.to_thread(time.monotonic)

    with pytest.raises(NotSimulatedError, match="no threads"):
        simulate(main)


def test_what_main_leaves_running_is_cancelled_and_cleans_up() -> None:
    async def lingering(loop: SimulatedLoop) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)
            loop.record("cleaned up")

    async def main(loop: SimulatedLoop) -> asyncio.Task[None]:
        task = asyncio.create_task(lingering(loop))
        await asyncio.sleep(5)
        return task

    simulation = simulate(main)
    assert [event.event for event in simulation.trace] == ["cleaned up"]
    assert simulation.seconds == 5.0


def test_async_generators_are_closed_at_the_end() -> None:
    closed: list[bool] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append(True)

    async def main(loop: SimulatedLoop) -> AsyncIterator[int]:
        generator = numbers()
        await anext(generator)
        return generator

    simulate(main)
    assert closed == [True]


def test_the_loop_serves_asyncio_runner(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    with (
        caplog.at_level(logging.WARNING),
        asyncio.Runner(loop_factory=SimulatedLoop, debug=True) as runner,
    ):
        assert runner.run(main()) == 3600.0
        assert runner.run(main()) == 7200.0
    assert not caplog.records


def test_a_stopped_loop_stops_and_a_closed_one_refuses() -> None:
    loop = SimulatedLoop()
    loop.stop()
    loop.run_forever()
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)
