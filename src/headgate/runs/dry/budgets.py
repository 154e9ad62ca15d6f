"""The budgets around a run as they stand before it: read where they are kept, and left as they are.

Limits that the run would found count as if they were there; one that differs is the same error as
in a run. Rule: looking founds nothing, not even the file that the books would be in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headgate.core.budgets.accounts import Account, Limit
from headgate.core.budgets.scopes import Scope, ancestors
from headgate.ledgers.connect import connect_budget, sqlite_path
from headgate.ledgers.schemes import SCHEMES, scheme_of
from headgate.runs.budgets import Books, ChangeCommand, found_limits, limits_of
from headgate.runs.kept.record import RunScope
from headgate.runs.options import RunOptions
from headgate.runs.raising import change_in_books


async def budgets_before(
    books: Books, scopes: Sequence[RunScope], options: RunOptions
) -> list[Account]:
    """Return what a run would be charged to, the root first, with the limits it would have."""
    charged = ancestors(Scope(scopes[-1].scope))
    kept = await _kept(books, charged)
    accounts = [kept.get(scope, Account(scope=scope)) for scope in charged]
    change = change_in_books(books.tracker, books.address)
    return await with_limits(accounts, scopes, options, change)


async def with_limits(
    accounts: Sequence[Account],
    scopes: Sequence[RunScope],
    options: RunOptions,
    change: ChangeCommand | None,
) -> list[Account]:
    """Return accounts with the limits that a run would found; one that differs is an error."""
    await found_limits(_Paper(accounts), scopes, options, change=change)
    wanted = limits_of(scopes)
    return [
        account if account.limit is not None else _limited(account, wanted.get(account.scope))
        for account in accounts
    ]


class _Paper:
    """Says which limit would be in force, and sets none."""

    def __init__(self, accounts: Sequence[Account]) -> None:
        self._limits = {account.scope: account.limit for account in accounts}

    async def found_limit(self, scope: Scope, limit: Limit) -> Limit:
        return self._limits.get(scope) or limit


async def _kept(books: Books, charged: Sequence[Scope]) -> Mapping[Scope, Account]:
    if books.url is None or not _is_there(books.url):
        return {}
    async with connect_budget(books.url) as tracker:
        found = [(await tracker.ledger.accounts(scope, most=1))[0] for scope in charged]
    return {account.scope: account for account in found}


def _is_there(url: str) -> bool:
    return scheme_of(url) not in SCHEMES["sqlite"] or sqlite_path(url).exists()


def _limited(account: Account, limit: Limit | None) -> Account:
    return account if limit is None else msgspec.structs.replace(account, limit=limit)
