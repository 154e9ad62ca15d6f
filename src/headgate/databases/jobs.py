"""Work for a database: how a batch of it is put into one transaction, and how it is answered.

There are two kinds of work. An operation is any function on the transaction; it runs within a
savepoint, so that one that fails leaves the others as they are. Requests of the same `Batch`
function that stand next to each other are handed to it together, and it answers each by itself. If
it raises, nothing of the transaction counts, and it is run again in two halves: a request that no
database takes fails alone in the end.

An operation may be run twice: when the connection is lost while it commits, nobody can tell
whether it was. So what is submitted must recognise its own work, as by an id that the caller made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
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
