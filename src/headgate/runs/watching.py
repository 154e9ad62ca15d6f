"""What nobody tells a run and so has to be asked for: its money, why tasks wait, and if in vain.

Rule: an answer that cannot be had now is asked for again; only a backend that says that it cannot
go on at all ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from headgate.errors import HeadgateError
from headgate.runs.backend import Backend, TaskState
from headgate.runs.viewing.reporting import LiveTask, Reporter
from headgate.workflow.standing import Standing

WATCH_SECONDS = 1.0
WHYS = 3


class Watch:
    """Asks the backend of one run; `live` are its tasks that have not ended.

    Whoever submits says so by `is_sending`: what is under way to the backend does not wait there.
    """

    def __init__(
        self,
        backend: Backend,
        live: Mapping[int, LiveTask],
        reporter: Reporter,
        *,
        clock: Callable[[], float],
        waits_for_windows: bool,
    ) -> None:
        self._backend = backend
        self._live = live
        self._reporter = reporter
        self._clock = clock
        self._waits_for_windows = waits_for_windows
        self.is_sending = False

    async def run(self) -> None:
        """Ask again and again, until it is cancelled."""
        while True:
            self._backend.check()
            await self.look_at_money()
            with suppress(HeadgateError):
                # What cannot be asked now is asked again; the backend itself waits for its store.
                await self._look_at_whys()
                await self._look_for_exhaustion()
            await asyncio.sleep(WATCH_SECONDS)

    async def look_at_money(self) -> None:
        """Ask what is spent and held."""
        with suppress(HeadgateError):
            self._reporter.money = tuple(await self._backend.money())

    async def give_up(self, waiting: Sequence[LiveTask], standing: Standing) -> None:
        """Cancel what waits; each becomes `standing` when its cancel comes through."""
        for live in waiting:
            live.given_up_as = standing
        await self._backend.cancel([live.task for live in waiting])

    def queued(self) -> list[LiveTask]:
        """Return the tasks that wait at the backend."""
        return [live for live in self._live.values() if live.task.state is TaskState.QUEUED]

    async def _look_at_whys(self) -> None:
        for live in self.queued()[:WHYS]:
            if self._clock() - live.since >= WATCH_SECONDS:
                live.why = await self._backend.why(live.task)

    async def _look_for_exhaustion(self) -> None:
        """Give up what waits for a budget whose window moves on, unless the file says to wait."""
        if self._waits_for_windows or not self._waits_only():
            return
        if not await self._backend.is_stuck() or not self._waits_only():
            return
        waiting = list(self._live.values())
        why = await self._backend.why(waiting[0].task)
        self._reporter.exhausted_by = self._reporter.exhausted_by or why or None
        await self.give_up(waiting, Standing.UNFUNDED)

    def _waits_only(self) -> bool:
        return bool(self._live) and not self.is_sending and len(self.queued()) == len(self._live)
