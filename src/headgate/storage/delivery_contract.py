"""The contract of deliveries: what is to be told to whom, how often it was tried, what came of it.

A delivery is one message for one address: the end of a task, or a budget alert. Its id is the same
on every try, so that a receiver recognises a repeat. Rule: a delivery is written in the transaction
of what it tells of, and ends as delivered or dead; nothing that happens to it changes a task.

Whoever sends claims first, for a bounded time. A claim that ends without an outcome, as after a
crash, lets the next sender try: a message may arrive twice, and is never lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from headgate.storage.audit import AuditEntry

MESSAGE_PREFIX = "msg_"
TASK_EVENTS = {
    "done": "task.completed",
    "failed": "task.failed",
    "cancelled": "task.cancelled",
    "rejected": "task.rejected",
}
"""The event of each state in which a task ends."""

MAX_PURGED = 2_000
"""How many deliveries are forgotten or given up at a time; if so many were, there may be more."""

MAX_KEPT_TRIES = 10
"""How many tries of a delivery are kept, the latest; all are counted."""

MAX_ANSWER_CHARACTERS = 200
"""How much is kept of what a receiver said to a try."""

ALERT_EVENT = "budget.alert"
PING_EVENT = "ping"


class DeliveryState(Enum):
    """Whether a delivery is still tried, has arrived, or was given up."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


class DeliveryTry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try, at the time at which it ended: a status came back, or `error` says why none did.

    `answer` is the beginning of what the receiver said, which may be anything.
    """

    at: float
    duration_ms: int = 0
    status: int | None = None
    error: str | None = None
    answer: str | None = None


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One message for one address; `task_id` is empty where it is about no task.

    `due_at` is set while it is pending. `status` and `error` are those of the latest try.
    `latest_tries`, the oldest first, also those before it was sent again, are there where one
    delivery is asked for, and not in lists.
    """

    id: str
    event: str
    url: str
    state: DeliveryState = DeliveryState.PENDING
    task_id: str = ""
    tries: int = 0
    created_at: float
    due_at: float | None = None
    ended_at: float | None = None
    status: int | None = None
    error: str | None = None
    latest_tries: tuple[DeliveryTry, ...] = ()


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery that somebody has claimed, and how often it was tried before."""

    id: str
    event: str
    url: str
    task_id: str = ""
    tries: int = 0


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What one sender may try now, with the secrets to sign it with, the newest first."""

    messages: tuple[Message, ...] = ()
    secrets: tuple[str, ...] = ()


class Candidate(msgspec.Struct, frozen=True):
    """A delivery that is due, and the host that it goes to."""

    id: str
    host: str


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """To whom a sender has a place to send.

    Neither to `busy_hosts` nor to any host at or below one of `busy_sites`; and if `only_hosts` is
    given, to those alone.
    """

    busy_hosts: tuple[str, ...] = ()
    busy_sites: tuple[str, ...] = ()
    only_hosts: tuple[str, ...] | None = None


ANYWHERE = Choice()


class TryOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one try; `due_at` None gives the delivery up unless it has arrived.

    `body` is what was sent: it is kept for the next try, and with what was given up.
    """

    id: str
    claimed_by: str
    has_arrived: bool
    status: int | None = None
    error: str | None = None
    due_at: float | None = None
    body: str | None = None
    duration_ms: int = 0
    answer: str | None = None


class DeliveryQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which deliveries to list, newest first; `before` is the last id of the page before."""

    state: DeliveryState | None = None
    task_id: str | None = None
    before: str | None = None
    limit: int = 100


class DeliveryPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a list; `next_before` is None if it is the last."""

    deliveries: tuple[Delivery, ...]
    next_before: str | None = None


class NothingLeft(msgspec.Struct, frozen=True):
    """The delivery has arrived and its task is forgotten, so there is nothing to send again."""


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    """A signing secret; one that was replaced signs beside the newer one until `ends_at`."""

    secret: str
    created_at: float
    ends_at: float | None = None


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A scope has used a share of its limit; `until` is when the same may be told again.

    None is never. A limit that was changed is told of anew.
    """

    message_id: str
    scope: str
    unit: str
    percent: int
    limit: int
    until: float | None
    body: str


class SendReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request: a status, or the reason for which there is none.

    `error` may repeat what the receiver said, and so a secret of its own. `problem` says the same
    in words that are all our own, for the log. `answer` is the beginning of what the receiver said,
    on one line, without what is known to be a secret or looks like one.

    `is_final` says that the address must not be tried again: it is refused, or gone for good.
    """

    status: int | None = None
    error: str | None = None
    problem: str | None = None
    has_arrived: bool = False
    is_final: bool = False
    asked_seconds: float | None = None
    answer: str | None = None


class Sender(Protocol):
    """Sends signed messages to addresses that anybody may have named."""

    async def open(self) -> None:
        """Get ready, so that the first message is not held up by it."""

    async def close(self) -> None:
        """Close every connection; the next message opens new ones."""

    async def send(
        self, message: Message, body: bytes, secrets: Sequence[str], *, now: float
    ) -> SendReport:
        """Send a message once, within its time; whatever goes wrong is in the report."""


class Deliveries(Protocol):
    """Keeps deliveries and secrets; every method may raise `StoreUnavailableError`."""

    def now(self) -> float:
        """Return the time by which deliveries are due."""

    async def due(self, choice: Choice = ANYWHERE, *, limit: int) -> list[Candidate]:
        """Return what is due of a choice, the oldest first."""

    async def claim(self, ids: Sequence[str], *, claimed_by: str, seconds: float) -> Claim:
        """Claim what is still due of these."""

    async def body(self, message: Message) -> str | None:
        """Return what is told, as JSON; None if neither it nor the task is kept any more."""

    async def settle(self, outcome: TryOutcome) -> None:
        """Write what came of a try; a sender that has lost its claim changes nothing by failing."""

    async def release(self, claimed_by: str | None) -> None:
        """Let what a sender has claimed, or everything, be claimed again at once."""

    async def alert(self, alerts: Sequence[Alert], url: str) -> int:
        """File those alerts that were not told yet, and return how many there were."""

    async def find(self, query: DeliveryQuery) -> DeliveryPage:
        """List deliveries, newest first."""

    async def get(self, delivery_id: str) -> Delivery | None:
        """Return a delivery; None if there is none."""

    async def redeliver(
        self, delivery_id: str, entry: AuditEntry | None = None
    ) -> Delivery | NothingLeft | None:
        """Start over with a delivery, and note who did; None if there is none."""

    async def secrets(self, entry: AuditEntry | None = None) -> tuple[Secret, ...]:
        """Return the secrets that sign now, the newest first; the first is made at need."""

    async def rotate(self, entry: AuditEntry | None = None) -> tuple[Secret, ...]:
        """Make a new secret, and note who did; those before it sign too for another day."""

    async def purge(self) -> int:
        """Forget what ended long ago and give up what is too much; return how many, bounded."""


def message_id(task_id: str) -> str:
    """Return the id of the message that tells of the end of a task."""
    return MESSAGE_PREFIX + task_id.replace("tsk_", "")


def host_of(url: str) -> str:
    """Return the host of an address, by which senders share their places; empty if it has none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
