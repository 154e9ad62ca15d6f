"""An event loop that plain functions can ask: places and budgets live on one, threads do not.

Rule: whoever waits in a thread can be interrupted, and what it asked for is cancelled then. The
loop's own thread never waits for the loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Answered = TypeVar("Answered")

_ON_ITS_OWN_LOOP = (
    "a sync client was called on the event loop that it waits for; "
    "call it from a thread, or use the async client"
)


class LoopThread:
    """Runs coroutines for other threads, on `loop`, or on one of its own in a thread behind it."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._given = loop
        self._own: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._starting = threading.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; one of its own is started when it is first asked for."""
        if self._given is not None:
            return self._given
        with self._starting:
            # A process that was forked off has the loop without the thread.
            if self._own is None or self._pid != os.getpid():
                self._own, self._pid = _started(), os.getpid()
            return self._own

    def run(
        self, work: Callable[[], Coroutine[Any, Any, Answered]], timeout: float | None = None
    ) -> Answered:
        """Run a coroutine on the loop and wait for what it returns or raises."""
        loop = self.loop
        if _running_loop() is loop:
            raise RuntimeError(_ON_ITS_OWN_LOOP)
        future = asyncio.run_coroutine_threadsafe(work(), loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise


shared = LoopThread()
"""The loop of all sync clients that were given none, so that they can share a scheduler."""


def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="headgate-adapters", daemon=True)
    thread.start()
    return loop


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
