"""What projects used lately: the figures of fair share, over a rolling window of hours.

Figures are kept by the hour, and an hour counts until all of it is older than the window.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

SECONDS_PER_HOUR = 3_600


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a project used in the hour that starts at `hour` (Unix seconds)."""

    project_id: str
    hour: int
    tokens: int = 0
    micro_usd: int = 0
    started: int = 0
    completed: int = 0
    forgiven: int = 0


class _Totals:
    __slots__ = ("completed", "forgiven", "hours", "started", "tokens")

    def __init__(self) -> None:
        self.tokens = self.started = self.completed = self.forgiven = 0
        self.hours: dict[int, list[int]] = {}

    def add(self, hour: int, tokens: int, started: int, completed: int, forgiven: int) -> None:
        amounts = self.hours.get(hour)
        if amounts is None:
            amounts = self.hours[hour] = [0, 0, 0, 0]
        amounts[0] += tokens
        amounts[1] += started
        amounts[2] += completed
        amounts[3] += forgiven
        self._count(tokens, started, completed, forgiven)

    def leave(self, hour: int) -> None:
        tokens, started, completed, forgiven = self.hours.pop(hour)
        self._count(-tokens, -started, -completed, -forgiven)

    def _count(self, tokens: int, started: int, completed: int, forgiven: int) -> None:
        self.tokens += tokens
        self.started += started
        self.completed += completed
        self.forgiven += forgiven


class ProjectFigures:
    """Usage, starts, completions and forgiven lag of each project within the window."""

    def __init__(self, *, window_hours: int, rows: Iterable[UsageRow] = ()) -> None:
        self._window_seconds = window_hours * SECONDS_PER_HOUR
        self._projects: dict[str, _Totals] = {}
        self._hour = 0
        for row in rows:
            self._totals(row.project_id).add(
                row.hour, row.tokens, row.started, row.completed, row.forgiven
            )

    def add(
        self,
        project_id: str,
        now: float,
        *,
        tokens: int = 0,
        started: int = 0,
        completed: int = 0,
        forgiven: int = 0,
    ) -> None:
        """Count something that happened now."""
        hour = hour_of(now)
        self._totals(project_id).add(hour, tokens, started, completed, forgiven)

    def roll(self, now: float) -> None:
        """Leave out what is older than the window."""
        hour = hour_of(now)
        if hour == self._hour:
            return
        self._hour = hour
        oldest = hour - self._window_seconds
        for totals in self._projects.values():
            for old in [start for start in totals.hours if start < oldest]:
                totals.leave(old)

    @property
    def tokens(self) -> dict[str, int]:
        """The tokens used, by project."""
        return {name: totals.tokens for name, totals in self._projects.items()}

    @property
    def started(self) -> dict[str, int]:
        """The tasks started, by project."""
        return {name: totals.started for name, totals in self._projects.items()}

    @property
    def completed(self) -> dict[str, int]:
        """The tasks done, by project."""
        return {name: totals.completed for name, totals in self._projects.items()}

    @property
    def forgiven(self) -> dict[str, int]:
        """The tokens of lag that were forgiven, by project."""
        return {name: totals.forgiven for name, totals in self._projects.items()}

    def _totals(self, project_id: str) -> _Totals:
        totals = self._projects.get(project_id)
        if totals is None:
            totals = self._projects[project_id] = _Totals()
        return totals


def hour_of(now: float) -> int:
    """Return the start of the hour."""
    return int(now // SECONDS_PER_HOUR) * SECONDS_PER_HOUR
