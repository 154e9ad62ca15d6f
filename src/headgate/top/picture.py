"""What is known of a service, as the last answers told it, and how the connection is.

Rule: an answer replaces the one before it and nothing is added up, so that a screen that is open
for weeks keeps no more than one that was just opened.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime
from enum import Enum

import msgspec

from headgate.bodies.admin import ProjectListBody
from headgate.bodies.figures import LaneListBody
from headgate.bodies.slots import SlotListBody
from headgate.bodies.tasks import BudgetStatusBody, StatsBody, WhyBody
from headgate.client.calls import Query
from headgate.core.tasks.task import TaskStatus
from headgate.task_snapshot import CONTENTS
from headgate.top.rota import Topic

MAX_TASKS = 100
RUNNING_STATES, WAITING_STATES = "assigned,running", "queued"
THROUGHPUT_SECONDS = 60.0
MAX_SAMPLES = 120
LEAST_SECONDS = 5.0


class ShownTask(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a list shows of a task; what a client sent and got may be large, and is not asked."""

    task_id: str
    project_id: str
    state: TaskStatus
    created_at: datetime
    agent_id: str | None = None
    action: str = ""
    target: str | None = None
    started_at: datetime | None = None
    not_before: datetime | None = None
    attempt: int = 0
    max_attempts: int = 1
    priority: int = 0


def query_of_tasks(states: str, wanted: str = "") -> Query:
    """Return how a list is asked for: the oldest that contain a text, and no more than is shown."""
    return {
        "state": states,
        "order": "oldest",
        "omit": ",".join(CONTENTS),
        "limit": MAX_TASKS,
        "text": wanted or None,
    }


class ShownTasks(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One page of tasks, oldest first."""

    tasks: tuple[ShownTask, ...] = ()
    next_cursor: str | None = None


class Contact(Enum):
    """How the connection to a service is."""

    LIVE = "live"
    POLLING = "polling"
    LOST = "lost"
    REFUSED = "refused"


class Picture:
    """The last answer to each question; None where there is none yet."""

    def __init__(self) -> None:
        self.stats: StatsBody | None = None
        self.projects: ProjectListBody | None = None
        self.lanes: LaneListBody | None = None
        self.running: ShownTasks | None = None
        self.waiting: ShownTasks | None = None
        self.budgets: BudgetStatusBody | None = None
        self.slots: SlotListBody | None = None
        self.reasons: dict[str, WhyBody | str] = {}
        self.problems: dict[Topic, str] = {}
        self.contact = Contact.POLLING
        self.contact_problem = ""
        self.throughput = Throughput()

    @property
    def is_past(self) -> bool:
        """Whether the figures are those of some time ago: nobody answers, or not to us."""
        return self.contact in (Contact.LOST, Contact.REFUSED)


class Throughput:
    """How many tasks end in a minute, by the counts of the last one."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=MAX_SAMPLES)

    def add(self, stats: StatsBody, now: float) -> None:
        """Note what has happened until now; counts that went back are those of another store."""
        done, failed = stats.metrics.tasks_completed, stats.metrics.tasks_failed
        if self._samples and (done < self._samples[-1][1] or failed < self._samples[-1][2]):
            self._samples.clear()
        self._samples.append((now, done, failed))
        while len(self._samples) > 2 and self._samples[1][0] <= now - THROUGHPUT_SECONDS:  # noqa: PLR2004
            self._samples.popleft()

    def per_minute(self) -> tuple[float, float] | None:
        """Return how many are done and how many fail; None before there is enough to go by."""
        if not self._samples:
            return None
        (began, done_before, failed_before), (ended, done, failed) = (
            self._samples[0],
            self._samples[-1],
        )
        minutes = (ended - began) / 60
        if ended - began < LEAST_SECONDS:
            return None
        return (done - done_before) / minutes, (failed - failed_before) / minutes
