"""Tasks as child processes, with real ones."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from executors.orders import CHAT, failure_of, opened, order, result_of
from headgate.core.lifecycle import NOTHING_USED, UNKNOWN_USAGE, Succeeded, Usage
from headgate.core.task import ProgressReport
from headgate.errors import InvalidSettingError
from headgate.executors import confinement, executor
from headgate.executors.build import build_executor
from headgate.executors.command import reported_in
from headgate.executors.executor import Executor, taking_reports
from headgate.executors.targets import MAX_RESULT_BYTES, CommandTarget
from headgate.providers import usage
from headgate.testing import VirtualClock

PATH = {"PATH": os.environ["PATH"]}

on_each_loop = pytest.mark.usefixtures("loop_factory")


def python(code: str, **fields: Any) -> CommandTarget:
    return CommandTarget(command=(sys.executable, "-c", code), **fields)


def shell(script: str, **fields: Any) -> CommandTarget:
    return CommandTarget(command=("sh", "-c", script), **fields)


async def read_line(path: Path) -> str:
    """Wait until somebody writes into a named pipe, and return the line."""
    return (await asyncio.to_thread(path.read_text)).strip()


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended; one that was killed may take a moment to do so."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        assert poll.poll(30_000), "it lives"
    finally:
        os.close(process)


def children() -> set[str]:
    """Return the processes that this one has started and not reaped."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


def descriptors() -> set[str]:
    """Return what this process has open."""
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Give a named pipe: reading it waits for a writer, without asking again and again."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@on_each_loop
async def test_a_command_gets_the_task_as_json_and_as_variables() -> None:
    code = (
        "import json, os, sys; task = json.load(sys.stdin);"
        "own = {k: v for k, v in os.environ.items() if k.startswith(('HEADGATE_', 'TRACE'))};"
        "del own['HEADGATE_PROCESS_MARK'];"
        "print(json.dumps([task, own]))"
    )
    given = msgspec.structs.replace(
        order("run", params={"a": 1}, given=[2], labels={"k": "v"}),
        deadline=1_767_225_600.5,
        traceparent="00-1-2-01",
        slot="work",
    )
    async with opened(python(code), environ=PATH) as executor:
        result = result_of(await executor.execute(given))
    task, own = result["json"]
    assert task == {
        "taskId": "t-1", "attempt": 2, "projectId": "search", "agentId": "coder", "action": "run",
        "tabId": None, "ref": None, "selector": None, "params": {"a": 1}, "input": [2],
        "labels": {"k": "v"}, "deadline": 1_767_225_600.5, "traceparent": "00-1-2-01",
        "slot": "work",
    }  # fmt: skip
    assert own == {
        "HEADGATE_TASK_ID": "t-1", "HEADGATE_ATTEMPT": "2", "HEADGATE_PROJECT_ID": "search",
        "HEADGATE_AGENT_ID": "coder", "HEADGATE_DEADLINE": "1767225600.500",
        "HEADGATE_SLOT": "work", "HEADGATE_PROGRESS": "/dev/null", "TRACEPARENT": "00-1-2-01",
    }  # fmt: skip


OUTPUTS: list[tuple[str, dict[str, object]]] = [
    ("true", {"stdout": "", "stderr": "", "exitCode": 0}),
    ("echo hi; echo oh >&2", {"stdout": "hi\n", "stderr": "oh\n", "exitCode": 0}),
    ("echo '{\"a\": 1}'", {"stdout": '{"a": 1}\n', "stderr": "", "exitCode": 0, "json": {"a": 1}}),
    ("echo 1; echo 2", {"stdout": "1\n2\n", "stderr": "", "exitCode": 0}),
    (r"printf '\377'", {"stdout": "\ufffd", "stderr": "", "exitCode": 0}),
]


@pytest.mark.parametrize(("script", "result"), OUTPUTS)
async def test_output_is_the_result(script: str, result: dict[str, object]) -> None:
    async with opened(shell(script), environ=PATH) as executor:
        assert result_of(await executor.execute(order())) == result


@on_each_loop
async def test_output_beyond_the_cap_is_cut_while_the_child_goes_on() -> None:
    code = "import sys; sys.stdout.write('o' * 3_000_000); sys.stderr.write('e' * 3_000_000)"
    async with opened(python(code, max_output_bytes=100), environ=PATH) as executor:
        result = result_of(await executor.execute(order()))
    assert result == {
        "stdout": "o" * 100, "stderr": "e" * 100, "exitCode": 0,
        "stdoutCut": True, "stderrCut": True,
    }  # fmt: skip


async def test_output_that_grows_when_it_is_written_as_json_is_cut_until_it_fits() -> None:
    async with opened(shell("head -c 300000 /dev/zero"), environ=PATH) as executor:
        outcome = await executor.execute(order())
    assert isinstance(outcome, Succeeded)
    assert outcome.result is not None
    assert len(bytes(outcome.result)) <= MAX_RESULT_BYTES
    assert result_of(outcome)["stdoutCut"] is True


async def test_no_result_is_larger_than_the_target_allows() -> None:
    target = shell("head -c 5000 /dev/zero", max_output_bytes=5_000, max_result_bytes=3_000)
    async with opened(target, environ=PATH) as executor:
        outcome = await executor.execute(order())
    assert isinstance(outcome, Succeeded)
    assert outcome.result is not None
    assert 1_000 < len(bytes(outcome.result)) <= 3_000
    assert result_of(outcome)["stdoutCut"] is True


@pytest.mark.parametrize("code", [0, 1])
async def test_usage_is_looked_for_in_slices(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of output may have a million lines, and each may tell of usage."""
    monkeypatch.setattr(executor, "SLICE_SECONDS", 0.0)
    rounds, read_in = [0], Counter[int]()
    feed = usage.EventStreamReader.feed

    def counted(lines: usage.EventStreamReader, piece: bytes) -> None:
        read_in[rounds[0]] += 1
        feed(lines, piece)

    async def count() -> None:
        while True:
            rounds[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(usage.EventStreamReader, "feed", counted)
    script = f"""print('["usage"' + chr(10) * 100_000 + ']'); raise SystemExit({code})"""
    async with opened(python(script), environ=PATH) as running:
        counting = asyncio.create_task(count())
        await running.execute(order())
        counting.cancel()
    assert len(read_in) > 20
    assert max(read_in.values()) <= 2


async def test_a_large_task_need_not_be_read() -> None:
    large = order(given="x" * 1_000_000)
    async with opened(shell("true"), environ=PATH) as executor:
        assert result_of(await executor.execute(large))["exitCode"] == 0
    async with opened(shell("wc -c"), environ=PATH) as executor:
        assert result_of(await executor.execute(large))["json"] > 1_000_000


async def test_the_usage_that_a_command_prints_is_priced() -> None:
    code = f"import json; print(json.dumps({CHAT!r}))"
    async with opened(python(code), environ=PATH) as executor:
        outcome = await executor.execute(order())
    assert outcome.usage == Usage(tokens=15, micro_usd=20, model="mine", is_priced=True)  # type: ignore[union-attr]


FAILURES: list[tuple[str, str]] = [
    ("exit 3", "command exited with 3"),
    ("echo first >&2; echo last >&2; echo >&2; exit 1", "command exited with 1: last"),
    ("echo out; exit 1", "command exited with 1"),
    ("kill -KILL $$", "command was killed by SIGKILL"),
    ("echo bye >&2; kill -TERM $$", "command was killed by SIGTERM: bye"),
    ("yes x | head -c 5000 >&2; echo the end >&2; exit 1", "command exited with 1: the end"),
]


@pytest.mark.parametrize(("script", "error"), FAILURES)
async def test_a_command_that_fails_says_how(script: str, error: str) -> None:
    async with opened(shell(script, max_output_bytes=1_000), environ=PATH) as executor:
        failure = failure_of(await executor.execute(order()))
    assert failure.error == error
    assert failure.is_transient
    assert failure.usage == UNKNOWN_USAGE


async def test_what_a_failed_command_used_is_still_read() -> None:
    code = f"import json, sys; print(json.dumps({CHAT!r})); sys.exit(1)"
    async with opened(python(code), environ=PATH) as executor:
        assert failure_of(await executor.execute(order())).usage.tokens == 15


async def test_a_command_that_cannot_start_used_nothing(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for target, error in [
        (CommandTarget(command=("no-such-program",)), "command not found: no-such-program"),
        (CommandTarget(command=("./no",)), "command not found: ./no"),
        (CommandTarget(command=(str(plain),)), f"command is not executable: {plain}"),
        (CommandTarget(command=(str(tmp_path),)), f"command is not executable: {tmp_path}"),
        (shell("true", cwd="/no/such"), "command could not be started: there is no directory"),
    ]:
        async with opened(target, environ=PATH) as executor:
            failure = failure_of(await executor.execute(order()))
        assert failure.error.startswith(error)
        assert not failure.is_transient
        assert failure.usage == NOTHING_USED


async def test_an_agent_that_no_variable_can_hold_fails_the_task() -> None:
    odd = msgspec.structs.replace(order(), agent_id="a\0b")
    async with opened(shell("true"), environ=PATH) as executor:
        failure = failure_of(await executor.execute(odd))
    assert failure.error == "command could not be started: embedded null byte"
    assert failure.usage == NOTHING_USED


async def test_a_relative_command_lies_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "tool").chmod(0o755)
    target = CommandTarget(command=("./tool",), cwd=str(tmp_path))
    async with opened(target, environ=PATH) as executor:
        assert result_of(await executor.execute(order()))["stdout"].strip() == str(tmp_path)


async def test_a_child_sees_a_small_environment() -> None:
    environ = PATH | {"SECRET": "no", "TOKEN": "t0ken", "LANG": "C", "ALLOWED": "yes"}
    target = shell("env", env={"KEY": "k-{env.TOKEN}"}, pass_env=("ALLOWED", "NOT_SET"))
    async with opened(target, environ=environ) as executor:
        lines = result_of(await executor.execute(order()))["stdout"].splitlines()
    names = {line.partition("=")[0] for line in lines if not line.startswith("HEADGATE_")}
    assert names - {"PWD", "_", "SHLVL", "OLDPWD"} == {"PATH", "LANG", "ALLOWED", "KEY"}
    assert "KEY=k-t0ken" in lines


async def test_a_secret_that_a_command_prints_is_not_shown_in_its_error() -> None:
    target = shell("echo bad $KEY >&2; exit 1", env={"KEY": "{env.TOKEN}"})
    async with opened(target, environ=PATH | {"TOKEN": "s3cr3t"}) as executor:
        failure = failure_of(await executor.execute(order()))
    assert failure.error == "command exited with 1: bad {env.TOKEN}"


async def started(executor: Executor, fifo: Path) -> tuple[asyncio.Task[object], int]:
    """Run a command that writes a process id into the pipe, and wait for it."""
    running: asyncio.Task[object] = asyncio.ensure_future(executor.execute(order()))
    return running, int(await read_line(fifo))


async def cancelled(running: asyncio.Task[object]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@on_each_loop
async def test_a_cancelled_command_ends_with_its_children(fifo: Path) -> None:
    script = f"sleep 1000 & echo $! > {fifo}; wait"
    before = children()
    async with opened(shell(script), environ=PATH) as executor:
        running, grandchild = await started(executor, fifo)
        os.kill(grandchild, 0)
        await cancelled(running)
    wait_for_end(grandchild)
    assert children() == before


@on_each_loop
async def test_a_group_that_ignores_the_signal_is_killed_after_the_grace(fifo: Path) -> None:
    script = f"trap '' TERM; sh -c 'echo $$ > {fifo}; while :; do sleep 1000; done'"
    before = children()
    async with opened(shell(script, kill_grace_seconds=0.05), environ=PATH) as executor:
        running, grandchild = await started(executor, fifo)
        await cancelled(running)
    wait_for_end(grandchild)
    assert children() == before


async def test_a_command_may_clean_up_within_the_grace(fifo: Path, tmp_path: Path) -> None:
    mark = tmp_path / "cleaned"
    script = (
        f"trap 'echo yes > {mark}; exit 0' TERM; echo $$ > {fifo}; while :; do sleep 0.01; done"
    )
    async with opened(shell(script, kill_grace_seconds=60), environ=PATH) as executor:
        running, _ = await started(executor, fifo)
        await cancelled(running)
    assert mark.read_text() == "yes\n"


@on_each_loop
async def test_a_command_that_is_cancelled_twice_is_still_reaped(fifo: Path) -> None:
    script = f"trap '' TERM; echo $$ > {fifo}; while :; do sleep 1000; done"
    before = children()
    async with opened(shell(script, kill_grace_seconds=0.1), environ=PATH) as executor:
        running, child = await started(executor, fifo)
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await running
    wait_for_end(child)
    assert children() == before


async def test_a_deadline_ends_the_group_and_is_told_as_a_timeout(fifo: Path) -> None:
    async with opened(shell(f"echo $$ > {fifo}; sleep 1000"), environ=PATH) as executor:
        reading, deadline = asyncio.ensure_future(read_line(fifo)), asyncio.timeout(None)
        # It comes when the command runs, however long that takes.
        reading.add_done_callback(lambda _: deadline.reschedule(0.0))
        with pytest.raises(TimeoutError):
            async with deadline:
                await executor.execute(order())
    wait_for_end(int(await reading))


@on_each_loop
async def test_a_grandchild_that_holds_the_output_open_does_not_hold_up_the_task(
    fifo: Path,
) -> None:
    script = f"echo out; sleep 1000 & echo $! > {fifo}"
    async with opened(shell(script), environ=PATH) as executor:
        running, grandchild = await started(executor, fifo)
        async with asyncio.timeout(60):
            outcome = await running
    assert result_of(outcome)["stdout"] == "out\n"  # type: ignore[arg-type]
    wait_for_end(grandchild)


@pytest.mark.parametrize("script", ["sleep 1000 &", "trap '' TERM; sleep 1000 & wait"])
async def test_a_thread_waits_where_there_are_no_descriptors_of_processes(
    script: str, fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    target = shell(f"{script.replace('&', f'& echo $! > {fifo};')}", kill_grace_seconds=0.05)
    with monkeypatch.context() as without:
        without.delattr(os, "pidfd_open")
        async with opened(target, environ=PATH) as executor:
            running, grandchild = await started(executor, fifo)
            if "wait" in script:
                await cancelled(running)
            else:
                await running
    wait_for_end(grandchild)
    assert children() == before


def test_a_loop_that_ends_takes_its_commands_along(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pids: list[int] = []

    async def abandoned() -> None:
        script = f"trap '' TERM; echo $$ > {fifo}; sleep 1000"
        async with opened(shell(script, kill_grace_seconds=0.05), environ=PATH) as it:
            _, pid = await started(it, fifo)
            pids.append(pid)

    asyncio.run(abandoned())
    wait_for_end(pids[0])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
async def test_a_child_does_not_outlive_a_service_that_is_killed(fifo: Path) -> None:
    service = f"""
import asyncio
from headgate.executors.build import build_executor
from headgate.executors.targets import CommandTarget
from headgate.executors.executor import WorkOrder
from headgate.core.task import Submission

async def main():
    target = CommandTarget(command=("sh", "-c", "echo $$ > {fifo}; exec sleep 1000"))
    it = build_executor("it", target, environ={PATH!r}, clock=lambda: 0.0)
    await it.open()
    await it.execute(WorkOrder(task_id="t", attempt=1, project_id="p", agent_id="a",
                               submission=Submission()))

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", service)
    child = int(await read_line(fifo))
    process.send_signal(signal.SIGKILL)
    await process.wait()
    wait_for_end(child)


async def test_many_commands_run_side_by_side_and_leave_no_descriptor_open() -> None:
    async with opened(shell("echo $HEADGATE_ATTEMPT"), environ=PATH) as executor:
        await executor.execute(order())
        before = descriptors()
        orders = [msgspec.structs.replace(order(), attempt=number) for number in range(30)]
        outcomes = await asyncio.gather(*(executor.execute(one) for one in orders))
        assert descriptors() == before
    assert [result_of(outcome)["json"] for outcome in outcomes] == list(range(30))


TARGETS: list[tuple[CommandTarget, str, str]] = [
    (CommandTarget(command=("",)), "targets.it.command", "program"),
    (CommandTarget(command=("a", "b\0")), "targets.it.command", "NUL"),
    (CommandTarget(command=("a", "x{params.y}")), "targets.it.command", "standard input"),
    (CommandTarget(command=("a", "{env.KEY}")), "targets.it.command", "standard input"),
    (CommandTarget(command=("{action}",)), "targets.it.command", "standard input"),
    (CommandTarget(command=("a",), env={"A": "{env.NOPE}"}), "targets.it.env.A", "NOPE"),
    (CommandTarget(command=("a",), env={"A=": "b"}), "targets.it.env.A=", "name"),
    (
        CommandTarget(command=("a",), env={"HEADGATE_TASK_ID": "b"}),
        "targets.it.env.HEADGATE_TASK_ID",
        "every task",
    ),
]


@pytest.mark.parametrize(("target", "setting", "words"), TARGETS)
def test_a_wrong_target_is_refused_by_name(target: CommandTarget, setting: str, words: str) -> None:
    with pytest.raises(InvalidSettingError) as raised:
        build_executor("it", target, environ={}, clock=VirtualClock())
    assert raised.value.field == setting
    assert words in raised.value.problem


def test_braces_of_other_languages_are_left_alone() -> None:
    target = CommandTarget(command=("awk", "{print $1}", "{}", "{name}"))
    build_executor("it", target, environ={}, clock=VirtualClock())


# How far a command says it is.


@pytest.fixture
def reports() -> asyncio.Queue[ProgressReport]:
    """Give what the attempts of a test report, one after another."""
    return asyncio.Queue()


async def next_of(reports: asyncio.Queue[ProgressReport]) -> ProgressReport:
    async with asyncio.timeout(30):
        return await reports.get()


LINES: list[tuple[bytes, tuple[float | None, str]]] = [
    (b"0.4 12 of 30 files", (0.4, "12 of 30 files")),
    (b"1", (1.0, "")),
    (b" 0 ", (0.0, "")),
    (b"1.0 done", (1.0, "done")),
    (b"0.0 errors so far", (0.0, "errors so far")),
    (b"1 of 30 files", (None, "1 of 30 files")),
    (b"0 errors so far", (None, "0 errors so far")),
    (b".25\tdone", (0.25, "done")),
    (b"12 of 30 files", (None, "12 of 30 files")),
    (b"40% done", (None, "40% done")),
    (b"0.4% done", (None, "0.4% done")),
    (b'{"fraction": 0.4, "text": "half"}', (0.4, "half")),
    (b'{"text": "half"}', (None, "half")),
    (b'{"fraction": "half"}', (None, '{"fraction": "half"}')),
    (b'{"a": ' + 2_000 * b"[", (None, '{"a": ' + 2_000 * "[")),
    (b"0.5 \xff", (0.5, "\ufffd")),
    (b"", (None, "")),
]


@pytest.mark.parametrize(("line", "report"), LINES)
def test_a_line_is_a_fraction_a_text_or_both(line: bytes, report: tuple[float | None, str]) -> None:
    fraction, text = reported_in(line)
    assert (fraction, text.strip()) == report


OWN_PYTHON = f"{sys.executable} -c 'import headgate; headgate.report_progress(0.4, \"12 of 30\")'"
FROM_ANOTHER = (
    f'{sys.executable} -c \'import subprocess; subprocess.run(["sh", "-c",'
    ' "echo 0.4 12 of 30 > $HEADGATE_PROGRESS"])\''
)


@on_each_loop
@pytest.mark.parametrize(
    "script", ["echo 0.4 12 of 30 >> $HEADGATE_PROGRESS", OWN_PYTHON, FROM_ANOTHER]
)
async def test_a_command_and_what_it_starts_report_progress(
    script: str, fifo: Path, reports: asyncio.Queue[ProgressReport]
) -> None:
    taking_reports.set(reports.put_nowait)
    async with opened(shell(f"{script}; read x < {fifo}"), environ=PATH) as executor:
        running = asyncio.ensure_future(executor.execute(order()))
        assert await next_of(reports) == ProgressReport(fraction=0.4, text="12 of 30")
        await asyncio.to_thread(fifo.write_text, "\n")
        assert result_of(await running)["exitCode"] == 0


@on_each_loop
async def test_a_flood_of_reports_is_read_and_the_last_one_counts(
    fifo: Path, reports: asyncio.Queue[ProgressReport]
) -> None:
    taking_reports.set(reports.put_nowait)
    script = (
        "exec 3> $HEADGATE_PROGRESS; yes 0.1 some | head -n 300000 >&3;"
        f" head -c 3000000 /dev/zero >&3; echo >&3; echo 0.9 last >&3; read x < {fifo}"
    )
    async with opened(shell(script), environ=PATH) as executor:
        running = asyncio.ensure_future(executor.execute(order()))
        while (await next_of(reports)).text != "last":
            assert reports.qsize() < 1_000
        await asyncio.to_thread(fifo.write_text, "\n")
        assert result_of(await running)["exitCode"] == 0


async def test_no_pipe_outlives_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: asyncio.Queue[ProgressReport]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    taking_reports.set(reports.put_nowait)
    before = descriptors()
    for script in ("test -p $HEADGATE_PROGRESS", "rm $HEADGATE_PROGRESS"):
        async with opened(shell(script), environ=PATH) as executor:
            assert result_of(await executor.execute(order()))["exitCode"] == 0
    async with opened(CommandTarget(command=("/no/such",)), environ=PATH) as executor:
        failure_of(await executor.execute(order()))
    assert descriptors() == before
    assert os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.parametrize("call", ["mkfifo", "open"])
async def test_a_command_runs_where_there_can_be_no_pipe(
    call: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reports: asyncio.Queue[ProgressReport],
) -> None:
    real = getattr(os, call)

    def refuse(path: Any, *arguments: Any, **fields: Any) -> Any:
        # As when there is no descriptor left: nobody can look into the folder either.
        if "headgate-progress" in str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *arguments, **fields)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, call, refuse)
    taking_reports.set(reports.put_nowait)
    script = "echo 0.5 > $HEADGATE_PROGRESS; echo $HEADGATE_PROGRESS"
    async with opened(shell(script), environ=PATH) as executor:
        assert result_of(await executor.execute(order()))["stdout"] == f"{os.devnull}\n"
    assert reports.empty()
    assert os.listdir(tmp_path) == []  # noqa: PTH208


async def test_where_no_temporary_folder_is_usable_a_command_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, reports: asyncio.Queue[ProgressReport]
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    taking_reports.set(reports.put_nowait)
    unswept = set(confinement._unswept)
    async with opened(shell("true"), environ=PATH) as executor:
        monkeypatch.setattr("tempfile.gettempdir", refuse)
        failed = failure_of(await executor.execute(order()))
        assert failed.is_transient
        assert "No usable temporary directory" in failed.error
    assert confinement._unswept == unswept
