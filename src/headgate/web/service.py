"""What the API asks of the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

import msgspec

from headgate.core.tasks.records import Submission, TaskRecord, Terms
from headgate.core.tasks.submit_keys import InvalidEntry, KeyRefusal, SubmitKey
from headgate.core.tasks.task import Task
from headgate.runtime.telling.event_feed import EventFeed
from headgate.store import KeyedAnswer, Queued, Totals, TurnedAway, UnknownParent
from headgate.task_query import TaskPage, TaskQuery
from headgate.tokens import UNBOUND, Bounds


class HealthReport(Protocol):
    """Whether this node can do its work, as what, and what is wrong."""

    @property
    def is_ready(self) -> bool:
        """Whether tasks are taken and run now."""

    @property
    def role(self) -> str:
        """What this node does among others."""

    @property
    def problem(self) -> str:
        """What keeps it from being ready; empty if nothing does."""

    @property
    def parts(self) -> dict[str, str]:
        """The store, the ledger and the dispatcher, each with its problem or `ok`."""


class TaskService(Protocol):
    """Takes tasks and tells what became of them.

    Every method may raise `StoreUnavailableError`.
    """

    def now(self) -> float:
        """Return the time by which deadlines are judged."""

    def submit(
        self, task: Task, terms: Terms, submission: Submission
    ) -> Awaitable[Queued | TurnedAway | UnknownParent]:
        """Take a task without an id; the answer means that it is on disk."""

    def submit_keyed(
        self, key: SubmitKey, drafts: Sequence[tuple[Task, Terms, Submission] | InvalidEntry]
    ) -> Awaitable[KeyedAnswer | KeyRefusal]:
        """Take the tasks of a request once, or return what became of them the first time."""

    async def cancel(self, task_id: str) -> TaskRecord | None:
        """Cancel a task, and wait a while for it to stop; `IllegalTransitionError` if it ended."""

    async def get(self, task_id: str) -> TaskRecord | None:
        """Return a task; None if there is no such task."""

    async def within(self, task_ids: Sequence[str], bounds: Bounds) -> frozenset[str]:
        """Return which of these tasks are there and within the bounds."""

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks, newest first, as many as fit on one page."""

    async def totals(self) -> Totals:
        """Count what waits, runs and has happened."""

    async def why(self, task_id: str, bounds: Bounds = UNBOUND) -> msgspec.Struct | None:
        """Return every rule that keeps a task waiting; None if there is no such task.

        Of the tasks that hold it, those outside the bounds are counted and not named.
        """

    def events(self) -> EventFeed:
        """Return what happens to tasks; `NotDispatchingError` where this node does not see it."""

    def health(self) -> HealthReport:
        """Say whether this node can do its work."""
