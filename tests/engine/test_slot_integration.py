"""Slots as a whole: config reload, deduplication, error recovery, race conditions."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from engine.slot_stage import MIDNIGHT, MINUTE, Stage, World, failure, play, slot
from headgate.core.slots.wakes import WakeMode
from headgate.engine.slots.slot import SlotSetup
from headgate.storage.memory import MemoryDatabase
from headgate.testing import SimulatedLoop

INTERVAL, TIMES, AFTER_RESET = WakeMode.INTERVAL, WakeMode.TIMES, WakeMode.AFTER_RESET


class TestConfigReload:
    """Loops go on under a new configuration: nothing is started again."""

    def test_both_loops_pick_up_a_changed_configuration_without_a_restart(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            stage = Stage(loop, world, [slot(world, poll_interval_minutes=60)])
            await stage.start()
            await stage.until(1.5)
            before = stage.slots.loops("work")
            assert world.poll_times() == ["00:00", "01:00"]
            changed = slot(
                world,
                modes=[TIMES],
                wake_on_start=True,
                wake_times=("03:00",),
                poll_interval_minutes=30,
            )
            stage.slots.reconfigure([changed])
            await stage.until(3.1)
            assert stage.slots.loops("work") == before
            assert not any(task is None or task.done() for task in before)
            assert world.poll_times()[2:5] == ["01:30", "01:30", "02:00"]
            assert "slot work wake scheduler detected config change" in world.lines
            assert "slot work quota poller detected config change" in world.lines

        play(main)

    def test_a_time_added_by_a_reload_is_served_and_a_removed_one_is_not(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> list[str]:
            times: dict[str, Any] = {
                "modes": [TIMES],
                "wake_on_start": True,
                "poll_interval_minutes": 1440,
            }
            stage = Stage(loop, world, [slot(world, wake_times=("08:00",), **times)])
            await stage.start()
            await stage.until(6)
            stage.slots.reconfigure([slot(world, wake_times=("12:00",), **times)])
            await stage.until(13)
            return world.wake_times()

        assert play(main) == ["00:00", "12:00"]

    def test_the_first_mode_of_a_cold_slot_wakes_it_at_once(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> list[str]:
            stage = Stage(loop, world, [slot(world)])
            await stage.start()
            await stage.until(1)
            stage.slots.reconfigure([slot(world, modes=[AFTER_RESET])])
            await stage.until(2)
            return world.wake_times()

        assert play(main) == ["01:00"]

    def test_another_key_is_used_from_the_next_request_on(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> set[str]:
            stage = Stage(loop, world, [slot(world, key="old-key")])
            await stage.start()
            await stage.until(1.1)
            seen = len(world.polls)
            stage.slots.reconfigure([slot(world, key="new-key")])
            await stage.until(3)
            assert stage.row().schedule.next_reset_epoch_ms is None
            return {asked.key for asked in world.polls[seen:]}

        assert play(main) == {"new-key"}

    def test_new_slots_start_and_those_that_left_stop(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            one, two = slot(world, "one", key="k1"), slot(world, "two", key="k2")
            stage = Stage(loop, world, [one])
            standings: list[list[str]] = []
            stage.slots.listen(lambda all_: standings.append([each.name for each in all_]))
            await stage.start()
            await stage.until(0.1)
            stage.slots.reconfigure([two])
            await stage.until(1.15)
            assert Counter(asked.key for asked in world.polls) == {"k1": 1, "k2": 3}
            assert standings[-1] == ["two"]
            provider = one.provider
            await stage.until(1.2)
            assert getattr(provider, "is_closed", False)

        play(main)

    @pytest.mark.parametrize("revive", ["settings", "by hand"])
    def test_a_slot_that_was_disabled_comes_back(self, revive: str) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            stage = Stage(loop, world, [slot(world)])
            world.poll_script.append(failure("refused", code=401))
            await stage.start()
            await stage.until(5)
            assert stage.row().schedule.slot_auto_disabled
            if revive == "settings":
                stage.slots.reconfigure([slot(world, poll_interval_minutes=31)])
            else:
                await stage.slots.switch("work", is_on=True)
            await stage.until(5.1)
            assert not stage.row().schedule.slot_auto_disabled
            assert world.poll_times() == ["00:00", "05:00"]

        play(main)


class TestDeduplication:
    """Each trigger is served once, whoever looks and however often."""

    def test_a_trigger_is_served_once_however_often_its_minute_is_looked_at(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> list[str]:
            world.window("key-1").use()
            world.latency_seconds = 0.5
            stage = Stage(
                loop, world, [slot(world, modes=[TIMES], wake_on_start=True, wake_times=("06:00",))]
            )
            await stage.start()
            await stage.until(6 - 10 / 3_600)
            for _ in range(40):
                stage.slots.reconfigure([_again(stage)])
                await asyncio.sleep(1)
            await stage.until(7)
            return [time[:5] for time in world.wake_times()]

        assert play(main) == ["06:00"]

    def test_slots_of_one_key_that_are_due_together_send_one_wake(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            names = ("one", "two", "three")
            setups = [
                slot(world, name, modes=[TIMES], wake_on_start=True, wake_times=("06:00",))
                for name in names
            ]
            stage = Stage(loop, world, setups)
            await stage.start()
            await stage.until(7)
            assert world.wake_times() == ["00:00", "06:00"]
            for name in names:
                schedule = stage.row(name).schedule
                assert schedule.last_times_marker == "2026-01-01 06:00"
                assert not schedule.wake_pending
                assert schedule.last_confirmed_at is not None

        play(main)

    def test_slots_of_different_keys_are_woken_each(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> set[str]:
            setups = [
                slot(
                    world, name, key=name, modes=[TIMES], wake_on_start=True, wake_times=("06:00",)
                )
                for name in ("key-one", "key-two")
            ]
            stage = Stage(loop, world, setups)
            await stage.start()
            await stage.until(7)
            return {asked.key for asked in world.wakes if asked.at > MIDNIGHT + MINUTE}

        assert play(main) == {"key-one", "key-two"}

    def test_a_restart_repeats_no_wake_and_forgets_none(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> list[str]:
            database = MemoryDatabase()
            setup = slot(world, modes=[TIMES], wake_on_start=True, wake_times=("06:00", "12:00"))
            for leaves, returns in ((6.001, 6.01), (11.95, 12.1), (13, 13.1), (14, 14)):
                stage = Stage(loop, world, [setup], database=database)
                running = await stage.start()
                await stage.until(leaves)
                running.cancel()
                await stage.until(returns)
            return world.wake_times()

        assert play(main) == ["00:00", "06:00", "12:06"]


class TestErrorRecovery:
    """Backoff, auto-disable, recovery."""

    def test_a_slot_recovers_from_errors_and_returns_to_its_interval(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            stage = Stage(loop, world, [slot(world)])
            world.poll_script.extend([failure("timeout"), failure("server_error")])
            await stage.start()
            await stage.until(4.1)
            assert world.poll_times() == ["00:00", "01:00", "03:00", "03:30", "04:00"]
            assert (
                "slot work poll failed (1/10 consecutive): timeout: played timeout" in world.lines
            )
            assert "slot work backing off: next poll in 60 min" in world.lines
            assert "slot work recovered after 2 consecutive error(s)" in world.lines

        play(main)

    def test_a_slot_that_is_disabled_says_what_to_do_and_the_others_go_on(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            bad = slot(world, "bad", key="bad", max_consecutive_errors=1, poll_interval_minutes=1)
            stage = Stage(loop, world, [bad])
            world.poll_script.append(failure("garbage"))
            await stage.start()
            await stage.until(0.5)
            stage.slots.reconfigure([bad, slot(world, "good", key="good")])
            await stage.until(3.1)
            assert "run `headgate slot resume bad`" in world.lines
            assert Counter(asked.key for asked in world.polls) == {"bad": 1, "good": 6}

        play(main)

    def test_while_the_store_is_away_nothing_is_sent_and_it_is_told_once(self) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            setup = slot(
                world,
                modes=[TIMES],
                wake_on_start=True,
                wake_times=("06:00",),
                poll_interval_minutes=5,
            )
            stage = Stage(loop, world, [setup])
            await stage.start()
            await stage.until(5.95)
            sent = len(world.polls) + len(world.wakes)
            stage.breaks()
            await stage.until(6.1)
            assert len(world.polls) + len(world.wakes) == sent
            assert stage.status().wake_loop.problem == "the store is unavailable"
            stage.mends()
            await stage.until(7)
            assert world.wake_times() == ["00:00", "06:06"]
            for loop_name in ("wake scheduler", "quota poller"):
                line = f"slot work {loop_name} cannot reach the store"
                assert world.lines.count(line) == 1
                assert world.lines.count(f"slot work {loop_name} goes on") == 1
            assert stage.status().wake_loop.problem == ""

        play(main)


class TestRaceConditions:
    """Loops and nodes that share a row do not get in each other's way."""

    @pytest.mark.parametrize("seed", range(3))
    def test_several_nodes_on_the_same_rows_poll_and_wake_once(self, seed: int) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            database = MemoryDatabase()
            world.latency_seconds, world.window_seconds = 0.3, 20 * MINUTE
            setup = slot(world, modes=[TIMES, AFTER_RESET], wake_times=("01:10",))
            nodes = [
                Stage(loop, world, [setup], database=database, is_shared=True) for _ in range(3)
            ]
            for node in nodes:
                await node.start()
            await nodes[0].until(1.505)
            # A window that opened after its minute had begun ends after one has begun, too.
            expected = ["00:00", "00:22", "00:44", "01:06", "01:28"]
            assert [time[:5] for time in world.wake_times()] == expected
            assert len({node.row().version for node in nodes}) == 1
            polls = Counter(asked.action for asked in world.polls)
            assert polls["initial-quota-poll"] == 1
            assert polls["wake-precheck"] == len(expected)
            assert polls["background-quota-poll"] == len(expected)

        play(main, seed=seed)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_wake_by_hand_and_one_by_schedule_at_the_same_moment_are_one(self, seed: int) -> None:
        async def main(loop: SimulatedLoop, world: World) -> int:
            world.latency_seconds = 0.2
            stage = Stage(
                loop, world, [slot(world, modes=[TIMES], wake_on_start=True, wake_times=("06:00",))]
            )
            await stage.start()
            await stage.until(6)
            warming = [asyncio.ensure_future(stage.slots.warm("work")) for _ in range(3)]
            await asyncio.gather(*warming, return_exceptions=True)
            await stage.until(7)
            return len(world.wakes) - 1

        assert play(main, seed=seed) == 1

    @pytest.mark.parametrize("seed", range(4))
    def test_a_change_of_settings_in_the_middle_of_a_poll_is_not_lost(self, seed: int) -> None:
        async def main(loop: SimulatedLoop, world: World) -> None:
            world.latency_seconds = 5.0
            stage = Stage(loop, world, [slot(world, poll_interval_minutes=10)])
            await stage.start()
            await asyncio.sleep(2)
            stage.slots.reconfigure([slot(world, poll_interval_minutes=1)])
            await stage.until(1)
            assert len(world.polls) > 40
            assert stage.row().config == stage.status().config

        play(main, seed=seed)


def _again(stage: Stage) -> SlotSetup:
    """Return the setup that is in force, as another object."""
    config = stage.status().config
    return slot(stage.world, modes=config.wake.wake_modes, wake_times=config.wake.wake_times)
