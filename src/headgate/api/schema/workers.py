"""The JSON that a service and its workers exchange, as one struct for each body.

Both sides import them, so they cannot drift apart.
"""

from __future__ import annotations

import msgspec

from headgate.core.task import TaskStatus
from headgate.core.task_view import TaskSnapshot


class ReportBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far an attempt is; what is out of bounds is cut to them."""

    fraction: float | None = None
    """From 0 to 1."""
    text: str = ""
    """One line of at most 200 characters."""


class RunningBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One attempt that a worker has under way."""

    task_id: str
    attempt: int
    progress: ReportBody | None = None
    """How far the task is. Without it, the last report stays. Headgate stores one a second."""


class ClaimBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A worker says how many tasks it can run at once, and names those that it runs now."""

    worker_id: str | None = None
    """The name from the first answer. Without it the worker joins as a new one."""
    capacity: int = 1
    """How many tasks it can have at once, those that it runs now included: 0 to 1,000. With 0 it
    leaves."""
    wait_seconds: float = 0.0
    """How long to wait for something to do, 0 to 25."""
    running: tuple[RunningBody, ...] = ()
    """What it has under way. Whatever else it has comes again."""


class GatewayBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a task calls models as its own, with which token, and which protocols are there."""

    base_url: str
    """Where the task calls models."""
    token: str
    """Its token."""
    protocols: tuple[str, ...] = ()
    """The protocols with an upstream."""


class ClaimedBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a worker is to run, to stop, and to drop because it is not its own any more."""

    worker_id: str
    """The name of the worker."""
    lease_seconds: float
    """How long the worker counts as alive from now on."""
    tasks: tuple[TaskSnapshot, ...] = ()
    """Tasks to run, up to 50."""
    cancelled: tuple[str, ...] = ()
    """Ids to stop."""
    lost: tuple[str, ...] = ()
    """Ids that are no longer its own."""
    gateway: dict[str, GatewayBody] | msgspec.UnsetType = msgspec.UNSET
    """For tasks that may call models as their own: address, token and protocols, by task."""
    waited_seconds: float | msgspec.UnsetType = msgspec.UNSET
    """How long the claim had waited when its lease was renewed; left out if it had not waited."""


class HeartbeatBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A worker renews its lease, and names the tasks that it runs."""

    worker_id: str
    """The name of the worker."""
    running: tuple[RunningBody, ...] = ()
    """What it has under way."""


class BeatBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How long the lease lasts from now on, what is to be stopped, and what is to be dropped."""

    lease_seconds: float
    """How long the worker counts as alive from now on."""
    cancelled: tuple[str, ...] = ()
    """Ids to stop."""
    lost: tuple[str, ...] = ()
    """Ids that are no longer its own."""


class UsedBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What an attempt used, as far as the worker knows; what is left out is unknown."""

    tokens: int | None = None
    usd: int | float | str | None = None
    model: str | None = None
    """The model. Without `usd`, its tokens are priced."""
    input_tokens: int | None = None
    """Tokens of the prompt."""
    output_tokens: int | None = None
    """Tokens of the answer."""


class CompleteBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The work is done; the result is any JSON."""

    worker_id: str
    """The name of the worker."""
    attempt: int
    result: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """Any JSON."""
    usage: UsedBody | None = None
    """What the attempt used."""


class FailBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The work was not done."""

    worker_id: str
    """The name of the worker."""
    attempt: int
    error: str
    """Why it failed."""
    retryable: bool = False
    """Whether another attempt may help."""
    cut_off: bool = False
    """Whether nobody knows how it ended, as after a timeout. It books its estimate, also with
    `book_failures = false`."""
    retry_after_seconds: float | None = None
    """The pause that the provider asked for. It costs no attempt."""
    usage: UsedBody | None = None
    """What the attempt used."""


class SettledTaskBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a task stands after its attempt: ended, or queued for another."""

    task_id: str
    state: TaskStatus
