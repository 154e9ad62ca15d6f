"""Reading the settings again beside everything else that goes on.

A file may lie where nothing answers any more. Rule: whoever wants another change does not wait for
it, one thread at most does, and a reload that takes too long is told of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headgate.errors import InvalidSettingError
from headgate.settings.origin import Origin
from headgate.settings.sources import Merged

READ_SECONDS = 10.0


class SettingsReader:
    """Reads one at a time, so that what was read later comes into force later."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._under_way: asyncio.Task[Merged] | None = None

    @asynccontextmanager
    async def read(self, origin: Origin) -> AsyncIterator[Merged]:
        """Give what the sources say now; nobody reads them again while the body runs."""
        async with self._turn:
            if self._under_way is not None and not self._under_way.done():
                problem = "has not been read since it was last asked for; see where it lies"
                raise InvalidSettingError(_name(origin), problem)
            yield await self._read(origin)

    async def _read(self, origin: Origin) -> Merged:
        # A large file takes a while to be read, and the loop has other things to do.
        self._under_way = asyncio.create_task(asyncio.to_thread(origin.read))
        self._under_way.add_done_callback(_note)
        done, _ = await asyncio.wait({self._under_way}, timeout=READ_SECONDS)
        if not done:
            problem = f"was not read within {READ_SECONDS:g} s, and nothing has changed"
            raise InvalidSettingError(_name(origin), f"{problem}; reload when it can be read")
        return self._under_way.result()


def _name(origin: Origin) -> str:
    return "settings" if origin.path is None else str(origin.path)


def _note(task: asyncio.Task[Merged]) -> None:
    # Marks an error as seen: nobody waits for what took too long.
    if not task.cancelled():
        task.exception()
