"""The overview: what needs attention, what runs and waits, what it costs, and who gets what.

Whoever acts for one project or agent alone sees its own numbers. What is known of the whole service
only, such as shares and the numbers over time, is shown to those who are not bound. Rule: the page
is there while the store or the ledger is away. It shows what is in memory, and says of the rest
that it is not known; nothing is told as none that is only unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from headgate.api.budgets import own_status
from headgate.api.calls import live_counts
from headgate.api.errors import ApiError, invalid_field
from headgate.api.http.response import Headers, Response
from headgate.api.http.slices import in_slices
from headgate.api.schema.tasks import StatsBody
from headgate.api.slots import known_closures, slot_bodies
from headgate.api.status import recent_step, stats_body
from headgate.budgets.status import ScopeStatus
from headgate.config import ProjectSettings
from headgate.core.budgets.alerts import NEARLY_USED_UP
from headgate.core.budgets.scopes import ROOT_WORDS, scope_words
from headgate.core.estimates import SilentKind
from headgate.core.fair_share import Share
from headgate.core.gates import GateClosure
from headgate.core.money import MICRO_PER_USD
from headgate.core.slots.status import SlotBody
from headgate.core.text import Steps, usd
from headgate.dashboard.budgets import BudgetBar, bars_of, claimed_words, state_of
from headgate.dashboard.formats import SlotBar, bar_of, capital
from headgate.dashboard.lists import CLOSURES, may_open, project_href, scope_href, slot_href
from headgate.dashboard.page import (
    NO_ANSWER,
    PAGE_HEADERS,
    Page,
    PageRoute,
    View,
    gzipped,
    page_route,
    response_route,
    takes_gzip,
)
from headgate.dashboard.task import ReasonShown, WhyView, why_view
from headgate.engine.history import LONG_STEP_SECONDS, STEP_SECONDS, History, Present, Step, summed
from headgate.engine.supervisor import OK, STORE_FAILS
from headgate.errors import StoreError
from headgate.providers.prices import price_advice
from headgate.storage.deliveries import DeliveryQuery, DeliveryState
from headgate.storage.usage import UnpricedModel

# `/ui/history`: the numbers over time, as columns for the charts, and as rows for a table.
#
# Rule: a moment of which nothing is known has null in every column, so that a line is not drawn
# over it as if it were. The columns are made once for each step, however many pages ask for them.

HTTP_OK = 200
RANGES = ("hour", "day")
ROW_SECONDS = 300
MAX_ROWS = 12
MINUTE_SECONDS = 60
MISSED_STEPS = 3
WAIT_DIGITS = 4
AT_DIGITS = 1

Column = list[float | None]


class HistoryBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The numbers of a range, a column each: counts and dollars per minute, waits in seconds."""

    step_seconds: float
    at: list[float]
    queued: Column
    inflight: Column
    completed: Column
    failed: Column
    wait_average: Column
    wait95: Column
    spent_usd: Column


class _Encoded(NamedTuple):
    """The numbers of a range as they are sent, and the steps that they were made of."""

    steps: tuple[int, float, float]
    content: bytes
    compressed: bytes


_encoded: WeakKeyDictionary[History, dict[str, _Encoded]] = WeakKeyDictionary()


async def show_history(view: View, _: str) -> Response:
    """Answer with the numbers of the last hour, or of the last day."""
    chosen = view.request.query().get("range", RANGES[0])
    if chosen not in RANGES:
        raise invalid_field("range", f"must be one of {', '.join(RANGES)}")
    if view.caller.is_bound:
        raise ApiError("forbidden", "the numbers over time are of the whole service")
    found = _encoded_history(view.api.engine.history, chosen)
    headers: Headers = (*PAGE_HEADERS, (b"vary", b"accept-encoding"))
    if not takes_gzip(view.request.header(b"accept-encoding")):
        return Response(HTTP_OK, found.content, headers)
    return Response(HTTP_OK, found.compressed, (*headers, (b"content-encoding", b"gzip")))


def _encoded_history(history: History, chosen: str) -> _Encoded:
    is_hour = chosen == RANGES[0]
    steps = list(history.hour if is_hour else history.day)
    known = (len(steps), steps[0].at, steps[-1].at) if steps else (0, 0.0, 0.0)
    kept = _encoded.setdefault(history, {})
    if chosen not in kept or kept[chosen].steps != known:
        body = history_body(steps, STEP_SECONDS if is_hour else LONG_STEP_SECONDS)
        content = msgspec.json.encode(body)
        kept[chosen] = _Encoded(known, content, gzipped(content))
    return kept[chosen]


def history_body(steps: Sequence[Step], step_seconds: float) -> HistoryBody:
    """Return steps as columns; where some are missing, there is a gap."""
    shown = list(with_gaps(steps, step_seconds))
    return HistoryBody(
        step_seconds=step_seconds,
        at=[round(at, AT_DIGITS) for at, _ in shown],
        queued=[None if step is None else step.queued for _, step in shown],
        inflight=[None if step is None else step.inflight for _, step in shown],
        completed=[_per_minute(step, "completed") for _, step in shown],
        failed=[_per_minute(step, "failed") for _, step in shown],
        wait_average=[_wait(step, "wait_average_seconds") for _, step in shown],
        wait95=[_wait(step, "wait_p95_seconds") for _, step in shown],
        spent_usd=[_dollars(step) for _, step in shown],
    )


def with_gaps(steps: Iterable[Step], step_seconds: float) -> Iterable[tuple[float, Step | None]]:
    """Yield each step with its time, and one without a step before whatever came too late."""
    before: float | None = None
    for step in steps:
        if before is not None and step.at - before > MISSED_STEPS * step_seconds:
            yield before + step_seconds, None
        yield step.at, step
        before = step.at


def rows_of(view: View) -> list[Step]:
    """Return the last hour in rows of five minutes, the newest first, for those without a chart."""
    if view.caller.is_bound:
        return []
    grouped = groupby(view.api.engine.history.hour, key=lambda step: int(step.at // ROW_SECONDS))
    rows = [row for _, group in grouped if (row := summed(group)) is not None]
    return rows[::-1][:MAX_ROWS]


def _per_minute(step: Step | None, name: str) -> float | None:
    if step is None:
        return None
    return round(float(getattr(step, name)) * MINUTE_SECONDS / step.seconds, 2)


def _dollars(step: Step | None) -> float | None:
    if step is None:
        return None
    return round(step.spent_micro_usd / MICRO_PER_USD * MINUTE_SECONDS / step.seconds, WAIT_DIGITS)


def _wait(step: Step | None, name: str) -> float | None:
    seconds = None if step is None else getattr(step, name)
    return None if seconds is None else round(float(seconds), WAIT_DIGITS)


HISTORY_ROUTES: tuple[PageRoute, ...] = (response_route("/ui/history", show_history),)


# What needs somebody's attention, the worst first, each with the page that helps.
#
# Rule: a notice says what is the matter and what it does to tasks; nothing that is as it should
# be is among them.

WORRYING_POLL_ERRORS = 3
MAX_NOTICES = 20
"""How many budgets are named, so that they leave room for slots and webhooks."""

_PART_NAMES = {
    "store": "The store",
    "ledger": "The ledger",
    "dispatcher": "The dispatcher",
    "descriptors": "File descriptors",
}
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
    title="The state of webhooks is unknown now",
    text="The store did not answer in time. This page asks again by itself.",
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
        yield Notice(tone="bad", title="This node does not accept or run tasks now", text=text)


def of_switches(is_paused: bool, projects: Mapping[str, ProjectSettings]) -> Iterator[Notice]:  # noqa: FBT001
    """Yield what somebody has paused and may have forgotten."""
    if is_paused:
        text = "No task starts until somebody resumes."
        yield Notice(tone="bad", title="Everything is paused", text=text, href="/ui/projects")
    for name, project in projects.items():
        words = _HELD_STATUSES.get(project.status.value)
        if words is not None:
            href = project_href(name)
            yield Notice(tone="warning", title="Project", name=name, text=words + ".", href=href)


def of_budgets(status: ScopeStatus) -> Steps[list[Notice]]:
    """Return the scopes that have no room, or nearly none, and where claims are to be decided.

    Of very many only how many they are.
    """
    found: list[Notice] = []
    waiting = [status]
    while waiting:
        one = waiting.pop()
        waiting += reversed(one.children)
        found += _of_budget(one)
        yield
    found.sort(key=lambda notice: notice.tone != "bad")
    if not (more := found[MAX_BUDGETS:]):
        return found
    summary = Notice(
        tone=more[0].tone,
        title=f"{len(more)} more {'budget is' if len(more) == 1 else 'budgets are'} used up",
        text="Or nearly used up, or with claims to decide. The page Budgets shows all of them.",
        href="/ui/budgets",
    )
    return [*found[:MAX_BUDGETS], summary]


def _of_budget(status: ScopeStatus) -> Iterator[Notice]:
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
            until_word="More room",
        )
    if words := claimed_words(status):
        yield Notice(
            tone="warning",
            title="The budget of" if status.scope else f"The budget of {ROOT_WORDS}",
            name=status.scope,
            text=f"has {words} claimed beyond a limit: an operator must accept or reject it.",
            href=scope_href(status.scope),
        )


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
            yield _slot_attention(slot, "bad", f"is disabled: {why or 'what needs its key waits'}.")
        elif slot.state == "exhausted":
            yield _slot_attention(slot, "warning", f"is exhausted: {_awaited(slot)}.")
        elif slot.state == "paused":
            why = slot.wait_reason.removeprefix("paused ")
            yield _slot_attention(slot, "warning", f"is paused {why}.")
        elif slot.state == "no_key":
            yield _slot_attention(slot, "bad", f"has {slot.wait_reason}.")
        elif slot.state == "closed":
            yield _slot_attention(
                slot, "warning", f"is closed: {slot.wait_reason or 'what needs its key waits'}."
            )
        elif slot.poll_errors >= WORRYING_POLL_ERRORS:
            text = f"could not be read {slot.poll_errors} times in a row: {slot.last_error}."
            yield _slot_attention(slot, "warning", text)


def _awaited(slot: SlotBody) -> str:
    """Return what the tasks of a slot that is used up wait for."""
    if slot.resets_at is not None and slot.wait_until is None:
        return "its window ended, and the next poll must confirm it"
    return "calls and tasks wait for the next window"


def _slot_attention(slot: SlotBody, tone: Literal["bad", "warning"], text: str) -> Notice:
    href = slot_href(slot.name)
    return Notice(
        tone=tone, title="Slot", name=slot.name, text=text, href=href, until=slot.wait_until
    )


def of_unpriced(models: Iterable[UnpricedModel]) -> Iterator[Notice]:
    """Yield the models that were used without a price: budgets know only what was reserved."""
    for one in models:
        lines = capital(price_advice(one.model))
        text = f"{one.problem}. {lines}."
        yield Notice(tone="warning", title="Model", name=one.model, text=text, href="/ui/budgets")


def of_silent(kinds: Iterable[SilentKind]) -> Iterator[Notice]:
    """Yield the work that reports nothing, which passes every budget unseen."""
    for one in kinds:
        text = f"{one.problem}. {capital(one.advice)}."
        name = one.kind.name
        yield Notice(tone="warning", title="Target", name=name, text=text, href="/ui/budgets")


def of_webhooks(dead: int, *, is_more: bool) -> Iterator[Notice]:
    """Yield that webhooks were given up."""
    if dead:
        number = f"{dead} or more" if is_more else str(dead)
        word = "webhook was" if dead == 1 and not is_more else "webhooks were"
        text = "Their receivers did not accept them. Headgate does not retry them."
        if dead == 1 and not is_more:
            text = "Its receiver did not accept it. Headgate does not retry it."
        yield Notice(
            tone="warning",
            title=f"{number} {word} given up since yesterday",
            text=text,
            href="/ui/webhooks?state=dead",
        )


MAX_SHARES = 12
MAX_BUDGETS = 8
MAX_SLOTS = 12
MAX_DEAD = 20
DAY_SECONDS = 86_400
MAX_REASONS = 3
ANSWER_SECONDS = 3.0
"""How long each part is waited for; the page itself has a little more."""

UNKNOWN = "unknown while the store is unreachable"
NO_LEDGER = "unknown while the ledger does not answer"

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
    stats, budget, dead, unpriced, silent, oldest = await asyncio.gather(
        _or_none(stats_body(view.api, view.caller)),
        _or_none(own_status(view.api, view.caller)),
        _or_none(_dead_webhooks(view)),
        _or_none(_unpriced(view)),
        _or_none(_silent(view)),
        _oldest(view),
    )
    slots, parts = await slot_bodies(view.api, view.caller), _parts(view, stats)
    found = [
        *of_health(parts, view.api.engine.health().problem),
        *of_switches(view.api.is_paused, _own_projects(view)),
        *([] if budget is None else await in_slices(of_budgets(budget))),
        *of_slots(slots),
        *of_closures(await known_closures(view.api) if view.may("admin") else ()),
        *of_unpriced(unpriced or ()),
        *of_silent(silent or ()),
        *_of_webhooks(dead, is_store_away=stats is None),
    ]
    notices, more_notices = worst_first(found)
    budgets = [] if budget is None else await in_slices(_limited(budget))
    context: dict[str, Any] = {
        "stats": stats,
        "present": _present(view, stats),
        "limits": view.api.limits,
        **_calls(view),
        "unknown": UNKNOWN if stats is None else "",
        "no_budget": _why_no_budget(parts),
        "is_fresh": _is_fresh(view, stats),
        "address": view.address,
        "may_open": partial(may_open, view),
        "notices": notices,
        "more_notices": more_notices,
        "recent": recent_step(view.api, view.caller),
        "rows": rows_of(view),
        "has_history": _has_history(view),
        "oldest": oldest,
        "is_dispatching": _is_dispatching(view),
        "budget": budget,
        "budgets": [_budget(view, one) for one in budgets[:MAX_BUDGETS]],
        "more_budgets": max(0, len(budgets) - MAX_BUDGETS),
        **_meters(view, slots),
    }
    return Page(template="overview.html", title="Overview", context=context)


def _is_fresh(view: View, stats: StatsBody | None) -> bool:
    if stats is None or stats.metrics.tasks_submitted:
        return False
    return not view.api.engine.calls and not view.api.metrics.calls.ended


def _calls(view: View) -> dict[str, Any]:
    """Return how many calls wait and run, and what those cost that ended at this node today."""
    spent, caller = None, view.caller
    # What others of its project spend is nothing for whoever acts for one agent.
    if caller.agent_id is None:
        spent = view.api.metrics.calls.today_micro_usd(view.now, caller.project_id)
    return {
        "has_calls": view.api.engine.calls is not None,
        "calls": live_counts(view.api, view.caller),
        "calls_micro_usd": spent,
    }


def _meters(view: View, slots: list[SlotBody]) -> dict[str, Any]:
    """Return who gets what: as many of each kind as are shown, and how many there are besides."""
    shares = _shares(view)
    return {
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
    """Return what waits and runs, as the store or the dispatcher counts it; None if unknown."""
    if stats is not None:
        return Present(queued=stats.queue.total_queued, inflight=stats.queue.total_inflight)
    return None if view.caller.is_bound else view.api.engine.outlook.present()


def _why_no_budget(parts: Mapping[str, str]) -> str:
    """Return why budgets are not known, where they are not: most stores keep the ledger as well."""
    is_in_store = parts.get("ledger", OK) == OK and parts.get("store", OK) != OK
    return UNKNOWN if is_in_store else NO_LEDGER


def of_closures(closures: Iterable[GateClosure]) -> Iterator[Notice]:
    """Yield the targets and agents that an answer or a worker closed; slots tell of themselves."""
    for one in closures:
        if one.kind in ("agent", "target") and one.task_id:
            yield Notice(
                tone="warning",
                title=one.kind.capitalize(),
                name=one.name,
                text=f"is closed by its {one.cause}: {one.why}.",
                href=CLOSURES,
                until=one.until,
            )


def _of_webhooks(dead: tuple[int, bool] | None, *, is_store_away: bool) -> Iterable[Notice]:
    if dead is not None:
        return of_webhooks(dead[0], is_more=dead[1])
    # Of a store that is away there is a notice already, and it is about everything.
    return () if is_store_away else (WEBHOOKS_UNKNOWN,)


async def _unpriced(view: View) -> tuple[UnpricedModel, ...]:
    # Which models others use is nothing for whoever is bound to one project or agent.
    if view.caller.is_bound:
        return ()
    found = await view.api.usage.unpriced()
    # One that has a price by now needs nobody any more.
    return tuple(one for one in found if not view.api.prices.is_known(one.model))


async def _silent(view: View) -> tuple[SilentKind, ...]:
    if view.caller.is_bound:
        return ()
    return await view.api.usage.silent(view.api.engine.settings.dispatch.target_estimates)


def _own_projects(view: View) -> dict[str, ProjectSettings]:
    projects, caller = view.api.config.settings.projects, view.caller
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


def _limited(status: ScopeStatus) -> Steps[list[ScopeStatus]]:
    """List the scopes that have a limit, the fullest first."""
    found: list[ScopeStatus] = []
    waiting = [status]
    while waiting:
        one = waiting.pop()
        waiting += one.children
        if one.used_share is not None:
            found.append(one)
        yield
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
    found = None if view.caller.is_bound else view.api.engine.outlook.shares()
    return sorted(found or (), key=lambda one: (-one.target, one.project_id))


def _has_history(view: View) -> bool:
    return not view.caller.is_bound


def _is_dispatching(view: View) -> bool:
    return view.api.engine.outlook.dispatch_state is not None


async def _oldest(view: View) -> Oldest | None:
    found = view.api.engine.outlook.longest_wait(view.now, view.caller.bounds)
    if found is None:
        return None
    asked = await _or_none(why_view(view, found.task_id))
    why = asked or WhyView(problem=NO_ANSWER)
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
    except (StoreError, ApiError, TimeoutError):
        return None


ROUTES: tuple[PageRoute, ...] = (page_route("/", show), *HISTORY_ROUTES)
