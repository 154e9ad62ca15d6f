"""The turns in a slot's life that no clock brings: its start, a new configuration, its return.

Each says what of the past still counts. A start polls first and wakes only if the reading calls
for it; a time of day that was not yet wanted when it passed is not caught up; whatever disabled a
slot, a new configuration revives it.
"""

from __future__ import annotations

import msgspec

from headgate.core.key_slots.quota import QuotaFailure, QuotaLimit
from headgate.core.key_slots.wake import (
    SECONDS_PER_MINUTE,
    SlotSchedule,
    WakeConfig,
    WakeMode,
    due_trigger,
    may_wake,
    minute_of,
)
from headgate.core.key_slots.wake_confirmation import end_pending, wake_needed


def slot_started(schedule: SlotSchedule, now: float) -> SlotSchedule:
    """Return the schedule at the start of its slot, with a poll asked for.

    The first start of all begins the interval, and leaves alone the times that passed before it. A
    restart changes neither: what was slept through is caught up.
    """
    if schedule.last_interval_fire is None:
        schedule = msgspec.structs.replace(schedule, last_interval_fire=minute_of(now))
    if schedule.times_served_until is None and schedule.last_times_marker is None:
        schedule = _without_times_before(schedule, now)
    return msgspec.structs.replace(schedule, poll_requested=True)


def initial_wake_needed(
    config: WakeConfig, schedule: SlotSchedule, quota: QuotaLimit | QuotaFailure, now: float
) -> bool:
    """Tell from the first reading after a start whether to wake at once."""
    return bool(config.wake_modes) and may_wake(schedule, now) and wake_needed(quota, now)


def config_changed(
    previous: WakeConfig, current: WakeConfig, schedule: SlotSchedule, now: float
) -> SlotSchedule:
    """Return the schedule under a new configuration; a disabled slot is enabled by it.

    An interval that is switched on begins now. A time added for a minute already past waits for
    tomorrow; one that was due before the change stays due. With the last mode goes the wake that is
    being confirmed, or its retry would be sent against the user's word.
    """
    if previous == current:
        return schedule
    if previous.wake_modes and not current.wake_modes:
        schedule = end_pending(schedule)
    if _switched_on(WakeMode.INTERVAL, previous, current):
        schedule = msgspec.structs.replace(schedule, last_interval_fire=minute_of(now))
    if _times_differ(previous, current) and not _time_is_due(previous, schedule, now):
        schedule = _without_times_before(schedule, now)
    disabled = schedule.wake_auto_disabled or schedule.slot_auto_disabled
    return slot_enabled(schedule) if disabled else schedule


def slot_enabled(schedule: SlotSchedule) -> SlotSchedule:
    """Return the schedule with polls and wakes allowed again, all errors and pauses forgotten."""
    return msgspec.structs.replace(
        end_pending(schedule),
        wake_auto_disabled=False,
        slot_auto_disabled=False,
        disabled_reason="",
        paused_until=None,
        paused_why="",
        wake_errors=0,
        consecutive_poll_errors=0,
        last_problem="",
        poll_requested=True,
    )


def _switched_on(mode: WakeMode, previous: WakeConfig, current: WakeConfig) -> bool:
    return mode in current.wake_modes and mode not in previous.wake_modes


def _times_differ(previous: WakeConfig, current: WakeConfig) -> bool:
    same = previous.wake_times == current.wake_times and previous.zone == current.zone
    return not same or _switched_on(WakeMode.TIMES, previous, current)


def _time_is_due(config: WakeConfig, schedule: SlotSchedule, now: float) -> bool:
    trigger = due_trigger(config, schedule, now)
    due = () if trigger is None else (trigger, *trigger.also_due)
    return any(each.mode is WakeMode.TIMES for each in due)


def _without_times_before(schedule: SlotSchedule, now: float) -> SlotSchedule:
    # The minute that is running still counts: who writes 09:00 at 09:00:20 means today.
    served_until = max(schedule.times_served_until or 0.0, now - SECONDS_PER_MINUTE)
    return msgspec.structs.replace(schedule, times_served_until=served_until)
