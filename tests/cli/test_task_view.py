"""A task as people read it."""

from __future__ import annotations

import pytest

from headgate.cli.task_view import lines_of
from headgate.core.records import Progress, TaskRecord, Terms
from headgate.core.tasks import Task, TaskStatus
from headgate.task_snapshot import snapshot_of


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
