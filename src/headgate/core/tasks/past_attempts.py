"""What is kept of an attempt after which its task was tried again.

The record has the latest attempt; of those before it these notes remain, so that any node can tell
the whole way of a task, also after a restart. They are for people: no later decision reads them.
Rule: their number and their texts are bounded, because they lie in a row that every step writes. A
task that ends with its first attempt has none.
"""

from __future__ import annotations

import msgspec

MAX_PAST_ATTEMPTS = 10
"""How many are kept of a task, the latest; earlier ones are only counted."""

MAX_ERROR_CHARACTERS = 300
_CUT = "…"


class PastAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt that has ended; one that its node never began has no `started_at`.

    `tokens` and `micro_usd` are what it was booked at, and `assumed_…` the part of it for which
    nobody gave a figure.
    """

    attempt: int
    started_at: float | None = None
    ended_at: float
    error: str | None = None
    agent_id: str | None = None
    slot: str | None = None
    node_id: str | None = None
    tokens: int = 0
    micro_usd: int = 0
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0


def with_latest(attempts: tuple[PastAttempt, ...], ended: PastAttempt) -> tuple[PastAttempt, ...]:
    """Return the notes of a task with one more; the earliest makes room for it."""
    return (*attempts, ended)[-MAX_PAST_ATTEMPTS:]


def beginning_of(error: str | None) -> str | None:
    """Return as much of an error as a note holds."""
    if error is None or len(error) <= MAX_ERROR_CHARACTERS:
        return error
    return error[: MAX_ERROR_CHARACTERS - 1] + _CUT
