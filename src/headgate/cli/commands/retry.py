"""`headgate retry`: do again what a task that ended was to do, as a new task."""

from __future__ import annotations

from typing import Any

import click

from headgate.cli.each_task import for_each
from headgate.cli.matching import check_choice, filter_of, filter_options, for_all_matching
from headgate.cli.places.connection import Connection, connect, connection_options, json_option


@click.command(
    epilog="""\b
Examples:
  headgate retry tsk_01m7fs2skb2415wvpawg4jr96h
  headgate retry --project evals --state failed
  headgate retry --label run=7 --yes --json
"""
)
@click.argument("task_ids", metavar="[TASK]...", nargs=-1)
@filter_options("done", "failed", "cancelled", "rejected")
@connection_options
@json_option
@click.pass_context
def retry(
    context: click.Context,
    /,
    *,
    task_ids: tuple[str, ...],
    yes: bool,
    connection: Connection,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - which tasks are meant
) -> None:
    """Submit again what tasks that ended were to do, as new tasks.

    Name them, or say which are meant: then their number is told first, and without --state it is
    those that did not succeed. Exits with 1 if one of them could not be submitted.
    """
    which = filter_of(given)
    check_choice(task_ids, which)
    with connect(connection) as client:
        if which:
            code = for_all_matching(
                client.retry_matching, which, verb="retry", yes=yes, as_json=as_json
            )
        else:
            code = for_each(
                task_ids,
                lambda task_id: (answer := client.retry(task_id), f"again as {answer.task_id}"),
                as_json=as_json,
            )
    context.exit(code)
