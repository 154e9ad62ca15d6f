"""The tasks of a run that a service has: what events tell of them, and looks for what is missed.

An event says that something happened, and looking says what is so; the end of a task counts when it
is in the journal, with the result, and is told then and once. Events may be missed while the stream
breaks, so every task is looked at now and then.

Rule: a task that moves on is told in its order, whatever order the news come in.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from headgate.client.async_client import Client
from headgate.core.tasks.events import LAST_RANK, EventKind, TaskEvent, rank_of
from headgate.core.tasks.task import TERMINAL, TaskStatus
from headgate.errors import RequestRefusedError
from headgate.runs.backend import StepTask, TaskState, Told
from headgate.runs.remote.insistence import Insistence
from headgate.runs.remote.journal import Ended, Journal, Unfinished
from headgate.runs.remote.tasks import gone_task, moved_task, task_of
from headgate.task_snapshot import TaskSnapshot

LOOKERS = 8
FIRST_LOOK_SECONDS = 5.0
LOOK_SECONDS = 30.0
PACE_SECONDS = 1.0
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
MAX_EARLY = 10_000
"""How much is kept of tasks whose id is not known yet: as much as a service keeps of events."""

NEWS = ",".join(kind.value for kind in EventKind if kind not in (EventKind.QUEUED, EventKind.RESET))
_FROM_NOW = "-"
"""No service knows such an event, so that the stream begins with a reset: it is there then."""


class Tracked(msgspec.Struct):
    """A task that has not ended, as it was last told; `ending` is the event of its end."""

    task: StepTask
    is_needed: bool
    look_at: float
    rank: int = 0
    is_asked: bool = False
    is_ending: bool = False
    ending: TaskEvent | None = None


class ServerWatch:
    """Follows the tasks of one run."""

    def __init__(self, client: Client, line: Insistence, journal: Journal) -> None:
        self._client = client
        self._line = line
        self._journal = journal
        self._tracked: dict[str, Tracked] = {}
        self._early: dict[str, TaskEvent] = {}
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._loops: list[asyncio.Task[None]] = []
        self._is_connected = asyncio.Event()
        self._fault: Exception | None = None
        self.told: Told | None = None
        self.sending = 0
        """How many batches are on their way: events may come before the ids of their tasks."""
        self.ended = asyncio.Event()
        """Is set when a task has ended."""

    def tasks(self) -> list[StepTask]:
        """Return the tasks that have not ended."""
        return [tracked.task for tracked in self._tracked.values()]

    def check(self) -> None:
        """Raise what keeps the run from going on at all, such as a token that was revoked."""
        if self._fault is not None:
            raise self._fault

    async def start(self) -> None:
        """Listen from now on; a stream that does not come about in time is waited for no longer."""
        for loop in (self._follow(), self._look(), *(self._answer() for _ in range(LOOKERS))):
            self._loops.append(asyncio.create_task(self._guarded(loop)))
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._is_connected.wait()
        except TimeoutError:
            return

    def add(self, task: StepTask, *, is_needed: bool) -> None:
        """Follow a task that was taken."""
        look_at = time.monotonic() + FIRST_LOOK_SECONDS
        tracked = Tracked(task=task, is_needed=is_needed, look_at=look_at)
        self._tracked[task.task_id] = tracked
        early = self._early.pop(task.task_id, None)
        if early is not None:
            self._heard(tracked, early)
        if self._fault is not None:
            self._give_up(task)

    def has_sent(self) -> None:
        """Note that a batch was answered; without one on its way no event can be too early."""
        self.sending -= 1
        if not self.sending:
            self._early.clear()

    async def look_at(self, unfinished: Sequence[Unfinished]) -> None:
        """Follow tasks of an earlier process, after a look at how each of them stands now."""
        places = asyncio.Semaphore(LOOKERS)

        async def look(task: StepTask) -> None:
            async with places:
                await self._look_up(task.task_id)

        for task, is_needed in unfinished:
            self.add(task, is_needed=is_needed)
        await asyncio.gather(*(look(task) for task, _ in unfinished))
        self.check()

    async def until_quiet(self, ends_at: Callable[[], float]) -> None:
        """Wait until all tasks have ended, or until a time of the event loop, which may move."""
        now = asyncio.get_running_loop().time
        while self._tracked and self._fault is None and now() < ends_at():
            self.ended.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(ends_at()):
                    await self.ended.wait()

    async def stop(self) -> None:
        """Listen no more; what is known to have ended is written down first, if that goes soon."""
        try:
            if self._fault is None and not self._line.trouble:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._asked.join()
        except TimeoutError:
            pass
        finally:
            for loop in self._loops:
                loop.cancel()
            await asyncio.gather(*self._loops, return_exceptions=True)
            self._loops.clear()

    async def _guarded(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except Exception as error:  # noqa: BLE001 - whoever asks next is told, and the run ends
            self._is_connected.set()
            self.ended.set()
            if self._fault is None:
                self._fault = error
                for task in self.tasks():
                    self._give_up(task)

    def _give_up(self, task: StepTask) -> None:
        """Tell of a task that nobody can follow any more; the journal knows that it goes on."""
        error = f"the service cannot be asked about it any more: {self._fault}"
        failed = msgspec.structs.replace(task, state=TaskState.FAILED, error=error)
        self.tell(failed)

    async def _follow(self) -> None:
        while True:
            events = self._client.events(
                kind=NEWS, last_event_id=_FROM_NOW, patience_seconds=math.inf
            )
            async for event in events:
                self._hear(event)

    def _hear(self, event: TaskEvent) -> None:
        if event.kind is EventKind.RESET:
            self._is_connected.set()
            for each in self._tracked.values():
                self._ask(each)
            return
        tracked = self._tracked.get(event.task_id)
        if tracked is not None:
            self._heard(tracked, event)
        elif self.sending:
            self._keep(event)

    def _keep(self, event: TaskEvent) -> None:
        before = self._early.pop(event.task_id, None)
        is_older = before is not None and _rank(before) > _rank(event)
        self._early[event.task_id] = before if is_older and before is not None else event
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def _heard(self, tracked: Tracked, event: TaskEvent) -> None:
        if event.state in TERMINAL:
            tracked.ending = event
            self._ask(tracked)
        elif event.state is not None:
            self._move(tracked, _rank(event), moved_task(tracked.task, event))

    def _move(self, tracked: Tracked, rank: int, task: StepTask) -> None:
        if rank > tracked.rank and not tracked.is_ending:
            tracked.rank, tracked.task = rank, task
            self.tell(task)

    def _ask(self, tracked: Tracked) -> None:
        if not (tracked.is_asked or tracked.is_ending):
            tracked.is_asked = True
            self._asked.put_nowait(tracked.task.task_id)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(PACE_SECONDS)
            now = time.monotonic()
            for tracked in self._tracked.values():
                if tracked.look_at <= now:
                    tracked.look_at = now + LOOK_SECONDS
                    self._ask(tracked)

    async def _answer(self) -> None:
        while True:
            task_id = await self._asked.get()
            try:
                await self._look_up(task_id)
            finally:
                self._asked.task_done()

    async def _look_up(self, task_id: str) -> None:
        tracked = self._tracked.get(task_id)
        if tracked is None:
            return
        tracked.is_asked = False
        snapshot = await self._line.ask(lambda: self._snapshot(task_id))
        if snapshot is None:
            gone = gone_task(tracked.task, tracked.ending, is_needed=tracked.is_needed)
            await self._end(tracked, gone, None)
        elif snapshot.state in TERMINAL:
            await self._end(tracked, task_of(snapshot, tracked.task), snapshot.result)
        else:
            rank = rank_of(snapshot.state, snapshot.attempt)
            self._move(tracked, rank, task_of(snapshot, tracked.task))

    async def _snapshot(self, task_id: str) -> TaskSnapshot | None:
        try:
            return await self._client.get(task_id)
        except RequestRefusedError as error:
            if error.code == "not_found":
                return None
            raise

    async def _end(self, tracked: Tracked, task: StepTask, result: object) -> None:
        # Two looks at one task may both see its end; the first one tells it. Until it is written
        # down it is among the tasks that have not ended, so at no moment is it unknown.
        if not tracked.is_ending:
            tracked.is_ending = True
            await self._journal.write(
                Ended(task=task, result=msgspec.Raw(msgspec.json.encode(result)))
            )
            del self._tracked[task.task_id]
            self.ended.set()
            self.tell(task)

    def tell(self, task: StepTask) -> None:
        """Tell of a change, if somebody listens."""
        if self.told is not None:
            self.told(task)


def _rank(event: TaskEvent) -> int:
    if event.state in TERMINAL:
        return LAST_RANK
    return rank_of(event.state or TaskStatus.QUEUED, event.attempt or 0)
