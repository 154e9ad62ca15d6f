"""What workers ask of this node: tasks to run, signs of life, and the settling of attempts.

A worker may speak to any node at any time, so nothing here is remembered between two requests but
who waits for an answer right now. A claim that finds nothing waits until the dispatcher calls.

Rule: waiting is bounded: in number, by the lease, and by the end of this node.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from headgate.core.budgets.ledger import Ledger
from headgate.core.budgets.scopes import Tenant
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import NOTHING_USED, Cancelled, Failed, Finish, Limited, Lost, Outcome
from headgate.core.task import (
    WORKER_PREFIX,
    Lease,
    ProgressReport,
    TaskRecord,
    TaskStatus,
    is_worker,
    slot_of,
)
from headgate.engine.call_registry import Calls
from headgate.engine.external_ledger import mark_dispatched
from headgate.engine.task_runner import Settlements
from headgate.errors import StaleWorkerError, StoreUnavailableError
from headgate.executors.executor import GatewayAccess, WorkOrder, work_order_of
from headgate.storage.store import Orders, Settled, Settlement, StaleLease, TaskStore, Visit

MAX_WAITING = 12_000
MAX_WAIT_SECONDS = 25.0
WAITED_OF_LEASE = 2 / 3
"""A claim is answered while the lease that it has renewed still lasts for a while."""

UNPAID_SECONDS = 1.0

Changed = Callable[[Iterable[TaskRecord], GateClosure | None], None]
Watch = Callable[[str, WorkOrder, Outcome, float], None]
"""Told of an attempt that has settled: its target, its order, what came of it, and when."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A worker offers its capacity, all of it, with what it runs, and how far that is."""

    agent_id: str
    worker_id: str | None
    capacity: int
    running: dict[str, int]
    wait_seconds: float = 0.0
    reports: dict[str, ProgressReport] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A worker says what came of an attempt; with a `tenant` the usage is its claim.

    `record` is the task as it was read a moment ago.
    """

    record: TaskRecord
    worker_id: str
    attempt: int
    outcome: Outcome
    tenant: Tenant | None = None


class _Waiter:
    """A claim that waits; another of the same worker takes its place."""

    __slots__ = ("is_called", "is_over")

    def __init__(self) -> None:
        self.is_called = asyncio.Event()
        self.is_over = False

    def end(self) -> None:
        self.is_over = True
        self.is_called.set()


class PullWorkers:
    """Serves the workers that speak to this node."""

    def __init__(
        self,
        store: TaskStore,
        settlements: Settlements,
        *,
        lease_seconds: float,
        node_id: Callable[[], str],
        changed: Changed,
        refresh: Callable[[], None],
        recheck: Callable[[str], None],
        doubt_slot: Callable[[str], None] = lambda _slot: None,
        ledger: Ledger | None = None,
        calls: Calls | None = None,
    ) -> None:
        self.lease_seconds = lease_seconds
        self._calls = calls
        self._store = store
        self._settlements = settlements
        self._node_id = node_id
        self._changed = changed
        self._refresh = refresh
        self._recheck = recheck
        self._doubt_slot = doubt_slot
        self._ledger = ledger
        self._waiters: dict[str, _Waiter] = {}
        self._called: dict[str, None] = {}
        """Workers that were called while no claim of theirs waited; the next one is in a hurry."""

        self._is_closed = False
        self._watch: Watch | None = None

    def watch(self, watch: Watch) -> None:
        """Have somebody told of every attempt that settles here."""
        self._watch = watch

    def call(self, worker_id: str) -> None:
        """Have a claim look again that waits here; where none does, the next one looks."""
        waiter = self._waiters.get(worker_id)
        if waiter is not None:
            waiter.is_called.set()
        elif is_worker(worker_id):
            self._called[worker_id] = None
            if len(self._called) > MAX_WAITING:
                del self._called[next(iter(self._called))]

    def close(self) -> None:
        """Answer all claims that wait, and let none wait any more."""
        self._is_closed = True
        for waiter in self._waiters.values():
            waiter.end()

    async def claim(self, claim: Claim) -> tuple[str, Orders]:
        """Return a worker's name and what it is to do, once there is something or time is over."""
        visit = Visit(
            worker_id=claim.worker_id or f"{WORKER_PREFIX}{uuid.uuid4().hex}",
            agent_id=claim.agent_id,
            capacity=claim.capacity,
            running=claim.running,
            lease_seconds=self.lease_seconds,
            joins=claim.worker_id is None,
            node_id=self._node_id(),
            reports=claim.reports,
        )
        self._supersede(visit.worker_id)
        is_called = visit.worker_id in self._called
        self._called.pop(visit.worker_id, None)
        waits = claim.capacity and claim.wait_seconds and len(self._waiters) < MAX_WAITING
        if not waits or self._is_closed:
            return visit.worker_id, await self._visit(visit)
        if not visit.joins and not is_called:
            # Nobody has anything for it that would be known here.
            visit = msgspec.structs.replace(visit, is_patient=True)
        waiter = self._enter(visit.worker_id)
        try:
            return visit.worker_id, await self._wait(visit, waiter, claim.wait_seconds)
        finally:
            self._leave(visit.worker_id, waiter)

    async def access(self, record: TaskRecord) -> GatewayAccess | None:
        """Return what an attempt that was claimed needs to make calls; None if it is to make none.

        A worker that was handed its task has it, so one that cannot be told of the gateway goes
        without.
        """
        if self._calls is None:
            return None
        try:
            return await self._calls.tasks.access(record)
        except StoreUnavailableError:
            return None

    async def beat(
        self,
        worker_id: str,
        agent_id: str,
        running: dict[str, int],
        reports: dict[str, ProgressReport] | None = None,
    ) -> Orders:
        """Renew the lease of a worker, and say what it is to stop; nothing is handed out."""
        return await self._visit(
            Visit(
                worker_id=worker_id,
                agent_id=agent_id,
                capacity=None,
                running=running,
                lease_seconds=self.lease_seconds,
                takes=False,
                node_id=self._node_id(),
                is_patient=True,
                reports=reports or {},
            )
        )

    async def settle(self, report: Report) -> TaskRecord | StaleLease:
        """Write what came of an attempt; one that is not the worker's any more changes nothing."""
        record = report.record
        stale = StaleLease(task_id=record.task.id)
        if record.progress.attempt != report.attempt:
            return stale
        settlement = self._settlement(record, report)
        is_own = record.progress.node_id == report.worker_id
        if self._calls is not None and is_own:
            open_calls = await self._calls.task_ended(record)
            settlement = msgspec.structs.replace(settlement, open_calls=open_calls)
        try:
            answer = await self._store.settle(settlement)
        except (StoreUnavailableError, asyncio.CancelledError):
            self._recheck(record.task.id)
            raise
        if not isinstance(answer, Settled):
            return stale
        self._changed(answer.records, settlement.closure)
        slot = slot_of(record)
        if slot is not None and isinstance(report.outcome, Limited):
            # A worker's word closes no slot, but it is a reason to ask the provider.
            self._doubt_slot(slot)
        # Only its first word ends an attempt; what comes again is answered and not told of.
        if self._watch is not None and record.progress.node_id == report.worker_id:
            target, outcome = record.task.target or "", _judged(record, report.outcome)
            self._watch(target, work_order_of(record), outcome, self._store.now())
        return answer.records[0]

    def _settlement(self, record: TaskRecord, report: Report) -> Settlement:
        if record.progress.node_id != report.worker_id:
            # It is over, or another's. Only the store knows whether this is a repeat of what
            # ended it, and nothing else is answered by this: an attempt is not begun twice.
            lease = Lease(node_id=report.worker_id, attempt=report.attempt)
            end = Finish(status=TaskStatus.DONE)
            return Settlement(task_id=record.task.id, lease=lease, step=end, cost=NOTHING_USED)
        settlement = self._settlements.make(
            record,
            self._settlements.reported(record, _judged(record, report.outcome)),
            self._store.now(),
            node_id=self._node_id(),
        )
        return msgspec.structs.replace(settlement, tenant=report.tenant)

    async def _wait(self, visit: Visit, waiter: _Waiter, wait_seconds: float) -> Orders:
        clock = asyncio.get_running_loop().time
        longest = min(MAX_WAIT_SECONDS, self.lease_seconds * WAITED_OF_LEASE)
        visited_at = began_at = clock()
        ends_at = began_at + min(wait_seconds, longest)
        orders = await self._visit(visit)
        # Only a request says what a worker offers, and not one that has been waiting since.
        visit = msgspec.structs.replace(
            visit, joins=False, capacity=None, is_patient=False, reports={}
        )
        while not orders.tasks and not orders.cancelled and not waiter.is_over:
            left = ends_at - clock()
            if left <= 0:
                break
            # Nothing is asked meanwhile: whoever has something for it calls, and the lease lasts.
            try:
                async with asyncio.timeout(left):
                    await waiter.is_called.wait()
            except TimeoutError:
                # It only renews the lease, so that the answer is true.
                visit = msgspec.structs.replace(visit, is_patient=True)
            if waiter.is_over:
                break
            waiter.is_called.clear()
            visited_at = clock()
            orders = await self._visit(visit)
        return msgspec.structs.replace(orders, waited_seconds=visited_at - began_at)

    async def _visit(self, visit: Visit) -> Orders:
        orders = await self._store.visit(visit)
        if not orders.is_alive:
            raise StaleWorkerError(visit.worker_id)
        if orders.has_news:
            self._refresh()
        if self._ledger is None or not orders.tasks:
            return orders
        paid = [record for record in orders.tasks if await self._may_spend(record, self._ledger)]
        return msgspec.structs.replace(orders, tasks=tuple(paid))

    async def _may_spend(self, record: TaskRecord, ledger: Ledger) -> bool:
        """Tell a ledger outside the store that the work begins; if it refuses it does not."""
        name = record.progress.reservation_id
        if name is None or await mark_dispatched(ledger, name):
            return True
        outcome = Lost(has_started=False, retry_seconds=UNPAID_SECONDS)
        settlement = self._settlements.make(
            record, outcome, self._store.now(), node_id=self._node_id()
        )
        answer = await self._store.settle(settlement)
        if isinstance(answer, Settled):
            self._changed(answer.records, None)
        return False

    def _supersede(self, worker_id: str) -> None:
        before = self._waiters.get(worker_id)
        if before is not None:
            before.end()

    def _enter(self, worker_id: str) -> _Waiter:
        waiter = self._waiters[worker_id] = _Waiter()
        self._store.watch(worker_id, partial(self.call, worker_id))
        return waiter

    def _leave(self, worker_id: str, waiter: _Waiter) -> None:
        if self._waiters.get(worker_id) is waiter:
            del self._waiters[worker_id]
            self._store.unwatch(worker_id)


def _judged(record: TaskRecord, outcome: Outcome) -> Outcome:
    """Return what came of an attempt: one that was to stop, and was not done, has been stopped."""
    if not record.progress.cancel_requested or not isinstance(outcome, Failed | Limited):
        return outcome
    return Cancelled(usage=outcome.usage if isinstance(outcome, Failed) else NOTHING_USED)
