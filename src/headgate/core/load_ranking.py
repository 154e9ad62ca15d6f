"""The lane with the highest load, found without looking at every lane.

Once both maxima are known, the load of a lane is linear in its depth and in the tick of its
oldest task: with a = alpha * max age and b = (1 - alpha) * max depth, the best lane has the lowest
*cost*, `b * oldest_tick - a * depth`. All lanes age together, so their order changes only with the
ratio a : b, which drifts slowly. The ranking keeps the lanes sorted for an earlier ratio, in bands
of similar depth. The range of a band bounds how far its lanes can have moved since, so that only
the first few of each band need to be read. When reading has cost more than sorting would, the
lanes are sorted for the ratio of the moment.

The rule it keeps: the answer is the one that comparing all lanes gives, in integers. Ties go to
the deeper lane, then to the one served longest ago, then to the lowest `order`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from heapq import heappop, heappush
from math import gcd, isfinite
from typing import Generic, TypeVar

import msgspec

from headgate.core.load import check_alpha
from headgate.errors import InvalidSettingError

MICRO = 1_000_000

_SLACK_VALUES = 64
_LEADING_BITS = 2
_BITS_BELOW_DEEPEST = 4

Lane = TypeVar("Lane", bound=Hashable)

Tie = tuple[int, int, int, int]
"""What decides between equal costs: depth (negated), last served, order, number of the update."""


def to_micro_weight(weight: float) -> int:
    """Return the weight in whole millionths, so that a depth is an exact sum."""
    if not (isfinite(weight) and weight >= 0):
        raise InvalidSettingError("weight", f"must be a finite number of at least 0, not {weight}")
    return round(weight * MICRO)


class _Point(msgspec.Struct, Generic[Lane], eq=False):
    """A lane as it stood at its last update."""

    lane: Lane
    depth: int
    oldest: int
    tie: Tie


class _Band(msgspec.Struct, Generic[Lane], eq=False):
    """Lanes whose depths lie in one range, by their rank and tie; of each depth only the first.

    A rank is a cost at the weights of the last sorting.
    """

    least_depth: int
    most_depth: int
    entries: list[tuple[int, Tie, _Point[Lane]]]


class _Bag:
    """A bag of integers that knows its smallest.

    A value that has left stays in the heap until it surfaces, or until there are too many such.
    """

    __slots__ = ("_counts", "_heap")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._heap: list[int] = []

    def add(self, value: int) -> None:
        count = self._counts.get(value)
        if count is None:
            heappush(self._heap, value)
        self._counts[value] = (count or 0) + 1

    def remove(self, value: int) -> None:
        self._counts[value] -= 1

    def least(self) -> int:
        while not self._counts[self._heap[0]]:
            del self._counts[heappop(self._heap)]
        return self._heap[0]

    def trim(self, most_values: int) -> None:
        if len(self._heap) > most_values:
            self._counts = {value: count for value, count in self._counts.items() if count}
            self._heap = sorted(self._counts)


class _Search(Generic[Lane]):
    """One call of `best`: how depth and age weigh in it, who leads so far, and at what cost.

    From a rank at the weights `sorted_depth` and `sorted_age` follows the cost now: for every
    lane, `sorted_age * cost == age * rank - shift * depth`.
    """

    __slots__ = ("age", "cost", "depth", "leader", "most_depth", "reads", "shift", "sorted_age")

    def __init__(
        self,
        *,
        depth: int,
        age: int,
        sorted_depth: int,
        sorted_age: int,
        most_depth: int,
        leader: _Point[Lane],
    ) -> None:
        self.depth = depth
        self.age = age
        self.sorted_age = sorted_age
        self.shift = depth * sorted_age - sorted_depth * age
        self.most_depth = most_depth
        self.leader = leader
        self.cost = age * leader.oldest - depth * leader.depth
        self.reads = 0

    def read(self, band: _Band[Lane]) -> None:
        """Let the lanes of a band take the lead, as far down as one of them possibly could."""
        age, depth, leader, lowest = self.age, self.depth, self.leader, self.cost
        most_depth = min(band.most_depth, self.most_depth)
        gained = self.shift * (most_depth if self.shift > 0 else band.least_depth)
        within_reach = self.sorted_age * lowest + gained
        for rank, tie, point in band.entries:
            reach = age * rank
            # Further down the ranks are higher, or equal with ties that are worse.
            if reach > within_reach or (reach == within_reach and tie > leader.tie):
                break
            self.reads += 1
            cost = age * point.oldest - depth * point.depth
            if cost < lowest or (cost == lowest and tie < leader.tie):
                leader, lowest = point, cost
                within_reach = self.sorted_age * lowest + gained
        self.leader, self.cost = leader, lowest


class LoadRanking(Generic[Lane]):
    """Lanes that have work, and which of them has the highest load.

    `examined` counts the lanes that `best` has read or sorted so far: the measure of its cost.
    """

    def __init__(self) -> None:
        self.examined = 0
        self._points: dict[Lane, _Point[Lane]] = {}
        self._oldest_ticks = _Bag()
        self._negated_depths = _Bag()
        self._latest_tick = 0
        self._by_depth: dict[int, list[tuple[int, Tie, _Point[Lane]]]] = {}
        self._bands: dict[int, _Band[Lane]] = {}
        self._sorted_depth = 0
        self._sorted_age = 1
        self._narrowest_bits = 0
        self._reads = 0
        self._updates = 0

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
        self._oldest_ticks.add(oldest_tick)
        self._negated_depths.add(-depth_micro)
        self._add(point)

    def discard(self, lane: Lane) -> None:
        """Take a lane out, if it is there."""
        point = self._points.pop(lane, None)
        if point is None:
            return
        self._oldest_ticks.remove(point.oldest)
        self._negated_depths.remove(-point.depth)
        self._remove(point)
        most_values = 2 * len(self._points) + _SLACK_VALUES
        self._oldest_ticks.trim(most_values)
        self._negated_depths.trim(most_values)

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane with the highest load at this tick, None if there is no lane."""
        depth_share, age_share = _shares(alpha)
        if not self._points:
            return None
        if tick < self._latest_tick:
            return self._compare_all(tick, depth_share, age_share)
        depth = depth_share * (tick - self._oldest_ticks.least())
        # Where no lane has any depth, age alone decides.
        age = age_share * self._most_depth() or 1
        if self._reads > len(self._by_depth):
            self._sort(depth, age)
        return self._find(depth, age)

    def _find(self, depth: int, age: int) -> Lane:
        most_depth = self._most_depth()
        search = _Search(
            depth=depth,
            age=age,
            sorted_depth=self._sorted_depth,
            sorted_age=self._sorted_age,
            most_depth=most_depth,
            leader=self._by_depth[most_depth][0][2],
        )
        for band in self._bands.values():
            search.read(band)
        self._reads += search.reads
        self.examined += search.reads + len(self._bands)
        return search.leader.lane

    def _most_depth(self) -> int:
        return -self._negated_depths.least()

    def _add(self, point: _Point[Lane]) -> None:
        """Enter a point among those of its depth, and in its band if it is the first of them."""
        peers = self._by_depth.get(point.depth)
        if peers is None:
            peers = self._by_depth[point.depth] = []
        before = peers[0][2] if peers else None
        insort(peers, (point.oldest, point.tie, point))
        if peers[0][2] is point:
            entries = self._band_of(point.depth).entries
            if before is not None:
                del entries[bisect_left(entries, self._ranked(before))]
            insort(entries, self._ranked(point))

    def _remove(self, point: _Point[Lane]) -> None:
        """Undo `_add`: the next of the same depth, if any, takes the place in the band."""
        peers = self._by_depth[point.depth]
        place = bisect_left(peers, (point.oldest, point.tie, point))
        del peers[place]
        if place == 0:
            entries = self._band_of(point.depth).entries
            del entries[bisect_left(entries, self._ranked(point))]
            if peers:
                insort(entries, self._ranked(peers[0][2]))
        if not peers:
            del self._by_depth[point.depth]

    def _ranked(self, point: _Point[Lane]) -> tuple[int, Tie, _Point[Lane]]:
        rank = self._sorted_age * point.oldest - self._sorted_depth * point.depth
        return rank, point.tie, point

    def _band_of(self, depth: int) -> _Band[Lane]:
        """Return the band of a depth: half an octave, or more where the depths are small."""
        bits = max(depth.bit_length() - _LEADING_BITS, self._narrowest_bits)
        least = depth >> bits << bits
        band = self._bands.get(least)
        if band is None:
            band = self._bands[least] = _Band(least, least + (1 << bits) - 1, [])
        return band

    def _sort(self, depth: int, age: int) -> None:
        """Rank all lanes anew, by these weights."""
        self._sorted_depth, self._sorted_age = depth, age
        self._fit_bands()
        for band in self._bands.values():
            band.entries = [
                (age * point.oldest - depth * point.depth, tie, point)
                for _, tie, point in band.entries
            ]
            band.entries.sort()
        self._reads = 0
        self.examined += len(self._by_depth)

    def _fit_bands(self) -> None:
        """Drop empty bands; draw all anew if the greatest depth has left the octaves they suit."""
        narrowest_bits = max(self._most_depth().bit_length() - _BITS_BELOW_DEEPEST, 0)
        if abs(narrowest_bits - self._narrowest_bits) <= 1:
            self._bands = {least: band for least, band in self._bands.items() if band.entries}
            return
        self._narrowest_bits = narrowest_bits
        self._bands.clear()
        for depth, peers in self._by_depth.items():
            self._band_of(depth).entries.append(peers[0])

    def _compare_all(self, tick: int, depth_share: int, age_share: int) -> Lane:
        """Answer for a tick before some lane's oldest task, which then has age 0.

        Such lanes are out of the linear order. They come from a counter that was set back, so it
        is enough to be right about them.
        """
        self.examined += len(self._points)
        self._latest_tick = max(point.oldest for point in self._points.values())
        depth = depth_share * max(tick - self._oldest_ticks.least(), 0)
        age = age_share * self._most_depth() or 1
        costs = (
            (age * min(point.oldest, tick) - depth * point.depth, point.tie, point)
            for point in self._points.values()
        )
        return min(costs)[2].lane


def _shares(alpha: float) -> tuple[int, int]:
    """Return alpha and its complement as whole numbers, as small as their ratio allows."""
    alpha_micro = round(check_alpha(alpha) * MICRO)
    divisor = gcd(alpha_micro, MICRO)
    return alpha_micro // divisor, (MICRO - alpha_micro) // divisor
