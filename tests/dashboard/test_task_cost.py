"""What a task was thought to cost, and what it did."""

from __future__ import annotations

from typing import Any

import pytest

from dashboard.test_task_page import record_of
from headgate.core.task import Progress, Task, TaskRecord, TaskStatus, Terms
from headgate.dashboard.task import CostRow, cost_rows
from headgate.dashboard.tasks import row_of

Row = tuple[str, int | None, int | None, str]


def record(status: TaskStatus, *, estimate: int | None = None, **fields: Any) -> TaskRecord:
    task = Task(id="t1", agent_id="a", created_at=100.0, status=status, estimate_tokens=estimate)
    return record_of(task=task, **fields)


def shown(row: CostRow) -> Row:
    return row.name, row.tokens, row.micro_usd, row.absent


QUEUED, RUNNING, DONE, FAILED = (
    TaskStatus.QUEUED,
    TaskStatus.RUNNING,
    TaskStatus.DONE,
    TaskStatus.FAILED,
)
COSTS: list[tuple[TaskRecord, list[Row]]] = [
    (
        record(QUEUED),
        [("Estimate", None, None, "none"), ("Booked", None, None, "not yet")],
    ),
    (
        record(FAILED),
        [("Estimate", None, None, "none"), ("Booked", None, None, "nothing")],
    ),
    (
        record(
            RUNNING,
            estimate=40,
            terms=Terms(estimate_micro_usd=7, cost_micro_usd=9),
            progress=Progress(attempt=1, reserved_tokens=50, reserved_micro_usd=8),
        ),
        [
            ("Estimate", 40, 7, "none"),
            ("Known beforehand", None, 9, "none"),
            ("Reserved now", 50, 8, "none"),
            ("Booked", None, None, "not yet"),
        ],
    ),
    (
        record(
            DONE,
            tokens=0,
            micro_usd=3,
            progress=Progress(
                attempt=1, reserved_micro_usd=8, reported_micro_usd=3, used_micro_usd=3
            ),
        ),
        [
            ("Estimate", None, None, "none"),
            ("Reserved before", 0, 8, "none"),
            ("Reported", None, 3, "not said"),
            ("Booked", 0, 3, "none"),
        ],
    ),
    (
        record(
            DONE,
            tokens=30,
            micro_usd=3,
            progress=Progress(
                attempt=2,
                used_tokens=80,
                used_micro_usd=11,
                assumed_tokens=50,
                assumed_micro_usd=8,
            ),
        ),
        [
            ("Estimate", None, None, "none"),
            ("Booked", 80, 11, "none"),
            ("Assumed part", 50, 8, "none"),
            ("The last attempt", 30, 3, "none"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("assumed", "text"),
    [((0, 0), ""), ((80, 11), "assumed"), ((80, 0), "partly assumed"), ((0, 5), "partly assumed")],
)
def test_the_list_says_which_amounts_nobody_reported(assumed: tuple[int, int], text: str) -> None:
    progress = Progress(
        attempt=1,
        used_tokens=80,
        used_micro_usd=11,
        assumed_tokens=assumed[0],
        assumed_micro_usd=assumed[1],
    )
    task = record(DONE, tokens=80, micro_usd=11, progress=progress)
    assert row_of(task, now=200.0).assumed == text


@pytest.mark.parametrize(("task", "rows"), COSTS)
def test_the_table_of_costs_has_what_is_known(task: TaskRecord, rows: list[Row]) -> None:
    assert [shown(row) for row in cost_rows(task)] == rows
