"""What a crash leaves behind, kept so that its clean-up code does not run.

A suspended coroutine that Python frees is closed first, and closing runs its `finally` blocks: the
very thing that a crash must not do. So the remains of a simulation are kept for the next few
simulations, long enough for a test to look at the state that the crash left. Then, outside of any
simulation, they are closed and whatever that raises or warns about is ignored.
"""

from __future__ import annotations

import asyncio
import atexit
import warnings
from asyncio import tasks as asyncio_tasks
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

KEPT_SIMULATIONS = 8
_CLOSE_ATTEMPTS = 100


class Remains:
    """The tasks and async generators that will never be resumed."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []
        self._generators: list[AsyncGenerator[Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._tasks or self._generators)

    def add_task(self, task: asyncio.Task[Any]) -> None:
        """Take a task out of its loop's sight and keep it as it is."""
        # Otherwise the runner would cancel it at the end, and wait for it in vain.
        asyncio_tasks._unregister_task(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._tasks.append(task)

    def add_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Keep an async generator that nobody will iterate further."""
        self._generators.append(generator)

    def mark_as_seen(self) -> None:
        """Read the exceptions of tasks that had failed: whoever would have looked is gone."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()

    def discard(self) -> None:
        """Close everything, quietly: what clean-up code says now is said after the end."""
        self.mark_as_seen()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for task in self._tasks:
                _close(task)
            self._tasks.clear()
            self._generators.clear()


def _close(task: asyncio.Task[Any]) -> None:
    coroutine = task.get_coro()
    # Each await in its clean-up code stops a close once more.
    for _ in range(_CLOSE_ATTEMPTS):
        with suppress(Exception, asyncio.CancelledError):
            coroutine.close()
            return


_kept: deque[Remains] = deque()


def keep(remains: Remains) -> None:
    """Keep the remains of one more simulation, and discard those of the oldest."""
    if remains:
        _kept.append(remains)
    while len(_kept) > KEPT_SIMULATIONS:
        _kept.popleft().discard()


@atexit.register
def _discard_all() -> None:
    while _kept:
        _kept.popleft().discard()
