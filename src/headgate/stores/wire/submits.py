"""Submissions and their answers as they are sent, one by one or many under a key.

Whoever submits has the task already. So of one that simply waits, only its place is sent back.
"""

from __future__ import annotations

import msgspec

from headgate.core.tasks.admission import QueueLimits, Rejected
from headgate.core.tasks.records import NO_PROGRESS, TaskRecord, Terms
from headgate.core.tasks.submit_keys import InvalidEntry, KeyRefusal, SubmitEntry, SubmitKey
from headgate.core.tasks.task import Task, TaskStatus
from headgate.databases.jobs import Job
from headgate.store import KeyedAnswer, KeyedSubmit, NewTask, Queued, TurnedAway, UnknownParent
from headgate.stores.moves.keyed_submits import new_tasks
from headgate.stores.moves.submitting import SubmitAnswer
from headgate.stores.task_rows import submission_text, to_submission
from headgate.stores.wire.records import KnownTasks, Sent, Whole, from_whole, whole
from headgate.stores.worksheet import SHORT_SUBMISSION


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
