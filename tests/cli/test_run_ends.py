"""What a run says last, whatever happens to it: on a pure output, and always with the way on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_run_cli import HELD, wait_until
from headgate.cli.main import run as run_headgate
from headgate.cli.run import MOST_AT_ONCE
from headgate.workflow.config import MAX_CONCURRENCY
from run_commands import Commands, ended, no_process_left

NOISY = """
config: {budget_usd: 1}
steps:
  - id: noisy
    call: noisy:work
"""
NOISY_MODULE = """
import os, sys
print("printed at import")
def work(*_given):
    print("printed by the work")
    os.write(1, b"written by the work\\n")
    os.system("echo printed by a child")
    print("without an end", end="")
    return 1
"""
ONE = """
config: {budget_usd: 1}
steps:
  - id: one
    command: ["true"]
    cost_usd: 0.07
"""


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    files = {"noisy.yaml": NOISY, "noisy.py": NOISY_MODULE, "one.yaml": ONE, "held.yaml": HELD}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return Commands(tmp_path)


def test_what_a_function_prints_is_not_part_of_the_document(commands: Commands) -> None:
    done = commands.run("noisy.yaml")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "done"
    for words in (
        "printed at import",
        "printed by the work",
        "written by the work",
        "printed by a child",
        "without an end",
    ):
        assert words in done.stderr


def test_a_full_output_says_so_and_where_the_run_is(commands: Commands) -> None:
    for more in ((), ("--json",)):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "headgate", "run", "one.yaml", "--data", "data", *more],
                cwd=commands.folder,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.returncode == 1
        *_, problem, ending, kept = done.stderr.splitlines()
        run_id = commands.ids()[-1]
        assert problem == (
            "headgate: standard output: No space left on device; "
            f"headgate runs show {run_id} --data {commands.data} prints it again"
        )
        assert ending.startswith("one is done: 1 of 1 done, $0.07, ")
        assert kept == f"kept in {commands.data / 'runs' / run_id}"


def test_the_third_ctrl_c_says_how_to_go_on(commands: Commands) -> None:
    # The step does not heed the signal that would end it.
    held = HELD.replace("echo {index}", "trap '' TERM; echo {index}")
    (commands.folder / "held.yaml").write_text(held)
    os.mkfifo(commands.folder / "gate")
    process = commands.start_run("held.yaml")
    with no_process_left(process):
        wait_until((commands.folder / "began").exists)
        assert process.stderr is not None
        for words in ("finishing 1 step", "stopping 1 step"):
            process.send_signal(signal.SIGINT)
            assert any(words in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        done = ended(process)
    assert done.code == 130
    way_on = f"headgate: to go on: headgate run --resume {commands.ids()[0]} --data {commands.data}"
    assert way_on in done.stderr.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_run_is_shown_says_how_to_go_on(
    commands: Commands,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Between the folder of a run and its display there is nothing that a test could hold up.
    def signalled(*_given: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr("headgate.cli.run_session.local_backend", signalled)
    monkeypatch.delenv("HEADGATE_BUDGET_URL", raising=False)
    file = str(commands.folder / "one.yaml")
    assert run_headgate(["run", file, "--data", str(commands.data)]) == 130
    printed = capsys.readouterr()
    way_on = f"headgate run --resume {commands.ids()[0]} --data {commands.data}"
    assert (printed.out, printed.err) == ("", f"headgate: to go on: {way_on}\n")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_that_is_refused_is_kept_nowhere_and_does_not_say_so(commands: Commands) -> None:
    session = ("--budget-session-id", "a", "--budget-session-limit")
    assert commands.run("one.yaml", *session, "5").code == 0
    refused = commands.run("one.yaml", *session, "6")
    assert refused.code == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "kept in" not in refused.stderr


def test_a_resume_says_what_was_done_before_and_heeds_a_new_concurrency(
    commands: Commands,
) -> None:
    (commands.folder / "one.yaml").write_text(ONE.replace("budget_usd: 1", "budget_usd: 0.06"))
    assert commands.run("one.yaml", "--concurrency", "2").code == 6
    resumed = commands.run("--resume", "last", "--concurrency", "40", "--budget-usd", "1")
    assert resumed.code == 0, resumed.stderr
    record = json.loads((commands.data / "runs" / commands.ids()[0] / "run.json").read_text())
    assert record["concurrency"] == 40
    again = commands.run("--resume", "last")
    assert "1 step, 1 of them done before; kept in" in again.stderr


def test_the_option_and_the_file_allow_the_same_concurrency() -> None:
    assert MOST_AT_ONCE == MAX_CONCURRENCY


@pytest.mark.parametrize(
    ("work", "line"),
    [
        ("command: [./nope]", "one.yaml:4: steps[0].command: command not found: ./nope; "),
        ("command: [echo, '{env.NOPE}']", "one.yaml:4: steps[0].command: the environment variable"),
        ("call: nope:work", "one.yaml:4: steps[0].call: nope cannot be imported"),
        ("target: nope\n    action: go", "one.yaml:4: steps[0].target: unknown target 'nope'"),
        (
            "model: gpt-4o\n    prompt: hi\n    endpoint: here",
            "one.yaml:2: config.endpoints.here.key: the environment variable NOPE is not",
        ),
    ],
)
def test_what_is_missing_is_named_with_file_line_and_key(
    commands: Commands, work: str, line: str
) -> None:
    endpoint = "{here: {kind: openai, url: 'http://127.0.0.1:1', key: '{env.NOPE}'}}"
    text = f"config:\n  endpoints: {endpoint}\nsteps:\n  - id: one\n    {work}\n"
    (commands.folder / "one.yaml").write_text(text)
    refused = commands.run("one.yaml")
    assert refused.code == 2
    assert refused.stderr.startswith(f"headgate: {line}")
    assert len(refused.stderr.splitlines()) == 1
    assert commands.ids() == []
