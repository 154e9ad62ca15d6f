"""A run against a real service, as a conductor would drive it, and what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headgate.workflow.backend import StepOrder, StepTask, TaskState
from headgate.workflow.remote_backend import RemoteBackend
from headgate.workflow.run_record import RunScope
from headgate.workflow.step_requests import TargetRequest
from headgate.workflow.workflow import Step, TargetWork, Workflow
from service.support import ECHO_TARGET, SLOW_TARGET

RUN = "20261115-200917-3fa2"
SETTINGS = f"""{ECHO_TARGET}{SLOW_TARGET}
[targets.notes]
kind = "callable"
entry_point = "service.work:note_and_run"

[targets.broken]
kind = "command"
command = ["false"]
"""
SECONDS = 20.0


def step(step_id: str = "a", *, target: str | None = None, **fields: Any) -> Step:
    return Step(id=step_id, line=3, work=TargetWork(target=target), **fields)


def workflow(*steps: Step) -> Workflow:
    return Workflow(name="eval", folder=Path("/"), steps=steps or (step(),))


def order(
    number: int,
    *,
    of: Step | None = None,
    generation: int = 0,
    micro_usd: int | None = None,
    tokens: int | None = None,
    **request: Any,
) -> StepOrder:
    chosen = of or step()
    assert isinstance(chosen.work, TargetWork)
    given = {"action": f"n{number}", "target": chosen.work.target, **request}
    return StepOrder(
        number=number,
        index=number,
        generation=generation,
        step=chosen,
        request=TargetRequest(**given),
        micro_usd=micro_usd,
        tokens=tokens,
    )


class TaskLog:
    """Everything that a backend has told, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[StepTask] = []
        self._changed = asyncio.Event()

    def __call__(self, task: StepTask) -> None:
        self.all.append(task)
        self._changed.set()

    def states(self, number: int) -> list[TaskState]:
        """Return the states that one run of a step was told in."""
        return [task.state for task in self.all if task.number == number]

    def ends(self) -> dict[int, StepTask]:
        """Return what has ended, by number."""
        return {task.number: task for task in self.all if task.state.has_ended}

    async def until(self, number: int, state: TaskState) -> StepTask:
        """Wait until a run of a step was told in a state."""
        async with asyncio.timeout(SECONDS):
            while True:
                self._changed.clear()
                for task in self.all:
                    if (task.number, task.state) == (number, state):
                        return task
                await self._changed.wait()

    async def until_ended(self, count: int) -> dict[int, StepTask]:
        """Wait until so many have ended."""
        async with asyncio.timeout(SECONDS):
            while len(self.ends()) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.ends()


def backend_at(
    url: str,
    folder: Path,
    *steps: Step,
    scopes: Sequence[RunScope] = (RunScope(scope="workflow:eval"),),
    run_id: str = RUN,
    **options: Any,
) -> RemoteBackend:
    return RemoteBackend(
        url,
        run_id=run_id,
        workflow=workflow(*steps),
        scopes=scopes,
        journal=folder / f"{run_id}.jsonl",
        **options,
    )


@asynccontextmanager
async def opened(backend: RemoteBackend) -> AsyncIterator[TaskLog]:
    """Open a backend, and close it however the body ends, as the end of a process would."""
    told = TaskLog()
    backend.listen(told)
    try:
        await backend.open()
        yield told
    finally:
        await backend.close(drain_seconds=0)


async def known(backend: RemoteBackend) -> dict[int, StepTask]:
    """Return what a backend knows already, by number."""
    return {task.number: task async for task in backend.known()}
