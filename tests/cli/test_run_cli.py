"""`headgate run` as a person meets it: exit codes, Ctrl-C, wrong calls, closed outputs."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from headgate.cli.main import run as run_headgate
from headgate.cli.run import run as run_command
from run_commands import Commands, Ended, ended, no_process_left
from service.support import running_service

CASES = """
config: {budget_usd: 0.25, concurrency: 1}
steps:
  - id: case
    foreach: [red, green, blue, white, black]
    command: ["echo", "{item} is a colour"]
    cost_usd: 0.07
  - id: report
    command: ["echo", "{steps.case.outputs}"]
"""
FAILING = """
steps:
  - id: bad
    command: ["sh", "-c", "echo no such page >&2; exit 3"]
  - id: after
    depends_on: bad
    command: ["true"]
"""
# The step says that it runs, and ends when somebody opens the other end of its pipe.
HELD = """
config: {concurrency: 1}
steps:
  - id: held
    foreach: [0, 1]
    command: ["sh", "-c", "echo {index} > began; cat gate"]
"""


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    for name, text in {"cases": CASES, "failing": FAILING, "held": HELD}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return Commands(tmp_path)


class Here:
    """Commands that only look, in this process: they start nothing, and none takes a second."""

    def __init__(self, capsys: pytest.CaptureFixture[str], data: Path) -> None:
        self._capsys = capsys
        self._data = data

    def call(self, *arguments: str) -> Ended:
        self._capsys.readouterr()
        code = run_headgate([*arguments, "--data", str(self._data)])
        printed = self._capsys.readouterr()
        return Ended(code, printed.out, printed.err)


@pytest.fixture
def here(
    commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Here:
    monkeypatch.chdir(commands.folder)
    monkeypatch.delenv("HEADGATE_BUDGET_URL", raising=False)
    return Here(capsys, commands.data)


def test_all_done_is_exit_code_zero_and_one_json_document(commands: Commands) -> None:
    done = commands.run("cases.yaml", "--budget-usd", "1")
    assert done.code == 0, done.stderr
    assert done.json["state"] == "done"
    assert done.json["exit_code"] == 0
    assert {step["step"]: step["micro_usd"] for step in done.json["steps"]} == {
        "case": 350_000,
        "report": 0,
    }
    assert done.json["money"][-1]["limit_micro_usd"] == 1_000_000
    told = done.stderr.splitlines()
    assert told[0].startswith(f"cases: run {done.json['run_id']}, 2 steps that run 6 times; kept")
    assert re.fullmatch(r"case\[0\] done after .*, \$0\.07", told[1])


def test_a_used_up_budget_is_exit_code_three_and_a_resume_goes_on(commands: Commands) -> None:
    stopped = commands.run("cases.yaml")
    assert stopped.code == 6
    assert stopped.json["state"] == "exhausted"
    assert stopped.json["resume"].endswith(f"--data {commands.data}")
    resumed = commands.run("--resume", "last", "--budget-usd", "0.50")
    assert resumed.code == 0, resumed.stderr
    assert resumed.json["run_id"] == stopped.json["run_id"]
    assert resumed.json["money"][-1]["spent_micro_usd"] == 350_000
    assert "case[0]" not in resumed.stderr


def test_failed_steps_are_exit_code_one_and_runs_show_what_failed(
    commands: Commands, here: Here
) -> None:
    failed = commands.call("run", "failing.yaml", "--data", str(commands.data))
    assert failed.code == 1
    assert "bad failed after" in failed.stdout
    assert "no such page" in failed.stdout
    assert f"again: headgate run --resume {commands.ids()[0]}" in failed.stdout
    assert re.search(rf"{commands.ids()[0]} +failing +failed", here.call("runs").stdout)
    shown = here.call("runs", "show", commands.ids()[0][:15])
    assert re.search(r"bad +failed", shown.stdout)
    assert re.search(r"after +skipped +'bad' failed", shown.stdout)
    as_json = here.call("runs", "show", "last", "--all", "--json").json
    assert [row["state"] for row in as_json["rows"]] == ["failed", "skipped"]


def wait_until(holds: Callable[[], bool]) -> None:
    """Look until it holds; the test's own timeout ends what never does."""
    while not holds():
        os.sched_yield()


def test_the_first_ctrl_c_lets_the_running_step_finish(commands: Commands) -> None:
    os.mkfifo(commands.folder / "gate")
    process = commands.start_run("held.yaml")
    with no_process_left(process):
        wait_until((commands.folder / "began").exists)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("finishing 1 step; Ctrl-C again stops it" in line for line in process.stderr)
        (commands.folder / "gate").write_text("done")
        done = ended(process)
    assert done.code == 130
    assert done.json["state"] == "interrupted"
    # What was submitted and has not begun begins with a resume, like what was not.
    assert done.json["steps"][0]["counts"] == {"done": 1, "not run": 1}


def test_the_second_ctrl_c_stops_the_running_step(commands: Commands) -> None:
    os.mkfifo(commands.folder / "gate")
    process = commands.start_run("held.yaml")
    with no_process_left(process):
        wait_until((commands.folder / "began").exists)
        assert process.stderr is not None
        for words in ("finishing 1 step", "stopping 1 step"):
            process.send_signal(signal.SIGTERM)
            assert any(words in line for line in process.stderr)
        done = ended(process)
    assert done.code == 130
    assert done.json["steps"][0]["counts"] == {"stopped": 1, "not run": 1}


WRONG_FILES = {
    "steps: []\n": "bad.yaml",
    "stepz: []\n": "stepz",
    "steps:\n  - id: a\n    command: [echo, '{steps.b.output}']\n": "b",
    "steps:\n  - id: a\n    foreach: none.jsonl\n    command: [echo]\n": "none.jsonl",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_file_is_one_line_exit_code_two_and_leaves_nothing(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    call = ["run", str(tmp_path / "bad.yaml"), "--data", str(tmp_path / "data")]
    for arguments in (call, [*call, "--dry-run"]):
        assert run_headgate(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert WRONG_FILES[text] in printed.err
        assert printed.err.count("\n") == 1
    assert not list(tmp_path.glob("data/runs/*"))


WRONG_CALLS: list[tuple[list[str], str]] = [
    ([], "FILE is missing; name a workflow, or a run to go on with by --resume (see"),
    (["nothing.yaml"], "FILE: cannot read nothing.yaml: No such file or directory"),
    (["--resume", "last", "--dry-run"], "--dry-run: is for a file; leave out --resume"),
    (["--resume", "nope"], "RUN: there is no run 'nope'"),
    (["f.yaml", "--token", "t"], "--token: is for a service; name one with --server"),
    (["f.yaml", "--project", "p"], "--project: is for a service; name one with --server"),
    (
        ["f.yaml", "--server", "http://127.0.0.1:1", "--budget-tracker", "redis"],
        "--budget-tracker: the service keeps the ledger; leave it out",
    ),
    (
        ["f.yaml", "--server", "http://127.0.0.1:1", "--config", "c.toml"],
        "--config: the service has its own settings; leave it out",
    ),
    (["f.yaml", "--budget-usd", "lots"], "--budget-usd: 'lots' is not an amount"),
    (["f.yaml", "--budget-usd", "0.0000001"], "--budget-usd: is finer than a micro-dollar"),
    (["f.yaml", "--budget-session-limit", "-1"], "--budget-session-limit: must not be negative"),
    (["f.yaml", "--budget-session-limit", "1"], "--budget-session-limit: there is no session"),
    (["f.yaml", "--budget-session-id", "a/b"], "--budget-session-id: 'a/b' is no name of a scope"),
    (["f.yaml", "--budget-tracker", "redis"], "--budget-tracker: redis needs --budget-redis-url"),
    (["f.yaml", "--concurrency", "0"], "0 is not in the range"),
    (["f.yaml", "--server", "http://127.0.0.1:1"], "a service runs only what its configuration"),
]


@pytest.mark.parametrize(("arguments", "line"), WRONG_CALLS, ids=[line for _, line in WRONG_CALLS])
def test_a_wrong_option_is_named_and_nothing_is_run(
    arguments: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADGATE_BUDGET_URL", raising=False)
    (tmp_path / "f.yaml").write_text(CASES)
    assert run_headgate(["run", *arguments, "--data", "data"]) == 2
    assert line in capsys.readouterr().err
    assert not list(tmp_path.glob("data/runs/*"))


def test_a_limit_that_differs_names_both_and_leaves_no_run(commands: Commands) -> None:
    session = ("--budget-session-id", "a", "--budget-session-limit")
    assert commands.run("cases.yaml", "--budget-usd", "1", *session, "5").code == 0
    refused = commands.run("cases.yaml", "--budget-usd", "1", *session, "6")
    assert refused.code == 2
    assert refused.stdout == ""
    assert "session:a: the limit is $5.00, and " in refused.stderr
    assert "says $6.00" in refused.stderr
    assert len(commands.ids()) == 1


@pytest.mark.parametrize(
    ("ending", "shown"),
    [
        (">&-; echo $?", ["6"]),
        ("2>&- | tail -n 3 | head -n 1; echo ${PIPESTATUS[0]}", ["cases ran out of budget", "6"]),
        ('2>&1 | (head -c 1 >/dev/null); echo "${PIPESTATUS[0]}"', ["6"]),
    ],
)
def test_closed_outputs_and_readers_that_go_do_not_change_the_end(
    ending: str, shown: list[str], commands: Commands
) -> None:
    call = f"{sys.executable} -m headgate run cases.yaml --data data {ending}"
    done = subprocess.run(
        ["bash", "-c", call],
        cwd=commands.folder,
        env={**os.environ, "XDG_DATA_HOME": str(commands.folder / "share")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == shown
    assert "Traceback" not in done.stderr


def test_a_terminal_has_a_display_that_is_gone_at_the_end(commands: Commands) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "headgate", "run", "cases.yaml", "--data", "data"],
        cwd=commands.folder,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "60", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    shown = b""
    while part := _read(ours):
        shown += part
    os.close(ours)
    done = ended(process)
    assert done.code == 6
    text = shown.decode()
    assert re.search(r"[━─]{10,}\S*  \d of 6", text)
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "\x1b[3" not in text
    assert "ran out of budget" in done.stdout


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:
        # The other side is closed.
        return b""


HELD_COST = "reserved $0.07, the cost_usd of the step"
STOP = "session:s would stop it at case[2], after case[1]: $0.07 needed, $0.01 left"


def test_a_dry_run_says_where_the_budget_would_end_it_and_founds_nothing(
    commands: Commands, here: Here
) -> None:
    call = ("run", "cases.yaml", "--dry-run", "--budget-session-id", "s")
    told = here.call(*call, "--budget-session-limit", "0.15")
    assert told.code == 6, told.stderr
    assert told.stdout.splitlines() == [
        "Dry run of cases: 6 runs of steps, 1 at once",
        "  step       runs           each   together  cumulated  why",
        f"  case[0…1]  2              $0.07  $0.14     $0.14      {HELD_COST}",
        "  case[2…4]  3     not run                              no budget has room for it",
        "  report     1     not run                              'case' was not run",
        "session:s: $0.00 spent of $0.15",
        "workflow:cases: $0.00 spent of $0.25",
        f"{STOP}; 4 runs of steps would not run",
        "estimated: $0.14; all of it would need $0.35; nothing was run",
    ]
    assert not commands.data.exists()
    as_json = here.call(*call, "--budget-session-limit", "0.15", "--json").json
    assert as_json["stop"]["at"] == "case[2]"
    assert as_json["counts"] == {"runs": 2, "fails": 0, "skipped": 0, "not run": 4}


ON_A_SERVICE = """
config: {budget_usd: 1}
steps:
  - id: hello
    foreach: [a, b]
    target: echo
    action: hello
    params: {name: "{item}"}
    cost_usd: 0.07
"""


def test_a_service_that_is_gone_is_exit_code_three(commands: Commands) -> None:
    (commands.folder / "hello.yaml").write_text(ON_A_SERVICE)
    with running_service(commands.folder, "--data", str(commands.folder / "service")) as service:
        done = commands.run("hello.yaml", "--server", service.address)
        assert done.code == 0, done.stderr
        (hello,) = done.json["steps"]
        assert hello["counts"] == {"done": 2}
        known = (hello["micro_usd"], hello["assumed_micro_usd"], hello["tokens"])
        assert known == (140_000, 0, 0), "a cost that is known is not assumed, here as there"
        dry = commands.run("hello.yaml", "--server", service.address, "--dry-run")
        assert dry.json["accounts"][-1]["limit_micro_usd"] == 1_000_000
    gone = commands.run("hello.yaml", "--server", service.address)
    assert gone.code == 3
    assert "no service answers at" in gone.stderr
    assert len(commands.ids()) == 1


def test_what_a_step_gave_is_printed_as_it_is(commands: Commands, here: Here) -> None:
    assert commands.run("cases.yaml").code == 6
    texts = here.call("runs", "output", "last", "case")
    assert texts.stdout.splitlines() == [f"{one} is a colour" for one in ("red", "green", "blue")]
    lines = here.call("runs", "output", "last", "case", "--json").stdout.splitlines()
    assert json.loads(lines[1]) == {"index": 1, "output": "green is a colour"}
    nothing = here.call("runs", "output", "last", "report")
    assert (nothing.code, nothing.stderr) == (1, "headgate: no run of report is done\n")
    unknown = here.call("runs", "output", "last", "nope")
    assert unknown.code == 2
    assert "has no step 'nope'; name one of case, report" in unknown.stderr


def test_the_tab_key_offers_runs_by_their_beginning(tmp_path: Path) -> None:
    for name in ("20270115-080000-aa", "20270116-080000-bb", ".unfinished-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    with click.Context(run_command) as context:
        context.params["data"] = tmp_path
        resume = next(one for one in run_command.params if one.name == "resume")
        offered = [item.value for item in resume.shell_complete(context, "2027")]
        assert offered == ["20270116-080000-bb", "20270115-080000-aa"]
        assert [item.value for item in resume.shell_complete(context, "l")] == ["last"]
        context.params["data"] = tmp_path / "nothing"
        assert [item.value for item in resume.shell_complete(context, "2")] == []
