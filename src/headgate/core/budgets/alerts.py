"""Budget alerts: which shares of a limit a scope has used up.

What counts is what was really used: spent and overrun. Money that is only held may come back, and
would raise alarms that nobody can act on.

Rule: a share is told of once in each window. A calendar window has an end; in a rolling one the
same share may be told of again after the window's length; without a window it is told of once for
as long as the limit stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headgate.core.budgets.ledger import Account, Unit
from headgate.core.budgets.windows import Window, resets_at

NEARLY_PERCENT = 80
SHARES_PERCENT = (50, NEARLY_PERCENT, 100)
NEARLY_USED_UP = NEARLY_PERCENT / 100
"""The share of a limit from which on a budget is called nearly used up, wherever it is shown."""

_WHOLE = 100
_SECONDS_PER_HOUR = 3_600


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """A scope has used this share of its limit; amounts are in `unit`.

    `window_ends_at` is that of a calendar window. `told_until` is when the share may be told of
    again; None is never.
    """

    scope: str
    unit: Unit
    percent: int
    limit: int
    used: int
    window: Window
    window_ends_at: float | None
    told_until: float | None


def share_used(*limits: tuple[int | None, int | None]) -> float | None:
    """Return how much of the tightest of some limits is used, of 1; None where there is no limit.

    Each is a limit and what is left of it, both None where there is none. A limit of nothing is
    used up.
    """
    shares = [
        1 - left / limit if limit else 1.0
        for limit, left in limits
        if limit is not None and left is not None
    ]
    return max(shares, default=None)


def crossings(accounts: Iterable[Account], now: float) -> list[Crossing]:
    """Return every share that is used up, of each scope and unit that has a limit."""
    return [crossing for account in accounts for crossing in _of_account(account, now)]


def _of_account(account: Account, now: float) -> list[Crossing]:
    limit = account.limit
    if limit is None:
        return []
    amounts = ((Unit.MICRO_USD, limit.limit_micro_usd), (Unit.TOKENS, limit.limit_tokens))
    # A limit of nothing is used up from the start, and that is what was meant.
    return [
        crossing
        for unit, amount in amounts
        if amount
        for crossing in _of_unit(account, limit.window, unit, amount, now)
    ]


def _of_unit(
    account: Account, window: Window, unit: Unit, amount: int, now: float
) -> list[Crossing]:
    spent, _, overrun = account.balance.column(unit)
    used = spent + overrun
    ends_at = None if window.hours is not None else resets_at(window, now, account.tz)
    until = now + window.hours * _SECONDS_PER_HOUR if window.hours is not None else ends_at
    return [
        Crossing(
            scope=account.scope,
            unit=unit,
            percent=percent,
            limit=amount,
            used=used,
            window=window,
            window_ends_at=ends_at,
            told_until=until,
        )
        for percent in SHARES_PERCENT
        if used * _WHOLE >= amount * percent
    ]
