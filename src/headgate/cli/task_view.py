"""A task as people read it: one line, or everything that is set."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from typing import TYPE_CHECKING, TextIO, cast

import click
import msgspec

from headgate.cli.output import clock_time, from_now, length_of
from headgate.core.money import format_usd
from headgate.core.text import printable
from headgate.errors import MICRO_PER_USD

if TYPE_CHECKING:
    from headgate.core.task import TaskStatus
    from headgate.core.task_view import (
        AttemptBody,
        HeldBody,
        ProgressBody,
        ReportedBody,
        TaskSnapshot,
        TaskUsageBody,
    )


HEADER = ("task", "state", "agent", "project", "action", "created", "took", "error")
SPARE = ("took", "project", "action", "error", "agent")
"""The columns that a narrow terminal does without, the first of them first."""

MOST_ERROR_CHARACTERS = 60

_COLOURS = {
    "queued": "cyan",
    "assigned": "blue",
    "running": "blue",
    "done": "green",
    "failed": "red",
    "cancelled": "yellow",
    "rejected": "magenta",
}
_IN_LINES = ("params", "input", "result", "labels", "estimate")


def has_colour(stream: TextIO | None = None) -> bool:
    """Tell whether what is written there may be coloured."""
    written = stream or sys.stdout
    return written is not None and written.isatty() and not os.environ.get("NO_COLOR")


def in_colour_of(state: TaskStatus, text: str, *, coloured: bool) -> str:
    """Return a text in the colour of a state, where that is wanted."""
    return click.style(text, fg=_COLOURS.get(state.value)) if coloured else text


def row_of(task: TaskSnapshot) -> tuple[str, ...]:
    """Return one line of a table of tasks."""
    return (
        task.task_id,
        task.state.value,
        task.agent_id or "(any)",
        task.project_id,
        task.action,
        from_now(task.created_at),
        "" if task.latency_ms is None else length_of(task.latency_ms / 1000),
        shortened(task.error or ""),
    )


def shortened(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_ERROR_CHARACTERS else f"{line[:MOST_ERROR_CHARACTERS]}…"


def lines_of(task: TaskSnapshot) -> list[str]:
    """Return everything that is set of a task, a line or a block for each field."""
    given = [(field.name, getattr(task, field.name)) for field in msgspec.structs.fields(task)]
    shown = [(name, value) for name, value in given if value not in (None, "", (), {})]
    shown = [(name, value) for name, value in shown if value is not False]
    labels = {name: name.replace("_", " ") for name, _ in shown}
    if task.completed_at is not None and "held" in labels:
        labels["held"] = "was held"
    width = max(map(len, labels.values()))
    lines = {name: _value(name, value, indent=width + 2) for name, value in shown}
    if task.choice is not None:
        said = (printable(one) for one in task.choice.sentences(task.project_id))
        lines["choice"] = f"\n{' ' * (width + 2)}".join(said)
    if task.unpriced:
        lines["unpriced"] = printable(_unpriced(task))
    return [f"{labels[name]:<{width}}  {text}" for name, text in lines.items()]


def _value(name: str, value: object, *, indent: int) -> str:
    if name in _IN_LINES:
        return _block(value, indent=indent)
    if name == "held":
        held = cast("tuple[HeldBody, ...]", value)
        texts = [printable(one.text.removeprefix("reserved ")) for one in held]
        return f"\n{' ' * indent}".join(texts)
    if name == "reported":
        return _reported(cast("ReportedBody", value))
    if name == "progress":
        return progress_line(cast("ProgressBody", value))
    if name == "usage":
        return _usage(cast("TaskUsageBody", value))
    if name == "attempts":
        past = cast("tuple[AttemptBody, ...]", value)
        return f"\n{' ' * indent}".join(_attempt(one) for one in past)
    if isinstance(value, datetime):
        return f"{clock_time(value)} ({from_now(value)})"
    if isinstance(value, tuple):
        return printable(", ".join(str(one) for one in value))
    return printable(str(getattr(value, "value", value)))


def _unpriced(task: TaskSnapshot) -> str:
    """Say what to do about a success whose dollars nobody knows."""
    if task.reported is not None:
        return "nobody knows what it cost in dollars; `headgate doctor` has the line to add"
    place = f"[targets.{task.target}]" if task.target else "its target"
    return f"it reported no cost; set estimate_usd in {place}, or report usage"


def progress_line(progress: ProgressBody) -> str:
    """Return how far a task says that it is, and when it last said something new."""
    return f"{printable(progress.words)} ({from_now(progress.at)})"


def _reported(said: ReportedBody) -> str:
    """Return what is known of the cost of the latest attempt, and who says so."""
    known = _amounts(said.tokens or 0, said.usd or 0.0) or "nothing used"
    return f"{known}, by the price list" if said.priced else known


def _usage(used: TaskUsageBody) -> str:
    """Return what was used, and how much of it is only assumed."""
    booked = _amounts(used.tokens or 0, used.usd or 0.0)
    assumed = _amounts(used.assumed_tokens or 0, used.assumed_usd or 0.0)
    return f"{booked or 'nothing'} (assumed {assumed})" if assumed else booked or "nothing"


def _attempt(past: AttemptBody) -> str:
    """Return one attempt after which the task was tried again: when, where, its cost, its error."""
    length = "not begun"
    if past.started_at is not None:
        length = f"took {length_of((past.ended_at - past.started_at).total_seconds())}"
    places = (("agent", past.agent_id), ("slot", past.slot), ("node", past.node_id))
    where = [f"{word} {name}" for word, name in places if name]
    ended = f"{past.attempt}: ended {clock_time(past.ended_at)}"
    said = ", ".join((ended, length, *where, f"booked {_usage(past.usage)}"))
    return printable(f"{said}: {past.error}" if past.error else said)


def _amounts(tokens: int, usd: float) -> str:
    named = [f"{tokens} tokens"] if tokens else []
    return ", ".join([*named, format_usd(round(usd * MICRO_PER_USD))] if usd else named)


def _block(value: object, *, indent: int) -> str:
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return "\n".join(
        printable(line) if number == 0 else " " * indent + printable(line)
        for number, line in enumerate(text.split("\n"))
    )
