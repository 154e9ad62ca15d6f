"""The routes of calls through the gateway: list them, show one, say why one waits.

Calls that wait and run are known to the node that dispatches, and to no other; what has ended is in
the store. A list has both, newest first, and its cursor is the id of a call. A node that does not
dispatch asks the one that does, and says so where that cannot be reached; what has ended it shows
by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

import msgspec

from headgate.api.api import Api, Route
from headgate.api.callers import Caller, own
from headgate.api.errors import ApiError, invalid_field
from headgate.api.http.request import Request, read_limit
from headgate.api.http.response import Response, json_response
from headgate.api.http.slices import mapped
from headgate.api.schema.calls import (
    CallAmountBody,
    CallBody,
    CallListBody,
    CallTokensBody,
    CallWhyBody,
)
from headgate.api.schema.tasks import CallCountsBody
from headgate.api.submission import check_unknown, excerpt, parse_filter_name
from headgate.api.tasks import reason_body
from headgate.core.call import CALL_PREFIX, CallRecord, CallState
from headgate.core.lifecycle import parse_rfc3339
from headgate.core.money import plain_usd
from headgate.core.task_view import exact_moment, moment
from headgate.engine.call_registry import Calls, CallWhy
from headgate.errors import NotDispatchingError
from headgate.storage.call_rows import CallPage, CallQuery

OK = 200
QUERY_FIELDS = (
    "projectId",
    "agentId",
    "model",
    "upstream",
    "slot",
    "taskId",
    "state",
    "since",
    "until",
    "limit",
    "cursor",
)
MAX_MODEL_LENGTH = 200
"""How long the name of a model may be that is looked for."""

LIVE = (CallState.WAITING, CallState.RUNNING)

_CALL_ID = re.compile(CALL_PREFIX + r"[0-9a-z]{1,40}")


async def list_calls(api: Api, request: Request, _: str) -> Response:
    """Answer with one page of calls, newest first: waiting, running and ended ones."""
    query = narrowed(read_query(request.query()), request.caller)
    try:
        calls = _live_calls(api) if _may_be_live(query) else api.engine.calls
    except NotDispatchingError as error:
        return await _asked(api, request, error, f"/calls?{request.query_string()}")

    def shown_to_caller(record: CallRecord) -> msgspec.Raw:
        # Encoded one by one: all at once, a page of a thousand would hold the loop.
        return msgspec.Raw(msgspec.json.encode(call_body(record, request.caller)))

    async with api.shares.making.turn(request.holder):
        page = await page_of(api, query, calls)
        shown = cast("list[CallBody]", await mapped(page.records, shown_to_caller))
        body = CallListBody(calls=shown, count=len(shown), next_cursor=page.next_before)
        return json_response(OK, body)


async def show_call(api: Api, request: Request, call_id: str) -> Response:
    """Answer with everything that is known of a call."""
    try:
        record = await own_call(api, request.caller, call_id)
    except NotDispatchingError as error:
        return await _asked(api, request, error, f"/calls/{call_id}")
    return json_response(OK, call_body(record, request.caller))


async def explain_call(api: Api, request: Request, call_id: str) -> Response:
    """Answer with every rule that keeps a call waiting; if need be, ask the node that knows."""
    try:
        why = why_body(await explained(api, request.caller, call_id))
    except NotDispatchingError as error:
        return await _asked(api, request, error, f"/calls/{call_id}/why")
    return json_response(OK, why)


async def explained(api: Api, caller: Caller, call_id: str) -> CallWhy:
    """Return every rule that keeps a call of the caller's waiting; one that has ended has none."""
    record = await own_call(api, caller, call_id)
    calls = api.engine.calls
    if calls is not None and not record.state.has_ended:
        why = calls.why(call_id, caller.bounds)
        if why is not None:
            return why
    return CallWhy(
        call_id=call_id,
        state=record.state,
        slot=record.slot,
        key_rule=record.key_rule,
        error=None if record.error is None else caller.told(record.error),
    )


def why_body(why: CallWhy) -> CallWhyBody:
    """Return why a call waits, as clients see it."""
    fields = msgspec.structs.asdict(why)
    return CallWhyBody(**fields | {"reasons": tuple(reason_body(one) for one in why.reasons)})


async def own_call(api: Api, caller: Caller, call_id: str) -> CallRecord:
    """Return a call that is there and belongs to the caller; any other is not found.

    `NotDispatchingError` if it may be one that waits or runs, and this node does not know of these.
    """
    if _CALL_ID.fullmatch(call_id) is None:
        raise _no_call()
    calls, store = api.engine.calls, api.engine.call_store
    record = None if calls is None else calls.get(call_id)
    if record is None and store is not None:
        record = await store.get(call_id)
    if record is None:
        _live_calls(api)
        raise _no_call()
    if not caller.owns(agent_id=record.agent_id, project_id=record.project_id):
        raise _no_call()
    return record


async def page_of(api: Api, query: CallQuery, calls: Calls | None) -> CallPage:
    """Return a page of what the store has and of what is in memory, newest first."""
    store = api.engine.call_store
    ended = CallPage(records=())
    if store is not None and (not query.states or set(query.states).difference(LIVE)):
        ended = await store.find(query)

    def matching(record: CallRecord) -> CallRecord | None:
        return record if query.matches(record) else None

    kept = await mapped(_in_memory(calls), matching)
    found = {record.id: record for record in kept if record is not None}
    if ended.next_before is not None:
        # What lies beyond is on the next page.
        found = {one: record for one, record in found.items() if one >= ended.next_before}
    # A call that ends while this is read may be in both.
    found.update((record.id, record) for record in ended.records)
    ids = sorted(found, reverse=True)
    records = tuple(found[one] for one in ids[: query.limit])
    is_cut = len(ids) > query.limit
    return CallPage(records=records, next_before=records[-1].id if is_cut else ended.next_before)


def _in_memory(calls: Calls | None) -> Iterable[CallRecord]:
    return () if calls is None else (*calls.latest(), *calls.kept(), *calls.live())


def live_counts(api: Api, caller: Caller) -> CallCountsBody | None:
    """Count the caller's calls that wait and run; None where only another node knows."""
    calls = api.engine.calls
    if calls is None or not api.engine.dispatcher.is_leading:
        return None
    own = [
        one.state
        for one in calls.live()
        if caller.owns(agent_id=one.agent_id, project_id=one.project_id)
    ]
    waiting = own.count(CallState.WAITING)
    return CallCountsBody(waiting=waiting, running=len(own) - waiting)


def _live_calls(api: Api) -> Calls | None:
    """Return what knows the calls that wait and run; None in a service without a gateway."""
    calls = api.engine.calls
    if calls is not None and not api.engine.dispatcher.is_leading:
        raise NotDispatchingError(api.engine.node.leader_address)
    return calls


def _may_be_live(query: CallQuery) -> bool:
    return not query.states or not set(query.states).isdisjoint(LIVE)


async def _asked(api: Api, request: Request, error: NotDispatchingError, path: str) -> Response:
    """Return what the node that dispatches answers; without an answer, where it is."""
    answer = await api.forwarder.ask(error.address, path, request)
    if answer is None:
        raise error
    return answer


def _no_call() -> ApiError:
    return ApiError("not_found", "call not found")


# Reading a query, and writing a call.


def read_query(given: dict[str, str]) -> CallQuery:
    """Read the filter and the page of a list."""
    check_unknown(given, QUERY_FIELDS)
    return CallQuery(
        project_id=parse_filter_name(given.get("projectId"), "projectId"),
        agent_id=parse_filter_name(given.get("agentId"), "agentId"),
        model=_model(given.get("model", "")),
        upstream=parse_filter_name(given.get("upstream"), "upstream"),
        slot=parse_filter_name(given.get("slot"), "slot"),
        task_id=parse_filter_name(given.get("taskId"), "taskId"),
        states=_states(given.get("state", "")),
        since=_moment(given, "since"),
        until=_moment(given, "until"),
        before=_cursor(given.get("cursor", "")),
        limit=read_limit(given),
    )


def narrowed(query: CallQuery, caller: Caller) -> CallQuery:
    """Return a query for what belongs to the caller; asking for another's is forbidden."""
    if not caller.is_bound:
        return query
    return msgspec.structs.replace(
        query,
        agent_id=own("agentId", query.agent_id, caller.agent_id),
        project_id=own("projectId", query.project_id, caller.project_id),
    )


def call_body(record: CallRecord, caller: Caller) -> CallBody:
    """Return a call as a caller sees it: without figures of budgets that it may not read."""
    error = None if record.error is None else caller.told(record.error)
    is_own_token = not caller.is_bound or record.token_id == caller.token_id
    # One that waits again after a try has not started: nothing of that try is left.
    started_at = None if record.state is CallState.WAITING else record.started_at
    has_waited = started_at or record.ended_at
    return CallBody(
        call_id=record.id,
        state=record.state,
        project_id=record.project_id,
        agent_id=record.agent_id,
        model=record.model,
        upstream=record.upstream,
        upstream_model=record.upstream_model,
        protocol=record.protocol,
        is_stream=record.is_stream,
        priority=record.priority,
        scopes=record.scopes,
        client=record.client,
        session=record.session,
        token_id=record.token_id if is_own_token else "",
        task_id=record.task_id,
        created_at=exact_moment(record.created_at),
        started_at=moment(started_at),
        first_byte_at=moment(record.first_byte_at),
        ended_at=moment(record.ended_at),
        waited_ms=None if has_waited is None else _milliseconds(has_waited - record.created_at),
        slot=record.slot,
        key_rule=record.key_rule,
        status=record.status,
        error=error,
        tries=record.tries,
        max_tokens=record.max_tokens,
        reported=CallTokensBody(
            input_tokens=record.input_tokens,
            cached_tokens=record.cached_tokens,
            cache_write_tokens=record.cache_write_tokens,
            output_tokens=record.output_tokens,
            reasoning_tokens=record.reasoning_tokens,
        ),
        reserved=_reserved(record),
        usage=_usage(record),
        is_unpriced=record.is_unpriced,
    )


def _reserved(record: CallRecord) -> CallAmountBody | None:
    if not record.reserved_tokens and not record.reserved_micro_usd:
        return None
    return CallAmountBody(
        tokens=record.reserved_tokens,
        usd=plain_usd(record.reserved_micro_usd),
        basis=record.reserved_basis,
    )


def _usage(record: CallRecord) -> CallAmountBody | None:
    if record.tokens is None and record.micro_usd is None:
        return None
    assumed = record.assumed_micro_usd
    return CallAmountBody(
        tokens=record.tokens or 0,
        usd=plain_usd(record.micro_usd or 0),
        assumed_tokens=record.assumed_tokens,
        assumed_usd=plain_usd(assumed) if assumed else None,
    )


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _model(text: str) -> str | None:
    if len(text) > MAX_MODEL_LENGTH or not text.isprintable():
        problem = f"must be 1 to {MAX_MODEL_LENGTH} printable characters"
        raise invalid_field("model", problem)
    return text or None


def _states(text: str) -> tuple[CallState, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        return tuple(dict.fromkeys([CallState(name) for name in names]))
    except ValueError:
        allowed = ", ".join(state.value for state in CallState)
        raise invalid_field("state", f"'{excerpt(text)}' is not a list of {allowed}") from None


def _moment(given: dict[str, str], field: str) -> float | None:
    text = given.get(field, "")
    seconds = parse_rfc3339(text) if text else None
    if text and seconds is None:
        raise invalid_field(field, "is a time with a zone, as 2026-01-31T12:00:00Z")
    return seconds


def _cursor(text: str) -> str | None:
    if text and _CALL_ID.fullmatch(text) is None:
        raise invalid_field("cursor", "must be the nextCursor of the page before")
    return text or None


ROUTES = (
    Route(
        "GET",
        "/calls",
        list_calls,
        "list calls through the gateway, newest first",
        "read",
        responses={200: CallListBody},
        query=QUERY_FIELDS,
        errors=("not_dispatching",),
    ),
    Route(
        "GET",
        "/calls/{id}",
        show_call,
        "show a call",
        "read",
        responses={200: CallBody},
        errors=("not_dispatching",),
    ),
    Route(
        "GET",
        "/calls/{id}/why",
        explain_call,
        "say why a call waits",
        "read",
        responses={200: CallWhyBody},
        errors=("not_dispatching",),
    ),
)
