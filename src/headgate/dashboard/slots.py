"""Slots: how much of each quota is used, when its window ends, what wakes it next; all closures.

Whoever may read sees them, since slots belong to nobody. What was sent and what came back is for
administrators, as it is in the API.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import msgspec

from headgate.api.admin import MAX_CLOSURES, opened
from headgate.api.slots import (
    OPENED,
    known_closures,
    one_slot,
    shown_closures,
    slot_bodies,
    slot_lines,
    switched,
    warmed,
)
from headgate.core.budgets.scopes import ROOT_NAME
from headgate.core.slots.quota import UNIT_HOURS
from headgate.core.slots.status import LogLine, SlotBody
from headgate.core.task_view import closure_body
from headgate.dashboard.formats import (
    LIMITS,
    LOG_ACTIONS,
    LOG_PHASES,
    SlotBar,
    bar_of,
    capital,
    limit_words,
    next_wake_words,
    said,
    wake_mode_words,
)
from headgate.dashboard.lists import CLOSURES, SLOTS, part_of, slot_href
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route
from headgate.engine.slots.slot_log import MAX_LINE_CHARS, line_text
from headgate.errors import InvalidFieldError, SlotUnavailableError, WindowOpenError

# The window of a slot as it is drawn: from its beginning over now to its reset.
#
# A provider tells when a window ends. When it began follows from the length that some of them tell,
# and otherwise from the wake that opened it.

HOUR_SECONDS = 3_600.0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """An open window; times are Unix seconds, and `elapsed` is the part of 1 that is over."""

    begins_at: float
    ends_at: float
    elapsed: float


def window_of(slot: SlotBody, now: float) -> Window | None:
    """Return the window that is open; None if none is, or it is not known when it began."""
    if slot.resets_at is None:
        return None
    ends_at = slot.resets_at.timestamp()
    begins_at = _begins_at(slot, ends_at)
    if begins_at is None or not begins_at <= now < ends_at:
        return None
    elapsed = (now - begins_at) / (ends_at - begins_at)
    return Window(begins_at=begins_at, ends_at=ends_at, elapsed=elapsed)


def _begins_at(slot: SlotBody, ends_at: float) -> float | None:
    """Return when the window began: with the wake that opened it, or its whole length ago."""
    whole = _length_seconds(slot)
    longest_ago = None if whole is None else ends_at - whole
    sent_at, confirmed_at = slot.last_wake_at, slot.last_confirmed_at
    if sent_at is None or confirmed_at is None or confirmed_at < sent_at:
        return longest_ago
    # A wake of an earlier window says nothing of this one.
    return max(sent_at.timestamp(), longest_ago or 0.0)


def _length_seconds(slot: SlotBody) -> float | None:
    for limit in slot.limits:
        if limit.unit == UNIT_HOURS and limit.number and limit.resets_at == slot.resets_at:
            return limit.number * HOUR_SECONDS
    return None


LINES_BESIDE = 12
LENGTH_BESIDE = 160
LINES_SHOWN = 200
MAX_LIMITS = 16


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One slot as it is drawn: its numbers, its window, and where its tasks are listed.

    `inflight` is known at the node that dispatches, and shown to those who are not bound.
    """

    slot: SlotBody
    path: str
    bar: SlotBar
    next_wake: str
    window: Window | None
    inflight: int | None
    waiting_path: str
    sharing_path: str


class LimitRow(msgspec.Struct, frozen=True, kw_only=True):
    """One limit that the provider told of, in words; `type` is what it calls it."""

    type: str
    name: str
    window: str
    percent_used: float | None
    resets_at: datetime | None


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log, as it is shown: what happened in words, and under which name."""

    at: str
    action: str
    words: str
    phase: str
    text: str
    is_error: bool


async def show(view: View, _: str) -> Page:
    """Show all slots."""
    part = part_of(view, await slot_bodies(view.api, view.caller), "from")
    context: dict[str, Any] = {
        "part": part,
        "cards": [_card(view, slot) for slot in part.rows],
        "can_act": view.can("admin"),
    }
    return Page(template="slots.html", title="Slots", context=context)


async def show_one(view: View, name: str) -> Page:
    """Show everything about a slot."""
    card = _card(view, await one_slot(view.api, name, view.caller))
    lines: list[Told] = []
    if view.may("admin"):
        lines = [_told(line) for line in await slot_lines(view.api, name, LINES_BESIDE)]
    context: dict[str, Any] = {
        "card": card,
        "slot": card.slot,
        "wake_modes": wake_mode_words(card.slot),
        "limits": _limits(card.slot),
        "more_limits": max(0, len(card.slot.limits) - MAX_LIMITS),
        "lines": lines,
        "line_length": LENGTH_BESIDE,
        "can_act": view.can("admin"),
        "has_log": view.may("admin"),
        "loops": [
            ("wakes", "sends wakes when they are due", card.slot.wake_loop),
            ("readings", "reads the quota", card.slot.quota_loop),
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
        "path": slot_href(name),
    }
    return Page(template="slot_log.html", title=f"Log of slot {name}", context=context)


async def warm(view: View, name: str, _: Form) -> Done:
    """Open the window of a slot now, and say what came of it."""
    to = slot_href(name)
    try:
        slot = await warmed(view.api, view.request, name)
    except (WindowOpenError, SlotUnavailableError) as error:
        return Done(to=to, said=f"{error}.", is_error=True)
    return Done(to=to, said=_said_of_wake(slot))


def _said_of_wake(slot: SlotBody) -> str:
    if slot.wake_pending:
        return "Headgate sent a wake. The next polls show whether the window is open; see below."
    if slot.state == "open":
        return "Headgate sent a wake, and the window is open."
    return "the provider has not answered yet. The result appears below."


async def enable(view: View, name: str, _: Form) -> Done:
    """Have a slot polled and woken again."""
    slot = await switched(view.api, view.request, name, is_on=True)
    if not slot.enabled:
        problem = f"the slot stays off: {slot.disabled_reason or 'see its settings'}."
        return Done(to=slot_href(name), said=problem, is_error=True)
    return Done(to=slot_href(name), said="the slot is enabled, and Headgate reads its quota.")


async def disable(view: View, name: str, _: Form) -> Done:
    """Leave a slot alone."""
    await switched(view.api, view.request, name, is_on=False)
    return Done(
        to=slot_href(name), said="the slot is disabled; its tasks wait until it is enabled."
    )


async def reopen(view: View, name: str, _: Form) -> Done:
    """Open a slot that an answer or a quota closed."""
    await opened(view.api, view.request, "slot", name)
    said_then = "the slot is open, until an answer of its provider closes it."
    return Done(to=slot_href(name), said=said_then)


def _card(view: View, slot: SlotBody) -> Card:
    outlook = view.api.engine.outlook
    dispatch_state = None if view.caller.is_bound else outlook.dispatch_state
    return Card(
        slot=slot,
        path=slot_href(slot.name),
        bar=bar_of(slot),
        next_wake=next_wake_words(slot),
        window=window_of(slot, view.now),
        inflight=None
        if dispatch_state is None
        else dispatch_state.in_flight.by_slot.get(slot.name, 0),
        waiting_path=_tasks_path(slot=slot.name),
        sharing_path=_tasks_path(provider=slot.provider),
    )


def _limits(slot: SlotBody) -> list[LimitRow]:
    return [
        LimitRow(
            type=limit.type,
            name=capital(said(LIMITS, limit.type)),
            window=limit_words(limit),
            percent_used=limit.percent_used,
            resets_at=limit.resets_at,
        )
        for limit in slot.limits[:MAX_LIMITS]
    ]


def _tasks_path(**which: str) -> str:
    return f"/ui/tasks?{urlencode({'state': 'queued', **which})}"


def _told(line: LogLine) -> Told:
    return Told(
        at=line.ts.replace("T", " ").replace("Z", " UTC"),
        action=line.action,
        words=said(LOG_ACTIONS, line.action),
        phase=said(LOG_PHASES, line.phase),
        text=line_text(line),
        is_error=line.phase == "error",
    )


# The closures: what keeps tasks from starting, who closed it, and the button that opens it. A slot
# is one of the things that close.

NOUNS = {kind: noun for noun, kind in OPENED.items()}


async def show_closures(view: View, _: str) -> Page:
    """Show everything that is closed, by kind and name."""
    found = shown_closures(await known_closures(view.api))
    context: dict[str, Any] = {
        "closures": [(NOUNS[one.kind], closure_body(one)) for one in found[:MAX_CLOSURES]],
        "more": max(0, len(found) - MAX_CLOSURES),
        "can_act": view.can("admin"),
    }
    return Page(template="closures.html", title="Closures", context=context)


async def reopen_closure(view: View, _: str, form: Form) -> Done:
    """Open one of them before its time."""
    noun, name = form.get("kind"), form.get("name")
    if noun not in OPENED:
        raise InvalidFieldError("kind", f"must be one of {', '.join(OPENED)}")
    await opened(view.api, view.request, OPENED[noun], name)
    said_of_it = f"{noun} {name or ROOT_NAME} is open, until what closed it closes it again."
    return Done(to=CLOSURES, said=said_of_it)


ROUTES: tuple[PageRoute, ...] = (
    page_route(CLOSURES, show_closures, needs="admin"),
    action_route(f"{CLOSURES}/open", reopen_closure),
    page_route(SLOTS, show, needs="read"),
    page_route(f"{SLOTS}/{{id}}", show_one, needs="read"),
    page_route(f"{SLOTS}/{{id}}/log", show_log, needs="admin"),
    action_route(f"{SLOTS}/{{id}}/warm", warm),
    action_route(f"{SLOTS}/{{id}}/enable", enable),
    action_route(f"{SLOTS}/{{id}}/disable", disable),
    action_route(f"{SLOTS}/{{id}}/open", reopen),
)
