"""A budget is drawn and said alike wherever it stands."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dashboard.test_attention import scope
from headgate.core.budgets.burn_rate import BurnRate
from headgate.dashboard.budgets import Ending, bars_of, ending, rate_words

USD = 1_000_000
STEADY = BurnRate(micro_usd_per_hour=USD, measured_seconds=600, is_steady=True)
BURST = BurnRate(micro_usd_per_hour=USD, tokens_per_hour=12_345, measured_seconds=90)
NOTHING = BurnRate()
NOW = 1_000.0


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


def test_dollars_have_no_bar_where_only_tokens_are_limited_and_none_were_spent() -> None:
    tokens: dict[str, Any] = {"limit_tokens": 1_000, "remaining_tokens": 600, "spent_tokens": 400}
    assert [bar.words for bar in bars_of(scope(**tokens))] == [
        "400 spent, 0 reserved of 1,000 tokens"
    ]
    both = bars_of(scope(**tokens, spent_micro_usd=190_554), is_exact=True)
    assert [bar.words for bar in both] == [
        "$0.190554 spent, $0.00 reserved, no limit",
        "400 spent, 0 reserved of 1,000 tokens",
    ]


ROOM = money(USD, 0, 0, 4 * USD)
ENDINGS = [
    ({}, STEADY, None, Ending(words="no limit", is_faint=True)),
    (money(4 * USD, 0, 0, 4 * USD), NOTHING, None, Ending(words="now")),
    (ROOM, STEADY, 2_000.0, Ending(words="", at=2_000.0)),
    (ROOM, BURST, None, Ending(words="not known, it is not spent steadily", is_faint=True)),
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
        Ending(words="not before more room is freed"),
    ),
]


@pytest.mark.parametrize(("fields", "rate", "ends_at", "expected"), ENDINGS)
def test_the_end_of_a_budget_is_said_as_far_as_it_is_known(
    fields: dict[str, Any], rate: BurnRate, ends_at: float | None, expected: Ending
) -> None:
    assert ending(scope(**fields), rate, ends_at) == expected


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (NOTHING, ""),
        (STEADY, "$1.00 an hour, over 10 min"),
        (BURST, "$1.00, 12.3k tokens an hour, over 1 min 30 s"),
        (msgspec.structs.replace(STEADY, micro_usd_per_hour=0), "$0.00 an hour, over 10 min"),
    ],
)
def test_a_rate_says_over_which_time_it_was_measured(rate: BurnRate, words: str) -> None:
    assert rate_words(rate) == words
