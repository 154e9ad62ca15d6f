"""The permits of a resource: who has one, who waits, and who is next.

A free permit goes to whoever asks, at once and without scoring. Otherwise the lane with the highest
load goes next; loads are compared when a permit is released, and each release is one tick. Tasks in
service neither age nor count as queued.

Rule: a permit is taken when its grant is made and freed once, whatever is raised, cancelled or
timed out in between. Every step here is one callback of the event loop, so there is no moment at
which two could have the same permit, or nobody knows of one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar

import msgspec

from headgate.budgets.tracker import ActiveReservation, Amount
from headgate.core.load import MICRO, to_micro_weight
from headgate.core.money import to_micro_usd, to_tokens
from headgate.core.task import Task
from headgate.errors import (
    HeadgateError,
    IllegalSettlementError,
    InvalidFieldError,
    InvalidSettingError,
    PermitTimeoutError,
    SchedulerClosedError,
    TooManyWaitingError,
)
from headgate.inprocess.lanes import Entry, Lane, LaneOrder, Totals, Waiter

# A shared resource: so many permits for concurrent calls.
#
# Rule: a resource belongs to one scheduler. Two that counted its permits side by side could only
# agree by asking each other at every grant.

MAX_CAPACITY = 1_000_000


class SharedResource:
    """Something that bears `capacity` concurrent calls: a provider's key, a database, a GPU."""

    __slots__ = ("_capacity", "in_use", "is_claimed", "name")

    def __init__(self, name: str, capacity: int = 1) -> None:
        if not name:
            raise InvalidSettingError("name", "must not be empty")
        self._capacity = whole_number("capacity", capacity, most=MAX_CAPACITY)
        self.name = name
        self.in_use = 0
        self.is_claimed = False

    def __repr__(self) -> str:
        return f"SharedResource({self.name!r}, {self.in_use} of {self.capacity} in use)"

    @property
    def capacity(self) -> int:
        """How many calls it bears at once; fixed, because those who wait count on it."""
        return self._capacity

    @property
    def free(self) -> int:
        """How many permits nobody has."""
        return self._capacity - self.in_use

    def claim(self) -> None:
        """Let a scheduler have it, once."""
        if self.is_claimed:
            problem = f"{self.name!r} has a scheduler already; use that one, or make another"
            raise InvalidSettingError("resource", problem)
        self.is_claimed = True


def whole_number(field: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """Return a setting that is a whole number in its range, or say what is wrong with it."""
    # True is an int to Python, and is not what anybody means by a number.
    if type(value) is int and least <= value and (most is None or value <= most):
        return value
    bounds = f"at least {least:,}" if most is None else f"between {least:,} and {most:,}"
    raise InvalidSettingError(field, f"must be a whole number, {bounds}, not {value!r}")


MAX_AGENTS = 10_000


class Permits:
    """What is granted and queued of one resource; `on_idle` hears when nothing is any more."""

    def __init__(
        self,
        resource: SharedResource,
        order: LaneOrder,
        trace: Trace,
        *,
        max_waiters: int,
        is_open_to_all: bool,
        on_idle: Callable[[], None],
    ) -> None:
        self.resource = resource
        self.order = order
        self.totals = Totals()
        self.tick = 0
        self.is_closed = False
        self._now = 0.0
        self._capacity = resource.capacity
        self.lanes: dict[str, Lane] = {}
        self._lanes_made = 0
        self._is_open_to_all = is_open_to_all
        self._max_waiters = max_waiters
        self._on_idle = on_idle
        self._sequence = 0
        self._granted = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lines = trace.lines if trace.lines.maxlen else None

    def open_lane(self, agent_id: str, capacity: int | None) -> Lane:
        """Let one more agent ask."""
        if not agent_id:
            raise InvalidFieldError("agent_id", "must not be empty")
        if agent_id in self.lanes:
            raise InvalidFieldError("agent_id", f"{agent_id!r} is registered already")
        if len(self.lanes) >= MAX_AGENTS:
            raise InvalidFieldError("agent_id", f"more than {MAX_AGENTS:,} agents; unregister some")
        self._lanes_made += 1
        lane = self.lanes[agent_id] = Lane(agent_id, self._lanes_made, capacity, self.totals)
        return lane

    def close_lane(self, agent_id: str) -> None:
        """Forget an agent: who waits is refused, what is queued is dropped, what runs goes on."""
        lane = self.lanes.pop(agent_id, None)
        if lane is None:
            raise unknown_agent(agent_id)
        lane.is_known = False
        self._empty(lane, unknown_agent(agent_id))

    def close(self) -> None:
        """Grant nothing any more, and refuse whoever waits."""
        self.is_closed = True
        for lane in self.lanes.values():
            self._empty(lane, SchedulerClosedError(self.resource.name))

    def submit(self, agent_id: str, task: Task) -> None:
        """Queue a task for whoever asks next in its lane."""
        if self.is_closed:
            raise SchedulerClosedError(self.resource.name)
        self.check_loop()
        self.check_room()
        lane = self._lane_of(agent_id)
        lane.submit(self._entry(task, is_submitted=True))
        if lane.waiting:
            self.order.touch(lane)
        self._note("queued", lane)

    def ask(
        self, waiter: Waiter, agent_id: str, task: Task | None, timeout: float | None
    ) -> Grant | None:
        """Return a grant if there is a free permit; otherwise queue who asks, and return None."""
        if self.is_closed:
            raise SchedulerClosedError(self.resource.name)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._move_to(loop)
        lane = self.lanes.get(agent_id) or self._lane_of(agent_id)
        self._now = loop.time()
        # A free permit and a lane with room of its own mean that nobody waits who could have it.
        if self.resource.in_use < self._capacity and (
            lane.capacity is None or lane.in_flight < lane.capacity
        ):
            entry = lane.take_submitted() if task is None else None
            return self._grant(lane, entry or self._entry(task), 0.0)
        if timeout is not None and not timeout > 0:
            raise self._too_late(lane, timeout)
        self._queue(waiter, lane, task)
        waiter.future = loop.create_future()
        if timeout is not None:
            waiter.timer = loop.call_later(timeout, self._expire, waiter, timeout)
        return None

    def free(self, grant: Grant) -> None:
        """Free a permit, once; that is a tick, and the next one goes."""
        if grant.is_released:
            return
        if grant.lane.totals is not self.totals:
            self._free_of_elsewhere(grant)
            return
        self.tick += 1
        lane = self._vacate(grant)
        if self._loop is not None:
            self._now = self._loop.time()
        if self._lines is not None:
            self._lines.append(("released", self._now, self.tick, lane.agent_id, lane.queued, 0))
        if self.totals.waiting:
            self._dispatch()
        elif not self.resource.in_use:
            self._on_idle()

    def refuse(self, grant: Grant) -> None:
        """Free a permit that cannot be used, with its task; nothing was done, so it is no tick."""
        self._undo(grant, "refused")

    def hand_back(self, grant: Grant) -> None:
        """Free a permit that nobody came for; a submitted task is queued again."""
        self.requeue(grant)
        self._undo(grant, "handed back")

    def requeue(self, grant: Grant) -> None:
        """Queue a submitted task again where it was: whoever took it did not use it."""
        entry, lane = grant.entry, grant.lane
        if entry.is_submitted and not self.is_closed and lane.is_known:
            lane.put_back(entry)
            if lane.waiting:
                self.order.touch(lane)

    def begin_budget_wait(self, lane: Lane) -> None:
        """Count a call that waits for money; it is one of those that may wait."""
        self.check_room()
        lane.waiting_for_budget += 1
        self.totals.waiting_for_budget += 1

    def end_budget_wait(self, lane: Lane) -> None:
        """Uncount a call that waits for money no more."""
        lane.waiting_for_budget -= 1
        lane.totals.waiting_for_budget -= 1

    def check_room(self) -> None:
        """Refuse one more where as many wait as may."""
        totals = self.totals
        if totals.queued + totals.waiting_for_budget >= self._max_waiters:
            raise TooManyWaitingError(self.resource.name, self._max_waiters)

    def check_loop(self) -> None:
        """Refuse whoever comes from another thread, or another loop while this one is used."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise self._elsewhere() from None
        if loop is not self._loop:
            self._move_to(loop)

    def _queue(self, waiter: Waiter, lane: Lane, task: Task | None) -> None:
        waiter.lane = lane
        waiter.since = self._now
        if task is None and lane.unclaimed():
            self._sequence += 1
            entry = None
        else:
            self.check_room()
            entry = self._entry(task)
        waiter.number = self._sequence
        lane.wait(waiter, entry)
        self.order.touch(lane)
        if self._lines is not None and entry is not None:
            self._lines.append(("queued", self._now, self.tick, lane.agent_id, lane.queued, 0))

    def _entry(self, task: Task | None, *, is_submitted: bool = False) -> Entry:
        self._sequence += 1
        if task is None:
            return Entry(self._sequence, self.tick, None)
        weight_micro = to_micro_weight(task.weight)
        return Entry(self._sequence, self.tick, task, weight_micro, is_submitted=is_submitted)

    def _dispatch(self) -> None:
        resource, totals, order = self.resource, self.totals, self.order
        while totals.waiting and resource.in_use < self._capacity:
            lane = order.best(self.tick)
            if lane is None:
                return
            taken = lane.take()
            order.touch(lane)
            if taken is not None:
                waiter, entry = taken
                if waiter.timer is not None:
                    waiter.timer.cancel()
                grant = self._grant(lane, entry, self._now - waiter.since)
                waiter.future.set_result(grant)
                if order.is_adaptive:
                    order.observe(lane, self.tick - entry.tick)

    def _grant(self, lane: Lane, entry: Entry, wait_seconds: float) -> Grant:
        tick = self.tick
        lane.in_flight += 1
        self._granted += 1
        lane.served = self._granted
        self.resource.in_use += 1
        wait_ticks = tick - entry.tick
        lane.counters.granted(entry.weight_micro, wait_ticks, wait_seconds)
        if self._lines is not None:
            line = ("granted", self._now, tick, lane.agent_id, lane.queued, wait_ticks)
            self._lines.append(line)
        return Grant(lane, entry, wait_ticks, wait_seconds)

    def _vacate(self, grant: Grant) -> Lane:
        grant.is_released = True
        lane = grant.lane
        lane.in_flight -= 1
        self.resource.in_use -= 1
        if lane.capacity is not None and lane.waiting:
            self.order.touch(lane)
        return lane

    def _undo(self, grant: Grant, kind: str) -> None:
        if grant.is_released:
            return
        if grant.lane.totals is not self.totals:
            self._free_of_elsewhere(grant)
            return
        if self._loop is not None:
            self._now = self._loop.time()
        lane = self._vacate(grant)
        lane.counters.taken_back(grant.entry.weight_micro, grant.wait_ticks, grant.wait_seconds)
        self._note(kind, lane)
        if lane.waiting:
            self.order.touch(lane)
        self._dispatch()
        if not self.resource.in_use:
            self._on_idle()

    def give_up(self, waiter: Waiter) -> None:
        """Take out whoever was cancelled while it waited, or hand back what it has just got."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        future = waiter.future
        if future.done() and not future.cancelled():
            outcome = future.result()
            if isinstance(outcome, Grant):
                self.hand_back(outcome)
            return
        future.cancel()
        self._withdraw(waiter)

    def _withdraw(self, waiter: Waiter) -> None:
        if not waiter.is_gone:
            waiter.lane.withdraw(waiter)
            self.order.touch(waiter.lane)
            self._note("withdrawn", waiter.lane)

    def turn_away(self, waiter: Waiter, error: HeadgateError) -> None:
        """Let somebody who waits go with an error; it is queued no more."""
        if waiter.timer is not None:
            waiter.timer.cancel()
        self._withdraw(waiter)
        if not waiter.future.done():
            waiter.future.set_result(error)

    def _expire(self, waiter: Waiter, timeout: float) -> None:
        if not waiter.future.done():
            self.turn_away(waiter, self._too_late(waiter.lane, timeout))

    def _too_late(self, lane: Lane, timeout: float) -> PermitTimeoutError:
        is_full = lane.capacity is not None and lane.in_flight >= lane.capacity
        agents_most = lane.capacity if is_full else None
        return PermitTimeoutError(
            self.resource.name, lane.agent_id, timeout, agents_most=agents_most
        )

    def _lane_of(self, agent_id: str) -> Lane:
        lane = self.lanes.get(agent_id)
        if lane is not None:
            return lane
        if not self._is_open_to_all:
            raise unknown_agent(agent_id)
        if len(self.lanes) >= MAX_AGENTS:
            self.lanes = {name: one for name, one in self.lanes.items() if not one.is_idle}
        return self.open_lane(agent_id, None)

    def _empty(self, lane: Lane, error: HeadgateError) -> None:
        for waiter in lane.waiters():
            self.turn_away(waiter, error)
        lane.drop_tasks()

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and self._loop.is_closed():
            self._start_anew()
        elif self.totals.waiting or self.totals.waiting_for_budget or self.resource.in_use:
            raise self._elsewhere()
        self._loop = loop

    def _start_anew(self) -> None:
        """Forget what a loop that is closed has left behind: nobody of it can release any more.

        What was submitted stays. A grant of before is known by its lane, and frees nothing here.
        """
        former, self.lanes, self.totals = self.lanes, {}, Totals()
        self.resource.in_use = 0
        self.order.clear()
        for lane in former.values():
            lane.is_known = False
            self.lanes[lane.agent_id] = lane.successor(self.totals)

    def _free_of_elsewhere(self, grant: Grant) -> None:
        if grant.lane.is_known:
            problem = f"is of another scheduler than that of {self.resource.name!r}; release there"
            raise InvalidFieldError("grant", problem)
        grant.is_released = True

    def _elsewhere(self) -> InvalidSettingError:
        problem = "has a scheduler that another event loop uses; give each loop its own"
        return InvalidSettingError("resource", f"{self.resource.name!r} {problem}")

    def _note(self, kind: str, lane: Lane, *, wait_ticks: int = 0) -> None:
        if self._lines is not None:
            at = 0.0 if self._loop is None else self._loop.time()
            self._lines.append((kind, at, self.tick, lane.agent_id, lane.queued, wait_ticks))


def unknown_agent(agent_id: str) -> InvalidFieldError:
    """Return the error for an agent that may not ask, or not any more."""
    problem = f"{agent_id!r} is not registered; register it, or give None for agents"
    return InvalidFieldError("agent_id", problem)


# A grant: one permit of a resource, for one task of one agent, until it is released.
#
# Rule: a permit is freed exactly once, however often its grant is released.

NOTHING = (0, 0)

_current: ContextVar[Grant | None] = ContextVar("headgate_grant", default=None)


class Grant:
    """A permit that somebody has, with the task that it is for and the money that is held for it.

    `model` is the one that the call may use: where a budget was too small for the one that was
    asked for, the cheaper one that the caller named.
    """

    __slots__ = (
        "_counted",
        "_held",
        "_holding",
        "_task",
        "charged_micro_usd",
        "entry",
        "is_released",
        "lane",
        "model",
        "wait_seconds",
        "wait_ticks",
    )

    def __init__(self, lane: Lane, entry: Entry, wait_ticks: int, wait_seconds: float) -> None:
        self.lane = lane
        self.entry = entry
        self.is_released = False
        self.wait_ticks = wait_ticks
        self.wait_seconds = wait_seconds
        self.model: str | None = None
        self.charged_micro_usd: int | None = None
        self._counted = NOTHING
        self._task = entry.task
        self._held: ActiveReservation | None = None
        self._holding: AbstractAsyncContextManager[ActiveReservation] | None = None

    def __repr__(self) -> str:
        state = "released" if self.is_released else "held"
        return f"Grant(agent_id={self.agent_id!r}, weight={self.weight:g}, {state})"

    @property
    def agent_id(self) -> str:
        """Whose permit it is."""
        return self.lane.agent_id

    @property
    def weight(self) -> float:
        """What its task counted in the queue."""
        return self.entry.weight_micro / MICRO

    @property
    def task(self) -> Task:
        """The task that it is for; one of weight 1 where none was submitted."""
        if self._task is None:
            self._task = Task(agent_id=self.lane.agent_id, enqueued_tick=self.entry.tick)
        return self._task

    @property
    def held(self) -> ActiveReservation | None:
        """The money that is held for it, None without a budget."""
        return self._held

    def charge(self, actual_usd: Amount, *, tokens: int | None = None) -> None:
        """Report what the call cost in all; a later report replaces it.

        With a budget it is booked when the grant is released, and a call that reports nothing is
        taken to have used all that was held. Without one it only counts in the stats.
        """
        cost = to_micro_usd(actual_usd, field="actual_usd")
        if self.is_released:
            raise IllegalSettlementError(
                subject=f"the grant of {self.agent_id!r}",
                current="released",
                wanted="charged",
                allowed=(),
                advice="report the cost before the permit is released",
            )
        if self._held is not None:
            self._held.charge(actual_usd, tokens=tokens)
        self._count(cost, 0 if tokens is None else to_tokens(tokens))
        self.charged_micro_usd = cost

    def not_charged(self) -> None:
        """Report that the provider cannot have charged."""
        if self._held is not None:
            self._held.not_charged()

    def attach(
        self,
        holding: AbstractAsyncContextManager[ActiveReservation],
        held: ActiveReservation,
        model: str | None,
    ) -> None:
        """Give it the money that was held for it."""
        self._holding, self._held, self.model = holding, held, model

    async def settle(self, error: BaseException | None) -> None:
        """Book what the call cost; afterwards nothing is held any more."""
        holding, self._holding = self._holding, None
        if holding is None or self._held is None:
            return
        try:
            await holding.__aexit__(
                None if error is None else type(error),
                error,
                None if error is None else error.__traceback__,
            )
        finally:
            cost = (0, 0) if self._held.is_given_back else self._held.cost
            self._count(*cost)

    def _count(self, micro_usd: int, tokens: int) -> None:
        counted_micro_usd, counted_tokens = self._counted
        self.lane.counters.charged(micro_usd - counted_micro_usd, tokens - counted_tokens)
        self._counted = (micro_usd, tokens)


def current_grant() -> Grant | None:
    """Return the grant under which this code was called by `wrap`, None outside of one.

    Tasks that a call has started and left behind are outside of it when it has ended.
    """
    grant = _current.get()
    return None if grant is None or grant.is_released else grant


@contextmanager
def granted_to(grant: Grant) -> Iterator[None]:
    """Let what is called meanwhile find the grant that it runs under."""
    token = _current.set(grant)
    try:
        yield
    finally:
        _current.reset(token)


# What the scheduler did lately, as lines that a person can read.
#
# Only the latest events are kept. They are tuples until somebody looks, because an event is noted
# far more often than it is read.

DEFAULT_EVENTS = 1_000
MAX_EVENTS = 1_000_000


class SchedulerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step: when, at which tick, of which agent, and how many of its tasks wait then.

    A task is queued and granted, and its permit released. Who gives up is withdrawn; a grant that
    nobody came for is handed back, and one that a budget cannot hold is refused.
    `wait_ticks` is how long the task of a grant had waited.
    """

    kind: str
    at_seconds: float
    tick: int
    agent_id: str
    queued: int
    wait_ticks: int

    def __str__(self) -> str:
        waited = f", waited {self.wait_ticks} ticks" if self.kind == "granted" else ""
        when = f"{self.at_seconds:12.3f}  tick {self.tick:<6}"
        return f"{when} {self.kind:<11}  {self.agent_id} ({self.queued} queued{waited})"


class Trace:
    """The latest events, the newest last; printed, it is one line for each."""

    def __init__(self, most_events: int) -> None:
        self.lines: deque[tuple[str, float, int, str, int, int]] = deque(maxlen=most_events)

    def events(self) -> list[SchedulerEvent]:
        """Return what is kept, the oldest first."""
        return [
            SchedulerEvent(
                kind=kind,
                at_seconds=at_seconds,
                tick=tick,
                agent_id=agent_id,
                queued=queued,
                wait_ticks=wait_ticks,
            )
            for kind, at_seconds, tick, agent_id, queued, wait_ticks in self.lines
        ]

    def __str__(self) -> str:
        return "\n".join(str(event) for event in self.events())
