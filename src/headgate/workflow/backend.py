"""The contract between a run and what carries out its steps: an engine here, or a service.

The conductor knows no task states but these, and no store. A backend submits each run of a step
once under its id, whatever happens to the process; it tells of ends by calling back in the event
loop, and of nothing twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec

from headgate.core.task import TaskStatus
from headgate.workflow.workflow import Step


class TaskState(Enum):
    """How far the task of a step has come."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"
    """No budget holds it: it has not run."""
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to the task."""
        return self not in (TaskState.QUEUED, TaskState.RUNNING)


STATES = {
    TaskStatus.QUEUED: TaskState.QUEUED,
    TaskStatus.ASSIGNED: TaskState.RUNNING,
    TaskStatus.RUNNING: TaskState.RUNNING,
    TaskStatus.DONE: TaskState.DONE,
    TaskStatus.FAILED: TaskState.FAILED,
    TaskStatus.CANCELLED: TaskState.CANCELLED,
    TaskStatus.REJECTED: TaskState.REJECTED,
}
"""What each status of a task means to a run, whoever keeps the task."""


Amounts = tuple[int | None, int | None]
"""The micro-dollars and the tokens of a run of a step; None is what nobody knows yet."""


class StepOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a step, filled and estimated, to be carried out.

    `number` counts the runs of all steps in the order of the file, `generation` how often this one
    was begun anew by a resume. `request` is what the work became: see
    `headgate.workflow.step_requests`. What `is_provisional` runs although a parent failed or was
    not run.
    """

    number: int
    index: int
    generation: int
    step: Step
    request: Any
    micro_usd: int | None
    tokens: int | None
    is_provisional: bool = False

    @property
    def amounts(self) -> Amounts:
        """What the run is estimated at."""
        return self.micro_usd, self.tokens


class StepTask(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one run of a step; times are Unix seconds."""

    number: int
    """Which run of a step it is, counted through the workflow."""
    generation: int
    """How often a resume started it again."""
    task_id: str
    """The id of the task."""
    state: TaskState
    """The state of the task."""
    attempt: int = 0
    """How often it was started."""
    started_at: float | None = None
    """When the latest attempt started."""
    completed_at: float | None = None
    """When it ended."""
    error: str | None = None
    """Why it failed."""
    tokens: int = 0
    """Tokens booked so far."""
    micro_usd: int = 0
    """Cost booked so far."""
    assumed_micro_usd: int = 0
    """The part of the cost that nobody confirmed: an attempt was interrupted and may have been
    charged."""
    is_unpriced: bool = False
    """It is done, and nobody said what it cost."""
    is_truncated: bool = False
    """It is done, and the answer of its model ends where its limit of tokens was reached."""
    is_provisional: bool = False
    """It ran although a parent failed or did not run, so a resume starts it again."""


def with_last_try(why: str, task: StepTask) -> str:
    """Return why a task waits, and what its last try met, if it was tried."""
    if not why or not task.error:
        return why
    met = "" if task.error in why else f": {task.error}"
    return f"{why} (attempt {task.attempt}){met}"


def keep_newest(newest: dict[int, StepTask], task: StepTask) -> None:
    """Keep a task as that of its run of a step, unless a later generation is known.

    Every reader of a run goes by this: a resume begins some runs anew, tasks are given in any
    order, and what an earlier generation gave counts no more, whatever has become of the newest.
    """
    known = newest.get(task.number)
    if known is None or known.generation < task.generation:
        newest[task.number] = task


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """One scope of a run, innermost last: what is spent (overrun included), held and allowed."""

    scope: str
    """The scope of the budget."""
    spent_micro_usd: int
    """What is spent, overrun included."""
    reserved_micro_usd: int
    """What is reserved."""
    limit_micro_usd: int | None = None
    """The limit, or null if there is none."""
    as_of: float | None = None
    """When the ledger said so, if it could not be asked since."""


TaskListener = Callable[[StepTask], None]
"""Is told of every change to a task, in the event loop; it must be quick and raise nothing."""


class Backend(Protocol):
    """Carries out steps."""

    @property
    def trouble(self) -> str:
        """What keeps the whole run from going on now, in one line; empty if nothing does."""

    @property
    def unbooked_micro_usd(self) -> int:
        """What the ledger had not recorded when everything was closed; a resume records it."""

    def check(self) -> None:
        """Raise what keeps the run from ever going on, if anything does."""

    def listen(self, listener: TaskListener) -> None:
        """Have changes told from now on; called once, before `open`."""

    async def open(self) -> None:
        """Make everything ready, and go on with what an earlier process left unfinished.

        Limits of budgets are set here; one that differs raises `BudgetMismatchError`. Where this
        raises, nothing is left open.
        """

    def known(self) -> AsyncIterator[StepTask]:
        """Give every task that the run has already, in any order; to be read before submitting."""

    async def submit(self, orders: Sequence[StepOrder]) -> None:
        """Have steps carried out; the answer means that each is kept, whatever happens now."""

    async def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        """Return the results of tasks that are done, as values, in their order."""

    async def cancel(self, tasks: Sequence[StepTask]) -> None:
        """Cancel what waits and stop what runs."""

    async def why(self, task: StepTask) -> str:
        """Say in one line why a task waits; empty if nobody knows."""

    async def money(self) -> list[Money]:
        """Return the scopes of the run, outermost first; when all is closed, as they were then."""

    async def is_stuck(self) -> bool:
        """Tell whether what waits can only go on when a budget's window moves on."""

    async def close(self, *, drain_seconds: float) -> None:
        """Take no more, let what runs finish for so long, then stop it; what waits stays.

        While it waits, ends are told as ever, and what runs can be cancelled.
        """
