"""A stream holds its permit until it is exhausted, closed, or forgotten.

A provider answers in pieces, and the call is not over before the last of them. Rule: the permit is
freed once, also for a stream that nobody reads to its end, or ever starts to read; and not before
what runs in it has ended.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from headgate.inprocess.permits import Grant, granted_to

Item = TypeVar("Item")
END = object()


class End(Protocol):
    """What frees the permit, once: with what ended the stream, and whether all of it was read."""

    async def __call__(self, error: BaseException | None, *, is_whole: bool) -> None:
        """Free it."""


class GovernedStream(Generic[Item]):
    """An async iterator over somebody else's, with whatever else that one can do.

    `grant` is the permit that it holds; it reports there what it costs.
    """

    def __init__(
        self,
        source: AsyncIterator[Item],
        grant: Grant,
        *,
        read: Callable[[Item], None],
        end: End,
        original: object = None,
    ) -> None:
        self.grant = grant
        self._source = source
        self._original = source if original is None else original
        self._read = read
        self._end: End | None = end
        self._is_reading = False
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        self._is_reading = True
        try:
            with granted_to(self.grant):
                item = await self._source.__anext__()
        except StopAsyncIteration:
            await self._finish(None, is_whole=not self._is_closed)
            raise
        except BaseException as error:
            await self._finish(error)
            raise
        finally:
            self._is_reading = False
        self._read(item)
        if self._is_closed:
            await self._finish(None)
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An error of whoever reads says nothing about what the provider charged.
        await self.aclose()

    async def aclose(self) -> None:
        """Close the source, and free the permit; while it is read, when that step has ended."""
        try:
            with granted_to(self.grant):
                await _close_all(self._source, self._original)
            self._is_closed = True
        finally:
            if not self._is_reading:
                await self._finish(None)

    close = aclose

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the source has
        return getattr(self._original, name)

    def __del__(self) -> None:
        end, self._end = self._end, None
        if end is not None and not self._loop.is_closed():
            ending = functools.partial(_end_later, self._source, self._original, self.grant, end)
            self._loop.call_soon_threadsafe(ending)

    async def _finish(self, error: BaseException | None, *, is_whole: bool = False) -> None:
        end, self._end = self._end, None
        if end is not None:
            await end(error, is_whole=is_whole)


class ThreadedIterator(Generic[Item]):
    """A plain iterator, of which each step runs in a thread, and its close as well."""

    def __init__(
        self,
        source: Iterator[Item],
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        is_running: Callable[[], bool],
    ) -> None:
        self._source = source
        self._in_thread = in_thread
        self._is_running = is_running
        self._is_closing = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        item: Item = await self._in_thread(functools.partial(next, self._source, END))
        if self._is_closing:
            await self.aclose()
        if item is END:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Close the source; while a step is in it, when that has ended."""
        self._is_closing = self._is_running()
        close = getattr(self._source, "close", None)
        if close is not None and not self._is_closing:
            await self._in_thread(close)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the source has
        return getattr(self._source, name)


async def _close_all(source: object, original: object) -> None:
    """Close a source, and what it was made from."""
    await _close(source)
    if original is not source:
        await _close(original)


async def _close(source: object) -> None:
    for name in ("aclose", "close"):
        close = getattr(source, name, None)
        if close is not None:
            closing = close()
            if isinstance(closing, Awaitable):
                await closing
            return


_ending: set[asyncio.Task[None]] = set()


def _end_later(source: object, original: object, grant: Grant, end: End) -> None:
    async def ended() -> None:
        try:
            with granted_to(grant):
                await _close_all(source, original)
        finally:
            await end(None, is_whole=False)

    task = asyncio.get_running_loop().create_task(ended())
    # The loop itself keeps only a weak reference.
    _ending.add(task)
    task.add_done_callback(_ending.discard)
