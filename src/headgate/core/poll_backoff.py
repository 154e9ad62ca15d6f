"""When a slot's quota is read next.

Polls come at their interval, and less often after each error. While a wake is being confirmed
they come every minute, and neither follow the backoff nor add to it: a provider that is away for
ten minutes after a wake must not cost the slot its polling.
"""

from __future__ import annotations

import msgspec

from headgate.core.wake import SECONDS_PER_MINUTE, SlotSchedule, WakeConfig

MAX_BACKOFF_EXPONENT = 4
PENDING_POLL_SECONDS = SECONDS_PER_MINUTE


def poll_delay_minutes(config: WakeConfig, consecutive_errors: int) -> int:
    """Return the minutes between two polls after so many errors in a row.

    The cap bounds the backoff only; it never makes polls more frequent than the interval.
    """
    interval = config.poll_interval_minutes
    backed_off: int = interval * 2 ** min(consecutive_errors, MAX_BACKOFF_EXPONENT)
    return min(backed_off, max(config.quota_poll_backoff_cap_minutes, interval))


def next_poll_at(config: WakeConfig, schedule: SlotSchedule, now: float) -> float | None:
    """Return the Unix second of the next poll; `now` if it is due, None if polling is disabled."""
    if schedule.slot_auto_disabled:
        return None
    return max(_unpaused_poll_at(config, schedule, now), schedule.paused_until or now)


def _unpaused_poll_at(config: WakeConfig, schedule: SlotSchedule, now: float) -> float:
    last = schedule.last_poll_at
    # A last poll in the future means that the clock went back, and the reading may be old.
    if schedule.poll_requested or last is None or last > now:
        return now
    if schedule.wake_pending:
        return max(now, last + PENDING_POLL_SECONDS)
    minutes = poll_delay_minutes(config, schedule.consecutive_poll_errors)
    return max(now, last + minutes * SECONDS_PER_MINUTE)


def poll_succeeded(schedule: SlotSchedule, now: float) -> SlotSchedule:
    """Return the schedule after a good reading: the errors before it are forgotten."""
    return msgspec.structs.replace(_polled(schedule, now), consecutive_poll_errors=0)


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


def slot_throttled(schedule: SlotSchedule, now: float, retry_after_seconds: float) -> SlotSchedule:
    """Return the schedule after "too many requests": polls and wakes wait as long as it says.

    That is an answer, not an error: it does not count towards the limit. A wait of less than a
    minute is a minute, or a provider that says zero would be asked in a tight loop.
    """
    paused_until = now + max(retry_after_seconds, SECONDS_PER_MINUTE)
    return msgspec.structs.replace(schedule, paused_until=paused_until, poll_requested=True)


def _polled(schedule: SlotSchedule, now: float) -> SlotSchedule:
    return msgspec.structs.replace(schedule, last_poll_at=now, poll_requested=False)
