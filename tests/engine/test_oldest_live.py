"""A list of tasks that have not ended begins where the oldest of them is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate.core.task import TaskStatus
from headgate.engine.engine import from_the_oldest_live
from headgate.storage.store import TaskQuery

QUEUED, DONE = TaskStatus.QUEUED, TaskStatus.DONE
FLIGHT = SimpleNamespace(task=SimpleNamespace(id="t6"))
DESK: Any = SimpleNamespace(waiting={"t7": None, "t5": None}, flights=[FLIGHT])
IDLE: Any = SimpleNamespace(waiting={}, flights=[])


@pytest.mark.parametrize(
    ("states", "before", "begins"),
    [
        ((QUEUED,), None, "t"),
        ((QUEUED, TaskStatus.RUNNING), None, "t"),
        ((QUEUED,), "t6", "t6"),
        ((QUEUED, DONE), None, None),
        ((), None, None),
    ],
)
def test_what_ended_before_the_oldest_that_waits_is_passed_over(
    states: tuple[TaskStatus, ...], before: str | None, begins: str | None
) -> None:
    query = TaskQuery(states=states, before=before, is_oldest_first=True)
    assert from_the_oldest_live(query, DESK).before == begins


def test_nothing_is_passed_over_where_nobody_knows_or_the_newest_come_first() -> None:
    query = TaskQuery(states=(QUEUED,), is_oldest_first=True)
    assert from_the_oldest_live(query, None) == query
    assert from_the_oldest_live(query, IDLE) == query
    newest = TaskQuery(states=(QUEUED,))
    assert from_the_oldest_live(newest, DESK) == newest
