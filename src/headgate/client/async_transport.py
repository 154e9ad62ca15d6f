"""HTTP for `Client`, on the transport of httpx2, which is loaded with the first client.

As for `SyncClient`, proxies of the environment are not asked and redirects not followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from headgate.client.event_stream import SILENCE_SECONDS, Message, MessageReader, StreamOverError
from headgate.client.requests import Address, Call
from headgate.client.responses import (
    MAX_RESPONSE_BYTES,
    Response,
    error_of,
    no_response,
    not_reached,
)
from headgate.errors import ServiceError

if TYPE_CHECKING:
    import httpx2


CONNECT_SECONDS = 5.0
KEEPALIVE_SECONDS = 30.0
MAX_CONNECTIONS = 100
MAX_LISTENERS = 32

_OK = 200
_NO_CONTENT = 204


class AsyncTransport:
    """Connections to one service, for one event loop."""

    def __init__(
        self, address: Address, headers: dict[str, str], *, timeout_seconds: float
    ) -> None:
        import httpx2  # noqa: PLC0415  slow to load

        self._httpx2 = httpx2
        self._address = address
        self._headers = headers
        self._timeout_seconds = timeout_seconds
        self._listeners = 0
        limits = self._httpx2.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=KEEPALIVE_SECONDS,
        )
        self._transport = self._httpx2.AsyncHTTPTransport(limits=limits)

    async def send(self, call: Call[Any]) -> Response:
        """Return what comes back, or raise why nothing did."""
        response = await self._request(call, call.timeout_seconds or self._timeout_seconds)
        try:
            return await self._read(response)
        except self._httpx2.RequestError as error:
            raise no_response(self._address.url, _why(error)) from None
        finally:
            await response.aclose()

    async def stream(
        self, call: Call[Any], *, silence_seconds: float = SILENCE_SECONDS
    ) -> AsyncGenerator[Message, None]:
        """Give the messages of a stream until it ends; raise the error if it is refused."""
        response = await self._request(call, silence_seconds)
        try:
            if response.status_code == _NO_CONTENT:
                raise StreamOverError
            if response.status_code != _OK:
                api_error = await self._read(response)
                raise error_of(api_error) or no_response(self._address.url, "not a stream")
            reader = MessageReader()
            async with aclosing(response.aiter_raw()) as pieces:
                async for piece in pieces:
                    for message in reader.feed(piece):
                        yield message
        except self._httpx2.RequestError as error:
            raise no_response(self._address.url, _why(error)) from None
        finally:
            await response.aclose()

    async def listen(
        self, call: Call[Any], is_news: Callable[[Message], bool], *, seconds: float
    ) -> bool:
        """Return when a message is news or time is up; False if there is no stream."""
        # Each stream takes a connection. Whoever waits beyond these polls instead.
        if self._listeners >= MAX_LISTENERS:
            return False
        self._listeners += 1
        try:
            async with asyncio.timeout(seconds), aclosing(self.stream(call)) as messages:
                async for message in messages:
                    if is_news(message):
                        return True
        except (TimeoutError, StreamOverError):
            return True
        except ServiceError:
            return False
        finally:
            self._listeners -= 1
        return False

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.aclose()

    async def _request(self, call: Call[Any], timeout_seconds: float) -> httpx2.Response:
        headers = {**self._headers, **call.headers}
        if call.body is not None:
            headers["content-type"] = "application/json"
        timeout = self._httpx2.Timeout(timeout_seconds, connect=CONNECT_SECONDS)
        request = self._httpx2.Request(
            call.method,
            self._address.url + call.path,
            headers=headers,
            content=call.body,
            extensions={"timeout": timeout.as_dict()},
        )
        try:
            response: httpx2.Response = await self._transport.handle_async_request(request)
        except (self._httpx2.ConnectError, self._httpx2.ConnectTimeout) as error:
            raise not_reached(self._address.url, _why(error)) from None
        except self._httpx2.PoolTimeout:
            raise not_reached(self._address.url, "all connections are in use") from None
        except self._httpx2.RequestError as error:
            raise no_response(self._address.url, _why(error)) from None
        return response

    async def _read(self, response: httpx2.Response) -> Response:
        body = bytearray()
        async with aclosing(response.aiter_raw()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_RESPONSE_BYTES:
                    raise no_response(self._address.url, "the answer is too long")
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Response(response.status_code, headers, bytes(body))


def _why(error: Exception) -> str:
    if "Timeout" in type(error).__name__:
        return "it took too long"
    return str(error) or type(error).__name__
