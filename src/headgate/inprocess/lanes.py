"""The queue of one agent: tasks that wait, and who waits for them.

A task is queued in one of three ways. *Submitted* ones lie in the lane until somebody asks for a
permit: the oldest goes to whoever asked first. An *own* task comes with the one who asks. Who asks
without one, while every submitted task has its taker, queues a *makeshift* task of weight 1.

Rule: own and makeshift tasks come and go with their waiter, and nobody has the age of another's.
Nothing that was submitted is lost with whoever waited for it: it goes to the first who asked after
it was there and has only a makeshift task, otherwise to the next who asks.
"""

from __future__ import annotations

from asyncio import Future, TimerHandle
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

import msgspec

from headgate.core.load import MICRO, AdaptiveAlpha, LoadRanking
from headgate.core.task import Task

SLACK_GONE = 32
NEVER = -1


by_sequence = attrgetter("sequence")
by_number = attrgetter("number")


class Entry:
    """A queued task: what it weighs, since which tick it waits, and its position in the order."""

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
    """Somebody who waits for a permit, with its task if that came with it; `number` is its turn.

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

    __slots__ = ("depth_micro", "queued", "waiting", "waiting_for_budget")

    def __init__(self) -> None:
        self.queued = 0
        self.waiting = 0
        self.waiting_for_budget = 0
        self.depth_micro = 0


class Lane:
    """What one agent has queued, who waits for it, and how many permits it has.

    `waiting_for_budget` counts its calls that wait for money, without a task in the queue.
    `served` is the number of the grant that it got last.
    """

    __slots__ = (
        "_own",
        "_own_gone",
        "_submitted",
        "_takers",
        "_takers_gone",
        "agent_id",
        "capacity",
        "counters",
        "depth_micro",
        "in_flight",
        "is_known",
        "order",
        "queued",
        "served",
        "totals",
        "waiting",
        "waiting_for_budget",
    )

    def __init__(self, agent_id: str, order: int, capacity: int | None, totals: Totals) -> None:
        self.agent_id = agent_id
        self.order = order
        self.capacity = capacity
        self.is_known = True
        self.depth_micro = 0
        self.queued = 0
        self.waiting = 0
        self.waiting_for_budget = 0
        self.in_flight = 0
        self.served = NEVER
        self.counters = LaneCounters()
        self.totals = totals
        self._submitted: deque[Entry] = deque()
        self._takers: deque[Waiter] = deque()
        self._takers_gone = 0
        self._own: deque[Waiter] = deque()
        self._own_gone = 0

    @property
    def is_competing(self) -> bool:
        """Whether somebody waits here, and the agent has a permit of its own left."""
        return self.waiting > 0 and (self.capacity is None or self.in_flight < self.capacity)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued here, nothing in flight, and nobody waits for money."""
        return not (self.queued or self.waiting or self.in_flight or self.waiting_for_budget)

    def stats(self, total_micro: int) -> AgentStats:
        """Return what the agent got, beside the weight that was granted in all."""
        counters = self.counters
        grants = counters.grants or 1
        return AgentStats(
            agent_id=self.agent_id,
            queued=self.queued,
            waiting_for_budget=self.waiting_for_budget,
            in_flight=self.in_flight,
            grants=counters.grants,
            weight=counters.granted_micro / MICRO,
            share=counters.granted_micro / total_micro if total_micro else 0.0,
            mean_wait_ticks=counters.waited_ticks / grants,
            longest_wait_ticks=counters.longest_wait_ticks,
            mean_wait_seconds=counters.waited_seconds / grants,
            longest_wait_seconds=counters.longest_wait_seconds,
            charged_micro_usd=counters.charged_micro_usd,
            charged_tokens=counters.charged_tokens,
        )

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
        """Queue a submitted task again, in its old position: who was given it never used it."""
        position = bisect_left(self._submitted, entry.sequence, key=by_sequence)
        self._submitted.insert(position, entry)
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
        lane.counters, lane.served = self.counters, self.served
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
        for position in range(first, len(self._own)):
            waiter = self._own[position]
            entry = waiter.entry
            if not waiter.is_gone and entry is not None and entry.task is None:
                del self._own[position]
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


# Which lane goes next: the highest load, and before it a lane that has waited too long.
#
# Lanes are ranked when a permit is to be given, never when somebody asks for one. Until then a lane
# that changed is only noted, so that many changes between two grants cost one.


class LaneOrder:
    """The lanes in which somebody waits, and which of them goes next."""

    def __init__(self, *, alpha: float, auto_tune: bool, max_wait_ticks: int | None) -> None:
        self.alpha = alpha
        self._adaptive = AdaptiveAlpha(alpha=alpha) if auto_tune else None
        self.max_wait_ticks = max_wait_ticks
        self._ranking: LoadRanking[Lane] = LoadRanking()
        self._changed: dict[Lane, None] = {}
        self._oldest: list[tuple[int, int, Lane]] = []

    def touch(self, lane: Lane) -> None:
        """Note that a lane has got or lost tasks, waiters or permits."""
        self._changed[lane] = None

    def clear(self) -> None:
        """Forget all lanes."""
        self._ranking = LoadRanking()
        self._changed.clear()
        self._oldest.clear()

    def best(self, tick: int) -> Lane | None:
        """Return the lane that goes next."""
        if self._changed:
            self._catch_up()
        overdue = None if self.max_wait_ticks is None else self._overdue(tick)
        return self._ranking.best(tick=tick, alpha=self.alpha) if overdue is None else overdue

    @property
    def is_adaptive(self) -> bool:
        """Whether alpha follows what is observed."""
        return self._adaptive is not None

    def observe(self, lane: Lane, wait_ticks: int) -> None:
        """Let alpha follow a grant, where it is to follow."""
        if self._adaptive is not None:
            self._adaptive = self._adaptive.observe(
                agent_id=lane.agent_id,
                wait_ticks=wait_ticks,
                queue_depth=lane.totals.depth_micro / MICRO,
            )
            self.alpha = self._adaptive.alpha

    def _catch_up(self) -> None:
        ranking = self._ranking
        for lane in self._changed:
            # What `is_competing` says, inlined: this is done for each grant.
            is_full = lane.capacity is not None and lane.in_flight >= lane.capacity
            head = None if is_full or not lane.waiting else lane.head()
            if head is None:
                ranking.discard(lane)
                continue
            ranking.put(
                lane,
                depth_micro=lane.depth_micro,
                oldest_tick=head.tick,
                last_served=lane.served,
                order=lane.order,
            )
            if self.max_wait_ticks is not None:
                heappush(self._oldest, (head.sequence, lane.order, lane))
        self._changed.clear()

    def _overdue(self, tick: int) -> Lane | None:
        """Return the lane whose oldest task is the oldest of all, if that has waited too long.

        Each change of a lane leaves a line in the heap; one that is no longer true is dropped when
        it surfaces, and all are when they are many.
        """
        if len(self._oldest) > 2 * len(self._ranking) + 64:
            self._oldest = sorted({line for line in self._oldest if self._is_true(line)})
        while self._oldest and not self._is_true(self._oldest[0]):
            heappop(self._oldest)
        if not self._oldest:
            return None
        lane = self._oldest[0][2]
        head = lane.head()
        limit = self.max_wait_ticks
        if head is None or limit is None or tick - head.tick < limit:
            return None
        return lane

    def _is_true(self, line: tuple[int, int, Lane]) -> bool:
        sequence, _, lane = line
        if lane not in self._ranking:
            return False
        head = lane.head()
        return head is not None and head.sequence == sequence


# What each agent got: grants, waits, cost, and its share of the whole.
#
# Waits are counted in ticks, which is what the order goes by, and in seconds, which is what people
# feel. A share is that of the weight that was granted.


class LaneCounters:
    """The running sums of one lane."""

    __slots__ = (
        "charged_micro_usd",
        "charged_tokens",
        "granted_micro",
        "grants",
        "longest_wait_seconds",
        "longest_wait_ticks",
        "waited_seconds",
        "waited_ticks",
    )

    def __init__(self) -> None:
        self.grants = 0
        self.granted_micro = 0
        self.waited_ticks = 0
        self.longest_wait_ticks = 0
        self.waited_seconds = 0.0
        self.longest_wait_seconds = 0.0
        self.charged_micro_usd = 0
        self.charged_tokens = 0

    def granted(self, weight_micro: int, ticks: int, seconds: float) -> None:
        """Count a grant, and what it had waited for."""
        self.grants += 1
        self.granted_micro += weight_micro
        if seconds > 0.0 or ticks:
            self.waited_ticks += ticks
            self.waited_seconds += seconds
            self.longest_wait_ticks = max(self.longest_wait_ticks, ticks)
            self.longest_wait_seconds = max(self.longest_wait_seconds, seconds)

    def taken_back(self, weight_micro: int, ticks: int, seconds: float) -> None:
        """Uncount a grant that was never used; its wait stays the longest if it was."""
        self.grants -= 1
        self.granted_micro -= weight_micro
        self.waited_ticks -= ticks
        self.waited_seconds -= seconds

    def charged(self, micro_usd: int, tokens: int) -> None:
        """Count what was booked for a grant."""
        self.charged_micro_usd += micro_usd
        self.charged_tokens += tokens


class AgentStats(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent stands now, and what it got since it was registered.

    `waiting_for_budget` counts its calls that wait for room in a budget.
    """

    agent_id: str
    queued: int
    waiting_for_budget: int
    in_flight: int
    grants: int
    weight: float
    share: float
    mean_wait_ticks: float
    longest_wait_ticks: int
    mean_wait_seconds: float
    longest_wait_seconds: float
    charged_micro_usd: int
    charged_tokens: int


def jain_index(amounts: Sequence[float]) -> float:
    """Return how even amounts are: 1 if all are equal, 1/n if one of n has everything."""
    squares = sum(amount * amount for amount in amounts)
    if not squares:
        return 1.0
    total = sum(amounts)
    return total * total / (len(amounts) * squares)
