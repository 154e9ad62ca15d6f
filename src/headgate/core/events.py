"""What happens to a task, as events: their names, their order and their JSON.

Records come late, twice and out of order; events must not. Rule: every state of a task has a rank
that only grows on its way, through all its attempts, and an event is what raises it.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from headgate.core.enums import FastEnum
from headgate.core.task import TaskStatus

MAX_ERROR_CHARACTERS = 500
LAST_RANK = 2**62
"""The rank of every end: a task has one."""


class EventKind(FastEnum):
    """The names of events. `reset` is not about a task: it says that some may have been missed."""

    QUEUED = "task.queued"
    RUNNING = "task.running"
    RETRYING = "task.retrying"
    COMPLETED = "task.completed"
    FAILED = "task.failed"
    CANCELLED = "task.cancelled"
    REJECTED = "task.rejected"
    RESET = "reset"


MEANINGS: dict[EventKind, str] = {
    EventKind.QUEUED: "the task was accepted, and waits",
    EventKind.RUNNING: "an attempt was assigned to an agent",
    EventKind.RETRYING: "an attempt failed, and the task waits for the next; `error` says why",
    EventKind.COMPLETED: "the task succeeded",
    EventKind.FAILED: "the task failed for good, or its deadline passed",
    EventKind.CANCELLED: "the task was cancelled",
    EventKind.REJECTED: "Headgate refused the task, because a queue or a budget has no room",
    EventKind.RESET: "you may have missed events: read the state of your tasks again",
}

# Asked for by name at every change of every task, and an enumeration takes its time to answer.
_QUEUED = TaskStatus.QUEUED
_RUNNING = TaskStatus.RUNNING
_ASSIGNED = TaskStatus.ASSIGNED
_ENDS = {
    TaskStatus.DONE: EventKind.COMPLETED,
    TaskStatus.FAILED: EventKind.FAILED,
    TaskStatus.CANCELLED: EventKind.CANCELLED,
    TaskStatus.REJECTED: EventKind.REJECTED,
}


class TaskEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The JSON of an event; what is not known of it, as of a reset, is left out."""

    id: str
    kind: EventKind
    time: datetime
    task_id: str = ""
    agent_id: str | None = None
    project_id: str = ""
    state: TaskStatus | None = None
    attempt: int | None = None
    error: str | None = None


def kind_of(status: TaskStatus, attempt: int) -> EventKind:
    """Return what it is called when a task comes into a state."""
    if status is _QUEUED:
        return EventKind.RETRYING if attempt else EventKind.QUEUED
    if status is _RUNNING or status is _ASSIGNED:
        return EventKind.RUNNING
    return _ENDS[status]


def rank_of(status: TaskStatus, attempt: int) -> int:
    """Return how far a task has come; to be assigned and to run are the same step."""
    if status is _QUEUED:
        return 2 * attempt
    if status is _RUNNING or status is _ASSIGNED:
        return 2 * attempt - 1
    return LAST_RANK


def shortened_error(error: str | None) -> str | None:
    """Return an error that is short enough to be kept for everybody who may look."""
    if error is None or len(error) <= MAX_ERROR_CHARACTERS:
        return error
    return error[: MAX_ERROR_CHARACTERS - 1] + "…"
