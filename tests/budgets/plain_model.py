"""A plain model of a ledger: a list of reservations, and every balance counted afresh from it.

It shares no code with the ledgers. Where they add differences to balances, it forgets all sums and
asks each reservation what it weighs; where they index leases, it looks at every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

A_DAY = 86_400

Amounts = tuple[int, int]
"""Micro-dollars and tokens."""

Answer = str | tuple[str, str, str, int, int, int, int]
"""The state after a call, `refused`, or the facts of a budget that is exceeded."""


@dataclass
class Held:
    """One reservation: what it asked for, and where it stands."""

    buckets: dict[str, int]
    amounts: Amounts
    at_once: bool
    lease_until: float
    state: str
    reserved_at: float
    actual: Amounts | None = None
    was_given_back: bool = False

    def weight(self, column: int) -> tuple[int, int, int]:
        """Tell what it weighs as spent, reserved and overrun."""
        held = self.amounts[column]
        if self.state in ("held", "dispatched"):
            return 0, held, 0
        if self.state == "assumed":
            return held, 0, 0
        if self.actual is None:
            return 0, 0, 0
        covered = 0 if self.was_given_back else min(held, self.actual[column])
        return covered, 0, self.actual[column] - covered


@dataclass
class PlainModel:
    """Limits as (dollars, tokens, is by day), and every reservation ever made."""

    now: float
    limits: dict[str, tuple[int | None, int | None, bool]] = field(default_factory=dict)
    reservations: dict[str, Held] = field(default_factory=dict)

    def set_limit(self, scope: str, limit: tuple[int | None, int | None, bool]) -> None:
        """Replace a limit; a new window counts what was reserved in it."""
        was_by_day = self.limits.get(scope, (None, None, False))[2]
        self.limits[scope] = limit
        today = self._bucket(scope)
        if was_by_day or not limit[2]:
            return
        for held in self.reservations.values():
            if scope in held.buckets and held.reserved_at >= today:
                held.buckets[scope] = today

    def pass_time(self) -> None:
        """End the leases that are due."""
        for held in self.reservations.values():
            if held.lease_until <= self.now and held.state in ("held", "dispatched"):
                held.state = "expired" if held.state == "held" else "assumed"

    def sums(self, scope: str, column: int) -> tuple[int, int, int]:
        """Count spent, reserved and overrun of a scope in its window."""
        live_from = self._bucket(scope)
        weights = [
            held.weight(column)
            for held in self.reservations.values()
            if held.buckets.get(scope, -1) >= live_from
        ]
        spent, reserved, overrun = (sum(part) for part in zip((0, 0, 0), *weights, strict=True))
        return spent, reserved, overrun

    def reserve(
        self,
        name: str,
        scopes: Sequence[str],
        amounts: Amounts,
        lease_seconds: float,
        *,
        at_once: bool,
    ) -> Answer:
        """Hold the amounts, or tell which limit is in the way."""
        known = self.reservations.get(name)
        if known is not None:
            same = (tuple(known.buckets), known.amounts, known.at_once) == (
                tuple(scopes),
                amounts,
                at_once,
            )
            return known.state if same else "refused"
        for scope in scopes:
            for column, unit in enumerate(("micro_usd", "tokens")):
                limit = self.limits.get(scope, (None, None, False))[column]
                sums = self.sums(scope, column)
                if limit is not None and sum(sums) + amounts[column] > limit:
                    return ("exceeded", scope, str(unit), int(limit), *sums)
        self.reservations[name] = Held(
            buckets={scope: self._bucket(scope) for scope in scopes},
            amounts=amounts,
            at_once=at_once,
            lease_until=self.now + lease_seconds,
            state="dispatched" if at_once else "held",
            reserved_at=self.now,
        )
        return self.reservations[name].state

    def dispatched(self, name: str) -> Answer:
        """Mark a live reservation."""
        held = self.reservations.get(name)
        if held is None or held.state not in ("held", "dispatched"):
            return "refused"
        held.state = "dispatched"
        return held.state

    def extend(self, name: str, lease_seconds: float) -> Answer:
        """Renew the lease of a live reservation."""
        held = self.reservations.get(name)
        if held is None or held.state not in ("held", "dispatched"):
            return "refused"
        held.lease_until = max(held.lease_until, self.now + lease_seconds)
        return held.state

    def commit(self, name: str, actual: Amounts) -> Answer:
        """Book the actual, once."""
        held = self.reservations.get(name)
        if held is None or held.state == "released":
            return "refused"
        if held.state == "committed":
            return "committed" if held.actual == actual else "refused"
        held.was_given_back = held.state == "expired"
        held.state, held.actual = "committed", actual
        return held.state

    def release(self, name: str) -> Answer:
        """Give back what no cost was booked for."""
        held = self.reservations.get(name)
        if held is None or held.state == "committed":
            return "refused"
        if held.state != "expired":
            held.state = "released"
        return held.state

    def _bucket(self, scope: str) -> int:
        is_by_day = self.limits.get(scope, (None, None, False))[2]
        return int(self.now) // A_DAY * A_DAY if is_by_day else 0
