"""What goes wrong around slots costs them minutes, not hours, and no second wake."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
import pytest

from engine.slot_stage import MIDNIGHT, MINUTE, Stage, World, failure, play, slot
from headgate.core.slots.quota import QuotaLimit, QuotaReport
from headgate.core.slots.slot import Claim, Rows, SlotConfig, SlotRow
from headgate.core.slots.steps import begin
from headgate.core.slots.wakes import WakeMode
from headgate.engine.slots.slot import SlotSetup
from headgate.engine.supervisor import Pulse, Supervisor
from headgate.errors import InvalidSettingError
from headgate.storage.memory import MemoryDatabase
from headgate.storage.slot_rows import SlotStore
from headgate.storage.transaction import Transaction
from headgate.testing import Host, HostCrashedError, SimulatedLoop, simulate

INTERVAL, TIMES, AFTER_RESET = WakeMode.INTERVAL, WakeMode.TIMES, WakeMode.AFTER_RESET


def left_by_a_wrong_clock(
    rows: Rows, now: float, *, config: SlotConfig
) -> tuple[tuple[SlotRow, ...], None]:
    _, row = begin(rows, now, config=config, starts=True)
    claim = Claim(id="dead", until=now + 12 * 3_600 + 90)
    return (msgspec.structs.replace(row, poll_claim=claim),), None


def test_a_poll_claimed_before_the_clock_went_back_stops_no_reading() -> None:
    async def main(loop: SimulatedLoop, world: World) -> tuple[list[str], list[str]]:
        setup = slot(
            world,
            modes=[TIMES],
            wake_on_start=True,
            wake_times=("06:00",),
            poll_interval_minutes=60,
        )
        stage = Stage(loop, world, [setup])
        await stage.store.open()
        step = partial(left_by_a_wrong_clock, config=setup.config)
        await SlotStore(stage.store).step(("work",), step)
        await stage.start()
        await stage.until(1.1)
        return world.poll_times(), world.wake_times()

    assert play(main) == (["00:00", "00:00", "01:00"], ["00:00"])


def test_tasks_held_for_a_reset_go_on_soon_after_an_outage_that_began_with_it() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world)])
        limit = QuotaLimit(
            type="TOKENS_LIMIT", percentage=100, next_reset_epoch_ms=int(MIDNIGHT + 3_600) * 1_000
        )
        world.poll_script.extend([QuotaReport(limits=(limit,))] * 2)
        await stage.start()
        await stage.until(0.9)
        world.poll_script.extend([failure("server_error")] * 100)
        await stage.until(1 + 40 / 60)
        assert stage.row().schedule.consecutive_poll_errors == 1
        world.poll_script.clear()
        await stage.until(1 + 56 / 60)
        assert stage.status().standing.closure is None

    play(main)


def test_a_provider_that_stays_away_after_a_reset_is_asked_every_fifteen_minutes() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world)])
        limit = QuotaLimit(
            type="TOKENS_LIMIT", percentage=100, next_reset_epoch_ms=int(MIDNIGHT + 3_600) * 1_000
        )
        world.poll_script.extend([QuotaReport(limits=(limit,))] * 2)
        world.poll_script.extend([failure("server_error")] * 1_000)
        await stage.start()
        await stage.until(6)
        assert not stage.row().schedule.slot_auto_disabled
        assert len(world.polls) < 4 * 6 + 12
        assert stage.row().schedule.consecutive_poll_errors == 3

    play(main)


def test_looks_while_the_provider_is_ill_do_not_disable_the_slot() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world)])
        await stage.start()
        await stage.until(0.1)
        world.poll_script.extend([failure("server_error")] * 50)
        for _ in range(20):
            await asyncio.sleep(61)
            stage.slots.read_soon("work")
        await asyncio.sleep(1)
        assert len(world.polls) == 21
        assert stage.row().schedule.consecutive_poll_errors == 0
        assert "not counted" in world.lines
        await stage.until(0.6)
        assert stage.row().schedule.consecutive_poll_errors == 1

    play(main)


@pytest.mark.parametrize("down_seconds", [20 * MINUTE, 3 * 3_600.0])
def test_a_wake_that_opened_its_window_is_not_sent_again_after_a_long_crash(
    down_seconds: float,
) -> None:
    async def main(loop: SimulatedLoop, world: World, steps: int) -> None:
        world.latency_seconds = 0.25
        database, host = MemoryDatabase(), Host(loop, "node")
        setup = slot(world, modes=[AFTER_RESET])
        host.crash_after(steps)
        life = host.spawn(Stage(loop, world, [setup], database=database).live())
        await asyncio.sleep(down_seconds)
        host.crash()
        with pytest.raises(HostCrashedError):
            await life
        opened, sent = world.window("key-1").opened, len(world.wakes)
        second = Stage(loop, world, [setup], database=database)
        await second.start()
        await asyncio.sleep(10 * MINUTE)
        assert not second.row().schedule.wake_pending
        if opened:
            assert len(world.wakes) == sent

    for steps in range(20, 80, 2):
        play(partial(main, steps=steps))


def test_polls_do_not_slip_by_the_time_that_an_answer_takes() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[float]:
        world.latency_seconds = 5.0
        world.window("key-1").use()
        stage = Stage(loop, world, [slot(world)])
        await stage.start()
        await stage.until(9)
        return [asked.at - MIDNIGHT for asked in world.polls]

    assert play(main) == [1_800.0 * count for count in range(18)]


def test_a_wake_is_confirmed_by_a_poll_every_minute_however_long_one_takes() -> None:
    async def main(loop: SimulatedLoop, world: World) -> int:
        world.latency_seconds = 20.0
        world.opens_windows = False
        stage = Stage(
            loop, world, [slot(world, modes=[TIMES], wake_on_start=True, wake_times=("23:00",))]
        )
        await stage.start()
        await stage.until(0.25)
        assert len(world.wakes) == 1
        return len([asked for asked in world.polls if asked.at > world.wakes[0].at])

    assert play(main) == 15


def test_too_many_requests_without_a_time_holds_tasks_for_a_minute_first() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        stage = Stage(loop, world, [slot(world, poll_interval_minutes=1440)])
        world.poll_script.extend([failure("throttled")] * 4)
        await stage.start()
        await stage.until(0.5)
        assert stage.status().standing.closure is None
        return world.poll_times()

    assert play(main) == ["00:00", "00:01", "00:03", "00:07", "00:15"]


def lost_key(world: World, **fields: object) -> tuple[SlotSetup, dict[str, bool]]:
    there = {"is": True}

    def read_key() -> str:
        if not there["is"]:
            raise InvalidSettingError("slots.work.key_file", "cannot be read: No such file")
        return "key-1"

    return msgspec.structs.replace(slot(world, **fields), read_key=read_key), there  # type: ignore[arg-type]


def test_a_key_file_that_is_away_for_a_moment_costs_the_slot_a_minute() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        setup, there = lost_key(world)
        stage = Stage(loop, world, [setup])
        await stage.start()
        await stage.until(0.49)
        there["is"] = False
        await stage.until(0.505)
        hold = stage.status().standing.closure
        assert hold is not None
        assert hold.why.startswith("no key: slots.work.key_file")
        there["is"] = True
        await stage.until(0.52)
        assert stage.status().standing.closure is None
        assert not stage.row().schedule.slot_auto_disabled
        await stage.until(1.1)
        assert world.poll_times() == ["00:00", "00:31", "01:01"]

    play(main)


def test_a_key_that_stays_away_is_told_once_and_nothing_is_sent() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        setup, there = lost_key(world, modes=[INTERVAL])
        there["is"] = False
        stage = Stage(loop, world, [setup])
        held: list[bool] = []
        await stage.start()
        await asyncio.sleep(1)
        stage.slots.listen(lambda all_: held.append(all_[0].closure is not None))
        await stage.until(3)
        assert (world.polls, world.wakes) == ([], [])
        assert all(held)
        assert world.lines.count("slot work cannot have its key") == 1
        there["is"] = True
        await stage.until(3.1)
        assert world.lines.count("slot work has its key again") == 1
        assert len(world.wakes) == 1

    play(main)


def test_a_time_that_a_pause_outlasts_is_told_as_missed_once() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.window("key-1").use()
        setup = slot(world, modes=[TIMES], wake_on_start=True, wake_times=("06:00",))
        database = MemoryDatabase()
        stage = Stage(loop, world, [setup], database=database)
        running = await stage.start()
        await stage.until(5.99)
        world.poll_script.append(failure("throttled", retry_after_seconds=1_200.0))
        await stage.until(12)
        assert world.wakes == []
        line = "slot work wake missed: times mode (06:00) had no wake within 15 min"
        assert world.lines.count(line) == 1
        running.cancel()
        again = Stage(loop, world, [setup], database=database)
        await again.start()
        await again.until(13)
        assert world.lines.count("wake missed") == 1

    play(main)


def test_a_time_that_comes_due_in_a_pause_fires_when_the_pause_ends() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        world.window("key-1").use()
        stage = Stage(
            loop, world, [slot(world, modes=[TIMES], wake_on_start=True, wake_times=("06:00",))]
        )
        await stage.start()
        await stage.until(5.99)
        world.poll_script.append(failure("throttled", retry_after_seconds=600.0))
        await stage.until(12)
        assert "wake missed" not in world.lines
        return world.wake_times()

    assert play(main) == ["06:10"]


def test_a_time_is_served_without_a_pre_check_that_a_dead_node_keeps_from_being_made() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        database, host = MemoryDatabase(), Host(loop, "node")
        world.window("key-1").use()
        setup = slot(
            world, modes=[TIMES], wake_on_start=True, wake_times=("06:00",), wake_catch_up_minutes=0
        )
        first = Stage(loop, world, [setup], database=database)
        life = host.spawn(first.live())
        await asyncio.sleep(6 * 3_600 - 20)
        world.latency_seconds = 30.0
        first.slots.read_soon("work")
        await asyncio.sleep(5)
        host.crash()
        with pytest.raises(HostCrashedError):
            await life
        world.latency_seconds = 0.0
        second = Stage(loop, world, [setup], database=database)
        await second.start()
        await second.until(7)
        assert second.row().schedule.last_times_marker == "2026-01-01 06:00"
        return [time[:5] for time in world.wake_times()]

    assert play(main) in (["06:00"], ["06:01"])


def unreadable(transaction: Transaction, _now: float) -> None:
    sql = "INSERT INTO slots (name, version, changed_at, kept) VALUES (?, 1, 0, ?)"
    transaction.write(sql, ("bad", '{"schedule": {"wake_pending": "x"}}'))


def test_a_slot_whose_row_cannot_be_read_starts_from_nothing_and_says_so() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        setups = [slot(world, "good"), slot(world, "bad", key="key-2", modes=[AFTER_RESET])]
        stage = Stage(loop, world, setups)
        await stage.store.open()
        await stage.store.run(unreadable)
        await stage.start()
        await stage.until(0.1)
        assert {asked.key for asked in world.polls} == {"key-1", "key-2"}
        assert [asked.key for asked in world.wakes] == ["key-2"]
        assert world.lines.count("slot bad starts from nothing") == 1

    play(main)


@pytest.mark.parametrize("latency_seconds", [0.0, 0.3, 1.0, 3.0])
def test_slots_of_one_key_share_the_retry_of_a_wake(latency_seconds: float) -> None:
    async def main(loop: SimulatedLoop, world: World) -> int:
        world.opens_windows = False
        world.latency_seconds = latency_seconds
        world.window("key-1").use()
        setups = [
            slot(world, "a", modes=[TIMES], wake_on_start=True, wake_times=("01:00",)),
            slot(world, "b", modes=[TIMES], wake_on_start=True, wake_times=("01:01",)),
        ]
        stage = Stage(loop, world, setups)
        await stage.start()
        await stage.until(0.9)
        world.window("key-1").end()
        await stage.until(2)
        assert not stage.row("a").schedule.wake_pending
        assert not stage.row("b").schedule.wake_pending
        return len(world.wakes)

    assert play(main) == 2


def test_a_reading_of_the_store_that_never_ends_stops_no_slot_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = SlotStore.rows
    hangs = {"left": 0}

    async def rows(self: SlotStore, after: int = -1) -> tuple[SlotRow, ...]:
        if hangs["left"]:
            hangs["left"] -= 1
            await asyncio.get_running_loop().create_future()
        return await real(self, after)

    async def main(loop: SimulatedLoop, world: World) -> int:
        stage = Stage(loop, world, [slot(world, poll_interval_minutes=5)])
        await stage.start()
        await stage.until(0.2)
        before, hangs["left"] = len(world.polls), 1
        await stage.until(1.2)
        return len(world.polls) - before

    monkeypatch.setattr(SlotStore, "rows", rows)
    assert play(main) >= 11


def test_a_change_of_settings_during_an_outage_does_not_end_it() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(
            loop, world, [slot(world, modes=[TIMES], wake_on_start=True, wake_times=("06:00",))]
        )
        await stage.start()
        await stage.until(1.005)
        stage.breaks()
        stage.slots.reconfigure(
            [slot(world, modes=[TIMES], wake_on_start=True, wake_times=("07:00",))]
        )
        await stage.until(1.1)
        assert stage.status().wake_loop.problem == "the store is unavailable"
        assert "wake scheduler goes on" not in world.lines
        stage.mends()
        await stage.until(1.11)
        assert stage.status().wake_loop.problem == ""

    play(main)


def test_a_loop_that_does_not_hear_its_end_keeps_nobody_waiting() -> None:
    async def main(loop: SimulatedLoop) -> float:
        released = loop.create_future()
        supervisor = Supervisor()

        async def deaf() -> None:
            while not released.done():
                try:
                    await asyncio.shield(released)
                except asyncio.CancelledError:
                    continue

        supervisor.start("deaf", deaf, Pulse())
        await asyncio.sleep(1)
        await supervisor.stop(longest_seconds=10)
        took = loop.time() - 1
        released.set_result(None)
        await asyncio.sleep(1)
        return took

    assert simulate(main).result == 10


def test_a_clock_that_was_hours_ahead_does_not_silence_the_interval() -> None:
    async def main(loop: SimulatedLoop, world: World) -> float:
        world.window_seconds = 30 * MINUTE
        stage = Stage(loop, world, [slot(world, modes=[INTERVAL])])
        await stage.start()
        await stage.until(2)
        loop.clock.set_back(14 * 3_600.0)
        back_at, sent = loop.clock(), len(world.wakes)
        await asyncio.sleep(1.2 * 3_600)
        return world.wakes[sent].at - back_at

    assert play(main) <= 61 * MINUTE
