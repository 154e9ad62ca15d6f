"""What was booked for tasks between two looks at them.

A record has the sum over all attempts of its task, so whoever counts money over time has to know
the sum that it has counted already. Rule: what was booked before this node began to dispatch is
counted nowhere, and everything that is booked from then on once, also for tasks that were in flight
or waited for another attempt at that moment: the backlog, which a dispatcher reads anyway before
its first decision, has the sum of each. The cost of the last attempt would not do instead: a record
that was cancelled does not tell whether it left the queue or its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TaskStatus


class Bookings:
    """The sums that were seen of live tasks for which something was booked; others are not kept."""

    def __init__(self) -> None:
        self._sums: dict[str, int] = {}
        self._is_loaded = False

    def load(self, live: Iterable[TaskRecord]) -> None:
        """Take the sums of live tasks as counted; once, for a later backlog may have news."""
        if self._is_loaded:
            return
        self._is_loaded = True
        for record in live:
            if record.progress.used_micro_usd:
                self._sums.setdefault(record.task.id, record.progress.used_micro_usd)

    def take(self, record: TaskRecord) -> int:
        """Return what was booked for a task since the last look at it."""
        task_id, booked = record.task.id, record.progress.used_micro_usd
        known = self._sums.get(task_id)
        if known is None:
            known = 0 if self._is_loaded else _before(record)
        if record.is_terminal:
            self._sums.pop(task_id, None)
        else:
            self._sums[task_id] = booked
        return booked - known

    def keep(self, is_known: Callable[[str], bool]) -> None:
        """Forget the tasks that are not known any more."""
        self._sums = {one: booked for one, booked in self._sums.items() if is_known(one)}

    def forget(self, task_id: str) -> None:
        """Forget a task that the store no longer has."""
        self._sums.pop(task_id, None)


def _before(record: TaskRecord) -> int:
    """Return what was booked before the latest change of a task that nobody has told of yet.

    Before the backlog is there, a change that comes is of a task that was in flight on this node.
    """
    booked = record.progress.used_micro_usd
    if record.task.status is TaskStatus.RUNNING or record.task.status is TaskStatus.ASSIGNED:
        return booked
    return booked - (record.micro_usd or 0)
