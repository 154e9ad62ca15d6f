"""The steps of a task store that workers ask for, and those that the dispatcher takes at them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from headgate.core.records import TaskRecord
from headgate.databases.access import Result
from headgate.databases.transaction import Transaction
from headgate.stores import taking_back, worker_visits
from headgate.stores.worksheet import Worksheet
from headgate.worker_store import Orders, Overdue, Visit


class WorkerSteps:
    """A part of the task store in a database."""

    async def visit(self, visit: Visit) -> Orders:
        """Renew the lease of a worker, start what is assigned to it, and say what it is to do."""

        def write(tasks: Transaction, now: float) -> Orders:
            sheet = self._sheet(tasks, now)
            orders = worker_visits.receive(sheet, visit)
            sheet.write()
            return orders

        return await self._run_first(write)

    async def give_up(self, epoch: int, overdue: Sequence[Overdue]) -> list[TaskRecord]:
        """End attempts that a worker has neither ended nor stopped in time."""
        return await self._take_back(epoch, lambda sheet: taking_back.give_up(sheet, overdue))

    @abstractmethod
    def _sheet(self, transaction: Transaction, now: float) -> Worksheet: ...

    @abstractmethod
    async def _run_first(self, operation: Callable[[Transaction, float], Result]) -> Result: ...

    @abstractmethod
    async def _take_back(
        self, epoch: int, operation: Callable[[Worksheet], list[Any]]
    ) -> list[TaskRecord]: ...
