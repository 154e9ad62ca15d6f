"""What is refused by its head alone, and what bodies may take in all."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from api.fake_app import fake_app
from api.fake_tokens import FakeTokens
from api.memory_transport import MemoryTransport, fed
from headgate.api.app import ROUTES, App
from headgate.api.auth import Authenticator, AuthRules
from headgate.api.http import connection
from headgate.api.http.connection import Connections

BODY = b'{"agentId": "a", "action": "click"}'
NO_SUCH_TOKEN = b"Authorization: Bearer hg_0123456789ab_" + b"0" * 48 + b"\r\n"
HOST = b"Host: localhost\r\n"
PAGE = b"Origin: https://evil.test\r\n"


def head(
    *lines: bytes, method: bytes = b"POST", path: bytes = b"/tasks", old: bool = False
) -> bytes:
    version = b"1.0" if old else b"1.1"
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, path, version, b"".join(lines))


def length(size: int) -> bytes:
    return b"Content-Length: %d\r\n" % size


def closed() -> App:
    """Give a service that asks for tokens, and has none."""
    app = fake_app()
    rules = AuthRules(is_loopback=True, needs_token=True)
    app.api.auth = Authenticator(FakeTokens(), rules)
    return app


def codes(written: bytes) -> list[str]:
    return re.findall(r'"code":"(\w+)"', written.decode())


@pytest.mark.parametrize("framing", [length(1_000_000), b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (HOST, "unauthorized"),
        (HOST + b"Authorization: Basic YTpi\r\n", "unauthorized"),
        (HOST + b"Authorization: Bearer hg_x\r\n", "unauthorized"),
        (b"Host: elsewhere.test\r\n" + NO_SUCH_TOKEN, "wrong_host"),
        (HOST + PAGE + NO_SUCH_TOKEN, "forbidden_origin"),
    ],
)
def test_whoever_is_not_let_in_is_told_before_the_body(
    lines: bytes, code: str, framing: bytes
) -> None:
    transport = asyncio.run(fed([head(lines, framing)], closed()))
    assert codes(transport.written) == [code]
    assert b"connection: close" in transport.written


def test_a_token_that_was_refused_a_moment_ago_is_refused_before_the_body() -> None:
    app, asking = closed(), head(HOST, NO_SUCH_TOKEN, length(len(BODY)))
    assert codes(asyncio.run(fed([asking, BODY], app)).written) == ["unauthorized"]
    transport = asyncio.run(fed([asking], app))
    assert codes(transport.written) == ["unauthorized"]
    assert b"connection: close" in transport.written


def test_whoever_asks_first_is_not_told_to_go_on_if_it_is_not_let_in() -> None:
    asking = head(HOST, length(5), b"Expect: 100-continue\r\n")
    transport = asyncio.run(fed([asking], closed()))
    assert codes(transport.written) == ["unauthorized"]
    assert b"100 Continue" not in transport.written


@pytest.mark.parametrize(("old", "interim"), [(False, 1), (True, 0)])
def test_only_a_client_of_1_1_is_told_to_go_on(old: bool, interim: int) -> None:
    """An older client would take the interim answer for the answer."""
    asking = head(HOST, length(len(BODY)), b"Expect: 100-continue\r\n", old=old)
    written = asyncio.run(fed([asking, BODY])).written
    assert (written.count(b"100 Continue"), written.count(b"HTTP/1.1 202")) == (interim, 1)


def test_what_needs_no_token_needs_none_with_a_body_either() -> None:
    for route in ROUTES:
        if route.needs is None:
            asked = head(HOST, length(2), path=route.path.encode()) + b"{}"
            asked = asked.replace(b"POST", route.method.encode())
            assert "unauthorized" not in codes(asyncio.run(fed([asked], closed())).written)


@pytest.mark.parametrize(
    ("request_bytes", "problem"),
    [
        (head(HOST, HOST, method=b"GET"), "Host"),
        (head(HOST, b"Host: elsewhere.test\r\n", method=b"GET"), "Host"),
        (head(HOST, HOST, method=b"GET", old=True), "Host"),
        (head(method=b"GET"), "Host"),
        (head(HOST, NO_SUCH_TOKEN, NO_SUCH_TOKEN, method=b"GET"), "Authorization"),
        (head(HOST, method=b"GET", path=b"http://elsewhere.test/tasks"), "Host"),
        (head(HOST, method=b"GET", path=b"http://localhost:81/tasks"), "Host"),
    ],
)
def test_a_request_has_one_host_and_one_authorization(request_bytes: bytes, problem: str) -> None:
    transport = asyncio.run(fed([request_bytes]))
    assert codes(transport.written) == ["bad_request"]
    assert (
        problem.lower() in json.loads(transport.written.partition(b"\r\n\r\n")[2])["error"].lower()
    )


@pytest.mark.parametrize(
    "request_bytes",
    [
        head(method=b"GET", path=b"/livez", old=True),
        head(HOST, method=b"GET", path=b"http://localhost/livez"),
        head(b"Host: LocalHost:7420\r\n", method=b"GET", path=b"http://localhost:7420/livez"),
        head(b"Host: [::1]:7420\r\n", method=b"GET", path=b"http://[::1]:7420/livez"),
    ],
)
def test_an_old_client_and_a_whole_address_are_served(request_bytes: bytes) -> None:
    assert asyncio.run(fed([request_bytes])).written.startswith(b"HTTP/1.1 200")


def connected(shared: Connections) -> tuple[connection.Connection, MemoryTransport]:
    transport, client = MemoryTransport(), shared.new()
    client.connection_made(transport)
    return client, transport


async def test_bodies_have_one_bound_over_all_connections() -> None:
    app = fake_app()
    shared = Connections(app)
    shared.shares.bytes.most = 1_000
    first, _ = connected(shared)
    first.data_received(head(HOST, length(900)) + b" " * 800)
    second, refused = connected(shared)
    second.data_received(head(HOST, length(900)) + b" " * 300)
    assert codes(refused.written) == ["limit_reached"]
    assert shared.shares.bytes.taken == 800
    first.connection_lost(None)
    second.connection_lost(None)
    assert shared.shares.bytes.taken == 0


async def test_heads_that_come_in_pieces_have_the_same_bound() -> None:
    shared = Connections(fake_app())
    shared.shares.bytes.most = 1_000
    padding = b"X-Padding: " + b"x" * 700 + b"\r\n"
    first, served = connected(shared)
    whole = head(HOST, padding, method=b"GET", path=b"/livez")
    first.data_received(whole[:-2])
    assert shared.shares.bytes.taken == len(whole) - 2
    second, refused = connected(shared)
    second.data_received(whole[:300])
    assert codes(refused.written) == ["limit_reached"]
    first.data_received(whole[-2:])
    for _ in range(60):
        await asyncio.sleep(0)
    assert served.written.startswith(b"HTTP/1.1 200")
    second.connection_lost(None)
    assert shared.shares.bytes.taken == 0
    first.connection_lost(None)


async def test_what_was_answered_is_not_held_any_more() -> None:
    app = fake_app()
    shared = Connections(app)
    client, transport = connected(shared)
    client.data_received((head(HOST, length(len(BODY))) + BODY) * 2)
    for _ in range(60):
        await asyncio.sleep(0)
    assert transport.written.count(b"HTTP/1.1 202") == 2
    assert shared.shares.bytes.taken == 0
    client.connection_lost(None)


async def test_what_is_worked_on_when_its_client_goes_is_let_go_of_once() -> None:
    app = fake_app()
    shared = Connections(app)
    client, _ = connected(shared)
    client.data_received(head(HOST, length(len(BODY))) + BODY)
    client.connection_lost(None)
    for _ in range(60):
        await asyncio.sleep(0)
    assert shared.shares.bytes.taken == 0
