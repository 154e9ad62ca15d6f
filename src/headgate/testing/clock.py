"""A clock that moves only when it is told to.

It stands in wherever a clock is taken: called, it gives Unix seconds, as `time.time` does, and its
`monotonic` is the counterpart of `time.monotonic`. The wall may be set, also backwards; the
monotonic reading never goes back.
"""

from __future__ import annotations

from headgate.errors import InvalidSettingError

DEFAULT_START = 1_767_225_600.0
"""2026-01-01T00:00:00Z, where a simulation begins unless it is told otherwise."""


class VirtualClock:
    """Unix seconds when called, and a monotonic reading that starts at zero."""

    def __init__(self, start: float = DEFAULT_START) -> None:
        self._wall_at_zero = start
        self._elapsed_seconds = 0.0

    def __call__(self) -> float:
        """Return the time of day, in Unix seconds."""
        return self._wall_at_zero + self._elapsed_seconds

    def monotonic(self) -> float:
        """Return the seconds passed since the clock was made."""
        return self._elapsed_seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if not seconds >= 0:
            raise InvalidSettingError("seconds", f"time cannot pass by {seconds}; use set_back")
        self._elapsed_seconds += seconds

    def advance_to(self, monotonic_seconds: float) -> None:
        """Let time pass up to a monotonic reading, exactly; an earlier reading changes nothing."""
        # Adding a difference could miss the reading by a rounding error, and the timer with it.
        self._elapsed_seconds = max(self._elapsed_seconds, monotonic_seconds)

    def set_back(self, seconds: float) -> None:
        """Move the wall back by `seconds` (forward if negative) while no time passes."""
        self._wall_at_zero -= seconds
