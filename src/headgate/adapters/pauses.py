"""Leaving a provider alone for as long as it asked.

Rule: whoever comes during a pause waits before it asks for a place, and whoever is given one during
a pause hands it back. So nobody holds a place or money for a call that would be turned away.
"""

from __future__ import annotations

import asyncio

from headgate.core.tasks.outcomes import Limited, pause_seconds


class Pauses:
    """When the next call may be sent; it belongs to one event loop."""

    def __init__(self) -> None:
        self._until = 0.0
        self._hits = 0

    @property
    def is_on(self) -> bool:
        """Whether no call is to be sent now."""
        return self._until > asyncio.get_running_loop().time()

    async def wait(self) -> None:
        """Wait until no pause is on; a new one may begin meanwhile."""
        loop = asyncio.get_running_loop()
        while (seconds := self._until - loop.time()) > 0:  # noqa: ASYNC110  it may be prolonged
            await asyncio.sleep(seconds)

    def begin(self, limited: Limited, now: float) -> None:
        """Note that the provider asked for a pause."""
        self._hits += 1
        self._until = max(self._until, now + pause_seconds(limited, self._hits))

    def answered(self) -> None:
        """Note that the provider answered."""
        self._hits = 0
