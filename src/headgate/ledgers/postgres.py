"""The ledger in PostgreSQL: for processes on many machines, judged by the server's clock."""

from __future__ import annotations

import time

from headgate.databases.postgres import LOCK_TIMEOUT_SECONDS, PostgresDatabase
from headgate.databases.transaction import Transaction
from headgate.ledger import Clock
from headgate.ledgers.sql_ledger import SqlLedger
from headgate.tracker import LedgerTracker

CLOCK_SECONDS = 60.0
DRIFT_SECONDS = 1.0
_SERVER_TIME = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


class ServerClock:
    """The server's time, carried on from the last comparison by a clock that nobody can set.

    That clock may stand still while the machine sleeps. So a wall clock that went another way
    since, for whatever reason, makes a new comparison due.
    """

    def __init__(self) -> None:
        self.forget()

    def __call__(self) -> float:
        """Return the server's time; before the first comparison, this machine's."""
        if self._ahead_seconds is None:
            return time.time()
        return time.monotonic() + self._ahead_seconds

    def forget(self) -> None:
        """Make a comparison due."""
        self._ahead_seconds: float | None = None
        self._compared_at = self._wall_ahead_seconds = 0.0

    def is_due(self) -> bool:
        """Tell whether the comparison is old, or a clock of this machine cannot be trusted."""
        now = time.monotonic()
        drift_seconds = abs(time.time() - now - self._wall_ahead_seconds)
        is_old = self._ahead_seconds is None or now - self._compared_at >= CLOCK_SECONDS
        return is_old or drift_seconds >= DRIFT_SECONDS

    def compare(self, transaction: Transaction) -> None:
        """Ask the server."""
        asked_at = time.monotonic()
        server_time = float(transaction.read(_SERVER_TIME)[0][0])
        self._compared_at = time.monotonic()
        # The answer was given somewhere between question and arrival.
        self._ahead_seconds = server_time - (asked_at + self._compared_at) / 2
        self._wall_ahead_seconds = time.time() - self._compared_at


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
