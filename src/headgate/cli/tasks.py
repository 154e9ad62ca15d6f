"""`headgate tasks`: a list of tasks, newest first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Unpack

import click

from headgate.cli.connection import Connection, connect, connection_options
from headgate.cli.output import (
    naming_unknown,
    past_moment,
    print_json_lines,
    print_tables,
    tell_more,
)

if TYPE_CHECKING:
    from headgate.client.requests import ListFilter
    from headgate.client.sync_client import SyncClient
    from headgate.core.task_view import TaskSnapshot


STATES = ("queued", "assigned", "running", "done", "failed", "cancelled", "rejected")
DEFAULT_LIMIT = 20
MOST_AT_ONCE = 1_000


@click.command(
    epilog="""\b
Examples:
  headgate tasks
  headgate tasks --state queued --state running --agent coder-1
  headgate tasks --state queued --oldest
  headgate tasks --text timeout --label run=7 --since 2h
  headgate tasks --project evals --state failed --all --json | jq -r .taskId
"""
)
@click.option("--agent", "agent_id", metavar="NAME", help="Only tasks of this agent.")
@click.option("--project", "project_id", metavar="NAME", help="Only tasks of this project.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES),
    help="Only tasks in this state; repeat the option for more.",
)
@click.option("--target", metavar="NAME", help="Only tasks for this target.")
@click.option("--slot", metavar="NAME", help="Only tasks of this slot.")
@click.option(
    "--provider", metavar="NAME", help="Only tasks that may use any slot of this provider."
)
@click.option("--scope", metavar="SCOPE", help="Only tasks charged to this budget or within it.")
@click.option("--label", metavar="KEY[=TEXT]", help="Only tasks with this label.")
@click.option("--text", metavar="TEXT", help="Only tasks with this in a name, label or error.")
@click.option(
    "--since",
    "created_after",
    metavar="TIME",
    type=past_moment,
    help="Only tasks submitted since then: 2h ago, or 2030-01-31T18:00:00Z.",
)
@click.option(
    "--until",
    "created_before",
    metavar="TIME",
    type=past_moment,
    help="Only tasks submitted before: 2h ago, or a time.",
)
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, MOST_AT_ONCE),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="How many to list.",
)
@click.option("--oldest", "is_oldest_first", is_flag=True, help="List the oldest first.")
@click.option("--all", "is_all", is_flag=True, help="List all of them.")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Write each task as one line of JSON.")
def tasks(
    *,
    states: tuple[str, ...],
    limit: int,
    is_oldest_first: bool,
    is_all: bool,
    connection: Connection,
    as_json: bool,
    **which: Unpack[ListFilter],
) -> None:
    """List tasks, newest first."""
    which["state"] = ",".join(states) or None
    which["order"] = "oldest" if is_oldest_first else None
    which["omit"] = None if as_json else _without_columns()
    with connect(connection) as client:
        # One more than is shown tells whether there are more.
        listed = client.iterate_tasks(**which) if is_all else _page(client, limit + 1, which)
        found = naming_unknown(
            listed,
            client,
            project=which.get("project_id"),
            agent=which.get("agent_id"),
            target=which.get("target"),
        )
        shown = found if is_all else islice(found, limit)
        if as_json:
            print_json_lines(shown)
        else:
            from headgate.cli.task_view import HEADER, SPARE, row_of  # noqa: PLC0415

            print_tables(
                "Tasks",
                HEADER,
                map(row_of, shown),
                empty=f"No tasks at {client.url}",
                whole=("task",),
                spare=SPARE,
            )
        if not is_all:
            tell_more(found, limit)


def _without_columns() -> str:
    """Return what a table of tasks has no column for, and may be large."""
    from headgate.core.task_view import CONTENTS  # noqa: PLC0415

    return ",".join(CONTENTS)


def _page(client: SyncClient, limit: int, which: ListFilter) -> Iterator[TaskSnapshot]:
    """Give as many tasks as are wanted; a page may be shorter than it could be, even empty."""
    cursor = None
    while limit:
        page = client.list_tasks(limit=min(limit, MOST_AT_ONCE), cursor=cursor, **which)
        yield from page.tasks
        cursor = page.next_cursor
        limit = max(0, limit - page.count) if cursor else 0
