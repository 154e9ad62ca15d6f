"""The routes of slots: how much of each quota is used, a wake by hand, and the switch.

Any node answers for all slots, also one that does not dispatch: what is known of them is shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import TypedDict

from headgate.api.api import Api, Route, actor_of
from headgate.api.callers import Caller
from headgate.api.http.request import Request, read_limit
from headgate.api.http.response import Response, json_response
from headgate.api.submission import check_unknown, read_body
from headgate.core.gates import GateClosure, GateKind
from headgate.core.slots.quota import QuotaLimit
from headgate.core.slots.slot import SlotReading, is_exhausted, why_off
from headgate.core.slots.status import (
    LogLine,
    LoopBody,
    QuotaLimitBody,
    SlotBody,
    SlotListBody,
    SlotLogBody,
    SlotResponseBody,
    SlotState,
    next_wake,
    quota_source_words,
    why_no_wake,
)
from headgate.core.slots.wakes import WakeMode, is_paused
from headgate.core.task_view import closure_body, exact_moment
from headgate.engine.slots.slot import LoopHealth, SlotStatus
from headgate.engine.slots.slots import Slots
from headgate.errors import SlotNotFoundError, StoreUnavailableError
from headgate.storage.audit import AuditEntry

# Slots as people and programs see them: what is known of each, and what comes next.
#
# Everything here is told from a status alone, so that any node answers for all slots.

_UNREAD = SlotReading(read_at=0.0)


def slot_body(
    status: SlotStatus,
    now: float,
    *,
    closures: Iterable[GateClosure] = (),
    is_whole: bool = True,
    max_inflight: int | None = None,
    overridden: Sequence[str] = (),
) -> SlotBody:
    """Return everything about a slot; `closures` are those that the slot itself does not know.

    Whoever is bound to one project or agent is not told whose task closed it: it is not whole then.
    """
    schedule, standing = status.row.schedule, status.standing
    timed = list(closures)
    found = [one for one in (standing.closure, *timed) if one is not None]
    found = sorted(dict.fromkeys(found), key=attrgetter("opens_at"), reverse=True)
    bodies = [closure_body(one, is_whole=is_whole) for one in found]
    reading = status.row.reading or _UNREAD
    modes = status.config.wake.wake_modes
    off = why_off(status.config, status.row)
    return SlotBody(
        name=status.config.name,
        provider=status.config.provider,
        zone=str(status.config.wake.zone),
        quota_from=status.config.wake.quota_from,
        quota_text=quota_source_words(status.config.wake),
        projects=_projects(status, is_whole=is_whole),
        max_inflight=max_inflight,
        overridden=list(overridden),
        state=_state(status, now, is_closed=bool(timed)),
        enabled=not off,
        percent_used=standing.percent_used,
        resets_at=_moment(standing.resets_at),
        read_at=_moment(reading.read_at or None),
        level=reading.level,
        limits=[_limit(limit) for limit in reading.limits],
        wait_reason=bodies[0].why if bodies else "",
        wait_until=bodies[0].until if bodies else None,
        closures=bodies,
        wake_modes=[mode.value for mode in WakeMode if mode in modes],
        wakes_enabled=bool(modes) and not (off or schedule.wake_auto_disabled),
        next_wake=next_wake(status.config, status.row, now),
        no_wake_reason=why_no_wake(status.config, status.row),
        wake_pending=schedule.wake_pending,
        last_wake_at=_moment(schedule.last_wake_at),
        last_confirmed_at=_moment(schedule.last_confirmed_at),
        wake_errors=schedule.wake_errors,
        poll_errors=schedule.consecutive_poll_errors,
        last_error=schedule.last_problem,
        last_poll_at=_moment(schedule.last_poll_at),
        next_poll_at=_moment(status.next_poll_at),
        disabled_reason=off or schedule.disabled_reason,
        wake_loop=_loop(status.wake_loop),
        quota_loop=_loop(status.quota_loop),
    )


def _state(status: SlotStatus, now: float, *, is_closed: bool) -> SlotState:
    config, row, reading = status.config, status.row, status.row.reading
    if why_off(config, row):
        return "paused" if config.is_enabled and row.is_off else "disabled"
    if row.schedule.paused_why:
        return "no_key"
    if is_paused(row.schedule, now):
        return "closed"
    if reading is not None and is_exhausted(config, reading, now):
        return "exhausted"
    if is_closed:
        return "closed"
    if reading is None:
        return "unknown"
    return "cold" if reading.resets_at is None or reading.resets_at <= now else "open"


def _projects(status: SlotStatus, *, is_whole: bool) -> list[str] | None:
    projects = status.config.projects
    return None if projects is None or not is_whole else list(projects)


def _limit(limit: QuotaLimit) -> QuotaLimitBody:
    reset_ms = limit.next_reset_epoch_ms
    return QuotaLimitBody(
        type=limit.type,
        unit=limit.unit,
        number=limit.number,
        percent_used=limit.percent_used,
        resets_at=_moment(None if reset_ms is None else reset_ms / 1000),
    )


def _loop(health: LoopHealth) -> LoopBody:
    return LoopBody(
        last_step_at=_moment(health.last_step_at),
        restarts=health.restarts,
        problem=health.problem,
    )


def _moment(seconds: float | None) -> datetime | None:
    """Return a time; None where none is known, or no calendar reaches it."""
    try:
        return None if seconds is None else exact_moment(seconds)
    except (OverflowError, OSError, ValueError):
        return None


OK = 200
ACCEPTED = 202
LOG_QUERY = ("limit",)
WARM_SECONDS = 20.0
"""How long a wake by hand is waited for; it goes on, and its slot says what comes of it."""


async def list_slots(api: Api, request: Request, _: str) -> Response:
    """Answer with the slots that the caller may use, in the order of the file."""
    bodies = await slot_bodies(api, request.caller)
    return json_response(OK, SlotListBody(slots=bodies, count=len(bodies)))


async def slot_bodies(api: Api, caller: Caller) -> list[SlotBody]:
    """Return the slots that the caller may use, in the order of the file."""
    now, closed = api.engine.now(), await closures_by_name(api, "slot")
    statuses = [one for one in api.slots.statuses() if may_use(one, caller)]
    is_whole = not caller.is_bound
    return [
        slot_body(
            one,
            now,
            closures=closed.get(one.config.name, ()),
            is_whole=is_whole,
            **_changeable(api, one.config.name),
        )
        for one in statuses
    ]


async def known_closures(api: Api) -> tuple[GateClosure, ...]:
    """Return what is closed, as far as this node knows while its store is away."""
    try:
        return await api.engine.closures()
    except StoreUnavailableError:
        return ()


OPENED: dict[str, GateKind] = {
    "slot": "slot",
    "target": "target",
    "agent": "agent",
    "budget": "scope",
}
"""What people call the things that they may open, and what the dispatcher calls them."""


def shown_closures(closures: Iterable[GateClosure]) -> list[GateClosure]:
    """Return the closures of what people know by name, by kind and name.

    What follows from others, as the gate of a provider, and what only the dispatcher speaks of, as
    a kind of work, is left to the reasons of a task.
    """
    kinds = OPENED.values()
    return sorted([one for one in closures if one.kind in kinds], key=attrgetter("kind", "name"))


async def closures_by_name(api: Api, kind: GateKind) -> dict[str, list[GateClosure]]:
    """Return what is closed of one kind: there may be thousands of budgets beside three slots."""
    found: dict[str, list[GateClosure]] = {}
    for one in await known_closures(api):
        if one.kind == kind:
            found.setdefault(one.name, []).append(one)
    return found


def may_use(status: SlotStatus, caller: Caller) -> bool:
    """Tell whether tasks of the caller may name a slot; to others it is not there."""
    return caller.project_id is None or status.config.is_for(caller.project_id)


async def show_slot(api: Api, request: Request, name: str) -> Response:
    """Answer with a slot."""
    return json_response(OK, await one_slot(api, name, request.caller))


async def one_slot(api: Api, name: str, caller: Caller) -> SlotBody:
    """Return a slot, or raise `SlotNotFoundError`."""
    status = _status(api.slots, name)
    if not may_use(status, caller):
        raise SlotNotFoundError(name)
    return await _body_of(api, status, caller)


async def _body_of(api: Api, status: SlotStatus, caller: Caller) -> SlotBody:
    closed = await closures_by_name(api, "slot")
    now, closures = api.engine.now(), closed.get(status.config.name, ())
    changeable = _changeable(api, status.config.name)
    return slot_body(status, now, closures=closures, is_whole=not caller.is_bound, **changeable)


class _Changeable(TypedDict):
    max_inflight: int | None
    overridden: list[str]


def _changeable(api: Api, name: str) -> _Changeable:
    """Return what the settings in force say of a slot that can be changed beside the file."""
    slots = api.config.settings.slots
    return {
        "max_inflight": slots[name].max_inflight if name in slots else None,
        "overridden": api.config.state.overridden_fields("slots", name),
    }


async def show_log(api: Api, request: Request, name: str) -> Response:
    """Answer with what this node has logged of a slot lately."""
    given = request.query()
    check_unknown(given, LOG_QUERY)
    lines = await slot_lines(api, name, read_limit(given))
    return json_response(OK, SlotLogBody(lines=lines, count=len(lines)))


async def slot_lines(api: Api, name: str, most: int) -> list[LogLine]:
    """Return the latest lines that this node has logged of a slot, oldest first."""
    return await api.slots.latest_lines(name, most)


async def warm_slot(api: Api, request: Request, name: str) -> Response:
    """Open a slot's window, unless it is open already; a slow provider is not waited for."""
    return json_response(ACCEPTED, await warmed(api, request, name))


async def warmed(api: Api, request: Request, name: str) -> SlotBody:
    """Open a slot's window, and return the slot when that is done, or takes too long to wait for.

    Raises `WindowOpenError` or `SlotUnavailableError` where nothing was sent, or was not taken.
    """
    slots = api.slots
    warming = asyncio.create_task(slots.warm(name, _entry(request, "slot.warm", name)))
    # A task that nobody holds may be freed while it waits.
    api.warming.add(warming)
    warming.add_done_callback(api.warming.discard)
    warming.add_done_callback(_look_at)
    await asyncio.wait((warming,), timeout=WARM_SECONDS)
    status = warming.result() if warming.done() else _status(slots, name)
    return await _body_of(api, status, request.caller)


async def observe_slot(api: Api, request: Request, name: str) -> Response:
    """Learn from a response that somebody else got with the key of a slot."""
    body = read_body(await request.json_body(), SlotResponseBody)
    status = _status(api.slots, name)
    observe_response(api.slots, name, body, api.engine.now())
    return json_response(ACCEPTED, await _body_of(api, status, request.caller))


def observe_response(slots: Slots, name: str, response: SlotResponseBody, now: float) -> None:
    """Have a slot learn from a response; the names of headers may be in any case."""
    headers = {header.lower(): value for header, value in response.headers.items()}
    slots.observe(name, response.status, headers, now)


async def enable_slot(api: Api, request: Request, name: str) -> Response:
    """Have a slot polled and woken again, whatever had disabled it."""
    return json_response(OK, await switched(api, request, name, is_on=True))


async def disable_slot(api: Api, request: Request, name: str) -> Response:
    """Leave a slot alone until somebody enables it; its tasks wait."""
    return json_response(OK, await switched(api, request, name, is_on=False))


async def switched(api: Api, request: Request, name: str, *, is_on: bool) -> SlotBody:
    """Enable or disable a slot, and return it."""
    entry = _entry(request, "slot.enable" if is_on else "slot.disable", name)
    status = await api.slots.switch(name, is_on=is_on, entry=entry)
    return await _body_of(api, status, request.caller)


def _status(slots: Slots, name: str) -> SlotStatus:
    for status in slots.statuses():
        if status.config.name == name:
            return status
    raise SlotNotFoundError(name)


def _look_at(warming: asyncio.Task[SlotStatus]) -> None:
    # Whoever asked may have been answered already, and then nobody asks what came of it.
    if not warming.cancelled():
        warming.exception()


def _entry(request: Request, action: str, name: str) -> AuditEntry:
    return AuditEntry(actor=actor_of(request), action=action, subject=name)


ROUTES = (
    Route(
        "GET",
        "/slots",
        list_slots,
        "list key slots: how much of each quota is used, and when it resets",
        "read",
        responses={200: SlotListBody},
    ),
    Route("GET", "/slots/{id}", show_slot, "show a key slot", "read", responses={200: SlotBody}),
    Route(
        "GET",
        "/slots/{id}/log",
        show_log,
        "show the recent requests of a key slot and their responses",
        responses={200: SlotLogBody},
        query=LOG_QUERY,
    ),
    Route(
        "POST",
        "/slots/{id}/warm",
        warm_slot,
        "open the window of a key slot now",
        responses={202: SlotBody},
        errors=("window_open", "slot_unavailable"),
    ),
    Route(
        "POST",
        "/slots/{id}/observe",
        observe_slot,
        "report the status and headers of a response to a request with the key of a slot",
        body=SlotResponseBody,
        responses={202: SlotBody},
    ),
    Route(
        "POST",
        "/slots/{id}/enable",
        enable_slot,
        "poll and wake a key slot again, whatever had disabled it",
        responses={200: SlotBody},
    ),
    Route(
        "POST",
        "/slots/{id}/disable",
        disable_slot,
        "stop polls and wakes of a key slot; its tasks wait",
        responses={200: SlotBody},
    ),
)
