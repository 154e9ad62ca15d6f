"""Submitting: a task is stored, if there is room for it and its parents are known.

A task that is turned away is stored too, as rejected, where its refusal is to be kept; one whose
parent has failed already is stored as failed. An id that is known gets the answer that it got the
first time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.core.tasks.admission import Rejected, admit
from headgate.core.tasks.records import OnParentFailure, Progress
from headgate.core.tasks.task import TaskStatus
from headgate.store import NewTask, Queued, TurnedAway, UnknownParent
from headgate.stores.moves.ending import enter_queue, parent_error
from headgate.stores.tallies import ENDED, SUBMITTED
from headgate.stores.task_rows import Spec, TaskRow
from headgate.stores.worksheet import Worksheet

SubmitAnswer = Queued | TurnedAway | UnknownParent


def prepare(sheet: Worksheet, requests: Sequence[NewTask]) -> None:
    """Read what these submissions need, beside their rows."""
    if requests:
        agents = {new.task.agent_id for new in requests}
        sheet.load_counts(agent for agent in agents if agent is not None)


def task_ids(new: NewTask) -> tuple[str, ...]:
    """Return the tasks that a submission looks at."""
    return (new.task.id, *new.terms.depends_on)


def submit(sheet: Worksheet, new: NewTask) -> SubmitAnswer:
    """Store a task if it may wait."""
    known = sheet.row(new.task.id)
    if known is not None:
        return _again(known, new)
    parents = []
    for parent_id in dict.fromkeys(new.terms.depends_on):
        parent = sheet.row(parent_id)
        if parent is None:
            return UnknownParent(parent_id=parent_id)
        parents.append(parent)
    return _store(sheet, new, parents)


def _store(sheet: Worksheet, new: NewTask, parents: list[TaskRow]) -> SubmitAnswer:
    fatal = _failed_parent(new, parents)
    if fatal is not None:
        return _store_failed(sheet, new, fatal)
    agent_id = new.task.agent_id
    queued_for_agent = 0 if agent_id is None else sheet.queued_for(agent_id)
    answer = admit(
        new.limits, queued=sheet.queued(), queued_for_agent=queued_for_agent, agent_id=agent_id
    )
    if isinstance(answer, Rejected):
        return _store_rejected(sheet, new, answer)
    row = _row(sheet, new, position=answer.position)
    if parents:
        _depend(sheet, row, parents)
    sheet.tallies.happen(SUBMITTED, row.agent_id, row.project_id)
    enter_queue(sheet, row)
    sheet.tell_dispatcher((row,), by=new.node_id)
    return Queued(record=row.record(new.submission), position=answer.position)


def _again(row: TaskRow, new: NewTask) -> SubmitAnswer:
    record, rejected = row.record(new.submission), row.spec.rejected
    if rejected is not None:
        return TurnedAway(record=record, rejected=rejected)
    return Queued(record=record, position=row.spec.position)


def _failed_parent(new: NewTask, parents: list[TaskRow]) -> TaskRow | None:
    if new.terms.on_parent_failure is OnParentFailure.RUN:
        return None
    failed = (row for row in parents if row.is_terminal and row.status is not TaskStatus.DONE)
    return next(failed, None)


def _depend(sheet: Worksheet, row: TaskRow, parents: list[TaskRow]) -> None:
    waiting_for = sum(not parent.is_terminal for parent in parents)
    row.progress = Progress(waiting_for=waiting_for)
    sheet.depend(row, [parent.id for parent in parents])
    for parent in parents:
        more = parent.progress.dependants + 1
        parent.progress = msgspec.structs.replace(parent.progress, dependants=more)
        sheet.change(parent)


def _store_failed(sheet: Worksheet, new: NewTask, parent: TaskRow) -> Queued:
    row = _row(sheet, new, position=0)
    _end_at_once(sheet, row, TaskStatus.FAILED, parent_error(parent))
    sheet.tallies.happen(SUBMITTED, row.agent_id, row.project_id)
    sheet.tell_dispatcher((row,), by=new.node_id)
    return Queued(record=row.record(new.submission), position=0)


def _store_rejected(sheet: Worksheet, new: NewTask, rejected: Rejected) -> TurnedAway:
    if not new.keeps_refusal:
        row = TaskRow(Spec(new.task, new.terms, 0, rejected))
        return TurnedAway(record=row.record(new.submission), rejected=rejected)
    row = _row(sheet, new, position=0, rejected=rejected)
    _end_at_once(sheet, row, TaskStatus.REJECTED, rejected.message)
    # It has nothing to decide there, but tells those who listen.
    sheet.tell_dispatcher((row,), by=new.node_id)
    return TurnedAway(record=row.record(new.submission), rejected=rejected)


def _end_at_once(sheet: Worksheet, row: TaskRow, status: TaskStatus, error: str) -> None:
    row.status, row.error = status, error
    row.progress = Progress(completed_at=sheet.now)
    sheet.tallies.happen(ENDED[status], row.agent_id, row.project_id)
    if row.spec.terms.callback_url is not None:
        sheet.tell_receiver(row, row.spec.terms.callback_url)


def _row(
    sheet: Worksheet, new: NewTask, *, position: int, rejected: Rejected | None = None
) -> TaskRow:
    task, tick = new.task, sheet.tick()
    # Only the store knows how many attempts have ended; and a new task has always to wait.
    if task.enqueued_tick != tick or task.status is not TaskStatus.QUEUED:
        task = msgspec.structs.replace(task, enqueued_tick=tick, status=TaskStatus.QUEUED)
    row = TaskRow(Spec(task, new.terms, position, rejected))
    sheet.add(row, new.submission)
    return row
