"""The callbacks that could run now, and which of them does.

Without a generator of random numbers they run in the order they came, as in asyncio. With one, any
task that is ready may be next. Plain callbacks keep their order among each other, because asyncio
promises it; between tasks it promises nothing, and that is what a seed explores.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from headgate.testing.boots import Boot


class Entry(NamedTuple):
    """A callback and the boot it belongs to; None is outside of every host."""

    handle: asyncio.Handle
    boot: Boot | None

    @property
    def is_void(self) -> bool:
        """True if it was cancelled, or if its host has crashed since."""
        return self.handle.cancelled() or (self.boot is not None and self.boot.dead)


class ReadyQueue:
    """Holds ready callbacks and chooses the next one."""

    def __init__(self, random: Random | None) -> None:
        self._random = random
        self._plain: deque[Entry] = deque()
        self._steps: list[tuple[int, int, Entry]] = []
        self._pushed = 0
        self._numbers: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._plain) + len(self._steps)

    def push(self, entry: Entry, callback: Callable[..., object] | None = None) -> None:
        """Add a callback; `callback` tells whether it is the step of a task."""
        task = getattr(callback, "__self__", None)
        if self._random is None or not isinstance(task, asyncio.Task):
            self._plain.append(entry)
            return
        self._pushed += 1
        # Sorted by the task's number, not by arrival: a task group cancels its tasks in the order
        # of a set, which changes from process to process.
        insort(self._steps, (self._number_of(task), self._pushed, entry))

    def pop(self) -> Entry:
        """Take out the callback that runs next."""
        choices = len(self._steps) + bool(self._plain)
        chosen = self._random.randrange(choices) if self._random and choices > 1 else 0
        return self._steps.pop(chosen)[2] if chosen < len(self._steps) else self._plain.popleft()

    def _number_of(self, task: asyncio.Task[Any]) -> int:
        return self._numbers.setdefault(task, self._pushed)
