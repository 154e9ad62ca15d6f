"""`headgate service` and `closures`: pause and resume everything, and see what is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.output import (
    clock_time,
    from_now,
    print_json,
    print_json_lines,
    print_table,
)

if TYPE_CHECKING:
    from headgate.core.task_view import ClosureBody

PAUSED = "The service is paused: no task starts. headgate service resume ends this."


@click.group()
def service() -> None:
    """Pause and resume the whole service.

    headgate project pause pauses one project; agent, target and slot have the same command.
    """


@service.command(
    epilog="""\b
Examples:
  headgate service pause
  headgate service pause --url https://fleet.example.org
"""
)
@connection_options
@json_option
def pause(*, connection: Connection, as_json: bool) -> None:
    """Pause everything: no waiting task or call starts.

    The service still accepts tasks, and running ones go on.
    """
    with connect(connection) as client:
        answer = client.pause()
    if as_json:
        print_json(answer)
    else:
        click.echo(PAUSED)


@service.command(
    epilog="""\b
Examples:
  headgate service resume
"""
)
@connection_options
@json_option
def resume(*, connection: Connection, as_json: bool) -> None:
    """Resume everything that headgate service pause held back.

    A project, agent, target or slot that was paused by name stays paused. To go on with a workflow
    that was interrupted, use headgate run --resume.
    """
    with connect(connection) as client:
        answer = client.resume()
        closed = client.closures().count
    if as_json:
        print_json(answer)
        return
    click.echo("The service is active.")
    if closed:
        click.echo(closures_line(closed))


def closures_line(count: int) -> str:
    """Return how many closures keep tasks waiting, and which command lists them."""
    keep = "1 closure keeps" if count == 1 else f"{count:,} closures keep"
    return f"{keep} tasks waiting; headgate closures lists them."


# `headgate closures`: what keeps tasks from starting, and who closed it.

HEADER = ("what", "name", "closed by", "since", "until", "why")


@click.command(
    epilog="""\b
Examples:
  headgate closures
  headgate closures --json | jq -r 'select(.cause == "worker") | .name'
  headgate slot resume work
  headgate budget resume project:evals
"""
)
@connection_options
@json_option
def closures(*, connection: Connection, as_json: bool) -> None:
    """List what is closed, so that its tasks wait: why, by whom, until when.

    Budgets, targets, slots and agents can be closed. headgate slot resume opens a slot early;
    target, agent and budget have the same command.
    """
    with connect(connection) as client:
        answer = client.closures()
    if as_json:
        print_json_lines(answer.closures)
    elif answer.closures:
        print_table("Closures", HEADER, [_row(one) for one in answer.closures])
    else:
        click.echo("Nothing is closed.")


def _row(one: ClosureBody) -> tuple[str, ...]:
    by = " ".join(text for text in (one.cause, one.by) if text)
    task = f", task {one.task_id}" if one.task_id else ""
    until = "" if one.until is None else f"{clock_time(one.until)} ({from_now(one.until)})"
    return (
        "budget" if one.kind == "scope" else one.kind,
        one.name or "root",
        f"{by}{task}",
        "" if one.since is None else from_now(one.since),
        until,
        one.why,
    )
