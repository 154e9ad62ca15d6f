"""What the page of budgets draws: who refuses first, the bars, and when a budget ends."""

from __future__ import annotations

from typing import Any

import pytest

from dashboard.test_attention import scope
from headgate.budgets.status import ScopeStatus
from headgate.core.budgets.burn_rate import BurnRate
from headgate.core.budgets.scopes import Scope
from headgate.dashboard.budgets import Ending, ScopeRow, bars_of, ending

OUTER, INNER = "project:p", "project:p/session:s"
Left = tuple[int | None, int | None]
"""What is left of the dollars and of the tokens; None is no limit."""


def status(scope: str, left: Left, *, spent: int = 0) -> ScopeStatus:
    usd, tokens = left
    return ScopeStatus(
        scope=Scope(scope),
        spent_micro_usd=spent,
        reserved_micro_usd=0,
        overrun_micro_usd=0,
        limit_micro_usd=None if usd is None else usd + spent,
        remaining_micro_usd=usd,
        spent_tokens=0,
        reserved_tokens=0,
        overrun_tokens=0,
        limit_tokens=tokens,
        remaining_tokens=tokens,
        window="none",
        resets_at=None,
    )


def row(own: ScopeStatus, *around: ScopeStatus) -> ScopeRow:
    return ScopeRow(
        status=own, rate=BurnRate(), ends_at=None, waiting=0, around=around, level=len(around)
    )


# What is left of the root, of the project and of the session itself; then who refuses first.
REFUSING: list[tuple[Left, Left, Left, list[tuple[str, int | None, int | None]]]] = [
    ((90, None), (50, None), (10, None), []),
    ((90, None), (10, None), (50, None), [(OUTER, 10, None)]),
    ((10, None), (20, None), (50, None), [("", 10, None)]),
    ((50, None), (90, None), (50, None), []),
    ((20, None), (20, None), (50, None), [(OUTER, 20, None)]),
    ((90, None), (50, None), (None, None), [(OUTER, 50, None)]),
    ((90, 100), (50, 900), (70, 500), [(OUTER, 50, None), ("", None, 100)]),
    ((90, 900), (50, 100), (70, 500), [(OUTER, 50, 100)]),
    ((90, 100), (50, None), (20, None), [("", None, 100)]),
    ((-5, None), (50, None), (20, None), [("", -5, None)]),
    ((None, None), (None, None), (20, 5), []),
]


@pytest.mark.parametrize(("root", "outer", "own", "expected"), REFUSING)
def test_the_budget_with_the_least_left_of_a_unit_refuses_first(
    root: Left, outer: Left, own: Left, expected: list[tuple[str, int | None, int | None]]
) -> None:
    one = row(status(INNER, own), status("", root), status(OUTER, outer))
    found = [(room.scope, room.micro_usd, room.tokens) for room in one.first_to_refuse]
    assert found == expected


def test_a_fuller_budget_that_has_more_left_is_not_named() -> None:
    fuller = status("", (170_000_000, None), spent=10_000_000)
    own = status(INNER, (31_000_000, None), spent=1_000_000)
    assert row(own, fuller).first_to_refuse == []


USD = 1_000_000
STEADY = BurnRate(micro_usd_per_hour=USD, measured_seconds=600, is_steady=True)
BURST = BurnRate(micro_usd_per_hour=USD, tokens_per_hour=12_345, measured_seconds=90)
NOTHING = BurnRate()


def money(spent: int, reserved: int, overrun: int, limit: int | None) -> dict[str, Any]:
    left = None if limit is None else limit - spent - reserved - overrun
    return {
        "spent_micro_usd": spent,
        "reserved_micro_usd": reserved,
        "overrun_micro_usd": overrun,
        "limit_micro_usd": limit,
        "remaining_micro_usd": left,
    }


# What is booked and the limit; then the words, and the tone of what was spent.
BARS = [
    (money(USD, 0, 0, 4 * USD), "$1.00 spent, $0.00 reserved of $4.00", "spent"),
    (money(USD, USD, USD, 4 * USD), "$1.00 spent, $1.00 reserved, $1.00 overrun of $4.00", "spent"),
    (money(3 * USD, USD, 0, 4 * USD), "$3.00 spent, $1.00 reserved of $4.00", "full"),
    (
        money(4 * USD, 0, USD, 4 * USD),
        "$4.00 spent, $0.00 reserved, $1.00 overrun of $4.00",
        "full",
    ),
    (money(0, 0, 0, 0), "$0.00 spent, $0.00 reserved of $0.00", "full"),
    (money(USD, 0, 0, None), "$1.00 spent, $0.00 reserved, no limit", "spent"),
]


@pytest.mark.parametrize(("booked", "words", "tone"), BARS)
def test_a_bar_has_its_parts_in_one_order_and_names_overrun(
    booked: dict[str, Any], words: str, tone: str
) -> None:
    (bar,) = bars_of(scope(**booked))
    assert bar.words == words
    assert [(name, shown) for name, _, shown in bar.parts] == [
        ("spent", tone),
        ("reserved", "reserved"),
        ("overrun", "overrun"),
    ]


ROOM = money(USD, 0, 0, 4 * USD)
ENDINGS = [
    ({}, STEADY, None, Ending(words="no limit", is_faint=True)),
    (money(4 * USD, 0, 0, 4 * USD), NOTHING, None, Ending(words="now")),
    (ROOM, STEADY, 2_000.0, Ending(words="", at=2_000.0)),
    (ROOM, BURST, None, Ending(words="unknown: spending is uneven", is_faint=True)),
    (ROOM, NOTHING, None, Ending(words="not at this rate", is_faint=True)),
    (ROOM, STEADY, None, Ending(words="not at this rate", is_faint=True)),
    (
        {**ROOM, "window": "day", "resets_at": 5_000},
        STEADY,
        None,
        Ending(words="not before it resets"),
    ),
    (
        {**ROOM, "window": "rolling:5h", "resets_at": 5_000},
        STEADY,
        None,
        Ending(words="not before it has more room"),
    ),
]


@pytest.mark.parametrize(("fields", "rate", "ends_at", "expected"), ENDINGS)
def test_the_end_of_a_budget_is_said_as_far_as_it_is_known(
    fields: dict[str, Any], rate: BurnRate, ends_at: float | None, expected: Ending
) -> None:
    assert ending(scope(**fields), rate, ends_at) == expected
