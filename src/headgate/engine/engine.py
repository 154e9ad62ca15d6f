"""The engine: the way of a task in one place, for the API, the command line and Python.

It ties the store, the dispatcher, the runner and the node together, and starts and stops their
loops. What a client may ask of a running service is a method here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeGuard, TypeVar

import msgspec
import structlog

from headgate.core.admission import QueueLimit, QueueLimits
from headgate.core.budgets.ledger import Ledger, Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import (
    DispatchSettings,
    DispatchState,
    InFlightAttempt,
    LaneStats,
    Settled,
    Waiting,
)
from headgate.core.estimates import Hold
from headgate.core.fair_share import Share, shares
from headgate.core.gates import GateClosure, GatePart, known_by_name
from headgate.core.idempotency import InvalidEntry, KeyRefusal, SubmitKey
from headgate.core.lifecycle import DEFAULT_POLICY, RetryPolicy
from headgate.core.retention import Retention, RetentionCut
from headgate.core.slots.slot import SlotStanding
from headgate.core.task import (
    Submission,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
    check_move,
    slot_of,
)
from headgate.core.task_view import HeldBody, ProgressBody, moment, progress_of, would_hold
from headgate.core.why import TaskReason, reasons, warning_at_submit
from headgate.engine.call_registry import Calls
from headgate.engine.dispatcher import Dispatcher
from headgate.engine.events import EventFeed
from headgate.engine.external_ledger import LeaseRenewer, SettlementOutbox, WatchedLedger
from headgate.engine.history import History, Present
from headgate.engine.node import NodeLife
from headgate.engine.reaper import Reaper
from headgate.engine.supervisor import Health, Loop, Supervisor, judge
from headgate.engine.task_calls import TaskCalls
from headgate.engine.task_runner import RetiredExecutors, TaskRunner
from headgate.engine.workers import PullWorkers
from headgate.errors import (
    NotDispatchingError,
    NotTakingWorkError,
    StoreError,
    StoreUnavailableError,
)
from headgate.executors.executor import Executor, RemoteExecutor, has_no_descriptor
from headgate.storage.audit import AuditEntry
from headgate.storage.call_rows import CallStore
from headgate.storage.store import (
    KeyedAnswer,
    KeyedSubmit,
    NewTask,
    Queued,
    TaskFilter,
    TaskPage,
    TaskQuery,
    TaskStore,
    Totals,
    TurnedAway,
    UnknownParent,
)
from headgate.storage.task_calls import TaskCallStore
from headgate.storage.task_ids import TaskIds
from headgate.storage.tokens import UNBOUND, Bounds

log = structlog.get_logger("headgate.engine")

IN_FORCE_SECONDS = 5.0
SWITCHED_OFF = "the scheduler is switched off; set scheduler.enabled = true"

WAITED_SECONDS = 5.0
LOOK_SECONDS = 0.02

IN_FLIGHT = frozenset({TaskStatus.ASSIGNED, TaskStatus.RUNNING})
MAX_AMONG = 20_000
LOOK_ON_SECONDS = 1.0
"""How long a node that does not dispatch looks for what is in flight."""

LOADED_SECONDS = 1.0
"""How long the leases of money wait for the dispatcher to read what is in flight."""

ROOM_SECONDS = 0.5
NO_ROOM_SECONDS = 5.0
"""How often targets that do their work elsewhere are asked for their room, and looked for."""

REPORT_SECONDS = 1.0
"""How often the store is told how far attempts are, at most."""

CALLS_SETTLED_SECONDS = 10.0
"""How long a stop waits for the ends of calls to be written; then their leases decide."""

MAX_SLOTS_SHOWN = 100
MAX_LOOKED_AT = 20_000
"""How many waiting tasks are looked at for the oldest; they stand about in their order."""

Filter = TypeVar("Filter", bound=TaskFilter)

Submitted = Queued | TurnedAway | UnknownParent


def _is_remote(executor: Executor) -> TypeGuard[RemoteExecutor]:
    # To ask whether it is an instance of a protocol takes dozens of calls for each of many targets.
    return hasattr(type(executor), "room")


Drain = Callable[[float], Awaitable[None]]
Preparation = Callable[[], Awaitable[None]]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How this node takes part: what may wait, how it decides, how much it runs."""

    dispatch: DispatchSettings
    is_enabled: bool = True
    limits: QueueLimits = QueueLimits()
    budgets: dict[Scope, Limit] = {}
    policy: RetryPolicy = DEFAULT_POLICY
    capacity: int = 20
    node_lease_seconds: float = 10.0
    worker_lease_seconds: float = 30.0
    tick_seconds: float = 5.0
    retention: Retention = Retention()
    max_result_bytes: int = 1_048_576
    free_failures: frozenset[str] = frozenset()


class CallParts(NamedTuple):
    """What calls through the gateway need of the store: its ledger, and where ended ones go.

    `tasks` has what those of running tasks have used so far.
    """

    ledger: Ledger
    store: CallStore
    tasks: TaskCallStore


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
        calls: CallParts | None = None,
    ) -> None:
        self._further_loops = further_loops or {}
        self.store, self.settings, self.executors = store, settings, executors
        self.ledger = ledger = None if ledger is None else WatchedLedger(ledger)
        self._outbox = (
            None if ledger is None else SettlementOutbox(store, ledger, settled=self._settled)
        )
        self._ids = TaskIds()
        self.feed = EventFeed(store.now)
        self.calls = None if calls is None else self._new_calls(calls)
        self.call_store = None if calls is None else calls.store
        self.runner = TaskRunner(
            store,
            executors,
            changed=self._changed,
            policy=settings.policy,
            draws=draws,
            max_result_bytes=settings.max_result_bytes,
            free_failures=settings.free_failures,
            ledger=ledger,
            slot_resets_at=self._slot_resets_at,
            calls=self.calls,
        )
        self.dispatcher = Dispatcher(
            store,
            settings.dispatch,
            start=self.runner.start,
            runs=self.runner.__contains__,
            inherit=self.runner.inherit,
            tick_seconds=settings.tick_seconds,
            ledger=ledger,
            feed=self.feed,
            call_worker=self._call_worker,
            calls=self.calls,
        )
        self.outlook = Outlook(self.dispatcher)
        self.history = History(self.feed.now, self.outlook.present)
        self.feed.subscribe(events=self.history)
        self._submits = Submits(store, self.dispatcher, show=self._show)
        self.workers = PullWorkers(
            store,
            self.runner.settlements,
            lease_seconds=settings.worker_lease_seconds,
            node_id=lambda: self.node.node_id,
            changed=self._changed,
            refresh=self.dispatcher.refresh,
            recheck=self.dispatcher.recheck,
            doubt_slot=self.feed.doubt_slot,
            ledger=ledger,
            calls=self.calls,
        )
        self.node = NodeLife(
            store,
            self.runner,
            self.dispatcher,
            capacity=settings.capacity if settings.is_enabled else 0,
            lease_seconds=settings.node_lease_seconds,
        )
        self.reaper = Reaper(store, settings.retention)
        self.refused_by_store = 0
        self._supervisor, self.retired = Supervisor(), RetiredExecutors()
        self._preparations: list[Preparation] = []
        self._phase = "starting"
        self._reports_kept_at = float("-inf")
        self.opened = asyncio.Event()
        """Set once the store and the ledger can be asked; tasks may still be read then."""

    def _new_calls(self, parts: CallParts) -> Calls:
        ledger = parts.ledger if self.ledger is None else self.ledger
        tasks = TaskCalls(
            ledger,
            parts.tasks,
            record_of=self.store.get,
            state=lambda: self.dispatcher.dispatch_state,
            loaded=lambda: self.dispatcher.loaded(),  # noqa: PLW0108 - it is made later
            decided_since=lambda: self.dispatcher.decided_since,
            keeps_ledger=self.ledger is None,
        )
        return Calls(
            ledger,
            parts.store,
            tasks=tasks,
            now=self.store.now,
            new_id=self.new_id,
            state=lambda: self.dispatcher.dispatch_state,
            wake=self._wake_dispatcher,
            is_ledger_outside=self.ledger is not None,
            settled=self._settled,
            leads=lambda: self.dispatcher.is_leading,
            may_grant=lambda: self.dispatcher.may_grant,
            node_id=lambda: self.node.node_id,
            is_shared=self.store.is_shared,
        )

    def _wake_dispatcher(self) -> None:
        self.dispatcher.wake()

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
        self.opened.set()
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

    async def hand_over(self) -> None:
        """Take no more tasks, and have another node dispatch; calls that wait go on there.

        While there is none, this one dispatches calls, which its running tasks may need to finish.
        """
        self._phase = "draining"
        self.workers.close()
        self.dispatcher.starts_tasks = False
        await self._quietly(self.node.begin_to_leave())

    async def stop(self, *, drain_seconds: float) -> None:
        """Take no more work, let what runs finish, and leave; after that everything is closed."""
        await self.drain(drain_seconds=drain_seconds)
        await self.close()

    async def drain(
        self, *, drain_seconds: float, settle_seconds: float = 0.0, beside: Drain | None = None
    ) -> None:
        """Take no more work, let what runs finish, and have a ledger outside told of it.

        Where that is away it is waited for so long; `hurry` ends the wait. What drains `beside` has
        the same seconds.
        """
        await self.hand_over()
        drains = (self.runner.drain, *(() if beside is None else (beside,)))
        await asyncio.gather(*(drain(drain_seconds) for drain in drains))
        await self._quietly(self.node.end())
        await self._supervisor.stop()
        if self.calls is not None:
            await self.calls.settled(seconds=CALLS_SETTLED_SECONDS)
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
            warning=self._warning(task),
        )

    def _warning(self, task: Task) -> str:
        """Say what is known here of a task that cannot start in time; another node knows less."""
        state = self.dispatcher.dispatch_state
        return "" if state is None else warning_at_submit(state, task)

    def new_id(self) -> str:
        """Return an id for a task that is to be submitted under it, once or more than once."""
        return self._ids.new(self.store.now())

    async def cancel(self, task_id: str, entry: AuditEntry | None = None) -> TaskRecord | None:
        """Cancel a task, and note who did; None if there is none, an error if it had ended.

        A task that runs ends when its executor has stopped; that is waited for, within bounds.
        """
        record = await self.cancel_soon(task_id, entry)
        if record is None or record.is_terminal:
            return record
        return await self._wait_for_end(record)

    async def cancel_soon(self, task_id: str, entry: AuditEntry | None = None) -> TaskRecord | None:
        """Cancel a task without waiting for one that runs to stop; None if there is none."""
        try:
            answer = await self.store.cancel(task_id, node_id=self.node.node_id, entry=entry)
        except (StoreUnavailableError, asyncio.CancelledError):
            self.dispatcher.recheck(task_id)
            raise
        if answer is None:
            return None
        record = answer.records[0]
        if answer.had_ended:
            check_move(task_id, record.task.status, TaskStatus.CANCELLED)
        self.dispatcher.observe(answer.records)
        self.feed.changed(answer.records)
        if record.is_terminal:
            return record
        if record.progress.node_id == self.node.node_id:
            self.runner.cancel(task_id, attempt=record.progress.attempt)
        self.workers.call(record.progress.node_id or "")
        return record

    async def _wait_for_end(self, record: TaskRecord) -> TaskRecord:
        """Return a task once it has ended, or as it is when time is over."""
        latest = record
        for _ in range(int(WAITED_SECONDS / LOOK_SECONDS)):
            found = await self.store.get(record.task.id)
            if found is None:
                return latest
            latest = found
            if latest.is_terminal:
                return latest
            await asyncio.sleep(LOOK_SECONDS)
        return latest

    async def get(self, task_id: str) -> TaskRecord | None:
        """Return a task with all that is known of it."""
        return await self.store.get(task_id)

    async def deleted_by(self, task_id: str) -> RetentionCut | None:
        """Return which setting deleted a task that is not there; None of one that never was."""
        return await self.store.deleted_by(task_id)

    async def within(self, task_ids: Sequence[str], bounds: Bounds) -> frozenset[str]:
        """Return which of these tasks are there and within the bounds."""
        owner = TaskQuery(agent_id=bounds.agent_id, project_id=bounds.project_id)
        return await self.store.among(task_ids, owner)

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks in the order of the query, as many as fit on one page.

        The store has no index of attempts, and what is in flight is older than what waits. The node
        that dispatches knows what is in flight, and reads nothing else. Any other node reads
        further and further back. Rule: a list of what is in flight has all of it, however many
        tasks wait; if that takes too long, the page says that there is more.
        """
        if self.dispatcher.dispatch_state is None and _is_of_attempts(query):
            return await self._find_in_flight(query)
        return await self.store.find(self.only_in_flight(query))

    def only_in_flight(self, wanted: Filter) -> Filter:
        """Return a filter of what is in flight that reads nothing else.

        The dispatch state counts an attempt from before the store does to after it, so none is
        missing.
        """
        state = self.dispatcher.dispatch_state
        if state is None or not _is_of_attempts(wanted) or len(state.in_flight) > MAX_AMONG:
            return wanted
        return msgspec.structs.replace(wanted, among=tuple(one.task.id for one in state.in_flight))

    async def _find_in_flight(self, query: TaskQuery) -> TaskPage:
        """Look for what is in flight until as much is found as the store has counted."""
        lanes = (await self.store.totals()).lanes
        most = sum(lane.inflight for lane in lanes if query.project_id in (None, lane.project_id))
        if not most:
            return TaskPage(records=())
        limit = query.limit if query.before else min(query.limit, most)
        narrow = msgspec.structs.replace(query, limit=limit)
        page = await read_on(self.store.find, narrow, seconds=LOOK_ON_SECONDS)
        if not query.before and len(page.records) >= most:
            return TaskPage(records=page.records)
        return page

    async def totals(self) -> Totals:
        """Count what waits, what runs and what has happened."""
        return await self.store.totals()

    async def carry_settlements(self) -> None:
        """Tell a ledger outside the store at once what has been settled, for an exact answer."""
        if self._outbox is not None:
            await self._outbox.run_once()

    async def flush_calls(self) -> None:
        """Have everything booked that calls have spent by now, for an exact answer."""
        if self.calls is not None and self.calls.escrow is not None:
            await self.calls.escrow.flush()

    async def _recall_slices(self) -> None:
        """Have calls draw on slices that were admitted under the limits of now."""
        if self.calls is not None and self.calls.escrow is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOADED_SECONDS):
                    await self.calls.escrow.recall()

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
            return Why.of(record, self.dispatcher.standings)
        dispatch_state = self.dispatcher.dispatch_state
        if dispatch_state is None and self.dispatcher.is_leading:
            problem = self.dispatcher.problem or "the tasks are still being read; try again"
            raise StoreUnavailableError(problem)
        if dispatch_state is None:
            raise NotDispatchingError(self.node.leader_address)
        found = reasons(
            dispatch_state,
            task_id,
            self.store.now(),
            partial(_is_within, bounds),
            bounds.may_charge,
        )
        hold = dispatch_state.would_hold(task_id, self.settings.budgets)
        return Why.of(record, self.dispatcher.standings, found, hold)

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
            is_loaded=self.dispatcher.dispatch_state is not None,
            knows_leader=self.node.leader_id not in ("", self.node.node_id),
            has_fault=self.dispatcher.has_fault,
            store_problem=self.node.problem,
            dispatcher_problem=self.dispatcher.problem,
            ledger_problem="" if self.ledger is None else self.ledger.problem,
            is_out_of_descriptors=self.runner.is_out_of_descriptors or has_no_descriptor(),
            shortage=self.reaper.shortage,
        )

    async def reconfigure(
        self, settings: EngineSettings, executors: Mapping[str, Executor]
    ) -> None:
        """Go by other settings, from the next round on and for what starts by then.

        This cannot fail. What runs goes on as it began; a limit that is lowered below what runs
        stops new starts only. The executors are open. Those that are there no more are closed when
        nobody uses them.
        """
        capacity = settings.capacity if settings.is_enabled else 0
        await self.node.offer(capacity, lease_seconds=settings.node_lease_seconds)
        before, self.settings = self.settings, settings
        if settings.budgets != before.budgets:
            await self._recall_slices()
        self.workers.lease_seconds = settings.worker_lease_seconds
        self.reaper.retention = settings.retention
        self.dispatcher.reconfigure(
            settings.dispatch,
            tick_seconds=settings.tick_seconds,
            asks_budgets=settings.budgets != before.budgets,
        )
        replaced = {
            name: one for name, one in self.executors.items() if executors.get(name) is not one
        }
        attempts = self.runner.under_way_at(replaced)
        self.executors = executors
        self.runner.reconfigure(
            executors,
            policy=settings.policy,
            max_result_bytes=settings.max_result_bytes,
            free_failures=settings.free_failures,
        )
        self.retired.retire(list(replaced.values()), attempts)

    async def closures(self) -> tuple[GateClosure, ...]:
        """Return everything that keeps tasks from starting, and who closed it.

        Only the node that dispatches knows of budgets and rate limits; any node knows of slots, and
        of what answers and workers have closed.
        """
        state = self.dispatcher.dispatch_state
        if state is not None:
            return tuple(known_by_name(state.closures.all()))
        stored = await self.store.closures()
        standing = (one.closure for one in self.dispatcher.standings)
        paused = self.settings.dispatch.pauses().values()
        return (*paused, *(one for one in standing if one is not None), *stored)

    async def open_gate(self, part: GatePart, entry: AuditEntry | None = None) -> bool:
        """Open a part before its time; whoever dispatches goes by it at its next round.

        What closed it may close it again: a budget that has no room, an answer of the provider.
        """
        was_closed = await self.store.open_gate(part, entry)
        state = self.dispatcher.dispatch_state
        if state is not None:
            was_closed = was_closed or part in state.closures.timed
            state.open(part)
            self.dispatcher.observe(())
        if self.calls is not None:
            self.calls.open(part)
        self.dispatcher.refresh()
        return was_closed

    async def in_force(self) -> None:
        """Wait until the dispatcher goes by the latest settings, within bounds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(IN_FORCE_SECONDS):
                await self.dispatcher.pending.in_force()

    async def _watch_targets(self) -> None:
        """Ask targets that do their work elsewhere for their room; keep what attempts report."""
        while True:
            remote = [
                (name, executor)
                for name, executor in self.executors.items()
                if _is_remote(executor)
            ]
            if remote and self.dispatcher.is_leading:
                await asyncio.gather(*(self._ask_room(name, one) for name, one in remote))
            await self._keep_reports()
            await asyncio.sleep(ROOM_SECONDS if remote else NO_ROOM_SECONDS)

    async def _ask_room(self, name: str, executor: RemoteExecutor) -> None:
        # One that takes its time keeps what it said last, and holds nobody else up for long.
        with suppress(TimeoutError):
            async with asyncio.timeout(NO_ROOM_SECONDS):
                room = await executor.room()
                self.dispatcher.set_room(name, room)
                self.runner.reports.update((one.task_id, one) for one in room.reports)

    async def _keep_reports(self) -> None:
        """Have the store keep what attempts have reported, at most once a second."""
        now = asyncio.get_running_loop().time()
        if not self.runner.reports or now < self._reports_kept_at + REPORT_SECONDS:
            return
        self._reports_kept_at = now
        reports, self.runner.reports = self.runner.reports, {}
        try:
            await self.store.report(tuple(reports.values()))
        except StoreUnavailableError:
            self.runner.reports = reports | self.runner.reports

    def _loops(self) -> dict[str, Loop]:
        loops: dict[str, Loop] = {
            "node": self.node.run,
            "dispatcher": self.dispatcher.run,
            "reaper": self.reaper.run,
            "history": self.history.run,
            "targets": self._watch_targets,
        }
        if self.calls is not None:
            loops["calls"] = self.calls.run
            if self.calls.escrow is not None:
                loops["escrow"] = self.calls.escrow.run
        if self.ledger is not None:
            loops["ledger"] = self.ledger.run
            loops["leases"] = LeaseRenewer(self.ledger, self._reservations).run
        if self._outbox is not None:
            loops["outbox"] = self._outbox.run
        return loops | dict(self._further_loops)

    async def _reservations(self) -> set[str]:
        """Return the money of all attempts that this node runs or sees in flight elsewhere."""
        # Whoever dispatches reads everything anew after each failure, which takes a moment.
        with suppress(TimeoutError):
            async with asyncio.timeout(LOADED_SECONDS):
                await self.dispatcher.loaded()
        return {*self.runner.reservations(), *self.dispatcher.reservations()}

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
            self.dispatcher.observe((answer.record,))
            self.feed.changed((answer.record,))
        elif isinstance(answer, TurnedAway) and answer.rejected.limit is QueueLimit.STORE:
            self.refused_by_store += 1
        elif isinstance(answer, TurnedAway) and answer.record.is_terminal:
            # It changes no plan; only those who listen want to know, if there is a task at all.
            self.feed.observe((answer.record,))
            self.feed.changed((answer.record,))

    def _changed(self, records: Iterable[TaskRecord], closure: GateClosure | None) -> None:
        self.dispatcher.observe(records, closure)
        self.feed.changed(records, closure)

    def _slot_resets_at(self, slot: str) -> float | None:
        return self.dispatcher.slot_resets_at(slot)

    def _call_worker(self, worker_id: str) -> None:
        self.workers.call(worker_id)

    def _settled(self, settled: Settled) -> None:
        """Ask again for what waits for budgets in which something was settled."""
        dispatch_state = self.dispatcher.dispatch_state
        if dispatch_state is not None and dispatch_state.parking.refusals:
            dispatch_state.settled(settled)
            self.dispatcher.observe(())

    def ask_budgets(self) -> None:
        """Ask again for what waits for budgets: the ledger has changed."""
        dispatch_state = self.dispatcher.dispatch_state
        if dispatch_state is not None and dispatch_state.parking.refusals:
            dispatch_state.ask_budgets_again()
            self.dispatcher.observe(())

    async def _quietly(self, step: Coroutine[Any, Any, None]) -> None:
        """Take a step of leaving; a store that cannot be asked then finds out by the lease."""
        try:
            await step
        except StoreError as error:
            log.warning("left without telling the store", problem=str(error))


class LongestWait(msgspec.Struct, frozen=True, kw_only=True):
    """A task that could start as far as it is concerned, and since when."""

    task_id: str
    agent_id: str | None
    project_id: str
    since: float


class Outlook:
    """The dispatch state, as far as people read it: shares, lanes, who waits.

    Rule: on a node that does not dispatch the answer is None, never an empty one.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    @property
    def dispatch_state(self) -> DispatchState | None:
        """What waits and runs; None where this node does not dispatch."""
        return self._dispatcher.dispatch_state

    def present(self) -> Present | None:
        """Return how many tasks wait and are in flight."""
        dispatch_state = self.dispatch_state
        if dispatch_state is None:
            return None
        return Present(queued=dispatch_state.waiting_tasks, inflight=len(dispatch_state.in_flight))

    def shares(self) -> tuple[Share, ...] | None:
        """Return the share of each project that it should have, and that it had."""
        dispatch_state = self.dispatch_state
        if dispatch_state is None:
            return None
        return shares(dispatch_state.settings.projects, dispatch_state.usage.tokens)

    def lanes(self, now: float) -> tuple[LaneStats, ...] | None:
        """Return the lanes in which tasks wait, with their load and longest wait."""
        dispatch_state = self.dispatch_state
        if dispatch_state is None:
            return None
        return dispatch_state.lane_stats(now)

    def waiting_for_scopes(self) -> dict[str, int] | None:
        """Return how many tasks and calls wait for each budget that has no room for them."""
        dispatch_state = self.dispatch_state
        return None if dispatch_state is None else dispatch_state.waiting_for_scopes()

    def longest_wait(self, now: float, bounds: Bounds = UNBOUND) -> LongestWait | None:
        """Return who waits longest within bounds; None if nobody does, or nobody knows."""
        dispatch_state = self.dispatch_state
        if dispatch_state is None:
            return None
        return longest_wait(dispatch_state.waiting, now, bounds)


def longest_wait(
    waiting: Mapping[str, Waiting], now: float, bounds: Bounds = UNBOUND
) -> LongestWait | None:
    """Return the task that has waited longest, not counting the time until its own or a parent's.

    A task that waits for its time or for a parent could not start, so nobody keeps it waiting.
    """
    longest, since = None, now
    for one in islice(waiting.values(), MAX_LOOKED_AT):
        task = one.task
        began = max(task.created_at, task.not_before or 0.0)
        if began < since and not one.waiting_for and _is_task_within(bounds, task):
            longest, since = task, began
    if longest is None:
        return None
    return LongestWait(
        task_id=longest.id, agent_id=longest.agent_id, project_id=longest.project_id, since=since
    )


def _is_task_within(bounds: Bounds, task: Task) -> bool:
    return bounds.has(agent_id=task.agent_id, project_id=task.project_id)


class Submits:
    """Sends new tasks to the store; the dispatcher hears of them, though nobody may await that.

    The dispatcher may be shown a task before the store has answered. Rule: only while no other is
    on its way. One that was sent before waits already, though the dispatch state does not know of
    it yet, and would be overtaken; and of those that come together none is planned before all of
    them are there.
    """

    def __init__(
        self, store: TaskStore, dispatcher: Dispatcher, *, show: Callable[[Submitted], None]
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._show = show
        self._unanswered = 0
        self._early: str | None = None

    def send(self, new: NewTask) -> asyncio.Future[Submitted]:
        """Send a task; where there is nothing else to do, it is planned at once."""
        task_id = new.task.id
        if self._unanswered:
            self._withdraw_early()
        # Before it is sent: a plan that is made at once shares its transaction.
        elif self._dispatcher.plan_early(new):
            self._early = task_id
        try:
            future = self._store.submit(new)
        except BaseException:
            self._withdraw_early()
            raise
        self._unanswered += 1
        # Not by whoever awaits the answer: a client that hangs up must not hide its task.
        future.add_done_callback(partial(self._answered, task_id))
        return future

    def send_keyed(self, keyed: KeyedSubmit) -> asyncio.Future[KeyedAnswer | KeyRefusal]:
        """Send the tasks of a request that has a key."""
        future = self._store.submit_keyed(keyed)
        self._unanswered += 1
        self._withdraw_early()
        ids = [one.task.id for one in keyed.tasks if isinstance(one, NewTask)]
        future.add_done_callback(partial(self._answered_keyed, ids))
        return future

    def _withdraw_early(self) -> None:
        """Take back what was shown early, unless it is planned; its answer shows it as it is."""
        if self._early is not None:
            self._dispatcher.withdraw_early(self._early)
            self._early = None

    def _answered(self, task_id: str, future: asyncio.Future[Submitted]) -> None:
        self._unanswered -= 1
        was_early = task_id == self._early
        if was_early:
            self._early = None
        if future.cancelled() or future.exception() is not None:
            # It may be on disk all the same.
            self._dispatcher.recheck(task_id)
            return
        if was_early:
            # If it still waits, then as what it is, and not as what it was thought to be.
            self._dispatcher.withdraw_early(task_id)
        self._show(future.result())

    def _answered_keyed(
        self, task_ids: list[str], future: asyncio.Future[KeyedAnswer | KeyRefusal]
    ) -> None:
        self._unanswered -= 1
        if future.cancelled() or future.exception() is not None:
            for task_id in task_ids:
                self._dispatcher.recheck(task_id)
            return
        answer = future.result()
        if isinstance(answer, KeyedAnswer):
            for outcome in answer.fresh:
                self._show(outcome)


def _is_of_attempts(wanted: TaskFilter) -> bool:
    return bool(wanted.states) and IN_FLIGHT.issuperset(wanted.states)


async def read_on(
    find_page: Callable[[TaskQuery], Awaitable[TaskPage]], query: TaskQuery, *, seconds: float
) -> TaskPage:
    """Return a page of tasks; while it is not full and time is left, look further."""
    clock = asyncio.get_running_loop().time
    asked_at, ends_at = clock(), clock() + seconds
    page = await find_page(query)
    records = list(page.records)
    # The next look takes about as long as the last one.
    while _has_stopped(page) and len(records) < query.limit and 2 * clock() - asked_at < ends_at:
        asked_at = clock()
        left = query.limit - len(records)
        further = msgspec.structs.replace(query, before=page.next_before, limit=left)
        page = await find_page(further)
        records += page.records
    return TaskPage(records=tuple(records), next_before=page.next_before)


def _has_stopped(page: TaskPage) -> bool:
    """Tell whether a page ended because enough was looked at, and not because it was full."""
    if page.next_before is None:
        return False
    return not page.records or page.next_before != page.records[-1].task.id


class SlotRoom(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """How much of the quota of a slot is used, and when it resets; what is unknown is left out."""

    name: str
    provider: str | None = None
    percent_used: float | None = None
    resets_at: datetime | None = None


class Why(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Where a task stands, and each rule that keeps it waiting.

    `slot` is the one that it names or was given, `slots` those that it may be given. `would_hold`
    is what its next attempt reserves, `progress` how far the one that runs says that it is.
    """

    task_id: str
    state: TaskStatus
    reasons: tuple[TaskReason, ...]
    would_hold: tuple[HeldBody, ...] = ()
    slot: SlotRoom | None = None
    slots: tuple[SlotRoom, ...] = ()
    progress: ProgressBody | None = None

    @classmethod
    def of(
        cls,
        record: TaskRecord,
        standings: Iterable[SlotStanding],
        reasons: tuple[TaskReason, ...] = (),
        hold: Hold | None = None,
    ) -> Why:
        """Return the answer about a task."""
        task = record.task
        is_open = task.provider is not None and task.status is TaskStatus.QUEUED
        slot = None if is_open and task.slot is None else slot_of(record)
        return cls(
            task_id=task.id,
            state=task.status,
            reasons=reasons,
            would_hold=() if hold is None else would_hold(hold),
            slot=None if slot is None else _named(slot, standings),
            slots=_of_provider(task, standings) if slot is None and task.provider else (),
            progress=progress_of(record),
        )


def _named(name: str, standings: Iterable[SlotStanding]) -> SlotRoom:
    """Return what is known of a slot; a name that no configured slot has is only a name."""
    found = (_room(one) for one in standings if one.name == name)
    return next(found, SlotRoom(name=name))


def _of_provider(task: Task, standings: Iterable[SlotStanding]) -> tuple[SlotRoom, ...]:
    own = [one for one in standings if one.is_for(task.project_id)]
    rooms = [_room(one) for one in own if one.provider == task.provider]
    return tuple(rooms[:MAX_SLOTS_SHOWN])


def _room(standing: SlotStanding) -> SlotRoom:
    return SlotRoom(
        name=standing.name,
        provider=standing.provider,
        percent_used=standing.percent_used,
        resets_at=moment(standing.resets_at),
    )


def _is_within(bounds: Bounds, attempt: InFlightAttempt) -> bool:
    return bounds.has(agent_id=attempt.agent_id, project_id=attempt.task.project_id)
