"""`headgate usage`: tokens and dollars by project, agent, model or day."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import print_json, print_table

if TYPE_CHECKING:
    from headgate.api.schema.tasks import UsageRowBody


GROUPINGS = ("project", "agent", "model", "day")
_NO_KEY = "(none)"


@click.command(
    epilog="""\b
Examples:
  headgate usage
  headgate usage --by model --since 2026-11-01
  headgate usage --by day --json | jq '.rows[] | [.key, .usd] | @tsv' -r
"""
)
@click.option(
    "--by",
    type=click.Choice(GROUPINGS),
    default="project",
    show_default=True,
    help="What the rows stand for.",
)
@click.option("--since", metavar="TIME", help="A day or a time.  [default: 30 days ago]")
@click.option("--until", metavar="TIME", help="A day or a time.  [default: now]")
@connection_options
@json_option
def usage(
    *, by: str, since: str | None, until: str | None, connection: Connection, as_json: bool
) -> None:
    """Print what tasks have used: tokens and dollars, with the counts of tasks and attempts.

    The assumed amounts are the part of the others that nobody reported: an attempt was lost, or
    its target said nothing, and what was reserved for it was booked.

    Figures are kept by the hour for 400 days; days are those of UTC.
    """
    from headgate.api.schema.tasks import UsageBody  # noqa: PLC0415

    query = {"by": by, "since": since, "until": until}
    with connect(connection) as client:
        answer = client.request("GET", "/usage", response_type=UsageBody, query=query)
    if as_json:
        print_json(answer)
        return
    title = f"Used from {_moment(answer.since)} to {_moment(answer.until)} UTC"
    rows = [_row(one, one.key or _NO_KEY) for one in answer.rows]
    columns = (by, "tasks", "attempts", "tokens", "dollars", "assumed tokens", "assumed dollars")
    print_table(title, columns, [*rows, _row(answer.total, "in all")])


def _row(one: UsageRowBody, name: str) -> tuple[str, ...]:
    return (
        name,
        f"{one.tasks:,}",
        f"{one.attempts:,}",
        f"{one.tokens:,}",
        one.usd,
        f"{one.assumed_tokens:,}",
        one.assumed_usd,
    )


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"
