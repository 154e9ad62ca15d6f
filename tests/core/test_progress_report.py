"""What is kept of a report, and where one goes that a function makes."""

from __future__ import annotations

import asyncio
import math
import os
from contextvars import copy_context
from pathlib import Path

import pytest

import headgate
from headgate.core.task import MAX_REPORT_CHARACTERS, ProgressReport
from headgate.executors.executor import taking_reports


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        (0.4, 0.4),
        (-1.0, 0.0),
        (7.0, 1.0),
        (math.inf, 1.0),
        (math.nan, None),
    ],
)
def test_a_fraction_is_from_0_to_1(given: float | None, kept: float | None) -> None:
    assert ProgressReport(fraction=given).bounded().fraction == kept


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("12 of 30 files", "12 of 30 files"),
        (" two\nlines\t", "two lines"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\ud800", "\\ud800"),
        ("x" * 200, "x" * 200),
        ("x" * 10**6, "x" * 199 + "…"),
        ("\u202e" * 300, "\\u202e" * 33 + "\\…"),
    ],
)
def test_a_text_is_one_short_printable_line(given: str, kept: str) -> None:
    text = ProgressReport(text=given).bounded().text
    assert text == kept
    assert len(text) <= MAX_REPORT_CHARACTERS


def reported(*arguments: object) -> list[ProgressReport]:
    taken: list[ProgressReport] = []

    def run() -> None:
        taking_reports.set(taken.append)
        headgate.report_progress(*arguments)  # type: ignore[arg-type]

    copy_context().run(run)
    return taken


def test_a_report_goes_to_whoever_runs_the_attempt() -> None:
    assert reported(0.4, "12 of 30") == [ProgressReport(fraction=0.4, text="12 of 30")]
    assert reported() == [ProgressReport()]


def test_a_report_never_fails_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headgate.report_progress(0.5, "nobody runs this")
    os.mkfifo(tmp_path / "unread")
    for name in ("unread", "missing"):
        monkeypatch.setenv("HEADGATE_PROGRESS", str(tmp_path / name))
        headgate.report_progress(0.5, "nobody reads this")
    assert reported("half") == []

    def refuse(_: ProgressReport) -> None:
        raise OSError("the other side is gone")

    async def run() -> str:
        taking_reports.set(refuse)
        headgate.report_progress(0.5)
        return "done"

    assert asyncio.run(run()) == "done"
