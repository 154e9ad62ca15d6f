"""The queue of one agent: tasks that wait, and who waits for them.

A task is queued in one of two ways. *Submitted* ones lie in the lane until somebody asks for a
place, and the oldest goes to whoever asked first; who asks while there is none left queues a
*makeshift* task of weight 1. An *own* task comes with the one who asks, and goes with it.

Rule: a makeshift task exists only as long as somebody waits who has no other. So nobody who gave up
leaves anything behind, and nothing that was submitted is lost with whoever waited for it.
"""

from __future__ import annotations

from asyncio import Future, TimerHandle
from bisect import bisect_left
from collections import deque
from typing import Any, TypeVar

from headgate.core.load_ranking import MICRO
from headgate.core.tasks import Task
from headgate.inprocess.figures import Tally

SLACK_GONE = 32
NEVER = -1


class Entry:
    """A queued task: what it weighs, since which tick it waits, and its place in the order."""

    __slots__ = ("is_gone", "is_makeshift", "is_own", "sequence", "task", "tick", "weight_micro")

    def __init__(
        self,
        sequence: int,
        tick: int,
        task: Task | None,
        weight_micro: int = MICRO,
        *,
        is_own: bool = False,
    ) -> None:
        self.sequence = sequence
        self.tick = tick
        self.task = task
        self.weight_micro = weight_micro
        self.is_gone = False
        self.is_makeshift = task is None
        self.is_own = is_own


class Waiter:
    """Somebody who waits for a place, and for which task if it has one of its own.

    The future ends with a grant or with the error to raise. It never fails: an error that nobody
    looks at, because the waiter was cancelled at the same moment, would be logged as lost.
    """

    __slots__ = ("entry", "future", "is_gone", "lane", "since", "timer")

    lane: Lane
    future: Future[Any]
    since: float

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.timer: TimerHandle | None = None
        self.is_gone = True


class Totals:
    """What all lanes of a scheduler come to."""

    __slots__ = ("depth_micro", "queued", "waiting")

    def __init__(self) -> None:
        self.queued = 0
        self.waiting = 0
        self.depth_micro = 0


Queued = TypeVar("Queued", Entry, Waiter)


class Lane:
    """What one agent has queued, who waits for it, and how many places it has."""

    __slots__ = (
        "_makeshift",
        "_own",
        "_own_gone",
        "_plain",
        "_plain_gone",
        "_plain_waiting",
        "_waiters",
        "_waiters_gone",
        "agent_id",
        "capacity",
        "depth_micro",
        "in_flight",
        "is_known",
        "order",
        "queued",
        "served_tick",
        "tally",
        "totals",
        "waiting",
    )

    def __init__(self, agent_id: str, order: int, capacity: int | None, totals: Totals) -> None:
        self.agent_id = agent_id
        self.order = order
        self.capacity = capacity
        self.is_known = True
        self.depth_micro = 0
        self.queued = 0
        self.waiting = 0
        self.in_flight = 0
        self.served_tick = NEVER
        self.tally = Tally()
        self.totals = totals
        self._plain: deque[Entry] = deque()
        self._plain_gone = 0
        self._plain_waiting = 0
        self._makeshift: deque[Entry] = deque()
        self._waiters: deque[Waiter] = deque()
        self._waiters_gone = 0
        self._own: deque[Waiter] = deque()
        self._own_gone = 0

    @property
    def is_competing(self) -> bool:
        """Whether somebody waits here, and the agent has a place of its own left."""
        return self.waiting > 0 and (self.capacity is None or self.in_flight < self.capacity)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued here and nothing in flight."""
        return not (self.queued or self.waiting or self.in_flight)

    def submit(self, entry: Entry) -> None:
        """Queue a task for whoever asks."""
        self._plain.append(entry)
        self._entered(entry)

    def unclaimed(self) -> bool:
        """Whether a submitted task waits that nobody has asked for."""
        return len(self._plain) - self._plain_gone > self._plain_waiting

    def wait(self, waiter: Waiter, entry: Entry | None) -> None:
        """Queue somebody: with a task of its own, a makeshift one, or None if one is unclaimed."""
        waiter.is_gone = False
        waiter.entry = None
        self.waiting += 1
        self.totals.waiting += 1
        if entry is not None:
            self._entered(entry)
            if entry.is_own:
                waiter.entry = entry
                self._own.append(waiter)
                return
            self._plain.append(entry)
            self._makeshift.append(entry)
        self._waiters.append(waiter)
        self._plain_waiting += 1

    def take_submitted(self) -> Entry | None:
        """Take the oldest submitted task out, if nobody has asked for it."""
        entry = self._first_plain() if self.unclaimed() else None
        if entry is not None:
            self._plain.popleft()
            self._left(entry)
        return entry

    def take(self) -> tuple[Waiter, Entry] | None:
        """Take out whoever is first, with the task that it gets; None if nobody waits any more.

        Who was cancelled, and has not run since, is taken out on the way.
        """
        while (entry := self.head()) is not None:
            waiter = self._own[0] if entry.is_own else self._first_waiter()
            if not waiter.future.done():
                return self._taken(waiter, entry)
            self.withdraw(waiter)
        return None

    def withdraw(self, waiter: Waiter) -> None:
        """Take out somebody who waits no more; a submitted task stays for the next."""
        if waiter.is_gone:
            return
        waiter.is_gone = True
        self.waiting -= 1
        self.totals.waiting -= 1
        if waiter.entry is not None:
            self._own_gone += 1
            self._left(waiter.entry)
            self._own, self._own_gone = _tidied(self._own, self._own_gone)
            return
        self._plain_waiting -= 1
        self._waiters_gone += 1
        self._waiters, self._waiters_gone = _tidied(self._waiters, self._waiters_gone)
        if self._makeshift:
            entry = self._makeshift.pop()
            entry.is_gone = True
            self._plain_gone += 1
            self._left(entry)
            self._plain, self._plain_gone = _tidied(self._plain, self._plain_gone)

    def put_back(self, entry: Entry) -> None:
        """Queue a submitted task again, in its old place: who was given it never used it."""
        place = bisect_left(self._plain, entry.sequence, key=lambda other: other.sequence)
        self._plain.insert(place, entry)
        self._entered(entry)

    def head(self) -> Entry | None:
        """Return the task that has waited longest of those for which somebody waits."""
        plain = self._first_plain() if self._plain_waiting else None
        own = self._first_own() if self._own else None
        if own is None or (plain is not None and plain.sequence < own.sequence):
            return plain
        return own

    def drop_tasks(self) -> None:
        """Forget what was submitted; nobody waits for it any more."""
        while (entry := self._first_plain()) is not None:
            self._plain.popleft()
            self._left(entry)

    def waiters(self) -> list[Waiter]:
        """Return everybody who waits, with and without a task of its own."""
        return [waiter for waiter in (*self._waiters, *self._own) if not waiter.is_gone]

    def _taken(self, waiter: Waiter, entry: Entry) -> tuple[Waiter, Entry]:
        waiter.is_gone = True
        self.waiting -= 1
        self.totals.waiting -= 1
        if entry.is_own:
            self._own.popleft()
            self._left(entry)
            return waiter, entry
        self._waiters.popleft()
        self._plain_waiting -= 1
        self._plain.popleft()
        if entry.is_makeshift:
            self._makeshift.popleft()
        self._left(entry)
        return waiter, entry

    def _entered(self, entry: Entry) -> None:
        self.queued += 1
        self.depth_micro += entry.weight_micro
        totals = self.totals
        totals.queued += 1
        totals.depth_micro += entry.weight_micro

    def _left(self, entry: Entry) -> None:
        self.queued -= 1
        self.depth_micro -= entry.weight_micro
        totals = self.totals
        totals.queued -= 1
        totals.depth_micro -= entry.weight_micro

    def _first_plain(self) -> Entry | None:
        plain = self._plain
        while plain and plain[0].is_gone:
            plain.popleft()
            self._plain_gone -= 1
        return plain[0] if plain else None

    def _first_own(self) -> Entry | None:
        own = self._own
        while own and own[0].is_gone:
            own.popleft()
            self._own_gone -= 1
        return own[0].entry if own else None

    def _first_waiter(self) -> Waiter:
        waiters = self._waiters
        while waiters[0].is_gone:
            waiters.popleft()
            self._waiters_gone -= 1
        return waiters[0]


def _tidied(queue: deque[Queued], gone: int) -> tuple[deque[Queued], int]:
    """Drop those that have left from the middle of a queue, once they are many."""
    if gone <= SLACK_GONE + len(queue) // 2:
        return queue, gone
    return deque(one for one in queue if not one.is_gone), 0
