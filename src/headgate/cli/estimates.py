"""`headgate estimates`: what each kind of work is expected to cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import from_now, print_json, print_table

if TYPE_CHECKING:
    from headgate.api.schema.tasks import KindBody, LearnedBody


@click.command(
    epilog="""\b
Examples:
  headgate estimates
  headgate estimates --project evals
  headgate estimates --json | jq '.kinds[] | select(.usd.silent) | .target'
"""
)
@click.option("--project", "project_id", metavar="ID", help="Only the work of this project.")
@connection_options
@json_option
def estimates(*, project_id: str | None, connection: Connection, as_json: bool) -> None:
    """Show what each kind of work is expected to cost.

    A task without an estimate reserves what its kind usually costs. Headgate learns this from
    reported costs and from priced responses of providers.
    """
    with connect(connection) as client:
        answer = client.estimates(project_id)
    if as_json:
        print_json(answer)
        return
    if not answer.kinds:
        click.echo(
            f"There are no estimates at {client.url} yet: no task has reported what it used."
        )
        return
    title = f"What {100 * answer.quantile:g}% of each kind of work cost no more than"
    columns = ("target", "project", "action", "dollars", "most", "tokens", "most", "samples", "fed")
    print_table(title, columns, [_row(one) for one in answer.kinds])
    if answer.is_truncated:
        click.echo("there are more; name a project with --project", err=True)


def _row(one: KindBody) -> tuple[str, ...]:
    return (
        one.target,
        one.project_id or "(all)",
        one.action or "(all)",
        *_amounts(one.usd, digits=6),
        *_amounts(one.tokens, digits=0),
        str(max(one.usd.samples, one.tokens.samples)),
        from_now(one.last_fed),
    )


def _amounts(known: LearnedBody, *, digits: int) -> tuple[str, str]:
    if known.usual is None or known.largest is None:
        return ("silent" if known.silent else "", "")
    return f"{known.usual:,.{digits}f}", f"{known.largest:,.{digits}f}"
