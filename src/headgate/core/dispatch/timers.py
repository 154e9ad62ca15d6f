"""Timers: what falls due when, with a cost that depends on what falls due.

A timer is replaced or dropped by its key. The old entry stays in the heap until it comes to the
top, or until most of the heap is old and it is built anew; so memory follows the live timers.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

SLACK = 1_024


class Timers(Generic[Key]):
    """Keys by the time at which they fall due; a key has one time."""

    __slots__ = ("_count", "_due", "_heap")

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: Key, at: float) -> None:
        """Let a key fall due at a time, instead of the one it had."""
        if self._due.get(key) == at:
            return
        self._due[key] = at
        self._count += 1
        heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._due) + SLACK:
            self._rebuild()

    def drop(self, key: Key) -> None:
        """Forget a key."""
        self._due.pop(key, None)
        if len(self._heap) > 2 * len(self._due) + SLACK:
            self._rebuild()

    def at(self, key: Key) -> float | None:
        """Return when a key falls due."""
        return self._due.get(key)

    def next_at(self) -> float | None:
        """Return when the first key falls due."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at:
                return at
            heappop(self._heap)
        return None

    def pop_due(self, now: float, *, most: int) -> list[Key]:
        """Take out the keys that are due, the earliest first, at most so many."""
        due: list[Key] = []
        while len(due) < most and (at := self.next_at()) is not None and at <= now:
            key = heappop(self._heap)[2]
            del self._due[key]
            due.append(key)
        return due

    def _rebuild(self) -> None:
        self._heap = [(at, place, key) for place, (key, at) in enumerate(self._due.items())]
        self._count = len(self._heap)
        heapify(self._heap)
