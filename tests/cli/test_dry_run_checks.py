"""A dry run looks for all that a run looks for before it begins, and says it in the same words."""

from __future__ import annotations

from pathlib import Path

import pytest

from headgate.cli.main import run as run_headgate
from run_commands import Commands
from service.support import running_service

MISSING: list[tuple[tuple[str, ...], str]] = [
    (("command: [no-such-program]",), "command not found: no-such-program"),
    (("command: ['true', '{env.NO_SUCH_NAME}']",), "NO_SUCH_NAME is not set"),
    (("http: {url: 'http://127.0.0.1/{env.NO_SUCH_NAME}'}",), "NO_SUCH_NAME is not set"),
    (("call: no_such_module:f",), "no_such_module cannot be imported"),
    (("call: json:no_such",), "json has no function no_such"),
    (("target: nowhere", "action: go"), "unknown target 'nowhere'"),
]


@pytest.mark.parametrize(("keys", "problem"), MISSING)
def test_what_would_stop_a_run_before_it_begins_stops_a_dry_run(
    keys: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("\n    ".join(["steps:\n  - id: one", *keys]))
    assert run_headgate(["run", "a.yaml", "--dry-run", "--data", "data"]) == 2
    dry = capsys.readouterr()
    assert problem in dry.err
    assert dry.out == ""
    assert run_headgate(["run", "a.yaml", "--data", "data"]) == 2
    assert dry.err in capsys.readouterr().err


def test_a_key_that_is_not_set_stops_a_run_and_not_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Path("a.yaml").write_text("steps:\n  - {id: one, model: gpt-4o-mini, prompt: hi}\n")
    line = "steps[0].model: gpt-4o-mini goes to openai, which needs OPENAI_API_KEY; set it\n"
    assert run_headgate(["run", "a.yaml", "--dry-run", "--data", "data"]) == 0
    assert capsys.readouterr().err == f"headgate: warning: a.yaml:2: {line}"
    assert run_headgate(["run", "a.yaml", "--data", "data"]) == 2
    assert capsys.readouterr().err == f"headgate: a.yaml:2: {line}"


TYPO = """
steps:
  - id: case
    foreach: [{n: 1, expected: one}, {n: 2, expected: two}]
    command: ["echo", "{item.n}"]
  - id: judge
    foreach: {step: case}
    command: ["echo", "{item.expcted}"]
"""


def test_a_dry_run_that_finds_failures_says_so_at_its_end_and_by_its_code(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TYPO)
    found = Commands(tmp_path).call("run", "a.yaml", "--dry-run")
    assert found.code == 1
    assert "there is no 'expcted'; did you mean expected?" in found.stdout
    assert found.stdout.splitlines()[-1] == (
        "estimated: $0.00; 2 runs of steps would fail; nothing was run"
    )


def test_a_run_warns_of_failures_that_are_certain_before_it_spends(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TYPO)
    failed = Commands(tmp_path).run("a.yaml")
    missing = "{item.expcted} has nothing to be filled with: there is no 'expcted'"
    line = f"headgate: warning: 2 runs of judge will fail: {missing}; did you mean expected?"
    assert failed.stderr.splitlines()[0] == line


SEVERAL = """
config: {budgt_usd: 1, concurency: 2}
steps:
  - {id: one, comand: [echo]}
  - {id: two, command: [echo], retries: many, timout: 3}
  - {id: three, command: 7, weight: heavy, priority: low}
"""


def test_everything_that_is_wrong_with_a_file_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(SEVERAL)
    assert run_headgate(["run", "a.yaml", "--data", "data"]) == 2
    lines = capsys.readouterr().err.splitlines()
    said = [line.partition(" is not")[0].partition(" must be")[0] for line in lines]
    assert said == [
        "headgate: a.yaml:2: config.budgt_usd:",
        "headgate: a.yaml:2: config.concurency:",
        "headgate: a.yaml:4: steps[0].comand:",
        "headgate: a.yaml:5: steps[1].timout:",
        "headgate: a.yaml:5: steps[1].retries:",
        "headgate: a.yaml:6: steps[2].command:",
        "headgate: a.yaml:6: steps[2].priority:",
        "headgate: a.yaml:6: steps[2].weight:",
    ]


def test_names_of_steps_that_are_wrong_are_all_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = [f"  - {{id: s{n}, command: [echo], depends_on: [nope]}}" for n in range(3)]
    Path("a.yaml").write_text("\n".join(["steps:", *steps]))
    assert run_headgate(["run", "a.yaml", "--data", "data"]) == 2
    assert capsys.readouterr().err.count("there is no step 'nope'") == 3


def test_a_module_that_prints_while_it_is_imported_leaves_the_json_alone(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    (tmp_path / "noisy.py").write_text("print('hello')\n\n\ndef work() -> None: ...\n")
    (tmp_path / "a.yaml").write_text("steps:\n  - {id: one, call: 'noisy:work'}\n")
    dry = commands.run("a.yaml", "--dry-run")
    assert (dry.code, dry.json["total"], dry.stderr) == (0, 1, "hello\n")
    assert commands.ids() == []


def test_a_target_that_a_service_does_not_have_stops_a_dry_run(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    (tmp_path / "a.yaml").write_text("steps:\n  - {id: one, target: nowhere, action: go}\n")
    with running_service(tmp_path, "--data", str(tmp_path / "service")) as service:
        dry = commands.run("a.yaml", "--server", service.address, "--dry-run")
    assert (dry.code, dry.stdout) == (2, "")
    assert "unknown target 'nowhere'; a service runs only" in dry.stderr
