"""Slots: how much of each quota is used, when its window ends, what wakes it next, and why.

Whoever may read sees them, since slots belong to nobody. What was sent and what came back is for
administrators, as it is in the API.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from headgate.dashboard.named_lists import part_of
from headgate.dashboard.page import (
    Done,
    Form,
    Page,
    PageRoute,
    View,
    action_route,
    page_route,
)
from headgate.dashboard.slot_window import Window, window_of
from headgate.errors import SlotUnavailableError, WindowOpenError
from headgate.slot_bodies import LogLine, SlotBody
from headgate.slot_logs import MAX_LINE_CHARS, line_text
from headgate.web.slots import one_slot, slot_bodies, slot_lines, switched, warmed

SLOTS = "/ui/slots"
LINES_BESIDE = 12
LENGTH_BESIDE = 160
LINES_SHOWN = 200


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One slot as it is drawn: its figures, its window, and where its tasks are listed.

    `inflight` is known at the node that dispatches, and shown to those who are not bound.
    """

    slot: SlotBody
    path: str
    window: Window | None
    inflight: int | None
    waiting_path: str
    sharing_path: str


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log, as it is shown."""

    at: str
    action: str
    phase: str
    text: str


async def show(view: View, _: str) -> Page:
    """Show all slots."""
    part = part_of(view, slot_bodies(view.api), "from")
    context: dict[str, Any] = {
        "part": part,
        "cards": [_card(view, slot) for slot in part.rows],
        "can_act": view.can("admin"),
    }
    return Page(template="slots.html", title="Slots", context=context)


async def show_one(view: View, name: str) -> Page:
    """Show everything about a slot."""
    card = _card(view, one_slot(view.api, name))
    lines: list[Told] = []
    if view.may("admin"):
        lines = [_told(line) for line in await slot_lines(view.api, name, LINES_BESIDE)]
    context: dict[str, Any] = {
        "card": card,
        "slot": card.slot,
        "lines": lines,
        "line_length": LENGTH_BESIDE,
        "can_act": view.can("admin"),
        "has_log": view.may("admin"),
        "loops": [
            ("wakes", "sends wakes when they are due", card.slot.wake_loop),
            ("polls", "reads the quota", card.slot.quota_loop),
        ],
    }
    return Page(template="slot.html", title=f"Slot {name}", context=context)


async def show_log(view: View, name: str) -> Page:
    """Show more of what was logged of a slot on this node."""
    lines = [_told(line) for line in await slot_lines(view.api, name, LINES_SHOWN)]
    context = {
        "lines": lines,
        "line_length": MAX_LINE_CHARS,
        "name": name,
        "path": path_of(name),
    }
    return Page(template="slot_log.html", title=f"Log of slot {name}", context=context)


async def warm(view: View, name: str, _: Form) -> Done:
    """Open the window of a slot now, and say what came of it."""
    to = path_of(name)
    try:
        slot = await warmed(view.api, view.request, name)
    except (WindowOpenError, SlotUnavailableError) as error:
        return Done(to=to, said=f"{error}.", is_error=True)
    return Done(to=to, said=_said_of_wake(slot))


def _said_of_wake(slot: SlotBody) -> str:
    if slot.wake_pending:
        return "a wake was sent. The next readings tell whether the window is open; see below."
    if slot.state == "open":
        return "a wake was sent, and the window is open."
    return "the provider has not answered yet. What comes of it is told below."


async def enable(view: View, name: str, _: Form) -> Done:
    """Have a slot polled and woken again."""
    slot = await switched(view.api, view.request, name, is_on=True)
    if not slot.enabled:
        problem = f"the slot stays off: {slot.disabled_reason or 'see its settings'}."
        return Done(to=path_of(name), said=problem, is_error=True)
    return Done(to=path_of(name), said="the slot is enabled, and its quota is read.")


async def disable(view: View, name: str, _: Form) -> Done:
    """Leave a slot alone."""
    await switched(view.api, view.request, name, is_on=False)
    return Done(to=path_of(name), said="the slot is disabled; its tasks wait until it is enabled.")


def path_of(name: str) -> str:
    """Return the address of a slot, whatever is in its name."""
    return f"{SLOTS}/{quote(name, safe='')}"


def _card(view: View, slot: SlotBody) -> Card:
    outlook = view.api.outlook
    desk = None if outlook is None or view.caller.is_bound else outlook.desk
    return Card(
        slot=slot,
        path=path_of(slot.name),
        window=window_of(slot, view.now),
        inflight=None if desk is None else desk.flights.by_slot.get(slot.name, 0),
        waiting_path=_tasks_path(slot=slot.name),
        sharing_path=_tasks_path(provider=slot.provider),
    )


def _tasks_path(**which: str) -> str:
    return f"/ui/tasks?{urlencode({'state': 'queued', **which})}"


def _told(line: LogLine) -> Told:
    return Told(at=line.ts, action=line.action, phase=line.phase, text=line_text(line))


ROUTES: tuple[PageRoute, ...] = (
    page_route(SLOTS, show, needs="read"),
    page_route(f"{SLOTS}/{{id}}", show_one, needs="read"),
    page_route(f"{SLOTS}/{{id}}/log", show_log, needs="admin"),
    action_route(f"{SLOTS}/{{id}}/warm", warm),
    action_route(f"{SLOTS}/{{id}}/enable", enable),
    action_route(f"{SLOTS}/{{id}}/disable", disable),
)
