"""`headgate cancel`: stop tasks, whether they wait or run."""

from __future__ import annotations

from typing import Any

import click

from headgate.cli.each_task import for_each
from headgate.cli.matching import check_choice, filter_of, filter_options, for_all_matching
from headgate.cli.places.connection import Connection, connect, connection_options, json_option


@click.command(
    epilog="""\b
Examples:
  headgate cancel tsk_01m7fs2skb2415wvpawg4jr96h
  headgate cancel --agent noisy --state queued
  headgate cancel --project evals --older 2h --yes
"""
)
@click.argument("task_ids", metavar="[TASK]...", nargs=-1)
@filter_options("queued", "assigned", "running")
@connection_options
@json_option
@click.pass_context
def cancel(
    context: click.Context,
    /,
    *,
    task_ids: tuple[str, ...],
    yes: bool,
    connection: Connection,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - which tasks are meant
) -> None:
    """Cancel tasks, whether they wait or run.

    Name them, or say which are meant: then their number is told first. One that runs is told to
    stop, and is `cancelling` until it has. Exits with 1 if one of them could not be cancelled.
    """
    which = filter_of(given)
    check_choice(task_ids, which)
    with connect(connection) as client:
        if which:
            code = for_all_matching(
                client.cancel_matching, which, verb="cancel", yes=yes, as_json=as_json
            )
        else:
            code = for_each(
                task_ids,
                lambda task_id: (answer := client.cancel(task_id), answer.status),
                as_json=as_json,
            )
    context.exit(code)
