"""Rate limits of the fleet: requests and tokens per minute, hour or day, as sliding windows.

A limit is on an agent type, a target or a slot. An attempt counts when it is planned, with the
tokens that are held for it; what it used beyond them counts when it ends. Counting is here; the
buckets that changed are handed to whoever keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from headgate.core.windows import SlidingCount

RateKind = Literal["agent_type", "target", "slot"]
RateUnit = Literal["requests", "tokens"]


class RateCharge(msgspec.Struct, frozen=True, kw_only=True):
    """What was added to one bucket of the count of a limit."""

    limit_id: str
    bucket: int
    amount: int


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """At most so many requests or tokens in any stretch of time as long as the window."""

    kind: RateKind
    name: str
    unit: RateUnit
    most: int
    window_seconds: int

    @property
    def id(self) -> str:
        """What the count is kept under; another limit on the same window goes on with it."""
        return f"{self.kind}:{self.name}:{self.unit}:{self.window_seconds}"

    def amount(self, tokens: int) -> int:
        """Return what an attempt with so many tokens counts."""
        return 1 if self.unit == "requests" else tokens


class NoRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A limit that is reached, and when there will be room; None is never."""

    limit: RateLimit
    until: float | None

    @property
    def why(self) -> str:
        """One line for a person."""
        limit = self.limit
        return f"{limit.most} {limit.unit} in {limit.window_seconds} seconds are reached"


class RateBook:
    """The counts of all limits."""

    def __init__(self, limits: Iterable[RateLimit]) -> None:
        self._limits: dict[tuple[str, str], list[RateLimit]] = {}
        self._counts: dict[str, SlidingCount] = {}
        self._unkept: tuple[RateCharge, ...] = ()
        self.change(limits)

    def change(self, limits: Iterable[RateLimit]) -> None:
        """Go by other limits; what was counted for a window that is still limited stays."""
        counts, self._counts, self._limits = self._counts, {}, {}
        for limit in limits:
            self._limits.setdefault((limit.kind, limit.name), []).append(limit)
            empty = SlidingCount(window_seconds=limit.window_seconds)
            self._counts[limit.id] = counts.get(limit.id, empty)

    def limits_on(self, *names: tuple[RateKind, str | None]) -> list[RateLimit]:
        """Return every limit on these agent types, targets and slots."""
        if not self._limits:
            return []
        return [
            limit
            for kind, name in names
            if name is not None
            for limit in self._limits.get((kind, name), ())
        ]

    def load(self, charges: Iterable[RateCharge]) -> None:
        """Go on from buckets that were kept; those of limits that are gone are left out."""
        buckets: dict[str, list[tuple[int, int]]] = {}
        for charge in charges:
            if charge.limit_id in self._counts:
                buckets.setdefault(charge.limit_id, []).append((charge.bucket, charge.amount))
        for limit_id, kept in buckets.items():
            window_seconds = self._counts[limit_id].window_seconds
            self._counts[limit_id] = SlidingCount(
                window_seconds=window_seconds, buckets=tuple(sorted(kept))
            )

    def reached(self, limits: Iterable[RateLimit], *, tokens: int, now: float) -> NoRoom | None:
        """Return the first limit without room for one more attempt."""
        for limit in limits:
            room_at = self._counts[limit.id].room_at(
                limit.amount(tokens), limit=limit.most, now=now
            )
            if room_at is None or room_at > now:
                return NoRoom(limit=limit, until=room_at)
        return None

    def count(
        self, limits: Iterable[RateLimit], *, tokens: int, now: float
    ) -> tuple[RateCharge, ...]:
        """Count an attempt, and return what to keep: its own charges first, one for each limit."""
        own = tuple(self._record(limit, limit.amount(tokens), now) for limit in limits)
        unkept, self._unkept = self._unkept, ()
        return own + unkept

    def count_more(self, limits: Iterable[RateLimit], *, tokens: int, now: float) -> None:
        """Count tokens that an attempt used beyond those held for it; the next one carries them."""
        by_tokens = (limit for limit in limits if limit.unit == "tokens")
        self._unkept += tuple(self._record(limit, tokens, now) for limit in by_tokens)

    def take_back(self, charges: tuple[RateCharge, ...], *, own: int) -> None:
        """Count an attempt no longer that never began; what it carried is yet to be kept."""
        self._unkept += charges[own:]
        for charge in charges[:own]:
            count = self._counts[charge.limit_id]
            buckets = tuple(
                (number, amount - charge.amount if number == charge.bucket else amount)
                for number, amount in count.buckets
            )
            self._counts[charge.limit_id] = msgspec.structs.replace(count, buckets=buckets)

    def _record(self, limit: RateLimit, amount: int, now: float) -> RateCharge:
        count = self._counts[limit.id] = self._counts[limit.id].record(now, amount)
        return RateCharge(limit_id=limit.id, bucket=count.buckets[-1][0], amount=amount)
