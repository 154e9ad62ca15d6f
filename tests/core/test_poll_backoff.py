"""When the quota is read next: the interval, the backoff, the pending wake, the pause."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.poll_backoff import (
    next_poll_at,
    poll_delay_minutes,
    poll_failed,
    poll_succeeded,
    slot_throttled,
)
from headgate.core.wake import SlotSchedule, WakeConfig

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
    for _ in range(3):
        schedule = poll_failed(config, schedule, NOW, "timeout")
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
    ("retry_after", "wait"), [(0, 60), (-5, 60), (59, 60), (61, 61), (9e5, 9e5)]
)
def test_too_many_requests_waits_as_long_as_it_says(retry_after: float, wait: float) -> None:
    throttled = slot_throttled(SlotSchedule(last_poll_at=NOW), NOW, retry_after)
    assert next_poll_at(WakeConfig(), throttled, NOW) == NOW + wait
    assert throttled.consecutive_poll_errors == 0


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
