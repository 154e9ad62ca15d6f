"""The contract of an executor: it does the work of one attempt, and says what came of it.

The runner cancels the coroutine when the task is cancelled, when its deadline passes and when the
node stops. An executor then ends whatever it started (a request, a group of processes) before it
lets the cancellation through; it never swallows one. Everything else is an outcome, not an
exception: an executor raises nothing for work that went wrong.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headgate.core.tasks.outcomes import Outcome
from headgate.core.tasks.records import Submission, TaskRecord, slot_of, waits_since


class WorkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one task; times are in Unix seconds.

    `waits_since` is when the attempt could have started, if anybody knows; `traceparent` is the
    trace that it belongs to. `slot` is the provider's key that it is to use. Whoever runs the order
    stops it at its deadline and after `attempt_seconds`.
    """

    task_id: str
    attempt: int
    project_id: str
    agent_id: str
    submission: Submission
    deadline: float | None = None
    waits_since: float | None = None
    started_at: float | None = None
    traceparent: str | None = None
    slot: str | None = None
    attempt_seconds: float | None = None


def work_order_of(record: TaskRecord) -> WorkOrder:
    """Return the latest attempt at a task as an order."""
    task = record.task
    return WorkOrder(
        task_id=task.id,
        attempt=record.progress.attempt,
        project_id=task.project_id,
        agent_id=record.agent_id or task.agent_id or "",
        submission=record.submission,
        deadline=task.deadline,
        waits_since=waits_since(record),
        started_at=record.progress.started_at,
        traceparent=record.submission.traceparent,
        slot=slot_of(record),
        attempt_seconds=record.terms.attempt_seconds,
    )


class Executor(Protocol):
    """Runs work orders for one target."""

    async def open(self) -> None:
        """Make ready what all orders share, such as connections."""

    async def close(self) -> None:
        """Let go of it; nothing is under way any more."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Do the work, and say what came of it."""
