"""Which tasks are meant, where there are many; and one page of those that were found.

Rule: a condition that is left out is None, and all that are given must hold. An empty name is
nobody's: it never comes to mean everybody.
"""

from __future__ import annotations

import msgspec

from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TaskStatus


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the tasks that are meant; no states are all of them.

    `among` are the ids of all that can be meant; others are not even looked at.
    `scope` is a budget that a task is charged to, or one around that. `label` is a key and its
    value, or None for any value. `slot` is the one that a task names or was given. Times are Unix
    seconds of the submit. `text` is looked for in the id, the project, the agent, the action, the
    labels and the error, whatever the case of the letters A to Z.
    """

    states: tuple[TaskStatus, ...] = ()
    agent_id: str | None = None
    project_id: str | None = None
    target: str | None = None
    slot: str | None = None
    provider: str | None = None
    scope: str | None = None
    label: tuple[str, str | None] | None = None
    created_before: float | None = None
    created_after: float | None = None
    text: str | None = None
    among: tuple[str, ...] | None = None

    @property
    def reads_submissions(self) -> bool:
        """Whether what clients sent has to be looked at, which may be large."""
        return self.label is not None or self.text is not None


class TaskQuery(TaskFilter, frozen=True, kw_only=True):
    """Which tasks to list, newest first unless `is_oldest_first`.

    `before` is the `next_before` of the page before, in either order: the next one goes on there.
    """

    before: str | None = None
    limit: int = 100
    is_oldest_first: bool = False


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list: it ends at the limit, or earlier where the tasks become too large.

    It also ends where enough tasks were looked at, however few of them match. `next_before` is the
    `before` of the page after it; None if this one is the last.
    """

    records: tuple[TaskRecord, ...]
    next_before: str | None = None
