"""How fast a scope spends, and when its budget will be used up if that goes on.

Read from the journal, over the last hour or as much of it as the journal still has. Rule: only what
was spent counts, overrun included; what is merely reserved may yet be given back.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.core.accounts import JournalEntry
from headgate.core.scopes import Scope

BURN_SECONDS = 3_600.0
LEAST_SECONDS = 60.0
LEAST_CUT_SECONDS = 1.0
_SECONDS_PER_HOUR = 3_600


class BurnRate(msgspec.Struct, frozen=True, kw_only=True):
    """What was spent in `measured_seconds`, scaled to an hour."""

    micro_usd_per_hour: int = 0
    tokens_per_hour: int = 0
    measured_seconds: int = 0


def burn_rate(
    entries: Sequence[JournalEntry], *, now: float, cut_at: float | None = None
) -> BurnRate:
    """Measure the entries of one scope, newest first.

    If none is older than the hour, the time since the oldest is measured, at least a minute: a
    budget that began ten minutes ago must not look six times slower than it is. `cut_at` is the
    time up to which entries were read where there are more: then that time is measured.
    """
    begin = now - BURN_SECONDS
    recent = [entry for entry in entries if entry.at >= begin]
    if not recent:
        return BurnRate()
    if len(recent) < len(entries):
        seconds = BURN_SECONDS
    elif cut_at is not None:
        seconds = min(BURN_SECONDS, max(LEAST_CUT_SECONDS, now - cut_at))
    else:
        seconds = max(LEAST_SECONDS, now - recent[-1].at)
    usd = sum(entry.delta.spent_micro_usd + entry.delta.overrun_micro_usd for entry in recent)
    tokens = sum(entry.delta.spent_tokens + entry.delta.overrun_tokens for entry in recent)
    return BurnRate(
        micro_usd_per_hour=_per_hour(usd, seconds),
        tokens_per_hour=_per_hour(tokens, seconds),
        measured_seconds=round(seconds),
    )


def burn_rates(entries: Sequence[JournalEntry], *, now: float, most: int) -> dict[Scope, BurnRate]:
    """Measure every scope that the entries of an outer one charge, newest first.

    As many as `most` are taken to be a part of them.
    """
    by_scope: dict[Scope, list[JournalEntry]] = {}
    for entry in entries:
        for charge in entry.charges:
            by_scope.setdefault(charge.scope, []).append(entry)
    cut_at = entries[-1].at if entries and len(entries) >= most else None
    return {scope: burn_rate(own, now=now, cut_at=cut_at) for scope, own in by_scope.items()}


def exhausted_at(
    rate: BurnRate,
    *,
    remaining_micro_usd: int | None,
    remaining_tokens: int | None,
    now: float,
    resets_at: float | None = None,
) -> float | None:
    """Tell when the first limit is reached at this rate; None if none is before room is freed."""
    times = [
        when
        for when in (
            _reached(remaining_micro_usd, rate.micro_usd_per_hour, now),
            _reached(remaining_tokens, rate.tokens_per_hour, now),
        )
        if when is not None and (resets_at is None or when < resets_at)
    ]
    return min(times, default=None)


def _per_hour(amount: int, seconds: float) -> int:
    # A correction of what was assumed before the hour can make the sum negative.
    return max(0, round(amount * _SECONDS_PER_HOUR / seconds))


def _reached(remaining: int | None, per_hour: int, now: float) -> float | None:
    if remaining is None:
        return None
    if remaining <= 0:
        return now
    return now + remaining / per_hour * _SECONDS_PER_HOUR if per_hour else None
