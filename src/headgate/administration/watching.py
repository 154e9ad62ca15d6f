"""Two loops: one that sees when the file changes, one that looks after what takes time.

Editors write a file in several steps, or put another in its place. So a change is acted upon when
the file has been the same for two looks in a row, whatever it is made of by then.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import structlog

from headgate.administration.changing import Administration
from headgate.audit import FILE, Actor
from headgate.errors import InvalidSettingError, StoreError

log = structlog.get_logger("headgate.settings")

WATCH_SECONDS = 1.0
UPKEEP_SECONDS = 2.0

Signature = tuple[int, int, int, int] | None


class Reloads(Protocol):
    """Reads the settings again when it is told to."""

    async def reload(self, actor: Actor, /) -> object:
        """Read them, or raise `InvalidSettingError` and change nothing."""


class SettingsWatch:
    """Reloads when the file has changed."""

    def __init__(self, administration: Reloads, path: Path) -> None:
        self._administration = administration
        self._path = path
        self._known = signature_of(path)
        self._last = self._known

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.run_once()

    async def run_once(self) -> bool:
        """Look at the file once; return whether it was read again."""
        found = await asyncio.to_thread(signature_of, self._path)
        is_settled = found == self._last
        self._last = found
        if found is None or found == self._known or not is_settled:
            return False
        try:
            await self._administration.reload(FILE)
        except InvalidSettingError as error:
            log.warning("the file was not taken; nothing has changed", problem=str(error))
        except StoreError as error:
            log.warning("the file could not be taken now; tried again", problem=str(error))
            return False
        self._known = found
        return True


def signature_of(path: Path) -> Signature:
    """Return what tells one state of a file from another; None if it is not there."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Upkeep:
    """Looks for changes at other nodes, and lets go of what has drained."""

    def __init__(self, administration: Administration, *, is_shared: bool) -> None:
        self._administration = administration
        self._is_shared = is_shared
        self._problem = ""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(UPKEEP_SECONDS)
            await self.run_once()

    async def run_once(self) -> None:
        """Look once; what cannot be done now is tried again at the next look."""
        try:
            if self._is_shared:
                await self._administration.look()
            await self._administration.finish_draining()
            await self._administration.send_limits()
            self._problem = ""
        except (StoreError, InvalidSettingError) as error:
            if self._problem != str(error):
                log.warning("changes of settings were not looked for", problem=str(error))
            self._problem = str(error)
