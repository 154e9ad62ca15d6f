"""The task store in memory: for tests, simulations and work that may be lost with the process."""

from __future__ import annotations

from collections.abc import Callable

from headgate.databases.inline import Faults, InlineWriter
from headgate.databases.memory import MemoryDatabase
from headgate.ledger import Clock
from headgate.stores.sql_store import SqlTaskStore
from headgate.stores.task_tables import TaskTables


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
        keeps_books: bool = True,
        is_shared: bool = False,
        faults: Faults | None = None,
        reply_seconds: Callable[[], float] | None = None,
    ) -> None:
        self.database = MemoryDatabase() if database is None else database
        writer = InlineWriter(self.database, faults=faults, reply_seconds=reply_seconds)
        tables = TaskTables(clock=clock, keeps_books=keeps_books)
        super().__init__(tables, writer, writer, is_shared=is_shared)
