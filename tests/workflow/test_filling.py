"""What a text sees of other steps, and how much of it is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.workflow import step_requests
from headgate.workflow.backend import StepTask, TaskState
from headgate.workflow.expansion import Expansion
from headgate.workflow.placeholders import parsed_template
from headgate.workflow.progress import StepRunState, WorkflowProgress
from headgate.workflow.report import RunTotals
from headgate.workflow.step_requests import Filler, fields_read
from headgate.workflow.workflow import CallWork, ListItems, Step
from workflow.fake_backend import a_run, a_step, a_workflow

READER = ["{steps.a.output}", "{steps.a.error}", "{steps.many.outputs}", "{steps.many.results}"]


class Results:
    """Gives results that are as large as wanted, and counts the questions."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.asked: list[int] = []

    async def __call__(self, tasks: Sequence[StepTask]) -> list[Any]:
        self.asked += [task.number for task in tasks]
        return [self.result for _ in tasks]


class Stage:
    """A step, one with three items, and one that reads both."""

    def __init__(self, folder: Path, result: Any = "out") -> None:
        work = CallWork(entry_point="a:b", given=parsed_template(READER))
        steps: tuple[Step, ...] = (
            a_step("a"),
            a_step("many", foreach=ListItems(values=(1, 2, 3))),
            a_step("reader", work=work, depends_on=("a", "many")),
        )
        run = a_run(folder, a_workflow(*steps))
        expansion = Expansion(run.workflow, run.items)
        self.progress = WorkflowProgress(
            run.workflow, {step.id: expansion.runs_of(step.id) for step in steps}
        )
        self.tally = RunTotals(run.workflow, self.progress, fields_read(run.workflow))
        self.results = Results(result)
        self.filler = Filler(run, self.progress, self.tally, self.results)
        self.progress.start()

    def end(self, number: int, run_state: StepRunState, *, micro_usd: int = 0) -> None:
        state = TaskState.DONE if run_state is StepRunState.DONE else TaskState.FAILED
        task = StepTask(number=number, generation=0, task_id=f"t{number}", state=state,
                        micro_usd=micro_usd)  # fmt: skip
        self.tally.add(task)
        if run_state is StepRunState.FAILED:
            self.tally.fail(number, f"error {number}")
        self.progress.end(number, run_state)

    def fields(self, step: str, *names: str) -> list[Any]:
        values = asyncio.run(self.filler.fetch([4]))
        view = self.filler.view(4, values)
        return [view.field(step, name) for name in names]


ONE = ("status", "output", "error", "cost_usd")


def test_the_fields_of_a_step_that_is_done(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.end(0, StepRunState.DONE, micro_usd=70_000)
    assert stage.fields("a", *ONE) == ["done", "out", None, 0.07]


def test_the_fields_of_a_step_that_failed(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.end(0, StepRunState.FAILED, micro_usd=10)
    assert stage.fields("a", *ONE) == ["failed", None, "error 0", 0.000_01]


@pytest.mark.parametrize(
    ("run_state", "word"),
    [
        (StepRunState.CONDITION_FALSE, "skipped"),
        (StepRunState.SKIPPED, "skipped"),
        (StepRunState.OVER_BUDGET, "not run"),
    ],
)
def test_the_status_of_a_step_without_a_task(
    tmp_path: Path, run_state: StepRunState, word: str
) -> None:
    stage = Stage(tmp_path)
    stage.progress.end(0, run_state)
    assert stage.fields("a", *ONE) == [word, None, None, 0.0]


def test_the_fields_of_a_step_with_items(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.end(1, StepRunState.DONE, micro_usd=10_000)
    stage.end(2, StepRunState.FAILED, micro_usd=20_000)
    stage.progress.end(3, StepRunState.CONDITION_FALSE)
    names = ("status", "outputs", "done", "failed", "skipped", "cost_usd")
    assert stage.fields("many", *names) == ["failed", ["out", None, None], 1, 1, 1, 0.03]


def test_a_result_is_fetched_once_while_there_is_room(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    for number in range(4):
        stage.end(number, StepRunState.DONE)
    stage.fields("a", "output")
    asked = list(stage.results.asked)
    assert sorted(asked) == [0, 1, 1, 2, 2, 3, 3]
    stage.fields("a", "output")
    assert stage.results.asked == asked


def test_what_is_kept_of_results_is_bounded_and_what_is_needed_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_requests, "MAX_CACHE_BYTES", 1_000)
    stage = Stage(tmp_path, result="x" * 400)
    for number in range(4):
        stage.end(number, StepRunState.DONE)
    for _ in range(3):
        assert stage.fields("many", "outputs", "results") == [["x" * 400] * 3] * 2
    assert stage.filler._cache._bytes <= 1_000
