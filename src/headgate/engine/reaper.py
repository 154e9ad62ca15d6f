"""The reaper: forgets results whose time is over, a bounded number at a time."""

from __future__ import annotations

import asyncio

import structlog

from headgate.errors import StoreUnavailableError
from headgate.storage.store import TaskStore

log = structlog.get_logger("headgate.reaper")

MAX_EVICTED = 1_000
PAUSE_SECONDS = 1.0


class Reaper:
    """Evicts ended tasks after `result_ttl_seconds`."""

    def __init__(self, store: TaskStore, *, result_ttl_seconds: float) -> None:
        self._store = store
        self.result_ttl_seconds = result_ttl_seconds
        self._problem = ""

    async def run(self) -> None:
        """Evict until cancelled."""
        while True:
            try:
                is_done = await self.run_once() < MAX_EVICTED
                self._problem = ""
            except StoreUnavailableError as error:
                self._log_problem(str(error))
                is_done = True
            await asyncio.sleep(PAUSE_SECONDS if is_done else 0)

    async def run_once(self) -> int:
        """Evict what is due, and return how many there were."""
        completed_before = self._store.now() - self.result_ttl_seconds
        return await self._store.evict(completed_before=completed_before, limit=MAX_EVICTED)

    def _log_problem(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("results were not evicted", problem=problem)
        self._problem = problem
