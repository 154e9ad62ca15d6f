"""Bodies of answers: whole, bounded, and read without holding the loop, whatever comes."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from executors.endpoint import free_port, reply, running_endpoint
from headgate.providers import connection_pool
from headgate.providers.content_coding import ContentCodingError
from headgate.providers.http_client import HttpClient, read_body, read_error_body
from providers.test_connection_pool import certificate, on_both_loops, server_context

__all__ = ["certificate", "server_context"]

MIB = 1 << 20
gzipped = partial(gzip.compress, mtime=0)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def coded(body: bytes, coding: str = "gzip") -> bytes:
    return reply(200, body, Content_Encoding=coding)


def four_times(body: bytes) -> bytes:
    for _ in range(4):
        body = gzipped(body)
    return body


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Serve one answer from a thread of its own, so that only the reader is on the loop."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
        except OSError:
            return  # The reader has left, or the test is over.

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


async def body_at(url: str, max_bytes: int = 64 * MIB) -> bytes | None:
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)
    try:
        response = await client.send("GET", url, {})
        try:
            return await read_body(response, max_bytes)
        finally:
            await response.aclose()
    finally:
        await client.close()


TEXT = b'{"state": "done"}' * 10_000
READ = [
    ("plain", reply(200, TEXT)),
    ("gzip", coded(gzipped(TEXT))),
    ("members", coded(gzipped(TEXT[:5_000]) + gzipped(TEXT[5_000:]))),
    ("zlib", coded(zlib.compress(TEXT), "deflate")),
    ("until it closes", OK + b"\r\n" + TEXT),
    ("chunked", CHUNKED + b"%x\r\n" % len(TEXT) + TEXT + b"\r\n0\r\n\r\n"),
    ("with trailers", CHUNKED + b"%x\r\n" % len(TEXT) + TEXT + b"\r\n0\r\na: b\r\n\r\n"),
    ("after 1xx", b"HTTP/1.1 103 Hint\r\n\r\n" * 20 + reply(200, TEXT)),
    ("many headers", OK + b"a: b\r\n" * 200 + b"Content-Length: 170000\r\n\r\n" + TEXT),
    ("in lines", reply(200, TEXT.replace(b"}", b"\n"))),
]


@pytest.mark.parametrize(("name", "answer"), READ)
async def test_an_honest_answer_is_read_whole(name: str, answer: bytes) -> None:
    with answering(answer) as url:
        body = await body_at(url, max_bytes=len(TEXT))
    assert body is not None, name
    assert body.replace(b"\n", b"}") == TEXT


LONG = [
    ("plain", reply(200, bytes(1_001))),
    ("gzip", coded(gzipped(bytes(1_001)))),
    ("chunked", CHUNKED + b"400\r\n" + bytes(1_024) + b"\r\n0\r\n\r\n"),
]


@pytest.mark.parametrize(("name", "answer"), LONG)
async def test_a_long_answer_is_none(name: str, answer: bytes) -> None:
    with answering(answer) as url:
        assert await body_at(url, max_bytes=1_000) is None, name


# What an answer may do to hold the loop; the error that ends it is part of the table.
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "gzip four times": (
        lambda: coded(four_times(bytes(16 * MIB)), "gzip, gzip, gzip, gzip"),
        "more than one Content-Encoding",
    ),
    "a bomb": (lambda: coded(gzipped(bytes(64 * MIB))), "grows more than"),
    "members": (lambda: coded(gzipped(b"") * 50_000), "members"),
    "tiny chunks": (lambda: CHUNKED + b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n", "tiny pieces"),
    "1xx without end": (lambda: b"HTTP/1.1 103 \r\n\r\n" * 40_000, "too many interim answers"),
    "many headers": (lambda: OK + b"a:\r\n" * 24_000 + b"\r\n", "head of the answer is too large"),
    "many trailers": (
        lambda: CHUNKED + b"2\r\n{}\r\n0\r\n" + b"a:\r\n" * 24_000,
        "too much beside its body",
    ),
    "a long header": (lambda: OK + b"a: " + b"x" * MIB, "head of the answer is too large"),
    "a length that nobody sends": (
        lambda: OK + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        "Content-Length overflow",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_answer_holds_the_loop(name: str) -> None:
    answer, said = HOSTILE[name]
    await body_at_nowhere()
    with (
        answering(answer()) as url,
        turns_of_the_loop() as turns,
        pytest.raises((ContentCodingError, httpx2.RequestError), match=said),
    ):
        await body_at(url)
    assert max(after - before for before, after in pairwise(turns)) < 0.05


async def test_an_honest_answer_does_not_hold_the_loop_either() -> None:
    rows = b"".join(b'{"id": %d, "state": "done"},\n' % i for i in range(100_000))
    await body_at_nowhere()
    with answering(coded(gzipped(rows))) as url, turns_of_the_loop() as turns:
        assert await body_at(url) == rows
    assert max(after - before for before, after in pairwise(turns)) < 0.05


@contextmanager
def turns_of_the_loop() -> Iterator[list[float]]:
    """Note each turn in time of this thread's processor: what others do does not count."""
    loop = asyncio.get_running_loop()
    turns: list[float] = []
    is_over = False

    def turn() -> None:
        turns.append(time.thread_time())
        if not is_over:
            loop.call_soon(turn)

    turn()
    yield turns
    is_over = True


async def body_at_nowhere() -> None:
    """Load what the first request of a process loads, which takes its time."""
    async with running_endpoint() as endpoint:
        await body_at(endpoint.url)


async def test_a_time_limit_strikes_while_an_answer_is_decoded() -> None:
    # 64 MiB that grow a hundredfold are within all bounds, and take longer than this.
    rows = b"".join(b'{"id": %d, "state": "done"},' % (i % 50) for i in range(1_000_000))
    with answering(coded(gzipped(rows, 1))) as url, pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await body_at(url)


async def test_an_answer_that_drips_ends_with_the_time_limit() -> None:
    async def drip(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        while True:
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(0.001)

    async with running_endpoint(drip) as endpoint:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await body_at(endpoint.url)


ERRORS = [
    (reply(500, gzipped(b"no luck"), Content_Encoding="gzip"), "no luck"),
    (reply(500, b"no luck"), "no luck"),
    (reply(500, b"xyz", Content_Encoding="gzip"), "incorrect header check"),
    (reply(500, b"xyz", Content_Encoding="gzip, gzip"), "more than one Content-Encoding"),
    (reply(500, gzipped(b"A" * MIB), Content_Encoding="gzip"), "A" * 4_096),
    (reply(500, gzipped(b"no luck")[:-4], Content_Encoding="gzip"), "no luck"),
]


@pytest.mark.parametrize(("answer", "said"), ERRORS)
async def test_the_beginning_of_an_error_is_read_as_well(answer: bytes, said: str) -> None:
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)
    async with running_endpoint(answer) as endpoint:
        response = await client.send("GET", endpoint.url, {})
        assert said in await read_error_body(response)
        await response.aclose()
    await client.close()


async def test_requests_say_which_codings_are_read() -> None:
    async with running_endpoint() as endpoint:
        await body_at(endpoint.url)
    assert endpoint.seen[0].headers["accept-encoding"] == "gzip, deflate"


@on_both_loops
async def test_all_hosts_together_have_no_more_connections_than_are_allowed() -> None:
    client = HttpClient(max_connections=3, connect_timeout_seconds=5.0)
    wires = set()
    most = 0

    async def slow(_: object, writer: asyncio.StreamWriter) -> None:
        nonlocal most
        wires.add(writer)
        most = max(most, sum(map(is_open, wires)))
        await asyncio.sleep(0)
        writer.write(reply(200, b"{}"))

    async with asyncio.timeout(10), AsyncExitStack() as stack:
        hosts = [await stack.enter_async_context(running_endpoint(slow)) for _ in range(6)]
        await asyncio.gather(*[asked(client, hosts[number % 6].url) for number in range(60)])
        assert most == 3
        assert len(client._transport._pools) <= 4  # type: ignore[union-attr]
        await client.close()
    assert sum(len(endpoint.seen) for endpoint in hosts) == 60


@on_both_loops
async def test_a_connection_that_is_being_made_is_not_forgotten() -> None:
    client = HttpClient(max_connections=2, connect_timeout_seconds=5.0)
    async with asyncio.timeout(10), running_endpoint() as one, running_endpoint() as other:
        for _ in range(2):
            await asyncio.gather(asked(client, one.url), asked(client, other.url))
        await client.close()
        assert (one.connections, other.connections) == (1, 1)


def is_open(writer: asyncio.StreamWriter) -> bool:
    """Say whether the other side has not closed a connection yet."""
    try:
        wire = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
    except OSError:
        return False
    with wire:
        try:
            return wire.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True


async def asked(client: HttpClient, url: str) -> None:
    response = await client.send("GET", url, {})
    assert await read_body(response, 100) == b"{}"
    await response.aclose()


async def test_a_response_that_is_closed_early_lets_the_next_request_go() -> None:
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)
    async with asyncio.timeout(10), running_endpoint(reply(200, bytes(MIB))) as endpoint:
        for _ in range(3):
            response = await client.send("GET", endpoint.url, {})
            await response.aclose()
            await response.aclose()
        await client.close()
    assert endpoint.connections == 3


REFUSED = [
    ("ftp://127.0.0.1/", {}, httpx2.UnsupportedProtocol),
    ("http:///path", {}, (httpx2.UnsupportedProtocol, httpx2.InvalidURL)),
    ("http://127.0.0.1:99999/", {}, httpx2.InvalidURL),
    ("http://127.0.0.1/", {"a": "b\r\nc: d"}, httpx2.LocalProtocolError),
    ("http://127.0.0.1/", {"a b": "c"}, httpx2.LocalProtocolError),
    ("http://127.0.0.1/", {"a": "\u00e9"}, httpx2.LocalProtocolError),
]


@pytest.mark.parametrize(("url", "headers", "error"), REFUSED)
async def test_what_cannot_be_sent_is_refused_and_takes_no_connection(
    url: str, headers: dict[str, str], error: type[Exception]
) -> None:
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)
    async with asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(error):
                await client.send("GET", url, headers)
        async with running_endpoint() as endpoint:
            await (await client.send("GET", endpoint.url, {})).aclose()
    await client.close()


async def test_errors_name_no_host() -> None:
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)
    port = free_port()
    with pytest.raises(httpx2.ConnectError) as caught:
        await client.send("GET", f"http://127.0.0.1:{port}/secret", {})
    assert str(caught.value) == "it refuses connections"
    await client.close()


@on_both_loops
async def test_a_request_of_which_a_part_was_sent_cost_nothing() -> None:
    """Over an idle connection neither, which is lost while the request is sent."""
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply(200, b"{}"))
        await reader.readuntil(b"\r\n\r\n")
        server.close()
        writer.transport.abort()

    async with asyncio.timeout(10):
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        with closing(server):
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
            await asked(client, url)
            with pytest.raises(httpx2.ConnectError):
                await client.send("POST", url, {}, bytes(64 * MIB))
            await client.close()


@pytest.fixture
def trusts_folder(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Trust the certificate beside that of SSL_CERT_FILE, which all tests have set."""
    said = subprocess.check_output(["openssl", "x509", "-hash", "-noout", "-in", certificate])
    (tmp_path / f"{said.decode().strip()}.0").symlink_to(certificate)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    connection_pool.trusted_context.cache_clear()
    yield
    connection_pool.trusted_context.cache_clear()


@pytest.mark.usefixtures("trusts_folder")
async def test_certificates_of_both_variables_are_trusted(server_context: ssl.SSLContext) -> None:
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)
    async with running_endpoint(context=server_context) as endpoint:
        await asked(client, f"https://127.0.0.1:{endpoint.port}")
        await client.close()


@pytest.mark.usefixtures("trusts_folder")
async def test_errors_of_a_certificate_name_no_host_through_a_proxy_either(
    server_context: ssl.SSLContext,
) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await writer.drain()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.start_tls(server_context)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    with closing(server):
        proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = HttpClient(max_connections=1, connect_timeout_seconds=5.0, proxy=proxy)
        with pytest.raises(httpx2.ConnectError) as caught:
            await client.send("GET", "https://secret.test/", {})
        await client.close()
    assert str(caught.value) == "its certificate is for another name"


async def test_a_name_in_other_letters_and_a_user_go_where_they_belong() -> None:
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)
    async with running_endpoint() as endpoint:
        url = f"http://us%20er:secret@LOCALHOST:{endpoint.port}/a%20b/\u00fc?q=x y#fragment"
        await (await client.send("POST", url, {}, b"{}")).aclose()
    await client.close()
    (seen,) = endpoint.seen
    assert (seen.path, seen.body) == ("/a%20b/%C3%BC?q=x%20y", b"{}")
    assert seen.headers["host"] == f"localhost:{endpoint.port}"
    assert "authorization" not in seen.headers


async def test_a_request_is_never_sent_twice() -> None:
    """Whoever closes a connection may have read what came over it, and acted on it."""
    client = HttpClient(max_connections=1, connect_timeout_seconds=5.0)

    async def once(_: object, writer: asyncio.StreamWriter) -> None:
        if len(endpoint.seen) == 1:
            writer.write(reply(200, b"{}"))
        else:
            writer.transport.abort()

    async with running_endpoint(once) as endpoint:
        response = await client.send("GET", endpoint.url, {})
        assert await read_body(response, 100) == b"{}"
        await response.aclose()
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.send("GET", endpoint.url, {})
        assert len(endpoint.seen) == 2
    await client.close()
