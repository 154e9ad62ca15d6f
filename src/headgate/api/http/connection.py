"""HTTP/1.1 on one connection: requests in, answers out, in their order.

A request is handed to the application when all of it has arrived, which bounds it: in size, and in
the time that it may take. Before its body is read, the application is shown its head, and may
refuse it: whoever is not let in sends no body. The rule for everything that a client can make this
process keep is the same: it is bounded here, and a client that does not take its answers is not
given further ones.

The parser is llhttp, as in most servers. It is fed so that no message ends inside of what it is
given, and so every byte is known to be of the head, of the body, or of what frames the body.

The rest is this short because the service needs little of HTTP: no upgrades, no bodies that are
worked on before they end. A wish to upgrade is passed over, as a server may.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import httptools

from headgate.api.callers import Caller
from headgate.api.errors import ApiError
from headgate.api.http.request import (
    MAX_BODY_BYTES,
    Head,
    Kept,
    read_head,
    request_ids,
    sent_request_id,
    too_large,
    unreadable,
)
from headgate.api.http.response import Response, error_response, plain_page, takes_html
from headgate.api.shares import Seat, Shares

# One request and its answer on a connection, as an ASGI application sees them.

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
        "_gone_callback",
        "_is_chunked",
        "_is_head",
        "_start",
        "_wire",
        "caller",
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
        self.caller: Caller | None = None
        """Who sends it, where its head has said that."""

        self.has_started = False
        self.has_ended = False
        self._wire = wire
        self._body: bytes | None = body
        self._date = date
        self._is_head = scope["method"] == "HEAD"
        self._is_chunked = False
        self._start: dict[str, Any] | None = None
        self._gone: asyncio.Event | None = None
        self._gone_callback: Callable[[], None] | None = None

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Have something called once when the client has gone, or is asked to go."""
        if self.has_ended or self._wire.has_eof:
            callback()
        else:
            self._gone_callback = callback

    def _call_back(self) -> None:
        callback, self._gone_callback = self._gone_callback, None
        if callback is not None:
            callback()

    def take_body(self) -> bytes | None:
        """Give the body, once."""
        body, self._body = self._body, None
        return body

    async def receive(self) -> dict[str, Any]:
        """Give the body, and after that wait for the client to go away."""
        body = self.take_body()
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        if not self.has_ended and not self._wire.has_eof:
            self._gone = self._gone or asyncio.Event()
            await self._gone.wait()
        return {"type": "http.disconnect"}

    @property
    def is_watching(self) -> bool:
        """Whether the application waits for the client to go away."""
        return self._gone is not None or self._gone_callback is not None

    def leave(self) -> None:
        """End a stream, as if the client had gone; any other answer goes on."""
        self._gone = self._gone or asyncio.Event()
        self._gone.set()
        self._call_back()

    def drop(self) -> None:
        """Note that the client has gone; what is still sent goes nowhere."""
        self.has_ended = True
        if self._gone is not None:
            self._gone.set()
        self._call_back()

    def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Take the whole answer at once."""
        if not self.has_ended:
            self._start = {"status": status, "headers": headers}
            self._end(body)

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
        self._gone_callback = None
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


def last_words(answer: Response, request_id: bytes, date: DateHeader) -> bytes:
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


MAX_HEAD_BYTES = 64 * 1024
MAX_FRAMING_BYTES = 64 * 1024
CHUNK_ALLOWANCE_BYTES = 32
MAX_LENGTH_DIGITS = 9
_NO_FRAMING_BYTES = min(MAX_HEAD_BYTES, MAX_FRAMING_BYTES)
REQUEST_SECONDS = 30.0
IDLE_SECONDS = 75.0
LINGER_SECONDS = 2.0
TAKE_SECONDS = 30.0
MAX_UNCOUNTED_BYTES = 16 * 1024
"""So much of an answer may wait for its client before it counts for the caller."""

MAX_KNOWN_HEAD_BYTES = 4 * 1024
"""The longest head that is remembered: thousands of connections may be open, and what they remember
counts for nobody."""

MAX_UNLIKE_HEADS = 8
"""After so many heads in a row that are not like the one before none is remembered any more."""

_EMPTY_LINE = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LOG = logging.getLogger("headgate.api")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})\r\n", re.IGNORECASE)


class KnownHead:
    """A head that a client has sent over its connection, and will most likely send again.

    Clients send the same head with every request, but for the length of the body. The same bytes
    mean the same, so the parser need not read them again, and nobody else either: `kept` is what
    the application has learned from the head.
    """

    __slots__ = ("_after", "_before", "caller", "head", "headers", "kept", "scope")

    def __init__(
        self, before: bytes, after: bytes, head: Head, scope: dict[str, Any], kept: Kept
    ) -> None:
        self.caller: Caller | None = None
        self._before = before
        self._after = after
        self.head = head
        self.scope = scope
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.kept = kept

    @classmethod
    def of(cls, data: bytes, head: Head, scope: dict[str, Any], kept: Kept) -> KnownHead | None:
        """Remember a head by its bytes; None if it is not one that a client repeats."""
        if len(data) > MAX_KNOWN_HEAD_BYTES:
            return None
        found = _LENGTH.search(data)
        is_plain = scope["http_version"] == "1.1" and not head.expectation
        if found is None or not is_plain or data.lower().count(b"content-length") > 1:
            return None
        return cls(data[: found.start(1)], data[found.end(1) :], head, scope, kept)

    def read(self, data: bytes, start: int) -> tuple[int, int]:
        """Return the length of the body and where it starts, if the head is here again; or 0, 0."""
        if not data.startswith(self._before, start):
            return 0, 0
        start += len(self._before)
        end = data.find(b"\r", start, start + MAX_LENGTH_DIGITS + 1)
        if end < 0 or not data.startswith(self._after, end) or not data[start:end].isdigit():
            return 0, 0
        return int(data[start:end]), end + len(self._after)


class Connection(asyncio.Protocol):
    """One client. At most one request is worked on at a time; further ones wait for their turn."""

    def __init__(self, shared: Connections) -> None:
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._peers: tuple[Any, Any] = (None, None)
        self._current: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Exchange] = deque()
        self._is_refused = False
        self._is_paused = False
        self.has_eof = False
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = self._loop.time() + REQUEST_SECONDS
        self._drained: asyncio.Event | None = None
        self._is_in_message = False
        self._last_bytes = b""
        self._untaken_bytes = 0
        self._head_bytes = 0
        self._known: KnownHead | None = None
        self._unlike_heads = 0
        self._missing_bytes = 0
        self._seat: Seat
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._is_in_head = True
        self._framing_bytes = 0
        self._chunks = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._length = 0
        self._most_bytes = MAX_BODY_BYTES
        self._head: Head | None = None
        self._caller: Caller | None = None
        self._head_data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection; where there are too many, another may have to go."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=MAX_UNCOUNTED_BYTES)
        self._shared.open.add(self)
        self._peers = peers_of(transport)
        client = self._peers[0]
        shares = self._shared.shares
        self._seat = Seat(shares, client[0] if client else "", self._close)
        self._timer = self._loop.call_later(REQUEST_SECONDS, self._look_at_clock)
        if shares.is_overfull:
            # To tell it so would keep the connection open until the client has read that.
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Let go of everything; the task that is under way finishes for nobody."""
        self._shared.forget(self)
        self._seat.leave()
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        # The parser can call the connection, and the scope of a request its exchange: each would
        # keep the other until garbage is looked for, and what has lived long never is.
        del self._parser
        for exchange in self._waiting:
            exchange.scope = {}
        self._waiting.clear()
        if self._current is not None:
            self._current.drop()

    def eof_received(self) -> bool:
        """Answer what was asked before the client stopped sending, then close.

        A stream has no end to wait for: there the end of sending is the end.
        """
        self.has_eof = True
        current = self._current
        return current is not None and not current.is_watching and not self._is_refused

    def data_received(self, data: bytes) -> None:
        """Read on, from one place where a message may end to the next."""
        start = 0
        while start < len(data) and not self._is_refused:
            if self._missing_bytes:
                end = min(start + self._missing_bytes, len(data))
                self._read_known_body(data[start:end])
            elif not (end := self._read_known_head(data, start)):
                end = self._stop_in(data, start)
                self._read(data[start:end])
            start = end
        self._last_bytes = (self._last_bytes + data[-3:])[-3:]
        unfinished = self._framing_bytes if self._is_in_head else 0
        if unfinished != self._head_bytes:
            self._keep_head(unfinished)

    def _keep_head(self, size: int) -> None:
        """Count a head that comes in pieces as held; most come in one."""
        more, self._head_bytes = size - self._head_bytes, size
        if more < 0:
            self._seat.let_go(-more)
        elif not self._seat.hold(more):
            self._refuse_bytes()

    def _stop_in(self, data: bytes, start: int) -> int:
        if self._length:
            return min(start + self._length - self._body_bytes, len(data))
        if start == 0:
            place = (self._last_bytes + data[:3]).find(_EMPTY_LINE)
            if place >= 0:
                return place + len(_EMPTY_LINE) - len(self._last_bytes)
        place = data.find(_EMPTY_LINE, start)
        return len(data) if place < 0 else place + len(_EMPTY_LINE)

    def _read_known_head(self, data: bytes, start: int) -> int:
        """Read a head that is the same as the last one; return where it ends, 0 if it is not."""
        known = self._known
        if known is None or self._is_in_message:
            return 0
        length, end = known.read(data, start)
        if not length:
            return 0
        self._unlike_heads = 0
        self.on_message_begin()
        self._is_in_head = False
        self._headers = known.headers
        self._missing_bytes = length
        head = known.head
        try:
            head = head if length == head.length else head._replace(length=length)
            self._take_head(head, known.caller)
            known.caller = self._caller
        except ApiError as api_error:
            self._refuse(api_error)
        return end

    def _read_known_body(self, data: bytes) -> None:
        self._missing_bytes -= len(data)
        self._keep_body(data)
        if self._missing_bytes or self._is_refused or self._known is None:
            return
        known = self._known
        self._hand_over(self._exchange({**known.scope}, known.kept, keep_alive=True))

    def _read(self, data: bytes) -> None:
        self._framing_bytes += len(data)
        is_first = not self._is_in_message
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                self._pass_over_upgrade()
        except httptools.HttpParserError as error:
            _LOG.debug("a request could not be read", exc_info=error)
            self._refuse(unreadable(self._parser.get_http_version()))
        else:
            if self._framing_bytes > _NO_FRAMING_BYTES:
                self._check_framing()
            elif is_first and self._is_in_message and self._length and not self._body_bytes:
                # It is the whole head, and nothing else.
                self._head_data = data

    def _pass_over_upgrade(self) -> None:
        """Read the same head again without the wish; the parser would not read its body."""
        if self._is_refused:
            return
        if not self._would_upgrade():
            self._refuse(ApiError("bad_request", "there are no tunnels here"))
            return
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)]
        lines += [b"%b: %b" % header for header in self._headers if header[0] != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._start_afresh()
        self._parser.feed_data(b"\r\n".join(lines) + _EMPTY_LINE)

    def _would_upgrade(self) -> bool:
        # A tunnel is another thing to the client, but the same to the parser.
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def pause_writing(self) -> None:
        """Note that the client does not take its answers; what waits for it counts as held."""
        self._drained = self._drained or asyncio.Event()
        self._keep_untaken(self._transport.get_write_buffer_size())

    def _keep_untaken(self, size: int) -> None:
        self._untaken_bytes += size
        if not self._seat.hold(size):
            _LOG.debug("a client that took too little of its answers was cut off")
            self._transport.abort()

    def resume_writing(self) -> None:
        """Go on with what waited for the client."""
        if self._drained is None:
            return
        self._seat.let_go(self._untaken_bytes)
        self._untaken_bytes = 0
        self._drained.set()
        self._drained = None
        if self._current is None and not self._transport.is_closing():
            self._next()

    def on_message_begin(self) -> None:
        """Start to collect a request, which from now on has a limited time."""
        self._is_in_message = True
        if self._current is None:
            self._expires_at = self._loop.time() + REQUEST_SECONDS

    def on_url(self, url: bytes) -> None:
        """Collect the address."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; what comes after the body is passed over."""
        if self._is_in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Refuse by its head what is too large, or whoever is not let in, before the body."""
        if self._framing_bytes > _NO_FRAMING_BYTES:
            self._check_framing()
        if self._would_upgrade():
            return
        self._is_in_head = False
        self._framing_bytes = 0
        try:
            self._head = read_head(self._url, self._headers, self._parser.get_http_version())
            self._take_head(self._head)
        except ApiError as api_error:
            self._refuse(api_error)

    def _take_head(self, head: Head, caller: Caller | None = None) -> None:
        if head.has_body:
            self._length = head.length
            self._most_bytes = self._shared.most_bytes(head.url)
            if head.length > self._most_bytes:
                raise too_large(self._most_bytes)
            if self._shared.check_head is not None and caller is None:
                caller = self._shared.check_head(head)
            self._caller = caller
            if self._current is None and not self._waiting:
                self._identify(caller)
        elif self._shared.check_head is not None:
            # Whoever is not let in is told so when it is answered.
            with suppress(ApiError):
                self._caller = self._shared.check_head(head)
        if head.expectation:
            self._take_expectation(head.expectation)

    def _identify(self, caller: Caller | None) -> None:
        """Count the connection for who sends the next request: between nodes it has many callers.

        So none waits for the turn of the caller before it. Until it is known who that is, it counts
        for its address.
        """
        if caller is not None:
            self._seat.identify(caller.token_id, is_trusted=caller.is_trusted)
        elif self._seat.is_known:
            with suppress(ApiError):
                self._seat.identify("", is_trusted=False)

    def on_chunk_header(self) -> None:
        """Count the chunks: each has some bytes that are not data."""
        self._chunks += 1

    def on_body(self, body: bytes) -> None:
        """Collect the body, within bounds."""
        self._framing_bytes -= len(body)
        if not self._is_refused:
            self._keep_body(body)

    def _keep_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._parts.append(body)
        has_room = self._seat.hold(len(body))
        if self._body_bytes > self._most_bytes:
            self._refuse(too_large(self._most_bytes))
        elif not has_room:
            self._refuse_bytes()

    def _refuse_bytes(self) -> None:
        pool = self._shared.shares.bytes
        line = f"{pool.of(self._seat.holder.key):,} bytes of your requests and answers are held"
        advice = "take your answers, and send less at a time"
        self._refuse(ApiError("limit_reached", f"{line}, of {pool.most:,} in all; {advice}"))

    def on_message_complete(self) -> None:
        """Hand the request over, or let it wait for those before it."""
        if self._framing_bytes > _NO_FRAMING_BYTES:
            self._check_framing()
        if self._is_refused or self._would_upgrade():
            return
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("ascii")
        scope = scope_of(method, self._url, version, self._headers, self._peers)
        keep_alive = version == "1.1" and self._parser.should_keep_alive()
        kept: Kept = {}
        if not keep_alive:
            self._known = None
        elif self._head_data and self._head is not None:
            self._remember(self._head_data, self._head, scope, kept)
        self._hand_over(self._exchange({**scope}, kept, keep_alive=keep_alive))

    def _remember(self, data: bytes, head: Head, scope: dict[str, Any], kept: Kept) -> None:
        """Remember a head for the next request, unless they are different every time."""
        self._unlike_heads += 1
        if self._unlike_heads <= MAX_UNLIKE_HEADS:
            self._known = KnownHead.of(data, head, scope, kept)
            if self._known is not None:
                self._known.caller = self._caller

    def _hand_over(self, exchange: Exchange) -> None:
        self._is_in_message = False
        self._start_afresh()
        if self._current is None and self._drained is None:
            self._run(exchange)
        else:
            self._waiting.append(exchange)
            self._pause()

    def _exchange(self, scope: dict[str, Any], kept: Kept, *, keep_alive: bool) -> Exchange:
        keep_alive = keep_alive and not self._seat.is_extra
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        exchange = Exchange(self, scope, body, self._shared.date, keep_alive=keep_alive)
        exchange.caller = self._caller
        scope["headgate.seat"] = self._seat
        scope["headgate.kept"] = kept
        scope["headgate.answer"] = exchange.answer
        scope["headgate.take"] = exchange.take_body
        scope["headgate.when_gone"] = exchange.when_gone
        scope["headgate.count_body"] = partial(self._count_body, exchange)
        return exchange

    def _count_body(self, exchange: Exchange, size: int) -> None:
        more, exchange.size = size - exchange.size, size
        if more > 0:
            self._seat.hold(more)
        else:
            self._seat.let_go(-more)

    def _run(self, exchange: Exchange) -> None:
        self._current = exchange
        # Where that is one connection too many, the application says so.
        with suppress(ApiError):
            self._identify(exchange.caller)
        self._seat.work()
        work = self._shared.shares.turns.run(self._work(exchange), self._seat)
        self._task = self._loop.create_task(work)

    async def _work(self, exchange: Exchange) -> None:
        try:
            await self._shared.app(exchange.scope, exchange.receive, exchange.send)
        except Exception:  # noqa: BLE001 - one request must not end the connection's task unseen
            _LOG.exception("the application failed on %s", exchange.scope["method"])
        self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        self._current = self._task = None
        # What the scope can call has the exchange: each would keep the other until they are looked
        # for, and to look for hundreds of thousands of objects costs a tenth of all time.
        exchange.scope = {}
        self._seat.rest()
        self._count_body(exchange, 0)
        must_close = not (exchange.has_ended and exchange.keep_alive) or self._shared.is_draining
        if must_close or self._transport.is_closing():
            self._close()
        elif self._drained is None:
            self._next()
        else:
            # The client does not read its answers, so it is not asked for more either.
            self._pause()
            self._expires_at = self._loop.time() + IDLE_SECONDS

    def _next(self) -> None:
        seconds = REQUEST_SECONDS if self._is_in_message else IDLE_SECONDS
        self._expires_at = self._loop.time() + seconds
        if self._waiting:
            self._run(self._waiting.popleft())
        elif self.has_eof:
            self._transport.close()
        elif self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _take_expectation(self, value: bytes) -> None:
        if value.lower() != b"100-continue":
            self._refuse(ApiError("expectation_failed", "expect nothing but 100-continue"))
        elif self._parser.get_http_version() == "1.1" and not (self._current or self._is_refused):
            # Before 1.1 there were no interim answers: a client would take it for the answer.
            self._transport.write(_CONTINUE)

    def write(self, data: bytes) -> None:
        """Send bytes; they are kept until the client takes them."""
        if self._drained is not None:
            self._keep_untaken(len(data))
        self._transport.write(data)

    async def drained(self) -> None:
        """Wait until the client has taken enough of what it was sent; if not, `TimeoutError`."""
        if self._drained is not None:
            async with asyncio.timeout(TAKE_SECONDS):
                await self._drained.wait()

    def close_if_idle(self) -> None:
        """Close unless a request is worked on; a stream, which would go on, is ended."""
        if self._current is None:
            self._transport.close()
        else:
            self._current.leave()

    def abort(self) -> None:
        """Close without waiting for anything; what is under way is cancelled."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    def _check_framing(self) -> None:
        if self._is_in_head:
            code, what, limit = "head_too_large", "head has", MAX_HEAD_BYTES
        else:
            limit = MAX_FRAMING_BYTES + CHUNK_ALLOWANCE_BYTES * self._chunks
            code, what = "bad_request", "chunks and trailers have, beside the body,"
        if self._framing_bytes > limit:
            self._refuse(ApiError(code, f"the {what} more than {limit} bytes"))

    def _look_at_clock(self) -> None:
        left = self._expires_at - self._loop.time()
        if self._current is not None:
            left = IDLE_SECONDS
        if left > 0:
            self._timer = self._loop.call_later(left, self._look_at_clock)
        elif self._is_in_message:
            message = f"the request did not arrive within {REQUEST_SECONDS:.0f} seconds"
            self._refuse(ApiError("request_timeout", message))
        else:
            self._close()

    def _close(self) -> None:
        # A client that takes nothing would keep the connection, and what it was sent, for ever.
        (self._transport.close if self._drained is None else self._transport.abort)()

    def _refuse(self, api_error: ApiError) -> None:
        if self._is_refused:
            return
        self._is_refused = True
        self._parts = []
        self._seat.let_go(self._body_bytes)
        if self._current is not None:
            # An answer to this request would overtake the one before it.
            self._current.keep_alive = False
            return
        shared = self._shared
        request_id = sent_request_id(self._headers) or next(shared.request_ids)
        shape = plain_page if takes_html(self._headers) else self._shape
        self._transport.write(last_words(shape(api_error, request_id), request_id, shared.date))
        self._linger()

    def _shape(self, api_error: ApiError, request_id: bytes) -> Response:
        if self._shared.refusal is None:
            return error_response(api_error, request_id)
        return self._shared.refusal(self._url, self._headers, api_error, request_id)

    def _linger(self) -> None:
        # To close while the client still sends would reset the connection, and with it the answer.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._loop.call_later(LINGER_SECONDS, self._transport.close)


# All connections of a server: what they share, and how they end together.


def _usual_bytes(_url: bytes) -> int:
    return MAX_BODY_BYTES


class Connections:
    """What the connections of one server share, and all that there are.

    An application may have a method `check_head`: it is given every head, and may return who sends
    it, where that is known at once, or raise an `ApiError` if a body is to come. It may also have
    `shares`, which it counts streams by, `most_bytes`, which says how long the body of a request
    to an address may be, and `refusal`, the answer to one there that is refused by its head.
    """

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - an ASGI application
        self.app = app
        self.check_head: Callable[[Head], Caller | None] | None = getattr(app, "check_head", None)
        self.shares: Shares = getattr(app, "shares", None) or Shares()
        self.most_bytes: Callable[[bytes], int] = getattr(app, "most_bytes", None) or _usual_bytes
        self.refusal: (
            Callable[[bytes, Sequence[tuple[bytes, bytes]], ApiError, bytes], Response] | None
        ) = getattr(app, "refusal", None)
        self.open: set[Connection] = set()
        self.date = DateHeader()
        self.request_ids = request_ids()
        self.is_draining = False
        self._all_closed = asyncio.Event()

    def new(self) -> Connection:
        """Return the protocol of a connection that is about to be made."""
        return Connection(self)

    def forget(self, connection: Connection) -> None:
        """Let go of a connection that is lost."""
        self.open.discard(connection)
        if not self.open:
            self._all_closed.set()

    async def drain(self, seconds: float) -> None:
        """Take no further request, and finish those that there are within this time."""
        self.is_draining = True
        for connection in list(self.open):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(seconds):
                await self._all_gone()
        except TimeoutError:
            self._abandon()

    async def _all_gone(self) -> None:
        while self.open:
            self._all_closed.clear()
            await self._all_closed.wait()

    def _abandon(self) -> None:
        _LOG.warning("%d connections did not end in time", len(self.open))
        for connection in list(self.open):
            connection.abort()
