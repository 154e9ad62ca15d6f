"""The optional fields: each is shown failing without it, and repaired with it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from headgate import Agent, AgentState, Project, Scheduler, SchedulerState, Task
from headgate.core.gates import GateClosure
from headgate.core.lane_index import LaneIndex
from headgate.core.scheduler import decide
from headgate.core.snapshot import LanePolicy
from snapshots import agents, by_project, idle, snapshot, tasks


def two_projects(**fields: Any) -> SchedulerState:
    values: dict[str, Any] = {
        "projects": [
            Project(id="x", max_concurrent_agents=None),
            Project(id="y", max_concurrent_agents=None),
        ],
        "tasks": tasks("x", 50) + tasks("y", 50),
        "agents": agents(4),
        "tasks_completed_in_window": {"x": 1, "y": 1},
    }
    return snapshot(**(values | fields))


def test_charge_in_round_shares_one_round() -> None:
    state = two_projects(project_token_usage={"x": 100, "y": 101})
    charged = dataclasses.replace(state, charge_in_round=True)
    assert by_project(Scheduler.schedule(state)) == {"x": 4}
    assert by_project(Scheduler.schedule(charged)) == {"x": 2, "y": 2}


def test_charge_in_round_follows_the_weights() -> None:
    state = two_projects(
        projects=[
            Project(id="x", credit_weight=3, max_concurrent_agents=None),
            Project(id="y", credit_weight=1, max_concurrent_agents=None),
        ],
        agents=agents(40),
        charge_in_round=True,
    )
    assert by_project(Scheduler.schedule(state)) == {"x": 30, "y": 10}


def test_work_without_tokens_is_charged_by_its_weight() -> None:
    state = two_projects(
        tasks=tasks("x", 50, weight=3.0) + tasks("y", 50, weight=1.0),
        agents=agents(40),
        charge_in_round=True,
    )
    assert by_project(Scheduler.schedule(state)) == {"x": 10, "y": 30}


def test_charge_in_round_stops_at_the_budgets() -> None:
    limited = Project(id="x", budget_limit=2_500, max_concurrent_agents=None)
    state = two_projects(projects=[limited], agents=agents(9), charge_in_round=True)
    assert len(Scheduler.schedule(state)) == 3
    for_all = two_projects(agents=agents(9), charge_in_round=True, global_budget=4_500)
    assert len(Scheduler.schedule(for_all)) == 5


def test_reserved_tokens_count_as_used() -> None:
    state = two_projects(project_token_usage={"x": 10, "y": 20}, agents=idle("a"))
    slow = dataclasses.replace(state, project_reserved={"x": 500})
    assert Scheduler.schedule(state)[0].project_id == "x"
    assert Scheduler.schedule(slow)[0].project_id == "y"


def test_reserved_tokens_count_against_both_budgets() -> None:
    limited = [Project(id="x", budget_limit=100), Project(id="y")]
    state = two_projects(projects=limited, project_reserved={"x": 100})
    assert by_project(Scheduler.schedule(state)) == {"y": 2}
    state = two_projects(global_budget=100, project_reserved={"x": 100})
    assert Scheduler.schedule(state) == []


def test_guarantee_asks_for_a_start_where_starts_are_counted() -> None:
    """Counting completions, a project whose tasks always fail stays guaranteed for ever."""
    failing = two_projects(tasks_completed_in_window={"y": 1}, project_token_usage={"x": 900})
    assert by_project(Scheduler.schedule(failing)) == {"x": 4}
    started = dataclasses.replace(failing, project_started={"x": 1, "y": 1})
    assert by_project(Scheduler.schedule(started)) == {"y": 4}


def test_a_start_in_the_round_meets_the_guarantee() -> None:
    state = two_projects(project_started={"y": 1}, project_token_usage={"x": 900, "y": 1})
    assert by_project(Scheduler.schedule(state)) == {"x": 1, "y": 3}


def test_counted_agents_fill_their_places() -> None:
    crew = [
        Agent(id="a", capacity=3),
        Agent(id="b", capacity=2, state=AgentState.BUSY),
        Agent(id="c", capacity=9, state=AgentState.PAUSED),
    ]
    state = two_projects(agents=crew, agent_inflight={"b": 1})
    plan = Scheduler.schedule(state)
    assert [action.agent_id for action in plan] == ["a", "b", "a", "a"]


def test_inflight_cap_ends_the_round() -> None:
    state = two_projects(agents=agents(9), agent_inflight={"a000": 1}, max_inflight=4)
    assert len(Scheduler.schedule(state)) == 3


def lanes(policy: LanePolicy, **fields: Any) -> SchedulerState:
    values: dict[str, Any] = {
        "projects": [Project(id="p", max_concurrent_agents=None)],
        "agents": [Agent(id="a", capacity=9), Agent(id="b", capacity=9)],
        "agent_inflight": {},
        "max_inflight": 1,
        "lane_policy": policy,
        "tick": 10,
    }
    return snapshot(**(values | fields))


def pinned(agent_id: str, count: int, **fields: Any) -> list[Task]:
    return [
        Task(id=f"{agent_id}{number:04}", project_id="p", agent_id=agent_id, **fields)
        for number in range(count)
    ]


def test_lane_with_fewest_in_flight_goes_first() -> None:
    state = lanes(
        LanePolicy.FEWEST_IN_FLIGHT,
        tasks=pinned("a", 3) + pinned("b", 3),
        agent_inflight={"a": 2, "b": 1},
        max_inflight=4,
    )
    assert [action.agent_id for action in Scheduler.schedule(state)] == ["b"]


def test_equal_lanes_are_served_in_turn() -> None:
    state = lanes(LanePolicy.FEWEST_IN_FLIGHT, tasks=pinned("a", 3) + pinned("b", 3))
    assert Scheduler.schedule(state)[0].agent_id == "a"
    after = dataclasses.replace(state, lane_served={"p": {"a": 9}})
    assert Scheduler.schedule(after)[0].agent_id == "b"


def test_within_a_lane_priority_then_creation_decides() -> None:
    waiting = [
        Task(id="t1", project_id="p", agent_id="a", created_at=9.0),
        Task(id="t2", project_id="p", agent_id="a", created_at=3.0),
        Task(id="t3", project_id="p", agent_id="a", created_at=99.0, priority=-1),
    ]
    state = lanes(LanePolicy.FEWEST_IN_FLIGHT, tasks=waiting, max_inflight=3)
    assert [action.task_id for action in Scheduler.schedule(state)] == ["t3", "t2", "t1"]


@pytest.mark.parametrize(
    ("alpha", "deep_since", "first"),
    [(0.0, 8, "b"), (0.25, 8, "b"), (0.5, 8, "a"), (0.25, 4, "a"), (0.0, 4, "b")],
)
def test_lane_with_highest_load_goes_first(alpha: float, deep_since: int, first: str) -> None:
    deep, old = pinned("a", 9, enqueued_tick=deep_since), pinned("b", 1, enqueued_tick=2)
    state = lanes(LanePolicy.HIGHEST_LOAD, tasks=deep + old, alpha=alpha)
    assert Scheduler.schedule(state)[0].agent_id == first


@pytest.mark.parametrize("policy", list(LanePolicy))
def test_a_round_serves_lanes_of_one_age_in_turn_however_deep_one_of_them_is(
    policy: LanePolicy,
) -> None:
    names = [f"a{number}" for number in range(4)]
    state = lanes(
        policy,
        agents=[Agent(id=name, capacity=20) for name in names],
        tasks=[task for name in names for task in pinned(name, 80 if name == "a0" else 20)],
        agent_inflight={},
        max_inflight=14,
        alpha=0.0,
    )
    index, served = LaneIndex.of(state), Counter[str]()
    for _ in range(2):
        # The next round goes on where the first one stopped: 14 and 14 are 7 for each.
        served.update(action.agent_id for action in decide(index, state))
    assert set(served.values()) == {7}


def test_a_lane_that_waited_too_long_goes_first() -> None:
    state = lanes(
        LanePolicy.HIGHEST_LOAD,
        tasks=pinned("a", 99, enqueued_tick=0) + pinned("b", 1, enqueued_tick=4),
        lane_served={"p": {"a": 9}},
        alpha=0.5,
    )
    bounded = dataclasses.replace(state, max_wait_ticks=6)
    assert Scheduler.schedule(state)[0].agent_id == "a"
    assert Scheduler.schedule(bounded)[0].agent_id == "b"


def test_parked_work_does_not_make_a_lane_look_loaded() -> None:
    closed = GateClosure(kind="target", name="t", until=99.0)
    state = lanes(
        LanePolicy.HIGHEST_LOAD,
        tasks=[
            *pinned("a", 50, target="t", enqueued_tick=0),
            Task(id="a-free", project_id="p", agent_id="a", enqueued_tick=9),
            *pinned("b", 2, enqueued_tick=8),
        ],
        closed_gates=[closed],
        max_inflight=2,
    )
    assert [action.agent_id for action in Scheduler.schedule(state)] == ["b", "b"]


def test_an_agent_that_takes_no_open_tasks_is_left_out() -> None:
    crew = [Agent(id="a", accepts_open=False), Agent(id="b")]
    for policy in (None, *LanePolicy):
        state = two_projects(agents=crew, lane_policy=policy)
        assert [action.agent_id for action in Scheduler.schedule(state)] == ["b"]


def test_open_tasks_go_to_the_agent_with_fewest_in_flight() -> None:
    state = lanes(
        LanePolicy.FEWEST_IN_FLIGHT,
        tasks=tasks("p", 3),
        agent_inflight={"a": 2},
        max_inflight=5,
    )
    assert [action.agent_id for action in Scheduler.schedule(state)] == ["b", "b", "a"]


def test_a_returning_project_is_owed_a_bounded_amount() -> None:
    state = two_projects(
        agents=agents(40), charge_in_round=True, project_token_usage={"x": 1_000_000}
    )
    clamped = dataclasses.replace(state, max_lag_tokens=5_000)
    assert by_project(Scheduler.schedule(state)) == {"y": 40}
    assert by_project(Scheduler.schedule(clamped)) == {"y": 25, "x": 15}


def test_forgiven_lag_is_not_found_again() -> None:
    state = two_projects(
        agents=agents(40),
        charge_in_round=True,
        project_token_usage={"x": 1_000_000},
        max_lag_tokens=5_000,
    )
    forgiven = Scheduler.forgive(state)
    assert forgiven == {"y": 990_000}
    later = dataclasses.replace(
        state,
        project_forgiven=forgiven,
        project_token_usage={"x": 1_015_000, "y": 25_000},
    )
    assert Scheduler.forgive(later) == {}
    assert by_project(Scheduler.schedule(later)) == {"x": 20, "y": 20}


def test_usage_of_absent_projects_does_not_stretch_the_shares() -> None:
    """A paused project's tokens would let the heaviest one run for half of them in a row."""
    state = two_projects(
        projects=[
            Project(id="x", credit_weight=3, max_concurrent_agents=None),
            Project(id="y", credit_weight=1, max_concurrent_agents=None),
        ],
        agents=agents(40),
        charge_in_round=True,
        project_token_usage={"gone": 1_000_000},
    )
    clamped = dataclasses.replace(state, max_lag_tokens=5_000)
    assert by_project(Scheduler.schedule(state)) == {"x": 40}
    assert by_project(Scheduler.schedule(clamped)) == {"x": 30, "y": 10}


@pytest.mark.parametrize(("ageing", "first"), [(0.0, "urgent"), (60.0, "old"), (3600.0, "urgent")])
def test_waiting_is_worth_priority_where_it_ages(ageing: float, first: str) -> None:
    waiting = [
        Task(id="old", project_id="p", priority=5, created_at=0.0),
        Task(id="urgent", project_id="p", priority=0, created_at=600.0),
    ]
    state = snapshot(
        projects=[Project(id="p")],
        tasks=waiting,
        agents=idle("a"),
        priority_ageing_seconds=ageing,
    )
    assert Scheduler.schedule(state)[0].task_id == first


def test_a_closed_gate_lets_the_work_behind_it_pass() -> None:
    waiting = [
        Task(id="t1", project_id="p", scopes=("session:s/workflow:w",)),
        Task(id="t2", project_id="p"),
    ]
    state = snapshot(
        projects=[Project(id="p")],
        tasks=waiting,
        agents=idle("a"),
        closed_gates=[GateClosure(kind="scope", name="session:s")],
    )
    assert [action.task_id for action in Scheduler.schedule(state)] == ["t2"]


def test_the_root_scope_closes_everything() -> None:
    state = two_projects(closed_gates=[GateClosure(kind="scope", name="")])
    assert Scheduler.schedule(state) == []


def test_a_rate_limited_type_gets_nothing() -> None:
    crew = [Agent(id="a", agent_type="claude"), Agent(id="b", agent_type="browser")]
    state = two_projects(agents=crew, rate_limited={"claude": 60.0})
    assert [action.agent_id for action in Scheduler.schedule(state)] == ["b"]


@pytest.mark.parametrize(("now", "count"), [(9.0, 0), (10.0, 1), (11.0, 1)])
def test_a_task_does_not_start_before_its_time(now: float, count: int) -> None:
    state = snapshot(
        projects=[Project(id="p")],
        tasks=[Task(id="t", project_id="p", not_before=10.0)],
        agents=idle("a"),
        now=now,
    )
    assert len(Scheduler.schedule(state)) == count
