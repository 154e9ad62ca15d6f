"""The routes of budgets: hold an amount before the work, book or give it back after it.

They are the tracker over HTTP, for agents in any language, on the same books as the tasks. The id
of a reservation is the caller's own, and is one within its scope: so a caller can settle what lies
in a scope of its own, and never what a task or somebody else holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from headgate.bodies.tasks import (
    CommitBody,
    FoundBudgetBody,
    LimitBody,
    ReservationBody,
    ReservationNameBody,
    ReserveBody,
    SettledBody,
)
from headgate.budget_tracker import ReservationToken
from headgate.core.budgets.scopes import Scope, depth, parse_scope
from headgate.core.budgets.windows import format_window
from headgate.core.money import plain_usd
from headgate.errors import IllegalSettlementError, InvalidFieldError
from headgate.intake.bodies import read_body
from headgate.scope_status import ScopeStatus, empty_status
from headgate.task_snapshot import exact_moment
from headgate.tracker import LedgerTracker
from headgate.web.api import Api, Route
from headgate.web.callers import Caller
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request
from headgate.web.refusals import Refusal

OK = 200
MAX_ID_LENGTH = 128

_SCOPE_DIGITS = 24
_FIELDS = {
    "amount_usd": "usd",
    "actual_usd": "usd",
    "reservation_id": "id",
    "lease_seconds": "leaseSeconds",
    "limit_usd": "limitUsd",
    "limit_tokens": "limitTokens",
}


async def found(api: Api, request: Request, _: str) -> Answer:
    """Set the limits of a scope that has none, or say which others it has."""
    body = read_body(await request.json_body(), FoundBudgetBody)
    scope = own_scope(body.scope, request.caller)
    if _is_configured(scope):
        request.caller.check("admin")
    with _in_words_of_the_body():
        limit = await tracker_of(api).found_budget(
            scope, body.limit_usd, body.limit_tokens, body.window
        )
    answer = LimitBody(
        scope=scope,
        limit_usd=dollars_or_none(limit.limit_micro_usd),
        limit_tokens=limit.limit_tokens,
        window=format_window(limit.window),
    )
    return json_answer(OK, answer)


async def reserve(api: Api, request: Request, _: str) -> Answer:
    """Hold an amount, or say which budget has no room for it."""
    body = read_body(await request.json_body(), ReserveBody)
    scope = own_scope(body.scope, request.caller)
    also = [own_scope(text, request.caller, field="also") for text in body.also]
    with _in_words_of_the_caller(body.id, scope) as reservation_id:
        token = await tracker_of(api).reserve(
            scope,
            body.usd,
            tokens=body.tokens,
            reservation_id=reservation_id,
            lease_seconds=body.lease_seconds,
            also=also,
            dispatched=body.dispatched,
        )
    return json_answer(OK, _shown(token, body.id, scope))


async def dispatched(api: Api, request: Request, _: str) -> Answer:
    """Note that the provider is about to be called."""
    body = read_body(await request.json_body(), ReservationNameBody)
    scope = own_scope(body.scope, request.caller)
    with _in_words_of_the_caller(body.id, scope) as reservation_id:
        token = await tracker_of(api).dispatched(reservation_id)
    return json_answer(OK, _shown(token, body.id, scope))


async def commit(api: Api, request: Request, _: str) -> Answer:
    """Book what the work has cost in place of what was held."""
    body = read_body(await request.json_body(), CommitBody)
    scope = own_scope(body.scope, request.caller)
    with _in_words_of_the_caller(body.id, scope) as reservation_id:
        await tracker_of(api).commit(reservation_id, body.usd, tokens=body.tokens)
    return _settled(body.id, scope, "committed")


async def release(api: Api, request: Request, _: str) -> Answer:
    """Give back what was held: the provider cannot have charged."""
    body = read_body(await request.json_body(), ReservationNameBody)
    scope = own_scope(body.scope, request.caller)
    with _in_words_of_the_caller(body.id, scope) as reservation_id:
        await tracker_of(api).release(reservation_id)
    return _settled(body.id, scope, "released")


async def own_status(api: Api, caller: Caller, given: str = "") -> ScopeStatus:
    """Return a scope and everything within it; without one, that of the caller.

    Of a caller whose budget nobody can write down it is empty, since nothing is charged to it.
    """
    scope = given_or_own(given, caller)
    if scope is None:
        return empty_status(Scope(caller.bounds.own_name))
    return await tracker_of(api).status(scope)


def tracker_of(api: Api) -> LedgerTracker:
    """Return the books of the service."""
    if api.tracker is None:
        raise Refusal("unavailable", "this service keeps no budgets")
    return api.tracker


def given_or_own(given: str, caller: Caller) -> Scope | None:
    """Return a scope that the caller may look at; without one its own, if that can be a scope."""
    return own_scope(given, caller) if given else caller.bounds.own_scope


def own_scope(text: str, caller: Caller, *, field: str = "scope") -> Scope:
    """Read a scope that the caller may look at and charge."""
    scope = parse_scope(text, field=field)
    caller.check_scope(scope)
    return scope


def dollars_or_none(micro_usd: int | None) -> str | None:
    """Return an amount in dollars; None is none."""
    return None if micro_usd is None else plain_usd(micro_usd)


def _is_configured(scope: Scope) -> bool:
    """Tell whether a scope holds what others submit: the root, and that of a whole project."""
    return depth(scope) < 1 or (depth(scope) == 1 and scope.startswith("project:"))


@contextmanager
def _in_words_of_the_body() -> Iterator[None]:
    """Name fields as the body does."""
    try:
        yield
    except InvalidFieldError as error:
        raise InvalidFieldError(_FIELDS.get(error.field, error.field), error.problem) from None


@contextmanager
def _in_words_of_the_caller(given_id: str, scope: Scope) -> Iterator[str]:
    """Give the id under which the books know a reservation, and tell refusals by the caller's."""
    reservation_id = _id_within(scope, given_id)
    try:
        with _in_words_of_the_body():
            yield reservation_id
    except IllegalSettlementError as error:
        line = str(error).replace(reservation_id, f"'{given_id}'")
        code = "not_found" if error.current == "unknown" else "reservation_conflict"
        raise Refusal(code, line, details={"state": error.current}) from None


def _id_within(scope: Scope, given_id: str) -> str:
    if not given_id or len(given_id) > MAX_ID_LENGTH or not given_id.isprintable():
        problem = f"has 1 to {MAX_ID_LENGTH} printable characters"
        raise InvalidFieldError("id", problem)
    digest = hashlib.sha256(scope.encode()).hexdigest()[:_SCOPE_DIGITS]
    return f"http:{digest}:{given_id}"


def _shown(token: ReservationToken, given_id: str, scope: Scope) -> ReservationBody:
    return ReservationBody(
        id=given_id,
        scope=scope,
        state=token.state.value,
        is_live=token.is_live,
        usd=plain_usd(token.micro_usd),
        tokens=token.tokens,
        lease_until=exact_moment(token.lease_until),
    )


def _settled(given_id: str, scope: Scope, state: Literal["committed", "released"]) -> Answer:
    return json_answer(OK, SettledBody(id=given_id, scope=scope, state=state))


ROUTES = (
    Route(
        "POST",
        "/budgets/found",
        found,
        "set the limits of a scope that has none",
        "submit",
        takes=FoundBudgetBody,
        answers={200: LimitBody},
        refuses=("budget_mismatch",),
    ),
    Route(
        "POST",
        "/budgets/reserve",
        reserve,
        "hold an amount before the work",
        "submit",
        takes=ReserveBody,
        answers={200: ReservationBody},
        refuses=("budget_exceeded", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/budgets/dispatched",
        dispatched,
        "note that the provider is about to be called",
        "submit",
        takes=ReservationNameBody,
        answers={200: ReservationBody},
        refuses=("not_found", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/budgets/commit",
        commit,
        "book what the work has cost",
        "submit",
        takes=CommitBody,
        answers={200: SettledBody},
        refuses=("not_found", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/budgets/release",
        release,
        "give back what was held",
        "submit",
        takes=ReservationNameBody,
        answers={200: SettledBody},
        refuses=("not_found", "reservation_conflict"),
    ),
)
