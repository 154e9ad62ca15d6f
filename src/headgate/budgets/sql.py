"""The ledger in a database: requests of concurrent callers share a transaction.

Everything goes through one writer thread. Requests that wait together are applied as one batch,
with one update a balance and one commit for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar, cast

from headgate.core.budgets.ledger import (
    MAX_ACCOUNTS,
    Account,
    AdjustRequest,
    Audit,
    Clock,
    JournalEntry,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
)
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.errors import CallerError, LedgerUnavailableError
from headgate.storage import ledger
from headgate.storage.ledger import MIGRATIONS, PART
from headgate.storage.migrations import migrate, schema_version
from headgate.storage.transaction import Database, Transaction
from headgate.storage.writer import GroupCommitWriter
from headgate.storage.zones import zone

Result = TypeVar("Result")

UPKEEP_SECONDS = 60.0


class SqlLedger:
    """A ledger in SQLite or PostgreSQL."""

    def __init__(self, database: Database, *, clock: Clock | None = None) -> None:
        self.writer = GroupCommitWriter(database)
        self._clock = time.time if clock is None else clock
        self._tidied_at = float("-inf")
        self._purged_up_to = ROOT
        # A database has one transaction object for each of its connections.
        self._checked: Transaction | None = None

    def now(self) -> float:
        """Return the time by which this ledger judges leases and windows."""
        return self._clock()

    async def open(self) -> None:
        """Connect, and bring the schema up to date."""
        self.writer.start()
        try:
            await self.writer.submit(self._prepare)
        except BaseException:
            await self.writer.close()
            raise

    async def close(self) -> None:
        """Finish what is queued, then let go of the connection."""
        await self.writer.close()

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""
        zone(limit.window.zone)
        await self._run(lambda tables, now: ledger.set_limit(tables, scope, limit, now))

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then."""
        zone(limit.window.zone)
        return await self._run(lambda tables, now: ledger.create_limit(tables, scope, limit, now))

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold the money in all scopes or in none; a known id gets its answer again."""
        return await self.writer.submit_request(self._apply, request)

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""
        answer = await self.writer.submit_request(self._apply, request)
        return cast("Reservation", answer)

    async def adjust(self, request: AdjustRequest) -> Reservation:
        """Change a balance by the word of an operator, or raise a `CallerError`."""
        answer = await self.writer.submit_request(self._apply, request)
        return cast("Reservation", answer)

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        """Return the scope and everything within it that has a limit or a balance."""
        return await self._run(lambda tables, now: ledger.accounts(tables, scope, now, most=most))

    async def journal(
        self, scope: Scope, *, since: float, until: float = inf, limit: int
    ) -> list[JournalEntry]:
        """Return the latest entries of a time that charge the scope, newest first."""
        return await self._run(
            lambda tables, _now: ledger.journal(
                tables, scope, since=since, until=until, limit=limit
            )
        )

    async def sweep(self) -> int:
        """Expire all leases that are due, and return how many there were."""
        expired, has_more = 0, True
        while has_more:
            step, has_more = await self.writer.submit(self._sweep)
            expired += step
        return expired

    async def audit(self) -> Audit:
        """Return both sides of the promise that balances equal the journal."""
        return await self._run(lambda tables, _now: ledger.audit(tables))

    async def _run(self, operation: Callable[[Transaction, float], Result]) -> Result:
        def on_ledger(transaction: Transaction) -> Result:
            now = self._begin(transaction)
            ledger.expire_due(transaction, now)
            return operation(transaction, now)

        return await self.writer.submit(on_ledger)

    def _prepare(self, transaction: Transaction) -> None:
        migrate(transaction, PART, MIGRATIONS)

    def _apply(
        self, transaction: Transaction, requests: Sequence[ledger.Request]
    ) -> Sequence[ledger.Answer | CallerError]:
        now = self._begin(transaction)
        return ledger.apply_batch(transaction, requests, now)

    def _sweep(self, transaction: Transaction) -> tuple[int, bool]:
        now = self._begin(transaction)
        expired = ledger.expire_due(transaction, now)
        return expired, ledger.tidy(transaction, now) or expired >= ledger.MAX_EXPIRED

    def _begin(self, transaction: Transaction) -> float:
        if transaction is not self._checked:
            self._check_tables(transaction)
        ledger.lock_ledger(transaction)
        now = self.now()
        # Also after a clock that was ahead was set back.
        if abs(now - self._tidied_at) >= UPKEEP_SECONDS:
            self._keep_up(transaction, now)
        return now

    def _check_tables(self, transaction: Transaction) -> None:
        """Look whether a new connection leads to the ledger: a file or a server can be replaced."""
        version = schema_version(transaction, PART)
        if not version:
            advice = "put it back, or open the ledger again to create a new one"
            line = f"the database has no ledger any more, nothing was granted; {advice}"
            raise LedgerUnavailableError(line)
        if version == MIGRATIONS[-1].number:
            self._checked = transaction
        else:
            migrate(transaction, PART, MIGRATIONS)

    def _keep_up(self, transaction: Transaction, now: float) -> None:
        # As long as there is more, the next call does the next step; none of them waits long.
        if ledger.tidy(transaction, now):
            return
        self._tidied_at = now
        self._purged_up_to = ledger.purge_buckets(transaction, now, after=self._purged_up_to)
