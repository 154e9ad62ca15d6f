"""Which lane goes next: the highest load, and before it a lane that has waited too long.

Lanes are ranked when a place is to be given, never when somebody asks for one. Until then a lane
that changed is only noted, so that many changes between two grants cost one.
"""

from __future__ import annotations

from heapq import heappop, heappush

from headgate.core.lanes.load_ranking import MICRO, LoadRanking
from headgate.core.load import AdaptiveAlpha
from headgate.inprocess.lanes import Lane


class LaneOrder:
    """The lanes in which somebody waits, and which of them goes next."""

    def __init__(self, *, alpha: float, auto_tune: bool, max_wait_ticks: int | None) -> None:
        self.alpha = alpha
        self._adaptive = AdaptiveAlpha(alpha=alpha) if auto_tune else None
        self.max_wait_ticks = max_wait_ticks
        self._ranking: LoadRanking[Lane] = LoadRanking()
        self._changed: dict[Lane, None] = {}
        self._oldest: list[tuple[int, int, Lane]] = []

    def touch(self, lane: Lane) -> None:
        """Note that a lane has got or lost tasks, waiters or places."""
        self._changed[lane] = None

    def clear(self) -> None:
        """Forget all lanes."""
        self._ranking = LoadRanking()
        self._changed.clear()
        self._oldest.clear()

    def best(self, tick: int) -> Lane | None:
        """Return the lane that goes next."""
        if self._changed:
            self._catch_up()
        overdue = None if self.max_wait_ticks is None else self._overdue(tick)
        return self._ranking.best(tick=tick, alpha=self.alpha) if overdue is None else overdue

    @property
    def is_adaptive(self) -> bool:
        """Whether alpha follows what is observed."""
        return self._adaptive is not None

    def observe(self, wait_ticks: int, depth_micro: int) -> None:
        """Let alpha follow a grant, where it is to follow."""
        if self._adaptive is not None:
            depth = depth_micro / MICRO
            self._adaptive = self._adaptive.observe(wait_ticks=wait_ticks, queue_depth=depth)
            self.alpha = self._adaptive.alpha

    def _catch_up(self) -> None:
        ranking = self._ranking
        for lane in self._changed:
            # What `is_competing` says, in place: this is done for each grant.
            is_full = lane.capacity is not None and lane.in_flight >= lane.capacity
            head = None if is_full or not lane.waiting else lane.head()
            if head is None:
                ranking.discard(lane)
                continue
            ranking.put(
                lane,
                depth_micro=lane.depth_micro,
                oldest_tick=head.tick,
                last_served_tick=lane.served_tick,
                order=lane.order,
            )
            if self.max_wait_ticks is not None:
                heappush(self._oldest, (head.sequence, lane.order, lane))
        self._changed.clear()

    def _overdue(self, tick: int) -> Lane | None:
        """Return the lane whose oldest task is the oldest of all, if that has waited too long.

        Each change of a lane leaves a line in the heap; one that is no longer true is dropped when
        it surfaces, and all are when they are many.
        """
        if len(self._oldest) > 2 * len(self._ranking) + 64:
            self._oldest = sorted({line for line in self._oldest if self._is_true(line)})
        while self._oldest and not self._is_true(self._oldest[0]):
            heappop(self._oldest)
        if not self._oldest:
            return None
        lane = self._oldest[0][2]
        head = lane.head()
        limit = self.max_wait_ticks
        if head is None or limit is None or tick - head.tick < limit:
            return None
        return lane

    def _is_true(self, line: tuple[int, int, Lane]) -> bool:
        sequence, _, lane = line
        if lane not in self._ranking:
            return False
        head = lane.head()
        return head is not None and head.sequence == sequence
