"""Money and tokens as integers: the one door through which an amount enters a ledger.

Rule: a float never touches a balance. Every amount is turned into whole micro-dollars here,
rounded up, because a fraction that is rounded down a million times is money nobody held.

The ceilings keep sums exact on every backend. One of them adds in doubles, which are exact up to
2**53, about 9.007e15: the largest limit is a ninth of that, the largest reservation a nine
thousandth, so a full scope with a reservation on top is still counted to the micro-dollar. Where
nothing is limited, no more is held than `MAX_BALANCE`, and what is booked stops growing there: two
such amounts can still be added.
"""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MIN_EMIN, ROUND_CEILING, Context, Decimal, InvalidOperation
from functools import lru_cache
from typing import NewType

import msgspec

from headgate.errors import InvalidAmountError

MicroUsd = NewType("MicroUsd", int)
Tokens = NewType("Tokens", int)

MICRO_PER_USD = 1_000_000
MAX_RESERVATION_MICRO_USD = MicroUsd(1_000_000 * MICRO_PER_USD)
MAX_LIMIT_MICRO_USD = MicroUsd(1_000_000_000 * MICRO_PER_USD)
MAX_RESERVATION_TOKENS = Tokens(10**12)
MAX_LIMIT_TOKENS = Tokens(10**15)
MAX_BALANCE = 4 * 10**15
"""The most of a column of a ledger, in micro-dollars and in tokens alike."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MICRO_DOLLAR = Decimal("0.000001")
# The program's own decimal context may be set to any precision; amounts must not depend on it.
_EXACT = Context(prec=40, rounding=ROUND_CEILING, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])
_SHOWN_CHARACTERS = 40
MAX_AMOUNT_LENGTH = 100
"""How long a written amount may be: nobody means more digits, and those that are read are kept."""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The columns of a ledger: four kinds of amount, each in dollars and in tokens.

    `unaccepted` is what somebody claims beyond what it may charge; it does not count.
    """

    spent_micro_usd: MicroUsd = MicroUsd(0)
    reserved_micro_usd: MicroUsd = MicroUsd(0)
    overrun_micro_usd: MicroUsd = MicroUsd(0)
    spent_tokens: Tokens = Tokens(0)
    reserved_tokens: Tokens = Tokens(0)
    overrun_tokens: Tokens = Tokens(0)
    unaccepted_micro_usd: MicroUsd = MicroUsd(0)
    unaccepted_tokens: Tokens = Tokens(0)


def to_micro_usd(amount: Decimal | float | str, *, field: str = "amount_usd") -> MicroUsd:
    """Turn dollars into micro-dollars, rounded up; refuse what one reservation cannot hold.

    A float is read as the shortest decimal that denotes it, so 0.07 is 70,000 micro-dollars.
    """
    return _to_micro_usd(amount, field=field, ceiling=MAX_RESERVATION_MICRO_USD)


def to_signed_micro_usd(amount: Decimal | float | str, *, field: str = "usd") -> MicroUsd:
    """Turn dollars that are added or taken away into micro-dollars, rounded away from zero."""
    dollars = _to_decimal(amount, field)
    size = _to_micro_usd(abs(dollars), field=field, ceiling=MAX_LIMIT_MICRO_USD)
    return MicroUsd(-size if dollars < 0 else size)


def to_signed_tokens(amount: int, *, field: str = "tokens") -> Tokens:
    """Check a number of tokens that is added or taken away."""
    if amount < 0:
        return Tokens(-_to_tokens(-amount, field=field, ceiling=MAX_LIMIT_TOKENS))
    return _to_tokens(amount, field=field, ceiling=MAX_LIMIT_TOKENS)


def to_limit_micro_usd(amount: Decimal | float | str, *, field: str = "limit_usd") -> MicroUsd:
    """Turn a limit in dollars into micro-dollars, rounded up; limits may be larger than amounts."""
    return _to_micro_usd(amount, field=field, ceiling=MAX_LIMIT_MICRO_USD)


def to_written_limit_micro_usd(amount: str, *, field: str = "limit_usd") -> MicroUsd:
    """Turn a limit that somebody wrote into micro-dollars, or refuse a part of one.

    Rounded, it would be another limit than the one that was written.
    """
    limit = to_limit_micro_usd(amount, field=field)
    if _EXACT.scaleb(_to_decimal(amount, field), 6) != limit:
        problem = "is finer than a micro-dollar; write a limit with at most six decimals"
        raise InvalidAmountError(field, problem)
    return limit


def to_tokens(amount: int, *, field: str = "tokens") -> Tokens:
    """Check a number of tokens for one reservation: a whole number, not negative."""
    return _to_tokens(amount, field=field, ceiling=MAX_RESERVATION_TOKENS)


def to_limit_tokens(amount: int, *, field: str = "limit_tokens") -> Tokens:
    """Check a limit in tokens: a whole number, not negative."""
    return _to_tokens(amount, field=field, ceiling=MAX_LIMIT_TOKENS)


def to_usd_float(micro_usd: int) -> float:
    """Give dollars as a float, for display and for interfaces that promise one; never to book."""
    return micro_usd / MICRO_PER_USD


def format_usd(micro_usd: int) -> str:
    """Write an amount exactly, with two to six decimals: `$32.40`, `$0.000001`, `-$1.50`."""
    plain = plain_usd(micro_usd)
    return f"-${plain[1:]}" if micro_usd < 0 else f"${plain}"


def amount_of(amount: int, unit: str) -> str:
    """Write an amount of a ledger with its unit: `$32.40`, or `1,200 tokens`."""
    return format_usd(amount) if unit == "micro_usd" else f"{amount:,} tokens"


def plain_usd(micro_usd: int) -> str:
    """Write an amount exactly, without the sign of the currency: `32.40`."""
    dollars, rest = divmod(abs(micro_usd), MICRO_PER_USD)
    decimals = f"{rest:06d}".rstrip("0")
    return f"{'-' if micro_usd < 0 else ''}{dollars}.{decimals:0<2}"


def read_usd(text: str) -> MicroUsd:
    """Read an amount that `plain_usd` wrote; what is left of a limit may be negative."""
    return MicroUsd(int(_EXACT.scaleb(_parse_decimal(text, "amount_usd"), 6)))


def _to_micro_usd(amount: object, *, field: str, ceiling: MicroUsd) -> MicroUsd:
    dollars = _to_decimal(amount, field)
    if not dollars.is_finite():
        raise InvalidAmountError(field, "must be a finite amount; give dollars as a plain number")
    if dollars < 0:
        raise InvalidAmountError(field, "must not be negative; write 0 or more dollars")
    if dollars > ceiling // MICRO_PER_USD:
        problem = f"is more than {format_usd(ceiling)}; amounts are in dollars, not micro-dollars"
        raise InvalidAmountError(field, problem)
    rounded_up = _EXACT.quantize(dollars, _MICRO_DOLLAR)
    return MicroUsd(int(_EXACT.scaleb(rounded_up, 6)))


def _to_decimal(amount: object, field: str) -> Decimal:
    if isinstance(amount, Decimal):
        return amount
    if isinstance(amount, int) and not isinstance(amount, bool):
        return Decimal(amount)
    if isinstance(amount, float):
        # Subclasses of float may print as anything, so their own repr is not asked.
        return Decimal(float.__repr__(amount))
    if isinstance(amount, str):
        return _parse_decimal(amount, field)
    problem = f"is a {type(amount).__name__}; give dollars as a Decimal, int, str or float"
    raise InvalidAmountError(field, problem)


def _parse_decimal(text: str, field: str) -> Decimal:
    if len(text) > MAX_AMOUNT_LENGTH:
        problem = f"has {len(text):,} characters, an amount has at most {MAX_AMOUNT_LENGTH}"
        raise InvalidAmountError(field, f"{problem}; write dollars as 12.50")
    return _read_decimal(text, field)


# The same few prices are written again and again.
@lru_cache(maxsize=1_024)
def _read_decimal(text: str, field: str) -> Decimal:
    stripped = text.strip()
    try:
        if _NUMBER.fullmatch(stripped):
            return Decimal(stripped)
    except InvalidOperation:
        # Only an exponent of many digits passes the pattern and is still no number.
        pass
    problem = f"{text[:_SHOWN_CHARACTERS]!r} is not an amount; write dollars as 12.50, without $"
    raise InvalidAmountError(field, problem)


def _to_tokens(amount: object, *, field: str, ceiling: Tokens) -> Tokens:
    if not isinstance(amount, int) or isinstance(amount, bool):
        problem = f"is a {type(amount).__name__}; give a whole number of tokens"
        raise InvalidAmountError(field, problem)
    if not 0 <= amount <= ceiling:
        raise InvalidAmountError(field, f"must be between 0 and {ceiling:,} tokens")
    return Tokens(int(amount))
