"""Confinement of commands: as whom they run, what they may gain, and how all they started ends.

A command leads a process group, which is killed when it ends. What has left the group is found by
the *mark* that every process of an attempt has in its environment, and is killed too. A command of
another user runs in a control group (cgroup v2) of its own where this process may make some, which
nothing leaves; that costs a millisecond or two. What a service that was killed outright left
behind, the next one on the machine ends when it starts.

Rule: no Python runs between fork and exec, in a copy of a process whose other threads may hold
locks. `setpriv` (util-linux) asks the kernel for what has to be asked there, and then becomes the
command.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from headgate.errors import InvalidSettingError

_LOG = logging.getLogger("headgate.commands")
_PROC = Path("/proc")


# As whom.


class CommandUser(msgspec.Struct, frozen=True, kw_only=True):
    """The user that a command runs as instead of the service's own."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    @property
    def variables(self) -> dict[str, str]:
        """What the environment says of a user."""
        return {"HOME": self.home, "LOGNAME": self.name, "SHELL": self.shell, "USER": self.name}

    @property
    def directory(self) -> str:
        """Where its commands run unless the target says it."""
        return self.home if Path(self.home).is_dir() else "/"

    def may_read(self, path: Path) -> bool:
        """Tell whether it may open a file or list a folder, by the modes on the way there."""
        try:
            steps = [*reversed(path.absolute().parents)]
            return all(self._has(step, 0o1) for step in steps) and self._has(path, 0o4)
        except OSError:
            return False

    def _has(self, path: Path, bit: int) -> bool:
        found = path.stat()
        if found.st_uid == self.uid:
            return bool(found.st_mode & bit << 6)
        if found.st_gid in (self.gid, *self.groups):
            return bool(found.st_mode & bit << 3)
        return bool(found.st_mode & bit)


# By their numbers in the kernel.
_CAPABILITIES = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}


def command_user(name: str, *, setting: str) -> CommandUser:
    """Return the user that a target names, or say why this process cannot run anything as it."""
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):
        problem = f"there is no user {name!r} on this machine; create it, or name another"
        raise InvalidSettingError(setting, problem) from None
    if entry.pw_uid == os.geteuid():
        problem = f"{name} is the user of the service itself, which protects nothing"
        raise InvalidSettingError(setting, f"{problem}; name another user")
    if entry.pw_uid == 0:
        raise InvalidSettingError(setting, "a command does not run as root; name another user")
    missing = [one for one, bit in _CAPABILITIES.items() if not _capabilities("CapEff") >> bit & 1]
    if missing:
        problem = f"this process may not run commands as {name}: it lacks {', '.join(missing)}"
        advice = "run the service as root or with these capabilities, or leave run_as out"
        raise InvalidSettingError(setting, f"{problem}; {advice}")
    return CommandUser(
        name=name,
        uid=entry.pw_uid,
        gid=entry.pw_gid,
        groups=tuple(os.getgrouplist(name, entry.pw_gid)),
        home=entry.pw_dir,
        shell=entry.pw_shell or "/bin/sh",
    )


def _capabilities(which: str) -> int:
    try:
        status = (_PROC / "self/status").read_text()
    except OSError:
        return -1 if which == "CapEff" and os.geteuid() == 0 else 0
    found = re.search(rf"^{which}:\s*([0-9a-f]+)", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


# How it is started.

_PROBE_SECONDS = 5.0
_DEATH_SIGNAL = ("--pdeathsig", "KILL")
_NO_NEW_PRIVILEGES = "--no-new-privs"


class Launcher:
    """Writes what stands before a command; without `setpriv` that is nothing."""

    def __init__(self, setpriv: str | None) -> None:
        self._setpriv = setpriv
        # A service that may change users must not hand that on.
        has_ambient = _capabilities("CapAmb") or _capabilities("CapInh")
        self._drop = ("--ambient-caps", "-all", "--inh-caps", "-all") if has_ambient else ()

    @property
    def sets_user(self) -> bool:
        """Whether the prefix changes the user; otherwise whoever starts the command does."""
        return self._setpriv is not None

    def prefix(self, user: CommandUser | None, *, no_new_privileges: bool) -> tuple[str, ...]:
        """Return what stands before a command."""
        if self._setpriv is None:
            return ()
        made = (self._setpriv, *_DEATH_SIGNAL, *self._drop)
        if no_new_privileges:
            made += (_NO_NEW_PRIVILEGES,)
        if user is not None:
            groups = ",".join(map(str, user.groups))
            made += ("--reuid", str(user.uid), "--regid", str(user.gid), "--groups", groups)
        return (*made, "--")


@functools.cache
def launcher() -> Launcher:
    """Return the launcher of this machine; finding out what it can do starts a process or two."""
    setpriv = shutil.which("setpriv")
    works = setpriv is not None and _works(
        (setpriv, *_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, "--", setpriv, "--version")
    )
    return Launcher(setpriv if works else None)


def _works(command: tuple[str, ...]) -> bool:
    try:
        done = subprocess.run(  # noqa: S603  nothing in it comes from outside
            command, capture_output=True, timeout=_PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# Marks: the service that started a process, and one number for each attempt.

MARK_VARIABLE = "HEADGATE_PROCESS_MARK"
_MARK = re.compile(rb"(?:^|\0)HEADGATE_PROCESS_MARK=([0-9a-f.,]+)")
_PARTS = re.compile(rb"%s\.[0-9a-f]{1,32}" % rb"\.".join((rb"([0-9a-f]{1,16})",) * 4))
_MAX_ENVIRONMENT_BYTES = 2 << 20
_MAX_MARK_CHARACTERS = 1_000
_FLAGS_FIELD = 6
_START_FIELD = 19
_ENVIRONMENT_FIELD = 47
"""Where the fields of a process are in its `stat`, counted behind its name."""
_WITHOUT_MEMORY = 0x0020_0004
"""The flags of the kernel's own threads and of a process that is ending."""


def new_mark() -> str:
    """Return the mark of a new attempt; it is in no other process of this machine."""
    return f"{_service_mark()}.{secrets.token_hex(12)}"


def marked(mark: str) -> dict[str, str]:
    """Return the variable that marks a process; a service that is itself marked adds its own."""
    outer = os.environ.get(MARK_VARIABLE, "")[:_MAX_MARK_CHARACTERS]
    return {MARK_VARIABLE: f"{outer},{mark}" if outer else mark}


def _service_mark() -> str:
    try:
        return _service_mark_of(os.getpid())
    except (OSError, ValueError):
        # Without its start a service could be taken for one that is gone. No space has the number
        # 0, so nobody judges by this mark.
        return f"{os.getuid():x}.0.{os.getpid():x}.0"


@functools.cache
def _service_mark_of(pid: int) -> str:
    started = _started_at(pid)
    if started is None:
        raise ValueError("this system does not show processes")
    return f"{os.getuid():x}.{_namespace():x}.{pid:x}.{started:x}"


def _namespace() -> int:
    """Return the number of the space in which process ids mean what they mean here."""
    return (_PROC / "self/ns/pid").stat().st_ino


def _started_at(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None if there is none."""
    try:
        return int(_stat(pid)[_START_FIELD])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _stat(pid: int | str) -> list[bytes]:
    return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def _is_orphan(mark: bytes) -> bool:
    """Tell whether the service of a mark was one of this user, here, and has ended."""
    found = _PARTS.fullmatch(mark)
    if found is None:
        return False
    uid, namespace, pid, started = (int(part, 16) for part in found.groups())
    return (uid, namespace) == (os.getuid(), _namespace()) and _started_at(pid) != started


def _is_of_dead_process(mark: bytes) -> bool:
    """Tell the same where the system shows no processes, by the number of the service alone."""
    found = _PARTS.fullmatch(mark)
    if found is None:
        return False
    uid, namespace, pid, _ = (int(part, 16) for part in found.groups())
    if (uid, namespace) != (os.getuid(), 0):
        return False
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, ProcessLookupError)
    return False


def has_marks() -> bool:
    """Whether the system shows the environment of processes, by which they are found."""
    return hasattr(os, "pidfd_open") and (_PROC / "self/environ").exists()


def _processes() -> Iterator[tuple[int, bytes | None]]:
    """Give all processes but this one, each with its environment where that can be read."""
    own = os.getpid()
    for name in os.listdir(_PROC):  # noqa: PTH208  names are enough, and there are many
        if not name.isdigit() or int(name) == own:
            continue
        try:
            yield int(name), _environment(name)
        except OSError:
            continue


def _environment(pid: int | str) -> bytes | None:
    """Return the environment of a process; None in the middle of an exec, while it shows none."""
    with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123  once a process
        found = file.read(_MAX_ENVIRONMENT_BYTES)
    if found:
        return found
    fields = _stat(pid)
    has_memory = not int(fields[_FLAGS_FIELD]) & _WITHOUT_MEMORY
    is_empty = fields[_ENVIRONMENT_FIELD] == fields[_ENVIRONMENT_FIELD + 1] != b"0"
    return None if has_memory and not is_empty else b""


def _is_doomed(environment: bytes, doomed: frozenset[bytes], *, orphans: bool) -> bool:
    for found in _MARK.findall(environment):
        marks = found.split(b",")
        if not doomed.isdisjoint(marks) or (orphans and any(map(_is_orphan, marks))):
            return True
    return False


def _kill(pid: int, doomed: frozenset[bytes], *, orphans: bool) -> bool | None:
    """Kill a process, if it is still the one that was found; None while that cannot be told."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        again = _environment(pid)
        if again is None:
            return None
        if not _is_doomed(again, doomed, orphans=orphans):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


MAX_ROUNDS = 20
"""How often the processes are looked through while new ones appear; a fork bomb is left then."""

_EXEC_SECONDS = 0.002
MAX_EXEC_LOOKS = 1_000
"""How often it is looked again for the end of an exec; on a busy machine one may take a while."""


def kill_marked(marks: Iterable[str], *, orphans: bool = False) -> int:
    """Kill what has one of these marks, or that of a service that is gone; return how many."""
    doomed = frozenset(mark.encode() for mark in marks)
    killed: set[int] = set()
    rounds = looks = 0
    while rounds < MAX_ROUNDS and looks < MAX_EXEC_LOOKS:
        new, is_unclear = set[int](), False
        for pid, environment in _processes():
            is_killed: bool | None = False
            if environment is None:
                is_killed = None
            elif _is_doomed(environment, doomed, orphans=orphans):
                is_killed = _kill(pid, doomed, orphans=orphans)
            is_unclear = is_unclear or is_killed is None
            if is_killed and pid not in killed:
                new.add(pid)
        killed |= new
        if new:
            rounds += 1
        elif is_unclear:
            looks += 1
            time.sleep(_EXEC_SECONDS)
        else:
            break
    return len(killed)


# Control groups.

_GROUP_PREFIX = "headgate-"
_KILL = "cgroup.kill"


class ControlGroups:
    """Control groups below this process's own, one for each attempt."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, mark: str) -> Path | None:
        """Make the group of an attempt; None if there can be no more."""
        path = self._folder / mark
        try:
            path.mkdir(parents=True)
        except OSError:
            return None
        return path

    @staticmethod
    def entry(group: Path, variables: Mapping[str, str]) -> tuple[str, ...]:
        """Return what stands before a command, so that it is in its group when it begins."""
        # Some shells add variables of their own, which the command need not see.
        added = " ".join(name for name in ("OLDPWD", "PWD", "SHLVL") if name not in variables)
        script = f'{{ echo 0 > "$0"; }} 2> /dev/null; unset {added}; exec "$@"'
        return ("/bin/sh", "-c", script, str(group / "cgroup.procs"))

    @staticmethod
    def kill(group: Path) -> None:
        """End everything in a group."""
        with suppress(OSError):
            (group / _KILL).write_text("1")

    def remove_empty(self) -> bool:
        """Remove the groups in which nothing is left; tell whether there are others."""
        _remove_empty(self._folder)
        with suppress(OSError):
            self._folder.rmdir()
        return self._folder.exists()


@functools.cache
def _control_groups_of(pid: int) -> ControlGroups | None:  # noqa: ARG001  once for each process
    own = _own_group()
    if own is None:
        return None
    for left in own.glob(f"{_GROUP_PREFIX}*"):
        if _is_orphan(f"{left.name.removeprefix(_GROUP_PREFIX)}.0".encode()):
            _end_groups(left)
    folder = own / f"{_GROUP_PREFIX}{_service_mark()}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    # It is made again with the group of an attempt.
    can_be_used = os.access(folder / _KILL, os.W_OK) and _can_enter(folder)
    with suppress(OSError):
        folder.rmdir()
    return ControlGroups(folder) if can_be_used else None


def control_groups() -> ControlGroups | None:
    """Return the control groups of this process; None if it may not make any."""
    return _control_groups_of(os.getpid())


def _can_enter(folder: Path) -> bool:
    groups = ControlGroups(folder)
    group = groups.create("probe")
    if group is None:
        return False
    look = ("/bin/sh", "-c", 'grep -qx $$ "$0"', f"{group}/cgroup.procs")
    entered = _works((*groups.entry(group, {}), *look))
    with suppress(OSError):
        group.rmdir()
    return entered


def _own_group() -> Path | None:
    """Return the folder of the control group (version 2) that this process is in."""
    try:
        mounts = (_PROC / "self/mountinfo").read_text().splitlines()
        groups = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    mounted = [line.split() for line in mounts if " - cgroup2 " in line]
    own = [line.removeprefix("0::/") for line in groups if line.startswith("0::/")]
    if not mounted or not own or ".." in own[0]:
        return None
    # What is mounted may be a part of the hierarchy, as in a container.
    root, point = mounted[0][3].strip("/"), mounted[0][4]
    if root and not f"{own[0]}/".startswith(f"{root}/"):
        return None
    return Path(point) / own[0].removeprefix(root).strip("/")


def _end_groups(folder: Path) -> None:
    with suppress(OSError):
        (folder / _KILL).write_text("1")
    for _ in range(100):
        _remove_empty(folder)
        with suppress(OSError):
            folder.rmdir()
        if not folder.exists():
            return
        time.sleep(0.01)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        for group in [*folder.iterdir()]:
            if group.is_dir():
                with suppress(OSError):
                    group.rmdir()


def confinement_of_this_machine() -> str:
    """Say how what commands leave behind is ended here."""
    if not has_marks():
        return "by process group only"
    own = _own_group()
    has_groups = own is not None and os.access(own, os.W_OK)
    also = ", with run_as by control group" if has_groups else ""
    return f"by process group and by the mark in its environment{also}"


# Folders for the named pipes of attempts.

_PIPE_PREFIX = "headgate-progress-"
_SHARED_TEMPORARY = "/tmp"  # noqa: S108  the folder's own name is nobody else's


def pipe_folder(mark: str, *, is_shared: bool) -> Path:
    """Return where the pipe of an attempt can be; shared, where every user gets to."""
    where = _SHARED_TEMPORARY if is_shared else tempfile.gettempdir()
    return Path(where, f"{_PIPE_PREFIX}{mark}")


def _remove_orphaned_folders() -> None:
    is_left = _is_orphan if has_marks() else _is_of_dead_process
    for where in {_SHARED_TEMPORARY, tempfile.gettempdir()}:
        for left in Path(where).glob(f"{_PIPE_PREFIX}*"):
            if is_left(left.name.removeprefix(_PIPE_PREFIX).encode()):
                shutil.rmtree(left, ignore_errors=True)


# What is left when an attempt has ended.

SWEEP_SECONDS = 0.5
"""How often all processes are looked through at the most, while attempts end."""


@functools.cache
def _end_orphans(pid: int) -> None:  # noqa: ARG001  once for each process
    try:
        killed = kill_marked((), orphans=True) if has_marks() else 0
        _remove_orphaned_folders()
    except OSError as error:
        _LOG.warning("what a killed service left running was not looked for: %s", error)
        return
    if killed:
        _LOG.warning("ended %d processes of commands whose service was killed", killed)


_unswept: set[str] = set()
"""The marks of attempts that run, or after which nobody has looked yet."""


def end_commands() -> None:
    """End all that commands have started, where the process ends at once and nothing is awaited."""
    with suppress(OSError):
        if _unswept and has_marks():
            kill_marked(_unswept)


class Sweeper:
    """Ends what attempts have left behind: soon after each, without anybody waiting for it.

    One look at all processes serves every attempt that has ended since the last.
    """

    def __init__(self) -> None:
        self._marks: set[str] = set()
        self._has_groups = False
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """End what a service that was killed has left on this machine."""
        await asyncio.to_thread(_end_orphans, os.getpid())

    @staticmethod
    def begin() -> str:
        """Return the mark of a new attempt."""
        mark = new_mark()
        _unswept.add(mark)
        return mark

    def ended(self, mark: str, group: Path | None) -> None:
        """End what is left of an attempt."""
        if group is not None:
            ControlGroups.kill(group)
            self._has_groups = True
            _unswept.discard(mark)
        elif has_marks():
            self._marks.add(mark)
        else:
            _unswept.discard(mark)
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._sweep())

    async def close(self) -> None:
        """End what the last attempts have left."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(self._end)

    async def _sweep(self) -> None:
        while self._marks or self._has_groups:
            await asyncio.to_thread(self._end)
            await asyncio.sleep(SWEEP_SECONDS)

    def _end(self) -> None:
        marks, self._marks = self._marks, set()
        try:
            killed = kill_marked(marks) if marks else 0
        except OSError as error:
            # As when there is no descriptor left: the next look finds it.
            self._marks |= marks
            _LOG.warning("what commands left running was not looked for: %s", error)
            return
        _unswept.difference_update(marks)
        if killed:
            _LOG.info("ended %d processes that commands had left running", killed)
        groups = control_groups() if self._has_groups else None
        if groups is not None:
            self._has_groups = groups.remove_empty()
