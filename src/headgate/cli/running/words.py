"""A run in words: the sentences that the live display, plain lines and the end have in common."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.cli.times import clock_time, length_of, moment_of
from headgate.core.budgets.scopes import Scope, leaf_kind
from headgate.core.money import format_usd
from headgate.runs.backend import Money
from headgate.runs.report import RunReport, RunState, StepRow, StepState

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


def told_money(money: Sequence[Money]) -> list[Money]:
    """Leave out scopes without a limit in which nothing was spent: nobody has a budget there."""
    return [
        one
        for one in money
        if one.limit_micro_usd is not None or one.spent_micro_usd or one.reserved_micro_usd
    ]


def shown_money(scopes: Sequence[Money]) -> list[Money]:
    """Choose the budgets that are worth a line: the session, and the innermost that is limited."""
    money = told_money(scopes)
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
    if task is not None and task.micro_usd:
        parts.append(cost_text(task.micro_usd, task.assumed_micro_usd))
    why = _why(row)
    return ", ".join(parts) + (f": {shortened(why)}" if why else "")


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
    """Say how much the books have yet to be told, why, and what tells them."""
    amount = format_usd(report.unbooked_micro_usd)
    why = f" ({shortened(report.trouble)})" if report.trouble else ""
    return f"{amount} of it is not in the books yet{why}; {resume} books it"


def _why(row: StepRow) -> str:
    if row.state is StepState.FAILED and row.task is not None and row.task.error:
        return row.task.error
    return row.why


def _told_counts(report: RunReport) -> str:
    told = [(count_of(report, state), state.value) for state in _TOLD_COUNTS]
    return "".join(f", {count:,} {name}" for count, name in told if count)
