"""How large a slice of a budget is that calls draw from in memory.

A slice is a reservation like any other, for a set of scopes. Calls draw on it and settle in memory,
and every few milliseconds one transaction commits what was spent and reserves the next slice. So a
call costs no transaction of its own, and no limit is passed, because a slice is admitted like
anything else.

Rule: what is in flight is always held. What is held beyond it, the headroom, is small beside what
is left in the tightest scope, and there is none where little is left of a limit: there each call
has a reservation of its own, which is exact. A crash books a slice in full, so it overbooks by the
headroom at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headgate.core.budgets.ledger import Account, Unit
from headgate.core.budgets.windows import resets_at

HEADROOM_SHARE = 16
"""The headroom of a slice is at most one part in so many of what is left."""

NEAR_SHARE = 8
"""With less than one part in so many of a limit left, calls are reserved one by one."""


class Amounts(NamedTuple):
    """Money in both units."""

    micro_usd: int = 0
    tokens: int = 0

    def amount(self, unit: Unit) -> int:
        """Return the amount in one unit."""
        return self.tokens if unit is Unit.TOKENS else self.micro_usd

    def plus(self, other: Amounts) -> Amounts:
        """Return the sum."""
        return Amounts(self.micro_usd + other.micro_usd, self.tokens + other.tokens)

    def minus(self, other: Amounts) -> Amounts:
        """Return what is left of it, which may be less than nothing."""
        return Amounts(self.micro_usd - other.micro_usd, self.tokens - other.tokens)

    def least(self, other: Amounts) -> Amounts:
        """Return the smaller of both in each unit."""
        return Amounts(min(self.micro_usd, other.micro_usd), min(self.tokens, other.tokens))

    def most(self, other: Amounts) -> Amounts:
        """Return the larger of both in each unit."""
        return Amounts(max(self.micro_usd, other.micro_usd), max(self.tokens, other.tokens))

    def covers(self, other: Amounts) -> bool:
        """Tell whether it is enough for another, in both units."""
        return self.micro_usd >= other.micro_usd and self.tokens >= other.tokens


NO_AMOUNTS = Amounts()


class SliceSize(NamedTuple):
    """What a slice is to hold; with `is_near` a limit is so near that it has no headroom.

    A window ends at `until`, and what is held for it counts no later.
    """

    held: Amounts
    is_near: bool
    until: float | None


def slice_size(
    accounts: Iterable[Account],
    *,
    in_flight: Amounts,
    wanted: Amounts,
    least: Amounts = NO_AMOUNTS,
    now: float,
) -> SliceSize:
    """Return the size of the next slice, where nothing of the last one is reserved any more.

    Headroom that one call of `least` would not fit into is of no use to anybody.
    """
    headroom = {unit: wanted.amount(unit) for unit in Unit}
    is_near = False
    until: float | None = None
    for account in accounts:
        limit = account.limit
        if limit is None:
            continue
        for unit in Unit:
            most = limit.amount(unit)
            if most is None:
                continue
            room = most - sum(account.balance.column(unit)) - in_flight.amount(unit)
            headroom[unit] = min(headroom[unit], max(0, room // HEADROOM_SHARE))
            is_near = is_near or room * NEAR_SHARE < most
        # Buckets of a rolling window pass into each other, and those of a calendar window do not.
        if limit.window.hours is None:
            ends_at = resets_at(limit.window, now, account.tz)
            if ends_at is not None:
                until = ends_at if until is None else min(until, ends_at)
    if any(headroom[unit] < least.amount(unit) for unit in Unit):
        is_near = True
    if is_near:
        headroom = dict.fromkeys(Unit, 0)
    held = Amounts(
        in_flight.micro_usd + headroom[Unit.MICRO_USD], in_flight.tokens + headroom[Unit.TOKENS]
    )
    return SliceSize(held=held, is_near=is_near, until=until)
