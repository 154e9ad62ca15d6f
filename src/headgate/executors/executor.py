"""The contract of an executor: it does the work of one attempt, and says what came of it.

The runner cancels the coroutine when the task is cancelled, when its deadline passes and when the
node stops. An executor then ends whatever it started (a request, a group of processes) before it
lets the cancellation through; it never swallows one. Everything else is an outcome, not an
exception: an executor raises nothing for work that went wrong.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import msgspec
import structlog

from headgate.core.lifecycle import Lost, Outcome
from headgate.core.task import (
    AttemptReport,
    ProgressReport,
    Submission,
    TaskRecord,
    slot_of,
    waits_since,
)
from headgate.core.text import (
    SLICE_BYTES,
    SLICE_SECONDS,
    Result,
    Steps,
    at_once,
    in_turns,
    json_steps,
)

log = structlog.get_logger("headgate.executors")


class GatewayAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt needs to call models through the gateway as its task's.

    `protocols` are those that have an upstream with a key: "openai", "anthropic". The token is good
    while the attempt runs.
    """

    base_url: str
    token: str
    protocols: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"GatewayAccess({self.base_url!r})"

    def variables(self, *, own: Container[str] = ()) -> dict[str, str]:
        """Return the variables that SDKs and agents go by.

        A protocol of which the target has a variable of its `own` is left to the target: its key
        would not be the task's, and the task's token is for nobody else.
        """
        variables = {"HEADGATE_BASE_URL": self.base_url, "HEADGATE_TASK_TOKEN": self.token}
        for protocol in self.protocols:
            address, key = GATEWAY_VARIABLES[protocol]
            if address not in own and key not in own:
                variables[address] = self.base_url + ("/v1" if protocol == "openai" else "")
                variables[key] = self.token
        return variables


GATEWAY_VARIABLES = {
    "openai": ("OPENAI_BASE_URL", "OPENAI_API_KEY"),
    "anthropic": ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
}
"""The variables that a program finds a provider by: its address, and the key."""


class WorkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one task; times are in Unix seconds.

    `waits_since` is when the attempt could have started, if anybody knows; `traceparent` is the
    trace that it belongs to. `slot` is the provider's key that it is to use, and `names_slot` says
    that the task itself asked for it, and not the settings of its target. Whoever runs the order
    stops it at its deadline and after `attempt_seconds`. With `gateway` it may call models as its
    task's. `is_resumed` says that another process has begun it, and that it may be under way still.
    """

    task_id: str
    attempt: int
    project_id: str
    agent_id: str
    submission: Submission
    deadline: float | None = None
    waits_since: float | None = None
    started_at: float | None = None
    traceparent: str | None = None
    slot: str | None = None
    names_slot: bool = False
    attempt_seconds: float | None = None
    gateway: GatewayAccess | None = None
    is_resumed: bool = False


def work_order_of(
    record: TaskRecord, gateway: GatewayAccess | None = None, *, is_resumed: bool = False
) -> WorkOrder:
    """Return the latest attempt at a task as an order."""
    task = record.task
    return WorkOrder(
        task_id=task.id,
        attempt=record.progress.attempt,
        project_id=task.project_id,
        agent_id=record.agent_id or task.agent_id or "",
        submission=record.submission,
        deadline=task.deadline,
        waits_since=waits_since(record),
        started_at=record.progress.started_at,
        traceparent=record.submission.traceparent,
        slot=slot_of(record),
        names_slot=record.terms.names_slot,
        attempt_seconds=record.terms.attempt_seconds,
        gateway=gateway,
        is_resumed=is_resumed,
    )


OUT_OF_DESCRIPTORS = (
    "this node has no file descriptor left; the task is tried again in a moment."
    " Raise the limit on open files (ulimit -n), or lower max_inflight"
)
DESCRIPTOR_SECONDS = 2.0
"""After so long work is tried again that could not begin for want of a descriptor."""

_NO_DESCRIPTOR = frozenset((errno.EMFILE, errno.ENFILE))


def has_no_descriptor(error: OSError | None = None) -> bool:
    """Tell whether an error, or just now any attempt to open a file, is for want of a descriptor.

    Libraries hide why a host was not found or a connection not made, so it is tried out.
    """
    if error is not None and error.errno in _NO_DESCRIPTOR:
        return True
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as problem:
        return problem.errno in _NO_DESCRIPTOR
    return False


def not_begun() -> Lost:
    """Return the outcome of work that could not begin for want of a descriptor."""
    return Lost(has_started=False, retry_seconds=DESCRIPTOR_SECONDS, error=OUT_OF_DESCRIPTORS)


class Executor(Protocol):
    """Runs work orders for one target."""

    async def open(self) -> None:
        """Make ready what all orders share, such as connections."""

    async def close(self) -> None:
        """Let go of it; nothing is under way any more."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Do the work, and say what came of it."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How many more tasks a target could begin now; `why` says what it is short of.

    Targets of one `pool` share its resources, and a task takes `needs` of them. `arrived` are the
    tasks that the pool knows since it was asked before. `reports` has what attempts of the target
    have said of themselves since then.
    """

    free: int
    why: str = ""
    pool: str = ""
    needs: dict[str, float] = {}
    arrived: tuple[str, ...] = ()
    reports: tuple[AttemptReport, ...] = ()


@runtime_checkable
class RemoteExecutor(Executor, Protocol):
    """An executor whose work goes on elsewhere, whatever happens to this process."""

    def leave(self, task_id: str) -> None:
        """Let the work of a task go on when its coroutine is cancelled: another finds it."""

    async def room(self) -> Room:
        """Say how many more tasks could begin now; none while that is not known."""


# How far an attempt is, as the function or the command says that does its work.
#
# Rule: a report is for people. It never fails the work, and nothing is decided by it.

taking_reports: ContextVar[Callable[[ProgressReport], None] | None] = ContextVar(
    "headgate_taking_reports", default=None
)
"""Takes what the attempt under way reports; whoever runs one sets it, in the attempt's context."""

PROGRESS_VARIABLE = "HEADGATE_PROGRESS"
"""Names the file to which a command writes its reports, one a line."""


def report_progress(fraction: float | None = None, text: str = "") -> None:
    """Say how far the task under way is: a fraction from 0 to 1, a short line, or both.

    A later report replaces it. Outside of a task that Headgate runs this does nothing.
    """
    take, path = taking_reports.get(), os.environ.get(PROGRESS_VARIABLE)
    if take is None and path is None:
        return
    try:
        share = None if fraction is None else float(fraction)
        report = ProgressReport(fraction=share, text=str(text)).bounded()
        if take is not None:
            take(report)
        elif path is not None:
            _write_report(path, report)
    except Exception as error:  # noqa: BLE001  whatever it is, the work goes on
        log.debug("a report of progress was not taken", problem=repr(error))


def _write_report(path: str, report: ProgressReport) -> None:
    """Write a line whole or not at all, and wait for nobody."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(descriptor, msgspec.json.encode(report) + b"\n")
    finally:
        os.close(descriptor)


# Results and errors in the form in which a task keeps them: JSON, and lines of bounded length.
#
# Rule: what is kept as JSON can be read again by whoever asks for it; what cannot is a text.

MAX_DEPTH = 200
"""How deep a result may be nested: far from where a reader, deep in its own calls, gives up."""

MAX_ERROR_CHARACTERS = 500
_CUT = "…"


def as_json(body: bytes) -> msgspec.Raw | None:
    """Return a body as JSON if it is exactly one JSON value, unchanged; otherwise None."""
    return at_once(as_json_steps(body))


def as_json_steps(body: bytes) -> Steps[msgspec.Raw | None]:
    """Do the same in slices."""
    try:
        raw = bytes(msgspec.json.decode(body, type=msgspec.Raw))
        # Numbers, too: `1e400` is well formed, and no reader has a value for it.
        yield from json_steps(raw, levels=MAX_DEPTH)
    except (ValueError, RecursionError):
        return None
    return msgspec.Raw(body.strip())


def as_json_or_text(body: bytes) -> Steps[msgspec.Raw | None]:
    """Return a body as the result of a task; what is no JSON is wrapped as `{"text": …}`."""
    if not body:
        return None
    found = yield from as_json_steps(body)
    if found is not None:
        return found
    yield
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parts = [b'{"text":"']
    for start in range(0, len(body), SLICE_BYTES):
        part = body[start : start + SLICE_BYTES]
        text = decoder.decode(part, final=start + SLICE_BYTES >= len(body))
        parts.append(msgspec.json.encode(text)[1:-1])
        yield
    return msgspec.Raw(b"".join((*parts, b'"}')))


async def in_slices(steps: Steps[Result]) -> Result:
    """Judge what work has made, and give others their turn after each slice of time."""
    return await in_turns(steps, lambda: asyncio.sleep(0), time.perf_counter, SLICE_SECONDS)


def shortened(text: str) -> str:
    """Return a text on one line that is short enough for an error."""
    # Only the beginning can be shown, and a body may be large.
    line = " ".join(text[: 4 * MAX_ERROR_CHARACTERS].split())
    if len(line) <= MAX_ERROR_CHARACTERS:
        return line
    return line[: MAX_ERROR_CHARACTERS - 1] + _CUT


def too_large(max_bytes: int) -> str:
    """Say that a result passes its cap."""
    return f"result is larger than {max_bytes} bytes"


# A work order as programs outside see it: a mapping with the names of the HTTP API.
#
# Rule: JSON is decoded when somebody asks for it, and once. Most functions read one field or none,
# and tens of thousands of orders may pass in a second.

_READERS: dict[str, Callable[[WorkOrder], object]] = {
    "taskId": lambda order: order.task_id,
    "attempt": lambda order: order.attempt,
    "projectId": lambda order: order.project_id,
    "agentId": lambda order: order.agent_id,
    "action": lambda order: order.submission.action,
    "tabId": lambda order: order.submission.tab_id,
    "ref": lambda order: order.submission.ref,
    "selector": lambda order: order.submission.selector,
    "params": lambda order: _decoded(order.submission.params) if order.submission.params else {},
    "input": lambda order: _decoded(order.submission.input),
    "labels": lambda order: dict(order.submission.labels),
    "deadline": lambda order: order.deadline,
    "traceparent": lambda order: order.traceparent,
    "slot": lambda order: order.slot,
}


class OrderView(Mapping[str, Any]):
    """One attempt at one task; `deadline` is in Unix seconds.

    `params` that were not given are empty, and anything else that was not given is None.
    """

    __slots__ = ("_read", "work_order")

    def __init__(self, work_order: WorkOrder) -> None:
        self.work_order = work_order
        self._read: dict[str, object] | None = None

    @property
    def gateway(self) -> GatewayAccess | None:
        """The address and the token for calls of models; None where there are none."""
        return self.work_order.gateway

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  each name has a type of its own
        if self._read is None:
            self._read = {}
        if key not in self._read:
            self._read[key] = _READERS[key](self.work_order)
        return self._read[key]

    def __iter__(self) -> Iterator[str]:
        return iter(_READERS)

    def __len__(self) -> int:
        return len(_READERS)

    def __repr__(self) -> str:
        return f"OrderView({self.work_order.task_id!r}, attempt={self.work_order.attempt})"


def order_json(order: WorkOrder) -> bytes:
    """Write the same names as JSON, with what the client wrote as it was written."""
    submission = order.submission
    return msgspec.json.encode(
        {
            "taskId": order.task_id,
            "attempt": order.attempt,
            "projectId": order.project_id,
            "agentId": order.agent_id,
            "action": submission.action,
            "tabId": submission.tab_id,
            "ref": submission.ref,
            "selector": submission.selector,
            "params": submission.params or None,
            "input": submission.input or None,
            "labels": submission.labels,
            "deadline": order.deadline,
            "traceparent": order.traceparent,
            "slot": order.slot,
        }
    )


def _decoded(json: msgspec.Raw) -> object:
    return msgspec.json.decode(json) if json else None
