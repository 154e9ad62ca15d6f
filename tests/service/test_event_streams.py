"""Streams of a real service: many clients, one that never reads, and a restart in between."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from api.event_stream import opened
from service.support import ServiceProcess, running_service, wait_until
from service.test_up import two_nodes

CLIENTS = 100
EVENTS_PER_TASK = 3
FIRST_TASKS = 1_500
WARM_UP_TASKS = 400
TASKS = 3_334
BATCH = 50
MOST_GROWTH_BYTES = 10_000_000
PATIENCE_SECONDS = 60.0
SETTINGS = """
[log]
level = "warning"

[scheduler]
max_queue_size = 100000
max_per_agent = 100000
max_inflight = 200
max_per_agent_inflight = 200
worker_count = 200
task_retention_seconds = 0.5
"""

_ID = re.compile(rb"^id: \w+-(\d+)\nevent: task\.", re.MULTILINE)


class Counter:
    """One client that counts its events, and sees that none is missing or comes twice."""

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        self.is_right = True
        self._tail = b""

    async def listen(self, host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port, limit=2**20)
        writer.write(b"GET /events HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        try:
            while data := await reader.read(2**18):
                self._take(data)
        finally:
            writer.close()

    def _take(self, data: bytes) -> None:
        whole, _, self._tail = (self._tail + data).rpartition(b"\n\n")
        for match in _ID.finditer(whole):
            number = int(match[1])
            self.is_right = self.is_right and self.last in (0, number - 1)
            self.last = number
            self.count += 1


def deaf_client(host: str, port: int) -> socket.socket:
    """Ask for events with a small window, and never read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect((host, port))
    client.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    return client


async def submit(service: ServiceProcess, tasks: int) -> None:
    body = {"agentId": "a", "tasks": [{"action": "work"}] * BATCH}
    for start in range(0, tasks, BATCH):
        batch = {**body, "tasks": body["tasks"][: tasks - start]}
        answer = await asyncio.to_thread(service.ask, "POST", "/tasks/batch", batch)
        assert answer.body["submitted"] == min(BATCH, tasks - start)


async def all_have(counters: list[Counter], events: int) -> None:
    started = time.monotonic()
    while any(counter.count < events for counter in counters):
        assert time.monotonic() - started < PATIENCE_SECONDS, sorted(c.count for c in counters)
        await asyncio.sleep(0.05)


def memory_bytes(service: ServiceProcess) -> int:
    pages = Path(f"/proc/{service.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def listen_and_measure(service: ServiceProcess) -> int:
    """Return by how much the service grew while everybody but one got all events."""
    place = urlsplit(service.address)
    host, port = place.hostname or "", place.port or 0
    await submit(service, FIRST_TASKS)
    counters = [Counter() for _ in range(CLIENTS)]
    listening = [asyncio.create_task(one.listen(host, port)) for one in counters]
    with deaf_client(host, port):
        metric = f"headgate_event_streams {CLIENTS + 1:.1f}"
        while metric not in await asyncio.to_thread(service.text, "/metrics"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await submit(service, WARM_UP_TASKS)
        await all_have(counters, WARM_UP_TASKS * EVENTS_PER_TASK)
        before = memory_bytes(service)
        await submit(service, TASKS)
        await all_have(counters, (WARM_UP_TASKS + TASKS) * EVENTS_PER_TASK)
        after = memory_bytes(service)
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    assert all(counter.is_right for counter in counters)
    return after - before


@pytest.mark.timeout(180)
def test_a_client_that_never_reads_costs_the_others_nothing_and_the_service_little(
    tmp_path: Path,
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS)
    with running_service(tmp_path, "--config", str(settings)) as service:
        grown = asyncio.run(listen_and_measure(service))
        assert grown < MOST_GROWTH_BYTES, f"{grown / 2**20:.1f} MiB"
        started = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - started < 20


def test_a_client_that_comes_back_after_a_restart_is_told_to_look_again(tmp_path: Path) -> None:
    async def listen(service: ServiceProcess, last_id: str = "") -> tuple[list[str], str]:
        place = urlsplit(service.address)
        headers = {"Last_Event_ID": last_id} if last_id else {}
        stream = await opened(place.hostname or "", place.port or 0, "/events", **headers)
        kinds = []
        first = await stream.block()
        assert first is not None
        task_id = await asyncio.to_thread(service.submit)
        while (sent := first if first.event else await stream.event()) is not None:
            kinds.append(sent.event)
            first = first._replace(event="")
            if sent.event == "task.completed" and sent.task == task_id:
                break
        stream.writer.close()
        return kinds, stream.last_id

    with running_service(tmp_path) as service:
        kinds, last_id = asyncio.run(listen(service))
        assert kinds == ["task.queued", "task.running", "task.completed"]
        kinds, last_id = asyncio.run(listen(service, last_id))
        assert kinds == ["task.queued", "task.running", "task.completed"]
        service.kill()
        service.start()
        kinds, _ = asyncio.run(listen(service, last_id))
        assert kinds == ["reset", "task.queued", "task.running", "task.completed"]


def test_any_node_has_the_stream_and_it_ends_when_the_dispatcher_does(
    tmp_path: Path, postgres_url: str
) -> None:
    async def listen(first: ServiceProcess, second: ServiceProcess) -> None:
        place = urlsplit(second.address)
        host, port = place.hostname or "", place.port or 0
        stream = await opened(host, port, "/events")
        assert stream.status == 200
        await stream.block()
        task_id = await asyncio.to_thread(second.submit)
        kinds = []
        while "task.completed" not in kinds:
            sent = await stream.event()
            assert sent is not None
            assert sent.task == task_id
            kinds.append(sent.event)
        assert kinds == ["task.queued", "task.running", "task.completed"]
        await asyncio.to_thread(first.kill)
        assert await stream.rest() == []
        await asyncio.to_thread(wait_until, partial(dispatches, second), seconds=20.0)
        again = await opened(host, port, "/events", Last_Event_ID=stream.last_id)
        reset = await again.event()
        assert reset is not None
        assert reset.event == "reset"
        for one in (stream, again):
            one.writer.close()
            await one.writer.wait_closed()

    with two_nodes(tmp_path, postgres_url) as (first, second):
        asyncio.run(asyncio.wait_for(listen(first, second), PATIENCE_SECONDS))


def dispatches(service: ServiceProcess) -> bool:
    answer = service.ask("GET", "/readyz")
    return answer.status == 200 and answer.body["role"] == "dispatcher"
