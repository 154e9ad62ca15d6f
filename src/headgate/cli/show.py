"""`headgate show`: everything about a task."""

from __future__ import annotations

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import print_json


@click.command(
    epilog="""\b
Examples:
  headgate show tsk_01m7fs2skb2415wvpawg4jr96h
  headgate show tsk_01m7fs2skb2415wvpawg4jr96h --json | jq .result
"""
)
@click.argument("task_id", metavar="TASK")
@connection_options
@json_option
def show(*, task_id: str, connection: Connection, as_json: bool) -> None:
    """Show everything about a task."""
    with connect(connection) as client:
        task = client.get(task_id)
    if as_json:
        print_json(task)
        return
    from headgate.cli.task_view import lines_of  # noqa: PLC0415  not for a list of commands

    click.echo("\n".join(lines_of(task)))
