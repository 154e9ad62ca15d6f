"""Budgets: the tree with what is spent, held and left, how fast it goes, the journal, the limits.

Below the tree are the known costs of each kind of work.

Rule: looking needs `read` and shows what is one's own; a limit is changed as the API does it,
beside the file, and only by whoever administers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec import UNSET

from headgate.api.admin import patch
from headgate.api.budget_report import BudgetReport
from headgate.api.budgets import (
    JournalPage,
    adjusted,
    budget_stats,
    budgets_around,
    charged,
    journal_page,
)
from headgate.api.http.slices import in_slices
from headgate.api.schema.admin import BudgetPatchBody, ProjectPatchBody
from headgate.api.schema.tasks import AdjustBody
from headgate.budgets.status import ScopeStatus
from headgate.budgets.tracker import new_reservation_id
from headgate.config import Settings
from headgate.config.budget_limits import budgets
from headgate.core.budgets.alerts import NEARLY_USED_UP
from headgate.core.budgets.burn_rate import BurnRate
from headgate.core.budgets.ledger import JournalEntry, Limit
from headgate.core.budgets.scopes import (
    ROOT,
    ROOT_NAME,
    Scope,
    ancestors,
    depth,
    is_within,
    parent,
    parse_scope,
    scope_words,
)
from headgate.core.budgets.windows import WindowKind, format_window, parse_window, window_words
from headgate.core.estimates import Sketch
from headgate.core.money import plain_usd, read_usd
from headgate.core.text import Steps, count, duration, exact_usd, named_like, usd
from headgate.dashboard.formats import BOOKINGS, said
from headgate.dashboard.forms import (
    BUDGET_FIELDS,
    changed_or_said,
    changes_nothing,
    dollars_of,
    integer_of,
    only_changed,
    rebased,
)
from headgate.dashboard.lists import BUDGETS, looked_for, part_of, scope_href
from headgate.dashboard.page import Done, Form, Page, PageRoute, View, action_route, page_route
from headgate.errors import CallerError, InvalidScopeError, StoreError
from headgate.storage.tokens import NO_OWN_BUDGET
from headgate.storage.usage import KnownKind

# A budget as it is drawn: its bars with the words beside them, its rate, and when it is used up.
#
# Rule: the overview and the page of budgets draw from here, so that a budget looks and reads the
# same on both. The parts of a bar are spent, reserved, overrun, in this order; red is overrun
# alone, and a budget that is used up without one has a tone of its own beside its word.

Part = tuple[str, int, str]
"""The name of a part of a bar, its amount, and its tone."""


class BudgetBar(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of a budget; without a limit there is nothing that a bar could be a part of."""

    parts: tuple[Part, ...]
    limit: int | None
    words: str


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """When a budget is used up: in words, and at which time if that is known; faint is no news."""

    words: str
    at: float | None = None
    is_faint: bool = False


def state_of(status: ScopeStatus) -> str:
    """Return the sign under which a budget is shown; empty where it has no limit."""
    used = status.used_share
    if used is None:
        return ""
    if used >= 1:
        return "exhausted"
    return "warning" if used >= NEARLY_USED_UP else "ok"


def bars_of(status: ScopeStatus, *, is_exact: bool = False) -> list[BudgetBar]:
    """Return a bar for dollars and one for tokens, as far as they are limited or used."""
    bars = []
    money = (status.spent_micro_usd, status.reserved_micro_usd, status.overrun_micro_usd)
    if status.limit_micro_usd is not None or status.limit_tokens is None or any(money):
        bars.append(_bar(money, status.limit_micro_usd, exact_usd if is_exact else usd))
    if status.limit_tokens is not None:
        tokens = (status.spent_tokens, status.reserved_tokens, status.overrun_tokens)
        bars.append(_bar(tokens, status.limit_tokens, count, unit=" tokens"))
    return bars


def _bar(
    amounts: tuple[int, int, int], limit: int | None, text: Callable[[int], str], unit: str = ""
) -> BudgetBar:
    spent, reserved, overrun = amounts
    is_full = limit is not None and sum(amounts) >= limit
    words = f"{text(spent)} spent, {text(reserved)} reserved"
    words += f", {text(overrun)} overrun" if overrun else ""
    words += ", no limit" if limit is None else f" of {text(limit)}{unit}"
    parts = (
        ("spent", spent, "full" if is_full else "spent"),
        ("reserved", reserved, "reserved"),
        ("overrun", overrun, "overrun"),
    )
    return BudgetBar(parts=parts, limit=limit, words=words)


def claimed_words(status: ScopeStatus) -> str:
    """Return what tenants claim in a scope and nobody has accepted; empty where it is nothing."""
    money, tokens = status.unaccepted_micro_usd, status.unaccepted_tokens
    parts = (exact_usd(money) if money else "", f"{count(tokens)} tokens" if tokens else "")
    return " and ".join(part for part in parts if part)


def ending(status: ScopeStatus, rate: BurnRate, ends_at: float | None) -> Ending:
    """Return when one of the limits of a scope is reached at its rate."""
    used = status.used_share
    if used is None:
        return Ending(words="no limit", is_faint=True)
    if used >= 1:
        return Ending(words="now")
    if ends_at is not None:
        return Ending(words="", at=ends_at)
    if rate.measured_seconds and not rate.is_steady:
        return Ending(words="unknown: spending is uneven", is_faint=True)
    if not rate.measured_seconds or status.resets_at is None:
        return Ending(words="not at this rate", is_faint=True)
    is_rolling = parse_window(status.window).kind is WindowKind.ROLLING
    return Ending(words="not before it has more room" if is_rolling else "not before it resets")


def rate_words(rate: BurnRate) -> str:
    """Return how fast a scope spends; empty where it spent nothing lately."""
    if not rate.measured_seconds:
        return ""
    tokens = f", {count(rate.tokens_per_hour)} tokens" if rate.tokens_per_hour else ""
    over = duration(rate.measured_seconds)
    return f"{usd(rate.micro_usd_per_hour)}{tokens} an hour, over {over}"


# The tree of budgets as rows: each scope with its bar, its rate, and the budgets around it.
#
# Rule: a row says for itself what binds it, also where that is a budget further up.

TASKS = "/ui/tasks"


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a budget has left of the units in which it is the first to refuse."""

    scope: Scope
    micro_usd: int | None
    tokens: int | None


class ScopeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One scope: `used` is the share of its tighter limit, None without a limit.

    `around` are the budgets further up that limit it too, the outermost first. `ends_at` is when
    one of its own limits is reached at its rate.
    """

    status: ScopeStatus
    rate: BurnRate
    ends_at: float | None
    waiting: int
    around: Sequence[ScopeStatus]
    level: int

    @property
    def used(self) -> float | None:
        """How much of the tighter limit is used, of 1."""
        return self.status.used_share

    @property
    def state(self) -> str:
        """The sign under which the scope is shown."""
        return state_of(self.status)

    @property
    def bars(self) -> list[BudgetBar]:
        """What is drawn of it, one bar a unit."""
        return bars_of(self.status)

    @property
    def claimed(self) -> str:
        """What tenants claim and nobody has accepted; empty where it is nothing."""
        return claimed_words(self.status)

    @property
    def window(self) -> str:
        """What counts against its limits, in words."""
        return window_words(self.status.window)

    @property
    def rate_words(self) -> str:
        """How fast it spends; empty where it spent nothing lately."""
        return rate_words(self.rate)

    @property
    def ending(self) -> Ending:
        """When one of its own limits is reached."""
        return ending(self.status, self.rate, self.ends_at)

    @property
    def first_to_refuse(self) -> list[Room]:
        """The budgets further up that have less left than its own; one, or one a unit.

        Not the fullest: what refuses the next task is the least room, however large the limit is.
        """
        usd = self._tightest(lambda one: one.remaining_micro_usd)
        tokens = self._tightest(lambda one: one.remaining_tokens)
        return [
            Room(
                scope=one.scope,
                micro_usd=one.remaining_micro_usd if one is usd else None,
                tokens=one.remaining_tokens if one is tokens else None,
            )
            for one in reversed(self.around)
            if one is usd or one is tokens
        ]

    def _tightest(self, left: Callable[[ScopeStatus], int | None]) -> ScopeStatus | None:
        """Return the budget further up that has the least left of a unit, if its own has more."""
        own = left(self.status)
        rooms = [(room, one) for one in reversed(self.around) if (room := left(one)) is not None]
        least, one = min(rooms, key=lambda pair: pair[0], default=(0, None))
        return None if own is not None and own <= least else one

    @property
    def tasks_href(self) -> str:
        """The address of the tasks that may wait for it."""
        return tasks_href(self.status.scope)


def rows_of(
    report: BudgetReport, around: Sequence[ScopeStatus] = ()
) -> Steps[tuple[list[ScopeRow], list[ScopeRow]]]:
    """Return a scope and all within it, each before what lies within it, and those without room.

    Of those without room the ones that tasks wait for are first.
    """
    top, rows = report.status, list[ScopeRow]()
    found: list[ScopeRow] = []
    for row in _rows(report, top, tuple(around), base=depth(top.scope)):
        rows.append(row)
        if row.state == "exhausted":
            found.append(row)
        yield
    return rows, sorted(found, key=lambda row: (-row.waiting, row.status.scope))


def tasks_href(scope: str) -> str:
    """Return the address of the tasks that wait and may be charged to a scope."""
    charged = {"scope": scope} if scope else {}
    return f"{TASKS}?{urlencode({'state': 'queued', **charged})}"


def innermost(scopes: Sequence[Scope]) -> list[Scope]:
    """Return the scopes that no other one of them lies within."""
    outer = {one for scope in scopes for one in ancestors(scope)[:-1]}
    return [scope for scope in scopes if scope not in outer]


def name_within(scope: Scope, outer: Scope) -> str:
    """Return the path of a scope below another one."""
    if not outer or scope == outer or not is_within(scope, outer):
        return scope_words(scope)
    return scope.removeprefix(f"{outer}/")


def _rows(
    report: BudgetReport, status: ScopeStatus, around: tuple[ScopeStatus, ...], *, base: int
) -> Iterator[ScopeRow]:
    yield ScopeRow(
        status=status,
        rate=report.rate(status.scope),
        ends_at=report.exhausted_at(status),
        waiting=report.waiting.get(status.scope, 0),
        around=around,
        level=depth(status.scope) - base,
    )
    inner = around if status.used_share is None else (*around, status)
    for child in status.children:
        yield from _rows(report, child, inner, base=base)


# What is known of the cost of each kind of work, from which tasks without an estimate hold money.

MAX_KINDS_SHOWN = 50


class KindRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work; `units` has its dollars and its tokens."""

    project_id: str
    target: str
    action: str
    fed_at: float
    units: tuple[LearnedCell, ...]


class LearnedCell(msgspec.Struct, frozen=True, kw_only=True):
    """What is known in one unit: what most of it does not exceed, and the most it has cost."""

    name: str
    is_usd: bool
    samples: int
    usual: int
    largest: int
    is_silent: bool


def kind_rows(known: Sequence[KnownKind], quantile: float) -> list[KindRow]:
    """Return what is known of kinds of work as rows of a table."""
    return [
        KindRow(
            project_id=one.kind.project_id,
            target=one.kind.name,
            action=one.kind.action,
            fed_at=one.fed_at,
            units=(
                _cell("Dollars", one.learned.micro_usd, quantile, is_usd=True),
                _cell("Tokens", one.learned.tokens, quantile, is_usd=False),
            ),
        )
        for one in known
    ]


def _cell(name: str, sketch: Sketch, quantile: float, *, is_usd: bool) -> LearnedCell:
    return LearnedCell(
        name=name,
        is_usd=is_usd,
        samples=sketch.count,
        usual=sketch.quantile(quantile),
        largest=sketch.largest,
        is_silent=sketch.is_silent,
    )


async def _kinds(view: View) -> dict[str, Any]:
    """Return what the section on the cost of work shows; nothing while the store is away."""
    if view.caller.agent_id is not None:
        return {"kinds": []}
    try:
        known = await view.api.usage.kinds(view.caller.project_id, most=MAX_KINDS_SHOWN + 1)
    except StoreError:
        return {"kinds": []}
    quantile = view.api.config.settings.scheduler.estimate_quantile
    return {
        "kinds": kind_rows(known[:MAX_KINDS_SHOWN], quantile),
        "has_more_kinds": len(known) > MAX_KINDS_SHOWN,
        "quantile_percent": f"{100 * quantile:g}",
    }


JOURNAL_ROWS = 50
MAX_EXHAUSTED = 10
MAX_TYPED = 200
NEW = "new"
"""Where the address has a scope that was typed and is none; `scope` would be looked for."""
WINDOWS = ("none", "day", "week", "month", "rolling:5h", "rolling:24h", "rolling:168h")

_IN_TOKENS = "the limit of the project is in tokens; remove that limit, then set one in dollars"
_TASK_RESERVATION = re.compile(r"([A-Za-z0-9_-]{1,64}):([0-9]{1,9}):[0-9]{1,18}")


class JournalLine(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the ledger; the reservation of a task is told by the task and its attempt."""

    at: float
    call: str
    words: str
    reservation: str
    task_id: str
    attempt: str
    scopes: list[Scope]
    changes: tuple[tuple[str, int, int], ...]
    """What was added under each name: micro-dollars and tokens."""


async def show(view: View, _: str) -> Page:
    """Show a scope and all within it; one that the address names, with its journal and limit."""
    query = view.request.query()
    given, is_one = query.get("scope", ""), "scope" in query
    if not given and view.caller.bounds.own_scope is None:
        return Page(template="no_budget.html", title="Budgets", context={"why": NO_OWN_BUDGET})
    report = await budget_stats(view.api, view.caller, given)
    around = await budgets_around(view.api, view.caller, report.status.scope)
    rows, exhausted = await in_slices(rows_of(report, [one for one in around if _has_limit(one)]))
    find = looked_for(view)
    listed = rows[1:] if is_one else rows
    found = named_like(listed, find, lambda row: (scope_words(row.status.scope),))
    context = {
        "find": find,
        "scope": report.status.scope,
        "own": rows[0],
        "own_bars": bars_of(rows[0].status, is_exact=True),
        "bars_of": bars_of,
        "is_one": is_one,
        "up": _up(view, report.status.scope),
        "rows": part_of(view, found, "from"),
        "exhausted": exhausted[:MAX_EXHAUSTED],
        "more_exhausted": max(0, len(exhausted) - MAX_EXHAUSTED),
        "has_limits": any(row.used is not None for row in rows),
        "overridden": _overridden(view),
        "limit": _limit_form(view, report.status),
        "claimed": claimed_words(report.status) if is_one else "",
        "claim_id": new_reservation_id(),
        "windows": WINDOWS,
        "labels": BUDGET_FIELDS,
        "typed": _typed(query),
        "journal": await _journal(view, report.status.scope) if is_one else None,
        **({"kinds": []} if is_one or find else await _kinds(view)),
        **_names(),
    }
    title = f"Budget of {scope_words(report.status.scope)}" if is_one else "Budgets"
    return Page(template="budgets.html", title=title, context=context)


async def set_limit(view: View, _: str, form: Form) -> Done:
    """Set what a scope may use; an amount that is left empty is no limit in that unit."""

    async def change() -> str:
        scope, config = _scope(form), view.api.config
        name, before = scope_words(scope), _limit_of(config.settings, scope)
        key, wanted = limit_key(config.settings, scope), _wanted(form, before)
        if key == "project" and wanted.limit_usd:
            raise CallerError(_IN_TOKENS)
        if changes_nothing(wanted):
            return f"the budget of {name} did not change: the form had the present values"
        if key == "project":
            project = ProjectPatchBody(budget_limit=wanted.limit_tokens)
            await patch(view.api, view.request, "projects", _project_of(scope), project)
        else:
            await patch(view.api, view.request, "budgets", scope or ROOT_NAME, wanted)
        amounts = _amounts(_limit_of(config.settings, scope))
        return f"the budget of {name} is set to {amounts}; tasks that waited for it are asked again"

    return await changed_or_said(_back(form), change, BUDGET_FIELDS)


async def decide(view: View, _: str, form: Form) -> Done:
    """Accept or reject all that tenants claim in a scope."""

    async def change() -> str:
        scope, action = _scope(form), form.get("action")
        if action not in ("accept", "reject"):
            raise CallerError("choose to accept or to reject it")
        body = AdjustBody(
            id=form.get("id"),
            scope=scope,
            action="accept" if action == "accept" else "reject",
            reason=form.get("reason"),
        )
        await adjusted(view.api, view.request, body)
        return f"what was claimed of {scope_words(scope)} is {action}ed"

    return await changed_or_said(_back(form), change, BUDGET_FIELDS)


async def remove_limit(view: View, _: str, form: Form) -> Done:
    """Take the limits of a scope away; what was booked stays booked."""

    async def change() -> str:
        scope = _scope(form)
        if limit_key(view.api.config.settings, scope) == "project":
            project = ProjectPatchBody(budget_limit=None)
            await patch(view.api, view.request, "projects", _project_of(scope), project)
        else:
            body = BudgetPatchBody(limit_usd=None, limit_tokens=None, window=None)
            await patch(view.api, view.request, "budgets", scope or ROOT_NAME, body)
        return f"{scope_words(scope)} has no limit of its own any more"

    return await changed_or_said(_back(form), change, BUDGET_FIELDS)


async def reset_limit(view: View, _: str, form: Form) -> Done:
    """Let the file say the limits of a scope again."""

    async def change() -> str:
        scope = _scope(form)
        body = BudgetPatchBody(reset=_overridden(view).get(scope, []))
        await patch(view.api, view.request, "budgets", scope or ROOT_NAME, body)
        return f"the budget of {scope_words(scope)} has the values of the file again"

    return await changed_or_said(_back(form), change, BUDGET_FIELDS)


def limit_key(settings: Settings, scope: Scope) -> str:
    """Return where the settings have the limit of a scope: `project`, `global` or `budgets`."""
    is_written = (scope or ROOT_NAME) in settings.budgets
    project = settings.projects.get(_project_of(scope))
    if project is not None and project.budget_limit is not None and not is_written:
        return "project"
    if scope == ROOT and settings.scheduler.global_budget and not is_written:
        return "global"
    return "budgets"


def _names() -> dict[str, Any]:
    return {"href": scope_href, "name_of": scope_words, "name_within": name_within}


def _limit_form(view: View, status: ScopeStatus) -> dict[str, Any] | None:
    """Return what a form for the limit begins with; None where it cannot be changed."""
    if not view.can("admin"):
        return None
    return {
        "key": limit_key(view.api.config.settings, status.scope),
        "held": _limit_fields(status.limit_micro_usd, status.limit_tokens, status.window),
    }


def _limit_fields(micro_usd: int | None, tokens: int | None, window: str) -> dict[str, str]:
    """Return what a form for a limit is drawn with."""
    return {
        "limit_usd": "" if micro_usd is None else plain_usd(micro_usd),
        "limit_tokens": "" if tokens is None else str(tokens),
        "window": window,
    }


def _limit_of(settings: Settings, scope: Scope) -> Limit:
    """Return the limit that the settings give a scope; the ledger may hear of it later."""
    return budgets(settings).get(scope, Limit())


def _wanted(form: Form, before: Limit) -> BudgetPatchBody:
    """Return what a form asks for that is not so already."""
    window = format_window(before.window)
    asked = rebased(form, _limit_fields(before.limit_micro_usd, before.limit_tokens, window))
    usd, tokens = dollars_of(asked, "limit_usd"), integer_of(asked, "limit_tokens")
    if not isinstance(usd, str) and not isinstance(tokens, int):
        raise CallerError("give dollars, tokens or both")
    limit_usd = plain_usd(read_usd(usd)) if isinstance(usd, str) else usd
    known = BudgetPatchBody(
        limit_usd=None if before.limit_micro_usd is None else plain_usd(before.limit_micro_usd),
        limit_tokens=before.limit_tokens,
        window=window,
    )
    given = BudgetPatchBody(
        limit_usd=limit_usd,
        limit_tokens=tokens,
        window=(asked.get("window") or "none") if asked.has("window") else UNSET,
    )
    return only_changed(given, known)


def _overridden(view: View) -> dict[str, list[str]]:
    """Return which fields of which scope are not as the file says, for whoever administers."""
    if not view.may("admin"):
        return {}
    state = view.api.config.state
    names = {one.name for one in state.overrides if one.kind == "budgets"}
    found = {name: state.overridden_fields("budgets", name) for name in names}
    return {("" if name == ROOT_NAME else name): fields for name, fields in found.items() if fields}


async def _journal(view: View, scope: Scope) -> dict[str, Any]:
    query = view.request.query()
    cursor = query.get("cursor", "")
    page: JournalPage = await journal_page(
        view.api, view.caller, scope, cursor=cursor, limit=JOURNAL_ROWS
    )
    entries = [_line(entry, innermost(charged(entry, view.caller))) for entry in page.entries]
    following = page.next_cursor
    return {
        "entries": entries,
        "first_url": scope_href(scope) if cursor else None,
        "next_url": f"{BUDGETS}?{urlencode({'scope': scope, 'cursor': following})}"
        if following
        else None,
    }


def _line(entry: JournalEntry, scopes: list[Scope]) -> JournalLine:
    found = _TASK_RESERVATION.fullmatch(entry.reservation_id)
    task_id, attempt = ("", "") if found is None else found.groups()
    delta = entry.delta
    return JournalLine(
        at=entry.at,
        call=entry.call.value,
        words=said(BOOKINGS, entry.call.value),
        reservation=entry.reservation_id,
        task_id=task_id,
        attempt=attempt,
        scopes=scopes,
        changes=(
            ("Spent", delta.spent_micro_usd, delta.spent_tokens),
            ("Reserved", delta.reserved_micro_usd, delta.reserved_tokens),
            ("Overrun", delta.overrun_micro_usd, delta.overrun_tokens),
            ("Unaccepted", delta.unaccepted_micro_usd, delta.unaccepted_tokens),
        ),
    )


def _up(view: View, scope: Scope) -> Scope | None:
    """Return the scope one level up, if it may be looked at."""
    above = parent(scope)
    if above is None or (view.caller.is_bound and not view.caller.bounds.may_charge(above)):
        return None
    return above


def _has_limit(status: ScopeStatus) -> bool:
    return status.limit_micro_usd is not None or status.limit_tokens is not None


def _amounts(limit: Limit) -> str:
    money = "" if limit.limit_micro_usd is None else exact_usd(limit.limit_micro_usd)
    count = "" if limit.limit_tokens is None else f"{limit.limit_tokens:,} tokens"
    amounts = " and ".join(one for one in (money, count) if one)
    return f"{amounts}, {window_words(format_window(limit.window))}"


def _scope(form: Form) -> Scope:
    text = form.get("scope")
    if not text:
        raise InvalidScopeError("scope", "is missing; root is everything together")
    return ROOT if text == ROOT_NAME else parse_scope(text)


def _project_of(scope: str) -> str:
    kind, _, name = scope.partition(":")
    return name if kind == "project" and "/" not in name else ""


def _back(form: Form) -> str:
    """Return the page that a form came from, or that of its scope; without one, what was typed."""
    to = form.get("back")
    if to == BUDGETS or to.startswith(f"{BUDGETS}?"):
        return to
    try:
        return scope_href(_scope(form))
    except InvalidScopeError:
        typed = {name: form.get(name)[:MAX_TYPED] for name in BUDGET_FIELDS}
        return f"{BUDGETS}?{urlencode({NEW: typed.pop('scope'), **typed})}"


def _typed(query: Mapping[str, str]) -> dict[str, str] | None:
    """Return what the form of a new budget is filled with again; None if nothing was sent."""
    if NEW not in query:
        return None
    amounts = {name: query.get(name, "")[:MAX_TYPED] for name in BUDGET_FIELDS}
    return {**amounts, "scope": query[NEW][:MAX_TYPED]}


ROUTES: tuple[PageRoute, ...] = (
    page_route(BUDGETS, show),
    action_route(f"{BUDGETS}/limit", set_limit),
    action_route(f"{BUDGETS}/decide", decide),
    action_route(f"{BUDGETS}/remove", remove_limit),
    action_route(f"{BUDGETS}/reset", reset_limit),
)
