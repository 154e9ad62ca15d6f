"""`headgate pause`: stop starting tasks, all or those of one thing."""

from __future__ import annotations

import click

from headgate.cli.pausing import set_paused, thing_options
from headgate.cli.places.connection import Connection, connection_options, json_option


@click.command(
    epilog="""\b
Examples:
  headgate pause
  headgate pause --project evals
"""
)
@thing_options
@connection_options
@json_option
def pause(
    *,
    project: str | None,
    agent: str | None,
    target: str | None,
    connection: Connection,
    as_json: bool,
) -> None:
    """Start nothing new, until it is resumed; tasks are still taken.

    Without a name this is for everything; with one, for that project, agent or target. What runs
    goes on.
    """
    things = {"project": project, "agent": agent, "target": target}
    set_paused(connection, things, is_paused=True, as_json=as_json)
