"""Figures as people read them, on pages and in terminals."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from headgate.core import text as figure_texts


@pytest.mark.parametrize(
    ("micro_usd", "shown"),
    [
        (0, "$0.00"),
        (1, "$0.000001"),
        (99, "$0.000099"),
        (3_213, "$0.0032"),
        (12_300, "$0.01"),
        (190_554, "$0.19"),
        (1_500_000, "$1.50"),
        (1_234_567_890_000, "$1,234,567.89"),
        (-2_500_000, "-$2.50"),
        (-100, "-$0.0001"),
    ],
)
def test_amounts_are_in_cents_and_small_ones_more_exact(micro_usd: int, shown: str) -> None:
    assert figure_texts.usd(micro_usd) == shown


@pytest.mark.parametrize(
    ("micro_usd", "shown"),
    [
        (0, "$0.00"),
        (42, "$0.000042"),
        (6_000, "$0.0060"),
        (22_848, "$0.0228"),
        (999_999, "$1.0000"),
        (1_500_000, "$1.50"),
        (-22_848, "-$0.0228"),
    ],
)
def test_amounts_of_a_column_have_equally_many_decimals_below_a_dollar(
    micro_usd: int, shown: str
) -> None:
    assert figure_texts.column_usd(micro_usd) == shown


def test_the_exact_amount_is_there_for_whoever_asks_for_it() -> None:
    assert figure_texts.exact_usd(1_234_190_554) == "$1,234.190554"
    assert figure_texts.exact_usd(-2_500_000) == "-$2.50"


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (1_234_567, "1.2M"),
        (250_000_000, "250M"),
        (3_000_000_000, "3.0G"),
        (9.44, "9.4"),
        (9.96, "10"),
        (29.44, "29"),
        (194.03, "194"),
    ],
)
def test_numbers_are_short(number: float, shown: str) -> None:
    assert figure_texts.count(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0123, "12 ms"),
        (5.44, "5.4 s"),
        (42.4, "42 s"),
        (60, "1 min"),
        (90, "1 min 30 s"),
        (3_600, "1 h"),
        (3_725, "1 h 2 min"),
        (90_000, "1 d 1 h"),
        (-90, "-1 min 30 s"),
    ],
)
def test_a_length_of_time_has_its_two_largest_units(seconds: float, shown: str) -> None:
    assert figure_texts.duration(seconds) == shown


@pytest.mark.parametrize(
    ("away", "shown"), [(0.4, "now"), (-42, "42 s ago"), (3_660, "in 1 h 1 min")]
)
def test_a_time_is_told_from_now(away: float, shown: str) -> None:
    assert figure_texts.relative(1_000.0 + away, 1_000.0) == shown


def test_a_time_is_exact_for_programs_and_says_its_zone() -> None:
    moment = datetime(2026, 11, 15, 20, 16, 5, tzinfo=UTC)
    assert (
        figure_texts.iso(moment) == figure_texts.iso(moment.timestamp()) == "2026-11-15T20:16:05Z"
    )
    assert figure_texts.clock(moment) == "2026-11-15 20:16:05 UTC"


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "0 %"), (0.024, "2.4 %"), (0.1, "10 %"), (0.449, "45 %")]
)
def test_small_shares_have_a_decimal(share: float, shown: str) -> None:
    assert figure_texts.percent(share) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("32.40", "$32.40"),
        ("-1.50", "-$1.50"),
        ("0.000001", "$0.000001"),
        # A float has no such number.
        ("9007199254.740993", "$9,007,199,254.74"),
        (None, "none"),
    ],
)
def test_an_amount_of_a_body_is_read_as_it_was_written(text: str | None, shown: str) -> None:
    assert figure_texts.dollars(text) == shown
