"""Tasks as child processes: one process a task, of a command that the configuration names.

Rule: nothing that a client sent becomes part of a command line. A task comes as JSON on standard
input and as variables, and there is no shell in between. The child sees a small environment, not
the service's own, which holds the credentials of every other target.
"""

from __future__ import annotations

import asyncio
import errno
import re
import signal
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from headgate.core.outcomes import NOTHING_USED, Failed, Outcome, Succeeded
from headgate.errors import InvalidSettingError
from headgate.executor import WorkOrder
from headgate.executors.capture import Capture
from headgate.executors.environment import Environment, SlotKeys, no_slot_keys
from headgate.executors.order_view import order_json
from headgate.executors.process_group import ProcessGroup
from headgate.executors.programs import death_signal_prefix, found_program
from headgate.executors.results import as_json, shortened
from headgate.executors.slot_texts import SlotText, uses_slot
from headgate.executors.targets import MAX_RESULT_BYTES, CommandTarget, has_slot
from headgate.providers.prices import PriceList
from headgate.providers.usage import usage_of

PASSED_ON = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER",
)  # fmt: skip
"""The variables that every child gets from the service's own environment."""
OWN_PREFIX = "HEADGATE_"

_TEMPLATE = re.compile(
    r"\{(?:tabId|agentId|projectId|taskId|action|resolved|(?:params|env|slot)\.[^{}]*)\}"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_THE_MACHINE = frozenset((errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC))


class CommandExecutor:
    """Runs the command of one target once for each task."""

    def __init__(
        self,
        name: str,
        target: CommandTarget,
        *,
        environ: Mapping[str, str],
        prices: PriceList,
        slot_keys: SlotKeys = no_slot_keys,
    ) -> None:
        _check_command(target.command, setting=f"targets.{name}.command")
        self._target = target
        self._prices = prices
        self._environment = Environment(environ, has_slot=has_slot(target), slot_keys=slot_keys)
        self._slot_variables: dict[str, SlotText] = {}
        self._variables = self._variables_of(target, environ, f"targets.{name}.env")
        self._death_signal: tuple[str, ...] = ()

    async def open(self) -> None:
        """See whether children can be made to end with the service."""
        self._death_signal = await death_signal_prefix()

    async def close(self) -> None:
        """Do nothing: the children of different tasks share nothing."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Run the command; a cancellation ends its whole group before it goes on."""
        try:
            group = self._started(order)
        except InvalidSettingError as error:
            return self._failed_before(str(error), is_transient=True)
        except (OSError, ValueError) as error:
            return self._not_started(error)
        try:
            code = await group.finished()
        except asyncio.CancelledError:
            await _carried_through(group.stop(self._target.kill_grace_seconds))
            raise
        return self._succeeded(group) if code == 0 else self._failed(group, code)

    def _started(self, order: WorkOrder) -> ProcessGroup:
        variables = self._variables
        for name, text in self._slot_variables.items():
            variables = variables | {name: text.filled(order)}
        program = found_program(self._target.command[0], self._target.cwd, variables)
        return ProcessGroup(
            (*self._death_signal, program, *self._target.command[1:]),
            environ=variables | _variables_for(order),
            cwd=self._target.cwd,
            stdin=order_json(order),
            max_output_bytes=self._target.max_output_bytes,
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
        said = group.stderr.last_line
        line = f"command {ending}: {said}" if said else f"command {ending}"
        return Failed(
            error=shortened(self._environment.cleaned(line)),
            is_transient=True,
            usage=usage_of(group.stdout.head, self._prices),
        )

    def _not_started(self, error: OSError | ValueError) -> Failed:
        problem, is_transient = _start_problem(error, self._target)
        return self._failed_before(problem, is_transient=is_transient)

    def _failed_before(self, problem: str, *, is_transient: bool) -> Failed:
        return Failed(
            error=shortened(self._environment.cleaned(problem)),
            is_transient=is_transient,
            usage=NOTHING_USED,
        )

    def _variables_of(
        self, target: CommandTarget, environ: Mapping[str, str], setting: str
    ) -> dict[str, str]:
        variables = {name: environ[name] for name in PASSED_ON if name in environ}
        for name in target.pass_env:
            if name in environ:
                variables[name] = self._environment.value(name, setting=f"{setting}.{name}")
        for name, value in target.env.items():
            _check_variable(name, setting=f"{setting}.{name}")
            self._put_variable(variables, name, value, f"{setting}.{name}")
        return variables

    def _put_variable(self, variables: dict[str, str], name: str, value: str, setting: str) -> None:
        if uses_slot(value):
            text = SlotText(value, setting=setting, environment=self._environment)
            self._slot_variables[name] = text
        else:
            variables[name] = self._environment.filled(value, setting=setting)


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


def _variables_for(order: WorkOrder) -> dict[str, str]:
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


def _start_problem(error: OSError | ValueError, target: CommandTarget) -> tuple[str, bool]:
    """Say why a command did not start, and whether it may start another time."""
    name = target.command[0]
    if not isinstance(error, OSError):
        return f"command could not be started: {error}", False
    if isinstance(error, FileNotFoundError) and target.cwd and error.filename == target.cwd:
        return f"command could not be started: there is no directory {target.cwd}", False
    if isinstance(error, FileNotFoundError):
        return f"command not found: {name}", False
    if isinstance(error, PermissionError):
        return f"command is not executable: {name}", False
    return f"command could not be started: {error.strerror}", error.errno in _OF_THE_MACHINE


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _check_command(command: tuple[str, ...], *, setting: str) -> None:
    if not command[0]:
        raise InvalidSettingError(setting, "must begin with the name of a program")
    for argument in command:
        if "\0" in argument:
            raise InvalidSettingError(setting, "an argument cannot contain a NUL character")
        if found := _TEMPLATE.search(argument):
            problem = f"{found[0]} is not filled in a command"
            advice = "the task comes as JSON on standard input"
            raise InvalidSettingError(setting, f"{problem}; {advice}")


def _check_variable(name: str, *, setting: str) -> None:
    if not _VARIABLE.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a variable")
    if name.startswith(OWN_PREFIX):
        raise InvalidSettingError(setting, f"names with {OWN_PREFIX} are set for every task")


async def _carried_through(stopping: Coroutine[Any, Any, None]) -> None:
    """Wait for something that must be done, however often this task is cancelled meanwhile."""
    task = asyncio.ensure_future(stopping)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
    task.result()
