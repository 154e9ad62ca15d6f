"""The tables of a task store without a store around them, in each dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from headgate.storage.memory import MemoryDatabase
from headgate.storage.postgres import PostgresDatabase
from headgate.storage.sql_store import migrate_all
from headgate.storage.transaction import Database, Transaction

Result = TypeVar("Result")

DIALECTS = ("sqlite", "postgres")


class Tables:
    """Fresh tables; each step is a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.do(migrate_all)

    def do(self, step: Callable[[Transaction], Result]) -> Result:
        """Run a step and commit it."""
        result = step(self.database.begin())
        self.database.commit()
        return result

    def count(self, table: str) -> int:
        """Count the rows of a table."""
        return int(self.do(lambda tx: tx.read(f"SELECT COUNT(*) FROM {table}"))[0][0])


@contextmanager
def fresh_tables(dialect: str, request: pytest.FixtureRequest) -> Iterator[Tables]:
    """Make tables that nobody has written to."""
    if dialect == "sqlite":
        yield Tables(MemoryDatabase())
        return
    database = PostgresDatabase(request.getfixturevalue("postgres_url"))
    yield Tables(database)
    database.close()
