"""The routes of slots: how much of each quota is used, a wake by hand, and the switch.

Any node answers for all slots, also one that does not dispatch: what is known of them is shared.
"""

from __future__ import annotations

import asyncio

from headgate.audit import AuditEntry
from headgate.bodies.slots import LogLine, SlotBody, SlotListBody, SlotLogBody
from headgate.errors import SlotNotFoundError
from headgate.intake.bodies import check_unknown
from headgate.runtime.key_slots.slots import Slots, SlotStatus
from headgate.web.api import Api, Route
from headgate.web.handlers.auditing import actor_of
from headgate.web.handlers.slot_views import slot_body
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request, read_limit

OK = 200
ACCEPTED = 202
LOG_QUERY = ("limit",)
WARM_SECONDS = 20.0
"""How long a wake by hand is waited for; it goes on, and its slot says what comes of it."""


async def list_slots(api: Api, _: Request, __: str) -> Answer:
    """Answer with all slots, in the order of the file."""
    bodies = slot_bodies(api)
    return json_answer(OK, SlotListBody(slots=bodies, count=len(bodies)))


def slot_bodies(api: Api) -> list[SlotBody]:
    """Return all slots, in the order of the file."""
    statuses = () if api.slots is None else api.slots.statuses()
    now = api.engine.now()
    return [slot_body(status, now) for status in statuses]


async def show_slot(api: Api, _: Request, name: str) -> Answer:
    """Answer with a slot."""
    return json_answer(OK, one_slot(api, name))


def one_slot(api: Api, name: str) -> SlotBody:
    """Return a slot, or raise `SlotNotFoundError`."""
    return slot_body(_status(_in(api, name), name), api.engine.now())


async def show_log(api: Api, request: Request, name: str) -> Answer:
    """Answer with what this node has logged of a slot lately."""
    given = request.query()
    check_unknown(given, LOG_QUERY)
    lines = await slot_lines(api, name, read_limit(given))
    return json_answer(OK, SlotLogBody(lines=lines, count=len(lines)))


async def slot_lines(api: Api, name: str, most: int) -> list[LogLine]:
    """Return the latest lines that this node has logged of a slot, oldest first."""
    return await _in(api, name).latest_lines(name, most)


async def warm_slot(api: Api, request: Request, name: str) -> Answer:
    """Open a slot's window, unless it is open already; a slow provider is not waited for."""
    return json_answer(ACCEPTED, await warmed(api, request, name))


async def warmed(api: Api, request: Request, name: str) -> SlotBody:
    """Open a slot's window, and return the slot when that is done, or takes too long to wait for.

    Raises `WindowOpenError` or `SlotUnavailableError` where nothing was sent, or was not taken.
    """
    slots = _in(api, name)
    warming = asyncio.create_task(slots.warm(name, _entry(request, "slot.warm", name)))
    # A task that nobody holds may be freed while it waits.
    api.warming.add(warming)
    warming.add_done_callback(api.warming.discard)
    warming.add_done_callback(_look_at)
    await asyncio.wait((warming,), timeout=WARM_SECONDS)
    status = warming.result() if warming.done() else _status(slots, name)
    return slot_body(status, api.engine.now())


async def enable_slot(api: Api, request: Request, name: str) -> Answer:
    """Have a slot polled and woken again, whatever had disabled it."""
    return json_answer(OK, await switched(api, request, name, is_on=True))


async def disable_slot(api: Api, request: Request, name: str) -> Answer:
    """Leave a slot alone until somebody enables it; its tasks wait."""
    return json_answer(OK, await switched(api, request, name, is_on=False))


async def switched(api: Api, request: Request, name: str, *, is_on: bool) -> SlotBody:
    """Enable or disable a slot, and return it."""
    entry = _entry(request, "slot.enable" if is_on else "slot.disable", name)
    status = await _in(api, name).switch(name, is_on=is_on, entry=entry)
    return slot_body(status, api.engine.now())


def _in(api: Api, name: str) -> Slots:
    if api.slots is None:
        raise SlotNotFoundError(name)
    return api.slots


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
        answers={200: SlotListBody},
    ),
    Route("GET", "/slots/{id}", show_slot, "show a key slot", "read", answers={200: SlotBody}),
    Route(
        "GET",
        "/slots/{id}/log",
        show_log,
        "tell what was sent for a key slot lately, and what came back",
        answers={200: SlotLogBody},
        query=LOG_QUERY,
    ),
    Route(
        "POST",
        "/slots/{id}/warm",
        warm_slot,
        "open the window of a key slot now",
        answers={202: SlotBody},
        refuses=("window_open", "slot_unavailable"),
    ),
    Route(
        "POST",
        "/slots/{id}/enable",
        enable_slot,
        "poll and wake a key slot again, whatever had disabled it",
        answers={200: SlotBody},
    ),
    Route(
        "POST",
        "/slots/{id}/disable",
        disable_slot,
        "leave a key slot alone; its tasks wait",
        answers={200: SlotBody},
    ),
)
