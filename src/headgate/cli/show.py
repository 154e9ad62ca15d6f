"""`headgate show`: everything about a task."""

from __future__ import annotations

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import print_json
from headgate.core.call import CALL_PREFIX


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
    """Show everything about a task, or about a call, whose id begins with call-."""
    if task_id.startswith(CALL_PREFIX):
        from headgate.cli.calls import print_call  # noqa: PLC0415  not for a list of commands

        print_call(task_id, connection, as_json=as_json)
        return
    with connect(connection) as client:
        task = client.get(task_id)
    if as_json:
        print_json(task)
        return
    from headgate.cli.task_view import lines_of  # noqa: PLC0415  not for a list of commands

    click.echo("\n".join(lines_of(task)))
