"""The order of grants is that of the equation, read plainly over all lanes."""

from __future__ import annotations

import asyncio
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Agent, Grant, LoadScheduler, SharedResource, Task
from headgate.testing import SimulatedLoop, simulate

AGENTS = ("a", "b", "c", "d")
WEIGHTS = (0.0, 0.5, 1.0, 2.0, 5.0)
CAPACITIES = {"a": None, "b": None, "c": None, "d": 1}


class Queued(NamedTuple):
    """A task: its position in the order, its tick and its weight."""

    number: int
    tick: int
    weight: float
    is_makeshift: bool = False


class Asking(NamedTuple):
    """Somebody who waits: its turn, and its task, None for one of those that were submitted."""

    number: int
    own: Queued | None


class Plain:
    """The rules as they are written: lists, and every lane compared at every grant.

    Who asks gets the oldest submitted task that nobody has asked for, or queues one of its own, of
    weight 1 if it names none. A submitted task whose taker is gone goes to the first who asked
    after it was there and has only such a makeshift one.
    """

    def __init__(self, *, alpha: float, capacity: int, max_wait_ticks: int | None) -> None:
        # Alpha counts in millionths, so that a third is one number everywhere.
        self.alpha = Fraction(round(alpha * 1_000_000), 1_000_000)
        self.max_wait_ticks = max_wait_ticks
        self.free = capacity
        self.tick = 0
        self.number = 0
        self.submitted: dict[str, list[Queued]] = {agent: [] for agent in AGENTS}
        self.waiters: dict[str, list[Asking]] = {agent: [] for agent in AGENTS}
        self.in_flight = dict.fromkeys(AGENTS, 0)
        self.grants = 0
        self.served = dict.fromkeys(AGENTS, -1)
        self.granted: list[tuple[str, int, int, float]] = []
        self.latest: dict[int, tuple[str, Queued, bool]] = {}

    def submit(self, agent: str, weight: float) -> None:
        self.number += 1
        self.submitted[agent].append(Queued(self.number, self.tick, weight))

    def acquire(self, agent: str, weight: float | None = None) -> int:
        self.number += 1
        own = None
        if weight is not None:
            own = Queued(self.number, self.tick, weight)
        elif len(self.submitted[agent]) <= self.takers(agent):
            own = Queued(self.number, self.tick, 1.0, is_makeshift=True)
        self.waiters[agent].append(Asking(self.number, own))
        self.grant()
        return self.number

    def release(self, agent: str) -> None:
        self.tick += 1
        self.free += 1
        self.in_flight[agent] -= 1
        self.grant()

    def withdraw(self, number: int) -> None:
        for agent, waiters in self.waiters.items():
            self.waiters[agent] = [one for one in waiters if one.number != number]
            self.pass_on(agent)

    def hand_back(self, number: int) -> None:
        """Undo a grant that nobody came for."""
        agent, task, is_submitted = self.latest[number]
        self.granted = [one for one in self.granted if one[1] != number]
        self.free += 1
        self.in_flight[agent] -= 1
        if is_submitted:
            self.submitted[agent] = sorted([*self.submitted[agent], task])
            self.pass_on(agent)
        self.grant()

    def pass_on(self, agent: str) -> None:
        unclaimed = self.submitted[agent][self.takers(agent) :]
        waiters = self.waiters[agent]
        for position, one in enumerate(waiters):
            if unclaimed and one.own and one.own.is_makeshift and one.number > unclaimed[0].number:
                waiters[position] = Asking(one.number, None)
                return

    def takers(self, agent: str) -> int:
        return sum(one.own is None for one in self.waiters[agent])

    def tasks(self, agent: str) -> list[Queued]:
        own = [one.own for one in self.waiters[agent] if one.own is not None]
        return [*self.submitted[agent], *own]

    def head(self, agent: str) -> Queued:
        own = [one.own for one in self.waiters[agent] if one.own is not None]
        return min([*own, *self.submitted[agent][: self.takers(agent)]])

    def grant(self) -> None:
        while self.free and (competing := [a for a in AGENTS if self.competes(a)]):
            agent = self.next_of(competing)
            task, waiters = self.head(agent), self.waiters[agent]
            is_submitted = task in self.submitted[agent]
            if is_submitted:
                self.submitted[agent].remove(task)
            taker = next(one for one in waiters if one.own == (None if is_submitted else task))
            waiters.remove(taker)
            self.in_flight[agent] += 1
            self.grants += 1
            self.served[agent] = self.grants
            self.free -= 1
            self.latest[taker.number] = (agent, task, is_submitted)
            self.granted.append((agent, taker.number, self.tick - task.tick, task.weight))

    def competes(self, agent: str) -> bool:
        capacity = CAPACITIES[agent]
        has_room = capacity is None or self.in_flight[agent] < capacity
        return bool(self.waiters[agent]) and has_room

    def next_of(self, competing: list[str]) -> str:
        oldest = min(competing, key=self.head)
        limit = self.max_wait_ticks
        if limit is not None and self.tick - self.head(oldest).tick >= limit:
            return oldest
        depth = {a: sum((Fraction(t.weight) for t in self.tasks(a)), Fraction()) for a in competing}
        age = {agent: self.tick - self.head(agent).tick for agent in competing}
        most_depth, most_age = max(depth.values()), max(age.values())

        def key(agent: str) -> tuple[Fraction, int, int, int]:
            load = Fraction(0)
            if most_depth:
                load += self.alpha * depth[agent] / most_depth
            if most_age:
                load += (1 - self.alpha) * age[agent] / most_age
            return (-load, self.served[agent], -age[agent], AGENTS.index(agent))

        return min(competing, key=key)


KINDS = ("submit", "acquire", "acquire", "acquire", "own", "release", "release", "cancel", "swap")

steps = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
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
        self.granted: list[tuple[str, int, int, float]] = []
        self.held: dict[str, list[tuple[Grant, asyncio.Event]]] = {agent: [] for agent in AGENTS}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def acquire(self, agent: str, number: int, weight: float | None = None) -> None:
        task = None if weight is None else Task(weight=weight)
        self.tasks[number] = asyncio.create_task(self.reserved(agent, number, task))

    async def reserved(self, agent: str, number: int, task: Task | None) -> None:
        async with self.scheduler.acquire(agent, task=task) as grant:
            self.granted.append((agent, number, grant.wait_ticks, grant.weight))
            end = asyncio.Event()
            self.held[agent].append((grant, end))
            await end.wait()

    def end(self, agent: str) -> Grant:
        grant, end = self.held[agent].pop(0)
        end.set()
        return grant

    async def finish(self) -> None:
        while any(self.held.values()):
            for agent in AGENTS:
                while self.held[agent]:
                    self.end(agent)
            await asyncio.sleep(1)


async def step(kind: str, agent: str, weight: float, plain: Plain, real: Real) -> None:
    waiting = [one.number for waiters in plain.waiters.values() for one in waiters]
    if kind == "submit":
        plain.submit(agent, weight)
        await real.scheduler.submit_task(agent, Task(weight=weight))
    elif kind == "acquire":
        real.acquire(agent, plain.acquire(agent))
    elif kind == "own":
        real.acquire(agent, plain.acquire(agent, weight), weight)
    elif kind == "cancel" and waiting:
        number = waiting[int(weight * 7) % len(waiting)]
        plain.withdraw(number)
        real.tasks[number].cancel()
    elif kind == "swap" and real.held[agent]:
        # Nothing is awaited without money to settle: the cancel meets who has just got the permit.
        count = len(plain.granted)
        plain.release(agent)
        await real.scheduler.release(real.end(agent))
        for _, number, _, _ in plain.granted[count:][:1]:
            real.tasks[number].cancel()
            plain.hand_back(number)
    elif kind == "release" and real.held[agent]:
        plain.release(agent)
        real.end(agent)


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
    for kind, agent, weight in history:
        await step(kind, agent, weight, plain, real)
        # A second is enough for everything that is ready: time jumps only when nothing is.
        await asyncio.sleep(1)
        assert real.granted == plain.granted
        assert scheduler.tick == plain.tick
        depths = {one.agent_id: one.queue_depth for one in scheduler.explain().lanes}
        for name in AGENTS:
            assert depths.get(name, 0.0) == sum(task.weight for task in plain.tasks(name))
    await real.finish()
    await asyncio.gather(*real.tasks.values(), return_exceptions=True)
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


def test_agents_that_wait_alike_are_served_in_turn_beside_one_with_a_deep_queue() -> None:
    async def main(loop: SimulatedLoop) -> Counter[str]:
        scheduler = LoadScheduler(None, SharedResource("llm", 3), optimize_for="latency")
        granted: list[str] = []

        async def reserved(agent: str) -> None:
            async with scheduler.acquire(agent):
                granted.append(agent)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for _ in range(380):
                group.create_task(reserved("deep"))
            for _ in range(4):
                for number in range(50):
                    group.create_task(reserved(f"a{number}"))
        return Counter(granted[: 4 * 51])

    grants = simulate(main, seed=None).result
    assert max(grants.values()) - min(grants.values()) <= 3
    assert len(grants) == 51


def order_of(optimize_for: str) -> str:
    """Return who is granted first: one task that waits longest, or a deep lane that came later."""

    async def main(loop: SimulatedLoop) -> str:
        scheduler = LoadScheduler(
            ["holder", "early", "deep"], SharedResource("llm"), optimize_for=optimize_for
        )
        granted: list[str] = []

        async def reserved(agent: str, seconds: float) -> None:
            async with scheduler.acquire(agent):
                granted.append(agent)
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(reserved("holder", 1))
            await asyncio.sleep(0.5)
            group.create_task(reserved("early", 1))
            await asyncio.sleep(1)
            for _ in range(50):
                group.create_task(reserved("deep", 1))
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

        async def reserved(agent: str) -> None:
            async with scheduler.acquire(agent):
                await asyncio.sleep(1)
                seen.append(scheduler.alpha)

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                for _ in range(3):
                    group.create_task(reserved(f"a{number % 4}"))
                await asyncio.sleep(1)
        return min(seen), max(seen)

    lowest, highest = simulate(main).result
    assert 0.0 <= lowest < highest <= 0.5
