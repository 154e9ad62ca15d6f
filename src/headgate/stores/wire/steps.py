"""Steps and their answers as they are sent, and how each becomes itself again.

A step says which of its tasks are known where it comes from. `note` of a job has what that means:
on the side that asks the records that it knows, on the side that writes whether they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headgate.core.budgets.accounts import Refused
from headgate.core.gates import GateClosure
from headgate.core.tasks.outcomes import Finish, TryAgain, Usage
from headgate.core.tasks.records import Lease, TaskRecord
from headgate.core.tasks.submit_keys import KeyRefusal
from headgate.core.tasks.task import TaskStatus
from headgate.databases.jobs import Job
from headgate.store import (
    Assigned,
    Assignment,
    CancelAnswer,
    KeyedAnswer,
    KeyedSubmit,
    NewTask,
    NotAssigned,
    Queued,
    Settled,
    Settlement,
    StaleLease,
    TurnedAway,
    UnknownParent,
)
from headgate.stores.moves.assigning import Plan
from headgate.stores.moves.cancelling import Cancellation
from headgate.stores.wire.records import (
    Change,
    KnownTasks,
    Sent,
    Whole,
    change,
    from_change,
    from_whole,
    to_raw,
    to_text,
    whole,
)
from headgate.stores.wire.submits import (
    HasNoParent,
    New,
    NewUnderKey,
    SentSubmitAnswer,
    Stored,
    WasKeyed,
    WasQueued,
    WasRefused,
    WasTurnedAway,
    answer_keyed,
    answer_submit,
    read_keyed,
    read_new,
    understand_keyed,
    understand_submit,
    write_keyed,
    write_new,
)
from headgate.stores.worksheet import SHORT_SUBMISSION


class Done(Sent, frozen=True, tag="d"):
    """The settlement of an attempt that succeeded, which most do; `by` is who writes it."""

    task_id: str
    node_id: str
    attempt: int
    tokens: int | None
    micro_usd: int | None
    model: str | None
    result: str | None
    by: str
    is_known: bool


class Settle(Sent, frozen=True, tag="s"):
    """Any other settlement."""

    task_id: str
    lease: Lease
    finish: Finish | None
    again: TryAgain | None
    cost: Usage
    result: str | None
    closure: GateClosure | None
    by: str
    is_known: bool


class Cancel(Sent, frozen=True, tag="c"):
    """A cancel."""

    task_id: str
    node_id: str


class Assign(Sent, frozen=True, tag="a"):
    """A plan."""

    epoch: int
    assignments: list[Assignment]
    known: list[bool]


SentStep = New | NewUnderKey | Done | Settle | Cancel | Assign


class WasSettled(Sent, frozen=True, tag="d"):
    """An attempt has ended."""

    record: Change | Whole
    others: list[Whole]


class WasStale(Sent, frozen=True, tag="l"):
    """The lease belongs to another attempt."""

    task_id: str


class WasCancelled(Sent, frozen=True, tag="k"):
    """A task after a cancel."""

    records: list[Whole]
    had_ended: bool


class NotTaken(Sent, frozen=True, tag="-"):
    """A line of a plan that was not applied."""

    task_id: str
    record: Whole | None
    refused: Refused | None


class Lines(Sent, frozen=True, tag="a"):
    """What came of a plan, line by line."""

    lines: list[Change | Whole | NotTaken]


SentAnswer = SentSubmitAnswer | WasKeyed | WasRefused | WasSettled | WasStale | WasCancelled | Lines


def write_step(job: Job, known: KnownTasks) -> SentStep | None:
    """Write a step, and note on the job what is known of its tasks; None if it is a rare one."""
    write = _WRITE.get(type(job.work))
    return None if write is None else write(job, known)


def read_step(sent: SentStep) -> tuple[Any, Any]:
    """Read a step, and which of its tasks are known to whoever sent it."""
    return _READ[type(sent)](sent)


def write_answer(job: Job) -> SentAnswer | None:
    """Write the answer to a step; None if it is a rare one."""
    write = _ANSWER.get(type(job.answer))
    return None if write is None else write(job)


def read_answer(job: Job, sent: SentAnswer, known: KnownTasks) -> object:
    """Read the answer to a step, and learn from it."""
    return _UNDERSTAND[type(sent)](job, sent, known)


def _write_settlement(job: Job, known: KnownTasks) -> Done | Settle:
    settlement: Settlement = job.work
    job.note = known.get(settlement.task_id)
    is_known = job.note is not None
    step, cost, lease = settlement.step, settlement.cost, settlement.lease
    result = to_text(settlement.result)
    is_end = isinstance(step, Finish)
    if is_end and step == _DONE and settlement.closure is None:
        return Done(
            settlement.task_id,
            lease.node_id,
            lease.attempt,
            cost.tokens,
            cost.micro_usd,
            cost.model,
            result,
            settlement.node_id,
            is_known,
        )
    return Settle(
        settlement.task_id,
        lease,
        step if isinstance(step, Finish) else None,
        None if isinstance(step, Finish) else step,
        cost,
        result,
        settlement.closure,
        settlement.node_id,
        is_known,
    )


def _read_done(sent: Done) -> tuple[Settlement, bool]:
    settlement = Settlement(
        task_id=sent.task_id,
        lease=Lease(node_id=sent.node_id, attempt=sent.attempt),
        step=_DONE,
        cost=Usage(tokens=sent.tokens, micro_usd=sent.micro_usd, model=sent.model),
        result=to_raw(sent.result),
        node_id=sent.by,
    )
    return settlement, sent.is_known


def _read_settlement(sent: Settle) -> tuple[Settlement, bool]:
    step = sent.finish if sent.again is None else sent.again
    settlement = Settlement(
        task_id=sent.task_id,
        lease=sent.lease,
        step=_DONE if step is None else step,
        cost=sent.cost,
        result=to_raw(sent.result),
        closure=sent.closure,
        node_id=sent.by,
    )
    return settlement, sent.is_known


def _write_plan(job: Job, known: KnownTasks) -> Assign:
    plan: Plan = job.work
    job.note = [known.get(line.task_id) for line in plan.assignments]
    is_known = [record is not None for record in job.note]
    return Assign(plan.epoch, list(plan.assignments), is_known)


def _answer_settled(job: Job) -> WasSettled:
    first, *others = job.answer.records
    # The same attempt may be settled twice at once; the result that counts is the first one's.
    is_own = first.result is None or first.result == job.work.result
    record = change(first) if job.note and is_own else whole(first)
    return WasSettled(record, [whole(other) for other in others])


def _answer_cancel(job: Job) -> WasCancelled:
    answer: CancelAnswer = job.answer
    return WasCancelled([whole(record) for record in answer.records], answer.had_ended)


def _answer_plan(job: Job) -> Lines:
    return Lines([_line(*pair) for pair in zip(job.answer, job.note, strict=True)])


def _line(answer: Assigned | NotAssigned, is_known: bool) -> Change | Whole | NotTaken:  # noqa: FBT001
    if isinstance(answer, Assigned):
        return change(answer.record) if is_known else whole(answer.record)
    record = None if answer.record is None else whole(answer.record)
    return NotTaken(answer.task_id, record, answer.refused)


def _understand_settled(job: Job, sent: WasSettled, known: KnownTasks) -> Settled:
    settlement: Settlement = job.work
    if isinstance(sent.record, Whole):
        record = from_whole(sent.record)
    else:
        record = from_change(sent.record, job.note, result=settlement.result)
    others = [from_whole(other) for other in sent.others]
    if record.is_terminal:
        known.drop(settlement.task_id)
    return Settled(records=(record, *others))


def _understand_cancelled(_job: Job, sent: WasCancelled, known: KnownTasks) -> CancelAnswer:
    records = tuple([from_whole(record) for record in sent.records])
    for record in records:
        if record.is_terminal:
            known.drop(record.task.id)
    return CancelAnswer(records=records, had_ended=sent.had_ended)


def _understand_plan(job: Job, sent: Lines, known: KnownTasks) -> list[Assigned | NotAssigned]:
    plan: Plan = job.work
    lines = zip(plan.assignments, sent.lines, job.note, strict=True)
    return [_understand_line(*line, known) for line in lines]


def _understand_line(
    assignment: Assignment,
    sent: Change | Whole | NotTaken,
    record: TaskRecord | None,
    known: KnownTasks,
) -> Assigned | NotAssigned:
    if isinstance(sent, NotTaken):
        found = None if sent.record is None else from_whole(sent.record)
        return NotAssigned(task_id=sent.task_id, record=found, refused=sent.refused)
    if isinstance(sent, Change) and record is not None:
        if not assignment.starts:
            return Assigned(record=from_change(sent, record))
        return Assigned(record=from_change(sent, record, submission=record.submission))
    return _understand_whole(sent, known)


def _understand_whole(sent: Change | Whole, known: KnownTasks) -> Assigned:
    if isinstance(sent, Change):
        raise TypeError("a change came of a task that is not known here")
    record = from_whole(sent)
    if sent.submission and len(sent.submission) <= SHORT_SUBMISSION:
        known.put(record)
    return Assigned(record=record)


_DONE = Finish(status=TaskStatus.DONE)

_WRITE: dict[type, Callable[[Job, KnownTasks], SentStep]] = {
    NewTask: write_new,
    KeyedSubmit: write_keyed,
    Settlement: _write_settlement,
    Cancellation: lambda job, _known: Cancel(job.work.task_id, job.work.node_id),
    Plan: _write_plan,
}
_READ: dict[type, Callable[[Any], tuple[Any, Any]]] = {
    New: read_new,
    NewUnderKey: read_keyed,
    Done: _read_done,
    Settle: _read_settlement,
    Cancel: lambda sent: (Cancellation(sent.task_id, sent.node_id), None),
    Assign: lambda sent: (Plan(sent.epoch, sent.assignments), sent.known),
}
_ANSWER: dict[type, Callable[[Job], SentAnswer]] = {
    Queued: lambda job: answer_submit(job.answer),
    TurnedAway: lambda job: answer_submit(job.answer),
    UnknownParent: lambda job: answer_submit(job.answer),
    KeyedAnswer: lambda job: answer_keyed(job.answer, job.note),
    KeyRefusal: lambda job: WasRefused(job.answer),
    Settled: _answer_settled,
    StaleLease: lambda job: WasStale(job.answer.task_id),
    CancelAnswer: _answer_cancel,
    list: _answer_plan,
}
_UNDERSTAND: dict[type, Callable[[Job, Any, KnownTasks], object]] = {
    Stored: understand_submit,
    WasQueued: understand_submit,
    WasTurnedAway: understand_submit,
    HasNoParent: understand_submit,
    WasKeyed: understand_keyed,
    WasRefused: lambda _job, sent, _known: sent.why,
    WasSettled: _understand_settled,
    WasStale: lambda _job, sent, _known: StaleLease(task_id=sent.task_id),
    WasCancelled: _understand_cancelled,
    Lines: _understand_plan,
}
