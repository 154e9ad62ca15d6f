"""A run in a folder with a real engine, opened and closed as often as a test wants."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headgate.workflow.backend import Backend, StepOrder, StepTask, TaskState
from headgate.workflow.local_backend import local_backend
from headgate.workflow.placeholders import parsed_template, parsed_text
from headgate.workflow.run_folder import RECORD, Run, read_record
from headgate.workflow.run_record import RunOptions, RunRecord
from headgate.workflow.step_requests import request_of
from headgate.workflow.workflow import (
    CallWork,
    CommandWork,
    HttpWork,
    ModelWork,
    Step,
    Work,
    Workflow,
)

RUN_ID = "20261115-200917-3fa2"
WAITED_SECONDS = 20.0
PATH = {"PATH": os.environ["PATH"]}


def shell(script: str, **fields: Any) -> CommandWork:
    """A command that the shell reads; env and cwd are texts with placeholders."""
    env = {name: parsed_text(text) for name, text in fields.pop("env", {}).items()}
    return CommandWork(command=tuple(map(parsed_text, ("sh", "-c", script))), env=env, **fields)


def http(url: str, method: str = "POST", body: object = None, **headers: str) -> HttpWork:
    """A request; underscores in names of headers are dashes."""
    texts = {name.replace("_", "-"): parsed_text(text) for name, text in headers.items()}
    return HttpWork(
        url=parsed_text(url),
        method=method,
        headers=texts,
        body=None if body is None else parsed_template(body),
    )


def call(entry_point: str, given: object = None) -> CallWork:
    """A call of a Python function."""
    return CallWork(
        entry_point=entry_point, given=None if given is None else parsed_template(given)
    )


def model(endpoint: str, name: str = "mine") -> ModelWork:
    """A call to a model."""
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
    return ModelWork(endpoint=endpoint, model=name, body=parsed_template(body), max_tokens=10)


def step(work: Work, step_id: str = "one", **fields: Any) -> Step:
    """A step of a workflow."""
    return Step(id=step_id, line=1, work=work, **fields)


class NoView:
    """A view of a step without items, behind no other."""

    item: Any = None
    index = 0
    run: Mapping[str, str] = {"id": RUN_ID, "name": "flow"}

    def field(self, step: str, name: str) -> Any:
        """There is no other step."""
        raise LookupError(step, name)


def order(
    of: Step,
    number: int = 0,
    generation: int = 0,
    micro_usd: int | None = None,
    tokens: int | None = 0,
    *,
    is_known: bool = True,
) -> StepOrder:
    """The order of one run of a step, which holds what it costs, if that `is_known`."""
    held = of.cost_micro_usd if micro_usd is None else micro_usd
    return StepOrder(
        number=number,
        index=0,
        generation=generation,
        step=of,
        request=request_of(of.work, NoView()),  # type: ignore[arg-type]
        micro_usd=(held or 0) if is_known else None,
        tokens=tokens if is_known else None,
    )


class Ear:
    """Hears what is told of tasks, and waits for their ends."""

    def __init__(self) -> None:
        self.told: list[StepTask] = []
        self._changed = asyncio.Event()

    def __call__(self, task: StepTask) -> None:
        self.told.append(task)
        self._changed.set()

    def ends(self) -> list[StepTask]:
        """Return the tasks that ended, in the order of their ends."""
        return [task for task in self.told if task.state.has_ended]

    async def wait(self, ends: int = 1) -> list[StepTask]:
        """Wait until so many tasks have ended."""
        async with asyncio.timeout(WAITED_SECONDS):
            while len(self.ends()) < ends:
                self._changed.clear()
                await self._changed.wait()
        return self.ends()

    async def wait_for(self, state: TaskState, attempt: int = 1) -> StepTask:
        """Wait until a task is told of in a state."""
        async with asyncio.timeout(WAITED_SECONDS):
            while True:
                for task in self.told:
                    if task.state is state and task.attempt >= attempt:
                        return task
                self._changed.clear()
                await self._changed.wait()


class Stage:
    """One run, its workflow and the options that it is begun with."""

    def __init__(
        self,
        folder: Path,
        *steps: Step,
        environ: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        run_id: str = RUN_ID,
        **config: Any,
    ) -> None:
        self.data = folder / "data"
        self.path = self.data / "runs" / run_id
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.workflow = Workflow(name="flow", folder=folder, steps=steps, **config)
        self.environ = {**PATH, **(environ or {})}
        self.options = RunOptions(data=self.data, **(options or {}))
        record = RunRecord(
            id=run_id, workflow="flow", created_at=0.0, source="flow.yaml", folder=str(folder)
        )
        is_known = (self.path / RECORD).exists()
        self.run = Run(self.path, read_record(self.path) if is_known else record, self.workflow, {})

    @asynccontextmanager
    async def opened(self, *, drain_seconds: float = 0.0) -> AsyncIterator[tuple[Backend, Ear]]:
        """Open a backend on the run, as one process after the other would."""
        ear = Ear()
        with self.run.held():
            backend = local_backend(self.run, self.workflow, self.options, self.environ)
            backend.listen(ear)
            await backend.open()
            # As the conductor does: from now on it is known that limits were created.
            self.run.change(has_begun=True)
            try:
                yield backend, ear
            finally:
                await backend.close(drain_seconds=drain_seconds)

    async def carried_out(self, *orders: StepOrder) -> list[StepTask]:
        """Carry out orders to their ends, and return these by number."""
        async with self.opened() as (backend, ear):
            await backend.submit(orders)
            ends = await ear.wait(len(orders))
        return sorted(ends, key=lambda task: task.number)

    async def one_end(self, of: Step) -> tuple[StepTask, Any]:
        """Carry out one step, and return its end and its result."""
        async with self.opened() as (backend, ear):
            await backend.submit([order(of)])
            (end,) = await ear.wait()
            (result,) = await backend.results([end])
        return end, result

    def files(self) -> bytes:
        """Return all that the folder of the run holds."""
        return b"".join(path.read_bytes() for path in self.path.rglob("*") if path.is_file())
