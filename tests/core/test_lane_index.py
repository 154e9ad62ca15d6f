"""The lane index that is kept between rounds decides what a fresh one would."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headgate import Agent, AgentState, Project, Task
from headgate.core.gates import GateClosure, GatePart
from headgate.core.lane_index import GRANTS_PER_TICK, LaneIndex, LaneKind, OfferHeap, Row
from headgate.core.load import to_micro_weight
from headgate.core.scheduler import decide
from headgate.core.snapshot import LanePolicy, SchedulerState
from snapshots import agents, snapshot, tasks

pytestmark = pytest.mark.hypothesis

PROJECTS = [
    Project(id="x", credit_weight=1, max_concurrent_agents=None),
    Project(id="y", credit_weight=2, max_concurrent_agents=3),
    Project(id="z", credit_weight=2, max_concurrent_agents=None, budget_limit=4_000),
]
AGENT_IDS = ["a", "b", "c"]
PARTS = [
    GatePart("target", "t"),
    GatePart("slot", "s"),
    GatePart("scope", "session:e"),
    GatePart("scope", "session:e/workflow:w"),
]


class KeptIndex(RuleBasedStateMachine):
    """Changes an index step by step, beside the plain facts from which one could be rebuilt."""

    @initialize(
        policy=st.sampled_from([None, *LanePolicy]),
        max_wait=st.sampled_from([None, 0, 3]),
        ageing=st.sampled_from([0.0, 5.0]),
        counted=st.booleans(),
    )
    def start(
        self, policy: LanePolicy | None, max_wait: int | None, ageing: float, counted: bool
    ) -> None:
        self.options: dict[str, Any] = {
            "lane_policy": policy,
            "max_wait_ticks": max_wait,
            "priority_ageing_seconds": ageing,
        }
        self.index = LaneIndex(
            policy=policy,
            max_wait_ticks=max_wait,
            priority_ageing_seconds=ageing,
            counts_inflight=counted,
        )
        self.counted = counted
        self.tasks: dict[str, Task] = {}
        self.agents: dict[str, Agent] = {}
        self.inflight: dict[str, int] = {}
        self.served: dict[str, dict[str, float]] = {}
        self.grants_of_tick = 0
        self.usage: dict[str, int] = {}
        self.closed: dict[GatePart, GateClosure] = {}
        self.limited: dict[str, float] = {}
        self.tick = 0
        self.number = 0

    @rule(
        project_id=st.sampled_from(["x", "y", "z", "ghost"]),
        owner=st.sampled_from([None, *AGENT_IDS]),
        priority=st.integers(0, 1),
        weight=st.sampled_from([1.0, 2.5]),
        gate=st.integers(0, 4),
        age=st.integers(0, 4),
    )
    def submit(
        self,
        *,
        project_id: str,
        owner: str | None,
        priority: int,
        weight: float,
        gate: int,
        age: int,
    ) -> None:
        self.number += 1
        task = Task(
            id=f"t{self.number:04}",
            project_id=project_id,
            agent_id=owner,
            priority=priority,
            weight=weight,
            created_at=float(self.number % 3),
            enqueued_tick=max(0, self.tick - age),
            target="t" if gate == 1 else None,
            slot="s" if gate in (1, 2) else None,
            scopes=("session:e/workflow:w",) if gate == 3 else (),
        )
        self.tasks[task.id] = task
        self.index.add(task)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.tasks:
            task_id = data.draw(st.sampled_from(sorted(self.tasks)))
            assert self.index.remove(task_id) == self.tasks.pop(task_id)
            assert self.index.remove(task_id) is None

    @rule(part=st.sampled_from(PARTS))
    def close(self, part: GatePart) -> None:
        self.closed[part] = GateClosure(kind=part.kind, name=part.name, until=1.0)
        self.index.close(self.closed[part])

    @rule(part=st.sampled_from(PARTS))
    def open(self, part: GatePart) -> None:
        self.closed.pop(part, None)
        self.index.open(part)

    @rule(
        agent_id=st.sampled_from(AGENT_IDS),
        state=st.sampled_from([AgentState.IDLE, AgentState.IDLE, AgentState.PAUSED]),
        capacity=st.integers(0, 3),
        accepts=st.booleans(),
        inflight=st.integers(0, 2),
    )
    def set_agent(
        self, agent_id: str, state: AgentState, capacity: int, accepts: bool, inflight: int
    ) -> None:
        agent = Agent(
            id=agent_id,
            agent_type="even" if agent_id == "b" else "odd",
            state=state,
            capacity=capacity,
            accepts_open=accepts,
        )
        self.agents[agent_id] = agent
        self.inflight[agent_id] = inflight if self.counted else 0
        self.index.set_agent(agent, inflight=self.inflight[agent_id])

    @rule(agent_id=st.sampled_from(AGENT_IDS))
    def remove_agent(self, agent_id: str) -> None:
        self.index.remove_agent(agent_id)
        self.agents.pop(agent_id, None)
        self.inflight.pop(agent_id, None)
        for lanes in self.served.values():
            lanes.pop(agent_id, None)

    @rule(agent_id=st.sampled_from(AGENT_IDS))
    def finish(self, agent_id: str) -> None:
        if self.inflight.get(agent_id, 0):
            self.inflight[agent_id] -= 1
            self.index.give_back_permit(agent_id)

    @rule(agent_type=st.sampled_from(["even", "odd"]), until=st.sampled_from([None, 9.0]))
    def limit(self, agent_type: str, until: float | None) -> None:
        self.limited.pop(agent_type, None)
        if until is not None:
            self.limited[agent_type] = until
        self.index.limit_agent_type(agent_type, until)

    @rule(
        cap=st.integers(0, 5),
        charge=st.booleans(),
        started=st.booleans(),
        lag=st.sampled_from([None, 1_500]),
        refused=st.integers(0, 2),
        alpha=st.sampled_from([0.0, 0.25, 0.5]),
        ended=st.integers(0, 2),
    )
    def decide(
        self,
        *,
        ended: int,
        cap: int,
        charge: bool,
        started: bool,
        lag: int | None,
        refused: int,
        alpha: float,
    ) -> None:
        if ended:
            self.tick += ended
            self.grants_of_tick = 0
        state = self.state(cap=cap, charge=charge, started=started, lag=lag, alpha=alpha)
        expected = decide(LaneIndex.of(state), state)
        actions = decide(self.index, state)
        assert actions == expected
        for position, action in enumerate(actions):
            task = self.tasks[action.task_id]
            served = self.tick + self.grants_of_tick / GRANTS_PER_TICK
            self.served.setdefault(task.project_id, {})[task.agent_id or ""] = served
            self.grants_of_tick += 1
            if position < refused:
                self.index.add(task)
                self.index.give_back_permit(action.agent_id)
            else:
                del self.tasks[action.task_id]
                self.inflight[action.agent_id] += 1
                self.usage[action.project_id] = self.usage.get(action.project_id, 0) + 1_000

    def state(
        self, *, cap: int, charge: bool, started: bool, lag: int | None, alpha: float
    ) -> SchedulerState:
        order = [entry.agent.id for entry in self.index.agents]
        inflight = dict(self.inflight)
        crew = [self.agents[name] for name in order]
        if not self.counted:
            crew = [_as_seen(agent, inflight[agent.id]) for agent in crew]
        return snapshot(
            projects=PROJECTS,
            tasks=list(self.tasks.values()),
            agents=crew,
            project_token_usage=dict(self.usage),
            project_started=dict(self.usage) if started else None,
            charge_in_round=charge,
            agent_inflight=inflight if self.counted else None,
            max_inflight=cap + sum(inflight.values()) if self.counted else cap,
            max_lag_tokens=lag,
            tick=self.tick,
            alpha=alpha,
            lane_served={name: dict(lanes) for name, lanes in self.served.items()},
            closed_gates=list(self.closed.values()),
            rate_limited=dict(self.limited),
            **self.options,
        )

    @invariant()
    def index_holds_exactly_the_waiting_tasks(self) -> None:
        if hasattr(self, "index"):
            assert {task.id for task in self.index} == set(self.tasks)
            assert len(self.index) == len(self.tasks)

    @invariant()
    def lanes_at_a_target_hold_what_waits_for_it_unless_for_a_known_time(self) -> None:
        if hasattr(self, "index"):
            found = {(one.project_id, one.owner): n for one, n in self.index.lanes_at("t").items()}
            waiting = [t for t in self.tasks.values() if t.target == "t"]
            ready = [t for t in waiting if not self.index.gate_of(t).closed_by]
            assert found == Counter((t.project_id, t.agent_id) for t in ready)

    @invariant()
    def depth_is_the_weight_of_what_no_gate_stops(self) -> None:
        if hasattr(self, "index") and self.options["lane_policy"] is LanePolicy.HIGHEST_LOAD:
            ready = [t for t in self.tasks.values() if not self.index.gate_of(t).closed_by]
            assert self.index.depth_micro == sum(to_micro_weight(t.weight) for t in ready)
            lanes = [ls for p in self.index.projects.values() for ls in p.lanes.values()]
            assert self.index.depth_micro == sum(lane.depth_micro for lane in lanes)


def _as_seen(agent: Agent, inflight: int) -> Agent:
    """Where places are not counted, an agent with work in flight is simply not idle."""
    if inflight and agent.state is AgentState.IDLE:
        return Agent(
            id=agent.id,
            agent_type=agent.agent_type,
            state=AgentState.BUSY,
            capacity=agent.capacity,
            accepts_open=agent.accepts_open,
        )
    return agent


TestKeptIndex = KeptIndex.TestCase
TestKeptIndex.settings = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("policy", [None, *LanePolicy])
def test_long_use_leaves_no_garbage_behind(policy: LanePolicy | None) -> None:
    index = LaneIndex(policy=policy, max_wait_ticks=50, counts_inflight=True)
    for agent in agents(8):
        index.set_agent(agent)
    randomness = random.Random(1)
    state = snapshot(projects=PROJECTS)
    sizes = []
    for step in range(3_000):
        owner = randomness.choice([None, "a000", "a001"])
        index.add(
            Task(
                id=f"t{step:05}",
                project_id=randomness.choice("xyz"),
                agent_id=owner,
                priority=-step,
                enqueued_tick=step,
                target=randomness.choice([None, "t", "u"]),
            )
        )
        if step % 3 == 0:
            waiting = next(iter(index)).id
            index.remove(waiting)
        if step % 50 == 0:
            index.close(GateClosure(kind="target", name="t"))
        if step % 50 == 25:
            index.open(GatePart("target", "t"))
        for action in decide(index, state):
            index.give_back_permit(action.agent_id)
        if step % 1_000 == 999:
            sizes.append(_footprint(index))
    assert max(sizes) <= 4 * min(sizes) + 2_000


def _footprint(thing: object) -> int:
    """Count the elements of every container reachable from the index."""
    seen: set[int] = set()
    pending, total = [thing], 0
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, str | int | float | Task | Agent | type):
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            total += len(item)
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            total += len(item)
            pending += list(item)
        else:
            names = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
            pending += [getattr(item, name) for name in names if hasattr(item, name)]
            pending += list(getattr(item, "__dict__", {}).values())
    return total


@pytest.mark.parametrize("policy", [None, *LanePolicy])
def test_a_plan_that_is_refused_again_and_again_leaves_no_garbage(
    policy: LanePolicy | None,
) -> None:
    index = LaneIndex(policy=policy, counts_inflight=True)
    index.set_agent(Agent(id="a"))
    waiting = {task.id: task for task in tasks("x", 3)}
    index.load(waiting.values())
    sizes: list[int] = []
    for _ in range(2_000):
        for action in decide(index, snapshot(projects=PROJECTS)):
            index.add(waiting[action.task_id])
            index.give_back_permit(action.agent_id)
        sizes.append(_footprint(index) if len(sizes) % 500 == 0 else 0)
    assert max(sizes) <= 2 * sizes[0] + 200


@pytest.mark.parametrize("is_closed", [False, True])
def test_priorities_that_come_and_go_leave_no_garbage(is_closed: bool) -> None:
    index = LaneIndex(policy=LanePolicy.HIGHEST_LOAD)
    index.set_agent(Agent(id="a"))
    if is_closed:
        index.close(GateClosure(kind="slot", name="s"))
    index.add(Task(id="stays", project_id="x", slot="s"))
    for priority in range(4_000):
        index.add(Task(id=f"t{priority}", project_id="x", slot="s", priority=priority))
        index.remove(f"t{priority}")
    assert _footprint(index) < 1_000


def test_lanes_that_come_and_go_leave_no_garbage() -> None:
    index = LaneIndex(policy=LanePolicy.HIGHEST_LOAD, max_wait_ticks=5)
    index.set_agent(Agent(id="stays"))
    for number in range(2_000):
        name = f"a{number}"
        index.set_agent(Agent(id=name))
        index.add(Task(id=f"t{number}", project_id="x", agent_id=name))
        index.remove(f"t{number}")
        index.remove_agent(name)
    assert _footprint(index) < 400


def test_a_parked_gate_costs_nothing_however_many_stand_behind_it() -> None:
    """A hundred thousand tasks on a closed budget are not looked at to start the one behind."""
    state = snapshot(projects=[Project(id="p")], charge_in_round=True)
    parked = tasks("p", 100_000, scopes=("session:e",))
    index = LaneIndex(policy=LanePolicy.FEWEST_IN_FLIGHT, counts_inflight=True)
    index.set_agent(Agent(id="a"))
    index.load(parked)
    index.close(GateClosure(kind="scope", name="session:e", until=60.0))
    index.add(Task(id="zz-can-run", project_id="p"))
    looked_at = _CountingDict(index._waiting)
    lane = index.projects["p"].lanes[LaneKind.TASKS, None]
    lane._order._waiting = looked_at
    assert [action.task_id for action in decide(index, state)] == ["zz-can-run"]
    assert looked_at.reads < 10


class _CountingDict(dict[str, Task]):
    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)


@pytest.mark.parametrize("policy", LanePolicy)
def test_a_lane_that_has_gone_is_freed_without_a_search_for_garbage(policy: LanePolicy) -> None:
    def kept() -> int:
        return sum(isinstance(one, OfferHeap | Row) for one in gc.get_objects())

    gc.disable()
    try:
        before = kept()
        index = LaneIndex(policy=policy, max_wait_ticks=3, counts_inflight=True)
        index.set_agent(Agent(id="a"))
        for number in range(3):
            index.add(Task(id=f"t{number}", project_id="x", agent_id="a", slot="s"))
        assert len(decide(index, snapshot(projects=PROJECTS))) == 1
        for task in list(index):
            index.remove(task.id)
        assert kept() == before
    finally:
        gc.enable()


def test_opening_one_of_two_closed_parts_is_not_enough() -> None:
    index = LaneIndex()
    index.set_agent(Agent(id="a"))
    index.add(Task(id="t", project_id="x", target="t", slot="s"))
    index.close(GateClosure(kind="target", name="t"))
    index.close(GateClosure(kind="slot", name="s"))
    state = snapshot(projects=PROJECTS)
    index.open(GatePart("target", "t"))
    assert decide(index, state) == []
    index.open(GatePart("slot", "s"))
    assert len(decide(index, state)) == 1


def test_a_new_task_joins_a_gate_that_is_closed_already() -> None:
    index = LaneIndex()
    index.set_agent(Agent(id="a"))
    index.close(GateClosure(kind="slot", name="s"))
    index.add(Task(id="t", project_id="x", slot="s"))
    assert decide(index, snapshot(projects=PROJECTS)) == []


def test_adding_a_waiting_id_again_replaces_the_task() -> None:
    index = LaneIndex()
    index.set_agent(Agent(id="a"))
    index.add(Task(id="t", project_id="x", priority=1))
    index.add(Task(id="t", project_id="y", priority=2))
    assert len(index) == 1
    assert decide(index, snapshot(projects=PROJECTS))[0].project_id == "y"


def test_an_agent_that_is_removed_takes_nothing_and_leaves_no_history() -> None:
    index = LaneIndex(policy=LanePolicy.FEWEST_IN_FLIGHT, counts_inflight=True)
    index.set_agent(Agent(id="a"))
    index.add(Task(id="t", project_id="x", agent_id="a"))
    decide(index, snapshot(projects=PROJECTS, tick=7))
    assert index.served() == {"x": {"a": 7}}
    index.give_back_permit("a")
    index.add(Task(id="u", project_id="x"))
    index.remove_agent("a")
    assert index.served() == {}
    assert decide(index, snapshot(projects=PROJECTS)) == []
    index.set_agent(Agent(id="b"))
    assert [action.agent_id for action in decide(index, snapshot(projects=PROJECTS))] == ["b"]
