"""Executors that the configuration has replaced or dropped, until their last attempt has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from headgate.executor import Executor

log = structlog.get_logger("headgate.executors")


class RetiredExecutors:
    """Closes each executor once, when nobody uses it any more or when the service ends."""

    def __init__(self) -> None:
        self._closing: dict[asyncio.Task[None], Sequence[Executor]] = {}

    def retire(self, executors: Sequence[Executor], attempts: Iterable[asyncio.Task[None]]) -> None:
        """Close executors when these attempts have ended."""
        if not executors:
            return
        closing = asyncio.get_running_loop().create_task(_close_after(executors, tuple(attempts)))
        self._closing[closing] = executors
        closing.add_done_callback(lambda task: self._closing.pop(task, None))

    async def close(self) -> None:
        """Close what is left now, whoever may still use it."""
        left, self._closing = self._closing, {}
        for task in left:
            task.cancel()
        for executors in left.values():
            await _close(executors)


async def _close_after(
    executors: Sequence[Executor], attempts: Sequence[asyncio.Task[None]]
) -> None:
    if attempts:
        await asyncio.wait(attempts)
    await _close(executors)


async def _close(executors: Sequence[Executor]) -> None:
    for executor in executors:
        try:
            await executor.close()
        except Exception:
            # It may be anybody's, and the next one is to be closed all the same.
            log.exception("an executor could not be closed")
