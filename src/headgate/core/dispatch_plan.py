"""What the desk is told, what it remembers of a waiting task, and what it plans."""

from __future__ import annotations

import msgspec

from headgate.core.budgets.accounts import Unit
from headgate.core.gates import GateClosure, GatePart
from headgate.core.lane_index import LaneIndex
from headgate.core.rate_limits import RateCharge, RateLimit
from headgate.core.snapshot import DEFAULT_TOKENS, Agent, LanePolicy, Project, tokens_charged
from headgate.core.task import Choice, Task, Terms

PAUSED = "paused by an administrator"
MISSING = "it is not configured; put it back into the file, or cancel the task"


class DispatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to decide, for whom, and with which agents."""

    projects: tuple[Project, ...]
    agents: tuple[Agent, ...] = ()
    rate_limits: tuple[RateLimit, ...] = ()
    lane_policy: LanePolicy = LanePolicy.FEWEST_IN_FLIGHT
    alpha: float = 0.25
    auto_tune: bool = False
    max_wait_ticks: int | None = None
    priority_ageing_seconds: float = 0.0
    default_tokens: int = DEFAULT_TOKENS
    default_micro_usd: int = 0
    max_inflight: int = 20
    max_per_agent_inflight: int = 10
    max_lag_tokens: int | None = None
    usage_window_hours: int = 24
    pull_targets: frozenset[str] = frozenset()
    paused_targets: tuple[str, ...] = ()
    missing_targets: tuple[str, ...] = ()
    is_paused: bool = False
    counts_free_work: bool = True
    """Whether work that is said to use no tokens holds one, so that projects of it are fair."""

    def new_index(self) -> LaneIndex:
        """Return an index in which nothing waits and nobody works."""
        return LaneIndex(
            policy=self.lane_policy,
            max_wait_ticks=self.max_wait_ticks,
            priority_ageing_seconds=self.priority_ageing_seconds,
            counts_inflight=True,
            pull_targets=self.pull_targets,
        )

    def pauses(self) -> dict[GatePart, GateClosure]:
        """Return the closures that stand for paused targets, and for those nobody configured.

        Only other settings open them.
        """
        closures = [
            GateClosure(kind="target", name=name, why=why)
            for why, names in ((PAUSED, self.paused_targets), (MISSING, self.missing_targets))
            for name in names
        ]
        return {closure.part: closure for closure in closures}

    def needs(self, waiting: Waiting) -> dict[Unit, int]:
        """Return what is to be held for an attempt at a task."""
        fixed = waiting.terms.cost_micro_usd
        estimated = waiting.terms.estimate_micro_usd or self.default_micro_usd
        micro_usd = estimated if fixed is None else fixed
        tokens = tokens_charged(waiting.task, self.default_tokens)
        if waiting.task.estimate_tokens == 0 and not self.counts_free_work:
            tokens = 0
        return {Unit.TOKENS: tokens, Unit.MICRO_USD: micro_usd}


class Waiting(msgspec.Struct, frozen=True):
    """A queued task, the conditions of it, and how often it was assigned before."""

    task: Task
    terms: Terms
    attempt: int
    waiting_for: int

    def is_after(self, other: Waiting) -> bool:
        """Say whether the task has come further: another attempt, or fewer parents to wait for."""
        if self.attempt != other.attempt:
            return self.attempt > other.attempt
        return self.waiting_for < other.waiting_for


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a plan, with what is to be held for it; `slot` is there if one was chosen."""

    task: Task
    terms: Terms
    attempt: int
    agent_id: str
    node_id: str
    tokens: int
    micro_usd: int
    rate_charges: tuple[RateCharge, ...] = ()
    slot: str | None = None
    choice: Choice | None = None

    @property
    def used_slot(self) -> str | None:
        """The slot that the attempt uses, chosen or named."""
        return self.slot or self.task.slot
