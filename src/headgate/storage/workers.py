"""Visits of workers: a sign of life, what is to be run, and what is not theirs any more.

A worker says what it runs. What it has beyond that is started and handed out, or handed out once
more if an earlier answer got lost. A worker that offers no place is leaving, and has taken from it
whatever it does not run.

Visits that come while others are being written are received together: a fleet of ten thousand sends
a thousand heartbeats a second, and each table is read and written once for all that wait.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import NamedTuple

import msgspec

from headgate.core.task import AttemptReport, ProgressReport, TaskRecord, TaskStatus
from headgate.errors import LimitReachedError, StoreUnavailableError
from headgate.storage import finish, nodes
from headgate.storage.assign import is_running
from headgate.storage.finish import take_from_worker
from headgate.storage.store import (
    MAX_HANDED_OUT,
    MAX_HANDED_OUT_BYTES,
    Node,
    Orders,
    Overdue,
    Visit,
)
from headgate.storage.transaction import Result, about
from headgate.storage.unit_of_work import TaskRow, UnitOfWork
from headgate.storage.writer import MAX_JOBS_OF_CALLER, asker

MAX_TOGETHER = 256
"""How many visits are received together: others wait for the lock meanwhile."""

PATIENCE_SECONDS = 0.005
"""How long visits that can wait do so for others: a transaction costs as much as ten of them."""

MAX_TOGETHER_BYTES = 4 * MAX_HANDED_OUT_BYTES
"""What their answers may have together; the visits beyond that are received with the next."""

REPORT_SECONDS = 1.0
"""What a worker reports of a task sooner than this after its last report is left out."""

Received = Orders | LimitReachedError
"""What one visit is answered with."""

_HELD = about("SELECT node_id, task_id FROM worker_tasks", "node_id")
_SIZES = about("SELECT id, octet_length(submission) FROM task_inputs", "id")


def receive(work: UnitOfWork, visits: Sequence[Visit]) -> list[Received]:
    """Do what visits ask for, each of another worker; the last ones may be left for another time.

    Those are left whose answers would be too large beside the others'.
    """
    return _Reception(work, visits).receive()


class _Reception:
    """What is known of workers that visit together, and what is written for all of them."""

    def __init__(self, work: UnitOfWork, visits: Sequence[Visit]) -> None:
        self._work = work
        self._visits = visits
        ids = [visit.worker_id for visit in visits]
        self._known = nodes.known_workers(work.transaction, ids)
        self._room = nodes.Room(work.transaction, work.now)
        self._held: dict[str, list[TaskRow]] = {worker_id: [] for worker_id in ids}
        self._load()
        self._renewed: list[nodes.Renewal] = []
        self._bytes = 0

    def _load(self) -> None:
        """Read what the workers have; money only of what they do not name."""
        work = self._work
        pairs = sorted(work.transaction.read(_HELD, list(self._held)))
        work.load([task_id for _, task_id in pairs])
        running = {visit.worker_id: visit.running for visit in self._visits}
        unnamed: list[TaskRow] = []
        for worker_id, task_id in pairs:
            row = work.row(task_id)
            if row is None or not row.is_in_flight or row.progress.node_id != worker_id:
                continue
            self._held[worker_id].append(row)
            if running[worker_id].get(row.id) != row.progress.attempt:
                unnamed.append(row)
        work.load_ledger((), unnamed)
        wanted = [row.id for row in unnamed]
        self._sizes: dict[str, int] = dict(work.transaction.read(_SIZES, wanted)) if wanted else {}

    def receive(self) -> list[Received]:
        """Receive the visits in their order, and write what came of them."""
        received: list[tuple[Received, list[TaskRow]]] = []
        for visit in self._visits:
            if received and self._bytes > MAX_TOGETHER_BYTES:
                break
            try:
                received.append(self._receive(visit))
            except LimitReachedError as error:
                received.append((error, []))
        nodes.renew_workers(self._work.transaction, self._renewed)
        self._work.load_submissions(row.id for _, rows in received for row in rows)
        return [self._with_tasks(answer, rows) for answer, rows in received]

    def _with_tasks(self, answer: Received, rows: list[TaskRow]) -> Received:
        if isinstance(answer, LimitReachedError) or not rows:
            return answer
        tasks = tuple([row.record(self._work.submission(row.id)) for row in rows])
        return msgspec.structs.replace(answer, tasks=tasks)

    def _receive(self, visit: Visit) -> tuple[Orders, list[TaskRow]]:
        """Receive one visit; return what it is answered with, and the tasks that go with it."""
        work = self._work
        before = self._admit(visit)
        if before is None:
            return Orders(is_alive=False), []
        capacity = _capacity(visit, before, work.now)
        lease_until = work.now + visit.lease_seconds
        offered_until = before.offered_until if visit.capacity is None else lease_until
        renewal = nodes.Renewal(before, capacity, lease_until, offered_until)
        self._renewed.append(renewal)
        is_changed = visit.joins or capacity != before.capacity
        if is_changed or before.lease_until <= work.now:
            work.notify_dispatcher_of_worker(visit.worker_id)
        held = self._held[visit.worker_id]
        named = [row for row in held if visit.running.get(row.id) == row.progress.attempt]
        own = {row.id for row in named}
        for row in named:
            last, report = row.progress.report, visit.reports.get(row.id)
            if report is not None and (last is None or work.now - last.at >= REPORT_SECONDS):
                _keep_report(work, row, report)
        others = [row for row in held if row.id not in own]
        changed = _take_back(work, others, visit, offers=capacity > 0)
        tasks = self._handed_out(others) if capacity and visit.takes else []
        if visit.capacity == 0 and not named:
            self._renewed.remove(renewal)
            nodes.leave(work.transaction, visit.worker_id)
        # By nobody: a reply that gets lost must not hide these from a dispatcher on the same node.
        work.notify_dispatcher(changed, by="")
        orders = Orders(
            is_alive=True,
            cancelled=tuple([row.id for row in named if row.progress.cancel_requested]),
            lost=tuple([task_id for task_id in visit.running if task_id not in own]),
            has_news=is_changed or bool(changed),
        )
        return orders, tasks

    def _admit(self, visit: Visit) -> nodes.KnownWorker | None:
        """Return what is known of a worker, None if it is not known any more.

        One that comes late is known until somebody acts on the end of its lease, or until it was
        gone for long; it needs room as one that joins does.
        """
        known = self._known.get(visit.worker_id)
        if known is None and visit.joins:
            self._room.check(visit.agent_id)
            worker = Node(id=visit.worker_id, capacity=visit.capacity or 0, agent_id=visit.agent_id)
            lease_seconds = visit.lease_seconds
            known = nodes.join_worker(
                self._work.transaction, worker, now=self._work.now, lease_seconds=lease_seconds
            )
            self._room.take(visit.agent_id)
        if known is None or known.agent_id != visit.agent_id:
            return None
        if known.lease_until <= self._work.now:
            self._room.check(visit.agent_id)
            self._room.take(visit.agent_id)
        return known

    def _handed_out(self, rows: list[TaskRow]) -> list[TaskRow]:
        """Start what is assigned, and return as much of what runs as fits in one answer."""
        fitting: list[TaskRow] = []
        total_bytes = 0
        for row in [row for row in rows if row.is_in_flight][:MAX_HANDED_OUT]:
            total_bytes += self._sizes.get(row.id, 0)
            if fitting and total_bytes > MAX_HANDED_OUT_BYTES:
                break
            if is_running(self._work, row):
                fitting.append(row)
        self._bytes += total_bytes
        return [row for row in fitting if row.status is TaskStatus.RUNNING]


def _capacity(visit: Visit, before: nodes.KnownWorker, now: float) -> int:
    """Return the capacity of a worker: signs of life keep its tasks, and its offer for a while.

    Or what is assigned to a worker that claims nothing any more would wait until its deadline.
    """
    if visit.capacity is not None:
        return visit.capacity
    return before.capacity if visit.takes or before.offered_until > now else 0


def _take_back(
    work: UnitOfWork, rows: list[TaskRow], visit: Visit, *, offers: bool
) -> list[TaskRow]:
    """Take back what a worker will not run: it leaves, offers nothing, or is not to run it."""
    changed: dict[str, TaskRow] = {}
    for row in rows:
        is_left = visit.capacity == 0 or (not offers and row.status is TaskStatus.ASSIGNED)
        is_unwanted = row.progress.cancel_requested and visit.takes
        if is_left or is_unwanted:
            others = take_from_worker(work, row)
            changed.update((each.id, each) for each in (row, *others))
    return list(changed.values())


def keep_reports(work: UnitOfWork, reports: Sequence[AttemptReport]) -> None:
    """Keep how far attempts say they are, of those that run."""
    said = {one.task_id: one for one in reports}
    for row in work.rows(said):
        is_meant = row.progress.attempt == said[row.id].attempt
        if is_meant and row.status is TaskStatus.RUNNING:
            _keep_report(work, row, said[row.id].report)


def _keep_report(work: UnitOfWork, row: TaskRow, report: ProgressReport) -> None:
    """Keep a report that says something new: its time is that of the last change."""
    old, new = row.progress.report, report.bounded()
    if old is None or (old.fraction, old.text) != (new.fraction, new.text):
        new = msgspec.structs.replace(new, at=work.now)
        row.progress = msgspec.structs.replace(row.progress, report=new)
        work.change(row)


# The steps of a task store that workers ask for, and those that the dispatcher takes at them.


class _Waiting(NamedTuple):
    """A visit, whoever sent it, and its answer."""

    visit: Visit
    answer: asyncio.Future[Orders]
    who: str


class WorkerSteps:
    """A part of the task store in a database."""

    def __init__(self) -> None:
        self._visits: list[_Waiting] = []
        self._is_urgent = asyncio.Event()
        self._receiving: asyncio.Task[None] | None = None

    async def visit(self, visit: Visit) -> Orders:
        """Renew the lease of a worker, start what is assigned to it, and say what it is to do."""
        answer: asyncio.Future[Orders] = asyncio.get_running_loop().create_future()
        self._visits.append(_Waiting(visit, answer, asker.get()))
        if not visit.is_patient or len(self._visits) >= MAX_TOGETHER:
            self._is_urgent.set()
        if self._receiving is None:
            # For all that wait, and so for nobody in particular.
            self._receiving = asyncio.create_task(self._receive_visits(), context=Context())
        return await answer

    async def give_up(self, epoch: int, overdue: Sequence[Overdue]) -> list[TaskRecord]:
        """End attempts that a worker has neither ended nor stopped in time."""
        return await self._take_back(epoch, partial(finish.give_up, overdue=overdue))

    async def report(self, reports: Sequence[AttemptReport]) -> None:
        """Keep how far attempts say they are; of one that is over nothing is kept."""
        await self._work(partial(keep_reports, reports=reports))

    async def _receive_visits(self) -> None:
        """Write all visits that wait, as often as some do."""
        try:
            while self._visits:
                if all(one.visit.is_patient for one in self._visits[:MAX_TOGETHER]):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PATIENCE_SECONDS):
                            await self._is_urgent.wait()
                self._is_urgent.clear()
                together, self._visits = _next_visits(self._visits)
                if together:
                    self._visits = await self._receive_together(together) + self._visits
        finally:
            self._receiving = None
            left, self._visits = self._visits, []
            _fail(left, StoreUnavailableError("the store was closed"))

    async def _receive_together(self, together: list[_Waiting]) -> list[_Waiting]:
        """Write visits in one transaction, and return those that found no room in it."""
        try:
            work = partial(receive, visits=[one.visit for one in together])
            received = await self._work(work, goes_first=True)
        except StoreUnavailableError as error:
            _fail(together, error)
            return []
        # Whoever caused it is told by itself, and the others are received.
        except Exception as error:  # noqa: BLE001
            if len(together) == 1:
                _fail(together, error)
            else:
                for one in together:
                    await self._receive_together([one])
            return []
        for one, its_orders in zip(together, received, strict=False):
            if one.answer.done():
                continue
            if isinstance(its_orders, LimitReachedError):
                one.answer.set_exception(its_orders)
            else:
                one.answer.set_result(its_orders)
        return together[len(received) :]

    @abstractmethod
    async def _work(
        self, operation: Callable[[UnitOfWork], Result], *, goes_first: bool = False
    ) -> Result: ...

    @abstractmethod
    async def _take_back(
        self, epoch: int, operation: Callable[[UnitOfWork], list[TaskRow]]
    ) -> list[TaskRecord]: ...


def _next_visits(waiting: Sequence[_Waiting]) -> tuple[list[_Waiting], list[_Waiting]]:
    """Return the visits that are received together, one of each worker, and the others."""
    is_alone = len({one.who for one in waiting}) == 1
    most = MAX_TOGETHER if is_alone else MAX_JOBS_OF_CALLER
    first: dict[str, _Waiting] = {}
    others: list[_Waiting] = []
    taken = Counter[str]()
    for one in waiting:
        worker_id = one.visit.worker_id
        if worker_id in first or len(first) >= MAX_TOGETHER or taken[one.who] >= most:
            others.append(one)
        elif not one.answer.done():
            first[worker_id] = one
            taken[one.who] += 1
    return list(first.values()), others


def _fail(waiting: Iterable[_Waiting], error: Exception) -> None:
    for one in waiting:
        if not one.answer.done():
            one.answer.set_exception(error)
