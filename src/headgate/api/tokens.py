"""The routes of tokens: make one, list them, revoke one.

Rule: nobody makes a token that may do more, or for longer, than the one it is asked for with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Literal

import msgspec

from headgate.api import submission
from headgate.api.api import Api, Route, actor_of
from headgate.api.callers import Caller
from headgate.api.errors import ApiError
from headgate.api.http.request import Request
from headgate.api.http.response import Response, json_response
from headgate.api.schema.tasks import CreatedTokenBody, NewTokenBody, TokenBody, TokenListBody
from headgate.api.submission import excerpt, read_body
from headgate.core.snapshot import MAX_PRIORITY
from headgate.core.task_view import exact_moment
from headgate.errors import InvalidFieldError, InvalidTaskError
from headgate.storage.audit import AuditEntry, Detail
from headgate.storage.tokens import NO_OWN_BUDGET, Bounds, NewToken, Token, new_token

OK = 200
CREATED = 201
_NOTE = f"the token has no budget of its own: {NO_OWN_BUDGET}"
_TOKEN_ID = re.compile(r"[0-9a-f]{1,64}")


async def create_token(api: Api, request: Request, _: str) -> Response:
    """Make a token, and answer with its text this once."""
    wanted = read_body(await request.json_body(), NewTokenBody)
    body = await created(api, request, wanted)
    return json_response(CREATED, body, ((b"cache-control", b"no-store"),))


async def created(api: Api, request: Request, wanted: NewTokenBody) -> CreatedTokenBody:
    """Make a token that has no more than its maker, and return it with its text."""
    tokens = api.tokens
    new = token_for(wanted, knows_project=api.submission_parser.knows_project, now=tokens.now())
    token = new.kept.token
    _check_no_more(request.caller, token)
    detail: Detail = {"name": token.name, "permissions": list(token.permissions)}
    await tokens.add(new.kept, _entry(request, "token.create", token.id, detail))
    return created_body(new, tokens.now())


def token_for(
    wanted: NewTokenBody, *, knows_project: Callable[[str], bool], now: float
) -> NewToken:
    """Make the token that was asked for, or raise `InvalidFieldError`; nothing is kept yet."""
    return new_token(
        name=wanted.name,
        permissions=tuple(wanted.permissions),
        now=now,
        bounds=_bounds(wanted, knows_project),
        expires_at=_expiry(wanted.expires_at),
    )


def created_body(new: NewToken, now: float) -> CreatedTokenBody:
    """Return a token that was made, with its text."""
    body = _shown(new.kept.token, now)
    note = "" if new.kept.token.bounds.own_scope is not None else _NOTE
    return CreatedTokenBody(token=new.text, note=note, **msgspec.structs.asdict(body))


async def list_tokens(api: Api, _: Request, __: str) -> Response:
    """Answer with all tokens, and none of their texts."""
    return json_response(OK, TokenListBody(tokens=await token_bodies(api)))


async def token_bodies(api: Api) -> list[TokenBody]:
    """Return all tokens that are remembered, the newest first."""
    tokens = api.tokens
    now = tokens.now()
    return [_shown(one, now) for one in await tokens.list()]


async def revoke_token(api: Api, request: Request, token_id: str) -> Response:
    """End a token for good; one that was revoked before stays so."""
    return json_response(OK, await revoked(api, request, token_id))


async def revoked(api: Api, request: Request, token_id: str) -> TokenBody:
    """End a token for good, and return it."""
    tokens = api.tokens
    if _TOKEN_ID.fullmatch(token_id) is None:
        raise _no_such_token()
    token = await tokens.revoke(token_id, _entry(request, "token.revoke", token_id, {}))
    if token is None:
        raise _no_such_token()
    api.auth.forget()
    return _shown(token, tokens.now())


def _entry(request: Request, action: str, token_id: str, detail: Detail) -> AuditEntry:
    return AuditEntry(actor=actor_of(request), action=action, subject=token_id, detail=detail)


def _no_such_token() -> ApiError:
    return ApiError("not_found", "there is no such token")


def _bounds(wanted: NewTokenBody, knows_project: Callable[[str], bool]) -> Bounds:
    agent_id, project_id, least = (
        wanted.agent_id,
        wanted.project_id,
        wanted.least_priority,
    )
    if agent_id == "" or project_id == "":
        # Whoever names nobody has most likely a variable that is not set, and wants a bound.
        field = "agentId" if agent_id == "" else "projectId"
        raise InvalidFieldError(field, "is empty; name one, or leave it out for all")
    if agent_id is not None:
        submission.parse_agent_id(agent_id)
    if project_id is not None and not knows_project(project_id):
        line = f"unknown project '{excerpt(project_id)}'"
        raise InvalidTaskError("unknown_project", "projectId", line)
    if least is not None and abs(least) > MAX_PRIORITY:
        raise InvalidFieldError("leastPriority", f"must be within {MAX_PRIORITY} of 0")
    return Bounds(agent_id=agent_id, project_id=project_id, least_priority=least)


def _expiry(given: datetime | None) -> float | None:
    if given is None:
        return None
    if given.tzinfo is None:
        raise InvalidFieldError("expiresAt", "must have a zone, as in 2030-01-31T12:00:00Z")
    seconds = given.timestamp()
    if seconds > submission.LATEST:
        raise InvalidFieldError("expiresAt", "is too far away; leave it out for none")
    return seconds


def _check_no_more(caller: Caller, token: Token) -> None:
    """Refuse what the caller may not do itself; whoever may make tokens is not bound."""
    own_least, own_end = caller.least_priority, caller.expires_at
    least, expires_at = token.bounds.least_priority, token.expires_at
    more = [
        ("permissions", not caller.permissions.issuperset(token.permissions)),
        ("leastPriority", own_least is not None and (least is None or least < own_least)),
        ("expiresAt", own_end is not None and (expires_at is None or expires_at > own_end)),
    ]
    for field, is_more in more:
        if is_more:
            line = f"field '{field}': is more than the token that asks has itself"
            raise ApiError("forbidden", line, details={"field": field})


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
        body=NewTokenBody,
        responses={201: CreatedTokenBody},
        errors=("unknown_project", "limit_reached", "name_taken"),
    ),
    Route("GET", "/tokens", list_tokens, "list tokens", "admin", responses={200: TokenListBody}),
    Route(
        "DELETE",
        "/tokens/{id}",
        revoke_token,
        "revoke a token",
        "admin",
        responses={200: TokenBody},
    ),
)
