"""Between runs of steps and tasks of a service: what is sent for one, and what is read of one.

Nothing here asks anybody. Rule: every task says by its labels which run and which step it is of, so
that people find and cancel the tasks of a run with no more than its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from headgate.bodies.tasks import WhyBody
from headgate.client.calls import shared_by
from headgate.client.task_fields import TaskFields, task_body
from headgate.core.money import plain_usd, to_limit_micro_usd
from headgate.core.tasks.events import TaskEvent
from headgate.core.tasks.task import TaskStatus
from headgate.errors import RequestRefusedError, WorkflowError
from headgate.runs.backend import STATES, StepOrder, StepTask, TaskState
from headgate.runs.orders import TargetRequest
from headgate.runs.remote.journal import SentOrder
from headgate.task_snapshot import TaskSnapshot, TaskUsageBody
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    HttpWork,
    ModelWork,
    StepItems,
    TargetWork,
    Workflow,
)

BATCH_TASKS = 50
BATCH_BYTES = 512 * 1024
"""A service takes twice that; a task that is larger by itself is sent alone, for it to judge."""

PATIENCE = timedelta(days=30)
"""How long a task may wait and run in all; its attempts end by their own timeout."""

_KEYS: dict[type[Any], str] = {
    CommandWork: "command",
    HttpWork: "http",
    CallWork: "call",
    ModelWork: "model",
}
_ONLY_NAMED = "a service runs only what its configuration names"
_TARGET = "name a target there (of kind http, command, callable or pull) and say `target: NAME`"
_SHOWN_TARGETS = 20
_WINDOWED = ("global_budget", "project_budget")


class Sender(NamedTuple):
    """What all tasks of a run have in common; without an agent of its own a step has this one."""

    run_id: str
    workflow: str
    scope: str
    agent_id: str
    project_id: str | None = None


class Parcel(NamedTuple):
    """One run of a step, ready to be sent."""

    order: SentOrder
    body: dict[str, object]
    size_bytes: int


def check_for_service(workflow: Workflow, file: str) -> None:
    """Refuse a workflow with a step that only runs on the machine of whoever starts it."""
    for index, step in enumerate(workflow.steps):
        if not isinstance(step.work, TargetWork):
            raise WorkflowError(
                file,
                f"step '{step.id}': {_ONLY_NAMED}; {_TARGET}, or run it without --server",
                line=step.line,
                key=f"steps[{index}].{_KEYS[type(step.work)]}",
            )


def check_targets(workflow: Workflow, known: Sequence[str]) -> None:
    """Refuse a workflow with a target that the service does not have."""
    for step in workflow.steps:
        name = step.work.target if isinstance(step.work, TargetWork) else None
        if name is not None and name not in known:
            there = ", ".join(sorted(known)[:_SHOWN_TARGETS]) or "none"
            line = f"step '{step.id}': unknown target '{name}'; {_ONLY_NAMED}: {there}"
            raise RequestRefusedError(line, code="unknown_target")


def needed_steps(workflow: Workflow) -> frozenset[str]:
    """Return the steps whose results a later one may ask for."""
    counterparts = (step.foreach for step in workflow.steps)
    named = {items.step for items in counterparts if isinstance(items, StepItems)}
    return frozenset(named.union(*(step.depends_on for step in workflow.steps)))


def parcel_of(order: StepOrder, sender: Sender, *, is_needed: bool, now: datetime) -> Parcel:
    """Return what is sent for one run of a step."""
    step, request = order.step, order.request
    assert isinstance(request, TargetRequest), request  # noqa: S101 - others were refused before
    fields: TaskFields = {
        **_work(request),
        "agent_id": step.agent or sender.agent_id,
        "project_id": sender.project_id,
        "priority": step.priority or None,
        "weight": step.weight,
        "max_attempts": step.retries + 1,
        "timeout_seconds": step.timeout_seconds,
        "deadline": now + PATIENCE,
        "estimate_tokens": _said_tokens(order),
        "scopes": (sender.scope,),
        "labels": {
            **step.labels,
            "run": sender.run_id,
            "workflow": sender.workflow,
            "step": step.id,
        },
    }
    if step.cost_micro_usd is not None:
        fields["cost_usd"] = plain_usd(step.cost_micro_usd)
    elif order.micro_usd:
        fields["estimate_usd"] = plain_usd(order.micro_usd)
    body = task_body(fields)
    sent = SentOrder(
        number=order.number,
        generation=order.generation,
        is_needed=is_needed,
        is_provisional=order.is_provisional,
    )
    return Parcel(sent, body, len(msgspec.json.encode(body)))


def batch_size(parcels: Sequence[Parcel], most: int) -> int:
    """Return how many of these go into the next request: few, and not too large together."""
    size_bytes = 0
    for count, parcel in enumerate(parcels):
        size_bytes += parcel.size_bytes
        if count == most or (count and size_bytes > BATCH_BYTES):
            return count
    return len(parcels)


def batch_body(parcels: Sequence[Parcel]) -> msgspec.Raw:
    """Return the bytes of a request, which stay the same however often it is sent."""
    bodies = [parcel.body for parcel in parcels]
    return msgspec.Raw(msgspec.json.encode({**shared_by(bodies), "tasks": bodies}))


def task_of(snapshot: TaskSnapshot, before: StepTask) -> StepTask:
    """Return what a service says of the task of a step."""
    used = snapshot.usage or TaskUsageBody()
    return StepTask(
        number=before.number,
        generation=before.generation,
        task_id=before.task_id,
        state=STATES[snapshot.state],
        attempt=snapshot.attempt,
        started_at=_seconds(snapshot.started_at),
        completed_at=_seconds(snapshot.completed_at),
        error=snapshot.error,
        tokens=(used.tokens or 0) - _shared_tokens(snapshot, used),
        micro_usd=to_limit_micro_usd(used.usd or 0),
        assumed_micro_usd=to_limit_micro_usd(used.assumed_usd or 0),
        is_provisional=before.is_provisional,
    )


def moved_task(task: StepTask, event: TaskEvent) -> StepTask:
    """Return a task that has moved on and not ended, as an event tells."""
    state = STATES[event.state or TaskStatus.QUEUED]
    changed: dict[str, Any] = {"state": state, "attempt": event.attempt or task.attempt}
    if state is TaskState.RUNNING:
        changed["started_at"] = event.time.timestamp()
    return msgspec.structs.replace(task, **changed)


def gone_task(task: StepTask, ending: TaskEvent | None, *, is_needed: bool) -> StepTask:
    """Return how a task ended that the service no longer has, as far as anybody can know.

    Its end may have been heard of, and then only the result is lost. Otherwise it may have been
    done, so it is not begun anew before somebody has decided that.
    """
    state = TaskState.FAILED if ending is None else STATES[ending.state or TaskStatus.FAILED]
    error = None if ending is None else ending.error
    if ending is None:
        error = f"the service no longer has task {task.task_id}, and nobody knows whether it was"
        error += " done; look at what it was to do, then resume the run, which begins it anew"
    elif state is TaskState.DONE and is_needed:
        state = TaskState.FAILED
        error = f"task {task.task_id} was done, but the service has forgotten its result, which"
        error += " later steps need; raise result_ttl_seconds there, then resume the run"
    return msgspec.structs.replace(
        task,
        state=state,
        error=error,
        attempt=task.attempt if ending is None else ending.attempt or task.attempt,
        completed_at=None if ending is None else ending.time.timestamp(),
    )


def lost_task(order: SentOrder, sent_at: float) -> StepTask:
    """Return a task of which nobody knows whether the service took it."""
    when = datetime.fromtimestamp(sent_at, UTC)
    error = f"it was sent at {when:%Y-%m-%d %H:%M} UTC and no answer came, so nobody knows whether"
    error += " it was done; look at what it was to do, then resume the run, which begins it anew"
    return failed_task(order, error)


def failed_task(order: SentOrder, error: str) -> StepTask:
    """Return a task that the service does not have."""
    return StepTask(
        number=order.number,
        generation=order.generation,
        task_id="",
        state=TaskState.FAILED,
        error=error,
    )


def waits_for_window(why: WhyBody) -> bool:
    """Tell whether a task can only start when the window of a budget has moved on."""
    for reason in why.reasons:
        kind = reason.hold.get("reason")
        is_scope = kind == "gate_closed" and reason.hold.get("kind") == "scope"
        is_dated = (kind == "budget_short" or is_scope) and reason.until is not None
        is_held_back = bool(reason.held_by or reason.held_by_others)
        if (kind in _WINDOWED or is_dated) and not is_held_back:
            return True
    return False


def _work(request: TargetRequest) -> TaskFields:
    return {
        "target": request.target,
        "action": request.action,
        "params": request.params,
        "input": request.input,
        "tab_id": request.tab_id,
        "selector": request.selector,
        "ref": request.ref,
        "slot": request.slot,
        "provider": request.provider,
    }


def _said_tokens(order: StepOrder) -> int | None:
    """Return the tokens that a step says; one that says none counts by its weight there."""
    said = order.step.estimate
    return order.tokens or (None if said is None else said.tokens)


def _shared_tokens(snapshot: TaskSnapshot, used: TaskUsageBody) -> int:
    """Return the tokens that only stand for the weight of a task in its project's share.

    Nobody has used these: a service counts them where neither the task nor its work says any.
    """
    is_said = snapshot.estimate is not None and snapshot.estimate.tokens is not None
    return 0 if is_said else used.assumed_tokens or 0


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
