"""What is measured of a service, each with everything warmed up first and as the best of some runs.

A neighbour on the machine can only make a figure worse, so the best is nearest to the cost.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import uvloop

from benchmarks.engine_client import Feed, Measured, Start, feeding
from benchmarks.options import ROOT
from executors.endpoint import free_port
from service.support import DidNotHappenError, ServiceProcess, wait_until

CONFIGURATION = ROOT / "benchmarks/engine.toml"
BATCH_CONNECTIONS = 8
SINGLE_CONNECTIONS = 64
QUEUE_CONNECTIONS = 32
"""With 8, less arrives between two plans than is in one, and no queue can be held."""

PARKED = "session:parked"
NOT_DUE_YET = "2100-01-01T00:00:00Z"
MOST_PRELOAD_SECONDS = 400.0
MOST_READY_SECONDS = 120.0

Result = TypeVar("Result")


class Sizes(NamedTuple):
    """How much is measured."""

    tasks: int
    runs: int
    warm_up: int
    starts: int
    window_seconds: float


class Starts(NamedTuple):
    """The median and the 99th of a hundred, in milliseconds."""

    p50_ms: float
    p99_ms: float


@contextmanager
def serving(
    folder: Path, *arguments: str, settings: Path = CONFIGURATION
) -> Iterator[ServiceProcess]:
    """Run the service, from when it is ready; with a long queue that may be a while."""
    given = ("--data", str(folder / "data"), "--config", str(settings), *arguments)
    service = ServiceProcess(folder, *given, port=free_port())
    service.spawn()
    try:
        wait_until(lambda: _is_up(service), seconds=MOST_READY_SECONDS, what=service.output)
        yield service
    finally:
        service.kill()


def _is_up(service: ServiceProcess) -> bool:
    if service.has_ended():
        raise DidNotHappenError(service.output())
    return service.is_ready()


def through_batches(service: ServiceProcess, sizes: Sizes) -> Measured:
    """Submit all tasks in batches, and see all of them done."""

    async def work(feed: Feed) -> Measured:
        await feed.run(feed.batches(sizes.warm_up), sizes.warm_up)
        requests = feed.batches(sizes.tasks)
        return _best([await feed.run(requests, sizes.tasks) for _ in range(sizes.runs)])

    return fed(service, BATCH_CONNECTIONS, work)


def through_singles(service: ServiceProcess, sizes: Sizes) -> Measured:
    """Submit all tasks one by one, and see all of them done."""

    async def work(feed: Feed) -> Measured:
        await feed.run(feed.singles(sizes.warm_up), sizes.warm_up)
        requests = feed.singles(sizes.tasks)
        return _best([await feed.run(requests, sizes.tasks) for _ in range(sizes.runs)])

    return fed(service, SINGLE_CONNECTIONS, work)


def submits(service: ServiceProcess, sizes: Sizes) -> Measured:
    """Submit tasks one by one that are not due yet: what is measured is their way to the disk."""

    async def work(feed: Feed) -> Measured:
        await feed.submit(feed.singles(sizes.warm_up, notBefore=NOT_DUE_YET))
        requests = feed.singles(sizes.tasks, notBefore=NOT_DUE_YET)
        return _best([await feed.submit(requests) for _ in range(sizes.runs)])

    return fed(service, SINGLE_CONNECTIONS, work)


def starts(service: ServiceProcess, sizes: Sizes) -> tuple[Starts, Starts]:
    """Start one task at a time; return how the client sees it, and the service's own stamps."""

    async def work(feed: Feed) -> list[Start]:
        for _ in range(sizes.starts // 10):
            await feed.start()
        return [await feed.start() for _ in range(sizes.starts)]

    runs = [fed(service, 0, work) for _ in range(sizes.runs)]
    seen = [_starts([start.seen_ms for start in run]) for run in runs]
    stamped = [_starts([start.stamped_ms for start in run]) for run in runs]
    return min(seen), min(stamped)


def park(service: ServiceProcess, tasks: int) -> int:
    """Let so many tasks wait behind a budget that is used up, and return how many do."""

    async def work(feed: Feed) -> int:
        await feed.run(feed.batches(1, scopes=[PARKED]), 1)
        return await feed.preload(tasks, seconds=MOST_PRELOAD_SECONDS, scopes=[PARKED])

    return fed(service, BATCH_CONNECTIONS, work)


def fill(folder: Path, queued: int) -> int:
    """Fill the queue of a service whose projects are paused, and return how many tasks wait.

    Each of them can run as soon as a service is started over them whose projects are not paused.
    """
    paused = folder / "paused.toml"
    settings = CONFIGURATION.read_text()
    paused.write_text(re.sub(r"(?m)^(\[projects\..*\])$", r'\1\nstatus = "paused"', settings))
    with serving(folder, settings=paused) as service:
        return fed(
            service,
            BATCH_CONNECTIONS,
            lambda feed: feed.preload(queued, seconds=MOST_PRELOAD_SECONDS),
        )


def with_queue(folder: Path, queued: int, sizes: Sizes) -> Measured:
    """Count what is done while so many tasks are kept waiting, all of which can run.

    The queue is that of the run in which it was furthest from this number.
    """

    async def work(feed: Feed) -> Measured:
        seconds = sizes.window_seconds
        await feed.steady(queued, seconds)
        runs = [await feed.steady(queued, seconds) for _ in range(sizes.runs)]
        worst = max((run.queued for run in runs), key=lambda found: abs(found - queued))
        return _best(runs)._replace(queued=worst)

    with serving(folder) as service:
        return fed(service, QUEUE_CONNECTIONS, work)


def fed(
    service: ServiceProcess, connections: int, work: Callable[[Feed], Awaitable[Result]]
) -> Result:
    """Do something with connections to a service, on an event loop of its own."""

    async def connected() -> Result:
        async with feeding(service, connections=connections) as feed:
            return await work(feed)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(connected())


def _best(runs: list[Measured]) -> Measured:
    submitted, done, cpu_us, _ = zip(*runs, strict=True)
    return Measured(max(submitted), max(done), min(cpu_us))


def _starts(times_ms: list[float]) -> Starts:
    return Starts(statistics.median(times_ms), statistics.quantiles(times_ms, n=100)[98])
