"""The tree of budgets as rows: each scope with its bar, its rate, and the budgets around it.

Rule: a row says for itself what binds it, also where that is a budget further up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import quote, urlencode

import msgspec

from headgate.core.burn_rate import BurnRate
from headgate.core.scopes import Scope, ancestors, depth, is_within
from headgate.dashboard.attention import NEARLY_USED_UP, ROOT_NAME, used_share
from headgate.scope_status import ScopeStatus
from headgate.web.budget_figures import BudgetFigures

HOME = "/ui/budgets"
TASKS = "/ui/tasks"


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
        return used_share(self.status)

    @property
    def state(self) -> str:
        """The sign under which the scope is shown."""
        used = self.used
        if used is None:
            return ""
        if used >= 1:
            return "exhausted"
        return "warning" if used >= NEARLY_USED_UP else "ok"

    @property
    def binding(self) -> ScopeStatus | None:
        """The budget further up that is fuller than its own, and so the first to refuse."""
        fullest = max(self.around, key=lambda one: used_share(one) or 0.0, default=None)
        if fullest is None or (used_share(fullest) or 0.0) <= (self.used or 0.0):
            return None
        return fullest

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


def name_of(scope: str) -> str:
    """Return a scope as people read it."""
    return scope or ROOT_NAME


def href(scope: str) -> str:
    """Return the address of a scope."""
    return f"{HOME}?scope={quote(scope, safe='')}"


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
        return name_of(scope)
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
    inner = around if used_share(status) is None else (*around, status)
    for child in status.children:
        yield from _rows(figures, child, inner, base=base)
