"""Submitting many tasks: lines of JSON go to the service in batches, and each gets a result.

Lines are sent on as they come. A batch is full at 50 lines or at a size that the service takes, and
is sent early when no further line is there, so that a slow writer is not kept waiting. Rule: no
more than one batch is in memory, however long the input is; a batch that waits for room holds the
writer back.
"""

from __future__ import annotations

import os
import random
import select
import sys
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import click
import msgspec

from headgate.api.schema.tasks import BatchEntryBody, SubmittedBatchBody, SubmittedBody
from headgate.cli.connection import Connection, connect
from headgate.cli.main import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from headgate.cli.output import FRAMES, is_terminal, length_of, print_json, with_local_times
from headgate.cli.task_view import has_colour, in_colour_of, shortened
from headgate.cli.why import reason_line
from headgate.client.requests import TaskFields, key_headers, shared_by, task_body
from headgate.core.retries import Backoff
from headgate.core.task import TaskStatus
from headgate.core.text import did_you_mean, nearest, printable
from headgate.errors import (
    NotAllowedError,
    RequestRefusedError,
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
)

if TYPE_CHECKING:
    from headgate.api.schema.tasks import WhyBody
    from headgate.client.sync_client import SyncClient
    from headgate.core.task_view import TaskSnapshot


# Lines of standard input, in batches that are full or that nothing follows soon.
#
# Rule: at most one batch and one line are kept. A line that is too long becomes a problem that has
# its number, and the rest of it is passed over.

MOST_LINES = 50
MOST_LINE_BYTES = 1_000_000
MOST_BATCH_BYTES = 700_000
IDLE_SECONDS = 0.1
PIECE_BYTES = 64 * 1024

_STANDARD_INPUT = 0


class Line(NamedTuple):
    """One line, counted from 1; `problem` if it cannot be a task."""

    number: int
    content: bytes
    problem: str = ""


def line_batches(source: int = _STANDARD_INPUT) -> Iterator[list[Line]]:
    """Give the lines of a file descriptor that are not empty, up to 50 at a time."""
    batch: list[Line] = []
    size = 0
    for line in _lines(source):
        if line is not None and (batch and size + len(line.content) > MOST_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        if line is not None:
            batch.append(line)
            size += len(line.content)
        if batch and (line is None or len(batch) == MOST_LINES):
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _lines(source: int) -> Iterator[Line | None]:
    """Give lines as they come, and None whenever no further one is there soon."""
    number, rest, is_passed_over = 0, b"", False
    for piece in _unmarked(_pieces(source)):
        if piece is None:
            yield None
            continue
        *complete, rest = (rest + piece).split(b"\n")
        for content in complete:
            number += 1
            if is_passed_over:
                is_passed_over = False
            elif content.strip():
                yield _line(number, content)
        if len(rest) > MOST_LINE_BYTES:
            if not is_passed_over:
                yield _line(number + 1, rest)
            rest, is_passed_over = b"", True
    if rest.strip() and not is_passed_over:
        yield _line(number + 1, rest)


def _line(number: int, content: bytes) -> Line:
    if len(content) > MOST_LINE_BYTES:
        return Line(number, b"", f"the line has more than {MOST_LINE_BYTES} bytes")
    return Line(number, content)


def _unmarked(pieces: Iterator[bytes | None]) -> Iterator[bytes | None]:
    """Pass pieces on without a byte order mark before the first; it may be cut anywhere."""
    begin = b""
    for piece in pieces:
        begin += piece or b""
        if len(begin) >= len(BOM_UTF8) or not BOM_UTF8.startswith(begin):
            break
    yield begin.removeprefix(BOM_UTF8)
    yield from pieces


def _pieces(source: int) -> Iterator[bytes | None]:
    while True:
        ready, _, _ = select.select([source], [], [], IDLE_SECONDS)
        if not ready:
            yield None
            select.select([source], [], [])
        piece = os.read(source, PIECE_BYTES)
        if not piece:
            return
        yield piece


# Waiting for room: a submission that finds none is tried again until there is some.

BACKOFF = Backoff(base_seconds=1.0, max_seconds=30.0)

Result = TypeVar("Result")


def until_room(act: Callable[[], Result], *, patient: bool) -> Result:
    """Do something; if patience is wanted, until the service has room for it and answers."""
    attempt = 0
    while True:
        try:
            return act()
        except (ServiceLimitError, ServiceUnavailableError) as error:
            if not patient:
                raise
            attempt += 1
            wait(attempt, error)


def wait(attempt: int, why: ServiceError | str) -> None:
    """Wait before another try, longer each time, and say so the first time."""
    if attempt == 1:
        click.echo(f"headgate: waiting: {printable(str(why))}", err=True)
    asked = why.retry_after_seconds if isinstance(why, ServiceError) else None
    drawn = BACKOFF.seconds(attempt, draw=random.random())  # noqa: S311 - spreads load, no secret
    time.sleep(max(drawn, asked or 0.0))


UNKNOWN_FIELD = "unknown_field"
OWNERS = frozenset({"agentId", "projectId"})
SHARED = ("agentId", "projectId", "callbackUrl")

_NOTHING = (b"null", b'""')
_OBJECTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
Fields = dict[str, msgspec.Raw]
"""A line, read as far as the names of its fields."""


MAX_WARNINGS = 20
"""How many different warnings are told of the lines of one command."""


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
        from headgate.api.submission import TASK_FIELDS  # noqa: PLC0415

        # The service passes over what it does not know, for clients of other versions.
        self._known = frozenset(TASK_FIELDS)
        body = task_body(fields)
        self._shared = {name: body.pop(name) for name in SHARED if name in body}
        self._defaults = {name: msgspec.Raw(msgspec.json.encode(body[name])) for name in body}
        self._client = client
        self._patient = patient
        self.taken = 0
        self.refused = 0
        self.has_unknown_fields = False
        self._warned: set[str] = set()

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
        found |= self._retried(waiting)
        results = [found[line.number] for line in lines]
        self.taken += sum(result.is_taken for result in results)
        self.refused += sum(not result.is_taken for result in results)
        self.has_unknown_fields |= any(result.code == UNKNOWN_FIELD for result in results)
        return results

    def _retried(self, waiting: dict[int, Fields]) -> dict[int, LineResult]:
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
        unknown = [name for name in own if name not in self._known]
        if unknown:
            return _bad(line, self._unknown(unknown[0]), code=UNKNOWN_FIELD)
        task = {**self._defaults, **own}
        if OWNERS & (task.keys() | self._shared.keys()):
            return task
        return _bad(line, "missing required field 'agentId'", code="missing_field")

    def _unknown(self, name: str) -> str:
        known = sorted(self._known)
        meant = did_you_mean(nearest(name, known), f"a task has {', '.join(known)}")
        return f"unknown field {shortened(name)!r}; {meant}"

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
                "POST", "/tasks/batch", body=body, headers=headers, response_type=SubmittedBatchBody
            ),
            patient=self._patient,
        )
        for entry in answer.tasks:
            self._warn(entry.warning or "")
        return {
            number: _result(number, entry)
            for number, entry in zip(tasks, answer.tasks, strict=True)
        }

    def _warn(self, warning: str) -> None:
        """Tell what may be a mistake once, however many lines have it."""
        if warning and warning not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(warning)
            _tell_warning(warning)

    def _is_tried_again(self, result: LineResult) -> bool:
        return self._patient and not result.is_taken and bool(result.retryable)


def submit_lines(
    connection: Connection, fields: TaskFields, *, patient: bool, as_json: bool
) -> int:
    """Submit every line of standard input, print a result for each, and return the exit code."""
    with connect(connection) as client, _naming_known(client, fields):
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
    if submission.has_unknown_fields:
        return EXIT_BAD_INPUT
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


# What is told while a task is waited for: a line that changes, or a line for each change.

FRAME_SECONDS = 0.1
LOOK_SECONDS = 1.0
SAID_AFTER_SECONDS = 1.0
"""How long a task may wait before anybody is told why."""

_CLEAR = "\r\x1b[2K"
_MINUTE_SECONDS = 60


class WaitReasons:
    """Says why a task waits, once it has waited for a moment, and again when that changes."""

    def __init__(self, task_id: str, why: Callable[[str], WhyBody]) -> None:
        self._task_id = task_id
        self._why = why
        self._since: float | None = None
        self._said: object = None
        self._is_allowed = True

    def line(self, state: TaskStatus, now: float) -> str | None:
        """Return what is to be said now of a task in this state; None if that is nothing."""
        if state is not TaskStatus.QUEUED:
            self._since = self._said = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since < SAID_AFTER_SECONDS or not self._is_allowed:
            return None
        try:
            reasons = self._why(self._task_id).reasons
        except NotAllowedError:
            self._is_allowed = False
            return None
        except ServiceError:
            # Whoever waits for the task is told of an outage; the next look may do better.
            return None
        # Counts and seconds change all the time; what keeps the task does not.
        is_now = [
            (one.detail.get("reason"), one.until and one.until.timestamp() // _MINUTE_SECONDS)
            for one in reasons
        ]
        if not reasons or is_now == self._said:
            return None
        self._said = is_now
        lines = [reason_line(one) for one in reasons]
        lines += [printable(one.warning) for one in reasons if one.warning]
        return f"{self._task_id} waits: {'; '.join(lines)}"


class ProgressLine:
    """Shows a task on standard error; in a terminal a thread keeps the line moving.

    Another one says why the task waits.
    """

    def __init__(self, task_id: str, why: Callable[[str], WhyBody]) -> None:
        self._task_id = task_id
        self._reasons = WaitReasons(task_id, why)
        self._started = time.monotonic()
        self._is_live = sys.stderr is not None and sys.stderr.isatty()
        self._coloured = has_colour(sys.stderr)
        self._task: TaskSnapshot | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._is_live:
            self._thread.start()
        # Nobody waits for its end: it may be asking a service that does not answer.
        threading.Thread(target=self._explain, name="reasons", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._is_live:
            self._thread.join()
            click.echo(_CLEAR, nl=False, err=True)

    def told(self, tasks: Iterable[TaskSnapshot]) -> Iterator[TaskSnapshot]:
        """Pass tasks on, and show each."""
        for task in tasks:
            self._task = task
            if not self._is_live:
                click.echo(self._text(), err=True)
            yield task

    def _explain(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            line = self._task and self._reasons.line(self._task.state, time.monotonic())
            if line and not self._over.is_set():
                click.echo(f"{_CLEAR if self._is_live else ''}{line}", err=True)

    def _draw(self) -> None:
        frame = 0
        while not self._over.wait(FRAME_SECONDS):
            frame = (frame + 1) % len(FRAMES)
            click.echo(f"{_CLEAR}{FRAMES[frame]} {self._text()}", nl=False, err=True)

    def _text(self) -> str:
        parts = [self._task_id]
        if self._task is not None:
            parts += _words(self._task, coloured=self._coloured)
        return " ".join((*parts, f"({length_of(time.monotonic() - self._started)})"))


def _words(task: TaskSnapshot, *, coloured: bool) -> list[str]:
    words = [in_colour_of(task.state, task.state.value, coloured=coloured)]
    if task.attempt > 1:
        words.append(f"attempt {task.attempt}")
    if task.error:
        words.append(printable(shortened(task.error)))
    return words


# Submitting one task, and waiting for its end with something to look at.
#
# Standard output has what a script wants: the id of the task, or its result. What goes on in the
# meantime is told on standard error: one line that changes in a terminal, otherwise a line for
# each change.


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
        with _naming_known(client, fields):
            submitted = _submitted(client, fields, key=idempotency_key, patient=patient)
        if not is_waiting:
            _tell_one(submitted, as_json=as_json)
            return 0
        left = None if timeout_seconds is None else timeout_seconds - (time.monotonic() - started)
        return _wait(client, submitted.task_id, timeout_seconds=left, as_json=as_json)


@contextmanager
def _naming_known(client: SyncClient, fields: TaskFields) -> Iterator[None]:
    """Have an error about the project or target of the options say which ones there are."""
    from headgate.cli.resources import PROJECTS, TARGETS  # noqa: PLC0415

    project, target = fields.get("project_id") or "", fields.get("target") or ""
    with (
        PROJECTS.naming_known(client, project, "unknown_project"),
        TARGETS.naming_known(client, target, "unknown_target"),
    ):
        yield


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
                "POST", "/tasks", body=body, headers=headers, response_type=SubmittedBody
            ),
            patient=patient,
        )
    except RequestRefusedError as error:
        if error.code == "missing_field" and error.details.get("field") == "agentId":
            error.args = (f"{error}; give --agent or --project",)
        raise


def _tell_warning(warning: str) -> None:
    click.echo(printable(f"headgate: warning: {with_local_times(warning)}"), err=True)


def _tell_one(submitted: SubmittedBody, *, as_json: bool) -> None:
    if submitted.warning:
        _tell_warning(submitted.warning)
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
        with ProgressLine(task_id, client.why) as line:
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
