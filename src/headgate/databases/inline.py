"""A writer without a thread: its transactions run between the steps of the event loop.

Work that is submitted before the loop comes round shares one transaction, as behind the thread of
`GroupCommitWriter`, and is answered in a step of its own. Between the two a simulated host may
crash: what was committed is kept, and nobody hears of it.

Rule: the writer belongs to no host. Its steps run in an empty context, so that a crash of whoever
submitted the work neither stops a transaction nor keeps the others from being answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from enum import Enum
from typing import Any

from headgate.databases.awaited import Awaited, deliver
from headgate.databases.jobs import MAX_BATCH, MAX_QUEUED, Answer, Batch, Request, perform
from headgate.databases.transaction import Database, LostTransactionError, Transaction
from headgate.errors import LedgerUnavailableError


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
