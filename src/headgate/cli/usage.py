"""`headgate usage`: tokens and dollars by project, agent, model, slot or day."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import clock_time, has_days, past_moment, print_json, print_table

if TYPE_CHECKING:
    from headgate.api.schema.tasks import UsageRowBody


GROUPINGS = ("project", "agent", "model", "slot", "day")
_NO_KEY = "(none)"


def _day_or_moment(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        return past_moment(text)


@click.command(
    epilog="""\b
Examples:
  headgate usage
  headgate usage --by agent --since 2h
  headgate usage --by model --since 2026-11-01
  headgate usage --by day --json | jq '.rows[] | [.key, .usd] | @tsv' -r
"""
)
@click.option(
    "--by",
    type=click.Choice(GROUPINGS),
    default="project",
    show_default=True,
    help="What each row stands for.",
)
@click.option(
    "--since",
    metavar="TIME",
    type=_day_or_moment,
    help="2h ago, a day or a time.  [default: 30 days ago]",
)
@click.option(
    "--until", metavar="TIME", type=_day_or_moment, help="2h ago, a day or a time.  [default: now]"
)
@connection_options
@json_option
def usage(
    *, by: str, since: str | None, until: str | None, connection: Connection, as_json: bool
) -> None:
    """Show the tokens and dollars that tasks and calls have used.

    Calls that a task makes count for that task. Assumed amounts were not reported: an attempt
    was lost, or its target reported no usage, so the reserved amount was booked.
    Usage is kept by the hour for 400 days. Days are UTC days.
    """
    from headgate.api.schema.tasks import UsageBody  # noqa: PLC0415

    query = {"by": by, "since": since, "until": until}
    with connect(connection) as client:
        answer = client.request("GET", "/usage", response_type=UsageBody, query=query)
    if as_json:
        print_json(answer)
        return
    days = has_days(answer.since, answer.until)
    since, until = (clock_time(one, has_day=days) for one in (answer.since, answer.until))
    title = f"Used from {since} to {until}"
    rows = [_row(one, one.key or _NO_KEY) for one in answer.rows]
    counts = ("tasks", "attempts", "calls")
    columns = (by, *counts, "tokens", "dollars", "assumed tokens", "assumed dollars")
    print_table(title, columns, [*rows, _row(answer.total, "in all")])


def _row(one: UsageRowBody, name: str) -> tuple[str, ...]:
    return (
        name,
        f"{one.tasks:,}",
        f"{one.attempts:,}",
        f"{one.calls:,}",
        f"{one.tokens:,}",
        one.usd,
        f"{one.assumed_tokens:,}",
        one.assumed_usd,
    )
