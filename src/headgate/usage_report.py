"""The contract of usage reports: what tasks used, by project, agent, model or day.

Figures are kept by the hour for thirty days. A day is one of UTC.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from headgate.tokens import Bounds

Grouping = Literal["project", "agent", "model", "day"]

GROUPINGS: tuple[Grouping, ...] = ("project", "agent", "model", "day")
MAX_ROWS = 1_000
"""How many rows a report has; what is left is one more."""

OTHER = " other"
"""The key of what has no row of its own; with its space it is nobody's name."""


class UsageSum(msgspec.Struct, frozen=True, kw_only=True):
    """What was used under one key: tasks that ended, attempts that ended, tokens, micro-dollars."""

    key: str
    tasks: int = 0
    attempts: int = 0
    tokens: int = 0
    micro_usd: int = 0


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of a time, days in their order and all else by cost; Unix seconds, in whole hours."""

    by: Grouping
    since: float
    until: float
    rows: tuple[UsageSum, ...]
    total: UsageSum


class UsageReports(Protocol):
    """Reads what was used; may raise `StoreUnavailableError`."""

    def now(self) -> float:
        """Return the time by which hours are told apart."""

    async def report(
        self, by: Grouping, *, since: float, until: float, bounds: Bounds
    ) -> UsageReport:
        """Sum up what was used from one hour until before another, within the bounds."""
