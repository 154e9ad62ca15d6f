"""The queue of one agent: tasks that wait, and who waits for them.

A task is queued in one of three ways. *Submitted* ones lie in the lane until somebody asks for a
place: the oldest goes to whoever asked first. An *own* task comes with the one who asks. Who asks
without one, while every submitted task has its taker, queues a *makeshift* task of weight 1.

Rule: own and makeshift tasks come and go with their waiter, and nobody has the age of another's.
Nothing that was submitted is lost with whoever waited for it: it goes to the first who asked after
it was there and has only a makeshift task, otherwise to the next who asks.
"""

from __future__ import annotations

from asyncio import Future, TimerHandle
from bisect import bisect_left, bisect_right
from collections import deque
from operator import attrgetter
from typing import Any

from headgate.core.lanes.load_ranking import MICRO
from headgate.core.tasks.task import Task
from headgate.inprocess.figures import Tally

SLACK_GONE = 32
NEVER = -1


by_sequence = attrgetter("sequence")
by_number = attrgetter("number")


class Entry:
    """A queued task: what it weighs, since which tick it waits, and its place in the order."""

    __slots__ = ("is_submitted", "sequence", "task", "tick", "weight_micro")

    def __init__(
        self,
        sequence: int,
        tick: int,
        task: Task | None,
        weight_micro: int = MICRO,
        *,
        is_submitted: bool = False,
    ) -> None:
        self.sequence = sequence
        self.tick = tick
        self.task = task
        self.weight_micro = weight_micro
        self.is_submitted = is_submitted


class Waiter:
    """Somebody who waits for a place, with its task if that came with it; `number` is its turn.

    The future ends with a grant or with the error to raise. It never fails: an error that nobody
    looks at, because the waiter was cancelled at the same moment, would be logged as lost.
    """

    __slots__ = ("entry", "future", "is_gone", "lane", "number", "since", "timer")

    lane: Lane
    future: Future[Any]
    number: int
    since: float

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.timer: TimerHandle | None = None
        self.is_gone = True


class Totals:
    """What all lanes of a scheduler come to."""

    __slots__ = ("depth_micro", "parked", "queued", "waiting")

    def __init__(self) -> None:
        self.queued = 0
        self.waiting = 0
        self.parked = 0
        self.depth_micro = 0


class Lane:
    """What one agent has queued, who waits for it, and how many places it has.

    `parked` counts its calls that wait for money, without a task in the queue.
    """

    __slots__ = (
        "_own",
        "_own_gone",
        "_submitted",
        "_takers",
        "_takers_gone",
        "agent_id",
        "capacity",
        "depth_micro",
        "in_flight",
        "is_known",
        "order",
        "parked",
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
        self.parked = 0
        self.in_flight = 0
        self.served_tick = NEVER
        self.tally = Tally()
        self.totals = totals
        self._submitted: deque[Entry] = deque()
        self._takers: deque[Waiter] = deque()
        self._takers_gone = 0
        self._own: deque[Waiter] = deque()
        self._own_gone = 0

    @property
    def is_competing(self) -> bool:
        """Whether somebody waits here, and the agent has a place of its own left."""
        return self.waiting > 0 and (self.capacity is None or self.in_flight < self.capacity)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued here, nothing in flight, and nobody waits for money."""
        return not (self.queued or self.waiting or self.in_flight or self.parked)

    def submit(self, entry: Entry) -> None:
        """Queue a task for whoever asks."""
        self._submitted.append(entry)
        self._entered(entry)

    def unclaimed(self) -> bool:
        """Whether a submitted task waits that nobody has asked for."""
        return len(self._submitted) > len(self._takers) - self._takers_gone

    def wait(self, waiter: Waiter, entry: Entry | None) -> None:
        """Queue somebody: with a task of its own, a makeshift one, or None if one is unclaimed."""
        waiter.is_gone = False
        waiter.entry = entry
        self.waiting += 1
        self.totals.waiting += 1
        if entry is None:
            self._takers.append(waiter)
        else:
            self._own.append(waiter)
            self._entered(entry)

    def take_submitted(self) -> Entry | None:
        """Take the oldest submitted task out, if nobody has asked for it."""
        if not self._submitted or not self.unclaimed():
            return None
        entry = self._submitted.popleft()
        self._left(entry)
        return entry

    def take(self) -> tuple[Waiter, Entry] | None:
        """Take out whoever is first, with the task that it gets.

        Who was cancelled, and has not run since, is only withdrawn: None says that the lane has
        another head now, and may have another turn.
        """
        entry = self.head()
        if entry is None:
            return None
        waiter = self._takers[0] if entry.is_submitted else self._own[0]
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
        if waiter.entry is None:
            self._takers_gone += 1
            self._takers, self._takers_gone = _tidied(self._takers, self._takers_gone)
            self._pass_on()
            return
        self._left(waiter.entry)
        self._own_gone += 1
        self._own, self._own_gone = _tidied(self._own, self._own_gone)

    def put_back(self, entry: Entry) -> None:
        """Queue a submitted task again, in its old place: who was given it never used it."""
        place = bisect_left(self._submitted, entry.sequence, key=by_sequence)
        self._submitted.insert(place, entry)
        self._entered(entry)
        self._pass_on()

    def head(self) -> Entry | None:
        """Return the task that has waited longest of those for which somebody waits."""
        own: Entry | None = None
        if self._own:
            first = self._own[0]
            own = self._first_of_own() if first.is_gone else first.entry
        if not self._takers or not self._has_takers():
            return own
        submitted = self._submitted[0]
        return submitted if own is None or submitted.sequence < own.sequence else own

    def drop_tasks(self) -> None:
        """Forget what was submitted; nobody waits for it any more."""
        while self._submitted:
            self._left(self._submitted.popleft())

    def successor(self, totals: Totals) -> Lane:
        """Return this lane with what was submitted and counted, but nobody who waits or runs."""
        lane = Lane(self.agent_id, self.order, self.capacity, totals)
        lane.tally, lane.served_tick = self.tally, self.served_tick
        for entry in self._submitted:
            lane.submit(entry)
        return lane

    def waiters(self) -> list[Waiter]:
        """Return everybody who waits, with and without a task of its own."""
        return [waiter for waiter in (*self._takers, *self._own) if not waiter.is_gone]

    def _pass_on(self) -> None:
        """Give a submitted task that has lost its taker to the first who asked after it was there.

        A makeshift task that is older stays: its waiter would lose its age.
        """
        takers = len(self._takers) - self._takers_gone
        if len(self._submitted) <= takers:
            return
        since = self._submitted[takers].sequence
        first = bisect_right(self._own, since, key=by_number)
        for place in range(first, len(self._own)):
            waiter = self._own[place]
            entry = waiter.entry
            if not waiter.is_gone and entry is not None and entry.task is None:
                del self._own[place]
                waiter.entry = None
                self._left(entry)
                turn = bisect_left(self._takers, waiter.number, key=by_number)
                self._takers.insert(turn, waiter)
                return

    def _taken(self, waiter: Waiter, entry: Entry) -> tuple[Waiter, Entry]:
        waiter.is_gone = True
        self.waiting -= 1
        self.totals.waiting -= 1
        if entry.is_submitted:
            self._takers.popleft()
            self._submitted.popleft()
        else:
            self._own.popleft()
        self._left(entry)
        return waiter, entry

    def _entered(self, entry: Entry) -> None:
        weight_micro, totals = entry.weight_micro, self.totals
        self.queued += 1
        self.depth_micro += weight_micro
        totals.queued += 1
        totals.depth_micro += weight_micro

    def _left(self, entry: Entry) -> None:
        weight_micro, totals = entry.weight_micro, self.totals
        self.queued -= 1
        self.depth_micro -= weight_micro
        totals.queued -= 1
        totals.depth_micro -= weight_micro

    def _first_of_own(self) -> Entry | None:
        own = self._own
        while own and own[0].is_gone:
            own.popleft()
            self._own_gone -= 1
        return own[0].entry if own else None

    def _has_takers(self) -> bool:
        takers = self._takers
        while takers and takers[0].is_gone:
            takers.popleft()
            self._takers_gone -= 1
        return bool(takers)


def _tidied(queue: deque[Waiter], gone: int) -> tuple[deque[Waiter], int]:
    """Drop those that have left from the middle of a queue, once they are many."""
    if gone <= SLACK_GONE + len(queue) // 2:
        return queue, gone
    return deque(one for one in queue if not one.is_gone), 0
