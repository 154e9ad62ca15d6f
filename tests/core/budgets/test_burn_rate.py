"""How fast a scope spends: what is measured, over which time, and when it runs out."""

from __future__ import annotations

import msgspec
import pytest

from headgate.core.budgets.burn_rate import BurnRate, burn_rate, burn_rates, exhausted_at
from headgate.core.budgets.ledger import JournalEntry
from headgate.core.budgets.reservations import Call, Charge, Delta
from headgate.core.budgets.scopes import Scope
from headgate.core.money import MicroUsd, Tokens

NOW = 1_700_000_000.0
MINUTE = 60.0


def entry(minutes_ago: float, *, spent: int = 0, overrun: int = 0, tokens: int = 0) -> JournalEntry:
    return JournalEntry(
        at=NOW - minutes_ago * MINUTE,
        reservation_id="r",
        call=Call.COMMIT,
        charges=(),
        delta=Delta(
            spent_micro_usd=MicroUsd(spent),
            overrun_micro_usd=MicroUsd(overrun),
            reserved_micro_usd=MicroUsd(-spent),
            spent_tokens=Tokens(tokens),
        ),
    )


def every(
    minutes: float, *, since: float = 0.0, until: float, spent: int = 1
) -> list[JournalEntry]:
    """Return entries at an even pace, newest first, from `since` to `until` minutes ago."""
    count = round((until - since) / minutes) + 1
    return [entry(since + n * minutes, spent=spent) for n in range(count)]


MEASURED: list[tuple[str, list[JournalEntry], tuple[int, int, int]]] = [
    ("nothing", [], (0, 0, 0)),
    ("nothing within the hour", [entry(61, spent=5)], (0, 0, 0)),
    ("half an hour", [entry(0, spent=10), entry(30)], (20, 0, 1_800)),
    ("a whole hour", [entry(1, spent=10), entry(59, spent=5), entry(90, spent=99)], (15, 0, 3_600)),
    ("overrun counts", [entry(0, spent=10, overrun=5), entry(60)], (15, 0, 3_600)),
    ("tokens", [entry(0, tokens=100), entry(15)], (0, 400, 900)),
    ("at least ten minutes", [entry(0, spent=1)], (6, 0, 600)),
    ("a clock that ran ahead", [entry(-5, spent=1)], (6, 0, 600)),
    ("fresh and steady", every(0.2, until=3), (320, 0, 180)),
    ("steady for long", every(1, until=55), (66, 0, 600)),
    (
        "faster lately",
        [*every(0.5, until=10, spent=4), *every(3, since=13, until=70)],
        (504, 0, 600),
    ),
    ("slow and steady", every(8, since=1, until=100, spent=10), (80, 0, 3_600)),
    ("a correction", [entry(0, spent=-3), entry(90, spent=5)], (0, 0, 3_600)),
]


@pytest.mark.parametrize(("case", "entries", "expected"), MEASURED)
def test_spending_is_scaled_to_an_hour(
    case: str, entries: list[JournalEntry], expected: tuple[int, int, int]
) -> None:
    rate = burn_rate(entries, now=NOW)
    assert (rate.micro_usd_per_hour, rate.tokens_per_hour, rate.measured_seconds) == expected


# Whether an end may be forecast by what was spent.
STEADY: list[tuple[str, list[JournalEntry], bool]] = [
    ("nothing", [], False),
    ("one task", [entry(0, spent=3)], False),
    ("a burst just now", every(0.01, until=0.2), False),
    ("a burst some minutes ago", every(0.01, since=4, until=4.2), False),
    ("a burst and a little since", [*every(1, until=5), *every(0.01, since=6, until=7)], False),
    ("a minute at an even pace", every(0.1, until=1), False),
    ("three minutes at an even pace", every(0.1, until=3), True),
    ("an even pace for hours", every(1, until=100), True),
    ("a task every eight minutes", every(8, since=1, until=100), True),
    ("an even pace that ended eleven minutes ago", every(1, since=11, until=55), False),
    ("only reserved", [entry(n) for n in range(9)], False),
    ("a correction", [entry(n, spent=-1) for n in range(9)], False),
    ("tokens alone", [entry(n, tokens=5) for n in range(9)], True),
    ("tokens in a burst", [entry(0, tokens=99, spent=1), *every(1, since=1, until=9)], False),
]


@pytest.mark.parametrize(("case", "entries", "is_steady"), STEADY)
def test_an_end_is_forecast_only_by_spending_that_goes_on(
    case: str, entries: list[JournalEntry], is_steady: bool
) -> None:
    rate = burn_rate(entries, now=NOW)
    assert rate.is_steady == is_steady
    ends = exhausted_at(rate, remaining_micro_usd=100, remaining_tokens=100, now=NOW)
    assert (ends is not None) == is_steady


def test_a_budget_without_room_is_used_up_now_whatever_the_rate() -> None:
    for rate in (BurnRate(), burn_rate([entry(0, spent=3)], now=NOW)):
        assert exhausted_at(rate, remaining_micro_usd=0, remaining_tokens=None, now=NOW) == NOW


# Rates of dollars and tokens, what remains of each, when room is freed; then the hours it lasts.
LASTS: list[tuple[tuple[int, int], tuple[int | None, int | None], float | None, float | None]] = [
    ((10, 0), (None, None), None, None),
    ((10, 0), (20, None), None, 2.0),
    ((0, 0), (20, None), None, None),
    ((0, 0), (0, None), None, 0.0),
    ((0, 0), (-5, None), None, 0.0),
    ((10, 10), (20, 10), None, 1.0),
    ((10, 10), (20, 0), None, 0.0),
    ((10, 0), (20, 20), None, 2.0),
    ((10, 0), (20, None), 3.0, 2.0),
    ((10, 0), (20, None), 1.0, None),
    ((10, 0), (0, None), 1.0, 0.0),
]


@pytest.mark.parametrize(("rates", "remaining", "resets_in", "lasts"), LASTS)
def test_the_first_limit_to_be_reached_decides(
    rates: tuple[int, int],
    remaining: tuple[int | None, int | None],
    resets_in: float | None,
    lasts: float | None,
) -> None:
    when = exhausted_at(
        BurnRate(
            micro_usd_per_hour=rates[0],
            tokens_per_hour=rates[1],
            measured_seconds=3_600,
            is_steady=True,
        ),
        remaining_micro_usd=remaining[0],
        remaining_tokens=remaining[1],
        now=NOW,
        resets_at=None if resets_in is None else NOW + resets_in * 3_600,
    )
    assert when == (None if lasts is None else NOW + lasts * 3_600)


def charging(one: JournalEntry, *scopes: str) -> JournalEntry:
    charges = tuple(Charge(scope=Scope(scope), bucket_start=0) for scope in scopes)
    return msgspec.structs.replace(one, charges=charges)


def test_one_look_at_the_journal_measures_every_scope_that_it_charges() -> None:
    entries = [
        charging(entry(1, spent=10), "", "project:a"),
        charging(entry(30, spent=5), "", "project:b"),
    ]
    rates = burn_rates(entries, now=NOW, most=100)
    assert {scope: rate.micro_usd_per_hour for scope, rate in rates.items()} == {
        "": 30,
        "project:a": 60,
        "project:b": 10,
    }
    assert rates[Scope("project:a")] == burn_rate(entries[:1], now=NOW)


def test_where_there_are_more_entries_than_were_read_the_time_that_was_read_is_measured() -> None:
    entries = [
        charging(entry(0.1, spent=10), "", "project:a"),
        charging(entry(0.5, spent=5), "", "project:b"),
    ]
    rates = burn_rates(entries, now=NOW, most=2)
    assert {scope: rate.measured_seconds for scope, rate in rates.items()} == {
        "": 30,
        "project:a": 30,
        "project:b": 30,
    }
    assert rates[Scope("project:a")].micro_usd_per_hour == 1_200
    assert not any(rate.is_steady for rate in rates.values())
    assert burn_rates([], now=NOW, most=2) == {}


def test_a_part_of_a_busy_journal_is_enough_to_go_by() -> None:
    entries = [charging(one, "") for one in every(0.01, until=0.5)]
    assert burn_rates(entries, now=NOW, most=len(entries))[Scope("")].is_steady
    assert not burn_rates(entries, now=NOW, most=len(entries) + 1)[Scope("")].is_steady
