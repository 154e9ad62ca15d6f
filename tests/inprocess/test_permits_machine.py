"""Whatever is cancelled, timed out, raised or shut down when: no permit too many, none lost.

A machine draws the steps, and the simulated loop the order in which what is ready runs. Several
steps may happen before anything runs, so a cancel meets its task before it has started, while it
waits, and between its grant and its next step.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headgate import Agent, Grant, LoadScheduler, SharedResource, Task
from headgate.errors import HeadgateError
from headgate.testing import SimulatedLoop

pytestmark = pytest.mark.hypothesis

AGENTS = ("a", "b", "c")


class BodyError(Exception):
    """What a holder raises."""


class PermitsMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(1, 3),
        alpha=st.sampled_from([0.0, 0.25, 0.5]),
        max_wait_ticks=st.sampled_from([None, 2]),
        seed=st.integers(0, 1000),
    )
    def start(self, capacity: int, alpha: float, max_wait_ticks: int | None, seed: int) -> None:
        self.loop = SimulatedLoop(seed=seed)
        self.capacity = capacity
        self.scheduler = LoadScheduler(
            ["a", "b", Agent(id="c", capacity=1)],
            SharedResource("llm", capacity),
            alpha=alpha,
            max_wait_ticks=max_wait_ticks,
            max_waiters=30,
        )
        self.holders: dict[asyncio.Task[Any], asyncio.Event] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.taken: list[Grant] = []
        # Their ids stay their own as long as they live.
        self.known = []
        self.submitted: dict[str, dict[int, float]] = {agent: {} for agent in AGENTS}

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for task in self.tasks:
            task.cancel()
        self.run(self.finished())
        assert self.scheduler.resource.in_use == len(self.taken)
        assert not self.holders
        self.nothing_submitted_is_lost_or_counted_twice()
        self.run(self.usable())
        assert self.run(self.scheduler.shutdown(timeout=1)) == 0
        assert self.scheduler.queued == 0
        self.loop.check()
        self.loop.close()

    async def finished(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def usable(self) -> None:
        """Show that every permit can be had again."""
        for grant in self.taken:
            await self.scheduler.release(grant)
        if self.is_closed:
            return
        if "a" not in self.scheduler.agents:
            self.scheduler.register("a")
        grants = [await self.scheduler.acquire("a", timeout=1) for _ in range(self.capacity)]
        for grant in grants:
            await self.scheduler.release(grant)

    def nothing_submitted_is_lost_or_counted_twice(self) -> None:
        """When nobody waits, what is queued is what was submitted and never served."""
        lanes = {lane.agent_id: lane for lane in self.scheduler.explain().lanes}
        for agent, weights in self.submitted.items():
            lane = lanes.get(agent)
            found = (0, 0, 0.0) if lane is None else (lane.waiting, lane.queued, lane.queue_depth)
            assert found == (0, len(weights), sum(weights.values()))

    is_closed = False
    known: list[Task]

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def reserved(self, agent: str, task: Task | None, patience: float | None) -> None:
        own = asyncio.current_task()
        assert own is not None
        try:
            async with self.scheduler.acquire(agent, task=task, timeout=patience) as grant:
                self.serve(agent, grant)
                self.holders[own] = end = asyncio.Event()
                try:
                    await end.wait()
                    if end in self.failing:
                        raise BodyError
                finally:
                    del self.holders[own]
        except (HeadgateError, BodyError):
            return

    def serve(self, agent: str, grant: Grant) -> None:
        if grant.entry.is_submitted and grant.lane.is_known and not self.is_closed:
            # It is served once: a second time it is not there.
            del self.submitted[agent][id(grant.task)]

    failing: frozenset[asyncio.Event] = frozenset()

    @rule(
        agent=st.sampled_from(AGENTS),
        weight=st.sampled_from([None, None, 0.0, 1.0, 4.0]),
        timeout=st.sampled_from([None, None, 0.0, 1.0, 2.0]),
    )
    def ask(self, agent: str, weight: float | None, timeout: float | None) -> None:
        task = None if weight is None else Task(weight=weight)
        self.tasks.append(self.loop.create_task(self.reserved(agent, task, timeout)))

    @rule(agent=st.sampled_from(AGENTS), weight=st.sampled_from([0.5, 3.0]))
    def submit(self, agent: str, weight: float) -> None:
        async def submitted() -> None:
            task = Task(weight=weight)
            with suppress(HeadgateError):
                await self.scheduler.submit_task(agent, task)
                self.submitted[agent][id(task)] = weight
                self.known.append(task)

        self.tasks.append(self.loop.create_task(submitted()))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        end = data.draw(st.sampled_from(list(self.holders.values())))
        if fails:
            self.failing |= {end}
        end.set()

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tasks[-8:])).cancel()

    @rule()
    def take_a_permit(self) -> None:
        async def taken() -> None:
            with suppress(HeadgateError):
                grant = await self.scheduler.acquire("a", timeout=0)
                self.serve("a", grant)
                self.taken.append(grant)

        self.run(taken())

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release_and_cancel_who_waits_before_it_can_run(self, data: st.DataObject) -> None:
        grant = self.taken.pop(0)
        waiting = [task for task in self.tasks if not task.done() and task not in self.holders]
        victims = data.draw(st.lists(st.sampled_from(waiting), max_size=3)) if waiting else []

        async def released() -> None:
            # Without money to settle nothing is awaited here, so nobody runs in between.
            await self.scheduler.release(grant)
            for victim in victims:
                victim.cancel()

        self.run(released())

    @rule(steps=st.integers(1, 4))
    def let_some_run(self, steps: int) -> None:
        async def some() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        self.run(some())

    @rule(seconds=st.sampled_from([1.0, 2.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(agent=st.sampled_from(AGENTS))
    def unregister_or_register(self, agent: str) -> None:
        if agent in self.scheduler.agents:
            self.scheduler.unregister(agent)
            self.submitted[agent].clear()
        else:
            self.scheduler.register(agent)

    @precondition(lambda self: len(self.tasks) > 12)
    @rule()
    def shut_down(self) -> None:
        self.is_closed = True
        self.run(self.scheduler.shutdown(timeout=0.5))
        for weights in self.submitted.values():
            weights.clear()

    @invariant()
    def capacity_is_never_exceeded(self) -> None:
        if not hasattr(self, "loop"):
            return
        assert (
            len(self.holders) + len(self.taken) <= self.scheduler.resource.in_use <= self.capacity
        )

    @invariant()
    def a_free_permit_means_that_nobody_waits_who_could_have_it(self) -> None:
        if hasattr(self, "loop") and self.scheduler.resource.free:
            lanes = self.scheduler.explain().lanes
            assert all(lane.load is None for lane in lanes)

    @invariant()
    def the_sums_of_all_lanes_are_the_totals(self) -> None:
        if hasattr(self, "loop"):
            lanes = self.scheduler.explain().lanes
            assert sum(lane.queued for lane in lanes) == self.scheduler.queued
            assert all(lane.queue_depth >= 0 and lane.queued >= lane.waiting for lane in lanes)
            assert self.scheduler.queued <= 30


TestPermits = PermitsMachine.TestCase
TestPermits.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
