"""A plain model of a task store: dictionaries and loops, with none of the store's ways."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import ceil

ENDED = ("done", "failed", "cancelled", "rejected")
GOES_FIRST = ("rejected", "cancelled", "done", "failed")
IN_FLIGHT = ("assigned", "running")
RESERVED_TOKENS = 100
NOTED_ATTEMPTS = 10


@dataclass
class ModelTask:
    agent_id: str | None
    project_id: str
    parents: tuple[str, ...]
    runs_anyway: bool
    is_for_later: bool = False
    state: str = "queued"
    attempt: int = 0
    losses: int = 0
    node_id: str | None = None
    taken_by: str | None = None
    settled_by: str | None = None
    is_to_cancel: bool = False
    started_at: float = 0.0
    completed_at: float | None = None
    landed: tuple[int, str | None, int] = (0, None, 0)
    noted: list[tuple[int, str | None, int]] = field(default_factory=list)


@dataclass
class TaskModel:
    """What a store should hold after the same calls."""

    max_queue: int
    max_per_agent: int
    queue_share: int
    max_scheduled: int
    limit_tokens: int
    tasks: dict[str, ModelTask] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    spent_tokens: int = 0
    shared_tokens: int = 0
    ticks: int = 0

    def waiting_for(self, task: ModelTask) -> int:
        """Count the parents that have not ended."""
        return sum(
            name in self.tasks and self.tasks[name].state not in ENDED for name in set(task.parents)
        )

    def submit(self, name: str, task: ModelTask, now: float) -> str:
        """Store a task; a known one keeps what it has."""
        if name in self.tasks:
            return "known"
        if any(parent not in self.tasks for parent in task.parents):
            return "unknown parent"
        failed = [p for p in task.parents if self.tasks[p].state in ENDED[1:]]
        if failed and not task.runs_anyway:
            self._store_ended(name, task, "failed", now)
        elif not self.has_room(task):
            self._store_ended(name, task, "rejected", now)
        else:
            self.tasks[name] = task
        return self.tasks[name].state

    def has_room(self, task: ModelTask) -> bool:
        """Tell whether one more task may wait."""
        waiting = [
            one
            for one in self.tasks.values()
            if one.state == "queued" and (one.is_for_later and not one.attempt) == task.is_for_later
        ]
        free = (self.max_scheduled if task.is_for_later else self.max_queue) - len(waiting)
        of_project = [one for one in waiting if one.project_id == task.project_id]
        if free <= 0 or len(of_project) >= self.queue_share * free:
            return False
        if task.agent_id is None or task.is_for_later:
            return True
        return sum(one.agent_id == task.agent_id for one in of_project) < self.max_per_agent

    def assign(self, name: str, attempt: int, node_id: str, *, starts: bool, agent: str) -> bool:
        """Take a task for a node."""
        task = self.tasks.get(name)
        if task is None:
            return False
        if task.state in IN_FLIGHT and (task.attempt, task.node_id) == (attempt, node_id):
            return True
        is_ready = task.state == "queued" and not self.waiting_for(task)
        if not is_ready or task.attempt != attempt - 1 or node_id not in self.nodes:
            return False
        reserved = RESERVED_TOKENS * sum(t.state in IN_FLIGHT for t in self.tasks.values())
        if self.spent_tokens + reserved + RESERVED_TOKENS > self.limit_tokens:
            return False
        task.state = "running" if starts else "assigned"
        task.attempt, task.node_id, task.taken_by, task.settled_by = attempt, node_id, agent, None
        return True

    def collect(self, node_id: str) -> list[str]:
        """Start everything that a live node was assigned."""
        if node_id not in self.nodes:
            return []
        started = [
            name
            for name, task in self.tasks.items()
            if task.state == "assigned" and task.node_id == node_id
        ]
        for name in started:
            self.tasks[name].state = "running"
        return started

    def settle(
        self, name: str, attempt: int, node_id: str, end: str | None, tokens: int, now: float
    ) -> bool:
        """End an attempt; `end` None tries again."""
        task = self.tasks.get(name)
        if task is None or task.attempt != attempt:
            return False
        if task.state not in IN_FLIGHT:
            return task.settled_by == node_id
        if task.node_id != node_id:
            return False
        share = tokens
        if not tokens:
            # It had its permit, and counts what it was charged; a failure for how long it had it.
            seconds = 1.0 if end == "done" else min(1.0, now - task.started_at)
            share = ceil(RESERVED_TOKENS * seconds)
        self._land(task, tokens, share)
        task.settled_by = node_id
        self._conclude(name, task, end, now)
        return True

    def cancel(self, name: str, now: float) -> None:
        """Cancel what waits, and note it for what runs."""
        task = self.tasks.get(name)
        if task is None:
            return
        if task.state == "running":
            task.is_to_cancel = True
        elif task.state == "assigned":
            self._land(task, 0)
            self._end(name, task, "cancelled", now)
        elif task.state == "queued":
            self._end(name, task, "cancelled", now)

    def drop(self, name: str, end: str, now: float) -> None:
        """End a task that waits."""
        task = self.tasks.get(name)
        if task is not None and task.state == "queued":
            self._end(name, task, end, now)

    def recover(self, name: str, now: float, *, max_losses: int) -> None:
        """Take a task back from a node that is gone."""
        task = self.tasks.get(name)
        if task is None or task.state not in IN_FLIGHT or task.node_id in self.nodes:
            return
        has_started = task.state == "running"
        self._land(task, RESERVED_TOKENS if has_started else 0)
        task.losses += has_started
        is_over = has_started and task.losses >= max_losses
        self._conclude(name, task, "failed" if is_over else None, now)

    def evict(self, now: float, *, seconds: float, most: int | None) -> None:
        """Delete what is too old or too many, unless somebody who has not ended depends on it."""
        needed = {
            parent
            for task in self.tasks.values()
            if task.state not in ENDED
            for parent in task.parents
        }
        ended = {name: at for name, task in self.tasks.items() if (at := task.completed_at)}
        free = [name for name in ended if name not in needed]
        gone = {name for name in free if ended[name] <= now - seconds}
        if most is not None:
            for _ in range(max(0, len(ended) - len(gone) - most)):
                kept = Counter(self.tasks[name].project_id for name in ended if name not in gone)
                left = [name for name in free if name not in gone]
                if not left:
                    break
                # The project that has most, as far as anything of it may go.
                largest = max(
                    sorted({self.tasks[name].project_id for name in left}), key=kept.__getitem__
                )
                gone.add(
                    min(
                        (name for name in left if self.tasks[name].project_id == largest),
                        key=lambda name: (
                            GOES_FIRST.index(self.tasks[name].state),
                            ended[name],
                            name,
                        ),
                    )
                )
        self.tasks = {name: task for name, task in self.tasks.items() if name not in gone}

    def _conclude(self, name: str, task: ModelTask, end: str | None, now: float) -> None:
        if end is None and not task.is_to_cancel:
            task.state, task.taken_by = "queued", None
            task.noted = [*task.noted, task.landed][-NOTED_ATTEMPTS:]
        else:
            self._end(name, task, end or "cancelled", now)

    def _land(self, task: ModelTask, tokens: int, share: int | None = None) -> None:
        task.landed = (task.attempt, task.node_id, tokens)
        task.node_id = None
        task.state = "landed"
        self.spent_tokens += tokens
        self.shared_tokens += tokens if share is None else share
        self.ticks += 1

    def _store_ended(self, name: str, task: ModelTask, state: str, now: float) -> None:
        task.state, task.completed_at = state, now
        self.tasks[name] = task

    def _end(self, name: str, task: ModelTask, state: str, now: float) -> None:
        task.state, task.completed_at = state, now
        if state == "done":
            return
        for child_name, child in self.tasks.items():
            if name in child.parents and child.state == "queued" and not child.runs_anyway:
                self._end(child_name, child, "failed", now)
