"""Jobs and their answers as bytes, for a writer in a process of its own.

Steps of tasks are many, so they are written as JSON arrays, at a tenth of what pickling them costs.
Everything else is rare, and is pickled. What a task was given to do and what it resulted in are
JSON already; they travel as texts, so that one which is not well-formed spoils nothing beside it.
"""

from __future__ import annotations

import copyreg
import pickle
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import Any

import msgspec

from headgate.core.admission import QueueLimits, Rejected
from headgate.core.budgets.ledger import Refused
from headgate.core.gates import GateClosure
from headgate.core.idempotency import InvalidEntry, KeyRefusal, SubmitEntry, SubmitKey
from headgate.core.lifecycle import Finish, TryAgain, Usage
from headgate.core.task import (
    NO_PROGRESS,
    Lease,
    Progress,
    Submission,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
)
from headgate.errors import HeadgateError, StoreError
from headgate.storage.assign import Plan
from headgate.storage.finish import Cancellation
from headgate.storage.sql_store import TaskTables
from headgate.storage.store import (
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
from headgate.storage.submit import SubmitAnswer, new_tasks
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import (
    NOT_SHOWN,
    SHORT_SUBMISSION,
    submission_text,
    to_submission,
)
from headgate.storage.writer import Asked, Batch, Job

# Records on their way from the process that writes to the one that asked.
#
# What a task was submitted with never changes. Of a task that the other side knows, only the rest
# is sent; the two together are the record that the store has.

MAX_KNOWN = 20_000


class Sent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base of all that is sent: arrays, without the names of their fields."""


class Whole(Sent, frozen=True, tag="w"):
    """A record with everything in it; a submission that is not shown is an empty text."""

    task: Task
    terms: Terms
    submission: str
    progress: Progress
    agent_id: str | None
    position: int
    result: str | None
    error: str | None
    tokens: int | None
    micro_usd: int | None


class Change(Sent, frozen=True, tag="c"):
    """What a record has beyond what its task was submitted with."""

    status: TaskStatus
    progress: Progress
    agent_id: str | None
    has_result: bool
    error: str | None
    tokens: int | None
    micro_usd: int | None


class KnownTasks:
    """Records whose submission this process has seen; the oldest make room for new ones."""

    def __init__(self, *, most: int = MAX_KNOWN) -> None:
        self._most = most
        # A plain dictionary would look for its oldest entry past all that have gone before it.
        self._records: OrderedDict[str, TaskRecord] = OrderedDict()

    def get(self, task_id: str) -> TaskRecord | None:
        """Return what is known of a task."""
        return self._records.get(task_id)

    def put(self, record: TaskRecord) -> None:
        """Remember a task."""
        # With a time of its own to start at, the record does not say what it was submitted with.
        if record.progress.not_before is not None:
            return
        self._records[record.task.id] = record
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def drop(self, task_id: str) -> None:
        """Forget a task that has ended."""
        self._records.pop(task_id, None)


def whole(record: TaskRecord) -> Whole:
    """Write all of a record."""
    submission = record.submission
    return Whole(
        record.task,
        record.terms,
        "" if submission is NOT_SHOWN else submission_text(submission),
        record.progress,
        record.agent_id,
        record.position,
        to_text(record.result),
        record.error,
        record.tokens,
        record.micro_usd,
    )


def change(record: TaskRecord) -> Change:
    """Write a record for somebody who knows its task, and its result if it has one."""
    return Change(
        record.task.status,
        record.progress,
        record.agent_id,
        record.result is not None,
        record.error,
        record.tokens,
        record.micro_usd,
    )


def from_whole(sent: Whole) -> TaskRecord:
    """Read a record."""
    return TaskRecord(
        task=sent.task,
        terms=sent.terms,
        submission=to_submission(sent.submission) if sent.submission else NOT_SHOWN,
        progress=sent.progress,
        agent_id=sent.agent_id,
        position=sent.position,
        result=to_raw(sent.result),
        error=sent.error,
        tokens=sent.tokens,
        micro_usd=sent.micro_usd,
    )


def from_change(
    sent: Change,
    known: TaskRecord,
    *,
    submission: Submission = NOT_SHOWN,
    result: msgspec.Raw | None = None,
) -> TaskRecord:
    """Read a record of a task that is known."""
    return TaskRecord(
        task=_task(known.task, sent),
        terms=known.terms,
        submission=submission,
        progress=sent.progress,
        agent_id=sent.agent_id,
        position=known.position,
        result=result if sent.has_result else None,
        error=sent.error,
        tokens=sent.tokens,
        micro_usd=sent.micro_usd,
    )


def to_text(raw: msgspec.Raw | None) -> str | None:
    """Write JSON that nobody has read as a text."""
    return None if raw is None else bytes(raw).decode()


def to_raw(text: str | None) -> msgspec.Raw | None:
    """Read JSON without looking into it."""
    return None if text is None else msgspec.Raw(text)


def _task(task: Task, sent: Change) -> Task:
    not_before = sent.progress.not_before
    if not_before is None:
        not_before = task.not_before
    return msgspec.structs.replace(task, status=sent.status, not_before=not_before)


# Submissions and their answers as they are sent, one by one or many under a key.
#
# Whoever submits has the task already. So of one that simply waits, only its place is sent back.


class New(Sent, frozen=True, tag="n"):
    """A task to be queued."""

    task: Task
    terms: Terms
    submission: str
    limits: QueueLimits
    node_id: str
    keeps_refusal: bool


class Wrong(Sent, frozen=True, tag="x"):
    """A task of a request that cannot be taken as it is."""

    entry: InvalidEntry


class NewUnderKey(Sent, frozen=True, tag="k"):
    """The tasks of a request that has a key."""

    key: SubmitKey
    tasks: list[New | Wrong]


class Stored(Sent, frozen=True, tag="s"):
    """A new task waits, and nothing else has become of it."""

    position: int
    enqueued_tick: int


class WasQueued(Sent, frozen=True, tag="q"):
    """A task was stored, and this is what has become of it."""

    record: Whole
    position: int


class WasTurnedAway(Sent, frozen=True, tag="t"):
    """There was no room."""

    record: Whole
    rejected: Rejected


class HasNoParent(Sent, frozen=True, tag="u"):
    """A parent is not known."""

    parent_id: str


SentSubmitAnswer = Stored | WasQueued | WasTurnedAway | HasNoParent


class WasKeyed(Sent, frozen=True, tag="y"):
    """What became of the tasks of a request."""

    entries: list[SubmitEntry]
    fresh: list[SentSubmitAnswer]
    is_replay: bool


class WasRefused(Sent, frozen=True, tag="f"):
    """Nothing was done under a key."""

    why: KeyRefusal


def write_new(job: Job, _known: KnownTasks) -> New:
    """Write a task, and note that its record is to be kept, if it is a short one."""
    new = _sent(job.work)
    job.note = _is_short(new)
    return new


def read_new(sent: New) -> tuple[NewTask, None]:
    """Read a task."""
    return _received(sent), None


def write_keyed(job: Job, _known: KnownTasks) -> NewUnderKey:
    """Write the tasks of a request, and note which records are to be kept."""
    keyed: KeyedSubmit = job.work
    tasks = [Wrong(one) if isinstance(one, InvalidEntry) else _sent(one) for one in keyed.tasks]
    job.note = [_is_short(one) for one in tasks if isinstance(one, New)]
    return NewUnderKey(keyed.key, tasks)


def read_keyed(sent: NewUnderKey) -> tuple[KeyedSubmit, int]:
    """Read the tasks of a request, and how many of them can be stored."""
    tasks = [one.entry if isinstance(one, Wrong) else _received(one) for one in sent.tasks]
    step = KeyedSubmit(key=sent.key, tasks=tuple(tasks))
    return step, len(new_tasks([step]))


def answer_submit(answer: SubmitAnswer) -> SentSubmitAnswer:
    """Write what became of a task."""
    if isinstance(answer, Queued):
        record = answer.record
        if record.progress is NO_PROGRESS and record.task.status is TaskStatus.QUEUED:
            return Stored(answer.position, record.task.enqueued_tick)
        return WasQueued(whole(record), answer.position)
    if isinstance(answer, TurnedAway):
        return WasTurnedAway(whole(answer.record), answer.rejected)
    return HasNoParent(answer.parent_id)


def answer_keyed(answer: KeyedAnswer, tasks: int) -> WasKeyed:
    """Write what became of a request that would store so many tasks."""
    # If only some are told of, their places do not say which.
    is_all = len(answer.fresh) == tasks
    fresh = [answer_submit(one) if is_all else _answer_whole(one) for one in answer.fresh]
    return WasKeyed(list(answer.entries), fresh, answer.is_replay)


def understand_submit(job: Job, sent: SentSubmitAnswer, known: KnownTasks) -> SubmitAnswer:
    """Read what became of a task."""
    return _understood(job.work, sent, known if job.note else None)


def understand_keyed(job: Job, sent: WasKeyed, known: KnownTasks) -> KeyedAnswer:
    """Read what became of a request."""
    tasks: list[NewTask] = new_tasks([job.work])
    if len(sent.fresh) == len(tasks):
        parts = zip(tasks, sent.fresh, job.note, strict=True)
        fresh = [_understood(new, one, known if short else None) for new, one, short in parts]
    else:
        fresh = [_understood(None, one, None) for one in sent.fresh]
    return KeyedAnswer(entries=tuple(sent.entries), fresh=tuple(fresh), is_replay=sent.is_replay)


def _sent(new: NewTask) -> New:
    text = submission_text(new.submission)
    return New(new.task, new.terms, text, new.limits, new.node_id, new.keeps_refusal)


def _received(sent: New) -> NewTask:
    return NewTask(
        task=sent.task,
        terms=sent.terms,
        submission=to_submission(sent.submission),
        limits=sent.limits,
        node_id=sent.node_id,
        keeps_refusal=sent.keeps_refusal,
    )


def _is_short(new: New) -> bool:
    return len(new.submission) <= SHORT_SUBMISSION


def _answer_whole(answer: SubmitAnswer) -> SentSubmitAnswer:
    if isinstance(answer, Queued):
        return WasQueued(whole(answer.record), answer.position)
    return answer_submit(answer)


def _understood(
    new: NewTask | None, sent: SentSubmitAnswer, known: KnownTasks | None
) -> SubmitAnswer:
    if isinstance(sent, Stored):
        return _queued(new, sent, known)
    if isinstance(sent, WasQueued):
        return Queued(record=from_whole(sent.record), position=sent.position)
    if isinstance(sent, WasTurnedAway):
        return TurnedAway(record=from_whole(sent.record), rejected=sent.rejected)
    return UnknownParent(parent_id=sent.parent_id)


def _queued(new: NewTask | None, sent: Stored, known: KnownTasks | None) -> Queued:
    if new is None:
        raise TypeError("a place came of a task that is not known here")
    task = msgspec.structs.replace(
        new.task, enqueued_tick=sent.enqueued_tick, status=TaskStatus.QUEUED
    )
    record = TaskRecord(
        task=task,
        terms=new.terms,
        submission=new.submission,
        agent_id=task.agent_id,
        position=sent.position,
    )
    if known is not None:
        known.put(record)
    return Queued(record=record, position=sent.position)


# Steps and their answers as they are sent, and how each becomes itself again.
#
# A step says which of its tasks are known where it comes from. `note` of a job has what that means:
# on the side that asks the records that it knows, on the side that writes whether they are.


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


class Pickled(Sent, frozen=True, tag="p"):
    """An operation that is not a step, or the answer to one."""

    content: bytes


class RareStep(Sent, frozen=True, tag="r"):
    """A step of which there are few."""

    content: bytes


class Error(Sent, frozen=True, tag="e"):
    """An error that a job came to."""

    content: bytes


_encoder = msgspec.json.Encoder()
_jobs = msgspec.json.Decoder(list[SentStep | RareStep | Pickled])
_job = msgspec.json.Decoder(SentStep | RareStep | Pickled)
_wholes = msgspec.json.Decoder(Whole)
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_answers = msgspec.json.Decoder(list[SentAnswer | Pickled | Error])


class StepWire:
    """The language of jobs on the tables of tasks."""

    def __init__(self, tables: TaskTables) -> None:
        self._apply = tables.apply
        self._known = KnownTasks()

    def pack(self, job: Job) -> bytes:
        """Write one job; raise if it cannot be sent."""
        if job.batch is None:
            return _encoder.encode(Pickled(pickle.dumps(job.work)))
        step = write_step(job, self._known)
        if step is not None:
            # What a process has printed may hold what no JSON can.
            with suppress(UnicodeEncodeError):
                return _encoder.encode(step)
        return _encoder.encode(RareStep(pickle.dumps(job.work)))

    def join(self, packed: Sequence[bytes]) -> bytes:
        """Put jobs together that were packed each by itself."""
        return b"[" + b",".join(packed) + b"]"

    def unpack(self, packed: bytes) -> list[Job]:
        """Read jobs; one that cannot be read fails alone."""
        try:
            return [self._job(sent) for sent in _jobs.decode(packed)]
        except msgspec.MsgspecError:
            return [self._job_alone(raw) for raw in _raws.decode(packed)]

    def pack_answers(self, jobs: Sequence[Job]) -> bytes:
        """Write what came of jobs, in their order."""
        return self.join([_packed_answer(job) for job in jobs])

    def unpack_answers(self, packed: bytes, jobs: deque[Asked]) -> list[Asked]:
        """Read what came of the first of these jobs, take them out, and return them."""
        return [self._answered(jobs.popleft(), sent) for sent in _answers.decode(packed)]

    def _job(self, sent: SentStep | RareStep | Pickled) -> Job:
        if isinstance(sent, Pickled):
            return Job(partial(_run_pickled, sent.content))
        if isinstance(sent, RareStep):
            return Job(partial(_run_rare, self._apply, sent.content))
        work, note = read_step(sent)
        job = Job(work, self._apply)
        job.note = note
        return job

    def _job_alone(self, raw: msgspec.Raw) -> Job:
        try:
            return self._job(_job.decode(raw))
        except msgspec.MsgspecError as error:
            return Job(partial(_fail, str(error)))

    def _answered(self, job: Asked, sent: SentAnswer | Pickled | Error) -> Asked:
        try:
            if isinstance(sent, Error):
                job.fail(pickle.loads(sent.content))  # noqa: S301
            elif isinstance(sent, Pickled):
                job.answer = pickle.loads(sent.content)  # noqa: S301
            else:
                job.answer = read_answer(job, sent, self._known)
        # An answer that cannot be read is for its caller, and not for those beside it.
        except Exception as error:  # noqa: BLE001
            job.fail(error)
        return job


def _fail(problem: str, _transaction: Transaction) -> None:
    line = f"a step cannot be read by the process that writes: {problem}"
    raise StoreError(line)


def _run_rare(apply: Batch[Any, Any], content: bytes, transaction: Transaction) -> object:
    answer = apply(transaction, [pickle.loads(content)])[0]  # noqa: S301
    if isinstance(answer, Exception):
        raise answer
    return answer


def _run_pickled(content: bytes, transaction: Transaction) -> object:
    operation: Callable[[Transaction], object] = pickle.loads(content)  # noqa: S301
    return operation(transaction)


def _packed_answer(job: Job) -> bytes:
    try:
        answer = None if job.batch is None or job.error is not None else write_answer(job)
        if answer is not None:
            with suppress(UnicodeEncodeError):
                return _encoder.encode(answer)
        return _encoder.encode(_pickled_answer(job))
    # The work is done, and only its answer cannot be told.
    except Exception as error:  # noqa: BLE001
        problem = RuntimeError(f"{job.error or error!r}")
        return _encoder.encode(Error(pickle.dumps(problem)))


def _pickled_answer(job: Job) -> Pickled | Error:
    if job.error is not None:
        return Error(pickle.dumps(_with_trace(job.error)))
    return Pickled(_with_records(job.answer))


def _with_trace(error: BaseException) -> BaseException:
    """Note where a fault that nobody foresaw has come from: its traceback cannot be sent."""
    if not isinstance(error, HeadgateError):
        lines = "".join(traceback.format_exception(error))
        error.add_note(f"In the process that writes: {lines}")
    return error


class _Pickler(pickle.Pickler):
    """Pickles records as they are sent otherwise; a node that collects its tasks gets many."""

    dispatch_table = copyreg.dispatch_table.copy()


def _reduced(record: TaskRecord) -> str | tuple[Any, ...]:
    try:
        return _record, (_encoder.encode(whole(record)),)
    except UnicodeEncodeError:
        return record.__reduce__()


def _record(packed: bytes) -> TaskRecord:
    return from_whole(_wholes.decode(packed))


_Pickler.dispatch_table[TaskRecord] = _reduced


def _with_records(answer: object) -> bytes:
    file = BytesIO()
    _Pickler(file).dump(answer)
    return file.getvalue()
