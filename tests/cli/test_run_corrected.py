"""`headgate run FILE --resume RUN`: a run goes on with a corrected file, and pays nothing twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headgate.errors import StoreError
from headgate.workflow.run_folder import RECORD, open_run
from run_commands import Commands, Ended, no_process_left
from service.support import running_service

FILE = """
config: {concurrency: 2}
steps:
  - id: case
    foreach: cases.jsonl
    command: ["sh", "-c", "echo {item.n} | tee -a ran"]
    cost_usd: 0.07
  - id: judge
    foreach: {step: case}
    command: ["echo", "{steps.case.output} {item.expcted}"]
    cost_usd: 0.01
"""
CASES = "".join(f'{{"n": {n}, "expected": "e{n}"}}\n' for n in range(3))
DEFINITIONS = """
steps:
  - id: first
    command: ["sh", "-c", "echo 1 >> ran; echo one"]
  - id: second
    command: ["sh", "-c", "echo 2 >> ran; echo two {steps.first.output}"]
  - id: third
    command: ["false"]
    depends_on: [second]
"""


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    (tmp_path / "cases.jsonl").write_text(CASES)
    (tmp_path / "eval.yaml").write_text(FILE)
    (tmp_path / "chain.yaml").write_text(DEFINITIONS)
    return Commands(tmp_path)


def correct(commands: Commands, file: str, before: str, after: str) -> None:
    path = commands.folder / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def ran(commands: Commands) -> list[str]:
    return (commands.folder / "ran").read_text().split()


def counts(done: Ended) -> dict[str, dict[str, int]]:
    return {step["step"]: step["counts"] for step in done.json["steps"]}


def test_a_corrected_file_goes_on_with_the_steps_that_are_not_done(commands: Commands) -> None:
    failed = commands.run("eval.yaml")
    assert (failed.code, len(ran(commands))) == (1, 3)
    correct(commands, "eval.yaml", "expcted", "expected")
    done = commands.run("eval.yaml", "--resume", "last")
    assert done.code == 0, done.stderr
    assert len(ran(commands)) == 3
    assert counts(done) == {"case": {"done": 3}, "judge": {"done": 3}}
    given = commands.call("runs", "output", "last", "judge", "--data", str(commands.data))
    assert given.stdout == "0 e0\n1 e1\n2 e2\n"


def test_a_resume_without_the_file_says_that_the_file_changed(commands: Commands) -> None:
    assert commands.run("eval.yaml").code == 1
    correct(commands, "eval.yaml", "expcted", "expected")
    again = commands.run("--resume", "last")
    assert again.code == 1
    name = commands.folder / "eval.yaml"
    command = f"headgate run {name} --resume {commands.ids()[0]} --data {commands.data}"
    assert f"headgate: {name} changed after this run began" in again.stderr
    assert f"to use the change: {command}\n" in again.stderr


def test_a_resume_says_that_items_changed_and_keeps_those_of_the_run(commands: Commands) -> None:
    assert commands.run("eval.yaml").code == 1
    correct(commands, "eval.yaml", "expcted", "expected")
    (commands.folder / "cases.jsonl").write_text('{"n": 7, "expected": "e7"}\n')
    done = commands.run("eval.yaml", "--resume", "last")
    assert (done.code, done.json["total"]) == (0, 6)
    name = commands.folder / "cases.jsonl"
    assert f"headgate: {name} changed after this run began" in done.stderr
    assert "it has another number of items now, so the run keeps those" in done.stderr


def test_a_corrected_item_is_used_by_what_is_not_done(commands: Commands) -> None:
    correct(commands, "eval.yaml", "expcted", "expected")
    correct(commands, "cases.jsonl", '"expected": "e1"', '"expcted": "e1"')
    assert commands.run("eval.yaml").code == 1
    correct(commands, "cases.jsonl", '"expcted": "e1"', '"expected": "new"')
    alone = commands.run("--resume", "last")
    command = f"headgate run {commands.folder / 'eval.yaml'} --resume {commands.ids()[0]}"
    assert f"{commands.folder / 'cases.jsonl'} changed after this run began" in alone.stderr
    assert f"to use the change: {command} --data {commands.data}\n" in alone.stderr
    refused = commands.run("eval.yaml", "--resume", "last")
    assert refused.code == 2
    assert "case (3 runs) and judge (2 runs) are done, and the change is in what" in refused.stderr
    done = commands.run("eval.yaml", "--resume", "last", "--changed", "keep")
    assert done.code == 0, done.stderr
    assert len(ran(commands)) == 3
    given = commands.call("runs", "output", "last", "judge", "--data", str(commands.data))
    assert given.stdout == "0 e0\n1 new\n2 e2\n"


def test_the_record_keeps_which_files_were_used(commands: Commands) -> None:
    assert commands.run("eval.yaml").code == 1
    (commands.folder / "fixed.yaml").write_text(FILE.replace("expcted", "expected"))
    assert commands.run("fixed.yaml", "--resume", "last").code == 0
    record = open_run(commands.data, "last").record
    assert Path(record.source).name == "eval.yaml"
    assert [Path(one.source).name for one in record.revisions] == ["fixed.yaml"]
    assert record.revisions[0].changed == ("judge",)
    folder = commands.data / "runs" / record.id
    assert "expcted" in (folder / "workflow.yaml").read_text()
    assert "expected" in (folder / record.files / "workflow.yaml").read_text()
    shown = commands.call("runs", "show", "last", "--data", str(commands.data), "--json").json
    assert Path(shown["source"]).name == "fixed.yaml"


def test_a_last_run_of_another_workflow_is_named_and_left_alone(commands: Commands) -> None:
    assert commands.run("eval.yaml").code == 1
    assert commands.run("chain.yaml").code == 1
    own, last = commands.ids()
    record = (commands.data / "runs" / last / RECORD).read_bytes()
    refused = commands.run("eval.yaml", "--resume", "last")
    assert refused.code == 2
    of_chain = f"the last run is of 'chain' ({commands.folder / 'chain.yaml'}), not 'eval'; "
    advice = f"headgate run eval.yaml --resume {own} --data {commands.data}"
    assert f"{of_chain}the last of 'eval': {advice}\n" in refused.stderr
    other = commands.folder / "elsewhere" / "eval.yaml"
    other.parent.mkdir()
    other.write_text(FILE)
    refused = commands.run(str(other), "--resume", "last")
    assert f"{of_chain}list the runs with: headgate runs --data {commands.data}\n" in refused.stderr
    assert (commands.data / "runs" / last / RECORD).read_bytes() == record


def test_a_finished_step_that_changed_is_named_and_nothing_runs(commands: Commands) -> None:
    assert commands.run("chain.yaml").code == 1
    record = (commands.data / "runs" / commands.ids()[0] / RECORD).read_bytes()
    correct(commands, "chain.yaml", "echo one", "echo ONE")
    correct(commands, "chain.yaml", '"false"', '"true"')
    refused = commands.run("chain.yaml", "--resume", "last")
    assert refused.code == 2
    named = "first (1 run) and second (1 run) are done, and the change is in what they do"
    assert named in refused.stderr
    assert "--changed keep" in refused.stderr
    assert "--changed rerun" in refused.stderr
    assert ran(commands) == ["1", "2"]
    assert (commands.data / "runs" / commands.ids()[0] / RECORD).read_bytes() == record


@pytest.mark.parametrize(
    ("choice", "again", "output"),
    [("keep", ["1", "2"], "two one\n"), ("rerun", ["1", "2", "1", "2"], "two ONE\n")],
)
def test_finished_steps_that_changed_are_kept_or_run_again_as_said(
    commands: Commands, choice: str, again: list[str], output: str
) -> None:
    assert commands.run("chain.yaml").code == 1
    correct(commands, "chain.yaml", "echo one", "echo ONE")
    correct(commands, "chain.yaml", '"false"', '"true"')
    done = commands.run("chain.yaml", "--resume", "last", "--changed", choice)
    assert done.code == 0, done.stderr
    assert ran(commands) == again
    given = commands.call("runs", "output", "last", "second", "--data", str(commands.data))
    assert given.stdout == output
    assert commands.run("--resume", "last").code == 0
    assert ran(commands) == again


def test_a_rerun_that_was_cut_short_goes_on_as_a_rerun(commands: Commands) -> None:
    assert commands.run("chain.yaml").code == 1
    correct(commands, "chain.yaml", "echo one", "exit 7; echo ONE")
    assert commands.run("chain.yaml", "--resume", "last", "--changed", "rerun").code == 1
    shown = commands.call("runs", "show", "last", "--data", str(commands.data), "--json").json
    assert [step["counts"] for step in shown["steps"]] == [
        {"failed": 1},
        {"skipped": 1},
        {"skipped": 1},
    ]
    correct(commands, "chain.yaml", "exit 7; ", "")
    correct(commands, "chain.yaml", '"false"', '"true"')
    # What the first file gave was set aside for good, so nothing has to be asked again.
    done = commands.run("chain.yaml", "--resume", "last", "--changed", "keep")
    assert done.code == 0, done.stderr
    given = commands.call("runs", "output", "last", "second", "--data", str(commands.data))
    assert given.stdout == "two ONE\n"


def test_new_steps_go_to_the_end_of_the_file(commands: Commands) -> None:
    assert commands.run("chain.yaml").code == 1
    correct(commands, "chain.yaml", '"false"', '"true"')
    new = "  - id: last\n    command: [echo, '{steps.second.output} more']\n"
    before = (commands.folder / "chain.yaml").read_text()
    (commands.folder / "chain.yaml").write_text(before + new)
    done = commands.run("chain.yaml", "--resume", "last")
    assert (done.code, done.json["total"]) == (0, 4), done.stderr
    assert ran(commands) == ["1", "2"]
    (commands.folder / "chain.yaml").write_text(before.replace("steps:\n", f"steps:\n{new}"))
    refused = commands.run("chain.yaml", "--resume", "last")
    assert refused.code == 2
    assert "new steps go to the end" in refused.stderr


WRONG = [
    ("  - id: second", "  - id: renamed", "the run has results of second"),
    (
        "steps:\n",
        "config:\n  budget_scopes:\n    - {name: team, key: a}\nsteps:\n",
        "budget_scopes",
    ),
]


@pytest.mark.parametrize(("before", "after", "said"), WRONG)
def test_what_a_run_cannot_take_over_is_refused_in_one_line(
    commands: Commands, before: str, after: str, said: str
) -> None:
    assert commands.run("chain.yaml").code == 1
    correct(commands, "chain.yaml", before, after)
    correct(commands, "chain.yaml", "{steps.first.output}", "")
    correct(commands, "chain.yaml", "[second]", "[first]")
    refused = commands.run("chain.yaml", "--resume", "last", "--changed", "rerun")
    assert (refused.code, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert said in refused.stderr


def test_a_file_that_names_a_model_without_a_price_is_never_taken(commands: Commands) -> None:
    correct(commands, "chain.yaml", "steps:\n", "config: {budget_usd: 1}\nsteps:\n")
    assert commands.run("chain.yaml").code == 1
    record = (commands.data / "runs" / commands.ids()[0] / RECORD).read_bytes()
    correct(commands, "chain.yaml", 'command: ["false"]', "model: nobody/knows-it\n    prompt: hi")
    for _ in range(2):
        refused = commands.run("chain.yaml", "--resume", "last")
        assert (refused.code, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert "steps[2].model" in refused.stderr
    assert (commands.data / "runs" / commands.ids()[0] / RECORD).read_bytes() == record
    assert not list((commands.data / "runs" / commands.ids()[0]).glob("revision-*"))
    # Without the file the run goes on by the one before.
    again = commands.run("--resume", "last")
    assert (again.code, ran(commands)) == (1, ["1", "2"])
    assert "knows-it" not in again.stdout


def test_a_higher_budget_in_the_file_counts(commands: Commands) -> None:
    text = FILE.replace("expcted", "expected")
    (commands.folder / "eval.yaml").write_text(text.replace("concurrency: 2", "budget_usd: 0.15"))
    stopped = commands.run("eval.yaml")
    assert stopped.code != 0
    assert stopped.json["state"] == "exhausted"
    correct(commands, "eval.yaml", "budget_usd: 0.15", "budget_usd: 1")
    done = commands.run("eval.yaml", "--resume", "last")
    assert done.code == 0, done.stderr
    assert done.json["money"][-1]["limit_micro_usd"] == 1_000_000


def test_queued_work_of_the_old_file_never_starts(commands: Commands) -> None:
    text = """
config: {concurrency: 1}
steps:
  - id: case
    foreach: [a, b, c, d]
    command: ["sh", "-c", "echo old-{item} >> ran; touch began; sleep 60"]
    cost_usd: 0.07
"""
    (commands.folder / "slow.yaml").write_text(text)
    process = commands.start_run("slow.yaml")
    with no_process_left(process):
        while not (commands.folder / "began").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.communicate()
    correct(commands, "slow.yaml", "old-{item} >> ran; touch began; sleep 60", "new-{item} >> ran")
    done = commands.run("slow.yaml", "--resume", "last")
    assert done.code == 0, done.stderr
    assert sorted(ran(commands)) == ["new-a", "new-b", "new-c", "new-d", "old-a"]
    assert "1 step was cut off and begins anew; $0.07 is booked as assumed\n" in done.stderr
    assert "lost node" not in done.stderr
    assert "service was killed" not in done.stderr


def test_changed_is_for_a_resume_with_a_file(commands: Commands) -> None:
    for call in (("eval.yaml", "--changed", "keep"), ("--resume", "last", "--changed", "keep")):
        refused = commands.run(*call)
        assert refused.code == 2
        assert refused.stderr.startswith("headgate: --changed: ")


def test_the_end_says_to_correct_the_file_where_a_resume_alone_cannot_help(
    commands: Commands,
) -> None:
    failed = commands.call("run", "eval.yaml", "--data", str(commands.data))
    name, run = commands.folder / "eval.yaml", commands.ids()[0]
    command = f"headgate run {name} --resume {run} --data {commands.data}"
    assert f"to go on: correct {name}, then {command}\n" in failed.stdout
    assert "to go on: headgate run --resume" not in failed.stdout
    failed = commands.call("run", "chain.yaml", "--data", str(commands.data))
    assert "to try the failed steps again: headgate run --resume" in failed.stdout
    assert "after a correction: headgate run" in failed.stdout


def test_a_revision_that_was_damaged_is_refused(commands: Commands) -> None:
    assert commands.run("eval.yaml").code == 1
    correct(commands, "eval.yaml", "expcted", "expected")
    assert commands.run("eval.yaml", "--resume", "last").code == 0
    run = open_run(commands.data, "last")
    (run.path / run.record.files / "workflow.yaml").write_text("steps: []\n")
    with pytest.raises(StoreError, match="was changed since"):
        open_run(commands.data, "last")


def test_a_run_on_a_service_takes_a_corrected_file(commands: Commands) -> None:
    (commands.folder / "headgate.toml").write_text(
        '[targets.echo]\nkind = "callable"\nentry_point = "headgate.executors.callable:echo"\n'
    )
    text = """
steps:
  - {id: case, foreach: [{n: 1}, {n: 2}], target: echo, action: hello, params: {n: "{item.n}"}}
  - {id: judge, foreach: {step: case}, target: echo, action: hello, params: {n: "{item.m}"}}
"""
    (commands.folder / "there.yaml").write_text(text)
    with running_service(commands.folder, "--data", str(commands.folder / "service")) as service:
        assert commands.run("there.yaml", "--server", service.address).code == 1
        correct(commands, "there.yaml", "{item.m}", "{item.n}")
        done = commands.run("there.yaml", "--resume", "last")
        assert done.code == 0, done.stderr
        assert counts(done) == {"case": {"done": 2}, "judge": {"done": 2}}
        correct(
            commands,
            "there.yaml",
            'hello, params: {n: "{item.n}"}}\n  - {id: judge',
            'again, params: {n: "{item.n}"}}\n  - {id: judge',
        )
        assert commands.run("there.yaml", "--resume", "last").code == 2
        again = commands.run("there.yaml", "--resume", "last", "--changed", "rerun")
        assert again.code == 0, again.stderr
        reads = '  - {id: all, target: echo, action: hello, params: {n: "{steps.case.outputs}"}}\n'
        (commands.folder / "there.yaml").write_text(
            (commands.folder / "there.yaml").read_text() + reads
        )
        refused = commands.run("there.yaml", "--resume", "last")
        assert refused.code == 2
        assert "the service kept no output of case" in refused.stderr
