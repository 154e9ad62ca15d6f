"""Local times of day, turned into moments.

A wake time is a wall clock's `HH:MM`, and a wall clock skips and repeats. The rule: every local
day has each of its times exactly once. A time that falls into a gap happens at the first moment
after the gap; one that the clock shows twice happens at its first showing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime, timedelta, tzinfo
from functools import lru_cache

import msgspec

from headgate.errors import InvalidSettingError

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
