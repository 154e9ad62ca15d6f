"""The ledger in PostgreSQL: for processes on many machines, judged by the server's clock."""

from __future__ import annotations

from headgate.databases.postgres import LOCK_TIMEOUT_SECONDS, PostgresDatabase
from headgate.databases.server_clock import ServerClock
from headgate.databases.transaction import Transaction
from headgate.ledger import Clock
from headgate.ledgers.sql_ledger import SqlLedger
from headgate.tracker import LedgerTracker


class PostgresLedger(SqlLedger):
    """Books in PostgreSQL; unless a clock is given, the server's clock decides."""

    def __init__(self, database: PostgresDatabase, *, clock: Clock | None = None) -> None:
        self._server_clock = ServerClock() if clock is None else None
        super().__init__(database, clock=self._server_clock or clock)

    def _prepare(self, transaction: Transaction) -> None:
        if self._server_clock is not None:
            self._server_clock.forget()
        super()._prepare(transaction)

    def _begin(self, transaction: Transaction) -> float:
        if self._server_clock is not None and self._server_clock.is_due():
            self._server_clock.compare(transaction)
        return super()._begin(transaction)


class PostgresBudgetTracker(LedgerTracker):
    """Budgets that processes on many machines share."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    ) -> None:
        database = PostgresDatabase(url, lock_timeout_seconds=lock_timeout_seconds)
        super().__init__(PostgresLedger(database, clock=clock))
