"""Budgets as Prometheus metrics: what remains, what is reserved, what was refused.

Refusals are counted when they happen; the gauges show the books as `refresh` last read them. Rule:
at most `MAX_SCOPES` scopes have a label of their own, the rest share `other`, because every label
is a time series that somebody has to keep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headgate.budget_tracker import BudgetTracker
from headgate.core.budgets.accounts import Refused
from headgate.core.budgets.books import ReserveRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import ROOT, Scope, ancestors, depth, leaf_kind, leaf_name
from headgate.core.money import to_usd_float
from headgate.errors import LedgerUnavailableError
from headgate.ledger import Ledger
from headgate.scope_status import ScopeStatus
from headgate.tracker import LedgerTracker

MAX_SCOPES = 200
REFRESH_SECONDS = 10.0
OTHER = "other"
ROOT_LABEL = "(root)"


class BudgetMetrics(Collector):
    """The three metrics of budgets, in a registry of prometheus-client."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        chosen = REGISTRY if registry is None else registry
        self._statuses: tuple[ScopeStatus, ...] = ()
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

    async def refresh(self, tracker: BudgetTracker) -> None:
        """Read the books for the gauges; call this every few seconds."""
        try:
            async with asyncio.timeout(REFRESH_SECONDS):
                self._statuses = tuple(_flat(await tracker.status()))
        except TimeoutError:
            waited = f"the ledger did not answer within {REFRESH_SECONDS:g} seconds"
            problem = f"{waited}; the gauges stay as they were"
            raise LedgerUnavailableError(problem) from None

    def count_rejection(self, scope: Scope, reason: str) -> None:
        """Count a refusal: `micro_usd` or `tokens` was short, or the ledger was `unavailable`."""
        label = scope or ROOT_LABEL
        if label not in self._refusing and len(self._refusing) >= MAX_SCOPES:
            label = OTHER
        else:
            self._refusing.add(label)
        self._rejections.labels(scope=label, reason=reason).inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges, as prometheus-client asks for them."""
        own, rest = _shared_out(self._statuses)
        yield _remaining(own, rest)
        yield _reserved(own, rest)


def _flat(status: ScopeStatus) -> Iterator[ScopeStatus]:
    yield status
    for child in status.children:
        yield from _flat(child)


def _shared_out(
    statuses: Iterable[ScopeStatus],
) -> tuple[list[ScopeStatus], list[ScopeStatus]]:
    """Part the scopes that get a label from the rest: the root, then limited and outer ones."""

    def rank(one: ScopeStatus) -> tuple[bool, bool, int, str]:
        return one.scope != ROOT, one.limit_micro_usd is None, depth(one.scope), one.scope

    ranked = sorted(statuses, key=rank)
    return ranked[:MAX_SCOPES], ranked[MAX_SCOPES:]


def _remaining(own: list[ScopeStatus], rest: list[ScopeStatus]) -> GaugeMetricFamily:
    text = "Dollars that a budget can still hold; of the other ones the least."
    gauge = GaugeMetricFamily("headgate_budget_remaining_usd", text, labels=("workflow", "scope"))
    for status in own:
        if status.remaining_micro_usd is not None:
            workflow = leaf_name(status.scope) if leaf_kind(status.scope) == "workflow" else ""
            labels = (workflow, status.scope or ROOT_LABEL)
            gauge.add_metric(labels, to_usd_float(status.remaining_micro_usd))
    left = [one.remaining_micro_usd for one in rest if one.remaining_micro_usd is not None]
    if left:
        gauge.add_metric(("", OTHER), to_usd_float(min(left)))
    return gauge


def _reserved(own: list[ScopeStatus], rest: list[ScopeStatus]) -> GaugeMetricFamily:
    text = "Dollars that reservations hold; the other scopes together."
    gauge = GaugeMetricFamily("headgate_budget_reserved_usd", text, labels=("scope",))
    for status in own:
        gauge.add_metric((status.scope or ROOT_LABEL,), to_usd_float(status.reserved_micro_usd))
    if rest:
        total = sum(one.reserved_micro_usd for one in _counted(own, rest))
        gauge.add_metric((OTHER,), to_usd_float(total))
    return gauge


def _counted(own: list[ScopeStatus], rest: list[ScopeStatus]) -> list[ScopeStatus]:
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
        self.found_limit = ledger.found_limit
        self.settle = ledger.settle
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
            self._metrics.count_rejection(answer.scope, answer.unit.value)
        return answer
