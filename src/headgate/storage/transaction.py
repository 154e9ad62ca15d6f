"""One open transaction, whatever database it is in.

What keeps rows is written as functions on a `Transaction`: they neither open nor commit one, so a
caller can put several of them into one commit. SQL is written once, with `?` for a parameter, in
the words that SQLite and PostgreSQL share; where they differ, the `Dialect` has the words.

Rule: no error of a driver leaves this folder. One after which nothing can be granted is a
`LedgerUnavailableError`, and spoils the whole transaction; any other is a `StoreError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec

from headgate.errors import LedgerUnavailableError

Value = str | int | float | None
Row = tuple[Any, ...]
"""A row as a driver gives it; whoever reads it knows the types of its columns."""

Statement = tuple[str, Sequence[Value]]
"""A statement with its parameters."""


class Dialect(Enum):
    """The databases that are spoken to."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"

    def elements(self, array: str) -> str:
        """Write a table of the elements of a JSON array; its one column is called `value`."""
        if self is Dialect.SQLITE:
            return f"json_each({array})"
        return f"jsonb_array_elements(CAST({array} AS jsonb))"

    def given(self, columns: Mapping[str, str]) -> str:
        """Write a table of the rows of one parameter, which is a JSON array of arrays."""
        fields = ", ".join(
            f"CAST(item.value->>{place} AS {kind}) AS {name}"
            for place, (name, kind) in enumerate(columns.items())
        )
        return f"(SELECT {fields} FROM {self.elements('?')} AS item) AS given"  # noqa: S608


class Insert(msgspec.Struct, frozen=True, kw_only=True):
    """Rows to insert into a table; one whose key exists has its `updated` columns replaced.

    `columns` are pairs of a name and a type. The names are the program's own, never input.
    """

    table: str
    columns: tuple[tuple[str, str], ...]
    key: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()

    @property
    def into(self) -> str:
        """The beginning of the statement, before its rows."""
        return f"INSERT INTO {self.table} ({', '.join(name for name, _ in self.columns)})"

    @property
    def on_conflict(self) -> str:
        """The end of the statement, after its rows."""
        if not self.key:
            return ""
        changes = ", ".join(f"{name} = excluded.{name}" for name in self.updated)
        return f" ON CONFLICT ({', '.join(self.key)}) DO UPDATE SET {changes}"


class LostTransactionError(LedgerUnavailableError):
    """The transaction is gone and its outcome is not known; it may be run once more."""


class Transaction(Protocol):
    """An open transaction; only whoever opened it may end it."""

    @property
    def dialect(self) -> Dialect:
        """The database that is spoken to."""

    def run(self, sql: str, parameters: Sequence[Value] = ()) -> None:
        """Run a statement that returns nothing of interest; an error may show at the next step."""

    def read(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Run a statement and return its rows."""

    def read_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run statements that do not depend on each other, and return the rows of each."""

    def write(self, sql: str, parameters: Sequence[Value] = ()) -> int:
        """Run a statement and return how many rows it changed."""

    def insert(self, insert: Insert, rows: Sequence[Row]) -> None:
        """Insert many rows in few steps; an error may show at the next step."""

    def savepoint(self) -> AbstractContextManager[None]:
        """Undo what is done within the block, and only that, if it raises."""


class Database(Protocol):
    """Opens transactions, one at a time, from one thread; it connects when it must."""

    def begin(self) -> Transaction:
        """Open a transaction in which what is read may also be written."""

    def commit(self) -> None:
        """End the transaction; it is on disk, or an error is raised."""

    def rollback(self) -> None:
        """Undo the transaction, if there is one; never raises."""

    def close(self) -> None:
        """Let go of the connection; the next `begin` makes a new one."""


def first_line(error: Exception) -> str:
    """Return what a driver has to say, without the parts that only it understands."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def json_rows(rows: Sequence[Row]) -> str:
    """Write rows as the parameter of `Dialect.given`."""
    return msgspec.json.encode(rows).decode()


def about(dialect: Dialect, statement: str, column: str, texts: Iterable[str]) -> Statement:
    """Complete a statement, so that it is about the rows whose column is one of these texts."""
    return _where_given(dialect, statement, column), (json_rows([(text,) for text in texts]),)


@cache
def _where_given(dialect: Dialect, statement: str, column: str) -> str:
    given = dialect.given({"text": "TEXT"})
    return f"{statement} WHERE {column} IN (SELECT given.text FROM {given})"  # noqa: S608


@cache
def percent_placeholders(sql: str) -> str:
    """Write the parameters of a statement as PostgreSQL's driver wants them."""
    return sql.replace("?", "%s")


# What a subject that keeps rows of its own needs of the store: a clock, and two ways in.
#
# Rule: an operation or a question is a function of a module, with its arguments bound by `partial`,
# so that it can be sent to another process.

Result = TypeVar("Result")


class Access(Protocol):
    """A way into a database that others use at the same time."""

    def now(self) -> float:
        """Return the time by which the store judges."""

    async def run(self, operation: Callable[[Transaction, float], Result]) -> Result:
        """Change something, at a time that is given; the answer means that it is on disk.

        After a lost connection it may be run twice, so it recognises its own work.
        """

    async def ask(
        self, question: Callable[[Transaction], Result], *, is_long: bool = False
    ) -> Result:
        """Read what has been committed.

        One that may have to look at everything says that it `is_long`. Others are given up soon by
        a server that is slow, so that they do not keep everybody waiting behind them.
        """
