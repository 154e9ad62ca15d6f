"""Budgets that the configuration names: what it no longer names is no longer in force.

Rule: only what came from the configuration is taken back. A budget that somebody set by hand, in
a scope that no configuration ever named, stays as it is.
"""

from __future__ import annotations

from headgate.core.budgets.accounts import Limit
from headgate.core.budgets.scopes import Scope
from headgate.databases.transaction import Transaction
from headgate.ledgers import sql_books
from headgate.stores.schemas.tasks import CONFIGURED

NO_LIMIT = Limit()


def set_limits(
    transaction: Transaction, limits: dict[Scope, Limit], *, keeps_books: bool
) -> tuple[Scope, ...]:
    """Put the budgets of the configuration in force; return the scopes that it has left out."""
    rows = transaction.read("SELECT scope FROM configured_budgets ORDER BY scope")
    left_out = tuple(Scope(row[0]) for row in rows if row[0] not in limits)
    if keeps_books:
        for scope in left_out:
            sql_books.set_limit(transaction, scope, NO_LIMIT)
        for scope, limit in limits.items():
            sql_books.set_limit(transaction, scope, limit)
    transaction.run("DELETE FROM configured_budgets")
    transaction.insert(CONFIGURED, [(scope,) for scope in limits])
    return left_out
