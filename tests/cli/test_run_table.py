"""The end of a run on paper: the table, what failed, the ending, how to go on; and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli.run_reports import BEGAN_AT, SESSION_MONEY, done, failed, report, running, task_of
from headgate.cli.run_progress import (
    FAILURES_SHOWN,
    CorrectedFile,
    end_lines,
    end_text,
    print_end,
    print_json_end,
    print_rows,
    print_steps,
    resume_command,
    truncated_text,
)
from headgate.workflow.backend import TaskState
from headgate.workflow.report import RunState, StepRow, StepState

FOLDER = Path("data/runs/20270115-080000-3fa2")
RESUME = "headgate run --resume 20270115-080000-3fa2"
CORRECTED = CorrectedFile("eval.yaml", "headgate run eval.yaml --resume 20270115-080000-3fa2")


def test_the_end_has_a_table_the_budgets_the_ending_and_the_way_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = report(
        failed(3),
        state=RunState.EXHAUSTED,
        counts={"done": 12, "failed": 1, "skipped": 2, "not run": 985},
        money=SESSION_MONEY,
        ended_at=BEGAN_AT + 75,
        exhausted_by="session:eval-1: $49.98 of $50.00 is used, and $0.07 was asked for",
    )
    print_end(ended, FOLDER, resume=RESUME, corrected=CORRECTED)
    assert capsys.readouterr().out.splitlines() == [
        "Run 20270115-080000-3fa2 of eval",
        "  step  runs   done  failed  skipped  not run  duration  attempts  tokens  cost",
        "  case  1,000  12    1       2        985      61 s      1,000     1,200   $0.84",
        "case[3] failed after 2.0 s, $0.07: exit code 3: no such page",
        "session:eval-1: $32.40 spent, $1.20 reserved of $50.00",
        "team:a: $0.000005 spent, no limit",
        "workflow:eval: $0.84 spent, $0.07 reserved of $5.00",
        "session:eval-1: $49.98 of $50.00 is used, and $0.07 was asked for",
        "eval ran out of budget: 12 of 1,000 done, 1 failed, 2 skipped, 985 not run, $0.84, 75 s",
        f"to go on: {RESUME}",
        f"kept in {FOLDER}",
    ]


@pytest.mark.parametrize("width", [5, 20, 79])
def test_a_table_that_would_break_its_words_is_plain(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    ended = report(state=RunState.DONE, counts={"done": 1_000}, ended_at=BEGAN_AT + 1)
    print_end(ended, FOLDER, resume=RESUME, corrected=CORRECTED)
    printed = capsys.readouterr().out
    assert ("│" in printed) == (width == 79)
    assert "1,000" in printed
    assert "$70.00" in printed


def test_a_run_that_is_done_needs_no_way_on() -> None:
    ended = report(state=RunState.DONE, counts={"done": 5}, ended_at=BEGAN_AT + 1)
    lines = list(end_lines(ended, FOLDER, resume=RESUME, corrected=CORRECTED))
    assert lines == ["eval is done: 5 of 5 done, $0.35, 1.0 s", f"kept in {FOLDER}"]


def test_failures_are_bounded_and_the_rest_is_counted() -> None:
    rows = [failed(index) for index in range(FAILURES_SHOWN + 5)]
    ended = report(*rows, state=RunState.FAILED, counts={"failed": 400})
    lines = list(end_lines(ended, FOLDER, resume=RESUME, corrected=CORRECTED))
    assert sum(line.startswith("case[") for line in lines) == FAILURES_SHOWN
    assert lines[FAILURES_SHOWN] == (
        "and 380 more failed; headgate runs show 20270115-080000-3fa2 --all lists them"
    )


def test_what_a_step_wrote_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_end(
        report(failed(0, "\x1b[2Jgone\nsecond line"), state=RunState.FAILED, counts={"failed": 1}),
        FOLDER,
        resume=RESUME,
        corrected=CORRECTED,
    )
    assert r"\x1b[2Jgone second line" in capsys.readouterr().out


def test_json_is_one_document_with_the_exit_code_and_the_way_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = {"done": 1, "failed": 1}
    ended = report(failed(3), state=RunState.FAILED, counts=counts, ended_at=BEGAN_AT + 2.5)
    print_json_end(ended, FOLDER, exit_code=1, resume=RESUME)
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "failed"
    assert found["exit_code"] == 1
    assert found["resume"] == RESUME
    assert found["folder"] == str(FOLDER)
    assert found["steps"][0]["counts"] == {"done": 1, "failed": 1}
    assert found["rows"][0]["task"]["error"] == "exit code 3: no such page"
    assert found["began_at"] == found["rows"][0]["task"]["started_at"] == "2027-01-15T08:00:00Z"
    assert found["ended_at"] == "2027-01-15T08:00:02.500000Z"
    assert found["rows"][0]["task"]["completed_at"] == "2027-01-15T08:00:02Z"


def test_a_failure_that_was_booked_as_assumed_says_what_to_write_if_it_was_free() -> None:
    row = failed(3)
    assert row.task is not None
    assert "cost_usd" not in end_text(row, now=BEGAN_AT + 9)
    guessed = replace(row, task=replace(row.task, assumed_micro_usd=70_000))
    line = end_text(guessed, now=BEGAN_AT + 9)
    assert line.endswith("exit code 3: no such page; write cost_usd: 0 if it is free")
    asked = replace(row, task=replace(row.task, assumed_micro_usd=70_000, tokens=9))
    assert "cost_usd" not in end_text(asked, now=BEGAN_AT + 9)


def test_rows_say_state_time_cost_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    lost = StepRow(
        name="case[4]",
        step="case",
        index=4,
        state=StepState.DONE,
        task=task_of(
            4,
            TaskState.DONE,
            completed_at=BEGAN_AT + 9,
            attempt=2,
            micro_usd=140_000,
            assumed_micro_usd=70_000,
        ),
    )
    skipped = StepRow(
        name="judge", step="judge", index=None, state=StepState.SKIPPED, why="'case' failed"
    )
    killed = replace(running(6), state=StepState.STOPPED)
    print_rows("Runs", [done(0), failed(3), lost, running(5), killed, skipped], now=BEGAN_AT + 12)
    assert capsys.readouterr().out.splitlines() == [
        "Runs",
        "  step     state    duration  attempts  cost                   why",
        "  case[0]  done     0.3 s     1         $0.07",
        "  case[3]  failed   2.0 s     1         $0.07                  exit code 3: no such page",
        "  case[4]  done     9.0 s     2         $0.14 ($0.07 assumed)",
        "  case[5]  running  12 s      1",
        "  case[6]  stopped            1",
        "  judge    skipped                                             'case' failed",
    ]


def test_the_way_on_names_the_directory_where_it_is_not_the_usual_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    usual = tmp_path / "headgate"
    assert resume_command("r", usual) == "headgate run --resume r"
    assert resume_command("r", Path("my data")) == "headgate run --resume r --data 'my data'"


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ((0, 0), ""),
        ((1, 0), "warning: 1 answer was truncated at max_tokens; raise max_tokens of s0"),
        (
            (1_200, 3),
            "warning: 1,203 answers were truncated at max_tokens; raise max_tokens of s0, s1",
        ),
        (
            (1, 1, 1, 1, 1),
            (
                "warning: 5 answers were truncated at max_tokens; raise max_tokens of s0, s1, s2 "
                "and 2 more"
            ),
        ),
    ],
)
def test_truncated_answers_are_counted_with_what_to_raise(
    counts: tuple[int, ...], line: str
) -> None:
    whole = report(state=RunState.DONE)
    steps = [
        replace(whole.steps[0], step=f"s{number}", truncated=count)
        for number, count in enumerate(counts)
    ]
    assert truncated_text(replace(whole, steps=tuple(steps))) == line


def test_what_nobody_priced_is_marked_in_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(7, TaskState.DONE, completed_at=BEGAN_AT + 1, is_unpriced=True)
    row = StepRow(name="case[7]", step="case", index=7, state=StepState.DONE, task=task)
    whole = report(row, state=RunState.DONE)
    whole = replace(whole, steps=(replace(whole.steps[0], unpriced=3),))
    print_steps(whole)
    print_rows("Runs", [row], now=BEGAN_AT + 12)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("unpriced")
    assert lines[2].endswith(" 3")
    assert lines[-1].endswith(" unpriced")
