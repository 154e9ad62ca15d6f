"""The client of a service under load: requests made beforehand, connections that stay open.

The service is another process, so what the client does costs the service nothing but its share of
the machine.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from benchmarks.http_load import Client, Connection
from service.support import ServiceProcess, family

BATCH = 50
BATCH_CONNECTIONS = 8
SINGLE_CONNECTIONS = 64
AGENTS = 40
PROJECTS = ("research", "evals")
ACCEPTED = 202
LOOK_SECONDS = 0.01
MOST_LOOK_SECONDS = 0.1
CORRECTION = 0.1
"""The part of what a queue lacks that is added at each look, or it would settle below its size."""

MOST_SECONDS = 300.0
# Requests that are sent over and over where the number of tasks is not known beforehand.
PREPARED_BATCHES = 100


class DidNotFinishError(Exception):
    """Tasks that the service took were not done in time."""


class Progress(NamedTuple):
    """What the service says of itself at one moment."""

    at: float
    queued: int
    completed: int
    cpu_seconds: float


class Measured(NamedTuple):
    """Tasks a second until all were submitted and until all were done, and the service's time.

    `queued` is how many tasks waited meanwhile, on average, where that was looked at.
    """

    submitted: float
    done: float
    cpu_us: float
    queued: float = 0.0


class Start(NamedTuple):
    """Milliseconds from sending a task to its first line, and between the service's own stamps."""

    seen_ms: float
    stamped_ms: float


class _Seen(msgspec.Struct, rename="camel"):
    task_id: str
    state: str
    created_at: datetime
    started_at: datetime | None = None
    result: float = 0.0

    def start(self, sent_at: float) -> Start:
        stamped = (self.started_at or self.created_at) - self.created_at
        return Start((self.result - sent_at) * 1e3, stamped.total_seconds() * 1e3)


class _Queue(msgspec.Struct, rename="camel"):
    total_queued: int


class _Metrics(msgspec.Struct, rename="camel"):
    tasks_completed: int


class _Stats(msgspec.Struct):
    queue: _Queue
    metrics: _Metrics


def task(number: int, **fields: object) -> dict[str, object]:
    """Describe a task with a share and with money: an agent, a project, an estimate, a session."""
    return {
        "agentId": f"agent-{number % AGENTS}",
        "projectId": PROJECTS[number % len(PROJECTS)],
        "action": "noop",
        "params": {"n": number},
        "estimate": {"tokens": 100, "usd": "0.001"},
        "scopes": ["session:bench"],
        **fields,
    }


class Feed:
    """One service, and the connections over which it is fed."""

    def __init__(self, client: Client, connections: Sequence[Connection], pid: int) -> None:
        self._client = client
        self._connections = connections
        self._pid = pid

    def batches(self, tasks: int, **fields: object) -> list[bytes]:
        """Prepare the requests that submit so many tasks in batches."""
        return [
            self._post(
                "/tasks/batch", {"agentId": "x", "tasks": [task(n, **fields) for n in numbers]}
            )
            for start in range(0, tasks, BATCH)
            if (numbers := range(start, min(start + BATCH, tasks)))
        ]

    def singles(self, tasks: int, **fields: object) -> list[bytes]:
        """Prepare the requests that submit so many tasks one by one."""
        return [self._post("/tasks", task(number, **fields)) for number in range(tasks)]

    async def progress(self) -> Progress:
        """Ask how far the service is."""
        _, body = await self._connections[0].request(self._client.head("GET", "/scheduler/stats"))
        stats = msgspec.json.decode(body, type=_Stats)
        return Progress(
            time.perf_counter(),
            stats.queue.total_queued,
            stats.metrics.tasks_completed,
            sum(cpu_seconds(pid) for pid in family(self._pid)),
        )

    async def send(self, requests: Sequence[bytes]) -> None:
        """Send all requests, in their order as far as connections are free."""
        left = iter(requests)
        await asyncio.gather(*(_send(connection, left) for connection in self._connections[1:]))

    async def run(self, requests: Sequence[bytes], tasks: int) -> Measured:
        """Submit tasks, and wait until all of them are done."""
        before = await self.progress()
        await self.send(requests)
        submitted_at = time.perf_counter()
        after = await self.wait_for(before.completed + tasks)
        return Measured(
            tasks / (submitted_at - before.at),
            tasks / (after.at - before.at),
            _cpu_us(before, after, tasks),
        )

    async def submit(self, requests: Sequence[bytes]) -> Measured:
        """Submit tasks that are not due yet, so that nothing but their submission is measured."""
        before = await self.progress()
        await self.send(requests)
        after = await self.progress()
        rate = len(requests) / (after.at - before.at)
        return Measured(rate, 0.0, _cpu_us(before, after, len(requests)))

    async def wait_for(self, completed: int) -> Progress:
        """Wait until so many tasks are done, and return the moment at which they were.

        A look costs as much as eight tasks, so there are few of them until nearly all is done.
        """
        first = progress = await self.progress()
        while progress.completed < completed:
            seconds, done = progress.at - first.at, progress.completed - first.completed
            if seconds > MOST_SECONDS:
                problem = f"{progress.completed} of {completed} done in {MOST_SECONDS:.0f} s"
                raise DidNotFinishError(problem)
            half_of_the_rest = (completed - progress.completed) * seconds / max(done, 1) / 2
            await asyncio.sleep(min(max(half_of_the_rest, LOOK_SECONDS), MOST_LOOK_SECONDS))
            progress = await self.progress()
        return progress

    async def preload(self, tasks: int, *, seconds: float, **fields: object) -> int:
        """Submit so many tasks, or as many as this time allows, and return how many wait."""
        requests = self.batches(PREPARED_BATCHES * BATCH, **fields)
        ends_at = time.perf_counter() + seconds
        while (progress := await self.progress()).queued < tasks and progress.at < ends_at:
            missing = (tasks - progress.queued + BATCH - 1) // BATCH
            await self.send(requests[:missing])
        return progress.queued

    async def steady(self, queued: int, seconds: float) -> Measured:
        """Keep so many tasks waiting for a while, and count what is done meanwhile.

        What is on its way counts as waiting, less what starts before it arrives: so much is added
        as lets the queue neither shrink nor grow.
        """
        requests = cycle(self.batches(PREPARED_BATCHES * BATCH))
        free, waiting = list(self._connections[1:]), list[int]()
        most = len(free) * BATCH
        added = 0.0

        async def send(connection: Connection) -> None:
            await _send(connection, islice(requests, 1))
            free.append(connection)

        before = progress = await self.progress()
        async with asyncio.TaskGroup() as sending:
            while progress.at < before.at + seconds:
                missing = queued - progress.queued
                added = min(max(0.0, added + missing * CORRECTION), most)
                under_way = most - len(free) * BATCH
                for _ in range(min(int(missing + added - under_way) // BATCH, len(free))):
                    sending.create_task(send(free.pop()))
                await asyncio.sleep(LOOK_SECONDS)
                progress = await self.progress()
                waiting.append(progress.queued)
        done = progress.completed - before.completed
        rate = done / (progress.at - before.at)
        return Measured(0.0, rate, _cpu_us(before, progress, done), statistics.fmean(waiting))

    async def paced(self, rate: int, seconds: float) -> Measured:
        """Submit so many tasks a second for a while, and count what is done meanwhile."""
        requests = cycle(self.batches(PREPARED_BATCHES * BATCH))
        loop, pause = asyncio.get_running_loop(), BATCH / rate
        before = await self.progress()
        begun = loop.time()
        for number in range(int(seconds / pause)):
            await asyncio.sleep(max(0.0, begun + number * pause - loop.time()))
            await self.send([next(requests)])
        after = await self.progress()
        done = after.completed - before.completed
        return Measured(0.0, done / (after.at - before.at), _cpu_us(before, after, done))

    async def start(self) -> Start:
        """Run one task on a service that has nothing else to do, and return how it started."""
        request = self._post("/tasks", task(0, target="clock"))
        sent_at = time.time()
        _, body = await self._connections[0].request(request)
        seen = msgspec.json.decode(body, type=_Seen)
        head = self._client.head("GET", f"/tasks/{seen.task_id}")
        # Not at once: a question beside the work would be paid for by the work.
        while seen.state != "done":
            await asyncio.sleep(LOOK_SECONDS)
            _, body = await self._connections[0].request(head)
            seen = msgspec.json.decode(body, type=_Seen)
        return seen.start(sent_at)

    def _post(self, path: str, body: object) -> bytes:
        content = msgspec.json.encode(body)
        return self._client.head("POST", path, len(content)) + content


@asynccontextmanager
async def feeding(service: ServiceProcess, *, connections: int) -> AsyncIterator[Feed]:
    """Connect to a service, with one connection more for questions."""
    place = urlsplit(service.address)
    client = Client(place.hostname or "", place.port or 0)
    opened = [await client.connect() for _ in range(connections + 1)]
    try:
        yield Feed(client, opened, service.pid)
    finally:
        for connection in opened:
            connection.close()


async def _send(connection: Connection, requests: Iterator[bytes]) -> None:
    for request in requests:
        status, answer = await connection.request(request)
        if status != ACCEPTED:
            problem = f"a submit was answered with {status}: {answer[:200]!r}"
            raise RuntimeError(problem)


def _cpu_us(before: Progress, after: Progress, tasks: int) -> float:
    return (after.cpu_seconds - before.cpu_seconds) / max(1, tasks) * 1e6


def cpu_seconds(pid: int, *, has_ended: bool = False) -> float:
    """Return the time of the processor that a process has used; 0 where nobody tells.

    With `has_ended` it is the time of those that it has started and that have ended.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # The name of the program stands in parentheses, and may contain anything.
    fields = status.rpartition(")")[2].split()
    user, system = fields[13:15] if has_ended else fields[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
