"""The supervisor: keeps loops running, and ends them together.

A loop that fails has a fault that nobody foresaw. It is logged once and started again after a
pause that grows, because a service that stops deciding is worse than one that tries again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from headgate.core.retries import Backoff

log = structlog.get_logger("headgate.supervisor")

RESTART_BACKOFF = Backoff(base_seconds=0.5, max_seconds=30.0)
HEALTHY_SECONDS = 60.0

Loop = Callable[[], Coroutine[Any, Any, None]]


class Supervisor:
    """Runs loops until it is stopped."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, loop: Loop) -> None:
        """Run a loop from now on."""
        task = asyncio.get_running_loop().create_task(_keep_running(name, loop))
        self._tasks[name] = task

    async def stop(self) -> None:
        """End all loops, and wait until they have ended."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _keep_running(name: str, loop: Loop) -> None:
    clock = asyncio.get_running_loop().time
    failures = 0
    while True:
        started = clock()
        try:
            await loop()
        except Exception:
            failures = 1 if clock() - started > HEALTHY_SECONDS else failures + 1
            log.exception("a loop failed and is started again", loop=name, failures=failures)
        else:
            return
        draw = random.random()  # noqa: S311
        await asyncio.sleep(RESTART_BACKOFF.seconds(failures, draw=draw))
