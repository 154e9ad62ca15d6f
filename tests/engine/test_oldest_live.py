"""A list of tasks that have not ended begins where the oldest of them is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headgate.core.task import TaskStatus
from headgate.engine.engine import Engine
from headgate.storage.store import TaskQuery

QUEUED, DONE = TaskStatus.QUEUED, TaskStatus.DONE
ATTEMPT = SimpleNamespace(task=SimpleNamespace(id="t6"))
BUSY: Any = SimpleNamespace(waiting={"t7": None, "t5": None}, in_flight=[ATTEMPT])
IDLE: Any = SimpleNamespace(waiting={}, in_flight=[])


def first_page(query: TaskQuery, dispatch_state: object) -> TaskQuery:
    engine: Any = SimpleNamespace(dispatcher=SimpleNamespace(dispatch_state=dispatch_state))
    return Engine._from_the_oldest_live(engine, query)


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
    assert first_page(query, BUSY).before == begins


def test_nothing_is_passed_over_where_nobody_knows_or_the_newest_come_first() -> None:
    query = TaskQuery(states=(QUEUED,), is_oldest_first=True)
    assert first_page(query, None) == query
    assert first_page(query, IDLE) == query
    newest = TaskQuery(states=(QUEUED,))
    assert first_page(newest, BUSY) == newest
