"""The end of a run on paper: a table by step, what failed, how it ended, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import click
import msgspec

from headgate.cli.output import Row, print_json, print_table
from headgate.cli.places.data_directory import default_directory
from headgate.cli.running.words import (
    cost_text,
    end_text,
    ending_text,
    money_text,
    row_seconds,
    shortened,
    told_money,
    unbooked_text,
)
from headgate.cli.times import length_of
from headgate.core.money import format_usd
from headgate.core.texts.printable import printable
from headgate.runs.raising import short_scope
from headgate.runs.report import RunReport, RunState, StepRow, StepState, StepSummary

STEPS_SHOWN = 100
FAILURES_SHOWN = 20
_COUNTED = (
    *(StepState.DONE, StepState.FAILED, StepState.SKIPPED, StepState.STOPPED, StepState.NOT_RUN),
    *(StepState.RUNNING, StepState.QUEUED, StepState.WAITING),
)
STEPS_HEADER = (
    *("step", "runs", *(state.value for state in _COUNTED)),
    *("duration", "attempts", "tokens", "cost", "assumed"),
)
ROWS_HEADER = ("step", "state", "duration", "attempts", "tokens", "cost", "why")


def print_end(report: RunReport, folder: Path, *, resume: str, file: TextIO | None = None) -> None:
    """Write everything that is to be said of a run that has ended, or stands still."""
    print_steps(report, file=file)
    for line in end_lines(report, folder, resume=resume):
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
    print_json({**msgspec.structs.asdict(report), **further}, file=file)


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
    report: RunReport, folder: Path, *, resume: str, has_failures: bool = True
) -> Iterator[str]:
    """Give the lines below the table: failures, budgets, the ending, what to do next."""
    if has_failures:
        yield from _failures(report)
    for money in told_money(report.money):
        yield money_text(money)
    if report.exhausted_by:
        yield shortened(report.exhausted_by)
        yield from _others(report)
    yield ending_text(report)
    if report.unbooked_micro_usd:
        yield unbooked_text(report, resume=resume)
    if report.state not in (RunState.DONE, RunState.RUNNING):
        yield f"to go on: {resume}"
    yield f"kept in {folder}"


def _others(report: RunReport) -> Iterator[str]:
    """Say what others have spent of a used-up budget that looks as if it were the run's alone."""
    short = short_scope(report)
    if short is not None and short.scope == report.money[-1].scope:
        others = short.spent_micro_usd - sum(step.micro_usd for step in report.steps)
        if others > 0:
            name = short.scope.rpartition("/")[2]
            yield f"{name}: {format_usd(others)} of it was spent by other runs of this workflow"


def resume_command(run_id: str, data: Path) -> str:
    """Return the command that goes on with a run; it names the directory if that is not usual."""
    return f"headgate run --resume {run_id}{_place(data)}"


def show_command(run_id: str, data: Path) -> str:
    """Return the command that prints how a run has ended."""
    return f"headgate runs show {run_id}{_place(data)}"


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
        _money(step.micro_usd),
        _money(step.assumed_micro_usd),
    )


def _run_row(row: StepRow, now: float) -> tuple[str, ...]:
    task = row.task
    why = row.why or (task.error if task is not None and task.error else "")
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
        cost_text(task.micro_usd, task.assumed_micro_usd) if task.micro_usd else "",
        shortened(why),
    )


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _money(micro_usd: int) -> str:
    return format_usd(micro_usd) if micro_usd else ""
