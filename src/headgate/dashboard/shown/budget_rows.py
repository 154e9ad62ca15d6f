"""The tree of budgets as rows: each scope with its bar, its rate, and the budgets around it.

Rule: a row says for itself what binds it, also where that is a budget further up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlencode

import msgspec

from headgate.core.budgets.burn_rate import BurnRate
from headgate.core.budgets.scopes import Scope, ancestors, depth, is_within, scope_words
from headgate.core.budgets.windows import window_words
from headgate.dashboard.shown.budget_words import (
    BudgetBar,
    Ending,
    bars_of,
    ending,
    rate_words,
    state_of,
)
from headgate.scope_status import ScopeStatus
from headgate.web.handlers.budget_figures import BudgetFigures

TASKS = "/ui/tasks"


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a budget has left of the units in which it is the first to refuse."""

    scope: Scope
    micro_usd: int | None
    tokens: int | None


class ScopeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One scope: `used` is the share of its tighter limit, None without a limit.

    `around` are the budgets further up that limit it too, the outermost first. `ends_at` is when
    one of its own limits is reached at its rate.
    """

    status: ScopeStatus
    rate: BurnRate
    ends_at: float | None
    waiting: int
    around: Sequence[ScopeStatus]
    level: int

    @property
    def used(self) -> float | None:
        """How much of the tighter limit is used, of 1."""
        return self.status.used_share

    @property
    def state(self) -> str:
        """The sign under which the scope is shown."""
        return state_of(self.status)

    @property
    def bars(self) -> list[BudgetBar]:
        """What is drawn of it, one bar a unit."""
        return bars_of(self.status)

    @property
    def window(self) -> str:
        """What counts against its limits, in words."""
        return window_words(self.status.window)

    @property
    def rate_words(self) -> str:
        """How fast it spends; empty where it spent nothing lately."""
        return rate_words(self.rate)

    @property
    def ending(self) -> Ending:
        """When one of its own limits is reached."""
        return ending(self.status, self.rate, self.ends_at)

    @property
    def first_to_refuse(self) -> list[Room]:
        """The budgets further up that have less left than its own; one, or one a unit.

        Not the fullest: what refuses the next task is the least room, however large the limit is.
        """
        usd = self._tightest(lambda one: one.remaining_micro_usd)
        tokens = self._tightest(lambda one: one.remaining_tokens)
        return [
            Room(
                scope=one.scope,
                micro_usd=one.remaining_micro_usd if one is usd else None,
                tokens=one.remaining_tokens if one is tokens else None,
            )
            for one in reversed(self.around)
            if one is usd or one is tokens
        ]

    def _tightest(self, left: Callable[[ScopeStatus], int | None]) -> ScopeStatus | None:
        """Return the budget further up that has the least left of a unit, if its own has more."""
        own = left(self.status)
        rooms = [(room, one) for one in reversed(self.around) if (room := left(one)) is not None]
        least, one = min(rooms, key=lambda pair: pair[0], default=(0, None))
        return None if own is not None and own <= least else one

    @property
    def tasks_href(self) -> str:
        """The address of the tasks that may wait for it."""
        return tasks_href(self.status.scope)


def rows_of(figures: BudgetFigures, around: Sequence[ScopeStatus] = ()) -> list[ScopeRow]:
    """Return a scope and all within it, each before what lies within it."""
    top = figures.status
    return list(_rows(figures, top, tuple(around), base=depth(top.scope)))


def exhausted_of(rows: Sequence[ScopeRow]) -> list[ScopeRow]:
    """Return the rows without room, those that tasks wait for first."""
    found = [row for row in rows if row.state == "exhausted"]
    return sorted(found, key=lambda row: (-row.waiting, row.status.scope))


def tasks_href(scope: str) -> str:
    """Return the address of the tasks that wait and may be charged to a scope."""
    charged = {"scope": scope} if scope else {}
    return f"{TASKS}?{urlencode({'state': 'queued', **charged})}"


def innermost(scopes: Sequence[Scope]) -> list[Scope]:
    """Return the scopes that no other one of them lies within."""
    outer = {one for scope in scopes for one in ancestors(scope)[:-1]}
    return [scope for scope in scopes if scope not in outer]


def name_within(scope: Scope, outer: Scope) -> str:
    """Return the path of a scope below another one."""
    if not outer or scope == outer or not is_within(scope, outer):
        return scope_words(scope)
    return scope.removeprefix(f"{outer}/")


def _rows(
    figures: BudgetFigures, status: ScopeStatus, around: tuple[ScopeStatus, ...], *, base: int
) -> Iterator[ScopeRow]:
    yield ScopeRow(
        status=status,
        rate=figures.rate(status.scope),
        ends_at=figures.exhausted_at(status),
        waiting=figures.waiting.get(status.scope, 0),
        around=around,
        level=depth(status.scope) - base,
    )
    inner = around if status.used_share is None else (*around, status)
    for child in status.children:
        yield from _rows(figures, child, inner, base=base)
