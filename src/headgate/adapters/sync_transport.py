"""The governed transport for programs without asyncio: the same calls, from any thread.

Places and money are asked for on an event loop; the request itself goes out from the thread that
makes it. Rule: as with the other transport, an answer passes unchanged, and closing it ends its
call.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator

import httpx2

from headgate.adapters.async_transport import end_soon, with_stream
from headgate.adapters.governed_call import GovernedCall
from headgate.adapters.governor import Governor
from headgate.adapters.loop_thread import LoopThread
from headgate.errors import LedgerUnavailableError
from headgate.hold import SETTLE_SECONDS

FINISH_SECONDS = 2 * SETTLE_SECONDS
"""How long the end of a call may take before the lease is left to decide."""


class GovernedTransport(httpx2.BaseTransport):
    """Sends over another transport what its governor lets pass."""

    def __init__(
        self, inner: httpx2.BaseTransport, governor: Governor, loop_thread: LoopThread
    ) -> None:
        self._inner = inner
        self._governor = governor
        self._loop_thread = loop_thread

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a call to a model waits for its place and its money first."""
        if not self._governor.is_governed(request):
            return self._inner.handle_request(request)
        call = self._governor.call_for(request, request.read())
        try:
            self._loop_thread.run(call.begin)
            response = self._inner.handle_request(call.to_send())
            call.answered(response)
            return with_stream(response, GovernedStream(response.stream, call, self))
        except BaseException as error:
            call.failed(error)
            self.finish(call)
            raise

    def close(self) -> None:
        """Close the connections, and books that were opened for them."""
        try:
            self._inner.close()
        finally:
            if self._governor.has_own_books:
                self._loop_thread.run(self._governor.close)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that its calls are known to."""
        return self._loop_thread.loop

    def finish(self, call: GovernedCall) -> None:
        """End a call, in bounded time."""
        try:
            self._loop_thread.run(call.finish, FINISH_SECONDS)
        except TimeoutError:
            problem = "a call was not settled in time: its lease decides"
            self._governor.on_unsettled(LedgerUnavailableError(problem))


class GovernedStream(httpx2.SyncByteStream):
    """The body of an answer; to close it ends its call."""

    def __init__(
        self,
        inner: httpx2.SyncByteStream | httpx2.AsyncByteStream,
        call: GovernedCall,
        transport: GovernedTransport,
    ) -> None:
        if not isinstance(inner, httpx2.SyncByteStream):
            raise TypeError("a sync client needs a transport whose answers are not async")
        self._inner = inner
        self._call = call
        self._transport = transport
        self._forgotten = weakref.finalize(self, end_soon, transport.loop, call)
        self._forgotten.atexit = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._inner:
            self._call.read(chunk)
            yield chunk

    def close(self) -> None:
        """Close the body, then free the place and book the cost."""
        self._forgotten.detach()
        try:
            self._inner.close()
        finally:
            self._transport.finish(self._call)
