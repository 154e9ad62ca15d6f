"""PostgreSQL: one connection, made again when it is lost.

Several processes share the ledger, so every wait has a bound: to connect, for a lock, for a
statement, for an acknowledgement on the wire. A server that is away, starting, read-only or full
makes the ledger unavailable, and the next transaction tries again.

With several hosts the server that may write is found again after a failover. Two rules keep a
former primary from being believed: a commit that its standby did not confirm counts as lost, and a
process that has seen a later timeline of the database does not go back to an earlier one.
"""

from __future__ import annotations

import asyncio
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import inf
from typing import Any, cast

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headgate.core.budgets.ledger import Clock
from headgate.core.retention import StoreSize
from headgate.errors import (
    InvalidSettingError,
    LedgerUnavailableError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    UnfitValueError,
)
from headgate.storage.ledger import LOCK
from headgate.storage.nodes import CHANNEL, channel_here
from headgate.storage.sql_store import SqlTaskStore, TaskTables, be_here
from headgate.storage.store import Beat
from headgate.storage.transaction import (
    Dialect,
    Insert,
    Lookup,
    LostTransactionError,
    Parameters,
    Row,
    Statement,
    Transaction,
    Value,
    first_line,
    json_rows,
    percent_placeholders,
)
from headgate.storage.writer import (
    ChildStarter,
    GroupCommitWriter,
    ProcessWriter,
    ReaderPool,
    StepWire,
    Writer,
    WriterSetup,
)

LOCK_TIMEOUT_SECONDS = 10.0
STATEMENT_TIMEOUT_SECONDS = 30.0
TRANSACTION_TIMEOUT_SECONDS = 60.0
# Waits before each try to connect; a server that restarts is often back within the last. After that
# a server that is still away is asked once each time, so that callers are refused at once.
CONNECT_WAITS_SECONDS = (0.0, 0.1, 0.4)
PREPARE_AFTER_USES = 2
LOCK_WAIT_SECONDS = 0.001
"""A first answer that takes so much longer than the quickest one has waited for another writer."""

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


ROW_OVERHEAD = 1.25
"""What the texts of tasks take in their tables, with all that belongs to a row and an index."""

# Of a domain its own tables count: others in the database do not fill it up.
_SIZES = (
    "SELECT CASE WHEN starts_with(current_schema(), 'headgate_') THEN"
    " (SELECT CAST(COALESCE(SUM(pg_total_relation_size(oid)), 0) AS BIGINT) FROM pg_class"
    " WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace)"
    " ELSE pg_database_size(current_database()) END, pg_total_relation_size('tasks')"
    " + pg_total_relation_size('task_inputs') + pg_total_relation_size('calls'),"
    " (SELECT CAST(COALESCE(SUM(amount), 0) AS BIGINT)"
    " FROM counters WHERE name IN ('live_bytes', 'ended_bytes', 'call_bytes'))"
)


class PostgresTransaction:
    """An open transaction on one connection.

    Statements that return nothing are sent without waiting for them; the next one that returns
    something, or the end, waits for all of them and raises the first error among them.
    """

    dialect = Dialect.POSTGRES
    was_full = False

    def __init__(self, connection: psycopg.Connection[Row], begin_sql: str) -> None:
        self._connection = connection
        self._begin_sql = begin_sql
        self._pipeline: psycopg.Pipeline | None = None
        self._open = ExitStack()
        self._is_unconfirmed = False
        self._begun_at = self._quickest = inf
        self.has_waited = False
        """Whether the first answer of this transaction, or of the last one before it, took long."""

        connection.add_notice_handler(self._hear)

    def begin(self) -> None:
        """Open the transaction; the server hears of it together with the first statement."""
        with self._translating():
            self._pipeline = self._open.enter_context(self._connection.pipeline())
        self.run(self._begin_sql)
        self._begun_at = time.monotonic()

    def end(self, sql: str) -> None:
        """End the transaction, by commit or rollback, and wait for it."""
        self._is_unconfirmed = False
        self.run(sql)
        self._pipeline = None
        with self._translating():
            self._open.close()
        if self._is_unconfirmed:
            raise UnconfirmedError(UNCONFIRMED)

    def _hear(self, notice: psycopg.errors.Diagnostic) -> None:
        # The wait for the standby was given up. The server has written the commit and reports it as
        # done; but if the standby takes over, it never happened.
        if "synchronous replication" in (notice.message_primary or ""):
            self._is_unconfirmed = True

    def abandon(self) -> None:
        """Leave a transaction whose connection is being given up."""
        self._pipeline = None
        with suppress(psycopg.Error):
            self._open.close()

    def run(self, sql: str | Lookup, parameters: Parameters = ()) -> None:
        """Run a statement that returns nothing of interest."""
        self._execute(sql, parameters)

    def read(self, sql: str | Lookup, parameters: Parameters = ()) -> list[Row]:
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
            self._execute(insert.postgres, (json_rows(rows),))

    def insert_all(self, inserts: Iterable[tuple[Insert, Sequence[Row]]]) -> None:
        """Insert rows into several tables, in this order."""
        for insert, rows in inserts:
            self.insert(insert, rows)

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

    def measure(self, *, is_limited: bool) -> StoreSize:
        """Return the size of the database, less what deleted tasks have left free in its tables.

        A server does not give that back to its disk, and uses it again.
        """
        if not is_limited:
            return StoreSize(used_bytes=0)
        ((database, tables, rows),) = self.read(_SIZES)
        return StoreSize(used_bytes=database - max(0, tables - int(rows * ROW_OVERHEAD)))

    def _execute(self, sql: str | Lookup, parameters: Parameters) -> psycopg.Cursor[Row]:
        if isinstance(sql, Lookup):
            sql, parameters = sql.postgres, (json_rows(parameters),)
        with self._translating():
            return self._connection.execute(percent_placeholders(sql).encode(), parameters)

    def _wait(self) -> None:
        if self._pipeline is not None:
            with self._translating():
                self._pipeline.sync()
            if self._begun_at != inf:
                seconds, self._begun_at = time.monotonic() - self._begun_at, inf
                self._quickest = min(self._quickest, seconds)
                self.has_waited = seconds - self._quickest >= LOCK_WAIT_SECONDS

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
    # on the ledger is only worth something if what is read after it is fresh. Whether it may write
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
        lock: str = "",
    ) -> None:
        self._parameters = connection_parameters(url)
        self._lock = lock
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
        self._outcome = ""
        """What a lost connection means to callers; before the first one nobody asked."""

        self._has_standby = False
        self._is_doubtful = False

    def begin(self) -> PostgresTransaction:
        """Open a transaction, connecting first if need be."""
        if self._transaction is None:
            self._connection = self._connect()
            self._transaction = PostgresTransaction(self._connection, self._begin_sql)
        self._transaction.begin()
        return self._transaction

    def wait_turn(self) -> bool:
        """Wait for the lock, if the transaction before may have had to wait for it.

        Where nobody else writes, the question would only cost a round trip.
        """
        transaction = self._transaction
        if not self._lock or transaction is None or not transaction.has_waited:
            return False
        transaction.read(self._lock)
        return True

    def commit(self) -> None:
        """End the transaction; it is on disk, at the standby too if there is one, or it raises."""
        if self._transaction is None or self._connection is None:
            return
        if not self._has_standby:
            self._transaction.end("COMMIT")
            return
        _confirmations.begin(self._connection)
        try:
            self._transaction.end("COMMIT")
        except UnconfirmedError:
            self._is_doubtful = True
            raise
        finally:
            _confirmations.end(self._connection)

    def rollback(self) -> None:
        """Undo the transaction; a connection that cannot even do that is given up."""
        if self._transaction is None:
            return
        try:
            self._transaction.end("ROLLBACK")
        except StoreError:
            self.close()
        else:
            # There may be no lock: what failed may have been to create the tables.
            self._transaction.has_waited = False

    def close(self) -> None:
        """Let go of the connection; the next transaction makes a new one."""
        connection, transaction = self._connection, self._transaction
        self._connection, self._transaction = None, None
        if connection is not None and transaction is not None:
            transaction.abandon()
            with suppress(psycopg.Error):
                connection.close()

    def make_room(self) -> bool:
        """The disk is the server's."""
        return False

    def _connect(self) -> psycopg.Connection[Row]:
        problem = ""
        for wait_seconds in CONNECT_WAITS_SECONDS[: 1 if self._is_away else None]:
            time.sleep(wait_seconds)
            try:
                connection = self._connect_once()
            except psycopg.Error as error:
                problem = f"PostgreSQL: {first_line(error)}{self._outcome}"
            else:
                self._is_away = False
                self._outcome = "; nothing was granted"
                return connection
        self._is_away = True
        raise LedgerUnavailableError(problem)

    def _connect_once(self) -> psycopg.Connection[Row]:
        if self._is_doubtful:
            learn_timelines(self._parameters)
            self._is_doubtful = False
        try:
            return self._connect_to(self._parameters)
        except FormerPrimaryError:
            # The first host that takes changes is the wrong one, so the others are asked by name.
            for host in _one_by_one(self._parameters):
                with suppress(psycopg.Error, FormerPrimaryError):
                    return self._connect_to(host)
            raise

    def _connect_to(self, parameters: Mapping[str, Any]) -> psycopg.Connection[Row]:
        connection = psycopg.connect(
            **parameters, autocommit=True, prepare_threshold=PREPARE_AFTER_USES
        )
        try:
            connection.execute(_CONFIGURE, (list(self._settings), list(self._settings.values())))
            check_pooler(connection, parameters)
            check_timeline(connection, self._parameters)
            ((self._has_standby,),) = connection.execute(_HAS_STANDBY).fetchall()
        except BaseException:
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
    if isinstance(error, psycopg.errors.DiskFull):
        return StoreFullError(f"{line}; free some space on the server's disk")
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
    defaults = _CONNECTION_DEFAULTS
    if _has_several_hosts(given):
        # The others are standbys, which would refuse every change.
        defaults = {**defaults, "target_session_attrs": "read-write"}
    return {**defaults, **cast("dict[str, Any]", given)}


def _one_by_one(parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the same parameters for each host."""
    hosts = str(parameters["host"]).split(",")
    ports = str(parameters.get("port") or "").split(",")
    for number, host in enumerate(hosts):
        yield {**parameters, "host": host, "port": ports[number % len(ports)]}


def _has_several_hosts(parameters: Mapping[str, Any]) -> bool:
    return "," in str(parameters.get("host") or "")


# Which server this is.


class FormerPrimaryError(LedgerUnavailableError):
    """A server still takes changes, although another has taken over from it."""


class UnconfirmedError(LostTransactionError):
    """A commit is on the disk of the primary, and perhaps of no other server."""


UNCONFIRMED = (
    "PostgreSQL: the standby did not confirm the commit in time, so it may be lost in a failover;"
    " nothing was granted"
)

_timelines: dict[str, int] = {}
"""The latest timeline that this process has seen of each database with several hosts."""


def check_timeline(connection: psycopg.Connection[Any], parameters: Mapping[str, Any]) -> None:
    """Refuse a server that went on alone when another took over from it.

    Each promotion begins a new timeline. A former primary that comes back, or was only cut off,
    still has the old one.
    """
    if not _has_several_hosts(parameters):
        return
    database = f"{parameters.get('host')} {parameters.get('port')} {parameters.get('dbname')}"
    rows = connection.execute(
        "SELECT CASE WHEN pg_is_in_recovery() THEN NULL"
        " ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END"
    ).fetchall()
    if rows[0][0] is None:
        return
    timeline, latest = int(rows[0][0], 16), _timelines.get(database, 0)
    if timeline < latest:
        problem = (
            f"PostgreSQL: the server {connection.info.host} is a former primary: it is on timeline"
            f" {timeline}, and {latest} was seen before; stop it, or make it a standby"
        )
        raise FormerPrimaryError(problem)
    _timelines[database] = timeline


def learn_timelines(parameters: Mapping[str, Any]) -> None:
    """Ask every host, so that the latest timeline is known."""
    for host in _one_by_one(parameters) if _has_several_hosts(parameters) else ():
        asked = {**host, "connect_timeout": _PROBE_SECONDS}
        with (
            suppress(psycopg.Error, FormerPrimaryError),
            psycopg.connect(**asked, autocommit=True) as connection,
        ):
            check_timeline(connection, parameters)


# A commit waits for the standby without a bound of the server's own: none of its timeouts counts
# then. So somebody looks after the commits of all connections, and gives up those that take long.

CONFIRM_SECONDS = 10.0
_HAS_STANDBY = (
    "SELECT current_setting('synchronous_standby_names') <> ''"
    " AND current_setting('synchronous_commit') NOT IN ('off', 'local')"
)


class _Confirmations:
    """The commits that wait for a standby, and a thread that gives them up in time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[psycopg.Connection[Any], float] = {}
        self._thread: threading.Thread | None = None

    def begin(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            self._since[connection] = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="headgate-confirmations"
                )
                self._thread.start()

    def end(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            self._since.pop(connection, None)

    def _run(self) -> None:
        while True:
            time.sleep(CONFIRM_SECONDS / 10)
            late = time.monotonic() - CONFIRM_SECONDS
            with self._lock:
                found = [one for one, since in self._since.items() if since < late]
            for connection in found:
                with suppress(psycopg.Error):
                    connection.cancel_safe(timeout=CONFIRM_SECONDS)


_confirmations = _Confirmations()

POOLED = (
    "PostgreSQL: a connection pooler that shares connections between transactions is in the way;"
    " Headgate needs sessions of its own. Connect to the server itself, or set pool_mode = session"
)
_PROBE_SECONDS = "2"
_PROBES = 3


def check_pooler(connection: psycopg.Connection[Any], parameters: Mapping[str, Any]) -> None:
    """Refuse a pooler in transaction mode: settings, LISTEN and prepared statements need a session.

    A pooler has a process id of its own. If there is one, a second connection shows whether both
    are given the same server in turn, as they are where transactions share it.
    """
    pid = _asked_pid(connection)
    if pid == connection.info.backend_pid:
        return
    once = {**parameters, "connect_timeout": _PROBE_SECONDS}
    with psycopg.connect(**once, autocommit=True, prepare_threshold=None) as other:
        for _ in range(_PROBES):
            if _asked_pid(other) == pid or _asked_pid(connection) != pid:
                raise InvalidSettingError("url", POOLED)


def _asked_pid(connection: psycopg.Connection[Any]) -> int:
    """Ask which process answers; 0 if none does soon, because a pooler has none to give."""
    asked, ends_at = connection.pgconn, time.monotonic() + float(_PROBE_SECONDS)
    asked.send_query(b"SELECT pg_backend_pid()")
    # Unlike `select` it takes any descriptor, of which connections of clients may have thousands.
    watch = select.poll()
    watch.register(asked.socket, select.POLLIN)
    found = 0
    while True:
        while asked.is_busy():
            left = ends_at - time.monotonic()
            if left <= 0 or not watch.poll(left * 1_000):
                raise InvalidSettingError("url", POOLED)
            asked.consume_input()
        result = asked.get_result()
        if result is None:
            return found
        found = int(result.get_value(0, 0) or 0)


# Hears what PostgreSQL tells on a channel, with a connection and a thread of its own.
#
# Rule: a watcher is called for every notification that it waits for, once for several that come
# together; and once after each connect, because something may have been missed before it. So one
# that looks for itself whenever it is called misses nothing.

Watcher = Callable[[], None]

MAX_WATCHERS = 16_384
# How long a thread that was told to stop may go on waiting.
POLL_SECONDS = 0.5
FIRST_WAIT_SECONDS = 0.1
LAST_WAIT_SECONDS = 5.0


class PostgresListener:
    """Calls watchers, each in its own event loop, when a payload comes that they wait for."""

    def __init__(self, url: str, channel: str) -> None:
        self._parameters = connection_parameters(url)
        self._channel = f"SELECT {channel_here(channel)}".encode()
        self._lock = threading.Lock()
        self._watchers: dict[str, tuple[asyncio.AbstractEventLoop, Watcher]] = {}
        self._stop: threading.Event | None = None

    def watch(self, payload: str, watcher: Watcher) -> None:
        """Call a watcher in the running loop whenever this payload comes."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if payload not in self._watchers and len(self._watchers) >= MAX_WATCHERS:
                problem = f"{MAX_WATCHERS} watch already; close another listener first"
                raise StoreUnavailableError(problem)
            self._watchers[payload] = (loop, watcher)
            if self._stop is None:
                self._stop = self._started()

    def unwatch(self, payload: str) -> None:
        """Call nobody any more for this payload."""
        with self._lock:
            self._watchers.pop(payload, None)

    def close(self) -> None:
        """Call nobody any more; the thread ends within a moment and is not waited for."""
        with self._lock:
            self._watchers = {}
            if self._stop is not None:
                self._stop.set()
                self._stop = None

    def _started(self) -> threading.Event:
        stop = threading.Event()
        threading.Thread(
            target=self._run, args=(stop,), name="headgate-listener", daemon=True
        ).start()
        return stop

    def _run(self, stop: threading.Event) -> None:
        wait_seconds = FIRST_WAIT_SECONDS
        while not stop.is_set():
            try:
                with self._connected() as connection:
                    wait_seconds = FIRST_WAIT_SECONDS
                    self._hear(connection, stop)
            except psycopg.Error:
                stop.wait(wait_seconds)
                wait_seconds = min(2 * wait_seconds, LAST_WAIT_SECONDS)

    def _connected(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(**self._parameters, autocommit=True)
        try:
            ((channel,),) = connection.execute(self._channel).fetchall()
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        except psycopg.Error:
            connection.close()
            raise
        return connection

    def _hear(self, connection: psycopg.Connection[Any], stop: threading.Event) -> None:
        self._call(list(self._watchers), stop)
        while not stop.is_set():
            heard = connection.notifies(timeout=POLL_SECONDS, stop_after=1)
            self._call(dict.fromkeys(notify.payload for notify in heard), stop)

    def _call(self, payloads: Iterable[str], stop: threading.Event) -> None:
        with self._lock:
            # A thread that was stopped may still be waiting while the next one is at work.
            watchers = [] if stop.is_set() else [self._watchers.get(name) for name in payloads]
        for loop, watcher in filter(None, watchers):
            # A loop that was closed has nobody left who watches.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(watcher)


# The clock of a PostgreSQL server, as this machine knows it.

CLOCK_SECONDS = 60.0
DRIFT_SECONDS = 1.0
_SERVER_TIME = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


class ServerClock:
    """The server's time, carried on from the last comparison by a clock that nobody can set.

    That clock may stand still while the machine sleeps. So a wall clock that went another way
    since, for whatever reason, makes a new comparison due.
    """

    def __init__(self) -> None:
        self.forget()

    def __call__(self) -> float:
        """Return the server's time; before the first comparison, this machine's."""
        if self._ahead_seconds is None:
            return time.time()
        return time.monotonic() + self._ahead_seconds

    def forget(self) -> None:
        """Make a comparison due."""
        self._ahead_seconds: float | None = None
        self._compared_at = self._wall_ahead_seconds = 0.0

    def is_due(self) -> bool:
        """Tell whether the comparison is old, or a clock of this machine cannot be trusted."""
        now = time.monotonic()
        drift_seconds = abs(time.time() - now - self._wall_ahead_seconds)
        is_old = self._ahead_seconds is None or now - self._compared_at >= CLOCK_SECONDS
        return is_old or drift_seconds >= DRIFT_SECONDS

    def compare(self, transaction: Transaction) -> None:
        """Ask the server."""
        asked_at = time.monotonic()
        server_time = float(transaction.read(_SERVER_TIME)[0][0])
        self._compared_at = time.monotonic()
        # The answer was given somewhere between question and arrival.
        self._ahead_seconds = server_time - (asked_at + self._compared_at) / 2
        self._wall_ahead_seconds = time.time() - self._compared_at


# What a process needs that writes to a task store in PostgreSQL.

IDLE_TIMEOUT_SECONDS = 2.0
STORE_TRANSACTION_TIMEOUT_SECONDS = 3.0


class PostgresTables(TaskTables):
    """Tables whose time is that of the server, unless a clock is given."""

    def __init__(
        self, *, clock: Clock | None = None, keeps_ledger: bool = True, domain: str = ""
    ) -> None:
        self._server_clock = ServerClock() if clock is None else None
        self._domain = domain
        super().__init__(clock=self._server_clock or clock, keeps_ledger=keeps_ledger)

    def prepare(self, transaction: Transaction) -> None:
        """Bring the schema up to date, and ask for the time: the server may be another one."""
        if self._domain:
            create_domain(transaction, self._domain)
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
        transaction_timeout_seconds=STORE_TRANSACTION_TIMEOUT_SECONDS,
        lock=LOCK,
    )


def postgres_writer_setup(
    url: str,
    lock_timeout_seconds: float,
    keeps_ledger: bool,  # noqa: FBT001
    domain: str,
) -> WriterSetup:
    """Make what a process needs to write to a server; the URL leads to the domain."""
    tables = PostgresTables(keeps_ledger=keeps_ledger, domain=domain)
    be_here(tables)
    return WriterSetup(task_database(url, lock_timeout_seconds), StepWire(tables.apply))


# Domains: several systems in one database, each in a schema of its own.
#
# Rule: everything of a domain lies in its schema and is found through the `search_path` of each
# connection: tasks, ledger, tokens, the row that is the lock, and the channel on which nodes are
# told. So no statement names a domain, and nothing of one can be reached from another.

_HAS_SCHEMA = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = ?"
_LOCK_NAME = "SELECT pg_advisory_xact_lock(hashtext(CAST(? AS TEXT)))"


def domain_schema(domain: str) -> str:
    """Return the schema of a domain."""
    return f"headgate_{domain}"


def domain_url(url: str, domain: str) -> str:
    """Return where a domain of a database is; without one, the database as the URL has it."""
    if not domain:
        return url
    options = str(connection_parameters(url).get("options") or "")
    path = f"-csearch_path={domain_schema(domain)}"
    return make_conninfo(url, options=f"{options} {path}".strip())


def create_domain(transaction: Transaction, domain: str) -> None:
    """Create the schema of a domain, unless it is there."""
    schema = domain_schema(domain)
    if transaction.read(_HAS_SCHEMA, (schema,)):
        return
    # Two nodes may start at once.
    transaction.run(_LOCK_NAME, (schema,))
    try:
        transaction.write(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    except LedgerUnavailableError:
        raise
    except StoreError as error:
        advice = "have it created, with AUTHORIZATION for the role of the URL"
        problem = f"the schema {schema} cannot be created: {error}; {advice}"
        raise StoreError(problem) from error


# The task store in PostgreSQL: for nodes on many machines, judged by the server's clock.
#
# A node that stands still within a transaction keeps everybody from writing, so the server takes
# its locks back after a few seconds; what it had not committed did not happen. Few threads read for
# everybody, so a question that a server does not answer is given up before people stop waiting.

READ_LOCK_SECONDS = 1.0
"""How long a question waits for a table that somebody has locked."""

READ_SECONDS = 3.0
"""How long a statement of a question may take, unless it is known to be a long one."""


class PostgresTaskStore(SqlTaskStore):
    """Tasks that many nodes share, with the ledger of their budgets beside them.

    With a `starter` a process of its own writes for this node. A `domain` has tasks, nodes and
    budgets of its own beside the others in the database.
    """

    tables: PostgresTables

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        keeps_ledger: bool = True,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
        starter: ChildStarter | None = None,
        domain: str = "",
    ) -> None:
        url = domain_url(url, domain)
        self._listener = PostgresListener(url, CHANNEL)
        self._comparing: asyncio.Future[None] | None = None
        tables = PostgresTables(clock=clock, keeps_ledger=keeps_ledger, domain=domain)
        writer: Writer
        if starter is not None:
            recipe = partial(postgres_writer_setup, url, lock_timeout_seconds, keeps_ledger, domain)
            writer = ProcessWriter(recipe, StepWire(tables.apply), starter)
        else:
            writer = GroupCommitWriter(task_database(url, lock_timeout_seconds))
        quick = partial(
            PostgresReader,
            url,
            lock_timeout_seconds=READ_LOCK_SECONDS,
            statement_timeout_seconds=READ_SECONDS,
        )
        patient = ReaderPool(partial(PostgresReader, url), most=1)
        # The dispatcher waits behind no question of others; a node that is not it asks nothing.
        news = ReaderPool(quick, most=1)
        readers = ReaderPool(quick)
        super().__init__(tables, writer, readers, long_reader=patient, news_reader=news)

    async def open(self) -> None:
        """Connect, bring the schema up to date, and learn what time it is."""
        await super().open()
        await self._set_clock()

    async def close(self) -> None:
        """Finish what was asked for, then let go of everything."""
        self.unwatch()
        if self._comparing is not None:
            self._comparing.cancel()
        await super().close()

    async def beat(
        self, node_id: str, *, capacity: int, lease_seconds: float, is_leaving: bool = False
    ) -> Beat:
        """Renew the lease of a node and of everything that it runs."""
        self._set_clock_soon()
        return await super().beat(
            node_id, capacity=capacity, lease_seconds=lease_seconds, is_leaving=is_leaving
        )

    def watch(self, recipient: str, callback: Callable[[], None]) -> None:
        """Call back in this event loop when a message for the recipient may have come."""
        self._listener.watch(recipient, callback)

    def unwatch(self, recipient: str | None = None) -> None:
        """Call nobody back any more, or no more for this recipient."""
        if recipient is None:
            self._listener.close()
        else:
            self._listener.unwatch(recipient)

    def _set_clock_soon(self) -> None:
        """Compare the clocks, if that is due; no sign of life waits behind the questions of others.

        Leases are judged by the clock of whoever writes, which compares its own.
        """
        if self._comparing is None and self.tables.is_clock_due():
            self._comparing = asyncio.ensure_future(self._set_clock())
            self._comparing.add_done_callback(self._compared)

    def _compared(self, comparing: asyncio.Future[None]) -> None:
        self._comparing = None
        # A server that cannot be asked is asked again with the next sign of life.
        if not comparing.cancelled():
            comparing.exception()

    async def _set_clock(self) -> None:
        # Where another process writes, its clock is not this one.
        if self.tables.is_clock_due():
            await self.ask(self.tables.set_clock)
