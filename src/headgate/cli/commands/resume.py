"""`headgate resume`: start tasks again that a pause held."""

from __future__ import annotations

import click

from headgate.cli.pausing import set_paused, thing_options
from headgate.cli.places.connection import Connection, connection_options, json_option


@click.command(
    epilog="""\b
Examples:
  headgate resume
  headgate resume --target browser
"""
)
@thing_options
@connection_options
@json_option
def resume(
    *,
    project: str | None,
    agent: str | None,
    target: str | None,
    connection: Connection,
    as_json: bool,
) -> None:
    """Start tasks again that a pause held.

    Without a name this turns the switch for everything back; what was paused by name stays paused
    until it is resumed by name.
    """
    things = {"project": project, "agent": agent, "target": target}
    set_paused(connection, things, is_paused=False, as_json=as_json)
