"""All connections of a server: what they share, and how they end together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from headgate.web.http.connection import Connection
from headgate.web.http.exchange import DateHeader
from headgate.web.http.request_head import Head
from headgate.web.http.requests import request_ids

_LOG = logging.getLogger("headgate.web")


class Connections:
    """What the connections of one server share, and all that there are.

    An application may have a method `meet`: it is shown every head with a body to come, and may
    raise a `Refusal`.
    """

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - an ASGI application
        self.app = app
        self.meet: Callable[[Head], None] | None = getattr(app, "meet", None)
        self.held_bytes = 0
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
