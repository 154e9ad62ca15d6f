"""The log: which lines there are, what they say, and in which form."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from api.asgi_client import Client, answer_of
from headgate.api.http.server import RequestLog
from headgate.cli.logs import configure_logs, is_told, task_logger
from headgate.config import LogSettings
from headgate.config.settings import LogFormat
from headgate.core.lifecycle import EXPIRED_WHILE_QUEUED
from headgate.core.task import Progress, Submission, Task, TaskRecord, TaskStatus
from headgate.engine.events import EventFeed
from headgate.engine.task_log import TaskLog

LEVELS = {"debug", "info", "warning", "error", "exception"}
CANARY = "canary-secret"
FORM = ("event", "level", "timestamp")
LOG_FORMATS: tuple[LogFormat, ...] = ("json", "text")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leave the loggers of other tests as they were."""
    yield
    structlog.reset_defaults()
    for name in ("headgate", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


class Written:
    """What was written to standard error so far."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self._text = ""

    @property
    def text(self) -> str:
        self._text += self._capture.readouterr().err
        return self._text

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def written(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.delenv("HEADGATE_LOG_LEVEL", raising=False)
    return Written(capfd)


def record(status: TaskStatus, attempt: int, error: str | None = None) -> TaskRecord:
    return TaskRecord(
        task=Task(id="tsk_1", agent_id="a", status=status, created_at=100.0, target="echo"),
        submission=Submission(action="x", labels={"k": CANARY}),
        progress=Progress(attempt=attempt, started_at=101.0, completed_at=103.5),
        error=error,
    )


def logged(written: Written, *records: TaskRecord) -> list[dict[str, Any]]:
    asyncio.run(tell(*records))
    return written.lines


async def tell(*records: TaskRecord) -> EventFeed:
    feed = EventFeed(lambda: 102.0)
    feed.open(1)
    feed.subscribe(events=TaskLog(task_logger()))
    for one in records:
        feed.observe([one])
    # Lines are written when the loop comes round.
    await asyncio.sleep(0)
    return feed


def test_every_step_of_a_task_is_a_line_without_what_it_was_given(
    written: Written,
) -> None:
    configure_logs(LogSettings(format="json"))
    lines = logged(
        written,
        record(TaskStatus.QUEUED, 0),
        record(TaskStatus.RUNNING, 1),
        record(TaskStatus.QUEUED, 1, f"answered 400: {CANARY} is no page"),
        record(TaskStatus.RUNNING, 2),
        record(TaskStatus.DONE, 2),
    )
    assert [line["event"] for line in lines] == [
        "task submitted",
        "task dispatched",
        "task retrying",
        "task dispatched",
        "task completed",
    ]
    assert all(line["task_id"] == "tsk_1" and line["level"] == "info" for line in lines)
    assert (lines[1]["wait_ms"], lines[4]["run_ms"]) == (1000, 2500)
    assert CANARY not in written.text


ENDS = [
    (TaskStatus.FAILED, f"it broke: token={CANARY}", "task failed"),
    (TaskStatus.FAILED, EXPIRED_WHILE_QUEUED, "task expired"),
    (TaskStatus.CANCELLED, "cancelled", "task cancelled"),
    (TaskStatus.REJECTED, "queue full", "task rejected"),
]


@pytest.mark.parametrize(("status", "error", "event"), ENDS)
def test_every_end_has_its_line(
    written: Written, status: TaskStatus, error: str, event: str
) -> None:
    configure_logs(LogSettings(format="json"))
    assert [line["event"] for line in logged(written, record(status, 1, error))] == [event]
    assert CANARY not in written.text


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("answered 500: no such page", "answered 500: no such page"),
        (f"exit 3: Authorization: Bearer {CANARY}", "exit 3: Authorization: Bearer [redacted]"),
        ("two\n  lines\x1b[2J", "two lines\\x1b[2J"),
        ("", ""),
        (None, ""),
        ("x" * 10_000, "x" * 299 + "…"),
    ],
)
def test_why_a_task_failed_is_one_bounded_line_without_secrets(
    written: Written, error: str | None, told: str
) -> None:
    configure_logs(LogSettings(format="json"))
    (line,) = logged(written, record(TaskStatus.FAILED, 1, error))
    assert (line["event"], line["error"]) == ("task failed", told)
    assert CANARY not in written.text


def test_the_level_comes_from_the_settings_unless_the_variable_says_otherwise(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logs(LogSettings(level="warning"))
    assert (is_told(logging.INFO), is_told(logging.WARNING)) == (False, True)
    monkeypatch.setenv("HEADGATE_LOG_LEVEL", "debug")
    configure_logs(LogSettings(level="warning"))
    assert is_told(logging.DEBUG)


@pytest.mark.parametrize(("wanted", "is_json"), [("auto", True), ("json", True), ("text", False)])
def test_the_form_of_lines_is_as_configured(written: Written, wanted: Any, is_json: bool) -> None:
    configure_logs(LogSettings(format=wanted))
    structlog.get_logger("headgate.x").info("hello", number=3, odd=object())
    assert written.text.startswith('{"number":3') is is_json
    assert "hello" in written.text


def test_loggers_of_the_standard_library_write_the_same_lines(written: Written) -> None:
    configure_logs(LogSettings(format="json"))
    logging.getLogger("headgate.api").warning("request %s failed", "r-1")
    (line,) = written.lines
    assert (line["event"], line["level"]) == ("request r-1 failed", "warning")


class Full(io.BytesIO):
    """A disk without any room."""

    def write(self, _: Any) -> int:
        raise OSError(28, "No space left on device")


def test_a_log_that_cannot_be_written_stops_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(Full(), write_through=True))
    for form in LOG_FORMATS:
        configure_logs(LogSettings(format=form))
        assert asyncio.run(tell(record(TaskStatus.QUEUED, 0))).next == 2


def test_lines_about_tasks_have_the_form_of_all_others(written: Written) -> None:
    configure_logs(LogSettings(format="json"))
    began_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    (quick,) = logged(written, record(TaskStatus.CANCELLED, 0))
    facts = {name: value for name, value in quick.items() if name not in FORM}
    structlog.get_logger("headgate.x").info(quick["event"], **facts)
    usual = written.lines[-1]
    assert list(usual) == list(quick)
    assert len(usual["timestamp"]) == len(quick["timestamp"])
    assert began_at <= quick["timestamp"] <= usual["timestamp"]
    assert [usual[name] for name in quick if name != "timestamp"] == [
        value for name, value in quick.items() if name != "timestamp"
    ]


def test_on_a_terminal_lines_about_tasks_are_for_people(written: Written) -> None:
    configure_logs(LogSettings(format="text"))
    asyncio.run(tell(record(TaskStatus.QUEUED, 0)))
    assert "task submitted" in written.text
    assert not written.text.startswith("{")


async def test_a_request_is_a_line_without_its_query_and_headers(written: Written) -> None:
    configure_logs(LogSettings(level="debug", format="json"))
    app: Any = RequestLog(Client().app)
    headers = {"authorization": f"Bearer {CANARY}"}
    await answer_of(app, "GET", f"/livez?token={CANARY}", headers=headers)
    (line,) = written.lines
    assert (line["event"], line["method"], line["path"]) == ("request", "GET", "/livez")
    assert (line["status"], bool(line["request_id"])) == (200, True)
    assert CANARY not in written.text


def test_errors_of_slots_that_are_meant_to_fail_are_left_out_and_no_others(
    written: Written,
) -> None:
    configure_logs(LogSettings(format="json"), failing_slots=("retired",))
    log = structlog.get_logger("headgate.slots")
    log.error("refused", slot="retired")
    log.warning("near its limit", slot="retired")
    log.error("refused", slot="main")
    log.error("something else")
    assert [line["event"] for line in written.lines] == [
        "near its limit", "refused", "something else",
    ]  # fmt: skip
