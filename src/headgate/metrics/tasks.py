"""What happens to tasks as Prometheus metrics: counts by agent, waits, runs, shares.

The counts come from the store, so that they go on after a restart. The histograms are of this
process: how long tasks waited and ran that this node has dispatched. Rule: at most `MAX_LABELS`
agents and projects have a label of their own, the rest share `other`, because every label is a time
series that somebody has to keep.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from headgate.core.dispatch.desk_settings import Waiting
from headgate.core.projects import Project
from headgate.core.shares import shares
from headgate.core.tasks.events import EventKind
from headgate.core.tasks.records import TaskRecord, waits_since
from headgate.runtime.looking.outlook import longest_wait
from headgate.runtime.telling.event_feed import Happening
from headgate.store import LaneCount, Totals

MAX_LABELS = 200
OTHER = "other"
OPEN_LANE = "(open)"
WAIT_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0)
RUN_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0)
MS_PER_SECOND = 1_000

COUNTS = {
    "submitted": "Tasks that were taken.",
    "completed": "Tasks that succeeded.",
    "failed": "Tasks that failed, the expired ones included.",
    "cancelled": "Tasks that were cancelled.",
    "rejected": "Tasks that were turned away, or that no budget will hold.",
    "expired": "Tasks whose deadline passed while they waited.",
}
"""The counts of the store that are metrics, with what each says."""


class Histogram:
    """Counts of times by bucket; much cheaper to add to than one of prometheus-client."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def metric(self) -> HistogramMetricFamily:
        """Return what was counted, as prometheus-client has it."""
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Durations:
    """How long tasks waited and ran, as the feed tells; add it to the witnesses of one."""

    def __init__(self) -> None:
        self.wait = Histogram(
            "headgate_task_wait_seconds",
            "How long attempts were kept waiting that this node has dispatched.",
            WAIT_BUCKETS,
        )
        self.run = Histogram(
            "headgate_task_run_seconds",
            "How long attempts ran that this node has dispatched, however they ended.",
            RUN_BUCKETS,
        )

    def __call__(self, happening: Happening, record: TaskRecord) -> None:
        """Count the wait of an attempt that starts, and the run of one that ends."""
        kind = happening.kind
        if kind is EventKind.RUNNING:
            since = waits_since(record)
            if since is not None:
                self.wait.add(max(0.0, happening.at - since))
        elif kind is not EventKind.QUEUED:
            started_at = record.progress.started_at
            if started_at is not None and happening.attempt:
                self.run.add(max(0.0, happening.at - started_at))


class Labels:
    """Which names have a label of their own: the first ones, for as long as they are there."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def shared_out(self, names: Iterable[str]) -> dict[str, str]:
        """Return the label of each of these names."""
        given = list(names)
        self._names &= set(given)
        for name in given:
            if len(self._names) >= MAX_LABELS:
                break
            self._names.add(name)
        return {name: name if name in self._names else OTHER for name in given}


def count_metrics(totals: Totals, labels: Labels) -> Iterator[Metric]:
    """Yield what has happened, in all and by agent."""
    by_agent = _by_agent(totals.lanes, labels)
    for name, text in COUNTS.items():
        whole = f"headgate_tasks_{name}"
        yield CounterMetricFamily(whole, text, value=getattr(totals, name))
        each = CounterMetricFamily(f"headgate_agent_tasks_{name}", text, labels=("agent",))
        for agent, lanes in by_agent.items():
            each.add_metric((agent,), sum(getattr(lane, name) for lane in lanes))
        yield each
    yield from _dispatch_metrics(totals, by_agent)
    yield from _present_metrics(totals, by_agent)


def share_metrics(
    projects: Iterable[Project], tokens: Mapping[str, int], labels: Labels
) -> Iterator[Metric]:
    """Yield the share that each project should have, and the one that it has."""
    found = shares(projects, tokens)
    targets = {share.project_id: share.target for share in found}
    actual = {share.project_id: share.actual for share in found}
    own = labels.shared_out(targets)
    yield _shares("target", "The share that a project should have.", targets, own)
    yield _shares("actual", "The share of the usage window that a project has.", actual, own)


def oldest_wait_seconds(waiting: Mapping[str, Waiting], now: float) -> float:
    """Return how long the oldest task has waited that is not waiting for its time or a parent."""
    found = longest_wait(waiting, now)
    return 0.0 if found is None else now - found.since


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def _by_agent(lanes: Iterable[LaneCount], labels: Labels) -> dict[str, list[LaneCount]]:
    ranked = sorted(lanes, key=lambda lane: -lane.started)
    own = labels.shared_out(lane.agent_id for lane in ranked)
    by_agent: dict[str, list[LaneCount]] = {}
    for lane in ranked:
        by_agent.setdefault(own[lane.agent_id] or OPEN_LANE, []).append(lane)
    return by_agent


def _dispatch_metrics(totals: Totals, by_agent: dict[str, list[LaneCount]]) -> Iterator[Metric]:
    text = "Attempts that were started."
    yield CounterMetricFamily("headgate_dispatches", text, value=totals.started)
    each = CounterMetricFamily("headgate_agent_dispatches", text, labels=("agent",))
    for agent, lanes in by_agent.items():
        each.add_metric((agent,), sum(lane.started for lane in lanes))
    yield each
    text = "Seconds that attempts were kept waiting before they started, summed up."
    seconds = totals.wait_ms / MS_PER_SECOND
    yield CounterMetricFamily("headgate_dispatch_latency_seconds", text, value=seconds)
    each = CounterMetricFamily("headgate_agent_dispatch_latency_seconds", text, labels=("agent",))
    for agent, lanes in by_agent.items():
        each.add_metric((agent,), sum(lane.wait_ms for lane in lanes) / MS_PER_SECOND)
    yield each


def _present_metrics(totals: Totals, by_agent: dict[str, list[LaneCount]]) -> Iterator[Metric]:
    texts = {"queued": "Tasks that wait.", "inflight": "Tasks that are assigned or run."}
    for name, text in texts.items():
        whole = sum(getattr(lane, name) for lane in totals.lanes)
        yield gauge(f"headgate_tasks_{name}", text, whole)
        each = GaugeMetricFamily(f"headgate_agent_tasks_{name}", text, labels=("agent",))
        for agent, lanes in by_agent.items():
            each.add_metric((agent,), sum(getattr(lane, name) for lane in lanes))
        yield each


def _shares(name: str, text: str, shares: dict[str, float], own: dict[str, str]) -> Metric:
    metric = GaugeMetricFamily(f"headgate_project_share_{name}", text, labels=("project",))
    summed: dict[str, float] = {}
    for project, share in shares.items():
        summed[own[project]] = summed.get(own[project], 0.0) + share
    for project, share in summed.items():
        metric.add_metric((project,), share)
    return metric
