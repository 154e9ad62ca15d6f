"""Other settings for a desk that is at work, in place: nothing that waits is touched one by one.

Rule: afterwards the desk plans as one would that was made with the new settings from the same
records, but for ties between agents that nobody declares. What is in flight stays, also beyond a
limit that was lowered; only new starts obey it. Another order within lanes builds all of them
again; where many tasks wait, and where figures of another stretch of the past are needed, a new
desk is made from the store instead.
"""

from __future__ import annotations

from headgate.core.dispatch.desk import Desk
from headgate.core.dispatch.desk_settings import DeskSettings
from headgate.core.gates import GatePart
from headgate.core.load import AdaptiveAlpha

_ORDERS = ("lane_policy", "max_wait_ticks", "priority_ageing_seconds", "pull_targets")
"""What lanes and gates are built by: with another one, all of them are built again."""


MAX_REBUILT = 2_000
"""How many tasks may wait for all lanes to be built again at once; more would take too long."""


def needs_new_desk(desk: Desk, after: DeskSettings) -> bool:
    """Tell whether a desk is better made anew from the store, step by step, than changed."""
    before = desk.settings
    if len(desk.waiting) > MAX_REBUILT and _differ(before, after, _ORDERS):
        return True
    return _differ(before, after, ("usage_window_hours",))


def refit(desk: Desk, settings: DeskSettings) -> None:
    """Have a desk decide by other settings from now on."""
    _Refit(desk, settings).run()


def ask_budgets_again(desk: Desk) -> None:
    """Offer again what waits for budgets, because their limits may have been raised."""
    _Refit(desk, desk.settings).ask_budgets_again()


class _Refit:
    """One change of one desk."""

    def __init__(self, desk: Desk, after: DeskSettings) -> None:
        self._desk = desk
        self._before = desk.settings
        self._after = after

    def run(self) -> None:
        self._desk.settings = self._after
        if self._differs(*_ORDERS):
            self._build_index()
        if self._differs("agents", "max_per_agent_inflight"):
            self._set_agents()
        if self._differs("alpha", "auto_tune"):
            self._desk.tuning = AdaptiveAlpha(alpha=self._after.alpha)
        if self._differs("rate_limits"):
            self._set_rate_limits()
        if self._differs("default_tokens", "default_micro_usd"):
            self.ask_budgets_again()
        self._desk.set_pauses(self._after.pauses())

    def ask_budgets_again(self) -> None:
        for scope in list(self._desk.parking.refusals):
            self._desk.open(GatePart("scope", scope))

    def _differs(self, *names: str) -> bool:
        return _differ(self._before, self._after, names)

    def _build_index(self) -> None:
        desk, old = self._desk, self._desk.index
        new = self._after.new_index()
        new.remember_served(old.served())
        for entry in old.agents:
            new.set_agent(entry.agent, inflight=entry.inflight)
            new.set_workers(entry.agent.id, old.agents.workers(entry.agent.id))
        for agent_type, no_room in desk.limited.items():
            new.limit_agent_type(agent_type, no_room.until)
        for closure in desk.closures.shown():
            new.close(closure)
        new.load(old)
        desk.index = desk.workers.index = desk.made_agents.index = desk.closures.index = new

    def _set_agents(self) -> None:
        index, made = self._desk.index, self._desk.made_agents
        if self._differs("max_per_agent_inflight"):
            made.set_capacity(self._after.max_per_agent_inflight)
        known = {agent.id: agent for agent in self._before.agents}
        declared = {agent.id for agent in self._after.agents}
        for agent in self._after.agents:
            if known.get(agent.id) != agent:
                entry = index.agents.get(agent.id)
                index.set_agent(agent, inflight=0 if entry is None else entry.inflight)
            made.declare(agent.id)
        for agent_id in known:
            if agent_id not in declared:
                made.take_over(agent_id)
        # A lane is ranked by the place of its agent, so those that moved are ranked again.
        for moved in index.agents.arrange(agent.id for agent in self._after.agents):
            index.set_agent(moved.agent, inflight=moved.inflight)

    def _set_rate_limits(self) -> None:
        """Count by other limits; who was held by one is asked again, and held again if need be."""
        desk = self._desk
        desk.rates.change(self._after.rate_limits)
        for agent_type in list(desk.limited):
            desk.lift(agent_type)
        for part, closure in list(desk.rate_closed.items()):
            if desk.closures.timed.get(part) is closure:
                self._desk.open(part)
        desk.rate_closed.clear()
        for task_id in list(desk.too_large):
            desk.offer_again(task_id)


def _differ(before: DeskSettings, after: DeskSettings, names: tuple[str, ...]) -> bool:
    return any(getattr(before, name) != getattr(after, name) for name in names)
