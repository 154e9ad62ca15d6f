"""Snapshots for tests: short constructors, hypothesis strategies, and a plain reading of the rule.

`plain_fair_share` follows the text of the rule step by step, with none of the structures that
make the real one fast. Where the two differ, the real one is wrong.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from headgate import (
    Agent,
    AgentState,
    AssignAction,
    Project,
    ProjectStatus,
    SchedulerState,
    Task,
    TaskStatus,
)
from headgate.core.gates import GateClosure
from headgate.core.snapshot import WORKING, LanePolicy


def snapshot(**fields: Any) -> SchedulerState:
    """Return a snapshot in which everything that a test does not mention is empty."""
    values: dict[str, Any] = {
        "projects": [],
        "tasks": [],
        "agents": [],
        "project_token_usage": {},
        "project_active_agent_counts": {},
        "tasks_completed_in_window": {},
    }
    return SchedulerState(**(values | fields))


def idle(*names: str) -> list[Agent]:
    return [Agent(id=name) for name in names]


def agents(count: int) -> list[Agent]:
    return [Agent(id=f"a{number:03}") for number in range(count)]


def tasks(project_id: str, count: int, **fields: Any) -> list[Task]:
    return [
        Task(id=f"{project_id}-{number:05}", project_id=project_id, **fields)
        for number in range(count)
    ]


def by_project(actions: list[AssignAction]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for action in actions:
        counts[action.project_id] = counts.get(action.project_id, 0) + 1
    return counts


def plain_fair_share(state: SchedulerState) -> list[AssignAction]:
    """Read the rule plainly: its eight fields only, open tasks only."""
    if state.global_budget is not None and state.global_tokens_used >= state.global_budget:
        return []
    ready = _ready_by_project(state)
    eligible = [p for p in state.projects if p.status in WORKING and p.id in ready]
    active = dict(state.project_active_agent_counts)
    actions: list[AssignAction] = []
    for agent in state.agents:
        if agent.state is not AgentState.IDLE or agent.id in {a.agent_id for a in actions}:
            continue
        for project in sorted(eligible, key=lambda project: _turn(state, eligible, project)):
            if ready[project.id] and _has_room(state, project, active):
                task = ready[project.id].pop(0)
                actions.append(AssignAction(agent.id, task.id, project.id))
                active[project.id] = active.get(project.id, 0) + 1
                break
    return actions


def _ready_by_project(state: SchedulerState) -> dict[str, list[Task]]:
    ready: dict[str, list[Task]] = {}
    for task in sorted(state.tasks, key=lambda task: (task.priority, task.id)):
        if task.status is TaskStatus.READY:
            ready.setdefault(task.project_id, []).append(task)
    return ready


def _turn(state: SchedulerState, eligible: list[Project], project: Project) -> tuple[int, float]:
    total_weight = sum(project.credit_weight for project in eligible)
    total_tokens = sum(state.project_token_usage.values()) or 1
    had_one = int(state.tasks_completed_in_window.get(project.id, 0) > 0)
    actual = state.project_token_usage.get(project.id, 0) / total_tokens
    return had_one, actual - project.credit_weight / total_weight


def _has_room(state: SchedulerState, project: Project, active: dict[str, int]) -> bool:
    used, cap = state.project_token_usage.get(project.id, 0), project.max_concurrent_agents
    within_budget = project.budget_limit is None or used < project.budget_limit
    return within_budget and (cap is None or active.get(project.id, 0) < cap)


PROJECT_IDS = [f"p{number}" for number in range(6)]
AGENT_IDS = [f"a{number}" for number in range(8)]
counts = st.dictionaries(st.sampled_from(PROJECT_IDS), st.integers(0, 5))
usages = st.dictionaries(st.sampled_from(PROJECT_IDS), st.integers(0, 2_000))
weights = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0, 7.0])


@st.composite
def projects(draw: st.DrawFn) -> list[Project]:
    chosen = draw(st.lists(st.sampled_from(PROJECT_IDS), unique=True, max_size=6))
    return [
        Project(
            id=name,
            credit_weight=draw(weights),
            max_concurrent_agents=draw(st.one_of(st.none(), st.integers(0, 4))),
            budget_limit=draw(st.one_of(st.none(), st.integers(0, 2_000))),
            status=draw(st.sampled_from([ProjectStatus.ACTIVE] * 3 + list(ProjectStatus))),
        )
        for name in chosen
    ]


@st.composite
def task_lists(draw: st.DrawFn, *, pinned: bool = False, most: int = 10) -> list[Task]:
    owners = st.sampled_from([None, None, *AGENT_IDS]) if pinned else st.none()
    size = draw(st.integers(0, most))
    numbers = draw(st.permutations(range(size)))
    return [
        Task(
            id=f"t{number:03}",
            project_id=draw(st.sampled_from([*PROJECT_IDS, "unknown"])),
            agent_id=draw(owners),
            priority=draw(st.integers(-2, 2)),
            weight=draw(st.sampled_from([1.0, 2.0, 3.0, 5.0])),
            status=draw(st.sampled_from([TaskStatus.READY] * 4 + list(TaskStatus))),
            created_at=float(draw(st.integers(0, 50))),
            enqueued_tick=draw(st.integers(0, 20)),
            estimate_tokens=draw(st.one_of(st.none(), st.integers(0, 500))),
            target=draw(st.sampled_from([None, None, "browser"])),
            slot=draw(st.sampled_from([None, None, "work"])),
            scopes=draw(st.sampled_from([(), (), ("session:s",), ("session:s/workflow:w",)])),
        )
        for number in numbers
    ]


@st.composite
def agent_lists(draw: st.DrawFn) -> list[Agent]:
    chosen = draw(st.lists(st.sampled_from(AGENT_IDS), unique=True, max_size=8))
    return [
        Agent(
            id=name,
            agent_type=draw(st.sampled_from(["claude", "browser"])),
            state=draw(st.sampled_from([AgentState.IDLE] * 3 + list(AgentState))),
            capacity=draw(st.integers(0, 3)),
            accepts_open=draw(st.booleans()),
        )
        for name in chosen
    ]


@st.composite
def plain_snapshots(draw: st.DrawFn) -> SchedulerState:
    """Snapshots with nothing but the fields of plain fair share."""
    priorities = draw(st.lists(st.integers(-2, 2), max_size=14))
    owners = st.sampled_from([*PROJECT_IDS, "unknown"])
    statuses = st.sampled_from([TaskStatus.READY] * 4 + list(TaskStatus))
    return _snapshot(
        draw,
        agents=[
            Agent(id=name, state=draw(st.sampled_from([AgentState.IDLE] * 3 + list(AgentState))))
            for name in draw(st.lists(st.sampled_from(AGENT_IDS), max_size=8))
        ],
        tasks=[
            Task(id=f"t{n:02}", project_id=draw(owners), priority=priority, status=draw(statuses))
            for n, priority in enumerate(priorities)
        ],
    )


def _snapshot(draw: st.DrawFn, *, agents: list[Agent], tasks: list[Task]) -> SchedulerState:
    return snapshot(
        projects=draw(projects()),
        tasks=tasks,
        agents=agents,
        project_token_usage=draw(usages),
        project_active_agent_counts=draw(counts),
        tasks_completed_in_window=draw(counts),
        global_budget=draw(st.one_of(st.none(), st.integers(0, 5_000))),
        global_tokens_used=draw(st.integers(0, 5_000)),
    )


@st.composite
def full_snapshots(draw: st.DrawFn) -> SchedulerState:
    """Snapshots in which any optional field may be set."""
    maybe_counts = st.one_of(st.none(), counts)
    inflight = st.dictionaries(st.sampled_from(AGENT_IDS), st.integers(0, 3))
    half_ticks = st.integers(0, 50).map(lambda halves: halves / 2)
    ticks = st.dictionaries(st.sampled_from([*AGENT_IDS, ""]), half_ticks, max_size=4)
    closures = [
        GateClosure(kind="target", name="browser", until=60.0),
        GateClosure(kind="slot", name="work"),
        GateClosure(kind="scope", name="session:s", until=90.0, why="exhausted"),
        GateClosure(kind="scope", name="session:s/workflow:w"),
    ]
    lane_policy = draw(st.sampled_from([None, *LanePolicy]))
    pulls = lane_policy is not None and draw(st.booleans())
    return dataclasses.replace(
        _snapshot(draw, agents=draw(agent_lists()), tasks=draw(task_lists(pinned=True))),
        charge_in_round=draw(st.booleans()),
        default_tokens=draw(st.sampled_from([0, 100, 1_000])),
        project_reserved=draw(st.one_of(st.just({}), usages)),
        project_started=draw(maybe_counts),
        agent_inflight=draw(st.one_of(st.none(), inflight)),
        max_inflight=draw(st.one_of(st.none(), st.integers(0, 12))),
        lane_policy=lane_policy,
        tick=draw(st.integers(20, 40)),
        alpha=draw(st.sampled_from([0.0, 0.25, 0.5])),
        lane_served=draw(st.dictionaries(st.sampled_from(PROJECT_IDS), ticks, max_size=3)),
        max_wait_ticks=draw(st.one_of(st.none(), st.integers(0, 30))),
        max_lag_tokens=draw(st.one_of(st.none(), st.integers(0, 1_000))),
        project_forgiven=draw(st.one_of(st.just({}), usages)),
        priority_ageing_seconds=draw(st.sampled_from([0.0, 10.0])),
        closed_gates=draw(st.lists(st.sampled_from(closures), unique=True, max_size=3)),
        rate_limited=draw(st.sampled_from([{}, {}, {"claude": 99.0}])),
        pull_targets=frozenset({"browser"}) if pulls else frozenset(),
        worker_permits=draw(inflight) if pulls else {},
    )
