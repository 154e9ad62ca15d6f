"""Whose turn it is: projects in the order of their guarantee and their deficit.

The deficit is the actual share of tokens less the target share, so the lowest is furthest behind.
Both shares move while a round charges its assignments; what is kept in order are projects of
equal weight, for which only their own usage matters, and the few classes of weight are compared
afresh each time.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from headgate.core.projects import Project
from headgate.core.snapshot import SchedulerState


class Turn:
    """A project in one round: what it has used so far, and how it stands.

    What is held for work in flight counts as used. The guarantee is one task completed in the
    window, or started where starts are counted.
    """

    __slots__ = ("active", "forgiven", "guaranteed", "order", "project", "target", "used")

    def __init__(self, project: Project, *, order: int, state: SchedulerState) -> None:
        name = project.id
        started = state.project_started
        served = state.tasks_completed_in_window if started is None else started
        self.project = project
        self.order = order
        self.used = state.project_token_usage.get(name, 0) + state.project_reserved.get(name, 0)
        self.forgiven = state.project_forgiven.get(name, 0)
        self.active = state.project_active_agent_counts.get(name, 0)
        self.guaranteed = int(served.get(name, 0) > 0)
        self.target = 0.0

    @property
    def is_held(self) -> bool:
        """Whether a limit of its own keeps the project from being given anything."""
        return self.is_at_cap or self.is_over_budget

    @property
    def is_over_budget(self) -> bool:
        """Whether the project has used its token budget."""
        limit = self.project.budget_limit
        return limit is not None and self.used >= limit

    @property
    def is_at_cap(self) -> bool:
        """Whether the project runs as many agents as it may."""
        cap = self.project.max_concurrent_agents
        return cap is not None and self.active >= cap


def total_tokens(state: SchedulerState) -> int:
    """Return what all projects have used, eligible or not."""
    return sum(state.project_token_usage.values()) + sum(state.project_reserved.values())


def set_targets(turns: list[Turn]) -> None:
    """Give each project its share of the total weight; equal shares where all weights are zero."""
    total_weight = sum(turn.project.credit_weight for turn in turns)
    for turn in turns:
        weight = turn.project.credit_weight
        turn.target = weight / total_weight if total_weight else 1 / len(turns)


class ShareOrder:
    """The projects that may still be given something, furthest behind first."""

    __slots__ = ("_classes", "_total")

    def __init__(self, turns: list[Turn], *, total: int) -> None:
        self._total = total
        self._classes: dict[float, list[tuple[int, int, int, Turn]]] = {}
        for turn in turns:
            self._classes.setdefault(turn.target, []).append(_place(turn))
        for heap in self._classes.values():
            heapify(heap)

    def first(self) -> Turn | None:
        """Return the project whose turn it is."""
        best: tuple[int, float, int] | None = None
        first = None
        total = self._total or 1
        for target, heap in self._classes.items():
            guaranteed, usage, order, turn = heap[0]
            key = (guaranteed, usage / total - target, order)
            if best is None or key < best:
                best, first = key, turn
        return first

    def share_of(self, turn: Turn) -> float:
        """Return the part of all tokens that a project has used."""
        return (turn.used + turn.forgiven) / (self._total or 1)

    def leave(self, turn: Turn) -> None:
        """Take out the project whose turn it is."""
        heap = self._classes[turn.target]
        heappop(heap)
        if not heap:
            del self._classes[turn.target]

    def charge(self, turn: Turn, tokens: int) -> None:
        """Book what the project whose turn it is was given, and find its new place."""
        turn.used += tokens
        self._total += tokens
        heapreplace(self._classes[turn.target], _place(turn))

    def put_back(self, turn: Turn) -> None:
        """Let a project that was passed over take part again."""
        heappush(self._classes.setdefault(turn.target, []), _place(turn))


def _place(turn: Turn) -> tuple[int, int, int, Turn]:
    return (turn.guaranteed, turn.used + turn.forgiven, turn.order, turn)
