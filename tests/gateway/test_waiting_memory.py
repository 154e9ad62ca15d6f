"""What calls that wait keep in memory: not their bodies."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
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
from gateway.test_gateway_isolation import token
from headgate.api.shares import Holder, Pool, SpillRoom, address_key
from headgate.core.call import CallState
from headgate.gateway import gateway as gateway_module
from headgate.gateway import request_body
from headgate.gateway.gateway import Patience
from headgate.gateway.request_body import LEAST_BYTES, RequestBody
from headgate.storage.tokens import Bounds, new_token
from service.support import running_service

STREAMS = 1_000
BODY_BYTES = 300_000
AT_ONCE = 50
MOST_GROWTH_BYTES = 40_000_000
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


ALICE = Holder("alice")


def test_a_body_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        given = os.urandom(3 * LEAST_BYTES)
        body, room = RequestBody(given), SpillRoom()
        assert body.may_spill
        assert await body.spill(room, ALICE, tmp_path)
        assert (room.files.of("alice"), room.bytes.of("alice")) == (1, 3 * LEAST_BYTES)
        assert not body.may_spill
        assert not await body.spill(room, ALICE, tmp_path)
        assert await body.read() == given
        assert (room.files.taken, room.bytes.taken) == (0, 0), "its file is gone"
        assert await body.read() == given
        assert await body.spill(room, ALICE, tmp_path), "it waits again"
        assert (room.files.taken, room.bytes.taken) == (1, 3 * LEAST_BYTES)
        assert await body.read() == given
        body.change(b"x")
        assert (body.size, body.may_spill) == (1, False)
        body.let_go()
        assert (room.files.taken, room.bytes.taken) == (0, 0)

    asyncio.run(scenario())
    assert not list(tmp_path.iterdir())


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
    async def scenario() -> None:
        room = SpillRoom()
        for folder, least in ((tmp_path / "nowhere", 0), (tmp_path, 2**62)):
            monkeypatch.setattr(request_body, "LEAST_FREE_BYTES", least)
            body = RequestBody(b"x" * LEAST_BYTES)
            assert not await body.spill(room, ALICE, folder)
            assert not body.may_spill, "nobody tries again and again"
            assert await body.read() == b"x" * LEAST_BYTES
            assert (room.files.taken, room.bytes.taken) == (0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("pool", ["files", "bytes"])
def test_a_caller_leaves_room_on_the_disk_for_others(tmp_path: Path, pool: str) -> None:
    async def scenario() -> None:
        room, bodies = SpillRoom(), []
        most = 64
        room.files.most = most if pool == "files" else 10 * most
        room.bytes.most = most * LEAST_BYTES if pool == "bytes" else 2**40
        for _ in range(most):
            bodies.append(RequestBody(b"x" * LEAST_BYTES))
            if not await bodies[-1].spill(room, ALICE, tmp_path):
                break
        assert bodies[-1].may_spill, "it stays in memory until there is room"
        assert most // 2 < room.files.taken < most
        other = RequestBody(b"x" * LEAST_BYTES)
        assert await other.spill(room, Holder("bob"), tmp_path)
        bodies[0].let_go()
        for one in (*bodies, other):
            one.let_go()
        assert (room.files.taken, room.bytes.taken) == (0, 0)

    asyncio.run(scenario())


async def test_calls_that_wait_take_no_more_of_the_disk_than_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no room there stays in memory, and there it counts until nothing more is taken.

    Those that have their turn leave their room on the disk to others, and find some in memory.
    """
    monkeypatch.setattr(gateway_module, "SPILL_AGAIN_SECONDS", 0.05)
    size = 1024 * 1024
    async with gateway_service(tmp_path, "[projects.a]\n", inflight=1) as gateway:
        gateway.gateway.patience = Patience(memory_seconds=0.1)
        shares = gateway.service.api.shares
        shares.spilled.bytes.most, shares.bytes.most = 8 * size, 12 * size
        now = gateway.service.engine.now()
        made = new_token(name="a", permissions=("submit",), now=now, bounds=Bounds(project_id="a"))
        await gateway.service.api.tokens.add(made.kept)
        headers = {"authorization": f"Bearer {made.text}"}
        first = gateway.start(CHAT, "[[until go]]", headers=headers)
        await gateway.until(lambda: bool(gateway.upstream.requests))
        asked = []
        for number in range(30):
            asked.append(gateway.start(CHAT, f"{number}" + "x" * size, headers=headers))
            await gateway.until(
                lambda: gateway.waiting + sum(one.done() for one in asked) == len(asked)
            )
        refused = [one.result() for one in asked if one.done()]
        assert len(refused) >= 10
        assert {one.status_code for one in refused} == {429}
        assert "bytes of your requests" in refused[0].text
        assert size < shares.spilled.bytes.taken < 8 * size
        assert shares.spilled.bytes.taken + shares.bytes.taken > 12 * size
        gateway.upstream.releases.add("go")
        answers = await asyncio.gather(first, *asked)
        assert sum(one.status_code == 200 for one in answers) == 31 - len(refused)
        await gateway.until(lambda: not shares.spilled.files.taken + shares.spilled.bytes.taken)


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


async def test_a_body_that_comes_back_from_the_disk_counts_as_memory(tmp_path: Path) -> None:
    """It does so until its answer begins, and its room on the disk is free meanwhile."""
    async with gateway_service(tmp_path, inflight=1) as gateway:
        gateway.gateway.patience = Patience(memory_seconds=0.0)
        shares, prompt = gateway.service.api.shares, "x" * BODY_BYTES
        first = gateway.start(CHAT, "[[until go]]")
        await gateway.until(lambda: len(gateway.upstream.requests) == 1)
        second = gateway.start(CHAT, f"[[until later]] {prompt}")
        await gateway.until(lambda: shares.spilled.bytes.taken > BODY_BYTES > shares.bytes.taken)
        gateway.upstream.releases.add("go")
        assert (await first).status_code == 200
        await gateway.until(lambda: len(gateway.upstream.requests) == 2)
        assert (shares.spilled.files.taken, shares.spilled.bytes.taken) == (0, 0)
        assert shares.bytes.taken > BODY_BYTES
        gateway.upstream.releases.add("later")
        assert (await second).status_code == 200
        await gateway.until(lambda: not shares.bytes.taken)


@pytest.mark.parametrize("is_patient", [True, False])
async def test_bodies_that_come_back_from_the_disk_leave_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_patient: bool
) -> None:
    """What there is no room for waits, and not for ever."""
    if not is_patient:
        monkeypatch.setattr(gateway_module, "BODY_ROOM_SECONDS", 0.1)
    size, count = 1024 * 1024, 8
    async with gateway_service(tmp_path, "[projects.a]\n[projects.b]\n", inflight=count) as gateway:
        gateway.gateway.patience = Patience(memory_seconds=0.0)
        shares = gateway.service.api.shares
        shares.bytes.most = 6 * size
        one, other = await token(gateway, "a"), await token(gateway, "b")
        first = [gateway.start(CHAT, "[[until go]]", headers=one) for _ in range(count)]
        await gateway.until(lambda: len(gateway.upstream.requests) == count)
        large = []
        for number in range(count):
            prompt = f"[[until later]] {number}" + "x" * size
            large.append(gateway.start(CHAT, prompt, headers=one))
            await gateway.until(lambda: shares.spilled.bytes.taken > len(large) * size)
        gateway.upstream.releases.add("go")
        assert {(await call).status_code for call in first} == {200}
        await gateway.until(lambda: not gateway.waiting and len(gateway.upstream.requests) > count)
        honest = gateway.start(CHAT, "x" * size, headers=other)
        await gateway.until(lambda: honest.done() or gateway.waiting == 1)
        assert not honest.done() or honest.result().status_code == 200, honest.result().text
        assert shares.bytes.taken < shares.bytes.most
        if not is_patient:
            await gateway.until(lambda: any(call.done() for call in large))
        gateway.upstream.releases.add("later")
        answers = await asyncio.gather(*large)
        refused = [answer for answer in answers if answer.status_code == 503]
        assert {answer.status_code for answer in answers} == ({200} if is_patient else {200, 503})
        assert all("no room in memory" in answer.text for answer in refused)
        states = {(await gateway.record(answer)).state for answer in refused}
        assert states <= {CallState.FAILED}, "its permit counts in the share"
        assert (await honest).status_code == 200
        await gateway.until(lambda: not shares.spilled.files.taken + shares.spilled.bytes.taken)


async def test_a_call_whose_client_leaves_before_there_is_room_is_not_sent(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, inflight=2) as gateway:
        gateway.gateway.patience = Patience(memory_seconds=0.0)
        shares = gateway.service.api.shares
        first = gateway.start(CHAT, "[[until go]]")
        other = gateway.start(CHAT, "[[until later]]")
        await gateway.until(lambda: len(gateway.upstream.requests) == 2)
        second = gateway.start(CHAT, "x" * BODY_BYTES)
        await gateway.until(lambda: shares.spilled.bytes.taken > BODY_BYTES)
        with held(shares.bytes, shares.bytes.most):
            gateway.upstream.releases.add("go")
            assert (await first).status_code == 200
            await gateway.until(lambda: len(gateway.calls) == 2 and not gateway.waiting)
            second.cancel()
            await gateway.until(lambda: len(gateway.calls) == 1)
        assert len(gateway.upstream.requests) == 2
        assert (shares.spilled.files.taken, shares.spilled.bytes.taken) == (0, 0)
        assert (await gateway.ask(CHAT)).status_code == 200, "its permit is free"
        gateway.upstream.releases.add("later")
        assert (await other).status_code == 200


async def test_a_stream_that_waits_for_room_in_memory_is_kept_alive(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, inflight=2) as gateway:
        never = 600.0
        gateway.gateway.patience = Patience(
            memory_seconds=0.0, open_seconds=never, keep_alive_seconds=0.01
        )
        shares = gateway.service.api.shares
        first = gateway.start(CHAT, "[[until go]]")
        other = gateway.start(CHAT, "[[until later]]")
        await gateway.until(lambda: len(gateway.upstream.requests) == 2)
        body, opened = asking(CHAT, "x" * BODY_BYTES, is_stream=True), asyncio.Event()

        async def read() -> str:
            async with gateway.client.stream("POST", CHAT, json=body) as answer:
                opened.set()
                return (await answer.aread()).decode()

        second = asyncio.create_task(read())
        await gateway.until(lambda: shares.spilled.bytes.taken > BODY_BYTES)
        with held(shares.bytes, shares.bytes.most):
            gateway.upstream.releases.add("go")
            assert (await first).status_code == 200
            await gateway.until(opened.is_set)
            assert len(gateway.upstream.requests) == 2
        assert (await second).rstrip().endswith("[DONE]")
        gateway.upstream.releases.add("later")
        assert (await other).status_code == 200


@contextmanager
def held(pool: Pool, size: int) -> Iterator[None]:
    """Have whoever is at this machine hold so much of a pool."""
    key = address_key("127.0.0.1")
    pool.take(key, size)
    try:
        yield
    finally:
        pool.give_back(key, size)


async def test_what_waits_for_a_permit_keeps_no_call_that_has_it_from_being_sent(
    tmp_path: Path,
) -> None:
    """Bodies that are too short for a file may fill the memory of their caller."""
    async with gateway_service(tmp_path, "[projects.a]\n", inflight=1) as gateway:
        gateway.gateway.patience = Patience(memory_seconds=0.0)
        shares, one = gateway.service.api.shares, await token(gateway, "a")
        shares.bytes.most = 2_000_000
        first = gateway.start(CHAT, "[[until go]]", headers=one)
        await gateway.until(lambda: len(gateway.upstream.requests) == 1)
        large = gateway.start(CHAT, "x" * 700_000, headers=one)
        await gateway.until(lambda: shares.spilled.bytes.taken > 700_000)
        short: list[asyncio.Task[httpx2.Response]] = []
        while not any(call.done() for call in short):
            prompt = f"{len(short)}" + "x" * (LEAST_BYTES - 2_000)
            short.append(gateway.start(CHAT, prompt, headers=one))
            await gateway.until(lambda: short[-1].done() or gateway.waiting == len(short) + 1)
        assert short.pop().result().status_code == 429
        gateway.upstream.releases.add("go")
        answers = await asyncio.gather(first, large, *short)
        assert {answer.status_code for answer in answers} == {200}
        await gateway.until(lambda: not shares.bytes.taken)


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
