"""The pages for people over a store of 100,000 tasks: how long each takes, what it weighs, and what
fifty open browsers cost the dispatcher.

Every page is asked for whole, one after the other, so that nothing that was drawn a moment ago
helps. A page weighs what is sent for it and for all that it loads, to a browser that takes gzip.

Browsers come and go in alternating rounds of the same run. A dispatcher is one process with one
interpreter, so what it can do at most is bounded by one core; the share of a core that the browsers
take is the share of its throughput that they cost. It is the difference of the processor time in
both kinds of rounds at the same pace of tasks, which hardly depends on what else the machine does:
at full speed a task takes now more and now less of it, by more than the browsers do. What was done
at full speed stands beside it; there the browsers and the client share the machine as well.
"""

from __future__ import annotations

import gzip
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from benchmarks.dashboard_browsers import Visits, open_browsers
from benchmarks.engine_client import Feed, Measured
from benchmarks.engine_measures import BATCH_CONNECTIONS, PARKED, fed, serving
from benchmarks.options import ROOT, Options
from benchmarks.report import Row, table
from service.support import ServiceProcess

CONFIGURATION = ROOT / "benchmarks/dashboard.toml"
BROWSERS = 50
MOST_MS = 300.0
MOST_COST = 0.05
MOST_BYTES = 150_000
KEPT_WAITING = 1_000
NOBODY_LISTENS = "http://127.0.0.1:9/hook"

PAGES_HEADER = ("milliseconds", "median", "worst", "target", "met")
WEIGHTS_HEADER = ("bytes as sent", "page", "with all it loads", "target", "met")
BROWSERS_HEADER = ("open overviews", "tasks/s", "CPU us/task", "region p50 ms", "worst ms")

_LOADED = re.compile(r'(?:src|href)="(/ui/static/[^"]+)"')


class Sizes(NamedTuple):
    """How many tasks there are, how often each page is asked for, and how long rounds are."""

    done: int
    failed: int
    waiting: int
    rare: int
    webhooks: int
    asks: int
    rounds: int
    round_seconds: float
    pace: int

    @property
    def tasks(self) -> int:
        """How many tasks are in the store."""
        return self.done + self.failed + self.waiting + self.rare + self.webhooks


FULL = Sizes(
    done=59_400,
    failed=5_000,
    waiting=35_000,
    rare=100,
    webhooks=500,
    asks=15,
    rounds=6,
    round_seconds=6.0,
    pace=1_000,
)
QUICK = Sizes(
    done=300,
    failed=50,
    waiting=100,
    rare=50,
    webhooks=50,
    asks=1,
    rounds=1,
    round_seconds=1.0,
    pace=500,
)


class Timed(NamedTuple):
    """One page, and the milliseconds of each time that it was asked for."""

    what: str
    times_ms: list[float]

    def row(self) -> Row:
        """Write the line."""
        median, worst = statistics.median(self.times_ms), max(self.times_ms)
        target = f"{MOST_MS:.0f}"
        return self.what, f"{median:.1f}", f"{worst:.1f}", target, _met(self.is_met)

    @property
    def is_met(self) -> bool:
        """Whether every answer came soon enough."""
        return max(self.times_ms) < MOST_MS


def run(options: Options) -> bool:
    """Measure everything, print it, and tell whether all targets were met."""
    sizes = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="hg-") as name:
        folder = Path(name)
        with serving(folder, settings=CONFIGURATION) as service:
            print(f"\ndashboard: putting {sizes.tasks:,} tasks into the store", flush=True)
            fed(service, BATCH_CONNECTIONS, lambda feed: fill(feed, sizes))
            met = [
                show_pages(service, sizes),
                show_weights(service),
                show_browsers(service, sizes),
            ]
    if options.quick:
        print("  a quick run shows that it works, and judges nothing")
    return options.quick or all(met)


async def fill(feed: Feed, sizes: Sizes) -> None:
    """Put all tasks into the store: the rare ones first, so that a search has a long way."""
    await feed.run(feed.batches(sizes.rare, labels={"kind": "rare"}), sizes.rare)
    await feed.run(feed.batches(sizes.webhooks, callbackUrl=NOBODY_LISTENS), sizes.webhooks)
    await feed.run(feed.batches(sizes.done, labels={"kind": "bulk"}), sizes.done)
    await feed.send(feed.batches(sizes.failed, target="failing"))
    await feed.run(feed.batches(1, scopes=[PARKED]), 1)
    await feed.send(feed.batches(sizes.waiting, scopes=[PARKED]))


def pages(service: ServiceProcess) -> dict[str, str]:
    """Return every page, and the list of tasks by every filter, by what it is."""
    done, waiting = newest(service, "done"), newest(service, "queued")
    webhook = service.ask("GET", "/webhooks?limit=1").body["webhooks"][0]["id"]
    since = quote(done["createdAt"])
    tasks = "/ui/tasks"
    return {
        "overview": "/",
        "its figures": "/ui/history",
        "tasks": tasks,
        "tasks, a later page": f"{tasks}?before={done['taskId']}",
        "tasks that wait": f"{tasks}?state=queued",
        "tasks that failed": f"{tasks}?state=failed",
        "tasks in two states": f"{tasks}?state=failed&state=done",
        "tasks of a project": f"{tasks}?project=evals",
        "tasks of an agent": f"{tasks}?agent=agent-7",
        "tasks of a project and an agent, failed": (
            f"{tasks}?project=evals&agent=agent-7&state=failed"
        ),
        "tasks for a target": f"{tasks}?target=failing",
        "tasks by a label": f"{tasks}?label={quote('kind=bulk')}",
        "tasks by a rare label": f"{tasks}?label={quote('kind=rare')}",
        "tasks by a text": f"{tasks}?text=agent-11",
        "tasks by a text that none has": f"{tasks}?text=nowhere-to-be-found",
        "tasks since a moment": f"{tasks}?since={since}",
        "tasks before a moment": f"{tasks}?until={since}",
        "a task that waits": f"{tasks}/{waiting['taskId']}",
        "a task that is done": f"{tasks}/{done['taskId']}",
        "cancel all that wait?": f"{tasks}/cancel?state=queued",
        "retry all that failed?": f"{tasks}/retry?state=failed",
        "projects": "/ui/projects",
        "budgets": "/ui/budgets",
        "slots": "/ui/slots",
        "webhooks": "/ui/webhooks",
        "settings": "/ui/settings",
        "a project": "/ui/projects/evals",
        "a budget with its journal": "/ui/budgets?scope=session%3Aparked",
        "a slot": "/ui/slots/switched-off",
        "the log of a slot": "/ui/slots/switched-off/log",
        "a webhook": f"/ui/webhooks/{webhook}",
        "the audit log": "/ui/settings/audit",
        "tokens": "/ui/settings/tokens",
        "a task as JSON": f"{tasks}/{done['taskId']}/raw",
    }


def newest(service: ServiceProcess, state: str) -> dict[str, str]:
    """Return the newest task in a state; one answer looks only so far back."""
    path = f"/tasks?state={state}&limit=1"
    body = service.ask("GET", path).body
    while not body["tasks"]:
        body = service.ask("GET", f"{path}&cursor={body['nextCursor']}").body
    found: dict[str, str] = body["tasks"][0]
    return found


def show_pages(service: ServiceProcess, sizes: Sizes) -> bool:
    """Ask for every page in turn, again and again, and print how long each took."""
    paths = pages(service)
    found = {what: Timed(what, []) for what in paths}
    for _ in range(sizes.asks):
        for what, path in paths.items():
            began = time.perf_counter()
            fetched(service, path)
            found[what].times_ms.append((time.perf_counter() - began) * 1e3)
    title = f"dashboard: every page over {sizes.tasks:,} tasks, on SQLite"
    table(title, PAGES_HEADER, [timed.row() for timed in found.values()])
    return all(timed.is_met for timed in found.values())


def show_weights(service: ServiceProcess) -> bool:
    """Print what is sent for each page and for what it loads, to a browser that was never there."""
    rows, met = [], []
    for what, path in pages(service).items():
        page, text = fetched(service, path)
        loaded = {found.replace("&amp;", "&") for found in _LOADED.findall(text)}
        whole = page + sum(fetched(service, found)[0] for found in loaded)
        is_met = whole < MOST_BYTES
        rows.append((what, f"{page:,}", f"{whole:,}", f"{MOST_BYTES:,}", _met(is_met)))
        met.append(is_met)
    table("dashboard: what is sent", WEIGHTS_HEADER, rows)
    return all(met)


def fetched(service: ServiceProcess, path: str) -> tuple[int, str]:
    """Ask for an address as a browser does; return how many bytes came, and the text of them."""
    connection = HTTPConnection(urlsplit(service.address).netloc, timeout=60.0)
    try:
        connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            problem = f"{path} was answered with {response.status}: {body[:200]!r}"
            raise RuntimeError(problem)
        is_packed = response.headers.get("content-encoding") == "gzip"
        return len(body), (gzip.decompress(body) if is_packed else body).decode()
    finally:
        connection.close()


class Rounds(NamedTuple):
    """What was done in rounds of one kind."""

    rates: list[float]
    cpu_us: list[float]

    def add(self, measured: Measured) -> None:
        """Take one round."""
        self.rates.append(measured.done)
        self.cpu_us.append(measured.cpu_us)

    def core_share(self, other: Rounds) -> float:
        """Return the share of a core that these rounds took beyond what the others did."""
        more_us = statistics.median(self.cpu_us) - statistics.median(other.cpu_us)
        return more_us * statistics.median(self.rates) / 1e6

    def row(self, what: str, visits: Visits | None) -> Row:
        """Write the line; without browsers nothing is said of regions."""
        seen = ("", "") if visits is None else (f"{visits.p50_ms:.1f}", f"{visits.worst_ms:.1f}")
        rate, cpu_us = statistics.median(self.rates), statistics.median(self.cpu_us)
        return what, f"{rate:,.0f}", f"{cpu_us:.1f}", *seen


def show_browsers(service: ServiceProcess, sizes: Sizes) -> bool:
    """Run tasks with and without open browsers, in turns, and print what those cost."""
    fast = in_turns(service, sizes, steady_round)
    fast.show(f"at full speed, rounds of {sizes.round_seconds:.0f} s in turns")
    print(f"  the rates differ by {fast.lost:.1%}, with client and browsers on the same machine")
    paced = in_turns(service, sizes, paced_round)
    paced.show(f"at {sizes.pace:,} tasks a second")
    cost = paced.watched.core_share(paced.alone)
    is_met = cost < MOST_COST and paced.visits.times_ms != []
    print(f"  cost: {cost:.1%} of a core, target {MOST_COST:.0%}, met: {_met(is_met)}")
    seconds = sizes.round_seconds * sizes.rounds
    per_second = paced.visits.requests / seconds
    print(
        f"  the browsers sent {per_second:.0f} requests a second, "
        f"and got {paced.visits.sent:,} bytes"
    )
    return is_met


class Turns(NamedTuple):
    """Rounds without and with browsers, and what those saw."""

    alone: Rounds
    watched: Rounds
    visits: Visits

    @property
    def lost(self) -> float:
        """The part of the throughput that was missing beside browsers."""
        return 1 - statistics.median(self.watched.rates) / statistics.median(self.alone.rates)

    def show(self, what: str) -> None:
        """Print both kinds of rounds."""
        rows = [self.alone.row("none", None), self.watched.row(f"{BROWSERS}", self.visits)]
        table(f"dashboard: tasks with open overviews, {what}", BROWSERS_HEADER, rows)


def in_turns(
    service: ServiceProcess, sizes: Sizes, work: Callable[[ServiceProcess, Sizes], Measured]
) -> Turns:
    """Let the same be done without and with browsers, again and again."""
    alone, watched, visits = Rounds([], []), Rounds([], []), Visits([], 0, 0)
    work(service, sizes)
    for _ in range(sizes.rounds):
        alone.add(work(service, sizes))
        with open_browsers(service.address, BROWSERS) as browsers:
            watched.add(work(service, sizes))
        visits = visits.joined(browsers.visits())
    return Turns(alone, watched, visits)


def paced_round(service: ServiceProcess, sizes: Sizes) -> Measured:
    """Give the dispatcher as much to do as in every other round."""
    return fed(service, BATCH_CONNECTIONS, lambda feed: feed.paced(sizes.pace, sizes.round_seconds))


def steady_round(service: ServiceProcess, sizes: Sizes) -> Measured:
    """Keep the dispatcher busy for a while, and return how much was done."""

    async def work(feed: Feed) -> Measured:
        parked = (await feed.progress()).queued
        return await feed.steady(parked + KEPT_WAITING, sizes.round_seconds)

    return fed(service, BATCH_CONNECTIONS, work)


def _met(is_met: bool) -> str:  # noqa: FBT001
    return "yes" if is_met else "no"
