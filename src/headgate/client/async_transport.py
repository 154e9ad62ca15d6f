"""HTTP for `Client`, on the transport of httpx2, which is loaded with the first client.

As for `SyncClient`, proxies of the environment are not asked and redirects not followed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from headgate.client.address import Address
from headgate.client.calls import Call
from headgate.client.replies import MAX_ANSWER_BYTES, Reply, error_of, no_answer, not_reached
from headgate.client.steps import SILENCE_SECONDS, Message, MessageReader, StreamOverError
from headgate.errors import ServiceError

if TYPE_CHECKING:
    import httpx2


CONNECT_SECONDS = 5.0
KEPT_SECONDS = 30.0
MAX_CONNECTIONS = 100

_OK = 200
_NO_CONTENT = 204


class AsyncTransport:
    """Connections to one service, for one event loop."""

    def __init__(
        self, address: Address, headers: dict[str, str], *, timeout_seconds: float
    ) -> None:
        self._httpx2 = _loaded()
        self._address = address
        self._headers = headers
        self._timeout_seconds = timeout_seconds
        limits = self._httpx2.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=KEPT_SECONDS,
        )
        self._transport = self._httpx2.AsyncHTTPTransport(limits=limits)

    async def send(self, call: Call[Any]) -> Reply | ServiceError:
        """Return what comes back, or why nothing did."""
        try:
            response = await self._asked(call, call.timeout_seconds or self._timeout_seconds)
            try:
                return await self._reply(response)
            finally:
                await response.aclose()
        except ServiceError as error:
            return error
        except self._httpx2.RequestError as error:
            return no_answer(self._address.url, _why(error))

    async def stream(
        self, call: Call[Any], *, silence_seconds: float = SILENCE_SECONDS
    ) -> AsyncGenerator[Message, None]:
        """Give the messages of a stream until it ends; raise the error if it is refused."""
        response = await self._asked(call, silence_seconds)
        try:
            if response.status_code == _NO_CONTENT:
                raise StreamOverError
            if response.status_code != _OK:
                reply = await self._reply(response)
                raise error_of(reply) or no_answer(self._address.url, "not a stream")
            reader = MessageReader()
            async with aclosing(response.aiter_bytes()) as pieces:
                async for piece in pieces:
                    for message in reader.feed(piece):
                        yield message
        except self._httpx2.RequestError as error:
            raise no_answer(self._address.url, _why(error)) from None
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.aclose()

    async def _asked(self, call: Call[Any], timeout_seconds: float) -> httpx2.Response:
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
            raise no_answer(self._address.url, _why(error)) from None
        return response

    async def _reply(self, response: httpx2.Response) -> Reply:
        body = bytearray()
        async with aclosing(response.aiter_bytes()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise no_answer(self._address.url, "the answer is too long")
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Reply(response.status_code, headers, bytes(body))


def _loaded() -> Any:  # noqa: ANN401 - a module
    try:
        import httpx2  # noqa: PLC0415
    except ModuleNotFoundError as error:
        message = "Client needs the package httpx2; install headgate[client], or use SyncClient"
        raise ImportError(message, name=error.name) from None
    return httpx2


def _why(error: Exception) -> str:
    if "Timeout" in type(error).__name__:
        return "it took too long"
    return str(error) or type(error).__name__
