"""A row of the tree names the budget that refuses first: the one that has the least left."""

from __future__ import annotations

import pytest

from headgate.budgets.status import ScopeStatus
from headgate.core.budgets.burn_rate import BurnRate
from headgate.core.budgets.scopes import Scope
from headgate.dashboard.budgets import ScopeRow

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
