"""What slots show to Prometheus: room, resets, wakes, polls, errors, and how their loops do.

Readings are those of the service, the same on every node; counts and loops are those of the node
that is asked. Rule: labels are the slots that are configured now. One that is gone leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headgate.core.key_slots.headroom import why_off
from headgate.runtime.key_slots.status import LoopHealth, SlotStatus

Value = Callable[[SlotStatus], "float | None"]

GAUGES: dict[str, tuple[str, Value]] = {
    "percent_used": (
        "How much of the quota window is used, from 0 to 100.",
        lambda status: status.standing.percent_used,
    ),
    "reset_timestamp_seconds": (
        "When the window that is open resets.",
        lambda status: status.standing.resets_at,
    ),
    "held": (
        "Whether the tasks of the slot wait for it.",
        lambda status: status.standing.hold is not None,
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
