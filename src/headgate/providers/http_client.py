"""A pool of connections for one target or provider: requests go out, bounded responses come in.

It stands on the transport of httpx2 and not on its client, which would keep cookies from one task
for the next and write URLs to the log, and a URL may carry a key. Redirects are never followed and
certificates always verified. There is no time limit on a response: whoever asks has one, and it
strikes, because no response holds the loop for longer than a slice of work. Its head and trailers
are bounded in lines and its body in pieces; what is coded is decoded slice by slice, in a thread
where one slice is not enough.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache
from typing import Any

import httpcore2
import httpx2

from headgate.core.text import SLICE_SECONDS
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
        self._transport = httpx2.AsyncHTTPTransport(
            limits=httpx2.Limits(
                max_connections=max_connections,
                max_keepalive_connections=max_connections,
                keepalive_expiry=KEEPALIVE_SECONDS,
            ),
            proxy=proxy,
            verify=_trusted(),
        )
        # The transport takes no network of ours, and its pools do.
        self._transport._pool._network_backend = BoundedNetwork()
        timeout = httpx2.Timeout(None, connect=connect_timeout_seconds)
        self._extensions = {"timeout": timeout.as_dict()}

    async def send(
        self, method: str, url: str, headers: dict[str, str], content: bytes | None = None
    ) -> httpx2.Response:
        """Send a request and wait for the head of its response; the caller closes the response."""
        request = httpx2.Request(
            method,
            url,
            headers={
                "user-agent": "headgate",
                "accept": "*/*",
                "accept-encoding": ACCEPT_ENCODING,
                **headers,
            },
            content=content,
            extensions=self._extensions,
        )
        return await self._transport.handle_async_request(request)

    async def close(self) -> None:
        """Close every connection."""
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
    pieces = read_bytes = 0
    began = time.perf_counter()
    async with aclosing(response.aiter_raw()) as chunks:
        async for chunk in chunks:
            if bounded is not None:
                bounded.progressed()
            pieces += 1
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


@cache
def _trusted() -> ssl.SSLContext:
    """Read the certificates that are trusted, once: it takes a while, and a megabyte."""
    return httpx2.create_ssl_context()


def explained(error: Exception) -> str:
    """Return what an error says, or its name when it says nothing."""
    return str(error) or type(error).__name__
