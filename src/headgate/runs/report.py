"""What can be told of a run, while it goes on and afterwards, to a terminal or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from headgate.runs.backend import Money, StepTask


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
    """All is done, and books that were away have not been told of all of it."""


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
    """One run of a step; `name` is its id, with `[index]` where it runs for each item.

    `why` says why it waits, was skipped or was not run.
    """

    name: str
    step: str
    index: int | None
    state: StepState
    task: StepTask | None = None
    why: str = ""


Ended = Callable[[StepRow], None]
"""Is told of every run of a step when it has ended, skipped ones too: `Conductor(…, ended=…)`.

Rows are made for it only if somebody listens; it must be quick and raise nothing."""


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one step together."""

    step: str
    total: int
    counts: dict[str, int]
    seconds: float | None = None
    """From the first start to the last end, as far as it has come."""
    attempts: int = 0
    tokens: int = 0
    micro_usd: int = 0
    assumed_micro_usd: int = 0
    error: str | None = None
    """The first error, if any run failed."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, by steps; `rows` has the runs that are worth a line (running, failed)."""

    run_id: str
    workflow: str
    state: RunState
    began_at: float
    ended_at: float | None = None
    seconds: float = 0.0
    """How long processes have carried it; the time between two of them does not count."""
    steps: tuple[StepSummary, ...] = ()
    rows: tuple[StepRow, ...] = ()
    money: tuple[Money, ...] = ()
    exhausted_by: str | None = None
    """The words of the budget that would not hold the next step."""
    total: int = 0
    ended: int = 0
    unbooked_micro_usd: int = 0
    """What the books had not been told when the run ended; a resume tells them."""
    trouble: str = ""
    """What keeps the whole run from going on now, or kept its money from being booked."""
