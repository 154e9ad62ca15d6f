"""What one request may cost the service itself: memory, and the time of everybody else."""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.billing_upstream import Plan
from gateway.gateway_service import CHAT, LOOK_SECONDS, MESSAGES, asking, gateway_service
from gateway.test_hostile import GZIP, http, scripted_upstream
from headgate.api.shares import HeldAnswer, Holder, Shares
from headgate.gateway.gateway import LARGE_ANSWER_BYTES, Patience, decoded_answer
from headgate.providers.connection_pool import UNCOUNTED_BYTES
from headgate.providers.prices import MAX_MODEL_LENGTH
from headgate.providers.requests import MAX_VALUES, has_too_many_values

PASSED = "/upstreams/openai/v1/foo"


async def test_the_model_of_a_request_that_is_passed_on_is_bounded(tmp_path: Path) -> None:
    async with gateway_service(tmp_path) as gateway:
        sent = len(gateway.upstream.requests)
        for model in ("m" * (MAX_MODEL_LENGTH + 1), "a\nb"):
            answer = await gateway.client.post(PASSED, json={"model": model})
            assert answer.status_code == 400, answer.text
            assert "printable" in answer.text
        assert len(gateway.upstream.requests) == sent, "nothing was sent"
        for body in ({}, {"model": "m" * MAX_MODEL_LENGTH}):
            await gateway.client.post(PASSED, json=body)
        assert len(gateway.upstream.requests) == sent + 2


class Pauses:
    """The longest that nothing else had its turn, by what this process has computed meanwhile."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            self.longest = max(self.longest, now - before)
            before = now


@asynccontextmanager
async def watched() -> AsyncIterator[Pauses]:
    """Watch how long the service stops for one of its clients."""
    pauses = Pauses()
    watching = asyncio.create_task(pauses.watch())
    try:
        yield pauses
    finally:
        watching.cancel()


@pytest.mark.parametrize("value", [b"1", b"{}", b"[]", b'{"a":1}', b'""'])
@pytest.mark.parametrize("path", [CHAT, PASSED])
async def test_a_body_of_very_many_values_stops_nobody(
    tmp_path: Path, path: str, value: bytes
) -> None:
    body = b'{"model":"gpt-5","messages":[' + b",".join([value] * 4_000_000) + b"]}"
    async with gateway_service(tmp_path) as gateway:
        async with watched() as pauses:
            answer = await gateway.client.post(path, content=body)
        assert answer.status_code == 413, answer.text
        assert "values" in answer.json()["error"]["message"]
        assert not gateway.upstream.requests
        assert pauses.longest < 0.2, "to decode it would take seconds"


async def test_large_images_and_texts_full_of_commas_are_taken(tmp_path: Path) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo" * 500_000}
    blocks = [
        {"type": "image", "source": source},
        {"type": "text", "text": '{"a\\": [1,2],' * 99_999},
    ]
    body = asking(MESSAGES) | {"messages": [{"role": "user", "content": blocks}]}
    async with gateway_service(tmp_path) as gateway:
        answer = await gateway.client.post(MESSAGES, json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("before", range(5))
def test_commas_in_text_are_no_values_wherever_a_body_is_parted(before: int) -> None:
    text = b'"' + b" " * before + b'\\\\\\",{[' * MAX_VALUES + b'"'
    assert not has_too_many_values(b"[" + text + b"]")
    assert has_too_many_values(b"[" + text + b",1" * MAX_VALUES + b"]")


async def sip(port: int) -> None:
    """Ask for a stream, and take it a few bytes at a time for as long as it lasts."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4_096)
    body = json.dumps(asking(CHAT, is_stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        while await reader.read(4_096):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        writer.close()


async def test_a_slow_reader_gives_its_permit_back(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, inflight=1) as gateway:
        gateway.gateway.patience = Patience(slow_seconds=0.3, drain_seconds=0.3)
        gateway.upstream.script.append(Plan(fault="endless"))
        sipping = asyncio.create_task(sip(gateway.port))
        await gateway.until(lambda: len(gateway.upstream.requests) == 1)
        answer = await gateway.ask(CHAT, "behind it")
        assert answer.status_code == 200, "it had the permit of the one that was cut"
        sipping.cancel()
        await asyncio.wait((sipping,))
        await gateway.until_idle()
        cut = next(iter(gateway.calls.latest()))
        assert cut.state.value == "failed"
        assert cut.assumed_tokens, "what it cost nobody has said"


async def test_a_coded_stream_is_decoded_in_slices_and_stops_nobody(tmp_path: Path) -> None:
    """Nobody asked for the coding: 30 kB of it stand for 5 MB of comments."""
    events = b"".join(
        b": "
        + b"a" * 250 * (at % 40 != 0)
        + secrets.token_hex(6).encode() * (at % 40 == 0)
        + b"\n\n"
        for at in range(20_000)
    )
    coded = gzip.compress(events, 9)
    assert len(coded) < 64 * 1024, "it may come in one piece"
    said = http(200, coded, "content-type: text/event-stream", GZIP)
    async with scripted_upstream(tmp_path, said) as gateway:
        async with watched() as pauses:
            answer = await gateway.ask(CHAT, is_stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.content.startswith(events)
        assert pauses.longest < 0.1, "one slice at a time"


@pytest.mark.parametrize("size", [1_000, LARGE_ANSWER_BYTES // 2, 3 * LARGE_ANSWER_BYTES + 7])
async def test_all_that_is_made_of_an_answer_counts_unless_it_is_short(size: int) -> None:
    shares = Shares()
    plain = secrets.token_bytes(size)
    coded = gzip.compress(plain)
    with HeldAnswer(shares, Holder("a")) as held:
        assert await decoded_answer(coded, {"content-encoding": "gzip"}, held) == plain
        whole = len(coded) + size
        assert shares.bytes.taken == (whole if whole > UNCOUNTED_BYTES else 0)
    assert not shares.bytes.taken
