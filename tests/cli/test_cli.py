"""The command line as a person meets it: output, bad input, exit codes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headgate import Project, Task
from headgate.cli import main as cli_main
from headgate.cli.main import run
from snapshots import idle, snapshot, tasks


@pytest.fixture
def snapshot_file(tmp_path: Path) -> Path:
    state = snapshot(
        projects=[Project(id="p", max_concurrent_agents=1)],
        tasks=tasks("p", 2),
        agents=idle("a", "b"),
    )
    path = tmp_path / "snapshot.json"
    path.write_bytes(msgspec.json.encode(state))
    return path


def test_decide_prints_the_plan_and_the_reasons(
    snapshot_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["decide", str(snapshot_file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Plan: 1 task for 1 of 2 agents",
        "  agent  task     project",
        "  a      p-00000  p",
        "",
        "Waiting: 1 task",
        "  task     reason",
        "  p-00001  project p has 1 of 1 tasks in flight",
    ]


def test_decide_writes_json(snapshot_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["decide", str(snapshot_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "actions": [{"agent_id": "a", "task_id": "p-00000", "project_id": "p"}],
        "waiting": {
            "p-00001": [
                {
                    "reason": "project_concurrency",
                    "project_id": "p",
                    "active": 1,
                    "limit": 1,
                    "message": "project p has 1 of 1 tasks in flight",
                }
            ]
        },
    }


def test_decide_shortens_a_long_list_and_counts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.json"
    path.write_bytes(msgspec.json.encode(snapshot(tasks=tasks("gone", 60), agents=idle("a"))))
    assert run(["decide", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  and 10 more; --json lists them all" in lines
    assert "  60     project gone does not exist" in lines


def valid() -> dict[str, object]:
    return {
        "projects": [{"id": "p"}],
        "tasks": [{"id": "t", "project_id": "p"}],
        "agents": [{"id": "a"}],
        "project_token_usage": {},
        "project_active_agent_counts": {},
        "tasks_completed_in_window": {},
    }


def test_a_minimal_file_needs_only_the_fields_without_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(valid()))
    assert run(["decide", str(path)]) == 0
    assert "a      t     p" in capsys.readouterr().out


BAD: list[tuple[bytes, str]] = [
    (b"", "snapshot: is not JSON"),
    (b"not json", "snapshot: is not JSON"),
    (b"\xff\xfe", "snapshot: is not JSON"),
    (b"[]", "snapshot: must be a JSON object"),
    (b"[" * 100_000, "snapshot: is nested too deeply"),
    (b"{}", "snapshot: Object missing required field `projects`"),
    (json.dumps(valid() | {"taks": []}).encode(), "taks: is not a field of a snapshot"),
    (json.dumps(valid() | {"tasks": [{"id": 7}]}).encode(), "tasks[0].id: Expected `str`"),
    (json.dumps(valid() | {"tasks": [{"id": ""}]}).encode(), "tasks[0].id: is empty"),
    (
        json.dumps(valid() | {"tasks": [{"id": "t"}, {"id": "t"}]}).encode(),
        "tasks[1].id: 't' is there twice",
    ),
    (
        json.dumps(valid() | {"projects": [{"id": "p", "credit_wieght": 2}]}).encode(),
        "projects[0]: Object contains unknown field `credit_wieght`",
    ),
    (
        json.dumps(valid() | {"tasks": [{"id": "t", "status": "lost"}]}).encode(),
        "tasks[0].status: Invalid enum value 'lost'",
    ),
    (
        json.dumps(valid() | {"project_token_usage": {"p": "many"}}).encode(),
        "project_token_usage[...]: Expected `int`",
    ),
]


@pytest.mark.parametrize(("content", "line"), BAD, ids=[line for _, line in BAD])
def test_a_malformed_snapshot_is_one_line_and_exit_code_two(
    content: bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert run(["decide", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"headgate: {line}")
    assert printed.err.count("\n") == 1


def test_control_characters_in_an_id_are_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostile.json"
    state = snapshot(tasks=[Task(id="t\n\x1b[31mred")])
    path.write_bytes(msgspec.json.encode(state))
    assert run(["decide", str(path)]) == 0
    assert r"t\n\x1b[31mred" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        assert run(["decide", str(path)]) == 2
        printed = capsys.readouterr().err
        assert f"cannot read {path}" in printed
        assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["decide"], "SNAPSHOT.json is missing (see headgate decide --help)"),
        (["webhooks", "redeliver"], "ID is missing (see headgate webhooks redeliver --help)"),
        (["worker"], "--agent is missing (see headgate worker --help)"),
        (
            ["completion"],
            "SHELL is missing; give one of bash, zsh, fish (see headgate completion --help)",
        ),
        (["nonsense"], "there is no command nonsense (see headgate --help)"),
        (["tasts"], "there is no command tasts; did you mean tasks? (see headgate --help)"),
        (
            ["resume"],
            (
                "there is no command resume; say what to resume: headgate service resume, or "
                "headgate project|agent|target|slot resume NAME (see headgate --help)"
            ),
        ),
        (
            ["pause", "evals"],
            (
                "there is no command pause; say what to pause: headgate service pause, or "
                "headgate project|agent|target|slot pause NAME (see headgate --help)"
            ),
        ),
        (
            ["drain"],
            (
                "there is no command drain; say what to drain: headgate "
                "project|agent|target|slot drain NAME (see headgate --help)"
            ),
        ),
        (
            ["list"],
            (
                "there is no command list; say what to list: headgate "
                "project|agent|target|slot|model|budget|token list (see headgate --help)"
            ),
        ),
        (
            ["warm"],
            (
                "there is no command warm; say what to warm: headgate slot warm NAME "
                "(see headgate --help)"
            ),
        ),
        (
            ["model", "pause", "gpt-5"],
            (
                "there is no command pause; the commands of headgate model are list, show. A "
                "model itself cannot be paused: headgate slot pause is for a key, and headgate "
                "project pause for a project (see headgate model --help)"
            ),
        ),
        (
            ["model", "set", "fast"],
            (
                "there is no command set; the commands of headgate model are list, show. "
                "[models] in the settings file sets the route of a name; then run headgate "
                "reload (see headgate model --help)"
            ),
        ),
        (
            ["usage", "drain"],
            "got unexpected extra argument (drain) (see headgate usage --help)",
        ),
        (
            ["service", "forget"],
            (
                "there is no command forget; the commands of headgate service are pause, resume "
                "(see headgate service --help)"
            ),
        ),
        (
            ["runs", "sho"],
            "there is no command sho; did you mean show? (see headgate runs --help)",
        ),
        (
            ["up", "--prot", "1"],
            "there is no option --prot; did you mean --port? (see headgate up --help)",
        ),
        (["up", "--port", "x"], "--port: 'x' is not a valid integer (see headgate up --help)"),
        (["up", "--port"], "option '--port' requires an argument"),
        (["audit", "a\nb"], "got unexpected extra argument (a\\nb) (see headgate audit --help)"),
        (
            ["cancel", "--older", "x"],
            "--older: 'x' is not a time such as 30s, 10m, 2h or 1d (see headgate cancel --help)",
        ),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_two(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err == f"headgate: {line}\n"


def test_a_fault_of_our_own_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(cli_main.cli, "main", broken)
    monkeypatch.delenv("HEADGATE_DEBUG", raising=False)
    assert run(["simulate"]) == 70
    printed = capsys.readouterr().err
    assert "internal error" in printed
    assert "ZeroDivisionError: oops" in printed
    assert "Traceback" not in printed


def test_a_simulation_shows_targets_beside_shares(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--seconds", "20", "--json"]) == 0
    lines = {line["project"]: line for line in json.loads(capsys.readouterr().out)["projects"]}
    assert set(lines) == {"research", "noisy", "evals"}
    for name in ("research", "noisy"):
        assert lines[name]["actual_share"] == pytest.approx(lines[name]["target_share"], abs=0.03)
    assert lines["evals"]["actual_share"] == 0.0
    assert lines["evals"]["reason"].startswith("project evals has used 30")


def test_a_simulation_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("5", "5", "6"):
        assert run(["simulate", "--seconds", "2", "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_reader_that_goes_away_is_not_an_error(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    waiting = [Task(id=f"t{number}") for number in range(20_000)]
    path.write_bytes(msgspec.json.encode(snapshot(tasks=waiting)))
    command = f"{sys.executable} -m headgate decide {path} --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("call", [["--help"], ["config", "example"]])
def test_a_reader_that_has_gone_makes_no_call_fail(call: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "headgate", *call]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_standard_input_is_read_for_a_dash(snapshot_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headgate", "decide", "-"],
        input=snapshot_file.read_bytes(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert b"Plan: 1 task for 1 of 2 agents" in done.stdout


LARGE_BLOCK = """
import ctypes
from headgate.cli.main import tune_interpreter

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
larger = bytes(20 << 20)
del larger
tune_interpreter()
before = libc.mallinfo2().hblks
block = bytes(1 << 20)
print(libc.mallinfo2().hblks - before)
"""
"""Prints how many blocks of the system's own a large one takes, after a larger one was freed."""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc 2.33 and newer tells"
)
def test_a_large_block_is_not_taken_from_the_heap_after_a_larger_one_was_freed() -> None:
    command = [sys.executable, "-c", LARGE_BLOCK]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "1\n"
