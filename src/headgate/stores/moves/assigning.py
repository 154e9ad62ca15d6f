"""Assigning: a line of a plan takes the task, a place and the money, or nothing at all.

The plan was made from a picture that may be old. What counts is the row: the task must still be
queued, with the attempt that the plan saw, and with nothing left to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headgate.core.budgets.accounts import Refused
from headgate.core.budgets.reservations import LIVE
from headgate.core.tasks.records import is_worker
from headgate.core.tasks.task import TaskStatus
from headgate.errors import CallerError
from headgate.store import Assigned, Assignment, NotAssigned
from headgate.stores import nodes
from headgate.stores.messages import Kind
from headgate.stores.moves.ending import leave_queue
from headgate.stores.tallies import STARTED, WAIT_MS
from headgate.stores.task_rows import TaskRow
from headgate.stores.worksheet import Worksheet


class Plan(msgspec.Struct, frozen=True):
    """What a dispatcher wants assigned, under the epoch in which it was elected."""

    epoch: int
    assignments: Sequence[Assignment]


def prepare(sheet: Worksheet, plans: Iterable[Plan]) -> set[str]:
    """Read what tasks that start were given to do, and return which nodes are not alive."""
    lines = [line for plan in plans for line in plan.assignments]
    if not lines:
        return set()
    sheet.load_submissions([line.task_id for line in lines if line.starts])
    return nodes.lease_ended(sheet.transaction, {line.node_id for line in lines}, sheet.now)


def assign(sheet: Worksheet, line: Assignment, *, dead: set[str]) -> Assigned | NotAssigned:
    """Apply one line of a plan; nobody is assigned to a node that is not alive."""
    row = sheet.row(line.task_id)
    if row is None:
        return NotAssigned(task_id=line.task_id, record=None)
    if _is_assigned(row, line):
        return _assigned(sheet, row, line)
    if line.node_id in dead or not _is_as_planned(row, line):
        return NotAssigned(task_id=line.task_id, record=row.record())
    is_held, refused = _reserve(sheet, line)
    if not is_held:
        return NotAssigned(task_id=line.task_id, record=row.record(), refused=refused)
    _take(sheet, row, line)
    if not line.starts:
        sheet.tell(line.node_id, Kind.ASSIGNED, row.id)
        if is_worker(line.node_id):
            sheet.give_to_worker(line.node_id, row.id)
    return _assigned(sheet, row, line)


def count_start(sheet: Worksheet, row: TaskRow) -> None:
    """Count an attempt that begins to run now."""
    lane = (row.agent_id, row.project_id)
    sheet.tallies.happen(STARTED, *lane)
    sheet.tallies.happen(WAIT_MS, *lane, _waited_ms(row, sheet.now))
    sheet.tallies.start(row.project_id)


def _is_assigned(row: TaskRow, line: Assignment) -> bool:
    progress = row.progress
    return (
        row.is_in_flight
        and progress.attempt == line.attempt
        and progress.node_id == line.node_id
        and progress.reservation_id == (line.reservation_id or None)
    )


def _is_as_planned(row: TaskRow, line: Assignment) -> bool:
    progress = row.progress
    return (
        row.status is TaskStatus.QUEUED
        and progress.attempt == line.attempt - 1
        and not progress.waiting_for
    )


def _reserve(sheet: Worksheet, line: Assignment) -> tuple[bool, Refused | None]:
    """Hold the money of a line; return whether it is held, and if a budget refused, its reasons."""
    request = line.reserve
    if request is None or not sheet.keeps_books:
        return True, None
    if request.dispatched is not line.starts:
        request = msgspec.structs.replace(request, dispatched=line.starts)
    try:
        answer = sheet.books.reserve(request, sheet.now)
    except CallerError:
        # An id that is taken, or a window whose zone this machine does not know: the line is not
        # applied, and the others in the same plan are not to suffer from it.
        return False, None
    if isinstance(answer, Refused):
        return False, answer
    # A known id gets its answer again, also when what it held was given back long ago.
    return answer.state in LIVE, None


def _take(sheet: Worksheet, row: TaskRow, line: Assignment) -> None:
    leave_queue(sheet, row)
    # A start is counted with the agent that takes the task, here as when another node collects it.
    row.agent_id = line.agent_id
    if line.starts:
        count_start(sheet, row)
    old, tallies = row.progress, sheet.tallies
    row.status = TaskStatus.RUNNING if line.starts else TaskStatus.ASSIGNED
    row.settled_by = None
    row.progress = msgspec.structs.replace(
        old,
        attempt=line.attempt,
        node_id=line.node_id,
        reservation_id=line.reservation_id or None,
        reserved_tokens=line.tokens,
        reserved_micro_usd=line.micro_usd,
        started_at=sheet.now if line.starts else old.started_at,
        slot=line.slot,
        choice=line.choice,
    )
    tallies.fly(line.agent_id, row.project_id, 1)
    tallies.serve(row.spec.task.agent_id, row.project_id, line.tick)
    tallies.charge(line.rate_charges)
    sheet.change(row)


def _assigned(sheet: Worksheet, row: TaskRow, line: Assignment) -> Assigned:
    if not line.starts:
        return Assigned(record=row.record())
    return Assigned(record=row.record(sheet.submission(row.id)))


def _waited_ms(row: TaskRow, now: float) -> int:
    """Return how long a task has been kept waiting though it could have started."""
    task, progress = row.spec.task, row.progress
    since = progress.not_before if progress.not_before is not None else task.not_before
    if progress.started_at is None:
        since = task.created_at if since is None else max(since, task.created_at)
    return 0 if since is None else max(0, round((now - since) * 1_000))
