"""How fast a run goes, and so when it ends: measured over the last minute, not from its beginning.

Runs that were kept from before a resume have not been done at any rate, so the first look at a run
only sets the mark. Rule: the time left only ever grows shorter between two ends; when what runs has
taken longer than is usual, or nothing can end, none is said.
"""

from __future__ import annotations

from collections import deque

MEASURED_SECONDS = 60.0
BETWEEN_SECONDS = 1.0
LEAST_SECONDS = 2.0
LATE = 1.5
"""How many times as long as usual nothing may end, until nobody can tell any more."""


class Pace:
    """Is shown how many have ended, and says how long the rest takes at the present rate."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._latest = 0
        self._latest_at = 0.0

    def note(self, ended: int, *, now: float) -> None:
        """Take a mark, at most one a second, and forget those that are over a minute old."""
        if not self._marks or ended != self._latest:
            self._latest, self._latest_at = ended, now
        if not self._marks or now - self._marks[-1][0] >= BETWEEN_SECONDS:
            self._marks.append((now, ended))
        # The newest of the old ones stays: it is where the minute begins.
        while len(self._marks) > 1 and now - self._marks[1][0] >= MEASURED_SECONDS:
            self._marks.popleft()

    def seconds_left(self, *, total: int, ended: int, now: float, running: int = 1) -> float | None:
        """Return how long it takes until all have ended; None as long as nobody can tell."""
        if not self._marks or ended >= total:
            return None
        since, before = self._marks[0]
        if now - since < LEAST_SECONDS or ended <= before:
            return None
        last_at = self._latest_at if ended == self._latest else now
        quiet = now - last_at
        each = (last_at - since) / (ended - before)
        left = (total - ended) * each - quiet
        # So many run at once that each of them takes as long as that many ends.
        is_late = quiet > max(LEAST_SECONDS, LATE * each * max(1, running))
        return None if is_late or left <= 0 else left
