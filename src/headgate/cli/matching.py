"""Doing one thing to all tasks that match: how many there are is said first.

Rule: nothing is done to tasks that nobody counted. A person is asked, a script says `--yes`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from headgate.cli.exit_codes import EXIT_FAILED
from headgate.cli.output import print_json
from headgate.cli.times import duration

if TYPE_CHECKING:
    from headgate.bodies.admin import BulkCancelBody, BulkRetryBody


Command = TypeVar("Command", bound=Callable[..., Any])


def filter_options(*states: str) -> Callable[[Command], Command]:
    """Add the options that say which tasks are meant, and `--yes`."""
    options = (
        click.option("--agent", "agent_id", metavar="NAME", help="All tasks of this agent."),
        click.option("--project", "project_id", metavar="NAME", help="All tasks of this project."),
        click.option("--target", metavar="NAME", help="All tasks for this target."),
        click.option("--label", metavar="KEY=TEXT", help="All tasks with this label."),
        click.option(
            "--state", "states", multiple=True, type=click.Choice(states), help="All in this state."
        ),
        click.option(
            "--older", "older_seconds", metavar="TIME", type=duration, help="All as old as 10m."
        ),
        click.option("--yes", is_flag=True, help="Do not ask whether that many are meant."),
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
        message = "name tasks, or say which with --agent, --project, --target, --label, --state"
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
        left = f"; {remaining} remain, run it again" if remaining else ""
        click.echo(f"{done} of {matched} {_tasks(matched)}{left}")
    return EXIT_FAILED if remaining else 0


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        message = f"{question} Nobody is there to say; give --yes"
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
