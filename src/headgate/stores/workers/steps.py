"""The steps of a task store that workers ask for, and those that the dispatcher takes at them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from headgate.core.tasks.records import TaskRecord
from headgate.databases.access import Result
from headgate.stores.moves import taking_back
from headgate.stores.task_rows import TaskRow
from headgate.stores.workers import visits as worker_visits
from headgate.stores.worksheet import Worksheet
from headgate.worker_store import Orders, Overdue, Visit


class WorkerSteps:
    """A part of the task store in a database."""

    async def visit(self, visit: Visit) -> Orders:
        """Renew the lease of a worker, start what is assigned to it, and say what it is to do."""
        return await self._work(partial(worker_visits.receive, visit=visit), goes_first=True)

    async def give_up(self, epoch: int, overdue: Sequence[Overdue]) -> list[TaskRecord]:
        """End attempts that a worker has neither ended nor stopped in time."""
        return await self._take_back(epoch, partial(taking_back.give_up, overdue=overdue))

    @abstractmethod
    async def _work(
        self, operation: Callable[[Worksheet], Result], *, goes_first: bool = False
    ) -> Result: ...

    @abstractmethod
    async def _take_back(
        self, epoch: int, operation: Callable[[Worksheet], list[TaskRow]]
    ) -> list[TaskRecord]: ...
