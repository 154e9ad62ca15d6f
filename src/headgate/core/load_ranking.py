"""The lane with the highest load, found without looking at every lane.

The load of a lane is linear in its depth and in the tick of its oldest task, once both maxima are
known: with a = alpha * max age and b = (1 - alpha) * max depth the best lane has the lowest
`b * oldest_tick - a * depth`. All lanes age together, so the order changes only with the ratio
a : b, which drifts slowly. The ranking therefore keeps a heap that was sorted for an earlier
ratio, and takes from it into a shortlist every lane that could have overtaken since: the maxima
bound how far a lane can have moved. When reading the shortlist has cost as much as sorting anew,
the heap is sorted for the ratio of the day.

The rule it keeps: the answer is exactly that of comparing all lanes, in integers. Ties go to the
deeper lane, then to the one served longest ago, then to the lowest `order`. Memory is bounded by
the number of lanes, whatever the number of updates.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from math import gcd, isfinite
from typing import Generic, TypeVar

import msgspec

from headgate.core.load import check_alpha
from headgate.errors import InvalidSettingError

MICRO = 1_000_000

_GARBAGE_FLOOR = 64
_READS_PER_SORT = 2

Lane = TypeVar("Lane", bound=Hashable)

Tie = tuple[int, int, int, int]
"""What decides between equal loads: depth (negated), last served, order, number of the update."""


def to_micro_weight(weight: float) -> int:
    """Return the weight in whole millionths, so that a depth is an exact sum."""
    if not (isfinite(weight) and weight >= 0):
        raise InvalidSettingError("weight", f"must be a finite number of at least 0, not {weight}")
    return round(weight * MICRO)


class _Point(msgspec.Struct, Generic[Lane], eq=False, gc=False):
    """A lane as it stood at its last update; a newer update leaves this one dead."""

    lane: Lane
    depth: int
    oldest: int
    tie: Tie
    live: bool = True


class _Heap(Generic[Lane]):
    """Points by `age_factor * oldest - depth_factor * depth`, lowest first, then by their tie.

    The dead are dropped when they surface, and all at once when they outnumber the living.
    """

    __slots__ = ("age_factor", "depth_factor", "entries")

    def __init__(self, *, depth_factor: int, age_factor: int) -> None:
        self.depth_factor = depth_factor
        self.age_factor = age_factor
        self.entries: list[tuple[int, Tie, _Point[Lane]]] = []

    def push(self, point: _Point[Lane]) -> None:
        rank = self.age_factor * point.oldest - self.depth_factor * point.depth
        heappush(self.entries, (rank, point.tie, point))

    def head(self) -> _Point[Lane]:
        entries = self.entries
        while not entries[0][2].live:
            heappop(entries)
        return entries[0][2]

    def sort(self, points: Iterable[_Point[Lane]]) -> None:
        age_factor, depth_factor = self.age_factor, self.depth_factor
        self.entries = [
            (age_factor * point.oldest - depth_factor * point.depth, point.tie, point)
            for point in points
        ]
        heapify(self.entries)


class _Question(Generic[Lane]):
    """One call of `best`: how depth and age weigh in it, the leader so far and its cost."""

    __slots__ = ("age_factor", "cost", "deepest", "depth_factor", "leader", "oldest")

    def __init__(
        self, *, depth_factor: int, age_factor: int, oldest: _Point[Lane], deepest: _Point[Lane]
    ) -> None:
        self.depth_factor = depth_factor
        self.age_factor = age_factor
        self.oldest = oldest
        self.deepest = deepest
        self.leader = oldest
        self.cost = age_factor * oldest.oldest - depth_factor * oldest.depth

    def consider(self, points: Iterable[_Point[Lane]]) -> None:
        """Let each point take the lead if its cost is lower."""
        age_factor, depth_factor = self.age_factor, self.depth_factor
        leader, lowest = self.leader, self.cost
        for point in points:
            cost = age_factor * point.oldest - depth_factor * point.depth
            if cost < lowest or (cost == lowest and point.tie < leader.tie):
                leader, lowest = point, cost
        self.leader, self.cost = leader, lowest

    def cut(self, heap: _Heap[Lane]) -> tuple[int, Tie]:
        """Return the entry of this heap from which on nothing can take the lead.

        The cost of a point is a sum of two terms: its rank in the heap, and its depth, or its
        oldest tick, whichever weighs more now than when the heap was sorted. No lane has more
        depth than the deepest or an earlier tick than the oldest, which bounds the second term.
        """
        shift = self.depth_factor * heap.age_factor - heap.depth_factor * self.age_factor
        if shift >= 0:
            most = heap.age_factor * self.cost + shift * self.deepest.depth
            return -(-most // self.age_factor), self.leader.tie
        most = heap.depth_factor * self.cost + shift * self.oldest.oldest
        return -(-most // self.depth_factor), self.leader.tie


class LoadRanking(Generic[Lane]):
    """Lanes that have work, and which of them has the highest load.

    `examined` counts the lanes that `best` has read or sorted so far: the measure of its cost.
    """

    def __init__(self) -> None:
        self.examined = 0
        self._points: dict[Lane, _Point[Lane]] = {}
        self._by_oldest: _Heap[Lane] = _Heap(depth_factor=0, age_factor=1)
        self._by_depth: _Heap[Lane] = _Heap(depth_factor=1, age_factor=0)
        self._by_load: _Heap[Lane] = _Heap(depth_factor=1, age_factor=1)
        self._shortlist: dict[Lane, _Point[Lane]] = {}
        self._reads = 0
        self._updates = 0
        self._latest_tick = 0

    def __len__(self) -> int:
        return len(self._points)

    def __contains__(self, lane: Lane) -> bool:
        return lane in self._points

    def put(
        self, lane: Lane, *, depth_micro: int, oldest_tick: int, last_served_tick: int, order: int
    ) -> None:
        """Enter a lane, or replace what was known of it.

        `depth_micro` is the weight of its waiting tasks in millionths, `oldest_tick` the tick at
        which the oldest of them was queued. Give each lane its own `order`: it breaks the last tie.
        """
        if depth_micro < 0:
            raise InvalidSettingError("depth_micro", f"must be at least 0, not {depth_micro}")
        self.discard(lane)
        self._updates += 1
        tie = (-depth_micro, last_served_tick, order, self._updates)
        point = self._points[lane] = _Point(lane, depth_micro, oldest_tick, tie)
        self._latest_tick = max(self._latest_tick, oldest_tick)
        most_entries = 2 * len(self._points) + _GARBAGE_FLOOR
        for heap in (self._by_oldest, self._by_depth, self._by_load):
            heap.push(point)
            if len(heap.entries) > most_entries:
                heap.sort([entry[2] for entry in heap.entries if entry[2].live])

    def discard(self, lane: Lane) -> None:
        """Take a lane out, if it is there."""
        point = self._points.pop(lane, None)
        if point is not None:
            point.live = False
            self._shortlist.pop(lane, None)

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane with the highest load at this tick, None if there is no lane."""
        depth_share, age_share = _shares(alpha)
        if not self._points:
            return None
        if tick < self._latest_tick:
            return self._compare_all(tick, depth_share, age_share)
        oldest, deepest = self._by_oldest.head(), self._by_depth.head()
        depth_factor = depth_share * (tick - oldest.oldest)
        age_factor = age_share * deepest.depth
        # Without a depth or an age to compare, the oldest lane leads; its tie prefers the deepest.
        if depth_factor == 0 or age_factor == 0:
            return oldest.lane
        question = _Question(
            depth_factor=depth_factor, age_factor=age_factor, oldest=oldest, deepest=deepest
        )
        return self._ask(question)

    def _ask(self, question: _Question[Lane]) -> Lane:
        if self._reads > _READS_PER_SORT * len(self._points):
            self._sort_for(question)
        shortlist = self._shortlist
        question.consider(shortlist.values())
        entries = self._by_load.entries
        cut = question.cut(self._by_load)
        while entries and entries[0] < cut:
            point = heappop(entries)[2]
            if point.live:
                shortlist[point.lane] = point
                question.consider((point,))
                cut = question.cut(self._by_load)
        self._reads += len(shortlist)
        self.examined += len(shortlist)
        return question.leader.lane

    def _sort_for(self, question: _Question[Lane]) -> None:
        """Order the heap by what counts now, so that the shortlist can start empty."""
        self._by_load.depth_factor = question.depth_factor
        self._by_load.age_factor = question.age_factor
        self._by_load.sort(self._points.values())
        self._shortlist.clear()
        self._reads = 0
        self.examined += len(self._points)

    def _compare_all(self, tick: int, depth_share: int, age_share: int) -> Lane:
        """Answer for a tick that lies before some lane's oldest task, which then has age 0.

        Such lanes break the linear order. They come from a clock that was set back, so it is
        enough to be right about them.
        """
        points = self._points.values()
        self.examined += len(points)
        self._latest_tick = max(point.oldest for point in points)
        oldest_tick = min(point.oldest for point in points)
        depth_factor = depth_share * max(tick - oldest_tick, 0)
        age_factor = age_share * max(point.depth for point in points) or 1
        return min(
            points,
            key=lambda point: (
                age_factor * min(point.oldest, tick) - depth_factor * point.depth,
                point.tie,
            ),
        ).lane


def _shares(alpha: float) -> tuple[int, int]:
    """Return alpha and its complement as whole numbers, as small as their ratio allows."""
    alpha_micro = round(check_alpha(alpha) * MICRO)
    divisor = gcd(alpha_micro, MICRO)
    return alpha_micro // divisor, (MICRO - alpha_micro) // divisor
