"""`headgate cancel`: stop tasks, whether they wait or run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from headgate.cli.connection import Connection, connect, connection_options, json_option
from headgate.cli.main import EXIT_FAILED
from headgate.cli.output import duration, print_json
from headgate.core.text import printable
from headgate.errors import LimitReachedError, NotAllowedError, RequestRefusedError, ServiceError

if TYPE_CHECKING:
    from headgate.api.schema.admin import BulkCancelBody, BulkRetryBody


# Doing one thing to each of several tasks: what becomes of one does not keep the next from it.

Act = Callable[[str], tuple[msgspec.Struct, str]]
"""Does it to one task, and returns the answer and a few words about it."""


def for_each(task_ids: Sequence[str], act: Act, *, as_json: bool) -> int:
    """Do it to each, tell what became of it, and return the exit code.

    A task of its own that is refused raises, as any command's input does; a service that does not
    answer, or does not allow it, ends the list.
    """
    if len(task_ids) == 1:
        _tell(task_ids[0], act(task_ids[0]), as_json=as_json)
        return 0
    refused = 0
    for task_id in task_ids:
        try:
            _tell(task_id, act(task_id), as_json=as_json)
        except NotAllowedError:
            raise
        except (RequestRefusedError, LimitReachedError) as error:
            refused += 1
            _tell_refused(task_id, error, as_json=as_json)
    return EXIT_FAILED if refused else 0


def _tell(task_id: str, outcome: tuple[msgspec.Struct, str], *, as_json: bool) -> None:
    answer, words = outcome
    click.echo(msgspec.json.encode(answer) if as_json else f"{printable(task_id)} {words}")


def _tell_refused(task_id: str, error: Exception, *, as_json: bool) -> None:
    code = error.code if isinstance(error, ServiceError) else ""
    if as_json:
        click.echo(msgspec.json.encode({"taskId": task_id, "code": code, "error": str(error)}))
    else:
        click.echo(f"headgate: {printable(f'{task_id}: {error}')}", err=True)


# Doing one thing to all tasks that match: how many there are is said first.
#
# Rule: nothing is done to tasks that nobody counted. A person is asked, a script says `--yes`.

Command = TypeVar("Command", bound=Callable[..., Any])


def filter_options(*states: str) -> Callable[[Command], Command]:
    """Add the options that say which tasks are meant, and `--yes`."""
    options = (
        click.option("--agent", "agent_id", metavar="NAME", help="All tasks of this agent."),
        click.option("--project", "project_id", metavar="NAME", help="All tasks of this project."),
        click.option("--target", metavar="NAME", help="All tasks for this target."),
        click.option("--label", metavar="KEY=TEXT", help="All tasks with this label."),
        click.option(
            "--state",
            "states",
            multiple=True,
            type=click.Choice(states),
            help="All tasks in this state.",
        ),
        click.option(
            "--older",
            "older_seconds",
            metavar="TIME",
            type=duration,
            help="All tasks older than this, such as 10m.",
        ),
        click.option("--yes", is_flag=True, help="Do not ask."),
    )

    def added(command: Command) -> Command:
        for option in reversed(options):
            option(command)
        return command

    return added


def filter_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return what the options say of tasks, as a client takes it; empty if they say nothing."""
    names = ("agent_id", "project_id", "target", "label")
    which = {name: given[name] for name in names if given[name]}
    if given["states"]:
        which["state"] = list(given["states"])
    if given["older_seconds"]:
        which["created_before"] = datetime.now(UTC) - timedelta(seconds=given["older_seconds"])
    return which


def check_choice(task_ids: tuple[str, ...], which: dict[str, Any]) -> None:
    """Refuse a call that names no task and says nothing of any, or does both."""
    if bool(task_ids) == bool(which):
        message = "name tasks, or choose them with --agent, --project, --target, --label, --state"
        message += " or --older"
        raise click.UsageError(message)


def for_all_matching(
    act: Callable[..., BulkCancelBody | BulkRetryBody],
    which: dict[str, Any],
    *,
    verb: str,
    yes: bool,
    as_json: bool,
) -> int:
    """Count, ask, do it to all, and return the exit code."""
    first = act(**which)
    matched = first.matched
    if matched and not yes:
        _ask(f"{verb} {matched} {_tasks(matched)}?")
    counts = _counts(act, which, first)
    remaining = counts["remaining"]
    if as_json:
        print_json(counts)
    else:
        done = counts.get("cancelled", 0) + counts.get("retried", 0)
        left = f"; {remaining} remain, run the command again" if remaining else ""
        click.echo(f"{_DONE[verb]} {done} of {matched} {_tasks(matched)}{left}")
    return EXIT_FAILED if remaining else 0


_DONE = {"cancel": "Cancelled", "retry": "Retried"}


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        message = f"{question} Nobody can answer here; give --yes"
        raise click.UsageError(message)
    click.confirm(question, abort=True, err=True)


def _counts(
    act: Callable[..., BulkCancelBody | BulkRetryBody],
    which: dict[str, Any],
    first: BulkCancelBody | BulkRetryBody,
) -> dict[str, int]:
    """Do it as long as fewer remain each time; return all rounds as one, by the API's names."""
    counts = msgspec.structs.asdict(first) | {"remaining": first.matched}
    while counts["remaining"]:
        answer = msgspec.structs.asdict(act(confirm=True, **which))
        is_stuck = answer["remaining"] >= counts["remaining"]
        counts = {name: counts[name] + answer[name] for name in answer}
        counts |= {"matched": first.matched, "remaining": answer["remaining"]}
        if is_stuck:
            break
    return counts


def _tasks(count: int) -> str:
    return "task" if count == 1 else "tasks"


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
    """Cancel waiting or running tasks.

    Name tasks, or choose them with options; the command then counts them and asks first. A running
    task is `cancelling` until it has stopped. The exit code is 1 if a task could not be cancelled.
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


# `headgate retry`: do again what a task that ended was to do, as a new task.


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
    """Submit ended tasks again, as new tasks.

    Name tasks, or choose them with options; the command then counts them and asks first. Without
    --state the command chooses tasks that did not succeed. The exit code is 1 if a task could not
    be submitted.
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
