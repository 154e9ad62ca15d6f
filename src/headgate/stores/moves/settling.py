"""Settling: the end of an attempt, written by whoever holds its lease.

Rule: a lease is one life of one node for one attempt. Whatever shows another one changes nothing.
The settlement that ended an attempt may come again, and gets its answer again.
"""

from __future__ import annotations

from headgate.core.tasks.outcomes import CANCELLED, Finish, TryAgain, Usage
from headgate.core.tasks.task import TaskStatus
from headgate.store import Settled, Settlement, StaleLease
from headgate.stores.moves.ending import descendants, finish, free_place, requeue
from headgate.stores.task_rows import TaskRow
from headgate.stores.worksheet import Worksheet

CANCELLED_ON_REQUEST = Finish(status=TaskStatus.CANCELLED, error=CANCELLED)


def settle(sheet: Worksheet, settlement: Settlement) -> Settled | StaleLease:
    """Write the end of an attempt: the outcome, the money, the freed place."""
    row = sheet.row(settlement.task_id)
    if row is None or row.progress.attempt != settlement.lease.attempt:
        return StaleLease(task_id=settlement.task_id)
    node_id = settlement.lease.node_id
    if row.is_in_flight and row.progress.node_id == node_id:
        return _settled(_apply(sheet, row, settlement))
    if not row.is_in_flight and row.settled_by == node_id:
        return _settled([row, *descendants(sheet, row)])
    return StaleLease(task_id=settlement.task_id)


def conclude(sheet: Worksheet, row: TaskRow, step: Finish | TryAgain, cost: Usage) -> list[TaskRow]:
    """End an attempt, and with it the task unless it is tried again; return the other tasks.

    A task that somebody wants cancelled is not tried again.
    """
    tokens, micro_usd = free_place(sheet, row, cost)
    sheet.tallies.use(
        (row.project_id, row.agent_id or "", cost.model or ""),
        is_over=row.progress.cancel_requested or isinstance(step, Finish),
        tokens=tokens,
        micro_usd=micro_usd,
    )
    if isinstance(step, TryAgain):
        if not row.progress.cancel_requested:
            requeue(sheet, row, step, cost)
            return []
        step = CANCELLED_ON_REQUEST
    if step.status is TaskStatus.DONE:
        sheet.tallies.complete(row.project_id)
    return finish(sheet, row, step)


def _apply(sheet: Worksheet, row: TaskRow, settlement: Settlement) -> list[TaskRow]:
    others = conclude(sheet, row, settlement.step, settlement.cost)
    row.settled_by = settlement.lease.node_id
    if settlement.result is not None and row.is_terminal:
        row.result = bytes(settlement.result).decode()
    if settlement.closure is not None:
        sheet.close_gate(settlement.closure)
    changed = [row, *others]
    sheet.tell_dispatcher(changed, by=settlement.node_id or settlement.lease.node_id)
    return changed


def _settled(rows: list[TaskRow]) -> Settled:
    return Settled(records=tuple([row.record() for row in rows]))
