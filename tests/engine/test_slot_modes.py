"""Wakes from end to end: each mode, its pre-check, its confirmation and its limits."""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

import pytest

from engine.slot_stage import MIDNIGHT, MINUTE, Stage, World, failure, play, slot
from headgate.core.slots.quota import QuotaLimit, QuotaReport, WakeAnswer
from headgate.core.slots.wakes import WakeMode
from headgate.testing import SimulatedLoop

INTERVAL, TIMES, AFTER_RESET = WakeMode.INTERVAL, WakeMode.TIMES, WakeMode.AFTER_RESET

AT_START = "00:00:20"
MODES: list[tuple[str, tuple[WakeMode, ...], dict[str, Any], list[str]]] = [
    ("none", (), {}, []),
    # With an interval or after a reset the first wake is that of the start; times are only times.
    ("interval", (INTERVAL,), {"wake_interval_minutes": 360}, [AT_START, "06:00", "12:00"]),
    ("times", (TIMES,), {"wake_times": ("06:30", "13:00")}, ["06:30", "13:00"]),
    (
        "times and a start",
        (TIMES,),
        {"wake_times": ("06:30", "13:00"), "wake_on_start": True},
        [AT_START, "06:30", "13:00"],
    ),
    (
        "interval without a start",
        (INTERVAL,),
        {"wake_interval_minutes": 360, "wake_on_start": False},
        ["06:00", "12:00"],
    ),
    ("after_reset", (AFTER_RESET,), {}, [AT_START, "05:02", "10:03"]),
    ("later", (AFTER_RESET,), {"wake_after_reset_minutes": 30}, [AT_START, "05:31", "11:01"]),
    ("all", tuple(WakeMode), {"wake_times": ("13:00",)}, [AT_START, "05:02", "10:03"]),
]


@pytest.mark.parametrize(
    ("name", "modes", "wake", "expected"), MODES, ids=[row[0] for row in MODES]
)
def test_a_mode_wakes_at_its_minutes(
    name: str, modes: tuple[WakeMode, ...], wake: dict[str, Any], expected: list[str]
) -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        stage = Stage(loop, world, [slot(world, modes=modes, **wake)])
        await stage.start()
        await stage.until(14)
        return world.wake_times()

    assert play(main, start=MIDNIGHT + 20) == expected


def test_times_are_those_of_the_zone_of_the_slot() -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        zone = ZoneInfo("America/New_York")
        stage = Stage(loop, world, [slot(world, modes=[TIMES], wake_times=("09:00",), zone=zone)])
        world.window("key-1").use()
        await stage.start()
        await stage.until(40)
        return world.wake_times()

    assert play(main) == ["14:00", "38:00"]


def test_a_wake_that_is_not_needed_is_not_sent_and_counts_as_served() -> None:
    async def main(
        loop: SimulatedLoop, world: World
    ) -> tuple[list[str], str | None, dict[str, int]]:
        stage = Stage(loop, world, [slot(world, modes=[TIMES], wake_times=("02:00",))])
        world.window("key-1").use()
        await stage.start()
        await stage.until(4)
        status = stage.status()
        return world.wake_times(), status.row.schedule.last_times_marker, status.wakes

    assert play(main) == ([], "2026-01-01 02:00", {"skipped": 1})


@pytest.mark.parametrize("kind", ["timeout", "unreachable", "server_error", "garbage"])
def test_a_pre_check_that_fails_does_not_keep_a_wake_from_being_sent(kind: str) -> None:
    async def main(loop: SimulatedLoop, world: World) -> list[str]:
        stage = Stage(
            loop,
            world,
            [slot(world, modes=[TIMES], wake_times=("06:00",), poll_interval_minutes=1440)],
        )
        await stage.start()
        await stage.until(5.99)
        world.poll_script.append(failure(kind))
        await stage.until(7)
        return world.wake_times()

    assert play(main) == ["06:00"]


def test_nothing_is_sent_at_a_start_without_a_mode_or_with_an_open_window() -> None:
    async def main(loop: SimulatedLoop, world: World) -> int:
        world.window("warm").use()
        setups = [
            slot(world, "no-mode", key="cold"),
            slot(world, "open", key="warm", modes=[INTERVAL]),
        ]
        stage = Stage(loop, world, setups)
        await stage.start()
        await stage.until(0.9)
        return len(world.wakes)

    assert play(main) == 0


def test_a_wake_is_confirmed_by_the_poll_that_follows_at_once() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world, modes=[AFTER_RESET])])
        await stage.start()
        await stage.until(0.1)
        schedule = stage.row().schedule
        assert not schedule.wake_pending
        assert schedule.last_confirmed_at == MIDNIGHT
        assert [asked.action for asked in world.polls] == [
            "initial-quota-poll",
            "background-quota-poll",
        ]
        assert "quota-poller.wake-confirmed" in stage.log.actions()

    play(main)


def test_the_poll_that_confirms_waits_for_the_answer_of_the_wake() -> None:
    async def main(loop: SimulatedLoop, world: World) -> tuple[list[str], int]:
        world.latency_seconds = 4.0
        stage = Stage(loop, world, [slot(world, modes=[AFTER_RESET])])
        await stage.start()
        await stage.until(0.1)
        return world.poll_times(), stage.row().schedule.wake_errors

    assert play(main) == (["00:00", "00:00:08"], 0)


def test_an_unconfirmed_wake_is_polled_every_minute_sent_once_more_and_given_up() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.opens_windows = False
        setup = slot(world, modes=[TIMES], wake_times=("00:05",), max_consecutive_errors=100)
        stage = Stage(loop, world, [setup])
        await stage.start()
        await stage.until(0.3)
        assert len(world.polls) >= 12
        assert stage.row().schedule.wake_pending
        await stage.until(2)
        assert world.wake_times() == ["00:05", "00:20"]
        assert world.wakes[-1].action == "forced-wake-retry"
        assert not stage.row().schedule.wake_pending
        assert not stage.row().schedule.wake_auto_disabled

    play(main)


def test_wakes_are_disabled_at_the_limit_of_errors_and_polls_go_on() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.opens_windows = False
        stage = Stage(loop, world, [slot(world, modes=[INTERVAL])])
        await stage.start()
        await stage.until(0.4)
        assert not stage.row().schedule.wake_auto_disabled
        await stage.until(6)
        assert stage.row().schedule.wake_auto_disabled
        assert world.wake_times() == ["00:00", "00:15"]
        assert world.poll_times()[-1] > "05:30"
        assert stage.status().standing.closure is None

    play(main)


def test_polls_back_off_while_they_fail_and_then_the_slot_is_disabled() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world, max_consecutive_errors=4)])
        world.poll_script.extend(failure("unreachable") for _ in range(9))
        await stage.start()
        await stage.until(48)
        assert world.poll_times() == ["00:00", "01:00", "03:00", "07:00"]
        hold = stage.status().standing.closure
        assert hold is not None
        assert "4 polls failed in a row" in hold.why

    play(main)


def test_a_refused_key_stops_at_once_and_says_so() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world, modes=[INTERVAL])])
        world.poll_script.append(failure("refused", code=401))
        await stage.start()
        await stage.until(30)
        assert (len(world.polls), len(world.wakes)) == (1, 0)
        assert stage.row().schedule.disabled_reason == "the provider refused the key (401)"

    play(main)


def test_a_key_that_cannot_be_read_holds_the_slot_and_nothing_is_sent() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world, key=None, modes=[INTERVAL])])
        await stage.start()
        await stage.until(3)
        assert (world.polls, world.wakes) == ([], [])
        hold = stage.status().standing.closure
        assert hold is not None
        assert "the variable KEY is not set" in hold.why

    play(main)


def test_too_many_requests_waits_as_long_as_it_says() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world)])
        world.poll_script.append(failure("throttled", code=429, retry_after_seconds=7_200.0))
        await stage.start()
        await stage.until(1)
        hold = stage.status().standing.closure
        assert hold is not None
        assert hold.until == MIDNIGHT + 7_200
        await stage.until(2.1)
        assert world.poll_times() == ["00:00", "02:00"]
        assert stage.status().standing.closure is None

    play(main)


def test_an_exhausted_slot_is_freed_by_the_first_poll_after_its_reset() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        stage = Stage(loop, world, [slot(world, poll_interval_minutes=240)])
        told: list[tuple[float, bool]] = []
        stage.slots.listen(lambda all_: told.append((loop.time(), all_[0].closure is not None)))
        reset = MIDNIGHT + 3_600.0
        limit = QuotaLimit(
            type="TOKENS_LIMIT", percentage=100, next_reset_epoch_ms=int(reset * 1000)
        )
        world.poll_script.append(QuotaReport(limits=(limit,)))
        await stage.start()
        await stage.until(2)
        assert (0.0, True) in told
        assert told[-1] == (3_602.0, False)

    play(main)


def test_a_refused_wake_stops_the_slot() -> None:
    async def main(loop: SimulatedLoop, world: World) -> None:
        world.wake_script.append(WakeAnswer(failure=failure("refused", code=403)))
        stage = Stage(loop, world, [slot(world, modes=[INTERVAL])])
        await stage.start()
        await stage.until(4)
        assert len(world.wakes) == 1
        assert stage.row().schedule.slot_auto_disabled

    play(main)


def test_a_slot_that_is_not_to_be_logged_writes_nothing() -> None:
    async def main(loop: SimulatedLoop, world: World) -> int:
        stage = Stage(loop, world, [slot(world, modes=[AFTER_RESET], is_logging=False)])
        await stage.start()
        await stage.until(6)
        assert len(world.wakes) == 2
        return len(stage.log.lines)

    assert play(main) == 0


def test_days_of_wakes_through_a_change_of_the_clock_are_each_sent_once() -> None:
    """In Berlin 02:30 does not exist on 29 March 2026, and happens at 03:00."""

    async def main(loop: SimulatedLoop, world: World) -> list[float]:
        berlin = ZoneInfo("Europe/Berlin")
        setup = slot(world, modes=[TIMES], wake_times=("02:30",), zone=berlin)
        stage = Stage(loop, world, [setup])
        await stage.start()
        await stage.until((86 + 3) * 24)
        return [asked.at for asked in world.wakes if asked.at > start + MINUTE]

    start = MIDNIGHT + 86 * 86_400.0
    assert play(main, start=start) == [
        MIDNIGHT + 86 * 86_400 + 5_400,
        MIDNIGHT + 87 * 86_400 + 3_600,
        MIDNIGHT + 88 * 86_400 + 1_800,
    ]
