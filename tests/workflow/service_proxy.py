"""A proxy before a service that loses requests and replies of submissions, and connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from budgets.fault_proxy import FaultProxy


class ServiceProxy(FaultProxy):
    """The proxy of the ledgers, before a service on a port."""

    def __init__(self, port: int, *, seed: int = 1, marker: bytes = b"POST /tasks/batch") -> None:
        super().__init__(Path(), markers=(marker,), seed=seed)
        self._upstream_port = port

    @property
    def url(self) -> str:
        """Where a client finds the proxy."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until one side or a fault ends it."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            with suppress(OSError):
                upstream = await asyncio.open_connection("127.0.0.1", self._upstream_port)
                await self._carry(reader, writer, *upstream)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
