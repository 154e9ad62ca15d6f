"""Plain fair share: the rule as it is written, before any optional field."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import (
    Agent,
    AgentState,
    AssignAction,
    Project,
    ProjectStatus,
    Scheduler,
    SchedulerState,
    Task,
    TaskStatus,
)
from headgate.core.gates import GateClosure
from headgate.errors import InvalidSnapshotError
from snapshots import (
    agents,
    by_project,
    full_snapshots,
    idle,
    plain_fair_share,
    plain_snapshots,
    snapshot,
    tasks,
)


@given(plain_snapshots())
@settings(deadline=None, max_examples=200)
def test_plan_equals_the_plain_reading_of_the_rule(state: SchedulerState) -> None:
    assert Scheduler.schedule(state) == plain_fair_share(state)


@given(full_snapshots())
@settings(deadline=None, max_examples=60)
def test_scheduling_does_not_change_its_argument(state: SchedulerState) -> None:
    before = copy.deepcopy(state)
    Scheduler.schedule(state)
    Scheduler.explain_all(state)
    assert state == before


@given(full_snapshots(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_order_of_tasks_and_mappings_does_not_matter(state: SchedulerState, random: object) -> None:
    shuffled = list(state.tasks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    mappings: dict[str, Any] = {
        field.name: dict(reversed(list(value.items())))
        for field in dataclasses.fields(state)
        if isinstance(value := getattr(state, field.name), dict)
    }
    other = dataclasses.replace(state, tasks=shuffled, **mappings)
    assert Scheduler.schedule(other) == Scheduler.schedule(state)
    assert Scheduler.explain_all(other) == Scheduler.explain_all(state)


@given(full_snapshots())
@settings(deadline=None, max_examples=100)
def test_no_cap_is_passed_and_nothing_is_given_twice(state: SchedulerState) -> None:
    actions = Scheduler.schedule(state)
    known = {task.id: task for task in state.tasks}
    assert len({action.task_id for action in actions}) == len(actions)
    assert all(known[action.task_id].status is TaskStatus.READY for action in actions)
    for action in actions:
        assert known[action.task_id].project_id == action.project_id
        assert known[action.task_id].agent_id in (None, action.agent_id)
    _check_agent_caps(state, actions)
    _check_project_caps(state, actions)
    if state.max_inflight is not None:
        counted = state.agent_inflight
        before = sum((state.project_active_agent_counts if counted is None else counted).values())
        assert not actions or before + len(actions) <= state.max_inflight


def _check_agent_caps(state: SchedulerState, actions: list[AssignAction]) -> None:
    for agent in state.agents:
        given_now = sum(action.agent_id == agent.id for action in actions)
        if state.agent_inflight is None:
            assert given_now <= (agent.state is AgentState.IDLE)
        elif given_now:
            assert state.agent_inflight.get(agent.id, 0) + given_now <= agent.capacity
        if agent.agent_type in state.rate_limited:
            assert given_now == 0


def _check_project_caps(state: SchedulerState, actions: list[AssignAction]) -> None:
    given_now = by_project(actions)
    for project in state.projects:
        count = given_now.get(project.id, 0)
        if not count:
            continue
        assert project.status in (ProjectStatus.ACTIVE, ProjectStatus.DRAINING)
        if project.max_concurrent_agents is not None:
            before = state.project_active_agent_counts.get(project.id, 0)
            assert before + count <= project.max_concurrent_agents
        if project.budget_limit is not None:
            assert state.project_token_usage.get(project.id, 0) < project.budget_limit


@given(full_snapshots())
@settings(deadline=None, max_examples=100)
def test_every_ready_task_is_planned_or_has_a_reason(state: SchedulerState) -> None:
    planned = {action.task_id for action in Scheduler.schedule(state)}
    reasons = Scheduler.explain_all(state)
    ready = {task.id for task in state.tasks if task.status is TaskStatus.READY}
    assert planned | set(reasons) == ready
    assert planned.isdisjoint(reasons)
    assert all(holds and all(hold.message for hold in holds) for holds in reasons.values())


@pytest.mark.parametrize(
    ("budget", "used", "given_out"),
    [(None, 10**9, 1), (100, 99, 1), (100, 100, 0), (100, 101, 0), (0, 0, 0)],
)
def test_nothing_is_given_when_the_global_budget_is_used_up(
    budget: int | None, used: int, given_out: int
) -> None:
    state = snapshot(
        projects=[Project(id="p")],
        tasks=tasks("p", 1),
        agents=idle("a"),
        global_budget=budget,
        global_tokens_used=used,
    )
    assert len(Scheduler.schedule(state)) == given_out


def test_only_idle_agents_get_work() -> None:
    everyone = [Agent(id=state.name, state=state) for state in AgentState]
    state = snapshot(projects=[Project(id="p")], tasks=tasks("p", 9), agents=everyone)
    assert [action.agent_id for action in Scheduler.schedule(state)] == ["IDLE"]


def test_an_agent_named_twice_is_given_one_task() -> None:
    state = snapshot(projects=[Project(id="p")], tasks=tasks("p", 9), agents=idle("a", "a"))
    assert len(Scheduler.schedule(state)) == 1


def test_lower_priority_value_goes_first_then_the_lower_id() -> None:
    waiting = [
        Task(id="t3", project_id="p", priority=1),
        Task(id="t2", project_id="p", priority=5),
        Task(id="t1", project_id="p", priority=5),
    ]
    state = snapshot(
        projects=[Project(id="p", max_concurrent_agents=9)], tasks=waiting, agents=agents(3)
    )
    assert [action.task_id for action in Scheduler.schedule(state)] == ["t3", "t1", "t2"]


def test_project_with_nothing_finished_goes_first() -> None:
    state = snapshot(
        projects=[Project(id="behind"), Project(id="new")],
        tasks=tasks("behind", 1) + tasks("new", 1),
        agents=idle("a"),
        project_token_usage={"behind": 1, "new": 999},
        tasks_completed_in_window={"behind": 1},
    )
    assert Scheduler.schedule(state)[0].project_id == "new"


def test_project_furthest_below_its_share_goes_first() -> None:
    state = snapshot(
        projects=[Project(id="light", credit_weight=1), Project(id="heavy", credit_weight=3)],
        tasks=tasks("light", 1) + tasks("heavy", 1),
        agents=idle("a"),
        project_token_usage={"light": 100, "heavy": 200},
        tasks_completed_in_window={"light": 1, "heavy": 1},
    )
    assert Scheduler.schedule(state)[0].project_id == "heavy"


def test_projects_that_stand_alike_keep_the_order_of_the_list() -> None:
    for order in (["x", "y"], ["y", "x"]):
        state = snapshot(
            projects=[Project(id=name) for name in order],
            tasks=tasks("x", 1) + tasks("y", 1),
            agents=idle("a"),
        )
        assert Scheduler.schedule(state)[0].project_id == order[0]


@pytest.mark.parametrize(
    ("project", "usage", "active"),
    [
        (Project(id="p", budget_limit=100), 100, 0),
        (Project(id="p", budget_limit=0), 0, 0),
        (Project(id="p", max_concurrent_agents=2), 0, 2),
        (Project(id="p", max_concurrent_agents=0), 0, 0),
        (Project(id="p", status=ProjectStatus.PAUSED), 0, 0),
        (Project(id="p", status=ProjectStatus.ARCHIVED), 0, 0),
    ],
)
def test_a_project_at_its_limit_is_passed_over(project: Project, usage: int, active: int) -> None:
    state = snapshot(
        projects=[project, Project(id="other")],
        tasks=tasks("p", 1) + tasks("other", 1),
        agents=idle("a", "b"),
        project_token_usage={"p": usage},
        project_active_agent_counts={"p": active},
    )
    assert by_project(Scheduler.schedule(state)) == {"other": 1}


def test_concurrency_counts_what_the_round_gave() -> None:
    state = snapshot(
        projects=[Project(id="p", max_concurrent_agents=3)],
        tasks=tasks("p", 9),
        agents=agents(9),
        project_active_agent_counts={"p": 1},
    )
    assert len(Scheduler.schedule(state)) == 2


def test_without_options_one_round_gives_everything_to_the_project_behind() -> None:
    """The fault of the plain rule that `charge_in_round` repairs."""
    state = snapshot(
        projects=[Project(id="x", max_concurrent_agents=9), Project(id="y")],
        tasks=tasks("x", 9) + tasks("y", 9),
        agents=agents(4),
        project_token_usage={"x": 100, "y": 101},
        tasks_completed_in_window={"x": 1, "y": 1},
    )
    assert by_project(Scheduler.schedule(state)) == {"x": 4}


def test_zero_total_weight_means_equal_shares() -> None:
    state = snapshot(
        projects=[Project(id="x", credit_weight=0), Project(id="y", credit_weight=0)],
        tasks=tasks("x", 1) + tasks("y", 1),
        agents=idle("a"),
        project_token_usage={"x": 10, "y": 5},
        tasks_completed_in_window={"x": 1, "y": 1},
    )
    assert Scheduler.schedule(state)[0].project_id == "y"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tasks": [Task(project_id="p")]}, "tasks[0].id"),
        ({"tasks": [Task(id="t"), Task(id="t")]}, "tasks[1].id"),
        ({"projects": [Project(id="p"), Project(id="p")]}, "projects[1].id"),
        ({"projects": [Project(id="p", credit_weight=-1)]}, "projects[0].credit_weight"),
        ({"projects": [Project(id="p", credit_weight=float("nan"))]}, "projects[0].credit_weight"),
        ({"tasks": [Task(id="t", weight=float("inf"))]}, "tasks[0].weight"),
        ({"tasks": [Task(id="t", estimate_tokens=-1)]}, "tasks[0].estimate_tokens"),
        ({"tasks": [Task(id="t", not_before=1.0)]}, "now"),
        ({"tasks": [Task(id="t", created_at=float("nan"))]}, "tasks[0].created_at"),
        ({"tasks": [Task(id="t", weight=1e308)]}, "tasks[0].weight"),
        ({"tasks": [Task(id="t", scopes=("Session:a",))]}, "tasks[0].scopes[0]"),
        ({"tasks": [Task(id="t", scopes=("no scope",))]}, "tasks[0].scopes[0]"),
        ({"closed_gates": [GateClosure(kind="scope", name="/x:y")]}, "closed_gates[0].name"),
        ({"agents": [Agent(id="")]}, "agents[0].id"),
        ({"agents": [Agent(id="a", capacity=-1)]}, "agents[0].capacity"),
        ({"agent_inflight": {"a": -2}}, "agent_inflight['a']"),
        ({"project_token_usage": {"p": -1}}, "project_token_usage['p']"),
        ({"project_reserved": {"p": -1}}, "project_reserved['p']"),
        ({"max_inflight": -1}, "max_inflight"),
        ({"alpha": 1.5}, "alpha"),
        ({"priority_ageing_seconds": -1.0}, "priority_ageing_seconds"),
    ],
)
def test_a_snapshot_that_cannot_be_decided_is_refused(
    fields: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidSnapshotError) as refusal:
        Scheduler.schedule(snapshot(**fields))
    assert refusal.value.field == named
    assert str(refusal.value).startswith(named)


def test_now_is_asked_for_only_where_a_waiting_task_needs_it() -> None:
    done = Task(id="t", not_before=1.0, status=TaskStatus.DONE)
    assert Scheduler.schedule(snapshot(tasks=[done])) == []


def test_a_task_of_an_unknown_project_is_left_alone() -> None:
    state = snapshot(projects=[], tasks=tasks("ghost", 1), agents=idle("a"))
    assert Scheduler.schedule(state) == []


def test_a_named_agent_takes_only_its_own_task() -> None:
    state = snapshot(
        projects=[Project(id="p")],
        tasks=[Task(id="t", project_id="p", agent_id="b")],
        agents=idle("a", "b"),
    )
    assert Scheduler.schedule(state) == [AssignAction("b", "t", "p")]


def test_entities_take_the_documented_defaults() -> None:
    assert msgspec.structs.asdict(Project(id="p")) == {
        "id": "p",
        "name": "",
        "credit_weight": 1.0,
        "max_concurrent_agents": 2,
        "budget_limit": None,
        "status": ProjectStatus.ACTIVE,
    }
    task = Task()
    assert (task.id, task.project_id, task.agent_id) == ("", "default", None)
    assert (task.priority, task.weight, task.status) == (0, 1.0, TaskStatus.READY)
    agent = Agent(id="a")
    assert (agent.name, agent.agent_type, agent.state, agent.capacity) == (
        "",
        "",
        AgentState.IDLE,
        1,
    )
