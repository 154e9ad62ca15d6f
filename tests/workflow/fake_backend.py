"""A backend in virtual time that keeps its tasks through crashes, and a run without a file."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headgate.errors import HeadgateError
from headgate.testing import DEFAULT_START
from headgate.workflow.backend import Money, StepOrder, StepTask, TaskListener, TaskState
from headgate.workflow.expansion import load_items
from headgate.workflow.run_folder import Run
from headgate.workflow.run_record import RunRecord
from headgate.workflow.workflow import CallWork, Step, Workflow

RUN_ID = "20260101-000000-0000"
SCOPE = "workflow:test"


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a run of a step when it is carried out."""

    state: TaskState = TaskState.DONE
    seconds: float = 1.0
    micro_usd: int = 0
    result: Any = None


Fates = Callable[[StepOrder], Fate]


class KeptTasks:
    """What outlives a process: tasks by number and generation, orders, results, money."""

    def __init__(self) -> None:
        self.tasks: dict[tuple[int, int], StepTask] = {}
        self.orders: dict[tuple[int, int], StepOrder] = {}
        self.results: dict[str, Any] = {}
        self.submitted: list[tuple[int, int]] = []
        self.started: list[int] = []
        self.executed: dict[int, int] = {}
        self.spent = 0
        self.limit: int | None = None
        self.most_unfinished = 0


class FakeBackend:
    """Carries out orders with a few permits, by priority, inside one budget."""

    def __init__(self, kept: KeptTasks, fates: Fates, *, permits: int = 4) -> None:
        self.kept = kept
        self._fates = fates
        self._free = permits
        self._listener: TaskListener = lambda _task: None
        self._queue: list[tuple[int, int, int]] = []
        self._running: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._held = 0
        self._is_closing = False
        self.is_dead = False
        self.stuck_when: Callable[[], bool] = lambda: False
        self.asked_stuck = 0
        self.cancelled: list[int] = []
        self.results_calls = 0
        self.trouble = ""
        self.unbooked_micro_usd = 0
        self.fault: HeadgateError | None = None

    def check(self) -> None:
        if self.fault is not None:
            raise self.fault

    def listen(self, listener: TaskListener) -> None:
        self._listener = listener

    async def open(self) -> None:
        for key, task in sorted(self.kept.tasks.items()):
            if not task.state.has_ended:
                self._change(key, state=TaskState.QUEUED)
                self._queue_up(key)
        self._start()

    async def known(self) -> AsyncIterator[StepTask]:
        for task in list(self.kept.tasks.values()):
            await asyncio.sleep(0)
            yield task

    async def submit(self, orders: Sequence[StepOrder]) -> None:
        for order in orders:
            key = (order.number, order.generation)
            self.kept.submitted.append(key)
            assert key not in self.kept.tasks, "the same generation twice"
            self.kept.orders[key] = order
            name = f"{RUN_ID}-{order.number}-{order.generation}"
            self.kept.tasks[key] = StepTask(
                number=order.number,
                generation=order.generation,
                task_id=name,
                state=TaskState.QUEUED,
                is_provisional=order.is_provisional,
            )
            self._queue_up(key)
        unfinished = sum(1 for task in self.kept.tasks.values() if not task.state.has_ended)
        self.kept.most_unfinished = max(self.kept.most_unfinished, unfinished)
        await asyncio.sleep(0.001)
        if not self.is_dead:
            for order in orders:
                key = (order.number, order.generation)
                if self.kept.tasks[key].state is TaskState.QUEUED:
                    self._listener(self.kept.tasks[key])
            self._start()

    async def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        self.results_calls += 1
        await asyncio.sleep(0.001)
        return [self.kept.results[task.task_id] for task in tasks]

    async def cancel(self, tasks: Sequence[StepTask]) -> None:
        for task in tasks:
            key = (task.number, task.generation)
            if self.kept.tasks[key].state.has_ended:
                continue
            self.cancelled.append(task.number)
            if (attempt := self._running.pop(key, None)) is not None:
                attempt.cancel()
                self._free += 1
            self._end(key, TaskState.CANCELLED)

    async def why(self, task: StepTask) -> str:
        return f"{task.number} waits for a permit"

    async def money(self) -> list[Money]:
        return [
            Money(
                scope=SCOPE,
                spent_micro_usd=self.kept.spent,
                reserved_micro_usd=self._held,
                limit_micro_usd=self.kept.limit,
            )
        ]

    async def is_stuck(self) -> bool:
        self.asked_stuck += 1
        return self.stuck_when()

    async def close(self, *, drain_seconds: float) -> None:
        self._is_closing = True
        if self._running and not self.is_dead:
            await asyncio.wait(list(self._running.values()), timeout=drain_seconds)
        for attempt in self._running.values():
            attempt.cancel()

    def crash(self) -> None:
        """End the process: nothing that it had under way is ever settled."""
        self.is_dead = True
        for attempt in self._running.values():
            attempt.cancel()

    def _queue_up(self, key: tuple[int, int]) -> None:
        heapq.heappush(self._queue, (self.kept.orders[key].step.priority, *key))

    def _start(self) -> None:
        while self._free and self._queue and not self._is_closing:
            _, number, generation = self._queue[0]
            key = (number, generation)
            if self.kept.tasks[key].state is not TaskState.QUEUED:
                heapq.heappop(self._queue)
                continue
            order = self.kept.orders[key]
            limit = self.kept.limit
            if limit is not None and self.kept.spent + self._held + (order.micro_usd or 0) > limit:
                if self._held:
                    return
                heapq.heappop(self._queue)
                self._end(key, TaskState.REJECTED, error=f"{SCOPE} is used up")
                continue
            heapq.heappop(self._queue)
            self._free -= 1
            self._held += order.micro_usd or 0
            self.kept.started.append(number)
            now = asyncio.get_running_loop().time() + DEFAULT_START
            attempt = self.kept.tasks[key].attempt + 1
            self._change(key, state=TaskState.RUNNING, attempt=attempt, started_at=now)
            self._running[key] = asyncio.create_task(self._run(key, order))

    async def _run(self, key: tuple[int, int], order: StepOrder) -> None:
        fate = self._fates(order)
        await asyncio.sleep(fate.seconds)
        if self.is_dead:
            return
        del self._running[key]
        self._free += 1
        self._held -= order.micro_usd or 0
        self.kept.spent += order.micro_usd or 0
        self.kept.executed[order.number] = self.kept.executed.get(order.number, 0) + 1
        if fate.state is TaskState.DONE:
            self.kept.results[self.kept.tasks[key].task_id] = fate.result
        error = "it went wrong" if fate.state is TaskState.FAILED else None
        self._end(key, fate.state, error=error, micro_usd=order.micro_usd or 0)
        self._start()

    def _end(
        self,
        key: tuple[int, int],
        state: TaskState,
        *,
        error: str | None = None,
        micro_usd: int = 0,
    ) -> None:
        now = asyncio.get_running_loop().time() + DEFAULT_START
        self._change(key, state=state, error=error, completed_at=now, micro_usd=micro_usd)

    def _change(self, key: tuple[int, int], **fields: Any) -> None:
        task = self.kept.tasks[key] = msgspec.structs.replace(self.kept.tasks[key], **fields)
        if not self.is_dead:
            self._listener(task)


def a_step(step_id: str, **fields: Any) -> Step:
    """Return a step that calls a function, unless it is said to do something else."""
    return Step(id=step_id, line=1, **{"work": CallWork(entry_point="work:do"), **fields})


def a_workflow(*steps: Step, **fields: Any) -> Workflow:
    return Workflow(name="test", folder=Path("/"), steps=steps, **fields)


def a_run(folder: Path, workflow: Workflow) -> Run:
    """Return a run of a workflow that no file says."""
    record = RunRecord(
        id=RUN_ID, workflow=workflow.name, created_at=DEFAULT_START, source="/test.yaml", folder="/"
    )
    return Run(folder, record, workflow, load_items(workflow, copies=None))
