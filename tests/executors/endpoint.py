"""A real HTTP endpoint on a free port, whose answers a test writes byte by byte if it wants to."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec

NEVER_GIVEN = range(20_000, 32_000)
"""Ports below those that Linux and others give to whoever asks for any."""


class Seen(NamedTuple):
    """A request as it came over the wire; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)


Answer = bytes | Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


class Endpoint:
    """Answers every request with `answer`, and remembers what came."""

    def __init__(self) -> None:
        self.answer: Answer = reply(200, b"{}")
        self.seen: list[Seen] = []
        self.connections = 0
        self.left = asyncio.Event()
        """Set when a connection has ended."""
        self.port = 0

    @property
    def url(self) -> str:
        """The address, without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it ends."""
        self.connections += 1
        try:
            while (request := await _read_request(reader)) is not None:
                self.seen.append(request)
                if isinstance(self.answer, bytes):
                    writer.write(self.answer)
                    await writer.drain()
                else:
                    await self.answer(request, writer)
        except (ConnectionError, EOFError, asyncio.CancelledError):
            pass  # The test is over, or has ended the connection.
        finally:
            writer.close()
            self.left.set()


def reply(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Write an answer; underscores in names of headers are dashes."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"HTTP/1.1 {status} Status", f"Content-Length: {len(body)}", *lines])
    return f"{head}\r\n\r\n".encode() + body


def reply_json(value: object, status: int = 200) -> bytes:
    """Write an answer whose body is JSON."""
    return reply(status, msgspec.json.encode(value), Content_Type="application/json")


@asynccontextmanager
async def running_endpoint(
    answer: Answer | None = None, *, context: ssl.SSLContext | None = None
) -> AsyncIterator[Endpoint]:
    """Serve on a free port of the loopback interface."""
    endpoint = Endpoint()
    if answer is not None:
        endpoint.answer = answer
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0, ssl=context)
    endpoint.port = server.sockets[0].getsockname()[1]
    try:
        yield endpoint
    finally:
        server.close()


def free_port() -> int:
    """Return a port on which nobody listens, and which nobody is given who asks for any.

    What the system gives away by itself, to connections too, may be anybody's the next moment.
    """
    for port in random.SystemRandom().sample(NEVER_GIVEN, k=100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


async def _read_request(reader: asyncio.StreamReader) -> Seen | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, path, headers, body)
