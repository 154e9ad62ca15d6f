"""`headgate reload`: make the service read its settings file again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import print_json, print_table
from headgate.core.text import printable

if TYPE_CHECKING:
    from headgate.api.schema.admin import ChangeBody


@click.command(
    epilog="""\b
Examples:
  headgate reload
  headgate config check --config fleet.toml && headgate reload
"""
)
@connection_options
@json_option
def reload(*, connection: Connection, as_json: bool) -> None:
    """Make the service read its settings file again; print what changed.

    A file with an error changes nothing. The service also notices a changed file by itself.
    """
    with connect(connection) as client:
        answer = client.reload()
    if as_json:
        print_json(answer)
        return
    if not answer.changed and not answer.needs_restart:
        click.echo("nothing has changed")
    if answer.changed:
        print_table("Changed", ("key", "from", "to"), [_row(one) for one in answer.changed])
    if answer.needs_restart:
        rows = [_row(one) for one in answer.needs_restart]
        print_table("Needs a restart", ("key", "from", "to"), rows)
    for line in answer.warnings:
        click.echo(f"headgate: warning: {printable(line)}", err=True)
    for key in answer.kept:
        click.echo(f"{key} is 0 in the file and stays as it was; the next start refuses a 0")


def _row(change: ChangeBody) -> tuple[str, str, str]:
    return change.key, _shown(change.before), _shown(change.after)


def _shown(value: Any) -> str:  # noqa: ANN401
    return "" if value is None else msgspec.json.encode(value).decode()
