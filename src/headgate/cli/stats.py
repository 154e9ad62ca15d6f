"""`headgate stats`: what waits, what runs, what is paused, and the limits in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import print_json, print_table
from headgate.cli.service import PAUSED, closures_line

if TYPE_CHECKING:
    from headgate.api.schema.tasks import StatsBody


AGENTS_SHOWN = 30
STOPPED_SHOWN = 10


@click.command(
    epilog="""\b
Examples:
  headgate stats
  headgate stats --json | jq .queue.totalQueued
"""
)
@connection_options
@json_option
def stats(*, connection: Connection, as_json: bool) -> None:
    """Show what waits, what runs, what is paused, and the limits in force."""
    with connect(connection) as client:
        answer = client.stats()
    if as_json:
        print_json(answer)
        return
    for line in held_back(answer):
        click.echo(line)
    print_table("Service", ("", "now", "limit"), _totals(answer))
    click.echo()
    print_table("Since the store was created", ("", "tasks"), _happened(answer))
    rows = _agents(answer)
    if rows:
        click.echo()
        header = ("agent", "queued", "in flight", "completed", "failed")
        print_table(_title(len(rows)), header, rows[:AGENTS_SHOWN])


def held_back(answer: StatsBody) -> list[str]:
    """Return what keeps tasks from starting: pauses, what drains, and closures."""
    lines = [PAUSED] if answer.paused else []
    for status in ("paused", "draining"):
        names = [f"{one.kind} {one.name}" for one in answer.stopped if one.status == status]
        if names:
            more = f" and {len(names) - STOPPED_SHOWN} more" if names[STOPPED_SHOWN:] else ""
            lines.append(f"{status.capitalize()}: {', '.join(names[:STOPPED_SHOWN])}{more}.")
    return lines + ([closures_line(answer.closures)] if answer.closures else [])


def _totals(answer: StatsBody) -> list[tuple[str, str, str]]:
    queue, limits, calls = answer.queue, answer.config, answer.calls
    live = (("calls waiting", calls.waiting), ("calls running", calls.running)) if calls else ()
    return [
        ("queued", str(queue.total_queued), _limit(limits.max_queue_size)),
        ("in flight", str(queue.total_inflight), _limit(limits.max_inflight)),
        ("queued of one project", "", f"{limits.queue_share:g} times what is free"),
        ("queued for one agent", "", _limit(limits.max_per_agent)),
        ("in flight for one agent", "", _limit(limits.max_per_agent_inflight)),
        *((name, str(count), "") for name, count in live),
    ]


def _happened(answer: StatsBody) -> list[tuple[str, str]]:
    metrics = answer.metrics
    return [
        ("submitted", str(metrics.tasks_submitted)),
        ("completed", str(metrics.tasks_completed)),
        ("failed", str(metrics.tasks_failed)),
        ("cancelled", str(metrics.tasks_cancelled)),
        ("rejected", str(metrics.tasks_rejected)),
        ("expired", str(metrics.tasks_expired)),
        ("mean wait for a start", f"{metrics.avg_dispatch_latency_ms:.1f} ms"),
    ]


def _agents(answer: StatsBody) -> list[tuple[str, ...]]:
    """Return a row for each agent, those with the most in flight and waiting first."""
    counts, metrics = answer.queue.agents, answer.metrics.agents
    rows = []
    for name in {*counts, *metrics}:
        now, past = counts.get(name), metrics.get(name)
        queued, inflight = (now.queued, now.inflight) if now else (0, 0)
        completed, failed = (past.tasks_completed, past.tasks_failed) if past else (0, 0)
        rows.append((name or "(any)", queued, inflight, completed, failed))
    rows.sort(key=lambda row: (-row[2], -row[1], -row[3], row[0]))
    return [tuple(str(cell) for cell in row) for row in rows]


def _title(count: int) -> str:
    return f"Agents: the busiest {AGENTS_SHOWN} of {count}" if count > AGENTS_SHOWN else "Agents"


def _limit(value: int | None) -> str:
    return "none" if value is None else str(value)
