"""What is told while a run goes on: frames of any size, lines that stay few, nobody to tell."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cli.run_reports import (
    BEGAN_AT,
    SESSION_MONEY,
    SO_FAR_SECONDS,
    done,
    failed,
    report,
    running,
    waiting,
)
from headgate.cli.run_progress import (
    Lines,
    Live,
    Progress,
    RemainingTime,
    Screen,
    beginning_text,
    drawn,
    followed,
    summary_text,
)
from headgate.workflow.report import RunReport


def frame(
    shown: RunReport,
    *,
    width: int = 80,
    height: int = 24,
    note: str = "",
    left: float | None = None,
) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    screen = Screen(
        report=shown,
        now=BEGAN_AT + SO_FAR_SECONDS,
        width=width,
        height=height,
        note=note,
        seconds_left=left,
    )
    console.print(drawn(screen))
    return [line.rstrip() for line in console.export_text().rstrip("\n").split("\n")]


def test_a_frame_shows_steps_reasons_the_bar_and_the_budgets() -> None:
    shown = report(
        running(12),
        running(13, attempt=2),
        waiting("judge", "the budget of session:eval-1 is full"),
        counts={"done": 12, "failed": 1, "running": 2, "waiting": 10},
        money=SESSION_MONEY,
    )
    assert frame(shown, note="finishing 2 steps; Ctrl-C again stops them", left=240.0) == [
        "eval 20270115-080000-3fa2  12 s",
        "⠋ case[12]  12 s",
        "⠋ case[13]  12 s  attempt 2",
        "  judge waits: the budget of session:eval-1 is full",
        f"{'━' * 20}{'─' * 20}  13 of 25, 1 failed  about 4 min left",
        "session:eval-1: $32.40 spent, $1.20 reserved of $50.00",
        "workflow:eval: $0.84 spent, $0.07 reserved of $5.00",
        "finishing 2 steps; Ctrl-C again stops them",
    ]


def test_steps_that_do_not_fit_the_screen_are_counted() -> None:
    rows = [running(index) for index in range(30)]
    lines = frame(report(*rows), height=10)
    assert len(lines) == 9
    assert lines[1].startswith("⠋ case[0]")
    assert lines[-2] == "  … and 24 more"
    assert "12 of 42" in lines[-1]


def test_a_narrow_terminal_cuts_lines_off_and_breaks_none() -> None:
    shown = report(running(3), waiting("judge", "a very long reason " * 10), money=SESSION_MONEY)
    lines = frame(shown, width=24)
    assert len(lines) == 6
    assert max(len(line) for line in lines) <= 24
    assert any(line.endswith("…") for line in lines)


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 80), st.integers(0, 5))
def test_a_frame_fits_every_terminal(width: int, height: int, rows: int, reasons: int) -> None:
    shown = report(
        *(running(index) for index in range(rows)),
        *(waiting(f"w{index}", f"{index} no room " * 20) for index in range(reasons)),
        counts={"done": 1, "running": rows},
        money=SESSION_MONEY,
    )
    lines = frame(shown, width=width, height=height, note="a note")
    assert len(lines) <= max(1, height - 1)
    assert all(len(line) <= width for line in lines)


def test_a_reason_that_many_have_is_told_once() -> None:
    rows = [waiting(f"judge[{index}]", "no permit is free") for index in range(5)]
    lines = frame(report(*rows, waiting("last", "the budget is full"), counts={"queued": 6}))
    assert lines[1:3] == [
        "  judge[0] waits: no permit is free",
        "  last waits: the budget is full",
    ]
    assert len(lines) == 4


def test_control_characters_of_a_reason_do_not_reach_the_terminal() -> None:
    lines = frame(report(waiting("judge", "\x1b[2J gone")))
    assert r"\x1b[2J gone" in lines[1]


def test_the_rate_is_that_of_the_last_minute() -> None:
    remaining_time = RemainingTime()
    for second in range(120):
        remaining_time.note(second * 10, now=float(second))
    for second in range(120, 240):
        remaining_time.note(1_200 + (second - 120), now=float(second))
    left = remaining_time.seconds_left(total=1_380, ended=1_319, now=239.0)
    assert left == pytest.approx(61.0, abs=1.5)


def test_what_was_kept_by_a_resume_is_no_rate() -> None:
    remaining_time = RemainingTime()
    remaining_time.note(9_000, now=0.0)
    assert remaining_time.seconds_left(total=10_000, ended=9_000, now=10.0) is None
    assert remaining_time.seconds_left(total=10_000, ended=9_010, now=10.0) == pytest.approx(990.0)


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_time_left_is_that_of_the_last_end_and_none_when_nothing_ends(at_once: int) -> None:
    remaining_time = RemainingTime()
    found: list[float | None] = []
    for tenth in range(121):
        # Twelve steps of a second each begin; from the second batch on none of them ends.
        now = tenth / 10
        ended = at_once * min(int(now), 2)
        remaining_time.note(ended, now=now)
        found.append(remaining_time.seconds_left(total=12, ended=ended, now=now, running=at_once))
    told = [(tenth, left) for tenth, left in enumerate(found) if left is not None]
    assert [tenth for tenth, _ in told] == list(range(20, 20 + len(told)))
    assert 29 <= told[-1][0] <= 45
    assert all(later < sooner for (_, sooner), (_, later) in pairwise(told))


def test_a_count_of_one_is_one_time() -> None:
    two = report(counts={"done": 1})
    two = msgspec.structs.replace(two, steps=(*two.steps, *two.steps), ended=0)
    assert beginning_text(two, Path("d")).split(", ")[1] == "2 steps that run 1 time; kept in d"


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = BEGAN_AT

    def __call__(self) -> float:
        return self.now


def written_by(work: Callable[[Lines, Clock], None]) -> list[str]:
    lines: list[str] = []
    clock = Clock()
    work(Lines(lines.append, clock), clock)
    return lines


def test_a_short_run_in_a_pipe_has_a_line_for_each_end() -> None:
    def short(told: Lines, clock: Clock) -> None:
        told.ended(done(0))
        told.ended(failed(1))

    assert written_by(short) == [
        "case[0] done after 0.3 s, $0.07",
        "case[1] failed after 2.0 s, $0.07: exit code 3: no such page",
    ]


@pytest.mark.parametrize("seconds_each", [0.001, 0.5, 60.0])
def test_ten_thousand_steps_are_a_few_hundred_lines_at_any_speed(seconds_each: float) -> None:
    shown = report(running(1), money=SESSION_MONEY)

    def long(told: Lines, clock: Clock) -> None:
        for index in range(10_000):
            clock.now += seconds_each
            told.ended(failed(index) if index % 3 == 0 else done(index))
            told.look(shown)

    lines = written_by(long)
    assert 100 < len(lines) < 500
    assert lines[100].startswith(("case[", "12 of 13; 1 running; session:eval-1: $32.40 spent"))


def test_silence_is_broken_by_how_the_run_stands_and_why_a_step_waits() -> None:
    shown = report(waiting("judge", "the budget resets at 12:00"), counts={"done": 3, "queued": 1})

    def quiet(told: Lines, clock: Clock) -> None:
        for _ in range(52):
            clock.now += 0.1
            told.look(shown)

    assert written_by(quiet) == ["3 of 4; 0 running; judge waits: the budget resets at 12:00"]


def test_a_reader_that_went_away_is_told_nothing_more_and_hurts_nobody() -> None:
    calls = []

    def broken(line: str) -> None:
        calls.append(line)
        raise BrokenPipeError

    told = Lines(broken, Clock())
    for index in range(3):
        told.ended(done(index))
    assert len(calls) == 1


def test_the_display_of_a_terminal_is_gone_afterwards_and_failures_stay() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, height=24, no_color=True)
    live = Live(console, Clock())
    live.look(report(running(1)))
    live.ended(done(1))
    live.ended(failed(2))
    live.note("finishing 1 step; Ctrl-C again stops it")
    live.look(report(running(1)))
    live.close()
    text = written.getvalue()
    assert "case[2] failed after 2.0 s, $0.07: exit code 3: no such page" in text
    assert "case[1] done" not in text
    assert "finishing 1 step" in text
    assert "\x1b[?25h" in text


def test_a_terminal_that_went_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        broken = False

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().write(text)

    written = Gone()
    live = Live(Console(file=written, force_terminal=True, width=80, height=24), Clock())
    written.broken = True
    before = written.getvalue()
    live.look(report(running(1)))
    live.ended(failed(2))
    live.close()
    assert written.getvalue() == before


async def test_a_run_is_looked_at_until_it_has_ended() -> None:
    looks: list[RunReport] = []
    closed: list[bool] = []

    class Counting(Lines):
        def look(self, report: RunReport) -> None:
            looks.append(report)
            if len(looks) == 1:
                seen.set()

        def close(self) -> None:
            closed.append(True)

    seen = asyncio.Event()
    told: Progress = Counting(lambda _line: None, Clock())
    async with followed(told, report):
        await seen.wait()
    assert looks
    assert closed == [True]


def test_a_summary_leaves_out_what_nobody_knows() -> None:
    assert summary_text(report(counts={"done": 1, "waiting": 1}), None) == "1 of 2; 0 running"
