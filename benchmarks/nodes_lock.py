"""How long each kind of step keeps the one lock of a store in PostgreSQL, with nobody beside it.

All nodes write behind that lock, so this bounds them together, however many they are. A step comes
in batches, as under load; tasks have money in three scopes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import NamedTuple

from benchmarks.report import Row, table
from headgate.core.dispatch_state import DispatchSettings, DispatchState
from headgate.core.snapshot import Project
from headgate.engine.events import EventFeed
from headgate.storage.postgres import (
    IDLE_TIMEOUT_SECONDS,
    PostgresDatabase,
    PostgresTaskStore,
    PostgresTransaction,
)
from headgate.storage.writer import GroupCommitWriter
from storage.scene import AWAY, Place, Scene

BATCH = 64
NEWS_BATCH = 64
"""About as many messages as gather for a dispatcher that has all it can do: 55 were seen between
two reads while the other node took 2,900 tasks a second, on two cores for everything."""

SUBMIT, PLAN, SETTLE = "submit", "plan, for this node", "settle, of this node"
AWAY_SUBMIT = "submit, at another node"
# It reads beside the lock; messages that were seen are deleted now and then.
NEWS = "news of other nodes"
AWAY_PLAN, COLLECT = "plan, for another node", "collect"
AWAY_SETTLE, BEAT = "settle, of another node", "beat and elect"
HEADER = ("under the lock, in batches of 64", "us a task", "a second", "transactions")


class Held(NamedTuple):
    """How long the lock was kept in all, and in how many transactions."""

    seconds: float
    transactions: int


class WatchedDatabase(PostgresDatabase):
    """Measures transactions; the lock is what each of them asks for first."""

    def __init__(self, url: str) -> None:
        super().__init__(url, idle_timeout_seconds=IDLE_TIMEOUT_SECONDS)
        self.held = Held(0.0, 0)
        self._begun_at = 0.0

    def begin(self) -> PostgresTransaction:
        """Open a transaction."""
        self._begun_at = time.perf_counter()
        return super().begin()

    def commit(self) -> None:
        """End the transaction."""
        super().commit()
        seconds = time.perf_counter() - self._begun_at
        self.held = Held(self.held.seconds + seconds, self.held.transactions + 1)


class LockTimes:
    """What each kind of step costs under the lock, in microseconds for each task."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[float, int]] = {}
        self.news_us = inf
        """What it costs the dispatcher to learn of a task of another node, beside the lock."""

    def add(self, kind: str, seconds: float, tasks: int, transactions: int) -> None:
        """Take the times of a kind; the best counts, as a neighbour only makes them worse."""
        best = self._kinds.get(kind, (inf, 0))
        self._kinds[kind] = min(best, (seconds / tasks * 1e6, transactions))

    def of(self, *kinds: str) -> float:
        """Return what a task costs that goes through these steps."""
        return sum(self._kinds[kind][0] for kind in kinds)

    def show(self) -> None:
        """Print them."""
        rows: list[Row] = [
            (kind, f"{us:.0f}", f"{1e6 / us:,.0f}" if us else "", f"{transactions}")
            for kind, (us, transactions) in self._kinds.items()
        ]
        table("nodes: how long a task keeps the lock of the store", HEADER, rows)
        what = f"{NEWS_BATCH} tasks of another node"
        print(f"  to learn of {what} costs the dispatcher {self.news_us:.0f} us of CPU each")


async def lock_times(url: str, *, tasks: int, runs: int) -> LockTimes:
    """Take tasks through all steps, on the node that dispatches and on another one."""
    database, found = WatchedDatabase(url), LockTimes()

    def make(clock: Callable[[], float], keeps_ledger: bool) -> PostgresTaskStore:  # noqa: FBT001
        store = PostgresTaskStore(url, clock=clock, keeps_ledger=keeps_ledger)
        store.writer = GroupCommitWriter(database)
        return store

    async with Place("postgres", make).scene() as scene:
        await scene.join_away()
        await _all_steps(scene, database, LockTimes(), BATCH, "warm-up")
        for number in range(runs):
            await _all_steps(scene, database, found, tasks, f"{number}")
            found.news_us = min(found.news_us, await _news_us(scene, tasks, f"{number}"))
    return found


async def _news_us(scene: Scene, tasks: int, prefix: str) -> float:
    """Have the dispatcher read and take in what another node submitted; return the CPU of each."""
    state = DispatchState(DispatchSettings(projects=(Project(id="search"),)))
    feed, seconds, count = EventFeed(scene.clock), 0.0, max(1, tasks // NEWS_BATCH)
    feed.open(scene.epoch)
    for batch in range(count):
        names = [f"{prefix} told {batch} {number}" for number in range(NEWS_BATCH)]
        await asyncio.gather(*(scene.submit(name, node_id=AWAY) for name in names))
        began = time.process_time()
        news = await scene.store.news(scene.epoch)
        for record in news.records:
            state.observe(record, scene.clock())
        feed.observe(news.records)
        seconds += time.process_time() - began
    return seconds / (count * NEWS_BATCH) * 1e6


async def _all_steps(
    scene: Scene, database: WatchedDatabase, found: LockTimes, tasks: int, prefix: str
) -> None:
    own = [f"{prefix} here {number}" for number in range(tasks)]
    away = [f"{prefix} away {number}" for number in range(tasks)]
    batches = [range(start, min(start + BATCH, tasks)) for start in range(0, tasks, BATCH)]

    async def measure(kind: str, work: Callable[[range], Awaitable[object]]) -> None:
        before = database.held
        for batch in batches:
            await work(batch)
        after = database.held
        transactions = after.transactions - before.transactions
        found.add(kind, after.seconds - before.seconds, tasks, transactions)

    def each(one: Callable[[int], Awaitable[object]]) -> Callable[[range], Awaitable[object]]:
        return lambda batch: asyncio.gather(*(one(number) for number in batch))

    await measure(SUBMIT, each(lambda n: scene.submit(own[n])))
    await measure(PLAN, lambda b: scene.plan(*(scene.line(own[n]) for n in b)))
    await measure(SETTLE, each(lambda n: scene.settle(own[n])))
    await measure(AWAY_SUBMIT, each(lambda n: scene.submit(away[n], node_id=AWAY)))
    await measure(NEWS, lambda _: scene.store.news(scene.epoch))
    await measure(AWAY_PLAN, lambda b: scene.plan(*(scene.line(away[n], node_id=AWAY) for n in b)))
    await measure(COLLECT, lambda _: scene.store.collect(AWAY))
    await measure(AWAY_SETTLE, each(lambda n: scene.settle(away[n], node_id=AWAY)))
    await measure(BEAT, lambda _: scene.let_time_pass(0.0))
