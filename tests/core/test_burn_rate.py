"""How fast a scope spends: what is measured, over which time, and when it runs out."""

from __future__ import annotations

import msgspec
import pytest

from headgate.core.accounts import JournalEntry
from headgate.core.burn_rate import BurnRate, burn_rate, burn_rates, exhausted_at
from headgate.core.money import MicroUsd, Tokens
from headgate.core.reservations import Call, Charge, Delta
from headgate.core.scopes import Scope

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


MEASURED: list[tuple[str, list[JournalEntry], tuple[int, int, int]]] = [
    ("nothing", [], (0, 0, 0)),
    ("nothing within the hour", [entry(61, spent=5)], (0, 0, 0)),
    ("half an hour", [entry(0, spent=10), entry(30)], (20, 0, 1_800)),
    ("a whole hour", [entry(1, spent=10), entry(59, spent=5), entry(90, spent=99)], (15, 0, 3_600)),
    ("overrun counts", [entry(0, spent=10, overrun=5), entry(60)], (15, 0, 3_600)),
    ("tokens", [entry(0, tokens=100), entry(15)], (0, 400, 900)),
    ("at least a minute", [entry(0, spent=1)], (60, 0, 60)),
    ("a clock that ran ahead", [entry(-5, spent=1)], (60, 0, 60)),
    ("a correction", [entry(0, spent=-3), entry(90, spent=5)], (0, 0, 3_600)),
]


@pytest.mark.parametrize(("case", "entries", "expected"), MEASURED)
def test_spending_is_scaled_to_an_hour(
    case: str, entries: list[JournalEntry], expected: tuple[int, int, int]
) -> None:
    rate = burn_rate(entries, now=NOW)
    assert (rate.micro_usd_per_hour, rate.tokens_per_hour, rate.measured_seconds) == expected


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
        BurnRate(micro_usd_per_hour=rates[0], tokens_per_hour=rates[1], measured_seconds=3_600),
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
        "project:a": 600,
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
    assert burn_rates([], now=NOW, most=2) == {}
