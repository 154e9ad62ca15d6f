"""Offers: where tasks could run now, on the nodes of the service and at the workers of agents.

Tasks of pull targets run at workers only, all others on nodes only. Either is a part of every
gate: while an agent has no worker with a free place, what its workers are to pull is parked.

Rule: tasks for the nodes are parked for want of a place only while others could be pulled. Where
nobody pulls, a full service is simply the end of the round, and nothing is parked for it.
"""

from __future__ import annotations

import math

from headgate.core.gates import ANY_WORKER, NODES, Gate, GateClosure, GatePart
from headgate.core.lanes.agent_pool import AgentPool

NODES_SHUT = GateClosure(kind="node", name="", why="every place of the service is taken")


class Offers:
    """The places that are left, and how many tasks are ready for either kind of them."""

    __slots__ = ("_pool", "are_nodes_shut", "is_any_shut", "nodes_left", "plain", "pulled")

    def __init__(self, pool: AgentPool) -> None:
        self._pool = pool
        self.nodes_left: float = math.inf
        self.are_nodes_shut = False
        self.is_any_shut = True
        self.plain = 0
        self.pulled = 0

    @property
    def has_ready(self) -> bool:
        """Whether anything waits that no gate holds."""
        return self.plain > 0 or self.pulled > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing that is ready has a place to run."""
        return self.nodes_left <= 0 and not self.pulled

    @property
    def must_shut_nodes(self) -> bool:
        """Whether tasks without a place stand in the way of others that have one."""
        return self.nodes_left <= 0 and self.plain > 0 and self.pulled > 0

    def count(self, gate: Gate, tasks: int) -> None:
        """Count tasks that became ready, or fewer of them."""
        if gate.is_pull:
            self.pulled += tasks
        else:
            self.plain += tasks

    def closure(self, part: GatePart) -> GateClosure | None:
        """Return what closes a part of an offered kind; None while it is open."""
        if part == NODES:
            return NODES_SHUT if self.are_nodes_shut else None
        is_shut = self.is_any_shut if part == ANY_WORKER else not self._pool.workers(part.name)
        return no_worker(part.name) if is_shut else None


def no_worker(agent_id: str) -> GateClosure:
    """Return what closes the gates of tasks that an agent's workers are to pull."""
    return GateClosure(kind="worker", name=agent_id, why="no worker has a free place")
