"""Calls through the gateway: those that wait and why, those that run, and the latest that ended.

Calls that wait and run are known to the node that dispatches. Another node asks it; where it does
not answer, the page shows what the store has, and says so. Rule: what is not known is said to be
unknown, and never shown as none.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlencode

import msgspec

from headgate.api.calls import (
    call_body,
    explained,
    narrowed,
    own_call,
    page_of,
    read_query,
    why_body,
)
from headgate.api.errors import ApiError, api_error_of, invalid_field
from headgate.api.http.response import Response, json_response
from headgate.api.schema.calls import CallAmountBody, CallBody, CallListBody, CallWhyBody
from headgate.core.call import CALL_PREFIX, CallState
from headgate.core.money import read_usd
from headgate.core.text import duration
from headgate.dashboard.formats import capital
from headgate.dashboard.forms import CALL_FIELDS, error_text
from headgate.dashboard.lists import may_open, scope_href, slot_href
from headgate.dashboard.page import (
    PAGE_HEADERS,
    Page,
    PageRoute,
    View,
    page_route,
    response_route,
)
from headgate.dashboard.task import (
    NOT_SAID,
    NOT_YET,
    NOTHING,
    CostRow,
    ReasonShown,
    TimelineStep,
    shown_reason,
)
from headgate.dashboard.tasks import Filters, filled, form_of
from headgate.engine.call_registry import Calls
from headgate.errors import InvalidFieldError, NotDispatchingError, StoreError
from headgate.storage.call_rows import CallQuery

CALLS = "/ui/calls"
OK, BAD_REQUEST = 200, 400
PAGE_ROWS = 50
MAX_LIVE_ROWS = 25
"""How many calls are shown that wait, and that run; of the others the number."""

MAX_LIVE_READ = 1_000
MAX_REASONS = 20
LIVE = (CallState.WAITING, CallState.RUNNING)
ENDED = tuple(state for state in CallState if state.has_ended)
STATES = tuple(state.value for state in CallState)
TEXTS = ("project", "agent", "model", "upstream", "slot", "task", "since", "until")
Body = TypeVar("Body")

UNREACHED = "the node that dispatches knows them, and did not answer"

_API_NAMES = {"project": "projectId", "agent": "agentId", "task": "taskId"}
FIELD_LABELS = {
    **CALL_FIELDS,
    **{api_name: CALL_FIELDS[name] for name, api_name in _API_NAMES.items()},
}


class CallFilters(Filters, frozen=True, kw_only=True):
    """Which calls are looked for, as it was written."""

    PATH: ClassVar[str] = CALLS
    TEXTS: ClassVar[tuple[str, ...]] = TEXTS

    def wanted(self, view: View, states: tuple[CallState, ...]) -> CallQuery | None:
        """Return the question for calls in these states; None if the filters leave out all."""
        given = {_API_NAMES.get(name, name): value for name, value in self.timed().items()}
        query = narrowed(read_query({**given, "state": ",".join(self.states)}), view.caller)
        left = tuple(one for one in states if one in query.states or not query.states)
        return msgspec.structs.replace(query, states=left) if left else None

    def checked_before(self) -> str | None:
        """Return from before which call a page goes on, or refuse what is no call."""
        if self.before and not self.before.startswith(CALL_PREFIX):
            raise invalid_field("before", "must be the id of a call")
        return self.before or None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A call as the list shows it; a call that waits has the first of its reasons."""

    call: CallBody
    seconds: float
    micro_usd: int | None
    assumed: str
    reason: ReasonShown | None = None
    position: int | None = None
    expected: str = ""


async def show(view: View, _: str) -> Page:
    """Show the calls that wait, run and have ended."""
    filters = filled(CallFilters, form_of(view))
    context: dict[str, Any] = {
        "filters": filters,
        "chips": filters.chips(),
        "states": STATES,
        "labels": CALL_FIELDS,
        "names": _names(view),
        "problem": "",
        "waiting": [],
        "running": [],
        "rows": [],
        "more_waiting": 0,
        "more_running": 0,
        "unknown": "",
        "older": None,
        "newer": filters.newer(),
        "newest": filters.url() if filters.before else None,
        "has_gateway": view.api.engine.calls is not None,
        "address": view.address,
    }
    try:
        context |= await _latest(view, filters)
        # Whoever has turned over looks for what has ended.
        context |= {} if filters.before else await _live(view, filters)
    except (ApiError, InvalidFieldError) as error:
        context["problem"] = capital(error_text(error, FIELD_LABELS))
    status = BAD_REQUEST if context["problem"] else OK
    return Page(template="calls.html", title="Calls", context=context, status=status)


async def _latest(view: View, filters: CallFilters) -> dict[str, Any]:
    query = filters.wanted(view, ENDED)
    if query is None:
        return {}
    query = msgspec.structs.replace(query, before=filters.checked_before(), limit=PAGE_ROWS)
    page = await page_of(view.api, query, view.api.engine.calls)
    rows = [_row(view, call_body(record, view.caller)) for record in page.records]
    older = None if page.next_before is None else filters.older(page.next_before)
    return {"rows": rows, "older": older}


async def _live(view: View, filters: CallFilters) -> dict[str, Any]:
    query = filters.wanted(view, LIVE)
    if query is None:
        return {}
    query = msgspec.structs.replace(query, limit=MAX_LIVE_READ)
    try:
        found = await _live_calls(view, query)
    except NotDispatchingError:
        return {"unknown": UNREACHED}
    # Who came first is shown first: that is the order in which most go.
    waiting = [one for one in reversed(found) if one.state is CallState.WAITING]
    running = [one for one in reversed(found) if one.state is CallState.RUNNING]
    return {
        "waiting": [await _waiting_row(view, one) for one in waiting[:MAX_LIVE_ROWS]],
        "more_waiting": max(0, len(waiting) - MAX_LIVE_ROWS),
        "running": [_row(view, one) for one in running[:MAX_LIVE_ROWS]],
        "more_running": max(0, len(running) - MAX_LIVE_ROWS),
    }


async def _live_calls(view: View, query: CallQuery) -> list[CallBody]:
    """Return the calls that wait and run, newest first; ask the node that knows."""
    api = view.api
    if _known_here(view) is not None or api.engine.calls is None:
        page = await page_of(api, query, api.engine.calls)
        return [call_body(record, view.caller) for record in page.records]
    address = api.engine.node.leader_address
    answer = await api.forwarder.ask(address, f"/calls?{_query_of(query)}", view.request)
    body = _decoded(answer, CallListBody)
    if body is None:
        raise NotDispatchingError(address)
    return body.calls


def _known_here(view: View) -> Calls | None:
    """Return what knows the calls that wait and run, if this node does."""
    engine = view.api.engine
    return engine.calls if engine.dispatcher.is_leading else None


def _query_of(query: CallQuery) -> str:
    given = {
        "projectId": query.project_id,
        "agentId": query.agent_id,
        "model": query.model,
        "upstream": query.upstream,
        "slot": query.slot,
        "taskId": query.task_id,
        "state": ",".join(one.value for one in query.states),
        "limit": str(query.limit),
    }
    return urlencode({name: value for name, value in given.items() if value})


def _decoded(answer: Response | None, kind: type[Body]) -> Body | None:
    """Read what another node has answered; None for anything else than that."""
    if answer is None or answer.status != OK:
        return None
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.MsgspecError:
        return None


async def _waiting_row(view: View, call: CallBody) -> Row:
    """Return a call that waits with its first reason, if this node knows it."""
    calls = _known_here(view)
    why = None if calls is None else calls.why(call.call_id, view.caller.bounds)
    # Each of them looks at all that wait.
    await asyncio.sleep(0)
    if why is None:
        return _row(view, call)
    body = why_body(why)
    return msgspec.structs.replace(
        _row(view, call),
        reason=shown_reason(view, body.reasons[0]) if body.reasons else None,
        position=body.position,
        expected=expected_words(body.expected_seconds),
    )


def expected_words(seconds: float | None) -> str:
    """Return about how long a call has to wait; empty where nobody can tell."""
    return "" if seconds is None else f"about {duration(seconds)}"


def _row(view: View, call: CallBody) -> Row:
    return Row(
        call=call,
        seconds=_seconds(call, view.now),
        micro_usd=None if call.usage is None else read_usd(call.usage.usd),
        assumed=_assumption(call.usage),
    )


def _seconds(call: CallBody, now: float) -> float:
    """Return how long a call waits or runs until now, or took from its start."""
    since = call.created_at if call.state is CallState.WAITING else call.started_at
    ended = now if call.ended_at is None else call.ended_at.timestamp()
    return max(0.0, ended - (since or call.created_at).timestamp())


def _assumption(usage: CallAmountBody | None) -> str:
    if usage is None or not (usage.assumed_tokens or usage.assumed_usd):
        return ""
    is_all = usage.assumed_tokens == usage.tokens and (usage.assumed_usd or "0") == usage.usd
    return "assumed" if is_all else "partly assumed"


def _names(view: View) -> dict[str, list[str]]:
    """Return the names that the form proposes, to those who may see the settings."""
    if not view.may("admin"):
        return {}
    settings = view.api.config.settings
    return {
        "project": list(settings.projects)[:MAX_LIVE_ROWS],
        "agent": list(settings.agents)[:MAX_LIVE_ROWS],
        "upstream": list(settings.all_upstreams)[:MAX_LIVE_ROWS],
        "model": list(settings.models)[:MAX_LIVE_ROWS],
    }


# One call: what happened, why it waits, why it had this key, what it cost.


class WhyShown(msgspec.Struct, frozen=True, kw_only=True):
    """Why a call waits, and for how long; `problem` if nobody could say."""

    reasons: list[ReasonShown] = []
    position: int | None = None
    expected: str = ""
    problem: str = ""


async def show_one(view: View, name: str) -> Page:
    """Show everything that is known of a call."""
    call = await _one(view, name)
    is_waiting = call.state is CallState.WAITING
    context: dict[str, Any] = {
        "call": call,
        "is_live": not call.state.has_ended,
        "is_waiting": is_waiting,
        "why": await _why(view, name) if is_waiting else WhyShown(),
        "steps": timeline(call),
        "token_rows": token_rows(call),
        "cost_rows": cost_rows(call),
        "scopes": [_scope_shown(view, one) for one in call.scopes],
        "slot_href": _slot_page(view, call),
        "path": f"{CALLS}/{call.call_id}",
        "calls": CALLS,
    }
    return Page(template="call.html", title=f"Call {call.call_id}", context=context)


async def show_raw(view: View, name: str) -> Response:
    """Answer with the whole call, as the API does."""
    return json_response(OK, await _one(view, name), PAGE_HEADERS)


async def _one(view: View, name: str) -> CallBody:
    try:
        return call_body(await own_call(view.api, view.caller, name), view.caller)
    except NotDispatchingError as error:
        answer = await view.api.forwarder.ask(error.address, f"/calls/{name}", view.request)
        body = _decoded(answer, CallBody)
        if body is None:
            raise ApiError("not_found", f"call not found; {UNREACHED}") from None
        return body


async def _why(view: View, name: str) -> WhyShown:
    body: CallWhyBody | None
    try:
        body = why_body(await explained(view.api, view.caller, name))
    except NotDispatchingError as error:
        answer = await view.api.forwarder.ask(error.address, f"/calls/{name}/why", view.request)
        body = _decoded(answer, CallWhyBody)
        if body is None:
            return WhyShown(problem=UNREACHED)
    except ApiError as error:
        return WhyShown(problem=error.body.error)
    except StoreError as error:
        return WhyShown(problem=api_error_of(error).body.error)
    return WhyShown(
        reasons=[shown_reason(view, one) for one in body.reasons[:MAX_REASONS]],
        position=body.position,
        expected=expected_words(body.expected_seconds),
    )


def timeline(call: CallBody) -> list[TimelineStep]:
    """Return what happened to a call, in its order."""
    created = call.created_at.timestamp()
    steps = [TimelineStep(at=created, state="waiting", title="Arrived", text=_from_whom(call))]
    if call.started_at is not None:
        started = call.started_at.timestamp()
        waited = f"It waited {duration(max(0.0, started - created))}."
        text = f"{waited} {_where_to(call)}"
        steps.append(TimelineStep(at=started, state="running", title="Sent", text=text))
    if call.first_byte_at is not None:
        first = call.first_byte_at.timestamp()
        since = (call.started_at or call.created_at).timestamp()
        text = f"{duration(max(0.0, first - since))} after it was sent."
        steps.append(TimelineStep(at=first, state="running", title="First byte", text=text))
    if call.ended_at is not None:
        steps.append(_end(call, call.ended_at.timestamp()))
    return steps


def _from_whom(call: CallBody) -> str:
    client = f"From {call.client}, " if call.client else "For "
    session = f", session {call.session}" if call.session else ""
    return f"{client}model {call.model}{session}."


def _where_to(call: CallBody) -> str:
    model = f" as {call.upstream_model}" if call.upstream_model else ""
    key = f" with the key {call.slot}" if call.slot else ""
    tries = f" It was sent {call.tries} times." if call.tries > 1 else ""
    return f"It was sent to {call.upstream}{model}{key}.{tries}"


def _end(call: CallBody, at: float) -> TimelineStep:
    status = f"The client got {call.status}." if call.status is not None else ""
    said = {
        CallState.CANCELLED: "Its client disconnected. Headgate booked its cost all the same."
        if call.usage is not None
        else "Its client disconnected.",
    }.get(call.state, "")
    return TimelineStep(
        at=at,
        state=call.state.value,
        title=capital(call.state.value),
        text=f"{said} {status}".strip(),
    )


def token_rows(call: CallBody) -> list[tuple[str, int]]:
    """Return the tokens that the upstream reported, by kind; what it did not say is left out."""
    said = call.reported
    rows = (
        ("Input in all", said.input_tokens),
        ("Input read from the cache", said.cached_tokens),
        ("Input written to the cache", said.cache_write_tokens),
        ("Output in all", said.output_tokens),
        ("Output for reasoning", said.reasoning_tokens),
    )
    return [(name, number) for name, number in rows if number is not None]


def cost_rows(call: CallBody) -> list[CostRow]:
    """Return what was held for a call, and what was booked."""
    has_ended = call.state.has_ended
    held = call.reserved
    rows = [
        CostRow(
            name="Reserved before" if has_ended else "Reserved now",
            tokens=None if held is None else held.tokens,
            micro_usd=None if held is None else read_usd(held.usd),
            absent=NOTHING,
        )
    ]
    usage = call.usage
    if usage is None:
        absent = NOTHING if has_ended else NOT_YET
        return [*rows, CostRow(name="Booked", tokens=None, micro_usd=None, absent=absent)]
    rows.append(CostRow(name="Booked", tokens=usage.tokens, micro_usd=read_usd(usage.usd)))
    if _assumption(usage):
        assumed = read_usd(usage.assumed_usd or "0")
        rows.append(
            CostRow(
                name="Assumed part",
                tokens=usage.assumed_tokens,
                micro_usd=assumed,
                absent=NOT_SAID,
            )
        )
    return rows


def _scope_shown(view: View, scope: str) -> tuple[str, str]:
    href = scope_href(scope)
    return scope, href if may_open(view, href) else ""


def _slot_page(view: View, call: CallBody) -> str:
    """Return the page of the key of a call; one that a client brought along has none."""
    is_known = call.slot in view.api.config.settings.slots
    return slot_href(call.slot) if call.slot and is_known else ""


ROUTES: tuple[PageRoute, ...] = (
    page_route(CALLS, show, needs="read"),
    page_route(f"{CALLS}/{{id}}", show_one, needs="read"),
    response_route(f"{CALLS}/{{id}}/raw", show_raw, needs="read"),
)
