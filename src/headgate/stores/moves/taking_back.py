"""What the dispatcher ends or takes back by itself: tasks that cannot run, and lost attempts."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.core.tasks.deadlines import EXPIRED_WHILE_QUEUED
from headgate.core.tasks.outcomes import (
    DEADLINE_EXCEEDED,
    NOTHING_USED,
    UNKNOWN_USAGE,
    Finish,
    Lost,
    TryAgain,
    next_step,
    timed_out,
)
from headgate.core.tasks.task import TaskStatus
from headgate.store import Drop
from headgate.stores import nodes
from headgate.stores.moves.ending import descendants, finish, leave_queue
from headgate.stores.moves.settling import CANCELLED_ON_REQUEST, conclude
from headgate.stores.task_rows import TaskRow
from headgate.stores.worksheet import Worksheet
from headgate.worker_store import Overdue


def drop(sheet: Worksheet, drops: Sequence[Drop]) -> list[TaskRow]:
    """End queued tasks; what is not queued any more is returned as it is."""
    sheet.load(wanted.task_id for wanted in drops)
    changed: dict[str, TaskRow] = {}
    for wanted in drops:
        row = sheet.row(wanted.task_id)
        if row is not None:
            others = _drop(sheet, row, wanted)
            changed.update((each.id, each) for each in (row, *others))
    return list(changed.values())


def recover(sheet: Worksheet, task_ids: Sequence[str]) -> list[TaskRow]:
    """Take attempts from nodes that are not alive; what is not in flight is returned as it is."""
    rows = sheet.rows(task_ids)
    sheet.load_books((), rows)
    owners = {row.progress.node_id for row in rows if row.progress.node_id is not None}
    dead = nodes.lease_ended(sheet.transaction, owners, sheet.now) if owners else set()
    changed: dict[str, TaskRow] = {}
    for row in rows:
        if row.progress.node_id is None or row.progress.node_id in dead:
            others = _recover(sheet, row) if row.is_in_flight else descendants(sheet, row)
            changed.update((each.id, each) for each in (row, *others))
    return list(changed.values())


def give_up(sheet: Worksheet, overdue: Sequence[Overdue]) -> list[TaskRow]:
    """End attempts at workers that have had their time; all that was held for them is booked."""
    rows = sheet.rows(wanted.task_id for wanted in overdue)
    sheet.load_books((), rows)
    attempts = {wanted.task_id: wanted.attempt for wanted in overdue}
    changed: dict[str, TaskRow] = {}
    for row in rows:
        is_meant = row.is_in_flight and row.progress.attempt == attempts[row.id]
        end = _end_of_overdue(row, sheet.now) if is_meant else None
        others = descendants(sheet, row) if end is None else _conclude(sheet, row, end)
        changed.update((each.id, each) for each in (row, *others))
    return list(changed.values())


def take_from_worker(sheet: Worksheet, row: TaskRow) -> list[TaskRow]:
    """End an attempt that its worker does not know of: it was lost, or is not wanted any more."""
    return _recover(sheet, row)


def _end_of_overdue(row: TaskRow, now: float) -> Finish | TryAgain | None:
    deadline = row.spec.task.deadline
    if deadline is not None and deadline <= now:
        has_started = row.status is TaskStatus.RUNNING
        error = DEADLINE_EXCEEDED if has_started else EXPIRED_WHILE_QUEUED
        return Finish(status=TaskStatus.FAILED, error=error)
    if row.progress.cancel_requested:
        return CANCELLED_ON_REQUEST
    seconds, began_at = row.spec.terms.attempt_seconds, row.progress.started_at
    if seconds is None or began_at is None or row.status is not TaskStatus.RUNNING:
        return None
    if now < began_at + seconds:
        return None
    return next_step(timed_out(seconds), row.progress, row.spec.terms, now=now, draw=0.0)


def _drop(sheet: Worksheet, row: TaskRow, wanted: Drop) -> list[TaskRow]:
    if row.status is not TaskStatus.QUEUED:
        return descendants(sheet, row)
    leave_queue(sheet, row)
    return finish(sheet, row, Finish(status=wanted.status, error=wanted.error))


def _recover(sheet: Worksheet, row: TaskRow) -> list[TaskRow]:
    """End a lost attempt; one that had begun is booked at all that was held for it."""
    has_started = row.status is TaskStatus.RUNNING
    step = next_step(
        Lost(has_started=has_started), row.progress, row.spec.terms, now=sheet.now, draw=0.0
    )
    return _conclude(sheet, row, step)


def _conclude(sheet: Worksheet, row: TaskRow, step: Finish | TryAgain) -> list[TaskRow]:
    has_started = row.status is TaskStatus.RUNNING
    return conclude(sheet, row, step, UNKNOWN_USAGE if has_started else NOTHING_USED)
