"""Rows of unfinished tasks as this process last wrote them, so that they need not be read again.

Only for a store that one process writes to, and even then the database is asked each time whether
somebody else wrote to it. A transaction takes rows out of the cache and puts them back when it has
written everything. Rule: what was put back counts once that transaction is known to have been
committed. If it was not, or nobody knows, its rows are gone from here and are read again.
"""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from headgate.databases.transaction import Transaction
from headgate.stores.task_rows import TaskRow

MAX_ROWS = 20_000


class Counted(Protocol):
    """A database that counts the transactions which it began and which it committed."""

    @property
    def begun(self) -> int:
        """How many were begun."""

    @property
    def committed(self) -> int:
        """How many of these are on disk."""


class RowCache:
    """Rows by task id; the oldest make room for new ones."""

    def __init__(self, database: Counted, *, most: int = MAX_ROWS) -> None:
        self._database = database
        self._most = most
        self._rows: dict[str, TaskRow] = {}
        self._written: dict[str, TaskRow] = {}
        self._moment = (0, 0)
        self._connection: Transaction | None = None
        self._version = 0

    def begin(self, transaction: Transaction) -> None:
        """Find out which rows still are as they were, at the start of every step."""
        database = self._database
        moment = (database.begun, database.committed)
        if moment != self._moment:
            self._end(moment)
        version: int = transaction.read("PRAGMA data_version")[0][0]
        # The number means something only on the connection that it comes from.
        if transaction is not self._connection or version != self._version:
            self._rows.clear()
        self._connection, self._version = transaction, version

    def take(self, task_id: str) -> TaskRow | None:
        """Take a row out, if it is here."""
        return self._written.pop(task_id, None) or self._rows.pop(task_id, None)

    def put(self, row: TaskRow) -> None:
        """Put a row in that this transaction has written, or found as it is."""
        self._written[row.id] = row

    def _end(self, moment: tuple[int, int]) -> None:
        begun, committed = self._moment
        if moment == (begun + 1, committed + 1):
            self._rows.update(self._written)
            for task_id in list(islice(self._rows, max(0, len(self._rows) - self._most))):
                del self._rows[task_id]
        self._written.clear()
        self._moment = moment
