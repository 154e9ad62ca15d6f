"""The server on a real socket: HTTP/1.1 as clients speak it, and clients that do not."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from api.asgi_client import Response
from api.fake_app import fake_app
from headgate.api import shares
from headgate.api.callers import Caller
from headgate.api.http import connection
from headgate.api.http.request import MAX_BODY_BYTES, Head
from headgate.api.http.server import listen, serve
from headgate.errors import InvalidSettingError

BODY = b'{"agentId": "a", "action": "click"}'
SUBMIT = b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
ALIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
HURRY = 0.05
UNKNOWN = "unknown"


class Peer:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        length = int(headers.get("content-length", 0)) if has_body else 0
        return int(first.split()[1]), headers, await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        return await self.reader.read()


Connect = Callable[[], Awaitable[Peer]]
Run = Callable[[Coroutine[Any, Any, None]], None]
Serve = Callable[..., None]


@asynccontextmanager
async def serving(app: Any = None, *, drain_seconds: float = 5.0) -> AsyncIterator[Connect]:
    app = app or fake_app()
    ready: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(
            app,
            host="127.0.0.1",
            port=0,
            on_ready=lambda host, port: ready.set_result((host, port)),
            drain_seconds=drain_seconds,
        )
    )
    host, port = await ready
    peers: list[Peer] = []

    async def connect() -> Peer:
        peers.append(Peer(*await asyncio.open_connection(host, port)))
        return peers[-1]

    try:
        yield connect
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for peer in peers:
            peer.writer.close()
            with suppress(ConnectionError):
                await peer.writer.wait_closed()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run something on each of the two event loops that there are."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


@pytest.fixture
def run(on_loop: Run) -> Serve:
    """Serve an application for as long as a scenario lasts."""

    def serve_for(scenario: Callable[[Connect], Awaitable[None]], app: Any = None) -> None:
        async def main() -> None:
            async with asyncio.timeout(20), serving(app) as connect:
                await scenario(connect)

        on_loop(main())

    return serve_for


@pytest.mark.parametrize("is_slow", [False, True], ids=["soon", "slow"])
def test_a_request_that_comes_early_waits_until_all_is_open_but_not_for_ever(
    on_loop: Run, *, is_slow: bool
) -> None:
    async def main() -> None:
        opened = asyncio.Event()
        bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(
            serve(
                fake_app(),
                host="127.0.0.1",
                port=0,
                on_ready=lambda _, port: bound.set_result(port),
                opened=opened,
                opening_seconds=0.2 if is_slow else 60.0,
            )
        )
        peer = Peer(*await asyncio.open_connection("127.0.0.1", await bound))
        await peer.send(ALIVE)
        answer = asyncio.create_task(peer.answer())
        await asyncio.sleep(0.05)
        assert not answer.done()
        if not is_slow:
            opened.set()
        assert (await answer)[0] == 200
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        peer.writer.close()

    on_loop(asyncio.wait_for(main(), 20))


def test_a_connection_serves_one_request_after_the_other(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        for _ in range(3):
            await peer.send(SUBMIT)
            status, headers, body = await peer.answer()
            assert (status, json.loads(body)["state"]) == (202, "queued")
            assert "date" in headers
            assert "connection" not in headers

    run(scenario)


def test_requests_that_are_sent_at_once_are_answered_in_their_order(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(SUBMIT * 20 + ALIVE)
        positions = [json.loads((await peer.answer())[2])["position"] for _ in range(20)]
        assert positions == list(range(1, 21))
        assert (await peer.answer())[2] == b'{"status":"ok"}'

    run(scenario)


def test_a_request_may_come_byte_by_byte(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        for byte in SUBMIT:
            await peer.send(bytes([byte]))
        assert (await peer.answer())[0] == 202

    run(scenario)


def test_a_chunked_body_is_put_together_and_its_trailer_passed_over(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        head = b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])
        await peer.send(head + chunks + b"Origin: https://evil.test\r\n\r\n" + ALIVE)
        assert (await peer.answer())[0] == 202
        assert (await peer.answer())[0] == 200

    run(scenario)


def test_head_has_the_length_and_no_body(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(b"HEAD /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" + ALIVE)
        status, headers, _ = await peer.answer(has_body=False)
        assert (status, headers["content-length"]) == (200, "15")
        assert (await peer.answer())[2] == b'{"status":"ok"}'

    run(scenario)


def test_a_client_that_asks_first_is_told_to_go_on(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        head, body = SUBMIT.split(b"\r\n\r\n", 1)
        await peer.send(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await peer.send(body)
        assert (await peer.answer())[0] == 202

    run(scenario)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /livez HTTP/1.0\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /livez HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
)
def test_the_connection_ends_where_the_client_wants_no_more(
    run: Serve, request_bytes: bytes
) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(request_bytes)
        assert (await peer.answer())[2] == b'{"status":"ok"}'
        assert await peer.rest() == b""

    run(scenario)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_an_upgrade_is_passed_over_and_the_request_answered(run: Serve, protocol: bytes) -> None:
    wanted = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMA\r\n" % protocol
    )

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        for plain, status in ((ALIVE, 200), (SUBMIT, 202), (ALIVE, 200)):
            head, body = plain.split(b"\r\n\r\n", 1)
            await peer.send(head + b"\r\n" + wanted + b"\r\n")
            await asyncio.sleep(0)
            await peer.send(body)
            assert (await peer.answer())[0] == status

    run(scenario)


def test_a_refusal_before_the_body_has_the_id_of_its_request(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        head = (
            b"POST /tasks HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\nContent-Length: %d\r\n\r\n"
        )
        await peer.send(head % (MAX_BODY_BYTES + 1))
        answered = Response(*await peer.answer())
        assert (answered.problem["code"], answered.headers["x-request-id"]) == (
            "body_too_large",
            "mine",
        )

    run(scenario)


def test_a_tunnel_is_not_made(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(b"CONNECT elsewhere:80 HTTP/1.1\r\nHost: elsewhere\r\n\r\n" + ALIVE)
        status, headers, _ = await peer.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert await peer.rest() == b""

    run(scenario)


def test_a_client_that_stops_sending_still_gets_all_its_answers(run: Serve) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(SUBMIT + SUBMIT)
        peer.writer.write_eof()
        assert (await peer.answer())[0] == 202
        assert (await peer.answer())[0] == 202
        assert await peer.rest() == b""

    run(scenario)


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "bad_request"),
        (b"GET /livez HTTP/1.1\r\nBroken Header\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"x" * 300_000, 431, "head_too_large"),
        (
            b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"x" * 70_000 + b"\r\n\r\n",
            431,
            "head_too_large",
        ),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431, "head_too_large"),
        (b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * 8_192), 414, "uri_too_long"),
        (
            b"POST /tasks HTTP/1.1\r\nHost: [::1]\r\nExpect: 200-ok\r\nContent-Length: 5\r\n\r\n",
            417,
            "expectation_failed",
        ),
        (b"CONNECT elsewhere:80 HTTP/1.1\r\nHost: elsewhere\r\n\r\n", 400, "bad_request"),
        (
            b"POST /tasks HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            400,
            "bad_request",
        ),
        (
            b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % (MAX_BODY_BYTES + 1),
            413,
            "body_too_large",
        ),
        (
            b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"10000\r\n%b\r\n" % (b" " * 0x10000) * 17,
            413,
            "body_too_large",
        ),
    ],
    ids=[
        "tls",
        "header",
        "long head",
        "whole long head",
        "many headers",
        "long address",
        "expectation",
        "tunnel",
        "two lengths",
        "length",
        "chunked",
    ],
)
def test_what_cannot_be_served_is_refused_and_the_connection_closed(
    run: Serve, request_bytes: bytes, status: int, code: str
) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(request_bytes)
        answered, headers, body = await peer.answer()
        api_error = Response(answered, headers, body).problem
        assert (answered, api_error["code"]) == (status, code)
        assert headers["connection"] == "close"
        assert await peer.rest() == b""

    run(scenario)


@pytest.mark.parametrize(
    ("kind", "body", "status", "code"),
    [
        (b'application/json; a=b; Charset="UTF-8"', BODY, 202, None),
        (b"application/json; charset=us-ascii", BODY, 202, None),
        (b"application/json;charset=utf-16", BODY, 415, "unsupported_media_type"),
        (b'application/json; a=b; Charset="latin1"', BODY, 415, "unsupported_media_type"),
        (b"application/json", BODY[:-1] + b', "colour": "\xff"}', 400, "bad_json"),
        (b"application/json", BODY[:-1] + b', "params": {"a": "\xff"}}', 400, "invalid_field"),
    ],
)
def test_a_body_is_utf_8_or_refused(
    run: Serve, kind: bytes, body: bytes, status: int, code: str | None
) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        head = b"POST /tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: %b\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        await peer.send(head % (kind, len(body)) + body)
        answered, _, answer = await peer.answer()
        assert (answered, json.loads(answer).get("code")) == (status, code)

    run(scenario)


@pytest.mark.parametrize("path", [b"/tasks/%ff%00", b"/\xc3\xa9", b"/tasks/a%2Fb", b"*", b"//"])
def test_odd_addresses_are_not_found(run: Serve, path: bytes) -> None:
    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        status, _, body = await peer.answer()
        assert (status, json.loads(body)["code"]) in ((404, "not_found"), (400, "bad_request"))

    run(scenario)


def test_a_head_that_does_not_end_is_refused_in_time(
    run: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REQUEST_SECONDS", HURRY)

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(b"GET /livez HTTP/1.1\r\nHost")
        status, _, body = await peer.answer()
        assert (status, json.loads(body)["code"]) == (408, "request_timeout")
        assert await peer.rest() == b""

    run(scenario)


def test_a_body_that_does_not_end_is_refused_in_time(
    run: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REQUEST_SECONDS", HURRY)

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(SUBMIT[:-5])
        assert (await peer.answer())[0] == 408

    run(scenario)


def test_connections_on_which_nothing_happens_are_closed(
    run: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REQUEST_SECONDS", HURRY)
    monkeypatch.setattr(connection, "IDLE_SECONDS", HURRY)

    async def scenario(connect: Connect) -> None:
        silent = await connect()
        assert await silent.rest() == b""
        used = await connect()
        await used.send(ALIVE)
        await used.answer()
        assert await used.rest() == b""

    run(scenario)


def test_a_request_that_takes_long_is_not_taken_for_an_idle_connection(
    run: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REQUEST_SECONDS", HURRY)
    monkeypatch.setattr(connection, "IDLE_SECONDS", HURRY)
    looked = 0

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal looked
        for _ in range(5):
            looked += 1
            await asyncio.sleep(HURRY)
        await answer_with(send, b"late")

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(ALIVE)
        assert (await peer.answer())[2] == b"late"

    run(scenario, slow)
    assert looked == 5


def test_of_more_connections_than_there_may_be_the_one_idle_longest_gives_way(
    run: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "MAX_CONNECTIONS", 9)

    async def scenario(connect: Connect) -> None:
        peers = []
        for _ in range(9):
            peers.append(await connect())
            await peers[-1].send(ALIVE)
            await peers[-1].answer()
        assert await peers[0].rest() == b""
        for peer in peers[1:]:
            await peer.send(ALIVE)
            assert (await peer.answer())[0] == 200

    run(scenario)


def test_where_all_connections_are_busy_a_further_one_is_for_one_request(
    run: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(shares, "EXTRA_CONNECTIONS", 1)
    started, done = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            started.set()
            await done.wait()
        await answer_with(send, b"yes")

    async def scenario(connect: Connect) -> None:
        busy = []

        async def keep_one_busy() -> None:
            busy.append(await connect())
            await busy[-1].send(ALIVE.replace(b"/livez", b"/slow"))
            await started.wait()
            started.clear()

        await keep_one_busy()
        await keep_one_busy()
        extra = await connect()
        await extra.send(ALIVE)
        status, headers, _ = await extra.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await extra.rest() == b""
        await keep_one_busy()
        with suppress(ConnectionError):
            assert await (await connect()).rest() == b""
        done.set()
        assert [(await peer.answer())[0] for peer in busy] == [200, 200, 200]

    run(scenario, slow)


async def answer_with(send: Any, *pieces: bytes) -> None:
    length = [(b"content-length", b"%d" % len(pieces[0]))] if len(pieces) == 1 else []
    await send({"type": "http.response.start", "status": 200, "headers": length})
    for n, piece in enumerate(pieces, start=1):
        last = n == len(pieces)
        await send({"type": "http.response.body", "body": piece, "more_body": not last})


def test_an_answer_may_go_out_piece_by_piece(run: Serve) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer_with(send, b"one", b"two", b"")

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(ALIVE)
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        pieces = b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        assert await peer.reader.readexactly(len(pieces)) == pieces
        await peer.send(ALIVE)
        assert (await peer.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(scenario, app)


def test_the_application_learns_that_a_client_went_away(run: Serve) -> None:
    gone: list[str] = []
    noted = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        gone.append((await receive())["type"])
        gone.append((await receive())["type"])
        noted.set()

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(ALIVE)
        peer.writer.transport.abort()
        await noted.wait()

    run(scenario, app)
    assert gone == ["http.request", "http.disconnect"]


def test_almost_all_of_a_large_answer_counts_until_its_client_takes_it(run: Serve) -> None:
    """What the system has taken of it does not count, and the loop may hold it all the same."""
    size = 4 << 20

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await answer_with(send, b"x" * size)

    class App:
        shares = shares.Shares()
        __call__ = staticmethod(answer)

    async def scenario(connect: Connect) -> None:
        address = (await connect()).writer.get_extra_info("peername")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(address)
            client.sendall(ALIVE)
            for _ in range(1_000):
                if App.shares.bytes.taken:
                    break
                await asyncio.sleep(0.01)
            assert App.shares.bytes.taken > 0.9 * size

    run(scenario, App())


def test_the_first_step_of_a_request_counts_for_whoever_sent_it(run: Serve) -> None:
    """The connections between nodes carry the requests of many callers."""
    counted: list[str] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        counted.append(scope["headgate.seat"].holder.key)
        await answer_with(send, b"ok")

    class App:
        shares = shares.Shares()
        __call__ = staticmethod(answer)

        @staticmethod
        def check_head(head: Head) -> Caller | None:
            name = head.authorization.decode().removeprefix("Bearer ")
            return None if name == UNKNOWN else Caller(name=name, token_id=name)

    def named(request: bytes, name: str) -> bytes:
        line = b"\r\nAuthorization: Bearer %b\r\n\r\n" % name.encode()
        return request.replace(b"\r\n\r\n", line)

    # More than the heads of which one is remembered, and one of those again.
    many = [f"t{number}" for number in range(connection.MAX_UNLIKE_HEADS + 2)]
    in_turn = ["greedy", "modest", "greedy", "greedy", *many, "t7", "t7", "greedy", UNKNOWN]
    at_once = ["greedy", "modest", "modest", UNKNOWN, "t1"]

    async def scenario(connect: Connect) -> None:
        for request in (SUBMIT, ALIVE):
            peer = await connect()
            for name in in_turn:
                await peer.send(named(request, name))
                assert (await peer.answer())[0] == 200
            await peer.send(b"".join(named(request, name) for name in at_once))
            for _ in at_once:
                assert (await peer.answer())[0] == 200

    run(scenario, App())
    address = shares.address_key("127.0.0.1")
    expected = [address if name == UNKNOWN else name for name in in_turn + at_once]
    assert counted == 2 * expected


def test_a_body_counts_for_nobody_who_used_its_connection_before(run: Serve) -> None:
    """A proxy or another node sends requests of many; one is not known before it is complete."""

    async def answer(_: Any, __: Any, send: Any) -> None:
        await answer_with(send, b"ok")

    class App:
        shares = shares.Shares()
        __call__ = staticmethod(answer)

        @staticmethod
        def check_head(head: Head) -> Caller | None:
            full = Caller(name="full", token_id="full", permissions=frozenset(("submit",)))
            return full if head.authorization else None

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(SUBMIT.replace(b"\r\n\r\n", b"\r\nAuthorization: full\r\n\r\n"))
        assert (await peer.answer())[0] == 200
        pool = App.shares.bytes
        pool.take("full", shares.SHARE * pool.most // (shares.SHARE + 1))
        await peer.send(SUBMIT)
        assert (await peer.answer())[0] == 200

    run(scenario, App())


@pytest.mark.parametrize("data", [ALIVE, ALIVE[:20], SUBMIT, SUBMIT[:-5]])
def test_a_closed_connection_is_gone_without_a_search_for_garbage(run: Serve, data: bytes) -> None:
    """Such a search takes long, so it is seldom."""

    def count() -> int:
        return sum(isinstance(one, connection.Connection) for one in gc.get_objects())

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(data)
        before = count()
        assert before
        peer.writer.transport.abort()
        for _ in range(1_000):
            if count() < before:
                return
            await asyncio.sleep(0.01)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        run(scenario)
    finally:
        gc.enable()


def test_an_answer_that_nobody_reads_stops_further_requests(run: Serve) -> None:
    answered = 0
    large = b"x" * 2_000_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal answered
        answered += 1
        await answer_with(send, large)

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(ALIVE * 50)
        for _ in range(200):
            await asyncio.sleep(0)
        assert answered < 20
        for _ in range(50):
            assert len((await peer.answer())[2]) == len(large)

    run(scenario, app)
    assert answered == 50


def test_an_application_that_fails_costs_only_its_own_connection(
    run: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/fail":
            raise ZeroDivisionError
        await answer_with(send, b"ok")

    async def scenario(connect: Connect) -> None:
        failing = await connect()
        await failing.send(b"GET /fail HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await failing.rest() == b""
        other = await connect()
        await other.send(ALIVE)
        assert (await other.answer())[2] == b"ok"

    run(scenario, app)
    assert "ZeroDivisionError" in caplog.text


def test_a_stop_finishes_what_is_under_way_and_closes_the_rest(on_loop: Run) -> None:
    started, may_end = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        started.set()
        await may_end.wait()
        await answer_with(send, b"done")

    async def main() -> None:
        async with asyncio.timeout(20):
            async with serving(app) as connect:
                busy, idle = await connect(), await connect()
                await busy.send(ALIVE)
                await started.wait()
                asyncio.get_running_loop().call_later(HURRY, may_end.set)
            assert (await busy.answer())[2] == b"done"
            assert await idle.rest() == b""

    on_loop(main())


def test_a_stop_does_not_wait_for_ever(on_loop: Run) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        async with asyncio.timeout(20):
            async with serving(app, drain_seconds=HURRY) as connect:
                peer = await connect()
                await peer.send(ALIVE)

    on_loop(main())


def test_the_server_leaves_signals_alone(run: Serve) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    seen: list[object] = []

    async def scenario(connect: Connect) -> None:
        peer = await connect()
        await peer.send(ALIVE)
        await peer.answer()
        seen.append(signal.getsignal(signal.SIGTERM))

    run(scenario)
    assert seen == before[1:]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidSettingError, match=f"127.0.0.1 port {port} is in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0), ("127.0.0.1", 70_000)]
)
def test_an_address_that_cannot_be_used_is_one_clear_line(host: str, port: int) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        listen(host, port)
    assert "\n" not in str(caught.value)


def test_an_address_of_the_new_protocol_is_served_too() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listen("::1", 0).close()
    except InvalidSettingError:
        pytest.skip("this machine has no IPv6 address")
