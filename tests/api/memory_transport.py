"""A connection without a socket: what was written to it, and a way to feed it."""

from __future__ import annotations

import asyncio
from typing import Any

from api.fake_app import fake_app
from headgate.api.app import App
from headgate.api.http.connection import Connections


class MemoryTransport(asyncio.Transport):
    """Keeps what was written, and who was told to pause."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False
        self.is_paused = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written += bytes(data)

    def write_eof(self) -> None:
        return

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.limits = (high, low)

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


async def fed(pieces: list[bytes], app: App | None = None) -> MemoryTransport:
    """Give a connection these pieces, each when it wants one, and let it come to rest."""
    app = app or fake_app()
    transport, connection = MemoryTransport(), Connections(app).new()
    connection.connection_made(transport)
    for piece in pieces:
        if transport.is_closed:
            break
        connection.data_received(piece)
        for _ in range(30):
            await asyncio.sleep(0)
        assert not transport.is_paused
    connection.connection_lost(None)
    return transport
