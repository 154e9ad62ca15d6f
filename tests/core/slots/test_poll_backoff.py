"""When the quota is read next: the interval, the backoff, the pending wake, the pause."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.slots.polling import (
    next_poll_at,
    poll_delay_minutes,
    poll_failed,
    poll_succeeded,
    slot_throttled,
)
from headgate.core.slots.slot import SlotReading
from headgate.core.slots.wakes import MAX_PAUSE_SECONDS, SlotSchedule, WakeConfig

NOW = 1_771_177_000.0
MINUTE = 60.0


@pytest.mark.parametrize(
    ("interval", "cap", "errors", "minutes"),
    [
        (30, 480, 0, 30),
        (30, 480, 1, 60),
        (30, 480, 2, 120),
        (30, 480, 3, 240),
        (30, 480, 4, 480),
        (30, 480, 5, 480),
        (30, 480, 9, 480),
        (30, 100, 1, 60),
        (30, 100, 2, 100),
        (30, 10, 0, 30),
        (30, 10, 4, 30),
        (1, 480, 4, 16),
        (1, 480, 100, 16),
        (1440, 480, 0, 1440),
        (1440, 480, 3, 1440),
        (60, 10_080, 4, 960),
    ],
)
def test_errors_double_the_interval_up_to_the_cap(
    interval: int, cap: int, errors: int, minutes: int
) -> None:
    config = WakeConfig(poll_interval_minutes=interval, quota_poll_backoff_cap_minutes=cap)
    assert poll_delay_minutes(config, errors) == minutes


@settings(deadline=None, max_examples=200)
@given(interval=st.integers(1, 1440), cap=st.integers(1, 10_080), errors=st.integers(0, 50))
def test_more_errors_never_shorten_the_wait(interval: int, cap: int, errors: int) -> None:
    config = WakeConfig(poll_interval_minutes=interval, quota_poll_backoff_cap_minutes=cap)
    wait = poll_delay_minutes(config, errors)
    assert interval <= wait <= poll_delay_minutes(config, errors + 1) <= max(cap, interval)


@pytest.mark.parametrize(
    ("schedule", "wait_seconds"),
    [
        (SlotSchedule(), 0),
        (SlotSchedule(last_poll_at=NOW), 1800),
        (SlotSchedule(last_poll_at=NOW - 1000), 800),
        (SlotSchedule(last_poll_at=NOW - 9000), 0),
        (SlotSchedule(last_poll_at=NOW, consecutive_poll_errors=2), 7200),
        (SlotSchedule(last_poll_at=NOW, poll_requested=True), 0),
        (SlotSchedule(last_poll_at=NOW, wake_pending=True), 60),
        (SlotSchedule(last_poll_at=NOW, wake_pending=True, consecutive_poll_errors=4), 60),
        (SlotSchedule(last_poll_at=NOW, wake_pending=True, poll_requested=True), 0),
        (SlotSchedule(last_poll_at=NOW, paused_until=NOW + 5000), 5000),
        (SlotSchedule(last_poll_at=NOW, paused_until=NOW + 50), 1800),
        (SlotSchedule(last_poll_at=NOW, wake_pending=True, paused_until=NOW + 5000), 5000),
        (SlotSchedule(poll_requested=True, paused_until=NOW + 5000), 5000),
        (SlotSchedule(last_poll_at=NOW + 86_400), 0),
    ],
)
def test_the_next_poll(schedule: SlotSchedule, wait_seconds: float) -> None:
    assert next_poll_at(WakeConfig(), schedule, NOW) == NOW + wait_seconds


def test_a_disabled_slot_is_not_polled() -> None:
    schedule = SlotSchedule(slot_auto_disabled=True, poll_requested=True)
    assert next_poll_at(WakeConfig(), schedule, NOW) is None


def test_disabled_wakes_do_not_stop_polls() -> None:
    schedule = SlotSchedule(wake_auto_disabled=True, last_poll_at=NOW)
    assert next_poll_at(WakeConfig(), schedule, NOW) == NOW + 30 * MINUTE


def test_the_slot_is_disabled_at_the_limit_of_errors_and_not_before() -> None:
    config = WakeConfig(max_consecutive_errors=3)
    schedule = SlotSchedule()
    disabled = []
    for hours in range(3):
        schedule = poll_failed(config, schedule, NOW + hours * 3 * 3600, "timeout")
        disabled.append(schedule.slot_auto_disabled)
    assert disabled == [False, False, True]
    assert schedule.disabled_reason == "3 polls failed in a row, the last: timeout"


def test_a_good_reading_forgets_the_errors() -> None:
    schedule = SlotSchedule(consecutive_poll_errors=9, poll_requested=True)
    recovered = poll_succeeded(schedule, NOW)
    assert recovered.consecutive_poll_errors == 0
    assert next_poll_at(WakeConfig(), recovered, NOW) == NOW + 30 * MINUTE
    assert not poll_failed(WakeConfig(), recovered, NOW, "timeout").slot_auto_disabled


def test_failures_while_a_wake_is_pending_do_not_count() -> None:
    schedule = SlotSchedule(wake_pending=True, consecutive_poll_errors=2, poll_requested=True)
    for minute in range(30):
        schedule = poll_failed(WakeConfig(), schedule, NOW + minute * MINUTE, "timeout")
    assert schedule.consecutive_poll_errors == 2
    assert not schedule.slot_auto_disabled
    assert next_poll_at(WakeConfig(), schedule, NOW + 29 * MINUTE) == NOW + 30 * MINUTE


@pytest.mark.parametrize(
    ("retry_after", "is_pending", "wait"),
    [
        (None, False, 60),
        (None, True, 60),
        (0, False, 60),
        (0, True, 60),
        (-5, False, 60),
        (float("nan"), False, 60),
        (0.2, False, 1),
        (1, False, 1),
        (59, False, 59),
        (59, True, 59),
        (61, True, 61),
        (9e5, False, 9e5),
        (1e12, False, MAX_PAUSE_SECONDS),
        (float("inf"), False, MAX_PAUSE_SECONDS),
    ],
)
def test_too_many_requests_waits_as_long_as_it_says(
    retry_after: float | None, is_pending: bool, wait: float
) -> None:
    polled = SlotSchedule(last_poll_at=NOW, wake_pending=is_pending)
    throttled = slot_throttled(WakeConfig(), polled, NOW, retry_after)
    assert next_poll_at(WakeConfig(), throttled, NOW) == NOW + wait
    assert next_poll_at(WakeConfig(), throttled, NOW + wait) == NOW + wait
    assert throttled.consecutive_poll_errors == 0


def test_a_provider_that_says_no_time_is_asked_after_a_minute_and_then_less_often() -> None:
    config, schedule, now = WakeConfig(), SlotSchedule(), NOW
    waits = []
    for _ in range(7):
        schedule = slot_throttled(config, schedule, now, None)
        due = next_poll_at(config, schedule, now)
        assert due is not None
        waits.append((due - now) / MINUTE)
        now = due
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_a_poll_out_of_turn_that_fails_neither_counts_nor_moves_the_next() -> None:
    config = WakeConfig()
    schedule = poll_failed(config, poll_succeeded(SlotSchedule(), NOW), NOW + 60, "timeout")
    assert schedule.consecutive_poll_errors == 0
    assert next_poll_at(config, schedule, NOW + 60) == NOW + 30 * MINUTE
    schedule = poll_failed(config, schedule, NOW + 30 * MINUTE, "timeout")
    assert schedule.consecutive_poll_errors == 1
    schedule = poll_failed(config, schedule, NOW + 80 * MINUTE, "timeout")
    assert schedule.consecutive_poll_errors == 1
    assert next_poll_at(config, schedule, NOW + 80 * MINUTE) == NOW + 90 * MINUTE


@settings(deadline=None, max_examples=200)
@given(steps=st.lists(st.tuples(st.booleans(), st.floats(0.0, 4_000.0)), max_size=60))
def test_however_often_a_slot_is_asked_errors_come_no_faster_than_the_backoff(
    steps: list[tuple[bool, float]],
) -> None:
    config, schedule, now = WakeConfig(), SlotSchedule(), NOW
    regular, counted = SlotSchedule(), 0
    for waits_for_turn, seconds in steps:
        due = next_poll_at(config, schedule, now)
        if due is None:
            break
        now = due if waits_for_turn else now + seconds
        schedule = poll_failed(config, schedule, now, "timeout")
        after = next_poll_at(config, schedule, now)
        assert after is None or after > now
    at = NOW
    while at <= now and (due := next_poll_at(config, regular, at)) is not None and due <= now:
        at, counted = due, counted + 1
        regular = poll_failed(config, regular, at, "timeout")
    assert schedule.consecutive_poll_errors <= counted


def test_a_provider_that_always_says_one_second_is_asked_less_and_less_often() -> None:
    config, schedule, now = WakeConfig(), SlotSchedule(), NOW
    waits = []
    for _ in range(14):
        schedule = slot_throttled(config, schedule, now, 1)
        due = next_poll_at(config, schedule, now)
        assert due is not None
        waits.append(due - now)
        now = due
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1800, 1800, 1800]
    assert slot_throttled(config, poll_succeeded(schedule, now), now, 1).paused_until == now + 1


def test_a_pause_stored_under_a_clock_years_ahead_does_not_silence_the_slot() -> None:
    schedule = SlotSchedule(last_poll_at=NOW - 9000, paused_until=NOW + 400 * 86_400)
    assert next_poll_at(WakeConfig(), schedule, NOW) == NOW


def exhausted(resets_in: float | None) -> SlotReading:
    resets_at = None if resets_in is None else NOW + resets_in
    return SlotReading(read_at=NOW, percent_used=100, resets_at=resets_at, is_exhausted=True)


@pytest.mark.parametrize(
    ("resets_in", "last", "errors", "wait"),
    [
        (None, 0, 0, 1800),
        (9000, 0, 0, 1800),
        (600, 0, 0, 602),
        (600, 0, 4, 602),
        (600, 0, 9, 602),
        (0.5, 0, 0, 2.5),
        (-2, 0, 0, 60),
        (-62, 0, 0, 60),
        (-122, 0, 0, 120),
        (-602, 0, 0, 600),
        (-902, 0, 0, 900),
        (-2, 0, 1, 60),
        (-2, 0, 9, 60),
        (-9000, 0, 0, 900),
        (-9000, 0, 9, 900),
        (600, 601, 0, 602),
    ],
)
def test_an_exhausted_slot_is_read_right_after_its_reset(
    resets_in: float | None, last: float, errors: int, wait: float
) -> None:
    now = NOW + last
    schedule = SlotSchedule(last_poll_at=now, consecutive_poll_errors=errors)
    due = next_poll_at(WakeConfig(), schedule, now, reading=exhausted(resets_in))
    assert due == NOW + wait


def test_a_provider_that_is_away_at_a_reset_is_asked_on_and_disabled_no_sooner() -> None:
    config, schedule, now = WakeConfig(), SlotSchedule(last_poll_at=NOW), NOW
    waits = []
    while (due := next_poll_at(config, schedule, now, reading=exhausted(60))) is not None:
        waits.append(due - now)
        now = due
        schedule = poll_failed(config, schedule, now, "connection refused")
    assert waits[:7] == [62, 60, 60, 120, 240, 480, 778]
    assert max(waits) == 900
    assert now - NOW > 24 * 3600


def warm(resets_in: float | None) -> SlotReading:
    resets_at = None if resets_in is None else NOW + resets_in
    return SlotReading(read_at=NOW, percent_used=7, resets_at=resets_at)


@pytest.mark.parametrize(
    ("resets_in", "unchanged", "wait"),
    [
        (None, 0, 1800),
        (None, 1, 3600),
        (None, 3, 7200),
        (None, 9, 7200),
        (18_000, 0, 1800),
        (18_000, 3, 7200),
        (7000, 3, 6400),
        (2000, 0, 1400),
        (2000, 3, 1400),
        (660, 3, 120),
        (500, 3, 120),
        (100, 3, 120),
        (119, 3, 120),
        (-100, 3, 7200),
    ],
)
def test_adaptive_polls_stretch_while_nothing_changes_and_come_closer_before_a_reset(
    resets_in: float | None, unchanged: int, wait: float
) -> None:
    schedule = SlotSchedule(last_poll_at=NOW, unchanged_readings=unchanged)
    due = next_poll_at(WakeConfig(), schedule, NOW, reading=warm(resets_in), is_adaptive=True)
    assert due == NOW + wait
    usual = next_poll_at(WakeConfig(), schedule, NOW, reading=warm(resets_in))
    assert usual == NOW + 1800


@settings(deadline=None, max_examples=200)
@given(
    interval=st.integers(1, 1440),
    unchanged=st.integers(0, 10),
    resets_in=st.floats(0.5, 90_000.0),
)
def test_no_adaptive_poll_lies_across_a_reset(
    interval: int, unchanged: int, resets_in: float
) -> None:
    config = WakeConfig(poll_interval_minutes=interval)
    schedule = SlotSchedule(last_poll_at=NOW, unchanged_readings=unchanged)
    due = next_poll_at(config, schedule, NOW, reading=warm(resets_in), is_adaptive=True)
    assert due is not None
    closest = min(interval * MINUTE, 120)
    assert closest <= due - NOW <= max(closest, min(resets_in + 2, 4 * interval * MINUTE))


def test_errors_and_pending_wakes_are_not_stretched() -> None:
    failed = SlotSchedule(last_poll_at=NOW, unchanged_readings=4, consecutive_poll_errors=1)
    due = next_poll_at(WakeConfig(), failed, NOW, reading=warm(None), is_adaptive=True)
    assert due == NOW + 3600
    pending = SlotSchedule(last_poll_at=NOW, unchanged_readings=4, wake_pending=True)
    due = next_poll_at(WakeConfig(), pending, NOW, reading=warm(None), is_adaptive=True)
    assert due == NOW + 60


def test_a_changed_reading_ends_the_stretch() -> None:
    schedule = SlotSchedule()
    for _ in range(9):
        schedule = poll_succeeded(schedule, NOW, is_unchanged=True)
    assert schedule.unchanged_readings == 4
    assert poll_succeeded(schedule, NOW).unchanged_readings == 0


def test_polls_of_a_broken_provider_thin_out_until_the_slot_is_disabled() -> None:
    config, schedule, now = WakeConfig(), SlotSchedule(), NOW
    minutes = []
    while (due := next_poll_at(config, schedule, now)) is not None:
        minutes.append(round((due - NOW) / MINUTE))
        now = due
        schedule = poll_failed(config, schedule, now, "connection refused")
    waits = [later - earlier for earlier, later in pairwise(minutes)]
    assert waits == [60, 120, 240, 480, 480, 480, 480, 480, 480]


def test_a_function_leaves_its_argument_alone() -> None:
    schedule = SlotSchedule(last_poll_at=NOW)
    before = msgspec.json.encode(schedule)
    poll_failed(WakeConfig(), schedule, NOW, "timeout")
    poll_succeeded(schedule, NOW)
    assert msgspec.json.encode(schedule) == before
