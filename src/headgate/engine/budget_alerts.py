"""The loop that notices used-up budgets, on the node that dispatches.

It looks every few seconds at the scopes that have a limit, so that no settlement pays for it. Rule:
which alerts were told is in the store, in the commit of the delivery itself; what is remembered
here only saves asking again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

import msgspec
import structlog

from headgate.core.budgets.alerts import Crossing, crossings
from headgate.core.budgets.ledger import Account, Ledger, Unit
from headgate.core.budgets.scopes import ROOT, ROOT_NAME
from headgate.core.budgets.windows import format_window
from headgate.core.money import to_usd_float
from headgate.core.task_view import AmountBody, exact_moment, moment
from headgate.errors import StoreUnavailableError
from headgate.storage.deliveries import ALERT_EVENT, Alert, Deliveries
from headgate.storage.task_ids import PREFIX, TaskIds
from headgate.storage.unit_of_work import MESSAGE_PREFIX

log = structlog.get_logger("headgate.budget_alerts")

LOOK_SECONDS = 5.0
LEDGER_LOOK_SECONDS = 30.0
"""How often a ledger outside the store is asked, which has to tell of all its scopes."""

MAX_PAGES = 20
"""How many pages one look takes; the next one goes on behind them."""

MAX_REMEMBERED = 100_000
REMEMBERED_SECONDS = 300.0

AccountsAfter = Callable[[str | None], Awaitable[Sequence[Account]]]
"""Returns accounts with limits behind a scope, None being before the first; none at the end."""


class AlertBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What a receiver is told of a budget; `window_ends_at` is there if the window has an end."""

    event: str
    scope: str
    percent: int
    limit: AmountBody
    used: AmountBody
    window: str
    window_ends_at: datetime | None = None
    noticed_at: datetime


class LedgerAccounts:
    """Reads the accounts with limits from a ledger outside the store, all at once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def after(self, scope: str | None) -> list[Account]:
        """Return all accounts with limits for the first call, and none for the next."""
        if scope is not None:
            return []
        accounts = await self._ledger.accounts(ROOT)
        return [account for account in accounts if account.limit is not None]


class BudgetAlerts:
    """Files an alert for each share of a budget that is used up, once in a window."""

    def __init__(
        self,
        deliveries: Deliveries,
        accounts_after: AccountsAfter,
        *,
        url: str,
        leads: Callable[[], bool],
        filed: Callable[[], None],
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._look_seconds = look_seconds
        self._deliveries = deliveries
        self._accounts_after = accounts_after
        self._url = url
        self._leads = leads
        self._filed = filed
        self._ids = TaskIds()
        self._told: dict[tuple[str, Unit, int], tuple[int, float]] = {}
        self._after: str | None = None
        self._problem = ""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.run_once()
                self._problem = ""
            except StoreUnavailableError as error:
                self._complain(str(error))
            await asyncio.sleep(self._look_seconds)

    async def run_once(self) -> int:
        """File what was not told yet, if this node dispatches, and return how many alerts."""
        if not self._leads():
            return 0
        filed = 0
        for _ in range(MAX_PAGES):
            accounts = await self._accounts_after(self._after)
            if not accounts:
                self._after = None
                break
            filed += await self._file(accounts)
            self._after = str(accounts[-1].scope)
        if filed:
            self._filed()
        return filed

    async def _file(self, accounts: Sequence[Account]) -> int:
        now = self._deliveries.now()
        new = [
            crossing for crossing in crossings(accounts, now) if not self._is_told(crossing, now)
        ]
        if not new:
            return 0
        alerts = [self._alert(crossing, now) for crossing in new]
        filed = await self._deliveries.alert(alerts, self._url)
        self._remember(new, now)
        if filed:
            scopes = sorted({crossing.scope or ROOT_NAME for crossing in new})
            log.info("budget alerts filed", alerts=filed, scopes=scopes[:10])
        return filed

    def _is_told(self, crossing: Crossing, now: float) -> bool:
        known = self._told.get((crossing.scope, crossing.unit, crossing.percent))
        return known is not None and known[0] == crossing.limit and known[1] > now

    def _remember(self, told: Sequence[Crossing], now: float) -> None:
        # For a while only: another node may have told of it earlier, and then it ends earlier.
        latest = now + REMEMBERED_SECONDS
        if len(self._told) + len(told) > MAX_REMEMBERED:
            self._told.clear()
        for crossing in told:
            key = (crossing.scope, crossing.unit, crossing.percent)
            self._told[key] = (crossing.limit, min(latest, crossing.told_until or latest))

    def _alert(self, crossing: Crossing, now: float) -> Alert:
        return Alert(
            message_id=self._ids.new(now).replace(PREFIX, MESSAGE_PREFIX),
            scope=crossing.scope,
            unit=crossing.unit.value,
            percent=crossing.percent,
            limit=crossing.limit,
            until=crossing.told_until,
            body=msgspec.json.encode(_body(crossing, now)).decode(),
        )

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("budgets were not looked at", problem=problem)
        self._problem = problem


def _body(crossing: Crossing, now: float) -> AlertBody:
    return AlertBody(
        event=ALERT_EVENT,
        scope=crossing.scope or ROOT_NAME,
        percent=crossing.percent,
        limit=_amount(crossing.unit, crossing.limit),
        used=_amount(crossing.unit, crossing.used),
        window=format_window(crossing.window),
        window_ends_at=moment(crossing.window_ends_at),
        noticed_at=exact_moment(now),
    )


def _amount(unit: Unit, amount: int) -> AmountBody:
    if unit is Unit.TOKENS:
        return AmountBody(tokens=amount)
    return AmountBody(usd=to_usd_float(amount))
