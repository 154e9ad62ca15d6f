"""The writer without a thread: what a crash may undo, and what it may not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import LedgerUnavailableError
from headgate.storage.memory import MemoryDatabase
from headgate.storage.transaction import Transaction
from headgate.storage.writer import Fault, InlineWriter
from headgate.testing import Host, HostCrashedError, SimulatedLoop, simulate


class CountedDatabase(MemoryDatabase):
    """A table of numbers that counts its commits."""

    def __init__(self) -> None:
        super().__init__()
        self.begin().run("CREATE TABLE numbers (number INTEGER PRIMARY KEY)")
        super().commit()
        self.commits = 0

    def commit(self) -> None:
        self.commits += 1
        super().commit()

    def numbers(self) -> list[int]:
        rows = self.begin().read("SELECT number FROM numbers ORDER BY number")
        self.rollback()
        return [row[0] for row in rows]


def add(number: int) -> Callable[[Transaction], int]:
    def operation(transaction: Transaction) -> int:
        transaction.run("INSERT INTO numbers VALUES (?) ON CONFLICT DO NOTHING", (number,))
        return number

    return operation


def open_writer(
    database: CountedDatabase, *faults: Fault | None, max_batch: int = 512, max_queued: int = 1_000
) -> InlineWriter:
    """Make an open writer whose next commits meet these faults, and whose later ones meet none."""
    due = list(faults)
    writer = InlineWriter(
        database,
        faults=lambda: due.pop(0) if due else None,
        max_batch=max_batch,
        max_queued=max_queued,
    )
    writer.start()
    return writer


def test_work_of_one_round_of_the_loop_shares_one_commit() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> list[int]:
        writer = open_writer(database)
        return await asyncio.gather(*[writer.submit(add(n)) for n in range(50)])

    assert simulate(main, seed=None).result == list(range(50))
    assert database.numbers() == list(range(50))
    assert database.commits == 1


def test_a_batch_has_a_bound() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> None:
        writer = open_writer(database, max_batch=10)
        await asyncio.gather(*[writer.submit(add(n)) for n in range(25)])

    simulate(main, seed=None)
    assert database.commits == 3


def test_requests_beside_each_other_are_handed_over_together() -> None:
    handed: list[list[int]] = []

    def halve(_transaction: Transaction, requests: Sequence[int]) -> list[int | Exception]:
        handed.append(list(requests))
        return [ValueError(f"{n} is odd") if n % 2 else n // 2 for n in requests]

    async def main(loop: SimulatedLoop) -> list[object]:
        writer = open_writer(CountedDatabase())
        waiting = [writer.submit_request(halve, n) for n in (2, 3, 4)]
        return list(await asyncio.gather(*waiting, return_exceptions=True))

    assert [str(answer) for answer in simulate(main).result] == ["1", "3 is odd", "2"]
    assert handed == [[2, 3, 4]]


def test_what_renews_a_lease_goes_before_what_was_there_earlier() -> None:
    order: list[str] = []

    async def main(loop: SimulatedLoop) -> None:
        writer = open_writer(CountedDatabase())
        later = writer.submit(lambda _: order.append("later"))
        await writer.submit(lambda _: order.append("first"), goes_first=True)
        await later

    simulate(main)
    assert order == ["first", "later"]


def test_a_refused_commit_leaves_nothing_and_the_next_one_works() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> None:
        writer = open_writer(database, Fault.REFUSED)
        with pytest.raises(LedgerUnavailableError, match="refused"):
            await writer.submit(add(1))
        assert database.numbers() == []
        assert await writer.submit(add(2)) == 2

    simulate(main)
    assert database.numbers() == [2]


def test_a_commit_whose_reply_gets_lost_is_run_once_more() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> None:
        assert await open_writer(database, Fault.REPLY_LOST).submit(add(1)) == 1

    simulate(main)
    assert (database.numbers(), database.commits) == ([1], 2)


def test_two_lost_replies_are_an_error_about_what_is_on_disk() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> None:
        writer = open_writer(database, Fault.REPLY_LOST, Fault.REPLY_LOST)
        with pytest.raises(LedgerUnavailableError, match="got lost"):
            await writer.submit(add(1))

    simulate(main)
    assert database.numbers() == [1]


def test_a_crash_between_commit_and_answer_keeps_the_one_and_loses_the_other() -> None:
    database = CountedDatabase()
    heard: list[int] = []

    async def main(loop: SimulatedLoop) -> None:
        writer = InlineWriter(database, reply_seconds=lambda: 1.0)
        writer.start()
        host = Host(loop, "a")

        async def work() -> None:
            heard.append(await writer.submit(add(1)))

        outcome = host.spawn(work())
        await asyncio.sleep(0.5)
        assert database.numbers() == [1]
        host.crash()
        with pytest.raises(HostCrashedError):
            await outcome
        await asyncio.sleep(1.0)

    simulate(main)
    assert heard == []


def test_the_crash_of_one_caller_is_nothing_to_the_others_in_its_batch() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> int:
        writer = open_writer(database)
        host = Host(loop, "a")

        async def work() -> None:
            await writer.submit(add(1))

        host.spawn(work())
        await asyncio.sleep(0)
        answered = writer.submit(add(2))
        host.crash()
        return await answered

    assert simulate(main, seed=None).result == 2
    assert database.numbers() == [1, 2]


def test_an_error_for_a_caller_that_crashed_is_no_failure_of_the_simulation() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> None:
        writer = open_writer(database, Fault.REFUSED)
        host = Host(loop, "a")

        async def work() -> None:
            await writer.submit(add(1))

        host.spawn(work())
        await asyncio.sleep(0)
        host.crash()
        await asyncio.sleep(1)

    simulate(main, seed=None)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), steps=st.integers(0, 40))
def test_wherever_a_host_crashes_what_it_heard_is_on_disk(seed: int, steps: int) -> None:
    database = CountedDatabase()
    heard: list[int] = []

    async def main(loop: SimulatedLoop) -> None:
        writer = open_writer(database)
        host = Host(loop, "a")

        async def work(number: int) -> None:
            heard.append(await writer.submit(add(number)))

        outcomes = [host.spawn(work(number)) for number in range(8)]
        host.crash_after(steps)
        await asyncio.gather(*outcomes, return_exceptions=True)
        await asyncio.sleep(1)

    simulate(main, seed=seed)
    assert set(heard) <= set(database.numbers())


def test_a_caller_that_gave_up_before_its_turn_is_skipped() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> int:
        writer = open_writer(database)
        writer.submit(add(1)).cancel()
        return await writer.submit(add(2))

    assert simulate(main).result == 2
    assert database.numbers() == [2]


def test_a_full_queue_refuses_at_once() -> None:
    async def main(loop: SimulatedLoop) -> None:
        writer = open_writer(CountedDatabase(), max_queued=1)
        waiting = writer.submit(add(1))
        with pytest.raises(LedgerUnavailableError, match="1 calls wait"):
            writer.submit(add(2))
        await waiting

    simulate(main)


def test_closing_finishes_what_is_queued_and_refuses_what_comes_after() -> None:
    async def main(loop: SimulatedLoop) -> int:
        writer = open_writer(CountedDatabase())
        waiting = writer.submit(add(1))
        await writer.close()
        with pytest.raises(LedgerUnavailableError, match="closed"):
            writer.submit(add(2))
        return await waiting

    assert simulate(main).result == 1


def test_a_writer_goes_on_in_the_next_loop_whatever_the_last_one_left() -> None:
    database = CountedDatabase()
    writer = open_writer(database)

    async def leave(loop: SimulatedLoop) -> None:
        writer.submit(add(1))

    async def go_on(loop: SimulatedLoop) -> int:
        return await writer.submit(add(2))

    simulate(leave, seed=None)
    assert simulate(go_on, seed=None).result == 2


def test_two_writers_share_a_database_within_a_loop() -> None:
    database = CountedDatabase()

    async def main(loop: SimulatedLoop) -> None:
        first, second = open_writer(database), open_writer(database)
        await asyncio.gather(*[first.submit(add(n)) for n in range(5)], second.submit(add(9)))
        await first.close()
        assert await second.submit(add(10)) == 10

    simulate(main)
    assert database.numbers() == [0, 1, 2, 3, 4, 9, 10]
