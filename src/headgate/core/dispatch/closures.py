"""What is closed at a desk: for a time, or as long as things stand as they do.

A closure for a time ends by itself, or when whoever closed opens again: a budget, a rate limit, a
pause that a provider asked for. A standing one says how things are: an administrator's pause, a
slot without room. Its time is only shown, and nothing ends it but another standing. Rule: a part is
open when neither closes it, and the end of one leaves the other as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.core.dispatch.timers import Timers
from headgate.core.gates import GateClosure, GateKind, GatePart
from headgate.core.lanes.index import LaneIndex


class Closures:
    """Both kinds of closures, and the index that is kept in line with them."""

    def __init__(self, index: LaneIndex) -> None:
        self.index = index
        self.timed: dict[GatePart, GateClosure] = {}
        self.standing: dict[GatePart, GateClosure] = {}
        self._openings: Timers[GatePart] = Timers()

    def close(self, closure: GateClosure, now: float) -> None:
        """Close a part until its time; one that is closed for longer stays so."""
        part = closure.part
        if closure.until is not None and closure.until <= now:
            return
        known = self.timed.get(part)
        if known is not None and (known.until or 0.0) > (closure.until or 0.0):
            return
        self.timed[part] = closure
        if part not in self.standing:
            self.index.close(closure)
        if closure.until is not None:
            self._openings.set(part, closure.until)

    def open(self, part: GatePart) -> bool:
        """End what closes a part for a time; return whether anything did."""
        if self.timed.pop(part, None) is None:
            return False
        self._openings.drop(part)
        if part not in self.standing:
            self.index.open(part)
        return True

    def hold(self, kind: GateKind, closures: Mapping[GatePart, GateClosure]) -> None:
        """Have these and no others of their kind stand, until this is called again."""
        ended = [part for part in self.standing if part.kind == kind and part not in closures]
        for part in ended:
            self.stand(part, None)
        for part, closure in closures.items():
            self.stand(part, closure)

    def stand(self, part: GatePart, closure: GateClosure | None) -> None:
        """Have one closure stand, or none."""
        if closure == self.standing.get(part):
            return
        if closure is not None:
            self.standing[part] = closure
            self.index.close(closure)
            return
        del self.standing[part]
        timed = self.timed.get(part)
        if timed is None:
            self.index.open(part)
        else:
            self.index.close(timed)

    def of(self, part: GatePart) -> list[GateClosure]:
        """Return everything that closes a part, what stands first."""
        found = (self.standing.get(part), self.timed.get(part))
        return [closure for closure in found if closure is not None]

    def is_closed(self, part: GatePart) -> bool:
        """Say whether anything closes a part."""
        return part in self.standing or part in self.timed

    def shown(self) -> list[GateClosure]:
        """Return one closure for each part that is closed, as the index has it."""
        return list((self.timed | self.standing).values())

    def look_at(self, part: GatePart, at: float) -> None:
        """Have a part fall due at a time, though it may open before or stay closed."""
        self._openings.set(part, at)

    def next_at(self) -> float | None:
        """Return when a part falls due."""
        return self._openings.next_at()

    def pop_due(self, now: float, *, most: int) -> list[GatePart]:
        """Return the parts whose time has come."""
        return self._openings.pop_due(now, most=most)
