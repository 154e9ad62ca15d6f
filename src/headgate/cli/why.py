"""`headgate why`: what keeps a task waiting, and until when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import print_json, printable

if TYPE_CHECKING:
    from headgate.http_bodies import ReasonBody, WhyBody


@click.command(
    epilog="""\b
Examples:
  headgate why tsk_01m7fs2skb2415wvpawg4jr96h
  headgate why tsk_01m7fs2skb2415wvpawg4jr96h --json | jq -r '.reasons[].hold.reason'
"""
)
@click.argument("task_id", metavar="TASK")
@connection_options
@json_option
def why(*, task_id: str, connection: Connection, as_json: bool) -> None:
    """Print every rule that keeps a task waiting, the widest first."""
    with connect(connection) as client:
        answer = client.why(task_id)
    if as_json:
        print_json(answer)
    else:
        click.echo("\n".join(_lines(answer)))


def _lines(answer: WhyBody) -> list[str]:
    if not answer.reasons:
        return [f"{answer.task_id} is {answer.state.value}, and waits for nothing"]
    lines = [f"{answer.task_id} is {answer.state.value}:"]
    for reason in answer.reasons:
        lines.append(f"  {_message(reason)}")
        if reason.held_by:
            lines.append(f"    held by {', '.join(map(printable, reason.held_by))}")
        if reason.held_by_others:
            lines.append(f"    held by {reason.held_by_others} tasks of others")
    return lines


def _message(reason: ReasonBody) -> str:
    """Return the line of a reason, with its time as people read it."""
    from headgate.cli.times import clock_time, from_now, moment_of  # noqa: PLC0415

    message = printable(reason.message)
    moment = None if reason.until is None else moment_of(reason.until)
    if moment is None:
        return message
    when = f"{clock_time(moment)} ({from_now(moment)})"
    exact = f"{reason.until:.0f}"
    return message.replace(exact, when) if exact in message else f"{message}, until {when}"
