"""The agents of the index: whose places are free, and who would take an open task.

An open task goes to the agent with the fewest tasks in flight, then to the one named first. One
that is to be pulled goes to such an agent with a free place at one of its workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter

from headgate.core.projects import Agent, AgentState

SLACK = 16


class AgentPlaces:
    """An agent, how many places it has, and how many of them are taken; the pool changes it.

    Whether it would take a task is kept rather than worked out, since every decision asks.
    """

    __slots__ = (
        "agent",
        "inflight",
        "is_free",
        "limited_until",
        "may_pull_open",
        "may_take_open",
        "order",
        "places",
        "workers",
    )

    def __init__(self, agent: Agent, *, order: int) -> None:
        self.agent = agent
        self.order = order
        self.inflight = 0
        self.places = 0
        self.limited_until: float | None = None
        self.is_free = False
        self.may_take_open = False
        """Whether it would take an open task now."""
        self.may_pull_open = False
        """Whether one of its workers would take an open task now."""
        self.workers = 0
        """How many places are free at its workers."""


class _Idlest:
    """Agents that may take a task, the one with the fewest in flight first.

    An entry that is out of date is noticed when it comes to the top.
    """

    __slots__ = ("_heap", "_may_take")

    def __init__(self, may_take: Callable[[AgentPlaces], bool]) -> None:
        self._may_take = may_take
        self._heap: list[tuple[int, int, AgentPlaces]] = []

    def push(self, entry: AgentPlaces, among: Mapping[str, AgentPlaces]) -> None:
        heappush(self._heap, (entry.inflight, entry.order, entry))
        if len(self._heap) > 2 * len(among) + SLACK:
            self.rebuild(among)

    def rebuild(self, among: Mapping[str, AgentPlaces]) -> None:
        able = (entry for entry in among.values() if self._may_take(entry))
        self._heap = [(entry.inflight, entry.order, entry) for entry in able]
        heapify(self._heap)

    def first(self) -> AgentPlaces | None:
        while self._heap:
            inflight, order, entry = self._heap[0]
            may_take = self._may_take(entry)
            if may_take and entry.inflight == inflight:
                return entry
            heappop(self._heap)
            if may_take and entry.inflight > inflight:
                heappush(self._heap, (entry.inflight, order, entry))
        return None


def places_of(agent: Agent, *, counted: bool) -> int:
    """Return how many tasks the agent may have.

    Where tasks in flight are not counted, only an idle agent takes work, and one task a round.
    """
    if counted:
        return agent.capacity if agent.state in (AgentState.IDLE, AgentState.BUSY) else 0
    return 1 if agent.state is AgentState.IDLE else 0


def first_idle(agents: Iterable[Agent]) -> Iterable[Agent]:
    """Return each agent once, where it is named first, or first named idle if it ever is."""
    chosen: dict[str, Agent] = {}
    for agent in agents:
        known = chosen.get(agent.id)
        if known is None or (known.state is not AgentState.IDLE and agent.state is AgentState.IDLE):
            chosen.pop(agent.id, None)
            chosen[agent.id] = agent
    return chosen.values()


def _moved(entry: AgentPlaces, order: int) -> bool:
    before, entry.order = entry.order, order
    return before != order


class AgentPool:
    """All agents in their order; `free` counts those that could take a task.

    `pulling` counts those with a worker that would take an open one.
    """

    __slots__ = (
        "_agents",
        "_counted",
        "_idlest",
        "_idlest_pulling",
        "_limited",
        "_orders",
        "_workers",
        "free",
        "pulling",
    )

    def __init__(self, *, counted: bool) -> None:
        self.free = 0
        self.pulling = 0
        self._counted = counted
        self._agents: dict[str, AgentPlaces] = {}
        self._workers: dict[str, int] = {}
        self._idlest = _Idlest(attrgetter("may_take_open"))
        self._idlest_pulling = _Idlest(attrgetter("may_pull_open"))
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
        entry.workers = self._workers.get(agent.id, 0)
        self._return(entry)
        return entry

    def workers(self, agent_id: str) -> int:
        """Return how many places are free at the workers of an agent."""
        return self._workers.get(agent_id, 0)

    def set_workers(self, agent_id: str, free: int) -> None:
        """Count the places that are free at the workers of an agent, also of an unknown one."""
        if free:
            self._workers[agent_id] = free
        else:
            self._workers.pop(agent_id, None)
        entry = self._agents.get(agent_id)
        if entry is not None:
            self._leave(entry)
            entry.workers = free
            self._return(entry)

    def arrange(self, first: Iterable[str]) -> list[AgentPlaces]:
        """Name these agents first, in this order; return those that have another place now."""
        ahead = {name: entry for name in first if (entry := self._agents.get(name)) is not None}
        self._agents = ahead | self._agents
        self._orders = count()
        moved = [entry for entry in self if _moved(entry, next(self._orders))]
        self._idlest.rebuild(self._agents)
        self._idlest_pulling.rebuild(self._agents)
        return moved

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
        return self._idlest.first()

    def for_open_pull(self) -> AgentPlaces | None:
        """Return the free agent whose worker would take the next open task."""
        return self._idlest_pulling.first()

    def _leave(self, entry: AgentPlaces) -> None:
        if entry.is_free:
            self.pulling -= entry.may_pull_open
            entry.is_free = entry.may_take_open = entry.may_pull_open = False
            self.free -= 1

    def _return(self, entry: AgentPlaces) -> None:
        if entry.inflight >= entry.places or entry.limited_until is not None:
            return
        entry.is_free = True
        self.free += 1
        if entry.agent.accepts_open:
            entry.may_take_open = True
            self._idlest.push(entry, self._agents)
            if entry.workers:
                entry.may_pull_open = True
                self.pulling += 1
                self._idlest_pulling.push(entry, self._agents)
