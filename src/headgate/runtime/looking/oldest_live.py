"""Where a list of tasks that have not ended begins, if it begins with the oldest.

There is no index by state, so a list from the oldest on would look at everything that ended long
ago first. The node that dispatches knows the oldest task that has not ended, and begins there.
"""

from __future__ import annotations

from itertools import chain

import msgspec

from headgate.core.dispatch.desk import Desk
from headgate.core.tasks.task import TERMINAL
from headgate.task_query import TaskQuery


def from_the_oldest_live(query: TaskQuery, desk: Desk | None) -> TaskQuery:
    """Return a query that passes over what ended before the oldest that has not."""
    if desk is None or not query.is_oldest_first or not query.states:
        return query
    if not TERMINAL.isdisjoint(query.states):
        return query
    oldest = min(chain(desk.waiting, (one.task.id for one in desk.flights)), default="")
    # Everything behind a beginning of an id comes after it, the id itself too.
    return msgspec.structs.replace(query, before=max(query.before or "", oldest[:-1]) or None)
