"""One command as a child process, from its start to its outcome; targets and workflows share it.

Rule: there is no shell in between, and the child sees a small environment, not the whole of the
process's own, which holds the credentials of everything else.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from headgate.core.tasks.outcomes import NOTHING_USED, Failed, Outcome, Succeeded
from headgate.executor import WorkOrder
from headgate.executors.capture import TAIL_BYTES, Capture
from headgate.executors.process_group import ProcessGroup
from headgate.executors.programs import death_signal_prefix, found_program
from headgate.executors.results import as_json, shortened
from headgate.executors.targets import MAX_RESULT_BYTES
from headgate.providers.prices import PriceList
from headgate.providers.usage import usage_of

PASSED_ON = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER",
)  # fmt: skip
"""The variables that every child gets from the process's own environment."""
OWN_PREFIX = "HEADGATE_"

_OF_THE_MACHINE = frozenset((errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC))


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """What is run, with all that it gets; the environment is complete."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: str | None
    stdin: bytes
    max_output_bytes: int
    kill_grace_seconds: float

    def __repr__(self) -> str:
        return f"Child({self.command[0]!r})"


class Cleaner(Protocol):
    """Takes out of texts what nobody is to see."""

    @property
    def longest_bytes(self) -> int:
        """How long that can be."""

    def cleaned(self, text: str) -> str:
        """Return a text without it."""

    def cleaned_end(self, raw: bytes, length: int) -> str:
        """Return the end of a text, about so many bytes, without it or any part of it."""


class Children:
    """Runs children; `hidden` takes out of an error what nobody is to see."""

    def __init__(self, *, prices: PriceList, hidden: Cleaner) -> None:
        self._prices = prices
        self._hidden = hidden
        self._death_signal: tuple[str, ...] = ()

    async def open(self) -> None:
        """See whether children can be made to end with this process."""
        self._death_signal = await death_signal_prefix()

    async def run(self, child: Child) -> Outcome:
        """Run a child to its end; a cancellation ends its whole group before it goes on."""
        try:
            group = self._started(child)
        except (OSError, ValueError) as error:
            problem, is_transient = start_problem(error, child.command[0], child.cwd)
            return self.not_started(problem, is_transient=is_transient)
        try:
            code = await group.finished()
        except asyncio.CancelledError:
            await _carried_through(group.stop(child.kill_grace_seconds))
            raise
        return self._succeeded(group) if code == 0 else self._failed(group, code)

    def not_started(self, problem: str, *, is_transient: bool) -> Failed:
        """Return the outcome of a child that was never there."""
        return Failed(
            error=shortened(self._hidden.cleaned(problem)),
            is_transient=is_transient,
            usage=NOTHING_USED,
        )

    def _started(self, child: Child) -> ProcessGroup:
        program = found_program(child.command[0], child.cwd, child.environ)
        return ProcessGroup(
            (*self._death_signal, program, *child.command[1:]),
            environ=child.environ,
            cwd=child.cwd,
            stdin=child.stdin,
            max_output_bytes=child.max_output_bytes,
            spare_bytes=self._hidden.longest_bytes,
        )

    def _succeeded(self, group: ProcessGroup) -> Succeeded:
        stdout, stderr = group.stdout, group.stderr
        length = max(len(stdout.text), len(stderr.text))
        raw = _result(stdout, stderr, length)
        # Written as JSON a text may be six times as long, and is cut again until it fits.
        while len(raw) > MAX_RESULT_BYTES:
            length //= 2
            raw = _result(stdout, stderr, length)
        return Succeeded(result=msgspec.Raw(raw), usage=usage_of(stdout.head, self._prices))

    def _failed(self, group: ProcessGroup, code: int) -> Failed:
        ending = f"exited with {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        # The whole end is cleaned before a line is taken out of it: a value may have several lines.
        lines = self._hidden.cleaned_end(group.stderr.end, TAIL_BYTES).strip().splitlines()
        said = lines[-1].strip() if lines else ""
        line = f"command {ending}: {said}" if said else f"command {ending}"
        return Failed(
            error=shortened(line),
            is_transient=True,
            usage=usage_of(group.stdout.head, self._prices),
        )


def variables_of(order: WorkOrder) -> dict[str, str]:
    """Return the variables that tell a child which attempt it is."""
    variables = {
        f"{OWN_PREFIX}TASK_ID": order.task_id,
        f"{OWN_PREFIX}ATTEMPT": str(order.attempt),
        f"{OWN_PREFIX}PROJECT_ID": order.project_id,
        f"{OWN_PREFIX}AGENT_ID": order.agent_id,
    }
    if order.slot is not None:
        variables[f"{OWN_PREFIX}SLOT"] = order.slot
    if order.deadline is not None:
        variables[f"{OWN_PREFIX}DEADLINE"] = f"{order.deadline:.3f}"
    if order.traceparent is not None:
        variables["TRACEPARENT"] = order.traceparent
    return variables


def start_problem(error: OSError | ValueError, name: str, cwd: str | None) -> tuple[str, bool]:
    """Say why a command did not start, and whether it may start another time."""
    if not isinstance(error, OSError):
        return f"command could not be started: {error}", False
    if isinstance(error, FileNotFoundError) and cwd and error.filename == cwd:
        return f"command could not be started: there is no directory {cwd}", False
    if isinstance(error, FileNotFoundError):
        return f"command not found: {name}", False
    if isinstance(error, PermissionError):
        return f"command is not executable: {name}", False
    return f"command could not be started: {error.strerror}", error.errno in _OF_THE_MACHINE


def _result(stdout: Capture, stderr: Capture, length: int) -> bytes:
    """Return what a task keeps of a command that succeeded, each output up to a length."""
    result: dict[str, object] = {
        "stdout": stdout.text[:length],
        "stderr": stderr.text[:length],
        "exitCode": 0,
    }
    if stdout.is_cut or len(stdout.text) > length:
        result["stdoutCut"] = True
    if stderr.is_cut or len(stderr.text) > length:
        result["stderrCut"] = True
    found = None if "stdoutCut" in result else as_json(stdout.head)
    if found is not None:
        result["json"] = found
    return msgspec.json.encode(result)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _carried_through(stopping: Coroutine[Any, Any, None]) -> None:
    """Wait for something that must be done, however often this task is cancelled meanwhile."""
    task = asyncio.ensure_future(stopping)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
    task.result()
