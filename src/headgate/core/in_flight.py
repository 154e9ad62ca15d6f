"""Tasks in flight: which places they take, on which node, and what projects have at stake.

A place is taken when an attempt is planned and given back when the store says that it is over, or
that it never began. So the sums here are never below the truth.

The places of a worker are those of one agent, and are counted apart from those of the nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

import msgspec

from headgate.core.lane_index import LaneIndex
from headgate.core.task import Task, TaskRecord, TaskStatus, is_worker


class InFlightAttempt(msgspec.Struct, frozen=True):
    """A place that is taken: by which attempt, whose, where, what is held, and for how long."""

    task: Task
    attempt: int
    agent_id: str
    node_id: str
    tokens: int
    slot: str | None = None
    attempt_seconds: float | None = None


class InFlightAttempts:
    """All attempts in flight, with the sums over nodes, projects and slots."""

    def __init__(self) -> None:
        self.active: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.by_slot: dict[str, int] = {}
        self._workers: dict[str, dict[str, int]] = {}
        self._agents: dict[str, str] = {}
        self._flights: dict[str, InFlightAttempt] = {}
        self._used: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._flights

    def __iter__(self) -> Iterator[InFlightAttempt]:
        return iter(self._flights.values())

    def get(self, task_id: str) -> InFlightAttempt | None:
        """Return the attempt that a task is in."""
        return self._flights.get(task_id)

    def add(self, flight: InFlightAttempt) -> None:
        """Take a place."""
        task, node_id = flight.task, flight.node_id
        self._flights[task.id] = flight
        self._used[node_id] = self._used.get(node_id, 0) + 1
        self.active[task.project_id] = self.active.get(task.project_id, 0) + 1
        self.reserved[task.project_id] = self.reserved.get(task.project_id, 0) + flight.tokens
        if flight.slot is not None:
            self.by_slot[flight.slot] = self.by_slot.get(flight.slot, 0) + 1

    def remove(self, flight: InFlightAttempt) -> None:
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


# Timers: what falls due when, with a cost that depends on what falls due.
#
# A timer is replaced or dropped by its key. The old entry stays in the heap until it comes to the
# top, or until most of the heap is old and it is built anew; so memory follows the live timers.

Key = TypeVar("Key", bound=Hashable)

SLACK = 1_024


class Timers(Generic[Key]):
    """Keys by the time at which they fall due; a key has one time."""

    __slots__ = ("_count", "_due", "_heap")

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: Key, at: float) -> None:
        """Let a key fall due at a time, instead of the one it had."""
        if self._due.get(key) == at:
            return
        self._due[key] = at
        self._count += 1
        heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._due) + SLACK:
            self._rebuild()

    def drop(self, key: Key) -> None:
        """Forget a key."""
        self._due.pop(key, None)
        if len(self._heap) > 2 * len(self._due) + SLACK:
            self._rebuild()

    def at(self, key: Key) -> float | None:
        """Return when a key falls due."""
        return self._due.get(key)

    def next_at(self) -> float | None:
        """Return when the first key falls due."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at:
                return at
            heappop(self._heap)
        return None

    def pop_due(self, now: float, *, most: int) -> list[Key]:
        """Take out the keys that are due, the earliest first, at most so many."""
        due: list[Key] = []
        while len(due) < most and (at := self.next_at()) is not None and at <= now:
            key = heappop(self._heap)[2]
            del self._due[key]
            due.append(key)
        return due

    def _rebuild(self) -> None:
        self._heap = [(at, place, key) for place, (key, at) in enumerate(self._due.items())]
        self._count = len(self._heap)
        heapify(self._heap)


# What the desk knows of workers: who has a free place, and which attempts take too long there.
#
# The service cannot stop what runs at a worker. It tells the worker of a cancel, and a worker
# keeps deadlines and the time of an attempt by itself. One that does neither has a grace, and is
# then taken out of the account.
#
# Rule: an attempt at a worker always comes to an end: by the worker's word, by the end of its
# lease, or by the end of a grace.

DEADLINE_GRACE_SECONDS = 5.0
CANCEL_GRACE_SECONDS = 30.0
AGAIN_SECONDS = 1.0
MAX_OVERDUE = 500
MAX_REMEMBERED = 10_000


class WorkerWatch:
    """Keeps the index in line with the free places of workers, and times their attempts."""

    def __init__(self, index: LaneIndex, flights: InFlightAttempts) -> None:
        self.index = index
        self._flights = flights
        self._overdue: Timers[str] = Timers()
        self._since: dict[str, float] = {}

    def set_node(self, node_id: str, places: int, *, agent_id: str, now: float) -> None:
        """Count the places of a node, or of a worker of an agent."""
        if not agent_id:
            self._flights.set_node(node_id, places)
            return
        if self._flights.workers_of(agent_id).get(node_id) == places:
            # The news name all workers each time, and a look counts all those of an agent.
            return
        self._flights.set_worker(node_id, places, agent_id=agent_id)
        self.look(agent_id, now)

    def drop_node(self, node_id: str, now: float) -> None:
        """Forget a node or a worker that is gone."""
        agent_id = self._flights.agent_of(node_id)
        self._flights.drop_node(node_id)
        if agent_id is not None:
            self.look(agent_id, now)

    def look(self, agent_id: str, now: float) -> None:
        """Have the index know how many places are free at the workers of an agent."""
        free = self._flights.free_at_workers(agent_id)
        if free:
            self._since.pop(agent_id, None)
        elif agent_id not in self._since:
            self._since[agent_id] = now
            if len(self._since) > MAX_REMEMBERED:
                del self._since[next(iter(self._since))]
        self.index.set_workers(agent_id, free)

    def since(self, agent_id: str) -> float | None:
        """Return since when the workers of an agent have had no free place, if it had any."""
        return self._since.get(agent_id)

    def take_off(self, flight: InFlightAttempt, now: float) -> None:
        """Time an attempt that has a place at a worker; others need none of this."""
        if is_worker(flight.node_id):
            self._time(flight, now)
            self.look(flight.agent_id, now)

    def observe(self, flight: InFlightAttempt, record: TaskRecord, now: float) -> None:
        """Time an attempt by its record, which tells when the worker has begun it."""
        if not is_worker(flight.node_id):
            return
        if record.progress.cancel_requested:
            self.cancel(flight, now)
        elif flight.attempt_seconds is not None:
            is_running = record.task.status is TaskStatus.RUNNING
            # One that has not begun has all of its time before it.
            began_at = record.progress.started_at if is_running else None
            self._time(flight, now if began_at is None else began_at)

    def _time(self, flight: InFlightAttempt, began_at: float) -> None:
        deadline, seconds = flight.task.deadline, flight.attempt_seconds
        if seconds is not None:
            over_at = began_at + seconds
            deadline = over_at if deadline is None else min(deadline, over_at)
        if deadline is not None:
            self._overdue.set(flight.task.id, deadline + DEADLINE_GRACE_SECONDS)

    def cancel(self, flight: InFlightAttempt, now: float) -> None:
        """Give a worker some time to stop an attempt that somebody wants cancelled."""
        if not is_worker(flight.node_id):
            return
        ends_at = now + CANCEL_GRACE_SECONDS
        deadline = flight.task.deadline
        if deadline is not None:
            ends_at = min(ends_at, deadline + DEADLINE_GRACE_SECONDS)
        known = self._overdue.at(flight.task.id)
        if known is None or ends_at < known:
            self._overdue.set(flight.task.id, ends_at)

    def land(self, flight: InFlightAttempt, now: float) -> None:
        """Have the place of an attempt back that is over."""
        if is_worker(flight.node_id):
            self._overdue.drop(flight.task.id)
            self.look(flight.agent_id, now)

    def next_at(self) -> float | None:
        """Return when an attempt has had its time."""
        return self._overdue.next_at()

    def take_overdue(self, now: float) -> list[InFlightAttempt]:
        """Return attempts that had their time; they are due again until they are over."""
        found = []
        for task_id in self._overdue.pop_due(now, most=MAX_OVERDUE):
            flight = self._flights.get(task_id)
            if flight is not None:
                self._overdue.set(task_id, now + AGAIN_SECONDS)
                found.append(flight)
        return found
