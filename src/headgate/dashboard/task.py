"""One task, from its submit to its webhook: what happened, what holds it, what it cost.

Rule: a page is small whatever a task has in it. Long texts are cut, and the whole is at the address
of the raw JSON.
"""

from __future__ import annotations

import json
import shlex
from typing import Any
from urllib.parse import urlencode

import msgspec

from headgate.api.errors import ApiError, api_error_of
from headgate.api.http.response import Response, json_response
from headgate.api.schema.tasks import ReasonBody, SlotRoomBody, WhyBody
from headgate.api.tasks import cancelled, explained, known_form, own_task, retried
from headgate.core.budgets.scopes import scope_words
from headgate.core.money import plain_usd
from headgate.core.task import MAX_LOSSES, PastAttempt, TaskRecord, TaskStatus, slot_of, waits_since
from headgate.core.task_view import held_of, progress_of, whole_snapshot_of
from headgate.core.text import count, duration, iso, percent, usd
from headgate.dashboard.formats import assumption, capital, started_at
from headgate.dashboard.lists import may_open, project_href, scope_href, slot_href
from headgate.dashboard.page import (
    PAGE_HEADERS,
    Done,
    Form,
    Page,
    PageRoute,
    View,
    action_route,
    page_route,
    response_route,
)
from headgate.dashboard.tasks import TASKS
from headgate.errors import HeadgateError, StoreError, utc_time
from headgate.redaction import hidden_address
from headgate.storage.deliveries import Delivery, DeliveryState
from headgate.storage.unit_of_work import message_id

# What a task was thought to cost, and what it did, as rows of a table and as bars.
#
# Rule: what nobody knows is said in a word; a zero is shown only where something was counted.

NONE, NOT_YET, NOTHING = "none", "not yet", "nothing"
NOT_SAID = "not said"
IN_FLIGHT = (TaskStatus.ASSIGNED, TaskStatus.RUNNING)


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table; where an amount is not known, `absent` says so."""

    name: str
    tokens: int | None
    micro_usd: int | None
    absent: str = NONE


class EstimateBar(msgspec.Struct, frozen=True, kw_only=True):
    """What was used of an estimate, and beyond it, in one unit."""

    within: int
    beyond: int
    estimate: int
    words: str


def cost_rows(record: TaskRecord) -> list[CostRow]:
    """Return everything that is known of what a task costs, the estimate first."""
    terms, progress = record.terms, record.progress
    estimate = record.task.estimate_tokens
    rows = [
        CostRow(name="Estimate", tokens=estimate, micro_usd=terms.estimate_micro_usd),
    ]
    if terms.cost_micro_usd is not None:
        rows.append(CostRow(name="Known beforehand", tokens=None, micro_usd=terms.cost_micro_usd))
    held = (progress.reserved_tokens, progress.reserved_micro_usd)
    if record.task.status in IN_FLIGHT:
        rows.append(CostRow(name="Reserved now", tokens=held[0], micro_usd=held[1]))
    elif record.is_terminal and any(held):
        rows.append(CostRow(name="Reserved before", tokens=held[0], micro_usd=held[1]))
    rows += [*_reported(record), _booked(record)]
    if progress.assumed_tokens or progress.assumed_micro_usd:
        assumed = (progress.assumed_tokens, progress.assumed_micro_usd)
        rows.append(CostRow(name="Assumed part", tokens=assumed[0], micro_usd=assumed[1]))
    if progress.attempt > 1 and record.tokens is not None:
        last = (record.tokens, record.micro_usd or 0)
        rows.append(CostRow(name="The last attempt", tokens=last[0], micro_usd=last[1]))
    return rows


def _reported(record: TaskRecord) -> list[CostRow]:
    """Return what the latest attempt is known to have used, once it has ended."""
    progress = record.progress
    said = (progress.reported_tokens, progress.reported_micro_usd)
    if said == (None, None):
        return []
    name = "Priced from the response" if progress.is_priced else "Reported"
    return [CostRow(name=name, tokens=said[0], micro_usd=said[1], absent=NOT_SAID)]


def _booked(record: TaskRecord) -> CostRow:
    if record.tokens is None and record.micro_usd is None:
        absent = NOTHING if record.is_terminal else NOT_YET
        return CostRow(name="Booked", tokens=None, micro_usd=None, absent=absent)
    used = record.progress
    return CostRow(name="Booked", tokens=used.used_tokens, micro_usd=used.used_micro_usd)


def estimate_bars(record: TaskRecord) -> list[EstimateBar]:
    """Return a bar for each unit that has an estimate, once something was booked."""
    if record.tokens is None:
        return []
    units = (
        ("Tokens", record.progress.used_tokens, record.task.estimate_tokens),
        ("Dollars", record.progress.used_micro_usd, record.terms.estimate_micro_usd),
    )
    return [
        EstimateBar(
            within=min(used, estimate),
            beyond=max(0, used - estimate),
            estimate=estimate,
            words=f"{name}: {percent(used / estimate)} of the estimate",
        )
        for name, used, estimate in units
        if estimate
    ]


# A task as a command that submits the same again.
#
# Rule: what is pasted into a shell does what it shows. The JSON has nothing but ASCII in it, so no
# character of a task hides another, and all of it is one quoted word. The token is a placeholder.

MAX_BODY_BYTES = 8_000
"""What a command line may carry; a larger task is tried again instead."""

BEARER = '-H "Authorization: Bearer $HEADGATE_TOKEN" '


def curl_of(record: TaskRecord, address: str, *, needs_token: bool) -> str | None:
    """Return the command; None if the task is too large for one."""
    given = record.submission
    if len(given.params or b"") + len(given.input or b"") > MAX_BODY_BYTES:
        return None
    body = json.dumps(_body(record))
    if len(body) > MAX_BODY_BYTES:
        return None
    bearer = BEARER if needs_token else ""
    return f"curl -s {bearer}{shlex.quote(address + '/tasks')} -d {shlex.quote(body)}"


def _body(record: TaskRecord) -> dict[str, object]:
    """Return what was submitted, as far as it was not the default or its time is over."""
    task, terms, given = record.task, record.terms, record.submission
    names_slot = terms.names_slot
    fields: dict[str, object] = {
        "agentId": task.agent_id,
        "projectId": task.project_id,
        "action": given.action,
        "tabId": given.tab_id,
        "selector": given.selector,
        "ref": given.ref,
        "params": _value(given.params),
        "input": _value(given.input),
        "priority": task.priority,
        "weight": task.weight if task.weight != 1 else None,
        "target": task.target,
        "slot": task.slot if names_slot else None,
        "provider": task.provider if names_slot else None,
        "estimate": _estimate(record),
        "scopes": list(task.scopes),
        "labels": given.labels,
        "maxAttempts": terms.max_attempts if terms.max_attempts != 1 else None,
        "onExhausted": terms.on_exhausted.value,
        "callbackUrl": terms.callback_url,
        "dependsOn": list(terms.depends_on),
        "onParentFailure": terms.on_parent_failure.value if terms.depends_on else None,
        "notBefore": _to_come(record),
    }
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _value(raw: msgspec.Raw | None) -> object:
    return json.loads(bytes(raw)) if raw else None


def _estimate(record: TaskRecord) -> dict[str, object]:
    tokens, micro_usd = record.task.estimate_tokens, record.terms.estimate_micro_usd
    given = {"tokens": tokens, "usd": None if micro_usd is None else plain_usd(micro_usd)}
    return {name: value for name, value in given.items() if value is not None}


def _to_come(record: TaskRecord) -> str | None:
    """Return the time that a task waits for; one that has started waits for none."""
    if record.progress.attempt or record.task.not_before is None or record.is_terminal:
        return None
    return iso(record.task.not_before)


# Why a task waits, with ways to everything that a reason names.
#
# A reason says what holds the task in a line for people; beside it are links to the tasks that
# hold it, to the budget, the slot, the project. Rule: a link is drawn only to a page that the
# visitor may open.

MAX_REASONS = 20


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A way to something that a reason names."""

    label: str
    name: str
    href: str


class ReasonShown(msgspec.Struct, frozen=True, kw_only=True):
    """One reason as the page shows it; `names_time` if the message itself says until when."""

    message: str
    until: float | None
    names_time: bool
    held_by: tuple[str, ...]
    held_by_others: int
    parents: tuple[str, ...]
    links: list[Link]
    warning: str


class WhyView(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons, and the slots that the task may use; `problem` if nobody could say.

    `holds` is what its next attempt reserves, a sentence for each unit.
    """

    reasons: list[ReasonShown] = []
    holds: list[str] = []
    more_reasons: int = 0
    slots: list[SlotRoomBody] = []
    problem: str = ""


async def why_view(view: View, task_id: str) -> WhyView:
    """Ask why a task waits; that nobody can say now is no reason to show nothing else."""
    try:
        answer = await explained(view.api, view.request, task_id)
    except ApiError as api_error:
        return WhyView(problem=api_error.body.error)
    except StoreError as error:
        # What a driver says may name hosts and paths.
        return WhyView(problem=api_error_of(error).body.error)
    body = _reason_body(answer)
    if body is None:
        return WhyView(problem="the node that knows did not answer")
    slots = body.slots if body.slot is None else (body.slot,)
    return WhyView(
        reasons=[shown_reason(view, one) for one in body.reasons[:MAX_REASONS]],
        more_reasons=max(0, len(body.reasons) - MAX_REASONS),
        slots=list(slots),
        holds=[f"It {one.text}" for one in body.would_hold],
    )


def _reason_body(answer: WhyBody | Response) -> WhyBody | None:
    """Read what this node says, or another one on its behalf."""
    if not isinstance(answer, Response):
        return answer
    if answer.status != OK:
        return None
    try:
        return msgspec.json.decode(answer.body, type=WhyBody)
    except msgspec.MsgspecError:
        return None


def shown_reason(view: View, reason: ReasonBody) -> ReasonShown:
    parents = reason.detail.get("parents")
    until = None if reason.until is None else reason.until.timestamp()
    return ReasonShown(
        message=capital(reason.message),
        until=until,
        names_time=until is not None and utc_time(until) in reason.message,
        held_by=reason.held_by,
        held_by_others=reason.held_by_others,
        parents=tuple(str(one) for one in parents or ()),
        links=links_of(view, reason.detail),
        warning=capital(reason.warning),
    )


def links_of(view: View, reason: dict[str, Any]) -> list[Link]:
    """Return the ways to what a reason names."""
    kind, name = reason.get("kind"), reason.get("name")
    scope = name if kind == "scope" else reason.get("scope")
    links = []
    href = scope_href(scope) if isinstance(scope, str) else ""
    if isinstance(scope, str) and may_open(view, href):
        links.append(Link(label="Budget", name=scope_words(scope), href=href))
    if kind == "slot":
        links.append(Link(label="Slot", name=str(name), href=slot_href(str(name))))
    if kind == "target":
        links.append(_tasks_link("In flight for", target=str(name)))
    if reason.get("agent_id") and view.caller.agent_id in (None, reason["agent_id"]):
        links.append(_tasks_link("In flight at", agent=str(reason["agent_id"])))
    if reason.get("project_id") and view.may("admin"):
        project = str(reason["project_id"])
        links.append(Link(label="Project", name=project, href=project_href(project)))
    if reason.get("reason") == "paused" and view.may("admin"):
        links.append(Link(label="Resume on", name="projects", href="/ui/projects"))
    return links


def _tasks_link(label: str, **which: str) -> Link:
    query = urlencode([*which.items(), ("state", "assigned"), ("state", "running")])
    return Link(label=label, name=next(iter(which.values())), href=f"/ui/tasks?{query}")


# The way of a task from its submit to its webhook, as far as it is known.
#
# The record keeps the latest attempt, and notes of some before it; earlier ones are only counted.
# Rule: what is not known is said, and no time is made up.


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
        text = f"{text} It is a retry of another task.".strip()
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
        state, text = "cancelled", "It no longer waits for them."
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
    text = "Their times are not stored." + (f" Of all attempts {told}." if told else "")
    return TimelineStep(at=None, state="warning", title=title, text=text)


def _past(attempt: PastAttempt) -> list[TimelineStep]:
    """Return the beginning and the end of an attempt after which the task was tried again."""
    number, place = attempt.attempt, _place(attempt.agent_id, attempt.node_id, attempt.slot)
    title = f"Attempt {number} started"
    began = TimelineStep(at=attempt.started_at, state="running", title=title, text=place)
    if attempt.started_at is None:
        # Its node did not come to it, so there is no time to tell.
        title = f"Attempt {number} assigned, not started"
        began = TimelineStep(at=None, state="assigned", title=title, text=place)
    said = [attempt.error.rstrip(".") + "."] if attempt.error else []
    text = " ".join([*said, *_booked_event(attempt)])
    title = f"Attempt {number} ended, will be retried"
    return [began, TimelineStep(at=attempt.ended_at, state="warning", title=title, text=text)]


def _booked_event(attempt: PastAttempt) -> list[str]:
    amounts = [f"{count(attempt.tokens)} tokens"] if attempt.tokens else []
    amounts += [usd(attempt.micro_usd)] if attempt.micro_usd else []
    if not amounts:
        return []
    assumed = (attempt.assumed_tokens, attempt.assumed_micro_usd)
    said = assumption(assumed, (attempt.tokens, attempt.micro_usd))
    amounts += [said] if said else []
    return [f"Booked: {', '.join(amounts)}."]


def _latest(record: TaskRecord) -> TimelineStep:
    """Return the attempt that is under way, or that the task ended with."""
    progress, began = record.progress, started_at(record)
    place = _place(record.agent_id, progress.node_id, slot_of(record), waited=_waited(record))
    text = " ".join((place, *_grounds(record)))
    title, state = f"Attempt {progress.attempt} started", "running"
    if began is None:
        title, state = f"Attempt {progress.attempt} assigned, not started", "assigned"
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
    return f"started; no retry: {_not_again(record)}"


def _not_again(record: TaskRecord) -> str:
    progress, most, deadline = record.progress, record.terms.max_attempts, record.task.deadline
    # The last failure is the end of the task, and not among those that were tried again.
    if progress.failures + 1 >= most:
        return "no more than one may fail" if most == 1 else f"no more than {most} may fail"
    if deadline is not None and (progress.completed_at or 0.0) >= deadline:
        return "its deadline has passed"
    if progress.losses + 1 >= MAX_LOSSES:
        return "its error says why"
    return "this kind of error does not go away by itself"


def _waiting(record: TaskRecord) -> list[TimelineStep]:
    progress, task = record.progress, record.task
    steps = []
    if task.status is TaskStatus.QUEUED and task.not_before is not None:
        title = "Next attempt, at the earliest" if progress.attempt else "May start"
        steps.append(TimelineStep(at=task.not_before, state="queued", title=title, is_to_come=True))
    if progress.cancel_requested and not record.is_terminal:
        text = "Headgate told its executor to stop."
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


OK = 200
MAX_BLOCK = 4_000
MAX_FORMATTED_BYTES = 64 * 1024
"""What is set out in lines before it is cut; a larger value is shown as it was sent."""

_NOT_SHOWN = ("not_found", "task_deleted", "forbidden", "unavailable", "internal")


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a task that may be large, as much of it as is shown."""

    name: str
    text: str
    size_bytes: int
    is_cut: bool


async def show(view: View, name: str) -> Page:
    """Show a task."""
    record = await _own(view, name)
    task_id = record.task.id
    delivery = await _delivery(view, record)
    why = WhyView()
    if record.task.status is TaskStatus.QUEUED:
        why = await why_view(view, task_id)
    context: dict[str, Any] = {
        "record": record,
        "task": record.task,
        "state": record.task.status.value,
        "is_live": _is_live(record, delivery),
        "is_waiting": record.task.status is TaskStatus.QUEUED,
        "why": why,
        "steps": timeline(record, delivery),
        "attempts_text": attempts_text(record),
        "cost_rows": cost_rows(record),
        "held": held_of(record),
        "progress": progress_of(record),
        "estimate_bars": estimate_bars(record),
        "slot": slot_of(record) or record.task.slot,
        "slot_href": slot_href,
        "delivery": delivery,
        "blocks": list(_blocks(record)),
        "curl": curl_of(record, view.address, needs_token=view.needs_login),
        "path": f"{TASKS}/{task_id}",
        "scopes": [_scope_shown(view, one) for one in record.task.scopes],
        "callback": hidden_address(record.terms.callback_url or ""),
        "can_cancel": view.can("cancel") and not record.is_terminal,
        "can_retry": view.can("submit") and record.is_terminal,
    }
    return Page(template="task.html", title=f"Task {task_id}", context=context)


async def show_raw(view: View, name: str) -> Response:
    """Answer with the whole task, as the API does."""
    return json_response(OK, whole_snapshot_of(await _own(view, name)), PAGE_HEADERS)


async def cancel(view: View, name: str, _: Form) -> Done:
    """Cancel a task."""
    to = f"{TASKS}/{known_form(name)}"
    try:
        body = await cancelled(view.api, view.request, name)
    except (ApiError, HeadgateError) as error:
        return _not_done(to, error)
    said = "the task is cancelled." if body.status == "cancelled" else "the task was told to stop."
    return Done(to=to, said=said)


async def retry(view: View, name: str, _: Form) -> Done:
    """Submit again what a task did that has ended, and go to the new one."""
    to = f"{TASKS}/{known_form(name)}"
    try:
        body = await retried(view.api, view.request, name)
    except (ApiError, HeadgateError) as error:
        return _not_done(to, error)
    return Done(to=f"{TASKS}/{body.task_id}", said="this is the new task.")


def _not_done(to: str, error: ApiError | HeadgateError) -> Done:
    """Say on the page what the API would have refused; what the page cannot show is an error."""
    api_error = error if isinstance(error, ApiError) else api_error_of(error)
    if api_error.body.code in _NOT_SHOWN:
        raise error
    return Done(to=to, said=f"{api_error.body.error}.", is_error=True)


async def _own(view: View, name: str) -> TaskRecord:
    return await own_task(view.api, view.caller, name)


async def _delivery(view: View, record: TaskRecord) -> Delivery | None:
    """Return the webhook of a task, to those who may see webhooks."""
    webhooks = view.api.webhooks
    if webhooks is None or record.terms.callback_url is None or not view.may("admin"):
        return None
    return await webhooks.deliveries.get(message_id(record.task.id))


def _is_live(record: TaskRecord, delivery: Delivery | None) -> bool:
    is_pending = delivery is not None and delivery.state is DeliveryState.PENDING
    return not record.is_terminal or is_pending


def _blocks(record: TaskRecord) -> list[Block]:
    found = (
        ("Result", (record.result or "").encode()),
        ("Params", record.submission.params),
        ("Input", record.submission.input),
    )
    return [block_of(name, bytes(raw)) for name, raw in found if raw]


def block_of(name: str, raw: bytes) -> Block:
    """Return the beginning of a JSON value, set out in lines if it is not large."""
    shown = raw
    if len(raw) <= MAX_FORMATTED_BYTES:
        shown = msgspec.json.format(raw, indent=2)
    text = shown[: 4 * MAX_BLOCK].decode("utf-8", "ignore")
    is_cut = len(shown) > 4 * MAX_BLOCK or len(text) > MAX_BLOCK
    return Block(name=name, text=text[:MAX_BLOCK], size_bytes=len(raw), is_cut=is_cut)


def _scope_shown(view: View, scope: str) -> tuple[str, str]:
    """Return a budget and its page, if the visitor may open that."""
    href = scope_href(scope)
    return scope, href if may_open(view, href) else ""


ROUTES: tuple[PageRoute, ...] = (
    page_route(f"{TASKS}/{{id}}", show, needs="read"),
    response_route(f"{TASKS}/{{id}}/raw", show_raw, needs="read"),
    action_route(f"{TASKS}/{{id}}/cancel", cancel, needs="cancel"),
    action_route(f"{TASKS}/{{id}}/retry", retry, needs="submit"),
)
