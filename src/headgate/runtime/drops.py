"""Drops: queued tasks that the dispatcher ends without having run them, and what they are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headgate.core.tasks.deadlines import EXPIRED_WHILE_QUEUED
from headgate.core.tasks.task import TaskStatus
from headgate.store import Drop


def expired(task_ids: Iterable[str]) -> list[Drop]:
    """Return the end of tasks whose deadline passed while they waited."""
    return [
        Drop(task_id=task_id, status=TaskStatus.FAILED, error=EXPIRED_WHILE_QUEUED)
        for task_id in task_ids
    ]


def rejected(errors: Mapping[str, str]) -> list[Drop]:
    """Return the end of tasks that no budget will hold, each with its reason."""
    return [
        Drop(task_id=task_id, status=TaskStatus.REJECTED, error=error)
        for task_id, error in errors.items()
    ]
