"""Why a task waits that somebody waits for: said once it takes a moment, and when it changes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from cli.said import in_zone
from headgate.api.schema.tasks import ReasonBody, WhyBody
from headgate.cli.main import run
from headgate.cli.submit_lines import SAID_AFTER_SECONDS, WaitReasons
from headgate.core.task import TaskStatus
from headgate.errors import NotAllowedError, ServiceUnavailableError

PAUSED = ReasonBody(detail={"reason": "project_paused"}, message="project off is paused")


def busy(inflight: int) -> ReasonBody:
    detail = {"reason": "agent_full", "inflight": inflight}
    return ReasonBody(detail=detail, message=f"agent a runs {inflight} tasks")


class Stage:
    """A task whose reasons a test changes, and what was said of them, with the time."""

    def __init__(self) -> None:
        self.reasons: tuple[ReasonBody, ...] = (PAUSED,)
        self.error: Exception | None = None
        self.asked = 0
        self.now = 100.0
        self.said: list[str] = []
        self.watch = WaitReasons("tsk_1", self.why)

    def why(self, task_id: str) -> WhyBody:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return WhyBody(task_id=task_id, state=TaskStatus.QUEUED, reasons=self.reasons)

    def look(self, state: TaskStatus = TaskStatus.QUEUED, *, after: float = 2.0) -> None:
        self.now += after
        line = self.watch.line(state, self.now)
        if line is not None:
            self.said.append(line)


def test_a_task_that_starts_soon_is_not_asked_about() -> None:
    stage = Stage()
    stage.look(after=0.0)
    stage.look(after=SAID_AFTER_SECONDS / 2)
    stage.look(TaskStatus.RUNNING, after=9.0)
    stage.look(TaskStatus.DONE, after=9.0)
    assert (stage.asked, stage.said) == (0, [])


def test_a_reason_is_said_once_and_again_when_it_is_another() -> None:
    stage = Stage()
    for _ in range(4):
        stage.look()
    stage.reasons = (busy(3),)
    for number in (3, 4, 5):
        stage.reasons = (busy(number),)
        stage.look()
    stage.reasons = (PAUSED, busy(5))
    stage.look()
    assert stage.said == [
        "tsk_1 waits: project off is paused",
        "tsk_1 waits: agent a runs 3 tasks",
        "tsk_1 waits: project off is paused; agent a runs 5 tasks",
    ]


def test_an_end_that_moves_is_said_again_by_the_minute() -> None:
    stage = Stage()

    def until(seconds: float) -> tuple[ReasonBody, ...]:
        at = datetime.fromtimestamp(seconds, UTC)
        return (ReasonBody(detail={"reason": "rate_limit"}, message="limited", until=at),)

    for moment in (1_000_000_020.0, 1_000_000_021.0, 1_000_000_030.0, 1_000_000_300.0):
        stage.reasons = until(moment)
        with in_zone("UTC"):
            stage.look()
    stage.look()
    assert [line.partition(" (")[0] for line in stage.said] == [
        "tsk_1 waits: limited, until 2001-09-09 01:47:01 UTC",
        "tsk_1 waits: limited, until 2001-09-09 01:51:40 UTC",
    ]


def test_what_waits_again_after_a_try_says_it_again() -> None:
    stage = Stage()
    for state in (TaskStatus.QUEUED, TaskStatus.QUEUED, TaskStatus.RUNNING) * 2:
        stage.look(state)
    assert stage.said == ["tsk_1 waits: project off is paused"] * 2


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (ServiceUnavailableError("away", code="unreachable"), 3),
        (NotAllowedError("no", code="forbidden"), 1),
    ],
)
def test_who_cannot_be_asked_keeps_nobody(error: Any, asked: int) -> None:
    stage = Stage()
    stage.error = error
    for _ in range(4):
        stage.look()
    assert (stage.said, stage.asked) == ([], asked)


def test_a_task_without_reasons_says_nothing() -> None:
    stage = Stage()
    stage.reasons = ()
    stage.look()
    stage.look()
    assert stage.said == []


def test_a_step_of_a_run_is_explained_where_runs_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["why", "case[1]"]) == 2
    line = "headgate: ID: is a step of a run; headgate runs show last says why its steps wait\n"
    assert capsys.readouterr().err == line
