"""The task store in PostgreSQL: for nodes on many machines, judged by the server's clock.

A node that stands still within a transaction keeps everybody from writing, so the server takes
its locks back after a few seconds; what it had not committed did not happen. Few threads read for
everybody, so a question that a server does not answer is given up before people stop waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headgate.databases.awaited import Writer
from headgate.databases.child import ChildStarter
from headgate.databases.listener import PostgresListener
from headgate.databases.postgres import LOCK_TIMEOUT_SECONDS, PostgresReader
from headgate.databases.process_writer import ProcessWriter
from headgate.databases.readers import ReaderPool
from headgate.databases.writer import GroupCommitWriter
from headgate.ledger import Clock
from headgate.store import Beat
from headgate.stores.messages import CHANNEL
from headgate.stores.sql_store import SqlTaskStore
from headgate.stores.wire.jobs import StepWire
from headgate.stores.wire.postgres_workplace import (
    PostgresTables,
    postgres_workplace,
    task_database,
)

READ_LOCK_SECONDS = 1.0
"""How long a question waits for a table that somebody has locked."""

READ_SECONDS = 3.0
"""How long a statement of a question may take, unless it is known to be a long one."""


class PostgresTaskStore(SqlTaskStore):
    """Tasks that many nodes share, with the books of their budgets beside them.

    With a `starter` a process of its own writes for this node.
    """

    tables: PostgresTables

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        keeps_books: bool = True,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
        starter: ChildStarter | None = None,
    ) -> None:
        self._listener = PostgresListener(url, CHANNEL)
        tables = PostgresTables(clock=clock, keeps_books=keeps_books)
        writer: Writer
        if starter is not None:
            recipe = partial(postgres_workplace, url, lock_timeout_seconds, keeps_books)
            writer = ProcessWriter(recipe, StepWire(tables), starter)
        else:
            writer = GroupCommitWriter(task_database(url, lock_timeout_seconds))
        quick = partial(
            PostgresReader,
            url,
            lock_timeout_seconds=READ_LOCK_SECONDS,
            statement_timeout_seconds=READ_SECONDS,
        )
        patient = ReaderPool(partial(PostgresReader, url), most=1)
        super().__init__(tables, writer, ReaderPool(quick), long_reader=patient)

    async def open(self) -> None:
        """Connect, bring the schema up to date, and learn what time it is."""
        await super().open()
        await self._set_clock()

    async def close(self) -> None:
        """Finish what was asked for, then let go of everything."""
        self.unwatch()
        await super().close()

    async def beat(self, node_id: str, *, places: int, lease_seconds: float) -> Beat:
        """Renew the lease of a node and of everything that it runs."""
        await self._set_clock()
        return await super().beat(node_id, places=places, lease_seconds=lease_seconds)

    def watch(self, recipient: str, callback: Callable[[], None]) -> None:
        """Call back in this event loop when a message for the recipient may have come."""
        self._listener.watch(recipient, callback)

    def unwatch(self, recipient: str | None = None) -> None:
        """Call nobody back any more, or no more for this recipient."""
        if recipient is None:
            self._listener.close()
        else:
            self._listener.unwatch(recipient)

    async def _set_clock(self) -> None:
        # Where another process writes, its clock is not this one.
        if self.tables.is_clock_due():
            await self.ask(self.tables.set_clock)
