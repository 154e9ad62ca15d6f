"""Commands are confined: whose rights they have, and that nothing of them lives on; real ones."""

from __future__ import annotations

import asyncio
import errno
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from executors.orders import failure_of, opened, order, result_of
from executors.test_command import PATH, children, read_line, shell, wait_for_end
from headgate import redaction
from headgate.core.lifecycle import Outcome
from headgate.core.task import ProgressReport
from headgate.errors import InvalidSettingError
from headgate.executors import command, confinement
from headgate.executors.confinement import (
    MARK_VARIABLE,
    CommandUser,
    ControlGroups,
    Launcher,
    command_user,
    control_groups,
    end_commands,
    kill_marked,
    marked,
    new_mark,
    pipe_folder,
)
from headgate.executors.executor import Executor, taking_reports
from headgate.executors.targets import CommandTarget

if sys.platform != "linux":
    pytest.skip("commands are confined by the kernel of Linux", allow_module_level=True)

needs_setpriv = pytest.mark.skipif(
    shutil.which("setpriv") is None, reason="needs setpriv of util-linux"
)
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may run a command as another user"
)
OTHER = "nobody"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a folder that every user may enter, as that of a test is not."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def fifo(folder: Path) -> Path:
    """Give a named pipe that a command of any user can write to."""
    path = folder / "fifo"
    os.mkfifo(path)
    path.chmod(0o666)
    return path


Fields = dict[str, Any]


@pytest.fixture(params=["marks", "marks of another user", "control groups"])
def ending(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fields:
    """Give the targets whose leftovers are ended in each way there is."""
    if request.param == "marks":
        return {}
    if os.geteuid() != 0:
        pytest.skip("only root may run a command as another user")
    if request.param == "marks of another user":
        monkeypatch.setattr(command, "control_groups", lambda: None)
    elif control_groups() is None:
        pytest.skip("this process may not make control groups")
    return {"run_as": OTHER}


async def output_of(target: CommandTarget) -> str:
    async with opened(target, environ=PATH) as executor:
        return said_by(await executor.execute(order()))


def said_by(outcome: Outcome) -> str:
    result = result_of(outcome)
    assert isinstance(result, dict)
    return str(result["stdout"]).strip()


# What it may gain.


@needs_setpriv
@pytest.mark.parametrize("is_wanted", [True, False])
async def test_a_command_gains_no_privileges_unless_the_target_says_so(is_wanted: bool) -> None:
    fields: dict[str, Any] = {} if is_wanted else {"no_new_privileges": False}
    said = await output_of(shell("grep NoNewPrivs /proc/self/status", **fields))
    assert said.split() == ["NoNewPrivs:", str(int(is_wanted))]


async def test_a_command_sees_no_variable_that_was_not_meant_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_SECRET", "s3cr3t")
    target = shell("env", env={"A": "1"}, pass_env=("TAKEN",))
    environ = {**PATH, "TAKEN": "2", "LEFT": "3", "HEADGATE_TOKEN": "s3cr3t"}
    async with opened(target, environ=environ) as executor:
        said = said_by(await executor.execute(order()))
    names = {line.partition("=")[0] for line in said.splitlines()}
    own = {
        f"HEADGATE_{one}" for one in ("TASK_ID", "ATTEMPT", "PROJECT_ID", "AGENT_ID", "PROGRESS")
    }
    # The shell that runs `env` here adds the last two.
    assert names - {"PWD", "_"} == {"PATH", "A", "TAKEN", MARK_VARIABLE, *own}


# Whom it can tell how far it is.


async def test_a_command_of_any_user_reports_progress(fifo: Path, ending: Fields) -> None:
    reports = asyncio.Queue[ProgressReport]()
    taking_reports.set(reports.put_nowait)
    target = shell(f"echo 0.4 some > $HEADGATE_PROGRESS && read x < {fifo}", **ending)
    async with opened(target, environ=PATH) as executor:
        running = asyncio.ensure_future(executor.execute(order()))
        async with asyncio.timeout(30):
            assert await reports.get() == ProgressReport(fraction=0.4, text="some")
        await asyncio.to_thread(fifo.write_text, "\n")
        assert result_of(await running)["exitCode"] == 0


def test_pipes_of_services_that_are_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mark = new_mark()
    uid, namespace, _, _, attempt = mark.split(".")
    orphan = f"{uid}.{namespace}.7fffffff.1.{attempt}"
    for one in (mark, orphan):
        folder = pipe_folder(one, is_shared=False)
        folder.mkdir()
        os.mkfifo(folder / "pipe")
    confinement._remove_orphaned_folders()
    assert [*tmp_path.iterdir()] == [pipe_folder(mark, is_shared=False)]


def test_pipes_of_dead_services_are_removed_where_the_system_shows_no_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(confinement, "_PROC", tmp_path / "proc")
    uid, own, attempt = os.getuid(), os.getpid(), "a" * 24
    orphan = f"{uid:x}.0.7fffffff.0.{attempt}"
    others = [
        f"{uid:x}.0.{own:x}.0.{attempt}",
        f"{uid + 1:x}.0.7fffffff.0.{attempt}",
        f"{uid:x}.{5:x}.7fffffff.1.{attempt}",
        f"{uid:x}.0.{'f' * 16}.0.{attempt}",
        "another",
    ]
    for one in (orphan, *others):
        pipe_folder(one, is_shared=False).mkdir()
    confinement._end_orphans.__wrapped__(own)
    assert {*tmp_path.iterdir()} == {pipe_folder(one, is_shared=False) for one in others}


# What it leaves behind.

_STAYS = "setsid sh -c 'echo $$ > {fifo}; exec /bin/sleep 1000' > /dev/null 2>&1"
AWAY = {"a session of its own": f"{_STAYS} &", "a daemon": f"({_STAYS} &)"}
WITHOUT_A_MARK = f"(env -i {_STAYS} &)"


def staying(start: str, fifo: Path, fields: Fields, end: str = "exit 0") -> CommandTarget:
    """Return a command that starts something, and ends when it is let go."""
    os.mkfifo(f"{fifo}.go")
    Path(f"{fifo}.go").chmod(0o666)
    return shell(f"{start.format(fifo=fifo)}\nread x < {fifo}.go; {end}", **fields)


async def let_go(fifo: Path) -> None:
    await asyncio.to_thread(Path(f"{fifo}.go").write_text, "\n")


async def left_by(executor: Executor, fifo: Path) -> tuple[asyncio.Future[Outcome], int]:
    """Start an attempt, and return it with what it has started."""
    running = asyncio.ensure_future(executor.execute(order()))
    return running, int(await read_line(fifo))


@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$"])
@pytest.mark.parametrize("how", AWAY)
async def test_what_a_command_starts_does_not_outlive_its_attempt(
    how: str, end: str, fifo: Path, ending: Fields
) -> None:
    async with opened(staying(AWAY[how], fifo, ending, end), environ=PATH) as executor:
        running, left = await left_by(executor, fifo)
        await let_go(fifo)
        await running
        await asyncio.to_thread(wait_for_end, left)


@needs_root
async def test_not_even_what_clears_its_environment_leaves_a_control_group(fifo: Path) -> None:
    if control_groups() is None:
        pytest.skip("this process may not make control groups")
    async with opened(staying(WITHOUT_A_MARK, fifo, {"run_as": OTHER}), environ=PATH) as executor:
        running, left = await left_by(executor, fifo)
        await let_go(fifo)
        await running
        await asyncio.to_thread(wait_for_end, left)


async def test_a_cancelled_attempt_leaves_nothing_either(fifo: Path, ending: Fields) -> None:
    before = children()
    script = f"{AWAY['a daemon'].format(fifo=fifo)}\nexec sleep 1000"
    async with opened(shell(script, kill_grace_seconds=0.05, **ending), environ=PATH) as executor:
        running, left = await left_by(executor, fifo)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.to_thread(wait_for_end, left)
    assert children() == before


async def test_the_end_of_one_attempt_leaves_the_others_alone(fifo: Path, ending: Fields) -> None:
    script = f"{AWAY['a daemon'].format(fifo=fifo)}\nexec sleep 1000"
    async with opened(shell(script, kill_grace_seconds=0.05, **ending), environ=PATH) as executor:
        running, left = await left_by(executor, fifo)
        async with opened(shell("setsid sleep 0 &", **ending), environ=PATH) as another:
            await another.execute(order())
        # Both ways of ending have been gone through once the other executor is closed.
        os.kill(left, 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await asyncio.to_thread(wait_for_end, left)


async def test_closing_ends_what_the_last_attempt_has_left(fifo: Path, ending: Fields) -> None:
    async with opened(staying(AWAY["a daemon"], fifo, ending), environ=PATH) as executor:
        running, left = await left_by(executor, fifo)
        await let_go(fifo)
        await running
    await asyncio.to_thread(wait_for_end, left)
    groups = control_groups()
    assert groups is None or not groups.remove_empty()


SERVICE = """
import asyncio
from headgate.executors import command
from headgate.executors.build import build_executor
from headgate.executors.executor import Executor
from headgate.executors.targets import CommandTarget
from headgate.executors.executor import WorkOrder
from headgate.core.task import Submission

async def main():
    command.control_groups = lambda: None
    target = CommandTarget(command=("sh", "-c", {script!r}))
    it = build_executor("it", target, environ={environ!r}, clock=lambda: 0.0)
    await it.open()
    await it.execute(WorkOrder(task_id="t", attempt=1, project_id="p", agent_id="a",
                               submission=Submission()))

asyncio.run(main())
"""


async def test_the_next_start_ends_what_a_killed_service_has_left(fifo: Path) -> None:
    script = f"{AWAY['a session of its own'].format(fifo=fifo)} exec sleep 1000"
    service = SERVICE.format(script=script, environ=PATH)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", service)
    left = int(await read_line(fifo))
    kill_marked((), orphans=True)
    os.kill(left, 0)  # While its service lives, it is nobody's orphan.
    process.send_signal(signal.SIGKILL)
    await process.wait()
    os.kill(left, 0)
    kill_marked((), orphans=True)
    await asyncio.to_thread(wait_for_end, left)


def test_what_is_in_the_middle_of_an_exec_is_found() -> None:
    """While a process becomes another program, the kernel shows no environment of it."""
    endless = 'exec "$0" -c "$1" "$0" "$1"'
    for _ in range(40):
        mark = new_mark()
        process = subprocess.Popen(
            ["/bin/sh", "-c", endless, "/bin/sh", endless], env={**PATH, **marked(mark)}
        )
        try:
            assert kill_marked([mark]) == 1
            assert process.wait(timeout=30) == -signal.SIGKILL
        finally:
            process.kill()
            process.wait()


def test_what_was_started_without_an_environment_is_passed_over() -> None:
    with subprocess.Popen(["/bin/sleep", "1000"], env={}) as process:
        try:
            while (found := confinement._environment(process.pid)) is None:
                os.sched_yield()
            assert found == b""
        finally:
            process.kill()


def test_what_another_service_marked_is_left_alone() -> None:
    mine = new_mark()
    uid, namespace, pid, started, attempt = mine.split(".")
    theirs = {
        "alive": mine,
        "another user's": f"{int(uid, 16) + 1:x}.{namespace}.7fffffff.1.{attempt}",
        "another machine's": f"{uid}.{int(namespace, 16) + 1:x}.7fffffff.1.{attempt}",
        "unreadable": "x.y",
        "short": f"{uid}.{namespace}.7fffffff.1",
        "empty": "....",
        "of nobody": f"{uid}.0.7fffffff.1.{attempt}",
        "too long to look for": f"{uid}.{namespace}.{'7' * 5_000}.1.{attempt}",
    }
    later = f"{int(started, 16) + 1:x}"
    orphans = {
        "gone": f"{uid}.{namespace}.7fffffff.1.{attempt}",
        "its number is another's now": f"{uid}.{namespace}.{pid}.{later}.{attempt}",
    }
    for marks, is_doomed in ((theirs, False), (orphans, True)):
        for name, mark in marks.items():
            found = f"A=1\0{MARK_VARIABLE}={mark}\0".encode()
            judged = confinement._is_doomed(found, frozenset(), orphans=True)
            assert judged is is_doomed, name


async def test_a_process_that_ends_at_once_takes_its_commands_along(
    fifo: Path, ending: Fields
) -> None:
    async with opened(staying(AWAY["a daemon"], fifo, ending), environ=PATH) as executor:
        running, left = await left_by(executor, fifo)
        await asyncio.to_thread(end_commands)
        await asyncio.to_thread(wait_for_end, left)
        await running


async def test_a_look_that_fails_is_made_again(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, kill = [], kill_marked

    def failing_once(marks: Iterable[str], *, orphans: bool = False) -> int:
        looks.append(marks)
        if len(looks) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return kill(marks, orphans=orphans)

    monkeypatch.setattr(confinement, "kill_marked", failing_once)
    async with opened(staying(AWAY["a daemon"], fifo, {}), environ=PATH) as executor:
        looks.clear()
        running, left = await left_by(executor, fifo)
        await let_go(fifo)
        await running
        await asyncio.to_thread(wait_for_end, left)
    assert len(looks) > 1


def test_a_service_within_a_command_keeps_the_outer_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = new_mark(), new_mark()
    monkeypatch.setenv(MARK_VARIABLE, outer)
    found = b"\0".join(f"{name}={value}".encode() for name, value in marked(inner).items())
    for mark in (outer, inner):
        assert confinement._is_doomed(found, frozenset({mark.encode()}), orphans=False)
    assert not confinement._is_doomed(found, frozenset({new_mark().encode()}), orphans=False)


# As whom it runs.


@pytest.fixture(params=["setpriv", "no setpriv"])
def starting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give each way in which a command is started as another user."""
    if request.param == "no setpriv":
        monkeypatch.setattr(command, "launcher", lambda: Launcher(None))
    elif shutil.which("setpriv") is None:
        pytest.skip("needs setpriv of util-linux")
    return str(request.param)


@needs_root
async def test_a_command_runs_as_another_user_with_nothing_of_the_service(starting: str) -> None:
    entry = pwd.getpwnam(OTHER)
    script = "id -u; id -g; id -G; echo $USER $LOGNAME; echo $HOME; umask; pwd"
    target = shell(f"{script}; grep CapEff /proc/self/status", run_as=OTHER)
    environ = {**PATH, "HOME": "/own", "USER": "own", "TMPDIR": "/own/tmp"}
    async with opened(target, environ=environ) as executor:
        said = said_by(await executor.execute(order())).splitlines()
    groups = " ".join(map(str, os.getgrouplist(OTHER, entry.pw_gid)))
    home = command_user(OTHER, setting="run_as").directory
    assert said[:6] == [
        str(entry.pw_uid), str(entry.pw_gid), groups, f"{OTHER} {OTHER}", entry.pw_dir, "0077",
    ]  # fmt: skip
    assert said[6] == home, starting
    assert int(said[7].split()[1], 16) == 0


@needs_root
async def test_another_user_reads_neither_token_nor_environment_of_the_service(
    folder: Path, starting: str
) -> None:
    data = folder / "data"
    data.mkdir(mode=0o700)
    (data / "token").write_text("s3cr3t")
    (data / "token").chmod(0o644)
    script = f"cat {data}/token; cat /proc/{os.getpid()}/environ; ls {data}; kill -0 {os.getpid()}"
    said = await output_of(shell(f"({script}) 2>/dev/null || echo refused", run_as=OTHER))
    assert said == "refused", starting


@needs_root
async def test_another_user_reopens_its_input_and_outputs(starting: str) -> None:
    script = "cat /dev/stdin > /dev/null && echo out > /dev/stdout && echo err > /dev/stderr"
    async with opened(shell(script, run_as=OTHER), environ=PATH) as executor:
        result = result_of(await executor.execute(order()))
    assert result == {"stdout": "out\n", "stderr": "err\n", "exitCode": 0}, starting


@needs_root
async def test_a_command_of_another_user_is_ended_however_it_was_started(
    fifo: Path, starting: str
) -> None:
    script = f"{AWAY['a daemon'].format(fifo=fifo)}\nexec sleep 1000"
    target = shell(script, kill_grace_seconds=0.05, run_as=OTHER)
    async with opened(target, environ=PATH) as executor:
        running, left = await left_by(executor, fifo)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.to_thread(wait_for_end, left)
    assert starting


@needs_root
@needs_setpriv
async def test_a_program_that_the_other_user_may_not_run_fails_the_task(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho hi\n")
    program.chmod(0o700)
    target = CommandTarget(command=(str(program),), run_as=OTHER)
    async with opened(target, environ=PATH) as executor:
        failure = failure_of(await executor.execute(order()))
    assert "Permission denied" in failure.error


def test_a_user_that_commands_cannot_run_as_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = pwd.getpwuid(os.geteuid()).pw_name
    everything = {"CapEff": -1}
    wrong = [
        ("no-such-user", everything, "there is no user 'no-such-user' on this machine"),
        ("", everything, "there is no user ''"),
        ("a\0b", everything, "there is no user"),
        (own, everything, f"{own} is the user of the service itself"),
        (OTHER, {}, f"may not run commands as {OTHER}: it lacks CAP_KILL, CAP_SETGID, CAP_SETUID"),
        (OTHER, {"CapEff": 1 << 7 | 1 << 6}, "it lacks CAP_KILL;"),
    ]
    for name, held, said in wrong:
        monkeypatch.setattr(
            confinement, "_capabilities", lambda which, held=held: held.get(which, 0)
        )
        with pytest.raises(InvalidSettingError) as raised:
            command_user(name, setting="targets.it.run_as")
        assert raised.value.field == "targets.it.run_as"
        assert said in raised.value.problem


def test_a_service_that_may_change_users_does_not_hand_that_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(confinement, "_capabilities", lambda which: int(which == "CapAmb"))
    prefix = Launcher("/usr/bin/setpriv").prefix(None, no_new_privileges=True)
    assert prefix[prefix.index("--ambient-caps") + 1] == "-all"
    assert prefix[prefix.index("--inh-caps") + 1] == "-all"


MODES = [
    (0o700, 0o600, False),
    (0o700, 0o644, False),
    (0o711, 0o600, False),
    (0o711, 0o604, True),
    (0o755, 0o640, False),
    (0o755, 0o644, True),
]


@pytest.mark.parametrize(("folder_mode", "file_mode", "is_readable"), MODES)
def test_what_another_user_may_read_is_seen_by_the_modes(
    folder: Path, folder_mode: int, file_mode: int, is_readable: bool
) -> None:
    file = folder / "token"
    file.write_text("s3cr3t")
    file.chmod(file_mode)
    folder.chmod(folder_mode)
    user = CommandUser(
        name="x", uid=64_000, gid=64_000, groups=(64_000,), home="/", shell="/bin/sh"
    )
    assert user.may_read(file) is is_readable
    owner = msgspec.structs.replace(user, uid=os.getuid())
    assert owner.may_read(file)
    assert not user.may_read(folder / "none")


SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin")


@needs_root
@pytest.mark.skipif(SYSTEM_PYTHON is None, reason="needs a Python that every user may run")
def test_a_hidden_process_shows_its_environment_to_root_alone() -> None:
    source = Path(redaction.__file__).read_text()
    for is_hidden in (False, True):
        code = source + ("\nhide_process()" if is_hidden else "") + "\nprint(flush=True)\ninput()"
        entry = pwd.getpwnam(OTHER)
        as_other: dict[str, Any] = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        with subprocess.Popen(
            [SYSTEM_PYTHON or "", "-SEc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"SECRET": "s3cr3t"}, cwd="/", **as_other,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            path = f"/proc/{process.pid}/environ"
            seen = subprocess.run(["cat", path], capture_output=True, check=False, **as_other)
            by_root = Path(path).read_bytes()
            process.communicate(b"\n")
        assert (b"s3cr3t" in seen.stdout) is not is_hidden
        assert b"s3cr3t" in by_root


def test_control_groups_are_only_used_where_they_can_be_entered(tmp_path: Path) -> None:
    assert not confinement._can_enter(tmp_path)
    assert ControlGroups(tmp_path / ("x" * 300)).create("x") is None
