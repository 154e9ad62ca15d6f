"""A state with other settings plans as one that was made with them, whatever it was before."""

from __future__ import annotations

from time import process_time
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from core.dispatch_model import START, queued, settings, state_of
from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import (
    MAX_REBUILT,
    DispatchSettings,
    DispatchState,
)
from headgate.core.gates import GateClosure
from headgate.core.rate_limits import RateLimit
from headgate.core.snapshot import (
    BUILT_IN_AGENT,
    Agent,
    AgentState,
    LanePolicy,
    Project,
    ProjectStatus,
    with_built_in_agent,
)
from headgate.core.task import Progress, TaskRecord, TaskStatus
from headgate.core.why import reasons

PROJECTS = ("x", "y", "z")
AGENTS = ("a", "b", "c")
TARGETS = ("t", "u")


def changed(dispatch_state: DispatchState, **fields: Any) -> None:
    dispatch_state.refit(msgspec.structs.replace(dispatch_state.settings, **fields))


def ids(dispatch_state: DispatchState, now: float = START) -> list[str]:
    return [line.task.id for line in dispatch_state.plan(now, most=100)]


def shape(dispatch_state: DispatchState, now: float = START) -> list[tuple[str, str]]:
    return [(line.task.id, line.agent_id) for line in dispatch_state.plan(now, most=100)]


@st.composite
def dispatch_settings(draw: st.DrawFn) -> DispatchSettings:
    names = draw(st.lists(st.sampled_from(AGENTS), unique=True))
    agents = tuple(
        Agent(
            id=name,
            capacity=draw(st.integers(1, 3)),
            accepts_open=draw(st.booleans()),
            agent_type=draw(st.sampled_from(("", "claude"))),
            state=draw(st.sampled_from((AgentState.IDLE, AgentState.PAUSED))),
        )
        for name in names
    )
    projects = tuple(
        Project(
            id=name,
            credit_weight=draw(st.sampled_from((0.0, 1.0, 3.0))),
            max_concurrent_agents=draw(st.sampled_from((None, 1, 2))),
            status=draw(st.sampled_from(tuple(ProjectStatus))),
        )
        for name in PROJECTS
    )
    limits = draw(st.sampled_from(((), (1,), (2,))))
    max_inflight = draw(st.integers(1, 6))
    return settings(
        projects=projects,
        agents=with_built_in_agent(agents, capacity=max_inflight),
        max_inflight=max_inflight,
        max_per_agent_inflight=draw(st.integers(1, 3)),
        default_tokens=draw(st.sampled_from((10, 100))),
        lane_policy=draw(st.sampled_from(LanePolicy)),
        max_wait_ticks=draw(st.sampled_from((None, 1, 1_000))),
        priority_ageing_seconds=draw(st.sampled_from((0.0, 60.0))),
        pull_targets=draw(st.sampled_from((frozenset(), frozenset({"u"})))),
        rate_limits=tuple(
            RateLimit(kind="target", name="t", unit="requests", most=most, window_seconds=60)
            for most in limits
        ),
        paused_targets=draw(st.sampled_from(((), ("t",), ("u",), ("t", "u")))),
        is_paused=draw(st.booleans()),
    )


@st.composite
def records(draw: st.DrawFn) -> list[TaskRecord]:
    return [
        queued(
            f"t{number:02d}",
            project_id=draw(st.sampled_from(PROJECTS)),
            agent_id=draw(st.sampled_from((None, *AGENTS, "undeclared"))),
            target=draw(st.sampled_from(TARGETS)),
            priority=draw(st.integers(0, 2)),
        )
        for number in range(draw(st.integers(0, 12)))
    ]


def in_flight(record: TaskRecord) -> TaskRecord:
    task = msgspec.structs.replace(record.task, id=f"f{record.task.id}", status=TaskStatus.RUNNING)
    progress = Progress(attempt=1, node_id="n1")
    agent_id = record.agent_id or BUILT_IN_AGENT
    return msgspec.structs.replace(record, task=task, progress=progress, agent_id=agent_id)


def fresh(
    settings_: DispatchSettings, waiting: list[TaskRecord], running: list[TaskRecord]
) -> DispatchState:
    dispatch_state = DispatchState(settings_)
    dispatch_state.in_flight.set_node("n1", 20)
    dispatch_state.load_more([*running, *waiting], START)
    return dispatch_state


@given(
    dispatch_settings(), st.lists(dispatch_settings(), min_size=1, max_size=3), records(), records()
)
@hypothesis_settings(deadline=None, max_examples=100)
def test_a_state_that_was_refitted_plans_as_a_new_one(
    first: DispatchSettings,
    others: list[DispatchSettings],
    waiting: list[TaskRecord],
    running: list[TaskRecord],
) -> None:
    running = [in_flight(record) for record in running]
    dispatch_state = fresh(first, waiting, running)
    for other in others:
        dispatch_state.refit(other)
    new = fresh(others[-1], waiting, running)
    # Agents that nobody declares are in the order in which they came, which no settings say.
    for moved in new.index.agents.arrange(
        [entry.agent.id for entry in dispatch_state.index.agents]
    ):
        new.index.set_agent(moved.agent, inflight=moved.inflight)
    assert shape(dispatch_state) == shape(new)


def test_a_limit_below_what_runs_stops_new_starts_only() -> None:
    dispatch_state = state_of(
        *(queued(f"t{n}") for n in range(6)), agents=(Agent(id="a", capacity=9),)
    )
    assert len(ids(dispatch_state)) == 5
    changed(dispatch_state, max_inflight=2)
    assert (len(dispatch_state.in_flight), ids(dispatch_state)) == (5, [])


def test_a_paused_target_holds_its_tasks_and_says_so() -> None:
    dispatch_state = state_of(queued("t1", target="t"), paused_targets=("t",))
    assert ids(dispatch_state) == []
    (reason,) = reasons(dispatch_state, "t1", START)
    assert reason.message == "target t is closed: paused by an administrator"
    changed(dispatch_state, paused_targets=())
    assert ids(dispatch_state) == ["t1"]


def test_a_pause_outlasts_what_the_provider_asked_for() -> None:
    dispatch_state = state_of(queued("t1", target="t"))
    dispatch_state.close(GateClosure(kind="target", name="t", until=START + 60, why="429"), START)
    changed(dispatch_state, paused_targets=("t",))
    dispatch_state.fall_due(START + 61)
    assert ids(dispatch_state, START + 61) == []
    changed(dispatch_state, paused_targets=())
    assert ids(dispatch_state, START + 61) == ["t1"]


def test_a_resume_does_not_open_what_the_provider_closed() -> None:
    dispatch_state = state_of(queued("t1", target="t"), paused_targets=("t",))
    dispatch_state.close(GateClosure(kind="target", name="t", until=START + 60, why="429"), START)
    changed(dispatch_state, paused_targets=())
    assert ids(dispatch_state) == []
    dispatch_state.fall_due(START + 61)
    assert ids(dispatch_state, START + 61) == ["t1"]


def test_the_switch_holds_everything_and_why_names_it_first() -> None:
    dispatch_state = state_of(queued("t1"), is_paused=True)
    assert ids(dispatch_state) == []
    assert reasons(dispatch_state, "t1", START)[0].detail.message.startswith(
        "the service is paused"
    )
    changed(dispatch_state, is_paused=False)
    assert ids(dispatch_state) == ["t1"]


def test_a_raised_rate_limit_lets_the_next_start_at_once() -> None:
    def limits(most: int) -> tuple[RateLimit, ...]:
        rate = RateLimit(kind="target", name="t", unit="requests", most=most, window_seconds=60)
        return (rate,)

    tasks = [queued(f"t{n}", target="t") for n in range(3)]
    dispatch_state = state_of(*tasks, rate_limits=limits(1), agents=(Agent(id="a", capacity=9),))
    assert len(ids(dispatch_state)) == 1
    changed(dispatch_state, rate_limits=limits(2))
    assert len(ids(dispatch_state)) == 1
    changed(dispatch_state, rate_limits=())
    assert len(ids(dispatch_state)) == 1


def test_a_raised_budget_is_asked_again_at_once() -> None:
    dispatch_state = state_of(queued("t1", scopes=("session:s",)))
    (line,) = dispatch_state.plan(START, most=1)
    refused = Refused(
        scope=Scope("session:s"),
        unit=Unit.TOKENS,
        limit=100,
        spent=100,
        reserved=0,
        overrun=0,
        requested=100,
        resets_at=int(START) + 3_600,
        may_clear=True,
    )
    dispatch_state.refuse(line, queued("t1", scopes=("session:s",)), refused, START)
    assert ids(dispatch_state) == []
    dispatch_state.ask_budgets_again(("", "session:other"))
    assert ids(dispatch_state) == [], "there it is not waited for"
    dispatch_state.ask_budgets_again(("", "session:s"))
    assert ids(dispatch_state) == ["t1"]


def test_what_waits_for_another_of_its_kind_is_not_asked_for_when_a_slice_changes() -> None:
    dispatch_state = state_of(queued("t1", scopes=("session:s",)))
    (line,) = dispatch_state.plan(START, most=1)
    refused = Refused(
        scope=Scope("session:s"),
        unit=Unit.TOKENS,
        limit=100,
        spent=0,
        reserved=10,
        overrun=0,
        requested=10,
        resets_at=None,
        may_clear=True,
        kind="alpha/agent/",
        live=1,
    )
    dispatch_state.refuse(line, queued("t1", scopes=("session:s",)), refused, START)
    dispatch_state.ask_budgets_again(("", "session:s"))
    assert ids(dispatch_state) == []
    dispatch_state.ask_budgets_again()
    assert ids(dispatch_state) == ["t1"]


def test_an_agent_that_left_goes_on_with_its_own_tasks() -> None:
    dispatch_state = state_of(
        queued("t1", agent_id="b"), queued("t2"), agents=(Agent(id="b", capacity=5),)
    )
    changed(dispatch_state, agents=())
    assert ids(dispatch_state) == ["t1"]


def test_a_lane_is_ranked_again_when_its_agent_has_another_place() -> None:
    agents = tuple(Agent(id=name) for name in "abc")
    dispatch_state = state_of(queued("t1", agent_id="b"), agents=agents)
    changed(dispatch_state, agents=())
    assert ids(dispatch_state) == ["t1"]


def test_another_past_or_another_order_of_many_tasks_needs_a_new_state() -> None:
    few = state_of(queued("t1"))
    assert not few.must_be_rebuilt(settings(max_inflight=1, agents=(), is_paused=True))
    assert not few.must_be_rebuilt(settings(priority_ageing_seconds=60.0))
    assert few.must_be_rebuilt(settings(usage_window_hours=1))
    many = state_of(*(queued(f"t{number}") for number in range(MAX_REBUILT + 1)))
    assert many.must_be_rebuilt(settings(priority_ageing_seconds=60.0))
    assert not many.must_be_rebuilt(settings(max_inflight=1))


def test_a_refit_costs_the_same_however_many_tasks_wait() -> None:
    tasks = [queued(f"t{n:06d}", agent_id=f"a{n % 50}") for n in range(20_000)]
    dispatch_state = state_of(*tasks, agents=tuple(Agent(id=f"a{n}") for n in range(50)))
    started = process_time()
    for most in range(1, 101):
        changed(
            dispatch_state,
            max_inflight=most,
            agents=tuple(Agent(id=f"a{n}") for n in range(most % 50)),
        )
    assert process_time() - started < 2.0
