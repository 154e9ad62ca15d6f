"""A pool of connections for one target or provider: requests go out, bounded responses come in.

Requests go over the lean connections of `connection_pool`, which cost a tenth of httpx2's; through
a proxy they go over the transport of httpx2. Responses and errors are those of httpx2 either way.
No cookie goes from one task to the next, and no URL to the log, since it may carry a key. Redirects
are never followed and certificates always verified. There is no time limit on a response: whoever
asks has one, and it strikes, because no response holds the loop for longer than a slice of work.
Its head and trailers are bounded and its body in pieces; what is coded is decoded slice by slice,
in a thread where one slice is not enough.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache, lru_cache, partial
from typing import Any

import httpcore2
import httpx2

from headgate.core.text import SLICE_SECONDS
from headgate.errors import InvalidFieldError, InvalidSettingError
from headgate.providers.connection_pool import (
    AnswerTimeoutError,
    NotSentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
    trusted_context,
    why_not_connected,
)
from headgate.providers.content_coding import (
    ACCEPT_ENCODING,
    ContentCodingError,
    ContentDecoder,
    TooLongError,
    coding_of,
)

# Servers commonly close an idle connection after five seconds; it must not be reused just then.
KEEPALIVE_SECONDS = 2.0
ERROR_BODY_BYTES = 4_096
ERROR_BODY_SECONDS = 5.0
MAX_ERROR_BODY_BYTES = 1 << 20
"""What is decoded of it at the most, to show its beginning."""

DECODE_SECONDS = 0.01
DECODE_BYTES = 1 << 20
"""How much is decoded in the thread before the next body has its turn there."""
FEW_PIECES = 16_384
BYTES_A_PIECE = 16
"""A body may come in a few thousand pieces of any size; beyond them they have so many bytes each.

A piece costs about the same whatever is in it, so a megabyte in chunks of one byte would take
twenty seconds.
"""

NOT_SENT = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.ProxyError,
)
"""Errors that come before a request is sent: nobody can have acted on it, or charged for it."""
NOT_SENDABLE = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.InvalidURL)
"""Errors of the request itself, which no further try would send either."""


class HttpClient:
    """Sends requests over connections that are kept and counted."""

    def __init__(
        self, *, max_connections: int, connect_timeout_seconds: float, proxy: str | None = None
    ) -> None:
        self._transport = (
            _PooledTransport(max_connections, connect_timeout_seconds)
            if proxy is None
            else _ProxyTransport(proxy, max_connections, connect_timeout_seconds)
        )

    async def send(
        self, method: str, url: str, headers: dict[str, str], content: bytes | None = None
    ) -> httpx2.Response:
        """Send a request and wait for the head of its response; the caller closes the response."""
        sent = {**_USUAL_HEADERS, **headers}
        return await self._transport.send(method, url, sent, content or b"")

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()


_USUAL_HEADERS = {"user-agent": "headgate", "accept": "*/*", "accept-encoding": ACCEPT_ENCODING}


class _PooledTransport:
    """Sends requests straight to their hosts; a pool for each of the last ones that were asked."""

    def __init__(self, max_connections: int, connect_timeout_seconds: float) -> None:
        self._max_connections = max_connections
        self._connect_seconds = connect_timeout_seconds
        self._permits = asyncio.Semaphore(max_connections)
        self._pools: OrderedDict[str, UpstreamPool] = OrderedDict()
        # How many requests of each origin are under way: from before a connection is made for one
        # until its response is closed.
        self._under_way: Counter[str] = Counter()

    async def send(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes
    ) -> httpx2.Response:
        is_short = len(url) <= _LONGEST_CACHED_URL
        origin, path = (_split_url if is_short else _split_new_url)(url)
        try:
            named = [
                (name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()
            ]
        except UnicodeEncodeError:
            raise httpx2.LocalProtocolError("a header is not ASCII") from None
        await self._permits.acquire()
        self._under_way[origin] += 1
        stream = None
        try:
            response = await self._pool(origin).send(method, path, named, content)
            stream = _PooledStream(response, partial(self._end, origin))
        except UpstreamError as error:
            raise _as_httpx2(error) from error
        except InvalidSettingError as error:
            problem = f"the URL {error.problem}"
            raise httpx2.InvalidURL(problem) from None
        except InvalidFieldError as error:
            raise httpx2.LocalProtocolError(str(error)) from None
        finally:
            if stream is None:
                self._end(origin)
        return httpx2.Response(response.status, headers=list(response.headers), stream=stream)

    def _end(self, origin: str) -> None:
        self._under_way[origin] -= 1
        if not self._under_way[origin]:
            del self._under_way[origin]
        self._permits.release()

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()

    def _pool(self, origin: str) -> UpstreamPool:
        pools = self._pools
        pool = pools.get(origin)
        if pool is None:
            pool = pools[origin] = UpstreamPool(
                origin,
                max_idle=self._max_connections,
                idle_seconds=KEEPALIVE_SECONDS,
                connect_seconds=self._connect_seconds,
                response_seconds=math.inf,
                read_seconds=math.inf,
                # Nobody knows what it does to run a task twice, so what was sent is not sent again.
                race_seconds=-math.inf,
            )
        pools.move_to_end(origin)
        if len(pools) > 1 and not pool.idle:
            self._make_room()
        return pool

    def _make_room(self) -> None:
        """Keep all pools together within the bound, and forget those that hold nothing."""
        pools = self._pools
        surplus = sum(pool.idle for pool in pools.values())
        surplus += self._under_way.total() - self._max_connections
        for origin, pool in list(pools.items())[:-1]:
            while pool.idle and surplus > 0:
                pool.drop_idle()
                surplus -= 1
            if not pool.idle and origin not in self._under_way:
                del pools[origin]


class _PooledStream(httpx2.AsyncByteStream):
    """The body of a response; its connection is free for the next request when it is closed."""

    def __init__(self, response: UpstreamResponse, end: Callable[[], None]) -> None:
        self._response = response
        self._end: Callable[[], None] | None = end

    @property
    def piece_count(self) -> int:
        """How many pieces have come, as the sender divided them."""
        return self._response.piece_count

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        """Give the body as it comes."""
        try:
            while piece := await self._response.read():
                yield piece
        except UpstreamError as error:
            raise _as_httpx2(error) from error

    async def aclose(self) -> None:
        """Let go of the response, once."""
        end, self._end = self._end, None
        if end is not None:
            self._response.close()
            end()


def _as_httpx2(error: UpstreamError) -> httpx2.RequestError:
    """Return an error of a pool in the classes of httpx2, without the host, which may be secret."""
    kind: type[httpx2.RequestError] = httpx2.RemoteProtocolError
    if isinstance(error, AnswerTimeoutError):
        kind = httpx2.ReadTimeout
    elif isinstance(error, NotSentError):
        is_timeout = isinstance(error.__cause__, TimeoutError)
        kind = httpx2.ConnectTimeout if is_timeout else httpx2.ConnectError
    return kind(error.problem)


_LONGEST_CACHED_URL = 256


def _split_new_url(text: str) -> tuple[str, str]:
    """Return where a URL leads, and what is asked for there."""
    url = httpx2.URL(text)
    if url.scheme not in {"http", "https"}:
        problem = "Request URL is missing an 'http://' or 'https://' protocol."
        raise httpx2.UnsupportedProtocol(problem)
    if not url.host:
        raise httpx2.InvalidURL("the URL has no host")
    netloc = url.netloc.decode("ascii")
    return f"{url.scheme}://{netloc}", url.raw_path.decode("ascii")


_split_url = lru_cache(maxsize=512)(_split_new_url)


class _ProxyTransport:
    """Sends requests through a proxy, on the transport of httpx2."""

    def __init__(self, proxy: str, max_connections: int, connect_timeout_seconds: float) -> None:
        self._transport = httpx2.AsyncHTTPTransport(
            limits=httpx2.Limits(
                max_connections=max_connections,
                max_keepalive_connections=max_connections,
                keepalive_expiry=KEEPALIVE_SECONDS,
            ),
            proxy=proxy,
            verify=trusted_context(),
        )
        # The transport takes no network of ours, and its pools do.
        self._transport._pool._network_backend = BoundedNetwork()
        timeout = httpx2.Timeout(None, connect=connect_timeout_seconds)
        self._extensions = {"timeout": timeout.as_dict()}

    async def send(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes
    ) -> httpx2.Response:
        request = httpx2.Request(
            method, url, headers=headers, content=content, extensions=self._extensions
        )
        try:
            return await self._transport.handle_async_request(request)
        except httpx2.ConnectError as error:
            found = error.__cause__.args[:1] if error.__cause__ is not None else ()
            if found and isinstance(found[0], ssl.SSLError):
                raise httpx2.ConnectError(why_not_connected(found[0])) from error
            raise

    async def close(self) -> None:
        await self._transport.aclose()


async def read_body(response: httpx2.Response, max_bytes: int) -> bytes | None:
    """Return the body of a response, decoded, or None as soon as it is longer than `max_bytes`.

    It raises `ContentCodingError` for a body that cannot be read.
    """
    if _said_length(response.headers) > 2 * max_bytes:
        return None
    body = bytearray()
    try:
        async with aclosing(body_pieces(response, max_bytes)) as pieces:
            async for piece in pieces:
                body += piece
    except TooLongError:
        return None
    return bytes(body)


async def read_error_body(response: httpx2.Response) -> str:
    """Return the beginning of a body that only explains a status: as much as comes soon."""
    body = bytearray()
    try:
        async with (
            asyncio.timeout(ERROR_BODY_SECONDS),
            aclosing(body_pieces(response, MAX_ERROR_BODY_BYTES)) as pieces,
        ):
            async for piece in pieces:
                body += piece
                if len(body) >= ERROR_BODY_BYTES:
                    break
    except (TimeoutError, httpx2.RequestError):
        pass
    except ContentCodingError as error:
        body = body or bytearray(f"(the body cannot be read: {error})".encode())
    return bytes(body[:ERROR_BODY_BYTES]).decode(errors="replace")


async def body_pieces(response: httpx2.Response, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Give the body of a response, decoded, as it comes; it raises `ContentCodingError`."""
    decoder = ContentDecoder(coding_of(response.headers), max_bytes=max_bytes)
    async with aclosing(_raw_pieces(response)) as pieces:
        async for piece in pieces:
            if decoded := decoder.feed(piece):
                yield decoded
            while decoder.has_more:
                if decoded := await _decoded_behind(decoder):
                    yield decoded
    decoder.finish()


async def _raw_pieces(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    network = response.extensions.get("network_stream")
    bounded = network if isinstance(network, BoundedStream) else None
    pooled = response.stream if isinstance(response.stream, _PooledStream) else None
    pieces = read_bytes = 0
    began = time.perf_counter()
    async with aclosing(response.aiter_raw()) as chunks:
        async for chunk in chunks:
            if bounded is not None:
                bounded.progressed()
            pieces = pieces + 1 if pooled is None else pooled.piece_count
            read_bytes += len(chunk)
            if pieces > FEW_PIECES + read_bytes // BYTES_A_PIECE:
                problem = f"it comes in more than {FEW_PIECES} tiny pieces"
                raise ContentCodingError(problem)
            yield chunk
            # Pieces that have come already are handed out without any pause.
            if time.perf_counter() - began > SLICE_SECONDS:
                await asyncio.sleep(0)
                began = time.perf_counter()


async def _decoded_behind(decoder: ContentDecoder) -> bytes:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_decoding_thread(), _decoded, decoder)


def _decoded(decoder: ContentDecoder) -> bytes:
    return decoder.feed_many(b"", max_bytes=DECODE_BYTES, seconds=DECODE_SECONDS)


@cache
def _decoding_thread() -> ThreadPoolExecutor:
    """Return the one thread that decodes, so that answers never take more than one processor."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="headgate-decode")


def _said_length(headers: Mapping[str, str]) -> int:
    # Whoever parsed the head has refused what is no number, or one of many digits.
    text = headers.get("content-length", "0")
    return int(text) if text.isdecimal() else 0


# What a response has beside its body.
#
# A parser takes the head of a response, its trailers and any number of 1xx responses before it as
# one piece of work each, and says nothing until it is done. So the lines that it is given between
# two signs of progress are bounded, and many of them at once are given to it in parts.

MAX_SILENT_LINES = 512
MAX_SILENT_BYTES = 128 << 10
DENSE_LINES = 256
PART_BYTES = 4 << 10


class BoundedStream(httpcore2.AsyncNetworkStream):
    """A connection that gives no more lines than one head or trailer may have."""

    def __init__(self, inner: httpcore2.AsyncNetworkStream) -> None:
        self._inner = inner
        self._left = b""
        self._lines = 0
        self._bytes = 0

    def progressed(self) -> None:
        """Note that a piece of a body has come out of what was read."""
        self._lines = self._bytes = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - as the base has it
        """Return the next bytes: all that came, or a part if many lines are in it."""
        if self._lines > MAX_SILENT_LINES or self._bytes > MAX_SILENT_BYTES:
            most = f"{MAX_SILENT_LINES} lines or {MAX_SILENT_BYTES} bytes"
            problem = f"the head or the trailers of the answer have more than {most}"
            raise httpcore2.RemoteProtocolError(problem)
        if self._left:
            await asyncio.sleep(0)
            data = self._left
        else:
            data = await self._inner.read(max_bytes, timeout)
        if len(data) > PART_BYTES and data.count(b"\n") > DENSE_LINES:
            data, self._left = data[:PART_BYTES], data[PART_BYTES:]
        else:
            self._left = b""
        self._lines += data.count(b"\n")
        self._bytes += len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as the base has it
        """Send bytes; what is read after them answers them."""
        self._lines = self._bytes = 0
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - as the base has it
    ) -> httpcore2.AsyncNetworkStream:
        """Go on with TLS."""
        return BoundedStream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401  as the base has it
        """Return what is known of the connection; one with something left to read is readable."""
        if info == "is_readable" and self._left:
            return True
        return self._inner.get_extra_info(info)


class BoundedNetwork(httpcore2.AnyIOBackend):
    """Opens connections that are bounded in the lines of a head."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - as the base has it
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to a host."""
        return BoundedStream(
            await super().connect_tcp(host, port, timeout, local_address, socket_options)
        )


def explained(error: Exception) -> str:
    """Return what an error says, or its name when it says nothing."""
    return str(error) or type(error).__name__
