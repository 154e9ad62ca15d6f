"""What the record says of a run while it is under way, and how it stood when that was over.

Rule: a process that was refused, or interrupted before it knew what is there, changes nothing. Only
the time counts in which a process carried the run, not that between two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headgate.runs.kept.folder import Run
from headgate.runs.report import RunReport, RunState

_BEGINS: dict[str, Any] = {
    "state": RunState.RUNNING,
    "ended": 0,
    "ended_at": None,
    "exhausted_by": None,
    "spent_micro_usd": None,
    "unbooked_micro_usd": 0,
    "money": (),
}
"""What the record says of a run that is under way; the rest is known when it has ended."""


class Keeping:
    """Keeps in the record how one run stands."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: dict[str, Any] = {}

    def begin(self, *, now: float, left_at: Callable[[], float]) -> None:
        """Say that the run is under way; `left_at` tells when a process left it that was killed."""
        record = self._run.record
        was_killed = record.life_began_at is not None
        carried = record.seconds_until(left_at()) if was_killed else record.carried_seconds
        self._before = {name: getattr(record, name) for name in _BEGINS}
        self._before |= {"carried_seconds": carried, "life_began_at": None}
        self._run.change(**_BEGINS, carried_seconds=carried, life_began_at=now)

    def take_back(self) -> None:
        """Say again what was said before the begin."""
        self._run.change(**self._before)

    def end(self, report: RunReport, *, now: float) -> None:
        """Say how the run stood when its process left it."""
        self._run.change(
            state=report.state,
            carried_seconds=self._run.record.seconds_until(now),
            life_began_at=None,
            ended_at=now,
            exhausted_by=report.exhausted_by,
            ended=report.ended,
            spent_micro_usd=sum(step.micro_usd for step in report.steps),
            unbooked_micro_usd=report.unbooked_micro_usd,
            money=report.money,
        )
