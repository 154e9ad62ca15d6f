"""What the dispatcher ends or takes back by itself: tasks that cannot run, and lost attempts."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.core.outcomes import Finish, Lost, next_step
from headgate.core.tasks import TaskStatus
from headgate.store import Drop
from headgate.stores import nodes
from headgate.stores.ending import descendants, finish, leave_queue
from headgate.stores.settling import conclude
from headgate.stores.task_rows import TaskRow
from headgate.stores.worksheet import Worksheet


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


def _drop(sheet: Worksheet, row: TaskRow, wanted: Drop) -> list[TaskRow]:
    if row.status is not TaskStatus.QUEUED:
        return descendants(sheet, row)
    leave_queue(sheet, row)
    return finish(sheet, row, Finish(status=wanted.status, error=wanted.error))


def _recover(sheet: Worksheet, row: TaskRow) -> list[TaskRow]:
    """End a lost attempt; one that had begun is booked at all that was held for it."""
    progress, has_started = row.progress, row.status is TaskStatus.RUNNING
    step = next_step(
        Lost(has_started=has_started), progress, row.spec.terms, now=sheet.now, draw=0.0
    )
    return conclude(
        sheet,
        row,
        step,
        tokens=progress.reserved_tokens if has_started else 0,
        micro_usd=progress.reserved_micro_usd if has_started else 0,
    )
