"""A proxy that loses replies: the server has done the work, and the client never hears of it.

It stands between a client and a server on a unix socket, and listens on a port of the loopback.
Faults are drawn from a seeded source. Only an exchange that contains one of the `markers`, in the
request or in the reply, is at risk, so that what is lost is the answer to a change and not the
greeting of a connection.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

CHUNK_BYTES = 65_536


class FaultProxy:
    """Passes bytes on, and now and then loses a reply, loses a request, or holds a reply back."""

    def __init__(self, socket_path: Path, *, markers: tuple[bytes, ...], seed: int) -> None:
        self.port = 0
        self.dropped_replies = 0
        self.cut_requests = 0
        self.delayed_replies = 0
        self._socket_path = socket_path
        self._markers = markers
        self._random = random.Random(seed)
        self._drop_reply = 0.0
        self._cut_request = 0.0
        self._delay_reply = 0.0
        self._connections: set[asyncio.Task[None]] = set()
        self._cut = asyncio.Event()
        self._passes = asyncio.Event()
        self._passes.set()

    def harm(
        self, *, drop_reply: float = 0.0, cut_request: float = 0.0, delay_reply: float = 0.0
    ) -> None:
        """Make faults from now on, each with its probability for a marked exchange."""
        self._drop_reply = drop_reply
        self._cut_request = cut_request
        self._delay_reply = delay_reply

    def heal(self) -> None:
        """Make no more faults."""
        self.harm()

    def hold(self) -> None:
        """Hold the replies of marked exchanges back from now on, until they are released."""
        self._passes.clear()

    def release(self) -> None:
        """Pass on the replies that were held back, and hold no more."""
        self._passes.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until one side or a fault ends it."""
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            with suppress(OSError):
                upstream = await asyncio.open_unix_connection(str(self._socket_path))
                await self._carry(reader, writer, *upstream)
        finally:
            await _close(writer)

    async def close_connections(self) -> None:
        """Cut every connection that is open."""
        self._cut.set()
        self._cut = asyncio.Event()
        await asyncio.gather(*self._connections)

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        is_at_risk = asyncio.Event()
        pumps: list[asyncio.Task[object]] = [
            asyncio.create_task(self._requests(reader, server_writer, is_at_risk)),
            asyncio.create_task(self._replies(server_reader, writer, is_at_risk)),
            asyncio.create_task(self._cut.wait()),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await _close(server_writer)

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_at_risk: asyncio.Event
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self._is_marked(chunk):
                is_at_risk.set()
                if self._happens(self._cut_request):
                    self.cut_requests += 1
                    return
            writer.write(chunk)
            await writer.drain()

    async def _replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_at_risk: asyncio.Event
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if is_at_risk.is_set() or self._is_marked(chunk):
                is_at_risk.clear()
                if self._happens(self._drop_reply):
                    self.dropped_replies += 1
                    return
                if self._happens(self._delay_reply):
                    self.delayed_replies += 1
                    await asyncio.sleep(self._random.random() * 0.01)
                await self._passes.wait()
            writer.write(chunk)
            await writer.drain()

    def _is_marked(self, chunk: bytes) -> bool:
        return any(marker in chunk for marker in self._markers)

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability


@asynccontextmanager
async def running_proxy(proxy: FaultProxy) -> AsyncIterator[FaultProxy]:
    """Listen on a free port for the length of the block."""
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close_connections()
        await server.wait_closed()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
