"""`headgate simulate`: a simulated fleet that shows fair shares, without a key or a service."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import click
import msgspec

from headgate.cli.output import drawn_table, is_terminal, print_json, print_table
from headgate.core.scheduler import Scheduler
from headgate.core.snapshot import Agent, LanePolicy, Project, SchedulerState
from headgate.core.task import Task
from headgate.errors import InvalidSettingError
from headgate.testing.fleet import SimulatedFleet, Workload

ROUNDS_PER_SECOND = 20
RECENT_GRANTS = 400
AGENTS = 6
HEADER = ("project", "target", "share", "running", "queued", "wait", "budget", "why it waits")


class ProjectReport(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the simulation: where a project stands."""

    project: str
    target_share: float
    actual_share: float
    running: int
    queued: int
    mean_wait_rounds: float
    tokens_used: int
    budget_limit: int | None
    reason: str

    def row(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        limit = (
            f"{self.tokens_used:,} of {self.budget_limit:,}"
            if self.budget_limit is not None
            else "none"
        )
        return (
            self.project,
            f"{self.target_share:.1%}",
            f"{self.actual_share:.1%}",
            str(self.running),
            str(self.queued),
            f"{self.mean_wait_rounds:.1f}",
            limit,
            self.reason,
        )


@click.command(
    epilog="""\b
Examples:
  headgate simulate
  headgate simulate --seconds 20 --seed 7
  headgate simulate --json
"""
)
@click.option(
    "--seconds",
    default=6.0,
    show_default=True,
    type=click.FloatRange(0.1, 3600),
    help="How long the simulation runs.",
)
@click.option("--seed", default=1, show_default=True, help="The same seed gives the same result.")
@click.option("--json", "as_json", is_flag=True, help="Write the final numbers as JSON.")
def simulate(*, seconds: float, seed: int, as_json: bool) -> None:
    """Watch fair shares in a simulated fleet: no key, no service.

    Three projects share six agents, and one of them is noisy. A terminal shows the table live. In a
    pipe the simulation runs at full speed and prints its last table.
    """
    if math.isnan(seconds):
        raise InvalidSettingError("--seconds", "must be a number")
    fleet = simulated_fleet(seed)
    rounds = max(1, round(seconds * ROUNDS_PER_SECOND))
    if is_terminal() and not as_json:
        _run_live(fleet, rounds)
        return
    for _ in range(rounds):
        fleet.step()
    if as_json:
        print_json({"rounds": fleet.round, "grants": len(fleet.grants), "projects": report(fleet)})
    else:
        print_table(_title(fleet), HEADER, [line.row() for line in report(fleet)])


def simulated_fleet(seed: int) -> SimulatedFleet:
    """Return the fleet of the simulation."""
    options = SchedulerState(
        projects=[],
        tasks=[],
        agents=[],
        project_token_usage={},
        project_active_agent_counts={},
        tasks_completed_in_window={},
        charge_in_round=True,
        project_started={},
        lane_policy=LanePolicy.FEWEST_IN_FLIGHT,
        max_lag_tokens=100_000,
    )
    workloads = [
        _workload("research", weight=2.0, backlog=12, tokens=(500, 4_000)),
        _workload("noisy", weight=1.0, backlog=400, tokens=(100, 1_500)),
        _workload("evals", weight=1.0, backlog=30, tokens=(500, 1_500), budget=30_000),
    ]
    agents = [Agent(id=f"agent-{number}") for number in range(1, AGENTS + 1)]
    return SimulatedFleet(workloads, agents, options, seed=seed)


def _workload(
    name: str, *, weight: float, backlog: int, tokens: tuple[int, int], budget: int | None = None
) -> Workload:
    def make(randomness: random.Random) -> Task:
        return Task(estimate_tokens=randomness.randint(*tokens))

    def rounds(randomness: random.Random) -> int:
        return randomness.randint(1, 6)

    project = Project(
        id=name, credit_weight=weight, max_concurrent_agents=None, budget_limit=budget
    )
    return Workload(project=project, make=make, backlog=backlog, rounds=rounds)


def report(fleet: SimulatedFleet) -> list[ProjectReport]:
    """Return where each project stands."""
    shares = fleet.recent_shares(RECENT_GRANTS)
    targets = fleet.target_shares()
    reasons = _first_reasons(fleet)
    return [
        ProjectReport(
            project=name,
            target_share=targets.get(name, 0.0),
            actual_share=shares.get(name, 0.0),
            running=fleet.active[name],
            queued=fleet.queued[name],
            mean_wait_rounds=_mean(fleet.waited[name][-RECENT_GRANTS:]),
            tokens_used=fleet.used[name] + fleet.reserved[name],
            budget_limit=workload.project.budget_limit,
            reason=reasons.get(name, ""),
        )
        for name, workload in fleet.workloads.items()
    ]


def _first_reasons(fleet: SimulatedFleet) -> dict[str, str]:
    state = fleet.snapshot()
    projects = {task.id: task.project_id for task in state.tasks}
    reasons: dict[str, str] = {}
    for task_id, hold in Scheduler.explain(state).items():
        reasons.setdefault(projects[task_id], hold.message)
    return reasons


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _title(fleet: SimulatedFleet) -> str:
    return f"Round {fleet.round}: {len(fleet.grants)} tasks started on {AGENTS} agents"


def _run_live(
    fleet: SimulatedFleet, rounds: int, pause: Callable[[float], None] = time.sleep
) -> None:
    from rich.live import Live  # noqa: PLC0415  slow to import, and unused in a pipe

    with Live(refresh_per_second=ROUNDS_PER_SECOND) as live:
        for _ in range(rounds):
            fleet.step()
            rows = [line.row() for line in report(fleet)]
            live.update(drawn_table(_title(fleet), HEADER, rows))
            pause(1 / ROUNDS_PER_SECOND)
