"""What changed while there was no desk to look at it: kept, and shown to the next one."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.core.dispatch.desk import Desk
from headgate.core.gates import GateClosure
from headgate.core.tasks.records import TaskRecord


class Unseen:
    """Records and closures in the order in which they came."""

    def __init__(self) -> None:
        self._records: list[TaskRecord] = []
        self._closures: list[GateClosure] = []

    def keep(self, records: Sequence[TaskRecord], closure: GateClosure | None) -> None:
        """Keep what a step has changed."""
        self._records += records
        if closure is not None:
            self._closures.append(closure)

    def forget(self) -> None:
        """Drop everything; what is read from now on has it."""
        self._records, self._closures = [], []

    def take(self, desk: Desk, now: float) -> list[TaskRecord]:
        """Close at a desk what was closed, and return the records that it is yet to see."""
        records, closures = self._records, self._closures
        self.forget()
        for closure in closures:
            desk.close(closure, now)
        return records
