"""Hostile clients and upstreams: everything is bounded, and no secret is anywhere."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.billing_upstream import Fault, Plan
from gateway.gateway_service import (
    ANTHROPIC_VERSION,
    CHAT,
    MESSAGES,
    RESPONSES,
    GatewayService,
    asking,
    error_of,
    gateway_service,
    usd,
)
from headgate.api.shares import Pool
from headgate.gateway import routing
from headgate.gateway.gateway import MAX_BODY_BYTES, Patience
from headgate.gateway.routing import CIRCUIT_FAILURES, MAX_CIRCUIT_SECONDS
from headgate.storage.ledger import expire_due
from headgate.storage.tokens import Bounds, new_token

CANARY = "sk-canary-0123456789abcdef"
FAULTS: tuple[Fault | None, ...] = (None, "cut", "garbage", "drop")
KEYS = {"A_KEY": CANARY + "-anthropic", "O_KEY": CANARY + "-openai"}


def rss_bytes() -> int:
    """Return how much memory this process has in use."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096


async def raw(gateway: GatewayService, request: bytes) -> bytes:
    """Send bytes, and return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request)
    try:
        return await reader.read(65_536)
    finally:
        writer.close()


def head(gateway: GatewayService, path: str, *lines: str) -> bytes:
    """Return the head of a request."""
    first = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{gateway.port}", *lines]
    return "\r\n".join([*first, "", ""]).encode("latin-1")


@asynccontextmanager
async def scripted_upstream(folder: Path, answer: bytes) -> AsyncIterator[GatewayService]:
    """Serve with an upstream that says one thing to everybody, and then ends the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstreams = f'[upstreams.openai]\nkind = "openai"\nbase_url = "http://127.0.0.1:{port}/v1"\n'
    upstreams += 'key_env = "O_KEY"\n'
    try:
        async with gateway_service(folder, upstreams=upstreams, environ=KEYS) as gateway:
            yield gateway
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_oversized_body_is_refused_before_it_is_read(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            length = f"content-length: {MAX_BODY_BYTES + 1}"
            answer = await raw(gateway, head(gateway, path, length))
            assert answer.startswith(b"HTTP/1.1 413")
            assert not gateway.upstream.requests

    asyncio.run(scenario())


TOKENS = "[auth]\nrequired = true\n"
NO_TOKENS = (
    (),
    ("authorization: Bearer sk-a-key-of-a-provider",),
    ("x-api-key: sk-a-key-of-a-provider",),
    ("authorization: Basic YTpi",),
    ("x-api-key: hg_0123456789ab_short",),
    ("authorization: Bearer hg_0123456789ab_short",),
    ("x-api-key: hg_task_1",),
)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/upstreams/openai/v1/files", f"/p/a{CHAT}"])
@pytest.mark.parametrize("keys", NO_TOKENS)
async def test_without_a_token_no_body_is_read(
    tmp_path: Path, path: str, keys: tuple[str, ...]
) -> None:
    async with gateway_service(tmp_path, TOKENS) as gateway:
        refused = await gateway.ask(CHAT, headers={"x-api-key": "hg_task_1"})
        assert refused.status_code == 401, "what signs the tokens of tasks is known from now on"
        for length in ("content-length: 30000000", "transfer-encoding: chunked"):
            async with asyncio.timeout(5.0):
                answer = await raw(gateway, head(gateway, path, length, *keys))
            assert answer.startswith(b"HTTP/1.1 401")
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            is_anthropic = path == MESSAGES
            kind = "authentication_error" if is_anthropic else "invalid_request_error"
            assert error["type"] == kind
            assert "hg_0" not in error["message"]


@pytest.mark.parametrize("name", ["authorization: Bearer", "x-api-key:"])
async def test_of_a_token_that_was_refused_a_moment_ago_no_body_is_read(
    tmp_path: Path, name: str
) -> None:
    async with gateway_service(tmp_path, TOKENS) as gateway:
        key = f"{name} hg_0123456789ab_{'0' * 48}"
        async with asyncio.timeout(5.0):
            for length, body in (("content-length: 2", b"{}"), ("content-length: 30000000", b"")):
                answer = await raw(gateway, head(gateway, CHAT, length, key) + body)
                assert answer.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("is_anthropic", [True, False])
async def test_what_is_refused_by_its_head_is_said_as_later(
    tmp_path: Path, is_anthropic: bool
) -> None:
    headers = {"anthropic-version": "2023-06-01"} if is_anthropic else {}
    async with gateway_service(tmp_path, TOKENS) as gateway:
        lines = [f"{name}: {value}" for name, value in headers.items()]
        early = await raw(gateway, head(gateway, "/v1/files", "content-length: 30000000", *lines))
        late = await gateway.client.get("/v1/files", headers=headers)
        assert late.status_code == 401
        assert early.startswith(b"HTTP/1.1 401")
        assert json.loads(early.partition(b"\r\n\r\n")[2]) == late.json()
        kind = "authentication_error" if is_anthropic else "invalid_request_error"
        assert error_of(late)["type"] == kind


async def test_one_key_is_sent_in_one_header_of_a_name(tmp_path: Path) -> None:
    async with gateway_service(tmp_path) as gateway:
        twice = ("x-api-key: one", "x-api-key: two", "content-length: 2")
        answer = await raw(gateway, head(gateway, CHAT, *twice) + b"{}")
        assert answer.startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("name", ["x-api-key: ", "authorization: Bearer "])
async def test_an_upload_counts_for_its_token(tmp_path: Path, name: str) -> None:
    async with gateway_service(tmp_path, TOKENS) as gateway:
        new = new_token(name="t", permissions=("submit",), now=gateway.service.engine.now())
        await gateway.service.api.tokens.add(new.kept)
        headers = {"x-api-key": new.text}
        assert (await gateway.ask(CHAT, headers=headers)).status_code == 200
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        lines = (f"{name}{new.text}", "content-length: 30000000")
        writer.write(head(gateway, CHAT, *lines) + b"x" * 100_000)
        held = gateway.service.api.shares.bytes
        await gateway.until(lambda: held.of(new.kept.token.id) >= 100_000)
        writer.close()


def test_a_long_body_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            answer = await gateway.ask(CHAT, "x" * 8_000_000)
            assert answer.status_code == 200
            assert len(gateway.upstream.requests[0].body) > 8_000_000

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"model": 5}',
        b'{"model": "gpt-5", "messages": ' + b"[" * 100_000,
        b'{"model": {"a": 1}, "stream": "yes"}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_what_is_no_request_is_refused_in_the_shape_of_the_protocol(
    tmp_path: Path, path: str, body: bytes
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
                headers = {"content-type": kind}
                answer = await gateway.client.post(path, content=body, headers=headers)
                assert answer.status_code == 400, answer.text
                assert error_of(answer)["type"] == "invalid_request_error"
            assert not gateway.upstream.requests
            assert not gateway.calls.live()

    asyncio.run(scenario())


@pytest.mark.parametrize("model", ["a\r\nx-evil: 1", "a\0b", "\u202eabc", "a" * 3_000, " "])
def test_a_model_with_a_strange_name_reaches_no_header_and_no_log(
    tmp_path: Path, model: str
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            answer = await gateway.ask(CHAT, model=model)
            assert answer.status_code in (200, 400)
            assert "x-evil" not in answer.headers
            for request in gateway.upstream.requests:
                assert "x-evil" not in request.headers

    asyncio.run(scenario())


def test_huge_header_values_are_refused_or_passed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            for name in ("user-agent", "x-session-id", "anthropic-beta", "x-headgate-agent"):
                answer = await gateway.ask(MESSAGES, headers={name: "v" * 20_000})
                assert answer.status_code < 500, answer.text
            answer = await gateway.ask(MESSAGES, headers={"user-agent": "v" * 200_000})
            assert answer.status_code == 431

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 5_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nx-long: " + b"v" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
)
def test_an_answer_that_is_none_becomes_an_error(tmp_path: Path, answer: bytes) -> None:
    async def scenario() -> None:
        async with scripted_upstream(tmp_path, answer) as gateway:
            got = await gateway.ask(CHAT)
            assert got.status_code == 502, got.text
            assert error_of(got)["type"] == "server_error"
            assert CANARY not in got.text
            record = await gateway.record(got)
            assert record.state.value == "failed"
            assert not gateway.calls.live()

    asyncio.run(scenario())


def test_the_headers_of_an_upstream_cannot_lie_about_us(tmp_path: Path) -> None:
    async def scenario() -> None:
        lies = {
            "x-headgate-cost-usd": "0",
            "x-headgate-call-id": "call-evil",
            "set-cookie": "a=b",
            "x-request-id": "theirs",
            "transfer-encoding-not": "x",
            "x-codex-primary-used-percent": "1",
        }
        async with gateway_service(tmp_path) as gateway:
            gateway.upstream.script.append(Plan(headers=lies))
            answer = await gateway.ask(CHAT)
            assert answer.status_code == 200
            assert answer.headers["x-headgate-call-id"].startswith("call-0")
            assert float(answer.headers["x-headgate-cost-usd"]) > 0
            assert "set-cookie" not in answer.headers
            assert answer.headers["x-request-id"] != "theirs"
            record = await gateway.record(answer)
            assert record.tokens == gateway.upstream.bill[0].tokens

    asyncio.run(scenario())


def test_an_upstream_that_repeats_its_key_does_not_show_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        body = json.dumps({"error": {"message": f"bad key {KEYS['O_KEY']}"}}).encode()
        for status in (400, 401, 403, 404, 500, 503):
            answer = b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
            async with scripted_upstream(tmp_path, answer) as gateway:
                for is_stream in (False, True):
                    got = await gateway.ask(CHAT, is_stream=is_stream)
                    assert got.status_code >= 400
                    assert CANARY not in got.text

    asyncio.run(scenario())


def test_no_key_and_no_token_is_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario() -> str:
        seen: list[str] = []
        async with gateway_service(tmp_path, environ=KEYS) as gateway:
            now = gateway.service.engine.now()
            made = new_token(
                name=secrets.token_hex(4), permissions=("submit", "read", "admin"), now=now
            )
            await gateway.service.api.tokens.add(made.kept)
            own = "sk-own-canary-5555"
            for headers in (
                {"authorization": f"Bearer {made.text}"},
                {"x-api-key": own, "authorization": f"Bearer {made.text}"},
                {"x-api-key": made.text + "0"},
            ):
                for path in (CHAT, MESSAGES, "/v1/nothing", "/upstreams/openai/x?key=" + own):
                    for fault in FAULTS:
                        gateway.upstream.script.append(Plan(fault=fault))
                        answer = await gateway.ask(path, headers=headers)
                        seen += [answer.text, repr(answer.headers)]
                        gateway.upstream.script.clear()
            for path in ("/calls?limit=1000", "/metrics", "/settings", "/status", "/v1/models"):
                got = await gateway.client.get(
                    path, headers={"authorization": f"Bearer {made.text}"}
                )
                seen += [got.text, repr(got.headers)]
            seen += [repr(one) for one in gateway.calls.latest()]
            secret = made.text.rpartition("_")[2]
            # What the client of this test logs is its own.
            seen += [one.getMessage() for one in caplog.records if one.name.startswith("headgate")]
            text = "\n".join(seen)
            assert secret not in text
            assert own not in text
            for request in gateway.upstream.requests:
                assert secret not in repr(request)
        return text

    text = asyncio.run(scenario())
    assert CANARY not in text


def test_what_is_printed_has_no_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, environ=KEYS) as gateway:
            for status in (401, 500, 429):
                gateway.upstream.script.append(Plan(status=status, retry_after="1"))
                await gateway.ask(CHAT)

    asyncio.run(scenario())
    printed = capfd.readouterr()
    assert CANARY not in printed.out + printed.err


def test_a_client_that_does_not_read_is_given_up_and_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.api.http.connection.TAKE_SECONDS", 0.3)

    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            gateway.gateway.patience = Patience(drain_seconds=1.0)
            gateway.upstream.script.append(Plan(fault="endless"))
            body = json.dumps(asking(MESSAGES, is_stream=True)).encode()
            before = rss_bytes()
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1_024)
            writer.write(head(gateway, MESSAGES, f"content-length: {len(body)}") + body)
            await gateway.until(lambda: bool(gateway.upstream.requests))
            await gateway.until_idle()
            record = await gateway.latest()
            assert record.state.value == "failed"
            assert record.assumed_tokens > 0
            assert rss_bytes() - before < 40_000_000
            writer.close()

    asyncio.run(scenario())


class WatchedPool(Pool):
    """A pool that knows how much of it was taken at most."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.peak = 0

    def take(self, key: str, amount: int = 1) -> None:
        super().take(key, amount)
        self.peak = max(self.peak, self.taken)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_huge_answer_does_not_fill_the_memory(tmp_path: Path, is_stream: bool) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            pool = gateway.service.api.shares.bytes = WatchedPool(10_000_000)

            async def asked(number: int) -> int:
                size = 0
                body = asking(CHAT, f"{number}", is_stream=is_stream)
                async with gateway.client.stream("POST", CHAT, json=body) as answer:
                    assert answer.status_code == 200
                    async for piece in answer.aiter_raw():
                        size += len(piece)
                return size

            count = 1 if is_stream else 4
            gateway.upstream.script.extend([Plan(fault="huge")] * count)
            sizes = await asyncio.gather(*(asked(number) for number in range(count)))
            assert min(sizes) > 1_000_000
            await gateway.until_idle()
            booked = sum(one.tokens or 0 for one in gateway.calls.latest())
            assert booked == sum(one.tokens for one in gateway.upstream.bill)
            if is_stream:
                assert pool.peak < 1_000_000
            else:
                assert max(sizes) <= pool.peak <= 2 * pool.most
            assert not pool.taken

    asyncio.run(scenario())


HALF_BYTES = 4_000_000


@asynccontextmanager
async def halting_upstream(
    folder: Path, *, is_packed: bool = False
) -> AsyncIterator[tuple[GatewayService, asyncio.Event]]:
    """Serve with an upstream that sends the second half of an answer when it is told to."""
    go_on = asyncio.Event()
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    text = {"id": "c", "model": "gpt-5", "x": "x" * 2 * HALF_BYTES, "usage": usage}
    body = json.dumps(text).encode()
    lines = [JSON]
    if is_packed:
        body = gzip.compress(json.dumps(text | {"x": secrets.token_hex(HALF_BYTES)}).encode())
        lines.append(GZIP)
    said = http(200, body, *lines)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said[:HALF_BYTES])
        await go_on.wait()
        writer.write(said[HALF_BYTES:])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstreams = f'[upstreams.openai]\nkind = "openai"\nbase_url = "http://127.0.0.1:{port}/v1"\n'
    upstreams += 'key_env = "O_KEY"\n'
    try:
        async with gateway_service(folder, upstreams=upstreams, environ=KEYS) as gateway:
            yield gateway, go_on
    finally:
        go_on.set()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("is_packed", [True, False])
async def test_answers_that_are_read_are_bounded_in_sum_and_all_arrive(
    tmp_path: Path, is_packed: bool
) -> None:
    async with halting_upstream(tmp_path, is_packed=is_packed) as (gateway, go_on):
        # One that is packed is there twice for a moment.
        pool = WatchedPool(20_000_000 if is_packed else 10_000_000)
        gateway.service.api.shares.bytes = pool
        asked = [gateway.start(CHAT, f"{number}") for number in range(6)]
        if is_packed:
            go_on.set()
        else:
            await gateway.until(lambda: pool.taken > 2 * HALF_BYTES)
            go_on.set()
        for one in asked:
            answer = await one
            assert answer.status_code == 200, answer.text
            assert len(answer.content) > 2 * HALF_BYTES
        assert 2 * HALF_BYTES < pool.peak <= 2 * pool.most
        await gateway.until_idle()
        assert not pool.taken


async def test_an_answer_for_which_there_is_no_room_is_refused_and_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with halting_upstream(tmp_path) as (gateway, go_on):
        pool = gateway.service.api.shares.bytes = WatchedPool(10_000_000)
        halted = [gateway.start(CHAT, f"{number}") for number in range(2)]
        await gateway.until(lambda: pool.taken > 2 * HALF_BYTES - 10_000)
        with monkeypatch.context() as impatient:
            impatient.setattr("headgate.api.shares.ROOM_SECONDS", 0.1)
            refused = await gateway.ask(CHAT, "another")
        assert refused.status_code == 503, refused.text
        assert "no room for its answer" in error_of(refused)["message"]
        record = await gateway.record(refused)
        assert record.assumed_tokens
        assert record.assumed_tokens == record.tokens
        go_on.set()
        for one in halted:
            assert (await one).status_code == 200


def test_a_page_of_another_site_cannot_make_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
                answer = await gateway.ask(CHAT, headers=headers)
                assert answer.status_code in (403, 421), answer.text
                answer = await gateway.client.get("/v1/models", headers=headers)
                assert answer.status_code in (403, 421), answer.text
            assert not gateway.upstream.requests

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["drop", None])
def test_a_tenant_whose_requests_fail_does_not_close_the_upstream(
    tmp_path: Path, fault: Fault | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "CIRCUIT_SECONDS", MAX_CIRCUIT_SECONDS)

    async def scenario() -> None:
        async with gateway_service(tmp_path, "[projects.a]\n") as gateway:
            now = gateway.service.engine.now()
            bounds = Bounds(project_id="a")
            made = new_token(
                name=secrets.token_hex(4), permissions=("submit",), now=now, bounds=bounds
            )
            await gateway.service.api.tokens.add(made.kept)
            tenant = {"authorization": f"Bearer {made.text}"}
            for _ in range(3 * CIRCUIT_FAILURES):
                status = 200 if fault else 500
                gateway.upstream.script.append(Plan(fault=fault, status=status, delay_seconds=0.0))
                answer = await gateway.ask(CHAT, headers=tenant)
                assert answer.status_code == 502
                gateway.upstream.script.clear()
            async with asyncio.timeout(MAX_CIRCUIT_SECONDS / 2):
                assert (await gateway.ask(CHAT)).status_code == 200

    asyncio.run(scenario())


def test_one_caller_cannot_have_all_calls(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("headgate.gateway.gateway.MAX_CALLS", 40)

    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            now = gateway.service.engine.now()
            tokens = []
            for name in ("one", "two"):
                new = new_token(name=name, permissions=("submit",), now=now)
                await gateway.service.api.tokens.add(new.kept)
                tokens.append(ANTHROPIC_VERSION | {"x-api-key": new.text})
            greedy = [
                gateway.start(MESSAGES, f"[[until go]] {number}", headers=tokens[0])
                for number in range(60)
            ]
            await gateway.until(lambda: len(gateway.calls) + sum(map(_done, greedy)) == 60)
            refused = [one.result() for one in greedy if one.done()]
            assert refused
            assert {one.status_code for one in refused} == {429}
            assert error_of(refused[0])["type"] == "rate_limit_error"
            other = gateway.start(MESSAGES, "[[until go]]", headers=tokens[1])
            await gateway.until(lambda: len(gateway.calls) == 61 - len(refused))
            gateway.upstream.releases.add("go")
            assert (await other).status_code == 200
            for one in greedy:
                await one

    asyncio.run(scenario())


def _done(one: asyncio.Task[Any]) -> bool:
    return one.done()


@pytest.mark.parametrize("usage", [b"null", b'{"input_tokens":0,"output_tokens":0}'])
async def test_a_response_in_the_background_is_booked_with_all_that_it_can_cost(
    tmp_path: Path, usage: bytes
) -> None:
    body = b'{"id":"resp_1","model":"gpt-5","status":"queued","usage":%b}' % usage
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    async with scripted_upstream(tmp_path, answer % (len(body), body)) as gateway:
        background: dict[str, Any] = {"background": True}
        for fields in (background, background | {"store": True}):
            queued = await gateway.ask(RESPONSES, max_output_tokens=50_000, **fields)
            assert queued.status_code == 200, queued.text
            record = await gateway.record(queued)
            assert (record.tokens or 0) >= 50_000
            assert (record.micro_usd or 0) >= 100_000
            assert record.assumed_tokens == record.tokens


async def test_a_limit_takes_no_response_in_the_background_that_is_not_bounded(
    tmp_path: Path,
) -> None:
    text = '[projects.a]\n[budgets."project:a"]\nlimit_tokens = 1000000\n'
    async with gateway_service(tmp_path, text) as gateway:
        asked: dict[str, Any] = {"model": "unknown-model", "background": True}
        refused = await gateway.ask(f"/p/a{RESPONSES}", **asked)
        assert refused.status_code == 400, refused.text
        assert "background" in error_of(refused)["message"]
        assert not gateway.upstream.requests
        assert (await gateway.ask(RESPONSES, **asked)).status_code == 200, "nothing limits it"


@pytest.mark.parametrize(
    "end",
    [
        "chat/completions;/moderations",
        "chat/completions%3f/moderations",
        "chat/completions%3F/moderations",
        "chat/completions%23/moderations",
        "chat%2fcompletions",
        "chat/completions%5c/moderations",
        "chat/completions%253f/moderations",
        "chat/completions%00/moderations",
        "x/%2e%2e",
        "x/%2e%2e/moderations",
        "x/..",
        "x//moderations",
    ],
)
async def test_a_path_that_may_be_read_in_two_ways_is_not_passed_on(
    tmp_path: Path, end: str
) -> None:
    async with gateway_service(tmp_path) as gateway:
        line = "content-length: 2\r\nconnection: close\r\n\r\n{}"
        request = head(gateway, f"/upstreams/openai/v1/{end}", line)
        answer = await raw(gateway, request.removesuffix(b"\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 404"), answer
        assert b"cannot be passed on" in answer
        assert not gateway.upstream.requests


async def test_the_token_of_a_task_is_not_sent_upstream(tmp_path: Path) -> None:
    async with gateway_service(tmp_path) as gateway:
        headers = {"x-claude-code-session-id": "hg_task_0123456789abcdef", "x-app": "cli"}
        assert (await gateway.ask(CHAT, headers=headers)).status_code == 200
        (sent,) = gateway.upstream.requests
        assert "hg_task_" not in str(sent.headers)
        assert sent.headers["x-app"] == "cli"


def http(status: int, body: bytes, *lines: str) -> bytes:
    """Return a whole answer of an upstream."""
    first = [f"HTTP/1.1 {status} Said", f"content-length: {len(body)}", *lines, "", ""]
    return "\r\n".join(first).encode("latin-1") + body


KEY = KEYS["O_KEY"]
ESCAPED = "".join(f"\\u{ord(one):04X}" for one in KEY)
JSON = "content-type: application/json"
GZIP = "content-encoding: gzip"


@pytest.mark.parametrize("key", [KEY, ESCAPED, ESCAPED.lower()])
@pytest.mark.parametrize("status", [200, 400, 404, 500])
@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_key_that_its_provider_repeats_does_not_come_back(
    tmp_path: Path, key: str, status: int, is_packed: bool
) -> None:
    body = f'{{"error":{{"message":"bad key {key}"}},"usage":null}}'.encode()
    lines = [JSON, f"request-id: {KEY}", f"x-ratelimit-limit-requests: {KEY}"]
    if is_packed:
        body = gzip.compress(body)
        lines.append(GZIP)
    async with scripted_upstream(tmp_path, http(status, body, *lines)) as gateway:
        answer = await gateway.ask(CHAT)
        assert answer.status_code == status or (status, answer.status_code) == (500, 502)
        assert "bad key [key]" in answer.text
        shown = answer.text + str(answer.headers.multi_items()) + repr(await gateway.latest())
        assert CANARY not in shown
        assert CANARY not in answer.text.encode().decode("unicode_escape")


async def test_a_stream_with_a_coding_is_read_and_hides_the_key(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    chunks: list[dict[str, Any]] = [
        {"id": "c", "model": "gpt-5", "choices": [{"index": 0, "delta": {"content": KEY}}]},
        {"id": "c", "model": "gpt-5", "choices": [], "usage": usage},
    ]
    events = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
    said = http(200, gzip.compress(events.encode()), "content-type: text/event-stream", GZIP)
    async with scripted_upstream(tmp_path, said) as gateway:
        answer = await gateway.ask(CHAT, is_stream=True)
        assert answer.status_code == 200
        assert '"content": "[key]"' in answer.text
        assert "[DONE]" in answer.text
        record = await gateway.record(answer)
        assert (record.input_tokens, record.output_tokens) == (11, 7)
        assert record.assumed_tokens == 0


async def test_a_stream_that_cannot_be_read_is_not_passed_on(tmp_path: Path) -> None:
    lines = ("content-type: text/event-stream", "content-encoding: br")
    async with scripted_upstream(tmp_path, http(200, b"data", *lines)) as gateway:
        answer = await gateway.ask(CHAT, is_stream=True)
        assert answer.status_code == 502
        record = await gateway.latest()
        assert record.tokens
        assert record.assumed_tokens == record.tokens


UNDER_WAY = b'{"id": "resp_1", "object": "response", "status": "queued", "usage": null}'
COMPLETED = {
    "id": "resp_1",
    "object": "response",
    "model": "gpt-5",
    "status": "completed",
    "usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10},
}
WITH_BUDGET = '[projects.a]\n[budgets."project:a"]\nlimit_usd = "500"\n'


@pytest.mark.parametrize("has_lease_ended", [False, True])
async def test_a_response_in_the_background_is_booked_as_it_ended_when_somebody_asks(
    tmp_path: Path, has_lease_ended: bool
) -> None:
    completed = json.dumps(COMPLETED).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        said = UNDER_WAY if asked.startswith(b"POST") else completed
        writer.write(http(200, said, JSON, "connection: close"))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstreams = f'[upstreams.openai]\nkind = "openai"\nbase_url = "http://127.0.0.1:{port}/v1"\n'
    upstreams += 'key_env = "O_KEY"\n'
    async with gateway_service(tmp_path, WITH_BUDGET, upstreams=upstreams, environ=KEYS) as gateway:
        asked: dict[str, Any] = {"background": True, "max_output_tokens": 1_000}
        first = await gateway.ask(f"/p/a{RESPONSES}", **asked)
        assert first.status_code == 200, first.text
        record = await gateway.record(first)
        assert record.assumed_micro_usd == record.micro_usd == record.reserved_micro_usd
        if has_lease_ended:
            store = cast("Any", gateway.service.engine.store)
            await store.run(lambda transaction, now: expire_due(transaction, now + 3_600))
        for _ in range(2):
            shown = await gateway.client.get(f"/p/a{RESPONSES}/resp_1")
            assert shown.json() == COMPLETED
            status = await gateway.status("project:a")
            # Ten tokens: seven at one dollar a million, three at two.
            assert usd(float(status["spentUsd"])) == 13
            assert usd(float(status["reservedUsd"])) == 0
        assert gateway.service.engine.call_store is not None
        kept = await gateway.service.engine.call_store.get(record.id)
        assert kept is not None
        assert (kept.tokens, kept.micro_usd, kept.assumed_micro_usd) == (10, 13, 0)
        used = (await gateway.client.get("/usage?by=model")).json()
        (row,) = [one for one in used["rows"] if one["key"] == "gpt-5"]
        assert (row["tokens"], row["calls"]) == (10, 1)
    server.close()
    await server.wait_closed()
