"""The ledger in PostgreSQL: for processes on many machines, judged by the server's clock."""

from __future__ import annotations

import time

from headgate.databases.postgres import LOCK_TIMEOUT_SECONDS, PostgresDatabase
from headgate.databases.transaction import Transaction
from headgate.ledger import Clock
from headgate.ledgers.sql_ledger import SqlLedger
from headgate.tracker import LedgerTracker

CLOCK_SECONDS = 60.0
_SERVER_TIME = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


class PostgresLedger(SqlLedger):
    """Books in PostgreSQL; unless a clock is given, the server's clock decides."""

    def __init__(self, database: PostgresDatabase, *, clock: Clock | None = None) -> None:
        super().__init__(database, clock=clock)
        self._follows_server = clock is None
        self._offset_seconds = 0.0
        self._compared_at = float("-inf")

    def now(self) -> float:
        """Return the server's time, as far as it was last compared with this machine's."""
        return super().now() + self._offset_seconds

    def _prepare(self, transaction: Transaction) -> None:
        self._compared_at = float("-inf")
        super()._prepare(transaction)

    def _begin(self, transaction: Transaction) -> float:
        is_due = time.monotonic() - self._compared_at >= CLOCK_SECONDS
        if self._follows_server and is_due:
            self._compare_clocks(transaction)
        return super()._begin(transaction)

    def _compare_clocks(self, transaction: Transaction) -> None:
        asked_at = self._clock()
        server_time = float(transaction.read(_SERVER_TIME)[0][0])
        # The answer was given somewhere between question and arrival.
        self._offset_seconds = server_time - (asked_at + self._clock()) / 2
        self._compared_at = time.monotonic()


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
