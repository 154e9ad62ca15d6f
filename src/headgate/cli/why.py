"""`headgate why`: what keeps a task or a call waiting, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import clock_time, from_now, length_of, print_json, with_local_times
from headgate.core.call import CALL_PREFIX
from headgate.core.text import printable

if TYPE_CHECKING:
    from headgate.api.schema.calls import CallWhyBody
    from headgate.api.schema.tasks import ReasonBody, SlotRoomBody, WhyBody


@click.command(
    epilog="""\b
Examples:
  headgate why tsk_01m7fs2skb2415wvpawg4jr96h
  headgate why call-01m7fs2skb2415wvpawg4jr96h
  headgate why tsk_01m7fs2skb2415wvpawg4jr96h --json | jq -r '.reasons[].detail.reason'
"""
)
@click.argument("task_id", metavar="ID")
@connection_options
@json_option
def why(*, task_id: str, connection: Connection, as_json: bool) -> None:
    """Explain why a task or a call waits.

    The reason that lasts longest comes first: a pause or a used-up budget before a busy agent. The
    id of a call begins with call-.
    """
    if task_id.startswith(CALL_PREFIX):
        _why_call(task_id, connection, as_json=as_json)
        return
    with connect(connection) as client:
        answer = client.why(task_id)
    if as_json:
        print_json(answer)
    else:
        click.echo("\n".join(lines_of(answer)))


def _why_call(call_id: str, connection: Connection, *, as_json: bool) -> None:
    from headgate.api.schema.calls import CallWhyBody  # noqa: PLC0415
    from headgate.client.requests import resource_path  # noqa: PLC0415

    path = resource_path("calls", call_id, "why", field_name="call_id")
    with connect(connection) as client:
        answer = client.request("GET", path, response_type=CallWhyBody)
    if as_json:
        print_json(answer)
    else:
        click.echo("\n".join(lines_of_call(answer)))


def lines_of_call(answer: CallWhyBody) -> list[str]:
    """Return every rule that keeps a call waiting, its place, and which key it has."""
    lines = [f"{answer.call_id} is {answer.state.value}:", *_reason_lines(answer.reasons)]
    if answer.position is not None:
        lines.append(f"  {_place(answer.position)}")
    if answer.expected_seconds is not None:
        lines.append(f"  about {length_of(answer.expected_seconds)} to go")
    if answer.slot or answer.key_rule:
        rule = f": {printable(answer.key_rule)}" if answer.key_rule else ""
        lines.append(f"  key {printable(answer.slot or 'of the upstream')}{rule}")
    if not answer.reasons and answer.position is None:
        lines[0] = f"{answer.call_id} is {answer.state.value}, and waits for nothing"
    return lines


def _place(position: int) -> str:
    if position == 1:
        return "its agent has no call that waits before it"
    calls = "one call waits" if position == 2 else f"{position - 1:,} calls wait"  # noqa: PLR2004
    return f"{calls} before it for the same agent"


def lines_of(answer: WhyBody) -> list[str]:
    """Return every rule that keeps a task waiting, and what holds it, a line for each."""
    if not answer.reasons:
        line = f"{answer.task_id} is {answer.state.value}, and waits for nothing"
        return [line, *_holds(answer), *_rooms(answer)]
    lines = [f"{answer.task_id} is {answer.state.value}:", *_reason_lines(answer.reasons)]
    return lines + _holds(answer) + _rooms(answer)


def _reason_lines(reasons: Sequence[ReasonBody]) -> list[str]:
    lines: list[str] = []
    for reason in reasons:
        lines.append(f"  {reason_line(reason)}")
        if reason.warning:
            lines.append(f"    {printable(with_local_times(reason.warning))}")
        if reason.held_by:
            lines.append(f"    held by {', '.join(map(printable, reason.held_by))}")
        if reason.held_by_others:
            lines.append(f"    held by {reason.held_by_others} tasks of others")
    return lines


def _holds(answer: WhyBody) -> list[str]:
    """Return a line for each unit in which the next attempt reserves something."""
    return [f"  {printable(one.text)}" for one in answer.would_hold]


def _rooms(answer: WhyBody) -> list[str]:
    """Return a line for each slot of the task whose quota no reason has told of."""
    told = {one.detail.get("name") for one in answer.reasons if one.detail.get("kind") == "slot"}
    slots = answer.slots if answer.slot is None else (answer.slot,)
    return [line for line in (_room(one) for one in slots if one.name not in told) if line]


def _room(slot: SlotRoomBody) -> str:
    from headgate.cli.slot import percent  # noqa: PLC0415

    used = "" if slot.percent_used is None else f"{percent(slot.percent_used)} used"
    resets_at = slot.resets_at
    when = "" if resets_at is None else f"resets {clock_time(resets_at)} ({from_now(resets_at)})"
    known = ", ".join(part for part in (used, when) if part)
    return f"  slot {printable(slot.name)}: {known}" if known else ""


def reason_line(reason: ReasonBody) -> str:
    """Return the line of a reason, with how far away its end is."""
    message = printable(with_local_times(reason.message))
    if reason.until is None:
        return message
    exact = clock_time(reason.until)
    until = "" if exact in message else f", until {exact}"
    return f"{message}{until} ({from_now(reason.until)})"
