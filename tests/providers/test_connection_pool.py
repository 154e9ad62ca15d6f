"""The client of an upstream against real servers, which answer well, badly, late or never."""

from __future__ import annotations

import asyncio
import errno
import math
import select
import socket
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import h11
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from executors.endpoint import Answer, Endpoint, Seen, free_port, reply, running_endpoint
from headgate.errors import InvalidFieldError, InvalidSettingError
from headgate.providers import connection_pool
from headgate.providers.connection_pool import (
    MAX_HEADERS,
    MAX_INTERIM_ANSWERS,
    MAX_UNREAD_BYTES,
    AnswerBrokenError,
    AnswerTimeoutError,
    AnswerTooLargeError,
    NotSentError,
    UpstreamError,
    UpstreamPool,
    UpstreamResponse,
)
from service.tls_proxy import certificate_in

Run = Callable[[Coroutine[Any, Any, None]], None]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
MOST = 1 << 20
PATIENCE_SECONDS = 20.0
CANARY = "sk-canary-4711"
HELLO = reply(200, b"hello")


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[Run], None]:
    def in_loop(run: Run) -> None:
        run(test())

    in_loop.__name__, in_loop.__doc__ = test.__name__, test.__doc__
    return LOOPS(in_loop)


@asynccontextmanager
async def pool_of(
    answer: Answer, *, path: str = "", **given: Any
) -> AsyncIterator[tuple[UpstreamPool, Endpoint]]:
    async with asyncio.timeout(PATIENCE_SECONDS), running_endpoint(answer) as endpoint:
        pool = UpstreamPool(endpoint.url + path, **given)
        try:
            yield pool, endpoint
        finally:
            await pool.close()
            assert pool.in_use == 0


async def asked(pool: UpstreamPool, body: bytes = b"{}") -> tuple[int, bytes]:
    with closing(await pool.send("POST", "/", (), body)) as response:
        return response.status, await response.read_all(MOST)


def in_turn(*answers: Answer) -> Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]:
    """Give one answer after the other, and nothing but a closed connection after the last."""
    left = list(answers)

    async def give(seen: Seen, writer: asyncio.StreamWriter) -> None:
        answer = left.pop(0) if left else b""
        if not isinstance(answer, bytes):
            await answer(seen, writer)
        elif answer:
            writer.write(answer)
        else:
            writer.close()

    return give


def then_closed(answer: bytes) -> Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]:
    async def give(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    return give


async def silent(_seen: Seen, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


def with_rest(rest: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + rest


# Requests.


@on_both_loops
async def test_a_request_goes_to_the_path_under_the_base_url_with_headers_of_this_connection() -> (
    None
):
    headers = [
        (b"Host", b"elsewhere"),
        (b"content-length", b"99"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Connection", b"close"),
        (b"X-Mine", b"yes"),
    ]
    async with pool_of(HELLO, path="/v1/") as (pool, endpoint):
        with closing(await pool.send("POST", "/messages?beta=true", headers, b"abc")) as response:
            assert response.status == 200
        assert endpoint.seen == [
            Seen(
                "POST",
                "/v1/messages?beta=true",
                {"host": f"127.0.0.1:{endpoint.port}", "x-mine": "yes", "content-length": "3"},
                b"abc",
            )
        ]


@on_both_loops
async def test_only_a_method_that_usually_has_a_body_says_that_it_has_none() -> None:
    async with pool_of(HELLO) as (pool, endpoint):
        for method in ("GET", "POST"):
            (await pool.send(method, "/", (), b"")).close()
        assert [seen.headers.get("content-length") for seen in endpoint.seen] == [None, "0"]


@on_both_loops
async def test_a_large_request_arrives_whole() -> None:
    body = bytes(range(256)) * 40_000
    async with pool_of(HELLO) as (pool, endpoint):
        assert await asked(pool, body) == (200, b"hello")
        assert endpoint.seen[0].body == body
        assert pool.idle == 1


@pytest.mark.parametrize(
    ("path", "headers", "field"),
    [
        ("no-slash", (), "path"),
        ("/a b", (), "path"),
        ("/a\r\nx: y", (), "path"),
        ("/a#b", (), "path"),
        ("/\N{SNOWMAN}", (), "path"),
        ("/", ((b"x", CANARY.encode() + b"\r\ny: z"),), "headers"),
        ("/", ((b"x", b"\r\ny: z"),), "headers"),
        ("/", ((b"x", b"\ny: z"),), "headers"),
        ("/", ((b"x", b"a\0"),), "headers"),
        ("/", ((b"x: y", b"z"),), "headers"),
        ("/", ((b"", b"z"),), "headers"),
        ("/", ((b"x" * 100 + b"\n", b"z"),), "headers"),
    ],
)
async def test_what_would_be_another_request_is_not_sent(
    path: str, headers: tuple[tuple[bytes, bytes], ...], field: str
) -> None:
    async with pool_of(HELLO) as (pool, endpoint):
        with pytest.raises(InvalidFieldError) as caught:
            await pool.send("POST", path, headers, b"")
        assert caught.value.field == field
        assert CANARY not in str(caught.value)
        assert endpoint.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "api.example.com",
        "ftp://example.com",
        "https://",
        "https://user:pass@example.com",
        "https://example.com/?key=1",
        "https://example.com:port",
        "https://example.com/a b",
        "https://ex\N{SNOWMAN}mple.com",
    ],
)
def test_a_base_url_is_a_plain_one(url: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        UpstreamPool(url)
    assert caught.value.field == "base_url"


@pytest.mark.parametrize(
    ("url", "address", "host"),
    [
        ("http://Example.com", ("example.com", 80), b"example.com"),
        ("http://example.com:80/v1", ("example.com", 80), b"example.com"),
        ("http://example.com:8080", ("example.com", 8080), b"example.com:8080"),
        ("https://example.com", ("example.com", 443), b"example.com"),
        ("http://[::1]:8080", ("::1", 8080), b"[::1]:8080"),
    ],
)
def test_the_host_header_has_a_port_that_is_not_the_usual_one(
    url: str, address: tuple[str, int], host: bytes
) -> None:
    pool = UpstreamPool(url)
    assert pool.address == address
    assert b"\r\nhost: %b\r\n" % host in pool._head("GET", "/", b"", 0)


# Answers.

CHUNKED = with_rest(
    b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nA: b\r\n\r\n"
)
ANSWERS = {
    "length": (HELLO, 200, b"hello"),
    "empty": (reply(500), 500, b""),
    "chunked": (CHUNKED, 200, b"hello"),
    "until close": (with_rest(b"\r\nhello"), 200, b"hello"),
    "length and close": (reply(200, b"hello", Connection="close"), 200, b"hello"),
    "old": (b"HTTP/1.0 200 OK\r\n\r\nhello", 200, b"hello"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, b""),
    "interim": (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + HELLO, 200, b"hello"),
    "continue": (b"HTTP/1.1 100 Continue\r\n\r\n" * 2 + HELLO, 200, b"hello"),
    "redirect": (reply(302, b"there", Location="/x"), 302, b"there"),
    "upgrade offered": (reply(200, b"hello", Connection="upgrade", Upgrade="h2c"), 200, b"hello"),
    "no reason": (b"HTTP/1.1 429\r\nContent-Length: 2\r\n\r\nno", 429, b"no"),
}


@LOOPS
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_however_it_is_framed(run: Run, name: str) -> None:
    raw, status, body = ANSWERS[name]

    async def read() -> None:
        async with pool_of(then_closed(raw)) as (pool, _):
            assert await asked(pool) == (status, body)

    run(read())


@LOOPS
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_byte_by_byte(run: Run, name: str) -> None:
    raw, status, body = ANSWERS[name]

    async def trickle(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        for place in range(len(raw)):
            writer.write(raw[place : place + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def read() -> None:
        async with pool_of(trickle) as (pool, _):
            assert await asked(pool) == (status, body)

    run(read())


@on_both_loops
async def test_names_of_headers_are_in_lower_case_and_the_first_of_several_is_given() -> None:
    raw = with_rest(b"X-One: 1 \r\nx-ONE:2\r\nEmpty:\r\nContent-Length: 0\r\n\r\n")
    async with pool_of(raw) as (pool, _):
        with closing(await pool.send("GET", "/", (), b"")) as response:
            assert response.headers == (
                (b"x-one", b"1"),
                (b"x-one", b"2"),
                (b"empty", b""),
                (b"content-length", b"0"),
            )
            assert response.header(b"x-one") == b"1"
            assert response.header(b"x-two") == b""


@on_both_loops
async def test_pieces_are_given_as_they_come() -> None:
    go_on = asyncio.Event()

    async def stream(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(with_rest(b"Transfer-Encoding: chunked\r\n\r\n"))
        for piece in (b"one", b"two"):
            await go_on.wait()
            go_on.clear()
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await go_on.wait()
        writer.write(b"0\r\n\r\n")

    async with pool_of(stream) as (pool, _):
        with closing(await pool.send("GET", "/", (), b"")) as response:
            for piece in (b"one", b"two"):
                assert response.read_nowait() is None
                go_on.set()
                assert await response.read() == piece
                assert not response.is_complete
            go_on.set()
            assert await response.read() == b""
            assert response.is_complete
            assert response.read_nowait() == b""
        assert pool.idle == 1


@on_both_loops
async def test_an_answer_to_head_has_no_body_and_its_connection_is_kept() -> None:
    head = with_rest(b"Content-Length: 5\r\n\r\n")
    async with pool_of(in_turn(head, head, HELLO)) as (pool, endpoint):
        for _ in range(2):
            with closing(await pool.send("HEAD", "/", (), b"")) as response:
                assert response.is_complete
                assert await response.read() == b""
        assert await asked(pool) == (200, b"hello")
        assert endpoint.connections == 1


@on_both_loops
async def test_a_body_above_what_the_caller_takes_ends_the_connection() -> None:
    async with pool_of(reply(200, bytes(101))) as (pool, _):
        response = await pool.send("GET", "/", (), b"")
        with pytest.raises(AnswerTooLargeError):
            await response.read_all(100)
        response = await pool.send("GET", "/", (), b"")
        assert await response.read_all(101) == bytes(101)


@on_both_loops
async def test_an_answer_has_one_reader_at_a_time() -> None:
    async with pool_of(in_turn(with_rest(b"\r\n"))) as (pool, _):
        with closing(await pool.send("GET", "/", (), b"")) as response:
            reading = asyncio.ensure_future(response.read())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError):
                await response.read()
            response.close()
            with pytest.raises(AnswerBrokenError):
                await reading


# Connections.


@on_both_loops
async def test_a_connection_is_used_again_once_its_answer_has_arrived() -> None:
    async with pool_of(HELLO) as (pool, endpoint):
        for _ in range(3):
            assert await asked(pool) == (200, b"hello")
            assert (pool.in_use, pool.idle) == (0, 1)
        assert endpoint.connections == 1


@on_both_loops
async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with pool_of(HELLO, max_idle=2) as (pool, endpoint):
        assert await asyncio.gather(*[asked(pool) for _ in range(5)]) == [(200, b"hello")] * 5
        assert endpoint.connections == 5
        assert (pool.in_use, pool.idle) == (0, 2)


@on_both_loops
async def test_the_connection_that_was_used_last_is_used_first() -> None:
    ports = {}
    gates = {b"first": asyncio.Event(), b"second": asyncio.Event(), b"third": asyncio.Event()}

    async def note(seen: Seen, writer: asyncio.StreamWriter) -> None:
        ports[seen.body] = writer.get_extra_info("peername")[1]
        await gates[seen.body].wait()
        writer.write(HELLO)

    async with pool_of(note) as (pool, _):
        first = asyncio.ensure_future(asked(pool, b"first"))
        second = asyncio.ensure_future(asked(pool, b"second"))
        for body, asking in ((b"second", second), (b"first", first)):
            gates[body].set()
            await asking
        gates[b"third"].set()
        await asked(pool, b"third")
        assert ports[b"third"] == ports[b"first"] != ports[b"second"]
        assert pool.idle == 2


@LOOPS
@pytest.mark.parametrize(
    "raw",
    [
        reply(200, b"hello", Connection="close"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        HELLO + b"x",
        HELLO + HELLO,
        HELLO + b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        reply(200, b"hello", Keep_Alive="timeout=1, max=9"),
    ],
)
def test_a_connection_that_cannot_be_trusted_again_is_not_kept(run: Run, raw: bytes) -> None:
    async def ask() -> None:
        async with pool_of(raw) as (pool, endpoint):
            for _ in range(2):
                assert await asked(pool) == (200, b"hello")
                assert pool.idle == 0
            assert endpoint.connections == 2

    run(ask())


@on_both_loops
async def test_an_answer_that_is_closed_before_its_end_ends_its_connection() -> None:
    async with pool_of(with_rest(b"Content-Length: 9\r\n\r\nhello")) as (pool, endpoint):
        response = await pool.send("GET", "/", (), b"")
        assert (pool.in_use, pool.idle) == (1, 0)
        response.close()
        response.close()
        assert (pool.in_use, pool.idle) == (0, 0)
        await endpoint.left.wait()
        with pytest.raises(AnswerBrokenError):
            await response.read()


@on_both_loops
async def test_what_was_not_read_of_a_closed_answer_does_not_look_like_its_end() -> None:
    async with pool_of(HELLO) as (pool, _):
        response = await pool.send("GET", "/", (), b"")
        response.close()
        assert pool.idle == 1
        with pytest.raises(AnswerBrokenError):
            response.read_nowait()


@on_both_loops
async def test_an_idle_connection_ends_after_a_while() -> None:
    async with pool_of(HELLO, idle_seconds=0.02) as (pool, endpoint):
        await asked(pool)
        assert pool.idle == 1
        await endpoint.left.wait()
        assert pool.idle == 0
        assert await asked(pool) == (200, b"hello")


@on_both_loops
async def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    say = asyncio.Event()

    async def answer(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        await say.wait()
        writer.write(HELLO)

    async with pool_of(answer) as (pool, endpoint):
        await asked(pool)
        say.set()
        await endpoint.left.wait()
        assert pool.idle == 0


@on_both_loops
async def test_a_connection_that_was_closed_while_idle_is_not_used() -> None:
    async with pool_of(then_closed(HELLO)) as (pool, endpoint):
        for count in range(1, 4):
            assert await asked(pool) == (200, b"hello")
            assert endpoint.connections == count


@LOOPS
@pytest.mark.parametrize("last_words", [b"", reply(408, Connection="close")])
def test_what_has_come_over_an_idle_connection_is_seen_before_the_loop_reads_it(
    run: Run, last_words: bytes
) -> None:
    async def ask() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), deaf_server() as (port, taken):

            async def answer() -> socket.socket:
                wire = await taken.get()
                assert await asyncio.get_running_loop().sock_recv(wire, 1 << 16)
                wire.sendall(HELLO)
                return wire

            pool = UpstreamPool(f"http://127.0.0.1:{port}", race_seconds=-math.inf)
            answering = asyncio.ensure_future(answer())
            assert await asked(pool) == (200, b"hello")
            with await answering as wire:
                answering = asyncio.ensure_future(answer())
                wire.sendall(last_words)
            (connection,) = pool._idle
            own = connection._transport.get_extra_info("socket")
            select.select([own.fileno()], [], [], PATIENCE_SECONDS)
            assert await asked(pool) == (200, b"hello")
            with await answering:
                await pool.close()

    run(ask())


@on_both_loops
async def test_a_request_that_meets_a_closing_connection_is_sent_again_on_a_new_one() -> None:
    async with pool_of(in_turn(HELLO, b"", HELLO)) as (pool, endpoint):
        await asked(pool)
        assert await asked(pool, b"second") == (200, b"hello")
        assert [seen.body for seen in endpoint.seen] == [b"{}", b"second", b"second"]
        assert endpoint.connections == 2


@on_both_loops
async def test_a_request_is_sent_again_once_at_the_most() -> None:
    async with pool_of(in_turn(HELLO, b"", b"", HELLO)) as (pool, endpoint):
        await asked(pool)
        with pytest.raises(AnswerBrokenError):
            await asked(pool)
        assert len(endpoint.seen) == 3


@LOOPS
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_request_that_an_idle_connection_took_was_sent(run: Run, is_refused: bool) -> None:
    """Whether the next one is refused or cut off: the upstream may have read it before."""

    async def ask() -> None:
        endpoint = Endpoint()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if endpoint.connections:
                writer.transport.abort()
            else:
                await endpoint.serve(reader, writer)

        async def die(_seen: Seen, writer: asyncio.StreamWriter) -> None:
            if is_refused:
                server.close()
            writer.close()

        endpoint.answer = in_turn(HELLO, die)
        async with asyncio.timeout(PATIENCE_SECONDS):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            with closing(server):
                port = server.sockets[0].getsockname()[1]
                pool = UpstreamPool(f"http://127.0.0.1:{port}", race_seconds=PATIENCE_SECONDS)
                await asked(pool)
                with pytest.raises(AnswerBrokenError):
                    await asked(pool, LARGE)
        assert len(endpoint.seen) == 2

    run(ask())


async def test_a_request_is_not_sent_again_when_the_upstream_had_time_to_read_it() -> None:
    answers = in_turn(HELLO, b"", HELLO)
    async with pool_of(answers, race_seconds=-PATIENCE_SECONDS) as (pool, endpoint):
        await asked(pool)
        with pytest.raises(AnswerBrokenError):
            await asked(pool)
        assert len(endpoint.seen) == 2


async def test_how_far_away_an_upstream_is_was_measured_when_nobody_was_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy gateway is slow to connect, and that is no reason to send a request once more."""
    busy_seconds = 0.5
    answers = in_turn(HELLO, HELLO, b"", HELLO)
    async with pool_of(answers, race_seconds=-busy_seconds) as (pool, endpoint):
        await asked(pool)
        pool._idle.pop().abort()
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def slowly(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(busy_seconds)
            return await connect(*arguments, **options)

        monkeypatch.setattr(loop, "create_connection", slowly)
        await asked(pool)
        with pytest.raises(AnswerBrokenError):
            await asked(pool)
        assert len(endpoint.seen) == 3


@on_both_loops
async def test_a_request_is_not_sent_again_after_the_first_byte_of_an_answer() -> None:
    async with pool_of(in_turn(HELLO, then_closed(b"H"), HELLO)) as (pool, endpoint):
        await asked(pool)
        with pytest.raises(AnswerBrokenError):
            await asked(pool)
        assert len(endpoint.seen) == 2


@on_both_loops
async def test_small_packets_are_not_held_back_and_a_silent_peer_is_probed() -> None:
    async with pool_of(in_turn(with_rest(b"\r\n"))) as (pool, _):
        with closing(await pool.send("GET", "/", (), b"")):
            (connection,) = pool._open
            wire = connection._transport.get_extra_info("socket")
            with socket.socket(fileno=socket.dup(wire.fileno())) as copy:
                assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


# Closing the pool.


@on_both_loops
async def test_closing_ends_idle_connections_now_and_others_after_their_answer() -> None:
    go_on = asyncio.Event()

    async def wait(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.body == b"slow":
            writer.write(with_rest(b"Content-Length: 5\r\n\r\n"))
            await go_on.wait()
            writer.write(b"hello")
        else:
            writer.write(HELLO)

    async with pool_of(wait) as (pool, _):
        response = await pool.send("POST", "/", (), b"slow")
        await asked(pool)
        assert (pool.in_use, pool.idle) == (1, 1)
        await pool.close()
        assert (pool.in_use, pool.idle) == (1, 0)
        go_on.set()
        assert await response.read_all(MOST) == b"hello"
        assert (pool.in_use, pool.idle) == (0, 0)
        with pytest.raises(NotSentError):
            await asked(pool)


@on_both_loops
async def test_a_retired_pool_keeps_no_connection_and_sends_what_is_under_way() -> None:
    async with pool_of(HELLO) as (pool, endpoint):
        await asked(pool)
        assert pool.idle == 1
        pool.retire()
        assert (pool.in_use, pool.idle) == (0, 0)
        assert await asked(pool) == (200, b"hello")
        assert (pool.in_use, pool.idle) == (0, 0)
        assert endpoint.connections == 2


# Failures.


@on_both_loops
async def test_an_upstream_that_nobody_runs_was_sent_nothing() -> None:
    port = free_port()
    with pytest.raises(NotSentError) as caught:
        await asked(UpstreamPool(f"http://127.0.0.1:{port}"))
    assert str(caught.value) == f"upstream 127.0.0.1:{port}: it refuses connections"


@on_both_loops
async def test_a_connection_that_is_not_made_in_time_was_sent_nothing() -> None:
    # Nobody answers the hello of TLS.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        pool = UpstreamPool(f"https://127.0.0.1:{port}", connect_seconds=0.05)
        with pytest.raises(NotSentError):
            await asked(pool)
        assert (pool.in_use, pool.idle) == (0, 0)


@on_both_loops
async def test_an_answer_that_does_not_come_in_time_was_sent() -> None:
    async with pool_of(silent, response_seconds=0.05) as (pool, _):
        with pytest.raises(AnswerTimeoutError):
            await asked(pool)
        assert (pool.in_use, pool.idle) == (0, 0)


@on_both_loops
async def test_a_body_that_stops_coming_times_out() -> None:
    async def stop(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(with_rest(b"Content-Length: 9\r\n\r\nhello"))
        await asyncio.Event().wait()

    async with pool_of(stop, read_seconds=0.05) as (pool, _):
        response = await pool.send("GET", "/", (), b"")
        assert await response.read() == b"hello"
        with pytest.raises(AnswerTimeoutError):
            await response.read()
        assert (pool.in_use, pool.idle) == (0, 0)


@on_both_loops
async def test_the_time_for_an_answer_starts_anew_with_each_request() -> None:
    async with pool_of(in_turn(HELLO, HELLO, silent), response_seconds=0.1) as (pool, _):
        loop = asyncio.get_running_loop()
        await asked(pool)
        await asked(pool)
        started_at = loop.time()
        with pytest.raises(AnswerTimeoutError):
            await asked(pool)
        assert loop.time() - started_at >= 0.09


@asynccontextmanager
async def deaf_server() -> AsyncIterator[tuple[int, asyncio.Queue[socket.socket]]]:
    """Take connections and read nothing."""
    loop = asyncio.get_running_loop()
    taken: asyncio.Queue[socket.socket] = asyncio.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        async def take() -> None:
            while True:
                wire, _ = await loop.sock_accept(server)
                taken.put_nowait(wire)

        taking = asyncio.ensure_future(take())
        yield server.getsockname()[1], taken
        taking.cancel()
        await asyncio.wait([taking])
        while not taken.empty():
            taken.get_nowait().close()


LARGE = bytes(64 << 20)


@on_both_loops
async def test_a_request_that_is_not_taken_in_time_was_not_sent() -> None:
    async with deaf_server() as (port, _):
        pool = UpstreamPool(f"http://127.0.0.1:{port}", response_seconds=0.1)
        with pytest.raises(NotSentError):
            await asked(pool, LARGE)


@on_both_loops
async def test_a_request_that_was_cut_off_while_it_was_sent_was_not_sent() -> None:
    async with deaf_server() as (port, taken):
        asking = asyncio.ensure_future(asked(UpstreamPool(f"http://127.0.0.1:{port}"), LARGE))
        (await taken.get()).close()
        with pytest.raises(NotSentError):
            await asking


@LOOPS
@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 20",
        with_rest(b"Content-Le"),
        with_rest(b"Content-Length: 9\r\n\r\nhello"),
        with_rest(b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel"),
        with_rest(b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"),
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_an_answer_that_is_cut_off_is_broken(run: Run, raw: bytes) -> None:
    async def ask() -> None:
        async with pool_of(then_closed(raw)) as (pool, _):
            with pytest.raises(AnswerBrokenError):
                await asked(pool)

    run(ask())


MALFORMED = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a later version": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "no status": b"HTTP/1.1 020 OK\r\nContent-Length: 0\r\n\r\n",
    "a name with a space": with_rest(b"a b: c\r\n\r\n"),
    "a zero byte": with_rest(b"a: b\0c\r\n\r\n"),
    "bad length": with_rest(b"Content-Length: five\r\n\r\nhello"),
    "two lengths": with_rest(b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
    "two framings": with_rest(b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"),
    "a coding": with_rest(b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "bad chunk": with_rest(b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n"),
    "upgrade": b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nabc",
    "large header": with_rest(b"a: " + b"b" * 70_000 + b"\r\n\r\n"),
    "large head": with_rest(b"a: %b\r\n" % (b"b" * 900) * 80 + b"\r\n"),
    "large reason": b"HTTP/1.1 200 " + b"O" * 70_000,
    "many headers": with_rest(b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n"),
    "many interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_INTERIM_ANSWERS + 1) + HELLO,
    "large trailer": CHUNKED[:-4] + b"c" * 70_000 + b"\r\n\r\n",
}


@LOOPS
@pytest.mark.parametrize("name", MALFORMED)
def test_an_answer_that_is_malformed_or_has_no_bounds_is_broken(run: Run, name: str) -> None:
    raw = MALFORMED[name]

    async def answer(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        # A trailer comes after the body was read.
        body_end = len(CHUNKED) - 4
        writer.write(raw[:body_end])
        await writer.drain()
        writer.write(raw[body_end:])

    async def ask() -> None:
        async with pool_of(answer) as (pool, _):
            with pytest.raises(AnswerBrokenError):
                await asked(pool)
            assert (pool.in_use, pool.idle) == (0, 0)

    run(ask())


@LOOPS
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"HTTP/1.1 200 OK\r\na: ", b"b" * 100),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"\r\n"),
        (CHUNKED[:-2], b"a: b\r\n"),
        (CHUNKED[:-2] + b"a: ", b"b" * 100),
        (with_rest(b"Transfer-Encoding: chunked\r\n\r\n3;"), b"x" * 100),
    ],
)
def test_what_has_no_end_beside_the_body_is_cut_off(run: Run, start: bytes, more: bytes) -> None:
    async def endless(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(more * 20)
            await writer.drain()

    async def ask() -> None:
        async with pool_of(endless) as (pool, _):
            with pytest.raises(AnswerBrokenError):
                await asked(pool)

    run(ask())


@on_both_loops
async def test_a_request_that_is_cancelled_ends_its_connection() -> None:
    arrived = asyncio.Event()

    async def note(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await writer.wait_closed()

    async with pool_of(note) as (pool, _):
        asking = asyncio.ensure_future(asked(pool))
        await arrived.wait()
        assert pool.in_use == 1
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert (pool.in_use, pool.idle) == (0, 0)


@on_both_loops
async def test_a_request_that_is_cancelled_when_its_connection_was_just_made_ends_it() -> None:
    async with pool_of(HELLO) as (pool, endpoint):
        asking = asyncio.ensure_future(asked(pool))
        while not pool.in_use:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert (pool.in_use, pool.idle) == (0, 0)
        await endpoint.left.wait()
        assert endpoint.seen == []


@on_both_loops
async def test_a_read_that_is_cancelled_loses_nothing() -> None:
    go_on = asyncio.Event()

    async def stream(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(with_rest(b"Content-Length: 5\r\n\r\n"))
        await go_on.wait()
        writer.write(b"hello")

    async with pool_of(stream) as (pool, _):
        with closing(await pool.send("GET", "/", (), b"")) as response:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await response.read()
            go_on.set()
            assert await response.read_all(MOST) == b"hello"
        assert pool.idle == 1


@LOOPS
@pytest.mark.parametrize(
    ("piece", "share"),
    [(b"%x\r\n%b\r\n" % (65_536, bytes(65_536)), 2), (b"1\r\nx\r\n" * 9_000, 0.5)],
)
def test_a_stream_that_nobody_reads_is_not_read_from_the_network(
    run: Run, piece: bytes, share: float
) -> None:
    async def ask() -> None:
        is_stuck = asyncio.Event()

        async def endless(_seen: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(with_rest(b"Transfer-Encoding: chunked\r\n\r\n"))
            while True:
                writer.write(piece)
                try:
                    async with asyncio.timeout(0.2):
                        await writer.drain()
                except TimeoutError:
                    is_stuck.set()
                    await writer.drain()

        async with pool_of(endless) as (pool, _):
            with closing(await pool.send("GET", "/", (), b"")) as response:
                await is_stuck.wait()
                unread = response.read_nowait()
                assert unread
                assert len(unread) <= share * MAX_UNREAD_BYTES
                size = 0
                while size < 8 * MAX_UNREAD_BYTES * share:
                    size += len(await response.read())

    run(ask())


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate_in(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.set_alpn_protocols(["h2", "http/1.1"])
    return context


@pytest.fixture
def trusts_certificate(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    connection_pool.trusted_context.cache_clear()
    yield
    connection_pool.trusted_context.cache_clear()


@LOOPS
@pytest.mark.usefixtures("trusts_certificate")
def test_https_speaks_http_1_and_keeps_its_connections(
    run: Run, server_context: ssl.SSLContext
) -> None:
    agreed = []
    large = bytes(3 << 20)

    async def note(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        agreed.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        writer.write(reply(200, large))

    async def ask() -> None:
        async with running_endpoint(note, context=server_context) as endpoint:
            pool = UpstreamPool(f"https://127.0.0.1:{endpoint.port}")
            for body in (b"", large):
                with closing(await pool.send("POST", "/", (), body)) as response:
                    assert await response.read_all(len(large)) == large
                assert pool.idle == 1
            assert endpoint.seen[1].body == large
            assert endpoint.connections == 1
            await pool.close()
        assert agreed == ["http/1.1"] * 2

    run(ask())


@pytest.mark.usefixtures("trusts_certificate")
def test_an_answer_without_a_length_ends_where_tls_says_so(server_context: ssl.SSLContext) -> None:
    """The loop of the standard library does not tell this end from a cut, and uvloop does."""

    async def cut_off(_seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(with_rest(b"\r\nhello"))
        await writer.drain()
        writer.transport.abort()

    async def ask() -> None:
        answer = in_turn(then_closed(with_rest(b"\r\nhello")), cut_off)
        async with running_endpoint(answer, context=server_context) as endpoint:
            pool = UpstreamPool(f"https://127.0.0.1:{endpoint.port}")
            assert await asked(pool) == (200, b"hello")
            with pytest.raises(AnswerBrokenError):
                await asked(pool)

    uvloop.run(ask())


@LOOPS
def test_a_certificate_that_nobody_vouches_for_is_sent_nothing(
    run: Run, server_context: ssl.SSLContext
) -> None:
    async def ask() -> None:
        async with running_endpoint(HELLO, context=server_context) as endpoint:
            with pytest.raises(NotSentError, match="certificate"):
                await asked(UpstreamPool(f"https://127.0.0.1:{endpoint.port}"))
            assert endpoint.seen == []

    run(ask())


@LOOPS
@pytest.mark.usefixtures("trusts_certificate")
def test_an_error_does_not_say_which_name_a_certificate_lacks(
    run: Run, server_context: ssl.SSLContext
) -> None:
    async def ask() -> None:
        async with running_endpoint(HELLO, context=server_context) as endpoint:
            with pytest.raises(NotSentError) as caught:
                await asked(UpstreamPool(f"https://localhost:{endpoint.port}"))
            assert caught.value.problem == "its certificate is for another name"
            assert endpoint.seen == []

    run(ask())


@on_both_loops
async def test_a_server_without_tls_is_sent_nothing() -> None:
    async with deaf_server() as (port, taken):
        asking = asyncio.ensure_future(asked(UpstreamPool(f"https://127.0.0.1:{port}")))
        with await taken.get() as wire:
            wire.sendall(reply(400))
            with pytest.raises(NotSentError):
                await asking


# Secrets.


@LOOPS
@pytest.mark.parametrize("name", MALFORMED)
def test_no_error_quotes_a_header(run: Run, name: str) -> None:
    raw = MALFORMED[name].replace(b"\r\n", b"\r\nx-key: %b\r\n" % CANARY.encode(), 1)

    async def ask() -> None:
        async with pool_of(then_closed(raw)) as (pool, endpoint):
            key = ((b"authorization", CANARY.encode()),)
            with pytest.raises(UpstreamError) as caught:
                await (await pool.send("POST", "/", key, b"")).read_all(MOST)
            error = caught.value
            assert (error.host, error.port) == ("127.0.0.1", endpoint.port)
            lines = traceback.format_exception(error)
            assert CANARY not in "".join(lines) + repr(error) + repr(vars(error))

    run(ask())


# However an answer is split.


class Wire(asyncio.Transport):
    """Where bytes would go; those that come are given to the protocol by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: object) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_aborted


def silent_listener() -> tuple[socket.socket, list[socket.socket]]:
    """Listen where nobody else can connect: all places of those who wait are taken."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(listener.getsockname())
    return listener, waiting


def addresses_of(*ports: int) -> Callable[..., Awaitable[list[Any]]]:
    async def looked_up(*_: object, **__: object) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, ("127.0.0.1", port)) for port in ports]

    return looked_up


async def test_an_address_that_keeps_silent_does_not_keep_the_next_one_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener, waiting = silent_listener()
    loop = asyncio.get_running_loop()
    async with pool_of(HELLO, connect_seconds=PATIENCE_SECONDS / 2) as (pool, endpoint):
        ports = listener.getsockname()[1], endpoint.port
        monkeypatch.setattr(loop, "getaddrinfo", addresses_of(*ports))
        assert await asked(pool) == (200, b"hello")
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [one for one in others if "_connected_socket" in repr(one)]
    for one in (listener, *waiting):
        one.close()


async def test_an_address_that_refuses_is_followed_by_the_next_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(connection_pool, "NEXT_ADDRESS_SECONDS", PATIENCE_SECONDS)
    async with pool_of(HELLO) as (pool, endpoint):
        monkeypatch.setattr(loop, "getaddrinfo", addresses_of(free_port(), endpoint.port))
        assert await asked(pool) == (200, b"hello")
        monkeypatch.setattr(loop, "getaddrinfo", addresses_of(free_port(), free_port()))
        pool._idle.pop().abort()
        with pytest.raises(NotSentError, match="refuses connections"):
            await asked(pool)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_network_that_is_not_there_is_no_reason_where_another_address_has_one(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    async def looked_up(*_: object, **__: object) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        # No connection leads to a group.
        found = [(*kind, ("224.0.0.1", 80)), (*kind, ("127.0.0.1", free_port()))]
        return found if is_first else found[::-1]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", looked_up)
    with pytest.raises(NotSentError, match="refuses connections"):
        await asked(UpstreamPool("http://two.test"))


async def test_a_time_limit_of_the_system_is_not_taken_for_that_of_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def in_vain(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connect call failed ('127.0.0.1', 80)")

    monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", in_vain)
    with pytest.raises(NotSentError) as caught:
        await asked(UpstreamPool("http://127.0.0.1"))
    assert caught.value.problem == "no connection (Connection timed out)"


async def connected() -> tuple[UpstreamPool, connection_pool._Connection, Wire]:
    pool = UpstreamPool("http://127.0.0.1")
    connection = connection_pool._Connection(pool, asyncio.get_running_loop())
    wire = Wire()
    connection.connection_made(wire)
    return pool, connection, wire


async def test_a_connection_that_is_closed_as_soon_as_it_is_made_was_sent_nothing() -> None:
    pool, connection, _ = await connected()
    connection.eof_received()
    with pytest.raises(NotSentError):
        await connection.request(b"", b"", is_head_request=False)
    assert (pool.in_use, pool.idle) == (0, 0)


@pytest.mark.parametrize(("raw", "idle"), [(HELLO, 1), (HELLO[:-1], 0)])
async def test_a_request_that_is_cancelled_while_its_answer_comes_lets_go_of_it(
    raw: bytes, idle: int
) -> None:
    pool, connection, wire = await connected()
    asking = asyncio.ensure_future(connection.request(b"", b"", is_head_request=False))
    await asyncio.sleep(0)
    connection.data_received(raw)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert (pool.in_use, pool.idle, wire.is_aborted) == (0, idle, not idle)
    await pool.close()


Outcome = tuple[int, tuple[tuple[bytes, bytes], ...], bytes] | type[UpstreamError]


def read_in_pieces(pieces: list[bytes]) -> Outcome:
    """Give the pieces to a connection one by one, then the end, and return what is read."""

    async def read() -> Outcome:
        _, connection, wire = await connected()
        asking = asyncio.ensure_future(connection.request(b"", b"", is_head_request=False))
        await asyncio.sleep(0)
        for piece in pieces:
            if not wire.is_aborted:
                connection.data_received(piece)
        if not wire.is_aborted:
            connection.eof_received()
        connection.connection_lost(None)
        try:
            response = await asking
            assert isinstance(response, UpstreamResponse)
            return response.status, response.headers, await response.read_all(MOST)
        except UpstreamError as error:
            return type(error)

    return asyncio.run(read())


def read_by_h11(raw: bytes) -> Outcome:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(raw)
    client.receive_data(b"")
    status, body = 0, b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    while True:
        event = client.next_event()
        if isinstance(event, h11.Response):
            status, headers = event.status_code, tuple(event.headers)
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return status, headers, body


NAMES = st.text("abcXYZ-019", min_size=1, max_size=8).map(lambda text: b"x-" + text.encode())
VALUES = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12).map(str.encode)
INTERIM = st.sampled_from(
    [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 X\r\na: b\r\n\r\n"]
)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    status = draw(st.sampled_from([200, 201, 204, 304, 400, 429, 500, 529]))
    pieces = draw(st.lists(st.binary(min_size=1, max_size=20), max_size=5))
    lines = [b"%b: %b\r\n" % one for one in draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))]
    body = b"".join(pieces)
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if framing == "length":
        lines.insert(draw(st.integers(0, len(lines))), b"Content-Length: %d\r\n" % len(body))
    elif framing == "chunked" and status not in (204, 304):
        lines.insert(draw(st.integers(0, len(lines))), b"Transfer-Encoding: chunked\r\n")
        body = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces)
        body += b"0\r\n" + draw(st.sampled_from([b"", b"trailer: x\r\n"])) + b"\r\n"
    if status in (204, 304):
        body = b""
    head = b"HTTP/1.1 %d Some Reason\r\n%b\r\n" % (status, b"".join(lines))
    return draw(INTERIM) + head + body


def split_at(raw: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    pieces = [raw[start:end] for start, end in pairwise(edges)]
    return [piece for piece in pieces if piece]


PLACES = st.lists(st.integers(0, 10_000), max_size=8)


@given(answers(), PLACES)
def test_an_answer_is_what_h11_reads_however_it_is_split(raw: bytes, places: list[int]) -> None:
    assert read_in_pieces(split_at(raw, places)) == read_by_h11(raw)


@given(answers(), PLACES, st.integers(0, 10_000), st.binary(max_size=3), st.integers(0, 3))
def test_a_damaged_answer_reads_the_same_however_it_is_split(
    raw: bytes, places: list[int], place: int, inserted: bytes, removed: int
) -> None:
    place %= len(raw) + 1
    damaged = raw[:place] + inserted + raw[place + removed :]
    assert read_in_pieces(split_at(damaged, places)) == read_in_pieces([damaged] if damaged else [])
