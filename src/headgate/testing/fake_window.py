"""The quota window of one key of a fake provider: cold, opened by use, used up, over.

It is cold until a request opens it. From then on it has a reset time, which no further request
moves; when that has come, it is cold again.
"""

from __future__ import annotations

from collections.abc import Callable

FULL_PERCENT = 100.0


class FakeWindow:
    """One window after the other, by the clock that is given."""

    def __init__(
        self,
        *,
        seconds: float,
        clock: Callable[[], float],
        first_percent: float = 0.0,
        percent_per_request: float = 1.0,
    ) -> None:
        self.seconds = seconds
        self.first_percent = first_percent
        self.percent_per_request = percent_per_request
        self.opened = 0
        self._clock = clock
        self._resets_at: float | None = None
        self._percent = 0.0

    @property
    def resets_at(self) -> float | None:
        """The Unix second at which the window that is open ends; None if none is."""
        if self._resets_at is not None and self._clock() >= self._resets_at:
            self.end()
        return self._resets_at

    @property
    def percent(self) -> float:
        """How much of the window is used; 0 while it is cold."""
        return self._percent if self.resets_at is not None else 0.0

    @property
    def is_used_up(self) -> bool:
        """Whether a further request would be refused."""
        return self.percent >= FULL_PERCENT

    def use(self) -> None:
        """Take one request, which opens the window if it is cold."""
        self.begin()
        self._percent = min(self._percent + self.percent_per_request, FULL_PERCENT)

    def begin(self) -> None:
        """Open the window, unless it is open."""
        if self.resets_at is None:
            self.opened += 1
            self._resets_at = self._clock() + self.seconds
            self._percent = self.first_percent

    def end(self) -> None:
        """Close the window; the key is cold."""
        self._resets_at = None

    def set_percent(self, percent: float) -> None:
        """Say how much of the window is used, which opens it."""
        self.begin()
        self._percent = percent
