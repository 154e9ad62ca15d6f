"""Why a task waits, with ways to everything that a reason names.

A reason says what holds the task in a line for people; beside it are links to the tasks that hold
it, to the budget, the slot, the project. Rule: a link is drawn only to a page that the visitor may
open.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec

from headgate.bodies.tasks import ReasonBody, SlotRoomBody, WhyBody
from headgate.core.budgets.scopes import scope_words
from headgate.dashboard.page import View
from headgate.dashboard.shown.formats import capital
from headgate.dashboard.shown.reachable import may_open, project_href, scope_href, slot_href
from headgate.errors import StoreError
from headgate.moments import FAR, utc_time
from headgate.web.handlers.tasks import explained
from headgate.web.http.answers import Answer
from headgate.web.refusals import Refusal, refusal_of

OK = 200
MAX_REASONS = 20


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A way to something that a reason names."""

    label: str
    name: str
    href: str


class ReasonShown(msgspec.Struct, frozen=True, kw_only=True):
    """One reason as the page shows it; `names_time` if the message itself says until when."""

    message: str
    until: float | None
    names_time: bool
    held_by: tuple[str, ...]
    held_by_others: int
    parents: tuple[str, ...]
    links: list[Link]


class WhyShown(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons, and the slots that the task may use; `problem` if nobody could say."""

    reasons: list[ReasonShown] = []
    more_reasons: int = 0
    slots: list[SlotRoomBody] = []
    problem: str = ""


async def why_shown(view: View, task_id: str) -> WhyShown:
    """Ask why a task waits; that nobody can say now is no reason to show nothing else."""
    try:
        answer = await explained(view.api, view.request, task_id)
    except Refusal as refusal:
        return WhyShown(problem=refusal.body.error)
    except StoreError as error:
        # What a driver says may name hosts and paths.
        return WhyShown(problem=refusal_of(error).body.error)
    body = _body(answer)
    if body is None:
        return WhyShown(problem="the node that knows did not answer")
    slots = body.slots if body.slot is None else (body.slot,)
    return WhyShown(
        reasons=[_shown(view, one) for one in body.reasons[:MAX_REASONS]],
        more_reasons=max(0, len(body.reasons) - MAX_REASONS),
        slots=list(slots),
    )


def _body(answer: msgspec.Struct | Answer) -> WhyBody | None:
    """Read what this node says, or another one on its behalf."""
    if not isinstance(answer, Answer):
        return msgspec.json.decode(msgspec.json.encode(answer), type=WhyBody)
    if answer.status != OK:
        return None
    try:
        return msgspec.json.decode(answer.body, type=WhyBody)
    except msgspec.MsgspecError:
        return None


def _shown(view: View, reason: ReasonBody) -> ReasonShown:
    parents = reason.hold.get("parents")
    until = None if reason.until is None or utc_time(reason.until) == FAR else reason.until
    return ReasonShown(
        message=capital(reason.message),
        until=until,
        names_time=until is not None and utc_time(until) in reason.message,
        held_by=reason.held_by,
        held_by_others=reason.held_by_others,
        parents=tuple(str(one) for one in parents or ()),
        links=links_of(view, reason.hold),
    )


def links_of(view: View, hold: dict[str, Any]) -> list[Link]:
    """Return the ways to what a hold names."""
    kind, name = hold.get("kind"), hold.get("name")
    scope = name if kind == "scope" else hold.get("scope")
    links = []
    href = scope_href(scope) if isinstance(scope, str) else ""
    if isinstance(scope, str) and may_open(view, href):
        links.append(Link(label="Budget", name=scope_words(scope), href=href))
    if kind == "slot":
        links.append(Link(label="Slot", name=str(name), href=slot_href(str(name))))
    if kind == "target":
        links.append(_tasks_link("In flight for", target=str(name)))
    if hold.get("agent_id") and view.caller.agent_id in (None, hold["agent_id"]):
        links.append(_tasks_link("In flight at", agent=str(hold["agent_id"])))
    if hold.get("project_id") and view.may("admin"):
        project = str(hold["project_id"])
        links.append(Link(label="Project", name=project, href=project_href(project)))
    if hold.get("reason") == "paused" and view.may("admin"):
        links.append(Link(label="Resume on", name="projects", href="/ui/projects"))
    return links


def _tasks_link(label: str, **which: str) -> Link:
    query = urlencode([*which.items(), ("state", "assigned"), ("state", "running")])
    return Link(label=label, name=next(iter(which.values())), href=f"/ui/tasks?{query}")
