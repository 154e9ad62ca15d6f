"""A lean HTTP/1.1 client: the connections to one upstream, one request on each at a time.

The parser is llhttp and every connection a protocol of the event loop, since a call through the
gateway or a task of an HTTP target may cost a few hundred microseconds in all. Two rules hold
throughout. Whatever an upstream sends is bounded, and nothing is read ahead of the caller beyond a
small buffer. Every error says whether the request may have reached the upstream, because somebody
may have to pay for it; it names host and port, and never a header, which may be a key.

Redirects are not followed, upgrades refused, content codings left as they are.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import re
import select
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from headgate.errors import HeadgateError, InvalidFieldError, InvalidSettingError
from headgate.providers.http_headers import FRAMING_HEADERS

MAX_UNREAD_BYTES = 256 * 1024
"""Reading stops while so much of an answer waits for the caller."""
UNCOUNTED_BYTES = 64 * 1024
"""So much of a whole answer is read before somebody counts it."""
PIECE_COST_BYTES = 64
"""What a piece counts beside its bytes, so that an answer in tiny pieces is bounded as well."""
MAX_HEADERS = 256
MAX_INTERIM_ANSWERS = 32
COPIED_BODY_BYTES = 32 * 1024
"""A body up to this size is copied behind the head; a larger one is handed over as it is."""
RACE_SECONDS = 0.25
"""How long news of a closed connection may take, beside the round trips of the network."""
MAX_ADDRESSES = 8
NEXT_ADDRESS_SECONDS = 0.25
"""How long one address of a name may keep silent before the next one is tried beside it."""

Count = Callable[[int], Awaitable[None]]

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"/[!\"$-~]*")
_LONGEST_CACHED_NAME = 64
_LONGEST_CACHED_PATH = 256
_BODILESS_METHODS = ("GET", "HEAD", "DELETE", "OPTIONS")
_DEFAULT_PORTS = {"http": 80, "https": 443}
# They belong to one connection, and so to this one: they are made here, or not sent at all.
_OWN_HEADERS = frozenset(name.encode() for name in FRAMING_HEADERS)
_VERSIONS = ("1.1", "1.0")
_FIRST_INTERIM = 100
_SWITCHING_PROTOCOLS = 101
_FIRST_FINAL = 200
_FRAMING_HEADERS = frozenset({b"content-length", b"keep-alive", b"transfer-encoding"})
_NO_SUCH_NETWORK = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH))
_NAME_MISMATCHES = frozenset((62, 64))
"""How OpenSSL says that a certificate is for another name, or for another address."""
_KEEP_ALIVE_TIMEOUT = re.compile(rb"(?:^|[,\s])timeout=(\d{1,6})")
KEEP_ALIVE_MARGIN_SECONDS = 1.0
"""A connection is given up so long before the upstream said that it closes it."""


class UpstreamError(HeadgateError):
    """An upstream gave no answer, or none that can be used.

    Unless it is a `NotSentError`, the upstream may have acted on the request, and charged for it.
    """

    def __init__(self, host: str, port: int, problem: str) -> None:
        super().__init__(f"upstream {host}:{port}: {problem}")
        self.host = host
        self.port = port
        self.problem = problem


class NotSentError(UpstreamError):
    """The upstream cannot have read the whole request; it may be sent again, here or elsewhere."""


class AnswerTimeoutError(UpstreamError):
    """The request was sent, and the answer or the rest of it did not come in time."""


class AnswerBrokenError(UpstreamError):
    """The request was sent, and the answer was cut off or is not HTTP/1.1."""


class AnswerTooLargeError(UpstreamError):
    """The body of the answer is longer than the caller takes."""


class UpstreamResponse:
    """An answer whose head has arrived; the caller reads its body, and closes it in any case.

    A `read` that is cancelled loses nothing: the next one goes on where it would have been.
    """

    __slots__ = (
        "_connection",
        "_error",
        "_pieces",
        "_pool",
        "_unread_bytes",
        "headers",
        "is_complete",
        "piece_count",
        "status",
    )

    def __init__(
        self,
        pool: UpstreamPool,
        connection: _Connection,
        status: int,
        headers: tuple[tuple[bytes, bytes], ...],
    ) -> None:
        self.status = status
        self.headers = headers
        self.is_complete = False
        """Whether all of it has arrived: what is unread can be read without waiting."""
        self.piece_count = 0
        """How many pieces of the body have arrived, as the upstream divided it."""
        self._pool = pool
        self._connection: _Connection | None = connection
        self._error: UpstreamError | None = None
        self._pieces: list[bytes] = []
        self._unread_bytes = 0

    def header(self, name: bytes) -> bytes:
        """Return the first value of a header, by its name in lower case; empty without one."""
        for one, value in self.headers:
            if one == name:
                return value
        return b""

    def read_nowait(self) -> bytes | None:
        """Return what has arrived and is unread: None if that is nothing yet, b"" at the end."""
        pieces = self._pieces
        if pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._unread_bytes = 0
            if self._connection is not None:
                self._connection.resume()
            return piece
        if self._error is not None:
            raise self._error
        return b"" if self.is_complete else None

    async def read(self) -> bytes:
        """Return the next piece as it came, and b"" at the end."""
        while (piece := self.read_nowait()) is None:
            if self._connection is not None:
                await self._connection.wait(self._pool.read_seconds)
        return piece

    def read_whole(self, most: int) -> bytes | None:
        """Return the whole body, as most answers come; None if it is to be awaited."""
        is_here = self.is_complete and self._error is None
        return self.read_nowait() if is_here and 0 < self._unread_bytes <= most else None

    async def read_all(self, most: int, count: Count | None = None) -> bytes:
        """Return the whole body, or raise `AnswerTooLargeError` as soon as it is above `most`.

        `count` is told how much of a long one is here, and may keep the rest waiting.
        """
        pieces = []
        size = 0
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > most:
                self.close()
                raise AnswerTooLargeError(
                    *self._pool.address, f"the answer has more than {most:,} bytes"
                )
            if size > UNCOUNTED_BYTES and count is not None:
                await count(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Let go of the answer: what is unread is dropped, and what has not arrived is cut off."""
        if self._error is None and (self._pieces or not self.is_complete):
            error = AnswerBrokenError(*self._pool.address, "the answer was closed before its end")
            self._error = error
            if self._connection is not None:
                self._connection.fail(error)
        self._pieces.clear()
        self._unread_bytes = 0


class _Connection(asyncio.Protocol):
    """One connection; it is idle, or has one request whose answer has not wholly arrived."""

    __slots__ = (
        "_deadline",
        "_fault",
        "_framing_bytes",
        "_has_begun",
        "_has_surplus",
        "_head_bytes",
        "_headers",
        "_interim_answers",
        "_is_busy",
        "_is_framed",
        "_is_head_request",
        "_is_paused",
        "_is_reused",
        "_is_unflushed",
        "_keep_alive",
        "_keep_alive_seconds",
        "_loop",
        "_parser",
        "_poll",
        "_pool",
        "_response",
        "_sent_at",
        "_timer",
        "_timer_at",
        "_transport",
        "_waiter",
        "expires_at",
        "took_request",
    )

    def __init__(self, pool: UpstreamPool, loop: asyncio.AbstractEventLoop) -> None:
        self.expires_at = 0.0
        self.took_request = False
        """Whether the upstream may have the request, although it had closed the connection."""

        self._pool = pool
        self._loop = loop
        # Of the transport only what its documentation has is used; its type has less.
        self._transport: Any = None
        self._poll: select.poll | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[UpstreamResponse | UpstreamError | None] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_busy = False
        self._is_reused = False
        self._is_paused = False
        self._is_unflushed = False
        self._sent_at = 0.0
        self._begin(is_head_request=False)

    def _begin(self, *, is_head_request: bool) -> None:
        self._is_head_request = is_head_request
        self._has_begun = False
        self._has_surplus = False
        self._is_framed = False
        self._keep_alive = False
        self._keep_alive_seconds: int | None = None
        self._interim_answers = 0
        self._head_bytes = 0
        self._framing_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._fault = ""
        self._response: UpstreamResponse | None = None

    async def request(
        self, head: bytes, body: bytes, *, is_head_request: bool
    ) -> UpstreamResponse | None:
        """Send a request and wait for the head of its answer.

        None is for an idle connection that the upstream has closed, as it may at any time.
        """
        if self._is_reused:
            self._begin(is_head_request=is_head_request)
        else:
            self._is_head_request = is_head_request
        if self._transport.is_closing():
            # It was closed as soon as it was made; one that is idle is forgotten when it is closed.
            raise NotSentError(*self._pool.address, "the connection was closed at once")
        self._is_busy = True
        waiter = self._waiter = self._loop.create_future()
        self._sent_at = now = self._loop.time()
        self._watch(now + self._pool.response_seconds)
        if len(body) <= COPIED_BODY_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        try:
            answer: UpstreamResponse | UpstreamError | None = await waiter
        except BaseException:
            self._give_up(waiter)
            raise
        if isinstance(answer, UpstreamError):
            raise answer
        return answer

    def _give_up(self, waiter: asyncio.Future[UpstreamResponse | UpstreamError | None]) -> None:
        if waiter.cancelled() or not waiter.done():
            self._waiter = None
            self.abort()
            return
        # The head came at the same moment; the connection may have another request already.
        answer = waiter.result()
        if isinstance(answer, UpstreamResponse):
            answer.close()

    async def wait(self, seconds: float) -> None:
        """Wait until more of the answer is there, or its end, or an error."""
        if self._waiter is not None:
            message = "an answer has one reader at a time"
            raise RuntimeError(message)
        waiter = self._waiter = self._loop.create_future()
        self._watch(self._loop.time() + seconds)
        try:
            await waiter
        finally:
            if self._waiter is waiter:
                self._waiter = None

    def _wake(self, value: UpstreamResponse | UpstreamError | None) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(value)

    def _watch(self, deadline: float) -> None:
        # A timer that fires too early is cheaper than one for every request.
        self._deadline = deadline
        if deadline == math.inf:
            return
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._deadline:
            self._watch(self._deadline)
        elif self._response is not None:
            self.fail(self._timeout(f"no more came for {self._pool.read_seconds:g} seconds"))
        elif self._is_unflushed:
            line = f"the request was not taken within {self._pool.response_seconds:g} seconds"
            self.fail(NotSentError(*self._pool.address, line))
        else:
            self.fail(self._timeout(f"no answer within {self._pool.response_seconds:g} seconds"))

    def _timeout(self, problem: str) -> AnswerTimeoutError:
        return AnswerTimeoutError(*self._pool.address, problem)

    def is_readable(self) -> bool:
        """Say whether bytes or the end have come that the loop has not read yet."""
        return self._poll is not None and bool(self._poll.poll(0))

    def resume(self) -> None:
        """Read on where reading was stopped."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def fail(self, error: UpstreamError | None) -> None:
        """End the connection; whoever waits is told why, with None that it had been closed."""
        response = self._response
        self.abort()
        if response is not None:
            response._connection = None
            response._error = response._error or error
        self._wake(error)

    def abort(self) -> None:
        """Drop the connection, whatever is under way."""
        self._is_busy = False
        self._response = None
        self._pool._forget(self)
        if self._transport is not None:
            self._transport.abort()

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; it says at once when it could not send everything."""
        self._transport = transport
        self._pool._open.add(self)
        is_tls = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(high=1 if is_tls else 0, low=0)
        wire = transport.get_extra_info("socket")
        if wire is not None:
            # Routers forget a connection that is silent for minutes, as one is before an answer.
            with suppress(OSError):
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._poll = select.poll()
            self._poll.register(wire.fileno(), select.POLLIN)

    def pause_writing(self) -> None:
        """Note that a part of the request is still here."""
        self._is_unflushed = True

    def resume_writing(self) -> None:
        """Note that the whole request is on its way."""
        self._is_unflushed = False

    def eof_received(self) -> bool:
        """End the connection, and an answer that says nothing of its length."""
        response = self._response
        if response is not None and not self._is_framed:
            response.is_complete = True
            self._end(response, keep_alive=False)
        else:
            self._lose()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """End what is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lose()

    def _lose(self) -> None:
        if not self._is_busy:
            self.abort()
        elif self._has_begun:
            self.fail(self._broken("the answer was cut off"))
        elif self._is_reused and (self._is_unflushed or self._may_be_race()):
            self.took_request = not self._is_unflushed
            self.fail(None)
        elif self._is_unflushed:
            line = "the connection was closed before the request was sent"
            self.fail(NotSentError(*self._pool.address, line))
        else:
            self.fail(self._broken("the connection was closed without an answer"))

    def _may_be_race(self) -> bool:
        """Say whether the upstream may have closed the connection before the request came.

        It had been idle, so the upstream may close it at any time. Its word of that is on the way
        for at most as long as the network takes; a connection that is closed later was closed by
        somebody who had the request.
        """
        elapsed = self._loop.time() - self._sent_at
        return elapsed <= self._pool.race_seconds + 2 * self._pool.round_trips_seconds

    def _broken(self, problem: str) -> AnswerBrokenError:
        return AnswerBrokenError(*self._pool.address, problem)

    def data_received(self, data: bytes) -> None:
        """Read what came of the answer."""
        if not self._is_busy:
            self.abort()  # Nobody asked for anything.
            return
        self._has_begun = True
        response = self._response
        unread_bytes = 0 if response is None else response._unread_bytes
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # What comes after the end of an answer does not spoil it, only its connection.
            self._has_surplus = True
            if self._response is None or not self._response.is_complete:
                # The parser's words are constants: they quote nothing of the answer.
                self._fault = self._fault or f"the answer is not HTTP/1.1 ({error})"
        had_head = response is not None
        response = self._response
        if self._fault:
            self.fail(self._broken(self._fault))
        elif response is None:
            # Headers are counted when they end, and this one may have no end.
            self._framing_bytes += len(data)
            if self._framing_bytes > self._pool.max_head_bytes:
                self.fail(self._broken("the head of the answer is too large"))
        elif response.is_complete:
            self._end(response, keep_alive=self._keep_alive)
        elif had_head and response._unread_bytes == unread_bytes:
            # Trailers and chunks without an end are no body, and nobody would ever see them.
            self._framing_bytes += len(data)
            if self._framing_bytes > self._pool.max_head_bytes:
                self.fail(self._broken("the answer has too much beside its body"))
        else:
            self._framing_bytes = 0
            if response._unread_bytes > MAX_UNREAD_BYTES and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
            self._wake(response)

    def _end(self, response: UpstreamResponse, *, keep_alive: bool) -> None:
        """Part from an answer that has wholly arrived; the next request may come at once."""
        response._connection = None
        self._response = None
        self._headers = []
        self._is_busy = False
        if keep_alive and not self._has_surplus and not self._is_unflushed:
            if self._is_head_request:
                # The old one waits for the body of which the head told.
                self._parser = httptools.HttpResponseParser(self)
            self.resume()
            self._is_reused = True
            self._pool._put_back(self, self._keep_alive_seconds)
        else:
            self.abort()
        self._wake(response)

    # What the parser says.

    def on_message_begin(self) -> None:
        """Note bytes after the end: an answer to nothing."""
        if self._response is not None:
            self._has_surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; what comes after the body is counted, and passed over."""
        self._head_bytes += len(name) + len(value) + 4
        response = self._response
        if response is not None:
            if self._head_bytes > self._pool.max_head_bytes and not response.is_complete:
                self._fault = "the answer has too much beside its body"
            return
        name = name.lower()
        if name in _FRAMING_HEADERS:
            if name == b"keep-alive":
                found = _KEEP_ALIVE_TIMEOUT.search(value.lower())
                self._keep_alive_seconds = int(found[1]) if found else None
            else:
                self._is_framed = True
                if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                    self._fault = "the answer has another Transfer-Encoding than chunked"
        self._headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Make the answer, unless it is an interim one."""
        if self._response is not None:
            return
        status = self._parser.get_status_code()
        headers = self._headers
        if self._head_bytes > self._pool.max_head_bytes or len(headers) > MAX_HEADERS:
            self._fault = "the head of the answer is too large"
        elif status < _FIRST_INTERIM or self._parser.get_http_version() not in _VERSIONS:
            self._fault = "the answer is not HTTP/1.1"
        elif status == _SWITCHING_PROTOCOLS:
            self._fault = "the answer wants another protocol"
        elif status >= _FIRST_FINAL:
            response = UpstreamResponse(self._pool, self, status, tuple(headers))
            self._response = response
            if self._is_head_request:
                response.is_complete = True
                self._keep_alive = self._parser.should_keep_alive()
        else:
            self._interim_answers += 1
            self._headers = []
            self._is_framed = False
            if self._interim_answers > MAX_INTERIM_ANSWERS:
                self._fault = "there are too many interim answers"

    def on_body(self, piece: bytes) -> None:
        """Keep a piece for the reader."""
        response = self._response
        if response is None or response.is_complete:
            self._has_surplus = True
        else:
            response._pieces.append(piece)
            response._unread_bytes += len(piece) + PIECE_COST_BYTES
            response.piece_count += 1

    def on_message_complete(self) -> None:
        """Note the end; that of an interim answer is none."""
        response = self._response
        if response is not None and not response.is_complete:
            response.is_complete = True
            # The parser forgets it right after.
            self._keep_alive = self._parser.should_keep_alive()


class UpstreamPool:
    """Sends requests to one upstream over connections that are kept between them."""

    def __init__(
        self,
        base_url: str,
        *,
        max_idle: int = 64,
        idle_seconds: float = 55.0,
        connect_seconds: float = 10.0,
        response_seconds: float = 600.0,
        read_seconds: float = 300.0,
        race_seconds: float = RACE_SECONDS,
        max_head_bytes: int = 64 * 1024,
    ) -> None:
        self.address, is_tls, authority, self._path = _read_base_url(base_url)
        """Host and port."""
        self.response_seconds = response_seconds
        self.read_seconds = read_seconds
        self.race_seconds = race_seconds
        self.max_head_bytes = max_head_bytes
        self._host_header = b" HTTP/1.1\r\nhost: " + authority
        self._max_idle = max_idle
        self._idle_seconds = idle_seconds
        self._connect_seconds = connect_seconds
        self.round_trips_seconds = connect_seconds
        """How long it took to connect at best, which is at least one round trip.

        At other times this process was busy, and the upstream no further away.
        """

        self._ssl_context = trusted_context() if is_tls else None
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def in_use(self) -> int:
        """How many connections have an answer under way."""
        return len(self._open) - len(self._idle)

    @property
    def idle(self) -> int:
        """How many connections wait for a request."""
        return len(self._idle)

    async def send(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        *,
        lines: bytes = b"",
    ) -> UpstreamResponse:
        """Send a request, and return when the head of its answer has arrived.

        `path`, which may have a query, is appended to the path of the base URL. Headers that
        belong to a connection are made here; those among `headers` are passed over. `lines` are
        further headers, which were made by `header_lines`.
        """
        if headers:
            lines += header_lines(headers)
        head = self._head(method, path, lines, len(body))
        is_head_request = method == "HEAD"
        idle = self._take_idle()
        if idle is not None:
            answer = await idle.request(head, body, is_head_request=is_head_request)
            if answer is not None:
                return answer
        # Nobody can have closed a new one for being idle, so this is tried once.
        try:
            connection = await self._connect()
            answer = await connection.request(head, body, is_head_request=is_head_request)
        except NotSentError as error:
            if idle is None or not idle.took_request:
                raise
            # An upstream that was killed with the request closes an idle connection as well.
            line = f"the connection was closed without an answer; on the next one, {error.problem}"
            raise AnswerBrokenError(*self.address, line) from error
        return cast("UpstreamResponse", answer)

    def drop_idle(self) -> None:
        """End the connection that has waited longest for a request, if any does."""
        if self._idle:
            self._idle[0].abort()

    def retire(self) -> None:
        """End idle connections now, and all others when their answer has ended or is closed.

        Whoever is about to send a request can still do so.
        """
        self._max_idle = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in self._idle[:]:
            connection.abort()

    async def close(self) -> None:
        """End connections as `retire` does, and send nothing any more."""
        self._is_closed = True
        self.retire()
        # The loop ends them when it has its next turn.
        await asyncio.sleep(0)

    def _head(self, method: str, path: str, lines: bytes, size: int) -> bytes:
        is_short = len(path) <= _LONGEST_CACHED_PATH
        line = (_request_line if is_short else _new_request_line)(method, self._path, path)
        if size or method not in _BODILESS_METHODS:
            return b"%b%b%b\r\ncontent-length: %d\r\n\r\n" % (line, self._host_header, lines, size)
        return b"%b%b%b\r\n\r\n" % (line, self._host_header, lines)

    def _take_idle(self) -> _Connection | None:
        idle = self._idle
        if self._is_closed:
            raise NotSentError(*self.address, "its connections were closed; make another pool")
        if not idle:
            return None
        now = idle[-1]._loop.time()
        while idle:
            connection = idle.pop()
            # Whatever has come, nobody asked for it: most likely the upstream has closed it.
            if connection.expires_at > now and not connection.is_readable():
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        host, port = self.address
        connection = _Connection(self, loop)
        try:
            async with asyncio.timeout(self._connect_seconds):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                wire = await _first_connected(loop, _in_turns(found))
                try:
                    await loop.create_connection(
                        lambda: connection,
                        sock=wire,
                        ssl=self._ssl_context,
                        server_hostname=None if self._ssl_context is None else host,
                    )
                except BaseException:
                    # It may be made already, and uvloop does not tell it that it is closed then.
                    connection.abort()
                    raise
        except (OSError, UnicodeError) as error:
            line = why_not_connected(error)
            # The system has a time limit of its own, and its error a number.
            if isinstance(error, TimeoutError) and error.errno is None:
                line = f"no connection within {self._connect_seconds:g} seconds"
            raise NotSentError(host, port, line) from error
        self.round_trips_seconds = min(self.round_trips_seconds, loop.time() - started_at)
        return connection

    def _put_back(self, connection: _Connection, keep_alive_seconds: int | None) -> None:
        seconds = self._idle_seconds
        if keep_alive_seconds is not None:
            seconds = min(seconds, keep_alive_seconds - KEEP_ALIVE_MARGIN_SECONDS)
        if self._is_closed or seconds <= 0 or len(self._idle) >= self._max_idle:
            connection.abort()
            return
        loop = connection._loop
        connection.expires_at = loop.time() + seconds
        self._idle.append(connection)
        if self._timer is None:
            self._timer = loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [one for one in self._idle if one.expires_at <= now]:
            connection.abort()
        if self._idle:
            soonest = min(one.expires_at for one in self._idle)
            self._timer = loop.call_at(soonest, self._expire)

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


_AddressInfo = tuple[int, int, int, str, Any]


def _in_turns(found: Sequence[_AddressInfo]) -> list[_AddressInfo]:
    """Order addresses so that two kinds of them alternate, the resolver's favourite first."""
    first = [one for one in found if one[0] == found[0][0]]
    others = [one for one in found if one[0] != found[0][0]]
    ordered = [one for pair in zip_longest(first, others) for one in pair if one is not None]
    return ordered[:MAX_ADDRESSES]


async def _first_connected(
    loop: asyncio.AbstractEventLoop, addresses: Sequence[_AddressInfo]
) -> socket.socket:
    """Connect to whichever address of a name answers first.

    A network may promise IPv6 and drop it, so the next address is tried beside one that is silent.
    """
    tries: set[asyncio.Task[socket.socket]] = set()
    left = list(addresses)
    failure: OSError | None = None
    try:
        while left or tries:
            if left:
                tries.add(asyncio.ensure_future(_connected_socket(loop, left.pop(0))))
            done, tries = await asyncio.wait(
                tries,
                timeout=NEXT_ADDRESS_SECONDS if left else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for one in done:
                if (error := one.exception()) is None:
                    tries |= done - {one}
                    return one.result()
                if failure is None or failure.errno in _NO_SUCH_NETWORK:
                    failure = cast("OSError", error)
        raise failure or OSError("no address")
    finally:
        for one in tries:
            _give_up_on(one)


def _give_up_on(attempt: asyncio.Task[socket.socket]) -> None:
    def close(ended: asyncio.Task[socket.socket]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            ended.result().close()

    attempt.cancel()
    attempt.add_done_callback(close)


async def _connected_socket(
    loop: asyncio.AbstractEventLoop, address: _AddressInfo
) -> socket.socket:
    family, kind, protocol, _, where = address
    wire = socket.socket(family, kind, protocol)
    try:
        wire.settimeout(0)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(wire, where)
    except BaseException:
        wire.close()
        raise
    return wire


@cache
def trusted_context() -> ssl.SSLContext:
    """Read the certificates that are trusted, once: it takes a while, and a megabyte.

    They are those of `SSL_CERT_FILE` and `SSL_CERT_DIR`, otherwise those of the system, which
    OpenSSL alone does not find everywhere: macOS has them in its keychain.
    """
    paths = ssl.get_default_verify_paths()
    has_own = paths.cafile or (paths.capath and any(Path(paths.capath).iterdir()))
    is_named = not os.environ.keys().isdisjoint(("SSL_CERT_FILE", "SSL_CERT_DIR"))
    if is_named or (has_own and sys.platform != "darwin"):
        context = ssl.create_default_context()
    else:
        import httpx2  # noqa: PLC0415  slow to load

        context = httpx2.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read_base_url(base_url: str) -> tuple[tuple[str, int], bool, bytes, bytes]:
    """Return host and port, whether it is HTTPS, the Host header, and the path without its end."""
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError:
        raise InvalidSettingError("base_url", "is not a URL") from None
    host = parts.hostname or ""
    path = parts.path.rstrip("/")
    if parts.scheme not in _DEFAULT_PORTS or not host:
        raise InvalidSettingError("base_url", "is not a URL of http or https")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidSettingError("base_url", "has a user, a query or a fragment; leave them out")
    if not base_url.isascii() or _TARGET.fullmatch(f"/{host}{path}".encode()) is None:
        raise InvalidSettingError("base_url", "has other characters than printable ASCII")
    authority = f"[{host}]" if ":" in host else host
    usual = _DEFAULT_PORTS[parts.scheme]
    if port is not None and port != usual:
        authority = f"{authority}:{port}"
    is_tls = parts.scheme == "https"
    return (host, usual if port is None else port), is_tls, authority.encode(), path.encode()


def _new_request_line(method: str, base: bytes, path: str) -> bytes:
    """Return how a request begins: its method and its target."""
    target = base + path.encode("ascii", "replace")
    if not path.isascii() or _TARGET.fullmatch(target) is None:
        raise InvalidFieldError("path", "is no path of printable ASCII; quote what is not")
    verb = method.encode("ascii", "replace")
    if _TOKEN.fullmatch(verb) is None:
        raise InvalidFieldError("method", "is not a method of HTTP")
    return b"%b %b" % (verb, target)


_request_line = lru_cache(maxsize=512)(_new_request_line)


def header_lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return headers as they are sent, without those that are made for each request."""
    parts = []
    for name, value in headers:
        start = _line_start(name) if len(name) <= _LONGEST_CACHED_NAME else _checked(name)
        if start:
            parts.append(start)
            parts.append(value)
    lines = b"".join(parts)
    breaks = len(parts) // 2
    # One look at all of it is faster than one at each value.
    if lines.count(b"\n") != breaks or lines.count(b"\r") != breaks or b"\0" in lines:
        raise InvalidFieldError("headers", "a value has a line break or a zero byte")
    return lines


@lru_cache(maxsize=512)
def _line_start(name: bytes) -> bytes:
    return _checked(name)


def _checked(name: bytes) -> bytes:
    """Return how the line of a header starts, or nothing for one that is made here."""
    if _TOKEN.fullmatch(name) is None:
        raise InvalidFieldError("headers", "a name is not one of HTTP")
    return b"" if name.lower() in _OWN_HEADERS else b"\r\n%b: " % name


def why_not_connected(error: OSError | UnicodeError) -> str:
    """Return the reason of a failed connect, which names no host."""
    if isinstance(error, ssl.SSLCertVerificationError):
        # What OpenSSL says of these two names the host.
        if error.verify_code in _NAME_MISMATCHES:
            return "its certificate is for another name"
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return "TLS could not be agreed on"
    if isinstance(error, socket.gaierror | UnicodeError):
        return "its name could not be resolved"
    if isinstance(error, ConnectionRefusedError):
        return "it refuses connections"
    # The error's own words name the address.
    why = type(error).__name__ if error.errno is None else os.strerror(error.errno)
    return f"no connection ({why})"
