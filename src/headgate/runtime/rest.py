"""Rest: how a loop sleeps until somebody wakes it, and how others can tell that it does."""

from __future__ import annotations

import asyncio


class Rest:
    """A sleep that is ended by `wake`, also by one that came before it."""

    def __init__(self) -> None:
        self._call = asyncio.Event()
        self.is_asleep = False

    def wake(self) -> None:
        """End the sleep, or the next one as soon as it begins."""
        self._call.set()

    def begin(self) -> None:
        """Have heard all that was called until now."""
        self._call.clear()

    async def sleep(self, seconds: float) -> bool:
        """Sleep until somebody calls; False if nobody has for so long."""
        self.is_asleep = True
        try:
            async with asyncio.timeout(seconds):
                await self._call.wait()
        except TimeoutError:
            return False
        finally:
            self.is_asleep = False
        return True
