"""One task, from its submit to its webhook: what happened, what holds it, what it cost.

Rule: a page is small whatever a task has in it. Long texts are cut, and the whole is at the address
of the raw JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.core.tasks.records import TaskRecord, slot_of
from headgate.core.tasks.task import TaskStatus
from headgate.dashboard.headers import PAGE_HEADERS
from headgate.dashboard.page import (
    Done,
    Form,
    Page,
    PageRoute,
    View,
    action_route,
    answer_route,
    page_route,
)
from headgate.dashboard.shown.reachable import may_open, scope_href, slot_href
from headgate.dashboard.shown.task_cost import cost_rows, estimate_bars
from headgate.dashboard.shown.task_curl import curl_of
from headgate.dashboard.shown.task_filters import TASKS
from headgate.dashboard.shown.task_reasons import WhyShown, why_shown
from headgate.dashboard.shown.task_timeline import attempts_text, timeline
from headgate.deliveries import Delivery, DeliveryState, message_id
from headgate.errors import HeadgateError
from headgate.redaction import hidden_address
from headgate.task_snapshot import whole_snapshot_of
from headgate.web.handlers.bulk import retried
from headgate.web.handlers.tasks import cancelled, known_form
from headgate.web.http.answers import Answer, json_answer
from headgate.web.refusals import Refusal, refusal_of

OK = 200
MAX_BLOCK = 4_000
MAX_FORMATTED_BYTES = 64 * 1024
"""What is set out in lines before it is cut; a larger value is shown as it was sent."""

_NOT_SHOWN = ("not_found", "forbidden", "unavailable", "internal")


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
    why = WhyShown()
    if record.task.status is TaskStatus.QUEUED:
        why = await why_shown(view, task_id)
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


async def show_raw(view: View, name: str) -> Answer:
    """Answer with the whole task, as the API does."""
    return json_answer(OK, whole_snapshot_of(await _own(view, name)), PAGE_HEADERS)


async def cancel(view: View, name: str, _: Form) -> Done:
    """Cancel a task."""
    to = f"{TASKS}/{known_form(name)}"
    try:
        body = await cancelled(view.api, view.request, name)
    except (Refusal, HeadgateError) as error:
        return _not_done(to, error)
    said = "the task is cancelled." if body.status == "cancelled" else "the task is asked to stop."
    return Done(to=to, said=said)


async def retry(view: View, name: str, _: Form) -> Done:
    """Submit again what a task did that has ended, and go to the new one."""
    to = f"{TASKS}/{known_form(name)}"
    try:
        body = await retried(view.api, view.request, name)
    except (Refusal, HeadgateError) as error:
        return _not_done(to, error)
    return Done(to=f"{TASKS}/{body.task_id}", said="this is the new task.")


def _not_done(to: str, error: Refusal | HeadgateError) -> Done:
    """Say on the page what the API would have refused; what the page cannot show is an error."""
    refusal = error if isinstance(error, Refusal) else refusal_of(error)
    if refusal.body.code in _NOT_SHOWN:
        raise error
    return Done(to=to, said=f"{refusal.body.error}.", is_error=True)


async def _own(view: View, name: str) -> TaskRecord:
    return view.caller.check_task(await view.api.engine.get(known_form(name)))


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
        ("Result", record.result),
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
    answer_route(f"{TASKS}/{{id}}/raw", show_raw, needs="read"),
    action_route(f"{TASKS}/{{id}}/cancel", cancel, needs="cancel"),
    action_route(f"{TASKS}/{{id}}/retry", retry, needs="submit"),
)
