"""Which shares of a budget are used up."""

from __future__ import annotations

import pytest

from headgate.core.budgets.alerts import NEARLY_USED_UP, SHARES_PERCENT, crossings, share_used
from headgate.core.budgets.ledger import Account, Balance, Limit, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.budgets.windows import parse_window
from headgate.core.money import MicroUsd, Tokens

NOW = 1_800_000_000.0
DAY_END = 1_800_057_600.0


def account(
    *, spent: int = 0, reserved: int = 0, overrun: int = 0, limit: int = 1_000, window: str = "day"
) -> Account:
    return Account(
        scope=Scope("project:x"),
        limit=Limit(limit_tokens=Tokens(limit), window=parse_window(window)),
        balance=Balance(
            spent_tokens=Tokens(spent),
            reserved_tokens=Tokens(reserved),
            overrun_tokens=Tokens(overrun),
        ),
    )


@pytest.mark.parametrize(
    ("spent", "reserved", "overrun", "percents"),
    [
        (0, 0, 0, []),
        (499, 0, 0, []),
        (500, 0, 0, [50]),
        (499, 501, 0, []),
        (790, 0, 10, [50, 80]),
        (999, 0, 0, [50, 80]),
        (1_000, 0, 0, [50, 80, 100]),
        (1_000, 0, 500, [50, 80, 100]),
    ],
)
def test_what_was_spent_counts_and_what_is_only_held_does_not(
    spent: int, reserved: int, overrun: int, percents: list[int]
) -> None:
    found = crossings([account(spent=spent, reserved=reserved, overrun=overrun)], NOW)
    assert [crossing.percent for crossing in found] == percents
    assert all(crossing.used == spent + overrun for crossing in found)


@pytest.mark.parametrize(
    ("window", "ends_at", "told_until"),
    [
        ("none", None, None),
        ("day", DAY_END, DAY_END),
        ("rolling:24h", None, NOW + 86_400),
    ],
)
def test_a_share_is_told_of_once_in_each_window(
    window: str, ends_at: float | None, told_until: float | None
) -> None:
    (found,) = crossings([account(spent=600, window=window)], NOW)
    assert (found.window_ends_at, found.told_until) == (ends_at, told_until)


def test_dollars_and_tokens_are_told_of_apart() -> None:
    both = Account(
        scope=Scope(""),
        limit=Limit(limit_tokens=Tokens(100), limit_micro_usd=MicroUsd(10)),
        balance=Balance(spent_tokens=Tokens(50), spent_micro_usd=MicroUsd(8)),
    )
    found = [(one.unit, one.percent, one.limit) for one in crossings([both], NOW)]
    assert found == [
        (Unit.MICRO_USD, 50, 10),
        (Unit.MICRO_USD, 80, 10),
        (Unit.TOKENS, 50, 100),
    ]


def test_a_scope_without_a_limit_or_with_one_of_nothing_is_not_told_of() -> None:
    assert crossings([Account(scope=Scope("project:x"))], NOW) == []
    assert crossings([account(spent=5, limit=0)], NOW) == []


@pytest.mark.parametrize(
    ("dollars", "tokens", "share"),
    [
        ((None, None), (None, None), None),
        ((100, 75), (None, None), 0.25),
        ((100, -20), (None, None), 1.2),
        ((None, None), (0, 0), 1.0),
        ((100, 75), (10, 1), 0.9),
    ],
)
def test_a_scope_is_as_full_as_its_tightest_limit(
    dollars: tuple[int | None, int | None],
    tokens: tuple[int | None, int | None],
    share: float | None,
) -> None:
    assert share_used(dollars, tokens) == (None if share is None else pytest.approx(share))


def test_nearly_used_up_is_a_share_that_alerts_go_out_at() -> None:
    assert round(100 * NEARLY_USED_UP) in SHARES_PERCENT
