"""A client of server-sent events on a plain connection, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


class Sent(NamedTuple):
    """One block of a stream: an event, or what only moves the place or keeps the line open."""

    id: str
    event: str
    data: Any

    @property
    def task(self) -> str:
        return str(self.data["taskId"]) if self.data else ""


class EventStream:
    """Reads one stream, chunk by chunk."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._text = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.last_id = ""

    async def begin(self, path: str, **headers: str) -> EventStream:
        lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        first, *rest = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers = dict(line.split(": ", 1) for line in rest if line)
        return self

    async def block(self) -> Sent | None:
        """Return the next block; None at the end."""
        while b"\n\n" not in self._text:
            size = int((await self._reader.readuntil(b"\r\n")).strip(), 16)
            chunk = await self._reader.readexactly(size + 2)
            if not size:
                return None
            self._text += chunk[:-2]
        text, self._text = self._text.split(b"\n\n", 1)
        return self._read(text.decode())

    async def event(self) -> Sent | None:
        """Return the next event, without the blocks that are none."""
        while (sent := await self.block()) is not None and not sent.event:
            pass
        return sent

    async def rest(self) -> list[Sent]:
        """Return all events up to the end."""
        events = []
        while (sent := await self.event()) is not None:
            events.append(sent)
        return events

    def _read(self, text: str) -> Sent:
        pairs = [line.partition(":") for line in text.split("\n")]
        fields = {name: value.removeprefix(" ") for name, _, value in pairs if name}
        self.last_id = fields.get("id", self.last_id)
        data = json.loads(fields["data"]) if "data" in fields else None
        return Sent(fields.get("id", ""), fields.get("event", ""), data)


Open = Callable[..., Awaitable[EventStream]]


async def opened(host: str, port: int, path: str, **headers: str) -> EventStream:
    """Open a stream at an address."""
    return await EventStream(*await asyncio.open_connection(host, port)).begin(path, **headers)
