"""The task, and the one table of moves that a task can make.

Two documents describe a task's life; here it is one. What the fair-share scheduler calls READY is
what the task service calls `queued`. Every change of state goes through `move`, so a state that
the table does not allow cannot come about.
"""

from __future__ import annotations

import msgspec

from headgate.core.enums import LenientEnum
from headgate.errors import IllegalTransitionError


class TaskStatus(LenientEnum):
    """Where a task is on its way. `QUEUED` is another name for `READY`."""

    READY = "queued"
    QUEUED = "queued"
    ASSIGNED = "assigned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One unit of work, as much of it as a decision needs.

    `agent_id` None leaves the task open to any agent of the project. A lower `priority` goes
    first. `weight` is a proxy for cost, used where no tokens are known. A `provider` leaves open
    which of its slots the task uses, unless it names a `slot`. Times are Unix seconds; a tick is
    one unit of work completed.
    """

    id: str = ""
    project_id: str = "default"
    agent_id: str | None = None
    priority: int = 0
    weight: float = 1.0
    status: TaskStatus = TaskStatus.READY
    created_at: float = 0.0
    enqueued_tick: int = 0
    estimate_tokens: int | None = None
    deadline: float | None = None
    not_before: float | None = None
    scopes: tuple[str, ...] = ()
    target: str | None = None
    slot: str | None = None
    provider: str | None = None


TRANSITIONS: dict[TaskStatus, dict[TaskStatus, str]] = {
    TaskStatus.QUEUED: {
        TaskStatus.ASSIGNED: "the dispatcher gave it an agent",
        TaskStatus.FAILED: "its deadline passed while queued",
        TaskStatus.CANCELLED: "cancelled before it started",
        TaskStatus.REJECTED: "refused at admission",
    },
    TaskStatus.ASSIGNED: {
        TaskStatus.RUNNING: "a node took it",
        TaskStatus.QUEUED: "its node was lost before it started",
        TaskStatus.FAILED: "it could not be started",
        TaskStatus.CANCELLED: "cancelled before it ran",
    },
    TaskStatus.RUNNING: {
        TaskStatus.DONE: "it succeeded",
        TaskStatus.FAILED: "it failed, or its deadline passed",
        TaskStatus.CANCELLED: "cancelled while running",
        TaskStatus.QUEUED: "its node was lost, or it is tried again",
    },
    TaskStatus.DONE: {},
    TaskStatus.FAILED: {},
    TaskStatus.CANCELLED: {},
    TaskStatus.REJECTED: {},
}

TERMINAL = frozenset(status for status, moves in TRANSITIONS.items() if not moves)


def check_move(task_id: str, current: TaskStatus, wanted: TaskStatus) -> None:
    """Raise `IllegalTransitionError` unless the table has this move."""
    moves = TRANSITIONS[current]
    if wanted not in moves:
        raise IllegalTransitionError(
            subject=f"task {task_id or '(no id)'}",
            current=current.value,
            wanted=wanted.value,
            allowed=tuple(status.value for status in moves),
        )


def move(task: Task, wanted: TaskStatus) -> Task:
    """Return the task in its new state, or refuse the move."""
    check_move(task.id, task.status, wanted)
    return msgspec.structs.replace(task, status=wanted)


def transition_diagram() -> str:
    """Draw the table as a Mermaid state diagram; the documentation shows this text."""
    lines = ["stateDiagram-v2", f"    [*] --> {TaskStatus.QUEUED.value}"]
    for current, moves in TRANSITIONS.items():
        lines += [f"    {current.value} --> {to.value}: {why}" for to, why in moves.items()]
    lines += [f"    {status.value} --> [*]" for status in TRANSITIONS if status in TERMINAL]
    return "\n".join(lines)
