"""Budget windows: which part of the past counts against a limit.

A window is none (all of it counts), calendar (this day, week or month in a zone) or rolling (the
last so many hours). Amounts are kept in buckets, one balance per scope and `bucket_start`, and an
amount stays in the bucket in which it was reserved, also when it settles later. Only a change of
the window itself moves amounts: each to the bucket of the time at which it was reserved.

A bucket that left its window long ago is dropped at some time, and never by the word of a clock
alone: `KEPT_BUCKETS` later ones must have been used since.

Rule: windows are computed from timestamps. What counts at `now` is every bucket that starts at or
after `live_from`; nothing is ever reset by a job, so no reset can be late, lost or doubled.

A calendar period has one bucket. It begins at the first instant at which the local clock shows its
first day: after the gap when clocks jump over midnight, at the first midnight when there are two.
A rolling window has 24 buckets to its length, and one counts until the whole of it is older than
the window. So up to one bucket's width too much counts, never too little: no stretch of time as
long as the window holds more than the limit.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from datetime import UTC, date, datetime, timedelta, tzinfo
from enum import Enum
from functools import lru_cache

import msgspec

from headgate.errors import InvalidSettingError

UTC_NAME = "UTC"
BUCKETS_PER_WINDOW = 24
MAX_ROLLING_HOURS = 366 * 24

KEPT_BUCKETS = 2 * BUCKETS_PER_WINDOW
"""How many of the latest buckets of a scope are kept, whatever time it is.

A clock that jumps ahead makes all of a window look old. What counted before the jump is still there
when the clock is set back, unless the scope was used in so many later buckets: two windows full.
"""

_SECONDS_PER_HOUR = 3_600
_ONE_DAY = timedelta(days=1)
_ROLLING = re.compile(r"rolling:([0-9]{1,6})h")
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9][A-Za-z0-9_+-]*)*")
_MAX_ZONE_LENGTH = 64
_HOURS = "write a rolling window in whole hours, as rolling:24h"
_EXAMPLES = "write none, day, week, month, week@Europe/Berlin or rolling:24h"


class WindowKind(Enum):
    """How a window's beginning is found."""

    NONE = "none"
    CALENDAR = "calendar"
    ROLLING = "rolling"


class CalendarUnit(Enum):
    """The period of a calendar window; a week begins on Monday."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A window as plain data: `unit` and `zone` belong to calendar ones, `hours` to rolling ones.

    The zone is a name; whoever reads it resolves it once and passes the `tzinfo` along.
    """

    kind: WindowKind = WindowKind.NONE
    unit: CalendarUnit | None = None
    zone: str = UTC_NAME
    hours: int | None = None

    def __post_init__(self) -> None:
        is_calendar = self.kind is WindowKind.CALENDAR
        is_rolling = self.kind is WindowKind.ROLLING
        if is_calendar != (self.unit is not None) or is_rolling != (self.hours is not None):
            problem = f"{self.kind.value} does not go with these fields"
            raise InvalidSettingError("window", f"{problem}; {_EXAMPLES}")
        if self.hours is not None and not 1 <= self.hours <= MAX_ROLLING_HOURS:
            problem = f"rolling hours must be between 1 and {MAX_ROLLING_HOURS}"
            raise InvalidSettingError("window", problem)
        if not is_calendar and self.zone != UTC_NAME:
            raise InvalidSettingError("window", "only day, week and month have a zone")
        if len(self.zone) > _MAX_ZONE_LENGTH or not _ZONE.fullmatch(self.zone):
            problem = "the zone is not an IANA name; write one as Europe/Berlin"
            raise InvalidSettingError("window", problem)


NO_WINDOW = Window()


def parse_window(text: str | None) -> Window:
    """Read a window from its text: `none`, `day`, `week@Europe/Berlin`, `rolling:24h`."""
    if text is None or text == WindowKind.NONE.value:
        return NO_WINDOW
    rolling = _ROLLING.fullmatch(text)
    if rolling is not None:
        return Window(kind=WindowKind.ROLLING, hours=int(rolling[1]))
    name, at, zone = text.partition("@")
    try:
        unit = CalendarUnit(name)
    except ValueError:
        advice = _HOURS if name.startswith(WindowKind.ROLLING.value) else _EXAMPLES
        raise InvalidSettingError("window", f"{text[:60]!r} is no window; {advice}") from None
    return Window(kind=WindowKind.CALENDAR, unit=unit, zone=zone if at else UTC_NAME)


def format_window(window: Window) -> str:
    """Write a window as the text that `parse_window` reads."""
    if window.hours is not None:
        return f"rolling:{window.hours}h"
    if window.unit is None:
        return WindowKind.NONE.value
    suffix = "" if window.zone == UTC_NAME else f"@{window.zone}"
    return f"{window.unit.value}{suffix}"


def window_words(text: str) -> str:
    """Return a window in words, after "counted": `by the day of UTC`, `over any 24 hours`."""
    window = parse_window(text)
    if window.hours is not None:
        return "over any hour" if window.hours == 1 else f"over any {window.hours} hours"
    if window.unit is None:
        return "in all"
    zone = f" of {UTC_NAME}" if window.zone == UTC_NAME else f", by the clock of {window.zone}"
    return f"by the {window.unit.value}{zone}"


def bucket_start(window: Window, now: float, tz: tzinfo) -> int:
    """Give the bucket in which an amount reserved at `now` is kept: 0 without a window."""
    if window.hours is not None:
        width = _bucket_seconds(window.hours)
        return math.floor(now) // width * width
    if window.unit is None:
        return 0
    return _day_start(_period_first_day(window, window.unit, now, tz), tz)


def live_from(window: Window, now: float, tz: tzinfo) -> int:
    """Give the earliest `bucket_start` that counts at `now`; every later bucket counts too.

    Later than `now` as well: a process whose clock runs ahead must not hide what it holds.
    """
    current = bucket_start(window, now, tz)
    if window.hours is None:
        return current
    return current - window.hours * _SECONDS_PER_HOUR


def counted_buckets(window: Window, now: float, tz: tzinfo) -> list[int]:
    """Give the buckets that count at `now`, the earliest first; each lasts until the next begins.

    The last one lasts for ever: an amount of a clock that runs ahead is counted in it.
    """
    current, earliest = bucket_start(window, now, tz), live_from(window, now, tz)
    if window.hours is None:
        return [current]
    return list(range(earliest, current + 1, _bucket_seconds(window.hours)))


def period_end(window: Window, start: int, tz: tzinfo) -> int | None:
    """Give the end of a bucket that begins at `start`; None without a window."""
    if window.hours is not None:
        return start + _bucket_seconds(window.hours)
    return resets_at(window, start, tz)


def resets_at(
    window: Window, now: float, tz: tzinfo, *, oldest_bucket: int | None = None
) -> int | None:
    """Tell when counted amounts next leave the window; None if waiting frees nothing.

    A calendar window empties at once. A rolling one empties bucket by bucket, so it is asked about
    the oldest counted bucket that holds anything.
    """
    if window.hours is not None:
        if oldest_bucket is None:
            return None
        return oldest_bucket + _bucket_seconds(window.hours) + window.hours * _SECONDS_PER_HOUR
    if window.unit is None:
        return None
    first = _period_first_day(window, window.unit, now, tz)
    return _day_start(_next_first_day(window.unit, first), tz)


def _period_first_day(window: Window, unit: CalendarUnit, now: float, tz: tzinfo) -> date:
    if tz is UTC and window.zone != UTC_NAME:
        problem = f"the zone {window.zone} was not resolved; pass its tzinfo"
        raise InvalidSettingError("window", problem)
    day = _day_at(math.floor(now), tz)
    if unit is CalendarUnit.MONTH:
        return day.replace(day=1)
    return day - timedelta(days=day.weekday()) if unit is CalendarUnit.WEEK else day


def _bucket_seconds(hours: int) -> int:
    return hours * _SECONDS_PER_HOUR // BUCKETS_PER_WINDOW


def _next_first_day(unit: CalendarUnit, first: date) -> date:
    if unit is CalendarUnit.MONTH:
        return (first + timedelta(days=31)).replace(day=1)
    return first + timedelta(days=7 if unit is CalendarUnit.WEEK else 1)


def _day_at(second: int, tz: tzinfo) -> date:
    """Give the latest day that has begun.

    Not the date that the clock shows: where it is set back over midnight the old date returns for
    an hour, and a budget must not return to a period that it has left.
    """
    day = datetime.fromtimestamp(second, tz).date()
    while _day_start(day + _ONE_DAY, tz) <= second:
        day += _ONE_DAY
    return day


@lru_cache(maxsize=4_096)
def _day_start(day: date, tz: tzinfo) -> int:
    midnight = datetime(day.year, day.month, day.day, tzinfo=tz)
    earlier_offset = int(midnight.timestamp())
    later_offset = int(midnight.replace(fold=1).timestamp())
    if later_offset >= earlier_offset:
        return earlier_offset
    # Midnight falls into a gap. The jump lies between the two readings of it, and need not lie at
    # midnight itself: Toronto went from 23:30 to 00:30 in 1919.
    candidates = range(later_offset, earlier_offset)
    jump = bisect_left(
        candidates, day, key=lambda second: datetime.fromtimestamp(second, tz).date()
    )
    return later_offset + jump
