"""The places of a resource: who has one, who waits, and who is next.

A free place goes to whoever asks, at once and without scoring. Otherwise the lane with the highest
load goes next; loads are compared when a place is released, and each release is one tick. Tasks in
service neither age nor count as queued.

Rule: a place is taken when its grant is made and freed once, whatever is raised, cancelled or timed
out in between. Every step here is one callback of the event loop, so there is no moment at which
two could have the same place, or nobody knows of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headgate.core.load_ranking import to_micro_weight
from headgate.core.tasks import Task
from headgate.errors import (
    HeadgateError,
    InvalidFieldError,
    InvalidSettingError,
    PlaceTimeoutError,
    SchedulerClosedError,
    TooManyWaitingError,
)
from headgate.inprocess.grants import Grant
from headgate.inprocess.lane_order import LaneOrder
from headgate.inprocess.lanes import Entry, Lane, Totals, Waiter
from headgate.inprocess.resource import SharedResource
from headgate.inprocess.trace import Trace

MAX_AGENTS = 10_000


class Places:
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
        self.lanes: dict[str, Lane] = {}
        self._lanes_made = 0
        self._is_open_to_all = is_open_to_all
        self._max_waiters = max_waiters
        self._on_idle = on_idle
        self._sequence = 0
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
            raise _unknown(agent_id)
        lane.is_known = False
        self._empty(lane, _unknown(agent_id))

    def close(self) -> None:
        """Grant nothing any more, and refuse whoever waits."""
        self.is_closed = True
        for lane in self.lanes.values():
            self._empty(lane, SchedulerClosedError(self.resource.name))

    def submit(self, agent_id: str, task: Task) -> None:
        """Queue a task for whoever asks next in its lane."""
        self._check_open()
        self._check_room()
        lane = self._lane_of(agent_id)
        lane.submit(self._entry(task))
        if lane.waiting:
            self.order.touch(lane)
        self._note("queued", lane)

    def ask(
        self, waiter: Waiter, agent_id: str, task: Task | None, timeout: float | None
    ) -> Grant | None:
        """Return a grant if there is a free place; otherwise queue who asks, and return None."""
        if self.is_closed:
            raise SchedulerClosedError(self.resource.name)
        lane = self.lanes.get(agent_id) or self._lane_of(agent_id)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._move_to(loop)
        # A free place and a lane with room of its own mean that nobody waits who could have it.
        if self.resource.in_use < self.resource.capacity and (
            lane.capacity is None or lane.in_flight < lane.capacity
        ):
            entry = lane.take_submitted() if task is None else None
            if entry is None:
                entry = self._entry(task, is_own=task is not None)
            return self._grant(lane, entry, 0.0)
        if timeout is not None and not timeout > 0:
            raise PlaceTimeoutError(self.resource.name, agent_id, timeout)
        self._queue(waiter, lane, task, loop)
        if timeout is not None:
            waiter.timer = loop.call_later(timeout, self._expire, waiter, timeout)
        return None

    async def wait(self, waiter: Waiter) -> Grant:
        """Wait for a place; whoever gives up leaves nothing behind."""
        try:
            outcome = await waiter.future
        except BaseException:
            self._give_up(waiter)
            raise
        if isinstance(outcome, Grant):
            return outcome
        raise outcome

    def free(self, grant: Grant) -> None:
        """Free a place, once; that is a tick, and the next one goes."""
        if grant.is_released:
            return
        self.tick += 1
        lane = self._vacate(grant)
        if self._lines is not None:
            self._note("released", lane)
        if self.totals.waiting:
            self._dispatch()
        elif not self.resource.in_use:
            self._on_idle()

    def refuse(self, grant: Grant) -> None:
        """Free a place that cannot be used, with its task; nothing was done, so it is no tick."""
        self._undo(grant, "refused")

    def hand_back(self, grant: Grant) -> None:
        """Free a place that nobody came for; a submitted task is queued again."""
        self.requeue(grant)
        self._undo(grant, "handed back")

    def requeue(self, grant: Grant) -> None:
        """Queue a submitted task again where it was: whoever took it did not use it."""
        entry, lane = grant.entry, grant.lane
        if not (entry.is_own or entry.is_makeshift or self.is_closed) and lane.is_known:
            lane.put_back(entry)

    def _queue(
        self, waiter: Waiter, lane: Lane, task: Task | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        waiter.lane = lane
        if task is None and lane.unclaimed():
            entry = None
        else:
            self._check_room()
            entry = self._entry(task, is_own=task is not None)
        waiter.future = loop.create_future()
        waiter.since = loop.time()
        lane.wait(waiter, entry)
        self.order.touch(lane)
        if self._lines is not None and entry is not None:
            self._note("queued", lane)

    def _entry(self, task: Task | None, *, is_own: bool = False) -> Entry:
        self._sequence += 1
        if task is None:
            return Entry(self._sequence, self.tick, None)
        weight_micro = to_micro_weight(task.weight)
        return Entry(self._sequence, self.tick, task, weight_micro, is_own=is_own)

    def _dispatch(self) -> None:
        resource, totals, order = self.resource, self.totals, self.order
        while totals.waiting and resource.in_use < resource.capacity:
            lane = order.best(self.tick)
            if lane is None:
                return
            taken = lane.take()
            order.touch(lane)
            if taken is not None:
                waiter, entry = taken
                if waiter.timer is not None:
                    waiter.timer.cancel()
                seconds = waiter.future.get_loop().time() - waiter.since
                waiter.future.set_result(self._grant(lane, entry, seconds))
                if order.is_adaptive:
                    order.observe(self.tick - entry.tick, totals.depth_micro)

    def _grant(self, lane: Lane, entry: Entry, wait_seconds: float) -> Grant:
        tick = self.tick
        lane.in_flight += 1
        lane.served_tick = tick
        self.resource.in_use += 1
        wait_ticks = tick - entry.tick
        lane.tally.granted(entry.weight_micro, wait_ticks, wait_seconds)
        if self._lines is not None:
            self._note("granted", lane, wait_ticks=wait_ticks)
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
        lane = self._vacate(grant)
        lane.tally.taken_back(grant.entry.weight_micro)
        self._note(kind, lane)
        if lane.waiting:
            self.order.touch(lane)
        self._dispatch()
        if not self.resource.in_use:
            self._on_idle()

    def _give_up(self, waiter: Waiter) -> None:
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
            resource, agent_id = self.resource.name, waiter.lane.agent_id
            self.turn_away(waiter, PlaceTimeoutError(resource, agent_id, timeout))

    def _lane_of(self, agent_id: str) -> Lane:
        lane = self.lanes.get(agent_id)
        if lane is not None:
            return lane
        if not self._is_open_to_all:
            raise _unknown(agent_id)
        if len(self.lanes) >= MAX_AGENTS:
            self.lanes = {name: one for name, one in self.lanes.items() if not one.is_idle}
        return self.open_lane(agent_id, None)

    def _empty(self, lane: Lane, error: HeadgateError) -> None:
        for waiter in lane.waiters():
            self.turn_away(waiter, error)
        lane.drop_tasks()

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.totals.waiting or self.resource.in_use:
            problem = "has a scheduler that another event loop uses; give each loop its own"
            raise InvalidSettingError("resource", f"{self.resource.name!r} {problem}")
        self._loop = loop

    def _check_open(self) -> None:
        if self.is_closed:
            raise SchedulerClosedError(self.resource.name)

    def _check_room(self) -> None:
        if self.totals.queued >= self._max_waiters:
            raise TooManyWaitingError(self.resource.name, self._max_waiters)

    def _note(self, kind: str, lane: Lane, *, wait_ticks: int = 0) -> None:
        if self._lines is not None:
            at = 0.0 if self._loop is None else self._loop.time()
            self._lines.append((kind, at, self.tick, lane.agent_id, lane.queued, wait_ticks))


def _unknown(agent_id: str) -> InvalidFieldError:
    problem = f"{agent_id!r} is not registered; register it, or give None for agents"
    return InvalidFieldError("agent_id", problem)
