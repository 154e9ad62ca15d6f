"""`headgate pause`, `resume` and `closures`: stop starting tasks, start them again, see who did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import from_now, print_json, print_json_lines, print_table
from headgate.core.text import printable
from headgate.errors import InvalidFieldError

if TYPE_CHECKING:
    import msgspec

    from headgate.api.schema.admin import Openable
    from headgate.core.task_view import ClosureBody


# What `headgate pause` and `headgate resume` share: which thing is meant, and the request.

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
            if noun not in _OPENED_ONLY:
                answer = _change(client, noun, name, "paused" if is_paused else "active")
                line = f"{noun} {name} is {'paused' if is_paused else 'active'}"
            else:
                answer, line = client.open(_OPENED_ONLY[noun], name), f"{noun} {name} is open"
                if noun == "budget":
                    # Without room it closes again: to open is only to ask once more.
                    line = f"{line} until it is found without room; see headgate closures"
            if not is_paused and noun in _OPENED_TOO and getattr(answer, "closures", None):
                client.open(_OPENED_TOO[noun], name)
    if as_json:
        print_json(answer)
    else:
        click.echo(printable(line))


_OPENED_ONLY: dict[str, Openable] = {"slot": "slot", "budget": "budget"}
_OPENED_TOO: dict[str, Openable] = {"agent": "agent", "target": "target"}


def _change(client: Any, noun: str, name: str, status: str) -> msgspec.Struct:  # noqa: ANN401
    from headgate.api.schema.admin import AgentBody, ProjectBody, TargetBody  # noqa: PLC0415

    kinds = {"project": ProjectBody, "agent": AgentBody, "target": TargetBody}
    path = f"/{noun}s/{quote(name, safe='')}"
    changed: msgspec.Struct = client.request(
        "PATCH", path, body={"status": status}, response_type=kinds[noun]
    )
    return changed


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


# `headgate resume`: start tasks again that a pause held.


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
@click.option("--slot", metavar="NAME", help="Only a key slot: open it.")
@click.option("--budget", metavar="SCOPE", help="Only a budget: ask it again.")
def resume(
    *,
    project: str | None,
    agent: str | None,
    target: str | None,
    slot: str | None,
    budget: str | None,
    connection: Connection,
    as_json: bool,
) -> None:
    """Start tasks again that a pause held.

    Without a name this turns the switch for everything back; what was paused by name stays paused
    until it is resumed by name. A target, an agent, a slot or a budget is opened as well, if an
    answer, a worker or want of room closed it: `headgate closures` lists them. What closed it may
    close it again.
    """
    things = {"project": project, "agent": agent, "target": target, "slot": slot, "budget": budget}
    set_paused(connection, things, is_paused=False, as_json=as_json)


# `headgate closures`: what keeps tasks from starting, and who closed it.


@click.command(
    epilog="""\b
Examples:
  headgate closures
  headgate closures --json | jq -r 'select(.cause == "worker") | .name'
"""
)
@connection_options
@json_option
def closures(*, connection: Connection, as_json: bool) -> None:
    """List what keeps tasks from starting: who closed it, since when and until when.

    `headgate resume` opens one of them before its time.
    """
    with connect(connection) as client:
        answer = client.closures()
    if as_json:
        print_json_lines(answer.closures)
        return
    if not answer.closures:
        click.echo("nothing is closed")
        return
    print_table("Closures", HEADER, [_closure_row(one) for one in answer.closures])


HEADER = ("what", "name", "closed by", "since", "until", "why")


def _closure_row(one: ClosureBody) -> tuple[str, ...]:
    noun = "budget" if one.kind == "scope" else one.kind
    by = " ".join(text for text in (one.cause, one.by) if text)
    task = f", task {one.task_id}" if one.task_id else ""
    return (
        noun,
        one.name or "(root)",
        f"{by}{task}",
        "" if one.since is None else from_now(one.since),
        "" if one.until is None else from_now(one.until),
        one.why,
    )
