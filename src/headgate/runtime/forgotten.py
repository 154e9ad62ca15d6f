"""Starts that nobody heard of: written as running on this node by a step whose answer got lost.

The store has them running here, and this node does not run them; nobody else would ever take them
back, because the node is alive. So it looks for them itself, whether it still dispatches or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TaskStatus
from headgate.store import TaskStore

LOOKED_FOR_SECONDS = 10.0
"""A server may finish a step a little after its caller has lost sight of it."""

Start = Callable[[TaskRecord], None]
"""Begins an attempt on this node."""

Runs = Callable[[str], bool]
"""Tells whether an attempt at a task is under way on this node."""


class ForgottenStarts:
    """Looks for tasks that may have been started on this node."""

    def __init__(self, store: TaskStore, *, start: Start, runs: Runs) -> None:
        self._store = store
        self._start = start
        self._runs = runs
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def suspect(self, task_ids: Iterable[str]) -> None:
        """Look for these tasks for a while; nobody knows whether they were started."""
        now = self._store.now()
        for task_id in task_ids:
            self._since[task_id] = now

    async def look(self, node_id: str) -> None:
        """Start what the store has running on this node, and this node does not."""
        now = self._store.now()
        for task_id, since in list(self._since.items()):
            if not self._runs(task_id):
                await self._look_at(task_id, node_id)
            if now - since >= LOOKED_FOR_SECONDS:
                self._since.pop(task_id, None)

    async def _look_at(self, task_id: str, node_id: str) -> None:
        record = await self._store.get(task_id)
        if record is None or record.task.status is not TaskStatus.RUNNING:
            return
        if record.progress.node_id == node_id and not self._runs(task_id):
            self._start(record)
