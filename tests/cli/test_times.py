"""Times on the command line, and in what is printed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click
import pytest

from cli.said import in_zone
from headgate.cli.output import (
    clock_time,
    countdown,
    duration,
    from_now,
    length_of,
    moment,
    moment_of,
    past_moment,
    with_local_times,
    with_utc_option,
)

NOW = datetime(2027, 1, 15, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86400), ("0.5s", 0.5), (" 5m ", 300)],
)
def test_a_length_of_time_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert duration(text) == seconds
    assert moment(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "m", "-5m", "0s", "1e9d", "9999999d", "10 minutes", "५m"]
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="10m"):
        duration(text)


@pytest.mark.parametrize("text", ["2030-01-31T18:00:00", "2030-01-31", "tomorrow"])
def test_a_moment_needs_a_zone(text: str) -> None:
    with pytest.raises(click.BadParameter, match="2030-01-31T18:00:00Z"):
        moment(text)


def test_a_moment_goes_on_as_it_was_written() -> None:
    assert moment("2030-01-31T18:00:00+01:00") == "2030-01-31T18:00:00+01:00"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (3.21, "3.2 s"),
        (59, "59 s"),
        (89, "89 s"),
        (720, "12 min"),
        (5399, "90 min"),
        (7200, "2 h"),
        (86400 * 3, "3 days"),
    ],
)
def test_a_length_is_told_in_the_unit_that_reads_best(seconds: float, text: str) -> None:
    assert length_of(seconds) == text
    assert from_now(NOW + timedelta(seconds=seconds), NOW) == f"in {text}"
    assert from_now(NOW - timedelta(seconds=seconds), NOW) == f"{text} ago"


def test_a_time_that_no_calendar_has_is_none() -> None:
    assert moment_of(1e30) is None
    assert moment_of(0) == datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "now"),
        (0, "now"),
        (4.2, "4.2 s"),
        (45, "45 s"),
        (600, "10 min"),
        (3_600, "1 h"),
        (4 * 3_600 + 12 * 60 + 20, "4 h 12 min"),
        (5 * 3_600 - 1, "5 h"),
        (86_400 * 30, "30 days"),
    ],
)
def test_a_countdown_is_told_to_the_minute(seconds: float, text: str) -> None:
    assert countdown(NOW + timedelta(seconds=seconds), NOW) == text


def test_a_length_of_time_can_be_meant_backwards() -> None:
    then = datetime.fromisoformat(past_moment("2h"))
    ago = datetime.now(UTC) - then
    assert timedelta(hours=2) <= ago < timedelta(hours=2, minutes=1)
    assert past_moment("2030-01-31T18:00:00Z") == "2030-01-31T18:00:00Z"


SUMMER = datetime(2026, 7, 1, 12, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("zone", "text"),
    [
        ("Europe/Berlin", "2026-07-01 14:30:00 CEST"),
        ("America/New_York", "2026-07-01 08:30:00 EDT"),
        ("Asia/Tokyo", "2026-07-01 21:30:00 JST"),
        ("UTC", "2026-07-01 12:30:00 UTC"),
    ],
)
def test_a_time_is_shown_in_the_local_zone_with_its_name(zone: str, text: str) -> None:
    with in_zone(zone):
        assert clock_time(SUMMER) == text
        said = with_local_times("budget a is full, until 2026-07-01 12:30:00 UTC; ask again")
    assert said == f"budget a is full, until {text}; ask again"


def test_a_time_of_today_is_shown_without_its_day() -> None:
    with in_zone("Europe/Berlin"):
        assert clock_time(SUMMER, now=SUMMER + timedelta(hours=9)) == "14:30:00 CEST"
        assert clock_time(SUMMER, now=SUMMER + timedelta(hours=10)) == "2026-07-01 14:30:00 CEST"


def test_every_command_can_show_utc() -> None:
    shown: list[str] = []

    @click.group(invoke_without_command=True)
    def outer() -> None:
        shown.append(clock_time(SUMMER))

    @outer.command()
    def inner() -> None:
        shown.append(clock_time(SUMMER))

    with_utc_option(outer)
    local, utc = "2026-07-01 14:30:00 CEST", "2026-07-01 12:30:00 UTC"
    for arguments, times in {
        ("--utc",): [utc],
        (): [local],
        ("inner", "--utc"): [local, utc],
        ("--utc", "inner"): [utc, utc],
        ("inner",): [local, local],
    }.items():
        with in_zone("Europe/Berlin"):
            outer.main(list(arguments), standalone_mode=False)
        assert shown == times
        shown.clear()
