"""What is kept of slots, as this node last saw it.

Loops look here, and not at the store, so that a slot with nothing to do costs no query. Nothing is
decided by it: what a look finds to be done is decided again inside a step, where it may turn out
that another node has done it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from headgate.core.slots.slot import SlotRow
from headgate.errors import StoreUnavailableError
from headgate.storage.audit import AuditEntry
from headgate.storage.slot_rows import SlotStore, Step

Answer = TypeVar("Answer")

READ_SECONDS = 30.0
"""How long a question for the rows may take; one that never ends must not hold up all slots."""


class SlotRowCache:
    """The rows of slots in memory; `changed` is called with each that is new."""

    def __init__(self, store: SlotStore, changed: Callable[[SlotRow], None]) -> None:
        self._store = store
        self._changed = changed
        self._rows: dict[str, SlotRow] = {}
        self._version = -1
        self._current: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Return the time that all nodes go by."""
        return self._store.now()

    def row(self, name: str) -> SlotRow:
        """Return what is known of a slot."""
        return self._rows.get(name) or SlotRow(name=name)

    def pending_of_key(self, key_digest: str) -> list[SlotRow]:
        """Return the slots whose wake under this key is being confirmed, configured or not."""
        return [
            row
            for row in self._rows.values()
            if row.schedule.wake_pending
            and row.config is not None
            and row.config.key_digest == key_digest
        ]

    def keep_only(self, names: frozenset[str]) -> None:
        """Forget all other slots; what the store keeps of them is not touched."""
        gone = self._rows.keys() - names
        for name in gone:
            del self._rows[name]
        if names - self._rows.keys():
            # A slot that comes back has a row from before, behind which the cache has read.
            self._version = -1

    async def drop_unreadable(self, name: str) -> bool:
        """Have the store drop what it keeps of a slot if nobody can read it; tell whether."""
        return await self._store.drop_unreadable(name)

    async def forget_others(self, names: tuple[str, ...]) -> None:
        """Have the store forget, after their time, slots that are not configured."""
        await self._store.forget(names)

    async def refresh(self) -> None:
        """Read what has changed until now, of all slots in one question.

        Those who ask while one is under way share the next, so that however many steps end at a
        time, two questions follow at most.
        """
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._read_after(self._current))
            # Whoever waits for it may be gone by the time that it fails.
            self._next.add_done_callback(_look_at)
        await asyncio.shield(self._next)

    async def _read_after(self, current: asyncio.Task[None] | None) -> None:
        if current is not None and not current.done():
            await asyncio.wait([current])
        self._current, self._next = self._next, None
        try:
            async with asyncio.timeout(READ_SECONDS):
                rows = await self._store.rows(after=self._version)
        except TimeoutError:
            problem = f"the rows of slots did not come within {READ_SECONDS:.0f} seconds"
            raise StoreUnavailableError(problem) from None
        for row in rows:
            self._take(row)

    async def step(
        self, names: tuple[str, ...], step: Step[Answer], entry: AuditEntry | None = None
    ) -> Answer:
        """Take a step, and see what it changed."""
        answer = await self._store.step(names, step, entry)
        # The step is on disk, whether or not its rows can be read now.
        with suppress(StoreUnavailableError):
            await self.refresh()
        return answer

    def _take(self, row: SlotRow) -> None:
        self._version = max(self._version, row.version)
        known = self._rows.get(row.name)
        # Of two answers that cross, the older one may come later.
        if known is None or row.version > known.version:
            self._rows[row.name] = row
            self._changed(row)


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
