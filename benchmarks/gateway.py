"""The gateway end to end: `headgate up` on SQLite in front of a fake provider, beside others.

The provider, the load and each gateway are processes of the same machine. Every gateway takes its
turn in every round, and a figure is the median of the rounds; ratios and added times are taken
within a round, since the machine is not the same from one to the next. Headgate and one of the
peers keep limits on two scopes and a window of requests; the other peers keep none.

Waiting streams are those of a model whose upstream takes one call at a time: what a thousand of
them cost is memory and time of the processor beyond that of the same service without them.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from benchmarks.engine_measures import serving
from benchmarks.engine_peers import FAILED
from benchmarks.gateway_load import Found, Load
from benchmarks.gateway_peers import PEERS, Gateway, Place, running_peers
from benchmarks.gateway_upstream import CHUNKS, HELD_MODEL, MODEL
from benchmarks.options import ROOT, Options
from benchmarks.report import Row, table
from executors.endpoint import free_port
from service.support import DidNotHappenError, family, wait_until

ALONE = "the provider alone"
PROXY = "a proxy without books (floor)"
HEADGATE = "Headgate"
TENSORZERO = "TensorZero with limits"
LITELLM = "LiteLLM"
CONNECTIONS = 16

LEAST_OF_TENSORZERO = 1.0
LEAST_OF_LITELLM = 20.0
MOST_ADDED_MS = 0.8
MOST_ADDED_FIRST_BYTE_MS = 1.5
MOST_IDLE_MEGABYTES = 40.0
MOST_IDLE_CORE = 0.03

MEGABYTE = 1_000_000
KILOBYTE = 1_024
START_SECONDS = 10.0
# Headers of a stream that waits are sent after some five seconds.
MOST_SECONDS_TO_HEADERS = 60.0
KEEP_ALIVE_SECONDS = 15.0
LOOK_SECONDS = 1.0
OPEN_FILES = 8_192
NOT_MEASURED = "not measured"

SETTINGS = """
[scheduler]
global_budget = 1_000_000_000_000
max_queue_size = 100_000
max_per_agent = 100_000

[projects.bench]

[budgets."project:bench"]
limit_usd = "900000"

[agents.bench]
type = "bench"

[rate_limits.bench]
requests_per_minute = 1_000_000_000

[upstreams.mock]
kind = "openai"
base_url = "http://127.0.0.1:{port}/v1"
key_env = "BENCHMARK_KEY"
models = ["{model}"]
max_inflight = 2_000

[upstreams.held]
kind = "openai"
base_url = "http://127.0.0.1:{port}/v1"
key_env = "BENCHMARK_KEY"
models = ["{held}"]
max_inflight = 1

[prices."{held}"]
input = "1"
output = "1"
"""
HEADERS = {"X-Headgate-Project": "bench", "X-Headgate-Agent": "bench"}


class Sizes(NamedTuple):
    """How much is measured."""

    rounds: int
    seconds: float
    warm_up_seconds: float
    streams: int
    watch_seconds: float


# Two rounds of keep-alives are within the time for which waiting streams are watched.
FULL = Sizes(rounds=7, seconds=1.5, warm_up_seconds=0.3, streams=1_000, watch_seconds=30.0)
QUICK = Sizes(rounds=1, seconds=0.3, warm_up_seconds=0.1, streams=50, watch_seconds=3.0)


class Shape(NamedTuple):
    """What is asked, and over how many connections."""

    is_stream: bool
    connections: int

    def __str__(self) -> str:
        what = "streams" if self.is_stream else "answers"
        return f"{what} over {self.connections} connection{'s' if self.connections > 1 else ''}"


ONE_ANSWER = Shape(is_stream=False, connections=1)
ANSWERS = Shape(is_stream=False, connections=CONNECTIONS)
ONE_STREAM = Shape(is_stream=True, connections=1)
STREAMS = Shape(is_stream=True, connections=CONNECTIONS)
SHAPES = (ONE_ANSWER, ANSWERS, ONE_STREAM, STREAMS)


class Turn(NamedTuple):
    """What one gateway did in one shape of one round."""

    found: Found
    cpu_us: float


class Target(NamedTuple):
    """What is asked of a figure; one that needs a peer is not judged where that is missing."""

    what: str
    found: Sequence[float]
    limit: float
    is_least: bool
    unit: str = ""
    peer: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the median is on the right side of the limit."""
        if not self.found:
            return False
        median = statistics.median(self.found)
        return median >= self.limit if self.is_least else median <= self.limit

    def row(self, missing: Collection[str]) -> Row:
        """Write the line."""
        wanted = f"{'at least' if self.is_least else 'at most'} {self.limit:g}{self.unit}"
        if not self.found:
            verdict = "not judged" if self.peer in missing else "no"
            return self.what, NOT_MEASURED, "", wanted, verdict
        spread = f"{min(self.found):.2f} to {max(self.found):.2f}"
        found = f"{statistics.median(self.found):.2f}{self.unit}"
        return self.what, found, spread, wanted, "yes" if self.is_met else "no"


TARGETS_HEADER = ("target", "median", "rounds", "wanted", "met")


class Rounds:
    """Every turn of every gateway, by shape, in the order of the rounds."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, Shape], list[Turn]] = {}
        self.problems: dict[tuple[str, Shape], str] = {}

    def add(self, title: str, shape: Shape, turn: Turn) -> None:
        """Take one turn; a shape in which a gateway failed once is not measured any more."""
        if turn.found.problem:
            self.problems[title, shape] = turn.found.problem
        self._turns.setdefault((title, shape), []).append(turn)

    def turns(self, title: str, shape: Shape) -> list[Turn]:
        """Return the turns of a gateway, none if one of them failed."""
        has_failed = (title, shape) in self.problems
        return [] if has_failed else self._turns.get((title, shape), [])

    def median(self, title: str, shape: Shape, figure: Callable[[Turn], float]) -> float | None:
        """Return the median of a figure over all rounds."""
        turns = self.turns(title, shape)
        return statistics.median(map(figure, turns)) if turns else None

    def ratios(self, title: str, other: str, shape: Shape) -> list[float]:
        """Return the rate of one gateway by that of another, in each round."""
        pairs = zip(self.turns(title, shape), self.turns(other, shape), strict=False)
        return [own.found.rate / theirs.found.rate for own, theirs in pairs]

    def added(self, title: str, shape: Shape, figure: Callable[[Turn], float]) -> list[float]:
        """Return what a gateway adds to a time of the provider alone, in each round."""
        pairs = zip(self.turns(title, shape), self.turns(ALONE, shape), strict=False)
        return [figure(own) - figure(alone) for own, alone in pairs]


def run(options: Options) -> bool:
    """Measure everything, print it, and tell whether all targets were met."""
    sizes = QUICK if options.quick else FULL
    _allow_open_files()
    before = os.getloadavg()[0]
    with _folder() as folder, running_upstream() as upstream:
        port = upstream.port
        with (
            _proxy(port) as proxy,
            running_peers(Place(options.gateways, folder, port)) as (peers, missing),
            _headgate(folder / "rates", port) as headgate,
        ):
            rounds = _measure([upstream, proxy, headgate, *peers], sizes)
        after = os.getloadavg()[0]
        print(f"\ngateway: load average {before:.2f} before the run, {after:.2f} after the rounds")
        for (title, shape), problem in rounds.problems.items():
            print(f"{title}, {shape}: {problem}")
        _show_answers(rounds, missing, sizes)
        _show_streams(rounds, missing, sizes)
        targets = [*_rate_targets(rounds), *_idle_targets(folder / "idle", port, sizes)]
    table("gateway: targets", TARGETS_HEADER, [target.row(missing) for target in targets])
    if options.quick:
        print("  a quick run shows that it works, and judges nothing")
    has_failed = any(title == HEADGATE for title, _ in rounds.problems)
    met = [target.is_met or target.peer in missing for target in targets]
    return options.quick or (not has_failed and all(met))


def _measure(gateways: Sequence[Gateway], sizes: Sizes) -> Rounds:
    """Let every gateway take its turn in every round; each round begins with another one."""
    rounds = Rounds()
    for number in range(sizes.rounds):
        first = number % len(gateways)
        for shape in SHAPES:
            for gateway in (*gateways[first:], *gateways[:first]):
                if (gateway.title, shape) not in rounds.problems:
                    rounds.add(gateway.title, shape, _turn(gateway, shape, sizes))
    return rounds


def _turn(gateway: Gateway, shape: Shape, sizes: Sizes) -> Turn:
    load = Load(
        port=gateway.port,
        path=gateway.path,
        headers=dict(gateway.headers),
        body=gateway.body(is_stream=shape.is_stream),
        connections=shape.connections,
        seconds=sizes.seconds,
        warm_up_seconds=sizes.warm_up_seconds,
        events=CHUNKS if shape.is_stream else 0,
    )
    before = gateway.cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gateway_load"],
        cwd=ROOT,
        input=msgspec.json.encode(load),
        capture_output=True,
        check=False,
    )
    used = gateway.cpu_seconds() - before
    if done.returncode:
        return Turn(Found(problem=done.stderr.decode()[-300:]), 0.0)
    found = msgspec.json.decode(done.stdout, type=Found)
    return Turn(found, used / max(1, found.all_requests) * 1e6)


ANSWERS_HEADER = (
    *("", "1 conn: req/s", "p50 ms", "added ms"),
    *(f"{CONNECTIONS} conns: req/s", "p50 ms", "p99 ms", "CPU us/req", f"of {TENSORZERO}"),
)
STREAMS_HEADER = (
    *("", "1 conn: streams/s", "first byte ms", "added ms"),
    *(f"{CONNECTIONS} conns: streams/s", "first byte ms", "p50 ms", "CPU us/stream"),
    f"of {TENSORZERO}",
)


def _show_answers(rounds: Rounds, missing: dict[str, str], sizes: Sizes) -> None:
    rows = [
        _row(
            rounds,
            title,
            missing,
            (
                (ONE_ANSWER, lambda turn: turn.found.rate, ",.0f"),
                (ONE_ANSWER, _p50_ms, ".3f"),
                rounds.added(title, ONE_ANSWER, _p50_ms),
                (ANSWERS, lambda turn: turn.found.rate, ",.0f"),
                (ANSWERS, _p50_ms, ".2f"),
                (ANSWERS, lambda turn: turn.found.p99_ms, ".2f"),
                (ANSWERS, lambda turn: turn.cpu_us, ".0f"),
                rounds.ratios(title, TENSORZERO, ANSWERS),
            ),
        )
        for title in (ALONE, PROXY, HEADGATE, *PEERS)
    ]
    table(f"gateway: answers in one piece, {_rounds(sizes)}", ANSWERS_HEADER, rows)


def _show_streams(rounds: Rounds, missing: dict[str, str], sizes: Sizes) -> None:
    rows = [
        _row(
            rounds,
            title,
            missing,
            (
                (ONE_STREAM, lambda turn: turn.found.rate, ",.0f"),
                (ONE_STREAM, _first_byte_ms, ".3f"),
                rounds.added(title, ONE_STREAM, _first_byte_ms),
                (STREAMS, lambda turn: turn.found.rate, ",.0f"),
                (STREAMS, _first_byte_ms, ".2f"),
                (STREAMS, _p50_ms, ".2f"),
                (STREAMS, lambda turn: turn.cpu_us, ",.0f"),
                rounds.ratios(title, TENSORZERO, STREAMS),
            ),
        )
        for title in (ALONE, PROXY, HEADGATE, *PEERS)
    ]
    table(f"gateway: streams of {CHUNKS} chunks, {_rounds(sizes)}", STREAMS_HEADER, rows)


Cell = tuple[Shape, Callable[[Turn], float], str] | list[float]


def _row(rounds: Rounds, title: str, missing: dict[str, str], cells: Sequence[Cell]) -> Row:
    """Write the line of a gateway: medians of figures, or of what was taken within each round."""
    if title in missing:
        return title, missing[title], *[""] * (len(cells) - 1)
    written = []
    for cell in cells:
        if isinstance(cell, list):
            written.append(f"{statistics.median(cell):.2f}" if cell else "")
        else:
            shape, figure, form = cell
            found = rounds.median(title, shape, figure)
            written.append(FAILED if found is None else format(found, form))
    return title, *written


def _rounds(sizes: Sizes) -> str:
    return "one round" if sizes.rounds == 1 else f"medians of {sizes.rounds} rounds"


def _p50_ms(turn: Turn) -> float:
    return turn.found.p50_ms


def _first_byte_ms(turn: Turn) -> float:
    return turn.found.first_byte_p50_ms


def _rate_targets(rounds: Rounds) -> list[Target]:
    return [
        Target(
            f"requests/s at {CONNECTIONS} connections, of {TENSORZERO}",
            rounds.ratios(HEADGATE, TENSORZERO, ANSWERS),
            LEAST_OF_TENSORZERO,
            is_least=True,
            peer=TENSORZERO,
        ),
        Target(
            f"requests/s at {CONNECTIONS} connections, of {LITELLM}",
            rounds.ratios(HEADGATE, LITELLM, ANSWERS),
            LEAST_OF_LITELLM,
            is_least=True,
            peer=LITELLM,
        ),
        Target(
            "added p50 at one connection",
            rounds.added(HEADGATE, ONE_ANSWER, _p50_ms),
            MOST_ADDED_MS,
            is_least=False,
            unit=" ms",
        ),
        Target(
            "added time to the first byte of a stream",
            rounds.added(HEADGATE, ONE_STREAM, _first_byte_ms),
            MOST_ADDED_FIRST_BYTE_MS,
            is_least=False,
            unit=" ms",
        ),
    ]


class Used(NamedTuple):
    """What a service has in memory, and has used of the processor, at one moment."""

    at: float
    bytes: int
    cpu_seconds: float

    def core_share(self, before: Used) -> float:
        """Return the share of a core that was used since another moment."""
        return (self.cpu_seconds - before.cpu_seconds) / (self.at - before.at)


def _idle_targets(folder: Path, port: int, sizes: Sizes) -> list[Target]:
    """Let streams wait behind one that is held, and see what they cost a service."""
    megabytes, core = [], []
    with _headgate(folder, port) as gateway:
        problem = gateway.problem()
        if problem:
            print(f"waiting streams: {problem}")
        else:
            measured = _idle(gateway, sizes)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found = runner.run(measured)
            if found is not None:
                megabytes, core = [found[0]], [found[1]]
    count = f"{sizes.streams:,} waiting streams"
    return [
        Target(f"{count}: memory", megabytes, MOST_IDLE_MEGABYTES, is_least=False, unit=" MB"),
        Target(f"{count}: percent of a core", core, MOST_IDLE_CORE * 100, is_least=False, unit="%"),
    ]


async def _idle(gateway: Gateway, sizes: Sizes) -> tuple[float, float] | None:
    """Return the megabytes and the percent of a core that waiting streams cost."""
    quiet_before = _used(gateway)
    await asyncio.sleep(sizes.watch_seconds)
    quiet = _used(gateway)
    held = gateway._replace(model=HELD_MODEL)
    opened = [await _open(held) for _ in range(sizes.streams + 1)]
    try:
        async with asyncio.timeout(MOST_SECONDS_TO_HEADERS):
            for reader, _ in opened:
                head = await reader.readuntil(b"\r\n\r\n")
                if b" 200 " not in head.splitlines()[0]:
                    print(f"waiting streams: {head!r}")
                    return None
        before = _used(gateway)
        await asyncio.sleep(sizes.watch_seconds)
        after = _used(gateway)
        # The first is the one that is held; whoever sends nothing to the others costs nothing.
        events = await asyncio.gather(*(_events(reader) for reader, _ in opened[1:]))
        print(f"waiting streams: each got {min(events)} to {max(events)} events")
        if closed := sum(reader.at_eof() for reader, _ in opened):
            print(f"waiting streams: {closed} of {len(opened)} were closed")
            return None
        if min(events) < sizes.watch_seconds // KEEP_ALIVE_SECONDS:
            print("waiting streams: some were not kept alive")
            return None
    except (TimeoutError, asyncio.IncompleteReadError) as error:
        print(f"waiting streams: no headers came: {error!r}")
        return None
    finally:
        for _, writer in opened:
            writer.close()
    core = after.core_share(before) - quiet.core_share(quiet_before)
    return (after.bytes - quiet.bytes) / MEGABYTE, core * 100


async def _events(reader: asyncio.StreamReader) -> int:
    """Return how many events have come over a stream since it was looked at last."""
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            return (await reader.read(MEGABYTE)).count(b"\n\n")
    except TimeoutError:
        return 0


async def _open(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    load = Load(
        port=gateway.port,
        path=gateway.path,
        headers=dict(gateway.headers),
        body=gateway.body(is_stream=True),
        connections=1,
        seconds=0,
        warm_up_seconds=0,
    )
    writer.write(load.request())
    return reader, writer


def _used(gateway: Gateway) -> Used:
    pids = [each for pid in gateway.pids for each in family(pid)]
    return Used(time.monotonic(), sum(map(_resident_bytes, pids)), gateway.cpu_seconds())


def _resident_bytes(pid: int) -> int:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return next((int(line[1]) * KILOBYTE for line in lines if line[0] == "VmRSS:"), 0)


@contextmanager
def _headgate(folder: Path, port: int) -> Iterator[Gateway]:
    folder.mkdir()
    settings = folder / "headgate.toml"
    settings.write_text(SETTINGS.format(port=port, model=MODEL, held=HELD_MODEL))
    os.environ["BENCHMARK_KEY"] = "sk-benchmark"
    with serving(folder, settings=settings) as service:
        own_port = int(service.address.rpartition(":")[2])
        yield Gateway(HEADGATE, own_port, (service.pid,), headers=HEADERS)


@contextmanager
def running_upstream() -> Iterator[Gateway]:
    """Run the fake provider."""
    port = free_port()
    with _serving(ALONE, "benchmarks.gateway_upstream", port) as upstream:
        yield upstream


@contextmanager
def _proxy(upstream_port: int) -> Iterator[Gateway]:
    """Run a proxy that only passes on."""
    port = free_port()
    with _serving(PROXY, "benchmarks.gateway_floor", port, upstream_port) as proxy:
        yield proxy


@contextmanager
def _serving(title: str, module: str, port: int, *arguments: int) -> Iterator[Gateway]:
    """Run a module that serves a port, from when it answers."""
    command = [sys.executable, "-m", module, str(port), *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    gateway = Gateway(title, port, (process.pid,))
    try:
        wait_until(lambda: _answers(process, gateway), seconds=START_SECONDS, what=gateway.problem)
        yield gateway
    finally:
        process.kill()
        process.wait()


def _answers(process: subprocess.Popen[bytes], gateway: Gateway) -> bool:
    if process.poll() is not None:
        problem = f"{gateway.title} ended with {process.returncode}"
        raise DidNotHappenError(problem)
    return not gateway.problem()


def _allow_open_files() -> None:
    """Let this process and those that it starts have as many connections as are opened here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hg-") as name:
        yield Path(name)
