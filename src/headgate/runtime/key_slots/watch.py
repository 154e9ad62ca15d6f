"""The watch over slots: sees what other nodes changed, and starts loops again that stand still.

It also notices a clock that jumped, after which every sleep is too long or too short, and has all
loops look at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from headgate.errors import StoreUnavailableError
from headgate.runtime.key_slots.mirror import SlotMirror
from headgate.runtime.supervisor import Pulse, Supervisor

log = structlog.get_logger("headgate.slots")

STUCK_SECONDS = 120.0
"""A step takes two requests at most, each with a limit of its own; one this long has stopped."""

REFRESH_SECONDS = 60.0
SHARED_REFRESH_SECONDS = 1.0
WATCH_SECONDS = 30.0
JUMP_SECONDS = 2.0
FORGET_SECONDS = 3_600.0


class SlotWatch:
    """Watches the loops of all slots."""

    def __init__(
        self,
        mirror: SlotMirror,
        supervisor: Supervisor,
        *,
        names: Callable[[], tuple[str, ...]],
        look_all: Callable[[], None],
        is_shared: bool,
    ) -> None:
        self._mirror = mirror
        self._supervisor = supervisor
        self._names = names
        self._look_all = look_all
        self._refresh_seconds = SHARED_REFRESH_SECONDS if is_shared else REFRESH_SECONDS
        self._wall_ahead: float | None = None
        self.refresh_pulse = Pulse()
        self._problem = ""
        self._forgets_at = 0.0

    async def refresh(self) -> None:
        """Read what others changed, until cancelled."""
        while True:
            self.refresh_pulse.begin()
            try:
                await self._refresh_once()
                self._tell("")
            except StoreUnavailableError as error:
                self._tell(str(error) or "the store cannot be asked")
            self.refresh_pulse.end(self._mirror.now())
            await asyncio.sleep(self._refresh_seconds)

    async def _refresh_once(self) -> None:
        names = self._names()
        if names:
            await self._mirror.refresh()
        now = asyncio.get_running_loop().time()
        if now >= self._forgets_at:
            await self._mirror.forget_others(names)
            self._forgets_at = now + FORGET_SECONDS

    async def watch(self) -> None:
        """Look after loops and clock, until cancelled."""
        while True:
            self.run_once()
            await asyncio.sleep(WATCH_SECONDS)

    def run_once(self) -> list[str]:
        """Start again what stands still, and return the names."""
        if self._has_jumped():
            log.info("the clock has jumped; all slots look at once")
            self._look_all()
        return self._supervisor.restart_stuck(STUCK_SECONDS)

    def _has_jumped(self) -> bool:
        before = self._wall_ahead
        self._wall_ahead = self._mirror.now() - asyncio.get_running_loop().time()
        return before is not None and abs(self._wall_ahead - before) > JUMP_SECONDS

    def _tell(self, problem: str) -> None:
        if problem and not self._problem:
            log.warning("slots cannot be read; nothing is sent until they can", problem=problem)
        elif self._problem and not problem:
            log.info("slots can be read again")
        self._problem = problem
