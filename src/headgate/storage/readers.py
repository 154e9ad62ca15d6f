"""Readers: a few threads that look things up while the writer writes.

A long list must not keep anybody from writing, and nobody who reads needs the writer's lock. Each
thread has a connection of its own that can only read; it connects with the first question, and
again after a loss. An answer has everything in it that was acknowledged before the question.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

from headgate.errors import StoreUnavailableError
from headgate.storage.transaction import Database, LostTransactionError, Transaction
from headgate.storage.writer import TRIES, Answer, Awaited, answer

MAX_READERS = 2
MAX_QUEUED = 1_024
CLOSE_SECONDS = 5.0


class ReaderPool:
    """Threads that answer questions for all event loops of this process."""

    def __init__(
        self,
        make_reader: Callable[[], Database],
        *,
        most: int = MAX_READERS,
        max_queued: int = MAX_QUEUED,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._make_reader = make_reader
        self._most = most
        self._max_queued = max_queued
        self._close_seconds = close_seconds
        self._queue: SimpleQueue[Awaited | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        # Nothing may be queued behind the marks that end the threads: it would wait for ever.
        self._closing = threading.Lock()

    def start(self) -> None:
        """Start the threads, if they do not run."""
        if self._threads:
            return
        # Threads that hang since the last close keep their queue, and end when they are answered.
        self._queue = SimpleQueue()
        self._threads = [self._thread(number) for number in range(self._most)]
        for thread in self._threads:
            thread.start()

    async def close(self) -> None:
        """Answer what was asked, and end the threads; one that hangs is left behind."""
        with self._closing:
            threads, self._threads = self._threads, []
            for _ in threads:
                self._queue.put(None)
        joins = [asyncio.to_thread(thread.join, self._close_seconds) for thread in threads]
        await asyncio.gather(*joins)

    def submit(self, question: Callable[[Transaction], Answer]) -> asyncio.Future[Answer]:
        """Ask a question of what has been committed; it may be asked twice, if no reply comes."""
        job = Awaited(question)
        with self._closing:
            self._refuse_unless_open()
            self._queue.put(job)
        return job.future

    def _refuse_unless_open(self) -> None:
        if not self._threads:
            raise StoreUnavailableError("the database is closed; open it again")
        if not self._threads[0].is_alive():
            # A fork takes the object along but not its threads, and nobody would answer.
            problem = "the database was opened in another process; open it in this process"
            raise StoreUnavailableError(problem)
        if self._queue.qsize() >= self._max_queued:
            problem = f"{self._max_queued} questions wait already; try again later"
            raise StoreUnavailableError(problem)

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(
            target=_run,
            args=(self._make_reader(), self._queue),
            name=f"headgate-reader-{number}",
            daemon=True,
        )


def _run(reader: Database, queue: SimpleQueue[Awaited | None]) -> None:
    while (job := queue.get()) is not None:
        if not job.future.cancelled():
            _ask(reader, job)
            answer([job])
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
