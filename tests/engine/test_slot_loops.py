"""The loops of slots: minutes without drift, and a watch that starts again what stands still."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from engine.slot_stage import MIDNIGHT, MINUTE, Stage, World, failure, play, slot
from headgate.core.slots.wakes import WakeMode
from headgate.engine.slots.loops import next_minute
from headgate.engine.slots.slot import Alarm
from headgate.engine.slots.slots import STUCK_SECONDS, WATCH_SECONDS
from headgate.engine.supervisor import Pulse, Supervisor
from headgate.storage.memory import MemoryDatabase
from headgate.testing import SimulatedLoop, simulate

TIMES, AFTER_RESET = WakeMode.TIMES, WakeMode.AFTER_RESET


@pytest.mark.parametrize(
    ("now", "expected"),
    [(0.0, 60.0), (0.1, 60.0), (59.999, 60.0), (60.0, 120.0), (MIDNIGHT + 61, MIDNIGHT + 120)],
)
def test_the_next_minute_is_that_of_the_wall_clock(now: float, expected: float) -> None:
    assert next_minute(now) == expected


def test_a_wake_loop_steps_at_the_beginning_of_minutes_however_long_a_step_takes() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.latency_seconds = 17.0
        setup = slot(
            world,
            modes=[TIMES],
            wake_on_start=True,
            wake_times=("00:03", "00:04"),
            poll_interval_minutes=1,
        )
        stage = Stage(loop, world, [setup])
        await stage.start()
        for minute in range(2, 20):
            await stage.until((minute + 0.999) / 60)
            step_at = stage.status().wake_loop.last_step_at
            assert step_at is not None
            assert step_at % MINUTE in (0.0, 17.0, 34.0, 51.0)

    play(main, start=MIDNIGHT + 7.7)


def test_a_minute_is_not_lost_when_a_slow_step_runs_past_it() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str | None]:
        # The pre-check and the wake of 06:00 take until after 06:01 has begun.
        world.latency_seconds = 40.0
        world.window("key-1").use()
        setup = slot(world, modes=[TIMES], wake_on_start=True, wake_times=("06:00", "06:01"))
        stage = Stage(loop, world, [setup])
        await stage.start()
        markers = []
        for minute in (0.9, 10):
            await stage.until(6 + minute / 60)
            markers.append(stage.row().schedule.last_times_marker)
        return markers

    assert play(main) == ["2026-01-01 06:00", "2026-01-01 06:01"]


def test_what_a_machine_slept_through_is_caught_up_at_once() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        stage = Stage(
            loop,
            world,
            [
                slot(
                    world,
                    modes=[TIMES],
                    wake_on_start=True,
                    wake_times=("06:00",),
                    poll_interval_minutes=600,
                )
            ],
        )
        await stage.start()
        await stage.until(5.5)
        # The wall goes on while the clock by which programs sleep stands still.
        loop.clock.set_back(-40 * MINUTE)
        await asyncio.sleep(WATCH_SECONDS + 1)
        return [time[:5] for time in world.wake_times()]

    assert play(main) == ["00:00", "06:10"]


def test_a_loop_that_stands_still_is_started_again_and_says_so() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world, modes=[AFTER_RESET])])
        world.hangs = True
        await stage.start()
        await asyncio.sleep(1)
        first = stage.slots.loops("work")
        await asyncio.sleep(STUCK_SECONDS - 2)
        assert stage.slots.loops("work") == first
        world.hangs = False
        await asyncio.sleep(WATCH_SECONDS + 100)
        health = stage.status().quota_loop
        assert health.restarts == 1
        assert stage.status().wake_loop.restarts == 0
        assert health.problem == ""
        assert "a loop is started again" in world.lines
        assert len(world.wakes) == 1
        assert not stage.row().schedule.wake_pending

    play(main)


def test_a_loop_that_fails_is_started_again_and_counted() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        setup = slot(world)
        stage = Stage(loop, world, [setup])
        await stage.start()
        await stage.until(0.1)
        is_broken = True

        def read_key() -> str:
            return str(1 // (not is_broken))

        broken = slot(world, poll_interval_minutes=2)
        stage.slots.reconfigure([msgspec.structs.replace(broken, read_key=read_key)])
        await asyncio.sleep(1)
        assert stage.status().quota_loop.restarts == 1
        assert "a loop failed and is started again" in world.lines
        is_broken = False
        polls = len(world.polls)
        await asyncio.sleep(600)
        assert stage.status().quota_loop.restarts == 1
        assert len(world.polls) >= polls + 4

    play(main)


def test_a_provider_that_raises_is_a_poll_that_failed() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        broken = slot(world, poll_interval_minutes=2, max_consecutive_errors=3)
        broken.provider.fails = True  # type: ignore[attr-defined]
        stage = Stage(loop, world, [broken])
        await stage.start()
        await asyncio.sleep(1)
        assert stage.row().schedule.consecutive_poll_errors == 1
        assert stage.row().poll_claim is None
        assert "ZeroDivisionError" in stage.row().schedule.last_problem
        assert "a provider failed" in world.lines
        await stage.until(1)
        assert stage.status().quota_loop.restarts == 0
        assert "ZeroDivisionError" in stage.row().schedule.disabled_reason

    play(main)


def test_a_loop_that_has_ended_is_started_again() -> None:
    async def main(loop: SimulatedLoop) -> tuple[int, int]:
        runs = 0

        async def ends() -> None:
            nonlocal runs
            runs += 1

        pulse, supervisor = Pulse(), Supervisor()
        supervisor.start("ends", ends, pulse)
        await asyncio.sleep(1)
        assert supervisor.restart_stuck(60) == ["ends"]
        await asyncio.sleep(1)
        await supervisor.stop()
        assert loop.time() == 2
        return runs, pulse.restarts

    assert simulate(main).result == (2, 1)


def test_a_loop_that_does_not_hear_that_it_is_cancelled_is_left_behind() -> None:
    async def main(loop: SimulatedLoop) -> int:
        released = loop.create_future()
        starts = 0
        pulse, supervisor = Pulse(), Supervisor()

        async def deaf() -> None:
            nonlocal starts
            starts += 1
            pulse.begin()
            while not released.done():
                try:
                    await asyncio.shield(released)
                except asyncio.CancelledError:
                    continue

        supervisor.start("deaf", deaf, pulse)
        await asyncio.sleep(61)
        assert supervisor.restart_stuck(60) == ["deaf"]
        await asyncio.sleep(1)
        released.set_result(None)
        await supervisor.stop()
        return starts

    assert simulate(main).result == 2


def test_a_slot_that_stays_disabled_says_so_at_the_next_start() -> None:
    async def main(loop: SimulatedLoop, world: World) -> int:
        database, setup = MemoryDatabase(), slot(world)
        world.poll_script.append(failure("refused", code=401))
        for _ in range(2):
            stage = Stage(loop, world, [setup], database=database)
            running = await stage.start()
            await asyncio.sleep(10)
            running.cancel()
        assert world.lines.count("slot work auto-disabled") == 1
        return world.lines.count("slot work is still disabled: the provider refused the key (401)")

    assert play(main) == 1


def test_an_idle_slot_asks_the_store_once_a_minute_for_all_slots() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        asked = 0
        setups = [slot(world, f"s{n}", key=f"k{n}", poll_interval_minutes=1440) for n in range(50)]
        stage = Stage(loop, world, setups)
        await stage.start()
        await stage.until(1)
        reader = stage.store.ask

        async def counting(question: object) -> object:
            nonlocal asked
            asked += 1
            return await reader(question)  # type: ignore[arg-type]

        stage.store.ask = counting  # type: ignore[method-assign, assignment]
        await stage.until(2)
        assert asked == 60

    play(main)


def test_an_alarm_rings_before_its_time_or_ends_by_it() -> None:
    async def main(loop: SimulatedLoop) -> list[float]:
        alarm, times = Alarm(), []
        await alarm.sleep(5)
        times.append(loop.time())
        loop.call_later(2, alarm.ring)
        await alarm.sleep(5)
        times.append(loop.time())
        alarm.ring()
        await alarm.sleep(5)
        times.append(loop.time())
        await alarm.sleep(-1)
        times.append(loop.time())
        return times

    assert simulate(main).result == [5.0, 7.0, 7.0, 7.0]
