"""A transport that lets calls to models pass when they have a place and their money is held.

Rule: an answer passes unchanged, piece by piece, and its call ends when it was read or closed. An
answer that nobody closes ends its call when it is forgotten.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator

import httpx2

from headgate.adapters.governed_call import GovernedCall
from headgate.adapters.governor import Governor
from headgate.adapters.loop_thread import run_soon


class GovernedAsyncTransport(httpx2.AsyncBaseTransport):
    """Sends over another transport what its governor lets pass."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, governor: Governor) -> None:
        self._inner = inner
        self._governor = governor

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a call to a model waits for its place and its money first."""
        if not self._governor.is_governed(request):
            return await self._inner.handle_async_request(request)
        call = self._governor.call_for(request, await request.aread())
        await call.begin()
        try:
            response = await self._inner.handle_async_request(call.to_send())
            call.answered(response)
            return with_stream(response, GovernedAsyncStream(response.stream, call))
        except BaseException as error:
            call.failed(error)
            await call.finish()
            raise

    async def aclose(self) -> None:
        """Close the connections, and books that were opened for them."""
        try:
            await self._inner.aclose()
        finally:
            await self._governor.close()


class GovernedAsyncStream(httpx2.AsyncByteStream):
    """The body of an answer; to close it ends its call."""

    def __init__(
        self, inner: httpx2.SyncByteStream | httpx2.AsyncByteStream, call: GovernedCall
    ) -> None:
        if not isinstance(inner, httpx2.AsyncByteStream):
            raise TypeError("an async client needs a transport whose answers are async")
        self._inner = inner
        self._call = call
        loop = asyncio.get_running_loop()
        self._forgotten = weakref.finalize(self, run_soon, loop, call.finish)
        self._forgotten.atexit = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            self._call.read(chunk)
            yield chunk

    async def aclose(self) -> None:
        """Close the body, then free the place and book the cost."""
        try:
            await self._inner.aclose()
        finally:
            await self._call.finish()
            self._forgotten.detach()


def with_stream(
    response: httpx2.Response, stream: httpx2.AsyncByteStream | httpx2.SyncByteStream
) -> httpx2.Response:
    """Return the answer with another body; it is not read yet, even if the given one was."""
    return httpx2.Response(
        response.status_code,
        headers=response.headers,
        stream=stream,
        extensions=response.extensions,
    )
