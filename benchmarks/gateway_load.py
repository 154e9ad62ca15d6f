"""The load on a gateway, in a process of its own: connections that ask again when answered.

    python -m benchmarks.gateway_load < load.json

It reads one `Load` and prints one `Found`, both as JSON. The parser is in C, and it is told of
nothing but the body and the end of an answer, so that on a machine with few cores the gateway has
most of them.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import statistics
import sys
import time
from typing import cast

import httptools
import msgspec
import uvloop

# Beyond the time of a round, until what was asked last must have been answered.
MOST_SECONDS_AFTER = 60.0
STREAM_END = b"data: [DONE]"
# A server that leaves Nagle's algorithm on waits for the acknowledgement of each piece of a stream,
# which this side would delay by 40 ms: that is no work of a gateway, so it is sent at once.
QUICK_ACK = getattr(socket, "TCP_QUICKACK", None)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, over how many connections, and for how long.

    A stream must have at least so many events; a plain answer has none.
    """

    port: int
    path: str
    headers: dict[str, str]
    body: dict[str, object]
    connections: int
    seconds: float
    warm_up_seconds: float
    events: int = 0

    def request(self) -> bytes:
        """Return the bytes of one request."""
        body = msgspec.json.encode(self.body)
        headers = {
            "Host": f"127.0.0.1:{self.port}",
            **self.headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self.path} HTTP/1.1\r\n{lines}\r\n".encode() + body


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Requests a second, and milliseconds to the end and to the first byte of an answer's body."""

    requests: int = 0
    all_requests: int = 0  # with those of the warm-up
    rate: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    first_byte_p50_ms: float = 0.0
    problem: str = ""


class AskingProtocol(asyncio.Protocol):
    """One connection, which sends the next request when the one before is answered."""

    def __init__(self, load: Load) -> None:
        self._request = load.request()
        self._events = load.events
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends_at = 0.0
        self._sent_at = 0.0
        self._first_byte_at = 0.0
        self._pieces: list[bytes] = []
        self.times: list[float] = []
        self.first_bytes: list[float] = []
        self.ended_at = 0.0

    async def ask_until(self, ends_at: float) -> None:
        """Ask again and again, and return when the answer to the last request has come."""
        self._done = asyncio.get_running_loop().create_future()
        self._ends_at = ends_at
        self.times, self.first_bytes = [], []
        self._send()
        await self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._socket = transport.get_extra_info("socket")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed: {exc}")

    def data_received(self, data: bytes) -> None:
        if self._events and QUICK_ACK is not None and self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what came is not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        if not self._pieces:
            self._first_byte_at = time.perf_counter()
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        problem = self._problem()
        if problem:
            self._fail(problem)
            return
        self.times.append(now - self._sent_at)
        self.first_bytes.append(self._first_byte_at - self._sent_at)
        if now < self._ends_at:
            self._send()
        else:
            self.ended_at = now
            self._done.set_result(None)

    def _problem(self) -> str:
        status = self._parser.get_status_code()
        if status != 200:
            return f"answered with {status}: {b''.join(self._pieces)[:300]!r}"
        if not self._events:
            return ""
        if STREAM_END not in self._pieces[-1] and STREAM_END not in b"".join(self._pieces[-3:]):
            return f"a stream without an end: {self._pieces[-1]!r}"
        # The first of a round is looked at as a whole.
        events = 0 if self.times else b"".join(self._pieces).count(b"data: ")
        if not self.times and events < self._events:
            return f"a stream of only {events} events"
        return ""

    def _send(self) -> None:
        if self._transport is not None:
            self._pieces = []
            self._sent_at = time.perf_counter()
            self._transport.write(self._request)

    def _fail(self, problem: str) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(problem))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()


async def put(load: Load) -> Found:
    """Warm the gateway up, ask for a while, and return what came of it."""
    loop = asyncio.get_running_loop()
    asking: list[AskingProtocol] = []
    try:
        async with asyncio.timeout(load.warm_up_seconds + load.seconds + MOST_SECONDS_AFTER):
            for _ in range(load.connections):
                _, protocol = await loop.create_connection(
                    lambda: AskingProtocol(load), "127.0.0.1", load.port
                )
                asking.append(protocol)
            await _all_until(asking, time.perf_counter() + load.warm_up_seconds)
            warmed_up = sum(len(protocol.times) for protocol in asking)
            began = time.perf_counter()
            await _all_until(asking, began + load.seconds)
    except TimeoutError:
        return Found(problem="no answer in time")
    except OSError as error:
        return Found(problem=str(error))
    finally:
        for protocol in asking:
            protocol.close()
    times = [each for protocol in asking for each in protocol.times]
    first_bytes = [each for protocol in asking for each in protocol.first_bytes]
    seconds = max(protocol.ended_at for protocol in asking) - began
    return Found(
        requests=len(times),
        all_requests=warmed_up + len(times),
        rate=len(times) / seconds,
        p50_ms=statistics.median(times) * 1e3,
        p99_ms=_p99(times) * 1e3,
        first_byte_p50_ms=statistics.median(first_bytes) * 1e3,
    )


async def _all_until(asking: list[AskingProtocol], ends_at: float) -> None:
    await asyncio.gather(*(protocol.ask_until(ends_at) for protocol in asking))


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, len(times) * 99 // 100)]


if __name__ == "__main__":
    gc.disable()
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    print(msgspec.json.encode(uvloop.run(put(given))).decode())
