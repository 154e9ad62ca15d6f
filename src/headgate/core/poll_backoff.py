"""When a slot's quota is read next.

Polls come at their interval, and less often after each error. While a wake is being confirmed
they come every minute, and neither follow the backoff nor add to it: a provider that is away for
ten minutes after a wake must not cost the slot its polling. A slot that is exhausted is read right
after its reset, whatever the interval, because tasks wait for it.

Adaptive polling is a choice: while readings tell nothing new the interval grows to four times its
length, but never across a reset, and in the ten minutes before one polls come closer.
"""

from __future__ import annotations

import msgspec

from headgate.core.slots import SlotReading
from headgate.core.wake import (
    MAX_PAUSE_SECONDS,
    SECONDS_PER_MINUTE,
    SlotSchedule,
    WakeConfig,
    is_paused,
)

MAX_BACKOFF_EXPONENT = 4
PENDING_POLL_SECONDS = SECONDS_PER_MINUTE

RESET_POLL_DELAY_SECONDS = 2.0
"""How long after a reset the first poll comes: a provider's clock is not ours to the second."""

NEAR_RESET_SECONDS = 600.0
NEAR_RESET_POLL_SECONDS = 120.0
MAX_STRETCH = 4

_MAX_THROTTLES_COUNTED = 16


def poll_delay_minutes(config: WakeConfig, consecutive_errors: int) -> int:
    """Return the minutes between two polls after so many errors in a row.

    The cap bounds the backoff only; it never makes polls more frequent than the interval.
    """
    interval = config.poll_interval_minutes
    backed_off: int = interval * 2 ** min(consecutive_errors, MAX_BACKOFF_EXPONENT)
    return min(backed_off, max(config.quota_poll_backoff_cap_minutes, interval))


def next_poll_at(
    config: WakeConfig,
    schedule: SlotSchedule,
    now: float,
    *,
    reading: SlotReading | None = None,
    is_adaptive: bool = False,
) -> float | None:
    """Return the Unix second of the next poll; `now` if it is due, None if polling is disabled."""
    if schedule.slot_auto_disabled:
        return None
    due_at = _unpaused_poll_at(config, schedule, now, reading, is_adaptive=is_adaptive)
    return max(due_at, schedule.paused_until or now) if is_paused(schedule, now) else due_at


def _unpaused_poll_at(
    config: WakeConfig,
    schedule: SlotSchedule,
    now: float,
    reading: SlotReading | None,
    *,
    is_adaptive: bool,
) -> float:
    last = schedule.last_poll_at
    # A last poll in the future means that the clock went back, and the reading may be old.
    if schedule.poll_requested or last is None or last > now:
        return now
    if schedule.wake_pending:
        return max(now, last + PENDING_POLL_SECONDS)
    due_at = (
        last + poll_delay_minutes(config, schedule.consecutive_poll_errors) * SECONDS_PER_MINUTE
    )
    if reading is not None and is_adaptive and not schedule.consecutive_poll_errors:
        due_at = _adapted_poll_at(config, schedule, reading, last)
    if reading is not None and reading.is_exhausted:
        due_at = min(due_at, _freeing_poll_at(schedule, reading, last) or due_at)
    return max(now, due_at)


def _adapted_poll_at(
    config: WakeConfig, schedule: SlotSchedule, reading: SlotReading, last: float
) -> float:
    interval = config.poll_interval_minutes * SECONDS_PER_MINUTE
    stretched = last + interval * min(1 + schedule.unchanged_readings, MAX_STRETCH)
    reset = reading.resets_at
    if reset is None or reset <= last:
        return stretched
    closer = last + min(interval, NEAR_RESET_POLL_SECONDS)
    first_near = max(closer, reset - NEAR_RESET_SECONDS)
    return min(stretched, first_near, max(closer, reset + RESET_POLL_DELAY_SECONDS))


def _freeing_poll_at(schedule: SlotSchedule, reading: SlotReading, last: float) -> float | None:
    """Return when an exhausted slot is read after its reset, None where that has no hurry.

    Failures there are tried again soon, but only a few times: a provider that is away for long
    must meet the usual backoff, or the limit of errors would be reached within minutes.
    """
    if reading.resets_at is None:
        return None
    first = reading.resets_at + RESET_POLL_DELAY_SECONDS
    if last < first:
        return first
    errors = schedule.consecutive_poll_errors
    is_told_again = not errors and last - reading.resets_at > NEAR_RESET_SECONDS
    if is_told_again or errors > MAX_BACKOFF_EXPONENT:
        return None
    return last + SECONDS_PER_MINUTE * 2.0**errors


def poll_succeeded(
    schedule: SlotSchedule, now: float, *, is_unchanged: bool = False
) -> SlotSchedule:
    """Return the schedule after a good reading: the errors before it are forgotten."""
    unchanged = min(schedule.unchanged_readings + 1, MAX_STRETCH) if is_unchanged else 0
    return msgspec.structs.replace(
        _polled(schedule, now), consecutive_poll_errors=0, unchanged_readings=unchanged
    )


def poll_failed(
    config: WakeConfig, schedule: SlotSchedule, now: float, problem: str
) -> SlotSchedule:
    """Return the schedule after a poll that failed; at the limit of errors the slot is disabled."""
    polled = _polled(schedule, now)
    if schedule.wake_pending:
        return polled
    errors = schedule.consecutive_poll_errors + 1
    failed = msgspec.structs.replace(polled, consecutive_poll_errors=errors)
    if errors < config.max_consecutive_errors:
        return failed
    reason = f"{errors} polls failed in a row, the last: {problem}"
    return msgspec.structs.replace(failed, slot_auto_disabled=True, disabled_reason=reason)


def slot_throttled(
    config: WakeConfig, schedule: SlotSchedule, now: float, retry_after_seconds: float | None
) -> SlotSchedule:
    """Return the schedule after "too many requests": polls and wakes wait as long as it says.

    That is an answer, not an error: it does not count towards the limit. Where it says nothing, or
    zero, the next poll comes when it would have come. A provider that says one second again and
    again is asked in longer and longer steps.
    """
    throttles = min(schedule.consecutive_throttles + 1, _MAX_THROTTLES_COUNTED)
    usual = config.poll_interval_minutes * SECONDS_PER_MINUTE
    least = min(2.0 ** (throttles - 1), usual)
    wait = PENDING_POLL_SECONDS if schedule.wake_pending else usual
    if retry_after_seconds is not None and retry_after_seconds > 0:
        wait = min(max(retry_after_seconds, least), MAX_PAUSE_SECONDS)
    return msgspec.structs.replace(
        schedule, paused_until=now + wait, poll_requested=True, consecutive_throttles=throttles
    )


def _polled(schedule: SlotSchedule, now: float) -> SlotSchedule:
    return msgspec.structs.replace(
        schedule, last_poll_at=now, poll_requested=False, consecutive_throttles=0
    )
