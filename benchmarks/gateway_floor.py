"""A proxy that does nothing but pass calls on: what Python costs before anything is decided.

    python -m benchmarks.gateway_floor PORT UPSTREAM_PORT

Both sides are parsed, bodies are read as JSON, each client's connection has one of its own to the
provider, and bytes are passed on as they came. It keeps no books, no limits and no queue.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import msgspec
import uvloop


class _Asked(msgspec.Struct):
    model: str
    stream: bool = False


class ClientProtocol(asyncio.Protocol):
    """The side of the client: a request goes on when it has come as a whole."""

    def __init__(self, upstream_port: int) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._decoder = msgspec.json.Decoder(_Asked)
        self._upstream = UpstreamProtocol()
        self._upstream_port = upstream_port
        self._connecting: asyncio.Task[object] | None = None
        self._raw = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._upstream.client = cast("asyncio.Transport", transport)
        loop = asyncio.get_running_loop()
        self._connecting = loop.create_task(
            loop.create_connection(lambda: self._upstream, "127.0.0.1", self._upstream_port)
        )

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._upstream.close()

    def data_received(self, data: bytes) -> None:
        self._raw += data
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._body:
            self._decoder.decode(self._body)
        raw, self._raw, self._body = self._raw, b"", b""
        self._upstream.send(raw)


class UpstreamProtocol(asyncio.Protocol):
    """The side of the provider: an answer goes back piece by piece."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._unsent = b""
        self.client: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._unsent:
            self._transport.write(self._unsent)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self.client is not None:
            self.client.write(data)

    def send(self, request: bytes) -> None:
        """Send a request, or keep it until there is a connection."""
        if self._transport is None:
            self._unsent += request
        else:
            self._transport.write(request)

    def close(self) -> None:
        """Close the connection, since the client's is closed."""
        self.client = None
        if self._transport is not None:
            self._transport.close()


async def serve(port: int, upstream_port: int) -> None:
    """Pass calls on until the process is ended."""
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientProtocol(upstream_port), "127.0.0.1", port, backlog=1_024
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
