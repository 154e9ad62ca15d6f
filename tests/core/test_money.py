"""Amounts enter the books as integers, rounded up, or not at all."""

from __future__ import annotations

import decimal
from decimal import Decimal
from fractions import Fraction
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.money import (
    MAX_LIMIT_MICRO_USD,
    MAX_LIMIT_TOKENS,
    MAX_RESERVATION_MICRO_USD,
    MAX_RESERVATION_TOKENS,
    format_usd,
    plain_usd,
    read_usd,
    to_limit_micro_usd,
    to_limit_tokens,
    to_micro_usd,
    to_tokens,
    to_usd_float,
    to_written_limit_micro_usd,
)
from headgate.errors import InvalidAmountError


class LoudFloat(float):
    """A float that prints as something that is no number, as some array libraries' do."""

    def __repr__(self) -> str:
        return f"LoudFloat({float(self)})"


@pytest.mark.parametrize(
    ("amount", "micro_usd"),
    [
        (0, 0),
        (1, 1_000_000),
        (50, 50_000_000),
        (0.07, 70_000),
        (0.1, 100_000),
        (0.29, 290_000),
        (1e-6, 1),
        (1e-7, 1),
        (1e-300, 1),
        (-0.0, 0),
        (0.1 + 0.2, 300_001),
        (1e6, 1_000_000_000_000),
        (LoudFloat(0.07), 70_000),
        ("0.07", 70_000),
        (" 12.50 ", 12_500_000),
        ("+3", 3_000_000),
        (".5", 500_000),
        ("5.", 5_000_000),
        ("1e-3", 1_000),
        ("0.0000001", 1),
        ("0.0000010000000000000000000000000000000000000001", 2),
        ("1e-999999999", 1),
        ("000001", 1_000_000),
        (Decimal("0.07"), 70_000),
        (Decimal("0.0700000000000000066613"), 70_001),
        (Decimal("1.0000001"), 1_000_001),
        (Decimal("-0"), 0),
        (Decimal("1E-1000000"), 1),
        (Decimal("1E+6"), 1_000_000_000_000),
    ],
)
def test_an_amount_is_rounded_up_to_a_micro_dollar(
    amount: Decimal | float | str, micro_usd: int
) -> None:
    booked = to_micro_usd(amount)

    assert booked == micro_usd
    assert type(booked) is int


@pytest.mark.parametrize(
    ("amount", "says"),
    [
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (float("-inf"), "finite"),
        (Decimal("NaN"), "finite"),
        (Decimal("sNaN"), "finite"),
        (Decimal("Infinity"), "finite"),
        (-1, "negative"),
        (-1e-12, "negative"),
        ("-0.01", "negative"),
        (Decimal("-1E-30"), "negative"),
        (1_000_001, "more than $1000000.00"),
        ("1000000.0000001", "more than $1000000.00"),
        ("1e999999", "more than $1000000.00"),
        pytest.param(10**5_000, "more than $1000000.00", id="an int too long to print"),
        (1e300, "more than $1000000.00"),
        (True, "is a bool"),
        (None, "is a NoneType"),
        (b"1", "is a bytes"),
        (Fraction(1, 3), "is a Fraction"),
        ("", "is not an amount"),
        ("  ", "is not an amount"),
        ("$5", "without $"),
        ("1,000", "is not an amount"),
        ("1_000", "is not an amount"),
        ("nan", "is not an amount"),
        ("inf", "is not an amount"),
        ("0x10", "is not an amount"),
        ("\N{FULLWIDTH DIGIT ONE}", "is not an amount"),
        ("1e9999999999999999999999", "is not an amount"),
    ],
)
def test_what_is_no_amount_is_refused_by_field(amount: object, says: str) -> None:
    with pytest.raises(InvalidAmountError) as refusal:
        to_micro_usd(cast("float", amount), field="actual_usd")

    assert refusal.value.field == "actual_usd"
    assert says in str(refusal.value)


def test_a_limit_may_be_larger_than_a_reservation() -> None:
    assert to_limit_micro_usd("1000000000") == MAX_LIMIT_MICRO_USD
    with pytest.raises(InvalidAmountError, match="limit_usd: is more than"):
        to_limit_micro_usd("1000000000.01")


@pytest.mark.parametrize("text", ["0", "0.000001", "12.50", "1000000000", "0.10000000", "1e-6"])
def test_a_limit_that_was_written_is_the_limit(text: str) -> None:
    assert to_written_limit_micro_usd(text) == to_limit_micro_usd(text)


@pytest.mark.parametrize("text", ["0.0000001", "1.0000005", "1e-99999", f"1.{'0' * 50}1"])
def test_a_limit_that_would_be_rounded_is_refused(text: str) -> None:
    with pytest.raises(InvalidAmountError, match="limit_usd: is finer than a micro-dollar; write"):
        to_written_limit_micro_usd(text)


def test_the_program_s_own_decimal_settings_do_not_change_an_amount() -> None:
    with decimal.localcontext(decimal.Context(prec=2, rounding=decimal.ROUND_DOWN)):
        assert to_micro_usd("123456.7890123") == 123_456_789_013
        assert to_micro_usd(0.07) == 70_000


def test_full_scopes_stay_exact_in_doubles() -> None:
    assert 8 * MAX_LIMIT_MICRO_USD + MAX_RESERVATION_MICRO_USD < 2**53
    assert 8 * MAX_LIMIT_TOKENS + MAX_RESERVATION_TOKENS < 2**53


@pytest.mark.parametrize("amount", [0, 1, 10**12])
def test_a_whole_number_of_tokens_is_taken_as_it_is(amount: int) -> None:
    assert to_tokens(amount) == amount


@pytest.mark.parametrize("amount", [-1, 10**12 + 1, 1.0, "1", True, None, Decimal(1)])
def test_other_tokens_are_refused_by_field(amount: object) -> None:
    with pytest.raises(InvalidAmountError, match=r"^estimate_tokens: "):
        to_tokens(cast("int", amount), field="estimate_tokens")


def test_a_token_limit_may_be_larger_than_a_reservation() -> None:
    assert to_limit_tokens(10**15) == 10**15
    with pytest.raises(InvalidAmountError, match="limit_tokens"):
        to_limit_tokens(10**15 + 1)


@pytest.mark.parametrize(
    ("micro_usd", "text"),
    [
        (0, "$0.00"),
        (1, "$0.000001"),
        (10, "$0.00001"),
        (70_000, "$0.07"),
        (72_500, "$0.0725"),
        (500_000, "$0.50"),
        (32_400_000, "$32.40"),
        (50_000_000, "$50.00"),
        (1_234_567_891_234, "$1234567.891234"),
        (-1_500_000, "-$1.50"),
    ],
)
def test_money_is_written_with_two_to_six_decimals(micro_usd: int, text: str) -> None:
    assert format_usd(micro_usd) == text


@given(st.integers(0, MAX_RESERVATION_MICRO_USD))
@settings(deadline=None)
def test_an_amount_survives_being_written_and_read(micro_usd: int) -> None:
    assert to_micro_usd(format_usd(micro_usd).removeprefix("$")) == micro_usd
    assert to_micro_usd(to_usd_float(micro_usd)) == micro_usd


@given(st.decimals(min_value=0, max_value=1_000_000, allow_nan=False))
@settings(deadline=None)
def test_rounding_never_loses_and_adds_less_than_a_micro_dollar(amount: Decimal) -> None:
    exact = Fraction(amount) * 1_000_000
    assert 0 <= to_micro_usd(amount) - exact < 1


@given(st.integers(-(2**80), 2**80))
@settings(deadline=None)
def test_any_balance_is_read_as_it_was_written(micro_usd: int) -> None:
    assert read_usd(plain_usd(micro_usd)) == micro_usd
