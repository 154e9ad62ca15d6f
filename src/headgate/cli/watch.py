"""`headgate watch`: events as they happen, until Ctrl-C or until the task has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options
from headgate.cli.output import duration
from headgate.core.text import printable

if TYPE_CHECKING:
    from headgate.core.events import TaskEvent


KINDS = ("queued", "running", "retrying", "completed", "failed", "cancelled", "rejected")


@click.command(
    epilog="""\b
Examples:
  headgate watch
  headgate watch tsk_01m7fs2skb2415wvpawg4jr96h
  headgate watch --project evals --kind failed --kind rejected
  headgate watch --json | jq -c '[.time, .kind, .taskId]'
"""
)
@click.argument("task_id", metavar="[TASK]", required=False)
@click.option("--agent", "agent_id", metavar="NAME", help="Only tasks of this agent.")
@click.option("--project", "project_id", metavar="NAME", help="Only tasks of this project.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    help="Only events of this kind; repeat the option for more.",
)
@click.option("--after", metavar="ID", help="Start after the event with this id.")
@click.option(
    "--patience",
    metavar="TIME",
    type=duration,
    default="5m",
    show_default=True,
    help="How long to wait for a service that does not answer.",
)
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Write each event as one line of JSON.")
def watch(
    *,
    task_id: str | None,
    agent_id: str | None,
    project_id: str | None,
    kinds: tuple[str, ...],
    after: str | None,
    patience: float,
    connection: Connection,
    as_json: bool,
) -> None:
    """Print events as they happen: of all tasks, or of one task until it ends.

    If the connection breaks, the command connects again and goes on after the last printed event.
    """
    from headgate.cli.task_view import has_colour  # noqa: PLC0415  not for a list of commands

    if task_id is not None and (agent_id or project_id or kinds):
        message = "--agent, --project and --kind are for all tasks, not for one"
        raise click.UsageError(message)
    coloured = has_colour()
    with connect(connection) as client:
        events = client.events(
            task_id,
            agent_id=agent_id,
            project_id=project_id,
            kind=",".join(f"task.{kind}" for kind in kinds) or None,
            last_event_id=after,
            patience_seconds=patience,
        )
        for event in events:
            _print(event, as_json=as_json, coloured=coloured)


def _print(event: TaskEvent, *, as_json: bool, coloured: bool) -> None:
    import msgspec  # noqa: PLC0415

    click.echo(msgspec.json.encode(event) if as_json else _line(event, coloured=coloured))


def _line(event: TaskEvent, *, coloured: bool) -> str:
    from headgate.cli.output import clock_time  # noqa: PLC0415
    from headgate.cli.task_view import in_colour_of, shortened  # noqa: PLC0415

    if event.state is None:
        return f"{clock_time(event.time)}  {event.kind.value}: some events may have been missed"
    name = event.kind.value.removeprefix("task.")
    parts = [
        clock_time(event.time),
        in_colour_of(event.state, f"{name:<9}", coloured=coloured),
        printable(event.task_id),
        printable(f"{event.agent_id or '(any)'} in {event.project_id}"),
    ]
    if event.attempt and event.attempt > 1:
        parts.append(f"attempt {event.attempt}")
    if event.error:
        parts.append(printable(shortened(event.error)))
    return "  ".join(parts)
