"""What budgets say in the terminal: the rows of their pane, and money in short.

Rule: money is counted in micro-dollars, as everywhere; only shares of a limit are fractions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headgate.bodies.tasks import BudgetStatusBody
from headgate.core.budgets.alerts import share_used
from headgate.core.budgets.scopes import ROOT_WORDS
from headgate.core.money import MicroUsd, read_usd
from headgate.core.texts.figures import count, dollars, usd
from headgate.top.arranging import Rows
from headgate.top.bars import Bar
from headgate.top.cells import (
    BAD,
    CAREFUL,
    NEVER,
    NOW,
    count_cell,
    is_full,
    limited_cell,
    money_cell,
    until_cell,
)
from headgate.top.picture import Picture
from headgate.top.tables import Cell, Row, number_cell, text_cell

MAX_DEPTH = 16


def budget_rows(picture: Picture, now: float) -> Sequence[Row]:
    """Return the scopes with what each has used of its limit, children under their parents."""
    scopes = [] if picture.budgets is None else list(_tree(picture.budgets, 0))
    return Rows(scopes, lambda one: _budget(one[1], one[0], now))


def _tree(status: BudgetStatusBody, depth: int) -> Iterator[tuple[int, BudgetStatusBody]]:
    yield depth, status
    if depth < MAX_DEPTH:
        for child in status.children:
            yield from _tree(child, depth + 1)


def _budget(status: BudgetStatusBody, depth: int, now: float) -> Row:
    bar, share = _fullest(status), _share(status)
    overrun = read_usd(status.overrun_usd)
    cells = (
        Cell(text=f"{'  ' * depth}{text_cell(_last_part(status.scope)).text}", order=status.scope),
        limited_cell(bar, share),
        money_cell(_used_micro_usd(status)),
        text_cell("no limit" if bar is None else limit_text(status)),
        _ends(status, share, now),
        until_cell(status.resets_at, now),
        count_cell(status.spent_tokens + status.overrun_tokens),
        money_cell(overrun or None, CAREFUL),
        money_cell(_micro_usd(status.burn_usd_per_hour)),
    )
    return Row(key=status.scope or ROOT_WORDS, cells=cells)


def _last_part(scope: str) -> str:
    return scope.rpartition("/")[2] or ROOT_WORDS


def _fullest(status: BudgetStatusBody) -> Bar | None:
    """Return the bar of dollars or of tokens, whichever is nearer to its limit; None without."""
    used_tokens = status.spent_tokens + status.overrun_tokens
    units = (
        (_used_micro_usd(status), read_usd(status.reserved_usd), _micro_usd(status.limit_usd)),
        (used_tokens, status.reserved_tokens, status.limit_tokens),
    )
    bars = [_part(used, held, limit) for used, held, limit in units if limit is not None]
    return max(bars, key=lambda bar: bar.used + bar.held, default=None)


def _part(used: int, held: int, limit: int) -> Bar:
    return Bar(used=used / limit, held=held / limit) if limit > 0 else Bar(used=1.0)


def _share(status: BudgetStatusBody) -> float | None:
    """Return how much of the tighter limit is used or held, as it is told wherever it is shown."""
    return share_used(
        (_micro_usd(status.limit_usd), _micro_usd(status.remaining_usd)),
        (status.limit_tokens, status.remaining_tokens),
    )


def _ends(status: BudgetStatusBody, share: float | None, now: float) -> Cell:
    """Return when a budget is used up if it is spent as lately; nobody knows that of most."""
    if share is None:
        return NEVER
    return number_cell(NOW, 0.0, BAD) if is_full(share) else until_cell(status.exhausted_at, now)


def limit_text(status: BudgetStatusBody) -> str:
    """Return the limits of a scope, and for how long they are: `$180.00/1h`."""
    money = "" if status.limit_usd is None else dollars(status.limit_usd)
    tokens = "" if status.limit_tokens is None else f"{count(status.limit_tokens)} tokens"
    return ", ".join(one for one in (money, tokens) if one) + _window(status.window)


def _window(window: str) -> str:
    """Return for how long a limit is: `day@Europe/Berlin` is a day."""
    if window == "none":
        return ""
    kind, _, hours = window.partition(":")
    return f"/{hours or kind.partition('@')[0]}"


def spent_text(status: BudgetStatusBody) -> str:
    """Return what was spent, overrun included."""
    return usd(_used_micro_usd(status))


def left_text(status: BudgetStatusBody) -> str:
    """Return what is left of the limit in dollars, else of that in tokens; empty without either."""
    left = _micro_usd(status.remaining_usd)
    if left is not None:
        return usd(max(0, left))
    tokens = status.remaining_tokens
    return "" if tokens is None else f"{count(max(0, tokens))} tokens"


def _used_micro_usd(status: BudgetStatusBody) -> int:
    return read_usd(status.spent_usd) + read_usd(status.overrun_usd)


def _micro_usd(text: str | None) -> MicroUsd | None:
    return None if text is None else read_usd(text)
