"""What is told while a run goes on, always on standard error: a live display, or plain lines.

Rules: telling costs a run next to nothing, and can never end it. A frame takes at most a tenth of
the time; the lines of a run are a few hundred at most, however long it is; and where nobody can be
told any more, as in a closed pipe, nothing further is said.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

import click
import msgspec
from rich.console import Group
from rich.text import Text

from headgate.cli.connection import default_directory
from headgate.cli.output import (
    FRAMES,
    Row,
    clock_time,
    is_drawable,
    length_of,
    moment_of,
    print_json,
    print_table,
    run_json,
)
from headgate.core.budgets.scopes import Scope, leaf_kind
from headgate.core.money import format_usd
from headgate.core.text import printable
from headgate.workflow.backend import Money, StepTask
from headgate.workflow.budgets import short_scope
from headgate.workflow.report import RunReport, RunState, StepRow, StepState, StepSummary

if TYPE_CHECKING:
    from rich.console import Console


# How fast a run goes, and so when it ends: measured over the last minute, not from its beginning.
#
# Runs that were kept from before a resume have not been done at any rate, so the first look at a
# run only sets the mark. Rule: the time left only ever grows shorter between two ends; when what
# runs has taken longer than is usual, or nothing can end, none is said.

MEASURED_SECONDS = 60.0
BETWEEN_SECONDS = 1.0
LEAST_SECONDS = 2.0
LATE = 1.5
"""How many times as long as usual nothing may end, until nobody can tell any more."""


class RemainingTime:
    """Is shown how many have ended, and says how long the rest takes at the present rate."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()
        self._latest = 0
        self._latest_at = 0.0

    def note(self, ended: int, *, now: float) -> None:
        """Take a mark, at most one a second, and forget those that are over a minute old."""
        if not self._marks or ended != self._latest:
            self._latest, self._latest_at = ended, now
        if not self._marks or now - self._marks[-1][0] >= BETWEEN_SECONDS:
            self._marks.append((now, ended))
        # The newest of the old ones stays: it is where the minute begins.
        while len(self._marks) > 1 and now - self._marks[1][0] >= MEASURED_SECONDS:
            self._marks.popleft()

    def seconds_left(self, *, total: int, ended: int, now: float, running: int = 1) -> float | None:
        """Return how long it takes until all have ended; None as long as nobody can tell."""
        if not self._marks or ended >= total:
            return None
        since, before = self._marks[0]
        if now - since < LEAST_SECONDS or ended <= before:
            return None
        last_at = self._latest_at if ended == self._latest else now
        quiet = now - last_at
        each = (last_at - since) / (ended - before)
        left = (total - ended) * each - quiet
        # So many run at once that each of them takes as long as that many ends.
        is_late = quiet > max(LEAST_SECONDS, LATE * each * max(1, running))
        return None if is_late or left <= 0 else left


# A run in words: the sentences that the live display, plain lines and the end have in common.

SESSION = "session"
MOST_WORDS_CHARACTERS = 200
_WAITING = (StepState.QUEUED, StepState.WAITING)
_TOLD_COUNTS = (StepState.FAILED, StepState.SKIPPED, StepState.STOPPED, StepState.NOT_RUN)


def count_of(report: RunReport, state: StepState) -> int:
    """Return how many runs of all steps are in a state."""
    return sum(step.counts.get(state.value, 0) for step in report.steps)


def counts_text(report: RunReport) -> str:
    """Say how many have ended, and how many of them not well."""
    return f"{report.ended:,} of {report.total:,}{_told_counts(report)}"


def limited_or_used(money: Sequence[Money]) -> list[Money]:
    """Leave out scopes without a limit in which nothing was spent: nobody has a budget there."""
    return [
        one
        for one in money
        if one.limit_micro_usd is not None or one.spent_micro_usd or one.reserved_micro_usd
    ]


def shown_money(scopes: Sequence[Money]) -> list[Money]:
    """Choose the budgets that are worth a line: the session, and the innermost that is limited."""
    money = limited_or_used(scopes)
    limited = [one for one in money if one.limit_micro_usd is not None]
    inner = limited[-1] if limited else money[-1] if money else None
    sessions = [one for one in money if leaf_kind(Scope(one.scope)) == SESSION]
    return [one for one in money if one is inner or one in sessions[:1]]


def money_text(money: Money) -> str:
    """Say what a scope has spent, holds and may spend."""
    text = f"{money.scope.rpartition('/')[2]}: {format_usd(money.spent_micro_usd)} spent"
    if money.reserved_micro_usd:
        text += f", {format_usd(money.reserved_micro_usd)} reserved"
    if money.limit_micro_usd is None:
        text = f"{text}, no limit"
    else:
        text = f"{text} of {format_usd(money.limit_micro_usd)}"
    asked_at = None if money.as_of is None else moment_of(money.as_of)
    return text if asked_at is None else f"{text} (as of {clock_time(asked_at)})"


def left_text(seconds: float | None) -> str:
    """Say how long it takes yet; nothing where nobody can tell."""
    return "" if seconds is None else f"about {length_of(seconds)} left"


def row_seconds(row: StepRow, *, now: float) -> float | None:
    """Return how long a run of a step took, or takes since it began."""
    task = row.task
    if task is None or task.started_at is None:
        return None
    return max(0.0, (task.completed_at or now) - task.started_at)


def end_text(row: StepRow, *, now: float) -> str:
    """Say in one line how a run of a step ended."""
    seconds = row_seconds(row, now=now)
    task = row.task
    parts = [f"{row.name} {row.state.value}"]
    if seconds is not None:
        parts[0] += f" after {length_of(seconds)}"
    if task is not None and task.attempt > 1:
        parts.append(f"{task.attempt} attempts")
    if task is not None and (cost := _task_cost(task)):
        parts.append(cost)
    why = _why(row)
    advice = ""
    # What a model was asked has tokens too. Of a command nobody else can say that it is free.
    if row.state is StepState.FAILED and task is not None and not task.tokens:
        advice = "; write cost_usd: 0 if it is free" if task.assumed_micro_usd else ""
    return ", ".join(parts) + (f": {shortened(why)}" if why else "") + advice


def waiting_rows(rows: Sequence[StepRow]) -> list[StepRow]:
    """Choose of the rows that wait the first for each reason."""
    first: dict[str, StepRow] = {}
    for row in rows:
        if row.state in _WAITING and row.why:
            first.setdefault(row.why, row)
    return list(first.values())


def waiting_text(row: StepRow) -> str:
    """Say why a run of a step waits."""
    return f"{row.name} waits: {shortened(row.why)}"


def cost_text(micro_usd: int, assumed_micro_usd: int) -> str:
    """Write an amount, and how much of it nobody confirmed."""
    assumed = f" ({format_usd(assumed_micro_usd)} assumed)" if assumed_micro_usd else ""
    return f"{format_usd(micro_usd)}{assumed}"


def _task_cost(task: StepTask) -> str:
    """Write what a run of a step cost, if it is known to have cost anything or is not known."""
    cost = cost_text(task.micro_usd, task.assumed_micro_usd) if task.micro_usd else ""
    return f"{cost} unpriced".lstrip() if task.is_unpriced else cost


def shortened(text: str, most: int = MOST_WORDS_CHARACTERS) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def ending_text(report: RunReport) -> str:
    """Say how a run ended, or that it has not."""
    spent = sum(step.micro_usd for step in report.steps)
    assumed = sum(step.assumed_micro_usd for step in report.steps)
    done = f"{count_of(report, StepState.DONE):,} of {report.total:,} done{_told_counts(report)}"
    text = f"{report.workflow} {_ENDINGS[report.state]}: {done}, {cost_text(spent, assumed)}"
    return f"{text}, {length_of(report.seconds)}" if report.seconds else text


_ENDINGS = {
    RunState.RUNNING: "is running",
    RunState.DONE: "is done",
    RunState.FAILED: "has failed steps",
    RunState.EXHAUSTED: "ran out of budget",
    RunState.INTERRUPTED: "was interrupted",
    RunState.UNBOOKED: "has ended, but is not booked",
}


def unbooked_text(report: RunReport, *, resume: str) -> str:
    """Say how much the ledger has yet to record, why, and what has it recorded."""
    amount = format_usd(report.unbooked_micro_usd)
    why = f" ({shortened(report.trouble)})" if report.trouble else ""
    return f"{amount} of it is not in the ledger yet{why}; {resume} books it"


def _why(row: StepRow) -> str:
    if row.state is StepState.FAILED and row.task is not None and row.task.error:
        return row.task.error
    return row.why


def _told_counts(report: RunReport) -> str:
    told = [(count_of(report, state), state.value) for state in _TOLD_COUNTS]
    return "".join(f", {count:,} {name}" for count, name in told if count)


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
        self._remaining_time = RemainingTime()
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
        self._remaining_time.note(report.ended, now=now)
        if now - self._told_at >= max(QUIET_SECONDS, QUIET_PART * (now - self._began_at)):
            self.tell(summary_text(report, seconds_left(self._remaining_time, report, now=now)))

    def close(self) -> None:
        """Do nothing: lines are complete as they are."""


class Live:
    """A display that is drawn over itself; lines that are to stay are put above it."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        # Slow to import, and unused in a pipe.
        from rich.live import Live as RichLive  # noqa: PLC0415

        self._console = console
        self._clock = clock
        self._remaining_time = RemainingTime()
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

        if self._is_mute:
            return
        now = self._clock()
        self._remaining_time.note(report.ended, now=now)
        screen = Screen(
            report=report,
            now=now,
            width=self._console.width,
            height=self._console.height,
            seconds_left=seconds_left(self._remaining_time, report, now=now),
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
        line = data.decode(errors="replace").rstrip("\n")
        if not any(event in line for event in _TOLD_OTHERWISE):
            self._progress.tell(line)
        return len(data)


_TOLD_OTHERWISE = ("recovered tasks of a lost node", "of commands whose service was killed")
"""Events of a service, which a run that was killed tells in its own words."""


def cut_off_text(steps: int, micro_usd: int) -> str:
    """Say what becomes of steps that ran when their process was killed."""
    booked = f"; {format_usd(micro_usd)} is booked as assumed" if micro_usd else ""
    if steps == 1:
        return f"1 step was cut off and begins anew{booked}"
    return f"{steps:,} steps were cut off and begin anew{booked}"


def spent_text(report: RunReport, limit_micro_usd: int) -> str:
    """Say that a run has spent a budget before it goes on with it; empty if it has not."""
    spent = sum(step.micro_usd for step in report.steps)
    if spent < limit_micro_usd or report.ended == report.total:
        return ""
    spent_usd, limit_usd = format_usd(spent), format_usd(limit_micro_usd)
    line = f"the run has already spent {spent_usd}, and its budget is {limit_usd} now"
    return f"warning: {line}: nothing that costs money starts"


def beginning_text(report: RunReport, folder: Path) -> str:
    """Say which run begins, how large it is, and where it is kept."""
    is_one = len(report.steps) == 1
    steps = "1 step that runs" if is_one else f"{len(report.steps):,} steps that run"
    runs = f"{steps} {report.total:,} {'time' if report.total == 1 else 'times'}"
    if report.total == len(report.steps):
        runs = steps.partition(" that")[0]
    before = f", {report.ended:,} of them done before" if report.ended else ""
    return f"{report.workflow}: run {report.run_id}, {runs}{before}; kept in {folder}"


def seconds_left(remaining_time: RemainingTime, report: RunReport, *, now: float) -> float | None:
    """Return how long a run takes yet; None as long as nobody can tell."""
    running = count_of(report, StepState.RUNNING)
    return remaining_time.seconds_left(
        total=report.total, ended=report.ended, now=now, running=running
    )


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
    looking = asyncio.create_task(_keep_reading(progress, report, trouble), name="progress")
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait((looking,))
        progress.close()


async def _keep_reading(
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


# A run as a screen of text: what one frame of the live display shows, whatever its size.
#
# Rule: a frame is never higher than the terminal less one line, and no line of it is ever broken;
# what does not fit is counted, or cut off with an ellipsis.

FRAMES_PER_SECOND = 10
WAITING_SHOWN = 3
LONGEST_BAR = 40
SHORTEST_BAR = 10


class Screen(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a frame is drawn from; `note` is what was said last, as after Ctrl-C."""

    report: RunReport
    now: float
    width: int
    height: int
    seconds_left: float | None = None
    note: str = ""


def drawn(screen: Screen) -> Group:
    """Draw one frame."""
    below = [*_bar(screen), *_money(screen), *_note(screen)]
    room = max(0, screen.height - 2 - len(below))
    waiting = _waiting(screen.report.rows, room // 2)
    running = _running(screen, room - len(waiting))
    lines = [_head(screen), *running, *waiting, *below]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines[: max(1, screen.height - 1)])


def _head(screen: Screen) -> Text:
    report = screen.report
    lasted = length_of(report.seconds)
    return Text.assemble((report.workflow, "bold"), f" {report.run_id}  {lasted}")


def _running(screen: Screen, room: int) -> list[Text]:
    rows = [row for row in screen.report.rows if row.state is StepState.RUNNING]
    count = max(len(rows), count_of(screen.report, StepState.RUNNING))
    shown = rows[:room] if count <= room else rows[: max(0, room - 1)]
    width = min(max((len(printable(row.name)) for row in shown), default=0), screen.width // 2)
    lines = [_row(row, width, screen.now) for row in shown]
    if count > len(shown) and room:
        more = f"… and {count - len(shown):,} more" if shown else f"{count:,} run"
        lines.append(Text(f"  {more}", "dim"))
    return lines


def _row(row: StepRow, width: int, now: float) -> Text:
    frame = FRAMES[int(now * FRAMES_PER_SECOND) % len(FRAMES)]
    name = Text(printable(row.name))
    name.truncate(width, overflow="ellipsis", pad=True)
    line = Text.assemble((f"{frame} ", "cyan"), name)
    seconds = row_seconds(row, now=now)
    if seconds is not None:
        line.append(f"  {length_of(seconds)}")
    if row.task is not None and row.task.attempt > 1:
        line.append(f"  attempt {row.task.attempt}", "yellow")
    return line


def _waiting(rows: Sequence[StepRow], room: int) -> list[Text]:
    shown = waiting_rows(rows)[: min(WAITING_SHOWN, room)]
    return [Text(f"  {printable(waiting_text(row))}", "dim") for row in shown]


def _bar(screen: Screen) -> list[Text]:
    report = screen.report
    words = [counts_text(report), left_text(screen.seconds_left)]
    text = "  ".join(word for word in words if word)
    length = min(LONGEST_BAR, screen.width - len(text) - 2)
    if length < SHORTEST_BAR:
        return [Text(text)]
    full = length * report.ended // report.total if report.total else length
    colour = "red" if count_of(report, StepState.FAILED) else "green"
    parts = (("━" * full, colour), ("─" * (length - full), "dim"), f"  {text}")
    return [Text.assemble(*parts)]


def _money(screen: Screen) -> list[Text]:
    return [Text(printable(money_text(one))) for one in shown_money(screen.report.money)]


def _note(screen: Screen) -> list[Text]:
    return [Text(printable(screen.note), "yellow")] if screen.note else []


# The end of a run on paper: a table by step, what failed, how it ended, and how to go on.

STEPS_SHOWN = 100
FAILURES_SHOWN = 20
TRUNCATED_SHOWN = 3
_COUNTED = (
    *(StepState.DONE, StepState.FAILED, StepState.SKIPPED, StepState.STOPPED, StepState.NOT_RUN),
    *(StepState.RUNNING, StepState.QUEUED, StepState.WAITING),
)
STEPS_HEADER = (
    *("step", "runs", *(state.value for state in _COUNTED)),
    *("duration", "attempts", "tokens", "cost", "assumed", "unpriced", "truncated"),
)
ROWS_HEADER = ("step", "state", "duration", "attempts", "tokens", "cost", "why")


class CorrectedFile(NamedTuple):
    """The file of a run, and the command that goes on with it once it is corrected."""

    name: str
    resume: str


def print_end(
    report: RunReport,
    folder: Path,
    *,
    resume: str,
    corrected: CorrectedFile,
    rest: str | None = None,
    file: TextIO | None = None,
) -> None:
    """Write everything that is to be said of a run that has ended, or stands still."""
    print_steps(report, file=file)
    for line in end_lines(report, folder, resume=resume, corrected=corrected, rest=rest):
        click.echo(printable(line), file=file)


def print_json_end(
    report: RunReport,
    folder: Path,
    *,
    exit_code: int,
    resume: str,
    raising: str | None = None,
    file: TextIO | None = None,
) -> None:
    """Write the report as one JSON document, with what a program needs to go on."""
    further = {"folder": str(folder), "exit_code": exit_code, "resume": resume, "raise": raising}
    print_json(run_json({**msgspec.structs.asdict(report), **further}), file=file)


def print_steps(report: RunReport, *, file: TextIO | None = None) -> None:
    """Write the table of steps."""
    shown = report.steps[:STEPS_SHOWN]
    header, rows = _filled_columns(STEPS_HEADER, [_step_row(step) for step in shown])
    title = f"Run {report.run_id} of {report.workflow}"
    print_table(title, header, rows, whole=("step",), file=file)
    if len(report.steps) > len(shown):
        more = len(report.steps) - len(shown)
        click.echo(f"  and {more:,} more; --json lists them all", file=file)


def end_lines(
    report: RunReport,
    folder: Path,
    *,
    resume: str,
    corrected: CorrectedFile,
    has_failures: bool = True,
    rest: str | None = None,
) -> Iterator[str]:
    """Give the lines below the table: failures, budgets, the ending, what to do next.

    `rest` says what the rest of a run needs whose budget is used up.
    """
    if has_failures:
        yield from _failures(report)
    if truncated := truncated_text(report):
        yield truncated
    for money in limited_or_used(report.money):
        yield money_text(money)
    if report.exhausted_by:
        yield shortened(report.exhausted_by)
        yield from _others(report)
    if rest is not None:
        yield rest
    yield ending_text(report)
    if report.unbooked_micro_usd:
        yield unbooked_text(report, resume=resume)
    if report.state is RunState.FAILED:
        yield from _after_failures(report, resume, corrected)
    elif report.state not in (RunState.DONE, RunState.RUNNING):
        yield f"to go on: {resume}"
    yield f"kept in {folder}"


def truncated_text(report: RunReport) -> str:
    """Say how many answers of models were truncated, and what to raise; nothing if none was."""
    steps = [step for step in report.steps if step.truncated]
    if not steps:
        return ""
    count = sum(step.truncated for step in steps)
    answers = "1 answer was" if count == 1 else f"{count:,} answers were"
    names = ", ".join(step.step for step in steps[:TRUNCATED_SHOWN])
    more = len(steps) - TRUNCATED_SHOWN
    where = f"{names} and {more:,} more" if more > 0 else names
    return f"warning: {answers} truncated at max_tokens; raise max_tokens of {where}"


def _after_failures(report: RunReport, resume: str, corrected: CorrectedFile) -> Iterator[str]:
    """Say what to do about failures; those of a wrong file come back until it is corrected."""
    failed = [row for row in report.rows if row.state is StepState.FAILED]
    if all(row.task is None for row in failed):
        yield f"to go on: correct {corrected.name}, then {corrected.resume}"
        return
    yield f"to try the failed steps again: {resume}"
    yield f"after a correction: {corrected.resume}"


def _others(report: RunReport) -> Iterator[str]:
    """Say what others have spent of a used-up budget that looks as if it were the run's alone."""
    short = short_scope(report)
    if short is not None and short.scope == report.money[-1].scope:
        others = short.spent_micro_usd - sum(step.micro_usd for step in report.steps)
        if others > 0:
            name = short.scope.rpartition("/")[2]
            yield f"{name}: {format_usd(others)} of it was spent by other runs of this workflow"


def resume_command(run_id: str, data: Path, *, file: str | None = None) -> str:
    """Return the command that goes on with a run; it names the directory if that is not usual."""
    named = "" if file is None else f" {shlex.quote(file)}"
    return f"headgate run{named} --resume {run_id}{_place(data)}"


def show_command(run_id: str, data: Path) -> str:
    """Return the command that prints how a run has ended."""
    return f"headgate runs show {run_id}{_place(data)}"


def list_command(data: Path) -> str:
    """Return the command that lists the runs."""
    return f"headgate runs{_place(data)}"


def _place(data: Path) -> str:
    return "" if data == default_directory() else f" --data {shlex.quote(str(data))}"


def print_rows(title: str, rows: list[StepRow], *, now: float) -> None:
    """Write a table with a line for each run of a step."""
    header, shown = _filled_columns(ROWS_HEADER, [_run_row(row, now) for row in rows])
    print_table(title, header, shown, whole=("step",))


def _filled_columns(header: Row, rows: Sequence[Row]) -> tuple[Row, list[Row]]:
    """Leave out columns that have nothing in them: a terminal has few, and a run seldom all."""
    kept = [at for at in range(len(header)) if any(row[at] for row in rows)]
    return [header[at] for at in kept], [[row[at] for at in kept] for row in rows]


def _failures(report: RunReport) -> Iterator[str]:
    failed = [row for row in report.rows if row.state is StepState.FAILED]
    count = sum(step.counts.get(StepState.FAILED.value, 0) for step in report.steps)
    for row in failed[:FAILURES_SHOWN]:
        yield end_text(row, now=report.ended_at or report.began_at)
    more = count - len(failed[:FAILURES_SHOWN])
    if more > 0:
        yield f"and {more:,} more failed; headgate runs show {report.run_id} --all lists them"


def _step_row(step: StepSummary) -> tuple[str, ...]:
    return (
        step.step,
        f"{step.total:,}",
        *(_count(step.counts.get(state.value, 0)) for state in _COUNTED),
        "" if step.seconds is None else length_of(step.seconds),
        _count(step.attempts),
        _count(step.tokens),
        _table_money(step.micro_usd),
        _table_money(step.assumed_micro_usd),
        _count(step.unpriced),
        _count(step.truncated),
    )


def _run_row(row: StepRow, now: float) -> tuple[str, ...]:
    task = row.task
    why = row.why or (task.error if task is not None and task.error else "")
    if task is not None and task.is_truncated and not why:
        why = "answer truncated at max_tokens"
    if task is None:
        return (row.name, row.state.value, "", "", "", "", shortened(why))
    # Nobody knows how long something ran whose process was killed.
    is_known = task.completed_at is not None or row.state is StepState.RUNNING
    seconds = row_seconds(row, now=now) if is_known else None
    return (
        row.name,
        row.state.value,
        "" if seconds is None else length_of(seconds),
        _count(task.attempt),
        _count(task.tokens),
        _task_cost(task),
        shortened(why),
    )


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _table_money(micro_usd: int) -> str:
    return format_usd(micro_usd) if micro_usd else ""
