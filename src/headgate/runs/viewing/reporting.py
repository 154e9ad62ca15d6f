"""A report of a run, made from what is known of it; cheap enough for ten a second.

Rule: rows are bounded. A report has the runs that are worth a line, and sums for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.runs.backend import Money, StepTask, TaskState
from headgate.runs.kept.folder import Run
from headgate.runs.report import RunReport, RunState, StepRow, StepState
from headgate.runs.tally import RunTally
from headgate.workflow.progress import WorkflowProgress
from headgate.workflow.standing import Standing

FAILED_ROWS = 100

_STATES = {
    Standing.WAITING: StepState.WAITING,
    Standing.SUBMITTED: StepState.QUEUED,
    Standing.DONE: StepState.DONE,
    Standing.FAILED: StepState.FAILED,
    Standing.SKIPPED: StepState.SKIPPED,
    Standing.UNMET: StepState.SKIPPED,
    Standing.UNFUNDED: StepState.NOT_RUN,
    Standing.STOPPED: StepState.NOT_RUN,
    Standing.UNFED: StepState.NOT_RUN,
    Standing.CUT_OFF: StepState.STOPPED,
}


class LiveTask:
    """A task that has not ended, what is held for it, and why it waits, if somebody asked.

    `given_up_as` is what it becomes when the cancel comes through that it was given up by.
    """

    __slots__ = ("given_up_as", "has_amounts", "micro_usd", "since", "task", "tokens", "why")

    def __init__(
        self, task: StepTask, since: float, micro_usd: int | None = None, tokens: int = 0
    ) -> None:
        self.task = task
        self.since = since
        self.has_amounts = micro_usd is not None
        self.micro_usd = micro_usd or 0
        self.tokens = tokens
        self.why = ""
        self.given_up_as: Standing | None = None


class Reporter:
    """Makes the reports of one run; its fields are set by whoever drives the run, or reads it."""

    def __init__(self, run: Run, progress: WorkflowProgress, tally: RunTally) -> None:
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
        return self._progress.ended - sum(self._progress.totals()[Standing.UNFUNDED :])

    def failed(self, number: int, task: StepTask | None, error: str) -> None:
        """Keep a failure as a row, unless there are enough of them."""
        if len(self._failed) < FAILED_ROWS:
            why = "" if task is not None and task.error else error
            self._failed.append(self._row(number, StepState.FAILED, task, why))

    def row(self, number: int, task: StepTask | None, why: str = "") -> StepRow:
        """Return one run as it stands."""
        standing = self._progress.standing(number)
        state = _STATES[standing]
        if state is StepState.QUEUED and task is not None and task.state is TaskState.RUNNING:
            state = StepState.RUNNING
        return self._row(number, state, task, why or self._why(number, standing))

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

    def _why(self, number: int, standing: Standing) -> str:
        if standing is Standing.UNFUNDED and self.exhausted_by:
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


def stopped_as(task: StepTask) -> Standing:
    """Return what becomes of a task that goes no further: it matters whether it had begun."""
    return Standing.CUT_OFF if task.attempt else Standing.STOPPED


def end_state(
    progress: WorkflowProgress, *, is_interrupted: bool, is_booked: bool = True
) -> RunState:
    """Return how a run has ended that goes no further."""
    standings = progress.totals()
    left = standings[Standing.STOPPED] + standings[Standing.CUT_OFF]
    if is_interrupted and (progress.ended < progress.total or left):
        return RunState.INTERRUPTED
    if standings[Standing.UNFUNDED]:
        return RunState.EXHAUSTED
    if standings[Standing.FAILED]:
        return RunState.FAILED
    return RunState.DONE if is_booked else RunState.UNBOOKED
