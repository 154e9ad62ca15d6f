"""The ledger in an SQLite file: durable, for the processes of one machine, with no server."""

from __future__ import annotations

from pathlib import Path

from headgate.budgets.sql import SqlLedger
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import Clock
from headgate.storage.sqlite import BUSY_TIMEOUT_SECONDS, SqliteDatabase


class SqliteBudgetTracker(LedgerTracker):
    """Budgets in a file that several processes of one machine may share."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
    ) -> None:
        database = SqliteDatabase(path, busy_timeout_seconds=busy_timeout_seconds)
        super().__init__(SqlLedger(database, clock=clock))
