"""The reaper: deletes ended tasks that are kept long enough or too many, some at a time.

Rule: it takes at most half of the writer's time. After each step it rests for as long as the step
took, so whoever lowers a setting by hundreds of thousands of tasks still has a service meanwhile.
"""

from __future__ import annotations

import asyncio

import structlog

from headgate.core.retention import Evicted, Retention
from headgate.errors import StoreUnavailableError
from headgate.storage.store import TaskStore

log = structlog.get_logger("headgate.reaper")

MAX_EVICTED = 500
PAUSE_SECONDS = 1.0


class Reaper:
    """Evicts ended tasks by their `retention`."""

    def __init__(self, store: TaskStore, retention: Retention) -> None:
        self._store = store
        self.retention = retention
        self._problem = ""

    async def run(self) -> None:
        """Evict until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            began_at = clock()
            has_more = False
            try:
                has_more = (await self.run_once()).has_more
                self._problem = ""
            except StoreUnavailableError as error:
                self._log_problem(str(error))
            took_seconds = clock() - began_at
            await asyncio.sleep(min(took_seconds, PAUSE_SECONDS) if has_more else PAUSE_SECONDS)

    async def run_once(self) -> Evicted:
        """Evict what is due, as much as one step may."""
        return await self._store.evict(self.retention, limit=MAX_EVICTED)

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("ended tasks were not deleted", problem=problem)
        self._problem = problem
