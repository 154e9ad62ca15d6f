"""SQLite without a file: for tests, simulations and work that may be lost.

Rule: what is in it lives as long as the object. Closing lets go of the transaction only, since
there is nowhere to read the rows from again; so a store over it may be closed and opened as one
over a file, and several of them may share it within one thread.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import apsw

from headgate.databases.sqlite import SqliteTransaction

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
