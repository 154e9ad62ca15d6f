"""A run as a screen of text: what one frame of the live display shows, whatever its size.

Rule: a frame is never higher than the terminal less one line, and no line of it is ever broken;
what does not fit is counted, or cut off with an ellipsis.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group
from rich.text import Text

from headgate.cli.running.words import (
    count_of,
    counts_text,
    left_text,
    money_text,
    row_seconds,
    shown_money,
    waiting_rows,
    waiting_text,
)
from headgate.cli.submitting.progress_line import FRAMES
from headgate.cli.times import length_of
from headgate.core.texts.printable import printable
from headgate.runs.report import RunReport, StepRow, StepState

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
