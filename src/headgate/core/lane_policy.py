"""Which lane of a project goes first: the two policies, and the bound on a lane's wait.

A chooser is kept between rounds. Whoever changes a lane offers it again; an offer that is out of
date is noticed when it comes to the top, so that no change has to search for the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Protocol

from headgate.core.load import LoadRanking
from headgate.core.snapshot import LanePolicy

if TYPE_CHECKING:
    from headgate.core.lane_index import AgentPermits, Lane

    AgentFor = Callable[[Lane], AgentPermits | None]
    """Names the agent that would take a lane's next task, or None while none is free."""

SLACK = 16
OPEN_LANE_ORDER = -1
_NEVER_OFFERED = 1 << 62


Key = tuple[int, ...]


class LaneChooser(Protocol):
    """A policy: lanes are offered to it, and it names the one that goes first."""

    def offer(self, lane: Lane) -> None:
        """Consider a lane that has got work, or an agent, and may now start."""

    def touch(self, lane: Lane) -> None:
        """Consider a lane whose depth or oldest task changed."""

    def ease(self, lane: Lane) -> None:
        """Consider a lane whose agent was free already, and has one task less in flight."""

    def drop(self, lane: Lane) -> None:
        """Forget a lane that is gone."""

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane that goes first among those that could start a task."""


class OfferHeap:
    """Lanes by a key that may have grown since they were offered.

    A key of None means that the lane cannot start anything now. Whoever makes a key smaller, or
    makes a lane able to start again, must offer the lane again.
    """

    __slots__ = ("_heap", "_key", "_most", "_offers")

    def __init__(self, key: Callable[[Lane], Key | None]) -> None:
        self._key = key
        # The number of the offer keeps a lane apart from an earlier one of the same owner.
        self._heap: list[tuple[Key, int, Lane]] = []
        self._offers = count()
        self._most = SLACK

    def offer(self, lane: Lane) -> None:
        """Add the lane under its present key."""
        key = self._key(lane)
        if key is not None:
            heappush(self._heap, (key, next(self._offers), lane))
        if len(self._heap) > self._most:
            self._rebuild()

    def peek(self) -> Lane | None:
        """Return the lane with the smallest key."""
        while self._heap:
            offered, _, lane = self._heap[0]
            key = self._key(lane)
            if key == offered:
                return lane
            heappop(self._heap)
            if key is not None and key > offered:
                heappush(self._heap, (key, next(self._offers), lane))
        return None

    def _rebuild(self) -> None:
        lanes = dict.fromkeys(lane for _, _, lane in self._heap)
        keys = ((self._key(lane), next(self._offers), lane) for lane in lanes)
        self._heap = [(key, offer, lane) for key, offer, lane in keys if key is not None]
        heapify(self._heap)
        self._most = 2 * len(self._heap) + SLACK


class FewestInFlight:
    """The lane whose agent has the fewest tasks in flight, then the one served longest ago."""

    __slots__ = ("_agent_for", "_open", "_pinned")

    def __init__(self, agent_for: AgentFor) -> None:
        self._agent_for = agent_for
        self._pinned = OfferHeap(self._key)
        self._open: Lane | None = None

    def offer(self, lane: Lane) -> None:
        """Consider a lane; the open one is compared afresh each time, as its agent varies."""
        if lane.owner is None:
            self._open = lane
        else:
            self._pinned.offer(lane)

    ease = offer

    def touch(self, lane: Lane) -> None:
        """Neither depth nor age matters here."""

    def drop(self, lane: Lane) -> None:
        """Forget a lane that is gone."""
        if lane is self._open:
            self._open = None

    def best(self, *, tick: int, alpha: float) -> Lane | None:  # noqa: ARG002
        """Return the lane that goes first."""
        pinned, open_lane = self._pinned.peek(), self._open
        if open_lane is None or not open_lane.ready or self._agent_for(open_lane) is None:
            return pinned
        if pinned is None:
            return open_lane
        return min(pinned, open_lane, key=lambda lane: self._key(lane) or ())

    def _key(self, lane: Lane) -> Key | None:
        agent = self._agent_for(lane) if lane.ready else None
        if agent is None:
            return None
        return (agent.inflight, lane.served_tick, agent.order, lane.owner is None)


class HighestLoad:
    """The lane with the highest load: weighted depth against the age of its oldest task.

    Lanes compete while they have work and an agent of their own to serve them; the open lane, which
    any agent serves, competes while it has work.
    """

    __slots__ = ("_agent_for", "_changed", "_ranking")

    def __init__(self, agent_for: AgentFor) -> None:
        self._agent_for = agent_for
        self._changed: dict[Lane, None] = {}
        self._ranking: LoadRanking[Lane] = LoadRanking()

    def offer(self, lane: Lane) -> None:
        """Consider a lane again at the next choice."""
        self._changed[lane] = None

    touch = offer

    def ease(self, lane: Lane) -> None:
        """How much an agent has in flight does not matter here."""

    def drop(self, lane: Lane) -> None:
        """Forget a lane that is gone."""
        self._changed.pop(lane, None)
        self._ranking.discard(lane)

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane that goes first."""
        self._catch_up()
        lane = self._ranking.best(tick=tick, alpha=alpha)
        if lane is None or self._agent_for(lane) is not None:
            return lane
        # Only the open lane can be first without an agent; the others are asked without it.
        self._ranking.discard(lane)
        second = self._ranking.best(tick=tick, alpha=alpha)
        self._changed[lane] = None
        return second

    def _catch_up(self) -> None:
        for lane in self._changed:
            if lane.owner is None:
                order = OPEN_LANE_ORDER if lane.ready else None
            else:
                agent = self._agent_for(lane) if lane.ready else None
                order = None if agent is None else agent.order
            self._rank(lane, order)
        self._changed.clear()

    def _rank(self, lane: Lane, order: int | None) -> None:
        if order is None:
            self._ranking.discard(lane)
            return
        self._ranking.put(
            lane,
            depth_micro=lane.depth_micro,
            oldest_tick=lane.oldest_tick(),
            last_served_tick=lane.served_tick,
            order=order,
        )


class BoundedWait:
    """A policy under which a lane that has waited `max_wait_ticks` goes before all others."""

    __slots__ = ("_agent_for", "_max_wait_ticks", "_offered", "_open", "_pinned", "_policy")

    def __init__(self, policy: LaneChooser, agent_for: AgentFor, *, max_wait_ticks: int) -> None:
        self._policy = policy
        self._agent_for = agent_for
        self._max_wait_ticks = max_wait_ticks
        self._pinned = OfferHeap(self._key)
        self._open: Lane | None = None
        self._offered: dict[Lane, int] = {}

    def offer(self, lane: Lane) -> None:
        """Consider a lane that has got work, or an agent, and may now start."""
        self._policy.offer(lane)
        self._remember(lane)

    def touch(self, lane: Lane) -> None:
        """Consider a lane whose depth or oldest task changed.

        The heap notices by itself when a lane has waited for less long than it was offered with,
        which is what happens whenever a lane is served; only a longer wait is news.
        """
        self._policy.touch(lane)
        offered = self._offered.get(lane, _NEVER_OFFERED)
        # The first comparison is the cheap one: a lane waits at least since it was served.
        if lane.ready and lane.served_tick < offered and lane.waiting_since() < offered:
            self._remember(lane)

    def ease(self, lane: Lane) -> None:
        """Consider a lane whose agent has less in flight; it has waited for as long as before."""
        self._policy.ease(lane)

    def drop(self, lane: Lane) -> None:
        """Forget a lane that is gone."""
        self._policy.drop(lane)
        self._offered.pop(lane, None)
        if lane is self._open:
            self._open = None

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane that has waited too long, or the policy's choice."""
        waiting = (lane for lane in (self._open, self._pinned.peek()) if lane is not None)
        keys = [(key, lane) for lane in waiting if (key := self._key(lane)) is not None]
        if keys:
            (waiting_since, _), lane = min(keys)
            if tick - waiting_since >= self._max_wait_ticks:
                return lane
        return self._policy.best(tick=tick, alpha=alpha)

    def _remember(self, lane: Lane) -> None:
        if lane.owner is None:
            self._open = lane
        else:
            self._offered[lane] = lane.waiting_since()
            self._pinned.offer(lane)

    def _key(self, lane: Lane) -> Key | None:
        agent = self._agent_for(lane) if lane.ready else None
        if agent is None:
            return None
        order = OPEN_LANE_ORDER if lane.owner is None else agent.order
        return (lane.waiting_since(), order)


def lane_chooser(
    policy: LanePolicy, agent_for: AgentFor, *, max_wait_ticks: int | None
) -> LaneChooser:
    """Return a chooser for the lanes of one project."""
    chooser: LaneChooser = (
        HighestLoad(agent_for) if policy is LanePolicy.HIGHEST_LOAD else FewestInFlight(agent_for)
    )
    if max_wait_ticks is None:
        return chooser
    return BoundedWait(chooser, agent_for, max_wait_ticks=max_wait_ticks)
