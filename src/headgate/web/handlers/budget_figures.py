"""The routes that show budgets: what is used, how fast, by when it is used up, and the journal.

The burn rates of all scopes come from one look at the journal. Rule: a journal is read a page at a
time, and a bounded part of it is looked at for a rate, which says what time it covers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from headgate.bodies.figures import JournalBody, JournalEntryBody
from headgate.bodies.tasks import BudgetStatusBody
from headgate.core.budgets.accounts import JournalEntry
from headgate.core.budgets.burn_rate import BURN_SECONDS, BurnRate, burn_rates, exhausted_at
from headgate.core.budgets.scopes import Scope, ancestors
from headgate.core.money import plain_usd
from headgate.intake.bodies import check_unknown
from headgate.scope_status import ScopeStatus
from headgate.task_snapshot import exact_moment
from headgate.web.api import Api, Route
from headgate.web.callers import Caller
from headgate.web.handlers.budgets import dollars_or_none, given_or_own, own_status, tracker_of
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request, read_limit
from headgate.web.refusals import invalid_field

OK = 200
STATUS_QUERY = ("scope",)
JOURNAL_QUERY = ("scope", "limit", "cursor")
BURN_ENTRIES = 2_000
MAX_SKIPPED = 9_000

_CURSOR = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)_([0-9]{1,4})")
_NO_RATE = BurnRate()


class BudgetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A scope with all within it, how fast each spends, and how many tasks wait for each."""

    status: ScopeStatus
    rates: Mapping[Scope, BurnRate]
    waiting: Mapping[str, int]
    now: float

    def rate(self, scope: Scope) -> BurnRate:
        """Return how fast a scope spends."""
        return self.rates.get(scope, _NO_RATE)

    def exhausted_at(self, status: ScopeStatus) -> float | None:
        """Return when the first limit of a scope is reached at its rate; None if none is."""
        return exhausted_at(
            self.rate(status.scope),
            remaining_micro_usd=status.remaining_micro_usd,
            remaining_tokens=status.remaining_tokens,
            now=self.now,
            resets_at=status.resets_at,
        )


class JournalPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of the journal of a scope, newest first, and the cursor of the next."""

    scope: Scope
    entries: Sequence[JournalEntry]
    next_cursor: str | None = None


async def budget_figures(api: Api, caller: Caller, given: str = "") -> BudgetFigures:
    """Return the figures of a scope and everything within it; without one, that of the caller."""
    status = await own_status(api, caller, given)
    tracker = tracker_of(api)
    now = tracker.ledger.now()
    if given_or_own(given, caller) is None:
        return BudgetFigures(status=status, rates={}, waiting={}, now=now)
    # What was spent before the last hour tells that a budget is older than that, and no more.
    since = now - 2 * BURN_SECONDS
    entries = await tracker.journal(status.scope, since=since, limit=BURN_ENTRIES)
    return BudgetFigures(
        status=status,
        rates=burn_rates(entries, now=now, most=BURN_ENTRIES),
        waiting=_waiting(api, caller),
        now=now,
    )


async def budgets_around(api: Api, caller: Caller, scope: Scope) -> list[ScopeStatus]:
    """Return the budgets that money of a scope counts against as well, the outermost first.

    Whoever is bound sees those of its own alone.
    """
    tracker = tracker_of(api)
    return [
        await tracker.own_status(outer) for outer in ancestors(scope)[:-1] if _is_own(outer, caller)
    ]


async def journal_page(
    api: Api, caller: Caller, given: str = "", *, cursor: str = "", limit: int
) -> JournalPage:
    """Return one page of the changes of a scope; without one, of that of the caller."""
    scope = given_or_own(given, caller)
    if scope is None:
        return JournalPage(scope=Scope(caller.bounds.own_name), entries=())
    until, skipped = _position(cursor)
    # The books do not number their entries for us, so a page goes on at the time of the last one,
    # after as many of that very time as were shown.
    found = await tracker_of(api).journal(scope, until=until, limit=skipped + limit + 1)
    entries = found[skipped : skipped + limit]
    next_cursor = None
    if entries and len(found) > skipped + limit:
        last = entries[-1].at
        before = skipped if last == until else 0
        next_cursor = _cursor(last, before + sum(1 for entry in entries if entry.at == last))
    return JournalPage(scope=scope, entries=entries, next_cursor=next_cursor)


async def show_budgets(api: Api, request: Request, _: str) -> Answer:
    """Answer with a scope and everything within it."""
    query = request.query()
    check_unknown(query, STATUS_QUERY)
    figures = await budget_figures(api, request.caller, query.get("scope", ""))
    return json_answer(OK, _status(figures, figures.status))


async def show_journal(api: Api, request: Request, _: str) -> Answer:
    """Answer with one page of the changes of a scope."""
    query = request.query()
    check_unknown(query, JOURNAL_QUERY)
    page = await journal_page(
        api,
        request.caller,
        query.get("scope", ""),
        cursor=query.get("cursor", ""),
        limit=read_limit(query),
    )
    entries = [_entry(entry, request.caller) for entry in page.entries]
    body = JournalBody(
        scope=page.scope, entries=entries, count=len(entries), next_cursor=page.next_cursor
    )
    return json_answer(OK, body)


def charged(entry: JournalEntry, caller: Caller) -> list[Scope]:
    """Return the scopes that an entry weighs on, as far as they are the caller's own."""
    return [charge.scope for charge in entry.charges if _is_own(charge.scope, caller)]


def _is_own(scope: Scope, caller: Caller) -> bool:
    return not caller.is_bound or caller.bounds.may_charge(scope)


def _waiting(api: Api, caller: Caller) -> Mapping[str, int]:
    # Tasks of others may wait for the same budget, so whoever is bound is not told how many.
    if api.outlook is None or caller.is_bound:
        return {}
    return api.outlook.waiting_for_scopes() or {}


def _position(cursor: str) -> tuple[float | None, int]:
    if not cursor:
        return None, 0
    match = _CURSOR.fullmatch(cursor)
    if match is None or int(match[2]) > MAX_SKIPPED:
        raise invalid_field("cursor", "must be the nextCursor of the page before")
    return float(match[1]), int(match[2])


def _cursor(at: float, skipped: int) -> str | None:
    # More changes at one moment than are skipped do not happen; if they did, the list ends there.
    return f"{at!r}_{skipped}" if skipped <= MAX_SKIPPED else None


def _status(figures: BudgetFigures, status: ScopeStatus) -> BudgetStatusBody:
    rate, ends = figures.rate(status.scope), figures.exhausted_at(status)
    is_measured = rate.measured_seconds > 0
    return BudgetStatusBody(
        scope=status.scope,
        window=status.window,
        spent_usd=plain_usd(status.spent_micro_usd),
        reserved_usd=plain_usd(status.reserved_micro_usd),
        overrun_usd=plain_usd(status.overrun_micro_usd),
        limit_usd=dollars_or_none(status.limit_micro_usd),
        remaining_usd=dollars_or_none(status.remaining_micro_usd),
        spent_tokens=status.spent_tokens,
        reserved_tokens=status.reserved_tokens,
        overrun_tokens=status.overrun_tokens,
        limit_tokens=status.limit_tokens,
        remaining_tokens=status.remaining_tokens,
        resets_at=None if status.resets_at is None else exact_moment(status.resets_at),
        burn_usd_per_hour=plain_usd(rate.micro_usd_per_hour) if is_measured else None,
        burn_tokens_per_hour=rate.tokens_per_hour if is_measured else None,
        burn_measured_seconds=rate.measured_seconds if is_measured else None,
        exhausted_at=None if ends is None else exact_moment(ends),
        waiting=figures.waiting.get(status.scope, 0),
        is_truncated=status.is_truncated,
        children=[_status(figures, child) for child in status.children],
    )


def _entry(entry: JournalEntry, caller: Caller) -> JournalEntryBody:
    delta = entry.delta
    return JournalEntryBody(
        at=exact_moment(entry.at),
        reservation_id=entry.reservation_id,
        call=entry.call.value,
        scopes=list(charged(entry, caller)),
        spent_usd=plain_usd(delta.spent_micro_usd),
        reserved_usd=plain_usd(delta.reserved_micro_usd),
        overrun_usd=plain_usd(delta.overrun_micro_usd),
        spent_tokens=delta.spent_tokens,
        reserved_tokens=delta.reserved_tokens,
        overrun_tokens=delta.overrun_tokens,
    )


ROUTES = (
    Route(
        "GET",
        "/budgets/status",
        show_budgets,
        "show a scope and everything within it",
        "read",
        answers={200: BudgetStatusBody},
        query=STATUS_QUERY,
        refuses=("invalid_field", "unknown_field"),
    ),
    Route(
        "GET",
        "/budgets/journal",
        show_journal,
        "list the changes of a scope, newest first",
        "read",
        answers={200: JournalBody},
        query=JOURNAL_QUERY,
    ),
)
