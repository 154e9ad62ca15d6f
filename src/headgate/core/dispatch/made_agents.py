"""Agents that nobody declared: made by their first task, and forgotten when they are idle.

Clients name them, so their number has no bound of its own. Rule: beyond `MAX_KNOWN_AGENTS` those
with nothing queued and nothing in flight are dropped; the next task makes them anew.
"""

from __future__ import annotations

from headgate.core.dispatch.flights import Flights
from headgate.core.lanes.index import LaneIndex
from headgate.core.projects import Agent

MAX_KNOWN_AGENTS = 10_000


class MadeAgents:
    """Makes agents in an index, and drops those that nobody needs."""

    def __init__(self, index: LaneIndex, flights: Flights, *, capacity: int) -> None:
        self.index = index
        self._flights = flights
        self._capacity = capacity
        self._made: dict[str, None] = {}
        self._most = MAX_KNOWN_AGENTS

    def __len__(self) -> int:
        return len(self._made)

    def make(self, agent_id: str) -> Agent:
        """Return the agent that a task which names it would bring about."""
        return Agent(id=agent_id, capacity=self._capacity, accepts_open=False)

    def set_capacity(self, capacity: int) -> None:
        """Give all of them, and those to come, this many places; what is in flight stays."""
        self._capacity = capacity
        for agent_id in self._made:
            self.index.set_agent(self.make(agent_id), inflight=self._inflight(agent_id))

    def declare(self, agent_id: str) -> None:
        """Leave an agent to the configuration, which names it from now on."""
        self._made.pop(agent_id, None)

    def take_over(self, agent_id: str) -> None:
        """Go on with an agent that the configuration names no more, as long as it has work."""
        inflight = self._inflight(agent_id)
        if inflight or self.index.has_own_lane(agent_id):
            self._made[agent_id] = None
            self.index.set_agent(self.make(agent_id), inflight=inflight)
        else:
            self.index.remove_agent(agent_id)

    def _inflight(self, agent_id: str) -> int:
        entry = self.index.agents.get(agent_id)
        return 0 if entry is None else entry.inflight

    def know(self, agent_id: str | None) -> None:
        """Make the agent that a task names, unless it is there; it takes only its own tasks."""
        if agent_id is None or self.index.agents.get(agent_id) is not None:
            return
        self.index.set_agent(self.make(agent_id))
        self._made[agent_id] = None
        if len(self._made) > self._most:
            self._forget_idle(agent_id)
            # Where all of them are busy, looking again at each new one would take ever longer.
            self._most = max(MAX_KNOWN_AGENTS, 2 * len(self._made))

    def _forget_idle(self, needed: str) -> None:
        busy = {flight.agent_id for flight in self._flights} | {needed}
        for agent_id in list(self._made):
            if agent_id not in busy and not self.index.has_own_lane(agent_id):
                del self._made[agent_id]
                self.index.remove_agent(agent_id)
