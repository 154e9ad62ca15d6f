"""Asking another node on a client's behalf, where only that node knows the answer.

Rule: a question is passed on once. One that was passed on to the wrong node is answered there with
a refusal, so that two nodes that take each other for the dispatcher cannot keep a client waiting.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headgate.web.answers import Answer, Headers
from headgate.web.requests import Request

if TYPE_CHECKING:
    import httpx2

FORWARDED = b"x-headgate-forwarded"
ANSWER_SECONDS = 3.0
MAX_CONNECTIONS = 16
MAX_ANSWER_BYTES = 4 * 2**20

_JSON = "application/json"
_RETRY_AFTER = "retry-after"
_LOG = logging.getLogger("headgate.web")


class Forwarder:
    """Passes questions on to other nodes; redirects are not followed, and proxies not asked."""

    def __init__(self) -> None:
        self._transport: httpx2.AsyncHTTPTransport | None = None

    async def ask(self, address: str, path: str, request: Request) -> Answer | None:
        """Return what the node at an address answers; None if it cannot be or was asked already."""
        if not address or request.header(FORWARDED):
            return None
        # A node that is alone never comes here, and does without the package.
        import httpx2  # noqa: PLC0415

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._ask(address + path, request.request_id)
        except (TimeoutError, httpx2.RequestError, httpx2.InvalidURL) as error:
            _LOG.warning("the node at %s was not reached: %r", address, error)
            return None

    async def _ask(self, url: str, request_id: bytes) -> Answer | None:
        import httpx2  # noqa: PLC0415

        headers = {FORWARDED: b"1", b"x-request-id": request_id, b"accept": _JSON.encode()}
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


async def _answer(response: httpx2.Response) -> Answer | None:
    """Return the answer of a node; anything else that may serve at its address has none."""
    from headgate.executors.http_client import read_body  # noqa: PLC0415

    if response.is_redirect or not response.headers.get("content-type", "").startswith(_JSON):
        return None
    body = await read_body(response, MAX_ANSWER_BYTES)
    if body is None:
        return None
    wait = response.headers.get(_RETRY_AFTER)
    headers: Headers = () if wait is None else ((_RETRY_AFTER.encode(), wait.encode()),)
    return Answer(response.status_code, body, headers)
