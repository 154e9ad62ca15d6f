"""All metrics of a node, for Prometheus to fetch.

What is asked of the store or the ledger is asked when somebody fetches, within bounds, and kept for
a moment. Rule: an outage never makes a fetch fail: it answers with what was last known, and says of
the part that is away that it is.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

import headgate
from headgate.budgets.tracker import LedgerTracker
from headgate.core.admission import QueueLimit
from headgate.core.budgets.ledger import Account, Ledger, Refused, ReserveRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import ROOT, Scope, ancestors, depth, leaf_kind, leaf_name
from headgate.core.call import CallRecord, CallState
from headgate.core.dispatch_state import LaneStats, Waiting
from headgate.core.estimates import SilentKind
from headgate.core.events import EventKind
from headgate.core.fair_share import shares
from headgate.core.gates import GateClosure, known_by_name
from headgate.core.money import MICRO_PER_USD, to_usd_float
from headgate.core.retention import StoreSize
from headgate.core.slots.slot import why_off
from headgate.core.snapshot import Project
from headgate.core.task import TaskRecord, waits_since
from headgate.errors import LedgerUnavailableError, StoreError
from headgate.storage.store import LaneCount, Totals
from headgate.storage.usage import OTHER as OTHER_MODELS
from headgate.storage.usage import UsageReports, UsageTotal

if TYPE_CHECKING:
    from headgate.engine.engine import Engine
    from headgate.engine.events import Happening
    from headgate.engine.slots.slot import LoopHealth, SlotStatus

# Every metric that a node shows. What a fetch answers with is made from this list, and so are the
# dashboard for Grafana and the rules for Prometheus that `headgate metrics` prints. Rule: what is
# not in the list cannot be shown.


class MetricInfo(NamedTuple):
    """What a metric is called and what it says.

    `across` makes one value of those of several nodes: `sum` where each node counts its own,
    otherwise `max` or `min`, because each tells the same of the whole service.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge", "histogram"] = "gauge"
    across: Literal["max", "min", "sum"] = "max"


class LaneMetric(NamedTuple):
    """A metric that is shown in all, by agent and by project, and the field of a lane it sums."""

    name: str
    text: str
    field: str
    divisor: int = 1
    kind: Literal["counter", "gauge"] = "counter"


MS_PER_SECOND = 1_000

LANE_METRICS = (
    LaneMetric("tasks_submitted_total", "Tasks that were accepted.", "submitted"),
    LaneMetric("tasks_completed_total", "Tasks that succeeded.", "completed"),
    LaneMetric("tasks_failed_total", "Tasks that failed, including expired tasks.", "failed"),
    LaneMetric("tasks_cancelled_total", "Tasks that were cancelled.", "cancelled"),
    LaneMetric(
        "tasks_rejected_total",
        "Tasks that were refused by a full queue or a budget without room.",
        "rejected",
    ),
    LaneMetric("tasks_expired_total", "Tasks whose deadline passed while they waited.", "expired"),
    LaneMetric("dispatches_total", "Attempts that were started.", "started"),
    LaneMetric(
        "dispatch_latency_seconds_total",
        "Seconds that attempts waited before they started; divide by the dispatches for the mean.",
        "wait_ms",
        divisor=MS_PER_SECOND,
    ),
    LaneMetric("tasks_queued", "Tasks that wait.", "queued", kind="gauge"),
    LaneMetric("tasks_inflight", "Tasks that are assigned or run.", "inflight", kind="gauge"),
)

AMOUNTS = {
    "spent": "that were spent in the window, without overrun.",
    "reserved": "that are reserved.",
    "overrun": "that were spent in the window above the reservations.",
    "unaccepted": "that tenants claim beyond their own limits, and that nobody has accepted.",
}
"""The amounts that every budget has, with what each says."""

UNIT_WORDS = {"usd": "Dollars", "tokens": "Tokens"}

CALL_LABELS = ("upstream", "model")
CALL_TIMES = {
    "wait": "How long calls waited for a permit, a key and money.",
    "first_byte": "How long an upstream took to its first byte, counted from the end of that wait.",
    "added": "How long the gateway worked on calls before the first try, without waits or uploads.",
}

_OLDEST = (
    "How long the oldest task has waited; tasks that wait for a time or a parent do not count."
)


def _lane_metrics() -> Iterator[MetricInfo]:
    for metric in LANE_METRICS:
        yield MetricInfo(f"headgate_{metric.name}", metric.text, kind=metric.kind)
        for label in ("agent", "project"):
            name = f"headgate_{label}_{metric.name}"
            yield MetricInfo(name, metric.text, (label,), metric.kind)


def _budget_metrics() -> Iterator[MetricInfo]:
    for unit, word in UNIT_WORDS.items():
        text = f"{word} that a budget has left; `other` is the least of the rest."
        name = f"headgate_budget_remaining_{unit}"
        yield MetricInfo(name, text, ("workflow", "scope"), across="min")
        text = f"{word} that a budget may use in its window; missing if it has no such limit."
        yield MetricInfo(f"headgate_budget_limit_{unit}", text, ("scope",))
        for amount, text in AMOUNTS.items():
            yield MetricInfo(f"headgate_budget_{amount}_{unit}", f"{word} {text}", ("scope",))


_LIST = (
    *_lane_metrics(),
    MetricInfo(
        "headgate_queue_rejections_total",
        "Tasks that were refused because a limit on waiting tasks was reached: `global` is"
        " max_queue_size, `project` queue_share, `agent` max_per_agent, `scheduled` max_scheduled,"
        " `project_scheduled` and `project_store` a project's part of max_scheduled and of the"
        " store.",
        ("limit",),
        "counter",
    ),
    MetricInfo(
        "headgate_task_wait_seconds",
        "How long attempts waited; only attempts that this node dispatched.",
        kind="histogram",
        across="sum",
    ),
    MetricInfo(
        "headgate_task_run_seconds",
        "How long attempts ran, however they ended; only attempts that this node dispatched.",
        kind="histogram",
        across="sum",
    ),
    MetricInfo(
        "headgate_agent_tasks_ready",
        "Tasks that wait for nothing but a free worker or node: no budget, pause, time or parent"
        " stops them.",
        ("agent",),
    ),
    MetricInfo("headgate_oldest_queued_seconds", _OLDEST),
    MetricInfo("headgate_project_oldest_queued_seconds", _OLDEST, ("project",)),
    MetricInfo(
        "headgate_closures",
        "Closures that now keep tasks from starting, of budgets (`scope`), slots, targets,"
        " agents, upstreams and others. `cause` says who closed it: `budget`, `rate`, `provider`,"
        " `credit`, `target`, `worker`, `operator` or `settings`.",
        ("kind", "cause"),
    ),
    MetricInfo(
        "headgate_project_share_target",
        "The share that a project should have, by its weight.",
        ("project",),
    ),
    MetricInfo(
        "headgate_project_share_actual",
        "The share that a project has of the tokens in the usage window.",
        ("project",),
    ),
    MetricInfo(
        "headgate_spend_usd_total",
        "Dollars that tasks and calls have cost: `reported` by the target, `priced` by the price"
        " list, or `assumed` if no cost was reported and the reservation was booked.",
        ("project", "model", "kind"),
        "counter",
    ),
    MetricInfo(
        "headgate_tokens_total",
        "Tokens that tasks and calls have used, `reported` or `assumed`.",
        ("project", "model", "kind"),
        "counter",
    ),
    MetricInfo(
        "headgate_overruns_total",
        "Attempts that cost more than their reservation, if anything was reserved.",
        ("project", "model"),
        "counter",
    ),
    MetricInfo(
        "headgate_unpriced_tokens_total",
        "Tokens of models without a price, for which the reservation was booked: add the price.",
        ("project", "model"),
        "counter",
    ),
    MetricInfo(
        "headgate_silent_kinds",
        "1 for work of the last day in a limited budget that reports nothing and has no estimate;"
        " at most 20.",
        ("project", "target", "unit"),
    ),
    MetricInfo(
        "headgate_calls_total",
        "Calls through the gateway that have ended: `done`, `failed`, `refused` or `cancelled`.",
        (*CALL_LABELS, "outcome"),
        "counter",
        "sum",
    ),
    MetricInfo(
        "headgate_call_tokens_total",
        "Tokens of these calls, as their upstream reported them: `input` without what was"
        " `cached`, `output`, and `assumed` if none were reported.",
        (*CALL_LABELS, "kind"),
        "counter",
        "sum",
    ),
    MetricInfo(
        "headgate_call_cost_usd_total",
        "Dollars that were booked for these calls.",
        CALL_LABELS,
        "counter",
        "sum",
    ),
    *(
        MetricInfo(f"headgate_call_{name}_seconds", text, CALL_LABELS, "histogram", "sum")
        for name, text in CALL_TIMES.items()
    ),
    MetricInfo(
        "headgate_calls_waiting",
        "Calls that wait, by the upstream that they go to.",
        ("upstream",),
        across="sum",
    ),
    MetricInfo("headgate_calls_running", "Calls that run.", ("upstream",), across="sum"),
    MetricInfo(
        "headgate_project_calls_total",
        "Calls of a project that have ended: `done`, `failed`, `refused` or `cancelled`.",
        ("project", "outcome"),
        "counter",
        "sum",
    ),
    MetricInfo(
        "headgate_project_calls_waiting",
        "Calls of a project that wait.",
        ("project",),
        across="sum",
    ),
    *_budget_metrics(),
    MetricInfo(
        "headgate_budget_rejections_total",
        "Reservations that a budget refused: too few `micro_usd` or `tokens` were left, too"
        " much of an unknown `kind` of work ran, or the ledger was `unavailable`.",
        ("scope", "reason"),
        "counter",
        "sum",
    ),
    MetricInfo(
        "headgate_ready",
        "1 if this node accepts and runs tasks, as /readyz says.",
        across="min",
    ),
    MetricInfo(
        "headgate_store_rejections_total",
        "Tasks that this node refused because the store had no room.",
        kind="counter",
        across="sum",
    ),
    MetricInfo(
        "headgate_store_used_bytes",
        "The size of the store, without reusable space; on PostgreSQL only with max_store_bytes.",
    ),
    MetricInfo(
        "headgate_store_free_bytes",
        "The space that is free for the store, on the disk of an SQLite file and in the file.",
        across="min",
    ),
    MetricInfo(
        "headgate_store_room_bytes",
        "The space that new tasks may use; missing if nothing limits it.",
        across="min",
    ),
    MetricInfo(
        "headgate_store_max_bytes",
        "The largest size of the store, max_store_bytes; missing if it is not set.",
    ),
    MetricInfo(
        "headgate_store_up",
        "1 if the store answered this fetch, or one half a second before.",
        across="min",
    ),
    MetricInfo(
        "headgate_ledger_up",
        "1 if the ledger answered this fetch, or one half a second before.",
        across="min",
    ),
    MetricInfo(
        "headgate_dispatcher",
        "1 on the node that dispatches; the sum over all nodes should be 1.",
        across="sum",
    ),
    MetricInfo(
        "headgate_dispatcher_epoch",
        "The number of the dispatcher's election, on the node that dispatches.",
    ),
    MetricInfo("headgate_node_attempts", "Attempts that run on this node.", across="sum"),
    MetricInfo("headgate_writer_queue", "Writes that wait for the next transaction.", across="sum"),
    MetricInfo("headgate_event_streams", "Streams of events that are open.", across="sum"),
    MetricInfo(
        "headgate_webhooks",
        "Webhooks that are kept: `pending` ones are tried again, `dead` ones are not.",
        ("state",),
    ),
    MetricInfo(
        "headgate_slot_percent_used",
        "How much of the quota window is used, from 0 to 100; missing before the first reading.",
        ("slot",),
    ),
    MetricInfo(
        "headgate_slot_reset_timestamp_seconds",
        "When the window that is open resets; missing while none is.",
        ("slot",),
    ),
    MetricInfo(
        "headgate_slot_closed",
        "1 if tasks of the slot wait for it: exhausted, paused, disabled.",
        ("slot",),
    ),
    MetricInfo(
        "headgate_slot_disabled",
        "1 if nothing is sent for it: by the file, by hand, by a refused key, by too many errors.",
        ("slot",),
    ),
    MetricInfo(
        "headgate_slot_wakes_disabled",
        "1 if wakes of the slot were disabled because none was confirmed.",
        ("slot",),
    ),
    MetricInfo("headgate_slot_poll_errors", "Polls that failed in a row.", ("slot",)),
    MetricInfo(
        "headgate_slot_wake_errors", "Readings in a row that did not confirm a wake.", ("slot",)
    ),
    MetricInfo(
        "headgate_slot_polls_total",
        "Readings of the quota by this node: `ok`, `observed` in real traffic, the kind of the"
        " failure, or `stale` where the answer came too late to count.",
        ("slot", "outcome"),
        "counter",
        "sum",
    ),
    MetricInfo(
        "headgate_slot_wakes_total",
        "Wakes by this node: `ok`, the kind of the failure, `skipped` where the window was open,"
        " `shared` where another slot of the key had sent one, `too_late` where it was"
        " left to its retry.",
        ("slot", "outcome"),
        "counter",
        "sum",
    ),
    MetricInfo(
        "headgate_slot_loop_restarts_total",
        "How often a loop of the slot, `wake` or `quota`, failed or stood still and was"
        " started again.",
        ("slot", "loop"),
        "counter",
        "sum",
    ),
    MetricInfo(
        "headgate_slot_loop_step_age_seconds",
        "How long ago a loop of the slot ended a step; a wake loop steps every minute.",
        ("slot", "loop"),
    ),
    MetricInfo("headgate_build_info", "Always 1; the version is the label.", ("version",)),
)

METRICS = {one.name: one for one in _LIST}


def counter(name: str, value: float | None = None) -> CounterMetricFamily:
    """Return a counter of the list: one without labels has its value, others get theirs."""
    info = METRICS[name]
    labels = info.labels if value is None else None
    return CounterMetricFamily(name, info.text, value=value, labels=labels)


def gauge(name: str, value: float | None = None) -> GaugeMetricFamily:
    """Return a gauge of the list: one without labels has its value, others get theirs."""
    info = METRICS[name]
    labels = info.labels if value is None else None
    return GaugeMetricFamily(name, info.text, value=value, labels=labels)


# What happens to tasks as Prometheus metrics: counts by agent, waits, runs, shares.
#
# The counts come from the store, so that they go on after a restart. The histograms are of this
# process: how long tasks waited and ran that this node has dispatched. Rule: at most `MAX_LABELS`
# agents and projects have a label of their own, the rest share `other`, because every label is a
# time series that somebody has to keep.

MAX_LABELS = 200
OTHER = "other"
OPEN_LANE = "(open)"
WAIT_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0)
RUN_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0)
MAX_WAITING_READ = 20_000


class Buckets:
    """Counts of times by bucket; much cheaper to add to than a histogram of prometheus-client."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds

    def counts(self) -> list[tuple[str, float]]:
        """Return how many times were at most as long as each bound."""
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))


class Histogram(Buckets):
    """Times by bucket, under a name."""

    def __init__(self, name: str, buckets: Sequence[float]) -> None:
        super().__init__(buckets)
        self._info = METRICS[name]

    def metric(self) -> HistogramMetricFamily:
        """Return what was counted, as prometheus-client has it."""
        name, text, *_ = self._info
        return HistogramMetricFamily(name, text, buckets=self.counts(), sum_value=self.total)


class Durations:
    """How long tasks waited and ran, as the feed tells; subscribe it to the events of one."""

    def __init__(self) -> None:
        self.wait = Histogram("headgate_task_wait_seconds", WAIT_BUCKETS)
        self.run = Histogram("headgate_task_run_seconds", RUN_BUCKETS)

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


def count_metrics(totals: Totals, agents: Labels, projects: Labels) -> Iterator[Metric]:
    """Yield what has happened and what waits and runs, in all, by agent and by project."""
    lanes_by = {
        "agent": _by_label(totals.lanes, agents, lambda lane: lane.agent_id, empty=OPEN_LANE),
        "project": _by_label(
            (*totals.lanes, *totals.forgotten), projects, lambda lane: lane.project_id
        ),
    }
    for name, _, field, divisor, kind in LANE_METRICS:
        family = counter if kind == "counter" else gauge
        # What happened is counted for the whole store as well; what is there now is only by lane.
        amount = getattr(totals, field, None)
        if amount is None:
            amount = _total(totals.lanes, field)
        yield family(f"headgate_{name}", amount / divisor)
        for label, lanes_of in lanes_by.items():
            each = family(f"headgate_{label}_{name}")
            for owner, lanes in lanes_of.items():
                each.add_metric((owner,), _total(lanes, field) / divisor)
            yield each
    refused = counter("headgate_queue_rejections_total")
    for limit in QueueLimit:
        # Where the store has no room, nothing is written of it; each node has its own count.
        if limit is not QueueLimit.STORE:
            refused.add_metric((limit.value,), getattr(totals, f"rejected_by_{limit.value}"))
    yield refused


def store_metrics(size: StoreSize | None, refused: int) -> Iterator[Metric]:
    """Yield how large the store is, what is free for it, and how often there was no room."""
    yield counter("headgate_store_rejections_total", refused)
    if size is None:
        return
    amounts = {
        "used": size.used_bytes,
        "free": size.free_bytes,
        "room": size.room_bytes,
        "max": size.max_bytes,
    }
    for name, amount in amounts.items():
        if amount is not None:
            yield gauge(f"headgate_store_{name}_bytes", amount)


def share_metrics(
    projects: Iterable[Project], tokens: Mapping[str, int], labels: Labels
) -> Iterator[Metric]:
    """Yield the share that each project should have, and the one that it has."""
    found = shares(projects, tokens)
    targets = {share.project_id: share.target for share in found}
    actual = {share.project_id: share.actual for share in found}
    own = labels.shared_out(targets)
    yield _shares("target", targets, own)
    yield _shares("actual", actual, own)


def ready_metric(stats: Iterable[LaneStats], lanes: Iterable[LaneCount], labels: Labels) -> Metric:
    """Return how many tasks of each agent wait for nothing but capacity; 0 of one that has none."""
    found = {lane.agent_id: 0 for lane in lanes}
    for one in stats:
        found[one.agent_id] = found.get(one.agent_id, 0) + one.lacking_workers
    own = labels.shared_out(found)
    shown: dict[str, int] = {}
    for agent_id, ready in found.items():
        label = own[agent_id] or OPEN_LANE
        shown[label] = shown.get(label, 0) + ready
    metric = gauge("headgate_agent_tasks_ready")
    for label, ready in shown.items():
        metric.add_metric((label,), ready)
    return metric


def oldest_waits(waiting: Mapping[str, Waiting], now: float) -> dict[str, float]:
    """Return how long the oldest task of each project has waited that could start, in seconds.

    A task that waits for its time or for a parent could not start, so nobody keeps it waiting.
    """
    since: dict[str, float] = {}
    for one in islice(waiting.values(), MAX_WAITING_READ):
        task = one.task
        began = max(task.created_at, task.not_before or 0.0)
        if not one.waiting_for and began < since.get(task.project_id, now):
            since[task.project_id] = began
    return {project_id: now - began for project_id, began in since.items()}


def closure_metric(closures: Iterable[GateClosure]) -> Metric:
    """Return how much is closed, by what it is and who closed it."""
    metric = gauge("headgate_closures")
    for key, number in Counter((one.kind, one.cause) for one in known_by_name(closures)).items():
        metric.add_metric(key, number)
    return metric


def oldest_metrics(waits: Mapping[str, float], labels: Labels) -> Iterator[Metric]:
    """Yield how long the oldest task has waited that could start, in all and by project."""
    yield gauge("headgate_oldest_queued_seconds", max(waits.values(), default=0.0))
    each = gauge("headgate_project_oldest_queued_seconds")
    own, longest = labels.shared_out(waits), dict[str, float]()
    for project_id, seconds in waits.items():
        longest[own[project_id]] = max(seconds, longest.get(own[project_id], 0.0))
    for project, seconds in longest.items():
        each.add_metric((project,), seconds)
    yield each


def _by_label(
    lanes: Iterable[LaneCount],
    labels: Labels,
    owner_of: Callable[[LaneCount], str],
    *,
    empty: str = "",
) -> dict[str, list[LaneCount]]:
    ranked = sorted(lanes, key=lambda lane: -lane.started)
    own = labels.shared_out(owner_of(lane) for lane in ranked)
    found: dict[str, list[LaneCount]] = {}
    for lane in ranked:
        found.setdefault(own[owner_of(lane)] or empty, []).append(lane)
    return found


def _total(lanes: Iterable[LaneCount], field: str) -> int:
    return sum(getattr(lane, field) for lane in lanes)


def _shares(name: str, shares: dict[str, float], own: dict[str, str]) -> Metric:
    metric = gauge(f"headgate_project_share_{name}")
    summed: dict[str, float] = {}
    for project, share in shares.items():
        summed[own[project]] = summed.get(own[project], 0.0) + share
    for project, share in summed.items():
        metric.add_metric((project,), share)
    return metric


# What tasks have used, as counters that never go down: sums of the store over all time.

NO_MODEL = "(none)"


def usage_metrics(totals: Iterable[UsageTotal]) -> Iterator[Metric]:
    """Yield the dollars and tokens that were booked, by project, model and how they are known.

    Beside them is how often more was booked than was reserved.
    """
    dollars: dict[tuple[str, str, str], int] = {}
    tokens: dict[tuple[str, str, str], int] = {}
    overruns: dict[tuple[str, str], int] = {}
    unpriced: dict[tuple[str, str], int] = {}
    projects: set[str] = set()
    for one in totals:
        if len(projects) < MAX_LABELS:
            projects.add(one.project_id)
        project = one.project_id if one.project_id in projects else OTHER
        model = OTHER if one.model == OTHER_MODELS else one.model or NO_MODEL
        if one.unpriced_tokens:
            both = (project, model)
            unpriced[both] = unpriced.get(both, 0) + one.unpriced_tokens
        said = one.micro_usd - one.assumed_micro_usd - one.priced_micro_usd
        for kind, micro_usd in (
            ("reported", said),
            ("priced", one.priced_micro_usd),
            ("assumed", one.assumed_micro_usd),
        ):
            key = (project, model, kind)
            dollars[key] = dollars.get(key, 0) + micro_usd
        for kind, amount in (
            ("reported", one.tokens - one.assumed_tokens),
            ("assumed", one.assumed_tokens),
        ):
            key = (project, model, kind)
            tokens[key] = tokens.get(key, 0) + amount
        overruns[project, model] = overruns.get((project, model), 0) + one.overruns
    spend = counter("headgate_spend_usd_total")
    for key, micro_usd in dollars.items():
        spend.add_metric(key, to_usd_float(micro_usd))
    yield spend
    used = counter("headgate_tokens_total")
    for key, amount in tokens.items():
        used.add_metric(key, amount)
    yield used
    over = counter("headgate_overruns_total")
    for pair, count in overruns.items():
        over.add_metric(pair, count)
    yield over
    without = counter("headgate_unpriced_tokens_total")
    for both, amount in unpriced.items():
        without.add_metric(both, amount)
    yield without


def silence_metric(silent: Iterable[SilentKind]) -> Metric:
    """Return the work of the last day that reports nothing, so that no budget sees it."""
    found = gauge("headgate_silent_kinds")
    for one in silent:
        unit = "tokens" if one.is_tokens else "usd"
        found.add_metric((one.kind.project_id, one.kind.name, unit), 1)
    return found


# Calls through the gateway as Prometheus metrics: outcomes, tokens, cost, and where time went.
#
# Counted in this process when a call ends, so a restart begins at zero; what the store has summed
# up of them is in the usage above. Rule: a model has a label only once an upstream has answered for
# it, since anybody can name one, and at most `MAX_CALL_SERIES` pairs of an upstream and a model
# have one; the rest share `other`.

MAX_CALL_SERIES = 100
FIRST_BYTE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
ADDED_BUCKETS = (0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
SECONDS_PER_DAY = 86_400

Series = tuple[str, str]
"""An upstream and a model, as labels have them."""


class _CallCounts:
    """What was counted of the calls of one upstream and model."""

    __slots__ = ("added", "first_byte", "micro_usd", "outcomes", "tokens", "wait")

    def __init__(self) -> None:
        self.outcomes: dict[CallState, int] = {}
        self.tokens = {"input": 0, "cached": 0, "output": 0, "assumed": 0}
        self.micro_usd = 0
        self.wait = Buckets(WAIT_BUCKETS)
        self.first_byte = Buckets(FIRST_BYTE_BUCKETS)
        self.added = Buckets(ADDED_BUCKETS)


class CallMetrics:
    """Counts calls as they end; tell it of each one."""

    def __init__(self) -> None:
        self._counts: dict[Series, _CallCounts] = {}
        self._day = 0
        self._today: dict[str, int] = {}
        self._projects: dict[str, dict[CallState, int]] = {}
        self.ended = 0

    def __call__(self, record: CallRecord) -> None:
        """Count a call that has ended."""
        self.ended += 1
        self._count_today(record)
        state = record.state
        outcomes = self._outcomes_of(record.project_id)
        outcomes[state] = outcomes.get(state, 0) + 1
        counts = self._counts_of(record)
        counts.outcomes[state] = counts.outcomes.get(state, 0) + 1
        ended_at = record.ended_at or record.created_at
        started_at = record.started_at
        counts.wait.add(max(0.0, (started_at or ended_at) - record.created_at))
        if started_at is not None and record.first_byte_at is not None:
            counts.first_byte.add(max(0.0, record.first_byte_at - started_at))
        cached = record.cached_tokens or 0
        tokens = counts.tokens
        # Whatever an upstream says, a counter never goes down.
        tokens["input"] += max(0, (record.input_tokens or 0) - cached)
        tokens["cached"] += max(0, cached)
        tokens["output"] += max(0, record.output_tokens or 0)
        tokens["assumed"] += record.assumed_tokens
        counts.micro_usd += record.micro_usd or 0

    def _count_today(self, record: CallRecord) -> None:
        day = int((record.ended_at or 0.0) // SECONDS_PER_DAY)
        if day != self._day:
            self._day, self._today = day, {}
        project = record.project_id
        if project not in self._today and len(self._today) >= MAX_LABELS:
            project = OTHER
        self._today[project] = self._today.get(project, 0) + (record.micro_usd or 0)

    def _outcomes_of(self, project_id: str) -> dict[CallState, int]:
        found = self._projects.get(project_id)
        if found is not None:
            return found
        name = project_id if len(self._projects) < MAX_LABELS else OTHER
        return self._projects.setdefault(name, {})

    def today_micro_usd(self, now: float, project_id: str | None = None) -> int:
        """Return what the calls of a project, or all, cost that ended here on this day of UTC."""
        if int(now // SECONDS_PER_DAY) != self._day:
            return 0
        if project_id is not None:
            return self._today.get(project_id, 0)
        return sum(self._today.values())

    def count_added(self, record: CallRecord, seconds: float) -> None:
        """Count the time that a call spent here, without its wait and without its upstream."""
        self._counts_of(record).added.add(max(0.0, seconds))

    def _counts_of(self, record: CallRecord) -> _CallCounts:
        series = (record.upstream, record.upstream_model or record.model)
        counts = self._counts.get(series)
        if counts is not None:
            return counts
        is_known = record.state is CallState.DONE
        if not is_known or len(self._counts) >= MAX_CALL_SERIES:
            series = (record.upstream, OTHER)
        return self._counts.setdefault(series, _CallCounts())

    def metrics(self, live: Iterable[CallRecord]) -> Iterator[Metric]:
        """Yield what was counted, and how many calls wait and run now."""
        yield from self._counters()
        yield from self._times()
        yield from _live_calls(list(live))

    def _counters(self) -> Iterator[Metric]:
        calls = counter("headgate_calls_total")
        tokens = counter("headgate_call_tokens_total")
        cost = counter("headgate_call_cost_usd_total")
        for series, counts in self._counts.items():
            for state, count in counts.outcomes.items():
                calls.add_metric((*series, state.value), count)
            for kind, amount in counts.tokens.items():
                tokens.add_metric((*series, kind), amount)
            cost.add_metric(series, to_usd_float(counts.micro_usd))
        projects = counter("headgate_project_calls_total")
        for project, outcomes in self._projects.items():
            for state, count in outcomes.items():
                projects.add_metric((project, state.value), count)
        yield from (calls, tokens, cost, projects)

    def _times(self) -> Iterator[Metric]:
        for name in CALL_TIMES:
            info = METRICS[f"headgate_call_{name}_seconds"]
            family = HistogramMetricFamily(info.name, info.text, labels=info.labels)
            for series, counts in self._counts.items():
                found: Buckets = getattr(counts, name)
                family.add_metric(series, found.counts(), found.total)
            yield family


def _live_calls(live: Sequence[CallRecord]) -> Iterator[Metric]:
    waiting, running = gauge("headgate_calls_waiting"), gauge("headgate_calls_running")
    counts: dict[str, list[int]] = {}
    for record in live:
        count = counts.setdefault(record.upstream, [0, 0])
        count[record.state is CallState.RUNNING] += 1
    for upstream, (waits, runs) in counts.items():
        waiting.add_metric((upstream,), waits)
        running.add_metric((upstream,), runs)
    yield from (waiting, running)
    of_projects = gauge("headgate_project_calls_waiting")
    waits_of = Counter(dict.fromkeys((one.project_id for one in live), 0))
    waits_of.update(one.project_id for one in live if one.state is CallState.WAITING)
    shown = dict(waits_of.most_common(MAX_LABELS))
    for project, waits in shown.items():
        of_projects.add_metric((project,), waits)
    if len(shown) < len(waits_of):
        of_projects.add_metric((OTHER,), waits_of.total() - sum(shown.values()))
    yield of_projects


# What slots show to Prometheus: room, resets, wakes, polls, errors, and how their loops do.
#
# Readings are those of the service, the same on every node; counts and loops are those of the
# node that is asked. Rule: labels are the slots that are configured now. One that is gone leaves
# nothing.

Value = Callable[["SlotStatus"], "float | None"]

SLOT_GAUGES: dict[str, Value] = {
    "percent_used": lambda status: status.standing.percent_used,
    "reset_timestamp_seconds": lambda status: status.standing.resets_at,
    "closed": lambda status: status.standing.closure is not None,
    "disabled": lambda status: bool(why_off(status.config, status.row)),
    "wakes_disabled": lambda status: status.row.schedule.wake_auto_disabled,
    "poll_errors": lambda status: status.row.schedule.consecutive_poll_errors,
    "wake_errors": lambda status: status.row.schedule.wake_errors,
}


def slot_metrics(statuses: Sequence[SlotStatus], now: float) -> Iterator[Metric]:
    """Yield the metrics of these slots."""
    for name, value_of in SLOT_GAUGES.items():
        metric = gauge(f"headgate_slot_{name}")
        for status in statuses:
            value = value_of(status)
            if value is not None:
                metric.add_metric((status.config.name,), value)
        yield metric
    yield _counts("polls", statuses)
    yield _counts("wakes", statuses)
    yield from _loops(statuses, now)


def _counts(name: str, statuses: Sequence[SlotStatus]) -> Metric:
    metric = counter(f"headgate_slot_{name}_total")
    for status in statuses:
        for outcome, count in getattr(status, name).items():
            metric.add_metric((status.config.name, outcome), count)
    return metric


def _loops(statuses: Sequence[SlotStatus], now: float) -> Iterator[Metric]:
    restarts = counter("headgate_slot_loop_restarts_total")
    ages = gauge("headgate_slot_loop_step_age_seconds")
    for status in statuses:
        loops = {"wake": status.wake_loop, "quota": status.quota_loop}
        for loop, health in loops.items():
            restarts.add_metric((status.config.name, loop), health.restarts)
            _add_age(ages, (status.config.name, loop), health, now)
    yield restarts
    yield ages


def _add_age(
    ages: GaugeMetricFamily, labels: tuple[str, str], health: LoopHealth, now: float
) -> None:
    if health.last_step_at is not None:
        ages.add_metric(labels, max(0.0, now - health.last_step_at))


# Budgets as Prometheus metrics: what remains, what is reserved, what was refused.
#
# Refusals are counted when they happen; the gauges show the ledger as `refresh` last read them.
# Rule: at most `MAX_SCOPES` scopes have a label of their own, the rest share `other`, because
# every label is a time series that somebody has to keep.

MAX_SCOPES = 200
REFRESH_SECONDS = 10.0
ROOT_LABEL = "(root)"


class Unit(NamedTuple):
    """What an amount of a budget is counted in: the last word of its metrics, and a field."""

    suffix: str
    field: str
    divisor: int

    def total(self, accounts: Iterable[Account], name: str) -> float:
        """Return an amount of the balances of scopes, summed up exactly."""
        column = f"{name}_{self.field}"
        total: int = sum(getattr(one.balance, column) for one in accounts)
        return total / self.divisor

    def limit(self, account: Account) -> float | None:
        """Return the limit of a scope, None if it has none."""
        limit: int | None = getattr(account.limit, f"limit_{self.field}", None)
        return None if limit is None else limit / self.divisor

    def remaining(self, account: Account) -> float | None:
        """Return what a scope has left of its limit, None if it has none."""
        limit: int | None = getattr(account.limit, f"limit_{self.field}", None)
        if limit is None:
            return None
        used: int = getattr(account.balance, f"used_{self.field}")
        return (limit - used) / self.divisor


UNITS = (Unit("usd", "micro_usd", MICRO_PER_USD), Unit("tokens", "tokens", 1))


class BudgetMetrics(Collector):
    """The metrics of budgets, in a registry of prometheus-client."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        chosen = REGISTRY if registry is None else registry
        self._accounts: Sequence[Account] = ()
        self._refusing: set[str] = set()
        self._rejections: dict[tuple[str, str], int] = {}
        chosen.register(self)

    def observe(self, tracker: LedgerTracker) -> LedgerTracker:
        """Return a tracker over the same ledger whose refusals are counted; use it instead."""
        return LedgerTracker(_CountingLedger(tracker.ledger, self))

    async def refresh(self, tracker: LedgerTracker) -> None:
        """Read the ledger for the gauges; call this every few seconds."""
        try:
            async with asyncio.timeout(REFRESH_SECONDS):
                self._accounts = await tracker.ledger.accounts(ROOT)
        except TimeoutError:
            waited = f"the ledger did not answer within {REFRESH_SECONDS:g} seconds"
            problem = f"{waited}; the gauges stay as they were"
            raise LedgerUnavailableError(problem) from None

    def count_refusal(self, refused: Refused) -> None:
        """Count what a budget had no room for, or what waits for the first of its kind."""
        self.count_rejection(refused.scope, "kind" if refused.kind else refused.unit.value)

    def count_rejection(self, scope: Scope, reason: str) -> None:
        """Count a refusal by its reason.

        `micro_usd` or `tokens` was short, enough of an unknown `kind` were in flight, or the ledger
        was `unavailable`.
        """
        label = scope or ROOT_LABEL
        if label not in self._refusing and len(self._refusing) >= MAX_SCOPES:
            label = OTHER
        else:
            self._refusing.add(label)
        key = (label, reason)
        self._rejections[key] = self._rejections.get(key, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Yield what was read and counted, as prometheus-client asks for it."""
        rejections = counter("headgate_budget_rejections_total")
        # Another thread may count meanwhile.
        for key, number in list(self._rejections.items()):
            rejections.add_metric(key, number)
        yield rejections
        own, rest = _shared_out(self._accounts)
        together = _counted(own, rest) if rest else None
        for unit in UNITS:
            yield _remaining(unit, own, rest)
            yield _limits(unit, own)
            for name in AMOUNTS:
                yield _amounts(name, unit, own, together)


def _shared_out(
    accounts: Iterable[Account],
) -> tuple[list[Account], list[Account]]:
    """Part the scopes that get a label from the rest: the root, then limited and outer ones."""

    def rank(one: Account) -> tuple[bool, bool, int, str]:
        has_limit = one.limit is not None and one.limit.has_amount
        return one.scope != ROOT, not has_limit, depth(one.scope), one.scope

    ranked = sorted(accounts, key=rank)
    return ranked[:MAX_SCOPES], ranked[MAX_SCOPES:]


def _remaining(unit: Unit, own: list[Account], rest: list[Account]) -> GaugeMetricFamily:
    metric = gauge(f"headgate_budget_remaining_{unit.suffix}")
    for account in own:
        left = unit.remaining(account)
        if left is not None:
            workflow = leaf_name(account.scope) if leaf_kind(account.scope) == "workflow" else ""
            metric.add_metric((workflow, account.scope or ROOT_LABEL), left)
    others = [left for one in rest if (left := unit.remaining(one)) is not None]
    if others:
        metric.add_metric(("", OTHER), min(others))
    return metric


def _limits(unit: Unit, own: list[Account]) -> GaugeMetricFamily:
    metric = gauge(f"headgate_budget_limit_{unit.suffix}")
    for account in own:
        limit = unit.limit(account)
        if limit is not None:
            metric.add_metric((account.scope or ROOT_LABEL,), limit)
    return metric


def _amounts(
    name: str, unit: Unit, own: list[Account], together: list[Account] | None
) -> GaugeMetricFamily:
    metric = gauge(f"headgate_budget_{name}_{unit.suffix}")
    for account in own:
        metric.add_metric((account.scope or ROOT_LABEL,), unit.total((account,), name))
    if together is not None:
        metric.add_metric((OTHER,), unit.total(together, name))
    return metric


def _counted(own: list[Account], rest: list[Account]) -> list[Account]:
    """Choose the scopes whose sum counts no money twice.

    Money held in a scope is held in its ancestors too. It is counted in the outermost one that does
    not also hold what a label of its own shows.
    """
    shown = {outer for one in own for outer in ancestors(one.scope)}
    scopes = {one.scope for one in rest} - shown
    return [
        one for one in rest if one.scope in scopes and not scopes & set(ancestors(one.scope)[:-1])
    ]


class _CountingLedger:
    """A ledger that passes everything on and counts what is refused."""

    def __init__(self, ledger: Ledger, metrics: BudgetMetrics) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self.open = ledger.open
        self.close = ledger.close
        self.set_limit = ledger.set_limit
        self.create_limit = ledger.create_limit
        self.settle = ledger.settle
        self.adjust = ledger.adjust
        self.accounts = ledger.accounts
        self.journal = ledger.journal
        self.sweep = ledger.sweep
        self.audit = ledger.audit
        self.now = ledger.now

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        try:
            answer = await self._ledger.reserve(request)
        except LedgerUnavailableError:
            self._metrics.count_rejection(request.scopes[-1], "unavailable")
            raise
        if isinstance(answer, Refused):
            self._metrics.count_refusal(answer)
        return answer


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4.encode()
FRESH_SECONDS = 0.5
"""How old an answer may be that is given again: half of what a figure may be late."""

READ_SECONDS = 2.0

Result = TypeVar("Result")
CountDeliveries = Callable[[], Awaitable[Mapping[str, int]]]
"""Counts webhooks by their state."""


class Beside(NamedTuple):
    """What the metrics show of parts that the engine does not know."""

    tracker: LedgerTracker | None = None
    usage: UsageReports | None = None
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
        self._waiting_projects, self._sharing_projects = Labels(), Labels()
        self._ready_agents = Labels()
        self._totals: Totals | None = None
        self._used: Sequence[UsageTotal] = ()
        self._silent: Sequence[SilentKind] = ()
        self._deliveries: Mapping[str, int] = {}
        self._store_is_up = self._ledger_is_up = False
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._shown: list[Metric] = []
        self.budgets = BudgetMetrics(self._registry)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        engine.feed.subscribe(events=self._durations, refusals=self.budgets.count_refusal)
        self.calls = CallMetrics()
        if engine.calls is not None:
            engine.calls.listen(self.calls)

    async def text(self) -> bytes:
        """Return everything in the text format, as fresh as a fetch needs it."""
        async with self._reading:
            now = time.monotonic()
            if now - self._read_at >= FRESH_SECONDS:
                await self._read()
                # By when it was asked for, so that what is shown is never older than it says.
                self._read_at = now
            # The engine's own are taken here, in its loop; the text is made beside it.
            self._shown = []
            for metric in self._present():
                self._shown.append(metric)
                await asyncio.sleep(0)
            return await asyncio.to_thread(generate_latest, self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what was last put together, as prometheus-client asks for it."""
        yield from self._shown

    async def _read(self) -> None:
        totals, used, silent, deliveries, budgets = await asyncio.gather(
            _within(self._engine.totals()),
            self._totalled(),
            self._silence(),
            self._counted(),
            _within(self._refreshed()),
        )
        self._store_is_up = totals is not None
        self._ledger_is_up = budgets is not None
        self._totals = totals or self._totals
        self._used = used or self._used
        self._silent = self._silent if silent is None else silent
        self._deliveries = deliveries or self._deliveries

    async def _counted(self) -> Mapping[str, int] | None:
        count = self._beside.deliveries
        return None if count is None else await _within(count())

    async def _totalled(self) -> Sequence[UsageTotal] | None:
        usage = self._beside.usage
        return None if usage is None else await _within(usage.totals())

    async def _silence(self) -> Sequence[SilentKind] | None:
        usage = self._beside.usage
        if usage is None:
            return None
        return await _within(usage.silent(self._engine.settings.dispatch.target_estimates))

    async def _refreshed(self) -> bool:
        if self._beside.tracker is not None:
            await self.budgets.refresh(self._beside.tracker)
        return True

    def _present(self) -> Iterator[Metric]:
        build = gauge("headgate_build_info")
        build.add_metric((headgate.__version__,), 1)
        yield build
        if self._totals is not None:
            yield from count_metrics(self._totals, self._agents, self._projects)
        yield from store_metrics(self._engine.reaper.size, self._engine.refused_by_store)
        yield from usage_metrics(self._used)
        yield silence_metric(self._silent)
        yield self._durations.wait.metric()
        yield self._durations.run.metric()
        calls = self._engine.calls
        yield from self.calls.metrics(() if calls is None else calls.live())
        yield from self._states()
        yield from self._of_dispatcher()
        yield self._webhooks()
        yield from slot_metrics(self._beside.slots(), self._engine.now())

    def _states(self) -> Iterator[Metric]:
        engine, beside = self._engine, self._beside
        yield gauge("headgate_ready", engine.health().is_ready)
        yield gauge("headgate_store_up", self._store_is_up)
        yield gauge("headgate_ledger_up", self._ledger_is_up)
        yield gauge("headgate_dispatcher", engine.dispatcher.is_leading)
        yield gauge("headgate_node_attempts", len(engine.runner))
        yield gauge("headgate_event_streams", beside.streams())
        yield gauge("headgate_writer_queue", beside.writer_queue())

    def _of_dispatcher(self) -> Iterator[Metric]:
        """Yield what only the node knows that dispatches."""
        dispatch_state, epoch = self._engine.dispatcher.dispatch_state, self._engine.feed.epoch
        if dispatch_state is None or epoch is None:
            return
        yield gauge("headgate_dispatcher_epoch", epoch)
        yield closure_metric(dispatch_state.closures.shown())
        lanes = () if self._totals is None else self._totals.lanes
        stats = dispatch_state.lane_stats(self._engine.now())
        yield ready_metric(stats, lanes, self._ready_agents)
        waits = oldest_waits(dispatch_state.waiting, self._engine.now())
        yield from oldest_metrics(waits, self._waiting_projects)
        yield from share_metrics(
            dispatch_state.settings.projects, dispatch_state.usage.tokens, self._sharing_projects
        )

    def _webhooks(self) -> Metric:
        metric = gauge("headgate_webhooks")
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
