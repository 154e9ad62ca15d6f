"""The deadlines of everything that runs, on one timer of the event loop.

A timer for each attempt would cost more than most attempts that come to their end in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from headgate.core.dispatch.timers import Timers

Key = TypeVar("Key", bound=Hashable)

MAX_LATE = 1_000


class DeadlineWatch(Generic[Key]):
    """Calls `late` with whatever has not left by its deadline, which is judged by `clock`."""

    def __init__(self, clock: Callable[[], float], late: Callable[[Key], None]) -> None:
        self._clock = clock
        self._late = late
        self._timers: Timers[Key] = Timers()
        self._alarm: asyncio.TimerHandle | None = None
        self._rings_at = 0.0

    def watch(self, key: Key, deadline: float | None) -> None:
        """Call if this has not left by the deadline; None is without end."""
        if deadline is None:
            return
        self._timers.set(key, deadline)
        if self._alarm is None or deadline < self._rings_at:
            self._set_alarm(deadline)

    def leave(self, key: Key) -> None:
        """Call no more for this."""
        self._timers.drop(key)

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._rings_at = at
        seconds = max(0.0, at - self._clock())
        self._alarm = asyncio.get_running_loop().call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        for key in self._timers.pop_due(self._clock(), most=MAX_LATE):
            self._late(key)
        following = self._timers.next_at()
        if following is not None:
            self._set_alarm(following)
