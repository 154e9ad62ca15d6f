"""An event loop that plain functions can ask: places and budgets live on one, threads do not.

Rule: whoever waits in a thread can be interrupted, and what it asked for is cancelled then. The
loop's own thread never waits for the loop, and nobody waits for a loop that does not run.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from headgate.errors import CallerError

Answered = TypeVar("Answered")

LOOK_SECONDS = 1.0
"""How often somebody who waits looks whether the loop still runs."""

_ON_ITS_OWN_LOOP = (
    "a sync client was called on the event loop that it waits for; "
    "call it from a thread, or use the async client"
)
_NOT_RUNNING = (
    "the event loop of a sync client does not run; keep it running while the client is used, "
    "or give no loop"
)

_ending: set[asyncio.Task[None]] = set()
"""What runs behind somebody who does not wait for it; a loop alone would not keep it."""


class UnusableLoopError(CallerError, RuntimeError):
    """The event loop of a sync client cannot be waited for: it does not run, or runs the caller."""


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

    @property
    def is_own_thread(self) -> bool:
        """Whether this is the thread of the loop, which must not wait for it."""
        return _running_loop() is self.loop

    def run(
        self, work: Callable[[], Coroutine[Any, Any, Answered]], timeout: float | None = None
    ) -> Answered:
        """Run a coroutine on the loop and wait for what it returns or raises."""
        if self.is_own_thread:
            raise UnusableLoopError(_ON_ITS_OWN_LOOP)
        loop = self.loop
        if not loop.is_running():
            raise UnusableLoopError(_NOT_RUNNING)
        future = _scheduled(work(), loop)
        try:
            _wait(future, loop, timeout)
            return future.result()
        except CancelledError:
            # A loop that ends cancels what it runs.
            raise UnusableLoopError(_NOT_RUNNING) from None
        except BaseException:
            if not loop.is_closed():
                future.cancel()
            raise


shared = LoopThread()
"""The loop of all sync clients that were given none, so that they can share a scheduler."""


def run_soon(
    loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run a coroutine on a loop, from any thread and without waiting for it."""
    # A loop that is closed has nobody waiting for a place, and the lease decides on the money.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_begin, loop, work)


def _begin(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    task = loop.create_task(work())
    _ending.add(task)
    task.add_done_callback(_ending.discard)


def _scheduled(
    coroutine: Coroutine[Any, Any, Answered], loop: asyncio.AbstractEventLoop
) -> Future[Answered]:
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise UnusableLoopError(_NOT_RUNNING) from None


def _wait(future: Future[Answered], loop: asyncio.AbstractEventLoop, timeout: float | None) -> None:
    ends = None if timeout is None else time.monotonic() + timeout
    while True:
        left = LOOK_SECONDS if ends is None else ends - time.monotonic()
        # What is done may itself be a timeout, so the future is not asked for its result here.
        if wait((future,), min(max(left, 0.0), LOOK_SECONDS)).done:
            return
        if left <= 0:
            raise TimeoutError
        if not loop.is_running():
            raise UnusableLoopError(_NOT_RUNNING)


def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    is_running = threading.Event()
    loop.call_soon(is_running.set)
    thread = threading.Thread(target=loop.run_forever, name="headgate-adapters", daemon=True)
    thread.start()
    is_running.wait()
    return loop


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
