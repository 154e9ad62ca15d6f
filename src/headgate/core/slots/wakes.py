"""Wakes of a key slot: when one is due, whether it worked, and how pages describe it.

A wake is the tiny request that opens a provider's quota window. Each of the three modes derives its
next trigger from the configuration, the slot's persisted state and `now`; markers in that state
alone say what has fired. So a restart neither repeats nor forgets a wake, and a loop that comes
late to a minute does not lose it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, tzinfo
from enum import Enum
from functools import lru_cache
from typing import Literal

import msgspec

from headgate.core.enums import LenientEnum
from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind, QuotaLimit
from headgate.errors import InvalidSettingError

# Local times of day as moments. A wall clock skips and repeats, yet every local day has each of its
# times exactly once: a time in a gap happens at the first moment after the gap, and one that the
# clock shows twice happens at its first showing.

_TIME_OF_DAY = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")
_ONE_DAY = timedelta(days=1)


class TimeOccurrence(msgspec.Struct, frozen=True, kw_only=True):
    """One time on one day: `marker` as the wall clock names it, `at` in Unix seconds."""

    marker: str
    at: float


def parse_time_of_day(text: object) -> tuple[int, int]:
    """Read `HH:MM` into hour and minute, or raise `InvalidSettingError`."""
    match = _TIME_OF_DAY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidSettingError("wake_times", f"{text!r} is not a time; write HH:MM, as 09:00")
    return int(match[1]), int(match[2])


def moment_of(day: date, time_of_day: str, zone: tzinfo) -> float:
    """Return the one moment at which the day has this time, in Unix seconds."""
    hour, minute = parse_time_of_day(time_of_day)
    shown_first = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
    first = shown_first.timestamp()
    second = shown_first.replace(fold=1).timestamp()
    # Only for a time inside a gap does the later offset give the earlier moment.
    return _first_moment_after_gap(second, first, zone) if second < first else first


def _first_moment_after_gap(before: float, after: float, zone: tzinfo) -> float:
    """Bisect for the change of offset that lies behind `before` and not behind `after`."""
    low, high = int(before), int(after)
    old_offset = datetime.fromtimestamp(low, zone).utcoffset()
    while high - low > 1:
        middle = (low + high) // 2
        if datetime.fromtimestamp(middle, zone).utcoffset() == old_offset:
            low = middle
        else:
            high = middle
    return float(high)


# Bounded, and worth it: a loop asks for the same three days every minute.
@lru_cache(maxsize=4096)
def day_occurrences(day: date, times: tuple[str, ...], zone: tzinfo) -> tuple[TimeOccurrence, ...]:
    """Return the day's occurrences of these times, earliest first."""
    found = (
        TimeOccurrence(marker=f"{day.isoformat()} {time}", at=moment_of(day, time, zone))
        for time in times
    )
    return tuple(sorted(found, key=lambda occurrence: (occurrence.at, occurrence.marker)))


def latest_occurrence(
    times: tuple[str, ...], zone: tzinfo, *, until: float
) -> TimeOccurrence | None:
    """Return the last occurrence up to and including a moment; None when there are no times."""
    for day in _days_around(until, zone, (1, 0, -1, -2)):
        for occurrence in reversed(day_occurrences(day, times, zone)):
            if occurrence.at <= until:
                return occurrence
    return None


def next_occurrence(times: tuple[str, ...], zone: tzinfo, *, after: float) -> TimeOccurrence | None:
    """Return the first occurrence later than a moment; None when there are no times."""
    for day in _days_around(after, zone, (-1, 0, 1, 2)):
        for occurrence in day_occurrences(day, times, zone):
            if occurrence.at > after:
                return occurrence
    return None


def _days_around(moment: float, zone: tzinfo, steps: tuple[int, ...]) -> Iterator[date]:
    """Yield days by their distance from the moment's own local day.

    Callers begin one day beyond it: where clocks change at midnight, a moment's date and the date
    of the time that happens at it can differ.
    """
    today = datetime.fromtimestamp(moment, zone).date()
    return (today + step * _ONE_DAY for step in steps)


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


QuotaSource = Literal["address", "requests", "traffic"]
"""Where a quota is read: at an address for nothing, by requests that cost, or from responses to
real traffic alone.
"""


class WakeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When one slot is woken and polled. Without `wake_modes` it is never woken.

    `wake_times` are read in `zone`. `wake_on_start` is None where nobody said, see
    `wakes_on_start`. `quota_from` is where readings come from. The last four are the same for all
    slots of an installation.
    """

    wake_modes: frozenset[WakeMode] = frozenset()
    wake_on_start: bool | None = None
    wake_interval_minutes: int = 60
    wake_times: tuple[str, ...] = ()
    wake_after_reset_minutes: int = 1
    poll_interval_minutes: int = 30
    zone: tzinfo = UTC
    quota_from: QuotaSource = "address"
    wake_catch_up_minutes: int = 15
    wake_quota_retry_window_minutes: int = 15
    max_consecutive_errors: int = 10
    quota_poll_backoff_cap_minutes: int = 480

    @property
    def is_polled(self) -> bool:
        """Whether anybody is asked for the quota; otherwise real traffic and wakes tell it."""
        return self.quota_from != "traffic"


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
    if config.wake_on_start and not config.wake_modes:
        problem = "needs wake_modes beside it; without one the slot is never woken"
        raise InvalidSettingError("wake_on_start", problem)
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
    """Return what keeps the slot from sending: it has no key, or its provider asked for a pause."""
    if schedule.paused_why:
        return f"no key: {schedule.paused_why}"
    return "paused, the provider asked for it"


def may_wake(schedule: SlotSchedule, now: float) -> bool:
    """Tell whether the slot is free for a scheduled wake.

    A trigger that comes due while a wake is being confirmed is held: the retry window ends, see
    `headgate.core.slots.wakes`, and what is due then fires. Only a time of day that
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


def first_wake_from(config: WakeConfig, schedule: SlotSchedule, moment: float) -> float | None:
    """Return when the first trigger comes that does not lie before a moment; None if none does."""
    found: list[float] = []
    modes, last_fire = config.wake_modes, schedule.last_interval_fire
    if WakeMode.INTERVAL in modes and last_fire is not None:
        seconds = config.wake_interval_minutes * SECONDS_PER_MINUTE
        found.append(last_fire + seconds * max(1, math.ceil((moment - last_fire) / seconds)))
    if WakeMode.TIMES in modes:
        times = tuple(config.wake_times)
        occurrence = next_occurrence(times, config.zone, after=moment - 1.0)
        found += [] if occurrence is None else [occurrence.at]
    if WakeMode.AFTER_RESET in modes:
        trigger = _after_reset_trigger(config, schedule, moment)
        found += [] if trigger is None or trigger.due_at < moment else [trigger.due_at]
    return min(found, default=None)


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


# Wake modes and ends of windows, in the words that pages and terminals share. A mode without words
# here is shown by its name, so that nothing is hidden.

ENDED = "ended"
"""What stands in the place of the time until a reset that has passed."""

_WORDS = {
    "interval": "at an interval",
    "times": "at times of day",
    "after_reset": "after a reset",
    "retry": "once more",
}
"""The modes of a slot, and what a service calls a wake that is sent again."""

_REASON = re.compile(r"(\w+) mode \((.+)\)")


def mode_words(mode: str) -> str:
    """Return when a slot is woken by a mode."""
    return _WORDS.get(mode, mode)


def reason_words(reason: str) -> str:
    """Return why a wake comes, which has not come yet: `5 min after the last one`."""
    found = _REASON.fullmatch(reason)
    if found is None:
        return reason
    mode, told = found.groups()
    if mode == "interval":
        return f"{told.removesuffix(' elapsed')} after the last one"
    if mode == "after_reset":
        return f"{told.removesuffix(' after reset')} after the reset"
    return f"set for {told}" if mode == "times" else reason


def ended_words(when: str) -> str:
    """Return what is said of a window whose reset has passed, which only a reading can show."""
    return f"the window {ENDED} {when}; a reading has to confirm it"


# Confirming a wake. It counts only when a later quota reading shows a reset time that has advanced
# and lies ahead. Until then it is pending: polls come every minute for one retry window, then the
# wake is sent once more, and after a second window the slot returns to its schedule, confirmed or
# not. So no wake can block the ones after it. A window does not end before the poll that was last
# asked for: after a restart or a pause that poll may tell that the wake worked long ago.
#
#     wake sent ──> pending ──────────────> pending, retried ──────────────> normal schedule
#                      │   window ends,          │   window ends             (or disabled, at the
#                      │   send once more        │                            limit of wake errors)
#                      └────────────> confirmed <┘


class Confirmation(Enum):
    """What a quota reading says about the wake that is pending."""

    NOT_PENDING = "not_pending"
    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not_confirmed"


class WindowEnd(Enum):
    """What the end of a retry window calls for. RETRY_NOW: send the wake once more."""

    NOT_YET = "not_yet"
    RETRY_NOW = "retry_now"
    BACK_TO_SCHEDULE = "back_to_schedule"
    WAKES_DISABLED = "wakes_disabled"


class ConfirmationStep(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule after a reading, and what the reading meant."""

    schedule: SlotSchedule
    outcome: Confirmation


class WindowStep(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule after a look at the retry window, and what is to be done."""

    schedule: SlotSchedule
    outcome: WindowEnd


def wake_needed(quota: QuotaLimit | QuotaFailure, now: float) -> bool:
    """Tell from a fresh reading whether a wake could open a window.

    A missing or past reset time means that no window is open. A failed reading means yes: better
    one wake too many than a window that opens late. Two failures are clear answers, though: a
    refused key opens nothing, and an exhausted one has its window open until the reset it names.
    """
    if isinstance(quota, QuotaLimit):
        return quota.next_reset_epoch_ms is None or quota.next_reset_epoch_ms / 1000 <= now
    if quota.kind is QuotaFailureKind.EXHAUSTED:
        return quota.resets_at is None or quota.resets_at <= now
    return quota.kind is not QuotaFailureKind.REFUSED


def wake_sent(config: WakeConfig, schedule: SlotSchedule, now: float) -> SlotSchedule:
    """Return the schedule with a wake under way, and the markers of all that it serves set.

    Store it before the request leaves: if the process dies in between, the retry window finds no
    confirmation and sends the wake.
    """
    schedule = _serve_due(config, schedule, now)
    return msgspec.structs.replace(
        schedule,
        wake_pending=True,
        wake_reset_snapshot_ms=schedule.next_reset_epoch_ms,
        wake_timeout_retry_fired=False,
        **_window_from(config, now),
    )


def quota_read(schedule: SlotSchedule, reset_ms: int | None, now: float) -> ConfirmationStep:
    """Take note of the reset time in a good reading, and settle the pending wake by it.

    A reading without a reset time keeps the last one seen: the wake that is due after a reset must
    not be lost because a poll came between the two. The reset time that an exhausted key names in
    its failure is such a reading too.
    """
    outcome = _outcome_of(schedule, reset_ms, now)
    if reset_ms is not None:
        schedule = msgspec.structs.replace(schedule, next_reset_epoch_ms=reset_ms)
    if outcome is Confirmation.CONFIRMED:
        schedule = msgspec.structs.replace(
            end_pending(schedule), wake_errors=0, last_confirmed_at=now
        )
    elif outcome is Confirmation.NOT_CONFIRMED:
        schedule = msgspec.structs.replace(schedule, wake_errors=schedule.wake_errors + 1)
    return ConfirmationStep(schedule=schedule, outcome=outcome)


def _outcome_of(schedule: SlotSchedule, reset_ms: int | None, now: float) -> Confirmation:
    if not schedule.wake_pending:
        return Confirmation.NOT_PENDING
    if reset_ms is None or reset_ms / 1000 <= now:
        # A reset that has passed says that no window is open, however it compares.
        return Confirmation.NOT_CONFIRMED
    snapshot_ms = schedule.wake_reset_snapshot_ms
    advanced = snapshot_ms is None or reset_ms > snapshot_ms + SAME_RESET_MS
    # A wake sent because the pre-check failed may meet a window that was open all along. Its reset
    # cannot advance, and counting that as an error would disable a healthy slot.
    open_all_along = snapshot_ms is not None and snapshot_ms / 1000 > now
    return Confirmation.CONFIRMED if advanced or open_all_along else Confirmation.NOT_CONFIRMED


def close_window(config: WakeConfig, schedule: SlotSchedule, now: float) -> WindowStep:
    """Return what the end of a retry window calls for, and the schedule after it.

    The limit of wake errors is applied when the window of the forced retry closes. Errors come
    once a minute, so that an earlier look would disable the slot before its retry.
    """
    if not schedule.wake_pending or not _window_is_over(config, schedule, now):
        return WindowStep(schedule=schedule, outcome=WindowEnd.NOT_YET)
    if not schedule.wake_timeout_retry_fired:
        return WindowStep(
            schedule=_forced_retry(config, schedule, now), outcome=WindowEnd.RETRY_NOW
        )
    schedule = end_pending(schedule)
    if schedule.wake_errors < config.max_consecutive_errors:
        return WindowStep(schedule=schedule, outcome=WindowEnd.BACK_TO_SCHEDULE)
    reason = f"no wake was confirmed in {schedule.wake_errors} readings"
    disabled = msgspec.structs.replace(schedule, wake_auto_disabled=True, disabled_reason=reason)
    return WindowStep(schedule=disabled, outcome=WindowEnd.WAKES_DISABLED)


def _window_is_over(config: WakeConfig, schedule: SlotSchedule, now: float) -> bool:
    awaits_poll = schedule.poll_requested and config.is_polled
    if awaits_poll or is_paused(schedule, now):
        return False
    deadline = schedule.wake_retry_window_deadline
    if deadline is None:
        return True
    # A deadline this far ahead was set before the clock went back or the window was shortened.
    longest_seconds = 2 * config.wake_quota_retry_window_minutes * SECONDS_PER_MINUTE
    return now >= deadline or deadline - now > longest_seconds


def _forced_retry(config: WakeConfig, schedule: SlotSchedule, now: float) -> SlotSchedule:
    return msgspec.structs.replace(
        _serve_due(config, schedule, now),
        wake_timeout_retry_fired=True,
        **_window_from(config, now),
    )


def key_refused(
    schedule: SlotSchedule, status: int | None, problem: str = "", *, key_place: str = ""
) -> SlotSchedule:
    """Return the schedule of a slot whose key the provider refused: nothing more is sent.

    Without a status nobody was asked, because there is no key; then the problem says so. A refusal
    is an error that is not waited for to come again, and is counted and shown as one. `key_place`
    is the variable or the file with the key, if whoever was refused knows it.
    """
    place = f" in {key_place}" if key_place else ""
    refusal = problem if status is None else f"the provider refused the key{place} ({status})"
    return msgspec.structs.replace(
        end_pending(schedule),
        slot_auto_disabled=True,
        poll_requested=False,
        disabled_reason=refusal,
        consecutive_poll_errors=schedule.consecutive_poll_errors + 1,
        last_problem=problem or refusal,
    )


def end_pending(schedule: SlotSchedule) -> SlotSchedule:
    """Return the schedule with no wake under way; the count of wake errors stays."""
    return msgspec.structs.replace(
        schedule,
        wake_pending=False,
        wake_reset_snapshot_ms=None,
        wake_retry_window_deadline=None,
        wake_timeout_retry_fired=False,
    )


def _serve_due(config: WakeConfig, schedule: SlotSchedule, now: float) -> SlotSchedule:
    trigger = due_trigger(config, schedule, now)
    return schedule if trigger is None else mark_fired(schedule, trigger, now)


def _window_from(config: WakeConfig, now: float) -> dict[str, float | bool]:
    """Return the fields that every sent wake sets: a new window, and a poll at once."""
    window_seconds = config.wake_quota_retry_window_minutes * SECONDS_PER_MINUTE
    return {
        "last_wake_at": now,
        "wake_retry_window_deadline": now + window_seconds,
        "poll_requested": True,
    }


# What changes a schedule besides the clock: a start, a new configuration, a slot that is enabled. A
# start polls first and wakes only if the reading calls for it. A time of day that was not yet
# wanted when it passed is not caught up. A new configuration revives a slot, whatever disabled it.


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


def wakes_on_start(config: WakeConfig) -> bool:
    """Tell whether a start may wake the slot: as it was set, else where a mode keeps windows open.

    Whoever names only times of day wants a window at those, and a start is none of them.
    """
    if config.wake_on_start is not None:
        return config.wake_on_start and bool(config.wake_modes)
    return bool(config.wake_modes & {WakeMode.INTERVAL, WakeMode.AFTER_RESET})


def initial_wake_needed(
    config: WakeConfig, schedule: SlotSchedule, quota: QuotaLimit | QuotaFailure, now: float
) -> bool:
    """Tell from the first reading after a start whether to wake at once."""
    return wakes_on_start(config) and may_wake(schedule, now) and wake_needed(quota, now)


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
