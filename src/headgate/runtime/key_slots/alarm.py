"""A sleep that can be ended: cheap, because every slot has two of them."""

from __future__ import annotations

import asyncio


class Alarm:
    """Wakes one sleeper after some time, or when it rings."""

    __slots__ = ("_has_rung", "_sleeper")

    def __init__(self) -> None:
        self._has_rung = False
        self._sleeper: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """End the sleep, or the next one if nobody sleeps."""
        self._has_rung = True
        _wake(self._sleeper)

    async def sleep(self, seconds: float) -> None:
        """Sleep so long, or until it rings."""
        if not self._has_rung:
            loop = asyncio.get_running_loop()
            self._sleeper = loop.create_future()
            timer = loop.call_later(max(0.0, seconds), _wake, self._sleeper)
            try:
                await self._sleeper
            finally:
                timer.cancel()
                self._sleeper = None
        self._has_rung = False


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)
