"""The service end to end: `headgate up` in a process of its own, fed over HTTP, on both stores.

Shares and budgets are on: two projects by weight, and every task is charged to three budgets.
Everything is durable. Floors and other task queues, none of them fair or budgeted, are measured in
the same run. The processor's time of the service stands beside each rate: it hardly depends on what
else the machine does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine_client import Measured
from benchmarks.engine_floor import floor
from benchmarks.engine_measures import (
    Sizes,
    Starts,
    fill,
    park,
    serving,
    starts,
    submits,
    through_batches,
    through_singles,
    with_queue,
)
from benchmarks.engine_peers import PEERS, measure
from benchmarks.options import Options
from benchmarks.report import Row, table
from budgets.servers import running_postgres
from headgate.storage.postgres import PostgresDatabase
from headgate.storage.sqlite import SqliteDatabase

FULL = Sizes(tasks=10_000, runs=3, warm_up=1_000, starts=200, window_seconds=5.0)
QUICK = Sizes(tasks=200, runs=1, warm_up=50, starts=10, window_seconds=0.2)
FEW_QUEUED = 1_000
QUICK_QUEUED = 2_000
PARKED = 100_000
QUICK_PARKED = 500

LEAST_SUBMITS = 6_000
LEAST_ON_SQLITE = 8_000
LEAST_ON_POSTGRES = 5_000
MOST_START_MS = 1.5
LEAST_QUEUE_RATIO = 0.9
LEAST_HELD, MOST_HELD = 0.8, 1.1
"""A row of queued tasks counts only if about so many were queued on average."""

MOST_PARKED_RATIO = 1.25

RATES_HEADER = ("", "tasks/s", "CPU us/task", "of floor", "of best peer", "target", "met")
STARTS_HEADER = ("one task at a time", "p50", "p99", "target p50", "met")
PARKED_HEADER = ("tasks behind a closed gate", "p50", "p99", "ratio", "target", "met")
QUEUES_HEADER = (
    "tasks queued, on SQLite",
    *("queued on average", "tasks/s", "CPU us/task", "ratio", "target", "met"),
)


class Line(NamedTuple):
    """A rate; what is asked of it; and whether no other queue may be ahead."""

    what: str
    rate: float
    floor: float = 0.0
    cpu_us: float = 0.0
    least: int = 0
    must_lead: bool = False

    def is_met(self, best_peer: float) -> bool:
        """Tell whether the rate is high enough, and ahead of others if it must be."""
        return self.rate >= self.least and (not self.must_lead or self.rate > best_peer)

    def row(self, best_peer: float) -> Row:
        """Write the line, with its ratios."""
        ahead = ", ahead" if self.must_lead else ""
        return (
            self.what,
            f"{self.rate:,.0f}",
            f"{self.cpu_us:.0f}" if self.cpu_us else "",
            _ratio(self.rate, self.floor),
            _ratio(self.rate, best_peer),
            f"{self.least:,}{ahead}" if self.least else "",
            _met(self.is_met(best_peer)) if self.least else "",
        )


class Latency(NamedTuple):
    """Milliseconds to the start of a task, as the client sees it and as the service stamps it."""

    seen: Starts
    stamped: Starts


class Peers(NamedTuple):
    """The rates of other queues; those that could not be measured have none."""

    rows: list[Row]
    best: float


def run(options: Options) -> bool:
    """Measure everything, print it, and tell whether all targets were met."""
    sizes = QUICK if options.quick else FULL
    queued = min(QUICK_QUEUED, options.queued) if options.quick else options.queued
    on_sqlite, latency = measure_sqlite(sizes)
    on_postgres = measure_postgres(sizes)
    peers = measure_peers(options, sizes)
    met = [
        show_rates([*on_sqlite, *on_postgres], peers, sizes),
        show_latency(latency),
        measure_parked(QUICK_PARKED if options.quick else PARKED, sizes),
        measure_queues(queued, sizes),
    ]
    if options.quick:
        print("  a quick run shows that it works, and judges nothing")
    return options.quick or all(met)


def measure_sqlite(sizes: Sizes) -> tuple[list[Line], Latency]:
    with _folder() as folder:
        bottom = floor(SqliteDatabase(folder / "floor.db"), tasks=sizes.tasks, runs=sizes.runs)
    with _folder() as folder, serving(folder) as service:
        latency = Latency(*starts(service, sizes))
        batches = through_batches(service, sizes)
        singles = through_singles(service, sizes)
        alone = submits(service, sizes)
    lines = [
        Line("SQLite alone (floor)", bottom, bottom),
        Line(
            "SQLite, batches",
            batches.done,
            bottom,
            batches.cpu_us,
            LEAST_ON_SQLITE,
            must_lead=True,
        ),
        Line("SQLite, single requests", singles.done, bottom, singles.cpu_us),
        Line("SQLite, single submits", alone.submitted, bottom, alone.cpu_us, LEAST_SUBMITS),
    ]
    return lines, latency


def measure_postgres(sizes: Sizes) -> list[Line]:
    with running_postgres(is_durable=True) as server:
        bottom = floor(PostgresDatabase(server.new_schema()), tasks=sizes.tasks, runs=sizes.runs)
        with _folder() as folder, serving(folder, "--store", server.url) as service:
            batches = through_batches(service, sizes)
            singles = through_singles(service, sizes)
    return [
        Line("PostgreSQL alone (floor)", bottom, bottom),
        Line(
            "PostgreSQL, batches",
            batches.done,
            bottom,
            batches.cpu_us,
            LEAST_ON_POSTGRES,
            must_lead=True,
        ),
        Line("PostgreSQL, single requests", singles.done, bottom, singles.cpu_us),
    ]


def measure_peers(options: Options, sizes: Sizes) -> Peers:
    found = {
        peer.title: measure(peer, options.peers_python, tasks=sizes.tasks, runs=sizes.runs)
        for peer in PEERS
    }
    best = max((rate for rate in found.values() if isinstance(rate, float)), default=0.0)
    rows = [
        Line(title, rate).row(best) if isinstance(rate, float) else (title, rate, *[""] * 5)
        for title, rate in found.items()
    ]
    return Peers(rows, best)


def show_rates(lines: Sequence[Line], peers: Peers, sizes: Sizes) -> bool:
    title = f"engine: {sizes.tasks:,} no-op tasks from submit to done, shares and budgets on"
    table(title, RATES_HEADER, [*(line.row(peers.best) for line in lines), *peers.rows])
    return all(line.is_met(peers.best) for line in lines)


def show_latency(latency: Latency) -> bool:
    seen, stamped = latency
    is_met = seen.p50_ms < MOST_START_MS
    rows = [
        _starts_row("sent by the client to first line", seen, f"{MOST_START_MS:.1f}", _met(is_met)),
        _starts_row("createdAt to startedAt", stamped, "", ""),
    ]
    table("engine: milliseconds from submit to start, idle, on SQLite", STARTS_HEADER, rows)
    return is_met


def measure_parked(parked: int, sizes: Sizes) -> bool:
    """Start tasks that can run, before and after others wait in front of them that cannot."""
    with _folder() as folder, serving(folder) as service:
        before, _ = starts(service, sizes)
        found = park(service, parked)
        after, _ = starts(service, sizes)
    ratio = after.p50_ms / before.p50_ms
    is_met = ratio <= MOST_PARKED_RATIO and found >= parked
    rows = [
        ("none", f"{before.p50_ms:.2f}", f"{before.p99_ms:.2f}", "", "", ""),
        _parked_row(found, after, f"{ratio:.2f}", f"{MOST_PARKED_RATIO:.2f}", _met(is_met)),
    ]
    table("engine: milliseconds from submit to start, past parked tasks", PARKED_HEADER, rows)
    return is_met


def measure_queues(queued: int, sizes: Sizes) -> bool:
    with _folder() as folder:
        few = with_queue(folder, FEW_QUEUED, sizes)
    with _folder() as folder:
        found = fill(folder, queued)
        many = with_queue(folder, found, sizes)
    ratio = many.done / max(1.0, few.done)
    holds = _holds(few, FEW_QUEUED) and _holds(many, queued)
    is_met = ratio >= LEAST_QUEUE_RATIO and holds
    target = f"{queued:,} at {LEAST_QUEUE_RATIO:.1f}"
    rows = [
        _queue_row(FEW_QUEUED, few, "", "", ""),
        _queue_row(found, many, f"{ratio:.2f}", target, _met(is_met)),
    ]
    table("engine: throughput while so many tasks are kept waiting", QUEUES_HEADER, rows)
    return is_met


def _starts_row(what: str, found: Starts, target: str, met: str) -> Row:
    return what, f"{found.p50_ms:.2f}", f"{found.p99_ms:.2f}", target, met


def _parked_row(parked: int, found: Starts, *verdict: str) -> Row:
    return f"{parked:,}", f"{found.p50_ms:.2f}", f"{found.p99_ms:.2f}", *verdict


def _holds(found: Measured, queued: int) -> bool:
    return LEAST_HELD * queued <= found.queued <= MOST_HELD * queued


def _queue_row(queued: int, found: Measured, *verdict: str) -> Row:
    figures = (f"{found.queued:,.0f}", f"{found.done:,.0f}", f"{found.cpu_us:.0f}")
    return f"{queued:,}", *figures, *verdict


def _ratio(rate: float, other: float) -> str:
    return f"{rate / other:.2f}" if other else ""


def _met(is_met: object) -> str:
    return "yes" if is_met else "no"


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hg-") as name:
        yield Path(name)
