"""The history: how much waited, ran, ended and cost, over the last hour and the last day.

It is told of every event by the feed, reads the dispatch state every few seconds, and keeps the
sums of each step in a ring. Nothing is asked of the store, and nothing is kept on disk: a node that
begins to dispatch begins with an empty history. Rule: a step in which this node did not dispatch is
left out, because it saw nothing then.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain

import msgspec

from headgate.core.events import EventKind
from headgate.core.task import TaskRecord, waits_since
from headgate.engine.events import Happening

STEP_SECONDS = 5.0
STEPS = 720
LEAST_STEP_SECONDS = 1.0
MOST_STEP_SECONDS = 60.0
"""A busy loop wakes late, but not by a minute; then the clock was set, or the machine slept."""

LONG_STEP_SECONDS = 60.0
LONG_STEPS = 1_440
LONG_TAIL = 0.95
RECENT_SECONDS = 300.0
"""What is called lately wherever one figure stands for how it goes now."""

_STEPS_IN_LONG = int(LONG_STEP_SECONDS / STEP_SECONDS)
_LEAST_WAIT_SECONDS = 0.001
_GROWTH = 1.2
WAIT_BOUNDS = tuple(_LEAST_WAIT_SECONDS * _GROWTH**step for step in range(112))
"""The upper ends of the buckets of waits, from a millisecond to a week."""

_RUNNING = EventKind.RUNNING
_COMPLETED = EventKind.COMPLETED
_FAILED = EventKind.FAILED


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """What waits and runs at a moment."""

    queued: int
    inflight: int


class Step(msgspec.Struct, kw_only=True):
    """The sums of one step, and what there was at its end."""

    at: float
    seconds: float = STEP_SECONDS
    queued: int = 0
    inflight: int = 0
    started: int = 0
    completed: int = 0
    failed: int = 0
    spent_micro_usd: int = 0
    wait_seconds: float = 0.0
    waits: dict[int, int] = {}

    @property
    def wait_average_seconds(self) -> float | None:
        """How long attempts waited on average; None if none started."""
        counted = sum(self.waits.values())
        return self.wait_seconds / counted if counted else None

    @property
    def wait_p95_seconds(self) -> float | None:
        """How long 95 of 100 attempts waited at most, to a fifth; None if none started."""
        wanted = LONG_TAIL * sum(self.waits.values())
        reached = 0
        for bucket in sorted(self.waits):
            reached += self.waits[bucket]
            if reached >= wanted:
                return WAIT_BOUNDS[bucket]
        return None


def summed(steps: Iterable[Step]) -> Step | None:
    """Return several steps as one; None of none."""
    parts = list(steps)
    if not parts:
        return None
    waits: dict[int, int] = {}
    for part in parts:
        for bucket, count in part.waits.items():
            waits[bucket] = waits.get(bucket, 0) + count
    last = parts[-1]
    return Step(
        at=last.at,
        seconds=sum(part.seconds for part in parts),
        queued=last.queued,
        inflight=last.inflight,
        started=sum(part.started for part in parts),
        completed=sum(part.completed for part in parts),
        failed=sum(part.failed for part in parts),
        spent_micro_usd=sum(part.spent_micro_usd for part in parts),
        wait_seconds=sum(part.wait_seconds for part in parts),
        waits=waits,
    )


class History:
    """The rings; `read` says what waits and runs, or None while this node does not dispatch."""

    def __init__(self, clock: Callable[[], float], read: Callable[[], Present | None]) -> None:
        self._clock = clock
        self._read = read
        self._current = Step(at=clock())
        self._since_long: list[Step] = []
        self.hour: deque[Step] = deque(maxlen=STEPS)
        self.day: deque[Step] = deque(maxlen=LONG_STEPS)

    def __call__(self, happening: Happening, record: TaskRecord) -> None:
        """Count an event; subscribe the history to the events of a feed."""
        step, kind = self._current, happening.kind
        # Every end of an attempt books something, also of one that is tried again or cancelled.
        step.spent_micro_usd += happening.booked_micro_usd
        if kind is _RUNNING:
            step.started += 1
            self._count_wait(step, happening, record)
        elif kind is _COMPLETED:
            step.completed += 1
        elif kind is _FAILED:
            step.failed += 1

    @staticmethod
    def _count_wait(step: Step, happening: Happening, record: TaskRecord) -> None:
        since = waits_since(record)
        if since is None:
            return
        waited = max(0.0, happening.at - since)
        bucket = min(bisect_left(WAIT_BOUNDS, waited), len(WAIT_BOUNDS) - 1)
        step.wait_seconds += waited
        step.waits[bucket] = step.waits.get(bucket, 0) + 1

    async def run(self) -> None:
        """End a step every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(STEP_SECONDS)
            self.run_once()

    def run_once(self) -> None:
        """End the step that is under way, and begin the next."""
        now = self._clock()
        step, self._current = self._current, Step(at=now)
        present = self._read()
        if present is None:
            self._since_long.clear()
            return
        step.seconds = self._length(now - step.at)
        step.at = now
        step.queued, step.inflight = present.queued, present.inflight
        self.hour.append(step)
        self._since_long.append(step)
        if len(self._since_long) >= _STEPS_IN_LONG:
            whole = summed(self._since_long)
            self._since_long.clear()
            if whole is not None:
                self.day.append(whole)

    def _length(self, measured_seconds: float) -> float:
        """Return how long a step took; where the clock was set, as long as a step takes.

        What lies before a clock that was set back is moved with it, so that times still ascend.
        """
        if measured_seconds < 0:
            for kept in chain(self.hour, self.day):
                kept.at += measured_seconds - STEP_SECONDS
        is_set = not 0 <= measured_seconds <= MOST_STEP_SECONDS
        return STEP_SECONDS if is_set else max(measured_seconds, LEAST_STEP_SECONDS)

    def recent(self, seconds: float) -> Step | None:
        """Return the last so many seconds as one step; None if nothing is known of them."""
        since = self._clock() - seconds
        return summed(step for step in self.hour if step.at > since)
