"""The order of grants is that of the equation, read plainly over all lanes."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Agent, LoadScheduler, SharedResource, Task
from headgate.testing import SimulatedLoop, simulate

AGENTS = ("a", "b", "c", "d")
WEIGHTS = (0.0, 0.5, 1.0, 2.0, 5.0)
CAPACITIES = {"a": None, "b": None, "c": None, "d": 1}


class Plain:
    """The rules as they are written: lists, and every lane compared at every grant.

    A task is its place in the order, its tick and its weight. Who asks for a place while no task is
    left for it queues one of weight 1.
    """

    def __init__(self, *, alpha: float, capacity: int, max_wait_ticks: int | None) -> None:
        # Alpha counts in millionths, so that a third is one number everywhere.
        self.alpha = Fraction(round(alpha * 1_000_000), 1_000_000)
        self.max_wait_ticks = max_wait_ticks
        self.free = capacity
        self.tick = 0
        self.number = 0
        self.tasks: dict[str, list[tuple[int, int, float]]] = {agent: [] for agent in AGENTS}
        self.waiters = dict.fromkeys(AGENTS, 0)
        self.in_flight = dict.fromkeys(AGENTS, 0)
        self.served = dict.fromkeys(AGENTS, -1)
        self.granted: list[tuple[str, int, float]] = []

    def submit(self, agent: str, weight: float) -> None:
        self.number += 1
        self.tasks[agent].append((self.number, self.tick, weight))

    def acquire(self, agent: str) -> None:
        if len(self.tasks[agent]) == self.waiters[agent]:
            self.submit(agent, 1.0)
        self.waiters[agent] += 1
        self.grant()

    def release(self, agent: str) -> None:
        self.tick += 1
        self.free += 1
        self.in_flight[agent] -= 1
        self.grant()

    def grant(self) -> None:
        while self.free and (competing := [a for a in AGENTS if self.competes(a)]):
            agent = self.next_of(competing)
            _, tick, weight = self.tasks[agent].pop(0)
            self.waiters[agent] -= 1
            self.in_flight[agent] += 1
            self.served[agent] = self.tick
            self.free -= 1
            self.granted.append((agent, self.tick - tick, weight))

    def competes(self, agent: str) -> bool:
        capacity = CAPACITIES[agent]
        return self.waiters[agent] > 0 and (capacity is None or self.in_flight[agent] < capacity)

    def next_of(self, competing: list[str]) -> str:
        oldest = min(competing, key=lambda agent: self.tasks[agent][0])
        limit = self.max_wait_ticks
        if limit is not None and self.tick - self.tasks[oldest][0][1] >= limit:
            return oldest
        depth = {a: sum((Fraction(t[2]) for t in self.tasks[a]), Fraction(0)) for a in competing}
        age = {agent: self.tick - self.tasks[agent][0][1] for agent in competing}
        most_depth, most_age = max(depth.values()), max(age.values())

        def key(agent: str) -> tuple[Fraction, Fraction, int, int]:
            load = Fraction(0)
            if most_depth:
                load += self.alpha * depth[agent] / most_depth
            if most_age:
                load += (1 - self.alpha) * age[agent] / most_age
            return (-load, -depth[agent], self.served[agent], AGENTS.index(agent))

        return min(competing, key=key)


steps = st.lists(
    st.tuples(
        st.sampled_from(["submit", "acquire", "acquire", "acquire", "release", "release"]),
        st.sampled_from(AGENTS),
        st.sampled_from(WEIGHTS),
    ),
    min_size=20,
    max_size=80,
)


class Real:
    """The same steps, done by asyncio tasks on a scheduler."""

    def __init__(self, scheduler: LoadScheduler) -> None:
        self.scheduler = scheduler
        self.granted: list[tuple[str, int, float]] = []
        self.ends: dict[str, list[asyncio.Event]] = {agent: [] for agent in AGENTS}

    async def hold(self, agent: str) -> None:
        async with self.scheduler.acquire(agent) as grant:
            self.granted.append((agent, grant.wait_ticks, grant.weight))
            end = asyncio.Event()
            self.ends[agent].append(end)
            await end.wait()


async def compare(
    history: list[tuple[str, str, float]],
    *,
    alpha: float,
    capacity: int,
    max_wait_ticks: int | None,
) -> None:
    agents = [a if CAPACITIES[a] is None else Agent(id=a, capacity=1) for a in AGENTS]
    scheduler = LoadScheduler(
        agents, SharedResource("llm", capacity), alpha=alpha, max_wait_ticks=max_wait_ticks
    )
    plain = Plain(alpha=alpha, capacity=capacity, max_wait_ticks=max_wait_ticks)
    real = Real(scheduler)
    async with asyncio.TaskGroup() as group:
        for kind, agent, weight in history:
            if kind == "submit":
                plain.submit(agent, weight)
                await scheduler.submit_task(agent, Task(weight=weight))
            elif kind == "acquire":
                plain.acquire(agent)
                group.create_task(real.hold(agent))
            elif real.ends[agent]:
                plain.release(agent)
                real.ends[agent].pop(0).set()
            # A second is enough for everything that is ready: time jumps only when nothing is.
            await asyncio.sleep(1)
            assert real.granted == plain.granted
            assert scheduler.tick == plain.tick
        while any(real.ends.values()):
            for ends in real.ends.values():
                while ends:
                    ends.pop(0).set()
            await asyncio.sleep(1)
    assert scheduler.resource.in_use == 0


@settings(deadline=None, max_examples=400)
@given(
    steps,
    st.sampled_from([0.0, 0.01, 0.25, 1 / 3, 0.5]),
    st.integers(1, 3),
    st.sampled_from([None, 1, 3, 10]),
)
def test_grants_come_in_the_order_of_the_equation(
    history: list[tuple[str, str, float]], alpha: float, capacity: int, max_wait_ticks: int | None
) -> None:
    async def main(loop: SimulatedLoop) -> None:
        await compare(history, alpha=alpha, capacity=capacity, max_wait_ticks=max_wait_ticks)

    simulate(main)


def order_of(optimize_for: str) -> str:
    """Return who is granted first: one task that waits longest, or a deep lane that came later."""

    async def main(loop: SimulatedLoop) -> str:
        scheduler = LoadScheduler(
            ["holder", "early", "deep"], SharedResource("llm"), optimize_for=optimize_for
        )
        granted: list[str] = []

        async def hold(agent: str, seconds: float) -> None:
            async with scheduler.acquire(agent):
                granted.append(agent)
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(hold("holder", 1))
            await asyncio.sleep(0.5)
            group.create_task(hold("early", 1))
            await asyncio.sleep(1)
            for _ in range(50):
                group.create_task(hold("deep", 1))
        rest = [agent for agent in granted if agent != "holder"]
        return rest[0]

    return simulate(main).result


@pytest.mark.parametrize(("optimize_for", "first"), [("latency", "early"), ("throughput", "deep")])
def test_presets_trade_waiting_for_depth(optimize_for: str, first: str) -> None:
    assert order_of(optimize_for) == first


def test_without_contention_nothing_is_scored_and_nothing_ages() -> None:
    async def main(loop: SimulatedLoop) -> None:
        scheduler = LoadScheduler(["a", "b"], SharedResource("llm", 2))
        async with scheduler.acquire("a") as first, scheduler.acquire("b") as second:
            assert first.wait_ticks == second.wait_ticks == 0
            assert [lane.load for lane in scheduler.explain().lanes] == [None, None]
        assert scheduler.tick == 2

    simulate(main)


def test_auto_tune_follows_a_growing_backlog_upwards_and_uneven_waits_downwards() -> None:
    async def main(loop: SimulatedLoop) -> tuple[float, float]:
        scheduler = LoadScheduler(None, SharedResource("llm"), alpha=0.25, auto_tune=True)
        seen: list[float] = []

        async def hold(agent: str) -> None:
            async with scheduler.acquire(agent):
                await asyncio.sleep(1)
                seen.append(scheduler.alpha)

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                for _ in range(3):
                    group.create_task(hold(f"a{number % 4}"))
                await asyncio.sleep(1)
        return min(seen), max(seen)

    lowest, highest = simulate(main).result
    assert 0.0 <= lowest < highest <= 0.5
