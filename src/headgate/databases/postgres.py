"""PostgreSQL: one connection, made again when it is lost.

Several processes share the books, so every wait has a bound: to connect, for a lock, for a
statement, for an acknowledgement on the wire. A server that is away, starting, read-only or full
makes the books unavailable, and the next transaction tries again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict

from headgate.databases.transaction import (
    Dialect,
    Insert,
    LostTransactionError,
    Row,
    Statement,
    Value,
    first_line,
    json_rows,
    percent_placeholders,
)
from headgate.errors import (
    InvalidSettingError,
    LedgerUnavailableError,
    StoreError,
    UnfitValueError,
)

LOCK_TIMEOUT_SECONDS = 10.0
STATEMENT_TIMEOUT_SECONDS = 30.0
TRANSACTION_TIMEOUT_SECONDS = 60.0
# Waits before each try to connect; a server that restarts is often back within the last. After that
# a server that is still away is asked once each time, so that callers are refused at once.
CONNECT_WAITS_SECONDS = (0.0, 0.1, 0.4)
PREPARE_AFTER_USES = 2

# Settings of libpq that the URL may replace.
_CONNECTION_DEFAULTS = {
    "application_name": "headgate",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "tcp_user_timeout": "15000",
}
# Rows are looked up by their keys. A plan that was made while a table was empty would read all of
# it, and is kept for as long as the connection. Older servers take a plan that cannot do without
# what is off for an immense one, and would compile it.
_BY_KEY = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
# Passes over what the server does not know, since it may be older than a setting.
_CONFIGURE = (
    "SELECT set_config(given.name, given.value, false)"
    " FROM unnest(%s::text[], %s::text[]) AS given (name, value) JOIN pg_settings USING (name)"
)
# The transaction is gone, and another try may do: a failover, a deadlock with somebody else.
_LOST = (
    psycopg.errors.AdminShutdown,
    psycopg.errors.CannotConnectNow,
    psycopg.errors.CrashShutdown,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.IdleInTransactionSessionTimeout,
    # The driver takes a statement for prepared whose preparation was undone by an error before it.
    psycopg.errors.InvalidSqlStatementName,
    psycopg.errors.SerializationFailure,
)


class PostgresTransaction:
    """An open transaction on one connection.

    Statements that return nothing are sent without waiting for them; the next one that returns
    something, or the end, waits for all of them and raises the first error among them.
    """

    dialect = Dialect.POSTGRES

    def __init__(self, connection: psycopg.Connection[Row], begin_sql: str) -> None:
        self._connection = connection
        self._begin_sql = begin_sql
        self._pipeline: psycopg.Pipeline | None = None
        self._open = ExitStack()

    def begin(self) -> None:
        """Open the transaction; the server hears of it together with the first statement."""
        with self._translating():
            self._pipeline = self._open.enter_context(self._connection.pipeline())
        self.run(self._begin_sql)

    def end(self, sql: str) -> None:
        """End the transaction, by commit or rollback, and wait for it."""
        self.run(sql)
        self._pipeline = None
        with self._translating():
            self._open.close()

    def abandon(self) -> None:
        """Leave a transaction whose connection is being given up."""
        self._pipeline = None
        with suppress(psycopg.Error):
            self._open.close()

    def run(self, sql: str, parameters: Sequence[Value] = ()) -> None:
        """Run a statement that returns nothing of interest."""
        self._execute(sql, parameters)

    def read(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Run a statement and return its rows."""
        return self.read_all([(sql, parameters)])[0]

    def read_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run statements in one round trip, and return the rows of each."""
        cursors = [self._execute(sql, parameters) for sql, parameters in statements]
        # Only after a synchronisation the server counts how long it waits for the next statement.
        self._wait()
        with self._translating():
            return [cursor.fetchall() for cursor in cursors]

    def write(self, sql: str, parameters: Sequence[Value] = ()) -> int:
        """Run a statement and return how many rows it changed."""
        cursor = self._execute(sql, parameters)
        self._wait()
        return cursor.rowcount

    def insert(self, insert: Insert, rows: Sequence[Row]) -> None:
        """Insert many rows in one statement, as one JSON text: half the cost of a row each."""
        if rows:
            self._execute(_insert_sql(insert), (json_rows(rows),))

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what is done within the block, and only that, if it raises."""
        self.run("SAVEPOINT inner_step")
        try:
            yield
            self._wait()
        except LedgerUnavailableError:
            raise
        except BaseException:
            self.run("ROLLBACK TO inner_step")
            self.run("RELEASE inner_step")
            raise
        self.run("RELEASE inner_step")

    def _execute(self, sql: str, parameters: Sequence[Value]) -> psycopg.Cursor[Row]:
        with self._translating():
            return self._connection.execute(percent_placeholders(sql).encode(), parameters)

    def _wait(self) -> None:
        if self._pipeline is not None:
            with self._translating():
                self._pipeline.sync()

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            # After an error the server skips everything up to the next synchronisation.
            if self._pipeline is not None:
                with suppress(psycopg.Error):
                    self._pipeline.sync()
            raise translated(error, self._connection) from error


class PostgresDatabase:
    """The transactions of one connection.

    A process that stands still within a transaction keeps its locks until the server takes them
    back: after `idle_timeout_seconds` if it has just read something, and on PostgreSQL 17 and later
    after `transaction_timeout_seconds` in any case.
    """

    # Each statement must see what was committed before it, and not before the transaction: a lock
    # on the books is only worth something if what is read after it is fresh. Whether it may write
    # is left to the server, which may have been made read-only on purpose.
    _begin_sql = "BEGIN ISOLATION LEVEL READ COMMITTED"

    def __init__(
        self,
        url: str,
        *,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
        statement_timeout_seconds: float = STATEMENT_TIMEOUT_SECONDS,
        idle_timeout_seconds: float = STATEMENT_TIMEOUT_SECONDS,
        transaction_timeout_seconds: float = TRANSACTION_TIMEOUT_SECONDS,
    ) -> None:
        self._parameters = connection_parameters(url)
        timeouts_seconds = {
            "lock_timeout": lock_timeout_seconds,
            "statement_timeout": statement_timeout_seconds,
            "idle_in_transaction_session_timeout": idle_timeout_seconds,
            "transaction_timeout": transaction_timeout_seconds,
        }
        self._settings = _BY_KEY | {
            name: str(int(seconds * 1_000)) for name, seconds in timeouts_seconds.items()
        }
        self._connection: psycopg.Connection[Row] | None = None
        self._transaction: PostgresTransaction | None = None
        self._is_away = False

    def begin(self) -> PostgresTransaction:
        """Open a transaction, connecting first if need be."""
        if self._transaction is None:
            self._connection = self._connect()
            self._transaction = PostgresTransaction(self._connection, self._begin_sql)
        self._transaction.begin()
        return self._transaction

    def commit(self) -> None:
        """End the transaction; it is on disk, or an error is raised."""
        if self._transaction is not None:
            self._transaction.end("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction; a connection that cannot even do that is given up."""
        if self._transaction is None:
            return
        try:
            self._transaction.end("ROLLBACK")
        except StoreError:
            self.close()

    def close(self) -> None:
        """Let go of the connection; the next transaction makes a new one."""
        connection, transaction = self._connection, self._transaction
        self._connection, self._transaction = None, None
        if connection is not None and transaction is not None:
            transaction.abandon()
            with suppress(psycopg.Error):
                connection.close()

    def _connect(self) -> psycopg.Connection[Row]:
        problem = ""
        for wait_seconds in CONNECT_WAITS_SECONDS[: 1 if self._is_away else None]:
            time.sleep(wait_seconds)
            try:
                connection = self._connect_once()
            except psycopg.Error as error:
                problem = f"PostgreSQL: {first_line(error)}; nothing was granted"
            else:
                self._is_away = False
                return connection
        self._is_away = True
        raise LedgerUnavailableError(problem)

    def _connect_once(self) -> psycopg.Connection[Row]:
        connection = psycopg.connect(
            **self._parameters, autocommit=True, prepare_threshold=PREPARE_AFTER_USES
        )
        try:
            connection.execute(_CONFIGURE, (list(self._settings), list(self._settings.values())))
        except psycopg.Error:
            connection.close()
            raise
        return connection


class PostgresReader(PostgresDatabase):
    """Transactions that only read; each sees one state, with all that was committed before it."""

    _begin_sql = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


def translated(error: psycopg.Error, connection: psycopg.Connection[Any]) -> StoreError:
    """Turn an error of the driver into one of ours."""
    line = f"PostgreSQL: {first_line(error)}"
    if _is_read_only(error):
        # Another try connects again, and after a failover reaches the server that may write.
        return LostTransactionError(f"{line}; the server is read-only, nothing was granted")
    if connection.closed or isinstance(error, _LOST):
        return LostTransactionError(line)
    if isinstance(error, psycopg.OperationalError):
        return LedgerUnavailableError(line)
    if isinstance(error, psycopg.DataError):
        return UnfitValueError(line)
    return StoreError(line)


def _is_read_only(error: psycopg.Error) -> bool:
    # A standby refuses some statements as features that it lacks, and only the text says why.
    is_refused = isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
    return is_refused or "during recovery" in str(error)


def connection_parameters(url: str) -> dict[str, Any]:
    """Return what libpq needs to connect, with bounds on how long it waits."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # The driver's own words repeat the URL, and with it the password.
        problem = "is not a PostgreSQL URL; write postgresql://user:password@host:5432/database"
        raise InvalidSettingError("url", problem) from None
    return {**_CONNECTION_DEFAULTS, **cast("dict[str, Any]", given)}


@cache
def _insert_sql(insert: Insert) -> str:
    given = Dialect.POSTGRES.given(dict(insert.columns))
    names = ", ".join(f"given.{name}" for name, _ in insert.columns)
    return f"{insert.into} SELECT {names} FROM {given}{insert.on_conflict}"  # noqa: S608
