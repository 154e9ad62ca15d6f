"""How a task leaves the queue or its place, how it ends, and what its end does to others.

Rule: every count is changed where the row is. A queued task leaves its lane once, an attempt frees
its place once, and a task ends once, whichever step it was that came first.

The end of a task is handed on to those that depend on it: one that succeeded is waited for no
more; one that did not fails them too, unless they asked to run all the same. This goes on, level by
level, within the same transaction.
"""

from __future__ import annotations

import msgspec

from headgate.core.tasks.deadlines import EXPIRED_WHILE_QUEUED
from headgate.core.tasks.outcomes import Finish, TryAgain, Usage
from headgate.core.tasks.past_attempts import PastAttempt, beginning_of, with_latest
from headgate.core.tasks.records import OnParentFailure, is_worker
from headgate.core.tasks.task import TaskStatus, check_move
from headgate.stores.tallies import ENDED, EXPIRED, TICK
from headgate.stores.task_rows import TaskRow
from headgate.stores.worksheet import Worksheet


def parent_error(parent: TaskRow) -> str:
    """Say why a task failed that depended on another."""
    return f"parent {parent.id} is {parent.status.value}"


def leave_queue(sheet: Worksheet, row: TaskRow) -> None:
    """Count a task out of its lane."""
    sheet.tallies.queue(row.spec.task.agent_id, row.project_id, -1)


def enter_queue(sheet: Worksheet, row: TaskRow) -> None:
    """Count a task into its lane."""
    sheet.tallies.queue(row.spec.task.agent_id, row.project_id, 1)


def free_place(sheet: Worksheet, row: TaskRow, cost: Usage) -> tuple[int, int]:
    """Take an attempt out of flight, book what it cost, and return the tokens and micro-dollars.

    What nobody knows of the cost is booked as it was held, and the task shows it as assumed.
    """
    old = row.progress
    assumed_tokens = old.reserved_tokens if cost.tokens is None else 0
    assumed_micro_usd = old.reserved_micro_usd if cost.micro_usd is None else 0
    tokens, micro_usd = cost.tokens or assumed_tokens, cost.micro_usd or assumed_micro_usd
    sheet.tallies.fly(row.agent_id, row.project_id, -1)
    sheet.tallies.count(TICK)
    if tokens or micro_usd:
        sheet.tallies.spend(row.project_id, tokens=tokens, micro_usd=micro_usd)
    sheet.settle_money(row.progress.reservation_id, tokens=tokens, micro_usd=micro_usd)
    node_id = row.progress.node_id
    if node_id is not None and is_worker(node_id):
        sheet.take_from_worker(node_id, row.id)
    row.tokens, row.micro_usd = tokens, micro_usd
    if tokens or micro_usd:
        row.progress = msgspec.structs.replace(
            old,
            used_tokens=old.used_tokens + tokens,
            used_micro_usd=old.used_micro_usd + micro_usd,
            assumed_tokens=old.assumed_tokens + assumed_tokens,
            assumed_micro_usd=old.assumed_micro_usd + assumed_micro_usd,
        )
    return tokens, micro_usd


def requeue(sheet: Worksheet, row: TaskRow, step: TryAgain, cost: Usage) -> None:
    """Let a task that has left its place wait for another attempt, and note the one that ended."""
    error = _storable(step.error)
    note = _note(row, cost, error=error, now=sheet.now)
    _move(sheet, row, TaskStatus.QUEUED)
    row.progress = msgspec.structs.replace(
        row.progress,
        failures=step.failures,
        losses=step.losses,
        rate_limit_hits=step.rate_limit_hits,
        not_before=step.not_before,
        node_id=None,
        attempts=with_latest(row.progress.attempts, note),
    )
    row.agent_id = row.spec.task.agent_id
    row.error = error
    enter_queue(sheet, row)


def finish(sheet: Worksheet, row: TaskRow, end: Finish) -> list[TaskRow]:
    """End a task that has left queue and place, and return the others that this changed."""
    _end(sheet, row, end)
    touched: dict[str, TaskRow] = {}
    ended = [row]
    while ended := [parent for parent in ended if parent.progress.dependants]:
        pairs = sheet.children(ended)
        touched.update((child.id, child) for _, child in pairs)
        ended = [child for parent, child in pairs if _hand_on(sheet, parent, child)]
    return list(touched.values())


def descendants(sheet: Worksheet, row: TaskRow) -> list[TaskRow]:
    """Return what the end of a task may have changed, for an answer that is given again."""
    found: dict[str, TaskRow] = {}
    ended = [row] if row.is_terminal else []
    while ended:
        children = [child for _, child in sheet.children(ended) if child.id not in found]
        found.update((child.id, child) for child in children)
        ended = [child for child in children if child.is_terminal]
    return list(found.values())


def release_parents(sheet: Worksheet, row: TaskRow) -> None:
    """Let go of the results that an ended task depended on."""
    for parent in sheet.rows(row.spec.terms.depends_on):
        old = parent.progress
        parent.progress = msgspec.structs.replace(old, dependants=max(0, old.dependants - 1))
        sheet.change(parent)


def _hand_on(sheet: Worksheet, parent: TaskRow, child: TaskRow) -> bool:
    """Tell a task that one of its parents has ended; return whether that ends it."""
    if child.status is not TaskStatus.QUEUED or not child.progress.waiting_for:
        return False
    is_fatal = child.spec.terms.on_parent_failure is OnParentFailure.FAIL
    if parent.status is not TaskStatus.DONE and is_fatal:
        leave_queue(sheet, child)
        _end(sheet, child, Finish(status=TaskStatus.FAILED, error=parent_error(parent)))
        return True
    left = child.progress.waiting_for - 1
    child.progress = msgspec.structs.replace(child.progress, waiting_for=left)
    sheet.change(child)
    return False


def _end(sheet: Worksheet, row: TaskRow, end: Finish) -> None:
    _move(sheet, row, end.status)
    row.progress = msgspec.structs.replace(
        row.progress, not_before=None, node_id=None, completed_at=sheet.now
    )
    row.error = _storable(end.error)
    sheet.tallies.happen(ENDED[end.status], row.agent_id, row.project_id)
    if end.error == EXPIRED_WHILE_QUEUED:
        sheet.tallies.happen(EXPIRED, row.agent_id, row.project_id)
    if row.spec.terms.depends_on:
        release_parents(sheet, row)
    if row.spec.terms.callback_url is not None:
        sheet.tell_receiver(row, row.spec.terms.callback_url)


def _note(row: TaskRow, cost: Usage, *, error: str | None, now: float) -> PastAttempt:
    """Return what is kept of an attempt that is out of flight and not requeued yet."""
    progress = row.progress
    tokens, micro_usd = row.tokens or 0, row.micro_usd or 0
    # A task that is assigned still shows when the attempt before began.
    has_begun = row.status is TaskStatus.RUNNING
    return PastAttempt(
        attempt=progress.attempt,
        started_at=progress.started_at if has_begun else None,
        ended_at=now,
        error=beginning_of(error),
        agent_id=row.agent_id,
        slot=progress.slot or row.spec.task.slot,
        node_id=progress.node_id,
        tokens=tokens,
        micro_usd=micro_usd,
        assumed_tokens=tokens if cost.tokens is None else 0,
        assumed_micro_usd=micro_usd if cost.micro_usd is None else 0,
    )


def _storable(error: str | None) -> str | None:
    """Leave out what no database takes; an error may quote whatever a process has printed."""
    if error is None or error.isprintable():
        return error
    return error.replace("\0", "").encode(errors="replace").decode()


def _move(sheet: Worksheet, row: TaskRow, status: TaskStatus) -> None:
    check_move(row.id, row.status, status)
    row.status = status
    sheet.change(row)
