"""The JSON that a service and its workers exchange, as one struct for each body.

Both sides import them, so they cannot drift apart.
"""

from __future__ import annotations

import msgspec

from headgate.core.task import TaskStatus
from headgate.core.task_view import TaskSnapshot


class RunningBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One attempt that a worker has under way."""

    task_id: str
    attempt: int


class ClaimBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A worker says how many tasks it can run at once, and names those that it runs now.

    The first claim has no `worker_id`. With a capacity of 0 the worker leaves.
    """

    worker_id: str | None = None
    capacity: int = 1
    wait_seconds: float = 0.0
    running: tuple[RunningBody, ...] = ()


class ClaimedBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a worker is to run, to stop, and to drop because it is not its own any more."""

    worker_id: str
    lease_seconds: float
    tasks: tuple[TaskSnapshot, ...] = ()
    cancelled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class HeartbeatBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A worker shows that it lives, and names what it runs."""

    worker_id: str
    running: tuple[RunningBody, ...] = ()


class BeatBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How long the lease lasts from now on, what is to be stopped, and what is to be dropped."""

    lease_seconds: float
    cancelled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class UsedBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What an attempt used, as far as the worker knows; what is left out is unknown."""

    tokens: int | None = None
    usd: int | float | str | None = None
    model: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class CompleteBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The work is done; the result is any JSON."""

    worker_id: str
    attempt: int
    result: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    usage: UsedBody | None = None


class FailBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The work was not done. `retry_after_seconds` says that the provider asked for a pause.

    `cut_off` says that nobody knows how it ended, as after a timeout: it books its estimate then,
    also where `book_failures = false`.
    """

    worker_id: str
    attempt: int
    error: str
    retryable: bool = False
    cut_off: bool = False
    retry_after_seconds: float | None = None
    usage: UsedBody | None = None


class SettledTaskBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a task stands after its attempt: ended, or queued for another."""

    task_id: str
    state: TaskStatus
