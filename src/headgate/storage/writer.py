"""The group-commit writer: everything that waits is put into one transaction.

A commit that is safe on disk costs the same for one change as for hundreds. So callers hand their
operations to one thread, which takes all that are queued, runs them in one transaction, commits,
and then answers all of them. Nobody waits for a batch to fill up: it fills while the one before
it is being committed.

What renews a lease goes first. However many calls are queued, it is in the next transaction;
otherwise a node under load would lose its lease, and with it all that it runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from enum import Enum
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from headgate.errors import LedgerUnavailableError
from headgate.storage.transaction import Database, LostTransactionError, Transaction

# Work for a database: how a batch of it is put into one transaction, and how it is answered.
#
# There are two kinds of work. An operation is any function on the transaction; it runs within a
# savepoint, so that one that fails leaves the others as they are. Requests of the same `Batch`
# function that stand next to each other are handed to it together, and it answers each by itself.
# If it raises, nothing of the transaction counts, and it is run again in two halves: a request
# that no database takes fails alone in the end.
#
# An operation may be run twice: when the connection is lost while it commits, nobody can tell
# whether it was. So what is submitted must recognise its own work, as by an id that the caller
# made.

Answer = TypeVar("Answer")
Request = TypeVar("Request")

Batch = Callable[[Transaction, Sequence[Request]], Sequence[Answer | Exception]]
"""Applies requests in their order, and returns an answer or an exception for each of them."""

MAX_BATCH = 512
MAX_QUEUED = 16_384
TRIES = 2


class Job:
    """One operation, or one request of a batch, and what came of it.

    `note` is for whoever carries jobs to another process.
    """

    __slots__ = ("answer", "batch", "error", "note", "work")

    def __init__(self, work: Any, batch: Batch[Any, Any] | None = None) -> None:  # noqa: ANN401
        self.work = work
        self.batch = batch
        self.note: Any = None
        self.answer: Any = None
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        # A future cannot carry this one, and the callers after it would never be answered.
        is_stop = isinstance(error, StopIteration)
        self.error = RuntimeError(f"an operation raised {error!r}") if is_stop else error


def perform(database: Database, jobs: Sequence[Job], *, tries: int = TRIES) -> None:
    """Run jobs in one transaction, once more if it got lost; each has an answer or an error."""
    try:
        _perform_once(database, jobs)
    except LostTransactionError as error:
        database.close()
        if tries > 1:
            perform(database, jobs, tries=tries - 1)
        else:
            _fail(jobs, error)
    # Whoever runs the jobs must outlive whatever they do; their callers get the error.
    except BaseException as error:  # noqa: BLE001
        database.rollback()
        _fail_or_part(database, jobs, error)


def _perform_once(database: Database, jobs: Sequence[Job]) -> None:
    transaction = database.begin()
    for batch, group in groupby(jobs, key=lambda job: job.batch):
        if batch is None:
            for job in group:
                _run_operation(transaction, job)
        else:
            _run_batch(transaction, batch, list(group))
    database.commit()


def _fail_or_part(database: Database, jobs: Sequence[Job], error: BaseException) -> None:
    """Fail the jobs; but if one of them may have spoilt the others, find out which."""
    is_shared = isinstance(error, LedgerUnavailableError) or not isinstance(error, Exception)
    if is_shared or len(jobs) == 1:
        _fail(jobs, error)
        return
    half = len(jobs) // 2
    perform(database, jobs[:half])
    perform(database, jobs[half:])


def _run_operation(transaction: Transaction, job: Job) -> None:
    job.error = None
    try:
        with transaction.savepoint():
            job.answer = job.work(transaction)
    except LedgerUnavailableError:
        raise
    except Exception as error:  # noqa: BLE001
        job.fail(error)


def _run_batch(transaction: Transaction, batch: Batch[Any, Any], jobs: list[Job]) -> None:
    answers = batch(transaction, [job.work for job in jobs])
    for job, its_answer in zip(jobs, answers, strict=True):
        is_error = isinstance(its_answer, Exception)
        job.answer, job.error = (None, its_answer) if is_error else (its_answer, None)


def _fail(jobs: Sequence[Job], error: BaseException) -> None:
    for job in jobs:
        job.fail(error)


# Jobs that somebody in an event loop waits for, and how they are answered.


class Writer(Protocol):
    """Takes work for a database from an event loop; its answer comes when it is on disk."""

    @property
    def queue_length(self) -> int:
        """How many calls wait for the next transaction."""

    def start(self) -> None:
        """Begin to take work."""

    async def close(self) -> None:
        """Finish what is queued, and take no more."""

    def submit(
        self, operation: Callable[[Transaction], Answer], *, goes_first: bool = False
    ) -> asyncio.Future[Answer]:
        """Run an operation in the next transaction, before all others if it `goes_first`."""

    def submit_request(
        self, batch: Batch[Request, Answer], request: Request
    ) -> asyncio.Future[Answer]:
        """Hand a request to its batch function together with those beside it."""


class Awaited(Job):
    """A job with the caller that waits for its answer, in the event loop that runs."""

    __slots__ = ("future",)

    def __init__(self, work: Any, batch: Batch[Any, Any] | None = None) -> None:  # noqa: ANN401
        super().__init__(work, batch)
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


def answer(jobs: Iterable[Awaited]) -> None:
    """Have each loop tell its callers what came of their jobs."""
    waiting: dict[asyncio.AbstractEventLoop, list[Awaited]] = {}
    for job in jobs:
        waiting.setdefault(job.future.get_loop(), []).append(job)
    for loop, its_jobs in waiting.items():
        # A loop that was closed meanwhile has nobody left who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(deliver, its_jobs)


def deliver(jobs: Iterable[Awaited]) -> None:
    """Tell callers of this loop what came of their jobs."""
    for job in jobs:
        if job.future.done():
            continue
        if job.error is None:
            job.future.set_result(job.answer)
        else:
            job.future.set_exception(job.error)


CLOSE_SECONDS = 5.0
MAX_FIRST = 1_024


class _Look(Enum):
    """Stands in the queue for a job that is beside it, so that the thread wakes up."""

    FIRST = "first"


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
        self._queue: SimpleQueue[Awaited | _Look | None] = SimpleQueue()
        self._first: deque[Awaited] = deque()
        self._thread: threading.Thread | None = None
        self._left_behind: threading.Thread | None = None
        # Nothing may be queued behind the mark that ends the thread: it would wait for ever.
        self._closing = threading.Lock()

    @property
    def queue_length(self) -> int:
        """How many calls wait for the next transaction."""
        return self._queue.qsize()

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

    def submit(
        self, operation: Callable[[Transaction], Answer], *, goes_first: bool = False
    ) -> asyncio.Future[Answer]:
        """Run an operation in the next transaction; its answer comes when that is on disk."""
        job = Awaited(operation)
        return self._enqueue_first(job) if goes_first else self._enqueue(job)

    def submit_request(
        self, batch: Batch[Request, Answer], request: Request
    ) -> asyncio.Future[Answer]:
        """Hand a request to its batch function together with those beside it."""
        return self._enqueue(Awaited(request, batch))

    def _enqueue(self, job: Awaited) -> asyncio.Future[Any]:
        with self._closing:
            self._refuse_unless_open()
            _refuse_if_full(self._queue.qsize(), self._max_queued)
            self._queue.put(job)
        return job.future

    def _enqueue_first(self, job: Awaited) -> asyncio.Future[Any]:
        with self._closing:
            self._refuse_unless_open()
            _refuse_if_full(len(self._first), MAX_FIRST)
            self._first.append(job)
            self._queue.put(_Look.FIRST)
        return job.future

    def _refuse_unless_open(self) -> None:
        if self._thread is None:
            raise LedgerUnavailableError("the database is closed; open it again")
        if not self._thread.is_alive():
            # A fork takes the object along but not its thread, and nobody would answer.
            problem = "the database was opened in another process; open it in this process"
            raise LedgerUnavailableError(problem)

    def _run(self, queue: SimpleQueue[Awaited | _Look | None]) -> None:
        is_last = False
        while not is_last:
            jobs, is_last = self._take(queue)
            if jobs:
                perform(self._database, jobs)
                answer(jobs)
        self._database.close()

    def _take(self, queue: SimpleQueue[Awaited | _Look | None]) -> tuple[list[Awaited], bool]:
        job = queue.get()
        jobs = self._take_first()
        while job is not None:
            if isinstance(job, Awaited) and not job.future.cancelled():
                jobs.append(job)
            if len(jobs) >= self._max_batch:
                return jobs, False
            try:
                job = queue.get_nowait()
            except Empty:
                return jobs, False
        return jobs, True

    def _take_first(self) -> list[Awaited]:
        # As many as there are now: others may be added meanwhile.
        taken = [self._first.popleft() for _ in range(len(self._first))]
        return [job for job in taken if not job.future.cancelled()]


def _refuse_if_full(waiting: int, most: int) -> None:
    if waiting >= most:
        problem = f"{most} calls wait already; try again later"
        raise LedgerUnavailableError(problem)


# A writer without a thread: its transactions run between the steps of the event loop.
#
# Work that is submitted before the loop comes round shares one transaction, as behind the thread of
# `GroupCommitWriter`, and is answered in a step of its own. Between the two a simulated host may
# crash: what was committed is kept, and nobody hears of it.
#
# Rule: the writer belongs to no host. Its steps run in an empty context, so that a crash of whoever
# submitted the work neither stops a transaction nor keeps the others from being answered.


class Fault(Enum):
    """What may befall a commit: it is refused, or it is done and the reply gets lost."""

    REFUSED = "refused"
    REPLY_LOST = "reply lost"


Faults = Callable[[], Fault | None]
"""Asked at each commit what is to befall it. A lost transaction is run once more, as always; two
lost replies in a row give the callers an error for what is on disk."""


class InlineWriter:
    """Writes for the callers of one event loop, in that loop."""

    def __init__(
        self,
        database: Database,
        *,
        faults: Faults | None = None,
        reply_seconds: Callable[[], float] | None = None,
        max_batch: int = MAX_BATCH,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self._database = database if faults is None else FaultyDatabase(database, faults)
        self._reply_seconds = reply_seconds
        self._max_batch = max_batch
        self._max_queued = max_queued
        self._is_open = False
        self._queue: list[Awaited] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def queue_length(self) -> int:
        """How many calls wait for the next transaction."""
        return len(self._queue)

    def start(self) -> None:
        """Begin to take work."""
        self._is_open = True

    async def close(self) -> None:
        """Run what is queued, and take no more."""
        self._is_open = False
        while self._queue:
            self._write()
        self._database.close()

    def submit(
        self, operation: Callable[[Transaction], Answer], *, goes_first: bool = False
    ) -> asyncio.Future[Answer]:
        """Run an operation in the next transaction, before all others if it `goes_first`."""
        job = Awaited(operation)
        return self._enqueue(job, 0 if goes_first else len(self._queue))

    def submit_request(
        self, batch: Batch[Request, Answer], request: Request
    ) -> asyncio.Future[Answer]:
        """Hand a request to its batch function together with those beside it."""
        return self._enqueue(Awaited(request, batch), len(self._queue))

    def _enqueue(self, job: Awaited, place: int) -> asyncio.Future[Any]:
        if not self._is_open:
            raise LedgerUnavailableError("the database is closed; open it again")
        if len(self._queue) >= self._max_queued:
            problem = f"{self._max_queued} calls wait already; try again later"
            raise LedgerUnavailableError(problem)
        loop = job.future.get_loop()
        if loop is not self._loop:
            # Whoever submitted to a loop that is over waits no more.
            self._queue, self._loop = [], loop
        if not self._queue:
            loop.call_soon(self._run, context=Context())
        self._queue.insert(place, job)
        return job.future

    def _run(self) -> None:
        if self._queue:
            self._write()
        if self._queue and self._loop is not None:
            self._loop.call_soon(self._run, context=Context())

    def _write(self) -> None:
        taken, self._queue = self._queue[: self._max_batch], self._queue[self._max_batch :]
        jobs = [job for job in taken if not job.future.cancelled()]
        if jobs:
            self._perform(jobs)
            self._answer(jobs)

    def _perform(self, jobs: list[Awaited]) -> None:
        perform(self._database, jobs)

    def _answer(self, jobs: Sequence[Awaited]) -> None:
        loop = jobs[0].future.get_loop()
        if self._reply_seconds is None:
            loop.call_soon(_deliver, jobs, context=Context())
        else:
            loop.call_later(self._reply_seconds(), _deliver, jobs, context=Context())


class FaultyDatabase:
    """A database whose commits fail when they are told to."""

    def __init__(self, database: Database, faults: Faults) -> None:
        self._database = database
        self._faults = faults

    def begin(self) -> Transaction:
        """Open a transaction."""
        return self._database.begin()

    def commit(self) -> None:
        """End the transaction, unless a fault is due."""
        fault = self._faults()
        if fault is Fault.REFUSED:
            raise LedgerUnavailableError("the commit was refused; try again later")
        self._database.commit()
        if fault is Fault.REPLY_LOST:
            raise LostTransactionError("the reply to the commit got lost")

    def rollback(self) -> None:
        """Undo the transaction, if there is one."""
        self._database.rollback()

    def close(self) -> None:
        """Let go of the connection."""
        self._database.close()


def _deliver(jobs: Sequence[Awaited]) -> None:
    deliver(jobs)
    for job in jobs:
        # Marks an error as seen: a caller that has crashed meanwhile will never look at it.
        if job.future.done() and not job.future.cancelled():
            job.future.exception()
