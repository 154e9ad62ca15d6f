"""What needs somebody's attention, the worst first, each with the page that helps.

Rule: a notice says what is the matter and what it does to tasks; nothing that is as it should be is
among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Literal

import msgspec

from headgate.bodies.slots import SlotBody
from headgate.core.budgets.alerts import NEARLY_USED_UP
from headgate.core.budgets.scopes import ROOT_WORDS
from headgate.core.texts.figures import usd
from headgate.dashboard.shown.formats import capital
from headgate.dashboard.shown.reachable import project_href, scope_href, slot_href
from headgate.scope_status import ScopeStatus
from headgate.settings import ProjectSettings

WORRYING_POLL_ERRORS = 3
MAX_NOTICES = 20
MAX_BUDGETS = 8
"""How many budgets are named, so that they leave room for slots and webhooks."""

_PART_NAMES = {"store": "The store", "ledger": "The ledger", "dispatcher": "The dispatcher"}
_HELD_STATUSES = {
    "paused": "is paused: its tasks wait",
    "draining": "is draining: it takes no new tasks",
    "archived": "is archived: its tasks wait",
}


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One matter; `name` is somebody's own word and is shown as such.

    `until` is when it ends, or what else `until_word` says of that time.
    """

    tone: Literal["bad", "warning"]
    title: str
    name: str = ""
    text: str
    href: str = ""
    until: datetime | float | None = None
    until_word: str = "Ends"


WEBHOOKS_UNKNOWN = Notice(
    tone="warning",
    title="Whether webhooks were given up is not known now",
    text="The store has not answered in time; this page asks again by itself.",
    href="/ui/webhooks?state=dead",
)


def worst_first(notices: Iterable[Notice]) -> tuple[list[Notice], int]:
    """Return the notices that are shown, and how many there are beside them."""
    found = sorted(notices, key=lambda notice: notice.tone != "bad")
    return found[:MAX_NOTICES], max(0, len(found) - MAX_NOTICES)


def of_health(parts: Mapping[str, str], problem: str) -> Iterator[Notice]:
    """Yield what keeps this node from its work."""
    failing = {name: words for name, words in parts.items() if words != "ok"}
    for name, words in failing.items():
        title = f"{_PART_NAMES.get(name, name)} has a problem"
        yield Notice(tone="bad", title=title, text=f"{capital(words)}.")
    if problem and problem not in failing.values():
        text = f"{capital(problem)}."
        yield Notice(tone="bad", title="This node does not take or run tasks now", text=text)


def of_switches(is_paused: bool, projects: Mapping[str, ProjectSettings]) -> Iterator[Notice]:  # noqa: FBT001
    """Yield what somebody has paused and may have forgotten."""
    if is_paused:
        text = "Nothing new is started until somebody resumes it."
        yield Notice(tone="bad", title="Everything is paused", text=text, href="/ui/projects")
    for name, project in projects.items():
        words = _HELD_STATUSES.get(project.status.value)
        if words is not None:
            href = project_href(name)
            yield Notice(tone="warning", title="Project", name=name, text=words + ".", href=href)


def of_budgets(status: ScopeStatus) -> Iterator[Notice]:
    """Yield the scopes that have no room, or nearly none; of very many only how many they are."""
    found = sorted(_of_budgets(status), key=lambda notice: notice.tone != "bad")
    yield from found[:MAX_BUDGETS]
    if more := found[MAX_BUDGETS:]:
        yield Notice(
            tone=more[0].tone,
            title=f"{len(more)} more {'budget is' if len(more) == 1 else 'budgets are'} used up",
            text="Or nearly so: the page of budgets has them all.",
            href="/ui/budgets",
        )


def _of_budgets(status: ScopeStatus) -> Iterator[Notice]:
    share = status.used_share
    if share is not None and share >= NEARLY_USED_UP:
        is_full = share >= 1
        yield Notice(
            tone="bad" if is_full else "warning",
            title="The budget of" if status.scope else f"The budget of {ROOT_WORDS}",
            name=status.scope,
            text=f"{'is used up' if is_full else 'is nearly used up'}: {left_text(status)}.",
            href=scope_href(status.scope),
            until=status.resets_at,
            until_word="Next frees room",
        )
    for child in status.children:
        yield from _of_budgets(child)


def left_text(status: ScopeStatus) -> str:
    """Return in words what is left of each limit of a scope."""
    parts = []
    if status.limit_micro_usd is not None and status.remaining_micro_usd is not None:
        left = usd(max(0, status.remaining_micro_usd))
        parts.append(f"{left} of {usd(status.limit_micro_usd)} left")
    if status.limit_tokens is not None and status.remaining_tokens is not None:
        left = f"{max(0, status.remaining_tokens):,}"
        parts.append(f"{left} of {status.limit_tokens:,} tokens left")
    return ", ".join(parts)


def of_slots(slots: Iterable[SlotBody]) -> Iterator[Notice]:
    """Yield the slots whose tasks wait, or of which nothing is known any more."""
    for slot in slots:
        if slot.state == "disabled":
            why = slot.disabled_reason.removeprefix("disabled, ")
            yield _slot(slot, "bad", f"is disabled: {why or 'its tasks wait'}.")
        elif slot.state == "exhausted":
            yield _slot(slot, "warning", f"is exhausted: {_awaited(slot)}.")
        elif slot.state == "paused":
            yield _slot(slot, "warning", f"is paused: {slot.hold or 'its tasks wait'}.")
        elif slot.poll_errors >= WORRYING_POLL_ERRORS:
            text = f"could not be read {slot.poll_errors} times in a row: {slot.last_error}."
            yield _slot(slot, "warning", text)


def _awaited(slot: SlotBody) -> str:
    """Return what the tasks of a slot that is used up wait for."""
    if slot.resets_at is not None and slot.held_until is None:
        return "its window ended, and a reading has to confirm it"
    return "its tasks wait for the next window"


def _slot(slot: SlotBody, tone: Literal["bad", "warning"], text: str) -> Notice:
    href = slot_href(slot.name)
    return Notice(
        tone=tone, title="Slot", name=slot.name, text=text, href=href, until=slot.held_until
    )


def of_webhooks(dead: int, *, is_more: bool) -> Iterator[Notice]:
    """Yield that webhooks were given up."""
    if dead:
        number = f"{dead} or more" if is_more else str(dead)
        word = "webhook was" if dead == 1 and not is_more else "webhooks were"
        text = "No receiver took them, and they are not tried again by themselves."
        if dead == 1 and not is_more:
            text = "Its receiver did not take it, and it is not tried again by itself."
        yield Notice(
            tone="warning",
            title=f"{number} {word} given up since yesterday",
            text=text,
            href="/ui/webhooks?state=dead",
        )
