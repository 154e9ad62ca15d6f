"""Submitting many tasks: lines of JSON go to the service in batches, and each gets a result.

Lines are sent on as they come. A batch is full at 50 lines or at a size that the service takes, and
is sent early when no further line is there, so that a slow writer is not kept waiting. Rule: no
more than one batch is in memory, however long the input is; a batch that waits for room holds the
writer back.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

import click
import msgspec

from headgate.bodies.tasks import BatchBody, BatchEntryBody
from headgate.cli.exit_codes import EXIT_FAILED
from headgate.cli.places.connection import Connection, connect
from headgate.cli.submitting.input_lines import Line, line_batches
from headgate.cli.submitting.patience import until_room, wait
from headgate.client.calls import shared_by
from headgate.client.task_fields import TaskFields, task_body
from headgate.core.texts.printable import printable
from headgate.errors import ServiceError

if TYPE_CHECKING:
    from headgate.client.sync_client import SyncClient

OWNERS = frozenset({"agentId", "projectId"})
SHARED = ("agentId", "projectId", "callbackUrl")

_NOTHING = (b"null", b'""')
_OBJECTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
Fields = dict[str, msgspec.Raw]
"""A line, read as far as the names of its fields."""


class LineResult(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What became of one line; without `task_id` nothing was stored."""

    line: int
    task_id: str | None = None
    state: str | None = None
    position: int | None = None
    code: str | None = None
    error: str | None = None
    retryable: bool | None = None

    @property
    def is_taken(self) -> bool:
        """Whether there is a task that was not refused."""
        return self.task_id is not None and self.code is None


class _Lines:
    """Submits lines, and counts what became of them."""

    def __init__(self, client: SyncClient, fields: TaskFields, *, patient: bool) -> None:
        body = task_body(fields)
        self._shared = {name: body.pop(name) for name in SHARED if name in body}
        self._defaults = {name: msgspec.Raw(msgspec.json.encode(body[name])) for name in body}
        self._client = client
        self._patient = patient
        self.taken = 0
        self.refused = 0

    def results(self, lines: list[Line]) -> list[LineResult]:
        """Submit a batch, again and again if patience is wanted, and return a result a line."""
        found: dict[int, LineResult] = {}
        waiting: dict[int, Fields] = {}
        for line in lines:
            task = self._task(line)
            if isinstance(task, LineResult):
                found[line.number] = task
            else:
                waiting[line.number] = task
        found |= self._insisted(waiting)
        results = [found[line.number] for line in lines]
        self.taken += sum(result.is_taken for result in results)
        self.refused += sum(not result.is_taken for result in results)
        return results

    def _insisted(self, waiting: dict[int, Fields]) -> dict[int, LineResult]:
        """Submit tasks until each is taken or refused for good, in rounds.

        What finds no room is kept as a rejected task all the same. So a round has as many lines as
        the one before had room for, or one that asks whether there is some.
        """
        found: dict[int, LineResult] = {}
        size, attempt = len(waiting), 0
        while waiting:
            sent = dict(islice(waiting.items(), size))
            found |= self._sent(sent)
            again = [number for number in sent if self._is_tried_again(found[number])]
            kept = set(again)
            waiting = {n: task for n, task in waiting.items() if n in kept or n not in sent}
            size = max(1, len(sent) - len(again)) if again else 2 * size
            attempt = attempt + 1 if again else 0
            if again:
                wait(attempt, found[again[0]].error or "")
        return found

    def _task(self, line: Line) -> Fields | LineResult:
        if line.problem:
            return _bad(line, line.problem)
        try:
            given = _OBJECTS.decode(line.content)
        except msgspec.ValidationError:
            return _bad(line, "a line must be a JSON object")
        except RecursionError:
            return _bad(line, "the line is nested too deeply")
        except msgspec.DecodeError as error:
            return _bad(line, f"the line is not JSON: {error}")
        # null, and an empty text, are the same as a field that is absent.
        own = {name: value for name, value in given.items() if bytes(value) not in _NOTHING}
        task = {**self._defaults, **own}
        if OWNERS & (task.keys() | self._shared.keys()):
            return task
        return _bad(line, "missing required field 'agentId'", code="missing_field")

    def _sent(self, tasks: dict[int, Fields]) -> dict[int, LineResult]:
        """Submit tasks, and those that name an agent apart from others where a batch must too."""
        pinned = {number: task for number, task in tasks.items() if "agentId" in task}
        opened = {number: task for number, task in tasks.items() if number not in pinned}
        if OWNERS & self._shared.keys():
            pinned, opened = tasks, {}
        return {
            number: result
            for group in (pinned, opened)
            if group
            for number, result in self._batch(group).items()
        }

    def _batch(self, tasks: dict[int, Fields]) -> dict[int, LineResult]:
        bodies = list(tasks.values())
        body = {**shared_by(bodies), **self._shared, "tasks": bodies}
        headers = {"idempotency-key": os.urandom(16).hex()}
        answer = until_room(
            lambda: self._client.request(
                "POST", "/tasks/batch", body=body, headers=headers, answer=BatchBody
            ),
            patient=self._patient,
        )
        return {
            number: _result(number, entry)
            for number, entry in zip(tasks, answer.tasks, strict=True)
        }

    def _is_tried_again(self, result: LineResult) -> bool:
        return self._patient and not result.is_taken and bool(result.retryable)


def submit_lines(
    connection: Connection, fields: TaskFields, *, patient: bool, as_json: bool
) -> int:
    """Submit every line of standard input, print a result for each, and return the exit code."""
    with connect(connection) as client:
        submission = _Lines(client, fields, patient=patient)
        for lines in line_batches():
            try:
                results = submission.results(lines)
            except (ServiceError, KeyboardInterrupt):
                _tell_rest(lines[0].number)
                raise
            for result in results:
                _tell(result, as_json=as_json)
    total = submission.taken + submission.refused
    click.echo(f"headgate: {submission.taken} of {total} submitted", err=True)
    return EXIT_FAILED if submission.refused else 0


def _tell(result: LineResult, *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(result))
    elif result.is_taken:
        click.echo(result.task_id)
    else:
        click.echo(f"headgate: line {result.line}: {printable(result.error or '')}", err=True)


def _tell_rest(number: int) -> None:
    click.echo(f"headgate: nothing is known of line {number} and those after it", err=True)


def _bad(line: Line, problem: str, *, code: str = "bad_json") -> LineResult:
    return LineResult(line=line.number, code=code, error=problem, retryable=False)


def _result(number: int, entry: BatchEntryBody) -> LineResult:
    return LineResult(
        line=number,
        task_id=entry.task_id,
        state=None if entry.state is None else entry.state.value,
        position=entry.position,
        code=entry.code,
        error=entry.error,
        retryable=entry.retryable,
    )
