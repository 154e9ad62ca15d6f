"""Tasks in flight: which places they take, on which node, and what projects have at stake.

A place is taken when an attempt is planned and given back when the store says that it is over, or
that it never began. So the sums here are never below the truth.

The places of a worker are those of one agent, and are counted apart from those of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headgate.core.tasks.task import Task


class InFlight(msgspec.Struct, frozen=True):
    """A place that is taken: by which attempt, whose, where, what is held, and for how long."""

    task: Task
    attempt: int
    agent_id: str
    node_id: str
    tokens: int
    slot: str | None = None
    attempt_seconds: float | None = None


class Flights:
    """All attempts in flight, with the sums over nodes, projects and slots."""

    def __init__(self) -> None:
        self.active: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.by_slot: dict[str, int] = {}
        self._workers: dict[str, dict[str, int]] = {}
        self._agents: dict[str, str] = {}
        self._flights: dict[str, InFlight] = {}
        self._used: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._flights

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._flights.values())

    def get(self, task_id: str) -> InFlight | None:
        """Return the attempt that a task is in."""
        return self._flights.get(task_id)

    def add(self, flight: InFlight) -> None:
        """Take a place."""
        task, node_id = flight.task, flight.node_id
        self._flights[task.id] = flight
        self._used[node_id] = self._used.get(node_id, 0) + 1
        self.active[task.project_id] = self.active.get(task.project_id, 0) + 1
        self.reserved[task.project_id] = self.reserved.get(task.project_id, 0) + flight.tokens
        if flight.slot is not None:
            self.by_slot[flight.slot] = self.by_slot.get(flight.slot, 0) + 1

    def remove(self, flight: InFlight) -> None:
        """Give a place back."""
        task, node_id = flight.task, flight.node_id
        del self._flights[task.id]
        self.active[task.project_id] -= 1
        self.reserved[task.project_id] -= flight.tokens
        self._used[node_id] -= 1
        if flight.slot is not None:
            self._leave_slot(flight.slot)
        is_known = node_id in self.places or node_id in self._agents
        if not self._used[node_id] and not is_known:
            del self._used[node_id]

    def _leave_slot(self, slot: str) -> None:
        self.by_slot[slot] -= 1
        if not self.by_slot[slot]:
            del self.by_slot[slot]

    def set_node(self, node_id: str, places: int) -> None:
        """Count the places of a node; 0 takes no more tasks, and keeps those it has."""
        self.places[node_id] = places

    def set_worker(self, node_id: str, places: int, *, agent_id: str) -> None:
        """Count the places of a worker, which only tasks of its agent can take."""
        self._agents[node_id] = agent_id
        self._workers.setdefault(agent_id, {})[node_id] = places

    def agent_of(self, node_id: str) -> str | None:
        """Return the agent that a worker serves; None of a node."""
        return self._agents.get(node_id)

    def drop_node(self, node_id: str) -> None:
        """Forget a node or a worker that is gone."""
        self.places.pop(node_id, None)
        agent_id = self._agents.pop(node_id, None)
        if agent_id is not None:
            del self._workers[agent_id][node_id]
            if not self._workers[agent_id]:
                del self._workers[agent_id]
        if not self._used.get(node_id):
            self._used.pop(node_id, None)

    def on_node(self, node_id: str) -> list[str]:
        """Return the tasks that a node has."""
        return [flight.task.id for flight in self if flight.node_id == node_id]

    def nodes(self) -> set[str]:
        """Return every node that has a task."""
        return {flight.node_id for flight in self}

    def known_nodes(self) -> set[str]:
        """Return every node and worker that has places, taken or not."""
        return self.places.keys() | self._agents.keys()

    @property
    def has_workers(self) -> bool:
        """Whether any worker is connected."""
        return bool(self._agents)

    def workers_of(self, agent_id: str) -> dict[str, int]:
        """Return the workers of an agent with their places."""
        return self._workers.get(agent_id, {})

    def free_at_workers(self, agent_id: str) -> int:
        """Return how many more tasks the workers of an agent take together."""
        own = self._workers.get(agent_id, {})
        return sum(max(0, places - self._used.get(node, 0)) for node, places in own.items())

    def free_by_agent(self) -> dict[str, int]:
        """Return how many more tasks workers take, for each agent that has any."""
        return {agent_id: self.free_at_workers(agent_id) for agent_id in self._workers}

    def free_places(self) -> int:
        """Return how many more tasks the nodes take together."""
        return sum(max(0, self._free_on(node_id)) for node_id in self.places)

    def node_for_next(self, agent_id: str = "") -> str:
        """Return the node, or the worker of an agent, with the most free places; there is one."""
        places = self._workers[agent_id] if agent_id else self.places
        return max(places, key=lambda node: places[node] - self._used.get(node, 0))

    def _free_on(self, node_id: str) -> int:
        return self.places[node_id] - self._used.get(node_id, 0)
