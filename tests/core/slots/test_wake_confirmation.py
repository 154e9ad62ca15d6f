"""From a wake to its confirmation: the pre-check, the retry window, the forced retry, the limit."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.slots.polling import next_poll_at, poll_failed, poll_succeeded, slot_throttled
from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind, QuotaLimit
from headgate.core.slots.wakes import (
    Confirmation,
    SlotSchedule,
    WakeConfig,
    WakeMode,
    WindowEnd,
    close_window,
    key_refused,
    quota_read,
    should_fire_wake,
    slot_started,
    wake_needed,
    wake_sent,
)

NOW = 1_771_176_960.0
NOW_MS = int(NOW * 1000)
MINUTE = 60.0
HOUR_MS = 3_600_000
WINDOW = 15 * MINUTE

CONFIG = WakeConfig(wake_modes=frozenset({WakeMode.INTERVAL}))
PATIENT = msgspec.structs.replace(CONFIG, max_consecutive_errors=1000)


def pending(snapshot_ms: int | None = None) -> SlotSchedule:
    started = SlotSchedule(last_interval_fire=NOW - 3600, next_reset_epoch_ms=snapshot_ms)
    return wake_sent(CONFIG, started, NOW)


@pytest.mark.parametrize(
    ("quota", "needed"),
    [
        (QuotaLimit(type="TOKENS_LIMIT"), True),
        (QuotaLimit(type="TOKENS_LIMIT", next_reset_epoch_ms=NOW_MS - 1), True),
        (QuotaLimit(type="TOKENS_LIMIT", next_reset_epoch_ms=NOW_MS), True),
        (QuotaLimit(type="TOKENS_LIMIT", next_reset_epoch_ms=NOW_MS + 1), False),
        (QuotaFailure(kind=QuotaFailureKind.TIMEOUT), True),
        (QuotaFailure(kind=QuotaFailureKind.UNREACHABLE), True),
        (QuotaFailure(kind=QuotaFailureKind.SERVER_ERROR), True),
        (QuotaFailure(kind=QuotaFailureKind.GARBAGE), True),
        (QuotaFailure(kind=QuotaFailureKind.REJECTED), True),
        (QuotaFailure(kind=QuotaFailureKind.THROTTLED), True),
        (QuotaFailure(kind=QuotaFailureKind.REFUSED), False),
        (QuotaFailure(kind=QuotaFailureKind.EXHAUSTED), True),
        (QuotaFailure(kind=QuotaFailureKind.EXHAUSTED, resets_at=NOW - 1), True),
        (QuotaFailure(kind=QuotaFailureKind.EXHAUSTED, resets_at=NOW + 1), False),
    ],
)
def test_the_pre_check_fails_open(quota: QuotaLimit | QuotaFailure, needed: bool) -> None:
    assert wake_needed(quota, NOW) is needed


def polled(schedule: SlotSchedule, now: float = NOW) -> SlotSchedule:
    """Return the schedule after a poll that told nothing."""
    return poll_failed(CONFIG, schedule, now, "timeout")


def test_a_sent_wake_is_pending_with_its_snapshot_and_window() -> None:
    schedule = pending(snapshot_ms=NOW_MS - HOUR_MS)
    assert schedule.wake_pending
    assert schedule.wake_reset_snapshot_ms == NOW_MS - HOUR_MS
    assert schedule.wake_retry_window_deadline == NOW + WINDOW
    assert not schedule.wake_timeout_retry_fired
    assert schedule.last_wake_at == NOW


def test_a_sent_wake_asks_for_a_poll_at_once_and_then_every_minute() -> None:
    schedule = msgspec.structs.replace(pending(), last_poll_at=NOW, consecutive_poll_errors=4)
    assert next_poll_at(CONFIG, schedule, NOW) == NOW
    for minute in range(3):
        now = NOW + minute * MINUTE
        schedule = poll_failed(CONFIG, schedule, now, "timeout")
        assert next_poll_at(CONFIG, schedule, now) == now + MINUTE


def test_a_sent_wake_serves_what_is_due() -> None:
    assert pending().last_interval_fire == NOW


@pytest.mark.parametrize(
    ("snapshot_ms", "reset_ms", "outcome"),
    [
        (None, NOW_MS + 5 * HOUR_MS, Confirmation.CONFIRMED),
        (NOW_MS - HOUR_MS, NOW_MS + 5 * HOUR_MS, Confirmation.CONFIRMED),
        (NOW_MS - HOUR_MS, NOW_MS - HOUR_MS + 1, Confirmation.NOT_CONFIRMED),
        (NOW_MS - 2 * HOUR_MS, NOW_MS - HOUR_MS, Confirmation.NOT_CONFIRMED),
        (None, NOW_MS - HOUR_MS, Confirmation.NOT_CONFIRMED),
        (None, NOW_MS, Confirmation.NOT_CONFIRMED),
        (None, NOW_MS + 1, Confirmation.CONFIRMED),
        (NOW_MS - 5, NOW_MS + 5, Confirmation.NOT_CONFIRMED),
        (NOW_MS - 5, NOW_MS + 60_000, Confirmation.CONFIRMED),
        (NOW_MS - HOUR_MS, NOW_MS - HOUR_MS, Confirmation.NOT_CONFIRMED),
        (NOW_MS - HOUR_MS, NOW_MS - 2 * HOUR_MS, Confirmation.NOT_CONFIRMED),
        (NOW_MS - HOUR_MS, None, Confirmation.NOT_CONFIRMED),
        (None, None, Confirmation.NOT_CONFIRMED),
        (NOW_MS + HOUR_MS, NOW_MS + 5 * HOUR_MS, Confirmation.CONFIRMED),
        (NOW_MS + HOUR_MS, NOW_MS + HOUR_MS, Confirmation.CONFIRMED),
        (NOW_MS + HOUR_MS, NOW_MS - HOUR_MS, Confirmation.NOT_CONFIRMED),
        (NOW_MS + HOUR_MS, None, Confirmation.NOT_CONFIRMED),
    ],
)
def test_a_reading_confirms_by_an_advanced_reset(
    snapshot_ms: int | None, reset_ms: int | None, outcome: Confirmation
) -> None:
    step = quota_read(pending(snapshot_ms), reset_ms, NOW)
    assert step.outcome is outcome
    assert step.schedule.wake_pending is (outcome is Confirmation.NOT_CONFIRMED)
    assert step.schedule.wake_errors == (1 if outcome is Confirmation.NOT_CONFIRMED else 0)


def test_confirmation_forgets_the_errors_and_the_window() -> None:
    schedule = msgspec.structs.replace(pending(), wake_errors=9, wake_timeout_retry_fired=True)
    confirmed = quota_read(schedule, NOW_MS + 5 * HOUR_MS, NOW + 30).schedule
    assert confirmed.wake_errors == 0
    assert confirmed.last_confirmed_at == NOW + 30
    assert confirmed.next_reset_epoch_ms == NOW_MS + 5 * HOUR_MS
    assert confirmed.wake_retry_window_deadline is None
    assert not confirmed.wake_timeout_retry_fired
    assert close_window(CONFIG, confirmed, NOW + WINDOW).outcome is WindowEnd.NOT_YET


def test_without_a_pending_wake_a_reading_counts_no_error() -> None:
    step = quota_read(SlotSchedule(), None, NOW)
    assert step.outcome is Confirmation.NOT_PENDING
    assert step.schedule == SlotSchedule()


def test_a_cold_reading_keeps_the_reset_that_a_wake_waits_for() -> None:
    config = WakeConfig(wake_modes=frozenset({WakeMode.AFTER_RESET}))
    schedule = SlotSchedule(next_reset_epoch_ms=NOW_MS)
    schedule = quota_read(schedule, None, NOW + 30).schedule
    assert should_fire_wake(config, schedule, NOW + MINUTE) is not None


@pytest.mark.parametrize(
    ("elapsed", "retried", "errors", "outcome"),
    [
        (0, False, 0, WindowEnd.NOT_YET),
        (WINDOW - 1, False, 14, WindowEnd.NOT_YET),
        (WINDOW, False, 15, WindowEnd.RETRY_NOW),
        (WINDOW, False, 0, WindowEnd.RETRY_NOW),
        (40 * WINDOW, False, 0, WindowEnd.RETRY_NOW),
        (WINDOW - 1, True, 30, WindowEnd.NOT_YET),
        (WINDOW, True, 9, WindowEnd.BACK_TO_SCHEDULE),
        (WINDOW, True, 10, WindowEnd.WAKES_DISABLED),
        (WINDOW, True, 30, WindowEnd.WAKES_DISABLED),
    ],
)
def test_what_the_end_of_a_window_calls_for(
    elapsed: float, retried: bool, errors: int, outcome: WindowEnd
) -> None:
    schedule = msgspec.structs.replace(
        polled(pending()), wake_timeout_retry_fired=retried, wake_errors=errors
    )
    step = close_window(CONFIG, schedule, NOW + elapsed)
    assert step.outcome is outcome
    still_pending = outcome in (WindowEnd.NOT_YET, WindowEnd.RETRY_NOW)
    assert step.schedule.wake_pending is still_pending
    assert step.schedule.wake_auto_disabled is (outcome is WindowEnd.WAKES_DISABLED)


def test_the_forced_retry_opens_a_window_and_polls_at_once() -> None:
    schedule = poll_succeeded(pending(), NOW)
    step = close_window(CONFIG, schedule, NOW + WINDOW)
    assert step.schedule.wake_timeout_retry_fired
    assert step.schedule.wake_retry_window_deadline == NOW + 2 * WINDOW
    assert step.schedule.last_wake_at == NOW + WINDOW
    assert next_poll_at(CONFIG, step.schedule, NOW + WINDOW) == NOW + WINDOW
    assert close_window(CONFIG, step.schedule, NOW + WINDOW).outcome is WindowEnd.NOT_YET


def test_the_forced_retry_keeps_the_snapshot_from_before_the_first_wake() -> None:
    schedule = pending(snapshot_ms=NOW_MS - HOUR_MS)
    retried = close_window(CONFIG, schedule, NOW + WINDOW).schedule
    assert retried.wake_reset_snapshot_ms == NOW_MS - HOUR_MS


def test_the_forced_retry_serves_a_trigger_that_was_held() -> None:
    config = msgspec.structs.replace(CONFIG, wake_interval_minutes=10)
    schedule = wake_sent(config, SlotSchedule(last_interval_fire=NOW - 600), NOW)
    retried = close_window(config, polled(schedule), NOW + WINDOW).schedule
    assert retried.last_interval_fire == NOW + WINDOW


def test_an_unconfirmed_wake_does_not_suppress_the_next() -> None:
    schedule = pending()
    assert should_fire_wake(PATIENT, schedule, NOW + 3600) is None
    for end in (NOW + WINDOW, NOW + 2 * WINDOW):
        schedule = close_window(PATIENT, polled(schedule), end).schedule
    assert not schedule.wake_pending
    assert should_fire_wake(PATIENT, schedule, NOW + 3600) is not None


def test_errors_of_unconfirmed_wakes_add_up_until_one_is_confirmed() -> None:
    schedule = msgspec.structs.replace(pending(), wake_errors=6, wake_timeout_retry_fired=True)
    schedule = close_window(CONFIG, schedule, NOW + WINDOW).schedule
    schedule = wake_sent(CONFIG, schedule, NOW + 3600)
    assert schedule.wake_errors == 6
    assert quota_read(schedule, NOW_MS + 5 * HOUR_MS, NOW + 3600).schedule.wake_errors == 0


def test_a_deadline_from_before_the_clock_went_back_does_not_hold_the_slot() -> None:
    step = close_window(CONFIG, polled(pending(), NOW - 24 * 3600), NOW - 24 * 3600)
    assert step.outcome is WindowEnd.RETRY_NOW


def test_a_clock_set_back_by_a_second_does_not_end_a_window() -> None:
    assert close_window(CONFIG, pending(), NOW - 1).outcome is WindowEnd.NOT_YET


def test_no_retry_is_sent_while_the_provider_asked_for_a_pause() -> None:
    paused = slot_throttled(CONFIG, pending(), NOW, retry_after_seconds=3600)
    assert close_window(CONFIG, paused, NOW + WINDOW).outcome is WindowEnd.NOT_YET
    assert close_window(CONFIG, paused, NOW + 3600).outcome is WindowEnd.NOT_YET
    asked = polled(paused, NOW + 3600)
    assert close_window(CONFIG, asked, NOW + 3600).outcome is WindowEnd.RETRY_NOW


def test_a_window_does_not_end_before_the_poll_that_a_start_asks_for() -> None:
    restarted = slot_started(polled(pending()), NOW + 40 * WINDOW)
    assert close_window(CONFIG, restarted, NOW + 40 * WINDOW).outcome is WindowEnd.NOT_YET
    confirmed = quota_read(restarted, NOW_MS + 20 * HOUR_MS, NOW + 40 * WINDOW)
    assert confirmed.outcome is Confirmation.CONFIRMED


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_everything_at_once(status: int) -> None:
    stopped = key_refused(pending(), status)
    assert not stopped.wake_pending
    assert stopped.disabled_reason == f"the provider refused the key ({status})"
    assert stopped.consecutive_poll_errors == 1
    assert stopped.last_problem == stopped.disabled_reason
    assert next_poll_at(CONFIG, stopped, NOW + 3600) is None
    assert should_fire_wake(CONFIG, stopped, NOW + 3600) is None


def test_a_key_that_is_not_there_is_named_by_its_problem() -> None:
    stopped = key_refused(SlotSchedule(), None, "key_env: the variable ZAI_KEY is not set")
    assert stopped.slot_auto_disabled
    assert stopped.disabled_reason == "key_env: the variable ZAI_KEY is not set"
    assert stopped.last_problem == stopped.disabled_reason


def run_episode(
    config: WakeConfig, schedule: SlotSchedule, answers: dict[int, int | None]
) -> tuple[list[int], SlotSchedule]:
    """Play the minutes after a wake; `answers` are good readings, other polls time out.

    Returns the minutes at which a wake was sent again, and the last schedule.
    """
    retries = []
    for minute in range(60):
        now = NOW + minute * MINUTE
        due = next_poll_at(config, schedule, now)
        if due is not None and due <= now and minute in answers:
            schedule = poll_succeeded(schedule, now)
            schedule = quota_read(schedule, answers[minute], now).schedule
        elif due is not None and due <= now:
            schedule = poll_failed(config, schedule, now, "timeout")
        step = close_window(config, schedule, now)
        schedule = step.schedule
        if step.outcome is WindowEnd.RETRY_NOW:
            retries.append(minute)
    return retries, schedule


WARM_MS = NOW_MS + 5 * HOUR_MS


@pytest.mark.parametrize(
    ("answers", "retries", "errors", "disabled"),
    [
        ({0: WARM_MS}, [], 0, False),
        ({0: None, 1: None, 2: WARM_MS}, [], 0, False),
        (dict.fromkeys(range(60)), [15], 31, True),
        (dict.fromkeys(range(20)) | {20: WARM_MS}, [15], 0, False),
        (dict.fromkeys(range(9)), [15], 9, False),
        ({}, [15], 0, False),
    ],
)
def test_an_hour_after_a_wake(
    answers: dict[int, int | None], retries: list[int], errors: int, disabled: bool
) -> None:
    sent_again, schedule = run_episode(CONFIG, pending(), answers)
    assert sent_again == retries
    assert schedule.wake_errors == errors
    assert schedule.wake_auto_disabled is disabled
    assert not schedule.wake_pending
    assert not schedule.slot_auto_disabled


@settings(deadline=None, max_examples=100)
@given(
    answers=st.dictionaries(
        st.integers(0, 59), st.none() | st.integers(NOW_MS - HOUR_MS, WARM_MS), max_size=60
    ),
    snapshot_ms=st.none() | st.integers(NOW_MS - HOUR_MS, NOW_MS + HOUR_MS),
)
def test_no_answers_keep_a_wake_pending_beyond_two_windows(
    answers: dict[int, int | None], snapshot_ms: int | None
) -> None:
    sent_again, schedule = run_episode(CONFIG, pending(snapshot_ms), answers)
    assert not schedule.wake_pending
    assert sent_again in ([], [15])
    assert schedule.wake_auto_disabled or should_fire_wake(CONFIG, schedule, NOW + 3600)
