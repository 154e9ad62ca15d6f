"""Webhooks: what was told to whom, how often it was tried, what came back, and once more.

Rule: of an address its query is hidden, and of a signing secret only its age is shown: whoever
needs a secret asks the command line, which is in the audit log. Raw JSON, and the command that
submits a task again, are what the API gives: there the address is whole, to whoever may read the
task.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from headgate.api.errors import ApiError
from headgate.api.schema.admin import DeliveryBody
from headgate.api.webhooks import (
    one_webhook,
    pinged,
    read_query,
    redelivered,
    rotated,
    signing_secrets,
    webhook_list,
)
from headgate.dashboard.formats import DELIVERIES, capital, said, unheard_words
from headgate.dashboard.forms import WEBHOOK_FIELDS, error_text
from headgate.dashboard.lists import address
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route
from headgate.redaction import hidden_address
from headgate.storage.deliveries import MAX_KEPT_TRIES, DeliveryState, Secret

WEBHOOKS = "/ui/webhooks"
OK, BAD_REQUEST = 200, 400
PAGE_ROWS = 50
STATES = tuple((state.value, said(DELIVERIES, state.value)) for state in DeliveryState)
HEAD = ("Webhook", "State", "Event", "Receiver", "Created", "Tries", "Last answer")
FILTERS = ("state", "task", "cursor")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook as it is drawn: its address without what may be a secret."""

    webhook: DeliveryBody
    path: str
    address: str
    state: str
    answer: str


async def show(view: View, _: str) -> Page:
    """Show one page of webhooks, and what signs them."""
    given = {name: value for name, value in view.request.query().items() if name in FILTERS}
    context: dict[str, Any] = {
        "is_on": view.api.webhooks is not None,
        "states": STATES,
        "labels": WEBHOOK_FIELDS,
        "head": [*HEAD, ""] if view.can("admin") else list(HEAD),
        "state": given.get("state", ""),
        "task": given.get("task", ""),
        "problem": "",
        "rows": [],
        "is_filtered": bool(given.get("state") or given.get("task")),
        "newest": address(WEBHOOKS, {**given, "cursor": ""}) if given.get("cursor") else None,
        "older": None,
        "secrets": [],
        "can_act": view.can("admin"),
    }
    if view.api.webhooks is not None:
        context |= await _rows(view, given)
        if not view.request.header(b"hx-request"):
            # Asking for them writes to the store, and no region that is drawn anew shows them.
            context["secrets"] = await signing_secrets(view.api)
    status = BAD_REQUEST if context["problem"] else OK
    return Page(template="webhooks.html", title="Webhooks", context=context, status=status)


async def _rows(view: View, given: dict[str, str]) -> dict[str, Any]:
    try:
        query = read_query({**given, "limit": str(PAGE_ROWS)})
    except ApiError as api_error:
        return {"problem": capital(error_text(api_error, WEBHOOK_FIELDS))}
    found = await webhook_list(view.api, query)
    older = (
        None
        if found.next_cursor is None
        else address(WEBHOOKS, {**given, "cursor": found.next_cursor})
    )
    return {"rows": [_row(one) for one in found.webhooks], "older": older}


async def show_one(view: View, name: str) -> Page:
    """Show everything that is known of a webhook."""
    row = _row(await one_webhook(view.api, name))
    context = {
        "row": row,
        "webhook": row.webhook,
        "most_tries": MAX_KEPT_TRIES,
        "can_act": view.can("admin"),
    }
    return Page(template="webhook.html", title=f"Webhook {name}", context=context)


async def redeliver(view: View, name: str, _: Form) -> Done:
    """Send a webhook again, from its first try on."""
    to = _path(name)
    try:
        await redelivered(view.api, view.request, name)
    except ApiError as api_error:
        if api_error.body.code != "conflict":
            raise
        return Done(to=to, said=f"{api_error.body.error}.", is_error=True)
    return Done(to=to, said="Headgate sends the webhook again, starting with the first try.")


async def ping(view: View, _: str, form: Form) -> Done:
    """Send a signed message to an address now, and say what happened."""
    try:
        answer = await pinged(view.api, view.request, form.get("url"))
    except ApiError as api_error:
        if api_error.body.code != "invalid_field":
            raise
        return Done(to=WEBHOOKS, said=f"{error_text(api_error, WEBHOOK_FIELDS)}.", is_error=True)
    came = "" if answer.status is None else f" with {answer.status}"
    if answer.delivered:
        return Done(to=WEBHOOKS, said=f"the receiver accepted the message{came}.")
    problem = f"the receiver {unheard_words(answer.error)}."
    return Done(to=WEBHOOKS, said=problem, is_error=True)


async def rotate(view: View, _: str, __: Form) -> Done:
    """Make a new signing secret."""
    secrets: tuple[Secret, ...] = await rotated(view.api, view.request)
    beside = f" {len(secrets) - 1} older ones also sign for now." if len(secrets) > 1 else ""
    said = f"there is a new signing secret; headgate webhooks secret prints it.{beside}"
    return Done(to=WEBHOOKS, said=said)


def _row(webhook: DeliveryBody) -> Row:
    return Row(
        webhook=webhook,
        path=_path(webhook.id),
        address=hidden_address(webhook.url),
        state=said(DELIVERIES, webhook.state),
        answer=answer_words(webhook),
    )


def answer_words(webhook: DeliveryBody) -> str:
    """Return what the receiver answered last, or what went wrong; empty before the first try."""
    if webhook.error:
        return webhook.error
    return "" if webhook.status is None else f"answered {webhook.status}"


def _path(webhook_id: str) -> str:
    return f"{WEBHOOKS}/{quote(webhook_id, safe='')}"


ROUTES: tuple[PageRoute, ...] = (
    page_route(WEBHOOKS, show, needs="admin"),
    page_route(f"{WEBHOOKS}/{{id}}", show_one, needs="admin"),
    action_route(f"{WEBHOOKS}/{{id}}/redeliver", redeliver),
    action_route(f"{WEBHOOKS}/ping", ping),
    action_route(f"{WEBHOOKS}/secret/rotate", rotate),
)
