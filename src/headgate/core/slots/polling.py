"""When a slot's quota is read next, and what else the slot needs next.

Polls come at their interval, counted from when the last one began, and less often after each error.
While a wake is being confirmed they come every minute. An exhausted slot is read right after its
reset, and then at least every quarter of an hour, because tasks wait for it. Polls out of turn
neither follow the backoff nor add to it: asking more often must not cost the slot its polling
sooner while a provider is away.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headgate.core.slots.quota import UNIFIED_LIMIT
from headgate.core.slots.slot import Claim, SlotConfig, SlotReading, SlotRow, why_off
from headgate.core.slots.wakes import (
    MAX_PAUSE_SECONDS,
    SECONDS_PER_MINUTE,
    SlotSchedule,
    WakeConfig,
    WakeTrigger,
    WindowEnd,
    close_window,
    is_paused,
    is_sliding,
    may_wake,
    should_fire_wake,
    wakes_on_start,
    why_paused,
)

MAX_BACKOFF_EXPONENT = 4
PENDING_POLL_SECONDS = SECONDS_PER_MINUTE

RESET_POLL_DELAY_SECONDS = 2.0
"""How long after a reset the first poll comes: a provider's clock is not ours to the second."""

MAX_FREEING_POLL_SECONDS = 900.0
"""How long at most an exhausted slot is not read after its reset, whatever fails."""

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
    """Return the Unix second of the next poll; `now` if it is due, None if there is none."""
    if schedule.slot_auto_disabled or not config.is_polled:
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
    due_at = _regular_poll_at(config, schedule) or now
    if reading is not None and is_adaptive and not schedule.consecutive_poll_errors:
        due_at = _adapted_poll_at(config, schedule, reading, last)
    if reading is not None and reading.is_exhausted:
        due_at = min(due_at, _freeing_poll_at(reading, last) or due_at)
    return max(now, due_at)


def _regular_poll_at(config: WakeConfig, schedule: SlotSchedule) -> float | None:
    """Return when interval and backoff bring the next poll; None if there was none yet."""
    last = _last_regular(schedule)
    minutes = poll_delay_minutes(config, schedule.consecutive_poll_errors)
    return None if last is None else last + minutes * SECONDS_PER_MINUTE


def _last_regular(schedule: SlotSchedule) -> float | None:
    last = schedule.last_regular_poll_at
    return schedule.last_poll_at if last is None else last


def _adapted_poll_at(
    config: WakeConfig, schedule: SlotSchedule, reading: SlotReading, last: float
) -> float:
    """Return when adaptive polling, which is a choice, brings the next poll.

    While readings tell nothing new the interval grows to four times its length, but never across a
    reset, and in the ten minutes before one polls come closer.
    """
    interval = config.poll_interval_minutes * SECONDS_PER_MINUTE
    stretched = last + interval * min(1 + schedule.unchanged_readings, MAX_STRETCH)
    reset = reading.resets_at
    if reset is None or reset <= last or is_sliding(schedule):
        return stretched
    closer = last + min(interval, NEAR_RESET_POLL_SECONDS)
    first_near = max(closer, reset - NEAR_RESET_SECONDS)
    return min(stretched, first_near, max(closer, reset + RESET_POLL_DELAY_SECONDS))


def _freeing_poll_at(reading: SlotReading, last: float) -> float | None:
    """Return when an exhausted slot is read after its reset, None if it named none.

    The longer ago the reset, the longer the steps, up to a quarter of an hour. A provider that
    renews a reset which has passed by a moment is not asked more than once a minute.
    """
    if reading.resets_at is None:
        return None
    first = reading.resets_at + RESET_POLL_DELAY_SECONDS
    if last < first:
        return max(first, last + SECONDS_PER_MINUTE) if reading.is_used_up_again else first
    return last + min(max(last - first, SECONDS_PER_MINUTE), MAX_FREEING_POLL_SECONDS)


def poll_succeeded(
    schedule: SlotSchedule, began_at: float, *, is_unchanged: bool = False
) -> SlotSchedule:
    """Return the schedule after a good reading: the errors before it are forgotten."""
    unchanged = min(schedule.unchanged_readings + 1, MAX_STRETCH) if is_unchanged else 0
    return msgspec.structs.replace(
        polled_in_turn(schedule, began_at),
        consecutive_poll_errors=0,
        unchanged_readings=unchanged,
        last_problem="",
    )


def poll_failed(
    config: WakeConfig, schedule: SlotSchedule, began_at: float, problem: str
) -> SlotSchedule:
    """Return the schedule after a poll that failed; at the limit of errors the slot is disabled.

    Only polls in their turn count. Of others there may be any number within an outage.
    """
    schedule = msgspec.structs.replace(schedule, last_problem=problem)
    if schedule.wake_pending:
        return polled_in_turn(schedule, began_at)
    if not _is_in_turn(config, schedule, began_at):
        return _polled(schedule, began_at)
    errors = schedule.consecutive_poll_errors + 1
    polled = polled_in_turn(schedule, began_at)
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
    zero, that is a minute, because tasks are held as well. Whoever says so again and again is asked
    in longer and longer steps, up to the interval.
    """
    throttles = min(schedule.consecutive_throttles + 1, _MAX_THROTTLES_COUNTED)
    usual = config.poll_interval_minutes * SECONDS_PER_MINUTE
    least = min(2.0 ** (throttles - 1), usual)
    wait = min(SECONDS_PER_MINUTE * 2.0 ** (throttles - 1), usual)
    if schedule.wake_pending:
        wait = PENDING_POLL_SECONDS
    if retry_after_seconds is not None and retry_after_seconds > 0:
        wait = min(max(retry_after_seconds, least), MAX_PAUSE_SECONDS)
    return msgspec.structs.replace(
        schedule,
        paused_until=now + wait,
        paused_why="",
        poll_requested=True,
        consecutive_throttles=throttles,
    )


def key_is_away(schedule: SlotSchedule, now: float, problem: str) -> SlotSchedule:
    """Return the schedule of a slot whose key cannot be had: it is looked for each minute.

    Nothing was asked, so nothing failed: a file that is being replaced is there a moment later.
    """
    return msgspec.structs.replace(
        schedule,
        paused_until=now + SECONDS_PER_MINUTE,
        paused_why=problem,
        poll_requested=True,
    )


def polled_in_turn(schedule: SlotSchedule, began_at: float) -> SlotSchedule:
    """Return the schedule after a poll from which the interval counts on."""
    return msgspec.structs.replace(_polled(schedule, began_at), last_regular_poll_at=began_at)


def _polled(schedule: SlotSchedule, began_at: float) -> SlotSchedule:
    return msgspec.structs.replace(
        schedule,
        last_poll_at=began_at,
        last_regular_poll_at=_last_regular(schedule),
        poll_requested=False,
        paused_why="",
        consecutive_throttles=0,
    )


def _is_in_turn(config: WakeConfig, schedule: SlotSchedule, began_at: float) -> bool:
    due_at = _regular_poll_at(config, schedule)
    last = schedule.last_poll_at
    return due_at is None or began_at >= due_at or (last is not None and last > began_at)


# What a slot needs next: a poll, a wake, the end of a retry window. These only look at a row,
# cheaply enough for every minute of every slot; `headgate.core.slots.steps` decides once more
# before anything is sent.

WakeCause = Literal["scheduled", "initial", "manual", "retry"]

CLAIM_SECONDS = 90.0
"""How long a poll is left to whoever claimed it."""


class DueWake(msgspec.Struct, frozen=True, kw_only=True):
    """A wake that is due: for a trigger of a mode, or because the slot has just started."""

    cause: WakeCause
    reason: str
    trigger: WakeTrigger | None = None


def poll_due_at(config: SlotConfig, row: SlotRow, now: float) -> float | None:
    """Return when the slot is to be polled, `now` if it is due, None if it is not polled.

    While somebody polls it, that is when their claim ends at the latest.
    """
    if why_off(config, row):
        return None
    due_at = next_poll_at(
        config.wake, row.schedule, now, reading=row.reading, is_adaptive=config.adaptive_polling
    )
    claim = row.poll_claim
    if due_at is None or claim is None or not is_live(claim, now, seconds=CLAIM_SECONDS):
        return due_at
    return max(due_at, claim.until)


def due_wake(config: SlotConfig, row: SlotRow, now: float) -> DueWake | None:
    """Return the wake that is due, before any pre-check."""
    if why_off(config, row):
        return None
    trigger = should_fire_wake(config.wake, row.schedule, now)
    if trigger is not None:
        return DueWake(cause="scheduled", reason=trigger.reason, trigger=trigger)
    if row.start == "wake" and wakes_on_start(config.wake) and may_wake(row.schedule, now):
        return DueWake(cause="initial", reason="start of the slot")
    return None


def open_until(row: SlotRow, moment: float) -> float | None:
    """Return the reset of the window that will be open at a moment, as far as is known."""
    reset_ms, reading = row.schedule.next_reset_epoch_ms, row.reading
    known = [] if reset_ms is None else [reset_ms / 1_000]
    if reading is not None and reading.is_exhausted and reading.resets_at is not None:
        known.append(reading.resets_at)
    return max((reset for reset in known if reset > moment), default=None)


def is_rate(row: SlotRow) -> bool:
    """Tell whether the last reading was one of a rate: its reset lies ahead whenever one asks."""
    reading = row.reading
    if reading is None or reading.resets_at is None or not is_sliding(row.schedule):
        return False
    if any(limit.type == UNIFIED_LIMIT for limit in reading.limits):
        return False
    return reading.resets_at > reading.read_at


def may_open_window(row: SlotRow, now: float) -> bool:
    """Tell whether a wake could open a window, by what is known where nobody can be asked.

    What is not known calls for a wake, as a reading that failed does.
    """
    return open_until(row, now) is None and not is_rate(row)


def window_is_over(config: SlotConfig, row: SlotRow, now: float) -> bool:
    """Tell whether a wake is pending whose retry window has ended."""
    if not row.schedule.wake_pending:
        return False
    return close_window(config.wake, row.schedule, now).outcome is not WindowEnd.NOT_YET


def wake_obstacle(config: SlotConfig, row: SlotRow, now: float) -> str:
    """Return why not even a person can have the slot woken now; "" if one can."""
    if row.schedule.wake_pending:
        return "a wake is being confirmed"
    if is_paused(row.schedule, now):
        return why_paused(row.schedule)
    return why_off(config, row)


def is_live(claim: Claim | None, now: float, *, seconds: float) -> bool:
    """Tell whether somebody is still at work under a claim.

    One that ends later than any claim made now was made before the clock went back.
    """
    return claim is not None and now < claim.until <= now + 2 * seconds
