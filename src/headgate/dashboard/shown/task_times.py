"""Since when a task waits or runs, and how long it took.

Rule: what an earlier attempt took is no time of the latest; a record has the beginning of the one
before until the next has begun.
"""

from __future__ import annotations

from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TaskStatus


def started_at(record: TaskRecord) -> float | None:
    """Return when the latest attempt began; None if it has not begun."""
    at, past = record.progress.started_at, record.progress.attempts
    if record.task.status is TaskStatus.ASSIGNED or at is None:
        return None
    return None if past and at < past[-1].ended_at else at


def queued_since(record: TaskRecord) -> float:
    """Return since when a task that waits may start: its submit, or the end of its last attempt."""
    past = record.progress.attempts
    queued_at = past[-1].ended_at if past else record.task.created_at
    return max(queued_at, record.task.not_before or 0.0)


def seconds_so_far(record: TaskRecord, now: float) -> float | None:
    """Return how long a task waits, runs, or took; None if no attempt has begun."""
    if record.task.status is TaskStatus.QUEUED:
        return max(0.0, now - queued_since(record))
    began, ended = started_at(record), record.progress.completed_at
    return None if began is None else max(0.0, (now if ended is None else ended) - began)
