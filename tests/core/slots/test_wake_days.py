"""The times mode over real days: catching up, clocks that change or are set back, restarts."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.slots.wake_examples import HOUR, MINUTE, berlin, fire, markers_fired, times_config
from headgate.core.slots.wakes import SlotSchedule, day_occurrences, mark_fired, should_fire_wake


@pytest.mark.parametrize(
    ("clock", "fires"),
    [
        ("2026-05-01T08:59:59", False),
        ("2026-05-01T09:00:00", True),
        ("2026-05-01T09:00:59", True),
        ("2026-05-01T09:01:30", True),
        ("2026-05-01T09:15:00", True),
        ("2026-05-01T09:15:01", False),
        ("2026-05-01T10:00:00", False),
    ],
)
def test_a_time_is_caught_up_within_its_window_and_not_later(clock: str, fires: bool) -> None:
    trigger = should_fire_wake(times_config("09:00"), SlotSchedule(), berlin(clock))
    assert (trigger is not None) is fires


@pytest.mark.parametrize(
    ("catch_up", "late_seconds", "fires"),
    [
        (0, 0, True),
        (0, 59, True),
        (0, 61, False),
        (1, 60, True),
        (60, 3600, True),
        (60, 3601, False),
    ],
)
def test_the_catch_up_window_is_configurable(catch_up: int, late_seconds: int, fires: bool) -> None:
    now = berlin("2026-05-01T09:00") + late_seconds
    trigger = should_fire_wake(times_config("09:00", catch_up=catch_up), SlotSchedule(), now)
    assert (trigger is not None) is fires


def test_a_time_before_midnight_is_caught_up_after_midnight() -> None:
    trigger = should_fire_wake(times_config("23:55"), SlotSchedule(), berlin("2026-05-02T00:05"))
    assert trigger is not None
    assert trigger.marker == "2026-05-01 23:55"
    assert trigger.reason == "times mode (23:55, 10 min late)"


def test_two_times_slept_through_are_served_by_one_wake() -> None:
    config = times_config("09:00", "09:10")
    schedule = fire(config, SlotSchedule(), berlin("2026-05-01T09:12"))
    assert schedule.last_times_marker == "2026-05-01 09:10"
    assert should_fire_wake(config, schedule, berlin("2026-05-01T09:13")) is None


def test_a_loop_of_sixty_seconds_and_its_work_loses_no_time() -> None:
    config = times_config("00:00", "09:00", "09:02", "14:30", "23:57")
    start = berlin("2026-05-01T00:00")
    moments = [start + step * 67.3 for step in range(int(10 * 24 * HOUR / 67.3))]
    fired = markers_fired(config, moments)
    assert len(fired) == len(set(fired)) == 50


def test_a_clock_set_back_does_not_fire_a_time_again() -> None:
    config = times_config("08:00", "09:00")
    schedule = fire(config, SlotSchedule(), berlin("2026-05-01T09:00"))
    for clock in ("2026-05-01T08:59", "2026-05-01T09:00", "2026-05-01T08:01", "2026-05-01T09:10"):
        assert should_fire_wake(config, schedule, berlin(clock)) is None
    assert should_fire_wake(config, schedule, berlin("2026-05-02T08:00")) is not None


def test_a_time_stored_under_a_clock_years_ahead_does_not_silence_the_slot() -> None:
    config = times_config("09:00")
    schedule = fire(config, SlotSchedule(), berlin("2036-05-01T09:00"))
    schedule = fire(config, schedule, berlin("2026-05-01T09:00"))
    assert schedule.last_times_marker == "2026-05-01 09:00"


def test_a_new_zone_does_not_hide_the_same_time_of_the_same_day() -> None:
    schedule = fire(times_config("09:00"), SlotSchedule(), berlin("2026-05-01T09:00"))
    moved = times_config("09:00", zone=ZoneInfo("America/New_York"))
    assert should_fire_wake(moved, schedule, berlin("2026-05-01T15:00")) is not None


def test_a_marker_alone_is_enough_to_hold_a_time_back() -> None:
    now = berlin("2026-05-01T09:05")
    for marker, fires in (("2026-05-01 09:00", False), ("2026-04-30 09:00", True)):
        schedule = SlotSchedule(last_times_marker=marker)
        assert (should_fire_wake(times_config("09:00"), schedule, now) is not None) is fires


@pytest.mark.parametrize(
    ("time", "clock", "fires"),
    [
        ("02:30", "2026-03-29T01:59:59", False),
        ("02:30", "2026-03-29T03:00:00", True),
        ("02:30", "2026-03-29T03:15:00", True),
        ("02:30", "2026-03-29T03:15:01", False),
    ],
)
def test_a_time_in_a_gap_fires_right_after_it(time: str, clock: str, fires: bool) -> None:
    assert (
        should_fire_wake(times_config(time), SlotSchedule(), berlin(clock)) is not None
    ) is fires


def test_a_time_in_a_gap_and_the_first_time_after_it_share_a_wake() -> None:
    config = times_config("02:30", "03:00")
    minutes = [berlin("2026-03-29T01:30") + step * MINUTE for step in range(60)]
    assert markers_fired(config, minutes) == ["2026-03-29 03:00"]


def test_a_time_shown_twice_fires_at_its_first_showing_only() -> None:
    config = times_config("02:30")
    first = berlin("2026-10-25T02:30")
    second = berlin("2026-10-25T02:30", fold=1)
    assert second - first == HOUR
    schedule = fire(config, SlotSchedule(), first)
    assert should_fire_wake(config, schedule, second) is None
    assert should_fire_wake(config, SlotSchedule(), second) is None


SUMMERS_AND_WINTERS = [
    ("Europe/Berlin", "2026-03-27"),
    ("Europe/Berlin", "2026-10-23"),
    ("America/New_York", "2026-03-06"),
    ("America/New_York", "2026-10-30"),
    ("Australia/Lord_Howe", "2026-04-03"),
    ("Australia/Lord_Howe", "2026-10-02"),
    ("Asia/Kolkata", "2026-03-27"),
    ("America/Havana", "2026-03-06"),
]


@pytest.mark.parametrize(("zone_name", "first_day"), SUMMERS_AND_WINTERS)
def test_each_time_fires_once_a_day_across_a_change_of_clocks(
    zone_name: str, first_day: str
) -> None:
    zone = ZoneInfo(zone_name)
    times = ("00:00", "01:45", "02:20", "09:00", "23:59")
    start_day = date.fromisoformat(first_day)
    start = datetime(start_day.year, start_day.month, start_day.day, tzinfo=zone).timestamp()
    days = [start_day + timedelta(days=step) for step in range(4)]
    expected = [
        occurrence.marker for day in days for occurrence in day_occurrences(day, times, zone)
    ]
    minutes = [start + step * MINUTE + 0.4 for step in range(4 * 24 * 60 + 120)]
    fired = markers_fired(times_config(*times, zone=zone), minutes)
    assert fired[: len(expected)] == expected


@pytest.mark.parametrize("zone_name", ["Europe/Berlin", "Australia/Lord_Howe"])
def test_a_year_of_minutes_fires_each_time_once_a_local_day(zone_name: str) -> None:
    zone = ZoneInfo(zone_name)
    config = times_config("02:15", "09:00", zone=zone)
    new_year = datetime(2026, 1, 1, tzinfo=zone).timestamp()
    # Three minutes a step: well inside the catch-up window, and a third of the time.
    fired = markers_fired(config, [new_year + step * 180.0 for step in range(365 * 480)])
    days = [(date(2026, 1, 1) + timedelta(days=step)).isoformat() for step in range(365)]
    assert fired == [f"{day} {time}" for day in days for time in ("02:15", "09:00")]


@settings(deadline=None, max_examples=60)
@given(
    zone=st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"]),
    start_day=st.dates(date(2026, 1, 1), date(2026, 12, 20)),
    times=st.lists(
        st.builds("{:02}:{:02}".format, st.integers(0, 23), st.integers(0, 59)),
        min_size=1,
        max_size=5,
        unique=True,
    ),
    steps_seconds=st.lists(
        st.one_of(st.integers(30, 90), st.integers(300, 1800), st.just(14 * 3600)),
        min_size=50,
        max_size=200,
    ),
    restart_every=st.integers(1, 20),
)
def test_sleeps_and_restarts_neither_repeat_nor_lose_a_time(
    zone: str, start_day: date, times: list[str], steps_seconds: list[int], restart_every: int
) -> None:
    config = times_config(*times, zone=ZoneInfo(zone))
    now = datetime(start_day.year, start_day.month, start_day.day, tzinfo=UTC).timestamp()
    schedule = SlotSchedule(times_served_until=now)
    served_until = now
    for count, step in enumerate(steps_seconds):
        now += step
        if count % restart_every == 0:
            schedule = msgspec.json.decode(msgspec.json.encode(schedule), type=SlotSchedule)
        trigger = should_fire_wake(config, schedule, now)
        wanted = [
            occurrence
            for days_back in (2, 1, 0, -1)
            for occurrence in day_occurrences(
                datetime.fromtimestamp(now, config.zone).date() - timedelta(days=days_back),
                config.wake_times,
                config.zone,
            )
            if served_until < occurrence.at <= now and now - occurrence.at <= 15 * MINUTE
        ]
        assert (trigger is not None) == bool(wanted)
        if trigger is not None:
            assert trigger.marker == wanted[-1].marker
            served_until = wanted[-1].at
            schedule = mark_fired(schedule, trigger, now)
