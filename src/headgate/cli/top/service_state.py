"""What is known of a service, as the last answers told it, and how the connection is.

Rule: an answer replaces the one before it and nothing is added up, so that a screen that is open
for weeks keeps no more than one that was just opened.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from enum import Enum

import msgspec

from headgate.api.schema.admin import LaneListBody, ProjectListBody
from headgate.api.schema.calls import CallBody, CallWhyBody
from headgate.api.schema.tasks import BudgetStatusBody, StatsBody, WhyBody
from headgate.client.requests import Query
from headgate.core.call import CallState
from headgate.core.slots.status import SlotListBody
from headgate.core.task import TaskStatus
from headgate.core.task_view import CONTENTS, ProgressBody

# Which question a screen asks next, and how many a second.
#
# Rule: one question at a time, and a turn in `PAUSE_SECONDS`. A pane that has no answer comes
# first, then whatever is most overdue, measured by how often it should be asked; so with too many
# questions all of them come later, and none is forgotten.

PAUSE_SECONDS = 0.5
COST_FACTOR = 10.0
"""A question whose answers take a while is asked at most in this many times as long.

It goes by the quicker of the last two: one alone is late when the service or the line had paused.
"""
KEPT_SECONDS = 60.0
"""What is not wanted any more is remembered for so long, since people go to and fro."""

_AT_ONCE = (0.0, 0.0)


class Topic(Enum):
    """What a question is about."""

    STATS = "counts"
    PROJECTS = "projects"
    LANES = "lanes"
    RUNNING = "running tasks"
    WAITING = "waiting tasks"
    WHY = "reasons"
    BUDGETS = "budgets"
    SLOTS = "slots"
    CALLS = "calls"


class Question(msgspec.Struct, frozen=True):
    """One thing to ask; of a reason also the task."""

    topic: Topic
    task_id: str = ""


class QuestionSchedule:
    """When each question was asked, and what that says about the next one."""

    def __init__(self) -> None:
        self._asked: dict[Question, float] = {}
        self._took: dict[Question, tuple[float, float]] = {}
        self._new_since: dict[Question, float] = {}

    def next(self, wanted: Mapping[Question, float], now: float) -> Question | None:
        """Return the question that is most overdue; None if none is due.

        `wanted` has the seconds between two askings of each. What is not in it is soon forgotten.
        """
        self._forget_old(wanted, now)
        most, chosen = 1.0, None
        for question, seconds in wanted.items():
            lateness = self._lateness(question, seconds, now)
            if lateness > most or (chosen is None and lateness >= 1):
                most, chosen = lateness, question
        return chosen

    def _lateness(self, question: Question, seconds: float, now: float) -> float:
        """Return 1 for what is just due, and more the longer it has been."""
        asked_at = self._asked.get(question)
        if asked_at is not None:
            every = max(seconds, COST_FACTOR * min(self._took.get(question, _AT_ONCE)))
            return (now - asked_at) / every
        if question.task_id:
            # Reasons are many: were they first, nothing else would come while rows change.
            return 1 + (now - self._new_since.setdefault(question, now)) / seconds
        return math.inf

    def _forget_old(self, wanted: Mapping[Question, float], now: float) -> None:
        old = now - KEPT_SECONDS
        kept = {one: at for one, at in self._asked.items() if one in wanted or at > old}
        self._asked = kept
        self._took = {one: took for one, took in self._took.items() if one in kept}
        self._new_since = {one: at for one, at in self._new_since.items() if one in wanted}

    def asked_at(self, question: Question) -> float | None:
        """Return when something was asked last."""
        return self._asked.get(question)

    def note(self, question: Question, began: float, ended: float) -> None:
        """Note that something was asked."""
        self._asked[question] = began
        self._new_since.pop(question, None)
        self._took[question] = (self._took.get(question, _AT_ONCE)[1], ended - began)

    def forget(self, topic: Topic) -> None:
        """Have everything of a topic asked again."""
        for one in [one for one in self._asked if one.topic is topic]:
            del self._asked[one]


class Throttle:
    """Gives turns, each at least a pause after the one before."""

    def __init__(self, pause_seconds: float, *, clock: Callable[[], float]) -> None:
        self._pause_seconds = pause_seconds
        self._clock = clock
        self._next_at = 0.0

    async def turn(self) -> None:
        """Wait for a turn, and take it."""
        wait = self._next_at - self._clock()
        self.take()
        if wait > 0:
            await asyncio.sleep(wait)

    def take(self) -> None:
        """Take a turn without waiting, as what a person asks for does; others come later."""
        self._next_at = max(self._next_at, self._clock()) + self._pause_seconds


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
    progress: ProgressBody | None = None


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


MAX_CALLS = 1_000
MAX_UPSTREAMS = 4
"""Of so many upstreams the call that waits longest is asked for its reason."""

LIVE_CALLS = "waiting,running"


class UpstreamCalls(msgspec.Struct, frozen=True, kw_only=True):
    """The calls to one upstream: how many run and wait, and the one that waits longest.

    `why` is its reason, or why nobody could say; None where it was not asked for.
    """

    upstream: str
    running: int
    waiting: int
    longest: CallBody | None = None
    why: CallWhyBody | str | None = None


def calls_by_upstream(calls: Iterable[CallBody]) -> tuple[UpstreamCalls, ...]:
    """Return how calls stand at each upstream, where the longest wait is first."""
    found: dict[str, list[CallBody]] = {}
    for one in calls:
        found.setdefault(one.upstream, []).append(one)
    rows = []
    for upstream, some in found.items():
        waiting = [one for one in some if one.state is CallState.WAITING]
        rows.append(
            UpstreamCalls(
                upstream=upstream,
                running=len(some) - len(waiting),
                waiting=len(waiting),
                longest=min(waiting, key=lambda one: one.created_at, default=None),
            )
        )
    return tuple(sorted(rows, key=_longest_first))


def _longest_first(row: UpstreamCalls) -> tuple[bool, float, str]:
    longest = row.longest
    return longest is None, 0.0 if longest is None else longest.created_at.timestamp(), row.upstream


class ConnectionState(Enum):
    """How the connection to a service is."""

    LIVE = "live"
    POLLING = "polling"
    LOST = "lost"
    REFUSED = "refused"


class ServiceState:
    """The last answer to each question; None where there is none yet."""

    def __init__(self) -> None:
        self.stats: StatsBody | None = None
        self.projects: ProjectListBody | None = None
        self.lanes: LaneListBody | None = None
        self.running: ShownTasks | None = None
        self.waiting: ShownTasks | None = None
        self.budgets: BudgetStatusBody | None = None
        self.slots: SlotListBody | None = None
        self.calls: tuple[UpstreamCalls, ...] | None = None
        self.reasons: dict[str, WhyBody | str] = {}
        self.problems: dict[Topic, str] = {}
        self.contact = ConnectionState.POLLING
        self.contact_problem = ""
        self.throughput = Throughput()

    @property
    def is_past(self) -> bool:
        """Whether what is known is that of some time ago: nobody answers, or not to us."""
        return self.contact in (ConnectionState.LOST, ConnectionState.REFUSED)


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
