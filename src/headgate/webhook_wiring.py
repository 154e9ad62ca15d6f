"""Wiring of webhooks: what judges addresses, what delivers, and what notices used-up budgets."""

from __future__ import annotations

from collections.abc import Callable

from headgate.errors import InvalidSettingError
from headgate.ledger import Ledger
from headgate.runtime.engine import Engine
from headgate.runtime.telling.budget_alerts import (
    LEDGER_LOOK_SECONDS,
    LOOK_SECONDS,
    BudgetAlerts,
    LedgerAccounts,
)
from headgate.runtime.telling.webhooks import Webhooks
from headgate.settings import Settings
from headgate.stores.budget_accounts import SqlAccounts
from headgate.stores.sql_store import SqlTaskStore
from headgate.stores.telling.deliveries import SqlDeliveries
from headgate.webhooks.allow_list import parse_allow_list
from headgate.webhooks.guard import UrlGuard
from headgate.webhooks.sender import WebhookSender

SWITCHED_OFF = "webhooks are switched off; set webhooks.enabled = true"


def attach_webhooks(
    engine: Engine,
    store: SqlTaskStore,
    settings: Settings,
    *,
    ledger: Ledger | None,
    is_alone: bool,
) -> Webhooks | None:
    """Have an engine deliver webhooks and notice budgets, as far as the settings say so."""
    given = settings.webhooks
    if not given.enabled:
        return None
    guard = UrlGuard(parse_allow_list(given.allow))
    webhooks = Webhooks(
        SqlDeliveries(store),
        WebhookSender(
            guard, timeout_seconds=given.timeout_seconds, max_connections=given.concurrency
        ),
        concurrency=given.concurrency,
        timeout_seconds=given.timeout_seconds,
        is_alone=is_alone,
    )
    engine.told = webhooks.see
    engine.also_run("webhooks", webhooks.run)
    if given.alerts_url is not None:
        _check_alerts_url(guard, given.alerts_url)
        accounts = SqlAccounts(store) if ledger is None else LedgerAccounts(ledger)
        alerts = BudgetAlerts(
            webhooks.deliveries,
            accounts.after,
            url=given.alerts_url,
            leads=lambda: engine.dispatcher.is_leading,
            filed=webhooks.wake,
            look_seconds=LOOK_SECONDS if ledger is None else LEDGER_LOOK_SECONDS,
        )
        engine.also_run("budget alerts", alerts.run)
    return webhooks


def callback_check(settings: Settings) -> Callable[[str], str | None]:
    """Return what says why a task cannot have an address told of its end."""
    if not settings.webhooks.enabled:
        return _switched_off
    return UrlGuard(parse_allow_list(settings.webhooks.allow)).problem_with


def _switched_off(_url: str) -> str:
    return SWITCHED_OFF


def _check_alerts_url(guard: UrlGuard, url: str) -> None:
    problem = guard.problem_with(url)
    if problem is not None:
        raise InvalidSettingError("webhooks.alerts_url", problem)
