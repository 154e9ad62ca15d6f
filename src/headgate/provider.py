"""The contract of a provider of keys: it tells the quota of one key, and sends the wake for it.

An answer is a value, also where it is a failure: a provider raises nothing for a refusal, a lost
connection, a time that ran out or an answer that makes no sense. Each request is shown to the
`Trail` of its call before it leaves, and so is what came of it, with the key taken out.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from headgate.core.key_slots.quota import QuotaFailure, QuotaReport, WakeAnswer

__all__ = ["Answered", "Call", "Exchange", "Provider", "Sent", "Trail", "Unanswered", "WakeAnswer"]


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """Which request is told of; what is told of the same one has the same `flow_id`."""

    flow_id: str
    action: str
    method: str
    url: str


class Sent(Exchange, frozen=True, kw_only=True):
    """A request that is about to leave."""

    body: str | None = None


class Answered(Exchange, frozen=True, kw_only=True):
    """The answer to a request, as much of it as is worth keeping."""

    status: int
    duration_ms: float
    body: str | None = None


class Unanswered(Exchange, frozen=True, kw_only=True):
    """A request that got no answer that could be read, and why."""

    error: str
    duration_ms: float
    status: int | None = None


class Trail(Protocol):
    """Is shown every request and what came of it; nothing that it is shown tells a key."""

    def sent(self, request: Sent) -> None:
        """Take note of a request before it leaves."""

    def answered(self, answer: Answered) -> None:
        """Take note of an answer."""

    def failed(self, failure: Unanswered) -> None:
        """Take note of a request without an answer."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One use of a key: `flow_id` links what is told of it, `action` says what it is for."""

    key: str
    action: str
    flow_id: str
    trail: Trail


class Provider(Protocol):
    """Speaks to the provider of one slot."""

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Ask how much of the quota is used, and when it resets."""

    async def wake(self, call: Call) -> WakeAnswer:
        """Send the tiny request that opens a window."""

    async def close(self) -> None:
        """Let go of connections."""
