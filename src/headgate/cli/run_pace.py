"""How fast a run goes, and so when it ends: measured over the last minute, not from its beginning.

Runs that were kept from before a resume have not been done at any rate, so the first look at a run
only sets the mark.
"""

from __future__ import annotations

from collections import deque

MEASURED_SECONDS = 60.0
BETWEEN_SECONDS = 1.0
LEAST_SECONDS = 2.0


class Pace:
    """Is shown how many have ended, and says how long the rest takes at the present rate."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def note(self, ended: int, *, now: float) -> None:
        """Take a mark, at most one a second, and forget those that are over a minute old."""
        if not self._marks or now - self._marks[-1][0] >= BETWEEN_SECONDS:
            self._marks.append((now, ended))
        # The newest of the old ones stays: it is where the minute begins.
        while len(self._marks) > 1 and now - self._marks[1][0] >= MEASURED_SECONDS:
            self._marks.popleft()

    def seconds_left(self, *, total: int, ended: int, now: float) -> float | None:
        """Return how long it takes until all have ended; None as long as nobody can tell."""
        if not self._marks or ended >= total:
            return None
        since, before = self._marks[0]
        if now - since < LEAST_SECONDS or ended <= before:
            return None
        return (total - ended) * (now - since) / (ended - before)
