"""The three wake modes: what is due, what has fired, and what is held; the configuration."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.slots.wake_examples import (
    BERLIN,
    HOUR,
    MINUTE,
    after_reset_config,
    berlin,
    fire,
    interval_config,
    times_config,
)
from headgate.core.slots.wakes import (
    SlotSchedule,
    WakeConfig,
    WakeMode,
    WakeTrigger,
    check_wake_config,
    mark_fired,
    next_wake_at,
    should_fire_wake,
)
from headgate.errors import InvalidSettingError

NOW = 1_771_177_000.0


def test_interval_mode() -> None:
    schedule = SlotSchedule(last_interval_fire=NOW - HOUR)
    trigger = should_fire_wake(interval_config(), schedule, NOW)
    assert trigger is not None
    assert trigger.mode is WakeMode.INTERVAL
    assert trigger.reason == "interval mode (60 min elapsed)"
    assert should_fire_wake(interval_config(), mark_fired(schedule, trigger, NOW), NOW) is None


@pytest.mark.parametrize(
    ("minutes", "elapsed_seconds", "fires"),
    [
        (60, 3599, False),
        (60, 3600, True),
        (60, 90_000, True),
        (1, 59, False),
        (1, 60, True),
        (1440, 86_399, False),
        (1440, 86_400, True),
    ],
)
def test_the_interval_has_to_elapse(minutes: int, elapsed_seconds: int, fires: bool) -> None:
    schedule = SlotSchedule(last_interval_fire=NOW - elapsed_seconds)
    assert (should_fire_wake(interval_config(minutes), schedule, NOW) is not None) is fires


def test_the_interval_of_a_slot_that_never_started_is_not_due() -> None:
    assert should_fire_wake(interval_config(), SlotSchedule(), NOW) is None


def test_a_jittering_loop_does_not_let_the_interval_slip() -> None:
    jitter = random.Random(7)
    schedule = SlotSchedule(last_interval_fire=0.0)
    fired_minutes = []
    for minute in range(1, 24 * 60 + 1):
        now = minute * MINUTE + jitter.uniform(0.0, 59.0)
        if should_fire_wake(interval_config(), schedule, now):
            fired_minutes.append(minute)
            schedule = fire(interval_config(), schedule, now)
    assert fired_minutes == [60 * hour for hour in range(1, 25)]


def test_a_late_interval_counts_from_its_late_wake() -> None:
    schedule = fire(interval_config(), SlotSchedule(last_interval_fire=0.0), 100 * MINUTE)
    assert should_fire_wake(interval_config(), schedule, 159 * MINUTE) is None
    assert should_fire_wake(interval_config(), schedule, 160 * MINUTE) is not None


def test_a_clock_set_back_an_hour_does_not_fire_the_interval() -> None:
    schedule = SlotSchedule(last_interval_fire=NOW)
    assert should_fire_wake(interval_config(), schedule, NOW - HOUR) is None


def test_an_interval_stored_under_a_clock_years_ahead_does_not_silence_the_slot() -> None:
    schedule = SlotSchedule(last_interval_fire=NOW + 1000 * 24 * HOUR)
    schedule = fire(interval_config(), schedule, NOW)
    assert should_fire_wake(interval_config(), schedule, NOW + 59 * MINUTE) is None
    assert should_fire_wake(interval_config(), schedule, NOW + 60 * MINUTE) is not None


def test_times_mode() -> None:
    now = berlin("2026-05-01T09:00:20")
    trigger = should_fire_wake(times_config("09:00", "14:30"), SlotSchedule(), now)
    assert trigger == WakeTrigger(
        mode=WakeMode.TIMES,
        marker="2026-05-01 09:00",
        due_at=berlin("2026-05-01T09:00"),
        reason="times mode (09:00)",
    )
    marked = mark_fired(SlotSchedule(), trigger, now)
    assert marked.last_times_marker == "2026-05-01 09:00"
    assert should_fire_wake(times_config("09:00", "14:30"), marked, now + 20) is None


def test_after_reset_mode() -> None:
    reset_ms = int((NOW - 5 * MINUTE) * 1000)
    schedule = SlotSchedule(next_reset_epoch_ms=reset_ms)
    trigger = should_fire_wake(after_reset_config(), schedule, NOW)
    assert trigger is not None
    assert trigger.mode is WakeMode.AFTER_RESET
    assert trigger.reason == "after_reset mode (1 min after reset)"
    marked = mark_fired(schedule, trigger, NOW)
    assert marked.last_reset_marker == reset_ms
    assert should_fire_wake(after_reset_config(), marked, NOW + HOUR) is None


@pytest.mark.parametrize(
    ("offset_minutes", "seconds_since_reset", "fires"),
    [
        (1, -1, False),
        (1, 59, False),
        (1, 60, True),
        (30, 1799, False),
        (30, 1800, True),
        (1, 40 * 24 * 3600, True),
    ],
)
def test_a_reset_fires_after_its_offset_however_late(
    offset_minutes: int, seconds_since_reset: int, fires: bool
) -> None:
    schedule = SlotSchedule(next_reset_epoch_ms=int((NOW - seconds_since_reset) * 1000))
    trigger = should_fire_wake(after_reset_config(offset_minutes), schedule, NOW)
    assert (trigger is not None) is fires


def test_without_an_observed_reset_there_is_nothing_to_fire_after() -> None:
    assert should_fire_wake(after_reset_config(), SlotSchedule(), NOW) is None


def test_the_next_reset_fires_again() -> None:
    schedule = fire(
        after_reset_config(), SlotSchedule(next_reset_epoch_ms=int(NOW * 1000)), NOW + MINUTE
    )
    later = msgspec.structs.replace(schedule, next_reset_epoch_ms=int((NOW + 5 * HOUR) * 1000))
    assert should_fire_wake(after_reset_config(), later, NOW + 5 * HOUR) is None
    assert should_fire_wake(after_reset_config(), later, NOW + 5 * HOUR + MINUTE) is not None


@pytest.mark.parametrize("told_again_ms", [1, 59_999, -1, -18_000_000])
def test_a_reset_that_is_told_again_a_little_differently_fires_once(told_again_ms: int) -> None:
    reset_ms = int(NOW * 1000)
    schedule = fire(after_reset_config(), SlotSchedule(next_reset_epoch_ms=reset_ms), NOW + MINUTE)
    again = msgspec.structs.replace(schedule, next_reset_epoch_ms=reset_ms + told_again_ms)
    assert should_fire_wake(after_reset_config(), again, NOW + HOUR) is None


def test_one_wake_serves_every_mode_that_is_due() -> None:
    now = berlin("2026-05-01T09:00")
    config = WakeConfig(wake_modes=frozenset(WakeMode), wake_times=("09:00",), zone=BERLIN)
    schedule = SlotSchedule(
        last_interval_fire=now - HOUR, next_reset_epoch_ms=int((now - HOUR) * 1000)
    )
    trigger = should_fire_wake(config, schedule, now)
    assert trigger is not None
    modes = [trigger.mode, *(other.mode for other in trigger.also_due)]
    assert modes == [WakeMode.INTERVAL, WakeMode.TIMES, WakeMode.AFTER_RESET]
    marked = mark_fired(schedule, trigger, now)
    assert marked.last_interval_fire == now
    assert marked.last_times_marker == "2026-05-01 09:00"
    assert marked.last_reset_marker == schedule.next_reset_epoch_ms
    assert should_fire_wake(config, marked, now) is None


def test_without_a_mode_nothing_fires() -> None:
    schedule = SlotSchedule(last_interval_fire=0.0, next_reset_epoch_ms=1)
    config = WakeConfig(wake_times=("09:00",), zone=BERLIN)
    assert should_fire_wake(config, schedule, berlin("2026-05-01T09:00")) is None
    assert next_wake_at(config, schedule, NOW) is None


@pytest.mark.parametrize(
    "held",
    [
        SlotSchedule(last_interval_fire=0.0, wake_pending=True),
        SlotSchedule(last_interval_fire=0.0, wake_auto_disabled=True),
        SlotSchedule(last_interval_fire=0.0, slot_auto_disabled=True),
        SlotSchedule(last_interval_fire=0.0, paused_until=NOW + 1),
    ],
)
def test_a_slot_that_is_not_free_fires_nothing(held: SlotSchedule) -> None:
    assert should_fire_wake(interval_config(), held, NOW) is None


def test_a_pause_ends_at_its_time() -> None:
    paused = SlotSchedule(last_interval_fire=0.0, paused_until=NOW)
    assert should_fire_wake(interval_config(), paused, NOW) is not None


def test_the_next_wake_is_the_earliest_of_all_modes() -> None:
    now = berlin("2026-05-01T08:30")
    config = WakeConfig(wake_modes=frozenset(WakeMode), wake_times=("09:00",), zone=BERLIN)
    table = [
        (now - 10 * MINUTE, now + 2 * HOUR, WakeMode.TIMES, berlin("2026-05-01T09:00")),
        (now - 45 * MINUTE, now + 2 * HOUR, WakeMode.INTERVAL, now + 15 * MINUTE),
        (now - 45 * MINUTE, now + 5 * MINUTE, WakeMode.AFTER_RESET, now + 6 * MINUTE),
        (now - 90 * MINUTE, now + 5 * MINUTE, WakeMode.INTERVAL, now - 30 * MINUTE),
    ]
    for last_fire, reset, mode, due_at in table:
        schedule = SlotSchedule(last_interval_fire=last_fire, next_reset_epoch_ms=int(reset * 1000))
        upcoming = next_wake_at(config, schedule, now)
        assert upcoming is not None
        assert (upcoming.mode, upcoming.due_at) == (mode, due_at)


def test_the_next_wake_of_a_served_time_is_tomorrows() -> None:
    now = berlin("2026-05-01T09:00:30")
    schedule = fire(times_config("09:00"), SlotSchedule(), now)
    upcoming = next_wake_at(times_config("09:00"), schedule, now)
    assert upcoming is not None
    assert upcoming.marker == "2026-05-02 09:00"
    assert upcoming.reason == "times mode (09:00)"


def test_disabled_wakes_have_no_next() -> None:
    schedule = SlotSchedule(last_interval_fire=NOW, wake_auto_disabled=True)
    assert next_wake_at(interval_config(), schedule, NOW) is None


@settings(deadline=None, max_examples=100)
@given(
    last_fire=st.floats(NOW - 2 * HOUR, NOW),
    reset_minutes=st.integers(-300, 300),
    served_minutes=st.integers(-2000, 0),
)
def test_nothing_fires_before_the_next_wake_and_something_at_it(
    last_fire: float, reset_minutes: int, served_minutes: int
) -> None:
    config = WakeConfig(wake_modes=frozenset(WakeMode), wake_times=("09:00", "18:30"))
    schedule = SlotSchedule(
        last_interval_fire=last_fire,
        next_reset_epoch_ms=int((NOW + reset_minutes * MINUTE) * 1000),
        times_served_until=NOW + served_minutes * MINUTE,
    )
    upcoming = next_wake_at(config, schedule, NOW)
    assert upcoming is not None
    fires_now = should_fire_wake(config, schedule, NOW) is not None
    assert fires_now == (upcoming.due_at <= NOW)
    if not fires_now:
        assert should_fire_wake(config, schedule, upcoming.due_at) is not None
        assert should_fire_wake(config, schedule, upcoming.due_at - 0.01) is None


def test_a_schedule_is_plain_json() -> None:
    now = berlin("2026-05-01T09:00")
    config = WakeConfig(wake_modes=frozenset(WakeMode), wake_times=("09:00",), zone=BERLIN)
    schedule = fire(config, SlotSchedule(last_interval_fire=0.0, next_reset_epoch_ms=1), now)
    assert msgspec.json.decode(msgspec.json.encode(schedule), type=SlotSchedule) == schedule


def test_the_defaults_are_valid() -> None:
    check_wake_config(WakeConfig())
    check_wake_config(times_config("00:00", "06:00", "12:00", "18:00", "23:59"))


@pytest.mark.parametrize(
    ("field", "bad_values"),
    [
        ("wake_interval_minutes", [0, 1441, -1, 1.5, True, "60", None]),
        ("wake_after_reset_minutes", [0, 1441]),
        ("poll_interval_minutes", [0, 1441]),
        ("wake_catch_up_minutes", [-1, 1441]),
        ("wake_quota_retry_window_minutes", [0, 1441]),
        ("max_consecutive_errors", [0]),
        ("quota_poll_backoff_cap_minutes", [0]),
        ("wake_times", [("9:00",), ("24:00",), ("09:00",) * 6]),
        ("wake_modes", [frozenset({"sometimes"})]),
        ("zone", ["Europe/Berlin", None]),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field: str, bad_values: list[object]) -> None:
    for value in bad_values:
        config = msgspec.structs.replace(WakeConfig(), **{field: value})
        with pytest.raises(InvalidSettingError) as caught:
            check_wake_config(config)
        assert caught.value.field == field


def test_the_times_mode_without_times_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="wake_times"):
        check_wake_config(times_config())
