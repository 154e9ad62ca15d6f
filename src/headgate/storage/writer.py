"""The writer of a database, in a thread, in the event loop or in a process, and its readers.

Everything that waits is put into one transaction.

A commit that is safe on disk costs the same for one change as for hundreds. So callers hand their
operations to one thread, which takes all that are queued, runs them in one transaction, commits,
and then answers all of them. Nobody waits for a batch to fill up: it fills while the one before
it is being committed, and while another process has the lock.

What renews a lease goes first. However many calls are queued, it is in the next transaction;
otherwise a node under load would lose its lease, and with it all that it runs. And it is repeated
here while the event loop that should ask for it is busy with something else.
"""

from __future__ import annotations

import asyncio
import copyreg
import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from enum import Enum
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import groupby
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from headgate.core.idempotency import KeyRefusal
from headgate.core.retries import Backoff
from headgate.core.task import Submission, TaskRecord
from headgate.errors import (
    HeadgateError,
    LedgerUnavailableError,
    StaleEpochError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from headgate.redaction import hide_process
from headgate.storage.store import (
    NOT_SHOWN,
    Assigned,
    CancelAnswer,
    Cancellation,
    KeyedAnswer,
    KeyedSubmit,
    NewTask,
    NotAssigned,
    Plan,
    Queued,
    Settled,
    Settlement,
    StaleLease,
    TurnedAway,
    UnknownParent,
)
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


class NotTakenError(Exception):
    """What came meanwhile could not be taken: some of it may be lost, and nothing is sure."""


class Job:
    """One operation, or one request of a batch, and what came of it."""

    __slots__ = ("answer", "batch", "error", "work")

    def __init__(self, work: Any, batch: Batch[Any, Any] | None = None) -> None:  # noqa: ANN401
        self.work = work
        self.batch = batch
        self.answer: Any = None
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        # A future cannot carry this one, and the callers after it would never be answered.
        is_stop = isinstance(error, StopIteration)
        self.error = RuntimeError(f"an operation raised {error!r}") if is_stop else error


def perform(
    database: Database,
    jobs: list[Job],
    *,
    tries: int = TRIES,
    was_full: bool = False,
    more: Callable[[int], Sequence[Job]] | None = None,
) -> None:
    """Run jobs in one transaction, once more if it got lost; each has an answer or an error.

    `more` returns what came while others wrote, in addition to so many jobs; the list takes it in.
    """
    try:
        _perform_once(database, jobs, more)
    except LostTransactionError as error:
        database.close()
        if tries > 1:
            perform(database, jobs, tries=tries - 1)
        else:
            _fail(jobs, error)
    except StoreFullError as error:
        database.rollback()
        # At the second look new work is refused. If it still does not fit, what was kept back for
        # this is enough to end tasks and to delete some.
        if tries > 1 and not was_full:
            perform(database, jobs, tries=tries, was_full=True)
        elif tries > 1 and database.make_room():
            perform(database, jobs, tries=tries - 1, was_full=True)
        else:
            _fail(jobs, error)
    except NotTakenError:
        database.rollback()
        raise
    # Whoever runs the jobs must outlive whatever they do; their callers get the error.
    except BaseException as error:  # noqa: BLE001
        database.rollback()
        _fail_or_part(database, jobs, error)


def _perform_once(
    database: Database, jobs: list[Job], more: Callable[[int], Sequence[Job]] | None
) -> None:
    transaction = database.begin()
    if more is not None and database.wait_turn():
        try:
            jobs += more(len(jobs))
        except Exception as error:
            raise NotTakenError(repr(error)) from error
    is_alone = len(jobs) == 1
    for batch, group in groupby(jobs, key=lambda job: job.batch):
        if batch is None and is_alone:
            # Beside nothing else it needs no savepoint: if it fails, all of the transaction does.
            jobs[0].error = None
            jobs[0].answer = jobs[0].work(transaction)
        elif batch is None:
            for job in group:
                _run_operation(transaction, job)
        else:
            _run_batch(transaction, batch, list(group))
    database.commit()


def _fail_or_part(database: Database, jobs: list[Job], error: BaseException) -> None:
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


# Standing orders: what is repeated here while the event loop that gave them is busy.
#
# A loop that is held up, by requests or by a call that keeps the interpreter, cannot renew leases.
# So it leaves the order to do so with its writer, anew with each sign of life that it gives. While
# those come in time nothing is repeated. Rule: a loop that gives no sign for `longest_seconds`, or
# whose process was stopped, is not spoken for.


class StandingOrder(NamedTuple):
    """An operation to be repeated; nobody is told what came of it."""

    operation: Callable[[Transaction], object]
    every_seconds: float
    longest_seconds: float


_LOOKS = 4
"""How often a process that waits looks at an order, within the time of one repetition."""


class _Kept:
    """A standing order, when the loop that gave it was last heard, and when it is due."""

    __slots__ = ("due_at", "ends_at", "order")

    def __init__(self, order: StandingOrder, now: float) -> None:
        self.order = order
        self.due_at = now + order.every_seconds
        self.ends_at = now + order.longest_seconds


class OrderBook:
    """The standing orders of one event loop, kept by whoever writes for it."""

    def __init__(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._is_stopped = is_stopped
        # Another thread may replace them at any moment, all at once.
        self._kept: tuple[_Kept, ...] = ()

    def take(self, orders: Sequence[StandingOrder]) -> None:
        """Replace all orders; this is a sign of the loop."""
        now = time.monotonic()
        self._kept = tuple([_Kept(order, now) for order in orders])

    @property
    def look_seconds(self) -> float:
        """How often somebody should look whether an order is due; 0 if there are none."""
        return min((one.order.every_seconds for one in self._kept), default=0.0) / _LOOKS

    def seconds_left(self) -> float | None:
        """Return how long nothing is due; None if nothing will be before the loop is heard."""
        times = [one.due_at for one in self._kept if one.due_at <= one.ends_at]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def due(self) -> list[Job]:
        """Return what is to be done now, and count it as done."""
        now = time.monotonic()
        due = [one for one in self._kept if one.due_at <= min(now, one.ends_at)]
        for one in due:
            one.due_at = now + one.order.every_seconds
        return [] if due and self._is_stopped() else [Job(one.order.operation) for one in due]


# Who asks for something: those who do take turns, so that one who asks for much keeps the others
# waiting for a part of it at most.

ALONE_SECONDS = 1.0
"""Who else has asked for something lately is not alone."""

asker: ContextVar[str] = ContextVar("asker", default="")
"""For whom something is asked; empty is the service itself."""


@contextmanager
def for_the_service() -> Iterator[None]:
    """Ask for the service itself: for what keeps others waiting until it is there.

    Rule: so few of it is under way at a time that nobody fills transactions with it.
    """
    before = asker.set("")
    try:
        yield
    finally:
        asker.reset(before)


class Askers:
    """Who asked for something last, and who did before that."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest = self._other = ("", -ALONE_SECONDS)

    def note(self, who: str) -> None:
        """Note that somebody asks for something."""
        if who != self._latest[0]:
            self._other = self._latest
        self._latest = (who, self._clock())

    def is_alone(self, who: str) -> bool:
        """Tell whether nobody else has asked for anything lately."""
        others = self._other if self._latest[0] == who else self._latest
        return self._clock() - others[1] >= ALONE_SECONDS


askers = Askers()
"""The callers of this process."""


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

    def keep(self, orders: Sequence[StandingOrder]) -> None:
        """Repeat these and no others while this loop is busy; each call is a sign of it."""


class Awaited(Job):
    """A job with whoever asks for it, and waits for its answer in the event loop that runs."""

    __slots__ = ("future", "who")

    def __init__(self, work: Any, batch: Batch[Any, Any] | None = None) -> None:  # noqa: ANN401
        super().__init__(work, batch)
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.who = asker.get()


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


class _Wake(Enum):
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
        self._queue: SimpleQueue[Awaited | _Wake | None] = SimpleQueue()
        self._first: deque[Awaited] = deque()
        self._orders = OrderBook()
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
            self._queue, self._orders = SimpleQueue(), OrderBook()
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

    def keep(self, orders: Sequence[StandingOrder]) -> None:
        """Repeat these and no others while this loop is busy; each call is a sign of it."""
        self._orders.take(orders)
        self._queue.put(_Wake.FIRST)

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
            self._queue.put(_Wake.FIRST)
        return job.future

    def _refuse_unless_open(self) -> None:
        if self._thread is None:
            raise LedgerUnavailableError("the database is closed; open it again")
        if not self._thread.is_alive():
            # A fork takes the object along but not its thread, and nobody would answer.
            problem = "the database was opened in another process; open it in this process"
            raise LedgerUnavailableError(problem)

    def _run(self, queue: SimpleQueue[Awaited | _Wake | None]) -> None:
        is_last = False
        while not is_last:
            jobs, is_last = self._take(queue)
            due = self._orders.due()
            if due or jobs:
                together = [*due, *jobs]
                perform(self._database, together, more=partial(self._take_more, queue))
                answer([job for job in together if isinstance(job, Awaited)])
        self._database.close()

    def _take(self, queue: SimpleQueue[Awaited | _Wake | None]) -> tuple[list[Awaited], bool]:
        try:
            job = queue.get(timeout=self._orders.seconds_left())
        except Empty:
            return [], False
        jobs = self._take_first()
        if job is None:
            return jobs, True
        if isinstance(job, Awaited) and not job.future.cancelled():
            jobs.append(job)
        return jobs + self._take_more(queue, len(jobs)), False

    def _take_more(self, queue: SimpleQueue[Awaited | _Wake | None], taken: int) -> list[Awaited]:
        """Return what is queued, in addition to so many jobs; the mark of the end stays there."""
        jobs = self._take_first()
        while taken + len(jobs) < self._max_batch:
            try:
                job = queue.get_nowait()
            except Empty:
                break
            if job is None:
                queue.put(None)
                break
            if isinstance(job, Awaited) and not job.future.cancelled():
                jobs.append(job)
        return jobs

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

    def keep(self, orders: Sequence[StandingOrder]) -> None:
        """Repeat nothing: while the loop is busy nothing is written here."""

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
        perform(self._database, [*jobs])

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

    def wait_turn(self) -> bool:
        """Wait until nobody else writes."""
        return self._database.wait_turn()

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

    def make_room(self) -> bool:
        """Free what was kept back for a full disk."""
        return self._database.make_room()


def _deliver(jobs: Sequence[Awaited]) -> None:
    deliver(jobs)
    for job in jobs:
        # Marks an error as seen: a caller that has crashed meanwhile will never look at it.
        if job.future.done() and not job.future.cancelled():
            job.future.exception()


# Readers: a few threads that look things up while the writer writes.
#
# A long list must not keep anybody from writing, and nobody who reads needs the writer's lock. Each
# thread has a connection of its own that can only read; it connects with the first question, and
# again after a loss. An answer has everything in it that was acknowledged before the question.

# Those who ask take turns: hundreds of long lists of one caller keep another's question waiting for
# one of them.

MAX_READERS = 2
MAX_QUESTIONS = 1_024
SHARE_OF_QUESTIONS = 8
"""How many times as many questions as there is room for one asker may have waiting."""

READER_PAUSES = 2
"""How many times as long as a question took its asker waits for the next answer, beside others.

A long list costs the database as much as the dispatcher has in seconds, and a server shares its
processors between all who ask. So one caller has at most one reader at a time, for a third of its
time; one that is alone has all of them.
"""


class Questions:
    """Questions that wait, by asker; each asker in turn has one of its own answered."""

    def __init__(
        self, callers: Askers = askers, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._callers = callers
        self._clock = clock
        self._changed = threading.Condition()
        self._by_asker: dict[str, deque[Awaited]] = {}
        self._turns: deque[str] = deque()
        self._asked: dict[str, int] = {}
        self._paused_until: dict[str, float] = {}
        self._waiting = 0
        self._ends = 0

    def __len__(self) -> int:
        return self._waiting

    def of(self, who: str) -> int:
        """Return how many questions of an asker wait."""
        return len(self._by_asker.get(who, ()))

    def put(self, who: str, job: Awaited) -> None:
        """Have a question answered."""
        with self._changed:
            waiting = self._by_asker.get(who)
            if waiting is None:
                waiting = self._by_asker[who] = deque()
                self._turns.append(who)
            waiting.append(job)
            self._waiting += 1
            self._changed.notify()

    def end(self) -> None:
        """Have one thread end when everything that waits by now is answered."""
        with self._changed:
            self._ends += 1
            self._changed.notify()

    def get(self) -> tuple[str, Awaited] | None:
        """Wait for the next question, and who asks it; None is the end."""
        with self._changed:
            while True:
                who, seconds = self.turn()
                if who is not None:
                    return who, self._taken(who)
                if self._ends and not self._waiting:
                    self._ends -= 1
                    return None
                self._changed.wait(seconds)

    def answered(self, who: str, seconds: float) -> None:
        """Note how long a question has taken a reader."""
        with self._changed:
            self._asked[who] -= 1
            if not self._asked[who]:
                del self._asked[who]
            if who and not self._ends and not self._callers.is_alone(who):
                now = self._clock()
                self._paused_until[who] = now + READER_PAUSES * seconds
                if len(self._paused_until) > MAX_QUESTIONS:
                    self._paused_until = {
                        each: until for each, until in self._paused_until.items() if until > now
                    }
            self._changed.notify()

    def turn(self) -> tuple[str | None, float | None]:
        """Return whose turn it is, or in how many seconds it may be somebody's."""
        now, soonest = self._clock(), None
        for who in self._turns:
            left = self._paused_until.get(who, 0.0) - now
            if self._ends or not who or (left <= 0 and not self._is_served(who)):
                return who, None
            if left > 0:
                soonest = left if soonest is None else min(soonest, left)
        return None, soonest

    def _is_served(self, who: str) -> bool:
        return who in self._asked and not self._callers.is_alone(who)

    def _taken(self, who: str) -> Awaited:
        self._turns.remove(who)
        waiting = self._by_asker[who]
        job = waiting.popleft()
        if waiting:
            self._turns.append(who)
        else:
            del self._by_asker[who]
        self._waiting -= 1
        self._asked[who] = self._asked.get(who, 0) + 1
        return job


class ReaderPool:
    """Threads that answer questions for all event loops of this process."""

    def __init__(
        self,
        make_reader: Callable[[], Database],
        *,
        most: int = MAX_READERS,
        max_queued: int = MAX_QUESTIONS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._make_reader = make_reader
        self._most = most
        self._max_queued = max_queued
        self._close_seconds = close_seconds
        self._questions = Questions()
        self._threads: list[threading.Thread] = []
        # Nothing may be queued behind the marks that end the threads: it would wait for ever.
        self._closing = threading.Lock()

    def start(self) -> None:
        """Start the threads, if they do not run."""
        if self._threads:
            return
        # Threads that hang since the last close keep their queue, and end when they are answered.
        self._questions = Questions()
        self._threads = [self._thread(number) for number in range(self._most)]
        for thread in self._threads:
            thread.start()

    async def close(self) -> None:
        """Answer what was asked, and end the threads; one that hangs is left behind."""
        with self._closing:
            threads, self._threads = self._threads, []
            for _ in threads:
                self._questions.end()
        joins = [asyncio.to_thread(thread.join, self._close_seconds) for thread in threads]
        await asyncio.gather(*joins)

    def submit(self, question: Callable[[Transaction], Answer]) -> asyncio.Future[Answer]:
        """Ask a question of what has been committed; it may be asked twice, if no reply comes."""
        job, who = Awaited(question), asker.get()
        with self._closing:
            self._refuse_unless_open(who)
            self._questions.put(who, job)
        return job.future

    def _refuse_unless_open(self, who: str) -> None:
        if not self._threads:
            raise StoreUnavailableError("the database is closed; open it again")
        if not self._threads[0].is_alive():
            # A fork takes the object along but not its threads, and nobody would answer.
            problem = "the database was opened in another process; open it in this process"
            raise StoreUnavailableError(problem)
        waiting = len(self._questions)
        if self._questions.of(who) >= SHARE_OF_QUESTIONS * (self._max_queued - waiting):
            problem = f"{waiting} questions wait, of at most {self._max_queued}; try again later"
            raise StoreUnavailableError(problem)

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(
            target=_answer_questions,
            args=(self._make_reader(), self._questions),
            name=f"headgate-reader-{number}",
            daemon=True,
        )


def _answer_questions(reader: Database, questions: Questions) -> None:
    while (found := questions.get()) is not None:
        who, job = found
        began_at = time.monotonic()
        if not job.future.cancelled():
            _ask(reader, job)
            answer([job])
        questions.answered(who, time.monotonic() - began_at)
    reader.close()


def _ask(reader: Database, job: Awaited, *, tries: int = TRIES) -> None:
    try:
        job.answer = job.work(reader.begin())
        reader.commit()
    except LostTransactionError as error:
        reader.close()
        if tries > 1:
            _ask(reader, job, tries=tries - 1)
        else:
            job.fail(error)
    # The thread must outlive whatever a question does; whoever asked gets the error.
    except BaseException as error:  # noqa: BLE001
        reader.rollback()
        job.fail(error)


# Starts processes that write: one at a time for a writer, and one ahead if that is wanted.
#
# A process needs a moment until it can work. Whoever knows early that one will be needed has it
# started ahead, with the modules that it will use; it waits for its first order, and ends by itself
# if none comes before the program ends.

_PROGRAM = "from headgate.storage.writer import main; main({}, {}, {!r})"


class Child(NamedTuple):
    """A process, and this end of the socket to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


class ChildStarter:
    """Starts processes that keep `inherited` files open, and load `modules` at once."""

    def __init__(self, *, inherited: Sequence[int] = (), modules: Sequence[str] = ()) -> None:
        self._inherited = tuple(inherited)
        self._modules = tuple(modules)
        self._ahead: Child | None = None

    def start_ahead(self) -> None:
        """Start a process for whoever asks next."""
        self._ahead = self._start()

    def start(self) -> Child:
        """Return a process that waits for its first order."""
        child, self._ahead = self._ahead, None
        return self._start() if child is None else child

    def _start(self) -> Child:
        ours, theirs = socket.socketpair()
        try:
            process = self._popen(theirs.fileno())
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return Child(process, ours)

    def _popen(self, descriptor: int) -> subprocess.Popen[bytes]:
        program = _PROGRAM.format(descriptor, os.getpid(), self._modules)
        # The same modules under the same names, and nothing from the folder that it starts in.
        paths = os.pathsep.join(path for path in sys.path if path)
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            pass_fds=(descriptor, *self._inherited),
            # What a terminal sends to everybody in the foreground is for the parent alone.
            process_group=0,
        )


# Frames on a stream between two processes of this program: a length, then as many bytes.
#
# Both ends are ours, so a frame is taken as it comes; how large one becomes is for the sender. One
# that begins with a zero byte, as no job or answer does, is why a process ends; to the process, it
# has standing orders.

RECEIVE_BYTES = 2**18
LAST_WORDS = STANDING = b"\0"

_LENGTH = struct.Struct("<I")


def framed(payload: bytes) -> bytes:
    """Return a payload as it is sent."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts what has arrived into frames, whatever the pieces were in which it came."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Take a piece in, and return the frames that are complete."""
        arrived = self._arrived
        arrived += piece
        complete: list[bytes] = []
        start = 0
        while len(arrived) - start >= _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(arrived, start)[0]
            if len(arrived) < end:
                break
            complete.append(bytes(arrived[begin:end]))
            start = end
        del arrived[:start]
        return complete


# What a process of its own needs to write for another one: a database, and a language for jobs.
#
# Rule: whatever is sent can be sent again to another process, and means the same there. So a job is
# data, or a function of a module with its arguments bound, and never something that was made on the
# spot.

Asked = TypeVar("Asked", bound=Job)


class Wire(Protocol):
    """How jobs and their answers are written as bytes, and read again."""

    def pack(self, job: Job) -> bytes:
        """Write one job; raise if it cannot be sent."""

    def unpack(self, packed: bytes) -> list[Job]:
        """Read jobs that were packed each by itself, and joined."""

    def pack_answers(self, jobs: Sequence[Job]) -> bytes:
        """Write what came of jobs, in their order."""

    def unpack_answers(self, packed: bytes, jobs: deque[Asked]) -> list[Asked]:
        """Read what came of the first of these jobs, take them out, and return them."""

    def join(self, packed: Sequence[bytes]) -> bytes:
        """Put jobs together that were packed each by itself."""


class WriterSetup(NamedTuple):
    """What is made in the process that writes."""

    database: Database
    wire: Wire


Recipe = Callable[[], WriterSetup]
"""Makes the setup of a writer; it is sent to the process as its first order."""


# Jobs and their answers as bytes, for a writer in a process of its own.
#
# Steps of tasks are many. They and their answers are the store's own structs as JSON, at a tenth of
# what pickling them costs; everything else is rare, and is pickled. Each job has a part of its own
# in a frame: a letter for its kind, a length, then as many bytes. So one that cannot be read, as
# for what a client has sent unread in it, spoils nothing beside it.

_STEP, _PICKLED_STEP, _PICKLED, _ERROR = b"srpe"
_PART = struct.Struct("<BI")

Step = NewTask | KeyedSubmit | Settlement | Cancellation | Plan
Submitted = Queued | TurnedAway | UnknownParent
StepAnswer = (
    Submitted
    | KeyedAnswer
    | KeyRefusal
    | Settled
    | StaleLease
    | CancelAnswer
    | None
    | list[Assigned | NotAssigned]
    | StaleEpochError
)

_encode = msgspec.json.Encoder().encode
_decode_step = msgspec.json.Decoder(Step).decode
_records = msgspec.json.Decoder(TaskRecord)
_decode_answer: dict[type, Callable[[bytes], Any]] = {
    NewTask: msgspec.json.Decoder(Queued | TurnedAway | UnknownParent).decode,
    KeyedSubmit: msgspec.json.Decoder(KeyedAnswer | KeyRefusal).decode,
    Settlement: msgspec.json.Decoder(Settled | StaleLease).decode,
    Cancellation: msgspec.json.Decoder(CancelAnswer | None).decode,
    Plan: msgspec.json.Decoder(list[Assigned | NotAssigned]).decode,
}


class StepWire:
    """The language of jobs on the tables of tasks; `apply` is the batch function of their steps."""

    def __init__(self, apply: Batch[Any, Any]) -> None:
        self._apply = apply

    def pack(self, job: Job) -> bytes:
        """Write one job; raise if it cannot be sent."""
        if job.batch is None:
            return _part(_PICKLED, pickle.dumps(job.work))
        try:
            return _part(_STEP, _encode(job.work))
        except UnicodeEncodeError:
            # What a process has printed may hold what no JSON can.
            return _part(_PICKLED_STEP, pickle.dumps(job.work))

    def join(self, packed: Sequence[bytes]) -> bytes:
        """Put jobs together that were packed each by itself."""
        return b"".join(packed)

    def unpack(self, packed: bytes) -> list[Job]:
        """Read jobs; one that cannot be read fails alone."""
        return [self._job(kind, content) for kind, content in _parts(packed)]

    def pack_answers(self, jobs: Sequence[Job]) -> bytes:
        """Write what came of jobs, in their order."""
        packed = b"".join([_packed_answer(job) for job in jobs])
        for job in jobs:
            # The frames of an error have the jobs, which would keep it and all that they hold.
            job.error = None
        return packed

    def unpack_answers(self, packed: bytes, jobs: deque[Asked]) -> list[Asked]:
        """Read what came of the first of these jobs, take them out, and return them."""
        return [_answered(jobs.popleft(), *part) for part in _parts(packed)]

    def _job(self, kind: int, content: bytes) -> Job:
        if kind == _PICKLED:
            return Job(partial(_run_pickled, content))
        if kind == _PICKLED_STEP:
            return Job(partial(_run_pickled_step, self._apply, content))
        try:
            return Job(_decode_step(content), self._apply)
        except msgspec.MsgspecError as error:
            return Job(partial(_refuse_step, str(error)))


def _part(kind: int, content: bytes) -> bytes:
    return _PART.pack(kind, len(content)) + content


def _parts(packed: bytes) -> list[tuple[int, bytes]]:
    parts: list[tuple[int, bytes]] = []
    start = 0
    while start < len(packed):
        kind, size = _PART.unpack_from(packed, start)
        begin = start + _PART.size
        start = begin + size
        parts.append((kind, packed[begin:start]))
    return parts


def _refuse_step(problem: str, _transaction: Transaction) -> None:
    line = f"a step cannot be read by the process that writes: {problem}"
    raise StoreError(line)


def _run_pickled_step(apply: Batch[Any, Any], content: bytes, transaction: Transaction) -> object:
    answer = apply(transaction, [pickle.loads(content)])[0]  # noqa: S301
    if isinstance(answer, Exception):
        raise answer
    return answer


def _run_pickled(content: bytes, transaction: Transaction) -> object:
    operation: Callable[[Transaction], object] = pickle.loads(content)  # noqa: S301
    return operation(transaction)


def _packed_answer(job: Job) -> bytes:
    try:
        if job.error is not None:
            return _part(_ERROR, pickle.dumps(_with_trace(job.error)))
        if job.batch is None:
            return _part(_PICKLED, _with_records(job.answer))
        try:
            return _part(_STEP, _encode(_without_submission(job.answer)))
        except UnicodeEncodeError:
            return _part(_PICKLED, _with_records(job.answer))
    # The work is done, and only its answer cannot be told.
    except Exception as error:  # noqa: BLE001
        problem = RuntimeError(f"{job.error or error!r}")
        return _part(_ERROR, pickle.dumps(problem))


def _answered(job: Asked, kind: int, content: bytes) -> Asked:
    try:
        if kind == _ERROR:
            job.fail(pickle.loads(content))  # noqa: S301
        elif kind == _PICKLED:
            job.answer = pickle.loads(content)  # noqa: S301
        else:
            answer = _decode_answer[type(job.work)](content)
            job.answer = _with_submission(answer, job.work)
    # An answer that cannot be read is for its caller, and not for those beside it.
    except Exception as error:  # noqa: BLE001
        job.fail(error)
    return job


def _without_submission(answer: StepAnswer) -> StepAnswer:
    """Leave out what tasks were given to do, which may be large: whoever submits has it."""
    if isinstance(answer, KeyedAnswer):
        bare = tuple([_showing(one, NOT_SHOWN) for one in answer.fresh])
        return msgspec.structs.replace(answer, fresh=bare)
    if isinstance(answer, Queued | TurnedAway):
        return _showing(answer, NOT_SHOWN)
    return answer


def _with_submission(answer: StepAnswer, step: Step) -> StepAnswer:
    if isinstance(answer, Queued | TurnedAway) and isinstance(step, NewTask):
        return _showing(answer, step.submission)
    if isinstance(answer, KeyedAnswer) and isinstance(step, KeyedSubmit):
        given = {new.task.id: new.submission for new in step.tasks if isinstance(new, NewTask)}
        whole = [
            one if isinstance(one, UnknownParent) else _showing(one, given[one.record.task.id])
            for one in answer.fresh
        ]
        return msgspec.structs.replace(answer, fresh=tuple(whole))
    return answer


def _showing(answer: Submitted, submission: Submission) -> Submitted:
    if isinstance(answer, UnknownParent):
        return answer
    record = msgspec.structs.replace(answer.record, submission=submission)
    if isinstance(answer, Queued):
        return Queued(record=record, position=answer.position, warning=answer.warning)
    return TurnedAway(record=record, rejected=answer.rejected)


def _with_trace(error: BaseException) -> BaseException:
    """Note where a fault that nobody foresaw has come from: its traceback cannot be sent."""
    if not isinstance(error, HeadgateError):
        lines = "".join(traceback.format_exception(error))
        error.add_note(f"In the process that writes: {lines}")
    return error


class _Pickler(pickle.Pickler):
    """Pickles records as they are sent otherwise; a node that collects its tasks gets many."""

    dispatch_table = copyreg.dispatch_table.copy()


def _reduced(record: TaskRecord) -> str | tuple[Any, ...]:
    try:
        return _record, (_encode(record),)
    except UnicodeEncodeError:
        return record.__reduce__()


def _record(packed: bytes) -> TaskRecord:
    return _records.decode(packed)


_Pickler.dispatch_table[TaskRecord] = _reduced


def _with_records(answer: object) -> bytes:
    file = BytesIO()
    _Pickler(file).dump(answer)
    return file.getvalue()


# What waits for a process that writes.
#
# A transaction locks the ledger, for everybody and on all nodes, so its length is what each of the
# steps waits from a submit to a start. A caller that asks for hundreds of things at a time is in
# all transactions and makes all of them long. So callers that had more than an equal part lately
# have a few jobs in a transaction, and are in one of three, all of them together: a tenant with
# many tokens has no more of the time than one.

SHARE_OF_JOBS = 8
"""How many times as many jobs as there is room for one caller may have waiting."""

WRITER_PAUSES = 2
"""How many times as long as their last transaction took greedy callers wait for the next.

What they ask for meanwhile is in that one, and costs together little more than one job alone. A
caller that is alone waits for nothing.
"""

MAX_JOBS_OF_CALLER = 64
MAX_BYTES_OF_CALLER = 2**18
"""How much of one caller is in a transaction at most, beside others."""

GREEDY_SECONDS = 0.002
MIN_GREEDY_JOBS, MAX_GREEDY_JOBS = 4, 2 * MAX_JOBS_OF_CALLER
"""How many jobs of all greedy callers are in a transaction: as many as take so long together.

The transactions before it tell, since a job costs many times as much on one store as on another.
"""

WRITER_WINDOW_SECONDS = 0.25
"""After so long the time that a caller had counts half."""

_LEAST_SECONDS = 0.000_1


class _Waiting:
    """What a caller waits for: those that go first of its own, the others, and what was sent."""

    __slots__ = ("first", "others", "seconds", "sent")

    def __init__(self) -> None:
        self.first: deque[Awaited] = deque()
        self.others: deque[Awaited] = deque()
        self.sent = 0
        self.seconds = 0.0
        """Its part of the time that transactions took lately."""

    def __len__(self) -> int:
        return len(self.first) + len(self.others)


class JobQueue:
    """Jobs that wait to be sent, by caller; the service itself waits for nobody."""

    def __init__(
        self, callers: Askers = askers, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._callers = callers
        self._clock = clock
        # The caller whose turn it is stands first.
        self._by_caller: dict[str, _Waiting] = {"": _Waiting()}
        self._length = 0
        self._total_seconds = 0.0
        self._recent_callers = 0
        self._window_ends_at = 0.0
        self._greedy_sent: set[str] = set()
        self._greedy_jobs = MAX_GREEDY_JOBS
        self._pause_ends_at = 0.0
        self.is_closing = False
        """Whether nobody is kept waiting any more."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Awaited]:
        for waiting in self._by_caller.values():
            yield from waiting.first
            yield from waiting.others

    @property
    def first(self) -> int:
        """How many jobs of the service itself go first."""
        return len(self._by_caller[""].first)

    def of(self, who: str) -> int:
        """Return how many jobs of a caller wait."""
        return len(self._by_caller.get(who, ()))

    def put(self, job: Awaited, *, goes_first: bool) -> None:
        """Have a job sent, before the others of its caller if it goes first."""
        waiting = self._by_caller.get(job.who)
        if waiting is None:
            waiting = self._by_caller[job.who] = _Waiting()
            self._forget_idle()
        (waiting.first if goes_first else waiting.others).append(job)
        self._length += 1

    def take(self, pack: Callable[[Awaited], bytes | None]) -> list[tuple[Awaited, bytes]]:
        """Return the jobs of the next frame; those that are packed as nothing are left out."""
        frame: list[tuple[Awaited, bytes]] = []
        left_bytes = self._move(self._by_caller[""].first, frame, pack, MAX_BATCH, MAX_FRAME_BYTES)
        now = self._clock()
        turns = [
            (who, waiting)
            for who, waiting in self._by_caller.items()
            if waiting and not self._seconds_left(who, waiting, now)
        ]
        left_greedy = self._greedy_jobs
        for who, waiting in turns:
            if len(frame) >= MAX_BATCH or left_bytes <= 0:
                break
            before = len(frame)
            most, most_bytes = MAX_BATCH, left_bytes
            if not self._is_free(who):
                most = min(most, before + MAX_JOBS_OF_CALLER)
                most_bytes = min(most_bytes, MAX_BYTES_OF_CALLER)
                if self._is_greedy(waiting):
                    most = min(most, before + left_greedy)
                    self._greedy_sent.add(who)
            for jobs in (waiting.first, waiting.others):
                rest = self._move(jobs, frame, pack, most, most_bytes)
                left_bytes -= most_bytes - rest
                most_bytes = rest
            waiting.sent += len(frame) - before
            if len(frame) == before:
                self._greedy_sent.discard(who)
                continue
            if who in self._greedy_sent:
                left_greedy -= len(frame) - before
            # It is the last in turn now.
            self._by_caller[who] = self._by_caller.pop(who)
        return frame

    def answered(self, jobs: Sequence[Awaited], seconds: float) -> None:
        """Note how long jobs that were sent have taken, all of them together."""
        now = self._clock()
        if now >= self._window_ends_at:
            self._begin_window(now)
        part = seconds / max(len(jobs), 1)
        for job in jobs:
            waiting = self._by_caller[job.who]
            waiting.sent -= 1
            if job.who:
                self._recent_callers += not waiting.seconds
                waiting.seconds += part
                self._total_seconds += part
            if not waiting.sent:
                self._greedy_sent.discard(job.who)
        if any(self._is_greedy(self._by_caller[who]) for who in {job.who for job in jobs}):
            self._pause_ends_at = now + WRITER_PAUSES * seconds
            fitting = GREEDY_SECONDS / max(part, _LEAST_SECONDS / MAX_GREEDY_JOBS)
            self._greedy_jobs = int(min(max(fitting, MIN_GREEDY_JOBS), MAX_GREEDY_JOBS))

    def seconds_left(self) -> float | None:
        """Return when it is the turn of somebody who waits; None if that is after an answer."""
        now = self._clock()
        left = [
            self._seconds_left(who, waiting, now)
            for who, waiting in self._by_caller.items()
            if waiting
        ]
        soonest = min(left, default=inf)
        return None if soonest == inf else soonest

    def drain(self) -> list[Awaited]:
        """Take everything out."""
        jobs = list(self)
        for waiting in self._by_caller.values():
            waiting.first.clear()
            waiting.others.clear()
        self._length = 0
        return jobs

    def _is_free(self, who: str) -> bool:
        return not who or self.is_closing or self._callers.is_alone(who)

    def _seconds_left(self, who: str, waiting: _Waiting, now: float) -> float:
        """Return for how long a caller has no turn."""
        if self._is_free(who):
            return 0.0
        if waiting.sent:
            return inf
        if not self._is_greedy(waiting):
            return 0.0
        return inf if self._greedy_sent else max(0.0, self._pause_ends_at - now)

    def _is_greedy(self, waiting: _Waiting) -> bool:
        """Tell whether a caller had more than an equal part of what callers had lately.

        One that had all of it is greedy: what the service does for others is not counted.
        """
        return waiting.seconds * max(self._recent_callers, 2) > self._total_seconds * 1.001

    def _begin_window(self, now: float) -> None:
        """Let what callers had count half, and forget what is next to nothing."""
        part = 0.5 ** min(1 + (now - self._window_ends_at) // WRITER_WINDOW_SECONDS, 64)
        for waiting in self._by_caller.values():
            had = waiting.seconds * part
            waiting.seconds = had if had >= _LEAST_SECONDS else 0.0
        recent = [one.seconds for one in self._by_caller.values() if one.seconds]
        self._total_seconds, self._recent_callers = sum(recent), len(recent)
        self._window_ends_at = now + WRITER_WINDOW_SECONDS

    def _move(
        self,
        jobs: deque[Awaited],
        frame: list[tuple[Awaited, bytes]],
        pack: Callable[[Awaited], bytes | None],
        most: int,
        most_bytes: int,
    ) -> int:
        """Move jobs into a frame that has `most` in the end; return how many bytes are left."""
        while jobs and len(frame) < most and most_bytes > 0:
            job = jobs.popleft()
            self._length -= 1
            if not job.future.cancelled() and (packed := pack(job)) is not None:
                frame.append((job, packed))
                most_bytes -= len(packed)
        return most_bytes

    def _forget_idle(self) -> None:
        """Forget callers that nothing is known of, where there are many."""
        if len(self._by_caller) > MAX_QUESTIONS:
            self._begin_window(self._clock())
            self._by_caller = {
                who: waiting
                for who, waiting in self._by_caller.items()
                if not who or waiting or waiting.sent or waiting.seconds
            }


# A writer whose transactions run in a process of its own, so that they share no interpreter.
#
# What waits is sent in frames. While a transaction is under way the next ones are sent, so that the
# process need not wait; it takes all that have come into its next transaction, and answers them in
# their order. What is sent ahead has a bound, and all else waits here: so whatever goes first waits
# for two transactions at most.
#
# Rule: when the process ends, whatever it had not answered may be on disk or not, and its callers
# are told so. What it was not sent yet waits for the next process, which is started at once; but if
# one after the other ends as soon as it began, there is a wait between them, and nothing is taken.


MAX_FRAMES = 8
MAX_FRAME_BYTES = 4 * 2**20
MAX_AHEAD_BYTES = 2 * MAX_FRAME_BYTES
"""How much may have been sent and not been answered; the last frame may go beyond."""

SHORT_LIFE_SECONDS = 1.0
MAX_SHORT_LIVES = 3
RESTARTS = Backoff(base_seconds=0.1, max_seconds=5.0)

_ENDED = "the process that writes has ended; what was asked of it may be done or not, look again"
_AWAY = "the process that writes cannot be started; see its messages, it is tried again"


def _log() -> Any:  # noqa: ANN401  a structlog logger
    """Return the logger; a ledger without a service has none of its package."""
    import structlog  # noqa: PLC0415

    return structlog.get_logger("headgate.writer")


class ProcessWriter:
    """Writes for the callers of one event loop, in a process that ends with this one."""

    def __init__(
        self,
        recipe: Recipe,
        wire: Wire,
        starter: ChildStarter,
        *,
        max_queued: int = MAX_QUEUED,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._recipe = recipe
        self._wire = wire
        self._starter = starter
        self._max_queued = max_queued
        self._close_seconds = close_seconds
        self._waiting = JobQueue()
        self._turn: asyncio.TimerHandle | None = None
        self._line: _Line | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._short_lives = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_open = False
        self._is_pumping = False
        self._owner = 0

    @property
    def pid(self) -> int | None:
        """The id of the process that writes."""
        return None if self._line is None else self._line.process.pid

    @property
    def queue_length(self) -> int:
        """How many calls wait for the next transaction; those in the one under way do not."""
        behind = 0 if self._line is None else self._line.waiting
        return len(self._waiting) + behind

    def start(self) -> None:
        """Start the process, if it does not run."""
        if self._is_open:
            return
        self._owner, self._loop = os.getpid(), asyncio.get_running_loop()
        self._is_open, self._is_pumping, self._short_lives = True, False, 0
        self._spawn()

    async def close(self) -> None:
        """Finish what is queued, and end the process; one that hangs is killed after a while."""
        self._is_open = False
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        line = self._line
        sent = () if line is None else line.sent
        left = [job.future for job in (*sent, *self._waiting)]
        if left and line is not None:
            self._waiting.is_closing = True
            self._pump()
            await asyncio.wait(left, timeout=self._close_seconds)
            self._waiting.is_closing = False
        line, self._line = self._line, None
        if line is not None:
            await line.close(self._close_seconds)
            self._fail_sent(line)
        self._fail_waiting()
        if self._turn is not None:
            self._turn.cancel()

    def submit(
        self, operation: Callable[[Transaction], Answer], *, goes_first: bool = False
    ) -> asyncio.Future[Answer]:
        """Run an operation in one of the next transactions; it must be one that can be sent."""
        return self._enqueue(Awaited(operation), goes_first=goes_first)

    def submit_request(
        self, batch: Batch[Request, Answer], request: Request
    ) -> asyncio.Future[Answer]:
        """Hand a request to its batch function together with those beside it."""
        return self._enqueue(Awaited(request, batch), goes_first=False)

    def keep(self, orders: Sequence[StandingOrder]) -> None:
        """Repeat these and no others while this loop is busy; each call is a sign of it."""
        # A process that is started anew hears of them with the next sign.
        if self._line is not None:
            self._line.keep(orders)

    def _enqueue(self, job: Awaited, *, goes_first: bool) -> asyncio.Future[Any]:
        self._refuse_unless_open(job)
        self._refuse_unless_room(job, goes_first=goes_first)
        self._waiting.put(job, goes_first=goes_first)
        self._pump_soon()
        return job.future

    def _refuse_unless_room(self, job: Awaited, *, goes_first: bool) -> None:
        waiting = self._waiting
        if goes_first and not job.who:
            _refuse_if_full(waiting.first, MAX_FIRST)
            return
        _refuse_if_full(len(waiting), self._max_queued)
        own = waiting.of(job.who)
        if job.who and own >= SHARE_OF_JOBS * (self._max_queued - len(waiting)):
            problem = f"{len(waiting)} calls wait already, {own} of them yours; try again later"
            raise LedgerUnavailableError(problem)

    def _refuse_unless_open(self, job: Awaited) -> None:
        if not self._is_open:
            raise LedgerUnavailableError("the database is closed; open it again")
        if os.getpid() != self._owner:
            # A fork takes the socket along, and two would write to it.
            problem = "the database was opened in another process; open it in this process"
            raise LedgerUnavailableError(problem)
        if job.future.get_loop() is not self._loop:
            problem = "the database was opened in another event loop; open it in this one"
            raise LedgerUnavailableError(problem)
        if self._restart is not None:
            raise LedgerUnavailableError(_AWAY)

    def _pump_soon(self) -> None:
        if not self._is_pumping:
            self._is_pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send what waits, as far as the process is not too far behind."""
        self._is_pumping = False
        line = self._line
        while line is not None and len(self._waiting) and line.has_room:
            frame = self._waiting.take(self._packed)
            if not frame:
                self._pump_later()
                return
            line.sent.extend([job for job, _ in frame])
            line.send(self._wire.join([packed for _, packed in frame]), jobs=len(frame))

    def _pump_later(self) -> None:
        """Send more when it is somebody's turn; without a time an answer comes before that."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        seconds = self._waiting.seconds_left()
        if seconds is not None:
            self._turn = asyncio.get_running_loop().call_later(seconds, self._pump)

    def _packed(self, job: Awaited) -> bytes | None:
        try:
            return self._wire.pack(job)
        # Whatever is wrong with a job is for its caller, and not for those beside it.
        except Exception as error:  # noqa: BLE001
            job.fail(error)
            deliver([job])
            return None

    def _spawn(self) -> None:
        self._restart = None
        try:
            self._line = _Line(self._starter.start(), self._recipe, self._answered, self._lost)
        except OSError as error:
            log = _log()
            log.warning("the process that writes cannot be started", problem=str(error))
            self._short_lives += 1
            self._start_later()
            return
        self._pump_soon()

    def _answered(self, line: _Line, frames: list[bytes]) -> None:
        answered = [self._wire.unpack_answers(frame, line.sent) for frame in frames]
        seconds = line.settle(sum(map(len, answered)))
        # What was answered together took that time together, whatever frames it came in.
        self._waiting.answered([job for jobs in answered for job in jobs], seconds)
        # The process is not to wait for what these answers set in motion here.
        self._pump()
        for jobs in answered:
            deliver(jobs)

    def _lost(self, line: _Line) -> None:
        """Tell the callers of a process that has ended, and start another."""
        if line is not self._line:
            return
        self._line = None
        self._fail_sent(line)
        if not self._is_open:
            self._fail_waiting()
            return
        code, problem = line.process.returncode, line.last_words
        log = _log()
        log.warning("the process that writes has ended", exit_code=code, problem=problem)
        self._short_lives = 0 if line.has_lived() else self._short_lives + 1
        if line.has_answered and self._short_lives <= MAX_SHORT_LIVES:
            self._spawn()
        else:
            self._start_later()

    def _start_later(self) -> None:
        self._fail_waiting()
        seconds = RESTARTS.seconds(max(1, self._short_lives), draw=0.0)
        self._restart = asyncio.get_running_loop().call_later(seconds, self._spawn)

    def _fail_sent(self, line: _Line) -> None:
        """Tell the callers of what was sent that nobody knows what came of it."""
        failed = list(line.sent)
        line.sent.clear()
        self._waiting.answered(failed, 0.0)
        _fail(failed, LedgerUnavailableError(_ENDED))
        deliver(failed)

    def _fail_waiting(self) -> None:
        failed = self._waiting.drain()
        _fail(failed, LedgerUnavailableError(_AWAY))
        deliver(failed)


class _Line:
    """The socket to a process, and what it has been sent and has not answered.

    `sent` are the jobs, in their order, and `frames` how many of them are in each frame, and how
    many bytes.
    """

    def __init__(
        self,
        child: Child,
        recipe: Recipe,
        answered: Callable[[_Line, list[bytes]], None],
        lost: Callable[[_Line], None],
    ) -> None:
        self.sent: deque[Awaited] = deque()
        self.frames: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._busy_since = 0.0
        self._first_answer_at: float | None = None
        self.last_words = "it gave no reason"
        self._answered = answered
        self._lost = lost
        self._frames = Frames()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        self.process, self._socket = child
        self._socket.settimeout(0.0)
        self._loop.add_reader(self._socket, self._read)
        self._write(framed(pickle.dumps(recipe)))

    @property
    def waiting(self) -> int:
        """How many jobs were sent and are not in the transaction under way."""
        return len(self.sent) - (self.frames[0][0] if self.frames else 0)

    @property
    def has_room(self) -> bool:
        """Whether another frame may be sent ahead of its transaction."""
        return (
            len(self.frames) < MAX_FRAMES
            and self.waiting < MAX_BATCH
            and self._bytes < MAX_AHEAD_BYTES
        )

    @property
    def has_answered(self) -> bool:
        """Whether the process has done anything."""
        return self._first_answer_at is not None

    def has_lived(self) -> bool:
        """Tell whether the process has worked for a while, however long it took to start."""
        since = self._first_answer_at
        return since is not None and self._loop.time() >= since + SHORT_LIFE_SECONDS

    def settle(self, jobs: int) -> float:
        """Forget frames of which so many jobs were answered, and return how long these have taken.

        An answer is for whole frames.
        """
        while jobs > 0:
            in_frame, size_bytes = self.frames.popleft()
            jobs -= in_frame
            self._bytes -= size_bytes
        since, self._busy_since = self._busy_since, self._loop.time()
        return self._busy_since - since

    def send(self, payload: bytes, *, jobs: int) -> None:
        """Send a frame of jobs, or as much of it as can be sent; the rest follows by itself."""
        if not self.frames:
            self._busy_since = self._loop.time()
        self.frames.append((jobs, len(payload)))
        self._bytes += len(payload)
        self._write(framed(payload))

    def keep(self, orders: Sequence[StandingOrder]) -> None:
        """Send standing orders, which are not answered."""
        # One that does not read what it was sent is told once it does.
        if not self._unsent:
            self._write(framed(STANDING + pickle.dumps(tuple(orders))))

    def _write(self, frame: bytes) -> None:
        if self._unsent:
            self._unsent += frame
            return
        sent = 0
        # A process that is gone is noticed by the end of what it says.
        with suppress(BlockingIOError, ConnectionError):
            sent = self._socket.send(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._loop.add_writer(self._socket, self._send_rest)

    async def close(self, seconds: float) -> None:
        """Say that no more will come, and wait for the end of the process."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, seconds)
        self._reap()

    def _send_rest(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except ConnectionError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            piece = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            piece = b""
        if not piece:
            self._end()
            return
        frames = self._frames.feed(piece)
        if frames and frames[-1].startswith(LAST_WORDS):
            self.last_words = frames.pop()[len(LAST_WORDS) :].decode(errors="replace")
        if frames:
            if self._first_answer_at is None:
                self._first_answer_at = self._loop.time()
            self._answered(self, frames)

    def _end(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._reap()
        self._lost(self)

    def _reap(self) -> None:
        self.process.kill()
        self.process.wait()


# The process that writes: it takes jobs from a socket, all that wait into one transaction.
#
# It belongs to the process that started it. When that one closes the socket, or is gone, it ends
# by itself; a signal for the whole group, as Ctrl-C is, is not meant for it. It keeps the open
# files that it was given, so that a lock which its parent holds lasts until nobody writes any
# more. It has no log: what it fails of, it tells its parent, which has one.

_SET_DEATH_SIGNAL = 1
_TIME_VALUE = struct.Struct("@ll")
_STOPPED = (b"T", b"t")


class _Link:
    """The socket to the parent: frames that have come, and those that go.

    No call waits for longer than until somebody should look at the standing orders. The kernel sees
    to that, so that it costs no further call.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._waiting: deque[bytes] = deque()
        self._longest_seconds = 0.0

    def wait_at_most(self, seconds: float) -> None:
        """Wait for so long from now on; 0 is for ever."""
        if seconds != self._longest_seconds:
            self._longest_seconds = seconds
            whole = int(seconds)
            time_value = _TIME_VALUE.pack(whole, int((seconds - whole) * 1e6))
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._connection.setsockopt(socket.SOL_SOCKET, option, time_value)

    def next(self, flags: int = 0) -> bytes | None:
        """Wait for the next frame; None if no more will come, `BlockingIOError` if none has yet."""
        while not self._waiting:
            piece = self._connection.recv(RECEIVE_BYTES, flags)
            if not piece:
                return None
            self._waiting.extend(self._frames.feed(piece))
        return self._waiting.popleft()

    def next_if_here(self) -> bytes | None:
        """Return the next frame if it has come already."""
        try:
            return self.next(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def send(self, frame: bytes, book: OrderBook, database: Database) -> None:
        """Send a frame; a parent that is too busy to read is spoken for meanwhile."""
        left = memoryview(frame)
        while left:
            try:
                left = left[self._connection.send(left) :]
            except BlockingIOError:
                if due := book.due():
                    perform(database, due)


def main(descriptor: int, parent: int, modules: Sequence[str]) -> None:
    """Write for the parent until it wants no more; the modules are loaded while it is busy."""
    _belong_to(parent)
    hide_process()
    for name in modules:
        # What is missing is said by the parent, which needs it too.
        with suppress(ImportError):
            import_module(name)
    connection = socket.socket(fileno=descriptor)
    link = _Link(connection)
    try:
        order = link.next()
        if order is not None:
            recipe: Recipe = pickle.loads(order)  # noqa: S301
            _serve(link, recipe(), parent)
    except ConnectionError:
        # The parent is gone, and nobody is left to be told.
        return
    # Whoever started this process has a log, and says it there.
    except Exception as error:  # noqa: BLE001
        words = f"{type(error).__name__}: {error}".encode(errors="replace")
        with suppress(OSError):
            connection.sendall(framed(LAST_WORDS + words))
        sys.exit(1)


def _serve(link: _Link, setup: WriterSetup, parent: int) -> None:
    _tune_interpreter()
    book = OrderBook(partial(_is_stopped, parent))
    more = partial(_take_more, link, setup, book)
    try:
        while (jobs := _take(link, setup, book)) is not None:
            due = book.due()
            if due or jobs:
                together = [*due, *jobs]
                perform(setup.database, together, more=more)
                jobs = together[len(due) :]
            if jobs:
                link.send(framed(setup.wire.pack_answers(jobs)), book, setup.database)
    finally:
        setup.database.close()


def _take(link: _Link, setup: WriterSetup, book: OrderBook) -> list[Job] | None:
    """Return what has come, nothing when a standing order is due, None at the end."""
    try:
        frame = link.next()
    except BlockingIOError:
        return []
    return None if frame is None else _unpack(frame, 0, link, setup, book)


def _take_more(link: _Link, setup: WriterSetup, book: OrderBook, taken: int) -> list[Job]:
    """Return what has come since, in addition to so many jobs."""
    frame = link.next_if_here() if taken < MAX_BATCH else None
    return [] if frame is None else _unpack(frame, taken, link, setup, book)


def _unpack(
    frame: bytes | None, taken: int, link: _Link, setup: WriterSetup, book: OrderBook
) -> list[Job]:
    """Return the jobs of a frame and of those behind it."""
    jobs: list[Job] = []
    while frame is not None:
        if frame.startswith(STANDING):
            book.take(pickle.loads(frame[len(STANDING) :]))  # noqa: S301
            link.wait_at_most(book.look_seconds)
        else:
            jobs += setup.wire.unpack(frame)
        if taken + len(jobs) >= MAX_BATCH:
            break
        frame = link.next_if_here()
    return jobs


def _is_stopped(pid: int) -> bool:
    """Tell whether a process was stopped, as by a signal or a debugger; only Linux says so."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The name of the program stands before the state, in brackets, and may hold anything.
    return status.rpartition(b")")[2].split()[0] in _STOPPED


def _belong_to(parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # A parent that is killed while this process waits for a disk would otherwise be outlived.
        from ctypes import CDLL  # noqa: PLC0415

        CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def _tune_interpreter() -> None:
    # Rows and records come and go by the thousand, and none of them form cycles.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
