"""Fair share between projects: whose turn it is, what each is owed, and what each used lately.

Projects go in the order of their guarantee and their deficit. For that order a deficit is the
actual share of tokens less the target share, so the lowest is furthest behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import msgspec

from headgate.core.snapshot import Project, SchedulerState


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
        return is_held(self.project, active=self.active, used=self.used)

    @property
    def is_over_budget(self) -> bool:
        """Whether the project has used its token budget."""
        return is_over_budget(self.project, self.used)

    @property
    def is_at_cap(self) -> bool:
        """Whether the project runs as many agents as it may."""
        return is_at_cap(self.project, self.active)


def is_held(project: Project, *, active: int, used: int) -> bool:
    """Tell whether a limit of its own keeps a project from being given anything."""
    return is_at_cap(project, active) or is_over_budget(project, used)


def is_over_budget(project: Project, used: int) -> bool:
    """Tell whether a project has used its token budget."""
    return project.budget_limit is not None and used >= project.budget_limit


def is_at_cap(project: Project, active: int) -> bool:
    """Tell whether a project runs as many agents as it may."""
    cap = project.max_concurrent_agents
    return cap is not None and active >= cap


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
    """The projects that may still be given something, furthest behind first.

    Both shares move while a round charges its assignments. Only projects of equal weight are kept
    in order, because among them only their own usage matters; the few classes of weight are
    compared afresh each time.
    """

    __slots__ = ("_classes", "_total")

    def __init__(self, turns: list[Turn], *, total: int) -> None:
        self._total = total
        self._classes: dict[float, list[tuple[int, int, int, Turn]]] = {}
        for turn in turns:
            self._classes.setdefault(turn.target, []).append(_rank(turn))
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
        """Count what the project whose turn it is was given, and find its new rank."""
        turn.used += tokens
        self._total += tokens
        heapreplace(self._classes[turn.target], _rank(turn))

    def put_back(self, turn: Turn) -> None:
        """Let a project that was passed over take part again."""
        heappush(self._classes.setdefault(turn.target, []), _rank(turn))


def _rank(turn: Turn) -> tuple[int, int, int, Turn]:
    return (turn.guaranteed, turn.used + turn.forgiven, turn.order, turn)


class WaitingLane(NamedTuple):
    """A lane with waiting tasks; of two lanes the one with the lower `served` goes first."""

    project_id: str
    waiting: int
    served: tuple[float, float]


def expected_rank(
    position: int, own: WaitingLane, others: Sequence[WaitingLane], weights: Mapping[str, float]
) -> int:
    """Return at which start a task of a lane has its turn, if each start costs as much.

    `position` is its place in its own lane, and the first of both is 1. The lanes of a project take
    turns, and projects start as much as their weights allow.
    """
    rank = position
    elsewhere: dict[str, list[WaitingLane]] = {}
    for lane in others:
        if lane.project_id == own.project_id:
            rank += starts_ahead(position, lane.waiting, goes_first=lane.served < own.served)
        else:
            elsewhere.setdefault(lane.project_id, []).append(lane)
    ahead = 0
    for project_id, lanes in elsewhere.items():
        own_weight, weight = weights.get(own.project_id, 0.0), weights.get(project_id, 0.0)
        turns = rank * weight / own_weight if own_weight else math.inf if weight else rank
        waiting = sum(lane.waiting for lane in lanes)
        goes_first = min(lane.served for lane in lanes) < own.served
        ahead += starts_ahead(turns, waiting, goes_first=goes_first)
    return rank + ahead


def starts_ahead(turns: float, waiting: int, *, goes_first: bool) -> int:
    """Return how many tasks of another queue start before ours."""
    if turns > waiting:
        return waiting
    sure = max(0, math.ceil(turns) - 1)
    # The last of these turns comes at the same time.
    return sure + (goes_first and turns == sure + 1)


class BudgetManager:
    """Share arithmetic under an optional cap on all tokens; None means no cap.

    A deficit here is target minus actual, so a positive one is owed work. `ShareOrder` sorts by
    actual minus target; both put the same project first.
    """

    def __init__(self, global_budget: int | None = None) -> None:
        self.global_budget = global_budget

    def calculate_target_ratios(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return each project's fraction of the whole, or nothing if the weights sum to zero."""
        total_weight = sum(weights.values())
        if total_weight == 0:
            return {}
        return {project_id: weight / total_weight for project_id, weight in weights.items()}

    def calculate_deficits(
        self, weights: Mapping[str, float], usage: Mapping[str, int]
    ) -> dict[str, float]:
        """Return how far each weighted project is below its share; negative is above it.

        Usage of a project without a weight counts in the total and has no deficit of its own.
        """
        targets = self.calculate_target_ratios(weights)
        total_usage = sum(usage.values())
        if total_usage == 0:
            return targets
        return {
            project_id: target - usage.get(project_id, 0) / total_usage
            for project_id, target in targets.items()
        }

    def is_global_budget_exhausted(self, total_used: int) -> bool:
        """Tell whether the cap on all tokens is reached."""
        return self.global_budget is not None and total_used >= self.global_budget

    def is_project_budget_exhausted(self, project_used: int, budget_limit: int | None) -> bool:
        """Tell whether a project has reached its own limit; None is no limit."""
        return budget_limit is not None and project_used >= budget_limit


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One project's parts of 1; a positive `deficit` is owed work."""

    project_id: str
    weight: float
    target: float
    actual: float
    tokens: int

    @property
    def deficit(self) -> float:
        """How far the project is below its share; negative is above it."""
        return self.target - self.actual


def shares(projects: Iterable[Project], tokens: Mapping[str, int]) -> tuple[Share, ...]:
    """Return the shares of projects in their order; where nobody has a weight, all are equal.

    Tokens of a project that is not among them count in the whole. Without any, nobody has had
    anything yet.
    """
    weights = {project.id: project.credit_weight for project in projects}
    whole = sum(tokens.values())
    targets = BudgetManager().calculate_target_ratios(weights)
    return tuple(
        Share(
            project_id=name,
            weight=weight,
            target=targets[name] if targets else 1 / len(weights),
            actual=tokens.get(name, 0) / whole if whole else 0.0,
            tokens=tokens.get(name, 0),
        )
        for name, weight in weights.items()
    )


# The lag clamp. A project that used nothing for a day would take thousands of grants in a row when
# it comes back. When it joins a round, what it is owed beyond `max_lag_tokens` is counted as if it
# had used it. A project that stays is never clamped: it is owed what it has earned. The caller
# carries what was forgiven to the next snapshot, or the same debt would be found again.


def forgiven_lag(
    usage: Sequence[int],
    targets: Sequence[float],
    *,
    joins: Sequence[bool],
    max_lag_tokens: int,
) -> list[int]:
    """Return the tokens to add to each project that joins so that it is owed at most the bound.

    `usage` includes what was forgiven before; `targets` are the shares, in the same order.
    """
    level = _level_of_the_present(usage, targets, joins)
    if level is None:
        level = _common_level(usage, targets, max_lag_tokens)
    debts = (math.ceil(share * level) - used for used, share in zip(usage, targets, strict=True))
    return [
        max(0, debt - max_lag_tokens) if joined else 0
        for debt, joined in zip(debts, joins, strict=True)
    ]


def _level_of_the_present(
    usage: Sequence[int], targets: Sequence[float], joins: Sequence[bool]
) -> float | None:
    """Return the total at which those who stay have had their shares; None if nobody stays."""
    present = [
        (used, share)
        for used, share, joined in zip(usage, targets, joins, strict=True)
        if not joined
    ]
    share = sum(share for _, share in present)
    return sum(used for used, _ in present) / share if share else None


def _common_level(usage: Sequence[int], targets: Sequence[float], bound: int) -> float:
    """Return the total usage at which everyone beyond the bound stands exactly at it.

    Forgiving one project raises the total, and with it what the others are owed, so those beyond
    the bound are solved for together; each pass can only find more of them.
    """
    level, forgiven = float(sum(usage)), 0
    while True:
        pairs = zip(usage, targets, strict=True)
        kept = [(used, share) for used, share in pairs if share * level - used <= bound]
        if len(usage) - len(kept) <= forgiven:
            return level
        forgiven = len(usage) - len(kept)
        share = sum(share for _, share in kept)
        if not share:
            return level
        level = (sum(used for used, _ in kept) - bound * forgiven) / share


SECONDS_PER_HOUR = 3_600


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a project used in the hour that starts at `hour` (Unix seconds)."""

    project_id: str
    hour: int
    tokens: int = 0
    micro_usd: int = 0
    started: int = 0
    completed: int = 0
    forgiven: int = 0


class ProjectUsage:
    """Usage, starts, completions and forgiven lag of each project within the window.

    Usage is kept by the hour, and an hour counts until all of it is older than the window. The sums
    are kept rather than added up, since every decision reads them.
    """

    def __init__(self, *, window_hours: int, rows: Iterable[UsageRow] = ()) -> None:
        self._window_seconds = window_hours * SECONDS_PER_HOUR
        self._hours: dict[str, dict[int, list[int]]] = {}
        self._hour = 0
        self._latest = 0
        self.tokens: dict[str, int] = {}
        self.started: dict[str, int] = {}
        self.completed: dict[str, int] = {}
        self.forgiven: dict[str, int] = {}
        for row in rows:
            self._add(
                row.project_id, row.hour, row.tokens, row.started, row.completed, row.forgiven
            )

    def add(
        self,
        project_id: str,
        now: float,
        *,
        tokens: int = 0,
        started: int = 0,
        completed: int = 0,
        forgiven: int = 0,
    ) -> None:
        """Count something that happened now."""
        hour = self._latest
        if not hour <= now < hour + SECONDS_PER_HOUR:
            hour = self._latest = hour_of(now)
        self._add(project_id, hour, tokens, started, completed, forgiven)

    def roll(self, now: float) -> None:
        """Leave out what is older than the window."""
        hour = hour_of(now)
        if hour == self._hour:
            return
        self._hour = hour
        oldest = hour - self._window_seconds
        for project_id, hours in self._hours.items():
            for old in [start for start in hours if start < oldest]:
                tokens, started, completed, forgiven = hours[old]
                self._add(project_id, old, -tokens, -started, -completed, -forgiven)
                del hours[old]

    def _add(
        self,
        project_id: str,
        hour: int,
        tokens: int,
        started: int,
        completed: int,
        forgiven: int,
    ) -> None:
        hours = self._hours.get(project_id)
        if hours is None:
            hours = self._hours[project_id] = {}
        amounts = hours.get(hour)
        if amounts is None:
            amounts = hours[hour] = [0, 0, 0, 0]
        if tokens:
            amounts[0] += tokens
            self.tokens[project_id] = self.tokens.get(project_id, 0) + tokens
        if started:
            amounts[1] += started
            self.started[project_id] = self.started.get(project_id, 0) + started
        if completed:
            amounts[2] += completed
            self.completed[project_id] = self.completed.get(project_id, 0) + completed
        if forgiven:
            amounts[3] += forgiven
            self.forgiven[project_id] = self.forgiven.get(project_id, 0) + forgiven


def hour_of(now: float) -> int:
    """Return the start of the hour."""
    return int(now // SECONDS_PER_HOUR) * SECONDS_PER_HOUR
