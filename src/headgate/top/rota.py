"""Which question a screen asks next, and how many a second.

Rule: one question at a time, and a turn in `PAUSE_SECONDS`. A pane that has no answer comes first,
then whatever is most overdue, measured by how often it should be asked; so with too many questions
all of them come later, and none is forgotten.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from enum import Enum

import msgspec

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


class Question(msgspec.Struct, frozen=True):
    """One thing to ask; of a reason also the task."""

    topic: Topic
    task_id: str = ""


class Rota:
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


class Pace:
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
