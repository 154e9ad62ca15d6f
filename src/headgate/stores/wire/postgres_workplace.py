"""What a process needs that writes to a task store in PostgreSQL."""

from __future__ import annotations

from headgate.databases.postgres import PostgresDatabase
from headgate.databases.server_clock import ServerClock
from headgate.databases.transaction import Transaction
from headgate.databases.workplace import Workplace
from headgate.ledger import Clock
from headgate.stores.task_tables import TaskTables, be_here
from headgate.stores.wire.jobs import StepWire

IDLE_TIMEOUT_SECONDS = 2.0
TRANSACTION_TIMEOUT_SECONDS = 3.0


class PostgresTables(TaskTables):
    """Tables whose time is that of the server, unless a clock is given."""

    def __init__(self, *, clock: Clock | None = None, keeps_books: bool = True) -> None:
        self._server_clock = ServerClock() if clock is None else None
        super().__init__(clock=self._server_clock or clock, keeps_books=keeps_books)

    def prepare(self, transaction: Transaction) -> None:
        """Bring the schema up to date, and ask for the time: the server may be another one."""
        super().prepare(transaction)
        if self._server_clock is not None:
            self._server_clock.compare(transaction)

    def begin(self, transaction: Transaction) -> float:
        """Make sure that the tables are there and nobody else writes, and return the time."""
        self.set_clock(transaction)
        return super().begin(transaction)

    def is_clock_due(self) -> bool:
        """Tell whether the server should be asked for the time."""
        return self._server_clock is not None and self._server_clock.is_due()

    def set_clock(self, transaction: Transaction) -> None:
        """Ask the server for the time, if that was long ago."""
        if self._server_clock is not None and self._server_clock.is_due():
            self._server_clock.compare(transaction)


def task_database(url: str, lock_timeout_seconds: float) -> PostgresDatabase:
    """Return a database whose server takes locks back from who stands still."""
    return PostgresDatabase(
        url,
        lock_timeout_seconds=lock_timeout_seconds,
        idle_timeout_seconds=IDLE_TIMEOUT_SECONDS,
        transaction_timeout_seconds=TRANSACTION_TIMEOUT_SECONDS,
    )


def postgres_workplace(url: str, lock_timeout_seconds: float, keeps_books: bool) -> Workplace:  # noqa: FBT001
    """Make a workplace on a server."""
    tables = PostgresTables(keeps_books=keeps_books)
    be_here(tables)
    return Workplace(task_database(url, lock_timeout_seconds), StepWire(tables))
