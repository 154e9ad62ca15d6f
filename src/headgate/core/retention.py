"""Retention: how long ended tasks are kept, how many of them, and how long usage is.

An ended task goes when its time is over, or when more are kept than may be, and in both cases only
if nothing needs it any more: no dependant that has yet to read its result, no webhook that has yet
to be delivered, no run that could be resumed from it. When there are too many, or they take too
much of the disk, those of the project go that has most of it: refusals before successes, failures
last. So whoever floods the store pushes its own history out, and nobody else's. Ended calls of the
gateway are kept for a time and up to a number, too, and make room before tasks do. Usage outlives
both, because reports look back further than clients do.

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
CALL_RETENTION_SECONDS: Final = 7 * A_DAY_SECONDS
MAX_ENDED_CALLS: Final = 200_000
USAGE_KEPT_SECONDS: Final = 400 * A_DAY_SECONDS
SHARES_KEPT_SECONDS: Final = 30 * A_DAY_SECONDS

BY_AGE: Final = "task_retention_seconds"
BY_NUMBER: Final = "max_ended_tasks"
BY_SIZE: Final = "max_store_bytes"
"""The settings that delete tasks, as the file names them within `[scheduler]`."""

MAX_REFUSALS: Final = 10_000
"""How many refused tasks are kept of one project: a refusal costs whoever sends it nothing."""

EVICTION_ORDER = (TaskStatus.REJECTED, TaskStatus.CANCELLED, TaskStatus.DONE, TaskStatus.FAILED)
"""Which goes first when there are too many: a flood of refusals must not push results out."""

EVICTION_RANKS = {status: rank for rank, status in enumerate(EVICTION_ORDER)}


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long an ended task is kept, and how many are; None is any number.

    `max_store_bytes` is what the whole store may take; None leaves that to the file system.
    """

    seconds: float = TASK_RETENTION_SECONDS
    max_tasks: int | None = MAX_ENDED_TASKS
    max_store_bytes: int | None = None

    def value_of(self, setting: str) -> float:
        """Return the value of one of the settings; 0 where none is set."""
        values = {BY_AGE: self.seconds, BY_NUMBER: self.max_tasks, BY_SIZE: self.max_store_bytes}
        return values[setting] or 0


class RetentionCut(msgspec.Struct, frozen=True, kw_only=True):
    """How far a setting has deleted: `task_id` is the highest id that went because of it.

    `value` is what the setting was at that time.
    """

    setting: str
    value: float
    task_id: str


# How much room the store has.
#
# Rule: new work is refused while something is left, and what is left is for what must not fail: to
# end what runs, to cancel, to delete. Deleting begins before anybody is refused.

RESERVE_BYTES: Final = 64 * 2**20
"""What stays free of a file system for what must not fail: some large transactions, twice over."""

RESERVE_PART: Final = 8
"""Of a small file system at most the eighth part stays free."""

FULL_FROM: Final = 0.9
"""From this part of `max_store_bytes` on ended tasks are deleted."""


class StoreSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a store takes, and what is free for it where that is known.

    What it could use again of its own files is free. Of what is free `reserve_bytes` are not for
    new work. `max_bytes` is what the settings allow it to take.
    """

    used_bytes: int
    free_bytes: int | None = None
    reserve_bytes: int = 0
    max_bytes: int | None = None

    @property
    def room_bytes(self) -> int | None:
        """How much new work may take; None where nothing bounds it."""
        rooms = []
        if self.free_bytes is not None:
            rooms.append(self.free_bytes - self.reserve_bytes)
        if self.max_bytes is not None:
            rooms.append(self.max_bytes - self.used_bytes)
        return max(0, min(rooms)) if rooms else None

    @property
    def excess_bytes(self) -> int:
        """How much of what has ended is to go, so that new work finds room."""
        excess = 0
        if self.free_bytes is not None:
            excess = 2 * self.reserve_bytes - self.free_bytes
        if self.max_bytes is not None:
            excess = max(excess, self.used_bytes - int(self.max_bytes * FULL_FROM))
        return max(0, excess)

    @property
    def problem(self) -> str:
        """Why there is no room for new work, and what to do; empty while there is."""
        if self.room_bytes != 0:
            return ""
        if self.max_bytes is not None and self.used_bytes >= self.max_bytes:
            return (
                f"the store takes {in_mebibytes(self.used_bytes)} of the"
                f" {in_mebibytes(self.max_bytes)} that it may; raise scheduler.max_store_bytes,"
                " or shorten scheduler.task_retention_seconds"
            )
        return (
            f"the disk of the store has {in_mebibytes(self.free_bytes or 0)} left, and"
            f" {in_mebibytes(self.reserve_bytes)} are kept for ending and deleting tasks; free"
            " some space"
        )


def reserve_of(total_bytes: int) -> int:
    """Return what stays free of a file system of this size."""
    return min(RESERVE_BYTES, total_bytes // RESERVE_PART)


def in_mebibytes(size_bytes: int) -> str:
    """Return a size as people read it."""
    return f"{size_bytes / 2**20:,.1f} MiB"


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """What one step deleted, whether another has more to do at once, and how large the store is."""

    tasks: int = 0
    calls: int = 0
    has_more: bool = False
    size: StoreSize | None = None


def cut_of(task_id: str, cuts: Iterable[RetentionCut]) -> RetentionCut | None:
    """Return what deleted a task that is not there; None if nothing can have, so it never was.

    Where several settings have passed it, its age would have been enough.
    """
    passed = {cut.setting: cut for cut in cuts if task_id <= cut.task_id}
    return passed.get(BY_AGE) or passed.get(BY_NUMBER) or passed.get(BY_SIZE)


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
