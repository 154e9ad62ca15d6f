"""All metrics of a node, for Prometheus to fetch.

What is asked of the store or the ledger is asked when somebody fetches, within bounds, and kept for
a moment. Rule: an outage never makes a fetch fail: it answers with what was last known, and says of
the part that is away that it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

import headgate
from headgate.budget_tracker import BudgetTracker
from headgate.core.budgets.accounts import Refused
from headgate.errors import StoreError
from headgate.metrics.budgets import BudgetMetrics
from headgate.metrics.slots import slot_metrics
from headgate.metrics.tasks import (
    Durations,
    Labels,
    count_metrics,
    gauge,
    oldest_wait_seconds,
    share_metrics,
)
from headgate.runtime.engine import Engine
from headgate.runtime.key_slots.status import SlotStatus
from headgate.store import Totals

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4.encode()
FRESH_SECONDS = 1.0
BUDGETS_FRESH_SECONDS = 10.0
READ_SECONDS = 2.0

Result = TypeVar("Result")
CountDeliveries = Callable[[], Awaitable[Mapping[str, int]]]
"""Counts webhooks by their state."""


class Beside(NamedTuple):
    """What the metrics show of parts that the engine does not know."""

    tracker: BudgetTracker | None = None
    streams: Callable[[], int] = lambda: 0
    writer_queue: Callable[[], int] = lambda: 0
    deliveries: CountDeliveries | None = None
    slots: Callable[[], Sequence[SlotStatus]] = tuple


class ServiceMetrics(Collector):
    """The metrics of one node, in a registry of their own."""

    def __init__(self, engine: Engine, beside: Beside) -> None:
        self._engine = engine
        self._beside = beside
        self._registry = CollectorRegistry()
        self._durations = Durations()
        self._agents, self._projects = Labels(), Labels()
        self._totals: Totals | None = None
        self._deliveries: Mapping[str, int] = {}
        self._store_is_up = self._ledger_is_up = False
        self._read_at = self._budgets_read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._shown: list[Metric] = []
        self._budgets = BudgetMetrics(self._registry)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        engine.feed.witnesses.append(self._durations)
        engine.feed.count_refusal = self._refused

    async def text(self) -> bytes:
        """Return everything in the text format, as fresh as a fetch needs it."""
        async with self._reading:
            now = time.monotonic()
            if now - self._read_at >= FRESH_SECONDS:
                await self._read(now)
            # The engine's own are taken here, in its loop; the text is made beside it.
            self._shown = list(self._present())
            return await asyncio.to_thread(generate_latest, self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what was last put together, as prometheus-client asks for it."""
        yield from self._shown

    async def _read(self, now: float) -> None:
        totals, deliveries, _ = await asyncio.gather(
            _within(self._engine.totals()), self._counted(), self._read_budgets(now)
        )
        self._read_at = time.monotonic()
        self._store_is_up = totals is not None
        self._totals = totals or self._totals
        self._deliveries = deliveries or self._deliveries

    async def _counted(self) -> Mapping[str, int] | None:
        count = self._beside.deliveries
        return None if count is None else await _within(count())

    async def _read_budgets(self, now: float) -> None:
        if now - self._budgets_read_at < BUDGETS_FRESH_SECONDS and self._ledger_is_up:
            return
        self._budgets_read_at = now
        self._ledger_is_up = await _within(self._refreshed()) is not None

    async def _refreshed(self) -> bool:
        if self._beside.tracker is not None:
            await self._budgets.refresh(self._beside.tracker)
        return True

    def _refused(self, refused: Refused) -> None:
        self._budgets.count_rejection(refused.scope, refused.unit.value)

    def _present(self) -> Iterator[Metric]:
        yield InfoMetricFamily("headgate_build", "The version.", {"version": headgate.__version__})
        if self._totals is not None:
            yield from count_metrics(self._totals, self._agents)
        yield self._durations.wait.metric()
        yield self._durations.run.metric()
        yield from self._states()
        yield from self._of_dispatcher()
        yield self._webhooks()
        yield from slot_metrics(self._beside.slots(), self._engine.now())

    def _states(self) -> Iterator[Metric]:
        engine, beside = self._engine, self._beside
        text = "Whether this node takes and runs tasks, as /readyz says."
        yield gauge("headgate_ready", text, engine.health().is_ready)
        yield gauge("headgate_store_up", "Whether the store answered.", self._store_is_up)
        yield gauge("headgate_ledger_up", "Whether the ledger answered.", self._ledger_is_up)
        leads = engine.dispatcher.is_leading
        yield gauge("headgate_dispatcher", "Whether this node dispatches.", leads)
        text = "Attempts that run on this node."
        yield gauge("headgate_node_attempts", text, len(engine.runner))
        yield gauge("headgate_event_streams", "Streams of events.", beside.streams())
        text = "Calls that wait for the next transaction."
        yield gauge("headgate_writer_queue", text, beside.writer_queue())

    def _of_dispatcher(self) -> Iterator[Metric]:
        """Yield what only the node knows that dispatches."""
        desk, epoch = self._engine.dispatcher.desk, self._engine.feed.epoch
        if desk is None or epoch is None:
            return
        yield gauge("headgate_dispatcher_epoch", "The epoch of this dispatcher.", epoch)
        age = oldest_wait_seconds(desk.waiting, self._engine.now())
        text = "How long the oldest task has waited that could start."
        yield gauge("headgate_oldest_queued_seconds", text, age)
        yield from share_metrics(desk.settings.projects, desk.figures.tokens, self._projects)

    def _webhooks(self) -> Metric:
        text = "Webhooks that are kept, by state; dead ones are not tried again."
        metric = GaugeMetricFamily("headgate_webhooks", text, labels=("state",))
        for state, count in self._deliveries.items():
            metric.add_metric((state,), count)
        return metric


async def _within(asked: Awaitable[Result]) -> Result | None:
    """Return an answer that comes soon enough; None if there is none."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await asked
    except (TimeoutError, StoreError):
        return None
