"""Serving the application on a socket, until the task that serves is cancelled."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

from headgate.errors import InvalidSettingError
from headgate.web.http.connections import Connections

DRAIN_SECONDS = 10.0
BACKLOG = 2048
MAX_PORT = 65_535

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
    drain_seconds: float = DRAIN_SECONDS,
) -> None:
    """Serve until cancelled; then take no more requests, and finish those that there are.

    `on_ready` gets the address and the port, which for port 0 is one that was free.
    """
    listener = listen(host, port)
    connections = Connections(app)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(connections.new, sock=listener, backlog=BACKLOG)
    try:
        bound = listener.getsockname()
        on_ready(bound[0], bound[1])
        await loop.create_future()
    finally:
        server.close()
        await connections.drain(drain_seconds)


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
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        problem = _PROBLEMS.get(getattr(error, "errno", None) or 0, f"cannot be used: {error}")
        raise InvalidSettingError("port", f"{host} port {port} {problem}") from None
    return listener
