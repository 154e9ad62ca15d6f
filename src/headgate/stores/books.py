"""The books of a task store as a ledger, for whoever asks about budgets and not about tasks.

Money that tasks hold and money that is asked for here lie in the same rows, under the same lock:
neither can pass a limit because of the other.
"""

from __future__ import annotations

from functools import partial
from math import inf

from headgate.core.budgets.accounts import Account, JournalEntry, Limit, Refused
from headgate.core.budgets.books import ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import Scope
from headgate.databases.access import Access
from headgate.databases.transaction import Transaction
from headgate.errors import StoreError
from headgate.ledger import MAX_ACCOUNTS, Audit
from headgate.ledgers import sql_books, sql_upkeep
from headgate.ledgers.zones import zone


class StoreLedger:
    """A ledger over a store that keeps its books; whoever has the store opens and closes it."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def now(self) -> float:
        """Return the time by which this ledger judges leases and windows."""
        return self._access.now()

    async def open(self) -> None:
        """Do nothing: the store is opened by whoever runs the tasks."""

    async def close(self) -> None:
        """Do nothing: the store is closed by whoever runs the tasks."""

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""
        zone(limit.window.zone)
        await self._access.run(partial(_set_limit, scope=scope, limit=limit))

    async def found_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then."""
        zone(limit.window.zone)
        return await self._access.run(partial(_found_limit, scope=scope, limit=limit))

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold the money in all scopes or in none; a known id gets its answer again."""
        return await self._access.run(partial(_apply, request=request))

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""
        answer = await self._access.run(partial(_apply, request=request))
        if isinstance(answer, Refused):
            raise StoreError("the books refused a settlement")
        return answer

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        """Return the scope and everything within it that has a limit or a balance."""
        await self._access.run(sql_books.expire_due)
        # Many scopes take a while to read, and nobody who writes is to wait for it.
        question = partial(sql_books.accounts, scope=scope, now=self.now(), most=most)
        return await self._access.ask(question)

    async def journal(
        self, scope: Scope, *, since: float, until: float = inf, limit: int
    ) -> list[JournalEntry]:
        """Return the latest entries of a time that charge the scope, newest first."""
        question = partial(sql_books.journal, scope=scope, since=since, until=until, limit=limit)
        return await self._access.ask(question)

    async def sweep(self) -> int:
        """Expire all leases that are due, and return how many there were."""
        return await self._access.run(sql_books.expire_due)

    async def audit(self) -> Audit:
        """Return both sides of the promise that balances equal the journal."""
        return await self._access.ask(sql_upkeep.audit, is_long=True)


def _set_limit(transaction: Transaction, _: float, *, scope: Scope, limit: Limit) -> None:
    sql_books.set_limit(transaction, scope, limit)


def _found_limit(transaction: Transaction, _: float, *, scope: Scope, limit: Limit) -> Limit:
    return sql_books.found_limit(transaction, scope, limit)


def _apply(
    transaction: Transaction, now: float, *, request: ReserveRequest | SettleRequest
) -> Reservation | Refused:
    (answer,) = sql_books.apply_batch(transaction, [request], now)
    if isinstance(answer, Exception):
        raise answer
    return answer
