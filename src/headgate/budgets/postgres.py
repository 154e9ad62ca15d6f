"""The ledger in PostgreSQL: for processes on many machines, judged by the server's clock."""

from __future__ import annotations

from headgate.budgets.sql import SqlLedger
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import Clock
from headgate.storage.postgres import LOCK_TIMEOUT_SECONDS, PostgresDatabase, ServerClock
from headgate.storage.transaction import Transaction


class PostgresLedger(SqlLedger):
    """A ledger in PostgreSQL; unless a clock is given, the server's clock decides."""

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
