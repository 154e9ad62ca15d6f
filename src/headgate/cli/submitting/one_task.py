"""Submitting one task, and waiting for its end with something to look at.

Standard output has what a script wants: the id of the task, or its result. What goes on in the
meantime is told on standard error: one line that changes in a terminal, a line a change otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from headgate.bodies.tasks import SubmittedBody
from headgate.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from headgate.cli.output import is_terminal, print_json
from headgate.cli.places.connection import Connection, connect
from headgate.cli.submitting.patience import until_room
from headgate.cli.submitting.progress_line import ProgressLine
from headgate.client.calls import key_headers
from headgate.client.task_fields import task_body
from headgate.core.tasks.task import TaskStatus
from headgate.core.texts.printable import printable
from headgate.errors import NotAllowedError, RequestRefusedError

if TYPE_CHECKING:
    from headgate.client.sync_client import SyncClient
    from headgate.client.task_fields import TaskFields
    from headgate.task_snapshot import TaskSnapshot


def submit_one(
    connection: Connection,
    fields: TaskFields,
    *,
    idempotency_key: str | None,
    patient: bool,
    is_waiting: bool,
    timeout_seconds: float | None,
    as_json: bool,
) -> int:
    """Submit a task, wait for its end if that is wanted, and return the exit code."""
    started = time.monotonic()
    with connect(connection) as client:
        submitted = _submitted(client, fields, key=idempotency_key, patient=patient)
        if not is_waiting:
            _tell(submitted, as_json=as_json)
            return 0
        left = None if timeout_seconds is None else timeout_seconds - (time.monotonic() - started)
        return _wait(client, submitted.task_id, timeout_seconds=left, as_json=as_json)


def _submitted(
    client: SyncClient, fields: TaskFields, *, key: str | None, patient: bool
) -> SubmittedBody:
    # Key and body are made once: an answer may have been lost in any round, and only the very
    # same request is known to be the same.
    body = task_body(fields)
    headers = key_headers(key, field="--idempotency-key")
    try:
        return until_room(
            lambda: client.request(
                "POST", "/tasks", body=body, headers=headers, answer=SubmittedBody
            ),
            patient=patient,
        )
    except RequestRefusedError as error:
        if error.code == "missing_field" and error.details.get("field") == "agentId":
            error.args = (f"{error}; give --agent or --project",)
        raise


def _tell(submitted: SubmittedBody, *, as_json: bool) -> None:
    if as_json:
        print_json(submitted)
        return
    click.echo(submitted.task_id)
    if is_terminal():
        click.echo(
            f"{submitted.state.value}, number {submitted.position} of those that wait", err=True
        )


def _wait(client: SyncClient, task_id: str, *, timeout_seconds: float | None, as_json: bool) -> int:
    try:
        with ProgressLine(task_id) as line:
            task = _last(line.told(client.progress(task_id, timeout_seconds=timeout_seconds)))
    except KeyboardInterrupt:
        click.echo(f"headgate: {task_id} goes on; headgate cancel {task_id} stops it", err=True)
        return EXIT_INTERRUPTED
    except NotAllowedError as error:
        error.args = (f"task {task_id} was submitted; waiting: {error}",)
        raise
    return _tell_end(task, as_json=as_json)


def _last(tasks: Iterator[TaskSnapshot]) -> TaskSnapshot:
    *_, last = tasks
    return last


def _tell_end(task: TaskSnapshot, *, as_json: bool) -> int:
    is_done = task.state is TaskStatus.DONE
    if as_json:
        print_json(task)
    elif task.result is not None:
        click.echo(msgspec.json.format(msgspec.json.encode(task.result), indent=2))
    if not is_done:
        why = f": {task.error}" if task.error else ""
        click.echo(printable(f"headgate: {task.task_id} {task.state.value}{why}"), err=True)
    return 0 if is_done else EXIT_FAILED
