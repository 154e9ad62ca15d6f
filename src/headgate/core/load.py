"""The load of a lane, which says how urgent it is, and the lane that has the highest.

    L(i) = alpha * (Q_i / max Q_j) + (1 - alpha) * (D_i / max D_j)

Q is the weighted depth of a lane's queue, D the age of its oldest task in ticks; a tick is one unit
of work completed, so that ages grow only while there is contention. Alpha 0 serves whoever has
waited longest, alpha 0.5 leans towards the deepest backlog. Load is relative, and a term whose
maximum is zero counts nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush, heapreplace
from math import gcd, inf, isfinite, sqrt
from typing import Generic, TypeVar

import msgspec

from headgate.errors import InvalidSettingError

MOST_ALPHA = 0.5
MOST_UNSAFE_ALPHA = 1.0
OPTIMIZE_FOR = {"latency": 0.0, "balanced": 0.25, "throughput": 0.5}

ADAPTIVE_STEP = 0.01
ADAPTIVE_WINDOW = 10
HIGH_VARIATION = 0.5
HIGH_GROWTH = 0.2


def load_score(
    *,
    alpha: float,
    queue_depth: float,
    max_queue_depth: float,
    oldest_wait: float,
    max_oldest_wait: float,
) -> float:
    """Return the load of a lane, between 0 and 1; the lane with the highest goes next."""
    depth_term = queue_depth / max_queue_depth if max_queue_depth else 0.0
    wait_term = oldest_wait / max_oldest_wait if max_oldest_wait else 0.0
    return alpha * depth_term + (1 - alpha) * wait_term


def check_alpha(alpha: float, *, most: float = MOST_ALPHA) -> float:
    """Return alpha if it is in its range, and refuse it otherwise.

    Above 0.5 depth outweighs age: beside a lane that stays deep, a shallow one may wait for ever.
    At 1 nothing but depth counts.
    """
    if 0.0 <= alpha <= most:
        return alpha
    problem = f"must be a number from 0 to {most:g}, not {alpha:g}"
    if most < alpha <= MOST_UNSAFE_ALPHA:
        problem = f"{problem}; allow_unsafe_alpha = true allows up to {MOST_UNSAFE_ALPHA:g}"
    raise InvalidSettingError("alpha", problem)


def resolve_alpha(
    *, alpha: float | None = None, optimize_for: str | None = None, most: float = MOST_ALPHA
) -> float:
    """Return the alpha that was given by number or by name; without either, the balanced one."""
    if alpha is not None and optimize_for is not None:
        raise InvalidSettingError("alpha", "give either alpha or optimize_for, not both")
    if alpha is not None:
        return check_alpha(alpha, most=most)
    name = "balanced" if optimize_for is None else optimize_for
    if name not in OPTIMIZE_FOR:
        choices = ", ".join(OPTIMIZE_FOR)
        raise InvalidSettingError("optimize_for", f"must be one of {choices}, not {name!r}")
    return OPTIMIZE_FOR[name]


def longest_wait_ticks(
    *, alpha: float, max_waiters: int, least_weight: float = 1.0, most_weight: float = 1.0
) -> float:
    """Return for how many ticks a task can wait at most, while so many wait and weigh so much.

    Say that no task has waited longer than B. One of age s loses only to a lane whose head is
    older than s - r * B, with r = alpha / (1 - alpha) * (1 - least share of the deepest lane). So
    whatever is granted after its tick r * B was waiting then, which is less than `max_waiters`,
    and B is at most r * B + max_waiters.
    """
    if alpha == MOST_UNSAFE_ALPHA:
        return inf
    others = max(max_waiters - 1, 1)
    least_share = min(least_weight / (most_weight * others), 1.0)
    kept = 1 - alpha / (1 - alpha) * (1 - least_share)
    return max_waiters / kept if kept > 0 else inf


class AdaptiveAlpha(msgspec.Struct, frozen=True, kw_only=True):
    """An alpha that follows what was observed: uneven waits lower it, a growing backlog raises it.

    Each observation is one grant: to which agent, how long its task had waited, and the weighted
    depth of all queues then. Waits are uneven where agents differ in their mean wait: one agent
    that queues many tasks at once waits longer for each, and nobody is worse off than another.
    Alpha moves a step at a time, once the window is full, and only the window is remembered.
    """

    alpha: float = OPTIMIZE_FOR["balanced"]
    waits: tuple[tuple[str, float], ...] = ()
    """The agent of each grant, and the ticks that its task had waited."""
    queue_depths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def observe(self, *, agent_id: str, wait_ticks: float, queue_depth: float) -> AdaptiveAlpha:
        """Return the state after one more grant."""
        waits = (*self.waits, (agent_id, wait_ticks))[-ADAPTIVE_WINDOW:]
        queue_depths = (*self.queue_depths, queue_depth)[-ADAPTIVE_WINDOW:]
        moved = self.alpha + _adjustment(waits, queue_depths)
        return AdaptiveAlpha(
            # Rounded, because thirty steps of 0.01 do not add up to 0.3 in binary.
            alpha=round(min(max(moved, 0.0), MOST_ALPHA), 6),
            waits=waits,
            queue_depths=queue_depths,
        )


def _adjustment(waits: tuple[tuple[str, float], ...], queue_depths: tuple[float, ...]) -> float:
    if len(waits) < ADAPTIVE_WINDOW:
        return 0.0
    if _variation(_mean_waits(waits)) > HIGH_VARIATION:
        return -ADAPTIVE_STEP
    if _growth(queue_depths) > HIGH_GROWTH:
        return ADAPTIVE_STEP
    return 0.0


def _mean_waits(waits: tuple[tuple[str, float], ...]) -> list[float]:
    """Return the mean wait of each agent."""
    by_agent: dict[str, list[float]] = {}
    for agent_id, wait_ticks in waits:
        by_agent.setdefault(agent_id, []).append(wait_ticks)
    return [sum(ticks) / len(ticks) for ticks in by_agent.values()]


def _variation(values: Sequence[float]) -> float:
    """Return the coefficient of variation: the standard deviation as a share of the mean."""
    mean = sum(values) / len(values)
    if mean == 0:
        return 0.0
    return sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean


def _growth(values: tuple[float, ...]) -> float:
    """Return by what share the newer half of the values exceeds the older half on average."""
    half = len(values) // 2
    older, newer = sum(values[:half]), sum(values[-half:])
    if older == 0:
        return 1.0 if newer > 0 else 0.0
    return newer / older - 1


# Task weights by model: a proxy for cost, not a price. The most specific tier that a model's name
# contains decides, in whatever order the vendor writes tier, version and date.

TIER_WEIGHTS = {
    "opus": 5.0,
    "sonnet": 2.0,
    "haiku": 1.0,
    "o3": 5.0,
    "o1": 5.0,
    "gpt-4o": 3.0,
    "gpt-4o-mini": 1.0,
    "gemini-pro": 3.0,
    "gemini-flash": 1.0,
}
UNKNOWN_WEIGHT = 2.0

CHARS_PER_TOKEN = 4
TOKENS_PER_WEIGHT = 1000

_TIERS = sorted(
    ((tier.split("-"), weight) for tier, weight in TIER_WEIGHTS.items()),
    key=lambda entry: -len(entry[0]),
)


def model_weight(model: str) -> float:
    """Return the weight of a model's tier, by its name in full: `gpt-4o-mini-2024-07-18`."""
    words = re.split(r"[^a-z0-9]+", model.lower())
    for tier_words, weight in _TIERS:
        if _in_order(tier_words, words):
            return weight
    return UNKNOWN_WEIGHT


def estimate_weight(model: str, prompt_chars: int) -> float:
    """Return the weight of a task: its model's, times the prompt's thousands of tokens, at least 1.

    Four characters are taken for a token.
    """
    if prompt_chars < 0:
        raise InvalidSettingError("prompt_chars", f"must be at least 0, not {prompt_chars}")
    input_tokens = prompt_chars / CHARS_PER_TOKEN
    return model_weight(model) * max(input_tokens / TOKENS_PER_WEIGHT, 1.0)


def _in_order(wanted: list[str], words: list[str]) -> bool:
    """Say whether the wanted words occur in this order; versions may stand between them."""
    remaining = iter(words)
    return all(word in remaining for word in wanted)


MICRO = 1_000_000

_SLACK = 64
_LEADING_BITS = 2
_BITS_BELOW_DEEPEST = 3

_MOST_FLAT_DEPTHS = 8
_FEW_DEPTHS = 4

Lane = TypeVar("Lane", bound=Hashable)

Tie = tuple[float, int, int, int]
"""What decides between equal costs: last served, oldest tick, order, number of the update."""


def to_micro_weight(weight: float) -> int:
    """Return the weight in whole millionths, so that a depth is an exact sum."""
    if not (isfinite(weight) and weight >= 0):
        raise InvalidSettingError("weight", f"must be a finite number of at least 0, not {weight}")
    return round(weight * MICRO)


class _Point(Generic[Lane]):
    """A lane as it stood at its last update, and the entries of its band if it is among them."""

    # Not a struct of msgspec, which takes longer to change: this is written at every update.
    __slots__ = ("depth", "entries", "lane", "oldest", "tie")

    def __init__(self, lane: Lane, depth: int, oldest: int, tie: Tie) -> None:
        self.lane = lane
        self.depth = depth
        self.oldest = oldest
        self.tie = tie
        self.entries: list[tuple[int, Tie, _Point[Lane]]] = []


class _Band(msgspec.Struct, Generic[Lane], eq=False):
    """Lanes whose depths lie in one range, by their rank and tie; of each depth only the first.

    A rank is a cost at the weights of the last sorting.
    """

    least_depth: int
    most_depth: int
    entries: list[tuple[int, Tie, _Point[Lane]]]


class LoadRanking(Generic[Lane]):
    """Finds the lane with the highest load without looking at every lane.

    Once both maxima are known, the load of a lane is linear in its depth and in the tick of its
    oldest task: with a = alpha * max age and b = (1 - alpha) * max depth, the best lane has the
    lowest *cost*, `b * oldest_tick - a * depth`. All lanes age together, so their order changes
    only with the ratio a : b, which drifts slowly. The ranking keeps the lanes sorted for an
    earlier ratio, in bands of similar depth. The range of a band bounds how far its lanes can have
    moved since, so that only the first few of each band need to be read. When reading has cost more
    than sorting would, the lanes are sorted for the ratio of the moment.

    While there are only a few different depths, the oldest lane of each is read instead, and no
    bands are kept: agents that each ask for one permit at a time all have the same depth, and come
    and go with every grant.

    The answer is the one that comparing all lanes gives, in integers. Ties go to the lane served
    longest ago, then to the one that has waited longest, then to the lowest `order`; never to the
    deeper one, which would win every grant from lanes of its age. `examined` counts the lanes that
    `best` has read or sorted so far: the measure of its cost.
    """

    def __init__(self) -> None:
        self.examined = 0
        self._alpha = -1.0
        self._depth_share, self._age_share = 0, 1
        self._points: dict[Lane, _Point[Lane]] = {}
        self._latest_tick = 0
        self._by_depth: dict[int, list[tuple[int, Tie, _Point[Lane]]]] = {}
        # What has left these heaps stays in them until it surfaces, or until most of it has left.
        # A lane whose oldest task is younger now keeps its place until it surfaces. Of the depths
        # only those from the middle one up are there: the lesser half is read when these run out.
        self._by_age: list[tuple[int, int, _Point[Lane]]] = []
        self._negated_depths: list[int] = []
        self._middle_depth = 0
        self._bands: dict[int, _Band[Lane]] = {}
        self._sorted_depth = 0
        self._sorted_age = 1
        self._narrowest_bits = 0
        self._reads = 0
        self._updates = 0
        self._is_flat = True

    def __len__(self) -> int:
        return len(self._points)

    def __contains__(self, lane: Lane) -> bool:
        return lane in self._points

    def put(
        self, lane: Lane, *, depth_micro: int, oldest_tick: int, last_served: float, order: int
    ) -> None:
        """Enter a lane, or replace what was known of it.

        `depth_micro` is the weight of its waiting tasks in millionths, `oldest_tick` the tick at
        which the oldest of them was queued. `last_served` is any number that grows from one grant
        to the next. Give each lane its own `order`: it breaks the last tie.
        """
        if depth_micro < 0:
            raise InvalidSettingError("depth_micro", f"must be at least 0, not {depth_micro}")
        self._updates += 1
        tie = (last_served, oldest_tick, order, self._updates)
        point = self._points.get(lane)
        if point is None:
            point = self._points[lane] = _Point(lane, depth_micro, oldest_tick, tie)
            is_older = True
        else:
            self._remove(point)
            is_older = oldest_tick < point.oldest
            point.depth, point.oldest, point.tie = depth_micro, oldest_tick, tie
        if oldest_tick > self._latest_tick:  # noqa: PLR1730  `max` is a call, for each update
            self._latest_tick = oldest_tick
        self._add(point)
        if is_older and not self._is_flat:
            heappush(self._by_age, (oldest_tick, self._updates, point))
            self._trim_ages()

    def discard(self, lane: Lane) -> None:
        """Take a lane out, if it is there."""
        point = self._points.pop(lane, None)
        if point is not None:
            self._remove(point)
            if not self._is_flat:
                self._trim_ages()
                self._trim_depths()

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane with the highest load at this tick, None if there is no lane."""
        if alpha != self._alpha:
            self._depth_share, self._age_share = _shares(alpha)
            self._alpha = alpha
        if not self._points:
            return None
        if not self._age_share:
            return self._deepest()
        if tick < self._latest_tick:
            return self._compare_all(tick)
        if self._is_flat:
            if len(self._by_depth) <= _MOST_FLAT_DEPTHS:
                return self._best_of_heads(tick)
            self._draw_bands()
        elif len(self._by_depth) <= _FEW_DEPTHS:
            self._drop_bands()
            return self._best_of_heads(tick)
        most_depth = self._most_depth()
        depth, age = self._weights(tick - self._least_tick(), most_depth)
        if self._reads > 2 * len(self._by_depth):
            self._sort(depth, age)
        return self._find(depth, age, most_depth)

    def _most_depth(self) -> int:
        depths, by_depth = self._negated_depths, self._by_depth
        while depths:
            if -depths[0] in by_depth:
                return -depths[0]
            heappop(depths)
        self._gather_depths()
        return -self._negated_depths[0]

    def _least_tick(self) -> int:
        ages, points = self._by_age, self._points
        while True:
            oldest, number, point = ages[0]
            if points.get(point.lane) is not point or point.oldest < oldest:
                heappop(ages)
            elif point.oldest == oldest:
                return oldest
            else:
                heapreplace(ages, (point.oldest, number, point))

    def _trim_ages(self) -> None:
        """Make the heap anew once most of it has left."""
        if len(self._by_age) > 2 * len(self._points) + _SLACK:
            self._gather_ages()

    def _trim_depths(self) -> None:
        if len(self._negated_depths) > 2 * len(self._by_depth) + _SLACK:
            self._gather_depths()

    def _gather_ages(self) -> None:
        points = self._points.values()
        self._by_age = sorted([(point.oldest, point.tie[3], point) for point in points])

    def _gather_depths(self) -> None:
        depths = sorted([-depth for depth in self._by_depth])
        self._negated_depths = depths[: len(depths) // 2 + 1]
        self._middle_depth = -self._negated_depths[-1] if depths else 0

    def _deepest(self) -> Lane:
        """Compare the lanes of the greatest depth by their ties: at alpha 1 age counts nothing."""
        peers = self._by_depth[max(self._by_depth)]
        self.examined += len(self._by_depth) + len(peers)
        return min((tie, point) for _, tie, point in peers)[1].lane

    def _best_of_heads(self, tick: int) -> Lane:
        """Compare the oldest lane of each depth: the others of it cost more, or have worse ties."""
        by_depth = self._by_depth
        self.examined += len(by_depth)
        if len(by_depth) == 1:
            (peers,) = by_depth.values()
            return peers[0][2].lane
        heads = [peers[0] for peers in by_depth.values()]
        depth, age = self._weights(tick - min(heads)[0], max(by_depth))
        costs = [
            (age * head[0] - depth * queued, head[1], head[2])
            for queued, head in zip(by_depth, heads, strict=True)
        ]
        return min(costs)[2].lane

    def _weights(self, most_age: int, most_depth: int) -> tuple[int, int]:
        """Return what depth and age count in a cost.

        Where no lane has any age, all ages are equal and depth alone decides; and the other way
        round.
        """
        return self._depth_share * (most_age or 1), self._age_share * (most_depth or 1)

    def _draw_bands(self) -> None:
        """Keep bands and heaps from now on, because there are many depths."""
        self._is_flat = False
        self._gather_ages()
        self._gather_depths()
        for peers in self._by_depth.values():
            self._enter(peers[0][2])
        self.examined += len(self._by_depth)

    def _drop_bands(self) -> None:
        """Keep neither, because there are only a few depths left."""
        self._is_flat = True
        self._by_age, self._negated_depths = [], []
        self._clear_bands()

    def _find(self, depth: int, age: int, most_depth: int) -> Lane:
        """Let the lanes of each band take the lead, as far down as one of them possibly could.

        From a rank at the weights of the last sorting follows the cost now: for every lane,
        `sorted_age * cost == age * rank - shift * depth`.
        """
        sorted_age = self._sorted_age
        shift = depth * sorted_age - self._sorted_depth * age
        leader = self._by_depth[most_depth][0][2]
        best_tie, lowest = leader.tie, age * leader.oldest - depth * most_depth
        reads = 0
        scaled_lowest = sorted_age * lowest
        for band in self._bands.values():
            extreme = band.most_depth if shift > 0 else band.least_depth
            if extreme > most_depth:  # noqa: PLR1730  `min` is a call, for each band of each choice
                extreme = most_depth
            gained = shift * extreme
            within_reach = scaled_lowest + gained
            for rank, tie, point in band.entries:
                reach = age * rank
                # Further down the ranks are higher, or equal with ties that are worse.
                if reach > within_reach or (reach == within_reach and tie > best_tie):
                    break
                reads += 1
                cost = age * point.oldest - depth * point.depth
                if cost < lowest or (cost == lowest and tie < best_tie):
                    leader, best_tie, lowest = point, tie, cost
                    scaled_lowest = sorted_age * lowest
                    within_reach = scaled_lowest + gained
        self._reads += reads
        self.examined += reads + len(self._bands)
        return leader.lane

    def _add(self, point: _Point[Lane]) -> None:
        """Enter a point among those of its depth, and in its band if it is the first of them."""
        depth, entry = point.depth, (point.oldest, point.tie, point)
        peers = self._by_depth.get(depth)
        if peers is None:
            self._by_depth[depth] = [entry]
            if not self._is_flat:
                self._enter(point)
                if depth >= self._middle_depth:
                    heappush(self._negated_depths, -depth)
                    self._trim_depths()
        elif entry[0] > peers[-1][0]:
            peers.append(entry)
        else:
            first = peers[0]
            insort(peers, entry)
            if peers[0] is entry and not self._is_flat:
                self._leave(first[2])
                self._enter(point)

    def _remove(self, point: _Point[Lane]) -> None:
        """Undo `_add`: the next of the same depth, if any, takes the place in the band."""
        peers = self._by_depth[point.depth]
        if peers[0][2] is not point:
            del peers[bisect_left(peers, (point.oldest, point.tie, point))]
            return
        if not self._is_flat:
            self._leave(point)
        if len(peers) == 1:
            del self._by_depth[point.depth]
            return
        del peers[0]
        if not self._is_flat:
            self._enter(peers[0][2])

    def _enter(self, point: _Point[Lane]) -> None:
        """Enter a point in its band: half an octave, or more where the depths are small."""
        depth = point.depth
        bits = depth.bit_length() - _LEADING_BITS
        if bits < self._narrowest_bits:  # noqa: PLR1730  `max` is a call, for each update
            bits = self._narrowest_bits
        least = depth >> bits << bits
        band = self._bands.get(least)
        if band is None:
            band = self._bands[least] = _Band(least, least + (1 << bits) - 1, [])
        point.entries = band.entries
        rank = self._sorted_age * point.oldest - self._sorted_depth * depth
        insort(point.entries, (rank, point.tie, point))

    def _leave(self, point: _Point[Lane]) -> None:
        rank = self._sorted_age * point.oldest - self._sorted_depth * point.depth
        del point.entries[bisect_left(point.entries, (rank, point.tie, point))]

    def _sort(self, depth: int, age: int) -> None:
        """Rank all lanes anew, by these weights."""
        self._sorted_depth, self._sorted_age = depth, age
        self._fit_bands()
        for band in self._bands.values():
            band.entries[:] = sorted(
                [
                    (age * point.oldest - depth * point.depth, tie, point)
                    for _, tie, point in band.entries
                ]
            )
        # Who begins with the likely leader reads less of the other bands.
        by_lead = sorted(self._bands.values(), key=lambda band: band.entries[0][:2])
        self._bands = {band.least_depth: band for band in by_lead}
        self._reads = 0
        self.examined += len(self._by_depth)

    def _fit_bands(self) -> None:
        """Drop empty bands; draw all anew if the greatest depth has left the octaves they suit."""
        narrowest_bits = max(self._most_depth().bit_length() - _BITS_BELOW_DEEPEST, 0)
        if abs(narrowest_bits - self._narrowest_bits) <= 1:
            self._bands = {least: band for least, band in self._bands.items() if band.entries}
            return
        self._narrowest_bits = narrowest_bits
        self._clear_bands()
        for peers in self._by_depth.values():
            self._enter(peers[0][2])

    def _clear_bands(self) -> None:
        # Points that are the first of their depth no more may still refer to the entries.
        for band in self._bands.values():
            band.entries.clear()
        self._bands.clear()

    def _compare_all(self, tick: int) -> Lane:
        """Answer for a tick before some lane's oldest task, which then has age 0.

        Such lanes are out of the linear order. They come from a counter that was set back, so it
        is enough to be right about them.
        """
        self.examined += len(self._points)
        ticks = [point.oldest for point in self._points.values()]
        self._latest_tick = max(ticks)
        depth, age = self._weights(max(tick - min(ticks), 0), max(self._by_depth))
        costs = (
            (age * min(point.oldest, tick) - depth * point.depth, point.tie, point)
            for point in self._points.values()
        )
        return min(costs)[2].lane


def _shares(alpha: float) -> tuple[int, int]:
    """Return alpha and its complement as whole numbers, as small as their ratio allows."""
    alpha_micro = round(check_alpha(alpha, most=MOST_UNSAFE_ALPHA) * MICRO)
    divisor = gcd(alpha_micro, MICRO)
    return alpha_micro // divisor, (MICRO - alpha_micro) // divisor
