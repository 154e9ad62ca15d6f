"""How fast a scope spends, and when its budget will be used up if that goes on.

Read from the journal. Rule: only what was spent counts, overrun included; what is merely reserved
may yet be given back. An end is forecast only by spending that goes on: something was spent in
every third of the time that is measured, and within the last ten minutes. A burst would otherwise
raise an alarm about money that nobody spends any more, and a first task one about a pace that
nobody knows yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.core.budgets.ledger import JournalEntry
from headgate.core.budgets.scopes import Scope
from headgate.core.text import Steps, at_once

BURN_SECONDS = 3_600.0
RECENT_SECONDS = 600.0
LEAST_STEADY_SECONDS = 120.0
LEAST_CUT_SECONDS = 1.0
PARTS = 3
LEAST_SHARE_OF_PART = 0.1
_SECONDS_PER_HOUR = 3_600


class BurnRate(msgspec.Struct, frozen=True, kw_only=True):
    """What was spent in `measured_seconds`, scaled to an hour; `is_steady` if that goes on."""

    micro_usd_per_hour: int = 0
    tokens_per_hour: int = 0
    measured_seconds: int = 0
    is_steady: bool = False


class _Span(msgspec.Struct, frozen=True):
    """The entries of a time that ends now, newest first; of a `is_cut` one there were more."""

    entries: Sequence[JournalEntry]
    seconds: float
    is_cut: bool


def burn_rate(
    entries: Sequence[JournalEntry], *, now: float, cut_at: float | None = None
) -> BurnRate:
    """Measure the entries of one scope, newest first.

    The last ten minutes are measured if something was spent all through them, else the hour. If no
    entry is older, the time since the oldest is: a budget that began ten minutes ago must not look
    six times slower than it is. What is not steady is spread over ten minutes at least. `cut_at` is
    the time up to which entries were read where there are more: then that time is measured.
    """
    hour = _span(entries, BURN_SECONDS, now=now, cut_at=cut_at)
    for span in (_span(entries, RECENT_SECONDS, now=now, cut_at=cut_at), hour):
        if _is_steady(span, now):
            return _rate(span.entries, span.seconds, is_steady=True)
    if not hour.entries:
        return BurnRate()
    seconds = hour.seconds if hour.is_cut else max(RECENT_SECONDS, hour.seconds)
    return _rate(hour.entries, seconds, is_steady=False)


def last_read_at(entries: Sequence[JournalEntry], most: int) -> float | None:
    """Return up to which time entries were read, newest first, if there may be more than `most`."""
    return entries[-1].at if entries and len(entries) >= most else None


def burn_rates(entries: Sequence[JournalEntry], *, now: float, most: int) -> dict[Scope, BurnRate]:
    """Measure every scope that the entries of an outer one charge, newest first.

    As many as `most` are taken to be a part of them.
    """
    return at_once(burn_rate_steps(entries, now=now, most=most))


def burn_rate_steps(
    entries: Sequence[JournalEntry], *, now: float, most: int
) -> Steps[dict[Scope, BurnRate]]:
    """Measure every scope, in slices."""
    by_scope: dict[Scope, list[JournalEntry]] = {}
    for entry in entries:
        for charge in entry.charges:
            by_scope.setdefault(charge.scope, []).append(entry)
        yield
    cut_at = last_read_at(entries, most)
    rates: dict[Scope, BurnRate] = {}
    for scope, own in by_scope.items():
        rates[scope] = burn_rate(own, now=now, cut_at=cut_at)
        yield
    return rates


def exhausted_at(
    rate: BurnRate,
    *,
    remaining_micro_usd: int | None,
    remaining_tokens: int | None,
    now: float,
    resets_at: float | None = None,
) -> float | None:
    """Tell when the first limit is reached; None if none is before room is freed, or nobody knows.

    Nobody knows where the rate is not steady; a limit that is reached already is so at any rate.
    """
    usd, tokens = (rate.micro_usd_per_hour, rate.tokens_per_hour) if rate.is_steady else (0, 0)
    times = [
        when
        for when in (
            _reached(remaining_micro_usd, usd, now),
            _reached(remaining_tokens, tokens, now),
        )
        if when is not None and (resets_at is None or when < resets_at)
    ]
    return min(times, default=None)


def _span(
    entries: Sequence[JournalEntry], most_seconds: float, *, now: float, cut_at: float | None
) -> _Span:
    within = [entry for entry in entries if entry.at >= now - most_seconds]
    if not within or len(within) < len(entries):
        return _Span(within, most_seconds, is_cut=False)
    if cut_at is not None:
        seconds = min(most_seconds, max(LEAST_CUT_SECONDS, now - cut_at))
        return _Span(within, seconds, is_cut=True)
    return _Span(within, now - within[-1].at, is_cut=False)


def _is_steady(span: _Span, now: float) -> bool:
    """Tell whether spending went on all through a time, and until lately.

    A part that has less than a tenth does not count: what follows a burst would make it a pace.
    Of a busy scope less than two minutes may have been read, and they are enough.
    """
    if span.seconds < LEAST_STEADY_SECONDS and not span.is_cut:
        return False
    spending = [entry for entry in span.entries if any(_spent(entry))]
    if not spending or now - spending[0].at > RECENT_SECONDS:
        return False
    units = [parts for parts in _parts(spending, span.seconds, now) if sum(parts) > 0]
    return bool(units) and all(min(parts) >= LEAST_SHARE_OF_PART * sum(parts) for parts in units)


def _parts(
    entries: Sequence[JournalEntry], seconds: float, now: float
) -> tuple[list[int], list[int]]:
    """Return what was spent in each part of a time, in dollars and in tokens."""
    usd, tokens = [0] * PARTS, [0] * PARTS
    for entry in entries:
        part = min(PARTS - 1, max(0, int((now - entry.at) / seconds * PARTS)))
        spent = _spent(entry)
        usd[part] += spent[0]
        tokens[part] += spent[1]
    return usd, tokens


def _spent(entry: JournalEntry) -> tuple[int, int]:
    delta = entry.delta
    return (
        delta.spent_micro_usd + delta.overrun_micro_usd,
        delta.spent_tokens + delta.overrun_tokens,
    )


def _rate(entries: Sequence[JournalEntry], seconds: float, *, is_steady: bool) -> BurnRate:
    spent = [_spent(entry) for entry in entries]
    return BurnRate(
        micro_usd_per_hour=_per_hour(sum(usd for usd, _ in spent), seconds),
        tokens_per_hour=_per_hour(sum(tokens for _, tokens in spent), seconds),
        measured_seconds=round(seconds),
        is_steady=is_steady,
    )


def _per_hour(amount: int, seconds: float) -> int:
    # A correction of what was assumed before the hour can make the sum negative.
    return max(0, round(amount * _SECONDS_PER_HOUR / seconds))


def _reached(remaining: int | None, per_hour: int, now: float) -> float | None:
    if remaining is None:
        return None
    if remaining <= 0:
        return now
    return now + remaining / per_hour * _SECONDS_PER_HOUR if per_hour else None
