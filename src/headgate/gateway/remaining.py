"""What the budgets of a call have left, for the headers of its answer.

Rule: an answer never waits for it. What is shown was read in the background, once a second at most
for each set of scopes, and is missing where nothing was read yet or nothing is limited.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headgate.core.budgets.ledger import Account, Ledger, Unit
from headgate.core.budgets.scopes import ROOT, Scope, charged_scopes
from headgate.core.budgets.windows import CalendarUnit, resets_at
from headgate.core.money import plain_usd
from headgate.errors import HeadgateError
from headgate.gateway.protocols import UsedWindow
from headgate.storage.tokens import UNBOUND, Bounds

REFRESH_SECONDS = 1.0
SHOWN_SECONDS = 10.0
"""What was read longer ago than this is not shown any more."""

MAX_SETS = 1_000
"""Of so many sets of scopes it is known what they have left."""

MAX_SEEN = 64
"""For so many bounds of tokens it is kept what they may see of one set."""

_MINUTES = {CalendarUnit.DAY: 1_440, CalendarUnit.WEEK: 10_080, CalendarUnit.MONTH: 43_200}


class Remaining(NamedTuple):
    """What the tightest of some budgets has left in dollars, and how much of each window is used.

    The window that is used most comes first.
    """

    micro_usd: int | None = None
    windows: Sequence[UsedWindow] = ()
    usd: bytes = b""
    """The same in dollars, for a header."""


NOTHING_LIMITED = Remaining()


class _Known:
    """The limited accounts of a set of scopes, as they were read, and what tokens see of them."""

    __slots__ = ("_seen", "accounts", "read_at")

    def __init__(self) -> None:
        self.accounts: Sequence[Account] = ()
        self.read_at = 0.0
        self._seen: dict[Bounds | None, Remaining] = {}

    def read(self, accounts: Sequence[Account]) -> None:
        self.accounts = accounts
        self._seen = {}

    def seen(self, bounds: Bounds, now: float) -> Remaining:
        key = None if bounds is UNBOUND else bounds
        found = self._seen.get(key)
        if found is None:
            shown = self.accounts
            if bounds.is_bound:
                shown = [one for one in shown if bounds.may_charge(one.scope)]
            found = remaining(shown, now)
            if len(self._seen) < MAX_SEEN:
                self._seen[key] = found
        return found


class RemainingBudgets:
    """Knows what budgets have left, as of the last second or so."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: OrderedDict[tuple[str, ...], _Known] = OrderedDict()
        self._asked: dict[tuple[str, ...], None] = {}
        self._reading: asyncio.Task[None] | None = None
        self._time: Callable[[], float] | None = None

    def _now(self) -> float:
        if self._time is None:
            self._time = asyncio.get_running_loop().time
        return self._time()

    def look(self, scopes: tuple[str, ...]) -> None:
        """Have what the budgets of a call have left read soon, if that is not known well enough."""
        known = self._known.get(scopes)
        now = self._now()
        if known is not None and known.read_at + REFRESH_SECONDS > now:
            return
        self._asked[scopes] = None
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())

    def get(self, scopes: tuple[str, ...], bounds: Bounds) -> Remaining:
        """Return what is known of the budgets of a call, of those that its token may see."""
        known = self._known.get(scopes)
        now = self._now()
        if known is None or not known.accounts or known.read_at + SHOWN_SECONDS < now:
            return NOTHING_LIMITED
        return known.seen(bounds, self._ledger.now())

    async def _read(self) -> None:
        """Read one set of scopes after the other, as long as any are asked for."""
        while self._asked:
            scopes = next(iter(self._asked))
            del self._asked[scopes]
            known = self._known.setdefault(scopes, _Known())
            # One that cannot be read is not asked for again at once.
            known.read_at = self._now()
            self._known.move_to_end(scopes)
            if len(self._known) > MAX_SETS:
                self._known.popitem(last=False)
            try:
                found = [
                    (await self._ledger.accounts(scope, most=1))[0]
                    for scope in charged_scopes(ROOT, [Scope(one) for one in scopes])
                ]
            except HeadgateError:
                continue
            known.read([one for one in found if one.limit is not None and one.limit.has_amount])


def remaining(accounts: Sequence[Account], now: float) -> Remaining:
    """Return what limited accounts have left."""
    least: int | None = None
    windows: list[UsedWindow] = []
    for account in accounts:
        limit = account.limit
        if limit is None:
            continue
        shares = []
        for unit in Unit:
            most = limit.amount(unit)
            if most is None:
                continue
            used = sum(account.balance.column(unit))
            shares.append(100.0 * used / most if most else 100.0)
            if unit is Unit.MICRO_USD:
                left = max(0, most - used)
                least = left if least is None else min(least, left)
        window = limit.window
        minutes = 60 * window.hours if window.hours else 0
        if window.unit is not None:
            minutes = _MINUTES[window.unit]
        if minutes and shares:
            frees_at = resets_at(window, now, account.tz, oldest_bucket=account.oldest_bucket)
            windows.append(UsedWindow(max(shares), minutes, frees_at))
    windows.sort(key=lambda one: -one.used_percent)
    return Remaining(least, windows, b"" if least is None else plain_usd(least).encode())
