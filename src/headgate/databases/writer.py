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
from collections.abc import Callable
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any

from headgate.databases.awaited import Awaited, answer
from headgate.databases.jobs import MAX_BATCH, MAX_QUEUED, Answer, Batch, Request, perform
from headgate.databases.transaction import Database, Transaction
from headgate.errors import LedgerUnavailableError

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
