"""The reaper: deletes ended tasks that are kept long enough, too many or too large, some at a time.

It also knows how large the store is, and says once when there is no room for new work, and when
there is again.

Rule: it takes at most half of the writer's time. After each step it rests for as long as the step
took, so whoever lowers a setting by hundreds of thousands of tasks still has a service meanwhile.
"""

from __future__ import annotations

import asyncio

import structlog

from headgate.core.retention import Evicted, Retention, StoreSize
from headgate.errors import StoreFullError, StoreUnavailableError
from headgate.storage.store import TaskStore

log = structlog.get_logger("headgate.reaper")

MAX_EVICTED = 500
PAUSE_SECONDS = 1.0
DISK_FULL = "the disk of the store is full; free some space"


class Reaper:
    """Evicts ended tasks by their `retention`."""

    def __init__(self, store: TaskStore, retention: Retention) -> None:
        self._store = store
        self.retention = retention
        self._problem = ""
        self.size: StoreSize | None = None
        self.shortage = ""
        """Why there is no room for new work; empty while there is."""

    async def run(self) -> None:
        """Evict until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            began_at = clock()
            has_more = False
            try:
                has_more = (await self.run_once()).has_more
                self._problem = ""
            except StoreFullError as error:
                self._notice(DISK_FULL)
                self._log_problem(str(error))
            except StoreUnavailableError as error:
                self._log_problem(str(error))
            took_seconds = clock() - began_at
            await asyncio.sleep(min(took_seconds, PAUSE_SECONDS) if has_more else PAUSE_SECONDS)

    async def run_once(self) -> Evicted:
        """Evict what is due, as much as one step may."""
        evicted = await self._store.evict(self.retention, limit=MAX_EVICTED)
        self.size = evicted.size
        self._notice("" if evicted.size is None else evicted.size.problem)
        return evicted

    def _notice(self, shortage: str) -> None:
        if shortage and not self.shortage:
            log.warning("the store has no room for new tasks", problem=shortage)
        elif self.shortage and not shortage:
            log.info("the store has room for new tasks again")
        self.shortage = shortage

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("ended tasks were not deleted", problem=problem)
        self._problem = problem
