"""Readers: they see what was acknowledged, change nothing, and wait for nobody who writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from budgets.servers import PostgresServer
from headgate.errors import StoreError, StoreUnavailableError
from headgate.storage.postgres import PostgresDatabase, PostgresReader
from headgate.storage.sqlite import SqliteDatabase, SqliteReader
from headgate.storage.transaction import Database, LostTransactionError, Transaction
from headgate.storage.writer import (
    ALONE_SECONDS,
    READER_PAUSES,
    Askers,
    Awaited,
    Questions,
    ReaderPool,
    asker,
)

BACKENDS = ("sqlite", "postgres")


class Place:
    """A table of numbers with a writer, and readers made on demand."""

    def __init__(self, writer: Database, make_reader: Callable[[], Database]) -> None:
        self.writer = writer
        self.make_reader = make_reader
        self.change("CREATE TABLE numbers (number INTEGER PRIMARY KEY)")

    def change(self, sql: str) -> None:
        self.writer.begin().run(sql)
        self.writer.commit()

    def add(self, number: int) -> None:
        self.change(f"INSERT INTO numbers VALUES ({number})")

    @asynccontextmanager
    async def pool(self, *, most: int = 2, max_queued: int = 100) -> AsyncIterator[ReaderPool]:
        pool = ReaderPool(self.make_reader, most=most, max_queued=max_queued)
        pool.start()
        try:
            yield pool
        finally:
            await pool.close()
            self.writer.close()


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        path = tmp_path / "tasks.db"
        return Place(SqliteDatabase(path), lambda: SqliteReader(path))
    url: str = request.getfixturevalue("postgres_url")
    return Place(PostgresDatabase(url), lambda: PostgresReader(url))


def count(transaction: Transaction) -> int:
    return int(transaction.read("SELECT COUNT(*) FROM numbers")[0][0])


def test_every_commit_is_seen_by_the_next_question(place: Place) -> None:
    async def scenario() -> None:
        async with place.pool() as pool:
            for number in range(20):
                place.add(number)
                assert await pool.submit(count) == number + 1

    asyncio.run(scenario())


def test_nobody_waits_for_whoever_writes(place: Place) -> None:
    async def scenario() -> None:
        async with place.pool() as pool:
            place.add(1)
            place.writer.begin().run("INSERT INTO numbers VALUES (2)")
            assert await pool.submit(count) == 1
            place.writer.commit()
            assert await pool.submit(count) == 2

    asyncio.run(scenario())


def test_one_question_sees_one_state(place: Place) -> None:
    def count_twice(transaction: Transaction) -> tuple[int, int]:
        before = count(transaction)
        place.add(7)
        return before, count(transaction)

    async def scenario() -> None:
        async with place.pool() as pool:
            assert await pool.submit(count_twice) == (0, 0)
            assert await pool.submit(count) == 1

    asyncio.run(scenario())


def test_a_reader_cannot_write(place: Place) -> None:
    def write(transaction: Transaction) -> None:
        transaction.write("INSERT INTO numbers VALUES (1)")

    async def scenario() -> None:
        async with place.pool() as pool:
            with pytest.raises(StoreError):
                await pool.submit(write)
            assert await pool.submit(count) == 0

    asyncio.run(scenario())


def test_a_question_that_fails_leaves_its_reader_usable(place: Place) -> None:
    def fail(_transaction: Transaction) -> None:
        raise StopIteration

    async def scenario() -> None:
        async with place.pool(most=1) as pool:
            with pytest.raises(StoreError, match="nowhere"):
                await pool.submit(lambda transaction: transaction.read("SELECT * FROM nowhere"))
            with pytest.raises(RuntimeError, match="StopIteration"):
                await pool.submit(fail)
            assert await pool.submit(count) == 0

    asyncio.run(scenario())


def test_a_long_question_does_not_hold_up_the_next(place: Place) -> None:
    may_go_on = threading.Event()

    def slow(transaction: Transaction) -> int:
        may_go_on.wait()
        return count(transaction)

    async def scenario() -> None:
        async with place.pool() as pool:
            long = pool.submit(slow)
            assert await pool.submit(count) == 0
            may_go_on.set()
            assert await long == 0

    asyncio.run(scenario())


def test_too_many_questions_are_refused_at_once(place: Place) -> None:
    may_go_on, is_busy = threading.Event(), threading.Event()

    def slow(_transaction: Transaction) -> None:
        is_busy.set()
        may_go_on.wait()

    async def scenario() -> None:
        async with place.pool(most=1, max_queued=1) as pool:
            under_way = pool.submit(slow)
            await asyncio.to_thread(is_busy.wait)
            waits = pool.submit(count)
            with pytest.raises(StoreUnavailableError, match="1 questions wait"):
                pool.submit(count)
            may_go_on.set()
            await asyncio.gather(under_way, waits)

    asyncio.run(scenario())


def test_closing_answers_what_was_asked_and_refuses_what_comes_after(place: Place) -> None:
    async def scenario() -> None:
        async with place.pool() as pool:
            asked = [pool.submit(count) for _ in range(10)]
            await pool.close()
            with pytest.raises(StoreUnavailableError, match="closed"):
                pool.submit(count)
            assert await asyncio.gather(*asked) == [0] * 10
            pool.start()
            assert await pool.submit(count) == 0

    asyncio.run(scenario())


def test_a_lost_question_is_asked_once_more_and_not_again(place: Place) -> None:
    asked: list[int] = []

    def lose(_transaction: Transaction) -> None:
        asked.append(1)
        raise LostTransactionError("no reply")

    async def scenario() -> None:
        async with place.pool() as pool:
            with pytest.raises(StoreUnavailableError, match="no reply"):
                await pool.submit(lose)

    asyncio.run(scenario())
    assert len(asked) == 2


def test_readers_are_away_with_their_server_and_come_back_with_it(postgres: PostgresServer) -> None:
    url = postgres.new_schema()
    place = Place(PostgresDatabase(url), lambda: PostgresReader(url))

    async def scenario() -> None:
        async with place.pool(most=1) as pool:
            assert await pool.submit(count) == 0
            postgres.stop()
            try:
                with pytest.raises(StoreUnavailableError):
                    await pool.submit(count)
            finally:
                postgres.start()
            assert await pool.submit(count) == 0

    asyncio.run(scenario())


def test_those_who_ask_take_turns(tmp_path: Path) -> None:
    """A hundred questions of one keep the one of another waiting for one of them."""
    path = tmp_path / "tasks.db"
    place = Place(SqliteDatabase(path), lambda: SqliteReader(path))
    answered: list[str] = []
    go_on, has_begun = threading.Event(), threading.Event()

    def first(_: Transaction) -> None:
        has_begun.set()
        go_on.wait(10)

    async def scenario() -> None:
        async with place.pool(most=1, max_queued=120) as pool:
            asker.set("greedy")
            blocked = pool.submit(first)
            await asyncio.to_thread(has_begun.wait, 10)
            asked = [pool.submit(lambda _: answered.append("greedy")) for _ in range(107)]
            with pytest.raises(StoreUnavailableError):
                pool.submit(lambda _: answered.append("greedy"))
            asker.set("modest")
            asked.append(pool.submit(lambda _: answered.append("modest")))
            asker.set("")
            asked.append(pool.submit(lambda _: answered.append("service")))
            go_on.set()
            await asyncio.gather(blocked, *asked)

    asyncio.run(scenario())
    assert answered.index("modest") <= 2
    assert answered.index("service") <= 3
    assert len(answered) == 109


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_beside_others_a_caller_has_one_reader_for_a_part_of_its_time() -> None:
    clock = Time()
    askers = Askers(clock)
    questions = Questions(askers, clock=clock)
    for who in ("modest", "greedy", "greedy", "greedy"):
        askers.note(who)
        questions.put(who, Awaited(count))
    assert questions.get() is not None
    assert questions.get() is not None
    # One of each is under way, and greedy has to wait for the end of its own.
    assert questions.turn() == (None, None)
    questions.answered("greedy", 0.25)
    assert questions.turn() == (None, READER_PAUSES * 0.25)
    # What the service itself asks never waits.
    questions.put("", Awaited(count))
    assert questions.turn() == ("", None)
    clock.now += READER_PAUSES * 0.25
    assert questions.turn() == ("greedy", None)


async def test_a_caller_that_is_alone_has_every_reader_all_the_time() -> None:
    clock = Time()
    askers = Askers(clock)
    questions = Questions(askers, clock=clock)
    askers.note("modest")
    clock.now += ALONE_SECONDS
    for _ in range(3):
        askers.note("greedy")
        questions.put("greedy", Awaited(count))
    assert questions.get() is not None
    assert questions.turn() == ("greedy", None)
    questions.answered("greedy", 0.5)
    assert questions.turn() == ("greedy", None)


async def test_at_the_end_everything_that_waits_is_answered_without_a_pause() -> None:
    clock = Time()
    askers = Askers(clock)
    questions = Questions(askers, clock=clock)
    for who in ("modest", "greedy", "greedy"):
        askers.note(who)
    questions.put("greedy", Awaited(count))
    questions.put("greedy", Awaited(count))
    assert questions.get() is not None
    questions.end()
    assert questions.get() is not None
    assert questions.get() is None
