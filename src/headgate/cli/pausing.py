"""What `headgate pause` and `headgate resume` share: which thing is meant, and the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import click

from headgate.cli.output import print_json
from headgate.cli.places.connection import Connection, connect
from headgate.core.texts.printable import printable
from headgate.errors import InvalidFieldError

if TYPE_CHECKING:
    import msgspec

Command = TypeVar("Command", bound=Callable[..., Any])


def thing_options(command: Command) -> Command:
    """Add --project, --agent and --target to a command."""
    for noun in ("target", "agent", "project"):
        article = "an" if noun == "agent" else "a"
        command = click.option(f"--{noun}", metavar="NAME", help=f"Only {article} {noun}.")(command)
    return command


def set_paused(
    connection: Connection,
    things: dict[str, str | None],
    *,
    is_paused: bool,
    as_json: bool,
) -> None:
    """Pause or resume everything, or the one thing that was named."""
    named = [(noun, name) for noun, name in things.items() if name is not None]
    if len(named) > 1:
        option = f"--{named[1][0]}"
        raise InvalidFieldError(option, "name one thing at a time")
    with connect(connection) as client:
        if not named:
            answer: msgspec.Struct = client.pause() if is_paused else client.resume()
            line = "paused: nothing new starts" if is_paused else "resumed"
        else:
            noun, name = named[0]
            answer = _change(client, noun, name, "paused" if is_paused else "active")
            line = f"{noun} {name} is {'paused' if is_paused else 'active'}"
    if as_json:
        print_json(answer)
    else:
        click.echo(printable(line))


def _change(client: Any, noun: str, name: str, status: str) -> msgspec.Struct:  # noqa: ANN401
    from headgate.bodies.admin import AgentBody, ProjectBody, TargetBody  # noqa: PLC0415

    kinds = {"project": ProjectBody, "agent": AgentBody, "target": TargetBody}
    path = f"/{noun}s/{quote(name, safe='')}"
    changed: msgspec.Struct = client.request(
        "PATCH", path, body={"status": status}, answer=kinds[noun]
    )
    return changed
