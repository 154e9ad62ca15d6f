"""`headgate decide`: the plan and the reasons for a snapshot file."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import click
import msgspec

from headgate.cli.output import print_json, print_table
from headgate.core.reasons import Reason
from headgate.core.scheduler import Scheduler
from headgate.core.snapshot import AssignAction, SchedulerState, decode_snapshot
from headgate.errors import InvalidSnapshotError

ROWS_SHOWN = 50


@click.command(
    epilog="""\b
Examples:
  headgate decide snapshot.json
  headgate decide snapshot.json --json | jq .actions
  some-exporter | headgate decide -
"""
)
@click.argument("snapshot", metavar="SNAPSHOT.json")
@click.option("--json", "as_json", is_flag=True, help="Write the plan and all reasons as JSON.")
def decide(snapshot: str, *, as_json: bool) -> None:
    """Print which agent runs which task of a snapshot, and why the others wait.

    FILE is a JSON object with the fields of SchedulerState; - reads standard input.
    """
    state = decode_snapshot(_read(snapshot))
    actions = Scheduler.schedule(state)
    reasons = Scheduler.explain_all(state)
    if as_json:
        print_json({"actions": actions, "waiting": _written(reasons)})
    else:
        _show(state, actions, reasons)


def _read(name: str) -> bytes:
    try:
        if name != "-":
            return Path(name).read_bytes()
        if sys.stdin is None:
            raise InvalidSnapshotError("snapshot", "standard input is closed; give a file")
        return sys.stdin.buffer.read()
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidSnapshotError):
            raise
        why = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot read {name}: {why}; give a readable file, or - for input"
        raise InvalidSnapshotError("snapshot", problem) from None


def _written(reasons: dict[str, tuple[Reason, ...]]) -> dict[str, list[dict[str, object]]]:
    return {
        task_id: [{**msgspec.to_builtins(reason), "message": reason.message} for reason in found]
        for task_id, found in reasons.items()
    }


def _show(
    state: SchedulerState,
    actions: list[AssignAction],
    reasons: dict[str, tuple[Reason, ...]],
) -> None:
    plan = [(action.agent_id, action.task_id, action.project_id) for action in actions]
    served = len({action.agent_id for action in actions})
    title = (
        f"Plan: {_number(len(plan), 'task')} for {served} of {_number(len(state.agents), 'agent')}"
    )
    print_table(title, ("agent", "task", "project"), plan[:ROWS_SHOWN])
    _show_rest(len(plan))
    waiting = [(task_id, found[0].message) for task_id, found in reasons.items()]
    click.echo()
    print_table(
        f"Waiting: {_number(len(waiting), 'task')}", ("task", "reason"), waiting[:ROWS_SHOWN]
    )
    _show_rest(len(waiting))
    if len(waiting) > ROWS_SHOWN:
        counts = Counter(reason for _, reason in waiting).most_common(ROWS_SHOWN)
        click.echo()
        print_table("By reason", ("tasks", "reason"), [(str(n), reason) for reason, n in counts])


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _show_rest(count: int) -> None:
    if count > ROWS_SHOWN:
        click.echo(f"  and {count - ROWS_SHOWN} more; --json lists them all")
