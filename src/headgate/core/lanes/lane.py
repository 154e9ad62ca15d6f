"""Lanes: where the tasks of one agent in one project wait.

A lane counts only work that could start: tasks behind a closed gate are in neither its depth nor
its oldest wait, so that parked work cannot make a lane look loaded.
"""

from __future__ import annotations

from headgate.core.gates import Gate
from headgate.core.lanes.grouped_heap import Entry, GroupedHeap, Rank
from headgate.core.lanes.load_ranking import to_micro_weight
from headgate.core.tasks.task import Task

NEVER_SERVED = -1
MAX_GATES_LOOKED_AT = 64
"""How many gates of a lane are looked at for its longest wait; the first came first."""


class Lane:
    """The queue of one agent within one project; `owner` None is the project's open lane."""

    __slots__ = (
        "_oldest",
        "_order",
        "_stock",
        "depth_micro",
        "owner",
        "project_id",
        "ready",
        "served_tick",
        "size",
    )

    def __init__(
        self,
        project_id: str,
        owner: str | None,
        waiting: dict[str, Task],
        *,
        tracks_ticks: bool,
    ) -> None:
        self.project_id = project_id
        self.owner = owner
        self.size = 0
        self.ready = 0
        self.depth_micro = 0
        self.served_tick = NEVER_SERVED
        self._stock: dict[Gate, list[int]] = {}
        self._order = GroupedHeap(waiting)
        self._oldest = GroupedHeap(waiting) if tracks_ticks else None

    def push(self, gate: Gate, rank: Rank, task: Task) -> None:
        """Take in one task."""
        self._count(gate, task, 1)
        self._order.push(gate, task.priority, rank, task)
        if self._oldest is not None:
            self._oldest.push(gate, 0, _tick_rank(task), task)

    def load(self, gate: Gate, ranked: list[tuple[Rank, Task]]) -> None:
        """Take in many tasks of one gate."""
        for _, task in ranked:
            self._count(gate, task, 1)
        self._order.load(gate, ((task.priority, rank, task) for rank, task in ranked))
        if self._oldest is not None:
            self._oldest.load(gate, ((0, _tick_rank(task), task) for _, task in ranked))

    def forget(self, gate: Gate, task: Task) -> bool:
        """Take one task out, and say whether it was the last of its gate in this lane."""
        if self._count(gate, task, -1):
            # Tasks leave in the order of priority, so this order empties from the middle.
            if self._oldest is not None:
                self._oldest.prune(self.size)
            return False
        self._order.drop(gate)
        if self._oldest is not None:
            self._oldest.drop(gate)
        del self._stock[gate]
        return True

    def prune(self) -> None:
        """Clear out tasks that were removed from the middle, once they are the most of it."""
        self._order.prune(self.size)

    def head(self) -> tuple[Entry, Gate] | None:
        """Return the entry of the task that goes first, with its gate."""
        return self._order.peek()

    def pop(self) -> tuple[Entry, Gate] | None:
        """Take out the entry of the task that goes first, and return it with its gate."""
        return self._order.pop()

    def oldest_tick(self) -> int:
        """Return the tick at which the task that has waited longest was enqueued."""
        head = None if self._oldest is None else self._oldest.peek()
        return 0 if head is None else head[0][4].enqueued_tick

    def longest_wait(self, now: float) -> float | None:
        """Return for how many seconds the task has waited that was queued first.

        Tasks behind closed gates count here: somebody waits for them all the same.
        """
        tasks = () if self._oldest is None else self._oldest.firsts(MAX_GATES_LOOKED_AT)
        return max((waited(task, now) for task in tasks), default=None)

    def behind(self, gate: Gate) -> int:
        """Return how many tasks wait behind a gate."""
        return self._stock[gate][0]

    def waiting_since(self) -> int:
        """Return the tick since which the lane has had work and has not been served."""
        return max(self.served_tick, self.oldest_tick())

    def park(self, gate: Gate) -> int:
        """Stop counting the tasks of a gate that closed, and return how many they are."""
        size, depth_micro = self._stock[gate]
        self.ready -= size
        self.depth_micro -= depth_micro
        return size

    def unpark(self, gate: Gate) -> int:
        """Count and offer the tasks of a gate that opened, and return how many they are."""
        size, depth_micro = self._stock[gate]
        self.ready += size
        self.depth_micro += depth_micro
        self._order.reopen(gate)
        if self._oldest is not None:
            self._oldest.reopen(gate)
        return size

    def _count(self, gate: Gate, task: Task, step: int) -> int:
        stock = self._stock.get(gate)
        if stock is None:
            stock = self._stock[gate] = [0, 0]
        depth_micro = step * to_micro_weight(task.weight) if self._oldest is not None else 0
        stock[0] += step
        stock[1] += depth_micro
        self.size += step
        if not gate.closed_by:
            self.ready += step
            self.depth_micro += depth_micro
        return stock[0]


def waited(task: Task, now: float) -> float:
    """Return for how many seconds a task has waited, not counting the time until its own."""
    return max(0.0, now - max(task.created_at, task.not_before or 0.0))


def _tick_rank(task: Task) -> Rank:
    return (task.enqueued_tick, 0, task.id)
