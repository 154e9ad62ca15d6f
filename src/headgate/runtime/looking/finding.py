"""Lists of tasks, where more is known of them than the store has an index for.

There is none by state, and what is in flight is older than what waits. The node that dispatches
knows what is in flight, and looks at nothing else. Any other looks further and further back. Rule:
a list of what is in flight has it, however many tasks wait; if that takes too long, it says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from headgate.core.dispatch.desk import Desk
from headgate.core.tasks.task import TaskStatus
from headgate.runtime.looking.oldest_live import from_the_oldest_live
from headgate.store import TaskStore
from headgate.task_query import TaskFilter, TaskPage, TaskQuery

IN_FLIGHT = frozenset({TaskStatus.ASSIGNED, TaskStatus.RUNNING})
MAX_AMONG = 20_000
LOOK_ON_SECONDS = 1.0
"""How long a node that does not dispatch looks for what is in flight."""

Filter = TypeVar("Filter", bound=TaskFilter)


async def find(store: TaskStore, query: TaskQuery, desk: Desk | None) -> TaskPage:
    """List tasks, by what the desk knows of them where there is one."""
    if desk is None and _is_of_flights(query):
        return await _find_in_flight(store, query)
    return await store.find(from_the_oldest_live(only_in_flight(query, desk), desk))


def only_in_flight(wanted: Filter, desk: Desk | None) -> Filter:
    """Return a filter of what is in flight that looks at nothing else.

    The desk counts a flight from before the store does to after it, so none is missing.
    """
    if desk is None or not _is_of_flights(wanted) or len(desk.flights) > MAX_AMONG:
        return wanted
    return msgspec.structs.replace(wanted, among=tuple(one.task.id for one in desk.flights))


async def look_on(
    find_page: Callable[[TaskQuery], Awaitable[TaskPage]], query: TaskQuery, *, seconds: float
) -> TaskPage:
    """Return a page of tasks; while it is not full and time is left, look further."""
    clock = asyncio.get_running_loop().time
    asked_at, ends_at = clock(), clock() + seconds
    page = await find_page(query)
    records = list(page.records)
    # The next look takes about as long as the last one.
    while _has_stopped(page) and len(records) < query.limit and 2 * clock() - asked_at < ends_at:
        asked_at = clock()
        left = query.limit - len(records)
        further = msgspec.structs.replace(query, before=page.next_before, limit=left)
        page = await find_page(further)
        records += page.records
    return TaskPage(records=tuple(records), next_before=page.next_before)


async def _find_in_flight(store: TaskStore, query: TaskQuery) -> TaskPage:
    """Look for what is in flight until as much is found as the store has counted."""
    lanes = (await store.totals()).lanes
    most = sum(lane.inflight for lane in lanes if query.project_id in (None, lane.project_id))
    if not most:
        return TaskPage(records=())
    limit = query.limit if query.before else min(query.limit, most)
    narrow = msgspec.structs.replace(query, limit=limit)
    page = await look_on(store.find, narrow, seconds=LOOK_ON_SECONDS)
    if not query.before and len(page.records) >= most:
        return TaskPage(records=page.records)
    return page


def _is_of_flights(wanted: TaskFilter) -> bool:
    return bool(wanted.states) and IN_FLIGHT.issuperset(wanted.states)


def _has_stopped(page: TaskPage) -> bool:
    """Tell whether a page ended because enough was looked at, and not because it was full."""
    if page.next_before is None:
        return False
    return not page.records or page.next_before != page.records[-1].task.id
