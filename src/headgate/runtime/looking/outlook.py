"""What only the node that dispatches knows without asking the store: shares, lanes, who waits.

Rule: on any other node the answer is None, never an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import msgspec

from headgate.core.dispatch.desk import Desk
from headgate.core.dispatch.desk_settings import Waiting
from headgate.core.dispatch.lane_figures import LaneFigure, lane_figures, waiting_for_scopes
from headgate.core.shares import Share, shares
from headgate.core.tasks.task import Task
from headgate.runtime.dispatcher import Dispatcher
from headgate.runtime.looking.history import Present
from headgate.tokens import UNBOUND, Bounds

MAX_LOOKED_AT = 20_000
"""How many waiting tasks are looked at for the oldest; they stand about in their order."""


class LongestWait(msgspec.Struct, frozen=True, kw_only=True):
    """A task that could start as far as it is concerned, and since when."""

    task_id: str
    agent_id: str | None
    project_id: str
    since: float


class Outlook:
    """The desk of a dispatcher, as far as people look at it."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    @property
    def desk(self) -> Desk | None:
        """What waits and runs; None where this node does not dispatch."""
        return self._dispatcher.desk

    def present(self) -> Present | None:
        """Return how many tasks wait and are in flight."""
        desk = self.desk
        if desk is None:
            return None
        return Present(queued=len(desk.waiting), inflight=len(desk.flights))

    def shares(self) -> tuple[Share, ...] | None:
        """Return the share of each project that it should have, and that it had."""
        desk = self.desk
        if desk is None:
            return None
        return shares(desk.settings.projects, desk.figures.tokens)

    def lanes(self, now: float) -> tuple[LaneFigure, ...] | None:
        """Return the lanes in which tasks wait, with their load and longest wait."""
        desk = self.desk
        if desk is None:
            return None
        return lane_figures(desk, now)

    def waiting_for_scopes(self) -> dict[str, int] | None:
        """Return how many tasks wait for each budget that has no room for them."""
        desk = self.desk
        return None if desk is None else waiting_for_scopes(desk)

    def longest_wait(self, now: float, bounds: Bounds = UNBOUND) -> LongestWait | None:
        """Return who waits longest within bounds; None if nobody does, or nobody knows."""
        desk = self.desk
        if desk is None:
            return None
        return longest_wait(desk.waiting, now, bounds)


def longest_wait(
    waiting: Mapping[str, Waiting], now: float, bounds: Bounds = UNBOUND
) -> LongestWait | None:
    """Return the task that has waited longest, not counting the time until its own or a parent's.

    A task that waits for its time or for a parent could not start, so nobody keeps it waiting.
    """
    longest, since = None, now
    for one in islice(waiting.values(), MAX_LOOKED_AT):
        task = one.task
        began = max(task.created_at, task.not_before or 0.0)
        if began < since and not one.waiting_for and _is_within(bounds, task):
            longest, since = task, began
    if longest is None:
        return None
    return LongestWait(
        task_id=longest.id, agent_id=longest.agent_id, project_id=longest.project_id, since=since
    )


def _is_within(bounds: Bounds, task: Task) -> bool:
    return bounds.has(agent_id=task.agent_id, project_id=task.project_id)
