"""What is sent raw is taken or refused as h11 and uvicorn do, or more strictly, with a reason."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import h11
import pytest

from api.memory_transport import MemoryTransport
from api.raw_requests import RAW_CASES, RawCase
from headgate.api.http.connection import Connections

# Its protocols are not a part of what its types describe.
uvicorn: Any = importlib.import_module("uvicorn")
server: Any = importlib.import_module("uvicorn.server")

LEAST_CASES = 150


class Taken(NamedTuple):
    """One request as the application had it, whole."""

    method: str
    body: bytes


class Recorder:
    """An application that notes the requests that came whole, and says yes."""

    def __init__(self) -> None:
        self.taken: list[Taken] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        self.taken.append(Taken(scope["method"], body))
        length = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"ok"})


async def fed(protocol: Any, pieces: list[bytes]) -> bool:
    """Give a connection all that it takes; return whether it has ended it."""
    transport = MemoryTransport()
    protocol.connection_made(transport)
    for piece in pieces:
        rounds = 0
        while transport.is_paused and rounds < 50:
            await asyncio.sleep(0)
            rounds += 1
        if transport.is_closed:
            break
        protocol.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(120):
        await asyncio.sleep(0)
    has_closed = transport.is_closed
    protocol.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    statuses = [part[:3] for part in transport.written.split(b"HTTP/1.1 ")[1:]]
    return has_closed or any(status[:1] in b"45" for status in statuses)


class Read(NamedTuple):
    """What a reader made of a connection: which requests it took, and whether it reads on."""

    taken: list[Taken]
    has_ended: bool


async def by_headgate(pieces: list[bytes]) -> Read:
    app = Recorder()
    return Read(app.taken, await fed(Connections(app).new(), pieces))


async def by_uvicorn(pieces: list[bytes], http: str) -> Read:
    app = Recorder()
    config = uvicorn.Config(
        app, http=http, ws="none", lifespan="off", log_config=None, access_log=False
    )
    config.load()
    protocol = config.http_protocol_class(
        config=config, server_state=server.ServerState(), app_state={}
    )
    return Read(app.taken, await fed(protocol, pieces))


def by_h11(pieces: list[bytes]) -> Read:
    connection, taken = h11.Connection(h11.SERVER), []
    method, body = "", b""
    for piece in pieces:
        try:
            connection.receive_data(piece)
            while True:
                event = connection.next_event()
                if isinstance(event, h11.Request):
                    method, body = event.method.decode(), b""
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    taken.append(Taken(method, body))
                    length = [("content-length", "0")]
                    connection.send(h11.Response(status_code=200, headers=length))
                    if connection.our_state is h11.SWITCHED_PROTOCOL:
                        return Read(taken, has_ended=True)
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is h11.DONE and connection.their_state is h11.DONE:
                        connection.start_next_cycle()
                else:
                    break
        except h11.RemoteProtocolError:
            return Read(taken, has_ended=True)
        if connection.our_state is h11.MUST_CLOSE:
            break
    return Read(taken, has_ended=False)


def whole(sent: bytes) -> list[bytes]:
    """Send everything at once."""
    return [sent]


def byte_by_byte(sent: bytes) -> list[bytes]:
    """Send one byte after the other."""
    return [sent[number : number + 1] for number in range(len(sent))]


def others(pieces: list[bytes]) -> dict[str, Read]:
    """Return what the others make of a case that comes in these pieces."""
    return {
        "h11": by_h11(pieces),
        "uvicorn with h11": asyncio.run(by_uvicorn(pieces, "h11")),
        "uvicorn with httptools": asyncio.run(by_uvicorn(pieces, "httptools")),
    }


@pytest.mark.parametrize("sent", [whole, byte_by_byte], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("case", RAW_CASES, ids=lambda case: case.name)
def test_a_raw_request_is_read_as_by_h11_and_uvicorn_or_a_reason_is_listed(
    case: RawCase, sent: Callable[[bytes], list[bytes]]
) -> None:
    pieces = sent(case.sent)
    own = asyncio.run(by_headgate(pieces))
    reads = others(pieces)
    for name, read in reads.items():
        both = min(len(own.taken), len(read.taken))
        is_same = own.taken[:both] == read.taken[:both]
        assert is_same or case.like_one, f"{name} reads other requests in it"
    assert not case.like_one or own.taken in [read.taken for read in reads.values()]
    numbers = [len(read.taken) for read in reads.values()]
    assert len(own.taken) <= max(numbers), "none of them takes it"
    is_stricter, is_like_one = len(own.taken) < min(numbers), len(own.taken) > min(numbers)
    assert not is_stricter or case.stricter
    assert not is_like_one or case.like_one
    # In pieces some of the others refuse a long head, too, and pass over an upgrade.
    if sent is whole:
        assert (is_stricter, is_like_one) == (bool(case.stricter), bool(case.like_one))
    assert own.has_ended or not case.stricter


@pytest.mark.parametrize("case", RAW_CASES, ids=lambda case: case.name)
def test_a_raw_request_is_the_same_byte_by_byte(case: RawCase) -> None:
    at_once = asyncio.run(by_headgate(whole(case.sent)))
    assert asyncio.run(by_headgate(byte_by_byte(case.sent))) == at_once


def test_there_are_enough_cases_and_each_has_a_name() -> None:
    assert len({case.name for case in RAW_CASES}) == len(RAW_CASES) >= LEAST_CASES
