"""Collecting: a node learns what it was assigned and what to cancel, and starts the former.

A message only says where to look. A task that is assigned to the node is written as running; one
that runs there already was started by a call whose answer got lost, and is returned once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.core.tasks.outcomes import NOTHING_USED, TryAgain
from headgate.core.tasks.records import Progress
from headgate.core.tasks.task import TaskStatus
from headgate.store import Collected
from headgate.stores.messages import Kind, Message
from headgate.stores.moves.assigning import count_start
from headgate.stores.moves.settling import conclude
from headgate.stores.task_rows import TaskRow
from headgate.stores.worksheet import Worksheet


def collect(sheet: Worksheet, node_id: str, received: Sequence[Message]) -> Collected:
    """Start what is assigned to a node, and say what it has to stop."""
    rows = [
        row
        for row in sheet.rows(message.task_id for message in received)
        if row.progress.node_id == node_id
    ]
    sheet.load_books((), [row for row in rows if row.status is TaskStatus.ASSIGNED])
    assigned = {message.task_id for message in received if message.kind is Kind.ASSIGNED}
    started = [row for row in rows if row.id in assigned and is_running(sheet, row)]
    sheet.load_submissions(row.id for row in started)
    return Collected(
        started=tuple([row.record(sheet.submission(row.id)) for row in started]),
        cancelled=tuple([row.id for row in rows if row.progress.cancel_requested]),
    )


def is_running(sheet: Worksheet, row: TaskRow) -> bool:
    """Start a task that is assigned, and tell whether it runs now."""
    if row.status is TaskStatus.ASSIGNED:
        _start(sheet, row)
    return row.status is TaskStatus.RUNNING


def _start(sheet: Worksheet, row: TaskRow) -> None:
    old = row.progress
    if not sheet.mark_dispatched(old.reservation_id):
        # The money went back before the node came: the task has to be decided again.
        give_back(sheet, row, old)
        return
    count_start(sheet, row)
    row.status = TaskStatus.RUNNING
    row.progress = msgspec.structs.replace(old, started_at=sheet.now)
    sheet.change(row)


def give_back(sheet: Worksheet, row: TaskRow, progress: Progress) -> None:
    """Have a task decided again that its node has not begun."""
    again = TryAgain(
        not_before=None,
        failures=progress.failures,
        losses=progress.losses,
        rate_limit_hits=progress.rate_limit_hits,
    )
    conclude(sheet, row, again, NOTHING_USED)
    sheet.tell_dispatcher((row,), by="")
