"""The tracker of a client, and when its books are opened and closed.

Rule: books are open while any call holds money in them. They are opened by the first call and
closed with the client, or by the last call that outlives it. Books that were given open stay so.
"""

from __future__ import annotations

import asyncio

from headgate.budget_tracker import BudgetTracker
from headgate.ledgers.connect import connect_budget
from headgate.tracker import LedgerTracker


class Books:
    """One tracker, used by calls on one event loop at a time."""

    def __init__(self, tracker: BudgetTracker | str) -> None:
        self._own: LedgerTracker | None = None
        if isinstance(tracker, str):
            tracker = self._own = connect_budget(tracker)
        self._tracker: BudgetTracker = tracker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()
        self._users = 0
        self._is_closing = False
        self.is_open = self._own is None

    async def use(self) -> BudgetTracker:
        """Return the tracker, open until whoever uses it leaves."""
        self._come_to_this_loop()
        self._users += 1
        self._is_closing = False
        try:
            if not self.is_open:
                async with self._turn:
                    await self._open()
        except BaseException:
            self._users -= 1
            raise
        return self._tracker

    async def leave(self) -> None:
        """Note that a call is settled; the last one closes what the client left open."""
        self._users = max(self._users - 1, 0)
        await self._close_unused()

    async def close(self) -> None:
        """Close the books when nobody uses them any more; the next call opens them again."""
        self._come_to_this_loop()
        self._is_closing = True
        await self._close_unused()

    def _come_to_this_loop(self) -> None:
        """Forget the calls of a loop that is over: nobody is left to end them."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._turn, self._users = loop, asyncio.Lock(), 0

    async def _open(self) -> None:
        if self._own is not None and not self.is_open:
            await self._own.__aenter__()
            self.is_open = True

    async def _close_unused(self) -> None:
        if self._own is None or not self._is_unused:
            return
        async with self._turn:
            # Another call may have come while an earlier closing was waited for.
            if self._is_unused:
                self.is_open = False
                await self._own.__aexit__(None, None, None)

    @property
    def _is_unused(self) -> bool:
        return self._is_closing and not self._users and self.is_open
