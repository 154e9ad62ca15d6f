"""Why who goes next: the load of every lane at this moment, term by term.

It reads the equation plainly, lane by lane. The order itself is found without looking at all of
them, and a test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

import msgspec

from headgate.core.lanes.load_ranking import MICRO
from headgate.core.load import load_score
from headgate.inprocess.lanes import Lane
from headgate.inprocess.resource import SharedResource


class LaneLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent stands; `load` is None for one that does not compete, and `reason` says why."""

    agent_id: str
    load: float | None
    queue_depth: float
    oldest_wait_ticks: int
    queued: int
    waiting: int
    parked: int
    in_flight: int
    reason: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Every agent with something to do, in the order in which they would go now.

    That is the highest load first; one whose task has waited for `max_wait_ticks` goes before it.
    """

    resource: str
    capacity: int
    in_use: int
    tick: int
    alpha: float
    lanes: tuple[LaneLoad, ...]

    def __str__(self) -> str:
        used = f"{self.resource}: {self.in_use} of {self.capacity} places in use"
        lines = [f"{used}, tick {self.tick}, alpha {self.alpha:g}"]
        for lane in self.lanes:
            load = "     " if lane.load is None else f"{lane.load:.3f}"
            lines.append(f"  {load}  {lane.agent_id}: {lane.reason}")
        return "\n".join(lines)


def explained(
    resource: SharedResource,
    lanes: Iterable[Lane],
    *,
    tick: int,
    alpha: float,
    max_wait_ticks: int | None = None,
) -> Explanation:
    """Return the load of each lane that has anything to do."""
    busy = [lane for lane in lanes if not lane.is_idle]
    competing = [lane for lane in busy if lane.is_competing]
    most_depth = max((lane.depth_micro for lane in competing), default=0)
    most_wait = max((_wait(lane, tick) for lane in competing), default=0)
    rows = []
    for lane in busy:
        wait = _wait(lane, tick)
        load = load_score(
            alpha=alpha,
            queue_depth=lane.depth_micro,
            max_queue_depth=most_depth,
            oldest_wait=wait,
            max_oldest_wait=most_wait,
        )
        is_overdue = lane.is_competing and max_wait_ticks is not None and wait >= max_wait_ticks
        row = _row(lane, wait, load if lane.is_competing else None, is_overdue=is_overdue)
        rows.append((_turn(lane, row.load, is_overdue=is_overdue), row))
    rows.sort(key=itemgetter(0))
    return Explanation(
        resource=resource.name,
        capacity=resource.capacity,
        in_use=resource.in_use,
        tick=tick,
        alpha=alpha,
        lanes=tuple(row for _, row in rows),
    )


def _turn(
    lane: Lane, load: float | None, *, is_overdue: bool
) -> tuple[bool, int, float, int, int, int]:
    """Return what lanes are sorted by: overdue by age, then load, with the ties of the ranking."""
    head = lane.head() if is_overdue else None
    oldest = 0 if head is None else head.sequence
    if load is None:
        return (True, 0, 1.0, 0, 0, lane.order)
    return (head is None, oldest, -load, -lane.depth_micro, lane.served_tick, lane.order)


def _row(lane: Lane, wait: int, load: float | None, *, is_overdue: bool) -> LaneLoad:
    return LaneLoad(
        agent_id=lane.agent_id,
        load=load,
        queue_depth=lane.depth_micro / MICRO,
        oldest_wait_ticks=wait,
        queued=lane.queued,
        waiting=lane.waiting,
        parked=lane.parked,
        in_flight=lane.in_flight,
        reason=_reason(lane, wait, is_overdue=is_overdue),
    )


def _reason(lane: Lane, wait: int, *, is_overdue: bool) -> str:
    money = f", and {lane.parked} wait for money" if lane.parked else ""
    if is_overdue:
        return f"goes before all others, because the oldest has waited {wait} ticks{money}"
    if lane.is_competing:
        return f"waits with depth {lane.depth_micro / MICRO:g}, the oldest for {wait} ticks{money}"
    if lane.waiting:
        return f"has {lane.in_flight} in flight, as many as the agent may have{money}"
    if lane.queued:
        return f"has {lane.queued} queued, and nobody has asked for a place{money}"
    return f"has {lane.in_flight} in flight, and nothing queued{money}"


def _wait(lane: Lane, tick: int) -> int:
    head = lane.head()
    return 0 if head is None else tick - head.tick
