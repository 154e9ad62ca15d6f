"""Tokens: who may ask the service for what, until when; make one, end one.

Rule: the text of a token is on the one page that answers its making, and nowhere else: in no
address, no cookie, and no page that is loaded again.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from headgate.api.errors import ApiError
from headgate.api.schema.tasks import CreatedTokenBody, NewTokenBody
from headgate.api.tokens import created, revoked, token_bodies
from headgate.dashboard.forms import TOKEN_FIELDS, error_text
from headgate.dashboard.lists import part_of
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route
from headgate.errors import InvalidFieldError, LimitReachedError, NameTakenError
from headgate.storage.tokens import MAX_NAME_LENGTH, PERMISSIONS

TOKENS = "/ui/settings/tokens"
CREATED = 201
LIFETIMES = {"": "does not expire", "1": "a day", "7": "a week", "30": "30 days", "365": "a year"}

_MEANINGS = {
    "submit": "submit and retry tasks",
    "read": "look at tasks, budgets and slots",
    "cancel": "cancel tasks",
    "admin": "everything else: settings, tokens, webhooks, slots",
}


async def show(view: View, _: str) -> Page:
    """Show the tokens that are remembered, and the form for another."""
    return await _page(view)


async def create(view: View, _: str, form: Form) -> Done | Page:
    """Make a token, and show its text this once."""
    try:
        made = await created(view.api, view.request, _wish(form, view.now))
    except InvalidFieldError as error:
        problem = error_text(error, TOKEN_FIELDS)
    except (LimitReachedError, NameTakenError) as error:
        problem = str(error)
    except ApiError as api_error:
        if api_error.body.code != "forbidden":
            raise
        problem = error_text(api_error, TOKEN_FIELDS)
    else:
        return await _page(view, made)
    return Done(to=TOKENS, said=f"{problem}.", is_error=True)


async def revoke(view: View, token_id: str, _: Form) -> Done:
    """End a token for good."""
    token = await revoked(view.api, view.request, token_id)
    return Done(to=TOKENS, said=f"the token {token.name} is revoked.")


async def _page(view: View, made: CreatedTokenBody | None = None) -> Page:
    context: dict[str, Any] = {
        "part": part_of(view, await token_bodies(view.api), "from"),
        "made": made,
        "own_id": view.caller.token_id,
        "permissions": [(name, _MEANINGS[name]) for name in PERMISSIONS],
        "lifetimes": LIFETIMES,
        "labels": TOKEN_FIELDS,
        "most_name": MAX_NAME_LENGTH,
        "can_act": view.can("admin"),
    }
    status = 200 if made is None else CREATED
    return Page(template="tokens.html", title="Tokens", context=context, status=status)


def _wish(form: Form, now: float) -> NewTokenBody:
    wanted = set(form.all("permissions"))
    return NewTokenBody(
        name=form.get("name"),
        permissions=[name for name in PERMISSIONS if name in wanted],
        expires_at=_expiry(form.get("expiresAt"), now),
        agent_id=form.get("agentId") or None,
        project_id=form.get("projectId") or None,
    )


def _expiry(days: str, now: float) -> datetime | None:
    if days not in LIFETIMES:
        raise InvalidFieldError("expiresAt", "must be one of the choices")
    return None if not days else datetime.fromtimestamp(now, UTC) + timedelta(days=int(days))


ROUTES: tuple[PageRoute, ...] = (
    page_route(TOKENS, show, needs="admin", is_personal=True),
    action_route(TOKENS, create),
    action_route(f"{TOKENS}/{{id}}/revoke", revoke),
)
