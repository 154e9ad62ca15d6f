"""What is told while a run goes on, always on standard error: a live display, or plain lines.

Rules: telling costs a run next to nothing, and can never end it. A frame takes at most a tenth of
the time; the lines of a run are a few hundred at most, however long it is; and where nobody can be
told any more, as in a closed pipe, nothing further is said.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from headgate.cli.output import is_drawable
from headgate.cli.running.pace import Pace
from headgate.cli.running.words import (
    count_of,
    counts_text,
    end_text,
    left_text,
    money_text,
    shown_money,
    waiting_rows,
    waiting_text,
)
from headgate.core.texts.printable import printable
from headgate.runs.report import RunReport, StepRow, StepState

if TYPE_CHECKING:
    from rich.console import Console

FRAME_SECONDS = 0.1
LARGEST_PART = 0.1
END_LINES = 100
FAILURE_LINES = 100
REASON_LINES = 20
QUIET_SECONDS = 5.0
QUIET_PART = 0.05
_LEFT_OUT = (StepState.SKIPPED, StepState.NOT_RUN)


class Progress(Protocol):
    """Tells of a run."""

    def begin(self, report: RunReport, folder: Path) -> None:
        """Tell what is about to run."""

    def ended(self, row: StepRow) -> None:
        """Tell of a run of a step that has ended; it is quick and raises nothing."""

    def tell(self, line: str) -> None:
        """Tell something that stays to be read."""

    def note(self, line: str) -> None:
        """Tell what holds from now on, until the next such line."""

    def look(self, report: RunReport) -> None:
        """Show how the run stands now."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Silence:
    """Tells nobody: standard error is closed."""

    def begin(self, report: RunReport, folder: Path) -> None:
        """Do nothing."""

    def ended(self, row: StepRow) -> None:
        """Do nothing."""

    def tell(self, line: str) -> None:
        """Do nothing."""

    def note(self, line: str) -> None:
        """Do nothing."""

    def look(self, report: RunReport) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lines:
    """Plain lines: the first ends one by one, then every so often how the run stands.

    The pause between two grows with the age of the run, so that their number hardly does.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._write = write
        self._clock = clock
        self._pace = Pace()
        self._began_at = self._told_at = clock()
        self._lines_left = END_LINES
        self._failures_left = FAILURE_LINES
        self._reasons: set[str] = set()
        self._is_mute = False

    def begin(self, report: RunReport, folder: Path) -> None:
        """Write which run it is, how large, and where it is kept."""
        self.tell(beginning_text(report, folder))

    def ended(self, row: StepRow) -> None:
        """Write a line for it, as long as there are not too many."""
        if row.state in _LEFT_OUT:
            self._tell_once(row)
            return
        if self._lines_left:
            self._lines_left -= 1
        elif row.state is StepState.FAILED and self._failures_left:
            self._failures_left -= 1
        else:
            return
        self.tell(end_text(row, now=self._clock()))

    def _tell_once(self, row: StepRow) -> None:
        """Tell each reason for which something does not run only once."""
        if row.why not in self._reasons and len(self._reasons) < REASON_LINES:
            self._reasons.add(row.why)
            self.tell(end_text(row, now=self._clock()))

    def note(self, line: str) -> None:
        """Write a line."""
        self.tell(line)

    def tell(self, line: str) -> None:
        """Write a line; after the first that cannot be written, none."""
        if self._is_mute:
            return
        self._told_at = self._clock()
        try:
            self._write(printable(line))
        except (OSError, ValueError):
            self._is_mute = True

    def look(self, report: RunReport) -> None:
        """Write how the run stands, if nothing was written for a while."""
        now = self._clock()
        self._pace.note(report.ended, now=now)
        if now - self._told_at >= max(QUIET_SECONDS, QUIET_PART * (now - self._began_at)):
            self.tell(summary_text(report, seconds_left(self._pace, report, now=now)))

    def close(self) -> None:
        """Do nothing: lines are complete as they are."""


class Live:
    """A display that is drawn over itself; lines that are to stay are put above it."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        # Slow to import, and unused in a pipe.
        from rich.live import Live as RichLive  # noqa: PLC0415

        self._console = console
        self._clock = clock
        self._pace = Pace()
        self._note = ""
        self._failures_left = FAILURE_LINES
        self._is_mute = False
        self._live = RichLive(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False
        )
        self._live.start()

    def begin(self, report: RunReport, folder: Path) -> None:
        """Draw the first frame."""
        del folder
        self.look(report)

    def ended(self, row: StepRow) -> None:
        """Keep a failure above the display, if there are not too many; the bar counts the rest."""
        if row.state is StepState.FAILED and self._failures_left:
            self._failures_left -= 1
            self.tell(end_text(row, now=self._clock()))

    def tell(self, line: str) -> None:
        """Put a line above the display, where it stays."""
        if self._is_mute:
            return
        try:
            self._console.print(printable(line), markup=False, highlight=False)
        except (OSError, ValueError):
            self._is_mute = True

    def note(self, line: str) -> None:
        """Have a line stand below all others from now on."""
        self._note = line

    def look(self, report: RunReport) -> None:
        """Draw one frame."""
        from headgate.cli.running.screen import Screen, drawn  # noqa: PLC0415

        if self._is_mute:
            return
        now = self._clock()
        self._pace.note(report.ended, now=now)
        screen = Screen(
            report=report,
            now=now,
            width=self._console.width,
            height=self._console.height,
            seconds_left=seconds_left(self._pace, report, now=now),
            note=self._note,
        )
        try:
            self._live.update(drawn(screen), refresh=True)
        except (OSError, ValueError):
            self._is_mute = True

    def close(self) -> None:
        """Take the display away; what follows begins where it was."""
        try:
            self._live.stop()
        except (OSError, ValueError):
            self._is_mute = True


class LogStream(io.BytesIO):
    """Where lines of the log go while a run is shown: through what shows it."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def write(self, content: Any, /) -> int:  # noqa: ANN401 - whatever is bytes
        """Tell what comes, without colours or the end of its line."""
        data = bytes(content)
        self._progress.tell(data.decode(errors="replace").rstrip("\n"))
        return len(data)


def beginning_text(report: RunReport, folder: Path) -> str:
    """Say which run begins, how large it is, and where it is kept."""
    is_one = len(report.steps) == 1
    steps = "1 step that runs" if is_one else f"{len(report.steps):,} steps that run"
    runs = f"{steps} {report.total:,} {'time' if report.total == 1 else 'times'}"
    if report.total == len(report.steps):
        runs = steps.partition(" that")[0]
    before = f", {report.ended:,} of them done before" if report.ended else ""
    return f"{report.workflow}: run {report.run_id}, {runs}{before}; kept in {folder}"


def seconds_left(pace: Pace, report: RunReport, *, now: float) -> float | None:
    """Return how long a run takes yet; None as long as nobody can tell."""
    running = count_of(report, StepState.RUNNING)
    return pace.seconds_left(total=report.total, ended=report.ended, now=now, running=running)


def summary_text(report: RunReport, seconds_left: float | None) -> str:
    """Say in one line how a run stands."""
    running = count_of(report, StepState.RUNNING)
    waiting = waiting_rows(report.rows)[:1]
    parts = [
        f"{counts_text(report)}; {running:,} running",
        *(money_text(one) for one in shown_money(report.money)),
        left_text(seconds_left),
        *map(waiting_text, waiting),
    ]
    return "; ".join(part for part in parts if part)


def progress_here(clock: Callable[[], float] = time.time) -> Progress:
    """Return what fits standard error: a display for a terminal, lines for anything else."""
    stream = sys.stderr
    if stream is None:
        return Silence()
    if is_drawable(stream):
        from rich.console import Console  # noqa: PLC0415

        return Live(Console(stderr=True), clock)
    return Lines(_write_line, clock)


@asynccontextmanager
async def followed(
    progress: Progress,
    report: Callable[[], RunReport],
    *,
    trouble: Callable[[], str] = lambda: "",
) -> AsyncIterator[None]:
    """Show how a run stands, again and again while the body runs.

    `trouble` says what keeps the whole run from going on, if anything does.
    """
    looking = asyncio.create_task(_keep_looking(progress, report, trouble), name="progress")
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait((looking,))
        progress.close()


async def _keep_looking(
    progress: Progress, report: Callable[[], RunReport], trouble: Callable[[], str]
) -> None:
    told = ""
    while True:
        began = time.perf_counter()
        if (now := trouble()) != told:
            told = now
            progress.note(told or "the run goes on")
        progress.look(report())
        took = time.perf_counter() - began
        await asyncio.sleep(max(FRAME_SECONDS, took / LARGEST_PART))


def _write_line(line: str) -> None:
    click.echo(line, err=True)
