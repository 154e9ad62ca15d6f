"""Cancelling: what waits ends at once, and the node of what runs is asked to stop it."""

from __future__ import annotations

import msgspec

from headgate.core.tasks.outcomes import NOTHING_USED
from headgate.core.tasks.records import is_worker
from headgate.core.tasks.task import TaskStatus
from headgate.store import CancelAnswer
from headgate.stores.messages import Kind
from headgate.stores.moves.ending import descendants, finish, leave_queue
from headgate.stores.moves.settling import CANCELLED_ON_REQUEST, conclude
from headgate.stores.task_rows import TaskRow
from headgate.stores.worksheet import Worksheet


class Cancellation(msgspec.Struct, frozen=True):
    """Somebody wants a task cancelled, and asked this node."""

    task_id: str
    node_id: str


def cancel(sheet: Worksheet, request: Cancellation) -> CancelAnswer | None:
    """Cancel a task; the first record is the task, the others ended with it."""
    row = sheet.row(request.task_id)
    if row is None:
        return None
    if row.status is TaskStatus.RUNNING:
        _ask_to_stop(sheet, row, request.node_id)
        return CancelAnswer(records=(row.record(),))
    had_ended = row.is_terminal
    if not had_ended:
        others = _cancel(sheet, row, request)
    else:
        is_repeat = row.status is TaskStatus.CANCELLED
        others = descendants(sheet, row) if is_repeat else []
    records = (row.record(), *[other.record() for other in others])
    return CancelAnswer(records=records, had_ended=had_ended)


def _ask_to_stop(sheet: Worksheet, row: TaskRow, asked_at: str) -> None:
    if row.progress.cancel_requested:
        return
    row.progress = msgspec.structs.replace(row.progress, cancel_requested=True)
    sheet.change(row)
    if row.progress.node_id not in (None, asked_at):
        sheet.tell(row.progress.node_id, Kind.CANCELLED, row.id)
    if is_worker(row.progress.node_id):
        # Whoever dispatches sees to it that a worker which does not stop is not waited for.
        sheet.tell_dispatcher((row,), by=asked_at)


def _cancel(sheet: Worksheet, row: TaskRow, request: Cancellation) -> list[TaskRow]:
    if row.status is TaskStatus.ASSIGNED:
        # Its node has not begun, so nothing was charged.
        others = conclude(sheet, row, CANCELLED_ON_REQUEST, NOTHING_USED)
    else:
        leave_queue(sheet, row)
        others = finish(sheet, row, CANCELLED_ON_REQUEST)
    sheet.tell_dispatcher([row, *others], by=request.node_id)
    return others
