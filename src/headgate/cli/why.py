"""`headgate why`: what keeps a task waiting, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import print_json
from headgate.core.text import printable
from headgate.errors import utc_time

if TYPE_CHECKING:
    from headgate.api.schema.tasks import ReasonBody, SlotRoomBody, WhyBody


@click.command(
    epilog="""\b
Examples:
  headgate why tsk_01m7fs2skb2415wvpawg4jr96h
  headgate why tsk_01m7fs2skb2415wvpawg4jr96h --json | jq -r '.reasons[].detail.reason'
"""
)
@click.argument("task_id", metavar="TASK")
@connection_options
@json_option
def why(*, task_id: str, connection: Connection, as_json: bool) -> None:
    """Print every rule that keeps a task waiting, the longest first.

    A pause or a used up budget comes before permits that are taken just now.
    """
    with connect(connection) as client:
        answer = client.why(task_id)
    if as_json:
        print_json(answer)
    else:
        click.echo("\n".join(lines_of(answer)))


def lines_of(answer: WhyBody) -> list[str]:
    """Return every rule that keeps a task waiting, and what holds it, a line for each."""
    if not answer.reasons:
        line = f"{answer.task_id} is {answer.state.value}, and waits for nothing"
        return [line, *_holds(answer), *_rooms(answer)]
    lines = [f"{answer.task_id} is {answer.state.value}:"]
    for reason in answer.reasons:
        lines.append(f"  {reason_line(reason)}")
        if reason.warning:
            lines.append(f"    {printable(reason.warning)}")
        if reason.held_by:
            lines.append(f"    held by {', '.join(map(printable, reason.held_by))}")
        if reason.held_by_others:
            lines.append(f"    held by {reason.held_by_others} tasks of others")
    return lines + _holds(answer) + _rooms(answer)


def _holds(answer: WhyBody) -> list[str]:
    """Return a line for each unit in which the next attempt reserves something."""
    return [f"  {printable(one.text)}" for one in answer.would_hold]


def _rooms(answer: WhyBody) -> list[str]:
    """Return a line for each slot of the task whose quota no reason has told of."""
    told = {one.detail.get("name") for one in answer.reasons if one.detail.get("kind") == "slot"}
    slots = answer.slots if answer.slot is None else (answer.slot,)
    return [line for line in (_room(one) for one in slots if one.name not in told) if line]


def _room(slot: SlotRoomBody) -> str:
    from headgate.cli.slots import percent  # noqa: PLC0415

    used = "" if slot.percent_used is None else f"{percent(slot.percent_used)} used"
    when = "" if slot.resets_at is None else f"resets {_when(slot.resets_at.timestamp())}"
    known = ", ".join(part for part in (used, when) if part)
    return f"  slot {printable(slot.name)}: {known}" if known else ""


def reason_line(reason: ReasonBody) -> str:
    """Return the line of a reason, with how far away its end is."""
    from headgate.cli.output import from_now, moment_of  # noqa: PLC0415

    message = printable(reason.message)
    moment = None if reason.until is None else moment_of(reason.until)
    if reason.until is None or moment is None:
        return message
    exact = utc_time(reason.until)
    until = "" if exact in message else f", until {exact}"
    return f"{message}{until} ({from_now(moment)})"


def _when(seconds: float) -> str:
    """Return a time and how far it is away; empty where no calendar reaches it."""
    from headgate.cli.output import clock_time, from_now, moment_of  # noqa: PLC0415

    moment = moment_of(seconds)
    return "" if moment is None else f"{clock_time(moment)} ({from_now(moment)})"
