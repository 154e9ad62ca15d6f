"""The routes of budgets: reserve an amount before the work, book or give it back after it.

They are the tracker over HTTP, for agents in any language, on the same ledger as the tasks. The id
of a reservation is the caller's own, and is one within its scope: so a caller can settle what lies
in a scope of its own, and never what a task or somebody else holds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec

from headgate.api.api import Api, Route, actor_of
from headgate.api.budget_report import (
    BudgetReport,
    dollars_or_none,
    journal_body,
    status_steps,
)
from headgate.api.callers import Caller
from headgate.api.errors import ApiError, invalid_field, no_room_for_tenant
from headgate.api.http.request import Request, read_limit
from headgate.api.http.response import Response, json_response
from headgate.api.http.slices import in_slices, mapped
from headgate.api.schema.admin import JournalBody
from headgate.api.schema.tasks import (
    AdjustBody,
    BudgetLimitBody,
    BudgetStatusBody,
    CommitBody,
    CreateBudgetBody,
    Details,
    ExtendBody,
    LeaseBody,
    ReleaseBody,
    ReleasedBody,
    ReservationBody,
    ReservationNameBody,
    ReserveBody,
    SettledBody,
)
from headgate.api.shares import MAX_OWN_SCOPES
from headgate.api.slots import closures_by_name
from headgate.api.submission import MAX_SCOPES, check_unknown, excerpt, read_body
from headgate.budgets.status import ScopeStatus, empty_status
from headgate.budgets.tracker import MAX_ID_LENGTH as MAX_LEDGER_ID_LENGTH
from headgate.budgets.tracker import ReservationToken
from headgate.core.budgets.burn_rate import BURN_SECONDS, burn_rate_steps
from headgate.core.budgets.ledger import Adjustment, JournalEntry
from headgate.core.budgets.scopes import ROOT_NAME, Scope, ancestors, depth, parse_scope
from headgate.core.budgets.windows import format_window
from headgate.core.money import plain_usd
from headgate.core.task_view import exact_moment
from headgate.core.text import did_you_mean, nearest
from headgate.errors import (
    BudgetExceededError,
    IllegalSettlementError,
    InvalidFieldError,
    StoreError,
)
from headgate.storage.audit import AuditEntry, Detail
from headgate.storage.tokens import Bounds

OK = 200
MAX_ID_LENGTH = 128
MAX_REASON_LENGTH = 500
MAX_CHARGED_LENGTH = 4_096
"""How many characters the scopes of one reservation of a tenant have, with all their ancestors."""

_SCOPE_DIGITS = 24
_AUDIT_DIGITS = 32
_FIELDS = {
    "amount_usd": "usd",
    "actual_usd": "usd",
    "reservation_id": "id",
    "lease_seconds": "leaseSeconds",
    "limit_usd": "limitUsd",
    "limit_tokens": "limitTokens",
}


async def create_budget(api: Api, request: Request, _: str) -> Response:
    """Set the limits of a scope that has none, or say which others it has."""
    body = read_body(await request.json_body(), CreateBudgetBody)
    scope = own_scope(body.scope, request.caller)
    if _is_configured(scope):
        request.caller.check("admin")
    await check_own_scopes(api, request.caller, [scope])
    with _in_words_of_the_body():
        limit = await api.tracker.create_budget(
            scope,
            body.limit_usd,
            body.limit_tokens,
            body.window,
            is_by_tenant=not request.caller.is_trusted,
        )
    answer = BudgetLimitBody(
        scope=scope,
        limit_usd=dollars_or_none(limit.limit_micro_usd),
        limit_tokens=limit.limit_tokens,
        window=format_window(limit.window),
    )
    return json_response(OK, answer)


async def reserve(api: Api, request: Request, _: str) -> Response:
    """Hold an amount, or say which budget has no room for it."""
    body = read_body(await request.json_body(), ReserveBody)
    scope = own_scope(body.scope, request.caller)
    if len(body.also) > MAX_SCOPES and not request.caller.is_trusted:
        raise invalid_field(
            "also", f"has {len(body.also)} entries, at most {MAX_SCOPES} are charged"
        )
    also = [own_scope(text, request.caller, field="also") for text in body.also]
    _check_length(request.caller, [scope, *also])
    await check_own_scopes(api, request.caller, [scope, *also])
    if (of_agent := request.caller.bounds.agent_scope) is not None:
        also.append(of_agent)
    try:
        with _in_words_of_the_caller(body.id, scope) as reservation_id:
            token = await api.tracker.reserve(
                scope,
                body.usd,
                tokens=body.tokens,
                reservation_id=reservation_id,
                lease_seconds=body.lease_seconds,
                also=also,
                dispatched=body.dispatched,
            )
    except BudgetExceededError as error:
        if request.caller.is_trusted:
            raise
        may_read = _is_own(Scope(error.scope), request.caller)
        raise no_room_for_tenant(error, may_read=may_read) from None
    return json_response(OK, _shown(token, body.id, scope))


async def dispatched(api: Api, request: Request, _: str) -> Response:
    """Note that the provider is about to be called."""
    body = read_body(await request.json_body(), ReservationNameBody)
    scope = own_scope(body.scope, request.caller)
    with _in_words_of_the_caller(body.id, scope) as reservation_id:
        token = await api.tracker.dispatched(reservation_id)
    return json_response(OK, _shown(token, body.id, scope))


async def extend(api: Api, request: Request, _: str) -> Response:
    """Renew the lease of work that takes longer; it never ends sooner than before."""
    body = read_body(await request.json_body(), ExtendBody)
    scope = own_scope(body.scope, request.caller)
    with _in_words_of_the_caller(body.id, scope) as reservation_id:
        token = await api.tracker.extend(reservation_id, body.lease_seconds)
    return json_response(OK, _shown(token, body.id, scope))


async def commit(api: Api, request: Request, _: str) -> Response:
    """Book what the work has cost in place of what was held."""
    body = read_body(await request.json_body(), CommitBody)
    scope = own_scope(body.scope, request.caller)
    with _in_words_of_the_caller(body.id, scope) as reservation_id:
        await api.tracker.commit(
            reservation_id, body.usd, tokens=body.tokens, tenant=request.caller.tenant
        )
    return _settled(body.id, scope, "committed")


async def release(api: Api, request: Request, _: str) -> Response:
    """Give back what was held: the provider cannot have charged."""
    body = read_body(await request.json_body(), ReservationNameBody)
    scope = own_scope(body.scope, request.caller)
    with _in_words_of_the_caller(body.id, scope) as reservation_id:
        await api.tracker.release(reservation_id)
    return _settled(body.id, scope, "released")


async def adjust(api: Api, request: Request, _: str) -> Response:
    """Change what is booked in a scope, or decide about what tenants claim there."""
    body = read_body(await request.json_body(), AdjustBody)
    status = await adjusted(api, request, body)
    report = BudgetReport(status=status, rates={}, waiting={}, now=api.tracker.ledger.now())
    return json_response(OK, await in_slices(status_steps(report, status)))


async def adjusted(api: Api, request: Request, body: AdjustBody) -> ScopeStatus:
    """Change a balance by the word of an operator, note who did, and return it."""
    scope = own_scope(body.scope, request.caller)
    if not body.reason.strip() or len(body.reason) > MAX_REASON_LENGTH:
        raise InvalidFieldError("reason", f"say why, in 1 to {MAX_REASON_LENGTH} characters")
    _check_given_id(body.id)
    name = f"adjust:{body.id}"
    with _in_words_of_the_operator(body.id, scope):
        status = await api.tracker.adjust(
            scope,
            body.usd,
            tokens=body.tokens,
            call=Adjustment(body.action),
            adjustment_id=name,
        )
    detail: Detail = {"id": body.id, "action": body.action, "reason": body.reason}
    amounts = {"usd": body.usd, "tokens": body.tokens}
    detail |= {key: str(amount) for key, amount in amounts.items() if amount is not None}
    # Written under its own id, so that the repeat of a lost answer is one entry, and not none.
    digest = hashlib.sha256(name.encode()).hexdigest()[:_AUDIT_DIGITS]
    await api.audit.write(
        AuditEntry(
            id=digest,
            actor=actor_of(request),
            action=f"budget.{body.action}",
            subject=scope or ROOT_NAME,
            detail=detail,
        )
    )
    api.engine.ask_budgets()
    return status


@contextmanager
def _in_words_of_the_operator(given_id: str, scope: Scope) -> Iterator[None]:
    try:
        yield
    except IllegalSettlementError:
        line = f"adjustment '{given_id}' was made with other parameters; use a new id"
        raise ApiError(
            "reservation_conflict", line, details={"id": given_id, "scope": scope}
        ) from None


async def release_any(api: Api, request: Request, reservation_id: str) -> Response:
    """Give back what any reservation holds, by the word of an operator."""
    body = read_body(await request.json_body(), ReleaseBody)
    with _in_words_of_the_journal(reservation_id):
        await api.tracker.release(reservation_id)
    await _record_settled(api, request, "budget.release", reservation_id, {"reason": body.reason})
    return json_response(OK, ReleasedBody(id=reservation_id))


async def extend_any(api: Api, request: Request, reservation_id: str) -> Response:
    """Keep any reservation for longer, by the word of an operator."""
    body = read_body(await request.json_body(), LeaseBody)
    with _in_words_of_the_journal(reservation_id), _in_words_of_the_body():
        token = await api.tracker.extend(reservation_id, body.lease_seconds)
    detail: Detail = {"leaseSeconds": body.lease_seconds, "reason": body.reason}
    await _record_settled(api, request, "budget.extend", reservation_id, detail)
    return json_response(OK, _shown(token, reservation_id, token.scope))


async def _record_settled(
    api: Api, request: Request, action: str, reservation_id: str, detail: Detail
) -> None:
    await api.record(request, action, reservation_id, detail)
    api.engine.ask_budgets()


@contextmanager
def _in_words_of_the_journal(reservation_id: str) -> Iterator[None]:
    """Check an id as the journal shows it, and say what became of its reservation."""
    if not reservation_id.isprintable() or len(reservation_id) > MAX_LEDGER_ID_LENGTH:
        raise ApiError("not_found", "there is no such reservation")
    try:
        yield
    except IllegalSettlementError as error:
        code = "not_found" if error.current == "unknown" else "reservation_conflict"
        details: Details = {"id": reservation_id, "state": error.current}
        raise ApiError(code, str(error), details=details) from None


# Budgets that a task names and nobody has defined: most likely a typing error.
#
# The task is taken all the same, and charged to that scope, where nothing limits it. Rule: a budget
# is defined if it, or one around it but the root, has a limit, or belongs to a project.


async def undefined_budgets(api: Api, caller: Caller, scopes: Sequence[Scope]) -> list[str]:
    """Return a warning for each scope that nobody has defined; none while the ledger is away."""
    lines = []
    try:
        for scope in scopes:
            if not await _is_defined(api, scope):
                near = await _nearest_budget(api, caller, scope)
                meant = f"; {did_you_mean(near)}" if near else "."
                lines.append(
                    f"Budget '{excerpt(scope)}' is not defined, so nothing limits it{meant}"
                )
    except StoreError:
        return []
    return lines


async def _is_defined(api: Api, scope: Scope) -> bool:
    for one in ancestors(scope)[1:]:
        kind, _, name = one.partition(":")
        if one in api.engine.settings.budgets or await api.defined_budgets.is_limited(one):
            return True
        if kind == "project" and name in api.config.settings.projects:
            return True
    return False


async def _nearest_budget(api: Api, caller: Caller, scope: Scope) -> str:
    """Return the defined scope that is written most alike, of those that the caller may see."""
    known = dict.fromkeys((*api.engine.settings.budgets, *await api.defined_budgets.names()))
    own = [one for one in known if one and _is_own(one, caller)]
    return nearest(scope, own)


async def own_status(api: Api, caller: Caller, given: str = "") -> ScopeStatus:
    """Return a scope and everything within it; without one, that of the caller.

    Of a caller whose budget nobody can write down it is empty, since nothing is charged to it.
    """
    scope = given_or_own(given, caller)
    if scope is None:
        return empty_status(Scope(caller.bounds.own_name))
    await api.engine.flush_calls()
    return await in_slices(await api.tracker.status_steps(scope))


def given_or_own(given: str, caller: Caller) -> Scope | None:
    """Return a scope that the caller may look at; without one its own, if that can be a scope."""
    return own_scope(given, caller) if given else caller.bounds.own_scope


def own_scope(text: str, caller: Caller, *, field: str = "scope") -> Scope:
    """Read a scope that the caller may look at and charge."""
    scope = parse_scope(text, field=field)
    caller.check_scope(scope)
    return scope


def _check_length(caller: Caller, scopes: Sequence[Scope]) -> None:
    """Refuse scopes that are long together: a reservation writes them down three times or more."""
    length = sum(map(len, {one for scope in scopes for one in ancestors(scope)}))
    if length > MAX_CHARGED_LENGTH and not caller.is_trusted:
        problem = f"all scopes with their ancestors have {length:,} characters"
        raise invalid_field("also", f"{problem}, at most {MAX_CHARGED_LENGTH:,} are charged")


async def check_own_scopes(api: Api, caller: Caller, scopes: Sequence[Scope]) -> None:
    """Refuse a tenant that charges more scopes than a tenant may; operators are not counted."""
    tenant = caller.tenant
    if tenant is None:
        return
    charged = {one for scope in scopes for one in ancestors(scope) if tenant.may_charge(one)}
    # All agents of a project are one tenant; whoever is bound to neither is counted by its token.
    name, own = f"the token {caller.name}", None
    if caller.project_id is not None:
        name, own = f"the project {caller.project_id}", Bounds(project_id=caller.project_id)
    elif caller.agent_id is not None:
        name, own = f"the agent {caller.agent_id}", caller.bounds
    key = f"token {caller.token_id}" if own is None else name
    counted = api.shares.scopes
    if counted.take(key, charged):
        return
    if counted.is_to_be_read(key):
        within = None if own is None else own.own_scope
        kept = () if within is None else await _kept_scopes(api, within)
        counted.read(key, kept)
        if counted.take(key, charged):
            return
    line = f"{name} charges {counted.count(key):,} scopes, at most {MAX_OWN_SCOPES:,} are its own"
    advice = "charge one scope for each workflow, and put the id of a run into the reservation's id"
    details: Details = {"yours": counted.count(key), "most": MAX_OWN_SCOPES}
    raise ApiError("limit_reached", f"{line}; {advice}", details=details)


async def _kept_scopes(api: Api, scope: Scope) -> list[Scope]:
    try:
        accounts = await api.tracker.ledger.accounts(scope, most=MAX_OWN_SCOPES + 1)
    except StoreError:
        # A ledger that is away holds nothing, and keeps nobody from submitting tasks meanwhile.
        return []
    return [account.scope for account in accounts]


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
    """Give the id under which the ledger knows a reservation, and name the caller's in errors."""
    reservation_id = _id_within(scope, given_id)
    try:
        with _in_words_of_the_body():
            yield reservation_id
    except IllegalSettlementError as error:
        line = str(error).replace(reservation_id, f"'{given_id}'")
        code = "not_found" if error.current == "unknown" else "reservation_conflict"
        details: Details = {"id": given_id, "scope": scope, "state": error.current}
        raise ApiError(code, line, details=details) from None


def _check_given_id(given_id: str) -> None:
    if not given_id or len(given_id) > MAX_ID_LENGTH or not given_id.isprintable():
        problem = f"has 1 to {MAX_ID_LENGTH} printable characters"
        raise InvalidFieldError("id", problem)


def _id_within(scope: Scope, given_id: str) -> str:
    _check_given_id(given_id)
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


def _settled(given_id: str, scope: Scope, state: Literal["committed", "released"]) -> Response:
    return json_response(OK, SettledBody(id=given_id, scope=scope, state=state))


# The routes that show budgets: what is used, how fast, by when it is used up, and the journal.
#
# The burn rates of all scopes come from one look at the journal. Rule: a journal is read a page
# at a time, and a bounded part of it is looked at for a rate, which says what time it covers.

STATUS_QUERY = ("scope",)
JOURNAL_QUERY = ("scope", "limit", "cursor")
BURN_ENTRIES = 2_000
MAX_SKIPPED = 9_000

_CURSOR = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)_([0-9]{1,4})")


class JournalPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of the journal of a scope, newest first, and the cursor of the next."""

    scope: Scope
    entries: Sequence[JournalEntry]
    next_cursor: str | None = None


async def budget_stats(api: Api, caller: Caller, given: str = "") -> BudgetReport:
    """Return the report of a scope and everything within it; without one, that of the caller."""
    status = await own_status(api, caller, given)
    tracker = api.tracker
    now = tracker.ledger.now()
    if given_or_own(given, caller) is None:
        return BudgetReport(status=status, rates={}, waiting={}, now=now)
    # What was spent before the last hour tells that a budget is older than that, and no more.
    since = now - 2 * BURN_SECONDS
    entries = await tracker.journal(status.scope, since=since, limit=BURN_ENTRIES)
    return BudgetReport(
        status=status,
        rates=await in_slices(burn_rate_steps(entries, now=now, most=BURN_ENTRIES)),
        waiting=_waiting(api, caller),
        now=now,
        # Only the node that dispatches knows which budgets have no room.
        closed=await closures_by_name(api, "scope"),
        is_whole=not caller.is_bound,
    )


async def budgets_around(api: Api, caller: Caller, scope: Scope) -> list[ScopeStatus]:
    """Return the budgets that money of a scope counts against as well, the outermost first.

    Whoever is bound sees those of its own alone.
    """
    tracker = api.tracker
    return [
        await tracker.own_status(outer) for outer in ancestors(scope)[:-1] if _is_own(outer, caller)
    ]


async def journal_page(
    api: Api, caller: Caller, given: str = "", *, cursor: str = "", limit: int
) -> JournalPage:
    """Return one page of the changes of a scope; without one, of that of the caller."""
    scope = given_or_own(given, caller)
    if scope is None:
        return JournalPage(scope=Scope(caller.bounds.own_name), entries=())
    until, skipped = _position(cursor)
    # The ledger does not number its entries, so a page goes on at the time of the last one, after
    # as many of that very time as were shown.
    found = await api.tracker.journal(scope, until=until, limit=skipped + limit + 1)
    entries = found[skipped : skipped + limit]
    next_cursor = None
    if entries and len(found) > skipped + limit:
        last = entries[-1].at
        before = skipped if last == until else 0
        next_cursor = _cursor(last, before + sum(1 for entry in entries if entry.at == last))
    return JournalPage(scope=scope, entries=entries, next_cursor=next_cursor)


async def show_budgets(api: Api, request: Request, _: str) -> Response:
    """Answer with a scope and everything within it."""
    query = request.query()
    check_unknown(query, STATUS_QUERY)
    caller, given = request.caller, query.get("scope", "")

    async def made() -> Response:
        report = await budget_stats(api, caller, given)
        return json_response(OK, await in_slices(status_steps(report, report.status)))

    key = ("budgets", given_or_own(given, caller), caller.bounds)
    return await api.shared_answers.get(key, made)


async def show_journal(api: Api, request: Request, _: str) -> Response:
    """Answer with one page of the changes of a scope."""
    query = request.query()
    check_unknown(query, JOURNAL_QUERY)
    page = await journal_page(
        api,
        request.caller,
        query.get("scope", ""),
        cursor=query.get("cursor", ""),
        limit=read_limit(query),
    )
    entries = await mapped(
        page.entries, lambda entry: journal_body(entry, charged(entry, request.caller))
    )
    body = JournalBody(
        scope=page.scope, entries=entries, count=len(entries), next_cursor=page.next_cursor
    )
    return json_response(OK, body)


def charged(entry: JournalEntry, caller: Caller) -> list[Scope]:
    """Return the scopes that an entry weighs on, as far as they are the caller's own."""
    return [charge.scope for charge in entry.charges if _is_own(charge.scope, caller)]


def _is_own(scope: Scope, caller: Caller) -> bool:
    return not caller.is_bound or caller.bounds.may_charge(scope)


def _waiting(api: Api, caller: Caller) -> Mapping[str, int]:
    # Tasks of others may wait for the same budget, so whoever is bound is not told how many.
    if caller.is_bound:
        return {}
    return api.engine.outlook.waiting_for_scopes() or {}


def _position(cursor: str) -> tuple[float | None, int]:
    if not cursor:
        return None, 0
    match = _CURSOR.fullmatch(cursor)
    if match is None or int(match[2]) > MAX_SKIPPED:
        raise invalid_field("cursor", "must be the nextCursor of the page before")
    return float(match[1]), int(match[2])


def _cursor(at: float, skipped: int) -> str | None:
    # More changes at one moment than are skipped do not happen; if they did, the list ends there.
    return f"{at!r}_{skipped}" if skipped <= MAX_SKIPPED else None


ROUTES = (
    Route(
        "POST",
        "/budgets/create",
        create_budget,
        "set the limits of a scope that has none",
        "submit",
        body=CreateBudgetBody,
        responses={200: BudgetLimitBody},
        errors=("budget_mismatch", "limit_reached"),
    ),
    Route(
        "POST",
        "/budgets/reserve",
        reserve,
        "reserve an amount before the work",
        "submit",
        body=ReserveBody,
        responses={200: ReservationBody},
        errors=("budget_exceeded", "limit_reached", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/budgets/dispatched",
        dispatched,
        "note that the provider is about to be called",
        "submit",
        body=ReservationNameBody,
        responses={200: ReservationBody},
        errors=("not_found", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/budgets/extend",
        extend,
        "extend the lease of a reservation",
        "submit",
        body=ExtendBody,
        responses={200: ReservationBody},
        errors=("not_found", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/budgets/commit",
        commit,
        "book what the work has cost",
        "submit",
        body=CommitBody,
        responses={200: SettledBody},
        errors=("not_found", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/budgets/release",
        release,
        "release a reservation",
        "submit",
        body=ReservationNameBody,
        responses={200: SettledBody},
        errors=("not_found", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/reservations/{id}/release",
        release_any,
        "release any reservation of the journal",
        "admin",
        body=ReleaseBody,
        responses={200: ReleasedBody},
        errors=("not_found", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/reservations/{id}/extend",
        extend_any,
        "extend the lease of any reservation of the journal",
        "admin",
        body=LeaseBody,
        responses={200: ReservationBody},
        errors=("not_found", "reservation_conflict"),
    ),
    Route(
        "POST",
        "/budgets/adjust",
        adjust,
        "change the booked amounts of a scope, or accept or reject its claims",
        "admin",
        body=AdjustBody,
        responses={200: BudgetStatusBody},
        errors=("reservation_conflict",),
    ),
    Route(
        "GET",
        "/budgets/status",
        show_budgets,
        "show a scope and everything within it",
        "read",
        responses={200: BudgetStatusBody},
        query=STATUS_QUERY,
        errors=("invalid_field", "unknown_field"),
    ),
    Route(
        "GET",
        "/budgets/journal",
        show_journal,
        "list the changes of a scope, newest first",
        "read",
        responses={200: JournalBody},
        query=JOURNAL_QUERY,
    ),
)
