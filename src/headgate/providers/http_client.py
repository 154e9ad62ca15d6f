"""A pool of connections for one target or provider: requests go out, bounded responses come in.

It stands on the transport of httpx2 and not on its client, which would keep cookies from one task
for the next and write URLs to the log, and a URL may carry a key. Redirects are never followed and
certificates always verified. There is no time limit on a response: whoever asks has one.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import aclosing
from functools import cache

import httpx2

# Servers commonly close an idle connection after five seconds; it must not be reused just then.
KEEPALIVE_SECONDS = 2.0
ERROR_BODY_BYTES = 4_096
ERROR_BODY_SECONDS = 5.0

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
        timeout = httpx2.Timeout(None, connect=connect_timeout_seconds)
        self._extensions = {"timeout": timeout.as_dict()}

    async def send(
        self, method: str, url: str, headers: dict[str, str], content: bytes | None = None
    ) -> httpx2.Response:
        """Send a request and wait for the head of its response; the caller closes the response."""
        request = httpx2.Request(
            method,
            url,
            headers={"user-agent": "headgate", "accept": "*/*", **headers},
            content=content,
            extensions=self._extensions,
        )
        return await self._transport.handle_async_request(request)

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.aclose()


async def read_body(response: httpx2.Response, max_bytes: int) -> bytes | None:
    """Return the body of a response, or None as soon as it is longer than `max_bytes`."""
    body = bytearray()
    async with aclosing(response.aiter_bytes()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                return None
    return bytes(body)


async def read_error_body(response: httpx2.Response) -> str:
    """Return the beginning of a body that only explains a status: as much as comes soon."""
    body = bytearray()
    try:
        async with asyncio.timeout(ERROR_BODY_SECONDS), aclosing(response.aiter_bytes()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) >= ERROR_BODY_BYTES:
                    break
    except (TimeoutError, httpx2.RequestError):
        pass
    return bytes(body[:ERROR_BODY_BYTES]).decode(errors="replace")


@cache
def _trusted() -> ssl.SSLContext:
    """Read the certificates that are trusted, once: it takes a while, and a megabyte."""
    return httpx2.create_ssl_context()


def explained(error: Exception) -> str:
    """Return what an error says, or its name when it says nothing."""
    return str(error) or type(error).__name__
