"""A task as people read it."""

from __future__ import annotations

import pytest

from headgate.cli.output import clock_time
from headgate.cli.task_view import lines_of
from headgate.core.task import PastAttempt, Progress, Task, TaskRecord, TaskStatus, Terms
from headgate.core.task_view import exact_moment, snapshot_of, whole_snapshot_of


def usage_line(*, used: tuple[int, int], assumed: tuple[int, int]) -> str:
    record = TaskRecord(
        task=Task(id="t", project_id="x", created_at=1.0, status=TaskStatus.FAILED),
        terms=Terms(attempt_seconds=30.0),
        progress=Progress(
            used_tokens=used[0],
            used_micro_usd=used[1],
            assumed_tokens=assumed[0],
            assumed_micro_usd=assumed[1],
        ),
        tokens=used[0],
        micro_usd=used[1],
    )
    lines = lines_of(snapshot_of(record))
    assert any(line.split() == ["timeout", "seconds", "30.0"] for line in lines)
    (line,) = [line for line in lines if line.startswith("usage")]
    return line.removeprefix("usage").strip()


@pytest.mark.parametrize(
    ("used", "assumed", "shown"),
    [
        ((0, 0), (0, 0), "nothing"),
        ((0, 70_000), (0, 70_000), "$0.07 (assumed $0.07)"),
        ((1_512, 193_400), (0, 0), "1512 tokens, $0.1934"),
        ((207, 1), (200, 0), "207 tokens, $0.000001 (assumed 200 tokens)"),
        ((9, 140_000), (4, 70_000), "9 tokens, $0.14 (assumed 4 tokens, $0.07)"),
    ],
)
def test_usage_is_one_line_that_says_what_is_assumed(
    used: tuple[int, int], assumed: tuple[int, int], shown: str
) -> None:
    assert usage_line(used=used, assumed=assumed) == shown


def test_an_attempt_before_the_latest_is_one_line_that_nothing_can_break() -> None:
    attempts = (
        PastAttempt(
            attempt=1,
            started_at=10.0,
            ended_at=12.0,
            error="it broke\nat\x1b[2J once",
            agent_id="coder",
            slot="work",
            node_id="n1",
            tokens=9,
            assumed_tokens=9,
        ),
        PastAttempt(attempt=2, ended_at=20.0),
    )
    record = TaskRecord(
        task=Task(id="t", project_id="x", created_at=1.0), progress=Progress(attempts=attempts)
    )
    (block,) = [one for one in lines_of(whole_snapshot_of(record)) if one.startswith("attempts")]
    shown = [line.strip() for line in block.removeprefix("attempts").split("\n")]
    first, second = (clock_time(exact_moment(at)) for at in (12.0, 20.0))
    where, booked = "agent coder, slot work, node n1", "booked 9 tokens (assumed 9 tokens)"
    assert shown == [
        f"1: ended {first}, took 2.0 s, {where}, {booked}: it broke\\nat\\x1b[2J once",
        f"2: ended {second}, not begun, booked nothing",
    ]
