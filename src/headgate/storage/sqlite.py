"""SQLite: one file, in WAL mode, with every commit on disk before it is answered.

The file may be shared with other processes: a transaction takes the write lock when it begins, so
what it reads cannot be changed before it writes. A lock that is held for longer than the busy
timeout, a full disk or a file that cannot be written make the ledger unavailable, and the next
transaction tries again.

Rule: what is written is the file at the path. One that was deleted is not made again by whoever had
it open, and one that was replaced is left for the new one, so that nobody spends a second time what
is written where no other process looks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import apsw
import msgspec

from headgate.core.budgets.ledger import Clock
from headgate.core.retention import StoreSize, reserve_of
from headgate.errors import (
    InvalidSettingError,
    LedgerUnavailableError,
    StoreError,
    StoreFullError,
)
from headgate.storage.sql_store import SqlTaskStore, TaskTables, be_here
from headgate.storage.transaction import (
    ROWS_PER_STEP,
    Dialect,
    Insert,
    Lookup,
    Parameters,
    Row,
    Statement,
    Value,
    first_line,
)
from headgate.storage.unit_of_work import RowCache
from headgate.storage.writer import (
    ChildStarter,
    GroupCommitWriter,
    ProcessWriter,
    ReaderPool,
    StepWire,
    Writer,
    WriterSetup,
)

BUSY_TIMEOUT_SECONDS = 10.0
CACHE_KIBIBYTES = 16_384
CHECKPOINT_PAGES = 2_000

_encode = msgspec.json.Encoder().encode

FileIdentity = tuple[int, int]
"""The device and the inode of a file: what a path leads to, and not what it is called."""

_UNAVAILABLE = (
    apsw.BusyError,
    apsw.CantOpenError,
    apsw.CorruptError,
    apsw.FullError,
    apsw.InterruptError,
    apsw.IOError,
    apsw.LockedError,
    apsw.NoMemError,
    apsw.NotADBError,
    apsw.PermissionsError,
    apsw.ReadOnlyError,
    apsw.AuthError,
)


class SqliteTransaction:
    """An open transaction on one connection."""

    dialect = Dialect.SQLITE

    def __init__(
        self, connection: apsw.Connection, path: Path, reserve: DiskReserve | None = None
    ) -> None:
        self._cursor = connection.cursor()
        self._connection = connection
        self._path = path
        self._reserve = reserve
        self.was_full = False

    def run(self, sql: str | Lookup, parameters: Parameters = ()) -> None:
        """Run a statement that returns nothing of interest."""
        self.read(sql, parameters)

    def read(self, sql: str | Lookup, parameters: Parameters = ()) -> list[Row]:
        """Run a statement and return its rows."""
        if isinstance(sql, Lookup):
            if not parameters:
                return []
            if len(parameters) == 1 and sql.one:
                sql = sql.one
            else:
                sql, parameters = sql.sqlite, (_encode(parameters).decode(),)
        try:
            return self._cursor.execute(sql, parameters).fetchall()
        except apsw.Error as error:
            raise self._translated(error) from error

    def read_all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """Run statements that do not depend on each other, and return the rows of each."""
        return [self.read(sql, parameters) for sql, parameters in statements]

    def write(self, sql: str, parameters: Sequence[Value] = ()) -> int:
        """Run a statement and return how many rows it changed."""
        self.read(sql, parameters)
        return self._connection.changes()

    def insert(self, insert: Insert, rows: Sequence[Row]) -> None:
        """Insert many rows in few steps.

        The driver lets other threads run at each step, and has to wait for its turn after it.
        """
        start, left = 0, len(rows)
        while left > 0:
            # The largest power of two that is not above what is left.
            step = min(ROWS_PER_STEP[0], 1 << (left.bit_length() - 1))
            taken = rows[start : start + step]
            self.read(insert.sqlite[step], tuple(chain.from_iterable(taken)))
            start, left = start + step, left - step

    def insert_all(self, inserts: Iterable[tuple[Insert, Sequence[Row]]]) -> None:
        """Insert rows into several tables, in this order."""
        for insert, rows in inserts:
            if rows:
                self.insert(insert, rows)

    def measure(self, *, is_limited: bool) -> StoreSize:  # noqa: ARG002
        """Return how large the file is without its free pages, and what is free on its disk."""
        self.was_full = False
        page_bytes, pages, free_pages = (
            self.read(f"PRAGMA {name}")[0][0]
            for name in ("page_size", "page_count", "freelist_count")
        )
        used_bytes, reusable_bytes = (pages - free_pages) * page_bytes, free_pages * page_bytes
        try:
            disk = os.statvfs(self._path.parent)
            file_bytes = self._path.stat().st_size
        except OSError:
            # Only in memory, or gone; the next transaction says so.
            return StoreSize(used_bytes=used_bytes)
        free_bytes, total_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if self._reserve is not None:
            self._reserve.hold(free_bytes, total_bytes)
        # What is in the log has yet to find its place in the file.
        unwritten_bytes = max(0, pages * page_bytes - file_bytes)
        return StoreSize(
            used_bytes=used_bytes,
            free_bytes=max(0, free_bytes + reusable_bytes - unwritten_bytes),
            reserve_bytes=reserve_of(total_bytes),
        )

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what is done within the block, and only that, if it raises."""
        self.read("SAVEPOINT inner_step")
        try:
            yield
        except BaseException:
            # Some errors end the transaction by themselves, and the savepoint with it.
            if self._connection.in_transaction:
                self.read("ROLLBACK TO inner_step")
                self.read("RELEASE inner_step")
            raise
        self.read("RELEASE inner_step")

    def _translated(self, error: apsw.Error) -> StoreError:
        problem = translated(error, self._path)
        self.was_full = self.was_full or isinstance(problem, StoreFullError)
        return problem


RESERVE_FILE_BYTES = 8 * 2**20
RESERVE_FILE_PART = 16
FILL_BYTES = 2**20
"""How large the reserve of a store is; on a small disk, at most this part of it."""

SPARE_BYTES = 2**20
"""Below this a disk counts as full when the store is opened."""

MAX_LOG_BYTES = 16 * 2**20
"""To what size the log is cut after a large transaction."""


class DiskReserve:
    """A file beside the store that only takes space, until the disk is full and it is given up.

    Deleting from a database needs room for its log. So what it takes is kept back for that, and
    is taken again when the disk has room.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(f"{path.name}-reserve")
        self._is_held = False

    def hold(self, free_bytes: int, total_bytes: int) -> None:
        """Take the space, if there is enough of it."""
        if self._is_held:
            return
        size = min(RESERVE_FILE_BYTES, total_bytes // RESERVE_FILE_PART)
        if free_bytes < size + reserve_of(total_bytes):
            return
        flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError):
            file = os.open(self._path, flags, 0o600)
            try:
                _fill(file, size)
                self._is_held = True
            finally:
                os.close(file)

    def give_up(self) -> bool:
        """Free the space; False if there was none."""
        self._is_held = False
        try:
            self._path.unlink()
        except OSError:
            return False
        return True


def _fill(file: int, size: int) -> None:
    """Give a file its size, written and not a hole, whatever the file system is."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
        return
    # macOS lacks it.
    piece = bytes(FILL_BYTES)
    for start in range(0, size, FILL_BYTES):
        os.pwrite(file, piece[: size - start], start)


class SqliteDatabase:
    """The transactions of one file."""

    _begin_sql = "BEGIN IMMEDIATE"

    def __init__(
        self,
        path: str | Path,
        *,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        has_reserve: bool = False,
    ) -> None:
        if str(Path(path)) == ":memory:":
            problem = "is not a file, and the ledger would be gone at every new connection"
            raise InvalidSettingError("path", f"{problem}; use memory: for a ledger without a file")
        self._path = Path(path).absolute()
        self._busy_timeout_ms = int(busy_timeout_seconds * 1_000)
        self._reserve = DiskReserve(self._path) if has_reserve else None
        self._connection: apsw.Connection | None = None
        self._transaction: SqliteTransaction | None = None
        self._opened: FileIdentity | None = None
        self.begun = 0
        self.committed = 0

    def begin(self) -> SqliteTransaction:
        """Take the write lock, connecting first if need be."""
        if self._opened is not None and self._file() != self._opened:
            self.close()
        if self._transaction is None or self._connection is None:
            self._connection = self._connect()
            self._transaction = SqliteTransaction(self._connection, self._path, self._reserve)
        self.begun += 1
        self._transaction.read(self._begin_sql)
        return self._transaction

    def commit(self) -> None:
        """End the transaction; it is on disk, or an error is raised."""
        if self._transaction is not None:
            self._transaction.read("COMMIT")
            self.committed += 1

    def rollback(self) -> None:
        """Undo the transaction, if there is one; never raises."""
        connection = self._connection
        if connection is None or not connection.in_transaction:
            return
        try:
            connection.execute("ROLLBACK")
        except apsw.Error:
            self.close()

    def close(self) -> None:
        """Let go of the file; the next transaction opens it again."""
        connection, self._connection, self._transaction = self._connection, None, None
        if connection is not None:
            with suppress(apsw.Error):
                self._spare_new_files(connection)
                connection.close()

    def wait_turn(self) -> bool:
        """One process writes at a time."""
        return False

    def make_room(self) -> bool:
        """Give the reserve up, so that tasks can be ended and deleted on a full disk."""
        if self._connection is not None:
            # What is in the log may have a place in the file already.
            with suppress(apsw.Error):
                self._connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        return self._reserve is not None and self._reserve.give_up()

    def _connect(self) -> apsw.Connection:
        if self._opened is None:
            self._create_file()
        # Asked before it is opened: if it is replaced meanwhile, the next transaction sees that.
        opened = self._file()
        try:
            connection = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE)
            self._configure(connection)
        except apsw.Error as error:
            raise translated(error, self._path) from error
        self._opened = opened
        return connection

    def _file(self) -> FileIdentity:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            advice = "put it back, or restart this process to create a new ledger"
            line = f"{self._path} is gone, nothing was granted; {advice}"
            raise LedgerUnavailableError(line) from None
        except OSError as error:
            raise self._cannot_be_opened(error) from error
        return found.st_dev, found.st_ino

    def _spare_new_files(self, connection: apsw.Connection) -> None:
        """Have SQLite not clean up by name: a file that was replaced has new ones beside it."""
        with suppress(LedgerUnavailableError):
            if self._file() != self._opened:
                connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)

    def _create_file(self) -> None:
        # Made here and not by SQLite, which would let everybody read it; the files that it adds
        # take over the mode of this one. One that exists is not touched: to close it would end the
        # locks that this process has on it through other connections.
        new = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        try:
            os.close(os.open(os.path.realpath(self._path), new, 0o600))
        except FileExistsError:
            return
        except FileNotFoundError:
            problem = f"the folder {self._path.parent} does not exist; create it first"
            raise InvalidSettingError("path", problem) from None
        except OSError as error:
            raise self._cannot_be_opened(error) from error

    def _cannot_be_opened(self, error: OSError) -> LedgerUnavailableError:
        return LedgerUnavailableError(f"{self._path} cannot be opened: {error.strerror}")

    def _configure(self, connection: apsw.Connection) -> None:
        connection.set_busy_timeout(self._busy_timeout_ms)
        # Only a file that is new takes this up, and any other would have to be locked for it;
        # whoever deletes gives pages back in small steps.
        if not connection.pragma("page_count"):
            connection.pragma("auto_vacuum", "incremental")
        mode = connection.pragma("journal_mode", "wal")
        if mode != "wal":
            problem = f"{self._path} cannot be used in WAL mode; use a disk of this machine"
            raise LedgerUnavailableError(problem)
        connection.pragma("synchronous", "full")
        # Without it, a disk of macOS may have a commit in its own cache only; others ignore it.
        connection.pragma("fullfsync", 1)
        connection.pragma("cache_size", -CACHE_KIBIBYTES)
        connection.wal_autocheckpoint(CHECKPOINT_PAGES)
        connection.pragma("journal_size_limit", MAX_LOG_BYTES)


class SqliteReader(SqliteDatabase):
    """Transactions that only read; each sees all that was committed before it began."""

    # It waits for no writer, and none waits for it.
    _begin_sql = "BEGIN"

    def _configure(self, connection: apsw.Connection) -> None:
        super()._configure(connection)
        connection.pragma("query_only", "on")


class ReadOnlyReader(SqliteReader):
    """Transactions on a file whose folder cannot be written, as in an archive or a snapshot.

    SQLite needs files beside it to read one in WAL mode. Where there are none, nobody has it open
    and all of it is in the one file, so that it is read as a file that never changes.
    """

    def _connect(self) -> apsw.Connection:
        self._opened = self._file()
        is_whole = not self._path.with_name(f"{self._path.name}-wal").exists()
        address = f"file:{quote(str(self._path))}?immutable={int(is_whole)}"
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        try:
            connection = apsw.Connection(address, flags=flags)
            connection.set_busy_timeout(self._busy_timeout_ms)
        except apsw.Error as error:
            raise translated(error, self._path) from error
        return connection


def translated(error: apsw.Error, path: Path) -> StoreError:
    """Turn an error of the driver into one of ours."""
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return LedgerUnavailableError(f"{path} is locked by another process; nothing was granted")
    if isinstance(error, apsw.FullError) or (isinstance(error, _NEEDS_SPACE) and _is_full(path)):
        return StoreFullError(f"{path}: the disk is full; free some space")
    if isinstance(error, _UNAVAILABLE):
        return LedgerUnavailableError(f"{path} cannot be used: {first_line(error)}")
    return StoreError(f"{path}: {first_line(error)}")


_NEEDS_SPACE = (apsw.IOError, apsw.CantOpenError)
"""What SQLite says where it cannot make one of the files that it needs beside the database."""


def _is_full(path: Path) -> bool:
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < SPARE_BYTES


# What a process needs that writes to a task store in an SQLite file.


def sqlite_writer_setup(path: Path, busy_timeout_seconds: float, keeps_ledger: bool) -> WriterSetup:  # noqa: FBT001
    """Make what a process needs to write to a file."""
    database = SqliteDatabase(path, busy_timeout_seconds=busy_timeout_seconds, has_reserve=True)
    tables = TaskTables(keeps_ledger=keeps_ledger, cache=RowCache(database))
    be_here(tables)
    return WriterSetup(database, StepWire(tables.apply))


# The task store in an SQLite file: durable, for one process of one machine, with no server.

STORE_BUSY_TIMEOUT_SECONDS = 2.0
"""How long another process may have the file before callers are told: they wait for twice that."""


class SqliteTaskStore(SqlTaskStore):
    """Tasks in a file, with the ledger of their budgets beside them.

    With a `starter` a process of its own writes, by its own clock.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        keeps_ledger: bool = True,
        busy_timeout_seconds: float = STORE_BUSY_TIMEOUT_SECONDS,
        starter: ChildStarter | None = None,
    ) -> None:
        database = SqliteDatabase(path, busy_timeout_seconds=busy_timeout_seconds, has_reserve=True)
        writer: Writer
        if starter is not None:
            tables = TaskTables(keeps_ledger=keeps_ledger)
            recipe = partial(
                sqlite_writer_setup, Path(path).absolute(), busy_timeout_seconds, keeps_ledger
            )
            writer = ProcessWriter(recipe, StepWire(tables.apply), starter)
        else:
            tables = TaskTables(clock=clock, keeps_ledger=keeps_ledger, cache=RowCache(database))
            writer = GroupCommitWriter(database)
        reader = ReaderPool(partial(SqliteReader, path))
        super().__init__(tables, writer, reader, is_shared=False)
