"""Windows are computed: periods leave no gap, and a rolling one holds its limit."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime, tzinfo
from typing import cast
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.budgets.windows import (
    BUCKETS_PER_WINDOW,
    NO_WINDOW,
    CalendarUnit,
    Window,
    WindowKind,
    bucket_start,
    format_window,
    live_from,
    parse_window,
    resets_at,
    window_words,
)
from headgate.errors import InvalidSettingError

ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/Sao_Paulo",
    "Asia/Beirut",
    "America/St_Johns",
    "America/Havana",
    "Pacific/Apia",
    "Asia/Kathmandu",
    "America/Toronto",
    "Africa/Cairo",
    "Pacific/Kwajalein",
)
HOUR = 3_600
DAY = 24 * HOUR


def unix(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


def day_in(zone: str) -> tuple[Window, tzinfo]:
    return parse_window(f"day@{zone}"), ZoneInfo(zone)


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("none", NO_WINDOW),
        ("day", Window(kind=WindowKind.CALENDAR, unit=CalendarUnit.DAY)),
        ("month", Window(kind=WindowKind.CALENDAR, unit=CalendarUnit.MONTH)),
        (
            "week@Europe/Berlin",
            Window(kind=WindowKind.CALENDAR, unit=CalendarUnit.WEEK, zone="Europe/Berlin"),
        ),
        (
            "day@America/Argentina/Buenos_Aires",
            Window(
                kind=WindowKind.CALENDAR,
                unit=CalendarUnit.DAY,
                zone="America/Argentina/Buenos_Aires",
            ),
        ),
        ("rolling:24h", Window(kind=WindowKind.ROLLING, hours=24)),
        ("rolling:1h", Window(kind=WindowKind.ROLLING, hours=1)),
        ("rolling:8784h", Window(kind=WindowKind.ROLLING, hours=8784)),
    ],
)
def test_a_window_is_read_from_its_text_and_written_back(text: str, window: Window) -> None:
    assert parse_window(text) == window
    assert format_window(window) == text


def test_a_missing_window_is_none_and_utc_need_not_be_named() -> None:
    assert parse_window(None) == NO_WINDOW
    assert parse_window("day@UTC") == parse_window("day")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hour",
        "Day",
        "day@",
        "day@/etc/passwd",
        "day@../../x",
        "day@Europe/Berlin ",
        "day@" + "a" * 65,
        "none@UTC",
        "rolling",
        "rolling:h",
        "rolling:0h",
        "rolling:24",
        "rolling:1.5h",
        "rolling:-1h",
        "rolling:8785h",
        "rolling:9999999h",
        "rolling:24h@UTC",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidSettingError, match=r"^window: "):
        parse_window(text)


@pytest.mark.parametrize(
    "text", ["rolling:1m", "rolling:24", "rolling:1.5h", "rolling", "rolling 1h"]
)
def test_a_rolling_window_in_other_units_is_told_that_hours_are_meant(text: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        parse_window(text)
    advice = "write a rolling window in whole hours, as rolling:24h"
    assert str(caught.value) == f"window: {text!r} is no window; {advice}"


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": WindowKind.CALENDAR},
        {"kind": WindowKind.ROLLING},
        {"kind": WindowKind.NONE, "hours": 1},
        {"kind": WindowKind.ROLLING, "hours": 1, "unit": CalendarUnit.DAY},
        {"kind": WindowKind.ROLLING, "hours": 1, "zone": "Europe/Berlin"},
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidSettingError):
        Window(**fields)  # type: ignore[arg-type]


def test_a_zone_that_was_not_resolved_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="Europe/Berlin was not resolved"):
        bucket_start(parse_window("day@Europe/Berlin"), 0.0, UTC)


def test_without_a_window_everything_counts_and_nothing_resets() -> None:
    assert bucket_start(NO_WINDOW, 1e9, UTC) == 0
    assert live_from(NO_WINDOW, 1e9, UTC) == 0
    assert resets_at(NO_WINDOW, 1e9, UTC, oldest_bucket=0) is None


@pytest.mark.parametrize(
    ("text", "now", "start", "end"),
    [
        ("day", "2026-04-12T15:00+00:00", "2026-04-12T00:00+00:00", "2026-04-13T00:00+00:00"),
        ("day", "2026-04-12T00:00+00:00", "2026-04-12T00:00+00:00", "2026-04-13T00:00+00:00"),
        ("week", "2026-04-12T15:00+00:00", "2026-04-06T00:00+00:00", "2026-04-13T00:00+00:00"),
        ("week", "2026-04-13T00:00+00:00", "2026-04-13T00:00+00:00", "2026-04-20T00:00+00:00"),
        ("month", "2026-01-31T15:00+00:00", "2026-01-01T00:00+00:00", "2026-02-01T00:00+00:00"),
        ("month", "2024-02-29T15:00+00:00", "2024-02-01T00:00+00:00", "2024-03-01T00:00+00:00"),
        ("month", "2025-12-31T23:59+00:00", "2025-12-01T00:00+00:00", "2026-01-01T00:00+00:00"),
        # Spring and autumn in Berlin: days of 23 and 25 hours, at their own midnights.
        (
            "day@Europe/Berlin",
            "2026-03-29T12:00+02:00",
            "2026-03-29T00:00+01:00",
            "2026-03-30T00:00+02:00",
        ),
        (
            "day@Europe/Berlin",
            "2026-10-25T12:00+01:00",
            "2026-10-25T00:00+02:00",
            "2026-10-26T00:00+01:00",
        ),
        (
            "month@Europe/Berlin",
            "2026-03-31T23:59+02:00",
            "2026-03-01T00:00+01:00",
            "2026-04-01T00:00+02:00",
        ),
        # Midnight does not exist: the day begins at 01:00.
        (
            "day@America/Sao_Paulo",
            "2018-11-04T01:00-02:00",
            "2018-11-04T01:00-02:00",
            "2018-11-05T00:00-02:00",
        ),
        (
            "day@Asia/Beirut",
            "2022-03-27T12:00+03:00",
            "2022-03-27T01:00+03:00",
            "2022-03-28T00:00+03:00",
        ),
        # The clock jumps from 23:30 to 00:30: the day begins at 00:30.
        (
            "day@America/Toronto",
            "1919-03-31T12:00-04:00",
            "1919-03-31T00:30-04:00",
            "1919-04-01T00:00-04:00",
        ),
        # The hour before midnight comes twice: the day has 25 hours.
        (
            "day@Asia/Beirut",
            "2022-10-29T23:30+02:00",
            "2022-10-29T00:00+03:00",
            "2022-10-30T00:00+02:00",
        ),
        # The hour after midnight comes twice: the day begins at the first.
        (
            "day@America/Havana",
            "2026-11-01T00:30-05:00",
            "2026-11-01T00:00-04:00",
            "2026-11-02T00:00-05:00",
        ),
        # At 00:01 the clock goes back to 23:01: the new day has begun and stays.
        (
            "day@America/St_Johns",
            "2010-11-06T23:30-03:30",
            "2010-11-07T00:00-02:30",
            "2010-11-08T00:00-03:30",
        ),
        # A day that the island skipped belongs to nobody.
        (
            "day@Pacific/Apia",
            "2011-12-29T23:59-10:00",
            "2011-12-29T00:00-10:00",
            "2011-12-31T00:00+14:00",
        ),
    ],
)
def test_a_calendar_period_begins_at_local_midnight(
    text: str, now: str, start: str, end: str
) -> None:
    window = parse_window(text)
    tz: tzinfo = UTC if window.zone == "UTC" else ZoneInfo(window.zone)

    assert bucket_start(window, unix(now), tz) == unix(start)
    assert live_from(window, unix(now), tz) == unix(start)
    assert resets_at(window, unix(now), tz) == unix(end)


def test_an_instant_just_before_midnight_is_not_rounded_into_the_next_day() -> None:
    midnight = unix("2026-04-13T00:00+00:00")
    just_before = math.nextafter(midnight, 0.0)

    assert resets_at(parse_window("day"), just_before, UTC) == midnight


CALENDARS = st.builds(
    lambda unit, zone: parse_window(f"{unit}@{zone}"),
    st.sampled_from(["day", "week", "month"]),
    st.sampled_from(ZONES),
)
SECONDS = st.integers(unix("1915-01-01T00:00+00:00"), unix("2037-01-01T00:00+00:00"))


@given(CALENDARS, SECONDS)
@settings(deadline=None, max_examples=300)
def test_calendar_periods_partition_time(window: Window, now: int) -> None:
    tz = ZoneInfo(window.zone)
    start = bucket_start(window, now, tz)
    end = cast("int", resets_at(window, now, tz))

    assert start <= now < end
    assert bucket_start(window, start, tz) == start
    assert bucket_start(window, end - 1, tz) == start
    assert bucket_start(window, end, tz) == end
    assert resets_at(window, end - 1, tz) == end


@pytest.mark.parametrize("zone", ZONES)
def test_the_period_never_goes_back_in_time(zone: str) -> None:
    window, tz = day_in(zone)
    starts = [
        bucket_start(window, now, tz)
        for year in (1919, 2010, 2018, 2022)
        for now in range(
            unix(f"{year}-01-01T00:00+00:00"), unix(f"{year + 1}-01-01T00:00+00:00"), 1_740
        )
    ]

    assert starts == sorted(starts)


def test_a_rolling_window_counts_a_bucket_until_the_whole_of_it_has_left() -> None:
    window = parse_window("rolling:24h")
    bucket = 100 * HOUR

    assert bucket_start(window, bucket + HOUR - 0.001, UTC) == bucket
    assert live_from(window, bucket + 25 * HOUR - 0.001, UTC) == bucket
    assert live_from(window, bucket + 25 * HOUR, UTC) == bucket + HOUR
    assert resets_at(window, bucket + 2 * HOUR, UTC, oldest_bucket=bucket) == bucket + 25 * HOUR


def test_an_empty_rolling_window_has_nothing_to_reset() -> None:
    assert resets_at(parse_window("rolling:5h"), 1e9, UTC) is None


@given(st.integers(1, 8_784), st.floats(0, 4e9))
@settings(deadline=None)
def test_rolling_buckets_partition_time_and_their_number_is_bounded(hours: int, now: float) -> None:
    window = Window(kind=WindowKind.ROLLING, hours=hours)
    start = bucket_start(window, now, UTC)
    width = hours * HOUR // BUCKETS_PER_WINDOW
    live = range(live_from(window, now, UTC), start + 1, width)

    assert start <= now < start + width
    assert len(live) == BUCKETS_PER_WINDOW + 1
    for bucket in live:
        leaves = resets_at(window, now, UTC, oldest_bucket=bucket)
        assert leaves is not None
        assert leaves > now
        assert live_from(window, leaves, UTC) == bucket + width
        assert live_from(window, leaves - 1, UTC) == bucket


REQUESTS = st.lists(st.tuples(st.floats(0, 2 * HOUR), st.integers(1, 60)), min_size=1, max_size=60)


@given(st.sampled_from([1, 5, 24]), REQUESTS)
@settings(deadline=None)
def test_no_interval_as_long_as_a_rolling_window_holds_more_than_the_limit(
    hours: int, requests: list[tuple[float, int]]
) -> None:
    window, limit = Window(kind=WindowKind.ROLLING, hours=hours), 100
    buckets: Counter[int] = Counter()
    granted: list[tuple[float, int]] = []
    now = 1e9
    for pause, amount in requests:
        now += pause * hours / 5
        earliest = live_from(window, now, UTC)
        if sum(sum_ for start, sum_ in buckets.items() if start >= earliest) + amount <= limit:
            buckets[bucket_start(window, now, UTC)] += amount
            granted.append((now, amount))

    for begin, _ in granted:
        held = sum(amount for at, amount in granted if begin <= at <= begin + hours * HOUR)
        assert held <= limit


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("none", "in all"),
        ("day", "by the day of UTC"),
        ("week@Europe/Berlin", "by the week, by the clock of Europe/Berlin"),
        ("rolling:1h", "over any hour"),
        ("rolling:24h", "over any 24 hours"),
    ],
)
def test_a_window_is_said_in_words(text: str, words: str) -> None:
    assert window_words(text) == words
