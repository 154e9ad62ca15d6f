"""The task store in an SQLite file: durable, for one process of one machine, with no server."""

from __future__ import annotations

from pathlib import Path

from headgate.databases.readers import ReaderPool
from headgate.databases.sqlite import SqliteDatabase, SqliteReader
from headgate.databases.writer import GroupCommitWriter
from headgate.ledger import Clock
from headgate.stores.row_cache import RowCache
from headgate.stores.sql_store import SqlTaskStore

BUSY_TIMEOUT_SECONDS = 2.0
"""How long another process may have the file before callers are told: they wait for twice that."""


class SqliteTaskStore(SqlTaskStore):
    """Tasks in a file, with the books of their budgets beside them."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        keeps_books: bool = True,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
    ) -> None:
        database = SqliteDatabase(path, busy_timeout_seconds=busy_timeout_seconds)
        super().__init__(
            GroupCommitWriter(database),
            ReaderPool(lambda: SqliteReader(path)),
            clock=clock,
            keeps_books=keeps_books,
            is_shared=False,
            cache=RowCache(database),
        )
