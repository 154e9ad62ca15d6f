"""A budget in words: what was spent of what, how fast, and until when it lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from headgate.core.budgets.accounts import JournalEntry
from headgate.core.budgets.burn_rate import BurnRate, exhausted_at
from headgate.core.budgets.reservations import Delta
from headgate.core.budgets.scopes import Scope, is_within, leaf_kind
from headgate.core.budgets.windows import window_words
from headgate.core.money import format_usd
from headgate.ledger import MAX_ACCOUNTS
from headgate.moments import utc_time
from headgate.scope_status import ScopeStatus

ROWS_SHOWN = 50
NOT_KNOWN = "not known, there is no steady spending to go by"
JOURNAL_HEADER = ("at", "call", "reservation", "scope", "spent", "reserved", "overrun", "tokens")


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """A budget around a scope, and how fast everything in it spends."""

    status: ScopeStatus
    rate: BurnRate


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """A scope with everything within it, the budgets around it, and how fast it spends."""

    status: ScopeStatus
    parents: tuple[Parent, ...]
    rate: BurnRate
    now: float

    @property
    def exhausted_at(self) -> float | None:
        """When the first of the budgets that bind the scope is used up, None if none is."""
        return min((when for when, _ in self._ends()), default=None)

    @property
    def exhausted_first(self) -> Scope | None:
        """The scope whose budget is used up first, the innermost of several."""
        return min(self._ends(), key=lambda end: end[0], default=(0.0, None))[1]

    def _ends(self) -> Iterator[tuple[float, Scope]]:
        own = Parent(status=self.status, rate=self.rate)
        for one in (own, *reversed(self.parents)):
            when = _end(one.status, one.rate, self.now)
            if when is not None:
                yield when, one.status.scope

    def as_keys(self) -> dict[str, object]:
        """Give the keys of the status, and after them those of the rate."""
        return {
            **msgspec.structs.asdict(self.status),
            "burn_micro_usd_per_hour": self.rate.micro_usd_per_hour,
            "burn_tokens_per_hour": self.rate.tokens_per_hour,
            "burn_measured_seconds": self.rate.measured_seconds,
            "exhausted_at": self.exhausted_at,
        }


def report_lines(report: BudgetReport) -> Iterator[str]:
    """Write a report for people."""
    status = report.status
    yield f"Spent: {_spent(status)}"
    yield f"Reserved: {format_usd(status.reserved_micro_usd)}"
    if status.overrun_micro_usd:
        overrun = format_usd(status.overrun_micro_usd)
        yield f"Overrun: {overrun} of what was spent was never reserved"
    if _used_tokens(status) or status.reserved_tokens or status.limit_tokens is not None:
        yield f"Tokens: {_tokens(status)}, {status.reserved_tokens:,} reserved"
    if report.rate.measured_seconds:
        yield f"Burn rate: {_rate(report.rate)}"
    if report.rate.measured_seconds or report.exhausted_at is not None:
        yield f"Exhausted: {_exhausted(report)}"
    if status.window != "none":
        resets = (
            "" if status.resets_at is None else f", next frees room at {utc_time(status.resets_at)}"
        )
        yield f"Counted: {window_words(status.window)}{resets}"
    yield from _breakdown(status)
    if status.is_truncated:
        most = f"{MAX_ACCOUNTS:,} scopes"
        yield f"Only {most} were read; ask for the status of one within to see more"
    if report.parents:
        yield "Budgets around it:"
        yield from (f"  {one.scope or '(root)'}: {_used(one)}" for one in _statuses(report))


def has_limit(status: ScopeStatus) -> bool:
    """Whether anything limits the scope itself."""
    return status.limit_micro_usd is not None or status.limit_tokens is not None


def journal_row(entry: JournalEntry) -> tuple[str, ...]:
    """Give the cells of one change; the same amounts weigh on every ancestor."""
    delta = entry.delta
    return (
        utc_time(entry.at),
        entry.call.value,
        entry.reservation_id,
        ", ".join(_innermost([charge.scope for charge in entry.charges])),
        _change(delta.spent_micro_usd),
        _change(delta.reserved_micro_usd),
        _change(delta.overrun_micro_usd),
        _token_change(delta),
    )


def _spent(status: ScopeStatus) -> str:
    spent = status.spent_micro_usd + status.overrun_micro_usd
    limit = status.limit_micro_usd
    if limit is None:
        return format_usd(spent)
    return f"{format_usd(spent)} / {format_usd(limit)}{_percent(spent, limit)}"


def _used(status: ScopeStatus) -> str:
    """Name the dollars, and the tokens where they are limited."""
    tokens = "" if status.limit_tokens is None else f", {_tokens(status)} tokens"
    return f"{_spent(status)}{tokens}"


def _tokens(status: ScopeStatus) -> str:
    used, limit = _used_tokens(status), status.limit_tokens
    of_limit = "" if limit is None else f" / {limit:,}{_percent(used, limit)}"
    return f"{used:,}{of_limit}"


def _used_tokens(status: ScopeStatus) -> int:
    return status.spent_tokens + status.overrun_tokens


def _percent(part: int, whole: int) -> str:
    return f" ({part / whole:.1%})" if whole else ""


def _rate(rate: BurnRate) -> str:
    minutes = max(1, round(rate.measured_seconds / 60))
    tokens = f", {rate.tokens_per_hour:,} tokens" if rate.tokens_per_hour else ""
    return f"{format_usd(rate.micro_usd_per_hour)}{tokens} an hour, over the last {minutes} min"


def _exhausted(report: BudgetReport) -> str:
    when = report.exhausted_at
    binding = [one for one in (report.status, *_statuses(report)) if has_limit(one)]
    if not binding:
        return "never, there is no limit"
    if when is None:
        if not _has_pace(report):
            return NOT_KNOWN
        frees_room = any(one.resets_at is not None for one in binding)
        return "not before room is freed" if frees_room else "not at that rate"
    first = report.exhausted_first
    of = "" if first == report.status.scope else f", of {first or '(root)'}"
    if when <= report.now:
        return f"now{of}"
    return f"at {utc_time(when)} at that rate, in {_span(when - report.now)}{of}"


def _has_pace(report: BudgetReport) -> bool:
    """Whether any of the budgets that bind the scope has a rate that an end can be told by."""
    own = Parent(status=report.status, rate=report.rate)
    return any(one.rate.is_steady for one in (own, *report.parents) if has_limit(one.status))


def _statuses(report: BudgetReport) -> list[ScopeStatus]:
    return [one.status for one in report.parents]


def _end(status: ScopeStatus, rate: BurnRate, now: float) -> float | None:
    return exhausted_at(
        rate,
        remaining_micro_usd=status.remaining_micro_usd,
        remaining_tokens=status.remaining_tokens,
        now=now,
        resets_at=status.resets_at,
    )


def _breakdown(status: ScopeStatus) -> Iterator[str]:
    by_kind: dict[str, list[ScopeStatus]] = {}
    for child in status.children:
        by_kind.setdefault(leaf_kind(child.scope), []).append(child)
    for kind, children in by_kind.items():
        yield f"Per-{kind} breakdown:"
        children.sort(key=lambda one: (-one.spent_micro_usd - one.overrun_micro_usd, one.scope))
        for child in children[:ROWS_SHOWN]:
            yield f"  {_name_within(child.scope, status.scope)}: {_used(child)}"
        if len(children) > ROWS_SHOWN:
            yield f"  and {len(children) - ROWS_SHOWN} more; --json lists them all"


def _name_within(scope: Scope, outer: Scope) -> str:
    """Give the bare name of a child, the path of what lies deeper."""
    path = scope.removeprefix(outer).removeprefix("/")
    return path if "/" in path else path.partition(":")[2]


def _innermost(scopes: Sequence[Scope]) -> list[str]:
    """Leave out the scopes that another one of them lies within."""
    inner = [
        scope
        for scope in scopes
        if not any(other != scope and is_within(other, scope) for other in scopes)
    ]
    return [scope or "(root)" for scope in inner]


def _change(micro_usd: int) -> str:
    if not micro_usd:
        return ""
    return f"{'+' if micro_usd > 0 else ''}{format_usd(micro_usd)}"


def _token_change(delta: Delta) -> str:
    parts = {
        "spent": delta.spent_tokens,
        "reserved": delta.reserved_tokens,
        "overrun": delta.overrun_tokens,
    }
    return ", ".join(f"{amount:+,} {name}" for name, amount in parts.items() if amount)


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"  # noqa: PLR2004
