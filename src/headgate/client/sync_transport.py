"""HTTP for `SyncClient`, on the standard library: connections that are kept for a while.

It needs no package, and loads in a third of the time that one takes: a command has no second to
spend on that. Proxies of the environment are not asked, and redirects not followed.
"""

from __future__ import annotations

import http.client
import select
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any, NamedTuple

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

CONNECT_SECONDS = 5.0
KEEPALIVE_SECONDS = 30.0
MAX_IDLE = 8
PIECE_BYTES = 64 * 1024

_OK = 200
_NO_CONTENT = 204


class _IdleConnection(NamedTuple):
    connection: http.client.HTTPConnection
    since: float


class SyncTransport:
    """Connections to one service; any thread may use it."""

    def __init__(
        self, address: Address, headers: dict[str, str], *, timeout_seconds: float
    ) -> None:
        self._address = address
        self._headers = headers
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._idle: list[_IdleConnection] = []

    def send(self, call: Call[Any]) -> Response:
        """Return what comes back, or raise why nothing did."""
        connection = self._connected(call.timeout_seconds or self._timeout_seconds)
        try:
            response = _read(self._request(connection, call))
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise no_response(self._address.url, _why(error)) from None
        except BaseException:
            # Ctrl-C: what is left of the answer must not be taken for the next one.
            connection.close()
            raise
        self._keep(connection)
        return response

    def stream(
        self, call: Call[Any], *, until: float | None = None
    ) -> Generator[Message, None, None]:
        """Give the messages of a stream until it ends, or time is up; raise if it is refused."""
        connection = self._connected(_patience_seconds(until))
        sock = connection.sock
        try:
            response = self._request(connection, call)
            if response.status == _NO_CONTENT:
                raise StreamOverError
            if response.status != _OK:
                api_error = _read(response)
                raise error_of(api_error) or no_response(self._address.url, "not a stream")
            reader = MessageReader()
            while (seconds := _patience_seconds(until)) > 0:
                # Signs of life satisfy a read, and must not put off the end.
                sock.settimeout(seconds)
                piece = response.read1(PIECE_BYTES)
                if not piece:
                    return
                yield from reader.feed(piece)
        except ServiceError:
            # What the service refuses is a ValueError too, and no fault of the connection.
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise no_response(self._address.url, _why(error)) from None
        finally:
            connection.close()

    def listen(
        self, call: Call[Any], is_news: Callable[[Message], bool], *, seconds: float
    ) -> bool:
        """Return when a message is news or time is up; False if there is no stream."""
        until = time.monotonic() + seconds
        try:
            with closing(self.stream(call, until=until)) as messages:
                if any(map(is_news, messages)):
                    return True
        except StreamOverError:
            return True
        except ServiceError:
            pass
        return time.monotonic() >= until

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle:
            one.connection.close()

    def _request(
        self, connection: http.client.HTTPConnection, call: Call[Any]
    ) -> http.client.HTTPResponse:
        headers = {**self._headers, **call.headers}
        if call.body is not None:
            headers["content-type"] = "application/json"
        connection.request(call.method, self._address.prefix + call.path, call.body, headers)
        return connection.getresponse()

    def _connected(self, timeout_seconds: float) -> http.client.HTTPConnection:
        connection = self._reused() or self._opened()
        if connection.sock is not None:
            connection.sock.settimeout(timeout_seconds)
        return connection

    def _reused(self) -> http.client.HTTPConnection | None:
        oldest = time.monotonic() - KEEPALIVE_SECONDS
        with self._lock:
            while self._idle:
                connection, since = self._idle.pop()
                # The service closes what is idle for longer, and would do so while it is used.
                if since > oldest and not _is_dropped(connection):
                    return connection
                connection.close()
        return None

    def _opened(self) -> http.client.HTTPConnection:
        is_tls = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        connection = kind(self._address.host, self._address.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            connection.close()
            raise not_reached(self._address.url, _why(error)) from None
        return connection

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        if connection.sock is None:
            return
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(_IdleConnection(connection, time.monotonic()))
                return
        connection.close()


def _is_dropped(connection: http.client.HTTPConnection) -> bool:
    """Tell whether the other side has closed an idle connection: then there is its end to read.

    A request that goes into such a one gets no answer, and whether it was carried out would not be
    known.
    """
    watch = select.poll()
    watch.register(connection.sock, select.POLLIN)
    return bool(watch.poll(0))


def _read(response: http.client.HTTPResponse) -> Response:
    headers = {name.lower(): value for name, value in response.getheaders()}
    body = response.read(MAX_RESPONSE_BYTES + 1)
    if len(body) > MAX_RESPONSE_BYTES:
        message = "the answer is too long"
        raise ValueError(message)
    with suppress(OSError):
        # A bounded read leaves the end of a chunked body unread, and the connection unusable.
        response.read()
    return Response(response.status, headers, body)


def _patience_seconds(until: float | None) -> float:
    """Return how long to wait for the next bytes of a stream that is read until then."""
    if until is None:
        return SILENCE_SECONDS
    return min(SILENCE_SECONDS, max(0.0, until - time.monotonic()))


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    if isinstance(error, http.client.HTTPException):
        # It carries what came instead, in the bytes of a stranger.
        return f"what it said is not HTTP ({type(error).__name__})"
    return str(error) or type(error).__name__
