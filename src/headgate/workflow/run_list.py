"""Runs for those who look: which there are, and how one stands, without driving any of them.

How a run stands is worked out from its tasks by the same rules as when it is carried out: what was
skipped is not stored, because conditions always give the same answer for the same results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headgate.core.money import format_usd
from headgate.errors import HeadgateError, InvalidSettingError, StoreError
from headgate.workflow.backend import Amounts, Money, StepTask, TaskState, keep_newest
from headgate.workflow.costs import limits_dollars
from headgate.workflow.expansion import Expansion
from headgate.workflow.progress import StepRunState, WorkflowProgress
from headgate.workflow.report import RunReport, RunState, RunTotals, StepRow, StepState
from headgate.workflow.run_folder import Run, is_driven, open_run, read_record, run_folders
from headgate.workflow.run_record import RunRecord
from headgate.workflow.run_tasks import RecordedTasks, last_event_at, recorded_tasks
from headgate.workflow.step_requests import (
    Filler,
    NoOrder,
    OrderMaker,
    RefusedAmounts,
    fields_read,
    output_of,
)
from headgate.workflow.workflow import Step

# A report of a run, made from what is known of it; cheap enough for ten a second.
#
# Rule: rows are bounded. A report has the runs that are worth a line, and sums for all of them.

FAILED_ROWS = 100

_STATES = {
    StepRunState.WAITING: StepState.WAITING,
    StepRunState.SUBMITTED: StepState.QUEUED,
    StepRunState.DONE: StepState.DONE,
    StepRunState.FAILED: StepState.FAILED,
    StepRunState.SKIPPED: StepState.SKIPPED,
    StepRunState.CONDITION_FALSE: StepState.SKIPPED,
    StepRunState.OVER_BUDGET: StepState.NOT_RUN,
    StepRunState.STOPPED: StepState.NOT_RUN,
    StepRunState.PARENT_NOT_RUN: StepState.NOT_RUN,
    StepRunState.INTERRUPTED: StepState.STOPPED,
}


class LiveTask:
    """A task that has not ended, what is held for it, and why it waits, if somebody asked.

    `amounts` are None if another process has submitted it. `cancelled_as` is what it becomes when
    the cancel comes through that it was given up by.
    """

    __slots__ = ("amounts", "cancelled_as", "since", "task", "why")

    def __init__(self, task: StepTask, since: float, amounts: Amounts | None = None) -> None:
        self.task = task
        self.since = since
        self.amounts = amounts
        self.why = ""
        self.cancelled_as: StepRunState | None = None


class Reporter:
    """Makes the reports of one run; its fields are set by whoever drives the run, or reads it."""

    def __init__(self, run: Run, progress: WorkflowProgress, tally: RunTotals) -> None:
        self._run = run
        self._progress = progress
        self._tally = tally
        self._failed: list[StepRow] = []
        self.state = RunState.RUNNING
        self.ended_at: float | None = None
        self.left_at: float | None = None
        """When its last process was there, if that was killed."""
        self.money: tuple[Money, ...] = ()
        self.exhausted_by: str | None = None
        self.unbooked_micro_usd = 0
        self.trouble = ""

    def report(self, live: Mapping[int, LiveTask], now: float) -> RunReport:
        """Return how the run stands."""
        return RunReport(
            run_id=self._run.id,
            workflow=self._run.workflow.name,
            state=self.state,
            began_at=self._run.record.created_at,
            ended_at=self.ended_at,
            seconds=self._run.record.seconds_until(now if self.left_at is None else self.left_at),
            steps=self._tally.summaries([one.task for one in live.values()], now),
            rows=(*self._live_rows(live), *self._failed),
            money=self.money,
            exhausted_by=self.exhausted_by,
            total=self._progress.total,
            ended=self._ended(),
            unbooked_micro_usd=self.unbooked_micro_usd,
            trouble=self.trouble,
        )

    def _ended(self) -> int:
        """Return how many have ended; what was not run is left to the resume of an interrupted."""
        if self.state is not RunState.INTERRUPTED:
            return self._progress.ended
        return self._progress.ended - sum(self._progress.totals()[StepRunState.OVER_BUDGET :])

    def failed(self, number: int, task: StepTask | None, error: str) -> None:
        """Keep a failure as a row, unless there are enough of them."""
        if len(self._failed) < FAILED_ROWS:
            why = "" if task is not None and task.error else error
            self._failed.append(self._row(number, StepState.FAILED, task, why))

    def row(self, number: int, task: StepTask | None, why: str = "") -> StepRow:
        """Return one run as it stands."""
        run_state = self._progress.run_state(number)
        state = _STATES[run_state]
        if state is StepState.QUEUED and task is not None and task.state is TaskState.RUNNING:
            state = StepState.RUNNING
        return self._row(number, state, task, why or self._why(number, run_state))

    def _row(self, number: int, state: StepState, task: StepTask | None, why: str) -> StepRow:
        step, index = self._progress.step(number), self._progress.index(number)
        has_items = step.foreach is not None
        return StepRow(
            name=f"{step.id}[{index}]" if has_items else step.id,
            step=step.id,
            index=index if has_items else None,
            state=state,
            task=task,
            why=why,
        )

    def _why(self, number: int, run_state: StepRunState) -> str:
        if run_state is StepRunState.OVER_BUDGET and self.exhausted_by:
            return self.exhausted_by
        return self._progress.why(number)

    def _live_rows(self, live: Mapping[int, LiveTask]) -> list[StepRow]:
        running: list[StepRow] = []
        waiting: list[StepRow] = []
        for number, one in live.items():
            if one.task.state is TaskState.RUNNING:
                running.append(self._row(number, StepState.RUNNING, one.task, ""))
            elif one.why:
                waiting.append(self._row(number, StepState.QUEUED, one.task, one.why))
        return running + waiting


def stopped_as(task: StepTask) -> StepRunState:
    """Return what becomes of a task that goes no further: it matters whether it had begun."""
    return StepRunState.INTERRUPTED if task.attempt else StepRunState.STOPPED


def end_state(
    progress: WorkflowProgress, *, is_interrupted: bool, is_booked: bool = True
) -> RunState:
    """Return how a run has ended that goes no further."""
    counts = progress.totals()
    left = counts[StepRunState.STOPPED] + counts[StepRunState.INTERRUPTED]
    if is_interrupted and (progress.ended < progress.total or left):
        return RunState.INTERRUPTED
    if counts[StepRunState.OVER_BUDGET]:
        return RunState.EXHAUSTED
    if counts[StepRunState.FAILED]:
        return RunState.FAILED
    return RunState.DONE if is_booked else RunState.UNBOOKED


INTERRUPTED = "its process ended while it ran; a resume tries again"

MAX_COUNTED = 10
"""How many runs of a list are looked into for their counts."""

_T = TypeVar("_T")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a list; `problem` says what is wrong with its folder, if anything is.

    `ended` counts runs of steps. It and the cost are None where no process has written them: of a
    run under way, or one whose process was killed; `counted` works them out. `seconds` is how long
    processes have carried it, and is worked out for one that was killed.
    """

    id: str
    """The id of the run."""
    workflow: str
    """The name of its workflow."""
    state: RunState
    """The state, as in a report."""
    created_at: float
    """When it started."""
    ended_at: float | None = None
    """When it last ended."""
    seconds: float | None = None
    """How long processes have worked on it."""
    total: int = 0
    """How many runs of steps there are."""
    ended: int | None = None
    """How many of them have ended, or null if nobody has counted them yet."""
    done: int | None = None
    """How many of them are done, or null if nobody has counted them yet."""
    server: str | None = None
    """The service that runs the steps, or null."""
    exhausted_by: str | None = None
    """The message of the budget that ended it."""
    spent_micro_usd: int | None = None
    """What it has cost, or null if nobody has counted it yet."""
    problem: str = ""
    """What is wrong with its folder."""


class ShownRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: the report, and a row for each run of a step that was asked for."""

    report: RunReport
    rows: tuple[StepRow, ...]
    record: RunRecord


def list_runs(data: Path) -> list[RunSummary]:
    """Return all runs, the newest first."""
    return [_summary(path) for path in run_folders(data)]


def counted(data: Path, found: Sequence[RunSummary]) -> list[RunSummary]:
    """Return runs with what their tasks tell of those that were left without counts.

    That reads the tasks of a run, so only so many of them are looked into.
    """
    unknown = [run.id for run in found if run.done is None and not run.problem]
    known = {name: _counted(data, name) for name in unknown[:MAX_COUNTED]}
    return [msgspec.structs.replace(run, **known.get(run.id, {})) for run in found]


def _counted(data: Path, name: str) -> dict[str, Any]:
    try:
        report = show_run(data, name).report
    except HeadgateError:
        # Whoever shows this run is told what is wrong with it.
        return {}
    spent = sum(step.micro_usd for step in report.steps)
    return {
        "ended": report.ended,
        "done": report.done,
        "spent_micro_usd": spent,
        "seconds": report.seconds,
    }


def show_run(
    data: Path, name: str, *, every_row: bool = False, clock: Callable[[], float] = time.time
) -> ShownRun:
    """Show a run by its id, a beginning of it, or `last`; every row, or those that are not done."""
    run = open_run(data, name)
    with recorded_tasks(run.path, run.id) as tasks:
        view = _View(run, tasks)
        view.work_out()
        return ShownRun(
            report=view.report(clock()), rows=view.rows(every=every_row), record=run.record
        )


def _summary(path: Path) -> RunSummary:
    try:
        record = read_record(path)
    except StoreError as error:
        state = RunState.INTERRUPTED
        return RunSummary(
            id=path.name, workflow="", state=state, created_at=0.0, problem=str(error)
        )
    is_live = is_driven(path)
    was_killed = record.life_began_at is not None and not is_live
    return RunSummary(
        id=record.id,
        workflow=record.workflow,
        state=_state(record, is_live=is_live),
        created_at=record.created_at,
        ended_at=record.ended_at,
        seconds=None if was_killed else record.seconds_until(time.time()),
        total=record.total,
        ended=None if record.state is RunState.RUNNING else record.ended,
        done=None if record.state is RunState.RUNNING else record.done,
        server=record.server,
        exhausted_by=record.exhausted_by,
        spent_micro_usd=record.spent_micro_usd,
    )


def _state(record: RunRecord, *, is_live: bool) -> RunState:
    """Return how a run stands; one that nobody drives and that has not ended was interrupted."""
    if is_live:
        return RunState.RUNNING
    return RunState.INTERRUPTED if record.state is RunState.RUNNING else record.state


class _View:
    """Works out how the runs of all steps stand."""

    def __init__(self, run: Run, tasks: RecordedTasks) -> None:
        workflow = run.workflow
        expansion = Expansion(workflow, run.items)
        self._run = run
        self._recorded = tasks
        self._state = _state(run.record, is_live=is_driven(run.path))
        self._progress = WorkflowProgress(
            workflow, {step.id: expansion.runs_of(step.id) for step in workflow.steps}
        )
        self._tally = RunTotals(workflow, self._progress, fields_read(workflow))
        self._filler = Filler(run, self._progress, self._tally, self._results)
        self._maker = OrderMaker(
            workflow,
            self._filler,
            RefusedAmounts(),
            self._progress,
            is_limited=limits_dollars(run.record.scopes),
        )
        self._reporter = Reporter(run, self._progress, self._tally)
        self._reporter.state = self._state
        self._reporter.ended_at = run.record.ended_at
        self._reporter.exhausted_by = run.record.exhausted_by
        self._reporter.unbooked_micro_usd = run.record.unbooked_micro_usd
        self._latest: dict[int, StepTask] = {}
        self._live: dict[int, LiveTask] = {}
        self._whys: dict[int, str] = {}
        self._has_failures = False

    def work_out(self) -> None:
        """Take the tasks over, and decide on what has none."""
        for task in self._recorded.tasks():
            self._tally_ended(task)
            keep_newest(self._latest, task)
        if self._state is not RunState.RUNNING:
            self._reporter.left_at = last_event_at(self._latest.values())
        self._latest = {
            number: task
            for number, task in sorted(self._latest.items())
            if not self._run.is_void(self._progress.step(number).id, task)
        }
        self._has_failures = any(task.state is TaskState.FAILED for task in self._latest.values())
        for task in self._latest.values():
            self._restore(task)
        if self._fails_fast():
            self._progress.stop()
        self._progress.start()
        while not self._fails_fast() and (number := self._progress.take()) is not None:
            self._decide(number)
        if self._state is not RunState.RUNNING or self._fails_fast():
            self._progress.stop()

    def report(self, now: float) -> RunReport:
        """Return the whole run by steps."""
        self._reporter.money = self._money()
        return self._reporter.report(self._live, now)

    def rows(self, *, every: bool) -> tuple[StepRow, ...]:
        """Return runs of steps one by one, in the order of the file."""
        return tuple(
            [
                self._reporter.row(number, self._latest.get(number), self._why(number))
                for number in range(self._progress.total)
                if every or self._progress.run_state(number) is not StepRunState.DONE
            ]
        )

    def _why(self, number: int) -> str:
        live = self._live.get(number)
        if live is not None and live.task.state is TaskState.QUEUED:
            return self._why_queued(live.task)
        return self._whys.get(number, "")

    def _tally_ended(self, task: StepTask) -> None:
        if task.state.has_ended:
            self._tally.add(task)

    def _restore(self, task: StepTask) -> None:
        number, run_state = task.number, self._run_state(task)
        self._progress.restore(number, run_state)
        if run_state is StepRunState.SUBMITTED:
            self._live[number] = LiveTask(task, 0.0)
        elif run_state.is_not_run and not task.state.has_ended:
            self._tally.add(task)
            if task.state is TaskState.RUNNING:
                self._whys[number] = INTERRUPTED
        elif run_state is StepRunState.FAILED:
            self._fail(number, task, task.error or "it was cancelled")

    def _run_state(self, task: StepTask) -> StepRunState:
        match task.state:
            case TaskState.DONE:
                return StepRunState.DONE
            case TaskState.FAILED:
                return StepRunState.FAILED
            case TaskState.REJECTED:
                return StepRunState.OVER_BUDGET
            case TaskState.CANCELLED:
                return self._cancelled(task)
            case _:
                return stopped_as(task) if self._is_left() else StepRunState.SUBMITTED

    def _is_left(self) -> bool:
        """Tell whether nothing goes on with what has not ended; a service does with its tasks."""
        return self._state is not RunState.RUNNING and self._run.record.server is None

    def _cancelled(self, task: StepTask) -> StepRunState:
        """Return what a cancelled task means: the run gave it up, or somebody else did."""
        if self._state is RunState.EXHAUSTED:
            return StepRunState.OVER_BUDGET
        if self._state is RunState.INTERRUPTED or self._fails_fast():
            return stopped_as(task)
        return StepRunState.FAILED

    def _fails_fast(self) -> bool:
        """Tell whether a failure has ended the run: what then had no task never got one."""
        return self._has_failures and self._run.workflow.fail_fast

    def _decide(self, number: int) -> None:
        values = (
            _finished(self._filler.fetch([number])) if self._filler.needs_results(number) else {}
        )
        made = self._maker.made(number, 0, values)
        if isinstance(made, NoOrder):
            if made.run_state is StepRunState.FAILED:
                self._fail(number, None, made.error)
            self._progress.end(number, made.run_state)
        elif self._state is RunState.EXHAUSTED:
            self._progress.end(number, StepRunState.OVER_BUDGET)

    def _fail(self, number: int, task: StepTask | None, error: str) -> None:
        self._tally.fail(number, error)
        self._reporter.failed(number, task, error)
        self._whys[number] = error
        self._has_failures = True

    def _money(self) -> tuple[Money, ...]:
        record = self._run.record
        if record.money or record.tracker != "local" or not record.scopes:
            return record.money
        own = record.scopes[-1]
        live = [one.task for one in self._live.values()]
        spent = sum(summary.micro_usd for summary in self._tally.summaries(live, 0.0))
        # What a process has reserved that was killed is booked by a resume.
        is_live = self._state is RunState.RUNNING
        balance = self._recorded.balance(own.scope, time.time()) if is_live else None
        return (
            Money(
                scope=own.scope,
                spent_micro_usd=spent,
                reserved_micro_usd=0 if balance is None else balance.reserved_micro_usd,
                limit_micro_usd=own.micro_usd,
            ),
        )

    def _why_queued(self, task: StepTask) -> str:
        """Say what a step waits for that another process drives, as far as its folder tells."""
        record = self._run.record
        if record.server is not None:
            return f"headgate why {task.task_id} says why"
        running = sum(one.task.state is TaskState.RUNNING for one in self._live.values())
        most = record.concurrency or self._run.workflow.concurrency
        if running >= most:
            return f"{running:,} of {most:,} steps run; concurrency = {most:,}"
        for one in self._money():
            if one.limit_micro_usd is not None and one.reserved_micro_usd:
                left = one.limit_micro_usd - one.spent_micro_usd - one.reserved_micro_usd
                reserved = f"steps that run have reserved {format_usd(one.reserved_micro_usd)}"
                return f"{one.scope} has {format_usd(max(0, left))} left; {reserved}"
        return "others go first" if running else "it starts soon"

    async def _results(self, tasks: Sequence[StepTask]) -> list[Any]:
        return self._recorded.results(tasks)


def _finished(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run what waits for nothing: here results come at once, and no event loop is needed."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        value: _T = ended.value
        return value
    coroutine.close()
    raise RuntimeError("a result was waited for")


# What the steps of a run gave, for those who look at it afterwards or while it goes on.
#
# Rule: some results at a time are in memory, however many there are.

AT_ONCE = 64
_NAMED_STEPS = 10


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of a step gave; `index` is the number of its item, None for a step without."""

    index: int | None
    """The number of the item, or null for a step that runs once."""
    output: Any
    """What the run of the step put out."""


def step_outputs(data: Path, name: str, step_id: str) -> Iterator[StepOutput]:
    """Give the outputs of a step's runs that are done, in the order of their items.

    Of a run that a resume began anew the newest generation counts, done or not.

    On a service only what later steps need is kept here; what is not is null.
    """
    run = open_run(data, name)
    step = _step(run, step_id)
    numbers = Expansion(run.workflow, run.items).runs_of(step.id)
    with recorded_tasks(run.path, run.id) as recorded:
        done = [task for task in _done(recorded, numbers) if not run.is_void(step.id, task)]
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
    newest: dict[int, StepTask] = {}
    for task in recorded.tasks():
        if task.number in numbers:
            keep_newest(newest, task)
    return [task for _, task in sorted(newest.items()) if task.state is TaskState.DONE]
