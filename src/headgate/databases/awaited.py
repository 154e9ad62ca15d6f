"""Jobs that somebody in an event loop waits for, and how they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from headgate.databases.jobs import Answer, Batch, Job, Request
from headgate.databases.transaction import Transaction


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
