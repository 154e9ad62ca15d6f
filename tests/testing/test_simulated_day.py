"""A day of scheduling on the simulated loop: fast, and the same for the same seed."""

from __future__ import annotations

import asyncio
import random
import time

from headgate import Project, Task
from headgate.core.snapshot import LanePolicy
from headgate.testing import SimulatedLoop, Simulation, simulate
from headgate.testing.fleet import SimulatedFleet, Workload
from snapshots import agents, snapshot

TICK_SECONDS = 5
DAY_SECONDS = 86_400


def fleet(seed: int) -> SimulatedFleet:
    def make(randomness: random.Random) -> Task:
        return Task(estimate_tokens=randomness.randint(100, 5_000))

    def rounds(randomness: random.Random) -> int:
        return randomness.randint(12, 120)

    workloads = [
        Workload(
            project=Project(id=name, credit_weight=weight, max_concurrent_agents=None),
            make=make,
            rounds=rounds,
        )
        for name, weight in (("x", 1.0), ("y", 2.0), ("z", 3.0))
    ]
    options = snapshot(
        charge_in_round=True,
        project_started={},
        lane_policy=LanePolicy.FEWEST_IN_FLIGHT,
        max_lag_tokens=50_000,
    )
    return SimulatedFleet(workloads, agents(6), options, seed=seed)


def simulated_day(seed: int) -> Simulation[int]:
    async def orchestrate(loop: SimulatedLoop) -> int:
        running = fleet(loop.random.randrange(2**32))
        for _ in range(DAY_SECONDS // TICK_SECONDS):
            for action in running.step():
                loop.record("assign", agent=action.agent_id, task=action.task_id)
            await asyncio.sleep(TICK_SECONDS)
        return len(running.grants)

    return simulate(orchestrate, seed=seed)


def test_a_day_of_scheduling_takes_less_than_a_second() -> None:
    seconds = []
    for _ in range(3):
        started = time.process_time()
        day = simulated_day(seed=1)
        seconds.append(time.process_time() - started)
        assert day.seconds == DAY_SECONDS
        assert day.result > 1_000
    assert min(seconds) < 1.0


def test_the_same_seed_gives_the_same_trace() -> None:
    assert simulated_day(seed=3).trace == simulated_day(seed=3).trace
    assert simulated_day(seed=3).trace != simulated_day(seed=4).trace
