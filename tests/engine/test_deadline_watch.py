"""Many deadlines on one timer of the loop."""

from __future__ import annotations

import asyncio

from headgate.engine.task_runner import DeadlineWatch
from headgate.testing import simulate
from headgate.testing.simulation import SimulatedLoop


def test_each_is_called_at_its_own_time_and_those_that_left_are_not() -> None:
    async def main(loop: SimulatedLoop) -> list[tuple[str, float]]:
        late: list[tuple[str, float]] = []
        watch: DeadlineWatch[str] = DeadlineWatch(
            loop.time, lambda key: late.append((key, loop.time()))
        )
        watch.watch("slow", 30.0)
        watch.watch("fast", 10.0)
        watch.watch("ended", 20.0)
        watch.watch("endless", None)
        watch.leave("ended")
        await asyncio.sleep(15)
        watch.watch("sooner", 16.0)
        watch.watch("past", 1.0)
        await asyncio.sleep(100)
        return late

    late = simulate(main).result
    assert late == [("fast", 10.0), ("past", 15.0), ("sooner", 16.0), ("slow", 30.0)]


def test_a_clock_that_runs_slower_than_the_loop_is_asked_again() -> None:
    async def main(loop: SimulatedLoop) -> float:
        late: list[float] = []
        watch: DeadlineWatch[str] = DeadlineWatch(
            lambda: loop.time() / 2, lambda _key: late.append(loop.time())
        )
        watch.watch("x", 10.0)
        await asyncio.sleep(100)
        return late[0]

    assert simulate(main).result >= 20.0
