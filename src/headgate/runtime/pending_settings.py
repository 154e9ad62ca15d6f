"""Settings that come into force between two rounds of the dispatcher, and never within one.

A plan that is being applied was made by one set of settings; so it is finished under them.
"""

from __future__ import annotations

import asyncio

from headgate.core.dispatch.desk import Desk
from headgate.core.dispatch.desk_settings import DeskSettings
from headgate.core.dispatch.refit import ask_budgets_again, needs_new_desk, refit


class PendingSettings:
    """The settings that decisions go by, and those that are to come."""

    def __init__(self, current: DeskSettings) -> None:
        self.current = current
        self._next: DeskSettings | None = None
        self._asks_budgets = False
        self._in_force = asyncio.Event()
        self._in_force.set()

    @property
    def is_waiting(self) -> bool:
        """Whether other settings are to come into force."""
        return self._next is not None

    def put(self, settings: DeskSettings, *, asks_budgets: bool) -> None:
        """Take settings for the next round; `asks_budgets` if limits in the books changed, too."""
        self._next = settings
        self._asks_budgets = self._asks_budgets or asks_budgets
        self._in_force.clear()

    def come_into_force(self, desk: Desk | None) -> bool:
        """Go by what is to come; return whether the desk can go on, or a new one is needed."""
        settings = self._next or self.current
        self.current, self._next = settings, None
        asks_budgets, self._asks_budgets = self._asks_budgets, False
        self._in_force.set()
        if desk is None:
            return True
        if needs_new_desk(desk, settings):
            return False
        refit(desk, settings)
        if asks_budgets:
            ask_budgets_again(desk)
        return True

    async def in_force(self) -> None:
        """Wait until nothing is to come any more."""
        await self._in_force.wait()
