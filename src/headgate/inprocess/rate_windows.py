"""Rate windows that keep their own count, with a clock of their own.

`RateLimitWindow` restarts at the first record after it expired. `SlidingRateLimitWindow` answers
the same questions and never lets more than the limit into any stretch of its length. The arithmetic
of both is in `headgate.core.rate_limits`; here it meets the clock, `time.time` unless one is given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headgate.core.rate_limits import WINDOW_SECONDS, SlidingCount, is_expired, seconds_left


def _wall_clock() -> float:
    # Looked up at each call, so that a test that replaces `time.time` is obeyed.
    return time.time()


@dataclass
class RateLimitWindow:
    """Counts the tokens of one agent type in one window, which restarts lazily.

    A `window_start` of 0.0 means now. Only `record` ever restarts the window: after it has expired,
    `current_tokens` holds the old value until then.
    """

    agent_type: str
    limit_type: str
    max_tokens: int
    current_tokens: int = 0
    window_start: float = 0.0
    clock: Callable[[], float] = field(default=_wall_clock, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.window_start == 0.0:
            self.window_start = self.clock()

    @property
    def window_seconds(self) -> int:
        """The window's length; an unknown `limit_type` is a KeyError."""
        return WINDOW_SECONDS[self.limit_type]

    def record(self, tokens: int) -> None:
        """Count tokens, in a new window that starts now if the old one has expired."""
        now = self.clock()
        if self._is_expired(now):
            self.current_tokens = 0
            self.window_start = now
        self.current_tokens += tokens

    def is_exceeded(self) -> bool:
        """Tell whether the limit is reached in a window that has not expired."""
        return not self._is_expired(self.clock()) and self.current_tokens >= self.max_tokens

    def seconds_until_reset(self) -> float:
        """Return the seconds to the window's end, whether or not the limit is reached."""
        return seconds_left(
            window_start=self.window_start, window_seconds=self.window_seconds, now=self.clock()
        )

    def _is_expired(self, now: float) -> bool:
        return is_expired(
            window_start=self.window_start, window_seconds=self.window_seconds, now=now
        )


class SlidingRateLimitWindow:
    """Counts the tokens of one agent type over the window that ends now, in bounded memory.

    Takes what `RateLimitWindow` takes. Tokens given at the start count as recorded at
    `window_start` (0.0 means now). An unknown `limit_type` is a KeyError at once.
    """

    def __init__(
        self,
        agent_type: str,
        limit_type: str,
        max_tokens: int,
        current_tokens: int = 0,
        window_start: float = 0.0,
        *,
        clock: Callable[[], float] = _wall_clock,
    ) -> None:
        self.agent_type = agent_type
        self.limit_type = limit_type
        self.max_tokens = max_tokens
        self.clock = clock
        self.window_start = window_start or clock()
        self._count = SlidingCount(window_seconds=self.window_seconds)
        if current_tokens:
            self._count = self._count.record(self.window_start, current_tokens)

    def __repr__(self) -> str:
        return (
            f"SlidingRateLimitWindow(agent_type={self.agent_type!r}, "
            f"limit_type={self.limit_type!r}, max_tokens={self.max_tokens}, "
            f"current_tokens={self.current_tokens})"
        )

    @property
    def window_seconds(self) -> int:
        """The window's length in seconds."""
        return WINDOW_SECONDS[self.limit_type]

    @property
    def current_tokens(self) -> int:
        """The tokens that count now."""
        now = self.clock()
        return self._count_at(now).total(now)

    def record(self, tokens: int) -> None:
        """Count tokens now."""
        self._count = self._count.record(self.clock(), tokens)

    def is_exceeded(self) -> bool:
        """Tell whether the limit is reached."""
        return self.current_tokens >= self.max_tokens

    def seconds_until_reset(self) -> float:
        """Return the seconds until the limit is no longer reached; 0.0 if it is not."""
        return self.seconds_until_room(1)

    def seconds_until_room(self, tokens: int) -> float:
        """Return the seconds until `tokens` more fit; infinite if they never will."""
        now = self.clock()
        room_at = self._count_at(now).room_at(tokens, limit=self.max_tokens, now=now)
        return math.inf if room_at is None else max(0.0, room_at - now)

    def _count_at(self, now: float) -> SlidingCount:
        # Kept, so that what a clock far behind has shifted stays where it was put.
        self._count = self._count.at(now)
        return self._count
