"""The overview: what needs attention, what runs and waits, what it costs, and who gets what.

Whoever acts for one project or agent alone sees its own figures. What is known of the whole service
only, such as shares and the figures over time, is shown to those who are not bound. Rule: the page
is there while the store or the ledger is away. It shows what is in memory, and says of the rest
that it is not known; nothing is told as none that is only unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from headgate.bodies.slots import SlotBody
from headgate.bodies.tasks import StatsBody
from headgate.core.budgets.scopes import scope_words
from headgate.core.shares import Share
from headgate.dashboard.page import NO_ANSWER, Page, PageRoute, View, page_route
from headgate.dashboard.pages.figures import ROUTES as FIGURE_ROUTES
from headgate.dashboard.pages.figures import rows_of
from headgate.dashboard.shown import attention
from headgate.dashboard.shown.attention import Notice, worst_first
from headgate.dashboard.shown.budget_words import BudgetBar, bars_of, state_of
from headgate.dashboard.shown.reachable import may_open, project_href, scope_href, slot_href
from headgate.dashboard.shown.slot_words import SlotBar, bar_of
from headgate.dashboard.shown.task_reasons import ReasonShown, WhyShown, why_shown
from headgate.deliveries import DeliveryQuery, DeliveryState
from headgate.errors import StoreError
from headgate.runtime.health import OK, STORE_FAILS
from headgate.runtime.looking.history import Present
from headgate.scope_status import ScopeStatus
from headgate.settings import ProjectSettings
from headgate.web.handlers.budgets import own_status
from headgate.web.handlers.slots import slot_bodies
from headgate.web.handlers.status import lately, stats_body
from headgate.web.refusals import Refusal

MAX_SHARES = 12
MAX_BUDGETS = 8
MAX_SLOTS = 12
MAX_DEAD = 20
DAY_SECONDS = 86_400
MAX_REASONS = 3
ANSWER_SECONDS = 3.0
"""How long each part is waited for; the page itself has a little more."""

UNKNOWN = "not known while the store is away"
NO_LEDGER = "not known while the ledger does not answer"

Result = TypeVar("Result")


class Oldest(msgspec.Struct, frozen=True, kw_only=True):
    """The task that has waited longest, and what holds it; `problem` if nobody could say."""

    task_id: str
    project_id: str
    agent_id: str | None
    since: float
    reasons: list[ReasonShown]
    problem: str = ""


class BudgetMeter(msgspec.Struct, frozen=True, kw_only=True):
    """A budget that has a limit; without an address for those who may not open its page."""

    status: ScopeStatus
    name: str
    href: str
    bars: list[BudgetBar]
    state: str


class SlotMeter(msgspec.Struct, frozen=True, kw_only=True):
    """A slot with its bar."""

    slot: SlotBody
    href: str
    bar: SlotBar


async def show(view: View, _: str) -> Page:
    """Show the overview."""
    stats, budget, dead, oldest = await asyncio.gather(
        _or_none(stats_body(view.api, view.caller)),
        _or_none(own_status(view.api, view.caller)),
        _or_none(_dead_webhooks(view)),
        _oldest(view),
    )
    slots, parts = slot_bodies(view.api), _parts(view, stats)
    found = [
        *attention.of_health(parts, view.api.engine.health().problem),
        *_notices(view, budget, slots),
        *_of_webhooks(dead, is_store_away=stats is None),
    ]
    notices, more_notices = worst_first(found)
    context: dict[str, Any] = {
        "stats": stats,
        "present": _present(view, stats),
        "limits": view.api.limits,
        "unknown": UNKNOWN if stats is None else "",
        "no_budget": _why_no_budget(parts),
        "is_fresh": stats is not None and not stats.metrics.tasks_submitted,
        "address": view.address,
        "may_open": partial(may_open, view),
        "notices": notices,
        "more_notices": more_notices,
        "lately": lately(view.api, view.caller),
        "rows": rows_of(view),
        "has_history": _has_history(view),
        "oldest": oldest,
        "is_dispatching": _is_dispatching(view),
        **_meters(view, budget, slots),
    }
    return Page(template="overview.html", title="Overview", context=context)


def _meters(view: View, budget: ScopeStatus | None, slots: list[SlotBody]) -> dict[str, Any]:
    """Return who gets what: as many of each kind as are shown, and how many there are besides."""
    budgets, shares = _limited(budget), _shares(view)
    return {
        "budget": budget,
        "budgets": [_budget(view, one) for one in budgets[:MAX_BUDGETS]],
        "more_budgets": max(0, len(budgets) - MAX_BUDGETS),
        "slots": [_slot(one) for one in slots[:MAX_SLOTS]],
        "more_slots": max(0, len(slots) - MAX_SLOTS),
        "shares": shares[:MAX_SHARES],
        "project_href": project_href,
        "more_shares": max(0, len(shares) - MAX_SHARES),
        "most_share": max((max(one.target, one.actual) for one in shares), default=1.0),
    }


def _parts(view: View, stats: StatsBody | None) -> Mapping[str, str]:
    """Return how the parts are; that the store is away is known here before the node tells it."""
    parts = view.api.engine.health().parts
    is_unseen = stats is None and parts.get("store", OK) == OK
    return {**parts, "store": STORE_FAILS} if is_unseen else parts


def _present(view: View, stats: StatsBody | None) -> Present | None:
    """Return what waits and runs, as the store counts it, or else the desk; None if unknown."""
    if stats is not None:
        return Present(queued=stats.queue.total_queued, inflight=stats.queue.total_inflight)
    outlook = view.api.outlook
    return None if outlook is None or view.caller.is_bound else outlook.present()


def _why_no_budget(parts: Mapping[str, str]) -> str:
    """Return why budgets are not known, where they are not: most stores keep the books as well."""
    is_in_store = parts.get("ledger", OK) == OK and parts.get("store", OK) != OK
    return UNKNOWN if is_in_store else NO_LEDGER


def _notices(view: View, budget: ScopeStatus | None, slots: list[SlotBody]) -> list[Notice]:
    return [
        *attention.of_switches(view.api.is_paused, _own_projects(view)),
        *(() if budget is None else attention.of_budgets(budget)),
        *attention.of_slots(slots),
    ]


def _of_webhooks(dead: tuple[int, bool] | None, *, is_store_away: bool) -> Iterable[Notice]:
    if dead is not None:
        return attention.of_webhooks(dead[0], is_more=dead[1])
    # Of a store that is away there is a notice already, and it is about everything.
    return () if is_store_away else (attention.WEBHOOKS_UNKNOWN,)


def _own_projects(view: View) -> dict[str, ProjectSettings]:
    administration = view.api.administration
    if administration is None:
        return {}
    projects, caller = administration.settings.projects, view.caller
    if not caller.is_bound:
        return projects
    # Whoever acts for an agent alone is told of no project: which there are is not its business.
    return {name: one for name, one in projects.items() if name == caller.project_id}


async def _dead_webhooks(view: View) -> tuple[int, bool]:
    """Count the webhooks of the last day that were given up, and say if there may be more."""
    webhooks = view.api.webhooks
    if webhooks is None or not view.may("admin"):
        return 0, False
    query = DeliveryQuery(state=DeliveryState.DEAD, limit=MAX_DEAD)
    page = await webhooks.deliveries.find(query)
    since = view.now - DAY_SECONDS
    recent = [one for one in page.deliveries if one.ended_at is not None and one.ended_at > since]
    return len(recent), len(recent) == MAX_DEAD


def _limited(status: ScopeStatus | None) -> list[ScopeStatus]:
    """List the scopes that have a limit, the fullest first."""
    if status is None:
        return []
    found: list[ScopeStatus] = []
    waiting = [status]
    while waiting:
        one = waiting.pop()
        waiting += one.children
        if one.used_share is not None:
            found.append(one)
    return sorted(found, key=lambda one: (-(one.used_share or 0.0), one.scope))


def _budget(view: View, status: ScopeStatus) -> BudgetMeter:
    href = scope_href(status.scope)
    return BudgetMeter(
        status=status,
        name=scope_words(status.scope),
        href=href if may_open(view, href) else "",
        bars=[bar for bar in bars_of(status) if bar.limit is not None],
        state=state_of(status),
    )


def _slot(slot: SlotBody) -> SlotMeter:
    return SlotMeter(slot=slot, href=slot_href(slot.name), bar=bar_of(slot))


def _shares(view: View) -> list[Share]:
    """List the shares of those projects that have any, the largest target first."""
    outlook = view.api.outlook
    found = None if outlook is None or view.caller.is_bound else outlook.shares()
    return sorted(found or (), key=lambda one: (-one.target, one.project_id))


def _has_history(view: View) -> bool:
    return view.api.history is not None and not view.caller.is_bound


def _is_dispatching(view: View) -> bool:
    return view.api.outlook is not None and view.api.outlook.desk is not None


async def _oldest(view: View) -> Oldest | None:
    outlook, bounds = view.api.outlook, view.caller.bounds
    found = None if outlook is None else outlook.longest_wait(view.now, bounds)
    if found is None:
        return None
    asked = await _or_none(why_shown(view, found.task_id))
    why = asked or WhyShown(problem=NO_ANSWER)
    return Oldest(
        task_id=found.task_id,
        project_id=found.project_id,
        agent_id=found.agent_id,
        since=found.since,
        reasons=why.reasons[:MAX_REASONS],
        problem=why.problem,
    )


async def _or_none(asked: Awaitable[Result]) -> Result | None:
    """Return an answer, or None where the part that knows it is away: the notices say so."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asked
    except (StoreError, Refusal, TimeoutError):
        return None


ROUTES: tuple[PageRoute, ...] = (page_route("/", show), *FIGURE_ROUTES)
