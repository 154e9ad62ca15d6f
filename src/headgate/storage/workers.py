"""Visits of workers: a sign of life, what is to be run, and what is not theirs any more.

A worker says what it runs. What it has beyond that is started and handed out, or handed out once
more if an earlier answer got lost. A worker that offers no place is leaving, and has taken from it
whatever it does not run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from headgate.core.task import TaskRecord, TaskStatus
from headgate.storage import finish, nodes
from headgate.storage.assign import is_running
from headgate.storage.finish import take_from_worker
from headgate.storage.store import (
    DISPATCHER,
    MAX_HANDED_OUT,
    MAX_HANDED_OUT_BYTES,
    Node,
    Orders,
    Overdue,
    Visit,
)
from headgate.storage.transaction import Result, about
from headgate.storage.unit_of_work import TaskRow, UnitOfWork

_HELD = "SELECT task_id FROM worker_tasks WHERE node_id = ? ORDER BY task_id"
_SIZES = about("SELECT id, octet_length(submission) FROM task_inputs", "id")


def receive(work: UnitOfWork, visit: Visit) -> Orders:
    """Do what one visit asks for."""
    before = _admit(work, visit)
    if before is None:
        return Orders(is_alive=False)
    capacity = _capacity(visit, before, work.now)
    nodes.renew_worker(
        work.transaction,
        visit.worker_id,
        capacity=capacity,
        lease_until=work.now + visit.lease_seconds,
        offers=visit.capacity is not None,
    )
    has_other_capacity = visit.joins or capacity != before.capacity
    if has_other_capacity:
        work.call(DISPATCHER)
    held = _held(work, visit.worker_id)
    named = [row for row in held if visit.running.get(row.id) == row.progress.attempt]
    own = {row.id for row in named}
    others = [row for row in held if row.id not in own]
    changed = _take_back(work, others, visit, offers=capacity > 0)
    tasks = _handed_out(work, others) if capacity and visit.takes else []
    if visit.capacity == 0 and not named:
        nodes.leave(work.transaction, visit.worker_id)
    # By nobody: a reply that gets lost must not hide these from a dispatcher on the same node.
    work.notify_dispatcher(changed, by="")
    return Orders(
        is_alive=True,
        tasks=tuple([row.record(work.submission(row.id)) for row in tasks]),
        cancelled=tuple([row.id for row in named if row.progress.cancel_requested]),
        lost=tuple([task_id for task_id in visit.running if task_id not in own]),
        has_news=has_other_capacity or bool(changed),
    )


def _capacity(visit: Visit, before: nodes.Offer, now: float) -> int:
    """Return the capacity of a worker: signs of life keep its tasks, and its offer for a while.

    Or what is assigned to a worker that claims nothing any more would wait until its deadline.
    """
    if visit.capacity is not None:
        return visit.capacity
    return before.capacity if visit.takes or before.until > now else 0


def _admit(work: UnitOfWork, visit: Visit) -> nodes.Offer | None:
    """Return what a worker has offered until now, None if it is not known any more."""
    transaction = work.transaction
    if visit.joins:
        worker = Node(id=visit.worker_id, capacity=visit.capacity or 0, agent_id=visit.agent_id)
        nodes.join_worker(transaction, worker, now=work.now, lease_seconds=visit.lease_seconds)
    return nodes.offer_of(transaction, visit.worker_id, visit.agent_id, work.now)


def _held(work: UnitOfWork, worker_id: str) -> list[TaskRow]:
    rows = work.transaction.read(_HELD, (worker_id,))
    held = work.rows(row[0] for row in rows)
    work.load_ledger((), held)
    return [row for row in held if row.is_in_flight and row.progress.node_id == worker_id]


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


def _handed_out(work: UnitOfWork, rows: list[TaskRow]) -> list[TaskRow]:
    """Start what is assigned, and return as much of what runs as fits in one answer."""
    wanted = [row for row in rows if row.is_in_flight][:MAX_HANDED_OUT]
    if not wanted:
        return []
    ids = [row.id for row in wanted]
    sizes: dict[str, int] = dict(work.transaction.read(_SIZES, ids))
    fitting: list[TaskRow] = []
    total_bytes = 0
    for row in wanted:
        total_bytes += sizes.get(row.id, 0)
        if fitting and total_bytes > MAX_HANDED_OUT_BYTES:
            break
        if is_running(work, row):
            fitting.append(row)
    work.load_submissions(row.id for row in fitting)
    return [row for row in fitting if row.status is TaskStatus.RUNNING]


# The steps of a task store that workers ask for, and those that the dispatcher takes at them.


class WorkerSteps:
    """A part of the task store in a database."""

    async def visit(self, visit: Visit) -> Orders:
        """Renew the lease of a worker, start what is assigned to it, and say what it is to do."""
        return await self._work(partial(receive, visit=visit), goes_first=True)

    async def give_up(self, epoch: int, overdue: Sequence[Overdue]) -> list[TaskRecord]:
        """End attempts that a worker has neither ended nor stopped in time."""
        return await self._take_back(epoch, partial(finish.give_up, overdue=overdue))

    @abstractmethod
    async def _work(
        self, operation: Callable[[UnitOfWork], Result], *, goes_first: bool = False
    ) -> Result: ...

    @abstractmethod
    async def _take_back(
        self, epoch: int, operation: Callable[[UnitOfWork], list[TaskRow]]
    ) -> list[TaskRecord]: ...
