"""Rows kept in memory are those on disk, whatever becomes of a transaction."""

from __future__ import annotations

from typing import cast

import pytest

from headgate.core.task import Task, TaskStatus, Terms
from headgate.errors import LedgerUnavailableError
from headgate.storage.sqlite import SqliteDatabase
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import RowCache, Spec, TaskRow
from storage.scene import Place, fresh_place


class Counts:
    """A database as far as the cache looks at it."""

    def __init__(self) -> None:
        self.begun = 0
        self.committed = 0


class Connection:
    """A connection that tells when somebody else wrote."""

    version = 1

    def read(self, _sql: str) -> list[tuple[int]]:
        """Return the version of the data."""
        return [(self.version,)]


def row(task_id: str) -> TaskRow:
    return TaskRow(Spec(Task(id=task_id), Terms(), 1))


class Bench:
    """A cache, with the database that it looks at."""

    def __init__(self, most: int = 10) -> None:
        self.counts = Counts()
        self.connection = Connection()
        self.cache = RowCache(self.counts, most=most)

    def begin(self, *, is_new: bool = True) -> None:
        """Begin a step, of a new transaction or of the one that is open."""
        self.counts.begun += is_new
        self.cache.begin(cast("Transaction", self.connection))

    def commit(self) -> None:
        """Have the transaction on disk."""
        self.counts.committed += 1

    def kept(self, *task_ids: str) -> list[str]:
        """Return which rows the next transaction finds, and end that one, too."""
        self.begin()
        found = [task_id for task_id in task_ids if self.cache.take(task_id) is not None]
        self.commit()
        return found


def test_a_row_is_kept_once_its_transaction_is_on_disk() -> None:
    bench = Bench()
    bench.begin()
    bench.cache.put(row("a"))
    bench.commit()
    assert bench.kept("a", "b") == ["a"]
    assert bench.kept("a") == [], "it was taken out, and not put back"


def test_a_row_of_a_transaction_that_was_not_committed_is_forgotten() -> None:
    bench = Bench()
    bench.begin()
    bench.cache.put(row("a"))
    assert bench.kept("a") == []


def test_a_row_taken_by_a_transaction_that_failed_is_forgotten() -> None:
    bench = Bench()
    bench.begin()
    bench.cache.put(row("a"))
    bench.commit()
    bench.begin()
    taken = bench.cache.take("a")
    assert taken is not None
    taken.status = TaskStatus.RUNNING
    bench.cache.put(taken)
    assert bench.kept("a") == []


def test_a_later_step_of_the_same_transaction_finds_what_an_earlier_one_wrote() -> None:
    bench = Bench()
    bench.begin()
    written = row("a")
    bench.cache.put(written)
    bench.begin(is_new=False)
    assert bench.cache.take("a") is written


def test_everything_is_forgotten_when_somebody_else_wrote_or_the_connection_is_new() -> None:
    for change in ("version", "connection"):
        bench = Bench()
        bench.begin()
        bench.cache.put(row("a"))
        bench.commit()
        if change == "version":
            bench.connection.version += 1
        else:
            bench.connection = Connection()
        assert bench.kept("a") == []


def test_the_oldest_rows_make_room() -> None:
    bench = Bench(most=2)
    bench.begin()
    for task_id in "abc":
        bench.cache.put(row(task_id))
    bench.commit()
    assert bench.kept("a", "b", "c") == ["b", "c"]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """Give a place for a store in a file."""
    return fresh_place("sqlite", request)


async def test_a_commit_that_fails_leaves_no_row_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_database: SqliteDatabase) -> None:
        raise LedgerUnavailableError("the disk is full")

    async with place.scene() as scene:
        await scene.submit("t1")
        with monkeypatch.context() as patch:
            patch.setattr(SqliteDatabase, "commit", fail)
            with pytest.raises(LedgerUnavailableError):
                await scene.store.cancel("t1", node_id="n1")
        record = await scene.assign("t1")
        assert record.task.status is TaskStatus.RUNNING
