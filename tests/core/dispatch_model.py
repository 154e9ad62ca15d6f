"""A store in miniature, to test a dispatch state beside: plain records, and no structure.

It keeps what a task store would, answers plans as one would, and says what changed as records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headgate.core.budgets.ledger import Refused, Unit
from headgate.core.budgets.scopes import Scope, ancestors
from headgate.core.dispatch_state import DispatchSettings, DispatchState, Planned
from headgate.core.fair_share import UsageRow, hour_of
from headgate.core.gates import GateClosure, GatePart
from headgate.core.rate_limits import RateLimit
from headgate.core.slots.slot import SlotStanding
from headgate.core.snapshot import Agent, Project
from headgate.core.task import Progress, Task, TaskRecord, TaskStatus, Terms

START = 1_767_225_600.0
WINDOW_SECONDS = 600
IN_FLIGHT = (TaskStatus.ASSIGNED, TaskStatus.RUNNING)


class Purse:
    """A scope with a limit in tokens, and a window that empties it now and then."""

    def __init__(self, limit: int, *, has_window: bool) -> None:
        self.limit = limit
        self.has_window = has_window
        self.spent = 0
        self.reserved = 0

    def refusal(self, scope: str, tokens: int, now: float) -> Refused | None:
        """Return why the purse cannot hold so many tokens more, None if it can."""
        if self.spent + self.reserved + tokens <= self.limit:
            return None
        resets_at = None
        if self.has_window:
            resets_at = (int(now) // WINDOW_SECONDS + 1) * WINDOW_SECONDS
        may_clear = resets_at is not None or self.spent + tokens <= self.limit
        return Refused(
            scope=Scope(scope),
            unit=Unit.TOKENS,
            limit=self.limit,
            spent=self.spent,
            reserved=self.reserved,
            overrun=0,
            requested=tokens,
            resets_at=resets_at,
            may_clear=tokens <= self.limit and may_clear,
        )


def settings(**fields: Any) -> DispatchSettings:
    """Return settings of two projects and three agents, unless a test says otherwise."""
    values: dict[str, Any] = {
        "projects": (
            Project(id="x", max_concurrent_agents=None),
            Project(id="y", credit_weight=2.0, max_concurrent_agents=2),
        ),
        "agents": (Agent(id="a", agent_type="claude", capacity=2), Agent(id="b")),
        "max_inflight": 5,
        "max_per_agent_inflight": 1,
        "default_tokens": 100,
    }
    return DispatchSettings(**(values | fields))


def queued(task_id: str = "t1", **fields: Any) -> TaskRecord:
    """Return the record of a task that waits; fields of terms and progress are told apart."""
    terms = {name: fields.pop(name) for name in Terms.__struct_fields__ if name in fields}
    progress = {name: fields.pop(name) for name in ("attempt", "waiting_for") if name in fields}
    fields.setdefault("project_id", "x")
    return TaskRecord(
        task=Task(id=task_id, **fields),
        terms=Terms(**terms),
        progress=Progress(**progress),
        agent_id=fields.get("agent_id"),
    )


def state_of(
    *records: TaskRecord, places: int = 10, now: float = START, **fields: Any
) -> DispatchState:
    """Return a dispatch state that has seen these records, with one node."""
    dispatch_state = DispatchState(settings(**fields))
    dispatch_state.in_flight.set_node("n1", places)
    for record in records:
        dispatch_state.observe(record, now)
    return dispatch_state


def taken(record: TaskRecord, line: Planned, *, starts: bool = True) -> TaskRecord:
    """Return a task after its line was applied."""
    status = TaskStatus.RUNNING if starts else TaskStatus.ASSIGNED
    progress = msgspec.structs.replace(
        record.progress,
        attempt=line.attempt,
        node_id=line.node_id,
        reserved_tokens=line.share_tokens,
        share_tokens=line.share_tokens,
        reserved_micro_usd=line.hold.micro_usd.amount,
        slot=line.slot,
    )
    return msgspec.structs.replace(
        record,
        task=msgspec.structs.replace(record.task, status=status),
        progress=progress,
        agent_id=line.agent_id,
    )


def ended(
    record: TaskRecord, status: TaskStatus, *, tokens: int = 0, not_before: float | None = None
) -> TaskRecord:
    """Return a task whose attempt is over, or that ended without one."""
    was_in_flight = record.task.status in IN_FLIGHT
    return msgspec.structs.replace(
        record,
        task=msgspec.structs.replace(
            record.task, status=status, not_before=not_before or record.task.not_before
        ),
        progress=msgspec.structs.replace(
            record.progress,
            node_id=None,
            share_tokens=tokens if was_in_flight else record.progress.share_tokens,
            reported_tokens=tokens if was_in_flight else record.progress.reported_tokens,
        ),
        agent_id=record.task.agent_id,
        tokens=tokens if was_in_flight else record.tokens,
        micro_usd=0,
    )


class StoreModel:
    """All records with every version they had, the budgets, the closures and the counts."""

    def __init__(self, purses: dict[str, Purse], limits: tuple[RateLimit, ...] = ()) -> None:
        self.now = START
        self.records: dict[str, TaskRecord] = {}
        self.versions: dict[str, list[TaskRecord]] = {}
        self.purses = purses
        self.limits = limits
        self.closures: dict[GatePart, GateClosure] = {}
        self.standings: tuple[SlotStanding, ...] = ()
        self.usage: dict[tuple[str, int], int] = {}
        self.starts: list[tuple[float, Task, str, int]] = []
        self.tick = 0

    def write(self, record: TaskRecord) -> TaskRecord:
        """Keep a new version of a task."""
        self.records[record.task.id] = record
        self.versions.setdefault(record.task.id, []).append(record)
        return record

    def in_state(self, *statuses: TaskStatus) -> list[str]:
        """Return the tasks in one of these states."""
        return sorted(
            name for name, record in self.records.items() if record.task.status in statuses
        )

    def apply(
        self, line: Planned, *, starts: bool, planned_at: float | None = None
    ) -> Refused | bool:
        """Apply a line of a plan; a refusal says which budget was short, False that it is old.

        A start counts against the rates from the moment when it was planned.
        """
        record = self.records[line.task.id]
        is_queued = record.task.status is TaskStatus.QUEUED
        if not is_queued or record.progress.attempt != line.attempt - 1:
            return False
        for scope in self._purses_of(record.task):
            refused = self.purses[scope].refusal(scope, line.share_tokens, self.now)
            if refused is not None:
                return refused
        for scope in self._purses_of(record.task):
            self.purses[scope].reserved += line.share_tokens
        self.write(taken(record, line, starts=starts))
        counted_at = self.now if planned_at is None else planned_at
        self.starts.append((counted_at, record.task, line.agent_id, line.share_tokens))
        return True

    def settle(
        self, task_id: str, status: TaskStatus, *, tokens: int, not_before: float | None = None
    ) -> list[TaskRecord]:
        """End an attempt, and return everything that this changed."""
        record = self.records[task_id]
        for scope in self._purses_of(record.task):
            self.purses[scope].reserved -= record.progress.reserved_tokens
            self.purses[scope].spent += tokens
        self.tick += 1
        key = (record.task.project_id, hour_of(self.now))
        self.usage[key] = self.usage.get(key, 0) + tokens
        return self.end(task_id, status, tokens=tokens, not_before=not_before)

    def end(
        self,
        task_id: str,
        status: TaskStatus,
        *,
        tokens: int = 0,
        not_before: float | None = None,
    ) -> list[TaskRecord]:
        """Write how a task goes on, and hand its end on to those that wait for it."""
        record = ended(self.records[task_id], status, tokens=tokens, not_before=not_before)
        changed = [self.write(record)]
        for child in self.in_state(TaskStatus.QUEUED) if record.is_terminal else []:
            depends_on = self.records[child].terms.depends_on
            if task_id in depends_on and status is TaskStatus.DONE:
                changed.append(self._release(child))
            elif task_id in depends_on:
                changed += self.end(child, TaskStatus.FAILED)
        return changed

    def pass_time(self, seconds: float) -> None:
        """Let time pass; windows that end on the way empty their purses."""
        before, self.now = int(self.now) // WINDOW_SECONDS, self.now + seconds
        if int(self.now) // WINDOW_SECONDS != before:
            for purse in self.purses.values():
                purse.spent = 0 if purse.has_window else purse.spent
        self.closures = {
            part: closure
            for part, closure in self.closures.items()
            if (closure.until or 0.0) > self.now
        }

    def fresh_state(
        self,
        dispatch_settings: DispatchSettings,
        nodes: dict[str, int],
        lines: Iterable[Planned] = (),
        *,
        workers: Mapping[str, tuple[str, int]] | None = None,
    ) -> DispatchState:
        """Return a dispatch state from what is kept here, which takes these lines as applied."""
        dispatch_state = DispatchState(dispatch_settings)
        rows = [
            UsageRow(project_id=name, hour=hour, tokens=tokens)
            for (name, hour), tokens in self.usage.items()
        ]
        live = {name: record for name, record in self.records.items() if not record.is_terminal}
        for line in lines:
            if line.task.id in live:
                live[line.task.id] = taken(live[line.task.id], line)
        dispatch_state.load(
            live.values(),
            usage=rows,
            rate_counts=(),
            closures=self.closures.values(),
            lane_served={},
            tick=self.tick,
            now=self.now,
        )
        dispatch_state.set_slots(self.standings)
        for node_id, places in nodes.items():
            dispatch_state.in_flight.set_node(node_id, places)
        for node_id, (agent_id, places) in (workers or {}).items():
            dispatch_state.workers.set_node(node_id, places, agent_id=agent_id, now=self.now)
        return dispatch_state

    def _purses_of(self, task: Task) -> list[str]:
        reached = {part for scope in task.scopes for part in ancestors(Scope(scope))}
        return sorted(reached & self.purses.keys())

    def _release(self, task_id: str) -> TaskRecord:
        record = self.records[task_id]
        left = record.progress.waiting_for - 1
        progress = msgspec.structs.replace(record.progress, waiting_for=left)
        return self.write(msgspec.structs.replace(record, progress=progress))
