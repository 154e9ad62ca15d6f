"""Waiting before another try.

A task that meets a provider's rate limit waits longer each time, and after its tries it pauses. A
paused task always has a resume time. Randomness is the caller's: a draw in [0, 1) is an argument.
"""

from __future__ import annotations

import msgspec

from headgate.errors import InvalidSettingError

TOKENS_EXHAUSTED_PAUSE_SECONDS = 300.0
_LARGEST_EXPONENT = 1023


class RateLimitPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a task meets rate limits: the first wait, the longest, and how many tries it has."""

    base_seconds: float = 60.0
    max_seconds: float = 300.0
    tries: int = 3

    def __post_init__(self) -> None:
        _check_range(self.base_seconds, self.max_seconds)
        if self.tries < 0:
            raise InvalidSettingError("tries", f"must be 0 or more, not {self.tries}")


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """The task tries again by itself at `until`."""

    until: float


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """The task gives up its permit and is queued again at `resume_at`."""

    resume_at: float


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Doubling waits; `spread` is the share of a wait that randomness may take off.

    Callers that failed together would otherwise come back together.
    """

    base_seconds: float = 1.0
    max_seconds: float = 60.0
    spread: float = 0.5

    def __post_init__(self) -> None:
        _check_range(self.base_seconds, self.max_seconds)
        if not 0 <= self.spread <= 1:
            raise InvalidSettingError("spread", f"must be from 0 to 1, not {self.spread}")

    def seconds(self, attempt: int, *, draw: float) -> float:
        """Return the wait after the given failure (the first is 1), for a draw in [0, 1)."""
        if not 0 <= draw < 1:
            raise InvalidSettingError("draw", f"must be in [0, 1), not {draw}")
        wait = doubled_seconds(attempt, base=self.base_seconds, maximum=self.max_seconds)
        return wait * (1 - self.spread * draw)


def doubled_seconds(attempt: int, *, base: float, maximum: float) -> float:
    """Return `min(base * 2^(attempt - 1), maximum)`; attempts count from 1."""
    if attempt < 1:
        raise InvalidSettingError("attempt", f"counts from 1, not {attempt}")
    # A larger power is an OverflowError, and the maximum holds long before.
    return min(base * 2.0 ** min(attempt - 1, _LARGEST_EXPONENT), maximum)


def rate_limit_wait_seconds(hits: int, policy: RateLimitPolicy | None = None) -> float:
    """Return how long a task waits after it met a rate limit for the `hits`-th time."""
    policy = policy or RateLimitPolicy()
    return doubled_seconds(hits, base=policy.base_seconds, maximum=policy.max_seconds)


def after_rate_limit(
    hits: int, *, now: float, policy: RateLimitPolicy | None = None
) -> Wait | Pause:
    """Decide what a task does after its `hits`-th rate limit: wait, or pause once out of tries."""
    policy = policy or RateLimitPolicy()
    at = now + rate_limit_wait_seconds(hits, policy)
    return Wait(until=at) if hits <= policy.tries else Pause(resume_at=at)


def after_tokens_exhausted(
    *, now: float, pause_seconds: float = TOKENS_EXHAUSTED_PAUSE_SECONDS
) -> Pause:
    """Return the pause of a task that has used up its tokens."""
    return Pause(resume_at=now + pause_seconds)


def _check_range(base_seconds: float, max_seconds: float) -> None:
    if not base_seconds > 0:
        raise InvalidSettingError("base_seconds", f"must be above 0, not {base_seconds}")
    if not max_seconds >= base_seconds:
        raise InvalidSettingError(
            "max_seconds", f"must be at least base_seconds ({base_seconds}), not {max_seconds}"
        )
