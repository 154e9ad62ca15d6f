"""The group-commit writer: who shares a commit, and who is spared whose failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headgate.errors import LedgerUnavailableError
from headgate.storage.sqlite import SqliteDatabase
from headgate.storage.transaction import LostTransactionError, Transaction
from headgate.storage.writer import (
    GroupCommitWriter,
    Job,
    NotTakenError,
    StandingOrder,
    perform,
)


class WatchedDatabase(SqliteDatabase):
    """Counts commits, and fails those that it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.commits = 0
        self.next_errors: list[Exception] = []
        self.answers = threading.Event()
        self.answers.set()

    def commit(self) -> None:
        self.commits += 1
        self.answers.wait()
        if self.next_errors:
            raise self.next_errors.pop(0)
        super().commit()


class Bench:
    """A writer over a table of numbers, whose thread can be held up while callers queue."""

    def __init__(
        self,
        path: Path,
        *,
        max_batch: int = 512,
        max_queued: int = 1_000,
        close_seconds: float = 30.0,
    ) -> None:
        self.database = WatchedDatabase(path)
        self.writer = GroupCommitWriter(
            self.database, max_batch=max_batch, max_queued=max_queued, close_seconds=close_seconds
        )
        self._may_go_on = threading.Event()

    async def hold_up(self) -> asyncio.Future[None]:
        """Occupy the thread until `let_go`; what is submitted meanwhile waits together."""
        is_busy = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._may_go_on.clear()

        def wait(_transaction: Transaction) -> None:
            loop.call_soon_threadsafe(is_busy.set)
            self._may_go_on.wait()

        occupied = self.writer.submit(wait)
        await is_busy.wait()
        self.database.commits = 0
        return occupied

    def let_go(self) -> None:
        self._may_go_on.set()
        self.database.answers.set()

    async def numbers(self) -> list[int]:
        rows = await self.writer.submit(
            lambda transaction: transaction.read("SELECT number FROM numbers ORDER BY number")
        )
        return [row[0] for row in rows]


@asynccontextmanager
async def open_bench(
    folder: Path, *, max_batch: int = 512, max_queued: int = 1_000, close_seconds: float = 30.0
) -> AsyncIterator[Bench]:
    bench = Bench(
        folder / "writer.db",
        max_batch=max_batch,
        max_queued=max_queued,
        close_seconds=close_seconds,
    )
    bench.writer.start()
    create = "CREATE TABLE IF NOT EXISTS numbers (number INTEGER PRIMARY KEY)"
    await bench.writer.submit(lambda transaction: transaction.run(create))
    try:
        yield bench
    finally:
        bench.let_go()
        await bench.writer.close()


def add(number: int) -> Callable[[Transaction], int]:
    def operation(transaction: Transaction) -> int:
        transaction.run("INSERT INTO numbers VALUES (?)", (number,))
        return number

    return operation


def add_and_fail(number: int) -> Callable[[Transaction], int]:
    def operation(transaction: Transaction) -> int:
        add(number)(transaction)
        problem = f"no {number}"
        raise KeyError(problem)

    return operation


def test_callers_that_wait_together_share_one_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            await bench.hold_up()
            waiting = [bench.writer.submit(add(n)) for n in range(50)]
            bench.let_go()
            assert await asyncio.gather(*waiting) == list(range(50))
            assert bench.database.commits == 2
            assert await bench.numbers() == list(range(50))

    asyncio.run(scenario())


def test_a_batch_has_a_bound(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path, max_batch=10) as bench:
            await bench.hold_up()
            waiting = [bench.writer.submit(add(n)) for n in range(25)]
            bench.let_go()
            await asyncio.gather(*waiting)
            assert bench.database.commits == 1 + 3

    asyncio.run(scenario())


def test_requests_beside_each_other_are_handed_over_together_and_answered_each(
    tmp_path: Path,
) -> None:
    handed: list[list[int]] = []

    def halve(_transaction: Transaction, requests: Sequence[int]) -> list[int | Exception]:
        handed.append(list(requests))
        return [ValueError(f"{n} is odd") if n % 2 else n // 2 for n in requests]

    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            await bench.hold_up()
            submit = bench.writer.submit_request
            waiting = [submit(halve, n) for n in (2, 3, 4)]
            between = bench.writer.submit(add(1))
            waiting += [submit(halve, n) for n in (6, 8)]
            bench.let_go()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert [str(answer) for answer in answers] == ["1", "3 is odd", "2", "3", "4"]
            assert await between == 1
            assert handed == [[2, 3, 4], [6, 8]]

    asyncio.run(scenario())


def test_an_operation_that_fails_leaves_nothing_and_spoils_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            await bench.hold_up()
            operations = [add(1), add_and_fail(2), add(3), add(3), add(4)]
            waiting = [bench.writer.submit(item) for item in operations]
            bench.let_go()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(answer).__name__ for answer in answers] == [
                *("int", "KeyError", "int", "StoreError", "int")
            ]
            assert await bench.numbers() == [1, 3, 4]

    asyncio.run(scenario())


def test_an_operation_may_even_raise_what_no_future_can_carry(tmp_path: Path) -> None:
    def stop(_transaction: Transaction) -> None:
        raise StopIteration

    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            with pytest.raises(RuntimeError, match="StopIteration"):
                await bench.writer.submit(stop)

    asyncio.run(scenario())


def test_a_caller_that_gave_up_before_its_turn_is_skipped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            await bench.hold_up()
            gives_up = bench.writer.submit(add(1))
            stays = bench.writer.submit(add(2))
            gives_up.cancel()
            bench.let_go()
            assert await stays == 2
            assert await bench.numbers() == [2]

    asyncio.run(scenario())


def test_a_caller_that_gives_up_during_its_turn_changes_nothing_for_the_others(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            under_way = await bench.hold_up()
            under_way.cancel()
            stays = bench.writer.submit(add(2))
            bench.let_go()
            assert await stays == 2

    asyncio.run(scenario())


def test_a_commit_that_fails_fails_everybody_in_it_and_nobody_after_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            # The first commit is that of the operation which holds the others up.
            first = await bench.hold_up()
            bench.database.next_errors = [LedgerUnavailableError("the disk is full")] * 2
            waiting = [bench.writer.submit(add(n)) for n in range(3)]
            bench.let_go()
            answers = await asyncio.gather(first, *waiting, return_exceptions=True)
            assert all(isinstance(answer, LedgerUnavailableError) for answer in answers)
            assert await bench.writer.submit(add(7)) == 7
            assert await bench.numbers() == [7]

    asyncio.run(scenario())


@pytest.mark.parametrize(("lost", "is_done"), [(1, True), (2, False)])
def test_a_lost_transaction_is_run_once_more_and_not_again(
    tmp_path: Path, lost: int, is_done: bool
) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            bench.database.next_errors = [LostTransactionError("no reply")] * lost
            if is_done:
                assert await bench.writer.submit(add(1)) == 1
            else:
                with pytest.raises(LedgerUnavailableError, match="no reply"):
                    await bench.writer.submit(add(1))
            assert await bench.numbers() == ([1] if is_done else [])

    asyncio.run(scenario())


def test_a_request_that_spoils_its_batch_fails_alone(tmp_path: Path) -> None:
    def add_all(transaction: Transaction, requests: Sequence[int]) -> list[int | Exception]:
        for number in requests:
            # The table takes no text that is no number, and the whole statement fails.
            transaction.run("INSERT INTO numbers VALUES (?)", (number if number != 5 else "five",))
        return list(requests)

    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            await bench.hold_up()
            waiting = [bench.writer.submit_request(add_all, n) for n in range(9)]
            bench.let_go()
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(answer).__name__ for answer in answers] == [
                *["int"] * 5,
                "StoreError",
                *["int"] * 3,
            ]
            assert await bench.numbers() == [0, 1, 2, 3, 4, 6, 7, 8]

    asyncio.run(scenario())


def test_what_renews_a_lease_is_in_the_next_transaction_whatever_is_queued(tmp_path: Path) -> None:
    ran: list[int] = []

    def note(number: int) -> Callable[[Transaction], None]:
        return lambda _transaction: ran.append(number)

    async def scenario() -> None:
        async with open_bench(tmp_path, max_batch=2, max_queued=4) as bench:
            await bench.hold_up()
            waiting = [bench.writer.submit(note(n)) for n in range(4)]
            first = bench.writer.submit(note(100), goes_first=True)
            bench.let_go()
            await asyncio.gather(first, *waiting)
            assert ran == [100, 0, 1, 2, 3]
            await bench.writer.submit(note(101), goes_first=True)
            assert ran[-1] == 101

    asyncio.run(scenario())


class ContendedDatabase(SqliteDatabase):
    """One for which others write before each transaction."""

    def wait_turn(self) -> bool:
        return True


def test_what_cannot_be_taken_in_ends_the_writer_and_writes_nothing(tmp_path: Path) -> None:
    """Answers are matched by their order: one too few, and all later ones would be of others."""
    database = ContendedDatabase(tmp_path / "a.db")
    database.begin().run("CREATE TABLE numbers (number INTEGER)")
    database.commit()
    job = Job(lambda transaction: transaction.run("INSERT INTO numbers VALUES (1)"))

    def more(_taken: int) -> list[Job]:
        raise MemoryError

    with pytest.raises(NotTakenError, match="MemoryError"):
        perform(database, [job], more=more)
    assert database.begin().read("SELECT COUNT(*) FROM numbers") == [(0,)]
    database.close()


def test_closing_finishes_what_is_queued_and_refuses_what_comes_after(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            await bench.hold_up()
            waiting = [bench.writer.submit(add(n)) for n in range(5)]
            closing = asyncio.create_task(bench.writer.close())
            await asyncio.sleep(0)
            with pytest.raises(LedgerUnavailableError, match="closed"):
                await bench.writer.submit(add(9))
            bench.let_go()
            await closing
            assert await asyncio.gather(*waiting) == list(range(5))

    asyncio.run(scenario())


def test_a_closed_writer_can_be_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:
            await bench.writer.close()
            await bench.writer.close()
            bench.writer.start()
            assert await bench.writer.submit(add(1)) == 1

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_database_that_hangs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path, close_seconds=0.05) as bench:
            bench.database.answers.clear()
            hangs = bench.writer.submit(add(1))
            async with asyncio.timeout(10.0):
                await bench.writer.close()
            assert not hangs.done()
            with pytest.raises(LedgerUnavailableError, match="not answered since"):
                bench.writer.start()
            bench.let_go()
            assert await hangs == 1

    asyncio.run(scenario())


def test_a_full_queue_refuses_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_bench(tmp_path, max_queued=2) as bench:
            await bench.hold_up()
            waiting = [bench.writer.submit(add(n)) for n in range(2)]
            with pytest.raises(LedgerUnavailableError, match="2 calls wait"):
                await bench.writer.submit(add(3))
            bench.let_go()
            await asyncio.gather(*waiting)

    asyncio.run(scenario())


def test_several_event_loops_can_share_a_writer(tmp_path: Path) -> None:
    answers: list[int] = []

    async def scenario() -> None:
        async with open_bench(tmp_path) as bench:

            def other_loop(start: int) -> None:
                async def submit_some() -> None:
                    numbers = range(start, start + 20)
                    answers.extend(
                        await asyncio.gather(*[bench.writer.submit(add(n)) for n in numbers])
                    )

                asyncio.run(submit_some())

            await asyncio.gather(*[asyncio.to_thread(other_loop, n * 100) for n in range(3)])
            assert sorted(answers) == await bench.numbers()
            assert len(answers) == 60

    asyncio.run(scenario())


def test_a_writer_whose_thread_is_in_another_process_says_so(tmp_path: Path) -> None:
    async def submit() -> None:
        writer = GroupCommitWriter(SqliteDatabase(tmp_path / "ledger.db"))
        # What a forked child finds: the object, but a thread that does not run here.
        writer._thread = threading.Thread(target=print)
        with pytest.raises(LedgerUnavailableError, match="another process"):
            await writer.submit(lambda _: None)

    asyncio.run(submit())


async def test_a_standing_order_is_repeated_while_the_loop_is_busy(tmp_path: Path) -> None:
    done = threading.Semaphore(0)
    async with open_bench(tmp_path) as bench:
        order = StandingOrder(lambda _transaction: done.release(), 0.02, 60.0)
        bench.writer.keep([order])
        # The event loop does nothing meanwhile.
        for _ in range(3):
            assert done.acquire(timeout=10.0)
        bench.writer.keep(())
