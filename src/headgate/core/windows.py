"""Rate windows as arithmetic: the one that restarts, and the one that slides.

The restarting window counts from its first event after expiry, so two full limits can pass around
a boundary. The sliding one never lets more than the limit into any stretch of its length. It counts
in buckets of a sixtieth of the window, which bounds its memory, and a bucket counts until all of it
has left the window: the error is always on the side of waiting, and at most one bucket long.
"""

from __future__ import annotations

import msgspec

from headgate.errors import InvalidAmountError

WINDOW_SECONDS = {"per_minute": 60, "per_hour": 3600, "per_day": 86400}

BUCKETS_PER_WINDOW = 60


def is_expired(*, window_start: float, window_seconds: float, now: float) -> bool:
    """Tell whether a restarting window is over; at its very end it is not."""
    return now - window_start > window_seconds


def seconds_left(*, window_start: float, window_seconds: float, now: float) -> float:
    """Return how long a restarting window still lasts, never less than zero."""
    return max(0.0, window_seconds - (now - window_start))


class SlidingCount(msgspec.Struct, frozen=True, kw_only=True):
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

    def at(self, now: float) -> SlidingCount:
        """Return what still counts at `now`; it has at most `BUCKETS_PER_WINDOW + 1` buckets."""
        if not self.buckets:
            return self
        clock = self._number_at(now)
        newest = self.buckets[-1][0]
        shift = clock - newest if newest - clock > BUCKETS_PER_WINDOW else 0
        oldest = max(clock, newest + shift) - BUCKETS_PER_WINDOW
        kept = [(number + shift, amount) for number, amount in self.buckets]
        return self._with(tuple(bucket for bucket in kept if bucket[0] >= oldest))

    def record(self, now: float, weight: int = 1) -> SlidingCount:
        """Return the count with `weight` more at `now`: 1 for a request, or a number of tokens."""
        if weight < 0:
            raise InvalidAmountError("weight", f"must be 0 or more, not {weight}")
        buckets = self.at(now).buckets
        number = self._number_at(now)
        if not buckets or buckets[-1][0] < number:
            return self._with((*buckets, (number, weight)))
        newest, amount = buckets[-1]
        return self._with((*buckets[:-1], (newest, amount + weight)))

    def total(self, now: float) -> int:
        """Return how much counts at `now`."""
        return sum(amount for _, amount in self.at(now).buckets)

    def next_release_at(self, now: float) -> float | None:
        """Return when the oldest bucket stops counting, or None if nothing counts."""
        buckets = self.at(now).buckets
        return self._release_at(buckets[0][0]) if buckets else None

    def room_at(self, needed: int, *, limit: int, now: float) -> float | None:
        """Return when `needed` more fits under `limit`: `now`, a later time, or None for never."""
        if needed > limit:
            return None
        present = self.at(now)
        excess = present.total(now) + needed - limit
        free_at = now
        for number, amount in present.buckets:
            if excess <= 0:
                break
            excess -= amount
            free_at = self._release_at(number)
        return free_at

    def _number_at(self, now: float) -> int:
        return int(now // self.bucket_seconds)

    def _release_at(self, number: int) -> float:
        return (number + 1 + BUCKETS_PER_WINDOW) * self.bucket_seconds

    def _with(self, buckets: tuple[tuple[int, int], ...]) -> SlidingCount:
        return msgspec.structs.replace(self, buckets=buckets)
