"""What calls that wait keep in memory: not their bodies."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from pathlib import Path

import pytest

from gateway.billing_upstream import BillingUpstream, upstream_in_thread
from gateway.gateway_service import (
    CHAT,
    ENVIRON,
    MESSAGES,
    PRICES,
    UPSTREAMS,
    asking,
    gateway_service,
)
from headgate.gateway.gateway import Patience
from headgate.gateway.request_body import LEAST_BYTES, RequestBody
from service.support import running_service

STREAMS = 1_000
BODY_BYTES = 300_000
AT_ONCE = 50
MOST_GROWTH_BYTES = 40_000_000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def test_a_body_comes_back_from_its_file_as_it_was() -> None:
    async def scenario() -> None:
        given = os.urandom(3 * LEAST_BYTES)
        body = RequestBody(given)
        assert body.may_spill
        assert await body.spill()
        assert not body.may_spill
        assert not await body.spill()
        assert await body.read() == given
        assert await body.read() == given
        body.change(b"x")
        assert (body.size, body.may_spill) == (1, False)
        body.let_go()

    asyncio.run(scenario())


def test_a_call_that_has_ended_is_gone_without_being_looked_for(tmp_path: Path) -> None:
    """Cycles are found by looking at everything, which costs more than the calls themselves."""

    async def scenario() -> set[str]:
        async with gateway_service(tmp_path) as gateway:
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                for is_stream in (False, True, False, True):
                    answer = await gateway.ask(CHAT, stream=is_stream)
                    assert answer.status_code == 200
                gc.collect()
                return {type(one).__qualname__ for one in gc.garbage}
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    found = asyncio.run(scenario())
    assert not found & {"Exchange", "Request", "Client", "Asked", "LiveCall", "Planned", "Task"}


def test_on_a_full_disk_a_body_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))

    async def scenario() -> None:
        body = RequestBody(b"x" * LEAST_BYTES)
        assert not await body.spill()
        assert not body.may_spill, "nobody tries again and again"
        assert await body.read() == b"x" * LEAST_BYTES

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_call_that_waited_is_sent_as_it_came(tmp_path: Path, path: str, is_stream: bool) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            gateway.gateway.patience = Patience(memory_seconds=0.0)
            first = gateway.start(path, "[[until go]]")
            await gateway.until(lambda: bool(gateway.upstream.requests))
            shares = gateway.service.api.shares.bytes
            prompt = "long " * 60_000
            second = gateway.start(path, prompt, is_stream=is_stream)
            await gateway.until_waiting()
            await gateway.until(lambda: shares.taken < LEAST_BYTES)
            gateway.upstream.releases.add("go")
            assert (await first).status_code == 200
            assert (await second).status_code == 200
            sent = gateway.upstream.requests[-1].fields["messages"]
            assert sent == asking(path, prompt)["messages"]
            await gateway.until(lambda: not shares.taken)

    asyncio.run(scenario())


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has in use."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.mark.timeout(110)
def test_a_thousand_waiting_streams_cost_next_to_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    with upstream_in_thread() as upstream:
        text = (UPSTREAMS + PRICES).replace("{url}", upstream.url)
        text = text.replace("{openai_url}", upstream.openai_url).replace("{inflight}", "1")
        (tmp_path / "headgate.toml").write_text(text)
        with running_service(tmp_path, "--config", str(tmp_path / "headgate.toml")) as service:
            port = int(service.address.rpartition(":")[2])
            grown = asyncio.run(_growth(service.pid, port, upstream))
            upstream.releases.add("go")
    assert grown < MOST_GROWTH_BYTES, f"{grown:,} bytes"


async def _growth(pid: int, port: int, upstream: BillingUpstream) -> int:
    """Return by how much a service grows with so many streams that wait."""
    prompt = "x" * BODY_BYTES
    body = json.dumps(asking(MESSAGES, f"[[until go]] {prompt}", is_stream=True)).encode()
    head = f"POST {MESSAGES} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"\r\n" + body
    opened: list[asyncio.StreamWriter] = []

    async def wait(turns: asyncio.Semaphore) -> None:
        async with turns:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            writer.write(request)
            await writer.drain()
        assert (await reader.readline()).split()[1] == b"200"

    async def all_wait(count: int) -> None:
        turns = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(wait(turns) for _ in range(count)))

    # The first one runs until it is let go; some more, and nothing is there for the first time.
    running = asyncio.create_task(all_wait(1))
    async with asyncio.timeout(20.0):
        while not upstream.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await all_wait(STREAMS // 10)
    before = resident_bytes(pid)
    await all_wait(STREAMS)
    grown = resident_bytes(pid) - before
    running.cancel()
    for writer in opened:
        writer.close()
    return grown
