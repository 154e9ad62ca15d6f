"""Calls beside tasks in one dispatch state: what they take, what they leave, and who goes first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import dispatch_model
from core.dispatch_model import START, Purse, state_of
from core.test_dispatch_state import refusal
from headgate.core.budgets.escrow import Amounts
from headgate.core.call import CallRecord, CallState
from headgate.core.dispatch_state import DispatchState, InFlightAttempt, Planned
from headgate.core.estimates import NOTHING, Hold
from headgate.core.estimates import given as given_amount
from headgate.core.gates import GateClosure, GatePart
from headgate.core.lane_index import NEVER_SERVED
from headgate.core.lifecycle import share_of_try
from headgate.core.rate_limits import RateLimit
from headgate.core.reasons import AgentFull, ProjectConcurrencyReached, UpstreamFull
from headgate.core.snapshot import Agent, LanePolicy, Project, ProjectStatus
from headgate.core.task import UPSTREAM_PREFIX, Progress, Task, TaskRecord, TaskStatus
from headgate.core.why import (
    LANES_SECONDS,
    MAX_RANKED_LANES,
    WaitingLanes,
    reasons,
    start_rank,
)

TARGET = "upstream:one"


def queued(task_id: str, **fields: Any) -> TaskRecord:
    return dispatch_model.queued(task_id, **{"project_id": "p", **fields})


def free() -> Hold:
    return Hold(micro_usd=NOTHING, tokens=NOTHING)


def call(
    call_id: str,
    *,
    project: str = "p",
    agent: str = "caller",
    parent: str | None = None,
    at: float = START,
    tokens: int = 100,
    target: str = TARGET,
    priority: int = 0,
) -> TaskRecord:
    return TaskRecord(
        task=Task(
            id=call_id,
            project_id=project,
            agent_id=agent,
            created_at=at,
            estimate_tokens=tokens,
            has_usd_estimate=True,
            target=target,
            is_call=True,
            parent_id=parent,
            priority=priority,
        )
    )


def with_calls(*calls: TaskRecord, permits: int | None = None, **fields: Any) -> DispatchState:
    fields.setdefault("projects", (Project(id="p", max_concurrent_agents=None),))
    given_permits = {} if permits is None else {TARGET: permits}
    state = state_of(upstream_permits=given_permits, **fields)
    for one in calls:
        state.observe_call(one, free, START)
    return state


def planned(state: DispatchState, *, most: int = 100) -> list[str]:
    return [one.task.id for one in state.plan(START, most=most)]


def end(state: DispatchState, call_id: str, tokens: int = 100) -> None:
    state.end_call(call_id, START, tokens=tokens, share=Amounts(tokens, tokens))


def test_a_call_takes_no_permit_of_nodes_and_none_of_max_inflight() -> None:
    state = with_calls(call("c1"), call("c2"), places=1, max_inflight=1)
    state.observe(queued("t1"), START)
    state.observe(queued("t2"), START)
    assert sorted(planned(state)) == ["c1", "c2", "t1"]
    state.observe_call(call("c3"), free, START)
    assert planned(state) == ["c3"]
    assert len(state.in_flight) == 1
    assert len(state.in_flight.calls) == 3


def test_a_plan_of_calls_alone_leaves_tasks_where_they_are() -> None:
    state = with_calls(call("c1"))
    state.observe(queued("t1"), START)
    assert planned(state, most=0) == ["c1"]
    assert planned(state) == ["t1"]


def test_an_upstream_answers_as_many_calls_as_it_has_permits() -> None:
    state = with_calls(*(call(f"c{n}") for n in range(4)), permits=2)
    assert planned(state) == ["c0", "c1"]
    (found, *_) = [one.detail for one in reasons(state, "c2", START)]
    assert found == UpstreamFull(upstream="one", inflight=2, limit=2)
    end(state, "c0")
    assert planned(state) == ["c2"]


def test_a_full_upstream_keeps_no_call_to_another_waiting() -> None:
    state = with_calls(call("c1"), call("c2"), call("c3", target="upstream:two"), permits=1)
    assert sorted(planned(state)) == ["c1", "c3"]


def test_who_waits_for_an_upstream_is_looked_up_once_a_second() -> None:
    state = with_calls(call("c1", agent="a"), call("other", target="upstream:two"), permits=0)
    lanes = WaitingLanes()
    for seconds, known in ((0.0, 1), (LANES_SECONDS / 2, 1), (LANES_SECONDS, 2), (-1.0, 2)):
        found = lanes.of(state, TARGET, START + seconds)
        assert found is not None
        assert len(found) == known
        assert start_rank(state, state.waiting["c1"].task, 1, found) == 1
        state.observe_call(call("c2", agent="b", at=START + 1), free, START)


def test_where_calls_wait_in_very_many_lanes_nobody_is_ranked() -> None:
    calls = [call(f"c{n}", agent=f"agent-{n}") for n in range(MAX_RANKED_LANES + 1)]
    for count, is_ranked in ((MAX_RANKED_LANES, True), (MAX_RANKED_LANES + 1, False)):
        state = with_calls(*calls[:count], permits=0)
        assert (WaitingLanes().of(state, TARGET, START) is not None) is is_ranked


def test_a_capacity_that_somebody_set_counts_calls_and_the_usual_one_does_not() -> None:
    capped = Agent(id="caller", capacity=1)
    for is_set, expected in ((True, ["c1"]), (False, ["c1", "c2"])):
        state = with_calls(
            call("c1"),
            call("c2"),
            agents=(capped,),
            capped_agents=frozenset({"caller"}) if is_set else frozenset(),
        )
        assert planned(state) == expected
    state = with_calls(
        call("c1"), call("c2"), agents=(capped,), capped_agents=frozenset({"caller"})
    )
    planned(state)
    assert any(isinstance(one.detail, AgentFull) for one in reasons(state, "c2", START))


def test_the_cap_of_a_project_counts_both_and_calls_of_its_tasks_go_on() -> None:
    projects = (Project(id="p", max_concurrent_agents=1),)
    state = with_calls(call("c1"), projects=projects)
    state.observe(queued("t1"), START)
    first = planned(state)
    assert len(first) == 1
    (waiting,) = {"c1", "t1"} - set(first)
    found = [one.detail for one in reasons(state, waiting, START)]
    assert any(isinstance(one, ProjectConcurrencyReached) for one in found)
    state.observe_call(call("child", parent=first[0]), free, START)
    assert planned(state) == ["child"]


def test_with_every_cap_at_one_a_task_and_its_calls_finish() -> None:
    state = with_calls(
        places=1,
        max_inflight=1,
        permits=1,
        max_per_agent_inflight=1,
        projects=(Project(id="p", max_concurrent_agents=1),),
        agents=(Agent(id="a1", capacity=1),),
        capped_agents=frozenset({"a1"}),
    )
    state.observe(queued("t1"), START)
    assert planned(state) == ["t1"]
    for number in range(3):
        state.observe_call(call(f"c{number}", agent="a1", parent="t1"), free, START)
        assert planned(state) == [f"c{number}"]
        end(state, f"c{number}")
    assert state.in_flight.reserved["p"] >= 300, "what its calls used counts for the task"


@pytest.mark.parametrize("tokens", [0, 70])
def test_a_call_of_a_task_at_another_node_counts_for_it_what_it_used(tokens: int) -> None:
    state = with_calls(places=1)
    state.observe(queued("t1"), START)
    assert planned(state) == ["t1"]
    before = state.in_flight.reserved["p"]
    running = CallRecord(
        id="c1",
        project_id="p",
        agent_id="caller",
        model="m",
        upstream="u",
        state=CallState.RUNNING,
        task_id="t1",
        started_at=START,
        reserved_tokens=100,
    )
    state.load_call_elsewhere(running)
    ended = msgspec.structs.replace(
        running, state=CallState.FAILED, ended_at=START + 60, tokens=tokens
    )
    state.end_call_elsewhere("c1", ended, START)
    assert state.in_flight.reserved["p"] == before + tokens


def test_a_closed_upstream_parks_its_calls_until_it_opens() -> None:
    state = with_calls(call("c1"))
    state.close(GateClosure(kind="target", name=TARGET, until=START + 5, why="busy"), START)
    assert planned(state) == []
    state.open(GatePart("target", TARGET))
    assert planned(state) == ["c1"]


def test_projects_share_a_busy_upstream_by_their_weights() -> None:
    projects = (
        Project(id="two", credit_weight=2.0, max_concurrent_agents=None),
        Project(id="one", credit_weight=1.0, max_concurrent_agents=None),
    )
    state = with_calls(projects=projects, permits=4)
    for number in range(900):
        for project in ("two", "one"):
            state.observe_call(call(f"{project}-{number:04}", project=project), free, START)
    served = {"two": 0, "one": 0}
    running: list[str] = []
    for _ in range(600):
        running += planned(state)
        done = running.pop(0)
        served[done.partition("-")[0]] += 1
        end(state, done)
    assert abs(served["two"] / 600 - 2 / 3) < 0.02


def test_a_call_that_moves_counts_as_one_start_and_one_end() -> None:
    state = with_calls(call("c1"))
    for _ in range(3):
        assert planned(state) == ["c1"]
        state.withdraw_call("c1", START)
        state.observe_call(call("c1"), free, START)
    assert planned(state) == ["c1"]
    end(state, "c1")
    assert (state.usage.started["p"], state.usage.completed["p"]) == (1, 1)


@pytest.mark.parametrize("permits", [None, 1])
@pytest.mark.parametrize("reserved", [950, 1_000])
def test_a_call_that_has_its_money_waits_for_no_budget(permits: int | None, reserved: int) -> None:
    """An older call waits for what the younger one holds, aside or behind a closed scope."""
    older, younger = in_session("a", at=START), in_session("b", at=START + 1)
    state = with_calls(permits=permits)
    line = state.start_call(older.task, hundred, START)
    assert line is not None
    refused = refusal(reserved=reserved)
    state.refuse(line, older, refused, START)
    moved = msgspec.structs.replace(younger.task, has_money=True)
    if state.start_call(moved, hundred, START) is None:
        state.observe_call(msgspec.structs.replace(younger, task=moved), hundred, START)
        assert planned(state) == ["b"]
    assert "b" in state.in_flight.calls


def hundred() -> Hold:
    return Hold(micro_usd=NOTHING, tokens=given_amount(100))


def in_session(call_id: str, *, at: float) -> TaskRecord:
    record = call(call_id, at=at)
    task = msgspec.structs.replace(record.task, scopes=("session:s",))
    return msgspec.structs.replace(record, task=task)


def test_shares_by_dollars_count_what_calls_cost_and_not_their_tokens() -> None:
    projects = (
        Project(id="dear", max_concurrent_agents=None),
        Project(id="cheap", max_concurrent_agents=None),
    )
    state = with_calls(projects=projects, permits=1, is_shared_by_usd=True)
    for number in range(200):
        for project in ("dear", "cheap"):
            state.observe_call(call(f"{project}-{number:03}", project=project), free, START)
    served = {"dear": 0, "cheap": 0}
    for _ in range(160):
        (one,) = planned(state)
        project = one.partition("-")[0]
        served[project] += 1
        share = Amounts(30 if project == "dear" else 10, 100)
        state.end_call(one, START, tokens=100, share=share)
    assert served["cheap"] == pytest.approx(3 * served["dear"], rel=0.05)


@pytest.mark.parametrize("is_shared_by_usd", [False, True])
def test_calls_that_fail_count_by_how_long_they_had_a_permit(is_shared_by_usd: bool) -> None:
    projects = tuple(Project(id=name, max_concurrent_agents=None) for name in ("sound", "failing"))
    state = with_calls(projects=projects, permits=1, is_shared_by_usd=is_shared_by_usd)
    for number in range(300):
        for project in ("sound", "failing"):
            state.observe_call(call(f"{project}-{number:03}", project=project), free, START)
    served = {"sound": 0, "failing": 0}
    for _ in range(300):
        (one,) = planned(state)
        project = one.partition("-")[0]
        served[project] += 1
        used = Amounts() if project == "failing" else Amounts(100, 100)
        share = share_of_try(used, Amounts(100, 100), 0.5)
        state.end_call(one, START, tokens=used.tokens, share=share, is_done=any(used))
    assert served["failing"] == pytest.approx(2 * served["sound"], abs=2)


def test_neither_calls_of_tasks_nor_others_of_a_project_starve_each_other() -> None:
    state = with_calls(permits=1)
    state.observe(queued("t1"), START)
    planned(state)
    for number in range(20):
        state.observe_call(call(f"child-{number:02}", parent="t1"), free, START)
        state.observe_call(call(f"plain-{number:02}", agent="other"), free, START)
    order = []
    for _ in range(20):
        (one,) = planned(state)
        order.append(one.partition("-")[0])
        end(state, one)
    assert order.count("child") == order.count("plain") == 10


Step = tuple[str, int, str, str]
steps = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("call", "child", "task", "plan", "end", "move", "forget"),
                *("close", "open", "spend", "reset"),
            )
        ),
        st.integers(0, 9),
        st.sampled_from(("p", "q")),
        st.sampled_from(("a1", "b", "c")),
    ),
    max_size=60,
)
SETTINGS: dict[str, Any] = {
    "projects": (
        Project(id="p", max_concurrent_agents=3),
        Project(id="q", max_concurrent_agents=None),
    ),
    "agents": (Agent(id="a1", capacity=2),),
    "capped_agents": frozenset({"a1"}),
    "max_inflight": 2,
    "places": 2,
    "permits": 3,
}


class _Fleet:
    """Tasks and calls that come, run and end, with what a registry keeps of calls."""

    def __init__(self) -> None:
        self.state = with_calls(**SETTINGS)
        self.waiting: dict[str, TaskRecord] = {}
        self.tasks: dict[str, TaskRecord] = {}
        self.count = 0

    def step(self, kind: str, number: int, project: str, agent: str) -> None:
        self.count += 1
        name = f"{kind}-{self.count:03}"
        running = [one.task.id for one in self.state.in_flight]
        match kind:
            case "call":
                self._wait(call(name, project=project, agent=agent, priority=number))
            case "child" if running:
                parent = running[number % len(running)]
                self._wait(call(name, project=project, agent=agent, parent=parent))
            case "task":
                record = queued(name, project_id=project, agent_id=agent)
                self.tasks[name] = record
                self.state.observe(record, START)
            case "plan":
                for one in self.state.plan(START, most=number):
                    self.waiting.pop(one.task.id, None)
            case "end" if self.state.in_flight.calls:
                ids = list(self.state.in_flight.calls)
                end(self.state, ids[number % len(ids)])
            case "move" if self.state.in_flight.calls:
                ids = list(self.state.in_flight.calls)
                self._move(ids[number % len(ids)])
            case "spend":
                self.state.close(GateClosure(kind="scope", name=""), START)
            case "reset":
                self.state.open(GatePart("scope", ""))
            case "close":
                self.state.close(GateClosure(kind="target", name=TARGET), START)
            case "open":
                self.state.open(GatePart("target", TARGET))
            case "forget" if self.waiting:
                gone = list(self.waiting)[number % len(self.waiting)]
                del self.waiting[gone]
                self.state.forget(gone, START)

    def _wait(self, record: TaskRecord) -> None:
        self.waiting[record.task.id] = record
        self.state.observe_call(record, free, START)

    def _move(self, call_id: str) -> None:
        """Have a call that failed wait for another key, with the money that it has."""
        task = self.state.in_flight.calls[call_id].task
        self.state.withdraw_call(call_id, START)
        self._wait(TaskRecord(task=msgspec.structs.replace(task, has_money=True)))

    def rebuilt(self, *, is_elsewhere: bool) -> DispatchState:
        """Return a state that was made anew from records and the registry, here or elsewhere.

        Another node has the calls that run from the notes in the store, and those that wait come
        to it one by one.
        """
        state = with_calls(**SETTINGS)
        for closure in self.state.closures.all():
            state.close(closure, START)
        running = [
            msgspec.structs.replace(
                self.tasks[one.task.id],
                task=msgspec.structs.replace(one.task, status=TaskStatus.RUNNING),
                agent_id=one.agent_id,
                progress=Progress(attempt=one.number, node_id=one.node_id),
            )
            for one in self.state.in_flight
        ]
        state.load_more(running, START)
        for record in self.tasks.values():
            if record.task.id in self.state.waiting:
                state.observe(record, START)
        for attempt in self.state.in_flight.calls.values():
            if is_elsewhere:
                state.load_call_elsewhere(note_of(attempt))
            else:
                state.load_call(attempt)
        for record in self.waiting.values():
            state.observe_call(record, free, START)
        return state


def note_of(attempt: InFlightAttempt) -> CallRecord:
    """Return what the store has of a call that runs."""
    task = attempt.task
    return CallRecord(
        id=task.id,
        project_id=task.project_id,
        agent_id=attempt.agent_id,
        model="m",
        upstream=(task.target or "").removeprefix(UPSTREAM_PREFIX),
        state=CallState.RUNNING,
        task_id=task.parent_id,
        slot=attempt.slot,
    )


def facts(state: DispatchState) -> tuple[object, ...]:
    pools = (state.index.agents, state.index.callers)
    permits = [{one.agent.id: one.inflight for one in pool if one.inflight} for pool in pools]
    return (
        sorted(state.waiting),
        sorted(state.in_flight.calls),
        sorted(one.task.id for one in state.in_flight),
        state.index.offers.upstreams,
        {name: count for name, count in state.in_flight.active.items() if count},
        permits,
        {project: state.index.ready(project) for project in ("p", "q")},
    )


@pytest.mark.hypothesis
@settings(max_examples=150)
@given(steps)
def test_a_fleet_stays_within_its_bounds_and_a_rebuild_changes_nothing(
    taken_steps: list[Step],
) -> None:
    fleet = _Fleet()
    for step in taken_steps:
        fleet.step(*step)
        state = fleet.state
        calls = state.in_flight.calls.values()
        assert len(state.in_flight) <= 2
        assert len(calls) <= 3
        assert state.index.offers.upstreams[TARGET] == 3 - len(calls)
        everything = list(state.in_flight.all())
        active = [one for one in everything if one.task.parent_id is None]
        assert sum(one.task.project_id == "p" for one in active) <= 3
        assert sum(one.agent_id == "a1" for one in active) <= 2
        assert state.waiting_calls == len(fleet.waiting)
    rebuilt = [fleet.rebuilt(is_elsewhere=is_elsewhere) for is_elsewhere in (False, True)]
    running = list(fleet.state.in_flight.calls)
    for _ in range(len(running) + 1):
        for one in (fleet.state, *rebuilt):
            # What stands in the way of others is parked when a round begins.
            one.index.begin_round(one.in_flight.free_capacity())
            one.index.set_tasks_left(2 - len(one.in_flight))
        assert facts(rebuilt[0]) == facts(rebuilt[1]) == facts(fleet.state)
        if running:
            ended = running.pop()
            end(fleet.state, ended)
            end(rebuilt[0], ended)
            rebuilt[1].end_call_elsewhere(ended, None, START)


# A call that nothing competes with is planned without a round, and that must make no difference.

SHORT_SETTINGS = st.fixed_dictionaries(
    {
        "lane_policy": st.sampled_from(list(LanePolicy)),
        "max_wait_ticks": st.sampled_from((None, 0, 3)),
        "max_lag_tokens": st.sampled_from((None, 50)),
        "priority_ageing_seconds": st.sampled_from((0.0, 10.0)),
        "is_shared_by_usd": st.booleans(),
        "auto_tune": st.booleans(),
        "places": st.integers(0, 2),
        "permits": st.integers(1, 4),
        "projects": st.sampled_from(
            (
                (Project(id="p", max_concurrent_agents=None), Project(id="q")),
                (
                    Project(id="p", max_concurrent_agents=2, budget_limit=700),
                    Project(id="q", credit_weight=3.0),
                ),
                (Project(id="p", status=ProjectStatus.PAUSED), Project(id="q")),
            )
        ),
        "rate_limits": st.sampled_from(
            (
                (),
                (
                    RateLimit(
                        kind="agent_type", name="typed", unit="requests", most=2, window_seconds=60
                    ),
                    RateLimit(
                        kind="target", name=TARGET, unit="tokens", most=400, window_seconds=60
                    ),
                ),
            )
        ),
    }
)
PARTS = (
    GatePart("target", TARGET),
    GatePart("scope", ""),
    GatePart("scope", "project:q"),
    GatePart("slot", "key"),
)
short_steps = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("call",) * 8,
                *("child", "task", "plan", "end", "end", "away", "close", "open", "later"),
                "refuse",
            )
        ),
        st.integers(0, 9),
        st.sampled_from(("p", "q", "nobody's")),
        st.sampled_from(("a1", "b", "c")),
    ),
    max_size=50,
)


class _Dispatch:
    """A dispatch state that calls come to as a registry lets them, with a round for each or not."""

    def __init__(self, *, is_short: bool, **fields: Any) -> None:
        self.state = with_calls(
            agents=(Agent(id="a1", capacity=2, agent_type="typed"),),
            capped_agents=frozenset({"a1"}),
            max_inflight=2,
            **fields,
        )
        self.is_short = is_short
        self.now = START
        self.planned: list[Planned] = []
        self.at_once = 0

    def step(self, name: str, kind: str, number: int, project: str, agent: str) -> None:
        state, now = self.state, self.now
        running = [one.task.id for one in state.in_flight]
        calls = sorted(state.in_flight.calls)
        match kind:
            case "call":
                self._come(_call_of(name, number, project, agent, self.now))
            case "child" if running:
                parent = running[number % len(running)]
                self._come(call(name, project=project, agent=agent, parent=parent, at=now))
            case "task":
                state.observe(queued(name, project_id=project, agent_id=agent), now)
            case "plan":
                self.planned += state.plan(now, most=number)
            case "end" if calls:
                tokens, call_id = 40 * number, calls[number % len(calls)]
                state.end_call(call_id, now, tokens=tokens, share=Amounts(number, tokens))
                self._plan_calls()
            case "away" if calls:
                state.withdraw_call(calls[number % len(calls)], now)
                self._plan_calls()
            case "close":
                part = PARTS[number % len(PARTS)]
                closure = GateClosure(kind=part.kind, name=part.name, until=now + 10 * number)
                state.close(closure, now)
            case "open":
                state.open(PARTS[number % len(PARTS)])
                self._plan_calls()
            case "later":
                self.now += 7 * number
                state.fall_due(self.now)
                self._plan_calls()
            case "refuse" if self.planned and self.planned[-1].task.id in calls:
                self._refuse(self.planned[-1])

    def _come(self, record: TaskRecord) -> None:
        holds = priced if record.task.priority % 2 else free
        if self.is_short:
            planned_at_once = self.state.start_call(
                record.task, holds, self.now, attempt=record.progress.attempt
            )
            if planned_at_once is not None:
                self.at_once += 1
                self.planned.append(planned_at_once)
                return
        self.state.observe_call(record, holds, self.now)
        self._plan_calls()

    def _plan_calls(self) -> None:
        if self.state.waiting_calls:
            self.planned += self.state.plan(self.now, most=0)

    def _refuse(self, line: Planned) -> None:
        refused = Purse(50, has_window=True).refusal("project:q", 60, self.now)
        record = TaskRecord(task=line.task, progress=Progress(attempt=line.attempt - 1))
        self.state.refuse(line, record, refused, self.now)

    def facts(self) -> tuple[object, ...]:
        state = self.state
        index, usage = state.index, state.usage
        pools = [
            {one.agent.id: (one.inflight, one.is_free) for one in pool}
            for pool in (index.agents, index.callers)
        ]
        return (
            state.tick,
            state.waiting,
            state.waiting_calls,
            state.present,
            state.forgiven_now,
            state.in_flight.calls,
            {one.task.id: one for one in state.in_flight},
            (usage.tokens, usage.started, usage.completed, usage.forgiven),
            (state.in_flight.active, state.in_flight.reserved, state.in_flight.by_slot),
            state.rates.__dict__,
            state.limited,
            state.too_large,
            state.tuning,
            state.closures.all(),
            state.parking.refusals,
            pools,
            index.offers.upstreams,
            (index.offers.plain, index.offers.called),
            sorted(one.id for one in index),
            index._served
            | {
                (lane.project_id, lane.owner, lane.kind): lane.served_tick
                for project in index.projects.values()
                for lane in project.lanes.values()
                if lane.served_tick != NEVER_SERVED
            },
            index._latest_served,
        )


def priced() -> Hold:
    return Hold(micro_usd=given_amount(30), tokens=given_amount(120), kind="p/m/")


def _call_of(name: str, number: int, project: str, agent: str, at: float) -> TaskRecord:
    record = call(name, project=project, agent=agent, priority=number, at=at, tokens=90 + number)
    scopes = (f"project:{project}", "session:s")[: 1 + number % 2]
    slot = "key" if number % 3 == 0 else None
    task = msgspec.structs.replace(record.task, scopes=scopes, slot=slot, has_claims=number > 7)
    return msgspec.structs.replace(record, task=task)


@pytest.mark.hypothesis
@settings(max_examples=300)
@given(SHORT_SETTINGS, short_steps)
def test_a_call_that_is_planned_at_once_is_planned_as_in_a_round(
    fields: dict[str, Any], taken_steps: list[Step]
) -> None:
    short, usual = (_Dispatch(is_short=is_short, **fields) for is_short in (True, False))
    for count, step in enumerate(taken_steps):
        for one in (short, usual):
            one.step(f"{step[0]}-{count:02}", *step)
        assert short.planned == usual.planned
        assert short.facts() == usual.facts()


def test_calls_that_come_one_after_the_other_need_no_round() -> None:
    fleet = _Dispatch(is_short=True, permits=2)
    for number in range(5):
        fleet.step(f"call-{number}", "call", 1, "p", "b")
    assert (fleet.at_once, len(fleet.planned)) == (2, 2), "no more than the upstream takes"
    fleet.step("", "end", 0, "p", "b")
    assert [one.task.id for one in fleet.planned[2:]] == ["call-2"]
    fleet.step("call-5", "call", 1, "p", "b")
    assert fleet.at_once == 2, "others wait before it"
