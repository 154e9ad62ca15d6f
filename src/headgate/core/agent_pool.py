"""The agents of the index: whose places are free, and who would take an open task.

An open task goes to the agent with the fewest tasks in flight, then to the one named first.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from headgate.core.projects import Agent, AgentState

SLACK = 16


class AgentPlaces:
    """An agent, how many places it has, and how many of them are taken; the pool changes it."""

    __slots__ = ("agent", "inflight", "is_free", "limited_until", "order", "places")

    def __init__(self, agent: Agent, *, order: int) -> None:
        self.agent = agent
        self.order = order
        self.inflight = 0
        self.places = 0
        self.limited_until: float | None = None
        self.is_free = False


def places_of(agent: Agent, *, counted: bool) -> int:
    """Return how many tasks the agent may have.

    Where tasks in flight are not counted, only an idle agent takes work, and one task a round.
    """
    if counted:
        return agent.capacity if agent.state in (AgentState.IDLE, AgentState.BUSY) else 0
    return 1 if agent.state is AgentState.IDLE else 0


class AgentPool:
    """All agents in their order; `free` counts those that could take a task."""

    __slots__ = ("_agents", "_counted", "_heap", "_limited", "_orders", "free")

    def __init__(self, *, counted: bool) -> None:
        self.free = 0
        self._counted = counted
        self._agents: dict[str, AgentPlaces] = {}
        self._heap: list[tuple[int, int, AgentPlaces]] = []
        self._limited: dict[str, float] = {}
        self._orders = count()

    def __iter__(self) -> Iterator[AgentPlaces]:
        return iter(self._agents.values())

    def get(self, agent_id: str) -> AgentPlaces | None:
        """Return the agent of this id."""
        return self._agents.get(agent_id)

    def put(self, agent: Agent, *, inflight: int) -> AgentPlaces:
        """Add or replace an agent; a known one keeps its place in the order."""
        entry = self._agents.get(agent.id)
        if entry is None:
            entry = self._agents[agent.id] = AgentPlaces(agent, order=next(self._orders))
        self._leave(entry)
        entry.agent = agent
        entry.inflight = inflight
        entry.places = places_of(agent, counted=self._counted)
        entry.limited_until = self._limited.get(agent.agent_type)
        self._return(entry)
        return entry

    def remove(self, agent_id: str) -> None:
        """Forget an agent; the others keep their order."""
        entry = self._agents.pop(agent_id, None)
        if entry is not None:
            self._leave(entry)

    def limit(self, agent_type: str, until: float | None) -> list[AgentPlaces]:
        """Limit a type until a time, or lift its limit with None; return the agents concerned."""
        if until is None:
            self._limited.pop(agent_type, None)
        else:
            self._limited[agent_type] = until
        concerned = [entry for entry in self if entry.agent.agent_type == agent_type]
        for entry in concerned:
            self._leave(entry)
            entry.limited_until = until
            self._return(entry)
        return concerned

    def take_place(self, entry: AgentPlaces) -> None:
        """Count one more task in flight."""
        entry.inflight += 1
        if entry.inflight >= entry.places:
            self._leave(entry)

    def give_back(self, entry: AgentPlaces) -> None:
        """Count one task less in flight."""
        self._leave(entry)
        entry.inflight -= 1
        self._return(entry)

    def for_open_task(self) -> AgentPlaces | None:
        """Return the free agent that would take the next open task."""
        while self._heap:
            inflight, order, entry = self._heap[0]
            takes_open = entry.is_free and entry.agent.accepts_open
            if takes_open and entry.inflight == inflight:
                return entry
            heappop(self._heap)
            if takes_open and entry.inflight > inflight:
                heappush(self._heap, (entry.inflight, order, entry))
        return None

    def _leave(self, entry: AgentPlaces) -> None:
        if entry.is_free:
            entry.is_free = False
            self.free -= 1

    def _return(self, entry: AgentPlaces) -> None:
        if entry.inflight >= entry.places or entry.limited_until is not None:
            return
        entry.is_free = True
        self.free += 1
        if entry.agent.accepts_open:
            heappush(self._heap, (entry.inflight, entry.order, entry))
            if len(self._heap) > 2 * len(self._agents) + SLACK:
                self._rebuild()

    def _rebuild(self) -> None:
        free = (entry for entry in self if entry.is_free and entry.agent.accepts_open)
        self._heap = [(entry.inflight, entry.order, entry) for entry in free]
        heapify(self._heap)
