"""The engine: the way of a task in one place, for the API, the command line and Python.

It ties the store, the dispatcher, the runner and the node together, and starts and stops their
loops. What a client may ask of a running service is a method here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import structlog

from headgate.core.accounts import Limit
from headgate.core.admission import QueueLimits
from headgate.core.desk_settings import DeskSettings
from headgate.core.gates import GateClosure
from headgate.core.outcomes import DEFAULT_POLICY, RetryPolicy
from headgate.core.records import Submission, TaskRecord, Terms
from headgate.core.scopes import Scope
from headgate.core.tasks import Task, TaskStatus, check_move
from headgate.core.why import Reason, reasons
from headgate.errors import NotDispatchingError, StoreError, StoreUnavailableError
from headgate.executor import Executor
from headgate.ledger import Ledger
from headgate.runtime.dispatcher import Dispatcher
from headgate.runtime.node import NodeLife
from headgate.runtime.reaper import Reaper
from headgate.runtime.settlement_outbox import SettlementOutbox
from headgate.runtime.supervisor import Loop, Supervisor
from headgate.runtime.task_runner import TaskRunner
from headgate.store import (
    NewTask,
    Queued,
    TaskPage,
    TaskQuery,
    TaskStore,
    Totals,
    TurnedAway,
    UnknownParent,
)
from headgate.task_ids import TaskIds

log = structlog.get_logger("headgate.engine")

SWITCHED_OFF = "the scheduler is switched off; set scheduler.enabled = true"
CANCEL_SECONDS = 5.0
CANCEL_LOOK_SECONDS = 0.02

Submitted = Queued | TurnedAway | UnknownParent


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How this node takes part: what may wait, how it decides, how much it runs."""

    desk: DeskSettings
    is_enabled: bool = True
    limits: QueueLimits = QueueLimits()
    budgets: dict[Scope, Limit] = {}
    policy: RetryPolicy = DEFAULT_POLICY
    places: int = 20
    lease_seconds: float = 10.0
    tick_seconds: float = 5.0
    result_ttl_seconds: float = 300.0
    max_result_bytes: int = 1_048_576


class Why(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a task stands, and each rule that keeps it waiting."""

    task_id: str
    state: TaskStatus
    reasons: tuple[Reason, ...] = ()


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine does its work, and what is in the way."""

    is_ready: bool
    role: str
    problem: str = ""


class Engine:
    """A node of the service."""

    def __init__(
        self,
        store: TaskStore,
        executors: Mapping[str, Executor],
        settings: EngineSettings,
        *,
        ledger: Ledger | None = None,
        draws: random.Random | None = None,
        further_loops: Mapping[str, Loop] | None = None,
    ) -> None:
        self._further_loops = further_loops or {}
        self.store = store
        self.settings = settings
        self._executors = executors
        self._ledger = ledger
        self._ids = TaskIds()
        self._limits = settings.limits
        self.runner = TaskRunner(
            store,
            executors,
            changed=self._changed,
            policy=settings.policy,
            draws=draws,
            max_result_bytes=settings.max_result_bytes,
            ledger=ledger,
        )
        self.dispatcher = Dispatcher(
            store,
            settings.desk,
            start=self.runner.start,
            runs=self.runner.__contains__,
            tick_seconds=settings.tick_seconds,
            ledger=ledger,
        )
        self.node = NodeLife(
            store,
            self.runner,
            self.dispatcher,
            places=settings.places if settings.is_enabled else 0,
            lease_seconds=settings.lease_seconds,
        )
        self.reaper = Reaper(store, result_ttl_seconds=settings.result_ttl_seconds)
        self._supervisor = Supervisor()
        self._phase = "starting"

    def now(self) -> float:
        """Return the time by which tasks are judged."""
        return self.store.now()

    async def start(self) -> None:
        """Open everything, join, and start the loops."""
        for executor in self._executors.values():
            await executor.open()
        await self.store.open()
        if self._ledger is not None:
            await self._ledger.open()
        await self._set_budgets()
        await self.node.begin()
        for name, loop in self._loops().items():
            self._supervisor.start(name, loop)
        await self.dispatcher.loaded()
        self._phase = ""

    async def stop(self, *, drain_seconds: float) -> None:
        """Take no more work, let what runs finish, and leave; after that everything is closed."""
        self._phase = "draining"
        await self._quietly(self.node.end())
        await self.runner.drain(drain_seconds)
        await self._supervisor.stop()
        await self._quietly(self.node.leave())
        for executor in self._executors.values():
            await executor.close()
        if self._ledger is not None:
            await self._ledger.close()
        await self.store.close()

    def submit(self, task: Task, terms: Terms, submission: Submission) -> asyncio.Future[Submitted]:
        """Queue a task under a new id; the answer means that it is on disk."""
        if not self.settings.is_enabled:
            raise StoreUnavailableError(SWITCHED_OFF)
        task = msgspec.structs.replace(task, id=self._ids.new(self.store.now()))
        future = self.store.submit(
            NewTask(
                task=task,
                terms=terms,
                submission=submission,
                limits=self._limits,
                node_id=self.node.node_id,
            )
        )
        # Not by whoever awaits the answer: a client that hangs up must not hide its task.
        future.add_done_callback(partial(self._submitted, task.id))
        return future

    async def cancel(self, task_id: str) -> TaskRecord | None:
        """Cancel a task; None if there is none, an error if it had ended.

        A task that runs ends when its executor has stopped; that is waited for, within bounds.
        """
        try:
            answer = await self.store.cancel(task_id, node_id=self.node.node_id)
        except (StoreUnavailableError, asyncio.CancelledError):
            self.dispatcher.doubt(task_id)
            raise
        if answer is None:
            return None
        record = answer.records[0]
        if answer.had_ended:
            check_move(task_id, record.task.status, TaskStatus.CANCELLED)
        self.dispatcher.see(answer.records)
        if record.is_terminal:
            return record
        if record.progress.node_id == self.node.node_id:
            self.runner.cancel(task_id, attempt=record.progress.attempt)
        return await self._wait_for_end(record)

    async def get(self, task_id: str) -> TaskRecord | None:
        """Return a task with all that is known of it."""
        return await self.store.get(task_id)

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks, newest first, as many as fit on one page."""
        return await self.store.find(query)

    async def totals(self) -> Totals:
        """Count what waits, what runs and what has happened."""
        return await self.store.totals()

    async def why(self, task_id: str) -> Why | None:
        """Say why a task waits; None if there is no such task."""
        record = await self.store.get(task_id)
        if record is None:
            return None
        status = record.task.status
        if status is not TaskStatus.QUEUED:
            return Why(task_id=task_id, state=status)
        desk = self.dispatcher.desk
        if desk is None and self.dispatcher.is_leading:
            problem = self.dispatcher.problem or "the tasks are still being read; try again"
            raise StoreUnavailableError(problem)
        if desk is None:
            raise NotDispatchingError(self.node.leader_address)
        return Why(task_id=task_id, state=status, reasons=reasons(desk, task_id, self.store.now()))

    def health(self) -> Health:
        """Say whether the engine does its work."""
        off = "" if self.settings.is_enabled else SWITCHED_OFF
        problem = self._phase or off or self.dispatcher.problem or self.node.problem
        role = "dispatcher" if self.dispatcher.is_leading else "worker"
        is_loaded = not self.dispatcher.is_leading or self.dispatcher.desk is not None
        return Health(is_ready=not problem and is_loaded, role=role, problem=problem)

    def _loops(self) -> dict[str, Loop]:
        loops: dict[str, Loop] = {
            "node": self.node.run,
            "dispatcher": self.dispatcher.run,
            "reaper": self.reaper.run,
        }
        if self._ledger is not None:
            loops["outbox"] = SettlementOutbox(self.store, self._ledger).run
        return loops | dict(self._further_loops)

    async def _set_budgets(self) -> None:
        budgets = self.settings.budgets
        left_out = await self.store.set_limits(budgets)
        if self._ledger is None:
            return
        for scope in left_out:
            await self._ledger.set_limit(scope, Limit())
        for scope, limit in budgets.items():
            await self._ledger.set_limit(scope, limit)

    def _submitted(self, task_id: str, future: asyncio.Future[Submitted]) -> None:
        if future.cancelled() or future.exception() is not None:
            # It may be on disk all the same.
            self.dispatcher.doubt(task_id)
            return
        answer = future.result()
        if isinstance(answer, Queued):
            self.dispatcher.see((answer.record,))

    def _changed(self, records: Iterable[TaskRecord], closure: GateClosure | None) -> None:
        self.dispatcher.see(records, closure)

    async def _wait_for_end(self, record: TaskRecord) -> TaskRecord:
        task_id, latest = record.task.id, record
        looks = int(CANCEL_SECONDS / CANCEL_LOOK_SECONDS)
        for _ in range(looks):
            found = await self.store.get(task_id)
            if found is None:
                return latest
            latest = found
            if latest.is_terminal:
                return latest
            await asyncio.sleep(CANCEL_LOOK_SECONDS)
        return latest

    async def _quietly(self, step: Coroutine[Any, Any, None]) -> None:
        """Take a step of leaving; a store that cannot be asked then finds out by the lease."""
        try:
            await step
        except StoreError as error:
            log.warning("left without telling the store", problem=str(error))
