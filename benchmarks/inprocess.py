"""The in-process scheduler: what a grant costs, and how fair the presets are.

Cost: so many agents contend for eight places with 10,000 tasks queued, each of them a coroutine
that takes a place and yields once. The floor is the same with a bare `asyncio.Semaphore`, which
knows no agents. Both run in turns, and the quickest turn of each counts. `loco-agent`, which the
load function comes from, is measured beside where it is installed. The same again for agents that
work in loops, as programs do: each asks for one place at a time, so one lane comes and one goes
with every grant.

Fairness: three crowds under each preset; how even grants and mean waits are between agents (Jain's
index: 1 is even, 1/8 is all for one), the longest wait in ticks, and the longest possible one.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine_peers import FAILED, NOT_INSTALLED
from benchmarks.options import ROOT, Options
from benchmarks.report import Row, table
from headgate import LoadScheduler, SharedResource
from headgate.core.load import OPTIMIZE_FOR, longest_wait_ticks
from headgate.inprocess.lanes import jain_index
from inprocess.fleet import Fleet, in_a_loop

AGENTS = (8, 100, 1_000)
CAPACITY = 8
QUEUED = 10_000
TURNS = 7
MOST_RATIO = 3.0
LEAST_TIMES_PEER = 100.0
PEER_SECONDS = 3.0

GRANTS = 20_000


async def semaphore_seconds(workers: int, calls_each: int) -> float:
    places = asyncio.Semaphore(CAPACITY)

    async def work() -> None:
        for _ in range(calls_each):
            async with places:
                await asyncio.sleep(0)

    started = time.process_time()
    await asyncio.gather(*(work() for _ in range(workers)))
    return time.process_time() - started


async def scheduler_seconds(agents: int, workers: int, calls_each: int) -> float:
    names = [f"agent-{number}" for number in range(agents)]
    resource = SharedResource("llm", CAPACITY)
    scheduler = LoadScheduler(names, resource, max_waiters=workers)

    async def work(name: str) -> None:
        for _ in range(calls_each):
            async with scheduler.acquire(name):
                await asyncio.sleep(0)

    started = time.process_time()
    await asyncio.gather(*(work(names[number % agents]) for number in range(workers)))
    return time.process_time() - started


def peer_grants_a_second(agents: int, queued: int, python: Path) -> float | str:
    if not python.exists():
        return NOT_INSTALLED
    command = [str(python), "-m", "benchmarks.inprocess_peer", "--agents", str(agents)]
    command += ["--queued", str(queued), "--capacity", str(CAPACITY)]
    command += ["--seconds", str(PEER_SECONDS)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in answer.stderr:
        return NOT_INSTALLED
    return FAILED if answer.returncode else float(answer.stdout)


def measure_cost(options: Options) -> bool:
    queued, turns = (500, 1) if options.quick else (QUEUED, TURNS)
    floor: list[float] = []
    ours: dict[int, list[float]] = {agents: [] for agents in AGENTS}
    for _ in range(turns):
        floor.append(asyncio.run(semaphore_seconds(queued, 1)))
        for agents, seconds in ours.items():
            seconds.append(asyncio.run(scheduler_seconds(agents, queued, 1)))
    rows: list[Row] = [("asyncio.Semaphore (floor)", f"{queued / min(floor):,.0f}", "1.00", "")]
    is_met = True
    for agents, seconds in ours.items():
        rate, ratio = queued / min(seconds), min(seconds) / min(floor)
        peer = peer_grants_a_second(agents, queued, options.peers_python)
        beside = peer if isinstance(peer, str) else f"{peer:,.0f}"
        rows.append((f"{agents:,} agents", f"{rate:,.0f}", f"{ratio:.2f}", beside))
        is_met &= ratio <= MOST_RATIO
        if agents == AGENTS[-1] and isinstance(peer, float):
            is_met &= rate >= LEAST_TIMES_PEER * peer
    header = ("capacity 8", "grants a second", "times the floor", "loco-agent")
    table(f"in-process: {queued:,} queued tasks", header, rows)
    print(f"  at most {MOST_RATIO:g} times the floor, and {LEAST_TIMES_PEER:g} times loco-agent")
    return is_met or options.quick


def measure_loops(options: Options) -> bool:
    calls, turns = (1_000, 1) if options.quick else (GRANTS, TURNS)
    rows: list[Row] = []
    is_met = True
    for agents in AGENTS:
        floor, ours = [], []
        for _ in range(turns):
            floor.append(asyncio.run(semaphore_seconds(agents, calls // agents)))
            ours.append(asyncio.run(scheduler_seconds(agents, agents, calls // agents)))
        ratio = min(ours) / min(floor)
        is_met &= ratio <= MOST_RATIO
        rates = (f"{calls / min(seconds):,.0f}" for seconds in (ours, floor))
        rows.append((f"{agents:,} agents in loops", *rates, f"{ratio:.2f}"))
    header = ("capacity 8", "grants a second", "asyncio.Semaphore", "times the floor")
    table("in-process: agents that ask for one permit at a time", header, rows)
    print(f"  at most {MOST_RATIO:g} times the floor")
    return is_met or options.quick


class Crowd(NamedTuple):
    """How many tasks each agent keeps queued, and what they weigh."""

    title: str
    backlogs: tuple[int, ...]
    weights: tuple[float, ...] = (1.0,) * 8


CROWDS = (
    Crowd("eight alike", (8,) * 8),
    Crowd("one keeps 50 queued, seven keep 2", (50, *(2,) * 7)),
    Crowd("eight alike, four of weight 5", (8,) * 8, (5.0,) * 4 + (1.0,) * 4),
)


def fairness(crowd: Crowd, alpha: float, grants: int) -> Row:
    """Let every agent queue a task again for each that it is granted; look at what it got."""
    waiters = sum(crowd.backlogs)

    def scenario() -> Fleet:
        fleet = Fleet(alpha=alpha, max_waiters=waiters)
        fleet.ask("first")
        for agent, backlog in enumerate(crowd.backlogs):
            for _ in range(backlog):
                fleet.ask(f"a{agent}", crowd.weights[agent])
        for _ in range(grants):
            grant = fleet.release()
            if grant is not None:
                fleet.ask(grant.agent_id, grant.weight)
        return fleet

    waits: dict[str, list[int]] = {f"a{agent}": [0] for agent in range(len(crowd.backlogs))}
    for grant in in_a_loop(scenario).grants[1:]:
        waits[grant.agent_id].append(grant.wait_ticks)
    means = [sum(one) / len(one) for one in waits.values()]
    longest = max(max(one) for one in waits.values())
    bound = longest_wait_ticks(
        alpha=alpha,
        max_waiters=waiters,
        least_weight=min(crowd.weights),
        most_weight=max(crowd.weights),
    )
    even_grants = jain_index([len(one) for one in waits.values()])
    return f"{even_grants:.2f}", f"{jain_index(means):.2f}", f"{longest}", f"{bound:,.0f}"


def run(options: Options) -> bool:
    is_met = measure_cost(options)
    is_met &= measure_loops(options)
    rows: list[Row] = [
        (crowd.title, preset, *fairness(crowd, alpha, 500 if options.quick else GRANTS))
        for crowd in CROWDS
        for preset, alpha in OPTIMIZE_FOR.items()
    ]
    header = ("crowd", "optimize_for", "Jain, grants", "Jain, waits", "longest wait", "bound")
    table("in-process: fairness, with 64 tasks waiting for one permit", header, rows)
    return is_met
