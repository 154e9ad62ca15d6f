"""Between the JSON of the API and what executors know: work orders in, outcomes out."""

from __future__ import annotations

import msgspec

from headgate.bodies.workers import CompleteBody, FailBody, UsedBody
from headgate.core.money import format_usd
from headgate.core.tasks.outcomes import (
    Cancelled,
    Failed,
    Limited,
    Lost,
    Outcome,
    Succeeded,
    Usage,
)
from headgate.core.tasks.records import Submission
from headgate.executor import WorkOrder
from headgate.task_snapshot import TaskSnapshot

STOPPED = "the worker was stopped"


def order_of(task: TaskSnapshot, agent_id: str) -> WorkOrder:
    """Return a task as an executor wants it."""
    return WorkOrder(
        task_id=task.task_id,
        attempt=task.attempt,
        project_id=task.project_id,
        agent_id=task.agent_id or agent_id,
        submission=Submission(
            action=task.action,
            tab_id=task.tab_id,
            selector=task.selector,
            ref=task.ref,
            params=_raw(task.params),
            input=_raw(task.input),
            labels=task.labels,
        ),
        deadline=None if task.deadline is None else task.deadline.timestamp(),
        traceparent=task.traceparent,
        slot=task.slot,
        attempt_seconds=task.timeout_seconds,
    )


def report_of(outcome: Outcome, *, worker_id: str, attempt: int) -> CompleteBody | FailBody:
    """Return an outcome as the service wants it."""
    match outcome:
        case Succeeded():
            return CompleteBody(
                worker_id=worker_id,
                attempt=attempt,
                result=outcome.result or msgspec.Raw(),
                usage=_used(outcome.usage),
            )
        case Failed():
            return FailBody(
                worker_id=worker_id,
                attempt=attempt,
                error=outcome.error,
                retryable=outcome.is_transient,
                usage=_used(outcome.usage),
            )
        case Limited():
            return FailBody(
                worker_id=worker_id,
                attempt=attempt,
                error=outcome.error,
                retry_after_seconds=max(0.0, outcome.retry_after_seconds or 0.0),
            )
        case Cancelled():
            return FailBody(
                worker_id=worker_id,
                attempt=attempt,
                error=STOPPED,
                retryable=True,
                usage=_used(outcome.usage),
            )
        case Lost():
            return FailBody(worker_id=worker_id, attempt=attempt, error=STOPPED, retryable=True)


def _used(usage: Usage) -> UsedBody:
    micro_usd = usage.micro_usd
    return UsedBody(
        tokens=usage.tokens,
        usd=None if micro_usd is None else format_usd(micro_usd).replace("$", ""),
        model=usage.model,
    )


def _raw(value: object) -> msgspec.Raw | None:
    return None if value is None else msgspec.Raw(msgspec.json.encode(value))
