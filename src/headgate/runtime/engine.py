"""The engine: the way of a task in one place, for the API, the command line and Python.

It ties the store, the dispatcher, the runner and the node together, and starts and stops their
loops. What a client may ask of a running service is a method here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog

from headgate.core.budgets.accounts import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch.desk_settings import DeskSettings
from headgate.core.dispatch.flights import InFlight
from headgate.core.gates import GateClosure
from headgate.core.tasks.admission import QueueLimits
from headgate.core.tasks.outcomes import DEFAULT_POLICY, RetryPolicy
from headgate.core.tasks.records import Submission, TaskRecord, Terms
from headgate.core.tasks.submit_keys import InvalidEntry, KeyRefusal, SubmitKey
from headgate.core.tasks.task import Task, TaskStatus, check_move
from headgate.core.why import reasons
from headgate.errors import (
    NotDispatchingError,
    NotTakingWorkError,
    StoreError,
    StoreUnavailableError,
)
from headgate.executor import Executor
from headgate.ledger import Ledger
from headgate.runtime.dispatcher import Dispatcher
from headgate.runtime.health import Health, judge
from headgate.runtime.ledger_watch import WatchedLedger
from headgate.runtime.looking import finding
from headgate.runtime.looking.history import History
from headgate.runtime.looking.outlook import Outlook
from headgate.runtime.looking.waiting import wait_for_end
from headgate.runtime.looking.why import Why, why_of
from headgate.runtime.node import NodeLife
from headgate.runtime.pull_workers import PullWorkers
from headgate.runtime.reaper import Reaper
from headgate.runtime.retired_executors import RetiredExecutors
from headgate.runtime.settlement_outbox import SettlementOutbox
from headgate.runtime.submits import Submits, Submitted
from headgate.runtime.supervisor import Loop, Supervisor
from headgate.runtime.task_runner import TaskRunner
from headgate.runtime.telling.event_feed import EventFeed
from headgate.store import KeyedAnswer, KeyedSubmit, NewTask, Queued, TaskStore, Totals, TurnedAway
from headgate.task_ids import TaskIds
from headgate.task_query import TaskPage, TaskQuery
from headgate.tokens import UNBOUND, Bounds

log = structlog.get_logger("headgate.engine")

SWITCHED_OFF = "the scheduler is switched off; set scheduler.enabled = true"

Preparation = Callable[[], Awaitable[None]]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How this node takes part: what may wait, how it decides, how much it runs."""

    desk: DeskSettings
    is_enabled: bool = True
    limits: QueueLimits = QueueLimits()
    budgets: dict[Scope, Limit] = {}
    policy: RetryPolicy = DEFAULT_POLICY
    places: int = 20
    lease_seconds: float = 10.0
    worker_lease_seconds: float = 30.0
    tick_seconds: float = 5.0
    result_ttl_seconds: float = 300.0
    max_result_bytes: int = 1_048_576


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
        self.told: Callable[[Iterable[TaskRecord]], None] = lambda _records: None
        self.slot_paused: Callable[[str], None] = lambda _slot: None
        self._further_loops = further_loops or {}
        self.store, self.settings, self.executors = store, settings, executors
        self.ledger = ledger = None if ledger is None else WatchedLedger(ledger)
        self._outbox = None if ledger is None else SettlementOutbox(store, ledger)
        self._ids = TaskIds()
        self.feed = EventFeed(store.now)
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
            feed=self.feed,
        )
        self.outlook, self.history = _overseen(self.dispatcher, self.feed)
        self._submits = Submits(store, self.dispatcher, show=self._show)
        self.workers = PullWorkers(
            store,
            self.runner.settlements,
            lease_seconds=settings.worker_lease_seconds,
            node_id=lambda: self.node.node_id,
            changed=self._changed,
            hear=self.dispatcher.hear,
            doubt=self.dispatcher.doubt,
            ledger=ledger,
        )
        self.dispatcher.call_worker = self.workers.call
        self.node = NodeLife(
            store,
            self.runner,
            self.dispatcher,
            places=settings.places if settings.is_enabled else 0,
            lease_seconds=settings.lease_seconds,
        )
        self.reaper = Reaper(store, result_ttl_seconds=settings.result_ttl_seconds)
        self._supervisor, self.retired = Supervisor(), RetiredExecutors()
        self._preparations: list[Preparation] = []
        self._phase = "starting"

    def now(self) -> float:
        """Return the time by which tasks are judged."""
        return self.store.now()

    async def start(self) -> None:
        """Open everything, join, and start the loops."""
        for executor in self.executors.values():
            await executor.open()
        await self.store.open()
        if self.ledger is not None:
            await self.ledger.open()
        for prepare in self._preparations:
            await prepare()
        await self._set_budgets()
        await self.node.begin()
        for name, loop in self._loops().items():
            self._supervisor.start(name, loop)
        await self.dispatcher.loaded()
        self._phase = ""

    def also_run(self, name: str, loop: Loop) -> None:
        """Run one more loop while the engine does."""
        self._further_loops = {**self._further_loops, name: loop}

    def before_start(self, prepare: Preparation) -> None:
        """Have something done when the store is open, before anything is decided."""
        self._preparations.append(prepare)

    async def stop(self, *, drain_seconds: float) -> None:
        """Take no more work, let what runs finish, and leave; after that everything is closed."""
        await self.drain(drain_seconds=drain_seconds)
        await self.close()

    async def drain(self, *, drain_seconds: float, settle_seconds: float = 0.0) -> None:
        """Take no more work, let what runs finish, and have a ledger outside told of it.

        Where that is away it is waited for so long; `hurry` ends the wait.
        """
        self._phase = "draining"
        self.workers.close()
        await self._quietly(self.node.end())
        await self.runner.drain(drain_seconds)
        await self._supervisor.stop()
        if self._outbox is not None:
            await self._outbox.finish(patience_seconds=settle_seconds)

    async def close(self) -> None:
        """Leave, and close everything; `drain` comes first."""
        await self._quietly(self.node.leave())
        await self.retired.close()
        for executor in self.executors.values():
            await executor.close()
        if self.ledger is not None:
            await self.ledger.close()
        await self.store.close()

    def submit(self, task: Task, terms: Terms, submission: Submission) -> asyncio.Future[Submitted]:
        """Queue a task under a new id; the answer means that it is on disk."""
        return self._submits.send(self._new_task(task, terms, submission))

    def submit_if_room(
        self, task: Task, terms: Terms, submission: Submission
    ) -> asyncio.Future[Submitted]:
        """Queue a task, or leave no trace of it where there is no room."""
        new = self._new_task(task, terms, submission)
        return self._submits.send(msgspec.structs.replace(new, keeps_refusal=False))

    def submit_keyed(
        self, key: SubmitKey, drafts: Sequence[tuple[Task, Terms, Submission] | InvalidEntry]
    ) -> asyncio.Future[KeyedAnswer | KeyRefusal]:
        """Queue the tasks of a request once, or return what became of them the first time."""
        tasks = [one if isinstance(one, InvalidEntry) else self._new_task(*one) for one in drafts]
        return self._submits.send_keyed(KeyedSubmit(key=key, tasks=tuple(tasks)))

    def _new_task(self, task: Task, terms: Terms, submission: Submission) -> NewTask:
        if not self.settings.is_enabled:
            raise NotTakingWorkError(SWITCHED_OFF)
        return NewTask(
            task=task if task.id else msgspec.structs.replace(task, id=self.new_id()),
            terms=terms,
            submission=submission,
            limits=self.settings.limits,
            node_id=self.node.node_id,
        )

    def new_id(self) -> str:
        """Return an id for a task that is to be submitted under it, once or more than once."""
        return self._ids.new(self.store.now())

    async def cancel(self, task_id: str) -> TaskRecord | None:
        """Cancel a task; None if there is none, an error if it had ended.

        A task that runs ends when its executor has stopped; that is waited for, within bounds.
        """
        record = await self.cancel_soon(task_id)
        if record is None or record.is_terminal:
            return record
        return await wait_for_end(self.store, record)

    async def cancel_soon(self, task_id: str) -> TaskRecord | None:
        """Cancel a task without waiting for one that runs to stop; None if there is none."""
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
        self.told(answer.records)
        if record.is_terminal:
            return record
        if record.progress.node_id == self.node.node_id:
            self.runner.cancel(task_id, attempt=record.progress.attempt)
        self.workers.call(record.progress.node_id or "")
        return record

    async def get(self, task_id: str) -> TaskRecord | None:
        """Return a task with all that is known of it."""
        return await self.store.get(task_id)

    async def within(self, task_ids: Sequence[str], bounds: Bounds) -> frozenset[str]:
        """Return which of these tasks are there and within the bounds."""
        owner = TaskQuery(agent_id=bounds.agent_id, project_id=bounds.project_id)
        return await self.store.among(task_ids, owner)

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks in the order of the query, as many as fit on one page."""
        return await finding.find(self.store, query, self.dispatcher.desk)

    async def totals(self) -> Totals:
        """Count what waits, what runs and what has happened."""
        return await self.store.totals()

    async def carry_settlements(self) -> None:
        """Tell a ledger outside the store at once what has been settled, for an exact answer."""
        if self._outbox is not None:
            await self._outbox.run_once()

    async def unbooked_micro_usd(self) -> int:
        """Return how much of what was settled a ledger outside the store has not been told."""
        return 0 if self._outbox is None else await self._outbox.left_micro_usd()

    def hurry(self) -> None:
        """Wait no longer for a ledger that is away."""
        if self._outbox is not None:
            self._outbox.hurry()

    async def why(self, task_id: str, bounds: Bounds = UNBOUND) -> Why | None:
        """Say why a task waits; None if there is no such task. Only what is within is named."""
        record = await self.store.get(task_id)
        if record is None:
            return None
        if record.task.status is not TaskStatus.QUEUED:
            return why_of(record, self.dispatcher.standings)
        desk = self.dispatcher.desk
        if desk is None and self.dispatcher.is_leading:
            problem = self.dispatcher.problem or "the tasks are still being read; try again"
            raise StoreUnavailableError(problem)
        if desk is None:
            raise NotDispatchingError(self.node.leader_address)
        found = reasons(desk, task_id, self.store.now(), partial(_is_within, bounds))
        return why_of(record, self.dispatcher.standings, found)

    def events(self) -> EventFeed:
        """Return what happens to tasks; `NotDispatchingError` where this node does not see it."""
        if not self.feed.is_open:
            raise NotDispatchingError(self.node.leader_address)
        return self.feed

    def health(self) -> Health:
        """Say whether the engine does its work."""
        off = "" if self.settings.is_enabled else SWITCHED_OFF
        return judge(
            phase=self._phase or off,
            is_leading=self.dispatcher.is_leading,
            is_loaded=self.dispatcher.desk is not None,
            knows_leader=self.node.leader_id not in ("", self.node.node_id),
            has_fault=self.dispatcher.has_fault,
            store_problem=self.node.problem,
            dispatcher_problem=self.dispatcher.problem,
            ledger_problem="" if self.ledger is None else self.ledger.problem,
        )

    def _loops(self) -> dict[str, Loop]:
        loops: dict[str, Loop] = {
            "node": self.node.run,
            "dispatcher": self.dispatcher.run,
            "reaper": self.reaper.run,
            "history": self.history.run,
        }
        if self.ledger is not None:
            loops["ledger"] = self.ledger.run
        if self._outbox is not None:
            self._outbox.has_told = self._ask_budgets
            loops["outbox"] = self._outbox.run
        return loops | dict(self._further_loops)

    async def _set_budgets(self) -> None:
        budgets = self.settings.budgets
        left_out = await self.store.set_limits(budgets)
        if self.ledger is None:
            return
        for scope in left_out:
            await self.ledger.set_limit(scope, Limit())
        for scope, limit in budgets.items():
            await self.ledger.set_limit(scope, limit)

    def _show(self, answer: Submitted) -> None:
        if isinstance(answer, Queued):
            self.dispatcher.see((answer.record,))
            self.told((answer.record,))
        elif isinstance(answer, TurnedAway) and answer.record.is_terminal:
            # It changes no plan; only those who listen want to know, if there is a task at all.
            self.feed.see((answer.record,))
            self.told((answer.record,))

    def _changed(self, records: Iterable[TaskRecord], closure: GateClosure | None) -> None:
        self.dispatcher.see(records, closure)
        self.told(records)
        if closure is not None and closure.kind == "slot":
            self.slot_paused(closure.name)

    def _ask_budgets(self) -> None:
        """Ask again for what waits for budgets: books outside the store have changed."""
        desk = self.dispatcher.desk
        if desk is not None and desk.parking.refusals:
            desk.ask_again(list(desk.parking.refusals), has_freed=True)
            self.dispatcher.see(())

    async def _quietly(self, step: Coroutine[Any, Any, None]) -> None:
        """Take a step of leaving; a store that cannot be asked then finds out by the lease."""
        try:
            await step
        except StoreError as error:
            log.warning("left without telling the store", problem=str(error))


def _overseen(dispatcher: Dispatcher, feed: EventFeed) -> tuple[Outlook, History]:
    """Return what people look at: the desk as it is, and how it was."""
    outlook = Outlook(dispatcher)
    history = History(feed.now, outlook.present)
    feed.witnesses.append(history)
    return outlook, history


def _is_within(bounds: Bounds, flight: InFlight) -> bool:
    return bounds.has(agent_id=flight.agent_id, project_id=flight.task.project_id)
