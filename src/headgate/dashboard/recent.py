"""What was made a moment ago, so that fifty open pages cost one drawing.

Rule: what is kept is found again only under the same key, and a key has everything in it that the
result may depend on. What is made soon is not kept beyond the next full second, which is when pages
are told what changed: what they fetch then was made after the change. What takes long is kept for
ten times as long, so that the largest page takes a tenth of the time at most, however often it is
asked for. What is old is let go, also when nobody asks any more: a page may hold a whole tree.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from headgate.errors import StoreUnavailableError

FRESH_SECONDS = 1.0
MAKE_SECONDS = 25.0
COST_FACTOR = 10.0
MOST_FRESH_SECONDS = 10.0
MAX_KEPT = 200

Made = TypeVar("Made")


def until_full_second(now: float, seconds: float = FRESH_SECONDS) -> float:
    """Return how long it is until the next moment at which everybody looks."""
    return seconds - now % seconds


class Recent(Generic[Made]):
    """The last result of each key; those who ask while it is made wait for the same one."""

    def __init__(self, ticks: Callable[[], float] | None = None) -> None:
        self._ticks = ticks
        self._kept: OrderedDict[object, tuple[asyncio.Task[Made], float]] = OrderedDict()
        self._sweep: asyncio.TimerHandle | None = None

    async def get(self, key: object, make: Callable[[], Awaitable[Made]]) -> Made:
        """Return what `make` returns, or returned under this key since the last full second.

        It is made in a task of its own: that one visitor leaves is nothing to the others.
        """
        now = self._now()
        making, fresh_until = self._kept.get(key, (None, 0.0))
        if making is None or now >= fresh_until or _has_failed(making):
            making = asyncio.create_task(_within_time(make))
            making.add_done_callback(lambda made: self._made(key, made, now))
            self._keep(key, making, now + until_full_second(now, FRESH_SECONDS))
        return await asyncio.shield(making)

    def _now(self) -> float:
        return (self._ticks or asyncio.get_running_loop().time)()

    def _made(self, key: object, made: asyncio.Task[Made], began: float) -> None:
        _look_at(made)
        rest = min(COST_FACTOR * (self._now() - began), MOST_FRESH_SECONDS)
        known, fresh_until = self._kept.get(key, (None, 0.0))
        if known is made and began + rest > fresh_until:
            end = began + rest
            self._kept[key] = (made, end + until_full_second(end, FRESH_SECONDS))

    def _keep(self, key: object, making: asyncio.Task[Made], fresh_until: float) -> None:
        self._kept[key] = (making, fresh_until)
        self._kept.move_to_end(key)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        if self._sweep is None:
            self._sweep_soon()

    def _sweep_soon(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(FRESH_SECONDS, self._let_go) if self._kept else None

    def _let_go(self) -> None:
        now = self._now()
        for key, (made, fresh_until) in list(self._kept.items()):
            if made.done() and now >= fresh_until:
                del self._kept[key]
        self._sweep_soon()


async def _within_time(make: Callable[[], Awaitable[Made]]) -> Made:
    try:
        async with asyncio.timeout(MAKE_SECONDS):
            return await make()
    except TimeoutError:
        raise StoreUnavailableError("the figures of a page did not come in time") from None


def _has_failed(making: asyncio.Task[Made]) -> bool:
    # Those who waited were told the same failure; whoever comes after them tries again.
    return making.done() and (making.cancelled() or making.exception() is not None)


def _look_at(making: asyncio.Task[Made]) -> None:
    # Whoever asked may have left, and then nobody asks what came of it.
    if not making.cancelled():
        making.exception()
