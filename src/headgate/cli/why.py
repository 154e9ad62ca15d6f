"""`headgate why`: what keeps a task or a call waiting, and until when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import (
    clock_time,
    from_now,
    length_of,
    print_json,
    tasks_or_calls,
    with_local_times,
)
from headgate.core.call import CALL_PREFIX
from headgate.core.text import printable
from headgate.errors import InvalidSettingError, RequestRefusedError, ServiceUnavailableError

if TYPE_CHECKING:
    from headgate.api.schema.calls import CallWhyBody
    from headgate.api.schema.tasks import ReasonBody, SlotRoomBody, WhyBody
    from headgate.client.sync_client import SyncClient

MOST_EXPLAINED = 10
"""How many tasks, and how many calls, are explained at once."""


@click.command(
    epilog="""\b
Examples:
  headgate why
  headgate why tsk_01m7fs2skb2415wvpawg4jr96h
  headgate why call-01m7fs2skb2415wvpawg4jr96h
  headgate why tsk_01m7fs2skb2415wvpawg4jr96h --json | jq -r '.reasons[].detail.reason'
"""
)
@click.argument("task_id", metavar="[ID]", required=False)
@connection_options
@json_option
def why(*, task_id: str | None, connection: Connection, as_json: bool) -> None:
    """Explain why a task or a call waits; without an ID, the latest tasks and calls that wait.

    The reason that lasts longest comes first: a pause or a used-up budget before a busy agent. The
    id of a call begins with call-.
    """
    if task_id is not None and "[" in task_id:
        problem = "is a step of a run; headgate runs show last says why its steps wait"
        raise InvalidSettingError("ID", problem)
    with _runs_named(), connect(connection) as client:
        if task_id is None:
            _print_waiting(client, as_json=as_json)
        else:
            _print(_why_one(client, task_id), as_json=as_json)


@contextmanager
def _runs_named() -> Iterator[None]:
    """Where no service answers, name the command for a run, which needs none."""
    from headgate.client.responses import NOT_REACHED  # noqa: PLC0415  not for a list of commands

    try:
        yield
    except ServiceUnavailableError as error:
        if error.code == NOT_REACHED:
            line = "of a run without a service, headgate runs show last says why its steps wait"
            error.args = (f"{error}; {line}",)
        raise


def _print(answer: WhyBody | CallWhyBody, *, as_json: bool) -> None:
    from headgate.api.schema.tasks import WhyBody  # noqa: PLC0415

    if as_json:
        print_json(answer)
    else:
        lines = lines_of(answer) if isinstance(answer, WhyBody) else lines_of_call(answer)
        click.echo("\n".join(lines))


def _why_one(client: SyncClient, given: str) -> WhyBody | CallWhyBody:
    """Ask about a task or a call; where there is none, say which one, and who was asked."""
    try:
        if given.startswith(CALL_PREFIX):
            return _why_call(client, given)
        return client.why(given)
    except RequestRefusedError as error:
        if error.code == "not_found":
            error.args = (f"{error}: {given} at {client.url}",)
        raise


def _why_call(client: SyncClient, call_id: str) -> CallWhyBody:
    from headgate.api.schema.calls import CallWhyBody  # noqa: PLC0415
    from headgate.client.requests import resource_path  # noqa: PLC0415

    path = resource_path("calls", call_id, "why", field_name="call_id")
    return client.request("GET", path, response_type=CallWhyBody)


def _print_waiting(client: SyncClient, *, as_json: bool) -> None:
    """Explain what waits, the latest first, a line of JSON for each; what starts meanwhile too."""
    import msgspec  # noqa: PLC0415

    from headgate.api.schema.calls import CallListBody  # noqa: PLC0415

    query: dict[str, str | int | None] = {"state": "waiting", "limit": MOST_EXPLAINED}
    calls = client.request("GET", "/calls", response_type=CallListBody, query=query)
    tasks = client.list_tasks(state="queued", limit=MOST_EXPLAINED)
    answers: list[WhyBody | CallWhyBody] = [
        *(_why_call(client, one.call_id) for one in calls.calls),
        *(client.why(one.task_id) for one in tasks.tasks),
    ]
    for answer in answers:
        if as_json:
            click.echo(msgspec.json.encode(answer))
        else:
            _print(answer, as_json=False)
    if not answers and not as_json:
        click.echo("Nothing waits.")
    if calls.next_cursor or tasks.next_cursor:
        more = (
            "more wait; headgate tasks --state queued and headgate calls --state waiting list them"
        )
        click.echo(f"headgate: {more}", err=True)


def lines_of_call(answer: CallWhyBody) -> list[str]:
    """Return every rule that keeps a call waiting, its place, and which key it has."""
    lines = [f"{answer.call_id} is {answer.state.value}:", *_reason_lines(answer.reasons)]
    if answer.error:
        lines.append(f"  {printable(with_local_times(answer.error))}")
    if answer.position is not None:
        lines.append(f"  {_place(answer.position)}")
    if answer.expected_seconds is not None:
        lines.append(f"  about {length_of(answer.expected_seconds)} to go")
    if answer.slot or answer.key_rule:
        rule = f": {printable(answer.key_rule)}" if answer.key_rule else ""
        lines.append(f"  key {printable(answer.slot or 'of the upstream')}{rule}")
    if not answer.error and not answer.reasons and answer.position is None:
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
        return [line, *_progress(answer), *_holds(answer), *_rooms(answer)]
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
            work = tasks_or_calls(reason.held_by_others)
            lines.append(f"    held by {work} of others")
    return lines


def _progress(answer: WhyBody) -> list[str]:
    from headgate.cli.task_view import progress_line  # noqa: PLC0415

    return [] if answer.progress is None else [f"  {progress_line(answer.progress)}"]


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
