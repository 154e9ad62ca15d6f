"""Since when tasks wait and run, also those that were tried before."""

from __future__ import annotations

import pytest

from headgate.core.task import PastAttempt, Progress, Task, TaskRecord, TaskStatus
from headgate.dashboard.tasks import row_of

BEFORE = PastAttempt(attempt=1, started_at=110.0, ended_at=150.0)
FIRST = Progress(attempt=1, started_at=110.0)
AGAIN = Progress(attempt=2, started_at=110.0, attempts=(BEFORE,))
BEGUN = Progress(attempt=2, started_at=160.0, attempts=(BEFORE,))
ENDED = Progress(attempt=2, started_at=160.0, completed_at=165.0, attempts=(BEFORE,))


@pytest.mark.parametrize(
    ("status", "progress", "not_before", "seconds"),
    [
        (TaskStatus.QUEUED, Progress(), None, 100.0),
        (TaskStatus.QUEUED, Progress(), 180.0, 20.0),
        (TaskStatus.QUEUED, Progress(attempt=1, attempts=(BEFORE,)), None, 50.0),
        (TaskStatus.QUEUED, Progress(attempt=1, attempts=(BEFORE,)), 170.0, 30.0),
        (TaskStatus.ASSIGNED, Progress(attempt=1), None, None),
        (TaskStatus.ASSIGNED, AGAIN, None, None),
        (TaskStatus.RUNNING, FIRST, None, 90.0),
        (TaskStatus.RUNNING, BEGUN, None, 40.0),
        (TaskStatus.DONE, ENDED, None, 5.0),
    ],
)
def test_a_row_has_the_time_of_the_latest_attempt_alone(
    status: TaskStatus, progress: Progress, not_before: float | None, seconds: float | None
) -> None:
    task = Task(id="t1", agent_id="a", created_at=100.0, status=status, not_before=not_before)
    assert row_of(TaskRecord(task=task, progress=progress), now=200.0).seconds == seconds
