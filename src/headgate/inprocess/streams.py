"""A stream holds its place until it is exhausted, closed, or forgotten.

A provider answers in pieces, and the call is not over before the last of them. Rule: the place is
freed once, also for a stream that nobody reads to its end, or ever starts to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

Item = TypeVar("Item")
End = Callable[[BaseException | None], Awaitable[None]]
"""What frees the place; it is called once, with what ended the stream."""


class GovernedStream(Generic[Item]):
    """An async iterator over somebody else's, with whatever else that one can do."""

    def __init__(self, source: AsyncIterator[Item], end: End) -> None:
        self._source = source
        self._end: End | None = end
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        try:
            return await self._source.__anext__()
        except StopAsyncIteration:
            await self._finish(None)
            raise
        except BaseException as error:
            await self._finish(error)
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the source, and free the place."""
        try:
            for name in ("aclose", "close"):
                close = getattr(self._source, name, None)
                if close is not None:
                    closing = close()
                    if isinstance(closing, Awaitable):
                        await closing
                    break
        finally:
            await self._finish(None)

    close = aclose

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the source has
        return getattr(self._source, name)

    def __del__(self) -> None:
        end, self._end = self._end, None
        if end is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_end_later, end)

    async def _finish(self, error: BaseException | None) -> None:
        end, self._end = self._end, None
        if end is not None:
            await end(error)


_ending: set[asyncio.Task[None]] = set()


def _end_later(end: End) -> None:
    async def ended() -> None:
        await end(None)

    task = asyncio.get_running_loop().create_task(ended())
    # The loop itself keeps only a weak reference.
    _ending.add(task)
    task.add_done_callback(_ending.discard)
