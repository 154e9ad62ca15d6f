"""Rows of the task table, and the records that they stand for.

What is fixed when a task is submitted is its `Spec`, one JSON text that is never written again. A
`TaskRow` has that and everything that changes; one transaction at a time works on it.
"""

from __future__ import annotations

import msgspec

from headgate.core.admission import Rejected
from headgate.core.task import (
    NO_PROGRESS,
    Progress,
    Submission,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
)
from headgate.storage.transaction import Row

NOT_SHOWN = Submission()
"""What stands in a record for a submission that was not asked for."""

_STATUSES = {status.value: status for status in TaskStatus}


class Spec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a task was submitted with, and the answer that it got."""

    task: Task
    terms: Terms
    position: int
    rejected: Rejected | None = None


class _Work(msgspec.Struct, frozen=True, rename="camel"):
    """A submission as it is read: the decoder keeps JSON unread only where it must be there."""

    action: str = ""
    tab_id: str | None = None
    selector: str | None = None
    ref: str | None = None
    params: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    labels: dict[str, str] = {}
    retry_of: str | None = None
    traceparent: str | None = None


_encoder = msgspec.json.Encoder()
_specs = msgspec.json.Decoder(Spec)
_progresses = msgspec.json.Decoder(Progress)
_works = msgspec.json.Decoder(_Work)


class TaskRow:
    """One row, with the columns as values; `spec_text` is empty until a new row is written.

    `submission` is there only where it happens to be known.
    """

    __slots__ = (
        "agent_id",
        "error",
        "id",
        "micro_usd",
        "progress",
        "project_id",
        "result",
        "settled_by",
        "spec",
        "spec_text",
        "status",
        "submission",
        "tokens",
    )

    def __init__(self, spec: Spec) -> None:
        self.id = spec.task.id
        self.project_id = spec.task.project_id
        self.agent_id = spec.task.agent_id
        self.status = spec.task.status
        self.spec = spec
        self.spec_text = ""
        self.progress = NO_PROGRESS
        self.submission: Submission | None = None
        self.settled_by: str | None = None
        self.error: str | None = None
        self.result: str | None = None
        self.tokens: int | None = None
        self.micro_usd: int | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether an attempt has a place."""
        # By identity, here and below: to hash a member of an enumeration is a call in itself.
        return self.status is TaskStatus.RUNNING or self.status is TaskStatus.ASSIGNED

    @property
    def is_terminal(self) -> bool:
        """Whether nothing can happen to the task any more."""
        return self.status is not TaskStatus.QUEUED and not self.is_in_flight

    @property
    def evictable_since(self) -> float | None:
        """When the task ended, if nothing needs it any more."""
        # What `core.retention` says, in fewer words: this is asked at every write.
        return None if self.progress.dependants else self.progress.completed_at

    def record(self, submission: Submission = NOT_SHOWN) -> TaskRecord:
        """Return the task as it is now."""
        return TaskRecord(
            task=self._task(),
            terms=self.spec.terms,
            submission=submission,
            progress=self.progress,
            agent_id=self.agent_id,
            position=self.spec.position,
            result=None if self.result is None else msgspec.Raw(self.result),
            error=self.error,
            tokens=self.tokens,
            micro_usd=self.micro_usd,
        )

    def written_spec(self) -> str:
        """Return the text of what the task was submitted with."""
        if not self.spec_text:
            self.spec_text = _text(self.spec)
        return self.spec_text

    def _task(self) -> Task:
        task, not_before = self.spec.task, self.progress.not_before
        if not_before is None:
            if self.status is task.status:
                return task
            not_before = task.not_before
        return msgspec.structs.replace(task, status=self.status, not_before=not_before)


def to_task_row(row: Row) -> TaskRow:
    """Read the columns of a task, in the order of the schema."""
    read = TaskRow(_specs.decode(row[2]))
    read.spec_text = row[2]
    read.agent_id = row[3]
    read.status = _STATUSES[row[4]]
    read.progress = _progresses.decode(row[5])
    read.settled_by, read.error, read.result, read.tokens, read.micro_usd = row[7:12]
    return read


def from_task_row(row: TaskRow) -> Row:
    """Write the columns of a task, in the order of the schema."""
    return (
        row.id,
        row.project_id,
        row.written_spec(),
        row.agent_id,
        row.status._value_,
        _text(row.progress),
        row.evictable_since,
        row.settled_by,
        row.error,
        row.result,
        row.tokens,
        row.micro_usd,
    )


def parents_in(spec_text: str) -> tuple[str, ...]:
    """Return what a task depends on; most texts need not be read for that."""
    if '"depends_on"' not in spec_text:
        return ()
    return _specs.decode(spec_text).terms.depends_on


def submission_text(submission: Submission) -> str:
    """Write what is to be done."""
    return _text(submission)


def to_submission(text: str) -> Submission:
    """Read what is to be done."""
    work = _works.decode(text)
    return Submission(
        action=work.action,
        tab_id=work.tab_id,
        selector=work.selector,
        ref=work.ref,
        params=work.params or None,
        input=work.input or None,
        labels=work.labels,
        retry_of=work.retry_of,
        traceparent=work.traceparent,
    )


def states_of(statuses: tuple[TaskStatus, ...]) -> list[str]:
    """Write states as the column has them."""
    return [status.value for status in statuses]


def _text(value: object) -> str:
    return _encoder.encode(value).decode()
