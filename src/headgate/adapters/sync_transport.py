"""The governed transport for programs without asyncio: the same calls, from any thread.

Places and money are asked for on an event loop; the request itself goes out from the thread that
makes it. Rule: as with the other transport, an answer passes unchanged, and closing it ends its
call.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from contextlib import suppress

import httpx2

from headgate.adapters.async_transport import with_stream
from headgate.adapters.governed_call import GovernedCall
from headgate.adapters.governor import Governor
from headgate.adapters.loop_thread import LoopThread, UnusableLoopError, run_soon
from headgate.adapters.sdk_errors import let_pass
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
            if isinstance(error, UnusableLoopError):
                let_pass(error, request.headers)
            raise

    def close(self) -> None:
        """Close the connections, and books that were opened for them."""
        try:
            self._inner.close()
        finally:
            self._close_books()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that its calls are known to."""
        return self._loop_thread.loop

    def finish(self, call: GovernedCall) -> None:
        """End a call, in bounded time; on the loop's own thread, without waiting for it."""
        if self._loop_thread.is_own_thread:
            run_soon(self.loop, call.finish)
            return
        try:
            self._loop_thread.run(call.finish, FINISH_SECONDS)
        except (TimeoutError, UnusableLoopError) as error:
            # A loop that was stopped may run again.
            run_soon(self.loop, call.finish)
            if call.is_sent:
                problem = f"a call was not settled, its lease decides: {error!r}"
                self._governor.not_settled(LedgerUnavailableError(problem))

    def _close_books(self) -> None:
        if self._governor.books is None:
            return
        if self._loop_thread.is_own_thread:
            run_soon(self.loop, self._governor.close)
            return
        # Books on a loop that is over cannot be closed any more, and nobody is helped by an error.
        with suppress(UnusableLoopError):
            self._loop_thread.run(self._governor.close)


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
        self._forgotten = weakref.finalize(self, run_soon, transport.loop, call.finish)
        self._forgotten.atexit = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._inner:
            self._call.read(chunk)
            yield chunk

    def close(self) -> None:
        """Close the body, then free the place and book the cost."""
        try:
            self._inner.close()
        finally:
            self._transport.finish(self._call)
            self._forgotten.detach()
