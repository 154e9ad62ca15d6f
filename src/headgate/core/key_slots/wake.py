"""When a key slot is due for a wake: the three modes, and the marker that each leaves.

A wake is the tiny request that opens a provider's quota window. Each mode derives its next
trigger from the configuration, the slot's persisted state and `now`; what has fired is told by
markers in that state alone. So a restart neither repeats nor forgets a wake, and a loop that
comes late to a minute does not lose it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, tzinfo

import msgspec

from headgate.core.enums import LenientEnum
from headgate.core.key_slots.wake_times import (
    TimeOccurrence,
    latest_occurrence,
    next_occurrence,
    parse_time_of_day,
)
from headgate.errors import InvalidSettingError

MAX_WAKE_TIMES = 5
MINUTES_PER_DAY = 1440
SECONDS_PER_MINUTE = 60.0

# A stored time that lies further ahead than this was written under a wrong clock. Believing it
# would silence the slot until then.
CLOCK_ERROR_SECONDS = 86_400.0


SAME_RESET_MS = 60_000
"""Reset times no further apart than this are one reset, told twice."""

MAX_PAUSE_SECONDS = 31 * 86_400.0
"""No provider is believed that asks to be left alone for longer; nor is a clock that was wrong."""


class WakeMode(LenientEnum):
    """A rule by which a slot is woken. A slot may use any number of them; each fires on its own."""

    INTERVAL = "interval"
    TIMES = "times"
    AFTER_RESET = "after_reset"


class WakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When one slot is woken and polled. Without `wake_modes` it is never woken.

    `wake_times` are read in `zone`. The last four are the same for all slots of an installation.
    """

    wake_modes: frozenset[WakeMode] = frozenset()
    wake_interval_minutes: int = 60
    wake_times: tuple[str, ...] = ()
    wake_after_reset_minutes: int = 1
    poll_interval_minutes: int = 30
    zone: tzinfo = UTC
    wake_catch_up_minutes: int = 15
    wake_quota_retry_window_minutes: int = 15
    max_consecutive_errors: int = 10
    quota_poll_backoff_cap_minutes: int = 480


RANGES: dict[str, tuple[int, int]] = {
    "wake_interval_minutes": (1, MINUTES_PER_DAY),
    "wake_after_reset_minutes": (1, MINUTES_PER_DAY),
    "poll_interval_minutes": (1, MINUTES_PER_DAY),
    "wake_catch_up_minutes": (0, MINUTES_PER_DAY),
    "wake_quota_retry_window_minutes": (1, MINUTES_PER_DAY),
    "max_consecutive_errors": (1, 1_000),
    "quota_poll_backoff_cap_minutes": (1, 7 * MINUTES_PER_DAY),
}


def check_wake_config(config: WakeConfig) -> None:
    """Raise `InvalidSettingError`, naming the field, unless every setting can be used."""
    for field, (lowest, highest) in RANGES.items():
        _check_range(field, getattr(config, field), lowest=lowest, highest=highest)
    if not all(isinstance(mode, WakeMode) for mode in config.wake_modes):
        allowed = ", ".join(mode.value for mode in WakeMode)
        raise InvalidSettingError("wake_modes", f"each must be one of {allowed}")
    _check_times(config)
    if not isinstance(config.zone, tzinfo):
        raise InvalidSettingError("zone", f"must be a time zone, not {config.zone!r}")


def _check_range(field: str, value: object, *, lowest: int, highest: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest:
        return
    problem = f"must be a whole number from {lowest} to {highest}, not {value!r}"
    raise InvalidSettingError(field, problem)


def _check_times(config: WakeConfig) -> None:
    if len(config.wake_times) > MAX_WAKE_TIMES:
        problem = f"at most {MAX_WAKE_TIMES} times, not {len(config.wake_times)}"
        raise InvalidSettingError("wake_times", problem)
    for time in config.wake_times:
        parse_time_of_day(time)
    if WakeMode.TIMES in config.wake_modes and not config.wake_times:
        raise InvalidSettingError("wake_times", "the times mode needs at least one time")


class SlotSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """What is known and has been done for one slot: plain data, the same after a restart.

    Moments are Unix seconds; a provider's reset times are milliseconds, as it sends them.
    `next_reset_epoch_ms` is the last reset time seen, which may have passed. Times up to
    `times_served_until` have fired, were missed or were never wanted. The fields from
    `wake_pending` to `wake_errors` belong to the wake that is being confirmed. The backoff of polls
    counts from `last_regular_poll_at`: one that comes out of turn and fails does not move it.
    Nothing is sent before `paused_until`, the provider's own word unless `paused_why` says
    otherwise. `slot_auto_disabled` stops polls and wakes, `wake_auto_disabled` only wakes;
    `disabled_reason` says why. `unchanged_readings` have told the same as the one before;
    `last_problem` is what went wrong at the last poll, or when the key was refused.
    """

    next_reset_epoch_ms: int | None = None

    last_times_marker: str | None = None
    times_served_until: float | None = None
    last_reset_marker: int | None = None
    last_interval_fire: float | None = None

    last_wake_at: float | None = None
    last_confirmed_at: float | None = None
    wake_pending: bool = False
    wake_reset_snapshot_ms: int | None = None
    wake_retry_window_deadline: float | None = None
    wake_timeout_retry_fired: bool = False
    wake_errors: int = 0

    last_poll_at: float | None = None
    last_regular_poll_at: float | None = None
    poll_requested: bool = False
    consecutive_poll_errors: int = 0
    consecutive_throttles: int = 0
    unchanged_readings: int = 0
    last_problem: str = ""

    paused_until: float | None = None
    paused_why: str = ""
    wake_auto_disabled: bool = False
    slot_auto_disabled: bool = False
    disabled_reason: str = ""


class WakeTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """One reason to wake a slot: the mode, since when it is due, and the marker it leaves.

    `also_due` are the triggers of other modes that the same wake serves.
    """

    mode: WakeMode
    marker: str
    due_at: float
    reason: str
    also_due: tuple[WakeTrigger, ...] = ()


def is_paused(schedule: SlotSchedule, now: float) -> bool:
    """Tell whether the provider asked to be left alone, and the time it named has not come."""
    until = schedule.paused_until
    return until is not None and now < until <= now + MAX_PAUSE_SECONDS


def why_paused(schedule: SlotSchedule) -> str:
    """Return who or what asked for the pause."""
    return schedule.paused_why or "the provider asked for it"


def may_wake(schedule: SlotSchedule, now: float) -> bool:
    """Tell whether the slot is free for a scheduled wake.

    A trigger that comes due while a wake is being confirmed is held: the retry window ends, see
    `headgate.core.key_slots.wake_confirmation`, and what is due then fires. Only a time of day that
    was held for longer than it is caught up is missed.
    """
    disabled = schedule.wake_auto_disabled or schedule.slot_auto_disabled
    return not (disabled or schedule.wake_pending or is_paused(schedule, now))


def should_fire_wake(config: WakeConfig, schedule: SlotSchedule, now: float) -> WakeTrigger | None:
    """Return the trigger that calls for a wake now, or None."""
    return due_trigger(config, schedule, now) if may_wake(schedule, now) else None


def due_trigger(config: WakeConfig, schedule: SlotSchedule, now: float) -> WakeTrigger | None:
    """Return what the modes ask for, whether or not the slot is free; one wake serves all due."""
    due = [trigger for trigger in _next_due(config, schedule, now) if trigger.due_at <= now]
    if not due:
        return None
    return msgspec.structs.replace(due[0], also_due=tuple(due[1:]))


def mark_fired(schedule: SlotSchedule, trigger: WakeTrigger, now: float) -> SlotSchedule:
    """Return the schedule with the markers of the trigger, and of those it serves, set.

    Also for a trigger that the pre-check found needless: it has been answered.
    """
    for served in (trigger, *trigger.also_due):
        schedule = _MARKERS[served.mode](schedule, served, now)
    return schedule


def next_wake_at(config: WakeConfig, schedule: SlotSchedule, now: float) -> WakeTrigger | None:
    """Return the trigger that is due first; `due_at` has passed if it is only being held.

    None where no mode has a trigger ahead, or wakes are disabled. The forced retry of a wake under
    way is no trigger: its time is `wake_retry_window_deadline`.
    """
    if schedule.wake_auto_disabled or schedule.slot_auto_disabled:
        return None
    ahead = [*_next_due(config, schedule, now), *_next_time_ahead(config, now)]
    return min(ahead, key=lambda trigger: trigger.due_at, default=None)


def minute_of(now: float) -> float:
    """Return the moment at which this minute began."""
    return now - now % SECONDS_PER_MINUTE


def _next_due(config: WakeConfig, schedule: SlotSchedule, now: float) -> list[WakeTrigger]:
    """Return the first unserved trigger of each mode; of times, only one that has come."""
    found = (_RULES[mode](config, schedule, now) for mode in WakeMode if mode in config.wake_modes)
    return [trigger for trigger in found if trigger is not None]


def _interval_trigger(config: WakeConfig, schedule: SlotSchedule, now: float) -> WakeTrigger | None:
    last_fire = schedule.last_interval_fire
    if last_fire is None:
        # The count begins with the start of the slot, which polls first.
        return None
    minutes = config.wake_interval_minutes
    due_at = last_fire + minutes * SECONDS_PER_MINUTE
    return WakeTrigger(
        mode=WakeMode.INTERVAL,
        marker=f"{due_at:.0f}",
        due_at=now if last_fire > now + CLOCK_ERROR_SECONDS else due_at,
        reason=f"interval mode ({minutes} min elapsed)",
    )


def _times_trigger(config: WakeConfig, schedule: SlotSchedule, now: float) -> WakeTrigger | None:
    occurrence = latest_occurrence(tuple(config.wake_times), config.zone, until=now)
    if occurrence is None or _is_too_late(config, occurrence, now):
        return None
    return None if _is_served(occurrence, schedule, now) else _trigger_of(occurrence, now)


def missed_time(config: WakeConfig, schedule: SlotSchedule, now: float) -> WakeTrigger | None:
    """Return the last time of day that had no wake and is too long ago to be caught up."""
    if WakeMode.TIMES not in config.wake_modes:
        return None
    occurrence = latest_occurrence(tuple(config.wake_times), config.zone, until=now)
    if occurrence is None or not _is_too_late(config, occurrence, now):
        return None
    # Named without how late it is, which goes on growing.
    return None if _is_served(occurrence, schedule, now) else _trigger_of(occurrence, occurrence.at)


def mark_missed(schedule: SlotSchedule, trigger: WakeTrigger) -> SlotSchedule:
    """Return the schedule with a missed time answered, so that it is told once."""
    return msgspec.structs.replace(schedule, times_served_until=trigger.due_at)


def interval_under_new_clock(schedule: SlotSchedule, now: float) -> SlotSchedule:
    """Return the schedule with the interval counted from now if its last wake lies ahead.

    The clock went back since; waiting for it to come round again would cost as long.
    """
    last_fire = schedule.last_interval_fire
    if last_fire is None or last_fire <= now + SECONDS_PER_MINUTE:
        return schedule
    return msgspec.structs.replace(schedule, last_interval_fire=minute_of(now))


def reset_slides(schedule: SlotSchedule) -> SlotSchedule:
    """Return the schedule with its reset answered before it comes: it slides, and never does."""
    return msgspec.structs.replace(schedule, last_reset_marker=schedule.next_reset_epoch_ms)


def is_sliding(schedule: SlotSchedule) -> bool:
    """Tell whether the reset was answered by its sliding, or by a wake once it had passed."""
    reset_ms = schedule.next_reset_epoch_ms
    return reset_ms is not None and reset_ms == schedule.last_reset_marker


def _next_time_ahead(config: WakeConfig, now: float) -> list[WakeTrigger]:
    if WakeMode.TIMES not in config.wake_modes:
        return []
    occurrence = next_occurrence(tuple(config.wake_times), config.zone, after=now)
    return [] if occurrence is None else [_trigger_of(occurrence, now)]


def _trigger_of(occurrence: TimeOccurrence, now: float) -> WakeTrigger:
    late_minutes = int((now - occurrence.at) // SECONDS_PER_MINUTE)
    late = f", {late_minutes} min late" if late_minutes > 0 else ""
    return WakeTrigger(
        mode=WakeMode.TIMES,
        marker=occurrence.marker,
        due_at=occurrence.at,
        reason=f"times mode ({occurrence.marker[-5:]}{late})",
    )


def _is_too_late(config: WakeConfig, occurrence: TimeOccurrence, now: float) -> bool:
    # Even without catching up, a time is due for the whole of its own minute.
    catch_up_seconds = max(config.wake_catch_up_minutes, 1) * SECONDS_PER_MINUTE
    return now - occurrence.at > catch_up_seconds


def _is_served(occurrence: TimeOccurrence, schedule: SlotSchedule, now: float) -> bool:
    """Tell whether this time has had its wake.

    The moment decides, not the marker: a clock that is set back shows old times again, and in
    another zone the same marker is another moment.
    """
    served_until = schedule.times_served_until
    if served_until is None:
        return occurrence.marker <= (schedule.last_times_marker or "")
    return occurrence.at <= served_until <= now + CLOCK_ERROR_SECONDS


def _after_reset_trigger(
    config: WakeConfig, schedule: SlotSchedule, _now: float
) -> WakeTrigger | None:
    reset_ms = schedule.next_reset_epoch_ms
    if reset_ms is None or not _is_new_reset(reset_ms, schedule.last_reset_marker):
        return None
    minutes = config.wake_after_reset_minutes
    return WakeTrigger(
        mode=WakeMode.AFTER_RESET,
        marker=str(reset_ms),
        due_at=reset_ms / 1000 + minutes * SECONDS_PER_MINUTE,
        reason=f"after_reset mode ({minutes} min after reset)",
    )


def _is_new_reset(reset_ms: int, last_served_ms: int | None) -> bool:
    # Two servers of a provider may differ by a moment, or one lag behind: neither is a new window.
    return last_served_ms is None or reset_ms > last_served_ms + SAME_RESET_MS


def _mark_interval(schedule: SlotSchedule, _trigger: WakeTrigger, now: float) -> SlotSchedule:
    # The minute, not the moment: a loop that comes a little earlier next time must not find the
    # interval short by a second, and slip by a minute at every wake.
    return msgspec.structs.replace(schedule, last_interval_fire=minute_of(now))


def _mark_times(schedule: SlotSchedule, trigger: WakeTrigger, _now: float) -> SlotSchedule:
    return msgspec.structs.replace(
        schedule, last_times_marker=trigger.marker, times_served_until=trigger.due_at
    )


def _mark_reset(schedule: SlotSchedule, trigger: WakeTrigger, _now: float) -> SlotSchedule:
    return msgspec.structs.replace(schedule, last_reset_marker=int(trigger.marker))


_RULES: dict[WakeMode, Callable[[WakeConfig, SlotSchedule, float], WakeTrigger | None]] = {
    WakeMode.INTERVAL: _interval_trigger,
    WakeMode.TIMES: _times_trigger,
    WakeMode.AFTER_RESET: _after_reset_trigger,
}

_MARKERS: dict[WakeMode, Callable[[SlotSchedule, WakeTrigger, float], SlotSchedule]] = {
    WakeMode.INTERVAL: _mark_interval,
    WakeMode.TIMES: _mark_times,
    WakeMode.AFTER_RESET: _mark_reset,
}
