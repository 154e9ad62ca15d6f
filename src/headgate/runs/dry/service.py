"""A service before a run: its targets, and the budgets as far as the service tells them."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.client.async_client import Client
from headgate.core.budgets.accounts import Account, Balance, Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.money import MicroUsd
from headgate.redaction import hidden_address
from headgate.runs.backend import Money
from headgate.runs.dry.budgets import with_limits
from headgate.runs.kept.record import RunScope
from headgate.runs.options import RunOptions
from headgate.runs.raising import change_at_service
from headgate.runs.remote.money import money_of, own_scope, within
from headgate.runs.remote.targets import check_known_targets
from headgate.workflow.workflow import Workflow


async def service_budgets(
    url: str,
    token: str | None,
    scopes: Sequence[RunScope],
    options: RunOptions,
    *,
    workflow: Workflow,
) -> list[Account]:
    """Return the scopes of a run as the service has them, with the limits they would have.

    A target that the service does not have is refused, as a run is.
    """
    async with Client(url, token=token) as client:
        await check_known_targets(client, workflow)
        scopes = within(await own_scope(client, scopes), scopes)
        money = await money_of(client, scopes)
    accounts = [_account(one) for one in money]
    return await with_limits(accounts, scopes, options, change_at_service(hidden_address(url)))


def _account(money: Money) -> Account:
    limit = money.limit_micro_usd
    balance = Balance(
        spent_micro_usd=MicroUsd(money.spent_micro_usd),
        reserved_micro_usd=MicroUsd(money.reserved_micro_usd),
    )
    return Account(
        scope=Scope(money.scope),
        limit=None if limit is None else Limit(limit_micro_usd=MicroUsd(limit)),
        balance=balance,
    )
