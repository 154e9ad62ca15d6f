"""One request and its answer on a connection, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import httptools

from headgate.web.http.answers import Answer

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
_WITHOUT_BODY = (204, 304)
_LAST_CHUNK = b"0\r\n\r\n"
_ASGI = {"version": "3.0"}


class Wire(Protocol):
    """What an exchange needs of its connection."""

    has_eof: bool
    """Whether the client has stopped sending."""

    def write(self, data: bytes) -> None:
        """Send bytes; they are kept until the client takes them."""

    async def drained(self) -> None:
        """Wait until the client has taken enough of what it was sent; if not, `TimeoutError`."""


class DateHeader:
    """The Date header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        """Return the header of now."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
        return self._line


class Exchange:
    """The whole request has arrived; the answer goes out in one piece, or piece by piece."""

    __slots__ = (
        "_body",
        "_date",
        "_gone",
        "_is_chunked",
        "_is_head",
        "_start",
        "_wire",
        "has_ended",
        "has_started",
        "keep_alive",
        "scope",
        "size",
    )

    def __init__(
        self, wire: Wire, scope: dict[str, Any], body: bytes, date: DateHeader, *, keep_alive: bool
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.size = len(body)
        self.has_started = False
        self.has_ended = False
        self._wire = wire
        self._body: bytes | None = body
        self._date = date
        self._is_head = scope["method"] == "HEAD"
        self._is_chunked = False
        self._start: dict[str, Any] | None = None
        self._gone: asyncio.Event | None = None

    async def receive(self) -> dict[str, Any]:
        """Give the body, and after that wait for the client to go away."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        if not self.has_ended and not self._wire.has_eof:
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()
        return {"type": "http.disconnect"}

    @property
    def is_watching(self) -> bool:
        """Whether the application waits for the client to go away."""
        return self._gone is not None

    def leave(self) -> None:
        """End a stream, as if the client had gone; any other answer goes on."""
        self._gone = self._gone or asyncio.Event()
        self._gone.set()

    def drop(self) -> None:
        """Note that the client has gone; what is still sent goes nowhere."""
        self.has_ended = True
        if self._gone is not None:
            self._gone.set()

    async def send(self, message: dict[str, Any]) -> None:
        """Take a part of the answer."""
        if self.has_ended:
            return
        if self._start is None:
            self._start = message
            return
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            self._end(body)
            return
        self._wire.write(self._head(is_whole=False) + self._piece(body))
        await self._wire.drained()

    def _end(self, body: bytes) -> None:
        self.has_ended = True
        if self.has_started:
            self._wire.write(self._piece(body) + (_LAST_CHUNK if self._is_chunked else b""))
        else:
            self._wire.write(self._head(is_whole=True) + (b"" if self._is_head else body))

    def _head(self, *, is_whole: bool) -> bytes:
        if self.has_started or self._start is None:
            return b""
        self.has_started = True
        status = self._start["status"]
        parts = [STATUS_LINES[status], self._date.line()]
        has_length = status in _WITHOUT_BODY
        for name, value in self._start["headers"]:
            if name == b"connection":
                self.keep_alive = False
                continue
            has_length = has_length or name == b"content-length"
            parts += (name, b": ", value, b"\r\n")
        if not has_length and not is_whole and not self._is_head:
            # Before 1.1 there were no chunks: there the end of the connection is the end.
            self._is_chunked = self.scope["http_version"] == "1.1"
        if self._is_chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        return b"".join(parts)

    def _piece(self, body: bytes) -> bytes:
        if self._is_head or not body:
            return b""
        return b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body


def last_words(answer: Answer, request_id: bytes, date: DateHeader) -> bytes:
    """Return the whole answer to what was refused before it was a request; then comes nothing."""
    parts = [STATUS_LINES[answer.status], date.line()]
    parts += [b"%b: %b\r\n" % one for one in answer.head(request_id) if one[0] != b"connection"]
    return b"".join([*parts, b"connection: close\r\n\r\n", answer.body])


def peers_of(transport: asyncio.BaseTransport) -> tuple[Any, Any]:
    """Return the addresses of the client and of the server, where they have any."""
    found = (transport.get_extra_info(name) for name in ("peername", "sockname"))
    client, server = [(one[0], one[1]) if isinstance(one, tuple) else None for one in found]
    return client, server


def scope_of(
    method: str,
    url: bytes,
    version: str,
    headers: list[tuple[bytes, bytes]],
    peers: tuple[Any, Any],
) -> dict[str, Any]:
    """Return what ASGI says of a request before its body; `peers` are its client and server."""
    path, query = _split(url)
    text = path.decode("latin-1")
    client, server = peers
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": version,
        "method": method,
        "scheme": "http",
        "path": unquote(text) if "%" in text else text,
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": client,
        "server": server,
    }


def _split(url: bytes) -> tuple[bytes, bytes]:
    if url.startswith(b"/"):
        path, _, query = url.partition(b"#")[0].partition(b"?")
        return path, query
    parsed = httptools.parse_url(url)
    return parsed.path or b"/", parsed.query or b""
