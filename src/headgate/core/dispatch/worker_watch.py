"""What the desk knows of workers: who has a free place, and which attempts take too long there.

The service cannot stop what runs at a worker. It tells the worker of a cancel, and a worker keeps
deadlines and the time of an attempt by itself. One that does neither has a grace, and is then taken
out of the account.

Rule: an attempt at a worker always comes to an end: by the worker's word, by the end of its lease,
or by the end of a grace.
"""

from __future__ import annotations

from headgate.core.dispatch.flights import Flights, InFlight
from headgate.core.dispatch.timers import Timers
from headgate.core.lanes.index import LaneIndex
from headgate.core.tasks.records import TaskRecord, is_worker
from headgate.core.tasks.task import TaskStatus

DEADLINE_GRACE_SECONDS = 5.0
CANCEL_GRACE_SECONDS = 30.0
AGAIN_SECONDS = 1.0
MAX_OVERDUE = 500
MAX_REMEMBERED = 10_000


class WorkerWatch:
    """Keeps the index in line with the free places of workers, and times their attempts."""

    def __init__(self, index: LaneIndex, flights: Flights) -> None:
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

    def take_off(self, flight: InFlight, now: float) -> None:
        """Time an attempt that has a place at a worker; others need none of this."""
        if is_worker(flight.node_id):
            self._time(flight, now)
            self.look(flight.agent_id, now)

    def see(self, flight: InFlight, record: TaskRecord, now: float) -> None:
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

    def _time(self, flight: InFlight, began_at: float) -> None:
        deadline, seconds = flight.task.deadline, flight.attempt_seconds
        if seconds is not None:
            over_at = began_at + seconds
            deadline = over_at if deadline is None else min(deadline, over_at)
        if deadline is not None:
            self._overdue.set(flight.task.id, deadline + DEADLINE_GRACE_SECONDS)

    def cancel(self, flight: InFlight, now: float) -> None:
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

    def land(self, flight: InFlight, now: float) -> None:
        """Have the place of an attempt back that is over."""
        if is_worker(flight.node_id):
            self._overdue.drop(flight.task.id)
            self.look(flight.agent_id, now)

    def next_at(self) -> float | None:
        """Return when an attempt has had its time."""
        return self._overdue.next_at()

    def take_overdue(self, now: float) -> list[InFlight]:
        """Return attempts that had their time; they are due again until they are over."""
        found = []
        for task_id in self._overdue.pop_due(now, most=MAX_OVERDUE):
            flight = self._flights.get(task_id)
            if flight is not None:
                self._overdue.set(task_id, now + AGAIN_SECONDS)
                found.append(flight)
        return found
