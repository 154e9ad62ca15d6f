"""What the scheduler did lately, as lines that a person can read.

Only the latest events are kept. They are tuples until somebody looks, because an event is noted far
more often than it is read.
"""

from __future__ import annotations

from collections import deque

import msgspec

DEFAULT_EVENTS = 1_000
MAX_EVENTS = 1_000_000


class SchedulerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step: when, at which tick, of which agent, and how many of its tasks wait then.

    A task is queued and granted, and its place released. Who gives up is withdrawn; a grant that
    nobody came for is handed back, and one that a budget cannot hold is refused.
    `wait_ticks` is how long the task of a grant had waited.
    """

    kind: str
    at_seconds: float
    tick: int
    agent_id: str
    queued: int
    wait_ticks: int

    def __str__(self) -> str:
        waited = f", waited {self.wait_ticks} ticks" if self.kind == "granted" else ""
        place = f"{self.at_seconds:12.3f}  tick {self.tick:<6}"
        return f"{place} {self.kind:<11}  {self.agent_id} ({self.queued} queued{waited})"


class Trace:
    """The latest events, the newest last; printed, it is one line for each."""

    def __init__(self, most_events: int) -> None:
        self.lines: deque[tuple[str, float, int, str, int, int]] = deque(maxlen=most_events)

    def events(self) -> list[SchedulerEvent]:
        """Return what is kept, the oldest first."""
        return [
            SchedulerEvent(
                kind=kind,
                at_seconds=at_seconds,
                tick=tick,
                agent_id=agent_id,
                queued=queued,
                wait_ticks=wait_ticks,
            )
            for kind, at_seconds, tick, agent_id, queued, wait_ticks in self.lines
        ]

    def __str__(self) -> str:
        return "\n".join(str(event) for event in self.events())
