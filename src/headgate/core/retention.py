"""Retention: how long a finished task's result is kept, and its usage.

A result goes when its time is over and nothing needs it any more: no dependant that has yet to
read it, no webhook that has yet to be delivered, no run that could be resumed from it. Usage rows
outlive results, because budgets and reports look back further than clients do.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headgate.core.task import TERMINAL, TaskStatus

RESULT_TTL_SECONDS = 300.0
USAGE_KEPT_SECONDS = 30 * 86400.0


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


def evictable_at(result: StoredResult, *, ttl_seconds: float = RESULT_TTL_SECONDS) -> float | None:
    """Return when the result may go, as things stand; None while it must stay."""
    if result.status not in TERMINAL or result.completed_at is None or result.needed_by:
        return None
    return result.completed_at + ttl_seconds


def may_evict(result: StoredResult, *, now: float, ttl_seconds: float = RESULT_TTL_SECONDS) -> bool:
    """Tell whether the result may go now."""
    at = evictable_at(result, ttl_seconds=ttl_seconds)
    return at is not None and now >= at


def next_eviction_at(
    results: Iterable[StoredResult], *, ttl_seconds: float = RESULT_TTL_SECONDS
) -> float | None:
    """Return when the first of these may go, as things stand; None if all must stay."""
    times = (evictable_at(result, ttl_seconds=ttl_seconds) for result in results)
    return min((at for at in times if at is not None), default=None)


def usage_kept_since(now: float, *, kept_seconds: float = USAGE_KEPT_SECONDS) -> float:
    """Return the time from which on usage rows stay; every older one may go."""
    return now - kept_seconds
