"""Records on their way from the process that writes to the one that asked.

What a task was submitted with never changes. Of a task that the other side knows, only the rest is
sent; the two together are the record that the store has.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from headgate.core.tasks.records import Progress, Submission, TaskRecord, Terms
from headgate.core.tasks.task import Task, TaskStatus
from headgate.stores.task_rows import NOT_SHOWN, submission_text, to_submission

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
