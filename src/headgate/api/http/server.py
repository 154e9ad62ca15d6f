"""Serving the application on a socket, until the task that serves is cancelled."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from headgate.api.http.connection import Connections
from headgate.api.shares import EXTRA_CONNECTIONS, MAX_CONNECTIONS, MAX_SPILLED_FILES
from headgate.errors import InvalidSettingError

DRAIN_SECONDS = 10.0
OPENING_SECONDS = 5.0
"""How long requests wait for what they need to be open; then they are told that it is not."""

MAX_OPEN_FILES = 65_536
MACOS_OPEN_FILES = 10_240
"""The limit on open files is raised to so many, where the system lets it."""

LEAST_KEPT_FILES = 64
KEPT_SHARE_OF_FILES = 4
"""A part of the open files, and so many at least, are for the store, targets and commands."""

SPILLED_SHARE_OF_FILES = 8
"""Another part is for the bodies of calls that wait."""

BACKLOG = 2048
MAX_PORT = 65_535
SEND_BUFFER_BYTES = 128 * 1024
"""What the system keeps of an answer for a client that does not take it; Linux doubles it.

By itself it would keep megabytes for each connection. And an event loop may hold all of an answer
until the last byte is handed over, while what was handed over counts for no caller any more.
"""

ANSWER_SECONDS = 2.0
MOST_ANSWER_BYTES = 10_000
LIVE = b'{"status":"ok"'
"""How the answer of a service to /livez begins."""

log = structlog.get_logger("headgate.api")

_PROBLEMS = {
    errno.EADDRINUSE: "is in use by another program; stop it, or choose another with --port",
    errno.EACCES: "may not be used by this user; choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "is no address of this machine; choose another with --host",
}


async def serve(
    app: Any,  # noqa: ANN401 - an ASGI application
    *,
    host: str,
    port: int,
    on_ready: Callable[[str, int], None],
    opened: asyncio.Event | None = None,
    opening_seconds: float = OPENING_SECONDS,
    drain_seconds: float = DRAIN_SECONDS,
) -> None:
    """Serve until cancelled; then take no more requests, and finish those that there are.

    `on_ready` gets the address and the port, which for port 0 is one that was free. Connections
    that come before `opened` is set wait for it, unless that takes too long.
    """
    listener = listen(host, port)
    try:
        bound = listener.getsockname()
        on_ready(bound[0], bound[1])
        if opened is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(opening_seconds):
                    await opened.wait()
    except BaseException:
        listener.close()
        raise
    connections = Connections(app)
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    spilled = connections.shares.spilled.files
    spilled.most = min(spilled.most, room_for_spilled(open_files))
    room = room_for_connections(open_files)
    pool = connections.shares.connections
    if room < pool.most:
        log.warning("few files may be open, so few connections too", connections=room)
        pool.most = room
    loop = asyncio.get_running_loop()
    server = await loop.create_server(connections.new, sock=listener, backlog=BACKLOG)
    try:
        await loop.create_future()
    finally:
        server.close()
        await connections.drain(drain_seconds)


def raise_open_files() -> None:
    """Let this process have more files open, as far as it may; commands that it runs may as well.

    Many systems begin with a limit of 1,024, for the sake of programs that are older than `poll`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS calls its hard limit infinite and refuses more than a number of its own.
    for wanted in (MAX_OPEN_FILES, MACOS_OPEN_FILES):
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        if soft == resource.RLIM_INFINITY or soft >= most:
            return
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return


def room_for_connections(open_files: int) -> int:
    """Return how many connections there may be, so that files are left for everything else."""
    if open_files in (resource.RLIM_INFINITY, -1):
        return MAX_CONNECTIONS
    kept = LEAST_KEPT_FILES + open_files // KEPT_SHARE_OF_FILES + EXTRA_CONNECTIONS
    kept += room_for_spilled(open_files)
    return max(min(open_files - kept, MAX_CONNECTIONS), open_files // KEPT_SHARE_OF_FILES)


def room_for_spilled(open_files: int) -> int:
    """Return how many files the bodies of calls that wait may have open."""
    if open_files in (resource.RLIM_INFINITY, -1):
        return MAX_SPILLED_FILES
    return min(MAX_SPILLED_FILES, open_files // SPILLED_SHARE_OF_FILES)


def listen(host: str, port: int) -> socket.socket:
    """Open the socket, or raise `InvalidSettingError` with one clear line."""
    if not 0 <= port <= MAX_PORT:
        raise InvalidSettingError("port", f"must be between 0 and {MAX_PORT}, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise InvalidSettingError("host", f"{host} port {port} cannot be used: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        number = getattr(error, "errno", None) or 0
        problem = _PROBLEMS.get(number, f"cannot be used: {error}")
        if number == errno.EADDRINUSE and _is_service(listener.family, address):
            problem = "is in use by another Headgate; stop it, or choose another with --port"
        raise InvalidSettingError("port", f"{host} port {port} {problem}") from None
    return listener


def _is_service(family: int, address: tuple[Any, ...]) -> bool:
    """Tell whether it is a service that serves at an address."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(address)
            connection.sendall(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
            head, _, body = connection.makefile("rb").read(MOST_ANSWER_BYTES).partition(b"\r\n\r\n")
    except OSError:
        return False
    return head.startswith(b"HTTP/1.") and body.startswith(LIVE)


# The log of requests, for whoever looks for a fault: a line each, at the level debug.
#
# Rule: a line has neither the query nor any header, so that no token can get into it.


class RequestLog:
    """An application around the application; it is only there while such lines are wanted."""

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - an ASGI application
        self._app = app
        self.check_head = getattr(app, "check_head", None)
        self.shares = getattr(app, "shares", None)
        self.most_bytes = getattr(app, "most_bytes", None)
        self.refusal = getattr(app, "refusal", None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        """Have a request answered, and say how."""
        started = time.perf_counter()
        head: dict[str, Any] = {}
        # Every answer is to be seen here.
        scope.pop("headgate.answer", None)

        async def noting(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            log.debug(
                "request",
                method=scope.get("method"),
                path=scope.get("path"),
                status=head.get("status"),
                request_id=_request_id(head),
                ms=round((time.perf_counter() - started) * 1_000, 3),
            )


def _request_id(head: dict[str, Any]) -> str | None:
    for name, value in head.get("headers", ()):
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return None
