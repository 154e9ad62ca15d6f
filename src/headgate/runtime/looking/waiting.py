"""Waiting for a task to end, within bounds."""

from __future__ import annotations

import asyncio

from headgate.core.tasks.records import TaskRecord
from headgate.store import TaskStore

WAITED_SECONDS = 5.0
LOOK_SECONDS = 0.02


async def wait_for_end(store: TaskStore, record: TaskRecord) -> TaskRecord:
    """Return a task once it has ended, or as it is when time is over."""
    latest = record
    for _ in range(int(WAITED_SECONDS / LOOK_SECONDS)):
        found = await store.get(record.task.id)
        if found is None:
            return latest
        latest = found
        if latest.is_terminal:
            return latest
        await asyncio.sleep(LOOK_SECONDS)
    return latest
