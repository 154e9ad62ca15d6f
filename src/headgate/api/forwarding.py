"""Asking another node on a client's behalf, where only that node knows the answer.

Rule: a question is passed on once. One that was passed on to the wrong node is answered there with
a refusal, so that two nodes that take each other for the dispatcher cannot keep a client waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from headgate.api.http.request import Request
from headgate.api.http.response import PROBLEM_JSON, Headers, Response
from headgate.api.shares import Making

if TYPE_CHECKING:
    import httpx2


FORWARDED = b"x-headgate-forwarded"
ANSWER_SECONDS = 3.0
MAX_CONNECTIONS = 16
MAX_ANSWER_BYTES = 4 * 2**20
SILENT_SECONDS = 45.0
EVENT_STREAM = b"text/event-stream"

_JSON = "application/json"
_TAKEN_TYPES = (_JSON, PROBLEM_JSON.decode())
_RETRY_AFTER = "retry-after"
_NOT_LET_IN = (401, 403, 421)
_LOG = logging.getLogger("headgate.api")


class Forwarder:
    """Passes questions on to other nodes; redirects are not followed, and proxies not asked.

    Callers take turns: the other node may let one wait that asks too much.
    """

    def __init__(self) -> None:
        self._turns = Making(MAX_CONNECTIONS)
        self._transport: httpx2.AsyncHTTPTransport | None = None
        self._streams: httpx2.AsyncHTTPTransport | None = None

    async def ask(self, address: str, path: str, request: Request) -> Response | None:
        """Return what the node at an address answers; None if it cannot be or was asked already."""
        if not address or request.header(FORWARDED):
            return None
        # A node that is alone never comes here, and does without the package.
        import httpx2  # noqa: PLC0415

        try:
            async with self._turns.turn(request.holder), asyncio.timeout(ANSWER_SECONDS):
                return await self._ask(address + path, request)
        except (TimeoutError, httpx2.RequestError, httpx2.InvalidURL) as error:
            _LOG.warning("the node at %s was not reached: %r", address, error)
            return None

    async def _ask(self, url: str, request: Request) -> Response | None:
        import httpx2  # noqa: PLC0415

        headers = _headers(request, accept=_JSON.encode())
        response = await self._opened().handle_async_request(
            httpx2.Request("GET", url, headers=headers)
        )
        try:
            return await _answer(response)
        finally:
            await response.aclose()

    def _opened(self) -> httpx2.AsyncHTTPTransport:
        if self._transport is None:
            import httpx2  # noqa: PLC0415

            # No connection is kept, so there is nothing to close when the service ends.
            limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=0)
            self._transport = httpx2.AsyncHTTPTransport(limits=limits)
        return self._transport

    async def stream(self, address: str, path: str, request: Request) -> Response | None:
        """Return a stream of the node at an address, as it comes, or what it answers instead."""
        if not address or request.header(FORWARDED):
            return None
        import httpx2  # noqa: PLC0415

        query = request.query_string()
        url = f"{address}{path}?{query}" if query else address + path
        if self._streams is None:
            # A pool of its own: streams last, and must not keep questions waiting. How many there
            # are is bounded by whoever asks.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
            self._streams = httpx2.AsyncHTTPTransport(limits=limits)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await _opened_stream(self._streams, url, request)
        except (TimeoutError, httpx2.RequestError, httpx2.InvalidURL) as error:
            _LOG.warning("the node at %s was not reached: %r", address, error)
            return None


def _headers(request: Request, *, accept: bytes) -> dict[bytes, bytes]:
    """Return what the other node has to know: who asks, for what, and after which event."""
    headers = {
        FORWARDED: b"1",
        b"x-request-id": request.request_id,
        b"accept": accept,
        b"accept-encoding": b"identity",
    }
    for name in (b"authorization", b"last-event-id"):
        value = request.header(name)
        if value:
            headers[name] = value
    return headers


async def _opened_stream(
    transport: httpx2.AsyncHTTPTransport, url: str, request: Request
) -> Response | None:
    import httpx2  # noqa: PLC0415

    # A node that lives sends something every few seconds.
    timeout = httpx2.Timeout(ANSWER_SECONDS, read=SILENT_SECONDS).as_dict()
    headers = _headers(request, accept=EVENT_STREAM)
    asked = httpx2.Request("GET", url, headers=headers, extensions={"timeout": timeout})
    response = await transport.handle_async_request(asked)
    if response.headers.get("content-type", "").encode() == EVENT_STREAM:
        return Response(response.status_code, b"", stream=_passed_on(response))
    try:
        return await _answer(response)
    finally:
        await response.aclose()


async def _passed_on(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Yield what comes; if the other node goes away, the stream ends."""
    import httpx2  # noqa: PLC0415

    try:
        async for piece in response.aiter_raw():
            yield piece
    except httpx2.RequestError:
        return
    finally:
        await response.aclose()


async def _answer(response: httpx2.Response) -> Response | None:
    """Return the answer of a node; anything else that may serve at its address has none."""
    from headgate.providers.content_coding import ContentCodingError  # noqa: PLC0415
    from headgate.providers.http_client import read_body  # noqa: PLC0415

    kind = response.headers.get("content-type", "").partition(";")[0].strip()
    # This node has let the client in. That the other one does not is no fault of the client's.
    if response.status_code in _NOT_LET_IN:
        return None
    if response.is_redirect or kind not in _TAKEN_TYPES:
        return None
    try:
        body = await read_body(response, MAX_ANSWER_BYTES)
    except ContentCodingError:
        return None
    if body is None:
        return None
    wait = response.headers.get(_RETRY_AFTER)
    headers: Headers = () if wait is None else ((_RETRY_AFTER.encode(), wait.encode()),)
    return Response(response.status_code, body, headers, kind.encode())
