"""What the steps of a run gave, for those who look at it afterwards or while it goes on.

Rule: some results at a time are in memory, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headgate.errors import InvalidSettingError
from headgate.runs.backend import StepTask, TaskState
from headgate.runs.kept.folder import Run, open_run
from headgate.runs.outputs import output_of
from headgate.runs.viewing.tasks import RecordedTasks, recorded_tasks
from headgate.workflow.expansion import Expansion
from headgate.workflow.workflow import Step

AT_ONCE = 64
_NAMED_STEPS = 10


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a step gave; `index` is the number of its item, None for a step without."""

    index: int | None
    output: Any


def step_outputs(data: Path, name: str, step_id: str) -> Iterator[StepOutput]:
    """Give the outputs of a step's runs that are done, in the order of their items.

    On a service only what later steps need is kept here; what is not is null.
    """
    run = open_run(data, name)
    step = _step(run, step_id)
    numbers = Expansion(run.workflow, run.items).runs_of(step.id)
    with recorded_tasks(run.path, run.id) as recorded:
        done = _done(recorded, numbers)
        for start in range(0, len(done), AT_ONCE):
            some = done[start : start + AT_ONCE]
            for task, result in zip(some, recorded.results(some), strict=True):
                index = task.number - numbers.start if step.foreach else None
                yield StepOutput(index=index, output=output_of(step.work, result))


def _step(run: Run, step_id: str) -> Step:
    for step in run.workflow.steps:
        if step.id == step_id:
            return step
    names = ", ".join(step.id for step in run.workflow.steps[:_NAMED_STEPS])
    problem = f"run {run.id} has no step {step_id[:64]!r}; name one of {names}"
    raise InvalidSettingError("STEP", problem)


def _done(recorded: RecordedTasks, numbers: range) -> list[StepTask]:
    found = {
        task.number: task
        for task in recorded.tasks()
        if task.number in numbers and task.state is TaskState.DONE
    }
    return [task for _, task in sorted(found.items())]
