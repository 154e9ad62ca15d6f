"""Retention: how long ended tasks are kept, how many of them, and how long usage is.

An ended task goes when its time is over, or when more are kept than may be, and in both cases only
if nothing needs it any more: no dependant that has yet to read its result, no webhook that has yet
to be delivered, no run that could be resumed from it. When there are too many, refusals go before
successes, and failures go last. Usage outlives tasks, because reports look back further than
clients do.

Rule: a deleted task leaves no row. Ids grow with time, so the highest id that a setting has deleted
says of every lower one that is not there any more that it was deleted, and by what.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from headgate.core.task import TERMINAL, TaskStatus

A_DAY_SECONDS: Final = 86_400.0
TASK_RETENTION_SECONDS: Final = 7 * A_DAY_SECONDS
MAX_ENDED_TASKS: Final = 1_000_000
USAGE_KEPT_SECONDS: Final = 400 * A_DAY_SECONDS
SHARES_KEPT_SECONDS: Final = 30 * A_DAY_SECONDS

BY_AGE: Final = "task_retention_seconds"
BY_NUMBER: Final = "max_ended_tasks"
"""The two settings that delete tasks, as the file names them within `[scheduler]`."""

EVICTION_ORDER = (TaskStatus.REJECTED, TaskStatus.CANCELLED, TaskStatus.DONE, TaskStatus.FAILED)
"""Which goes first when there are too many: a flood of refusals must not push results out."""

EVICTION_RANKS = {status: rank for rank, status in enumerate(EVICTION_ORDER)}


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long an ended task is kept, and how many are; None is any number."""

    seconds: float = TASK_RETENTION_SECONDS
    max_tasks: int | None = MAX_ENDED_TASKS

    def value_of(self, setting: str) -> float:
        """Return the value of one of the two settings."""
        return self.seconds if setting == BY_AGE else self.max_tasks or 0


class RetentionCut(msgspec.Struct, frozen=True, kw_only=True):
    """How far a setting has deleted: `task_id` is the highest id that went because of it.

    `value` is what the setting was at that time.
    """

    setting: str
    value: float
    task_id: str


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """What one step deleted, and whether another has more to do at once."""

    tasks: int = 0
    has_more: bool = False


def cut_of(task_id: str, cuts: Iterable[RetentionCut]) -> RetentionCut | None:
    """Return what deleted a task that is not there; None if nothing can have, so it never was.

    Where both settings have passed it, its age would have been enough.
    """
    passed = {cut.setting: cut for cut in cuts if task_id <= cut.task_id}
    return passed.get(BY_AGE) or passed.get(BY_NUMBER)


def excess(kept: int, retention: Retention) -> int:
    """Return how many ended tasks are too many."""
    return 0 if retention.max_tasks is None else max(0, kept - retention.max_tasks)


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """A stored task snapshot, as much of it as retention needs.

    `completed_at` is None while the task is not terminal. `dependants` counts the tasks that have
    yet to read the result.
    """

    status: TaskStatus
    completed_at: float | None = None
    dependants: int = 0
    undelivered_webhooks: int = 0
    resumable: bool = False

    @property
    def needed_by(self) -> tuple[str, ...]:
        """What keeps the result, whatever its age; empty if nothing does."""
        holders = (
            ("dependants", self.dependants > 0),
            ("undelivered webhooks", self.undelivered_webhooks > 0),
            ("resumable run", self.resumable),
        )
        return tuple(name for name, holds in holders if holds)


def evictable_at(
    result: StoredResult, *, retention_seconds: float = TASK_RETENTION_SECONDS
) -> float | None:
    """Return when the result may go, as things stand; None while it must stay."""
    if result.status not in TERMINAL or result.completed_at is None or result.needed_by:
        return None
    return result.completed_at + retention_seconds


def may_evict(
    result: StoredResult, *, now: float, retention_seconds: float = TASK_RETENTION_SECONDS
) -> bool:
    """Tell whether the result may go now."""
    at = evictable_at(result, retention_seconds=retention_seconds)
    return at is not None and now >= at


def next_eviction_at(
    results: Iterable[StoredResult], *, retention_seconds: float = TASK_RETENTION_SECONDS
) -> float | None:
    """Return when the first of these may go, as things stand; None if all must stay."""
    times = (evictable_at(result, retention_seconds=retention_seconds) for result in results)
    return min((at for at in times if at is not None), default=None)


def usage_kept_since(now: float, *, kept_seconds: float = USAGE_KEPT_SECONDS) -> float:
    """Return the time from which on usage rows stay; every older one may go."""
    return now - kept_seconds
