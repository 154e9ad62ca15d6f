"""The contract of what keeps slots: rows that change by steps, each of them atomic.

A step is a pure function of the rows and the time, see `headgate.core.key_slots.steps`. It runs in
a transaction, so that of several nodes that take the same step one finds it still to be done. Steps
are bound with `functools.partial`, and can be sent to the process that writes. Every method may
raise `StoreUnavailableError`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from headgate.audit import AuditEntry
from headgate.core.key_slots.slot import Rows, SlotRow

Answer = TypeVar("Answer")

Step = Callable[[Rows, float], "tuple[tuple[SlotRow, ...], Answer]"]
"""From the rows that were asked for, by name, and now, to the rows that change and an answer.

A slot that nothing is kept of yet has a row with nothing but its name.
"""


class SlotStore(Protocol):
    """Keeps the rows of slots, in memory or in a database."""

    def now(self) -> float:
        """Return the time that all nodes go by."""

    async def rows(self, after: int = -1) -> tuple[SlotRow, ...]:
        """Return the rows that changed after a version, in the order of their versions."""

    async def step(
        self, names: tuple[str, ...], step: Step[Answer], entry: AuditEntry | None = None
    ) -> Answer:
        """Take a step on the rows of these slots; its answer means that the change is on disk.

        `entry` is written to the audit log with it. What a step raises changes nothing, and
        reaches the caller.
        """

    async def drop_unreadable(self, name: str) -> bool:
        """Drop the row of a slot if it cannot be read; tell whether there was such a row."""

    async def forget(self, configured: Collection[str]) -> int:
        """Forget slots that are not configured and have not changed for long; return how many."""
