"""An engine in memory, for tests of the API: it admits and remembers, and runs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from headgate.core.admission import Admitted, QueueLimits, Rejected, admit
from headgate.core.dispatch_state import DispatchSettings
from headgate.core.idempotency import (
    InvalidEntry,
    KeyRefusal,
    SubmitEntry,
    SubmitKey,
    is_kept,
    to_try_again,
)
from headgate.core.reasons import GlobalBudgetExhausted
from headgate.core.retention import RetentionCut, cut_of
from headgate.core.task import (
    TERMINAL,
    Progress,
    Submission,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
    check_move,
)
from headgate.core.why import TaskReason
from headgate.engine.engine import Engine, EngineSettings, Why
from headgate.engine.events import EventFeed
from headgate.engine.supervisor import Health
from headgate.storage.audit import AuditEntry
from headgate.storage.memory import MemoryTaskStore
from headgate.storage.store import (
    KeyedAnswer,
    LaneCount,
    Queued,
    TaskPage,
    TaskQuery,
    Totals,
    TurnedAway,
    UnknownParent,
)
from headgate.storage.submit import entry_of
from headgate.storage.task_ids import TaskIds
from headgate.storage.tokens import UNBOUND, Bounds

Outcome = Queued | TurnedAway | UnknownParent


def health(
    *,
    is_ready: bool = True,
    role: str = "dispatcher",
    problem: str = "",
    shortage: str = "",
    parts: dict[str, str] | None = None,
) -> Health:
    """Return how a node is; it is well unless the test says otherwise."""
    well = {"store": "ok", "ledger": "ok", "dispatcher": "ok", "descriptors": "ok"}
    return Health(
        is_ready=is_ready, role=role, problem=problem, shortage=shortage, parts=parts or well
    )


class FakeEngine(Engine):
    """Answers at once; `failure`, if set, is raised by everything that needs a store."""

    def __init__(self, *, limits: QueueLimits | None = None, now: float = 1_800_000_000.0) -> None:
        super().__init__(
            MemoryTaskStore(), {}, EngineSettings(dispatch=DispatchSettings(projects=()))
        )
        self.asked_budgets = 0
        self.limits = limits or QueueLimits()
        self.time = now
        self.cuts: list[RetentionCut] = []
        self.records: dict[str, TaskRecord] = {}
        self.failure: Exception | None = None
        self.refusal: Rejected | None = None
        self.failing_actions: dict[str, Exception] = {}
        self.state = health()
        self.cancel_takes_effect = True
        self.most_under_way = 0
        self.keyed: dict[tuple[str, str], tuple[str, tuple[SubmitEntry, ...]]] = {}
        self.keys_are_full = False
        self.asked_for = UNBOUND
        self.questions = 0
        self._under_way = 0
        self._ids = TaskIds()
        self.feed = EventFeed(self.now)
        self.feed.open(1)
        self.opened.set()

    def events(self) -> EventFeed:
        self._check()
        return self.feed

    def now(self) -> float:
        return self.time

    def submit(self, task: Task, terms: Terms, submission: Submission) -> asyncio.Future[Outcome]:
        self._check()
        if submission.action in self.failing_actions:
            raise self.failing_actions[submission.action]
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        asyncio.get_running_loop().call_soon(self._set_answer, future, task, terms, submission)
        return future

    def _set_answer(
        self, future: asyncio.Future[Outcome], task: Task, terms: Terms, submission: Submission
    ) -> None:
        self._under_way -= 1
        future.set_result(self._store(task, terms, submission))

    def submit_keyed(
        self, key: SubmitKey, drafts: Sequence[tuple[Task, Terms, Submission] | InvalidEntry]
    ) -> asyncio.Future[KeyedAnswer | KeyRefusal]:
        return asyncio.ensure_future(self._submit_keyed(key, drafts))

    async def _submit_keyed(
        self, key: SubmitKey, drafts: Sequence[tuple[Task, Terms, Submission] | InvalidEntry]
    ) -> KeyedAnswer | KeyRefusal:
        self._check()
        digest, entries = self.keyed.get((key.owner, key.name), ("", ()))
        if digest and digest != key.digest:
            return KeyRefusal.MISMATCH
        if not digest and self.keys_are_full:
            return KeyRefusal.FULL
        places = to_try_again(entries, drafts) if digest else range(len(drafts))
        if not places:
            return KeyedAnswer(entries=entries)
        found = dict(enumerate(entries))
        for place in places:
            one = drafts[place]
            found[place] = entry_of(one if isinstance(one, InvalidEntry) else self._store(*one))
        entries = tuple([found[place] for place in range(len(drafts))])
        if is_kept(entries):
            self.keyed[key.owner, key.name] = (key.digest, entries)
        return KeyedAnswer(entries=entries, is_replay=False)

    def _store(self, task: Task, terms: Terms, submission: Submission) -> Outcome:
        for parent_id in terms.depends_on:
            if parent_id not in self.records:
                return UnknownParent(parent_id=parent_id)
        task = msgspec.structs.replace(task, id=self._ids.new(self.time))
        if self.refusal is not None:
            record = TaskRecord(task=task, terms=terms, submission=submission)
            return TurnedAway(record=record, rejected=self.refusal)
        admission = admit(
            self.limits,
            queued=len(self._waiting()),
            queued_for_project=sum(
                record.task.project_id == task.project_id for record in self._waiting()
            ),
            queued_for_agent=len(self._waiting(task.agent_id)),
            project_id=task.project_id,
            agent_id=task.agent_id,
        )
        if isinstance(admission, Admitted):
            record = TaskRecord(task=task, terms=terms, submission=submission)
            self.records[task.id] = record
            return Queued(record=record, position=admission.position)
        task = msgspec.structs.replace(task, status=TaskStatus.REJECTED)
        error = admission.message
        record = TaskRecord(task=task, terms=terms, submission=submission, error=error)
        self.records[task.id] = record
        return TurnedAway(record=record, rejected=admission)

    def _waiting(self, agent_id: str | None = None) -> list[TaskRecord]:
        return [
            record
            for record in self.records.values()
            if record.task.status is TaskStatus.QUEUED
            and (agent_id is None or record.task.agent_id == agent_id)
        ]

    def set_state(self, task_id: str, status: TaskStatus, **changes: object) -> None:
        """Move a task as the test wants it."""
        record = self.records[task_id]
        task = msgspec.structs.replace(record.task, status=status)
        self.records[task_id] = msgspec.structs.replace(record, task=task, **changes)

    def ask_budgets(self) -> None:
        """Note that what waits for budgets is asked for again."""
        self.asked_budgets += 1

    async def cancel(self, task_id: str, entry: AuditEntry | None = None) -> TaskRecord | None:  # noqa: ARG002
        self._check()
        record = self.records.get(task_id)
        if record is None:
            return None
        check_move(task_id, record.task.status, TaskStatus.CANCELLED)
        if self.cancel_takes_effect:
            self.set_state(task_id, TaskStatus.CANCELLED, progress=Progress(completed_at=self.time))
        return self.records[task_id]

    async def get(self, task_id: str) -> TaskRecord | None:
        self._check()
        return self.records.get(task_id)

    async def deleted_by(self, task_id: str) -> RetentionCut | None:
        self._check()
        return cut_of(task_id, self.cuts)

    async def find(self, query: TaskQuery) -> TaskPage:
        self._check()
        found = [
            record
            for task_id, record in sorted(self.records.items(), reverse=True)
            if query.agent_id in (None, record.task.agent_id)
            and query.project_id in (None, record.task.project_id)
            and (not query.states or record.task.status in query.states)
            and (query.before is None or task_id < query.before)
        ]
        page = tuple(found[: query.limit])
        return TaskPage(
            records=page, next_before=page[-1].task.id if len(found) > len(page) else None
        )

    async def totals(self) -> Totals:
        self._check()
        lanes = [
            LaneCount(
                project_id=record.task.project_id,
                agent_id=record.task.agent_id or "",
                queued=int(record.task.status is TaskStatus.QUEUED),
                inflight=int(record.task.status is TaskStatus.RUNNING),
                submitted=1,
                served_tick=0,
            )
            for record in self.records.values()
            if record.task.status not in TERMINAL
        ]
        submitted = len(self.records)
        return Totals(lanes=tuple(lanes), submitted=submitted, started=3, wait_ms=10)

    async def within(self, task_ids: Sequence[str], bounds: Bounds) -> frozenset[str]:
        self._check()
        self.questions += 1
        found = [self.records[one] for one in task_ids if one in self.records]
        return frozenset(
            one.task.id
            for one in found
            if bounds.has(
                agent_id=one.agent_id or one.task.agent_id, project_id=one.task.project_id
            )
        )

    async def why(self, task_id: str, bounds: Bounds = UNBOUND) -> Why | None:
        self._check()
        self.asked_for = bounds
        record = self.records.get(task_id)
        if record is None:
            return None
        reason = GlobalBudgetExhausted(used=5, limit=5)
        return Why(
            task_id=task_id,
            state=record.task.status,
            reasons=(TaskReason(detail=reason, message="the budget is used up"),),
        )

    def health(self) -> Health:
        return self.state

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
