"""One open transaction, whatever database it is in.

What keeps rows is written as functions on a `Transaction`: they neither open nor commit one, so a
caller can put several of them into one commit. SQL is written once, with `?` for a parameter, in
the words that SQLite and PostgreSQL share; where they differ, the `Dialect` has the words.

Rule: no error of a driver leaves this folder. One after which nothing can be granted is a
`LedgerUnavailableError`, and spoils the whole transaction; any other is a `StoreError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec

from headgate.core.money import MAX_BALANCE
from headgate.core.retention import StoreSize
from headgate.errors import LedgerUnavailableError

Value = str | int | float | None
Row = tuple[Any, ...]
"""A row as a driver gives it; whoever reads it knows the types of its columns."""


class Dialect(Enum):
    """The databases that are spoken to."""

    SQLITE = "sqlite"
    POSTGRES = "postgres"

    def elements(self, array: str) -> str:
        """Write a table of the elements of a JSON array; its one column is called `value`."""
        if self is Dialect.SQLITE:
            return f"json_each({array})"
        return f"jsonb_array_elements(CAST({array} AS jsonb))"

    @property
    def texts(self) -> str:
        """The texts of one parameter, which is a JSON array, as what a column may be in."""
        if self is Dialect.SQLITE:
            return "(SELECT value FROM json_each(?))"
        elements = "jsonb_array_elements_text(CAST(? AS jsonb))"
        return f"(SELECT item.value FROM {elements} AS item(value))"  # noqa: S608

    def given(self, columns: Mapping[str, str]) -> str:
        """Write a table of the rows of one parameter, which is a JSON array of arrays."""
        fields = ", ".join(
            f"CAST(item.value->>{place} AS {kind}) AS {name}"
            for place, (name, kind) in enumerate(columns.items())
        )
        return f"(SELECT {fields} FROM {self.elements('?')} AS item) AS given"  # noqa: S608


ROWS_PER_STEP = (64, 32, 16, 8, 4, 2, 1)
"""How many rows SQLite inserts in one step: statements of a few fixed lengths stay prepared."""


class Insert:
    """Rows to insert into a table, as one statement for each dialect.

    Of a row whose key exists, `updated` columns are replaced, `added` ones have the amount added,
    and `highest` ones keep the higher amount. One of `bounded` has it added until it has reached
    the most that a ledger counts: a sum of what tasks claim must not fail the end of a task.
    `columns` are pairs of a name and a type. The names are the program's own, never input.
    """

    __slots__ = ("postgres", "sqlite")

    def __init__(
        self,
        *,
        table: str,
        columns: tuple[tuple[str, str], ...],
        key: tuple[str, ...] = (),
        updated: tuple[str, ...] = (),
        added: tuple[str, ...] = (),
        bounded: tuple[str, ...] = (),
        highest: tuple[str, ...] = (),
    ) -> None:
        names = [name for name, _ in columns]
        into = f"INSERT INTO {table} ({', '.join(names)})"
        changes = [f"{name} = excluded.{name}" for name in updated]
        changes += [f"{name} = {table}.{name} + excluded.{name}" for name in added]
        changes += [
            f"{name} = {table}.{name} + CASE WHEN {table}.{name} < {MAX_BALANCE}"
            f" THEN excluded.{name} ELSE 0 END"
            for name in bounded
        ]
        changes += [
            f"{name} = CASE WHEN excluded.{name} > {table}.{name}"
            f" THEN excluded.{name} ELSE {table}.{name} END"
            for name in highest
        ]
        end = f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {', '.join(changes)}" if key else ""
        row = f"({', '.join('?' * len(columns))})"
        self.sqlite = {
            rows: f"{into} VALUES {', '.join([row] * rows)}{end}" for rows in ROWS_PER_STEP
        }
        given = Dialect.POSTGRES.given(dict(columns))
        from_given = ", ".join(f"given.{name}" for name in names)
        self.postgres = f"{into} SELECT {from_given} FROM {given}{end}"  # noqa: S608


class Lookup:
    """A statement about many things at once: its parameters are sent as one JSON array.

    `one` is the same about a single text, which is its parameter as it is; it may be empty.
    """

    __slots__ = ("one", "postgres", "sqlite")

    def __init__(self, sql: Callable[[Dialect], str], *, one: str = "") -> None:
        self.sqlite = sql(Dialect.SQLITE)
        self.postgres = sql(Dialect.POSTGRES)
        self.one = one


def about(statement: str, column: str) -> Lookup:
    """Make the lookup of a statement for the rows whose column is one of the texts."""
    where = f"{statement} WHERE {column}"
    return Lookup(lambda dialect: f"{where} IN {dialect.texts}", one=f"{where} = ?")


Parameters = Sequence[Value] | Sequence[Row]
"""The parameters of a statement; of a lookup, the texts or the rows that it is about."""

Statement = tuple[str | Lookup, Parameters]
"""A statement with its parameters."""


class LostTransactionError(LedgerUnavailableError):
    """The transaction is gone and its outcome is not known; it may be run once more."""


class Transaction(Protocol):
    """An open transaction; only whoever opened it may end it."""

    @property
    def dialect(self) -> Dialect:
        """The database that is spoken to."""

    @property
    def was_full(self) -> bool:
        """Whether the disk had no room since it was last measured."""

    def run(self, sql: str | Lookup, parameters: Parameters = ()) -> None:
        """Run a statement that returns nothing of interest; an error may show at the next step."""

    def read(self, sql: str | Lookup, parameters: Parameters = ()) -> list[Row]:
        """Run a statement and return its rows."""

    def read_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run statements that do not depend on each other, and return the rows of each."""

    def write(self, sql: str, parameters: Sequence[Value] = ()) -> int:
        """Run a statement and return how many rows it changed."""

    def insert(self, insert: Insert, rows: Sequence[Row]) -> None:
        """Insert many rows in few steps; an error may show at the next step."""

    def insert_all(self, inserts: Iterable[tuple[Insert, Sequence[Row]]]) -> None:
        """Insert rows into several tables, in this order."""

    def savepoint(self) -> AbstractContextManager[None]:
        """Undo what is done within the block, and only that, if it raises."""

    def measure(self, *, is_limited: bool) -> StoreSize:
        """Return how large the database is, and what is free for it; `is_limited` if that matters.

        Where the database is not limited, one that is dear to measure may leave its size out.
        """


class Database(Protocol):
    """Opens transactions, one at a time, from one thread; it connects when it must."""

    def begin(self) -> Transaction:
        """Open a transaction in which what is read may also be written."""

    def wait_turn(self) -> bool:
        """Wait until nobody else writes, if others may; False if that was not worth a question."""

    def commit(self) -> None:
        """End the transaction; it is on disk, or an error is raised."""

    def rollback(self) -> None:
        """Undo the transaction, if there is one; never raises."""

    def close(self) -> None:
        """Let go of the connection; the next `begin` makes a new one."""

    def make_room(self) -> bool:
        """Free what was kept back for a full disk; False if there is nothing to free."""


def first_line(error: Exception) -> str:
    """Return what a driver has to say, without the parts that only it understands."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def json_rows(rows: Parameters) -> str:
    """Write rows as the parameter of `Dialect.given`, or texts as that of `Dialect.texts`."""
    return msgspec.json.encode(rows).decode()


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

    def run(self, operation: Callable[[Transaction, float], Result]) -> Awaitable[Result]:
        """Change something, at a time that is given; the answer means that it is on disk.

        After a lost connection it may be run twice, so it recognises its own work.
        """

    def ask(
        self, question: Callable[[Transaction], Result], *, is_long: bool = False
    ) -> Awaitable[Result]:
        """Read what has been committed.

        One that may have to look at everything says that it `is_long`. Others are given up soon by
        a server that is slow, so that they do not keep everybody waiting behind them.
        """
