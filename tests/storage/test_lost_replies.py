"""Two simulated nodes whose commits are refused and whose replies get lost: nobody misses anything.

Whoever gets an error asks again, and is told again what it was told; in the end every task has run
and none is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import ParamSpec, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.core.admission import QueueLimits
from headgate.core.lifecycle import NOTHING_USED, Finish
from headgate.core.task import Lease, Submission, Task, TaskStatus, Terms
from headgate.errors import StoreUnavailableError
from headgate.storage.memory import MemoryDatabase, MemoryTaskStore
from headgate.storage.store import Assignment, NewTask, Node, Settled, Settlement, TaskStore
from headgate.storage.writer import Fault
from headgate.testing import SimulatedLoop, simulate

TASKS = 6
LEASE_SECONDS = 1_000.0
NO_LIMITS = QueueLimits(max_queue=None, max_per_agent=None)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def faults_of(random: Random, share: float) -> Callable[[], Fault | None]:
    def fault() -> Fault | None:
        return random.choice(list(Fault)) if random.random() < share else None

    return fault


async def insist(
    step: Callable[Arguments, Awaitable[Result]],
    *args: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Ask until there is an answer."""
    while True:
        try:
            return await step(*args, **options)
        except StoreUnavailableError:
            await asyncio.sleep(0.01)


def new_task(number: int) -> NewTask:
    return NewTask(
        task=Task(id=f"t{number}", project_id="default", agent_id="a1"),
        terms=Terms(),
        submission=Submission(action="click"),
        limits=NO_LIMITS,
        node_id="n2",
    )


def assigned_to_the_other(task_id: str) -> Assignment:
    return Assignment(
        task_id=task_id,
        attempt=1,
        agent_id="a1",
        node_id="n2",
        starts=False,
        reservation_id="",
        share_tokens=0,
    )


def done(task_id: str) -> Settlement:
    return Settlement(
        task_id=task_id,
        lease=Lease(node_id="n2", attempt=1),
        step=Finish(status=TaskStatus.DONE),
        cost=NOTHING_USED,
    )


async def dispatch(store: TaskStore) -> None:
    """Assign whatever is heard of, until everything is heard to be over."""
    epoch = (await insist(store.elect, "n1", lease_seconds=LEASE_SECONDS)).epoch
    over: set[str] = set()
    while len(over) < TASKS:
        news = await insist(store.news, epoch)
        over |= {record.task.id for record in news.records if record.is_terminal}
        queued = [
            assigned_to_the_other(record.task.id)
            for record in news.records
            if record.task.status is TaskStatus.QUEUED
        ]
        await insist(store.assign, epoch, queued)
        await asyncio.sleep(0.1)


async def run_tasks(store: TaskStore) -> list[str]:
    """Submit tasks, run what is collected, and return what was settled, in order."""
    for number in range(TASKS):
        await insist(store.submit, new_task(number))
    settled: list[str] = []
    while len(settled) < TASKS:
        collected = await insist(store.collect, "n2")
        for record in collected.started:
            if record.task.id not in settled:
                answer = await insist(store.settle, done(record.task.id))
                assert isinstance(answer, Settled)
                settled.append(record.task.id)
        await asyncio.sleep(0.1)
    return settled


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000), share=st.sampled_from([0.0, 0.2, 0.5, 0.8]))
def test_every_task_is_heard_of_and_run_whatever_replies_get_lost(seed: int, share: float) -> None:
    async def main(loop: SimulatedLoop) -> list[str]:
        database, fault = MemoryDatabase(), faults_of(Random(seed), share)
        stores = [
            MemoryTaskStore(database, clock=loop.clock, faults=fault, is_shared=True)
            for _ in range(2)
        ]
        for store, node_id in zip(stores, ("n1", "n2"), strict=True):
            await insist(store.open)
            node = Node(id=node_id, capacity=4)
            await insist(store.join, node, lease_seconds=LEASE_SECONDS)
        # Whoever changes something tells a dispatcher only if there is one.
        await insist(stores[0].elect, "n1", lease_seconds=LEASE_SECONDS)
        _, settled = await asyncio.gather(dispatch(stores[0]), run_tasks(stores[1]))
        return settled

    simulation = simulate(main, seed=seed, max_steps=50_000)
    assert sorted(simulation.result) == [f"t{number}" for number in range(TASKS)]
