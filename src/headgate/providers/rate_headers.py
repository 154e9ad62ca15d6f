"""Limits as headers of an answer tell them: rows of a quota, and what could not be read of them.

Each provider has its names; a limit, what remains and a time are read alike. Rule: a header that
makes no sense is named and left out, and the others still count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC

from headgate.core.key_slots.quota import QuotaLimit, QuotaReport
from headgate.providers.reset_times import epoch_ms, reset_time

RATE_LIMIT = "RATE_LIMIT"
"""The type of rows that are a rate of requests or tokens; the unit says of which."""

Headers = Mapping[str, str]


class RateRows:
    """Collects rows from the headers of one answer."""

    def __init__(self, headers: Headers, *, now: float) -> None:
        self._headers = headers
        self._now = now
        self._rows: list[QuotaLimit] = []
        self._unreadable: list[str] = []

    def add_rate(self, unit: str, *, limit: str, remaining: str, reset: str) -> None:
        """Add a row from the three headers of these names, if it says how much is left."""
        allowed, left = self.number(limit), self.number(remaining)
        if left is None:
            return
        row = QuotaLimit(
            type=RATE_LIMIT,
            unit=unit,
            usage=allowed,
            remaining=left,
            current_value=None if allowed is None else max(allowed - left, 0.0),
            percentage=100.0 if left == 0 else None,
            next_reset_epoch_ms=epoch_ms(self.time(reset)),
        )
        self.add(row)

    def add(self, row: QuotaLimit) -> None:
        """Add a row."""
        self._rows.append(row)

    def number(self, name: str) -> float | None:
        """Return a header as a number; below zero it means that there is no such limit."""
        text = self._headers.get(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self._unreadable.append(f"{name} is no number")
            return None
        return number if number >= 0 else None

    def time(self, name: str) -> float | None:
        """Return a header as a Unix second."""
        try:
            return reset_time(self._headers.get(name), now=self._now, zone=UTC)
        except ValueError:
            self._unreadable.append(f"{name} is no time")
            return None

    def report(self) -> QuotaReport:
        """Return all rows, in the order in which they were added."""
        return QuotaReport(limits=tuple(self._rows), unreadable=tuple(self._unreadable))
