from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.load import MICRO, LoadRanking, to_micro_weight
from headgate.errors import InvalidSettingError


class Known(msgspec.Struct, frozen=True):
    depth_micro: int
    oldest_tick: int
    last_served: int
    order: int


def put(ranking: LoadRanking[str], lane: str, known: Known) -> None:
    ranking.put(lane, **msgspec.structs.asdict(known))


def ranked(lanes: dict[str, Known]) -> LoadRanking[str]:
    ranking: LoadRanking[str] = LoadRanking()
    for lane, known in lanes.items():
        put(ranking, lane, known)
    return ranking


def best_of_all(lanes: dict[str, Known], *, tick: int, alpha: float) -> str | None:
    """Read the rule plainly: score every lane, in integers, and take the highest."""
    if not lanes:
        return None
    alpha_micro = round(alpha * MICRO)
    ages = {lane: max(tick - known.oldest_tick, 0) for lane, known in lanes.items()}
    most_depth = max(known.depth_micro for known in lanes.values())
    most_age = max(ages.values())

    def key(lane: str) -> tuple[int, int, int, int]:
        known = lanes[lane]
        depth_term = alpha_micro * known.depth_micro * (most_age or 1) if most_depth else 0
        age_term = (MICRO - alpha_micro) * ages[lane] * (most_depth or 1) if most_age else 0
        score = depth_term + age_term
        return (-score, known.last_served, known.oldest_tick, known.order)

    return min(lanes, key=key)


ALPHAS = st.sampled_from([0.0, 0.01, 0.25, 1 / 3, 0.4999995, 0.5, 0.9, 0.999999, 1.0])


def operations(
    *, lanes: int, most_depth: int, most_tick: int
) -> st.SearchStrategy[list[tuple[str, int, int, int, float]]]:
    """Draw a history: put, discard or ask, each with a lane, a depth, a tick and an alpha."""
    return st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "discard", "best", "best"]),
            st.integers(0, lanes - 1),
            st.integers(0, most_depth),
            st.integers(0, most_tick),
            ALPHAS,
        ),
        max_size=80,
    )


def check_history(history: list[tuple[str, int, int, int, float]]) -> None:
    ranking: LoadRanking[str] = LoadRanking()
    lanes: dict[str, Known] = {}
    for kind, number, depth, tick, alpha in history:
        lane = f"lane-{number}"
        if kind == "put":
            lanes[lane] = Known(depth, tick, tick * 7 % 3, number)
            put(ranking, lane, lanes[lane])
        elif kind == "discard":
            ranking.discard(lane)
            lanes.pop(lane, None)
        else:
            expected = best_of_all(lanes, tick=tick, alpha=alpha)
            assert ranking.best(tick=tick, alpha=alpha) == expected
        assert len(ranking) == len(lanes)
        assert (lane in ranking) == (lane in lanes)


@settings(deadline=None, max_examples=300)
@given(operations(lanes=6, most_depth=3, most_tick=4))
def test_best_is_that_of_comparing_all_lanes_when_ties_abound(
    history: list[tuple[str, int, int, int, float]],
) -> None:
    check_history(history)


@settings(deadline=None, max_examples=200)
@given(operations(lanes=20, most_depth=2**40, most_tick=10**6))
def test_best_is_that_of_comparing_all_lanes_when_values_are_large(
    history: list[tuple[str, int, int, int, float]],
) -> None:
    check_history(history)


class Contention:
    """A fleet with more work than places: each step serves the best lane, and one task arrives.

    It starts with four tasks a lane: all of them new, or waiting since all sorts of ticks.
    """

    def __init__(
        self,
        *,
        lanes: int,
        alpha: float,
        weight: Callable[[random.Random], int],
        burst: bool = False,
    ) -> None:
        self.random = random.Random(lanes)
        self.weight = weight
        self.alpha = alpha
        self.tick = 0
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(lanes)]
        self.served_ticks = [0] * lanes
        self.known: dict[str, Known] = {}
        self.ranking: LoadRanking[str] = LoadRanking()
        for _ in range(4 * lanes):
            self.arrive(self.random.randrange(lanes))
            self.tick += 0 if burst else 1

    def arrive(self, lane: int) -> None:
        self.queues[lane].append((self.weight(self.random), self.tick))
        self.update(lane)

    def update(self, lane: int) -> None:
        queue = self.queues[lane]
        if not queue:
            self.ranking.discard(str(lane))
            del self.known[str(lane)]
            return
        depth = sum(weight for weight, _ in queue)
        self.known[str(lane)] = Known(depth, queue[0][1], self.served_ticks[lane], lane)
        put(self.ranking, str(lane), self.known[str(lane)])

    def step(self) -> str | None:
        best = self.ranking.best(tick=self.tick, alpha=self.alpha)
        if best is not None:
            lane = int(best)
            self.queues[lane].pop(0)
            self.served_ticks[lane] = self.tick
            self.tick += 1
            self.update(lane)
        self.arrive(self.random.randrange(len(self.queues)))
        return best


def integer_weight(source: random.Random) -> int:
    return source.choice((1, 2, 3, 5)) * MICRO


def any_weight(source: random.Random) -> int:
    return round(source.uniform(1, 10) * MICRO)


def heavy_weight(source: random.Random) -> int:
    return round(min(source.paretovariate(1.2), 1000) * MICRO)


def equal_weight(source: random.Random) -> int:
    return MICRO


WEIGHTS = [integer_weight, any_weight, heavy_weight, equal_weight]


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_best_is_that_of_comparing_all_lanes_under_contention(
    weight: Callable[[random.Random], int], alpha: float
) -> None:
    fleet = Contention(lanes=40, alpha=alpha, weight=weight, burst=True)
    for _ in range(400):
        expected = best_of_all(fleet.known, tick=fleet.tick, alpha=alpha)
        assert fleet.step() == expected


def mean_examined(fleet: Contention, *, steps: int) -> float:
    """Return how many lanes a choice read or sorted, all told."""
    for _ in range(steps):
        fleet.step()
    return fleet.ranking.examined / steps


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_best_looks_at_few_of_a_thousand_lanes(
    weight: Callable[[random.Random], int], alpha: float
) -> None:
    fleet = Contention(lanes=1000, alpha=alpha, weight=weight)
    assert mean_examined(fleet, steps=2000) < 50


@pytest.mark.parametrize("weight", WEIGHTS)
def test_best_looks_at_few_lanes_after_a_burst_of_work_for_all(
    weight: Callable[[random.Random], int],
) -> None:
    fleet = Contention(lanes=1000, alpha=0.25, weight=weight, burst=True)
    assert mean_examined(fleet, steps=1000) < 60


TIES = [
    # rule                             first lane        second lane      winner
    ("the one served longest ago",     Known(2, 5, 8, 0), Known(1, 4, 7, 1), "second"),
    ("served longest ago, if deeper",  Known(2, 5, 7, 1), Known(1, 4, 8, 0), "first"),
    ("the longest wait",               Known(2, 5, 7, 0), Known(1, 4, 7, 1), "second"),
    ("the lowest order",               Known(1, 0, 7, 1), Known(1, 0, 7, 0), "second"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "first", "second", "winner"), TIES, ids=[t[0] for t in TIES])
def test_ties_are_broken(rule: str, first: Known, second: Known, winner: str) -> None:
    # At tick 6 with alpha 0.5 the first three rows give 2/2 + 1/2 against 1/2 + 2/2.
    assert ranked({"first": first, "second": second}).best(tick=6, alpha=0.5) == winner


def test_alpha_zero_serves_whoever_has_waited_longest() -> None:
    ranking = ranked({"deep": Known(9 * MICRO, 5, 0, 0), "old": Known(MICRO, 4, 0, 1)})
    assert ranking.best(tick=10, alpha=0.0) == "old"


def test_alpha_one_half_lets_a_deep_backlog_pass_a_slightly_older_lane() -> None:
    ranking = ranked({"deep": Known(9 * MICRO, 5, 0, 0), "old": Known(MICRO, 4, 0, 1)})
    assert ranking.best(tick=10, alpha=0.5) == "deep"


def test_lanes_of_one_age_are_served_in_turn_however_deep_one_of_them_is() -> None:
    ranking: LoadRanking[int] = LoadRanking()
    depths = [500, *[10] * 50]
    for lane, depth in enumerate(depths):
        ranking.put(lane, depth_micro=depth, oldest_tick=0, last_served=-1, order=lane)
    served = []
    for tick in range(5 * len(depths)):
        best = ranking.best(tick=tick, alpha=0.0)
        assert best is not None
        served.append(best)
        depths[best] -= 1
        ranking.put(best, depth_micro=depths[best], oldest_tick=0, last_served=tick, order=best)
    assert set(Counter(served).values()) == {5}


def test_without_any_age_the_deepest_lane_leads() -> None:
    ranking = ranked({"shallow": Known(1, 3, 0, 0), "deep": Known(2, 3, 0, 1)})
    assert ranking.best(tick=3, alpha=0.25) == "deep"


def test_without_any_depth_the_oldest_lane_leads() -> None:
    ranking = ranked({"young": Known(0, 3, 0, 0), "old": Known(0, 2, 0, 1)})
    assert ranking.best(tick=5, alpha=0.25) == "old"


def test_a_task_from_the_future_has_age_zero() -> None:
    ranking = ranked({"future": Known(5, 90, 1, 0), "now": Known(5, 10, 0, 1)})
    assert ranking.best(tick=10, alpha=0.25) == "now"
    assert ranking.best(tick=9, alpha=0.25) == "now"


def test_no_lane_leads_where_there_is_none() -> None:
    ranking = ranked({"only": Known(1, 0, 0, 0)})
    ranking.discard("only")
    ranking.discard("never there")
    assert ranking.best(tick=1, alpha=0.25) is None
    assert len(ranking) == 0


def footprint(thing: object) -> int:
    """Return the bytes of an object and of all that it alone leads to."""
    seen: dict[int, object] = {}
    waiting = [thing]
    while waiting:
        item = waiting.pop()
        if id(item) not in seen and not isinstance(item, type):
            seen[id(item)] = item
            waiting.extend(gc.get_referents(item))
    return sum(sys.getsizeof(item) for item in seen.values())


@pytest.mark.parametrize("asked_every", [1, 1000])
def test_a_hundred_thousand_updates_of_ten_lanes_do_not_grow_the_ranking(asked_every: int) -> None:
    source = random.Random(asked_every)
    ranking: LoadRanking[int] = LoadRanking()
    sizes = []
    for update in range(1, 100_001):
        lane = source.randrange(10)
        depth = source.randrange(1, 50) * MICRO
        ranking.put(lane, depth_micro=depth, oldest_tick=update, last_served=update, order=lane)
        if update % asked_every == 0:
            ranking.best(tick=update, alpha=0.25)
        if update % 10_000 == 0:
            sizes.append(footprint(ranking))
    assert max(sizes) < 100_000


def test_lanes_that_left_are_let_go() -> None:
    ranking: LoadRanking[int] = LoadRanking()
    for lane in range(1000):
        ranking.put(lane, depth_micro=lane, oldest_tick=lane, last_served=0, order=lane)
    ranking.best(tick=1000, alpha=0.25)
    for lane in range(1000):
        ranking.discard(lane)
    assert footprint(ranking) < 100_000


@pytest.mark.parametrize("alpha", [-0.01, 1.01, float("nan")])
def test_alpha_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(InvalidSettingError, match="alpha: must be a number from 0 to 1, not "):
        ranked({}).best(tick=0, alpha=alpha)


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="depth_micro"):
        ranked({"lane": Known(-1, 0, 0, 0)})


@pytest.mark.parametrize(
    ("weight", "micro"), [(0.0, 0), (1, 1_000_000), (0.1, 100_000), (2.5, 2_500_000), (1e-7, 0)]
)
def test_weight_in_millionths(weight: float, micro: int) -> None:
    assert to_micro_weight(weight) == micro


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_a_weight_that_cannot_be_summed_is_refused(weight: float) -> None:
    with pytest.raises(InvalidSettingError, match="weight"):
        to_micro_weight(weight)
