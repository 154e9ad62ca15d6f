"""SQLite without a file: for tests, simulations and work that may be lost.

Rule: what is in it lives as long as the object. Closing lets go of the transaction only, since
there is nowhere to read the rows from again; so a store over it may be closed and opened as one
over a file, and several of them may share it within one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import apsw

from headgate.core.budgets.ledger import Clock
from headgate.storage.sql_store import SqlTaskStore, TaskTables
from headgate.storage.sqlite import SqliteTransaction
from headgate.storage.writer import Faults, InlineWriter

_NAME = ":memory:"


class MemoryDatabase:
    """The transactions of tables that only this process sees."""

    def __init__(self) -> None:
        self._connection = apsw.Connection(_NAME)
        self._transaction = SqliteTransaction(self._connection, Path(_NAME))

    def begin(self) -> SqliteTransaction:
        """Open a transaction."""
        self._transaction.read("BEGIN IMMEDIATE")
        return self._transaction

    def commit(self) -> None:
        """End the transaction."""
        self._transaction.read("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction, if there is one; never raises."""
        if self._connection.in_transaction:
            with suppress(apsw.Error):
                self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Undo the transaction, if there is one; what was committed stays."""
        self.rollback()

    def wait_turn(self) -> bool:
        """One process writes at a time."""
        return False

    def make_room(self) -> bool:
        """There is no disk."""
        return False


# The task store in memory: for tests, simulations and work that may be lost with the process.


class MemoryTaskStore(SqlTaskStore):
    """Tasks in this process, without a thread; several stores may share one database.

    Whoever has several join one database says `is_shared`, or each takes the others for dead.
    `faults` and `reply_seconds` are for simulations, and go to the writer.
    """

    def __init__(
        self,
        database: MemoryDatabase | None = None,
        *,
        clock: Clock | None = None,
        keeps_ledger: bool = True,
        is_shared: bool = False,
        faults: Faults | None = None,
        reply_seconds: Callable[[], float] | None = None,
    ) -> None:
        self.database = MemoryDatabase() if database is None else database
        writer = InlineWriter(self.database, faults=faults, reply_seconds=reply_seconds)
        tables = TaskTables(clock=clock, keeps_ledger=keeps_ledger)
        super().__init__(tables, writer, writer, is_shared=is_shared)
