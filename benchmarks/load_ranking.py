"""The cost of serving the lane with the highest load, with 8 lanes and with 1,000.

A step is what contention asks of the ranking: choose the best lane, put it back with one task
less, and put a lane that got a task. Both sizes run in turns, and the quickest turn of each
counts, because on a shared machine the others measure the neighbours. The floor is what comparing
all lanes would cost.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

from benchmarks.options import Options
from benchmarks.report import Row, table
from headgate.core.load import MICRO, LoadRanking, estimate_weight, to_micro_weight

FEW, MANY = 8, 1000
TASKS_PER_LANE = 4
WARM_UP_STEPS = 6000
STEPS = 500
TURNS = 100
ALPHAS = (0.0, 0.25, 0.5)
MOST_RATIO = 2.0

MODELS = ("claude-haiku-4-5", "claude-sonnet-4-5", "claude-opus-4-1", "gpt-4o", "gpt-4o-mini")


def tier_weight(source: random.Random) -> int:
    return source.choice((1, 2, 3, 5)) * MICRO


def uniform_weight(source: random.Random) -> int:
    return to_micro_weight(source.uniform(1, 10))


def prompt_weight(source: random.Random) -> int:
    prompt_chars = min(int(source.lognormvariate(9, 1)), 800_000)
    return to_micro_weight(estimate_weight(source.choice(MODELS), prompt_chars))


WEIGHTS: dict[str, Callable[[random.Random], int]] = {
    "tiers 1, 2, 3, 5": tier_weight,
    "uniform 1 to 10": uniform_weight,
    "model and prompt": prompt_weight,
}


class Fleet:
    """Lanes with work for ever: as many tasks arrive as are served."""

    def __init__(self, *, lanes: int, alpha: float, weight: Callable[[random.Random], int]) -> None:
        source = random.Random(lanes)
        self.arrivals = [(source.randrange(lanes), weight(source)) for _ in range(5003)]
        self.arrived = 0
        self.alpha = alpha
        self.tick = 0
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(lanes)]
        self.depths = [0] * lanes
        self.served_ticks = [0] * lanes
        self.ranking: LoadRanking[int] = LoadRanking()
        for _ in range(TASKS_PER_LANE * lanes):
            self.arrive()
            self.tick += 1
        self.run(WARM_UP_STEPS)

    def arrive(self) -> None:
        lane, weight = self.arrivals[self.arrived % len(self.arrivals)]
        self.arrived += 1
        self.queues[lane].append((self.tick, weight))
        self.depths[lane] += weight
        self.put(lane)

    def put(self, lane: int) -> None:
        self.ranking.put(
            lane,
            depth_micro=self.depths[lane],
            oldest_tick=self.queues[lane][0][0],
            last_served=self.served_ticks[lane],
            order=lane,
        )

    def serve(self, lane: int) -> None:
        _, weight = self.queues[lane].pop(0)
        self.depths[lane] -= weight
        self.served_ticks[lane] = self.tick
        self.tick += 1
        if self.queues[lane]:
            self.put(lane)
        else:
            self.ranking.discard(lane)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            lane = self.ranking.best(tick=self.tick, alpha=self.alpha)
            if lane is not None:
                self.serve(lane)
            self.arrive()

    def microseconds_a_step(self) -> float:
        started = time.process_time()
        self.run(STEPS)
        return (time.process_time() - started) / STEPS * 1e6

    def microseconds_to_compare_all(self) -> float:
        started = time.process_time()
        for _ in range(10):
            self.compare_all()
        return (time.process_time() - started) / 10 * 1e6

    def compare_all(self) -> int:
        lanes = [lane for lane, queue in enumerate(self.queues) if queue]
        most_depth = max(self.depths)
        most_age = max(self.tick - self.queues[lane][0][0] for lane in lanes)
        depth_factor, age_factor = self.alpha * most_age, (1 - self.alpha) * most_depth
        return max(
            lanes,
            key=lambda lane: (
                depth_factor * self.depths[lane]
                + age_factor * (self.tick - self.queues[lane][0][0])
            ),
        )


def quickest(few: Fleet, many: Fleet) -> tuple[float, float]:
    """Run both in turns, and return the quickest turn of each."""
    gc.collect()
    gc.disable()
    try:
        turns = [(few.microseconds_a_step(), many.microseconds_a_step()) for _ in range(TURNS)]
    finally:
        gc.enable()
    return min(turn[0] for turn in turns), min(turn[1] for turn in turns)


def run(_options: Options) -> bool:
    rows: list[Row] = []
    worst = 0.0
    for name, weight in WEIGHTS.items():
        for alpha in ALPHAS:
            few, many = (Fleet(lanes=lanes, alpha=alpha, weight=weight) for lanes in (FEW, MANY))
            few_us, many_us = quickest(few, many)
            worst = max(worst, many_us / few_us)
            compared_us = many.microseconds_to_compare_all()
            figures = (few_us, many_us, many_us / few_us, compared_us)
            rows.append((name, f"{alpha:.2f}", *(f"{figure:.2f}" for figure in figures)))
    header = (
        "weights",
        "alpha",
        f"{FEW} lanes us",
        f"{MANY} lanes us",
        "ratio",
        "comparing all us",
    )
    table("load ranking: one step of contention", header, rows)
    print(f"  worst ratio {worst:.2f}, at most {MOST_RATIO:.2f}")
    return worst <= MOST_RATIO
