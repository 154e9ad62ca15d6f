"""Whatever happens, in whatever order: the state is what a fresh look at the store would give."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.dispatch_model import IN_FLIGHT, Purse, StoreModel
from core.dispatch_model import settings as dispatch_settings
from headgate.core.dispatch_state import (
    AGAIN_SECONDS,
    DEADLINE_GRACE_SECONDS,
    DispatchState,
    InFlightAttempt,
    Planned,
)
from headgate.core.gates import GateClosure, GatePart
from headgate.core.rate_limits import RateLimit
from headgate.core.reasons import (
    AgentFull,
    BudgetShort,
    GateClosed,
    InflightCapReached,
    LaneBehind,
    NodesFull,
    NotYetDue,
    NoWorker,
    ParentsPending,
    ProjectConcurrencyReached,
    RateLimited,
    Reason,
    WorkersFull,
)
from headgate.core.slots.slot import SlotStanding
from headgate.core.snapshot import LanePolicy
from headgate.core.task import OnExhausted, Progress, Task, TaskRecord, TaskStatus, Terms
from headgate.core.why import reasons

pytestmark = pytest.mark.hypothesis

AGENTS = [None, None, "a", "b", "made-1", "made-2"]
CAPACITY = {"a": 2, "b": 1, "made-1": 1, "made-2": 1}
PLACES = 4
PULL = frozenset({"pull"})
LIMITS = (
    RateLimit(kind="target", name="t", unit="requests", most=3, window_seconds=60),
    RateLimit(kind="agent_type", name="claude", unit="tokens", most=900, window_seconds=60),
)
GATES: list[dict[str, Any]] = [
    {},
    {"target": "t"},
    {"target": "u"},
    {"scopes": ("session:window",)},
    {"scopes": ("session:none",)},
    {"scopes": ("session:none/workflow:w",), "target": "u"},
    {"target": "pull"},
    {"target": "pull", "scopes": ("session:window",)},
    {"slot": "one"},
    {"provider": "p"},
    {"provider": "p", "target": "pull"},
    {"provider": "gone"},
]
SLOTS = ("one", "two", "three")


class StateBesideAStore(RuleBasedStateMachine):
    """Shows a dispatch state everything that happens to a store, and lets it plan."""

    @initialize(policy=st.sampled_from(list(LanePolicy)), max_lag=st.sampled_from([None, 500]))
    def begin(self, policy: LanePolicy, max_lag: int | None) -> None:
        self.settings = dispatch_settings(
            rate_limits=LIMITS,
            lane_policy=policy,
            max_wait_ticks=5,
            max_lag_tokens=max_lag,
            pull_targets=PULL,
        )
        self.model = StoreModel(
            {
                "session:window": Purse(1_000, has_window=True),
                "session:none": Purse(1_000, has_window=False),
            }
        )
        self.nodes = {"n1": PLACES, "n2": PLACES - 2}
        self.workers: dict[str, tuple[str, int]] = {}
        self.dispatch_state = self.model.fresh_state(self.settings, self.nodes)
        self.open_lines: list[Planned] = []
        self.planned_at = self.model.now
        self.number = 0

    @rule(
        project_id=st.sampled_from(["x", "y"]),
        agent_id=st.sampled_from(AGENTS),
        gate=st.sampled_from(GATES),
        priority=st.integers(0, 1),
        tokens=st.sampled_from([None, 10, 300, 700, 1_500]),
        starts_in=st.sampled_from([None, None, 0, 30]),
        ends_in=st.sampled_from([None, 20, 500]),
        parents=st.integers(0, 2),
        on_exhausted=st.sampled_from([OnExhausted.WAIT, OnExhausted.WAIT, OnExhausted.REJECT]),
    )
    def submit(
        self,
        *,
        project_id: str,
        agent_id: str | None,
        gate: dict[str, Any],
        priority: int,
        tokens: int | None,
        starts_in: float | None,
        ends_in: float | None,
        parents: int,
        on_exhausted: OnExhausted,
    ) -> None:
        self.number += 1
        now = self.model.now
        depends_on = tuple(self.model.in_state(TaskStatus.QUEUED, *IN_FLIGHT)[:parents])
        task = Task(
            id=f"t{self.number:04}",
            project_id=project_id,
            agent_id=agent_id,
            priority=priority,
            created_at=now,
            enqueued_tick=self.model.tick,
            estimate_tokens=tokens,
            not_before=None if starts_in is None else now + starts_in,
            deadline=None if ends_in is None else now + ends_in,
            **gate,
        )
        record = TaskRecord(
            task=task,
            terms=Terms(depends_on=depends_on, on_exhausted=on_exhausted),
            progress=Progress(waiting_for=len(depends_on)),
            agent_id=agent_id,
        )
        self.show([self.model.write(record)])

    @precondition(lambda self: not self.open_lines)
    @rule(most=st.sampled_from([1, 3, 100]))
    def plan(self, most: int) -> None:
        self.expire()
        before = self.model.in_state(*IN_FLIGHT)
        self.planned_at = self.model.now
        self.open_lines = self.dispatch_state.plan(self.model.now, most=most)
        assert len(self.open_lines) <= most
        assert not {line.task.id for line in self.open_lines} & set(before)
        for line in self.open_lines:
            self.check_line(line)

    @precondition(lambda self: bool(self.open_lines))
    @rule(data=st.data())
    def answer_one(self, data: st.DataObject) -> None:
        line = self.open_lines.pop(data.draw(st.integers(0, len(self.open_lines) - 1)))
        self.answer(line, starts=data.draw(st.booleans()))

    @precondition(lambda self: not self.open_lines)
    @rule()
    def decide_until_nothing_more_can_start(self) -> None:
        self.expire()
        self.planned_at = self.model.now
        while lines := self.dispatch_state.plan(self.model.now, most=100):
            for line in lines:
                self.check_line(line)
                self.answer(line, starts=True)
            self.expire()
        for task_id in self.dispatch_state.waiting:
            holds = [
                reason.detail for reason in reasons(self.dispatch_state, task_id, self.model.now)
            ]
            assert not any(isinstance(hold, LaneBehind) for hold in holds), (task_id, holds)

    @precondition(lambda self: self.model.in_state(*IN_FLIGHT))
    @rule(
        data=st.data(),
        status=st.sampled_from(
            [TaskStatus.DONE, TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.QUEUED]
        ),
        used=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
        pause=st.sampled_from([None, 10.0]),
    )
    def settle(
        self, data: st.DataObject, status: TaskStatus, used: float, pause: float | None
    ) -> None:
        task_id = data.draw(st.sampled_from(self.model.in_state(*IN_FLIGHT)))
        reserved = self.model.records[task_id].progress.reserved_tokens
        not_before = None if pause is None else self.model.now + pause
        changed = self.model.settle(
            task_id,
            status,
            tokens=int(used * reserved),
            not_before=not_before if status is TaskStatus.QUEUED else None,
        )
        self.show(changed)

    @precondition(lambda self: self.model.in_state(TaskStatus.QUEUED))
    @rule(data=st.data())
    def cancel_while_queued(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(self.model.in_state(TaskStatus.QUEUED)))
        self.show(self.model.end(task_id, TaskStatus.CANCELLED))

    @precondition(lambda self: not self.open_lines)
    @rule(node_id=st.sampled_from(["n1", "n2"]))
    def lose_a_node(self, node_id: str) -> None:
        lost = [node for node in self.nodes if node.startswith(node_id)]
        for node in lost:
            self.dispatch_state.in_flight.drop_node(node)
            for task_id in self.dispatch_state.in_flight.on_node(node):
                record = self.model.records[task_id]
                is_running = record.task.status is TaskStatus.RUNNING
                tokens = record.progress.reserved_tokens if is_running else 0
                self.show(self.model.settle(task_id, TaskStatus.QUEUED, tokens=tokens))
            places = self.nodes.pop(node)
            self.number += 1
            self.nodes[f"{node_id}-{self.number}"] = places
        for node, places in self.nodes.items():
            self.dispatch_state.in_flight.set_node(node, places)

    @precondition(lambda self: len(self.workers) < 4)
    @rule(agent_id=st.sampled_from(["a", "b", "made-1"]), places=st.integers(0, 2))
    def a_worker_connects(self, agent_id: str, places: int) -> None:
        self.number += 1
        self.set_worker(f"worker-{self.number}", agent_id, places)

    @precondition(lambda self: bool(self.workers))
    @rule(data=st.data(), places=st.integers(0, 3))
    def a_worker_offers_other_places(self, data: st.DataObject, places: int) -> None:
        node = data.draw(st.sampled_from(sorted(self.workers)))
        self.set_worker(node, self.workers[node][0], places)

    @precondition(lambda self: bool(self.workers) and not self.open_lines)
    @rule(data=st.data())
    def lose_a_worker(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[node]
        self.dispatch_state.workers.drop_node(node, self.model.now)
        for task_id in self.dispatch_state.in_flight.on_node(node):
            tokens = self.model.records[task_id].progress.reserved_tokens
            self.show(self.model.settle(task_id, TaskStatus.QUEUED, tokens=tokens))

    def set_worker(self, node: str, agent_id: str, places: int) -> None:
        self.workers[node] = (agent_id, places)
        self.dispatch_state.workers.set_node(node, places, agent_id=agent_id, now=self.model.now)

    def places_on(self, node: str) -> int:
        return self.workers[node][1] if node in self.workers else self.nodes[node]

    @rule(seconds=st.sampled_from([0.5, 9.0, 40.0, 61.0, 700.0]))
    def pass_time(self, seconds: float) -> None:
        self.model.pass_time(seconds)
        self.expire()

    def give_up(self, overdue: list[InFlightAttempt]) -> None:
        for attempt in overdue:
            assert (attempt.task.deadline or 9e99) + DEADLINE_GRACE_SECONDS <= self.model.now
            tokens = self.model.records[attempt.task.id].progress.reserved_tokens
            if attempt.task.id in self.model.in_state(*IN_FLIGHT):
                self.show(self.model.settle(attempt.task.id, TaskStatus.FAILED, tokens=tokens))

    def expire(self) -> None:
        """Let everything due happen, as every round does first."""
        planned = {line.task.id for line in self.open_lines}
        late = {
            task_id
            for task_id in self.model.in_state(TaskStatus.QUEUED)
            if (self.model.records[task_id].task.deadline or 9e99) <= self.model.now
        }
        due = self.dispatch_state.fall_due(self.model.now)
        assert set(due.expired) == late - planned
        for task_id in due.expired:
            if self.model.records[task_id].task.status is TaskStatus.QUEUED:
                self.show(self.model.end(task_id, TaskStatus.FAILED))
        for task_id in due.rejected:
            record = self.model.records[task_id]
            assert record.terms.on_exhausted is OnExhausted.REJECT
            if record.task.status is TaskStatus.QUEUED:
                self.show(self.model.end(task_id, TaskStatus.REJECTED))
        self.give_up(due.overdue)

    @rule(name=st.sampled_from(["t", "u"]), seconds=st.sampled_from([5.0, 50.0]))
    def pause_a_target(self, name: str, seconds: float) -> None:
        closure = GateClosure(kind="target", name=name, until=self.model.now + seconds)
        known = self.model.closures.get(closure.part)
        if known is None or (known.until or 0.0) < (closure.until or 0.0):
            self.model.closures[closure.part] = closure
        self.dispatch_state.close(closure, self.model.now)

    @rule(name=st.sampled_from(SLOTS), seconds=st.sampled_from([5.0, 50.0]))
    def pause_a_slot(self, name: str, seconds: float) -> None:
        closure = GateClosure(kind="slot", name=name, until=self.model.now + seconds)
        known = self.model.closures.get(closure.part)
        if known is None or (known.until or 0.0) < (closure.until or 0.0):
            self.model.closures[closure.part] = closure
        self.dispatch_state.close(closure, self.model.now)

    @rule(
        held=st.sets(st.sampled_from(SLOTS)),
        configured=st.integers(0, len(SLOTS)),
        percent=st.sampled_from([None, 0.0, 50.0]),
        seconds=st.sampled_from([None, -5.0, 5.0]),
    )
    def read_the_quotas(
        self, *, held: set[str], configured: int, percent: float | None, seconds: float | None
    ) -> None:
        until = None if seconds is None else self.model.now + seconds
        self.model.standings = tuple(
            SlotStanding(
                name=name,
                provider="p",
                closure=GateClosure(kind="slot", name=name, until=until) if name in held else None,
                percent_used=percent if name == "two" else 10.0,
            )
            for name in SLOTS[:configured]
        )
        self.dispatch_state.set_slots(self.model.standings)

    @precondition(lambda self: self.model.records)
    @rule(data=st.data())
    def see_an_old_record(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.model.records)))
        versions = self.model.versions[task_id]
        # A task that has ended is forgotten, and the store is asked before it could run again.
        if versions[-1].is_terminal:
            versions = [old for old in versions if old.task.status is not TaskStatus.QUEUED]
        before = picture(self.dispatch_state, self.model.now)
        self.dispatch_state.observe(data.draw(st.sampled_from(versions)), self.model.now)
        assert picture(self.dispatch_state, self.model.now) == before

    @invariant()
    def the_state_is_what_a_fresh_one_would_be(self) -> None:
        if not hasattr(self, "dispatch_state"):
            return
        fresh = self.model.fresh_state(
            self.settings, self.nodes, self.open_lines, workers=self.workers
        )
        # Counts of rates are not in the model, so what they closed is taken over.
        for agent_type, no_room in self.dispatch_state.limited.items():
            fresh.index.limit_agent_type(agent_type, no_room.until)
        now = self.model.now
        assert picture(self.dispatch_state, now) == picture(fresh, now)
        assert self.dispatch_state.tick == self.model.tick

    @invariant()
    def every_task_that_waits_has_a_reason_and_it_is_true(self) -> None:
        if not hasattr(self, "dispatch_state"):
            return
        for task_id in self.dispatch_state.waiting:
            found = reasons(self.dispatch_state, task_id, self.model.now)
            assert found
            for reason in found:
                assert reason.message
                assert self.is_true(reason.detail, task_id), (task_id, reason)

    def teardown(self) -> None:
        if not hasattr(self, "dispatch_state"):
            return
        for line in self.open_lines:
            self.answer(line, starts=True)
        for task_id in self.model.in_state(*IN_FLIGHT):
            self.show(self.model.settle(task_id, TaskStatus.DONE, tokens=0))
        for task_id in self.model.in_state(TaskStatus.QUEUED):
            self.show(self.model.end(task_id, TaskStatus.CANCELLED))
        self.model.pass_time(10_000)
        self.dispatch_state.fall_due(self.model.now)
        dispatch_state = self.dispatch_state
        assert (
            len(dispatch_state.waiting),
            len(dispatch_state.in_flight),
            len(dispatch_state.index),
        ) == (0, 0, 0)
        assert dispatch_state.next_at() is None
        assert (dispatch_state.parking.refusals, dispatch_state.closures.timed) == ({}, {})
        assert (dispatch_state.limited, dispatch_state.too_large, dispatch_state.hopeless) == (
            {},
            {},
            {},
        )
        assert not any(dispatch_state.in_flight.active.values())
        assert not any(dispatch_state.in_flight.reserved.values())

    def show(self, changed: list[TaskRecord]) -> None:
        for record in changed:
            self.dispatch_state.observe(record, self.model.now)

    def answer(self, line: Planned, *, starts: bool) -> None:
        applied = self.model.apply(line, starts=starts, planned_at=self.planned_at)
        if applied is True:
            return
        record = self.model.records[line.task.id]
        refused = None if applied is False else applied
        error = self.dispatch_state.refuse(line, record, refused, self.model.now)
        if error is not None:
            self.show(self.model.end(line.task.id, TaskStatus.REJECTED))

    def check_line(self, line: Planned) -> None:
        """A plan takes nothing that is not free, and nothing that may not start."""
        now, dispatch_state = self.model.now, self.dispatch_state
        record = self.model.records[line.task.id]
        assert record.task.status is TaskStatus.QUEUED
        assert line.attempt == record.progress.attempt + 1
        assert not record.progress.waiting_for
        assert (record.task.not_before or 0.0) <= now
        assert (record.task.deadline or 9e99) > now
        assert record.task.agent_id in (None, line.agent_id)
        assert ("target", record.task.target) not in self.model.closures
        self.check_slot(line)
        counts = Counter(attempt.agent_id for attempt in dispatch_state.in_flight)
        assert counts[line.agent_id] <= CAPACITY[line.agent_id]
        on_node = Counter(attempt.node_id for attempt in dispatch_state.in_flight)
        assert on_node[line.node_id] <= self.places_on(line.node_id)
        if record.task.target in PULL:
            assert self.workers[line.node_id][0] == line.agent_id
        else:
            assert line.node_id in self.nodes
        assert len(dispatch_state.in_flight) <= dispatch_state.settings.max_inflight
        assert dispatch_state.in_flight.active.get("y", 0) <= 2
        self.check_rates(line)

    def check_slot(self, line: Planned) -> None:
        """A task has the slot that it names, or one of its provider, and either is open."""
        slot = line.used_slot
        assert (slot is not None) == bool(line.task.slot or line.task.provider)
        assert line.slot is None or line.task.provider == "p"
        if slot is not None:
            assert not self.closes_slot(slot)
            assert line.slot is None or slot in {one.name for one in self.model.standings}

    def closes_slot(self, slot: str) -> bool:
        held = {one.name for one in self.model.standings if one.closure}
        return slot in held or ("slot", slot) in self.model.closures

    def check_rates(self, line: Planned) -> None:
        since = self.model.now - 60.0
        lately = [start for start in self.model.starts if start[0] > since]
        if line.task.target == "t":
            assert sum(task.target == "t" for _, task, _, _ in lately) < 3
        if line.agent_id == "a":
            used = sum(tokens for _, _, agent_id, tokens in lately if agent_id == "a")
            assert used + line.share_tokens <= 900

    def is_true(self, hold: Reason, task_id: str) -> bool:
        dispatch_state, now = self.dispatch_state, self.model.now
        record = self.model.records[task_id]
        match hold:
            case ParentsPending():
                is_true = hold.count == record.progress.waiting_for > 0
            case NotYetDue():
                is_true = hold.until == record.task.not_before and hold.until > now
            case GateClosed() | BudgetShort() | RateLimited():
                is_true = self.is_short(hold, task_id)
            case AgentFull():
                in_flight = self.in_flight_of(hold.agent_id)
                is_true = hold.inflight == CAPACITY[hold.agent_id] == in_flight
            case ProjectConcurrencyReached():
                is_true = (
                    hold.active == hold.limit == dispatch_state.in_flight.active[hold.project_id]
                )
            case NoWorker() | WorkersFull():
                is_true = self.lacks_a_worker(hold, record.task)
            case InflightCapReached():
                is_true = hold.inflight == len(dispatch_state.in_flight) and hold.limit == 5
            case NodesFull():
                is_true = dispatch_state.in_flight.free_capacity() == 0
            case _ if task_id in dispatch_state.hopeless:
                is_true = record.terms.on_exhausted is OnExhausted.REJECT
            case _:
                is_true = not isinstance(hold, LaneBehind) or task_id in dispatch_state.index
        return is_true

    def lacks_a_worker(self, hold: NoWorker | WorkersFull, task: Task) -> bool:
        assert task.target in PULL
        assert hold.agent_id == (task.agent_id or "")
        used = Counter(attempt.node_id for attempt in self.dispatch_state.in_flight)
        own = {
            node: places
            for node, (agent_id, places) in self.workers.items()
            if agent_id in ((task.agent_id,) if task.agent_id else ("a", "b"))
        }
        has_room = any(used[node] < places for node, places in own.items())
        if isinstance(hold, WorkersFull):
            return not has_room and hold.capacity == sum(own.values()) > 0
        return not sum(own.values()) or (task.agent_id is None and has_room)

    def is_short(self, hold: GateClosed | BudgetShort | RateLimited, task_id: str) -> bool:
        dispatch_state, now = self.dispatch_state, self.model.now
        if isinstance(hold, BudgetShort):
            refused = dispatch_state.parking.refusal_of(task_id)
            return refused is not None and refused.scope == hold.scope
        if isinstance(hold, RateLimited):
            return hold.until > now and hold.agent_type in dispatch_state.limited
        if hold.kind == "scope":
            return GatePart("scope", hold.name) in dispatch_state.parking.refusals
        if hold.kind == "slot":
            return self.closes_slot(hold.name)
        if hold.kind == "provider":
            own = [one.name for one in self.model.standings if one.provider == hold.name]
            return all(self.closes_slot(name) for name in own)
        return task_id in dispatch_state.too_large or (hold.until or 0.0) > now

    def in_flight_of(self, agent_id: str) -> int:
        stored = (self.model.records[task_id] for task_id in self.model.in_state(*IN_FLIGHT))
        planned = sum(line.agent_id == agent_id for line in self.open_lines)
        return planned + sum(record.agent_id == agent_id for record in stored)


def picture(dispatch_state: DispatchState, now: float) -> dict[str, object]:
    """Everything that the dispatch state believes, as plain values."""
    overdue = dispatch_state.workers.next_at()
    aside = {
        name
        for name in dispatch_state.waiting
        if dispatch_state.parking.refusal_of(name) is not None
    }
    offered = {task.id for task in dispatch_state.index} | aside | dispatch_state.too_large.keys()
    offered |= dispatch_state.hopeless.keys()
    return {
        "waiting": {name: (w.attempt, w.waiting_for) for name, w in dispatch_state.waiting.items()},
        "offered": offered,
        "in_flight": {
            attempt.task.id: (attempt.number, attempt.agent_id, attempt.node_id, attempt.tokens)
            for attempt in dispatch_state.in_flight
        },
        "active": {name: count for name, count in dispatch_state.in_flight.active.items() if count},
        "slots": dispatch_state.in_flight.by_slot,
        "reserved": {
            name: tokens for name, tokens in dispatch_state.in_flight.reserved.items() if tokens
        },
        "used": {name: tokens for name, tokens in dispatch_state.usage.tokens.items() if tokens},
        "free": dispatch_state.in_flight.free_capacity(),
        "workers": {
            name: free for name, free in dispatch_state.in_flight.free_by_agent().items() if free
        },
        "pulling": dispatch_state.index.agents.pulling,
        # One that was due and is still planned is due again soon, whenever it was due first.
        "overdue": None if overdue is None else max(overdue, now + AGAIN_SECONDS),
        "agents": {
            entry.agent.id: entry.inflight
            for entry in dispatch_state.index.agents
            if entry.inflight
        },
    }


TestDeskBesideAStore = StateBesideAStore.TestCase
TestDeskBesideAStore.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
