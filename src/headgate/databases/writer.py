"""The group-commit writer: everything that waits is put into one transaction.

A commit that is safe on disk costs the same for one change as for hundreds. So callers hand their
operations to one thread, which takes all that are queued, runs them in one transaction, commits,
and then answers all of them. Nobody waits for a batch to fill up: it fills while the one before
it is being committed.

There are two kinds of work. An operation is any function on the transaction; it runs within a
savepoint, so that one that fails leaves the others as they are. Requests of the same `Batch`
function that stand next to each other are handed to it together, and it answers each by itself.

An operation may be run twice: when the connection is lost while it commits, nobody can tell
whether it was. So what is submitted must recognise its own work, as by an id that the caller made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from headgate.databases.transaction import Database, LostTransactionError, Transaction
from headgate.errors import LedgerUnavailableError

Answer = TypeVar("Answer")
Request = TypeVar("Request")

Batch = Callable[[Transaction, Sequence[Request]], Sequence[Answer | Exception]]
"""Applies requests in their order, and returns an answer or an exception for each of them."""

MAX_BATCH = 512
MAX_QUEUED = 16_384
TRIES = 2
CLOSE_SECONDS = 5.0


class _Job:
    """One operation, or one request of a batch, with the caller that waits for its answer."""

    __slots__ = ("answer", "batch", "error", "future", "work")

    def __init__(self, work: Any, batch: Batch[Any, Any] | None) -> None:  # noqa: ANN401
        self.work = work
        self.batch = batch
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.answer: Any = None
        self.error: BaseException | None = None


class GroupCommitWriter:
    """One thread that writes for all event loops of this process."""

    def __init__(
        self,
        database: Database,
        *,
        max_batch: int = MAX_BATCH,
        max_queued: int = MAX_QUEUED,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._database = database
        self._max_batch = max_batch
        self._max_queued = max_queued
        self._close_seconds = close_seconds
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left_behind: threading.Thread | None = None
        # Nothing may be queued behind the mark that ends the thread: it would wait for ever.
        self._closing = threading.Lock()

    def start(self) -> None:
        """Start the thread, if it does not run."""
        # Two threads on one connection would end each other's transactions.
        if self._left_behind is not None and self._left_behind.is_alive():
            problem = "the database has not answered since the last close; try again later"
            raise LedgerUnavailableError(problem)
        if self._thread is None:
            self._queue = SimpleQueue()
            self._thread = threading.Thread(
                target=self._run, args=(self._queue,), name="headgate-writer", daemon=True
            )
            self._thread.start()

    async def close(self) -> None:
        """Finish what is queued, and end the thread.

        A database that hangs is waited for only so long. Then the thread is left behind: it ends
        when the database answers, or with the process.
        """
        with self._closing:
            thread, self._thread = self._thread, None
            self._queue.put(None)
        if thread is not None:
            self._left_behind = thread
            await asyncio.to_thread(thread.join, self._close_seconds)

    def submit(self, operation: Callable[[Transaction], Answer]) -> asyncio.Future[Answer]:
        """Run an operation in the next transaction; its answer comes when that is on disk."""
        return self._enqueue(_Job(operation, None))

    def submit_request(
        self, batch: Batch[Request, Answer], request: Request
    ) -> asyncio.Future[Answer]:
        """Hand a request to its batch function together with those beside it."""
        return self._enqueue(_Job(request, batch))

    def _enqueue(self, job: _Job) -> asyncio.Future[Any]:
        with self._closing:
            if self._thread is None:
                raise LedgerUnavailableError("the ledger is closed; open it again")
            if not self._thread.is_alive():
                # A fork takes the object along but not its thread, and nobody would answer.
                problem = "the ledger was opened in another process; open one in this process"
                raise LedgerUnavailableError(problem)
            if self._queue.qsize() >= self._max_queued:
                problem = f"{self._max_queued} calls wait already; try again later"
                raise LedgerUnavailableError(problem)
            self._queue.put(job)
        return job.future

    def _run(self, queue: SimpleQueue[_Job | None]) -> None:
        is_last = False
        while not is_last:
            jobs, is_last = self._take(queue)
            if jobs:
                self._perform(jobs)
                _answer(jobs)
        self._database.close()

    def _take(self, queue: SimpleQueue[_Job | None]) -> tuple[list[_Job], bool]:
        jobs: list[_Job] = []
        job = queue.get()
        while job is not None:
            if not job.future.cancelled():
                jobs.append(job)
            if len(jobs) >= self._max_batch:
                return jobs, False
            try:
                job = queue.get_nowait()
            except Empty:
                return jobs, False
        return jobs, True

    def _perform(self, jobs: list[_Job]) -> None:
        for tries_left in reversed(range(TRIES)):
            try:
                self._perform_once(jobs)
            except LostTransactionError as error:
                self._database.close()
                if not tries_left:
                    _fail(jobs, error)
                    return
            # The thread must outlive whatever an operation does; its callers get the error.
            except BaseException as error:  # noqa: BLE001
                self._database.rollback()
                _fail(jobs, error)
                return
            else:
                return

    def _perform_once(self, jobs: list[_Job]) -> None:
        transaction = self._database.begin()
        for batch, group in groupby(jobs, key=lambda job: job.batch):
            if batch is None:
                for job in group:
                    _run_operation(transaction, job)
            else:
                _run_batch(transaction, batch, list(group))
        self._database.commit()


def _run_operation(transaction: Transaction, job: _Job) -> None:
    job.error = None
    try:
        with transaction.savepoint():
            job.answer = job.work(transaction)
    except LedgerUnavailableError:
        raise
    except StopIteration as error:
        # A future cannot carry this one, and the callers after it would never be answered.
        job.error = RuntimeError(f"an operation raised {error!r}")
    except Exception as error:  # noqa: BLE001
        job.error = error


def _run_batch(transaction: Transaction, batch: Batch[Any, Any], jobs: list[_Job]) -> None:
    answers = batch(transaction, [job.work for job in jobs])
    for job, answer in zip(jobs, answers, strict=True):
        is_error = isinstance(answer, Exception)
        job.answer, job.error = (None, answer) if is_error else (answer, None)


def _fail(jobs: list[_Job], error: BaseException) -> None:
    for job in jobs:
        job.error = error


def _answer(jobs: list[_Job]) -> None:
    waiting: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in jobs:
        waiting.setdefault(job.future.get_loop(), []).append(job)
    for loop, its_jobs in waiting.items():
        # A loop that was closed meanwhile has nobody left who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_deliver, its_jobs)


def _deliver(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is None:
            job.future.set_result(job.answer)
        else:
            job.future.set_exception(job.error)
