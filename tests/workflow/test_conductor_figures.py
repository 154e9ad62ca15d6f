"""What a run of a step costs the conductor itself, in memory and in time."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.workflow.backend import Money, StepOrder, StepTask, TaskListener, TaskState
from headgate.workflow.conductor import Conductor
from headgate.workflow.placeholders import parsed_template
from headgate.workflow.report import RunState
from headgate.workflow.workflow import CallWork, ListItems, StepItems, Workflow
from workflow.fake_backend import a_run, a_step, a_workflow

RUNS = 10_000
MOST_BYTES = 1_000
MOST_SECONDS = 250e-6
"""Six times what it takes on a machine that is not busy; `make bench` has the figure itself."""


class InstantBackend:
    """Says of everything at once that it is done, and keeps nothing."""

    trouble = ""
    unbooked_micro_usd = 0

    def check(self) -> None:
        """Have nothing to complain of."""

    def listen(self, listener: TaskListener) -> None:
        self._told = listener

    async def open(self) -> None:
        """Need nothing."""

    async def known(self) -> AsyncIterator[StepTask]:
        nothing: tuple[StepTask, ...] = ()
        for task in nothing:
            yield task

    async def submit(self, orders: Sequence[StepOrder]) -> None:
        asyncio.get_running_loop().call_soon(self._end, orders)

    async def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        return [task.number for task in tasks]

    async def cancel(self, tasks: Sequence[StepTask]) -> None:
        """Have nothing to cancel."""

    async def why(self, task: StepTask) -> str:  # noqa: ARG002
        return ""

    async def money(self) -> list[Money]:
        return []

    async def is_stuck(self) -> bool:
        return False

    async def close(self, *, drain_seconds: float) -> None:
        """Have nothing to close."""

    def _end(self, orders: Sequence[StepOrder]) -> None:
        for order in orders:
            task = StepTask(
                number=order.number,
                generation=order.generation,
                task_id=f"20260101-000000-0000-{order.number:07d}",
                state=TaskState.DONE,
                attempt=1,
                started_at=1.0,
                completed_at=2.0,
                micro_usd=7,
            )
            self._told(task)


def one_step() -> Workflow:
    items = ListItems(values=tuple(range(RUNS)))
    work = CallWork(entry_point="work:do", given=parsed_template("{item}"))
    return a_workflow(a_step("a", foreach=items, work=work))


def two_steps() -> Workflow:
    items = ListItems(values=tuple(range(RUNS // 2)))
    work = CallWork(entry_point="work:do", given=parsed_template("{steps.a.output}"))
    follower = a_step("b", foreach=StepItems(step="a"), depends_on=("a",), work=work)
    return a_workflow(a_step("a", foreach=items), follower)


def many_steps() -> Workflow:
    return a_workflow(
        *[
            a_step(f"s{number}", depends_on=(f"s{number - 1}",) if number % 10 else ())
            for number in range(RUNS)
        ]
    )


WORKFLOWS = pytest.mark.parametrize("make", [one_step, two_steps, many_steps])


def carried_out(folder: Path, workflow: Workflow) -> Conductor:
    conductor = Conductor(a_run(folder, workflow), InstantBackend())
    report = asyncio.run(conductor.run())
    assert (report.state, report.ended) == (RunState.DONE, RUNS)
    return conductor


@WORKFLOWS
def test_a_run_of_a_step_takes_less_than_a_kilobyte(tmp_path: Path, make: Any) -> None:
    workflow = make()
    carried_out(tmp_path, a_workflow(a_step("warm", foreach=ListItems(values=(0,) * RUNS))))
    tracemalloc.start()
    try:
        conductor = carried_out(tmp_path, workflow)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert conductor.report().ended == RUNS
    assert kept / RUNS < MOST_BYTES
    assert most / RUNS < 1.5 * MOST_BYTES


@WORKFLOWS
def test_a_run_of_a_step_takes_microseconds(tmp_path: Path, make: Any) -> None:
    workflow = make()
    began = time.process_time()
    carried_out(tmp_path, workflow)
    assert (time.process_time() - began) / RUNS < MOST_SECONDS
