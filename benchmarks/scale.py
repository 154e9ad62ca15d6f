"""A fleet of ten thousand agents and a million tasks in virtual time: waits, shares, decisions.

1,000 projects in five classes of weight share 10,000 agents. Tasks cost 200 to 8,000 tokens and run
for one to nine rounds; a tenth of the projects come and go. The decision is the real one, over the
lane index that the dispatcher keeps. The time of a task is that of the processor for a whole round:
to submit, to decide and to settle.

What has to hold is what the page on fairness states: the bound on the grants that go to others
while an eligible project waits, and shares within two percent for each class of weight.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict

from benchmarks.options import Options
from benchmarks.report import Row, table
from headgate import Agent, Project, SchedulerState, Task
from headgate.core.snapshot import LanePolicy
from headgate.testing.fleet import SimulatedFleet, Workload

PROJECTS, AGENTS, TASKS = 1_000, 10_000, 1_000_000
QUICK = 50
"""How many times smaller a quick run is."""

WEIGHTS = (1.0, 2.0, 3.0, 5.0, 8.0)
CHEAPEST, DEAREST = 200, 8_000
LAG_TOKENS = 1_000_000
AWAY_EVERY, AWAY_ROUNDS = 10, 40
"""Every so manyth project is there for so many rounds, and then away for as many."""

MOST_SHARE_ERROR = 0.02
MOST_MICROSECONDS = 40.0


def options() -> SchedulerState:
    return SchedulerState(
        projects=[],
        tasks=[],
        agents=[],
        project_token_usage={},
        project_active_agent_counts={},
        tasks_completed_in_window={},
        charge_in_round=True,
        project_started={},
        lane_policy=LanePolicy.FEWEST_IN_FLIGHT,
        max_lag_tokens=LAG_TOKENS,
    )


def weight_of(number: int) -> float:
    return WEIGHTS[number % len(WEIGHTS)]


def comes_and_goes(number: int) -> bool:
    return number % AWAY_EVERY == 0


def workload(number: int, backlog: int) -> Workload:
    offset = number // AWAY_EVERY
    return Workload(
        project=Project(
            id=f"p{number:04}", credit_weight=weight_of(number), max_concurrent_agents=None
        ),
        make=lambda chance: Task(estimate_tokens=_cost(chance)),
        rounds=lambda chance: chance.randint(1, 9),
        backlog=backlog,
        present=(
            (lambda turn: (turn + offset) // AWAY_ROUNDS % 2 == 0)
            if comes_and_goes(number)
            else (lambda _: True)
        ),
    )


def _cost(chance: random.Random) -> int:
    return int(CHEAPEST * (DEAREST / CHEAPEST) ** chance.random())


class Measured:
    """One fleet, run until it has given out so many tasks."""

    def __init__(self, projects: int, agents: int, tasks: int) -> None:
        # So many that a project never runs out, whatever its share.
        backlog = max(20, math.ceil(4 * agents * max(WEIGHTS) / projects))
        self.fleet = SimulatedFleet(
            [workload(number, backlog) for number in range(projects)],
            [Agent(id=f"a{number:05}") for number in range(agents)],
            options(),
            seed=22,
        )
        self.decide_us: list[float] = []
        self.others: dict[str, int] = dict.fromkeys(self.fleet.workloads, 0)
        self.longest: dict[str, int] = dict.fromkeys(self.fleet.workloads, 0)
        began = time.process_time()
        while len(self.fleet.grants) < tasks:
            self._round()
        self.seconds = time.process_time() - began

    def _round(self) -> None:
        started = time.process_time()
        actions = self.fleet.step()
        spent = time.process_time() - started
        if actions:
            self.decide_us.append(spent / len(actions) * 1e6)
        present = {
            name for name, one in self.fleet.workloads.items() if one.present(self.fleet.round)
        }
        # Grants to others while a project was there and had work, in the order of the plan.
        served: dict[str, int] = {}
        for position, action in enumerate(actions):
            last = served.get(action.project_id)
            since = self.others[action.project_id] + position if last is None else position - last
            self.longest[action.project_id] = max(self.longest[action.project_id], since)
            served[action.project_id] = position
        for name in self.others:
            if name not in present:
                self.others[name] = 0
            elif name in served:
                self.others[name] = len(actions) - served[name]
            else:
                self.others[name] += len(actions)

    def bound(self, number: int) -> int:
        """Return how many grants may go to others before a project is served, as the page says."""
        count = len(self.fleet.workloads)
        share = weight_of(number) / sum(map(weight_of, range(count)))
        return math.ceil(count * (LAG_TOKENS + DEAREST) / (share * CHEAPEST)) + 2 * count

    def class_shares(self) -> dict[float, tuple[float, float]]:
        """Return for each weight what its steady projects got of their tokens, and what is due."""
        got: dict[float, int] = defaultdict(int)
        due: dict[float, float] = defaultdict(float)
        for number, name in enumerate(self.fleet.workloads):
            if not comes_and_goes(number):
                got[weight_of(number)] += self.fleet.used[name] + self.fleet.reserved[name]
                due[weight_of(number)] += weight_of(number)
        tokens, weights = sum(got.values()), sum(due.values())
        return {weight: (got[weight] / tokens, due[weight] / weights) for weight in sorted(got)}


def run(given: Options) -> bool:
    scale = QUICK if given.quick else 1
    found = Measured(PROJECTS // scale, AGENTS // scale, TASKS // scale)
    fleet = found.fleet
    waits = sorted(wait for one in fleet.waited.values() for wait in one)
    shares = found.class_shares()
    rows: list[Row] = [
        (f"weight {weight:g}", f"{got:.2%}", f"{due:.2%}", f"{got - due:+.2%}")
        for weight, (got, due) in shares.items()
    ]
    title = f"{len(fleet.workloads):,} projects, {len(fleet.agents):,} agents, {len(waits):,} tasks"
    table(title, ("class of projects", "share", "due", "error"), rows)
    worst = max(abs(got - due) for got, due in shares.values())
    closest = max(
        found.longest[name] / found.bound(number) for number, name in enumerate(fleet.workloads)
    )
    starved = [name for name, one in fleet.waited.items() if not one]
    cost = statistics.median(found.decide_us)
    table(
        f"in {fleet.round:,} rounds of virtual time, {found.seconds:.0f} s of one processor",
        ("", "measured", "target"),
        [
            ("rounds that a task waited, p50", f"{waits[len(waits) // 2]:,}", ""),
            ("p99", f"{waits[len(waits) * 99 // 100]:,}", ""),
            ("most grants to others while one waits", f"{max(found.longest.values()):,}", ""),
            ("the same as a part of the bound", f"{closest:.1e}", "1"),
            ("projects that got nothing", f"{len(starved)}", "0"),
            ("largest error of a share", f"{worst:.2%}", f"{MOST_SHARE_ERROR:.0%}"),
            ("us a task, to submit, decide and settle", f"{cost:.1f}", f"{MOST_MICROSECONDS:g}"),
        ],
    )
    is_kept = closest <= 1 and not starved and worst <= MOST_SHARE_ERROR
    return given.quick or (is_kept and cost <= MOST_MICROSECONDS)
