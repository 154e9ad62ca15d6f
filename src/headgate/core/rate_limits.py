"""Rate limits of the fleet: requests and tokens per minute, hour or day, as sliding windows.

A limit is on an agent type, a target or a slot. An attempt counts when it is planned, with the
tokens that are held for it; what it used beyond them counts when it ends. Counting is here; the
buckets that changed are handed to whoever keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import msgspec

from headgate.errors import InvalidAmountError

# Rate windows as arithmetic: the one that restarts, and the one that slides.
#
# The restarting window counts from its first event after expiry, so two full limits can pass
# around a boundary. The sliding one never lets more than the limit into any stretch of its
# length. It counts in buckets of a sixtieth of the window, which bounds its memory, and a bucket
# counts until all of it has left the window: the error is always on the side of waiting, and at
# most one bucket long.

WINDOW_SECONDS = {"per_minute": 60, "per_hour": 3600, "per_day": 86400}

BUCKETS_PER_WINDOW = 60


def is_expired(*, window_start: float, window_seconds: float, now: float) -> bool:
    """Tell whether a restarting window is over; at its very end it is not."""
    return now - window_start > window_seconds


def seconds_left(*, window_start: float, window_seconds: float, now: float) -> float:
    """Return how long a restarting window still lasts, never less than zero."""
    return max(0.0, window_seconds - (now - window_start))


class SlidingCount(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What was counted lately, as `(number, amount)` buckets in ascending order.

    Bucket `n` covers the times from `n * bucket_seconds` up to the next one. A clock that goes back
    frees nothing: up to a window behind, the newest bucket stands for the present; further
    behind, everything counted is taken as counted now. Either way two windows heal it.
    """

    window_seconds: float
    buckets: tuple[tuple[int, int], ...] = ()

    @property
    def bucket_seconds(self) -> float:
        """The length of one bucket."""
        return self.window_seconds / BUCKETS_PER_WINDOW

    @cached_property
    def counted(self) -> int:
        """The sum of all buckets."""
        return sum([amount for _, amount in self.buckets])

    def at(self, now: float) -> SlidingCount:
        """Return what still counts at `now`; it has at most `BUCKETS_PER_WINDOW + 1` buckets."""
        buckets = self.buckets
        if not buckets:
            return self
        clock = int(now // (self.window_seconds / BUCKETS_PER_WINDOW))
        newest = buckets[-1][0]
        if newest <= clock and clock - BUCKETS_PER_WINDOW <= buckets[0][0]:
            return self
        shift = clock - newest if newest - clock > BUCKETS_PER_WINDOW else 0
        oldest = max(clock, newest + shift) - BUCKETS_PER_WINDOW
        if not shift and self.buckets[0][0] >= oldest:
            return self
        kept = [(number + shift, amount) for number, amount in self.buckets]
        return self._with(tuple(bucket for bucket in kept if bucket[0] >= oldest))

    def record(self, now: float, weight: int = 1) -> SlidingCount:
        """Return the count with `weight` more at `now`: 1 for a request, or a number of tokens."""
        if weight < 0:
            raise InvalidAmountError("weight", f"must be 0 or more, not {weight}")
        present = self.at(now)
        buckets = present.buckets
        number = int(now // (self.window_seconds / BUCKETS_PER_WINDOW))
        if not buckets or buckets[-1][0] < number:
            made = self._with((*buckets, (number, weight)))
        else:
            newest, amount = buckets[-1]
            made = self._with((*buckets[:-1], (newest, amount + weight)))
        # Handed on, or every attempt would add up all buckets anew.
        made.__dict__["counted"] = present.counted + weight
        return made

    def total(self, now: float) -> int:
        """Return how much counts at `now`."""
        return self.at(now).counted

    def next_release_at(self, now: float) -> float | None:
        """Return when the oldest bucket stops counting, or None if nothing counts."""
        buckets = self.at(now).buckets
        return self._release_at(buckets[0][0]) if buckets else None

    def room_at(self, needed: int, *, limit: int, now: float) -> float | None:
        """Return when `needed` more fits under `limit`: `now`, a later time, or None for never."""
        if needed > limit:
            return None
        present = self.at(now)
        excess = present.counted + needed - limit
        if excess <= 0:
            return now
        free_at = now
        for number, amount in present.buckets:
            if excess <= 0:
                break
            excess -= amount
            free_at = self._release_at(number)
        return free_at

    def _release_at(self, number: int) -> float:
        return (number + 1 + BUCKETS_PER_WINDOW) * self.bucket_seconds

    def _with(self, buckets: tuple[tuple[int, int], ...]) -> SlidingCount:
        return SlidingCount(window_seconds=self.window_seconds, buckets=buckets)


MAX_FOUND = 1_024
"""For how many agent types, targets and slots together it is remembered which limits they have."""

RateKind = Literal["agent_type", "target", "slot"]
RateUnit = Literal["requests", "tokens"]


class RateCharge(msgspec.Struct, frozen=True, kw_only=True):
    """What was added to one bucket of the count of a limit."""

    limit_id: str
    bucket: int
    amount: int


class RateLimit(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """At most so many requests or tokens in any stretch of time as long as the window."""

    kind: RateKind
    name: str
    unit: RateUnit
    most: int
    window_seconds: int

    @cached_property
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


class RateTable:
    """The counts of all limits."""

    def __init__(self, limits: Iterable[RateLimit]) -> None:
        self._limits: dict[tuple[str, str], list[RateLimit]] = {}
        self._found: dict[tuple[tuple[RateKind, str | None], ...], list[RateLimit]] = {}
        self._counts: dict[str, SlidingCount] = {}
        self._unkept: tuple[RateCharge, ...] = ()
        self.change(limits)

    def change(self, limits: Iterable[RateLimit]) -> None:
        """Go by other limits; what was counted for a window that is still limited stays."""
        counts, self._counts, self._limits = self._counts, {}, {}
        self._found.clear()
        for limit in limits:
            self._limits.setdefault((limit.kind, limit.name), []).append(limit)
            empty = SlidingCount(window_seconds=limit.window_seconds)
            self._counts[limit.id] = counts.get(limit.id, empty)

    def limits_on(self, *names: tuple[RateKind, str | None]) -> list[RateLimit]:
        """Return every limit on these agent types, targets and slots."""
        if not self._limits:
            return []
        found = self._found.get(names)
        if found is None:
            found = [
                limit
                for kind, name in names
                if name is not None
                for limit in self._limits.get((kind, name), ())
            ]
            if len(self._found) >= MAX_FOUND:
                self._found.clear()
            self._found[names] = found
        return found

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
            amount, most = 1 if limit.unit == "requests" else tokens, limit.most
            count = self._counts[limit.id].at(now)
            if count.counted + amount <= most:
                continue
            room_at = count.room_at(amount, limit=most, now=now)
            if room_at is None or room_at > now:
                return NoRoom(limit=limit, until=room_at)
        return None

    def count(
        self, limits: Iterable[RateLimit], *, tokens: int, now: float
    ) -> tuple[RateCharge, ...]:
        """Count an attempt, and return what to keep: its own charges first, one for each limit."""
        own = tuple([self._record(limit, limit.amount(tokens), now) for limit in limits])
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
            count = self._counts.get(charge.limit_id)
            if count is None:
                # The settings have changed since.
                continue
            buckets = tuple(
                (number, amount - charge.amount if number == charge.bucket else amount)
                for number, amount in count.buckets
            )
            self._counts[charge.limit_id] = msgspec.structs.replace(count, buckets=buckets)

    def _record(self, limit: RateLimit, amount: int, now: float) -> RateCharge:
        limit_id = limit.id
        count = self._counts[limit_id] = self._counts[limit_id].record(now, amount)
        return RateCharge(limit_id=limit_id, bucket=count.buckets[-1][0], amount=amount)
