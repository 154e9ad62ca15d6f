"""The routes of tokens: make one, list them, revoke one.

Rule: nobody makes a token that may do more, or for longer, than the one it is asked for with.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal

import msgspec

from headgate.audit import AuditEntry, Detail
from headgate.core.snapshot import MAX_PRIORITY
from headgate.errors import InvalidFieldError
from headgate.http_bodies import CreatedTokenBody, NewTokenBody, TokenBody, TokenListBody
from headgate.intake import fields
from headgate.intake.bodies import read_body
from headgate.task_snapshot import exact_moment
from headgate.tokens import Bounds, NewToken, Token, Tokens, new_token
from headgate.web.answers import Answer, json_answer
from headgate.web.api import Api, Route
from headgate.web.auditing import actor_of
from headgate.web.callers import Caller
from headgate.web.refusals import Refusal
from headgate.web.requests import Request

OK = 200
CREATED = 201
_TOKEN_ID = re.compile(r"[0-9a-f]{1,64}")


async def create_token(api: Api, request: Request, _: str) -> Answer:
    """Make a token, and answer with its text this once."""
    wish = read_body(await request.json_body(), NewTokenBody)
    tokens = _tokens(api)
    bounds = _bounds(api, wish)
    expires_at = _expiry(wish.expires_at)
    _check_no_more(request.caller, wish, bounds, expires_at)
    new = new_token(
        name=wish.name,
        permissions=tuple(wish.permissions),
        now=tokens.now(),
        bounds=bounds,
        expires_at=expires_at,
    )
    token = new.kept.token
    detail: Detail = {"name": token.name, "permissions": list(token.permissions)}
    await tokens.add(new.kept, _entry(request, "token.create", token.id, detail))
    body = created_body(new, tokens.now())
    return json_answer(CREATED, body, ((b"cache-control", b"no-store"),))


def created_body(new: NewToken, now: float) -> CreatedTokenBody:
    """Return a token that was made, with its text."""
    shown = _shown(new.kept.token, now)
    return CreatedTokenBody(token=new.text, **msgspec.structs.asdict(shown))


async def list_tokens(api: Api, _: Request, __: str) -> Answer:
    """Answer with all tokens, and none of their texts."""
    tokens = _tokens(api)
    now = tokens.now()
    return json_answer(OK, TokenListBody(tokens=[_shown(one, now) for one in await tokens.list()]))


async def revoke_token(api: Api, request: Request, token_id: str) -> Answer:
    """End a token for good; one that was revoked before stays so."""
    tokens = _tokens(api)
    if _TOKEN_ID.fullmatch(token_id) is None:
        raise _no_such_token()
    token = await tokens.revoke(token_id, _entry(request, "token.revoke", token_id, {}))
    if token is None:
        raise _no_such_token()
    api.entrance.forget()
    return json_answer(OK, _shown(token, tokens.now()))


def _entry(request: Request, action: str, token_id: str, detail: Detail) -> AuditEntry:
    return AuditEntry(actor=actor_of(request), action=action, subject=token_id, detail=detail)


def _no_such_token() -> Refusal:
    return Refusal("not_found", "there is no such token")


def _tokens(api: Api) -> Tokens:
    if api.tokens is None:
        raise Refusal("unavailable", "this service keeps no tokens")
    return api.tokens


def _bounds(api: Api, wish: NewTokenBody) -> Bounds:
    project_id, least = wish.project_id or None, wish.least_priority
    agent_id = fields.identifier(wish.agent_id, "agentId") if wish.agent_id else None
    if project_id is not None and not api.intake.knows_project(project_id):
        raise Refusal("unknown_project", f"unknown project '{project_id[:60]}'")
    if least is not None and abs(least) > MAX_PRIORITY:
        raise InvalidFieldError("leastPriority", f"must be within {MAX_PRIORITY} of 0")
    return Bounds(agent_id=agent_id, project_id=project_id, least_priority=least)


def _expiry(given: datetime | None) -> float | None:
    if given is None:
        return None
    if given.tzinfo is None:
        raise InvalidFieldError("expiresAt", "must have a zone, as in 2030-01-31T12:00:00Z")
    seconds = given.timestamp()
    if seconds > fields.LATEST:
        raise InvalidFieldError("expiresAt", "is too far away; leave it out for none")
    return seconds


def _check_no_more(
    caller: Caller, wish: NewTokenBody, bounds: Bounds, expires_at: float | None
) -> None:
    """Refuse what the caller may not do itself; whoever may make tokens is not bound."""
    own_least, own_end = caller.least_priority, caller.expires_at
    least = bounds.least_priority
    more = [
        ("permissions", not caller.permissions.issuperset(wish.permissions)),
        ("leastPriority", own_least is not None and (least is None or least < own_least)),
        ("expiresAt", own_end is not None and (expires_at is None or expires_at > own_end)),
    ]
    for field, is_more in more:
        if is_more:
            line = f"field '{field}': is more than the token that asks has itself"
            raise Refusal("forbidden", line, details={"field": field})


def _shown(token: Token, now: float) -> TokenBody:
    bounds, expires_at, revoked_at = token.bounds, token.expires_at, token.revoked_at
    return TokenBody(
        id=token.id,
        name=token.name,
        permissions=token.permissions,
        state=_state(token, now),
        created_at=exact_moment(token.created_at),
        expires_at=None if expires_at is None else exact_moment(expires_at),
        revoked_at=None if revoked_at is None else exact_moment(revoked_at),
        agent_id=bounds.agent_id,
        project_id=bounds.project_id,
        least_priority=bounds.least_priority,
    )


def _state(token: Token, now: float) -> Literal["good", "expired", "revoked"]:
    if token.revoked_at is not None:
        return "revoked"
    return "good" if token.is_good(now) else "expired"


ROUTES = (
    Route(
        "POST",
        "/tokens",
        create_token,
        "make a token, and show it this once",
        "admin",
        takes=NewTokenBody,
        answers={201: CreatedTokenBody},
        refuses=("unknown_project", "limit_reached"),
    ),
    Route("GET", "/tokens", list_tokens, "list tokens", "admin", answers={200: TokenListBody}),
    Route(
        "DELETE",
        "/tokens/{id}",
        revoke_token,
        "revoke a token",
        "admin",
        answers={200: TokenBody},
    ),
)
