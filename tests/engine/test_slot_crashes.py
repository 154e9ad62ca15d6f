"""A crash between any two steps loses no wake and repeats none."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from engine.slot_stage import MIDNIGHT, MINUTE, Stage, World, play, slot
from headgate.core.slots.wakes import WakeMode
from headgate.storage.memory import MemoryDatabase
from headgate.testing import Host, HostCrashedError, SimulatedLoop

SIX = MIDNIGHT + 6 * 3_600.0
STEPS = 60
"""Beyond so many steps after its minute has begun, a wake is confirmed and all is quiet."""


async def crashing_life(
    loop: SimulatedLoop, world: World, *, lives_until: float, steps: int, again_after: float
) -> Stage:
    """Run a slot that crashes some steps after a moment, and once more for two retry windows."""
    database, host = MemoryDatabase(), Host(loop, "node")
    setup = slot(
        world,
        modes=[WakeMode.TIMES],
        wake_on_start=True,
        wake_times=("06:00",),
        poll_interval_minutes=240,
    )
    first = Stage(loop, world, [setup], database=database)
    life = host.spawn(first.live())
    await asyncio.sleep(lives_until - loop.clock())
    host.crash_after(steps)
    await asyncio.sleep(again_after)
    host.crash()
    with pytest.raises(HostCrashedError):
        await life
    second = Stage(loop, world, [setup], database=database)
    await second.start()
    await asyncio.sleep(34 * MINUTE)
    return second


@pytest.mark.parametrize(("latency_seconds", "again_after"), [(0.0, 0.5), (0.25, 125.0)])
def test_a_wake_that_is_due_is_sent_once_wherever_the_process_dies(
    latency_seconds: float, again_after: float
) -> None:
    async def main(loop: SimulatedLoop, world: World, steps: int) -> None:
        world.latency_seconds = latency_seconds
        # Whoever starts wakes a cold key, so the window of the start has to be over by six.
        world.window_seconds = 10 * MINUTE
        world.window("key-1").use()
        world.window("key-1").end()
        stage = await crashing_life(
            loop, world, lives_until=SIX - 0.1, steps=steps, again_after=again_after
        )
        window, schedule = world.window("key-1"), stage.row().schedule
        assert window.opened == 3
        assert schedule.last_times_marker == "2026-01-01 06:00"
        assert not schedule.wake_pending
        scheduled = [asked for asked in world.wakes if asked.at >= SIX]
        # A request that died with the process opened nothing, so it is sent once more.
        assert len(scheduled) - 1 <= (1 if latency_seconds else 0)

    for steps in range(STEPS):
        play(partial(main, steps=steps), start=SIX - 11 * MINUTE)


def test_a_start_wakes_a_cold_key_once_wherever_the_process_dies() -> None:
    async def main(loop: SimulatedLoop, world: World, steps: int) -> None:
        world.latency_seconds = 0.25
        stage = await crashing_life(
            loop, world, lives_until=loop.clock(), steps=steps, again_after=1.0
        )
        assert world.window("key-1").opened == 1
        assert not stage.row().schedule.wake_pending
        assert len(world.wakes) <= 2

    for steps in range(STEPS):
        play(partial(main, steps=steps))
