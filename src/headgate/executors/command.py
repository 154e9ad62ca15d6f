"""Tasks as child processes: one process a task, of a command that the configuration names.

Nothing that a client sent becomes part of a command line: a task comes as JSON on standard input
and as variables. There is no shell in between. Targets and workflows share `Children`, which runs a
command from its start to its outcome. What a command may do beside its work, and how everything
that it starts ends, is in `confinement`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from errno import EACCES, ENOENT
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from headgate.core.lifecycle import NOTHING_USED, Failed, Outcome, Succeeded
from headgate.core.text import Steps
from headgate.errors import InvalidSettingError
from headgate.executors.confinement import (
    CommandUser,
    ControlGroups,
    Launcher,
    Sweeper,
    command_user,
    control_groups,
    launcher,
    marked,
    pipe_folder,
)
from headgate.executors.executor import (
    PROGRESS_VARIABLE,
    WorkOrder,
    as_json_steps,
    has_no_descriptor,
    in_slices,
    not_begun,
    order_json,
    report_progress,
    shortened,
    taking_reports,
)
from headgate.executors.targets import MAX_RESULT_BYTES, CommandTarget, has_slot
from headgate.executors.templates import Environment, SlotKeys, SlotText, no_slot_keys, uses_slot
from headgate.providers.prices import PriceList
from headgate.providers.usage import usage_steps

_TEMPLATE = re.compile(
    r"\{(?:tabId|agentId|projectId|taskId|action|resolved|(?:params|env|slot)\.[^{}]*)\}"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
        self._environment = Environment(environ, has_slot=has_slot(target), slot_keys=slot_keys)
        self._slot_variables: dict[str, SlotText] = {}
        self._user = (
            None
            if target.run_as is None
            else command_user(target.run_as, setting=f"targets.{name}.run_as")
        )
        self._children = Children(
            prices=prices, hidden=self._environment, has_other_user=self._user is not None
        )
        self._variables = self._variables_of(target, environ, f"targets.{name}.env")

    async def open(self) -> None:
        """See how children can be confined."""
        await self._children.open()

    async def close(self) -> None:
        """End what the last tasks have left running."""
        await self._children.close()

    async def execute(self, order: WorkOrder) -> Outcome:
        """Run the command; a cancellation ends its whole group before it goes on."""
        try:
            child = self._child(order)
        except InvalidSettingError as error:
            return self._children.not_started(str(error), is_transient=True)
        return await self._children.run(child)

    def _child(self, order: WorkOrder) -> Child:
        variables = self._variables
        for name, text in self._slot_variables.items():
            variables = variables | {name: text.filled(order)}
        if order.gateway is not None:
            variables = variables | order.gateway.variables(own=variables)
        return Child(
            command=self._target.command,
            environ=variables | variables_of(order),
            cwd=self._target.cwd or (None if self._user is None else self._user.directory),
            stdin=order_json(order),
            max_output_bytes=self._target.max_output_bytes,
            max_result_bytes=self._target.max_result_bytes,
            kill_grace_seconds=self._target.kill_grace_seconds,
            no_new_privileges=self._target.no_new_privileges,
            user=self._user,
        )

    def _variables_of(
        self, target: CommandTarget, environ: Mapping[str, str], setting: str
    ) -> dict[str, str]:
        variables = {name: environ[name] for name in PASSED_ON if name in environ}
        if self._user is not None:
            # The folder for temporary files of the service is not for others.
            variables.pop("TMPDIR", None)
            variables |= self._user.variables
        for name in target.pass_env:
            if name in environ:
                variables[name] = self._environment.value(name, setting=f"{setting}.{name}")
        for name, value in target.env.items():
            check_variable(name, setting=f"{setting}.{name}")
            self._put_variable(variables, name, value, f"{setting}.{name}")
        return variables

    def _put_variable(self, variables: dict[str, str], name: str, value: str, setting: str) -> None:
        if uses_slot(value):
            text = SlotText(value, setting=setting, environment=self._environment)
            self._slot_variables[name] = text
        else:
            variables[name] = self._environment.filled(value, setting=setting)


def check_variable(name: str, *, setting: str) -> None:
    """Refuse a name that no variable can have, or that is set for every task."""
    if not _VARIABLE.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a variable")
    if name.startswith(OWN_PREFIX):
        raise InvalidSettingError(setting, f"names with {OWN_PREFIX} are set for every task")


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
    max_result_bytes: int = MAX_RESULT_BYTES
    no_new_privileges: bool = False
    user: CommandUser | None = None

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
    """Runs children; `hidden` takes out of an error what nobody is to see.

    A child sees a small environment, not the whole of the process's own, which has the credentials
    of everything else.
    """

    def __init__(self, *, prices: PriceList, hidden: Cleaner, has_other_user: bool = False) -> None:
        self._prices = prices
        self._hidden = hidden
        self._has_other_user = has_other_user
        self._launcher = Launcher(None)
        self._groups: ControlGroups | None = None
        self._sweeper = Sweeper()

    async def open(self) -> None:
        """See how children can be confined, and end those of a service that was killed."""
        self._launcher = await asyncio.to_thread(launcher)
        if self._has_other_user:
            self._groups = await asyncio.to_thread(control_groups)
        await self._sweeper.open()

    async def close(self) -> None:
        """End what the last children have left running."""
        await self._sweeper.close()

    async def run(self, child: Child) -> Outcome:
        """Run a child to its end; a cancellation ends its whole group before it goes on."""
        mark, pipe, confined_in = self._sweeper.begin(), None, None
        try:
            pipe = ProgressPipe.opened(mark, self._hidden, is_shared=child.user is not None)
            # A command of the service's own user could end the service itself, and is trusted with
            # the mark. Another user from the beginning cannot enter a group of this one's.
            if self._groups is not None and child.user is not None and self._launcher.sets_user:
                confined_in = self._groups.create(mark)
            environ = {
                **child.environ,
                **marked(mark),
                PROGRESS_VARIABLE: os.devnull if pipe is None else pipe.path,
            }
            return await self._run(child, environ, confined_in)
        finally:
            if pipe is not None:
                pipe.close()
            self._sweeper.ended(mark, confined_in)

    async def _run(
        self, child: Child, environ: Mapping[str, str], confined_in: Path | None
    ) -> Outcome:
        try:
            group = self._started(child, environ, confined_in)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and has_no_descriptor(error):
                return not_begun()
            problem, is_transient = start_problem(error, child.command[0], child.cwd)
            return self.not_started(problem, is_transient=is_transient)
        try:
            code = await group.finished()
        except asyncio.CancelledError:
            await _carried_through(group.stop(child.kill_grace_seconds))
            raise
        if code == 0:
            return await in_slices(self._succeeded(group, child.max_result_bytes))
        return await in_slices(self._failed(group, code))

    def not_started(self, problem: str, *, is_transient: bool) -> Failed:
        """Return the outcome of a child that was never there."""
        return Failed(
            error=shortened(self._hidden.cleaned(problem)),
            is_transient=is_transient,
            usage=NOTHING_USED,
        )

    def _started(
        self, child: Child, environ: Mapping[str, str], confined_in: Path | None
    ) -> ProcessGroup:
        command = (
            *self._launcher.prefix(child.user, no_new_privileges=child.no_new_privileges),
            found_program(child.command[0], child.cwd, child.environ),
            *child.command[1:],
        )
        if confined_in is not None:
            command = (*ControlGroups.entry(confined_in, child.environ), *command)
        return ProcessGroup(
            command,
            environ=environ,
            cwd=child.cwd,
            stdin=child.stdin,
            max_output_bytes=child.max_output_bytes,
            spare_bytes=self._hidden.longest_bytes,
            user=child.user,
            sets_user=not self._launcher.sets_user,
        )

    def _succeeded(self, group: ProcessGroup, max_result_bytes: int) -> Steps[Succeeded]:
        stdout, stderr = group.stdout, group.stderr
        length = max(len(stdout.text), len(stderr.text))
        raw = yield from _result(stdout, stderr, length)
        # Written as JSON a text may be six times as long, and is cut again until it fits.
        while length and len(raw) > max_result_bytes:
            length //= 2
            raw = yield from _result(stdout, stderr, length)
        usage = yield from usage_steps(stdout.head, self._prices)
        return Succeeded(result=msgspec.Raw(raw), usage=usage)

    def _failed(self, group: ProcessGroup, code: int) -> Steps[Failed]:
        ending = f"exited with {code}" if code > 0 else f"was killed by {_signal_name(-code)}"
        # The whole end is cleaned before a line is taken out of it: a value may have several lines.
        lines = self._hidden.cleaned_end(group.stderr.end, TAIL_BYTES).strip().splitlines()
        said = lines[-1].strip() if lines else ""
        line = f"command {ending}: {said}" if said else f"command {ending}"
        usage = yield from usage_steps(group.stdout.head, self._prices)
        return Failed(error=shortened(line), is_transient=True, usage=usage)


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


def _result(stdout: Capture, stderr: Capture, length: int) -> Steps[bytes]:
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
    found = None if "stdoutCut" in result else (yield from as_json_steps(stdout.head))
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


_FOR_ALL = 0o666
_UMASK = 0o077
"""What the command of another user writes is for that user alone."""

LEFTOVER_SECONDS = 0.5
"""How long what the child left behind may go on writing once the child itself has ended."""


class ProcessGroup:
    """One child and everything that it starts, from its start to its end.

    The child leads a session and a group of its own. It is reaped exactly once, whatever happens to
    those who wait for it. Its group is ended before it is reaped, because until then nobody else
    can get its number. Neither a grandchild that keeps the output open nor one that ignores signals
    can keep anybody waiting for longer than the grace.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        cwd: str | None,
        stdin: bytes,
        max_output_bytes: int,
        spare_bytes: int = 0,
        user: CommandUser | None = None,
        sets_user: bool = False,
    ) -> None:
        self.stdout, self.stderr = _two_captures(max_output_bytes, spare_bytes)
        self._user = user
        self._sets_user = sets_user
        try:
            self._process = self._started(command, environ, cwd, stdin)
        except BaseException:
            self._close_captures()
            raise
        finally:
            self.stdout.give_away()
            self.stderr.give_away()
        self._exited = asyncio.Event()
        self._watch = self._watched()

    async def finished(self) -> int:
        """Wait until the child has ended by itself, and return its code (negative: a signal)."""
        await self._exited.wait()
        await self._outputs_end(LEFTOVER_SECONDS)
        return self._reaped()

    async def stop(self, grace_seconds: float) -> None:
        """End the whole group: politely, and after the grace by force."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._exited.wait()
                await self.stdout.ended.wait()
                await self.stderr.ended.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._exited.wait()
        finally:
            # Also when the loop itself is being torn down, and everything on it cancelled.
            self._reaped()

    def _watched(self) -> _ExitWatch:
        try:
            return _ExitWatch(self._process, self._exited.set)
        except RuntimeError:
            # There is no thread left to wait on, so the child must not be left running.
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._close_captures()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None

    async def _outputs_end(self, most_seconds: float) -> None:
        try:
            async with asyncio.timeout(most_seconds):
                await self.stdout.ended.wait()
                await self.stderr.ended.wait()
        except TimeoutError:
            self.stdout.drain()
            self.stderr.drain()

    def _reaped(self) -> int:
        self._signal(signal.SIGKILL)
        self._watch.close()
        self._close_captures()
        return self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # The group has its leader's number until the leader is reaped.
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def _close_captures(self) -> None:
        self.stdout.close()
        self.stderr.close()

    def _started(
        self, command: Sequence[str], environ: Mapping[str, str], cwd: str | None, stdin: bytes
    ) -> subprocess.Popen[bytes]:
        # A file, unlike a pipe, needs nobody to feed it and does not mind a child that never reads.
        user = self._user
        with _temporary_file() as file:
            file.write(stdin)
            file.seek(0)
            if user is not None:
                # Who opens /dev/stdin or /dev/stdout again must be let; nobody else gets there.
                for descriptor in (file.fileno(), self.stdout.write_end, self.stderr.write_end):
                    os.fchmod(descriptor, _FOR_ALL)
            changed = user if self._sets_user else None
            return subprocess.Popen(  # noqa: S603  the configuration names the command
                command,
                stdin=file,
                stdout=self.stdout.write_end,
                stderr=self.stderr.write_end,
                env=environ,
                cwd=cwd,
                start_new_session=True,
                umask=-1 if user is None else _UMASK,
                user=None if changed is None else changed.uid,
                group=None if changed is None else changed.gid,
                extra_groups=None if changed is None else changed.groups,
            )


def _temporary_file() -> IO[bytes]:
    try:
        return tempfile.TemporaryFile()
    except FileNotFoundError as error:
        # No folder for temporary files can be written to, and it is no file of the command.
        raise OSError(errno.ENOSPC, error.strerror) from None


def _two_captures(max_bytes: int, spare_bytes: int) -> tuple[Capture, Capture]:
    first = Capture(max_bytes, spare_bytes)
    try:
        return first, Capture(max_bytes, spare_bytes)
    except OSError:
        first.give_away()
        first.close()
        raise


class _ExitWatch:
    """Calls back, once, when a child has ended, and leaves it to be reaped."""

    def __init__(self, process: subprocess.Popen[bytes], on_exit: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        try:
            self._descriptor: int | None = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            # Where there are no such descriptors, or none is left, a thread waits instead.
            self._descriptor = None
            threading.Thread(target=self._wait, args=(process,), daemon=True).start()
            return
        self._loop.add_reader(self._descriptor, self._ended)

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _ended(self) -> None:
        self.close()
        self._on_exit()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        _wait_for_exit(process.pid)
        # A loop that is closed says that nobody waits any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_exit)


def _wait_for_exit(pid: int) -> None:
    """Return when a child has ended, and leave it to be reaped: its group has its number."""
    if sys.platform == "darwin" and not hasattr(os, "waitid"):
        # Python has the other way on macOS from 3.13 on.
        flags = select.KQ_EV_ADD | select.KQ_EV_ONESHOT
        event = select.kevent(pid, select.KQ_FILTER_PROC, flags, select.KQ_NOTE_EXIT)
        # One that has ended already cannot be watched any more.
        with closing(select.kqueue()) as queue, suppress(ProcessLookupError):
            queue.control([event], 1)
    else:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


_CHUNK_BYTES = 64 << 10
TAIL_BYTES = 2_048
"""How much of the end is shown."""


class Capture:
    """Reads one pipe on the running loop; `write_end` is for the child.

    The beginning is kept, and the rest is read and dropped: a pipe that is not drained to its end
    would block the child once it is full. The last bytes are kept too, because the reason of a
    failure stands there; more of them than are shown, because what is to be hidden is only found as
    a whole.
    """

    def __init__(self, max_bytes: int, spare_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._end_bytes = TAIL_BYTES + spare_bytes
        self._head = bytearray()
        self._tail = b""
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self.ended = asyncio.Event()
        """Set when nobody holds the pipe any more, or when it was closed here."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)

    @property
    def is_cut(self) -> bool:
        """Whether there was more than is kept."""
        return bool(self._tail)

    @property
    def head(self) -> bytes:
        """The beginning of the output, up to the cap."""
        return bytes(self._head)

    @property
    def text(self) -> str:
        """The same as a text."""
        return self._head.decode(errors="replace")

    @property
    def end(self) -> bytes:
        """The end of the output: what is shown of it, and as many bytes before as were asked."""
        end = bytes(self._head[-self._end_bytes :]) + self._tail
        return end[-self._end_bytes :]

    def give_away(self) -> None:
        """Let go of the child's end, so that the pipe ends with the child."""
        os.close(self.write_end)

    def drain(self) -> None:
        """Read what is there already, without waiting; a writer that goes on is not followed."""
        for _ in range(self._max_bytes // _CHUNK_BYTES + 2):
            if self.ended.is_set() or not self._read():
                return

    def close(self) -> None:
        """Stop reading, whoever may still write."""
        if not self.ended.is_set():
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self.ended.set()

    def _read(self) -> bool:
        try:
            chunk = os.read(self._read_end, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self.close()
            return False
        room = self._max_bytes - len(self._head)
        self._head += chunk[:room]
        if len(chunk) > room:
            self._tail = (self._tail + chunk[room:])[-self._end_bytes :]
        return True


# How far a command is, as it says itself.

MAX_LINE_BYTES = 4_096
_FRACTION = re.compile(r"\s*([01](?=\s*$)|[01]?\.[0-9]+(?=\s|$))")
"""A whole number stands for itself alone: "1 of 30 files" is a text."""
_ALL_WRITE = 0o622
_ALL_ENTER = 0o711


class ProgressPipe:
    """A named pipe that a command writes lines to: each says how far it is.

    It has a path, because programs close the descriptors that they do not know before they start
    others. The latest line counts: of what is read at once, only that one is looked at.

    Rule: it is held open for reading and writing, so nobody waits to open it or is told of its end.
    """

    def __init__(self, path: Path, descriptor: int, hidden: Cleaner) -> None:
        self.path = str(path)
        self._descriptor = descriptor
        self._hidden = hidden
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    @classmethod
    def opened(cls, mark: str, hidden: Cleaner, *, is_shared: bool) -> ProgressPipe | None:
        """Return the pipe of an attempt; None if nobody takes reports, or there can be no pipe."""
        if taking_reports.get() is None:
            return None
        path = None
        try:
            # In a folder that all may enter the name is what others do not know.
            path = pipe_folder(mark, is_shared=is_shared) / secrets.token_hex(12)
            path.parent.mkdir(mode=0o700)
            os.mkfifo(path, 0o600)
            if is_shared:
                path.chmod(_ALL_WRITE)
                path.parent.chmod(_ALL_ENTER)
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            if path is not None:
                _remove_pipe(path)
            return None
        return cls(path, descriptor, hidden)

    def close(self) -> None:
        """Stop reading, and remove the pipe."""
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        _remove_pipe(Path(self.path))

    def _read(self) -> None:
        try:
            chunk = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return
        whole, newline, rest = (self._rest + chunk).rpartition(b"\n")
        self._rest = rest[:MAX_LINE_BYTES]
        if newline:
            fraction, text = reported_in(whole.rstrip().rpartition(b"\n")[2][:MAX_LINE_BYTES])
            report_progress(fraction, self._hidden.cleaned(text))


def _remove_pipe(path: Path) -> None:
    """Remove a pipe and its folder, without a descriptor: there may be none left.

    What else a command put there is removed at the next start of a service: it may be a lot.
    """
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


class _ReportedLine(msgspec.Struct, frozen=True):
    fraction: float | None = None
    text: str = ""


def reported_in(line: bytes) -> tuple[float | None, str]:
    """Read a line: JSON with a fraction and a text, or a fraction, a text or both in this order."""
    with suppress(ValueError, RecursionError):
        found = msgspec.json.decode(line, type=_ReportedLine)
        return found.fraction, found.text
    text = line.decode(errors="replace")
    found_fraction = _FRACTION.match(text)
    if found_fraction is None:
        return None, text
    return float(found_fraction[1]), text[found_fraction.end() :]


# Finding programs.


def found_program(name: str, cwd: str | None, variables: Mapping[str, str]) -> str:
    """Return the path of a program, or raise the error that starting it would raise."""
    if cwd is not None and not Path(cwd).is_dir():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), cwd)
    if "/" in name:
        path = str(Path(cwd or "").joinpath(name).absolute())
        return _checked(shutil.which(path), path)
    search = variables.get("PATH", os.defpath)
    return _checked(shutil.which(name, path=search), shutil.which(name, os.F_OK, search))


def _checked(found: str | None, path: str | None) -> str:
    if found is not None:
        return found
    if path is None or not Path(path).exists():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), path)
    raise PermissionError(EACCES, os.strerror(EACCES), path)
