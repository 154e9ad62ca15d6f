"""The way of a task from its submit to its webhook, as far as it is known.

The record keeps the latest attempt, and the feed of events what happened lately; earlier attempts
are only counted. Rule: what is not known is said, and no time is made up.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headgate.core.records import MAX_LOSSES, TaskRecord, slot_of, waits_since
from headgate.core.tasks import TaskStatus
from headgate.dashboard.formats import duration
from headgate.deliveries import Delivery, DeliveryState
from headgate.redaction import hidden_address
from headgate.runtime.event_feed import Happening

MAX_ATTEMPTS_SHOWN = 20


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the timeline; `state` is a name that has a sign, `at` None is not known."""

    at: float | None
    state: str
    title: str
    text: str = ""
    tasks: tuple[str, ...] = ()
    is_to_come: bool = False


class Attempt(msgspec.Struct, kw_only=True):
    """What is known of one attempt."""

    number: int
    started_at: float | None = None
    ended_at: float | None = None
    error: str = ""


def timeline(
    record: TaskRecord, happenings: Iterable[Happening], delivery: Delivery | None
) -> list[Step]:
    """Return everything that happened to a task, in its order, and what is to come."""
    return [
        _submitted(record),
        *_conditions(record),
        *_attempts(record, happenings),
        *_waiting(record),
        *_end(record),
        *_webhook(record, delivery),
    ]


def _submitted(record: TaskRecord) -> Step:
    retry_of = record.submission.retry_of
    text = f"As number {record.position} of those that waited." if record.position else ""
    if retry_of:
        text = f"{text} It does again what another task did.".strip()
    tasks = (retry_of,) if retry_of else ()
    at = record.task.created_at
    return Step(at=at, state="queued", title="Submitted", text=text, tasks=tasks)


def _conditions(record: TaskRecord) -> list[Step]:
    parents = record.terms.depends_on
    if not parents:
        return []
    left = record.progress.waiting_for
    state, text = "done", "All of them have ended."
    if left and record.is_terminal:
        state, text = "cancelled", "It does not wait for them any more."
    elif left:
        state, text = "queued", f"Not ended yet: {left}."
    title = "Depends on other tasks"
    return [Step(at=None, state=state, title=title, text=text, tasks=parents[:20])]


def _attempts(record: TaskRecord, happenings: Iterable[Happening]) -> list[Step]:
    known = attempts_of(record, happenings)
    shown = [one for one in known if one.started_at is not None or one.ended_at is not None]
    shown = shown[-MAX_ATTEMPTS_SHOWN:]
    steps = []
    unseen = record.progress.attempt - len(shown)
    if unseen > 0:
        steps.append(_untold(record, unseen))
    for attempt in shown:
        steps += _told(record, attempt)
    return steps


def attempts_of(record: TaskRecord, happenings: Iterable[Happening]) -> list[Attempt]:
    """Return all attempts of a task, with what the record and the latest events know of them."""
    attempts = {number: Attempt(number=number) for number in range(1, record.progress.attempt + 1)}
    for one in happenings:
        attempt = attempts.get(one.attempt)
        if attempt is None:
            continue
        if one.status in (TaskStatus.RUNNING, TaskStatus.ASSIGNED):
            attempt.started_at = one.at
        elif one.status is TaskStatus.QUEUED:
            attempt.ended_at, attempt.error = one.at, one.error or ""
    latest = attempts.get(record.progress.attempt)
    if latest is not None and record.progress.started_at is not None:
        latest.started_at = record.progress.started_at
    return list(attempts.values())


def _untold(record: TaskRecord, number: int) -> Step:
    progress = record.progress
    counts = (
        (progress.failures, "failed"),
        (progress.losses, "lost their node"),
        (progress.rate_limit_hits, "met a rate limit"),
    )
    told = ", ".join(f"{count} {what}" for count, what in counts if count)
    title = "1 earlier attempt" if number == 1 else f"{number} earlier attempts"
    text = "Their times are not kept." + (f" Of all attempts {told}." if told else "")
    return Step(at=None, state="warning", title=title, text=text)


def _told(record: TaskRecord, attempt: Attempt) -> list[Step]:
    is_latest = attempt.number == record.progress.attempt
    text = " ".join((_place(record), *_grounds(record))) if is_latest else ""
    title = f"Attempt {attempt.number} started"
    steps = [Step(at=attempt.started_at, state="running", title=title, text=text)]
    if attempt.ended_at is not None:
        ended = f"Attempt {attempt.number} ended, to be tried again"
        steps.append(Step(at=attempt.ended_at, state="warning", title=ended, text=attempt.error))
    return steps


def _place(record: TaskRecord) -> str:
    """Return what was decided for the latest attempt: who runs it, where, after what wait."""
    since, started_at = waits_since(record), record.progress.started_at
    parts = [f"Agent {record.agent_id}"] if record.agent_id else []
    if record.progress.node_id:
        parts.append(f"on node {record.progress.node_id}")
    slot = slot_of(record)
    if slot:
        parts.append(f"with slot {slot}")
    if since is not None and started_at is not None:
        parts.append(f"after a wait of {duration(max(0.0, started_at - since))}")
    return ", ".join(parts) + "." if parts else ""


def _grounds(record: TaskRecord) -> list[str]:
    """Return why the latest attempt was started when it was."""
    choice = record.progress.choice
    return [] if choice is None else choice.sentences(record.task.project_id)


def attempts_text(record: TaskRecord) -> str:
    """Return what is said beside the number of attempts: what may still come, or why nothing is."""
    progress, most = record.progress, record.terms.max_attempts
    if not record.is_terminal:
        return f"started; it is given up when {most} {'has' if most == 1 else 'have'} failed"
    if record.task.status is not TaskStatus.FAILED or not progress.attempt:
        return "started"
    return f"started; not tried again: {_not_again(record)}"


def _not_again(record: TaskRecord) -> str:
    progress, most, deadline = record.progress, record.terms.max_attempts, record.task.deadline
    # The last failure is the end of the task, and not among those that were tried again.
    if progress.failures + 1 >= most:
        return "no more than one may fail" if most == 1 else f"no more than {most} may fail"
    if deadline is not None and (progress.completed_at or 0.0) >= deadline:
        return "its deadline has passed"
    if progress.losses + 1 >= MAX_LOSSES:
        return "its error says why"
    return "an error like this one does not pass by itself"


def _waiting(record: TaskRecord) -> list[Step]:
    progress, task = record.progress, record.task
    steps = []
    if task.status is TaskStatus.QUEUED and task.not_before is not None:
        title = "Next attempt, at the earliest" if progress.attempt else "May start"
        steps.append(Step(at=task.not_before, state="queued", title=title, is_to_come=True))
    if progress.cancel_requested and not record.is_terminal:
        text = "Its executor was asked to stop."
        steps.append(Step(at=None, state="cancelled", title="To be cancelled", text=text))
    if task.deadline is not None and not record.is_terminal:
        title = "Deadline: it fails if it has not ended by then"
        steps.append(Step(at=task.deadline, state="warning", title=title, is_to_come=True))
    return steps


def _end(record: TaskRecord) -> list[Step]:
    if not record.is_terminal:
        return []
    state = record.task.status.value
    titles = {"done": "Done", "failed": "Failed", "cancelled": "Cancelled", "rejected": "Rejected"}
    return [
        Step(
            at=record.progress.completed_at,
            state=state,
            title=titles.get(state, state),
            text=record.error or "",
        )
    ]


def _webhook(record: TaskRecord, delivery: Delivery | None) -> list[Step]:
    if delivery is None:
        if record.terms.callback_url is None or record.is_terminal:
            return []
        text = f"To {hidden_address(record.terms.callback_url)}, when the task has ended."
        return [Step(at=None, state="pending", title="Webhook", text=text, is_to_come=True)]
    tries = "1 try" if delivery.tries == 1 else f"{delivery.tries} tries"
    answer = "" if delivery.status is None else f", last answered {delivery.status}"
    error = f": {delivery.error}" if delivery.error else "."
    text = f"{tries}{answer}{error}"
    if delivery.state is DeliveryState.PENDING:
        title = "Webhook, next try"
        return [Step(at=delivery.due_at, state="pending", title=title, text=text, is_to_come=True)]
    is_there = delivery.state is DeliveryState.DELIVERED
    title = "Webhook delivered" if is_there else "Webhook given up"
    return [Step(at=delivery.ended_at, state=delivery.state.value, title=title, text=text)]
