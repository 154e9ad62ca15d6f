"""Budgets as clients see them: what is used, how fast, by when it is used up, and the journal.

Told from what a ledger says, so that a service and a command that opens a ledger itself say the
same of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from headgate.api.schema.admin import JournalEntryBody
from headgate.api.schema.tasks import BudgetStatusBody
from headgate.budgets.status import ScopeStatus
from headgate.core.budgets.burn_rate import BurnRate, exhausted_at
from headgate.core.budgets.ledger import JournalEntry
from headgate.core.budgets.scopes import Scope
from headgate.core.gates import GateClosure
from headgate.core.money import plain_usd
from headgate.core.task_view import closure_body, exact_moment
from headgate.core.text import Steps

_NO_RATE = BurnRate()


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """A scope with all within it, how fast each spends, and how many tasks wait for each."""

    status: ScopeStatus
    rates: Mapping[Scope, BurnRate]
    waiting: Mapping[str, int]
    now: float
    closed: Mapping[str, Sequence[GateClosure]] = {}
    is_whole: bool = True

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


def dollars_or_none(micro_usd: int | None) -> str | None:
    """Return an amount in dollars; None is none."""
    return None if micro_usd is None else plain_usd(micro_usd)


def status_steps(report: BudgetReport, status: ScopeStatus) -> Steps[BudgetStatusBody]:
    """Return a scope and everything within it as clients see it, in slices."""
    yield
    children: list[BudgetStatusBody] = []
    for child in status.children:
        shown = yield from status_steps(report, child)
        children.append(shown)
    rate, ends = report.rate(status.scope), report.exhausted_at(status)
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
        unaccepted_usd=dollars_or_none(status.unaccepted_micro_usd or None),
        unaccepted_tokens=status.unaccepted_tokens,
        resets_at=None if status.resets_at is None else exact_moment(status.resets_at),
        counted_since=(
            None if status.counted_since is None else exact_moment(status.counted_since)
        ),
        burn_usd_per_hour=plain_usd(rate.micro_usd_per_hour) if is_measured else None,
        burn_tokens_per_hour=rate.tokens_per_hour if is_measured else None,
        burn_measured_seconds=rate.measured_seconds if is_measured else None,
        burn_is_steady=rate.is_steady,
        exhausted_at=None if ends is None else _reached(ends),
        waiting=report.waiting.get(status.scope, 0),
        closures=[
            closure_body(one, is_whole=report.is_whole)
            for one in report.closed.get(status.scope, ())
        ],
        is_truncated=status.is_truncated,
        children=children,
    )


def _reached(seconds: float) -> datetime | None:
    """Return a time; None where no calendar reaches it."""
    try:
        return exact_moment(seconds)
    except (OverflowError, OSError, ValueError):
        return None


def journal_body(entry: JournalEntry, scopes: Sequence[Scope]) -> JournalEntryBody:
    """Return a change as clients see it, with the scopes that they may see."""
    delta = entry.delta
    return JournalEntryBody(
        at=exact_moment(entry.at),
        reservation_id=entry.reservation_id,
        call=entry.call.value,
        scopes=list(scopes),
        spent_usd=plain_usd(delta.spent_micro_usd),
        reserved_usd=plain_usd(delta.reserved_micro_usd),
        overrun_usd=plain_usd(delta.overrun_micro_usd),
        spent_tokens=delta.spent_tokens,
        reserved_tokens=delta.reserved_tokens,
        overrun_tokens=delta.overrun_tokens,
        unaccepted_usd=plain_usd(delta.unaccepted_micro_usd),
        unaccepted_tokens=delta.unaccepted_tokens,
    )
