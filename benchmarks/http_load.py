"""A plain HTTP client for load: keep-alive connections that send one request after the other.

It parses only what it needs, so that on a machine with few cores the service has most of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import msgspec


class Connection:
    """One connection to the service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(self, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request, and return its status and body."""
        self._writer.write(head + body)
        answer, content = await read_answer(self._reader)
        return int(answer[9:12]), content

    def close(self) -> None:
        self._writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read an answer, whole or in chunks; return its head in lower case, and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    start = head.find(b"content-length:")
    if start >= 0:
        length = int(head[start + 15 : head.index(b"\r", start)])
        return head, await reader.readexactly(length)
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:size]
    await reader.readexactly(2)
    return head, bytes(body)


class Client:
    """Requests over a fixed number of connections."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def connect(self) -> Connection:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        return Connection(reader, writer)

    async def open(self, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Ask for a stream, and return what it is read from."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self.head("GET", path))
        return reader, writer

    def head(
        self, method: str, path: str, length: int = 0, headers: Mapping[str, str] | None = None
    ) -> bytes:
        line = f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        content = f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        return f"{line}{more}{content}\r\n".encode()

    async def get(self, path: str) -> object:
        connection = await self.connect()
        try:
            _, body = await connection.request(self.head("GET", path))
            return msgspec.json.decode(body)
        finally:
            connection.close()

    async def send_all(self, path: str, bodies: Sequence[bytes], *, connections: int) -> None:
        """Send all bodies, in their order as far as connections are free."""
        left = iter(bodies)
        await asyncio.gather(*(self._send(path, left) for _ in range(connections)))

    async def _send(self, path: str, bodies: Iterator[bytes]) -> None:
        connection = await self.connect()
        for body in bodies:
            status, answer = await connection.request(self.head("POST", path, len(body)), body)
            if status != 202:
                problem = f"{path} answered {status}: {answer[:200]!r}"
                raise RuntimeError(problem)
        connection.close()
