"""All metrics of a node, for Prometheus to fetch.

What is asked of the store or the ledger is asked when somebody fetches, within bounds, and kept for
a moment. Rule: an outage never makes a fetch fail: it answers with what was last known, and says of
the part that is away that it is.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
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
from headgate.core.dispatch_state import Waiting
from headgate.core.estimates import SilentKind
from headgate.core.events import EventKind
from headgate.core.fair_share import shares
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
MS_PER_SECOND = 1_000
MAX_WAITING_READ = 20_000


class LaneMetric(NamedTuple):
    """A metric that is shown in all, by agent and by project, and the field of a lane it sums."""

    name: str
    text: str
    field: str
    divisor: int = 1
    family: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily


LANE_METRICS = (
    LaneMetric("tasks_submitted", "Tasks that were taken.", "submitted"),
    LaneMetric("tasks_completed", "Tasks that succeeded.", "completed"),
    LaneMetric("tasks_failed", "Tasks that failed, the expired ones included.", "failed"),
    LaneMetric("tasks_cancelled", "Tasks that were cancelled.", "cancelled"),
    LaneMetric(
        "tasks_rejected",
        "Tasks that were turned away, or that no budget has room for.",
        "rejected",
    ),
    LaneMetric("tasks_expired", "Tasks whose deadline passed while they waited.", "expired"),
    LaneMetric("dispatches", "Attempts that were started.", "started"),
    LaneMetric(
        "dispatch_latency_seconds",
        "Seconds that attempts were kept waiting before they started, summed up.",
        "wait_ms",
        divisor=MS_PER_SECOND,
    ),
    LaneMetric("tasks_queued", "Tasks that wait.", "queued", family=GaugeMetricFamily),
    LaneMetric(
        "tasks_inflight", "Tasks that are assigned or run.", "inflight", family=GaugeMetricFamily
    ),
)


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
    """How long tasks waited and ran, as the feed tells; subscribe it to the events of one."""

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


def count_metrics(totals: Totals, agents: Labels, projects: Labels) -> Iterator[Metric]:
    """Yield what has happened and what waits and runs, in all, by agent and by project."""
    lanes_by = {
        "agent": _by_label(totals.lanes, agents, lambda lane: lane.agent_id, empty=OPEN_LANE),
        "project": _by_label(
            (*totals.lanes, *totals.forgotten), projects, lambda lane: lane.project_id
        ),
    }
    for name, text, field, divisor, family in LANE_METRICS:
        # What happened is counted for the whole store as well; what is there now is only by lane.
        amount = getattr(totals, field, None)
        if amount is None:
            amount = _total(totals.lanes, field)
        yield family(f"headgate_{name}", text, value=amount / divisor)
        for label, lanes_of in lanes_by.items():
            each = family(f"headgate_{label}_{name}", text, labels=(label,))
            for owner, lanes in lanes_of.items():
                each.add_metric((owner,), _total(lanes, field) / divisor)
            yield each
    text = "Tasks that were turned away because as many waited as may, by the limit that they met."
    refused = CounterMetricFamily("headgate_queue_rejections", text, labels=("limit",))
    for limit in QueueLimit:
        # Where the store has no room, nothing is written of it; each node has its own count.
        if limit is not QueueLimit.STORE:
            refused.add_metric((limit.value,), getattr(totals, f"rejected_by_{limit.value}"))
    yield refused


def store_metrics(size: StoreSize | None, refused: int) -> Iterator[Metric]:
    """Yield how large the store is, what is free for it, and how often there was no room."""
    text = "Tasks that this node turned away because the store had no room."
    yield CounterMetricFamily("headgate_store_rejections", text, value=refused)
    if size is None:
        return
    amounts = {
        "used": ("What the store takes, without what it can use again.", size.used_bytes),
        "free": ("What is free for the store, on its disk and in its files.", size.free_bytes),
        "room": ("What new tasks may take of that.", size.room_bytes),
        "max": ("What the store may take, by max_store_bytes.", size.max_bytes),
    }
    for name, (text, amount) in amounts.items():
        if amount is not None:
            yield gauge(f"headgate_store_{name}_bytes", text, amount)


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


def oldest_metrics(waits: Mapping[str, float], labels: Labels) -> Iterator[Metric]:
    """Yield how long the oldest task has waited that could start, in all and by project."""
    text = "How long the oldest task has waited that could start."
    yield gauge("headgate_oldest_queued_seconds", text, max(waits.values(), default=0.0))
    each = GaugeMetricFamily("headgate_project_oldest_queued_seconds", text, labels=("project",))
    own, longest = labels.shared_out(waits), dict[str, float]()
    for project_id, seconds in waits.items():
        longest[own[project_id]] = max(seconds, longest.get(own[project_id], 0.0))
    for project, seconds in longest.items():
        each.add_metric((project,), seconds)
    yield each


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


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


def _shares(name: str, text: str, shares: dict[str, float], own: dict[str, str]) -> Metric:
    metric = GaugeMetricFamily(f"headgate_project_share_{name}", text, labels=("project",))
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
    labels = ("project", "model", "kind")
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
    text = "Dollars that tasks have cost."
    spend = CounterMetricFamily("headgate_spend_usd", text, labels=labels)
    for key, micro_usd in dollars.items():
        spend.add_metric(key, to_usd_float(micro_usd))
    yield spend
    used = CounterMetricFamily("headgate_tokens", "Tokens that tasks have used.", labels=labels)
    for key, amount in tokens.items():
        used.add_metric(key, amount)
    yield used
    text = "Attempts that cost more than was reserved for them."
    over = CounterMetricFamily("headgate_overruns", text, labels=("project", "model"))
    for pair, count in overruns.items():
        over.add_metric(pair, count)
    yield over
    text = "Tokens of models without a price; what was reserved for them was booked."
    without = CounterMetricFamily("headgate_unpriced_tokens", text, labels=("project", "model"))
    for both, amount in unpriced.items():
        without.add_metric(both, amount)
    yield without


def silence_metric(silent: Iterable[SilentKind]) -> Metric:
    """Return the work of the last day that reports nothing, so that no budget sees it."""
    text = "Work that reports nothing and has no estimate, so that budgets do not see its cost."
    found = GaugeMetricFamily("headgate_silent_kinds", text, labels=("project", "target", "unit"))
    for one in silent:
        unit = "tokens" if one.is_tokens else "usd"
        found.add_metric((one.kind.project_id, one.kind.name, unit), 1)
    return found


# What slots show to Prometheus: room, resets, wakes, polls, errors, and how their loops do.
#
# Readings are those of the service, the same on every node; counts and loops are those of the
# node that is asked. Rule: labels are the slots that are configured now. One that is gone leaves
# nothing.

Value = Callable[["SlotStatus"], "float | None"]

GAUGES: dict[str, tuple[str, Value]] = {
    "percent_used": (
        "How much of the quota window is used, from 0 to 100.",
        lambda status: status.standing.percent_used,
    ),
    "reset_timestamp_seconds": (
        "When the window that is open resets.",
        lambda status: status.standing.resets_at,
    ),
    "closed": (
        "Whether the tasks of the slot wait for it.",
        lambda status: status.standing.closure is not None,
    ),
    "disabled": (
        "Whether nothing is sent for the slot until somebody changes that.",
        lambda status: bool(why_off(status.config, status.row)),
    ),
    "wakes_disabled": (
        "Whether wakes of the slot were disabled because none was confirmed.",
        lambda status: status.row.schedule.wake_auto_disabled,
    ),
    "poll_errors": (
        "Polls that failed in a row.",
        lambda status: status.row.schedule.consecutive_poll_errors,
    ),
    "wake_errors": (
        "Readings in a row that did not confirm a wake.",
        lambda status: status.row.schedule.wake_errors,
    ),
}


def slot_metrics(statuses: Sequence[SlotStatus], now: float) -> Iterator[Metric]:
    """Yield the metrics of these slots."""
    for name, (text, value_of) in GAUGES.items():
        yield _gauge(name, text, statuses, value_of)
    yield _counts("polls", "Readings of the quota by this node, by outcome.", statuses)
    yield _counts("wakes", "Wakes by this node, by outcome.", statuses)
    yield from _loops(statuses, now)


def _gauge(name: str, text: str, statuses: Sequence[SlotStatus], value_of: Value) -> Metric:
    metric = GaugeMetricFamily(f"headgate_slot_{name}", text, labels=("slot",))
    for status in statuses:
        value = value_of(status)
        if value is not None:
            metric.add_metric((status.config.name,), value)
    return metric


def _counts(name: str, text: str, statuses: Sequence[SlotStatus]) -> Metric:
    metric = CounterMetricFamily(f"headgate_slot_{name}", text, labels=("slot", "outcome"))
    for status in statuses:
        for outcome, count in getattr(status, name).items():
            metric.add_metric((status.config.name, outcome), count)
    return metric


def _loops(statuses: Sequence[SlotStatus], now: float) -> Iterator[Metric]:
    labels = ("slot", "loop")
    text = "How often a loop of the slot was started again on this node."
    restarts = CounterMetricFamily("headgate_slot_loop_restarts", text, labels=labels)
    text = "How long ago a loop of the slot ended a step on this node."
    ages = GaugeMetricFamily("headgate_slot_loop_step_age_seconds", text, labels=labels)
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

AMOUNTS = {
    "spent": "that were spent within what was reserved for it; the other scopes together.",
    "reserved": "that are reserved; the other scopes together.",
    "overrun": "that were spent beyond what was reserved for it; the other scopes together.",
    "unaccepted": "that tenants claim and nobody has accepted; the other scopes together.",
}
"""The amounts of a scope that are gauges, with what each says."""


class Unit(NamedTuple):
    """What an amount of a budget is counted in, and how a metric says so."""

    word: str
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


UNITS = (Unit("Dollars", "usd", "micro_usd", MICRO_PER_USD), Unit("Tokens", "tokens", "tokens", 1))


class BudgetMetrics(Collector):
    """The metrics of budgets, in a registry of prometheus-client."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        chosen = REGISTRY if registry is None else registry
        self._accounts: Sequence[Account] = ()
        self._refusing: set[str] = set()
        self._rejections = Counter(
            "headgate_budget_rejections",
            "Reservations that were refused, by the scope that refused and the reason.",
            ("scope", "reason"),
            registry=chosen,
        )
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
        self._rejections.labels(scope=label, reason=reason).inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges, as prometheus-client asks for them."""
        own, rest = _shared_out(self._accounts)
        together = _counted(own, rest) if rest else None
        for unit in UNITS:
            yield _remaining(unit, own, rest)
            yield _limits(unit, own)
            for name, text in AMOUNTS.items():
                yield _amounts(name, text, unit, own, together)


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
    text = f"{unit.word} that a budget has left; of the other ones the least."
    name = f"headgate_budget_remaining_{unit.suffix}"
    gauge = GaugeMetricFamily(name, text, labels=("workflow", "scope"))
    for account in own:
        left = unit.remaining(account)
        if left is not None:
            workflow = leaf_name(account.scope) if leaf_kind(account.scope) == "workflow" else ""
            gauge.add_metric((workflow, account.scope or ROOT_LABEL), left)
    others = [left for one in rest if (left := unit.remaining(one)) is not None]
    if others:
        gauge.add_metric(("", OTHER), min(others))
    return gauge


def _limits(unit: Unit, own: list[Account]) -> GaugeMetricFamily:
    text = f"{unit.word} that a budget may use in its window."
    gauge = GaugeMetricFamily(f"headgate_budget_limit_{unit.suffix}", text, labels=("scope",))
    for account in own:
        limit = unit.limit(account)
        if limit is not None:
            gauge.add_metric((account.scope or ROOT_LABEL,), limit)
    return gauge


def _amounts(
    name: str, text: str, unit: Unit, own: list[Account], together: list[Account] | None
) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(
        f"headgate_budget_{name}_{unit.suffix}", f"{unit.word} {text}", labels=("scope",)
    )
    for account in own:
        gauge.add_metric((account.scope or ROOT_LABEL,), unit.total((account,), name))
    if together is not None:
        gauge.add_metric((OTHER,), unit.total(together, name))
    return gauge


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
        yield InfoMetricFamily("headgate_build", "The version.", {"version": headgate.__version__})
        if self._totals is not None:
            yield from count_metrics(self._totals, self._agents, self._projects)
        yield from store_metrics(self._engine.reaper.size, self._engine.refused_by_store)
        yield from usage_metrics(self._used)
        yield silence_metric(self._silent)
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
        dispatch_state, epoch = self._engine.dispatcher.dispatch_state, self._engine.feed.epoch
        if dispatch_state is None or epoch is None:
            return
        yield gauge("headgate_dispatcher_epoch", "The epoch of this dispatcher.", epoch)
        waits = oldest_waits(dispatch_state.waiting, self._engine.now())
        yield from oldest_metrics(waits, self._waiting_projects)
        yield from share_metrics(
            dispatch_state.settings.projects, dispatch_state.usage.tokens, self._sharing_projects
        )

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
