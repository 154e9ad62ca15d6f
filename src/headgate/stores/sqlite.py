"""The task store in an SQLite file: durable, for one process of one machine, with no server."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from headgate.databases.awaited import Writer
from headgate.databases.child import ChildStarter
from headgate.databases.process_writer import ProcessWriter
from headgate.databases.readers import ReaderPool
from headgate.databases.sqlite import SqliteDatabase, SqliteReader
from headgate.databases.writer import GroupCommitWriter
from headgate.ledger import Clock
from headgate.stores.row_cache import RowCache
from headgate.stores.sql_store import SqlTaskStore
from headgate.stores.task_tables import TaskTables
from headgate.stores.wire.jobs import StepWire
from headgate.stores.wire.sqlite_workplace import sqlite_workplace

BUSY_TIMEOUT_SECONDS = 2.0
"""How long another process may have the file before callers are told: they wait for twice that."""


class SqliteTaskStore(SqlTaskStore):
    """Tasks in a file, with the books of their budgets beside them.

    With a `starter` a process of its own writes, by its own clock.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        keeps_books: bool = True,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        starter: ChildStarter | None = None,
    ) -> None:
        database = SqliteDatabase(path, busy_timeout_seconds=busy_timeout_seconds)
        writer: Writer
        if starter is not None:
            tables = TaskTables(keeps_books=keeps_books)
            recipe = partial(
                sqlite_workplace, Path(path).absolute(), busy_timeout_seconds, keeps_books
            )
            writer = ProcessWriter(recipe, StepWire(tables), starter)
        else:
            tables = TaskTables(clock=clock, keeps_books=keeps_books, cache=RowCache(database))
            writer = GroupCommitWriter(database)
        reader = ReaderPool(partial(SqliteReader, path))
        super().__init__(tables, writer, reader, is_shared=False)
