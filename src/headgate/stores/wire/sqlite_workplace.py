"""What a process needs that writes to a task store in an SQLite file."""

from __future__ import annotations

from pathlib import Path

from headgate.databases.sqlite import SqliteDatabase
from headgate.databases.workplace import Workplace
from headgate.stores.row_cache import RowCache
from headgate.stores.task_tables import TaskTables, be_here
from headgate.stores.wire.jobs import StepWire


def sqlite_workplace(path: Path, busy_timeout_seconds: float, keeps_books: bool) -> Workplace:  # noqa: FBT001
    """Make a workplace on a file."""
    database = SqliteDatabase(path, busy_timeout_seconds=busy_timeout_seconds)
    tables = TaskTables(keeps_books=keeps_books, cache=RowCache(database))
    be_here(tables)
    return Workplace(database, StepWire(tables))
