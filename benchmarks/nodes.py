"""Several nodes on one PostgreSQL: what a second and a fourth node gain, and what bounds them.

Every node is `headgate up` in a process of its own, and the load is spread over all of them. One
of them dispatches. On a machine with few cores they compete with each other, with the server and
with the load. So beside each rate stands the processor's time that a task or a call costs in each
role, and the time for which it keeps the one lock of the store. From these follows what nodes with
cores of their own could do: the slowest of what can only be done in one place is the ceiling. Where
each node is a domain of its own, nothing is done in one place but what the server does.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg
import uvloop

from benchmarks.engine_client import (
    BATCH_CONNECTIONS,
    SINGLE_CONNECTIONS,
    Feed,
    cpu_seconds,
)
from benchmarks.engine_measures import CONFIGURATION, NOT_DUE_YET, serving
from benchmarks.gateway import CONNECTIONS, HEADERS, running_upstream
from benchmarks.gateway_load import Load, put
from benchmarks.gateway_peers import Gateway
from benchmarks.gateway_upstream import MODEL
from benchmarks.http_load import Client
from benchmarks.nodes_lock import (
    AWAY_PLAN,
    AWAY_SETTLE,
    AWAY_SUBMIT,
    COLLECT,
    NEWS,
    PLAN,
    SETTLE,
    SUBMIT,
    LockTimes,
    lock_times,
)
from benchmarks.options import Options
from benchmarks.report import Row, table
from budgets.servers import PostgresServer, running_postgres
from service.support import ServiceProcess, family, wait_until

DOMAINS = 2
CORES = 8
"""What two nodes, their writers, the server and the load need to be beside each other."""

LEAST_DONE = 4_000
LEAST_GROWTH = 1.6
MOST_START_MS = 10.0
MOST_SHARE_ERROR = 0.02

SETTINGS = """
[projects.heavy]
credit_weight = 2.0

[projects.light]
credit_weight = 1.0

[projects.bench]

[upstreams.mock]
kind = "openai"
base_url = "http://127.0.0.1:{port}/v1"
key_env = "BENCHMARK_KEY"
models = ["{model}"]
max_inflight = 2_000
"""
HEAVY_SHARE = 2 / 3
# Those that do not dispatch have room for one more, so that a task alone runs there.
ROOM, MORE_ROOM = "worker_count = 2_000", "worker_count = 2_001"
STARTED = "SELECT project_id, SUM(started), SUM(queued) FROM lanes GROUP BY project_id"
READY_SECONDS = 60.0
LOOK_SECONDS = 0.005


class Sizes(NamedTuple):
    """How much is measured; `due_seconds` is longer than it takes to submit the tasks."""

    counts: tuple[int, ...]
    tasks: int
    runs: int
    starts: int
    call_seconds: float
    due_seconds: float


FULL = Sizes((1, 2, 4), tasks=8_000, runs=3, starts=100, call_seconds=3.0, due_seconds=5.0)
QUICK = Sizes((1, 2), tasks=200, runs=1, starts=5, call_seconds=0.3, due_seconds=1.0)


class Roles(NamedTuple):
    """The processor's time by role, in seconds, or in microseconds for each task."""

    nodes: float
    dispatcher: float
    writers: float
    server: float

    def per(self, before: Roles, count: int) -> Roles:
        """Return microseconds for each of so many, since another moment."""
        pairs = zip(self, before, strict=True)
        return Roles(*((after - earlier) / max(1, count) * 1e6 for after, earlier in pairs))


class Rate(NamedTuple):
    """How many a second, and what each of them costs."""

    rate: float
    cost: Roles

    def row(self, what: str, before: float) -> Row:
        """Write the line, with the ratio to what fewer nodes did."""
        ratio = f"{self.rate / before:.2f}" if before else ""
        cells = [f"{each:.0f}" for each in (*self.cost, sum(self.cost))]
        return what, f"{self.rate:,.0f}", ratio, *cells


class Measured(NamedTuple):
    """All figures of one number of nodes."""

    nodes: int
    submits: Rate
    done: Rate
    calls: Rate
    share_error: float
    start_ms: float


Work = Callable[[], Awaitable[float]]
"""Does something that is prepared, and returns how many were done a second."""

RATES_HEADER = (
    *("nodes", "a second", "of one", "CPU us: nodes", "dispatcher", "writers", "PostgreSQL"),
    "all",
)


class Fleet:
    """Nodes on one database, of which the first dispatches, or each its own domain."""

    def __init__(
        self,
        nodes: Sequence[ServiceProcess],
        server: PostgresServer,
        url: str,
        *,
        has_domains: bool = False,
    ) -> None:
        self.nodes = nodes
        self.url = url
        self.has_domains = has_domains
        self._server = server

    @property
    def domains(self) -> list[Fleet]:
        """Each domain by itself."""
        return [Fleet([node], self._server, self.url) for node in self.nodes]

    def roles(self) -> Roles:
        """Return what each role has used of the processor."""
        dispatchers = len(self.nodes) if self.has_domains else 1
        server = self._server.pid
        return Roles(
            sum(cpu_seconds(node.pid) for node in self.nodes[dispatchers:]),
            sum(cpu_seconds(node.pid) for node in self.nodes[:dispatchers]),
            sum(cpu_seconds(node.writer_pid) for node in self.nodes),
            cpu_seconds(server, has_ended=True) + sum(map(cpu_seconds, family(server))),
        )

    @asynccontextmanager
    async def feeding(self, connections: int) -> AsyncIterator[Feed]:
        """Connect to all nodes in turn, and once more to the last one, for questions."""
        places = [urlsplit(node.address) for node in self.nodes]
        clients = [Client(place.hostname or "", place.port or 0) for place in places]
        chosen = (clients[-1], *islice(cycle(clients), connections))
        opened = [await client.connect() for client in chosen]
        try:
            yield Feed(clients[0], opened, self.nodes[0].pid)
        finally:
            for connection in opened:
                connection.close()

    async def rate(self, count: int, work: Work) -> Rate:
        """Do work for so many tasks, and see what each of them costs."""
        before = self.roles()
        rate = await work()
        return Rate(rate, self.roles().per(before, count))


@contextmanager
def running_fleet(
    count: int, server: PostgresServer, upstream_port: int, *, has_domains: bool = False
) -> Iterator[Fleet]:
    """Run nodes on a new database, from when all of them are ready."""
    url = server.new_database()
    settings = CONFIGURATION.read_text() + SETTINGS.format(port=upstream_port, model=MODEL)
    os.environ["BENCHMARK_KEY"] = "sk-benchmark"
    with ExitStack() as stack:
        nodes: list[ServiceProcess] = []
        for number in range(count):
            folder = stack.enter_context(_folder())
            own = f'\n[store]\ndomain = "d{number}"\n' if has_domains else ""
            written = folder / "headgate.toml"
            written.write_text((settings.replace(ROOM, MORE_ROOM) if nodes else settings) + own)
            node = stack.enter_context(serving(folder, "--store", url, settings=written))
            if has_domains or not nodes:
                wait_until(partial(_dispatches, node), seconds=READY_SECONDS)
            nodes.append(node)
        yield Fleet(nodes, server, url, has_domains=has_domains)


def _dispatches(node: ServiceProcess) -> bool:
    return bool(node.ask("GET", "/readyz").body["role"] == "dispatcher")


def run(options: Options) -> bool:
    """Measure everything, print it, and tell whether all targets were met."""
    sizes = QUICK if options.quick else FULL
    before = os.getloadavg()[0]
    with running_postgres(is_durable=True) as server, running_upstream() as upstream:
        lock = asyncio.run(
            lock_times(server.new_database(), tasks=sizes.tasks // 8, runs=sizes.runs)
        )
        found = []
        for count in sizes.counts:
            with (
                running_fleet(count, server, upstream.port) as fleet,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                found.append(runner.run(measure(fleet, sizes)))
        with (
            running_fleet(DOMAINS, server, upstream.port, has_domains=True) as fleet,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            domains = runner.run(measure_domains(fleet, sizes))
    after = os.getloadavg()[0]
    print(f"\nnodes: load average {before:.2f} before the run, {after:.2f} after it")
    _show(found, domains, sizes)
    lock.show()
    met = _judge(found, lock)
    if options.quick:
        print("  a quick run shows that it works, and judges nothing")
    return options.quick or met


async def measure(fleet: Fleet, sizes: Sizes) -> Measured:
    """Measure everything of some nodes; shares come first, while no project is owed anything."""
    share_error = await _share_error(fleet, sizes)
    async with fleet.feeding(0) as feed:
        starts = [(await feed.start()).seen_ms for _ in range(sizes.starts)]
    async with fleet.feeding(BATCH_CONNECTIONS) as feed:
        work = _done(sizes.tasks, feed)
        done = await _best(sizes, lambda: fleet.rate(sizes.tasks, work))
    calls = await _best(sizes, lambda: _calls(fleet, sizes))
    async with fleet.feeding(SINGLE_CONNECTIONS) as feed:
        more = _submits(sizes.tasks, feed)
        submits = await _best(sizes, lambda: fleet.rate(sizes.tasks, more))
    return Measured(len(fleet.nodes), submits, done, calls, share_error, statistics.median(starts))


async def measure_domains(fleet: Fleet, sizes: Sizes) -> list[Rate]:
    """Measure submits, tasks and calls of domains that are fed at a time."""
    tasks = sizes.tasks // len(fleet.nodes)

    async def rate(connections: int, prepare: Callable[[Feed], Work]) -> Rate:
        async with AsyncExitStack() as stack:
            each = connections // len(fleet.nodes)
            feeds = [await stack.enter_async_context(one.feeding(each)) for one in fleet.domains]
            prepared = [prepare(feed) for feed in feeds]

            async def beside() -> float:
                return sum(await asyncio.gather(*(one() for one in prepared)))

            return await _best(sizes, lambda: fleet.rate(sizes.tasks, beside))

    done = await rate(BATCH_CONNECTIONS, partial(_done, tasks))
    calls = await _best(sizes, lambda: _calls(fleet, sizes))
    return [await rate(SINGLE_CONNECTIONS, partial(_submits, tasks)), done, calls]


async def _best(sizes: Sizes, work: Callable[[], Awaitable[Rate]]) -> Rate:
    """Return the run with the highest rate, and its cost; the first run warms everything up."""
    runs = [await work() for _ in range(sizes.runs + 1)][1:]
    return max(runs, key=lambda run: run.rate)


def _submits(tasks: int, feed: Feed) -> Work:
    requests = feed.singles(tasks, notBefore=NOT_DUE_YET)

    async def work() -> float:
        return (await feed.submit(requests)).submitted

    return work


def _done(tasks: int, feed: Feed) -> Work:
    requests = feed.batches(tasks)

    async def work() -> float:
        return (await feed.run(requests, tasks)).done

    return work


async def _calls(fleet: Fleet, sizes: Sizes) -> Rate:
    """Make calls through all nodes at a time; those of other nodes go on to the dispatcher."""
    count = len(fleet.nodes)
    gateway = Gateway("", 0, headers=HEADERS)
    loads = [
        Load(
            port=urlsplit(node.address).port or 0,
            path=gateway.path,
            headers=dict(gateway.headers),
            body=gateway.body(is_stream=False),
            connections=CONNECTIONS // count,
            seconds=sizes.call_seconds,
            warm_up_seconds=0.0,
        )
        for node in fleet.nodes
    ]
    before = fleet.roles()
    found = await asyncio.gather(*map(put, loads))
    after = fleet.roles()
    for one in found:
        if one.problem:
            raise RuntimeError(one.problem)
    cost = after.per(before, sum(one.all_requests for one in found))
    return Rate(sum(one.rate for one in found), cost)


async def _share_error(fleet: Fleet, sizes: Sizes) -> float:
    """Let tasks of two projects fall due at a time, and see in which proportion they start."""
    due_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + sizes.due_seconds))
    async with fleet.feeding(BATCH_CONNECTIONS) as feed:
        for project in ("heavy", "light"):
            await feed.send(feed.batches(sizes.tasks // 2, projectId=project, notBefore=due_at))
    error = 0.0
    async with await psycopg.AsyncConnection.connect(fleet.url, autocommit=True) as connection:
        while True:
            rows = await (await connection.execute(STARTED)).fetchall()
            found = {project: (started, queued) for project, started, queued in rows}
            (heavy, heavy_left), (light, _) = found["heavy"], found["light"]
            if not heavy_left:
                return error
            # Of a few tasks no share can be told.
            if heavy + light >= sizes.tasks // 10:
                error = abs(float(heavy / (heavy + light)) - HEAVY_SHARE)
            await asyncio.sleep(LOOK_SECONDS)


# What nodes with cores of their own could do, from what each role costs.


class Ceiling(NamedTuple):
    """How many a second at most, and what it is that can do no more."""

    rate: float
    bound_by: str

    def __str__(self) -> str:
        return f"{self.rate:,.0f}, {self.bound_by}"


def ceiling(found: Rate, count: int, lock_us: float, dispatcher_us: float | None = None) -> Ceiling:
    """Return what so many nodes could do; the others share one part of the work, the lock none.

    A writer waits for the server while that works for it.
    """
    places = {
        "the lock": (lock_us, 1),
        "the dispatcher": (dispatcher_us or found.cost.dispatcher, 1),
        "the other nodes": (found.cost.nodes, count - 1),
        "the writers": (found.cost.writers + found.cost.server, count),
    }
    rates = [
        Ceiling(1e6 * processes / us, name)
        for name, (us, processes) in places.items()
        if us > 0 and processes
    ]
    return min(rates)


def submit_lock_us(lock: LockTimes, count: int) -> float:
    """Return how long a submit keeps the lock where all nodes take as many."""
    elsewhere = 1 - 1 / count
    return lock.of(SUBMIT) / count + elsewhere * lock.of(AWAY_SUBMIT, NEWS)


def submit_dispatcher_us(lock: LockTimes, alone: Rate, count: int) -> float:
    """Return what a submit costs the dispatcher, which takes its part and learns of the others.

    On few cores little gathers between two reads, so what it uses here says nothing of that.
    """
    return alone.cost.dispatcher / count + (1 - 1 / count) * lock.news_us


def done_lock_us(lock: LockTimes, count: int) -> float:
    """Return how long a task keeps the lock until it is done, where all nodes run as many."""
    elsewhere = 1 - 1 / count
    ran = lock.of(PLAN, SETTLE) / count
    ran += elsewhere * lock.of(AWAY_PLAN, COLLECT, AWAY_SETTLE, NEWS)
    return submit_lock_us(lock, count) + ran


def _show(found: Sequence[Measured], domains: Sequence[Rate], sizes: Sizes) -> None:
    first = found[0]
    for (title, pick), apart in zip(RATES.items(), domains, strict=True):
        rows = [pick(one).row(f"{one.nodes}", pick(first).rate) for one in found]
        rows.append(apart.row(f"{DOMAINS}, each a domain", pick(first).rate))
        table(f"nodes: {title.format(tasks=sizes.tasks)}", RATES_HEADER, rows)


RATES: dict[str, Callable[[Measured], Rate]] = {
    "{tasks:,} single submits over all nodes": lambda one: one.submits,
    "{tasks:,} no-op tasks from submit to done, in batches over all nodes": lambda one: one.done,
    "calls through the gateway, over all nodes": lambda one: one.calls,
}
CEILINGS_HEADER = ("nodes", "submits a second, at most", "tasks a second to done, at most")
VERDICTS_HEADER = ("target", "measured", "ceiling", "wanted", "met")


def _judge(found: Sequence[Measured], lock: LockTimes) -> bool:
    """Print what could be and what was asked for; with few cores the ceiling is judged."""
    alone = found[0].submits
    submits = [
        ceiling(
            one.submits,
            one.nodes,
            submit_lock_us(lock, one.nodes),
            submit_dispatcher_us(lock, alone, one.nodes),
        )
        for one in found
    ]
    done = [ceiling(one.done, one.nodes, done_lock_us(lock, one.nodes)) for one in found]
    rows: list[Row] = [
        (f"{one.nodes}", str(submit), str(ended))
        for one, submit, ended in zip(found, submits, done, strict=True)
    ]
    table("nodes: with cores of their own, as derived from the costs", CEILINGS_HEADER, rows)
    one, two, *_ = found
    verdicts = [
        Verdict(
            "submits of two nodes, of one",
            two.submits.rate / one.submits.rate,
            LEAST_GROWTH,
            ceiling=submits[1].rate / submits[0].rate,
        ),
        Verdict("tasks done a second, two nodes", two.done.rate, LEAST_DONE, done[1].rate),
        Verdict(
            "tasks done, two nodes of one",
            two.done.rate / one.done.rate,
            1.0,
            ceiling=done[1].rate / done[0].rate,
        ),
        Verdict("start on another node, p50 ms", two.start_ms, MOST_START_MS, is_least=False),
        Verdict(
            "error of a share, of all started",
            max(each.share_error for each in found),
            MOST_SHARE_ERROR,
            is_least=False,
        ),
    ]
    table("nodes: targets", VERDICTS_HEADER, [verdict.row() for verdict in verdicts])
    print(f"  {os.cpu_count()} cores; a ceiling counts where there are fewer than {CORES}")
    return all(verdict.is_met for verdict in verdicts)


class Verdict(NamedTuple):
    """A figure, what is asked of it, and what it could be where it has the cores."""

    what: str
    found: float
    limit: float
    ceiling: float = 0.0
    is_least: bool = True

    @property
    def is_met(self) -> bool:
        """Whether it is on the right side of the limit, here or with cores enough."""
        if not self.is_least:
            return self.found <= self.limit
        has_cores = (os.cpu_count() or 1) >= CORES
        return self.found >= self.limit or (not has_cores and self.ceiling >= self.limit)

    def row(self) -> Row:
        """Write the line."""
        wanted = f"{'at least' if self.is_least else 'at most'} {self.limit:,g}"
        ceiling = f"{self.ceiling:,.2f}" if self.ceiling else ""
        met = "yes" if self.is_met else "no"
        return self.what, f"{self.found:,.3f}", ceiling, wanted, met


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hg-") as name:
        yield Path(name)
