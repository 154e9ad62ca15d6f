"""A fleet of pull workers at one service: what a claim takes, and what workers cost who only wait.

Ten thousand machines are simulated by one process. A simulated worker has what the service sees of
a real one: a connection of its own, which stays open, and an id with a lease. It claims, waits,
says at once that its task is done, and claims again; or keeps its task and sends heartbeats. It has
neither a process nor an HTTP library of its own, so 10,000 of them take 10,000 descriptors here and
as many at the service, and some of one processor. All requests are real HTTP on 127.0.0.1.

The time of a claim counts from when there was both, a worker that asked and a task that was sent,
to when the worker has its task. So it is the whole way: submit, decision, assignment, wake-up.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.engine_client import cpu_seconds
from benchmarks.engine_measures import serving
from benchmarks.http_load import Client
from benchmarks.options import Options
from benchmarks.report import Row, table
from service.support import ServiceProcess

MOST_CLAIM_MS = 250.0
CLAIMS_A_SECOND = 1_000
LEAST_RATE = 0.98 * CLAIMS_A_SECOND
MOST_GROWTH = 1.5
"""How many times as much one of 10,000 workers, or one of their claims, may cost as of 1,000."""

AGENTS = 10
BATCH = 50
SUBMITTERS = 8
JOINING = 200
"""How many workers join at a time."""

WAIT_SECONDS = 20.0
BEAT_SECONDS = 10.0
MOST_SECONDS = 120.0
OK, ACCEPTED = 200, 202
LEAST_FREE_FILES = 500

SETTINGS = """
[scheduler]
max_queue_size = 2_000_000
max_per_agent = 2_000_000
max_inflight = 20_000
max_per_agent_inflight = 20_000
task_retention_seconds = 600
"""
AGENT = """
[agents.{name}]
target = "pull"
capacity = 20_000
"""


class Sizes(NamedTuple):
    """How many workers there are, and how long each thing is measured."""

    fleets: tuple[int, ...]
    seconds: float
    idle_seconds: float
    claims: int


# Idle for as long as a claim waits: so each worker claims once more meanwhile.
FULL = Sizes((100, 1_000, 10_000), seconds=10.0, idle_seconds=WAIT_SECONDS, claims=CLAIMS_A_SECOND)
QUICK = Sizes((10, 40), seconds=0.5, idle_seconds=0.5, claims=100)


class Used(NamedTuple):
    """The processor's time of the service and of its writer, in seconds."""

    service: float
    writer: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.service + self.writer


class Measured(NamedTuple):
    """All figures of one fleet; processors' time is in seconds for each second."""

    workers: int
    join_seconds: float
    kib: int
    idle: Used
    claims: Used
    claim_ms: Sequence[float]
    claimed_a_second: float
    busy: Used
    beat_ms: Sequence[float]

    @property
    def claim_cost(self) -> float:
        """The seconds of processors for each claim: as much in a larger fleet, if it is linear."""
        return self.claims.total / self.claimed_a_second

    def percentile(self, hundredths: int) -> float:
        """Return how many milliseconds so many of a hundred claims took at most."""
        return statistics.quantiles(self.claim_ms, n=100)[hundredths - 1]


class _Running(msgspec.Struct, rename="camel"):
    task_id: str
    attempt: int
    params: dict[str, float]


class _Claimed(msgspec.Struct, rename="camel"):
    worker_id: str
    tasks: list[_Running]


_CLAIMED = msgspec.json.Decoder(_Claimed)
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")
_PRIVATE = re.compile(r"Private_(?:Clean|Dirty): +(\d+) kB")
_NO_TASKS = b'"tasks":[]'


class SimulatedWorker(asyncio.Protocol):
    """One worker with a connection of its own and one task at a time."""

    __slots__ = ("_buffer", "_fleet", "_path", "_sent_at", "_task", "_transport", "_what", "id")

    def __init__(self, fleet: Fleet, agent_id: str) -> None:
        self.id = ""
        self._fleet = fleet
        self._path = f"/agents/{agent_id}"
        self._buffer = b""
        self._what = ""
        self._sent_at = 0.0
        self._task: _Running | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join as soon as there is a connection."""
        self._transport = cast("asyncio.Transport", transport)
        self._send("join", f"{self._path}/claim", b'{"capacity":1}')

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that a connection is gone which should not be."""
        if not self._fleet.is_over:
            self._fleet.fail(f"a worker lost its connection: {exc}")

    def data_received(self, data: bytes) -> None:
        """Take an answer, once all of it is there."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        length = _LENGTH.search(self._buffer, 0, end) if end >= 0 else None
        if length is None or len(self._buffer) < end + 4 + int(length[1]):
            return
        status, body, self._buffer = int(self._buffer[9:12]), self._buffer[end + 4 :], b""
        if status != OK:
            self._fleet.fail(f"{self._what} was answered with {status}: {body[:300]!r}")
        elif self._what in ("join", "claim"):
            self._take(body)
        elif self._what == "beat":
            self._fleet.beat_ms.append((time.perf_counter() - self._sent_at) * 1e3)
        else:
            self._task = None
            self._fleet.done += 1
            self.claim()

    def _take(self, body: bytes) -> None:
        if self._what == "claim" and _NO_TASKS in body:
            self.claim()
            return
        claimed = _CLAIMED.decode(body)
        if self._what == "join":
            self.id = claimed.worker_id
            # All claims at once would come back all at once; those of a real fleet are spread.
            self.claim(self._fleet.joined(self) * WAIT_SECONDS)
            return
        (self._task,) = claimed.tasks
        now = time.perf_counter()
        self._fleet.claim_ms.append((now - max(self._sent_at, self._task.params["at"])) * 1e3)
        if self._fleet.is_busy:
            self._fleet.busy.append(self)
        else:
            self.complete()

    def claim(self, wait_seconds: float = WAIT_SECONDS) -> None:
        """Ask for a task, and wait for it."""
        body = b'{"workerId":"%b","capacity":1,"waitSeconds":%f}' % (self.id.encode(), wait_seconds)
        self._send("claim", f"{self._path}/claim", body)

    def complete(self) -> None:
        """Say that the task is done."""
        assert self._task is not None
        body = {"workerId": self.id, "attempt": self._task.attempt, "usage": {"tokens": 1}}
        path = f"/tasks/{self._task.task_id}/complete"
        self._send("complete", path, msgspec.json.encode(body))

    def beat(self) -> None:
        """Renew the lease."""
        assert self._task is not None
        running = [{"taskId": self._task.task_id, "attempt": self._task.attempt}]
        body = {"workerId": self.id, "running": running}
        self._send("beat", f"{self._path}/heartbeat", msgspec.json.encode(body))

    def close(self) -> None:
        """Go without a word."""
        if self._transport is not None:
            self._transport.close()

    def _send(self, what: str, path: str, body: bytes) -> None:
        assert self._transport is not None
        self._what, self._sent_at = what, time.perf_counter()
        self._transport.write(self._fleet.client.head("POST", path, len(body)) + body)


class Fleet:
    """Simulated workers of one service, and what submits tasks for them."""

    def __init__(self, service: ServiceProcess) -> None:
        place = urlsplit(service.address)
        self.host, self.port = place.hostname or "", place.port or 0
        self.client = Client(self.host, self.port)
        self.workers: list[SimulatedWorker] = []
        self.busy: list[SimulatedWorker] = []
        self.claim_ms: list[float] = []
        self.beat_ms: list[float] = []
        self.done = 0
        self.is_busy = self.is_over = False
        self._count = 0
        self._service = service
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joining = asyncio.Semaphore(JOINING)

    def fail(self, problem: str) -> None:
        """End the measurement: what follows would be no figure."""
        if not self._failed.done():
            self._failed.set_exception(RuntimeError(problem))

    def joined(self, worker: SimulatedWorker) -> float:
        """Count a worker that has a name, and return which part of them all has one."""
        self.workers.append(worker)
        self._joining.release()
        return len(self.workers) / self._count

    async def join(self, count: int) -> float:
        """Have so many workers join, and return how many seconds that took."""
        loop, began_at = asyncio.get_running_loop(), time.perf_counter()
        self._count = count
        for number in range(count):
            await self._joining.acquire()
            worker = SimulatedWorker(self, f"fleet-{number % AGENTS}")
            await loop.create_connection(partial(_this, worker), self.host, self.port)
            self.check()
        await self.until(lambda: len(self.workers) == count)
        return time.perf_counter() - began_at

    async def submit(self, tasks: int, seconds: float) -> None:
        """Submit so many tasks in batches, evenly over some time."""
        connections = [await self.client.connect() for _ in range(SUBMITTERS)]
        sending: set[asyncio.Task[None]] = set()
        free = asyncio.Queue[int]()
        for number in range(SUBMITTERS):
            free.put_nowait(number)
        loop = asyncio.get_running_loop()
        began_at = loop.time()

        async def send(place: int, first: int) -> None:
            status, answer = await connections[place].request(
                *self._batch(range(first, min(first + BATCH, tasks)))
            )
            if status != ACCEPTED:
                self.fail(f"a submit was answered with {status}: {answer[:300]!r}")
            free.put_nowait(place)

        for first in range(0, tasks, BATCH):
            await asyncio.sleep(max(0.0, began_at + seconds * first / tasks - loop.time()))
            sent = asyncio.create_task(send(await free.get(), first))
            sending.add(sent)
            sent.add_done_callback(sending.discard)
            self.check()
        await asyncio.gather(*sending)
        for connection in connections:
            connection.close()

    def _batch(self, numbers: range) -> tuple[bytes, bytes]:
        at = time.perf_counter()
        tasks = [
            {"agentId": f"fleet-{number % AGENTS}", "action": "work", "params": {"at": at}}
            for number in numbers
        ]
        body = msgspec.json.encode({"agentId": "x", "tasks": tasks})
        return self.client.head("POST", "/tasks/batch", len(body)), body

    async def beat(self, seconds: float) -> None:
        """Have every busy worker send heartbeats, spread evenly as those of a real fleet are."""
        loop = asyncio.get_running_loop()
        began_at, sent, workers = loop.time(), 0, self.busy
        while (passed := loop.time() - began_at) < seconds:
            due = int(passed / BEAT_SECONDS * len(workers))
            for number in range(sent, due):
                workers[number % len(workers)].beat()
            sent = max(sent, due)
            self.check()
            await asyncio.sleep(0.005)
        await self.until(lambda: len(self.beat_ms) >= sent)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so, within bounds."""
        ends_at = time.perf_counter() + MOST_SECONDS
        while not condition():
            self.check()
            if time.perf_counter() > ends_at:
                found = f"{len(self.workers)} workers, {len(self.busy)} busy, {self.done} done"
                problem = f"not within {MOST_SECONDS:.0f} seconds: {found}"
                raise RuntimeError(problem)
            await asyncio.sleep(0.005)

    def check(self) -> None:
        """Raise what has gone wrong."""
        if self._failed.done():
            self._failed.result()

    def used(self) -> Used:
        """Return what the service has used of the processors."""
        return Used(cpu_seconds(self._service.pid), cpu_seconds(self._service.writer_pid))

    def close(self) -> None:
        """Close all connections."""
        self.is_over = True
        for worker in self.workers:
            worker.close()


def _this(worker: SimulatedWorker) -> SimulatedWorker:
    return worker


async def measure(service: ServiceProcess, workers: int, sizes: Sizes) -> Measured:
    """Measure one fleet: while it only waits, at many claims a second, and while all are busy."""
    fleet = Fleet(service)
    try:
        before_kib = _kib(service)
        join_seconds = await fleet.join(workers)
        idle = await _using(fleet, asyncio.sleep(sizes.idle_seconds), sizes.idle_seconds)
        kib = _kib(service) - before_kib
        tasks = int(sizes.claims * sizes.seconds)
        await _claims(fleet, sizes.claims, 1.0)
        began_at = time.perf_counter()
        claims = await _using(fleet, _claims(fleet, tasks, sizes.seconds), sizes.seconds)
        rate = tasks / (time.perf_counter() - began_at)
        claim_ms, fleet.claim_ms, fleet.is_busy = fleet.claim_ms, [], True
        await fleet.submit(workers, workers / sizes.claims)
        await fleet.until(lambda: len(fleet.busy) == workers)
        busy = await _using(fleet, fleet.beat(sizes.seconds), sizes.seconds)
    finally:
        fleet.close()
    return Measured(
        workers=workers,
        join_seconds=join_seconds,
        kib=kib,
        idle=idle,
        claims=claims,
        claim_ms=claim_ms,
        claimed_a_second=rate,
        busy=busy,
        beat_ms=fleet.beat_ms,
    )


async def _claims(fleet: Fleet, tasks: int, seconds: float) -> None:
    """Submit tasks over some time, and wait until the workers have done all of them."""
    fleet.done, fleet.claim_ms = 0, []
    await fleet.submit(tasks, seconds)
    await fleet.until(lambda: fleet.done == tasks)


async def _using(fleet: Fleet, work: Awaitable[None], seconds: float) -> Used:
    """Return what the service uses of the processors meanwhile, in each second."""
    before = fleet.used()
    await work
    after = fleet.used()
    pairs = zip(after, before, strict=True)
    return Used(*((later - earlier) / seconds for later, earlier in pairs))


def _kib(service: ServiceProcess) -> int:
    """Return the memory of the service and of its writer, without what they share with others."""
    found = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in service.pids]
    return sum(int(size) for text in found for size in _PRIVATE.findall(text))


def run(options: Options) -> bool:
    """Measure every fleet, print it, and tell whether all targets were met."""
    sizes = QUICK if options.quick else FULL
    _raise_open_files(max(sizes.fleets))
    before = os.getloadavg()[0]
    found = []
    for workers in sizes.fleets:
        with (
            tempfile.TemporaryDirectory(prefix="hg-") as name,
            _serving(Path(name)) as service,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            found.append(runner.run(measure(service, workers, sizes)))
    after = os.getloadavg()[0]
    cores = os.cpu_count()
    print(f"\nworkers: {cores} cores, shared with the simulated fleet;", end=" ")
    print(f"load average {before:.2f} before the run, {after:.2f} after it")
    _show(found, sizes)
    met = _judge(found)
    if options.quick:
        print("  a quick run shows that it works, and judges nothing")
    return options.quick or met


@contextmanager
def _serving(folder: Path) -> Iterator[ServiceProcess]:
    settings = folder / "headgate.toml"
    agents = [AGENT.format(name=f"fleet-{number}") for number in range(AGENTS)]
    settings.write_text(SETTINGS + "".join(agents))
    with serving(folder, settings=settings) as service:
        yield service


def _raise_open_files(workers: int) -> None:
    """Let this process have a descriptor for each worker, or say that it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = workers + LEAST_FREE_FILES
    if hard not in (-1, resource.RLIM_INFINITY) and hard < needed:
        problem = f"{workers:,} workers need {needed:,} open files, and {hard:,} are allowed"
        raise RuntimeError(problem)
    if soft not in (-1, resource.RLIM_INFINITY) and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _show(found: Sequence[Measured], sizes: Sizes) -> None:
    header: Row = ("workers", "joined a second", "KiB each", "idle CPU %: service", "writer", "all")
    table(
        "workers that wait: memory and processors of the service",
        header,
        [
            (
                f"{one.workers:,}",
                f"{one.workers / one.join_seconds:,.0f}",
                f"{one.kib / one.workers:.1f}",
                *_percent(one.idle),
            )
            for one in found
        ],
    )
    table(
        f"claims at {sizes.claims:,} tasks a second, from task sent to task claimed",
        ("workers", "p50 ms", "p99 ms", "max ms", "a second", "CPU %: service", "writer", "all"),
        [
            (
                f"{one.workers:,}",
                f"{one.percentile(50):.1f}",
                f"{one.percentile(99):.1f}",
                f"{max(one.claim_ms):.1f}",
                f"{one.claimed_a_second:,.0f}",
                *_percent(one.claims),
            )
            for one in found
        ],
    )
    table(
        f"busy workers, a heartbeat in {BEAT_SECONDS:.0f} seconds each",
        ("workers", "beats a second", "p50 ms", "max ms", "CPU %: service", "writer", "all"),
        [
            (
                f"{one.workers:,}",
                f"{len(one.beat_ms) / sizes.seconds:,.0f}",
                f"{statistics.median(one.beat_ms or [0.0]):.1f}",
                f"{max(one.beat_ms, default=0.0):.1f}",
                *_percent(one.busy),
            )
            for one in found
        ],
    )


def _percent(used: Used) -> tuple[str, str, str]:
    return tuple(f"{100 * each:.1f}" for each in (*used, used.total))  # type: ignore[return-value]


def _judge(found: Sequence[Measured]) -> bool:
    """Print each target with what was found, and tell whether all were met."""
    last, before = found[-1], found[-2]
    p99_ms = max(one.percentile(99) for one in found)
    rate = min(one.claimed_a_second for one in found)
    growth = {
        "memory of a worker": (last.kib / last.workers) / (before.kib / before.workers),
        "processors of a worker that waits": _growth(last.idle, before.idle, last, before),
        "processors of a busy worker": _growth(last.busy, before.busy, last, before),
        "processors of a claim": last.claim_cost / max(before.claim_cost, 1e-9),
    }
    rows: list[Row] = [
        (
            "p99 of a claim, ms",
            f"{p99_ms:.1f}",
            f"at most {MOST_CLAIM_MS:g}",
            _yes(p99_ms <= MOST_CLAIM_MS),
        ),
        (
            "claims a second",
            f"{rate:,.0f}",
            f"at least {LEAST_RATE:,.0f}",
            _yes(rate >= LEAST_RATE),
        ),
    ]
    for what, times in growth.items():
        of = f"{what}, {last.workers:,} to {before.workers:,}"
        rows.append((of, f"{times:.2f}", f"at most {MOST_GROWTH:g}", _yes(times <= MOST_GROWTH)))
    table("targets", ("what", "found", "wanted", "met"), rows)
    print(f"  linear where the last ones are at most {MOST_GROWTH:g}")
    return all(row[-1] == "yes" for row in rows)


def _growth(used: Used, used_before: Used, last: Measured, before: Measured) -> float:
    """Return how many times as much one of the larger fleet costs as one of the smaller."""
    each = used.total / last.workers
    return each / max(used_before.total / before.workers, 1e-9)


def _yes(is_met: object) -> str:
    return "yes" if is_met else "no"
