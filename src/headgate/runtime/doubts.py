"""Tasks in doubt: nobody knows whether what was asked for them is on disk, so the store is asked.

The answer to a step got lost, or whoever waited for it has gone. Then the step may be on its way
still, and a look at the store would come too soon. So the look is taken behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from headgate.core.tasks.records import TaskRecord
from headgate.store import TaskStore

MAX_IN_DOUBT = 1_000
"""With more of them, it is quicker to read everything anew."""


class Doubts:
    """The tasks to look at."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self._task_ids: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._task_ids)

    @property
    def are_too_many(self) -> bool:
        """Whether it is better to read everything anew."""
        return len(self._task_ids) > MAX_IN_DOUBT

    def add(self, task_id: str) -> None:
        """Look at a task the next time."""
        self._task_ids[task_id] = None

    def forget(self) -> None:
        """Look at none; everything is read anew."""
        self._task_ids = {}

    async def look(self) -> AsyncIterator[tuple[str, TaskRecord | None]]:
        """Return the tasks as the store has them, each when it was read; None if it has not."""
        task_ids, self._task_ids = self._task_ids, {}
        # Steps are written in their order: what was sent before this is on disk now, or lost.
        await self._store.sent(())
        for task_id in task_ids:
            yield task_id, await self._store.get(task_id)
