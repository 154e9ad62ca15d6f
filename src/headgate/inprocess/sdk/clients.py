"""HTTP clients that govern what is built on them: pass one to an SDK as its `http_client`.

Both SDKs take clients of httpx2. These have the limits and timeouts that the SDKs give their own,
and go through the proxies that the environment names, as those do. Their transports let a call to a
model pass when it has a permit and its money is held.

Rule: a response passes unchanged, piece by piece, and its call ends when it was read or closed. A
response that nobody closes ends its call when it is forgotten.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.request import getproxies

import httpx2

from headgate.budgets.tracker import (
    SETTLE_SECONDS,
    Amount,
    BudgetTracker,
    OnExhausted,
    note_held,
)
from headgate.errors import CallerError, HeadgateError, LedgerUnavailableError
from headgate.inprocess.scheduler import LoadScheduler
from headgate.inprocess.sdk.governed_call import GovernedCall, let_pass
from headgate.inprocess.sdk.governor import Governor, Name, OnResponse
from headgate.providers.prices import PriceList

TIMEOUT = httpx2.Timeout(600.0, connect=5.0)
LIMITS = httpx2.Limits(max_connections=1_000, max_keepalive_connections=100)


class GovernorFields(TypedDict, total=False):
    """The fields of a `Governor`."""

    scheduler: LoadScheduler | None
    agent_id: Name
    tracker: BudgetTracker | str | None
    scope: Name | None
    budget_usd: Amount | None
    also: Iterable[str]
    prices: PriceList | None
    reserve: Literal["strict", "expected"]
    max_tokens: int | None
    estimate_usd: Amount | None
    cheaper: Mapping[str, str] | None
    on_exhausted: OnExhausted
    max_wait_seconds: float | None
    lease_seconds: float
    ask_stream_usage: bool
    pause_when_limited: bool
    allow_other: bool
    on_unsettled: Callable[[HeadgateError], None] | None
    on_response: OnResponse | None


def async_client(
    *, transport: httpx2.AsyncBaseTransport | None = None, **fields: Unpack[GovernorFields]
) -> httpx2.AsyncClient:
    """Return a client for `AsyncOpenAI` and `AsyncAnthropic`; `fields` are those of a `Governor`.

    It belongs to the event loop of its scheduler. A `transport` of your own replaces the usual
    connections and proxies.
    """
    return governed_async_client(Governor(**fields), transport)


def governed_async_client(
    governor: Governor, transport: httpx2.AsyncBaseTransport | None = None
) -> httpx2.AsyncClient:
    """Return a client whose calls a governor lets pass."""
    proxies = {} if transport is not None else proxies_of(getproxies())
    return httpx2.AsyncClient(
        transport=GovernedAsyncTransport(
            transport or httpx2.AsyncHTTPTransport(limits=LIMITS), governor
        ),
        mounts={
            pattern: None
            if proxy is None
            else GovernedAsyncTransport(
                httpx2.AsyncHTTPTransport(limits=LIMITS, proxy=proxy), governor
            )
            for pattern, proxy in proxies.items()
        },
        timeout=TIMEOUT,
        follow_redirects=True,
    )


def sync_client(
    *,
    transport: httpx2.BaseTransport | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
    **fields: Unpack[GovernorFields],
) -> httpx2.Client:
    """Return a client for `OpenAI` and `Anthropic`; `fields` are those of a `Governor`.

    Permits and money are asked for on `loop`, which must be running in another thread than the one
    that calls. Without one they are asked for on a loop that all such clients of the process share,
    and then nothing else may use their scheduler, and trackers are best given as URLs.
    """
    return governed_sync_client(Governor(**fields), transport, loop)


def governed_sync_client(
    governor: Governor,
    transport: httpx2.BaseTransport | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> httpx2.Client:
    """Return a client whose calls a governor lets pass."""
    loop_thread = shared if loop is None else LoopThread(loop)
    proxies = {} if transport is not None else proxies_of(getproxies())
    return httpx2.Client(
        transport=GovernedTransport(
            transport or httpx2.HTTPTransport(limits=LIMITS), governor, loop_thread
        ),
        mounts={
            pattern: None
            if proxy is None
            else GovernedTransport(
                httpx2.HTTPTransport(limits=LIMITS, proxy=proxy), governor, loop_thread
            )
            for pattern, proxy in proxies.items()
        },
        timeout=TIMEOUT,
        follow_redirects=True,
    )


def proxies_of(named: Mapping[str, str]) -> dict[str, str | None]:
    """Return the proxy of each pattern of URLs, None for those that are reached directly.

    A client that is given a transport does not look at the environment by itself.
    """
    direct = [host.strip() for host in named.get("no", "").split(",") if host.strip()]
    if "*" in direct:
        return {}
    proxies: dict[str, str | None] = {
        f"{scheme}://": url if "://" in url else f"http://{url}"
        for scheme in ("http", "https", "all")
        if (url := named.get(scheme))
    }
    patterns = (_pattern(host) for host in direct)
    return proxies | {pattern: None for pattern in patterns if proxies and pattern is not None}


def _pattern(host: str) -> str | None:
    """Return what matches a host that is reached directly; None for a network, or what is none."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        is_name = host.lower() == "localhost" or "://" in host
        pattern = host if "://" in host else f"all://{'' if is_name else '*'}{host}"
        return pattern if "/" not in pattern.partition("://")[2] else None
    return f"all://[{address}]" if isinstance(address, IPv6Address) else f"all://{address}"


# The transports of these clients.


class GovernedAsyncTransport(httpx2.AsyncBaseTransport):
    """Sends over another transport what its governor lets pass."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, governor: Governor) -> None:
        self._inner = inner
        self._governor = governor

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; a call to a model waits for its permit and its money first."""
        if not self._governor.is_governed(request):
            return await self._inner.handle_async_request(request)
        call = self._governor.call_for(request, await request.aread())
        await call.begin()
        try:
            response = await self._inner.handle_async_request(call.to_send())
            try:
                call.received(response)
            except httpx2.DecodingError:
                await response.aclose()
                raise
            return with_stream(response, GovernedAsyncStream(response.stream, call))
        except BaseException as error:
            call.failed(error)
            await call.finish()
            raise

    async def aclose(self) -> None:
        """Close the connections, and a ledger that was opened for them."""
        try:
            await self._inner.aclose()
        finally:
            await self._governor.close()


class GovernedAsyncStream(httpx2.AsyncByteStream):
    """The body of a response; to close it ends its call."""

    def __init__(
        self, inner: httpx2.SyncByteStream | httpx2.AsyncByteStream, call: GovernedCall
    ) -> None:
        if not isinstance(inner, httpx2.AsyncByteStream):
            raise TypeError("an async client needs a transport whose responses are async")
        self._inner = inner
        self._call = call
        loop = asyncio.get_running_loop()
        self._forgotten = weakref.finalize(self, run_soon, loop, call.finish)
        self._forgotten.atexit = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            has_more = self._call.read(chunk)
            while has_more:
                await asyncio.sleep(0)
                has_more = self._call.read(b"")
            if shown := self._call.shown(chunk):
                yield shown
        if rest := self._call.shown_rest():
            yield rest

    async def aclose(self) -> None:
        """Close the body, then free the permit and book the cost."""
        try:
            await self._inner.aclose()
        finally:
            await self._call.finish()
            self._forgotten.detach()


def with_stream(
    response: httpx2.Response, stream: httpx2.AsyncByteStream | httpx2.SyncByteStream
) -> httpx2.Response:
    """Return the response with another body; it is not read yet, even if the given one was."""
    return httpx2.Response(
        response.status_code,
        headers=response.headers,
        stream=stream,
        extensions=response.extensions,
    )


# The governed transport for programs without asyncio: the same calls, from any thread.
#
# Permits and money are asked for on an event loop; the request itself goes out from the thread that
# makes it. Rule: as with the other transport, a response passes unchanged, and closing it ends its
# call.

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
        """Send a request; a call to a model waits for its permit and its money first."""
        if not self._governor.is_governed(request):
            return self._inner.handle_request(request)
        call = self._governor.call_for(request, request.read())
        try:
            self._loop_thread.run(call.begin)
            if call.held is not None:
                # It began on another thread: this one must know that it holds money.
                note_held(call.held)
            response = self._inner.handle_request(call.to_send())
            try:
                call.received(response)
            except httpx2.DecodingError:
                response.close()
                raise
            return with_stream(response, GovernedStream(response.stream, call, self))
        except BaseException as error:
            call.failed(error)
            self.finish(call)
            if isinstance(error, UnusableLoopError):
                let_pass(error, request.headers)
            raise

    def close(self) -> None:
        """Close the connections, and a ledger that was opened for them."""
        try:
            self._inner.close()
        finally:
            self._close_tracker()

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

    def _close_tracker(self) -> None:
        if self._governor.tracker is None:
            return
        if self._loop_thread.is_own_thread:
            run_soon(self.loop, self._governor.close)
            return
        # A ledger on a loop that is over cannot be closed any more; an error would help nobody.
        with suppress(UnusableLoopError):
            self._loop_thread.run(self._governor.close)


class GovernedStream(httpx2.SyncByteStream):
    """The body of a response; to close it ends its call."""

    def __init__(
        self,
        inner: httpx2.SyncByteStream | httpx2.AsyncByteStream,
        call: GovernedCall,
        transport: GovernedTransport,
    ) -> None:
        if not isinstance(inner, httpx2.SyncByteStream):
            raise TypeError("a sync client needs a transport whose responses are not async")
        self._inner = inner
        self._call = call
        self._transport = transport
        self._forgotten = weakref.finalize(self, run_soon, transport.loop, call.finish)
        self._forgotten.atexit = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._inner:
            has_more = self._call.read(chunk)
            while has_more:
                has_more = self._call.read(b"")
            if shown := self._call.shown(chunk):
                yield shown
        if rest := self._call.shown_rest():
            yield rest

    def close(self) -> None:
        """Close the body, then free the permit and book the cost."""
        try:
            self._inner.close()
        finally:
            self._transport.finish(self._call)
            self._forgotten.detach()


# An event loop that plain functions can ask: permits and budgets live on one, threads do not.
#
# Rule: whoever waits in a thread can be interrupted, and what it asked for is cancelled then. The
# loop's own thread never waits for the loop, and nobody waits for a loop that does not run.

Result = TypeVar("Result")

CHECK_SECONDS = 1.0
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
        self, work: Callable[[], Coroutine[Any, Any, Result]], timeout: float | None = None
    ) -> Result:
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
    # A loop that is closed has nobody waiting for a permit, and the lease decides on the money.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_begin, loop, work)


def _begin(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    task = loop.create_task(work())
    _ending.add(task)
    task.add_done_callback(_ending.discard)


def _scheduled(
    coroutine: Coroutine[Any, Any, Result], loop: asyncio.AbstractEventLoop
) -> Future[Result]:
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise UnusableLoopError(_NOT_RUNNING) from None


def _wait(future: Future[Result], loop: asyncio.AbstractEventLoop, timeout: float | None) -> None:
    ends = None if timeout is None else time.monotonic() + timeout
    while True:
        left = CHECK_SECONDS if ends is None else ends - time.monotonic()
        # What is done may itself be a timeout, so the future is not asked for its result here.
        if wait((future,), min(max(left, 0.0), CHECK_SECONDS)).done:
            return
        if left <= 0:
            raise TimeoutError
        if not loop.is_running():
            raise UnusableLoopError(_NOT_RUNNING)


def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    is_running = threading.Event()
    loop.call_soon(is_running.set)
    thread = threading.Thread(target=loop.run_forever, name="headgate-sdk", daemon=True)
    thread.start()
    is_running.wait()
    return loop


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
