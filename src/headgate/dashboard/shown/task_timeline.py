"""The way of a task from its submit to its webhook, as far as it is known.

The record keeps the latest attempt, and notes of some before it; earlier ones are only counted.
Rule: what is not known is said, and no time is made up.
"""

from __future__ import annotations

import msgspec

from headgate.core.tasks.past_attempts import PastAttempt
from headgate.core.tasks.records import MAX_LOSSES, TaskRecord, slot_of, waits_since
from headgate.core.tasks.task import TaskStatus
from headgate.core.texts.figures import count, duration, usd
from headgate.dashboard.shown.task_times import started_at
from headgate.deliveries import Delivery, DeliveryState
from headgate.redaction import hidden_address


class TimelineStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the timeline; `state` is a name that has a sign, `at` None is not known."""

    at: float | None
    state: str
    title: str
    text: str = ""
    tasks: tuple[str, ...] = ()
    is_to_come: bool = False


def timeline(record: TaskRecord, delivery: Delivery | None) -> list[TimelineStep]:
    """Return everything that happened to a task, in its order, and what is to come."""
    return [
        _submitted(record),
        *_conditions(record),
        *_attempts(record),
        *_waiting(record),
        *_end(record),
        *_webhook(record, delivery),
    ]


def _submitted(record: TaskRecord) -> TimelineStep:
    retry_of = record.submission.retry_of
    text = f"Number {record.position} in the queue of the service." if record.position else ""
    if retry_of:
        text = f"{text} It does again what another task did.".strip()
    tasks = (retry_of,) if retry_of else ()
    at = record.task.created_at
    return TimelineStep(at=at, state="queued", title="Submitted", text=text, tasks=tasks)


def _conditions(record: TaskRecord) -> list[TimelineStep]:
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
    return [TimelineStep(at=None, state=state, title=title, text=text, tasks=parents)]


def _attempts(record: TaskRecord) -> list[TimelineStep]:
    past = record.progress.attempts
    is_noted = bool(past) and past[-1].attempt == record.progress.attempt
    latest = [] if is_noted or not record.progress.attempt else [_latest(record)]
    untold = record.progress.attempt - len(past) - len(latest)
    steps = [_untold(record, untold)] if untold > 0 else []
    for attempt in past:
        steps += _past(attempt)
    return steps + latest


def _untold(record: TaskRecord, number: int) -> TimelineStep:
    progress = record.progress
    counts = (
        (progress.failures, "failed"),
        (progress.losses, "lost their node"),
        (progress.rate_limit_hits, "met a rate limit"),
    )
    told = ", ".join(f"{times} {what}" for times, what in counts if times)
    title = "1 earlier attempt" if number == 1 else f"{number} earlier attempts"
    text = "Their times are not kept." + (f" Of all attempts {told}." if told else "")
    return TimelineStep(at=None, state="warning", title=title, text=text)


def _past(attempt: PastAttempt) -> list[TimelineStep]:
    """Return the beginning and the end of an attempt after which the task was tried again."""
    number, place = attempt.attempt, _place(attempt.agent_id, attempt.node_id, attempt.slot)
    title = f"Attempt {number} started"
    began = TimelineStep(at=attempt.started_at, state="running", title=title, text=place)
    if attempt.started_at is None:
        # Its node did not come to it, so there is no time to tell.
        title = f"Attempt {number} assigned, and not begun"
        began = TimelineStep(at=None, state="assigned", title=title, text=place)
    said = [attempt.error.rstrip(".") + "."] if attempt.error else []
    text = " ".join([*said, *_booked(attempt)])
    title = f"Attempt {number} ended, to be tried again"
    return [began, TimelineStep(at=attempt.ended_at, state="warning", title=title, text=text)]


def _booked(attempt: PastAttempt) -> list[str]:
    amounts = [f"{count(attempt.tokens)} tokens"] if attempt.tokens else []
    amounts += [usd(attempt.micro_usd)] if attempt.micro_usd else []
    if not amounts:
        return []
    assumed = (attempt.assumed_tokens, attempt.assumed_micro_usd)
    if any(assumed):
        is_whole = assumed == (attempt.tokens, attempt.micro_usd)
        amounts.append("assumed" if is_whole else "partly assumed")
    return [f"Booked: {', '.join(amounts)}."]


def _latest(record: TaskRecord) -> TimelineStep:
    """Return the attempt that is under way, or that the task ended with."""
    progress, began = record.progress, started_at(record)
    place = _place(record.agent_id, progress.node_id, slot_of(record), waited=_waited(record))
    text = " ".join((place, *_grounds(record)))
    title, state = f"Attempt {progress.attempt} started", "running"
    if began is None:
        title, state = f"Attempt {progress.attempt} assigned, and not begun", "assigned"
    return TimelineStep(at=began, state=state, title=title, text=text)


def _waited(record: TaskRecord) -> float | None:
    """Return how long the latest attempt was kept waiting though it could have started."""
    since, began = waits_since(record), started_at(record)
    return None if since is None or began is None else max(0.0, began - since)


def _place(
    agent_id: str | None, node_id: str | None, slot: str | None, *, waited: float | None = None
) -> str:
    """Return what was decided for an attempt: who runs it, where, after what wait."""
    parts = [f"Agent {agent_id}"] if agent_id else []
    if node_id:
        parts.append(f"on node {node_id}")
    if slot:
        parts.append(f"with slot {slot}")
    if waited is not None:
        parts.append(f"after a wait of {duration(waited)}")
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


def _waiting(record: TaskRecord) -> list[TimelineStep]:
    progress, task = record.progress, record.task
    steps = []
    if task.status is TaskStatus.QUEUED and task.not_before is not None:
        title = "Next attempt, at the earliest" if progress.attempt else "May start"
        steps.append(TimelineStep(at=task.not_before, state="queued", title=title, is_to_come=True))
    if progress.cancel_requested and not record.is_terminal:
        text = "Its executor was asked to stop."
        steps.append(TimelineStep(at=None, state="cancelled", title="To be cancelled", text=text))
    if task.deadline is not None and not record.is_terminal:
        title = "Deadline: it fails if it has not ended by then"
        steps.append(TimelineStep(at=task.deadline, state="warning", title=title, is_to_come=True))
    return steps


def _end(record: TaskRecord) -> list[TimelineStep]:
    if not record.is_terminal:
        return []
    state = record.task.status.value
    titles = {"done": "Done", "failed": "Failed", "cancelled": "Cancelled", "rejected": "Rejected"}
    # What went wrong stands on top of the page, and is not said twice.
    at, title = record.progress.completed_at, titles.get(state, state)
    return [TimelineStep(at=at, state=state, title=title)]


def _webhook(record: TaskRecord, delivery: Delivery | None) -> list[TimelineStep]:
    if delivery is None:
        if record.terms.callback_url is None or record.is_terminal:
            return []
        text = f"To {hidden_address(record.terms.callback_url)}, when the task has ended."
        return [TimelineStep(at=None, state="pending", title="Webhook", text=text, is_to_come=True)]
    tries = "1 try" if delivery.tries == 1 else f"{delivery.tries} tries"
    answer = "" if delivery.status is None else f", last answered {delivery.status}"
    error = f": {delivery.error}" if delivery.error else "."
    text = f"{tries}{answer}{error}"
    if delivery.state is DeliveryState.PENDING:
        title = "Webhook, next try"
        return [
            TimelineStep(
                at=delivery.due_at, state="pending", title=title, text=text, is_to_come=True
            )
        ]
    is_there = delivery.state is DeliveryState.DELIVERED
    title = "Webhook delivered" if is_there else "Webhook given up"
    return [TimelineStep(at=delivery.ended_at, state=delivery.state.value, title=title, text=text)]
