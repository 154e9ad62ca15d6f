"""What the node that dispatches knows of those who wait."""

from __future__ import annotations

import pytest

from headgate.core.dispatch_state import Waiting
from headgate.core.task import DEFAULT_TERMS, Task
from headgate.engine.engine import longest_wait
from headgate.storage.tokens import UNBOUND, Bounds

NOW = 100.0


def waiting(*tasks: Task, parents: int = 0) -> dict[str, Waiting]:
    return {
        task.id: Waiting(task=task, terms=DEFAULT_TERMS, attempt=0, waiting_for=parents)
        for task in tasks
    }


OLD = Task(id="old", project_id="p", agent_id="a", created_at=10.0)
YOUNG = Task(id="young", project_id="q", agent_id="b", created_at=50.0)
TIMED = Task(id="timed", project_id="p", created_at=1.0, not_before=90.0)
LATE = Task(id="late", project_id="p", created_at=1.0, not_before=200.0)


@pytest.mark.parametrize(
    ("tasks", "bounds", "found"),
    [
        ((), UNBOUND, None),
        ((YOUNG, OLD), UNBOUND, ("old", 10.0)),
        ((YOUNG, TIMED), UNBOUND, ("young", 50.0)),
        ((TIMED,), UNBOUND, ("timed", 90.0)),
        ((LATE,), UNBOUND, None),
        ((YOUNG, OLD), Bounds(project_id="q"), ("young", 50.0)),
        ((YOUNG, OLD), Bounds(agent_id="b"), ("young", 50.0)),
        ((OLD,), Bounds(project_id="q"), None),
    ],
)
def test_who_could_start_and_is_kept_waiting_longest_is_found(
    tasks: tuple[Task, ...], bounds: Bounds, found: tuple[str, float] | None
) -> None:
    one = longest_wait(waiting(*tasks), NOW, bounds)
    assert (None if one is None else (one.task_id, one.since)) == found


def test_nobody_is_kept_waiting_by_us_for_a_parent() -> None:
    assert longest_wait(waiting(OLD, parents=1), NOW) is None
