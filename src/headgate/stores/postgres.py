"""The task store in PostgreSQL: for nodes on many machines, judged by the server's clock.

A node that stands still within a transaction keeps everybody from writing, so the server takes
its locks back after a few seconds; what it had not committed did not happen.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.databases.listener import PostgresListener
from headgate.databases.postgres import LOCK_TIMEOUT_SECONDS, PostgresDatabase, PostgresReader
from headgate.databases.readers import ReaderPool
from headgate.databases.transaction import Transaction
from headgate.databases.writer import GroupCommitWriter
from headgate.ledger import Clock
from headgate.ledgers.postgres import ServerClock
from headgate.stores.messages import CHANNEL
from headgate.stores.sql_store import SqlTaskStore

IDLE_TIMEOUT_SECONDS = 2.0
TRANSACTION_TIMEOUT_SECONDS = 3.0


class PostgresTaskStore(SqlTaskStore):
    """Tasks that many nodes share, with the books of their budgets beside them."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        keeps_books: bool = True,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    ) -> None:
        self._server_clock = ServerClock() if clock is None else None
        self._listener = PostgresListener(url, CHANNEL)
        database = PostgresDatabase(
            url,
            lock_timeout_seconds=lock_timeout_seconds,
            idle_timeout_seconds=IDLE_TIMEOUT_SECONDS,
            transaction_timeout_seconds=TRANSACTION_TIMEOUT_SECONDS,
        )
        super().__init__(
            GroupCommitWriter(database),
            ReaderPool(lambda: PostgresReader(url)),
            clock=self._server_clock or clock,
            keeps_books=keeps_books,
        )

    async def close(self) -> None:
        """Finish what was asked for, then let go of everything."""
        self.unwatch()
        await super().close()

    def watch(self, recipient: str, callback: Callable[[], None]) -> None:
        """Call back in this event loop when a message for the recipient may have come."""
        self._listener.watch(recipient, callback)

    def unwatch(self, recipient: str | None = None) -> None:
        """Call nobody back any more, or no more for this recipient."""
        if recipient is None:
            self._listener.close()
        else:
            self._listener.unwatch(recipient)

    def _prepare(self, transaction: Transaction) -> None:
        super()._prepare(transaction)
        # A new connection may lead to another server, with another clock.
        if self._server_clock is not None:
            self._server_clock.compare(transaction)

    def _begin(self, transaction: Transaction) -> float:
        if self._server_clock is not None and self._server_clock.is_due():
            self._server_clock.compare(transaction)
        return super()._begin(transaction)
