"""Every local day has each of its times exactly once, whatever its clock does."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.slots.wakes import (
    day_occurrences,
    latest_occurrence,
    moment_of,
    next_occurrence,
    parse_time_of_day,
)
from headgate.errors import InvalidSettingError

# zone, day, time, the moment in UTC
ORDINARY_DAYS = [
    ("UTC", "2026-05-01", "09:00", "2026-05-01T09:00"),
    ("Europe/Berlin", "2026-01-15", "09:00", "2026-01-15T08:00"),
    ("Europe/Berlin", "2026-07-15", "09:00", "2026-07-15T07:00"),
    ("America/New_York", "2026-07-15", "23:59", "2026-07-16T03:59"),
    ("Asia/Kolkata", "2026-03-29", "02:30", "2026-03-28T21:00"),
    ("Asia/Kolkata", "2026-10-25", "00:00", "2026-10-24T18:30"),
]
GAPS = [
    ("Europe/Berlin", "2026-03-29", "01:59", "2026-03-29T00:59"),
    ("Europe/Berlin", "2026-03-29", "02:00", "2026-03-29T01:00"),
    ("Europe/Berlin", "2026-03-29", "02:30", "2026-03-29T01:00"),
    ("Europe/Berlin", "2026-03-29", "02:59", "2026-03-29T01:00"),
    ("Europe/Berlin", "2026-03-29", "03:00", "2026-03-29T01:00"),
    ("Europe/Berlin", "2026-03-29", "03:01", "2026-03-29T01:01"),
    ("America/New_York", "2026-03-08", "02:30", "2026-03-08T07:00"),
    ("America/New_York", "2026-03-08", "03:30", "2026-03-08T07:30"),
    ("Australia/Lord_Howe", "2026-10-04", "02:00", "2026-10-03T15:30"),
    ("Australia/Lord_Howe", "2026-10-04", "02:15", "2026-10-03T15:30"),
    ("Australia/Lord_Howe", "2026-10-04", "02:30", "2026-10-03T15:30"),
    ("America/Havana", "2026-03-08", "00:30", "2026-03-08T05:00"),
    ("Pacific/Apia", "2011-12-30", "09:00", "2011-12-30T10:00"),
]
OVERLAPS = [
    ("Europe/Berlin", "2026-10-25", "01:59", "2026-10-24T23:59"),
    ("Europe/Berlin", "2026-10-25", "02:00", "2026-10-25T00:00"),
    ("Europe/Berlin", "2026-10-25", "02:30", "2026-10-25T00:30"),
    ("Europe/Berlin", "2026-10-25", "03:00", "2026-10-25T02:00"),
    ("America/New_York", "2026-11-01", "01:30", "2026-11-01T05:30"),
    ("America/New_York", "2026-11-01", "02:00", "2026-11-01T07:00"),
    ("Australia/Lord_Howe", "2026-04-05", "01:45", "2026-04-04T14:45"),
    ("Australia/Lord_Howe", "2026-04-05", "02:00", "2026-04-04T15:30"),
    ("America/St_Johns", "2010-11-07", "00:00", "2010-11-07T02:30"),
]


@pytest.mark.parametrize(("zone", "day", "time", "expected"), ORDINARY_DAYS + GAPS + OVERLAPS)
def test_a_time_of_day_has_one_moment(zone: str, day: str, time: str, expected: str) -> None:
    moment = moment_of(date.fromisoformat(day), time, ZoneInfo(zone))
    assert datetime.fromtimestamp(moment, UTC).isoformat(timespec="minutes") == f"{expected}+00:00"


@pytest.mark.parametrize(
    "text",
    ["", "9:00", "09:0", "24:00", "12:60", "09:00:00", " 09:00", "09:00\n", "ab:cd", "0\u0669:00"],
)
def test_a_time_that_is_not_hh_mm_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidSettingError, match="wake_times") as caught:
        parse_time_of_day(text)
    assert caught.value.field == "wake_times"


def test_a_number_is_no_time() -> None:
    with pytest.raises(InvalidSettingError):
        parse_time_of_day(900)


@pytest.mark.parametrize(("text", "expected"), [("00:00", (0, 0)), ("23:59", (23, 59))])
def test_hh_mm_is_read(text: str, expected: tuple[int, int]) -> None:
    assert parse_time_of_day(text) == expected


def test_without_times_nothing_occurs() -> None:
    assert latest_occurrence((), UTC, until=0.0) is None
    assert next_occurrence((), UTC, after=0.0) is None


def test_yesterdays_last_time_is_found_after_midnight() -> None:
    zone = ZoneInfo("Europe/Berlin")
    just_after_midnight = datetime(2026, 5, 2, 0, 5, tzinfo=zone).timestamp()
    found = latest_occurrence(("09:00", "23:55"), zone, until=just_after_midnight)
    assert found is not None
    assert found.marker == "2026-05-01 23:55"


def test_a_time_already_past_is_found_though_the_date_fell_back_to_yesterday() -> None:
    # In Newfoundland clocks went back at 00:01, into the day before.
    zone = ZoneInfo("America/St_Johns")
    yesterday_again = datetime(2010, 11, 6, 23, 30, fold=1, tzinfo=zone).timestamp()
    found = latest_occurrence(("00:00",), zone, until=yesterday_again)
    assert found is not None
    assert found.marker == "2010-11-07 00:00"


ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Kolkata",
    "America/Havana",
    "America/St_Johns",
    "Antarctica/Troll",
    "Africa/Casablanca",
    "Pacific/Apia",
]
times_of_day = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.integers(0, 59))
time_lists = st.lists(times_of_day, min_size=1, max_size=5).map(tuple)


@settings(deadline=None, max_examples=200)
@given(
    zone=st.sampled_from(ZONES).map(ZoneInfo),
    times=time_lists,
    day=st.dates(date(2005, 1, 1), date(2035, 12, 31)),
)
def test_moments_never_run_backwards(zone: ZoneInfo, times: tuple[str, ...], day: date) -> None:
    days = [day_occurrences(day + timedelta(days=step), times, zone) for step in range(3)]
    moments = [occurrence.at for occurrences in days for occurrence in occurrences]
    markers = [occurrence.marker for occurrences in days for occurrence in occurrences]
    assert moments == sorted(moments)
    assert markers == sorted(markers)


@settings(deadline=None, max_examples=200)
@given(
    zone=st.sampled_from(ZONES).map(ZoneInfo),
    times=time_lists,
    moment=st.integers(1_104_537_600, 2_082_758_400),
)
def test_latest_and_next_enclose_the_moment(
    zone: ZoneInfo, times: tuple[str, ...], moment: int
) -> None:
    latest = latest_occurrence(times, zone, until=moment)
    following = next_occurrence(times, zone, after=moment)
    assert latest is not None
    assert following is not None
    assert latest.at <= moment < following.at
    reached = latest_occurrence(times, zone, until=following.at)
    assert reached is not None
    assert reached.at == following.at


def test_every_day_of_thirty_years_has_each_time_once_on_the_wall_clock() -> None:
    zone = ZoneInfo("Europe/Berlin")
    for step in range(0, 365 * 30, 3):
        day = date(2005, 1, 1) + timedelta(days=step)
        for occurrence in day_occurrences(day, ("01:30", "09:00", "23:59"), zone):
            shown = datetime.fromtimestamp(occurrence.at, zone)
            assert f"{shown:%Y-%m-%d %H:%M}" == occurrence.marker
            assert shown.fold == 0
