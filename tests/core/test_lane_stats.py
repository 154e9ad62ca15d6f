"""What the state tells of its lanes: what is ready, how long the first has waited, the load."""

from __future__ import annotations

from time import process_time

import msgspec
import pytest

from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import (
    DispatchSettings,
    DispatchState,
    LaneStats,
)
from headgate.core.gates import GateClosure, GatePart
from headgate.core.snapshot import Agent, AgentState, LanePolicy, Project, ProjectStatus
from headgate.core.task import DEFAULT_TERMS, Progress, Submission, Task, TaskRecord, TaskStatus

NOW = 1_000.0
EVAL = "session:eval"


def new_state(policy: LanePolicy = LanePolicy.HIGHEST_LOAD, alpha: float = 0.5) -> DispatchState:
    projects = tuple(Project(id=name, max_concurrent_agents=9) for name in ("p", "q"))
    return DispatchState(
        DispatchSettings(
            projects=projects, lane_policy=policy, alpha=alpha, max_wait_ticks=1_000, agents=()
        )
    )


def queue(dispatch_state: DispatchState, *tasks: Task) -> None:
    for task in tasks:
        queued = msgspec.structs.replace(task, status=TaskStatus.QUEUED)
        record = TaskRecord(
            task=queued, terms=DEFAULT_TERMS, submission=Submission(), progress=Progress()
        )
        dispatch_state.observe(record, NOW)


def figure(dispatch_state: DispatchState, project_id: str, agent_id: str = "") -> LaneStats:
    found = {(one.project_id, one.agent_id): one for one in dispatch_state.lane_stats(NOW)}
    return found[project_id, agent_id]


def task(
    name: str, agent_id: str | None = None, project_id: str = "p", tick: int = 0, **rest: object
) -> Task:
    fields: dict[str, object] = {"created_at": 900.0, **rest}
    return Task(
        id=name,
        project_id=project_id,
        agent_id=agent_id,
        enqueued_tick=tick,
        **fields,  # type: ignore[arg-type]
    )


def closure(scope: str = EVAL) -> GateClosure:
    return GateClosure(kind="scope", name=scope, why="used up")


def refused(scope: str = EVAL, spent: int = 10) -> Refused:
    return Refused(
        scope=Scope(scope),
        unit=Unit.MICRO_USD,
        limit=10,
        spent=spent,
        reserved=0,
        overrun=0,
        requested=5,
        resets_at=2_000,
        may_clear=True,
    )


STOPPED: list[tuple[str, dict[str, object]]] = [
    ("everything is paused", {"is_paused": True}),
    ("the project is paused", {"projects": (Project(id="p", status=ProjectStatus.PAUSED),)}),
    ("the project is archived", {"projects": (Project(id="p", status=ProjectStatus.ARCHIVED),)}),
    ("the agent is paused", {"agents": (Agent(id="a", state=AgentState.PAUSED),)}),
    ("the agent is at fault", {"agents": (Agent(id="a", state=AgentState.ERROR),)}),
]


@pytest.mark.parametrize(("case", "settings"), STOPPED)
def test_a_lane_that_may_start_nothing_is_not_ready_and_has_no_load(
    case: str, settings: dict[str, object]
) -> None:
    dispatch_state = DispatchState(
        DispatchSettings(**{"projects": (Project(id="p"),), "agents": (), **settings})  # type: ignore[arg-type]
    )
    queue(dispatch_state, task("t", "a"))
    found = figure(dispatch_state, "p", "a")
    assert (found.agent_id, found.ready, found.load) == ("a", 0, None)


def test_a_lane_of_a_project_that_drains_is_ready_for_what_it_has() -> None:
    draining = Project(id="p", status=ProjectStatus.DRAINING)
    dispatch_state = DispatchState(DispatchSettings(projects=(draining,), agents=()))
    queue(dispatch_state, task("t", "a"))
    assert figure(dispatch_state, "p", "a").ready == 1
    assert figure(dispatch_state, "p", "a").load is not None


def test_a_lane_that_may_start_nothing_is_no_measure_for_the_others() -> None:
    paused = Agent(id="a", state=AgentState.PAUSED)
    dispatch_state = DispatchState(msgspec.structs.replace(new_state().settings, agents=(paused,)))
    queue(dispatch_state, *(task(f"a{n}", "a") for n in range(9)), task("b", "b"))
    assert figure(dispatch_state, "p", "b").load == 0.5


def test_each_lane_has_its_own_line_and_nothing_that_waits_is_none() -> None:
    dispatch_state = new_state()
    assert dispatch_state.lane_stats(NOW) == ()
    queue(
        dispatch_state,
        task("1", "a"),
        task("2", "a"),
        task("3", "b"),
        task("4"),
        task("5", "a", "q"),
    )
    found = [(one.project_id, one.agent_id, one.ready) for one in dispatch_state.lane_stats(NOW)]
    assert sorted(found) == [("p", "", 1), ("p", "a", 2), ("p", "b", 1), ("q", "a", 1)]


def test_the_load_is_that_of_the_seed_beside_the_lanes_of_the_same_project() -> None:
    dispatch_state = new_state(alpha=0.25)
    dispatch_state.tick = 10
    queue(
        dispatch_state, *(task(f"deep{n}", "a", tick=8) for n in range(4)), task("old", "b", tick=0)
    )
    queue(dispatch_state, task("alone", "a", "q", tick=10))
    assert figure(dispatch_state, "p", "a").load == pytest.approx(0.25 * 1 + 0.75 * 0.2)
    assert figure(dispatch_state, "p", "b").load == pytest.approx(0.25 * 0.25 + 0.75 * 1)
    assert figure(dispatch_state, "q", "a").load == pytest.approx(0.25)


def test_the_wait_is_that_of_the_task_that_came_first_whatever_its_priority() -> None:
    dispatch_state = new_state()
    queue(
        dispatch_state,
        task("urgent", "a", tick=5, created_at=990.0, priority=-5),
        task("old", "a", tick=1, created_at=700.0),
        task("timed", "b", tick=1, created_at=100.0, not_before=980.0),
    )
    assert figure(dispatch_state, "p", "a").longest_wait_seconds == 300.0
    assert figure(dispatch_state, "p", "b").longest_wait_seconds == 20.0


def test_what_waits_behind_a_closed_gate_is_not_ready_and_has_waited_all_the_same() -> None:
    dispatch_state = new_state()
    queue(dispatch_state, task("held", "a", created_at=500.0, scopes=(EVAL,)))
    dispatch_state.close(closure(), NOW)
    held = figure(dispatch_state, "p", "a")
    assert (held.ready, held.longest_wait_seconds, held.load) == (0, 500.0, None)
    dispatch_state.open(GatePart("scope", EVAL))
    assert figure(dispatch_state, "p", "a").ready == 1


def test_a_task_that_left_is_not_the_oldest_any_more() -> None:
    dispatch_state = new_state()
    queue(
        dispatch_state,
        task("gone", "a", created_at=100.0),
        task("here", "a", tick=1, created_at=800.0),
    )
    dispatch_state.forget("gone", NOW)
    assert figure(dispatch_state, "p", "a").longest_wait_seconds == 200.0


def test_looking_changes_nothing() -> None:
    looked, other = new_state(), new_state()
    for dispatch_state in (looked, other):
        queue(dispatch_state, *(task(f"t{n}", "a", tick=n, priority=n % 3) for n in range(9)))
        dispatch_state.forget("t0", NOW)
        dispatch_state.index.set_agent(dispatch_state.index.agents.get("a").agent)  # type: ignore[union-attr]
        dispatch_state.in_flight.set_node("node", 4)
    looked.lane_stats(NOW)
    plans = [
        [line.task.id for line in dispatch_state.plan(NOW, most=9)]
        for dispatch_state in (looked, other)
    ]
    assert plans[0] == plans[1]
    assert plans[0]


def test_tasks_that_wait_for_a_budget_are_counted_behind_it_and_set_aside_for_it() -> None:
    dispatch_state = new_state()
    queue(
        dispatch_state, *(task(f"t{n}", "a", scopes=(EVAL,)) for n in range(3)), task("free", "b")
    )
    assert dispatch_state.waiting_for_scopes() == {}
    dispatch_state.parking.judge(task("t0", "a", scopes=(EVAL,)), refused(), DEFAULT_TERMS)
    dispatch_state.close(closure(), NOW)
    assert dispatch_state.waiting_for_scopes() == {EVAL: 3}
    aside = new_state()
    queue(aside, task("dear", "a", created_at=600.0, scopes=(EVAL,)))
    aside.parking.judge(task("dear", "a", scopes=(EVAL,)), refused(spent=6), DEFAULT_TERMS)
    aside.index.remove("dear")
    assert aside.waiting_for_scopes() == {EVAL: 1}
    assert figure(aside, "p", "a").longest_wait_seconds == 400.0


@pytest.mark.parametrize("tasks", [2_000, 20_000])
def test_the_cost_grows_with_the_lanes_and_not_with_the_tasks(tasks: int) -> None:
    dispatch_state = new_state()
    queue(dispatch_state, *(task(f"{n:06d}", f"a{n % 100}", tick=n) for n in range(tasks)))
    began = process_time()
    assert len(dispatch_state.lane_stats(NOW)) == 100
    assert process_time() - began < 0.05


def test_at_an_unsafe_alpha_the_deepest_lane_goes_before_the_oldest() -> None:
    dispatch_state = new_state(alpha=1.0)
    dispatch_state.tick = 10
    queue(
        dispatch_state, *(task(f"deep{n}", "a", tick=8) for n in range(4)), task("old", "b", tick=0)
    )
    assert figure(dispatch_state, "p", "a").load == 1.0
    assert figure(dispatch_state, "p", "b").load == 0.25
    dispatch_state.in_flight.set_node("n", 1)
    assert [line.task.id for line in dispatch_state.plan(NOW, most=1)] == ["deep0"]
