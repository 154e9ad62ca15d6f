"""The clock of a PostgreSQL server, as this machine knows it."""

from __future__ import annotations

import time

from headgate.databases.transaction import Transaction

CLOCK_SECONDS = 60.0
DRIFT_SECONDS = 1.0
_SERVER_TIME = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


class ServerClock:
    """The server's time, carried on from the last comparison by a clock that nobody can set.

    That clock may stand still while the machine sleeps. So a wall clock that went another way
    since, for whatever reason, makes a new comparison due.
    """

    def __init__(self) -> None:
        self.forget()

    def __call__(self) -> float:
        """Return the server's time; before the first comparison, this machine's."""
        if self._ahead_seconds is None:
            return time.time()
        return time.monotonic() + self._ahead_seconds

    def forget(self) -> None:
        """Make a comparison due."""
        self._ahead_seconds: float | None = None
        self._compared_at = self._wall_ahead_seconds = 0.0

    def is_due(self) -> bool:
        """Tell whether the comparison is old, or a clock of this machine cannot be trusted."""
        now = time.monotonic()
        drift_seconds = abs(time.time() - now - self._wall_ahead_seconds)
        is_old = self._ahead_seconds is None or now - self._compared_at >= CLOCK_SECONDS
        return is_old or drift_seconds >= DRIFT_SECONDS

    def compare(self, transaction: Transaction) -> None:
        """Ask the server."""
        asked_at = time.monotonic()
        server_time = float(transaction.read(_SERVER_TIME)[0][0])
        self._compared_at = time.monotonic()
        # The answer was given somewhere between question and arrival.
        self._ahead_seconds = server_time - (asked_at + self._compared_at) / 2
        self._wall_ahead_seconds = time.time() - self._compared_at
