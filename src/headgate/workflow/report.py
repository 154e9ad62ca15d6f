"""What can be told of a run, while it goes on and afterwards, to a terminal or as JSON."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache

import msgspec

from headgate.workflow.backend import Money, StepTask, TaskState
from headgate.workflow.progress import StepCounts, StepRunState, WorkflowProgress
from headgate.workflow.workflow import Workflow


class RunState(Enum):
    """How a run stands."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """All that could run has run, and some of it failed."""
    EXHAUSTED = "exhausted"
    """A budget would not hold what was left."""
    INTERRUPTED = "interrupted"
    """Its process was stopped, or is gone."""
    UNBOOKED = "unbooked"
    """All is done, and a ledger that was away has not recorded all of it."""


class StepState(Enum):
    """How one run of a step stands, for people: the states of a task, and those without one."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOT_RUN = "not run"
    """No budget would hold it, or the run ended before it."""
    STOPPED = "stopped"
    """It had begun, and an interruption ended it."""


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a step."""

    name: str
    """The id of the step, with `[index]` where it runs for each item."""
    step: str
    """The step."""
    index: int | None
    """The number of the item, or null for a step that runs once."""
    state: StepState
    """What became of it, as in the table at the end of a run."""
    task: StepTask | None = None
    """What is known of its task, or null if none was submitted."""
    why: str = ""
    """Why it waits, was skipped or was not run."""


Ended = Callable[[StepRow], None]
"""Is told of every run of a step when it has ended, skipped ones too: `Conductor(…, ended=…)`.

Rows are made for it only if somebody listens; it must be quick and raise nothing."""


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one step together."""

    step: str
    """The step."""
    total: int
    """How many runs the step has: one, or one for each item."""
    counts: dict[str, int]
    """How many runs are in each state."""
    seconds: float | None = None
    """For how long at least one of its runs has run, over all resumes."""
    attempts: int = 0
    """Attempts of all its runs together."""
    tokens: int = 0
    """Tokens of all its runs together."""
    micro_usd: int = 0
    """Cost of all its runs together."""
    assumed_micro_usd: int = 0
    """The part of the cost that nobody confirmed: an attempt was interrupted and may have been
    charged."""
    unpriced: int = 0
    """How many runs are done though nobody said what they cost."""
    truncated: int = 0
    """How many answers of models end where their limit of tokens was reached."""
    error: str | None = None
    """The first error, if any run failed."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, by steps; `rows` has the runs that are worth a line (running, failed)."""

    run_id: str
    """The id of the run."""
    workflow: str
    """The name of its workflow."""
    state: RunState
    """`done`, `failed`, `exhausted`, `interrupted`, `unbooked` or `running`."""
    began_at: float
    """When it started."""
    ended_at: float | None = None
    """When it ended."""
    seconds: float = 0.0
    """How long processes have worked on it. The time between an end and its resume does not count.
    """
    steps: tuple[StepSummary, ...] = ()
    """A summary for each step."""
    rows: tuple[StepRow, ...] = ()
    """The runs of steps that are worth a line, failed ones above all. `--all` lists every one."""
    money: tuple[Money, ...] = ()
    """Each budget of the run, outermost first."""
    exhausted_by: str | None = None
    """The message of the budget that had no room for the next step."""
    total: int = 0
    """How many runs of steps there are."""
    ended: int = 0
    """How many of them have ended."""
    unbooked_micro_usd: int = 0
    """What the ledger had not recorded when the run ended. A resume records it."""
    trouble: str = ""
    """What keeps the whole run from continuing now, or kept its cost from being booked."""

    @property
    def done(self) -> int:
        """How many runs of steps are done."""
        return sum(step.counts.get(StepState.DONE.value, 0) for step in self.steps)


# What the tasks of a run came to: money, tokens, attempts and errors, by step.
#
# Rule: a task is added once, when it has ended, whatever generation it is of: what a failed
# attempt cost before a resume stays spent. Of a single run only its cost is kept, its task where
# a later step reads its result, and its error where one reads that.

_OUTPUTS = frozenset(("output", "result", "outputs", "results"))


PAUSE_SECONDS = 1.0
"""Shorter pauses count as time in which a step runs: of many short runs there are few spans."""


class _StepTotals:
    """The sums of one step; `summary` is kept until something changes."""

    __slots__ = ("assumed_micro_usd", "attempts", "error", "first_start", "last_end",
                 "micro_usd", "pauses", "summary", "tokens", "truncated", "unpriced")  # fmt: skip

    def __init__(self) -> None:
        self.attempts = 0
        self.tokens = 0
        self.micro_usd = 0
        self.assumed_micro_usd = 0
        self.unpriced = 0
        self.truncated = 0
        self.first_start: float | None = None
        self.last_end: float | None = None
        self.pauses: tuple[float, ...] = ()
        self.error: str | None = None
        self.summary: StepSummary | None = None

    def add(self, task: StepTask) -> None:
        self.attempts += task.attempt
        self.tokens += task.tokens
        self.micro_usd += task.micro_usd
        self.assumed_micro_usd += task.assumed_micro_usd
        self.unpriced += task.is_unpriced
        self.truncated += task.is_truncated
        # What a budget refused did not run until then, even if an earlier attempt did.
        started_at, ended_at = task.started_at, task.completed_at
        if task.state is not TaskState.REJECTED and started_at is not None and ended_at is not None:
            self.first_start, *pauses, self.last_end = self.spans_with(started_at, ended_at)
            self.pauses = tuple(pauses)

    @property
    def spans(self) -> tuple[float, ...]:
        """When at least one of its tasks ran: the start and the end of each span, in order."""
        if self.first_start is None or self.last_end is None:
            return ()
        return (self.first_start, *self.pauses, self.last_end)

    def spans_with(self, start: float, end: float) -> tuple[float, ...]:
        """Return the spans with one more, which is one with those that it meets."""
        spans, end = self.spans, max(start, end)
        first = bisect_left(spans, start - PAUSE_SECONDS)
        after = bisect_right(spans, end + PAUSE_SECONDS)
        met = (start, end, *spans[first:after])
        # An odd place lies within a span.
        inner = (min(met),) * (first % 2 == 0) + (max(met),) * (after % 2 == 0)
        return spans[:first] + inner + spans[after:]


class RunTotals:
    """The sums of a whole run."""

    def __init__(
        self, workflow: Workflow, progress: WorkflowProgress, read: Iterable[tuple[str, str]]
    ) -> None:
        self._progress = progress
        self._steps = {step.id: _StepTotals() for step in workflow.steps}
        self._micro_usd = array("q", bytes(8 * progress.total))
        self._results_read = {step for step, field in read if field in _OUTPUTS}
        self._errors_read = {step for step, field in read if field == "error"}
        self._kept: dict[int, tuple[int, str]] = {}
        self._errors: dict[int, str] = {}

    def add(self, task: StepTask) -> None:
        """Add a task that has ended."""
        step_id = self._progress.step(task.number).id
        tally = self._steps[step_id]
        tally.add(task)
        tally.summary = None
        self._micro_usd[task.number] += task.micro_usd
        if task.state is TaskState.DONE and step_id in self._results_read:
            self._kept[task.number] = max(
                self._kept.get(task.number, (-1, "")), (task.generation, task.task_id)
            )

    def fail(self, number: int, error: str) -> None:
        """Keep the error of a run that failed, with a task or without one."""
        step_id = self._progress.step(number).id
        tally = self._steps[step_id]
        tally.summary = None
        if tally.error is None:
            tally.error = error
        if step_id in self._errors_read:
            self._errors[number] = error

    def touch(self, step_id: str) -> None:
        """Say that the counts of a step have changed."""
        self._steps[step_id].summary = None

    def kept_task(self, number: int) -> StepTask:
        """Return the task of a run that is done and whose result some step reads."""
        generation, task_id = self._kept[number]
        return StepTask(number=number, generation=generation, task_id=task_id, state=TaskState.DONE)

    def error(self, number: int) -> str | None:
        """Return the error of a run that failed and whose error some step reads."""
        return self._errors.get(number)

    def micro_usd(self, number: int) -> int:
        """Return what a run cost, over all generations."""
        return self._micro_usd[number]

    def step_micro_usd(self, step_id: str) -> int:
        """Return what the runs of a step cost that have ended."""
        return self._steps[step_id].micro_usd

    def summaries(self, live: Iterable[StepTask], now: float) -> tuple[StepSummary, ...]:
        """Return every step as it stands now; `live` are the tasks that have not ended."""
        by_step: dict[str, list[StepTask]] = {}
        for task in live:
            by_step.setdefault(self._progress.step(task.number).id, []).append(task)
        return tuple(
            [
                tally.summary
                if tally.summary is not None and step_id not in by_step
                else self._summary(step_id, tally, by_step, now)
                for step_id, tally in self._steps.items()
            ]
        )

    def _summary(
        self,
        step_id: str,
        tally: _StepTotals,
        by_step: Mapping[str, list[StepTask]],
        now: float,
    ) -> StepSummary:
        live = by_step.get(step_id, [])
        running = [task for task in live if task.state is TaskState.RUNNING]
        counts = self._progress.counts(step_id)
        summary = StepSummary(
            step=step_id,
            total=counts.total,
            counts=_counts(counts, running=len(running)),
            seconds=_seconds(tally, running, now),
            attempts=tally.attempts + sum(task.attempt for task in live),
            tokens=tally.tokens + sum(task.tokens for task in live),
            micro_usd=tally.micro_usd + sum(task.micro_usd for task in live),
            assumed_micro_usd=tally.assumed_micro_usd
            + sum(task.assumed_micro_usd for task in live),
            unpriced=tally.unpriced,
            truncated=tally.truncated,
            error=tally.error,
        )
        tally.summary = None if live else summary
        return summary


def _counts(counts: StepCounts, *, running: int) -> dict[str, int]:
    return _by_state(
        (
            counts[StepRunState.WAITING],
            counts[StepRunState.SUBMITTED] - running,
            running,
            counts[StepRunState.DONE],
            counts[StepRunState.FAILED],
            counts.skipped,
            counts.not_run - counts[StepRunState.INTERRUPTED],
            counts[StepRunState.INTERRUPTED],
        )
    )


@lru_cache(maxsize=1_024)
def _by_state(counts: tuple[int, ...]) -> dict[str, int]:
    # Thousands of steps that run once have the same counts, and share them.
    return {state.value: count for state, count in zip(StepState, counts, strict=True) if count > 0}


def _seconds(tally: _StepTotals, running: list[StepTask], now: float) -> float | None:
    starts = [task.started_at for task in running if task.started_at is not None]
    spans = tally.spans_with(min(starts), now) if starts else tally.spans
    return sum(spans[1::2]) - sum(spans[::2]) if spans else None
