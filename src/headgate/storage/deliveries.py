"""Deliveries: what is to be told to whom, how often it was tried, what came of it.

A delivery is one message for one address: the end of a task, or a budget alert. It is written in
the transaction of what it tells of, and ends as delivered or dead; nothing that happens to it
changes a task. A sender claims it first, for a bounded time. A claim that ends without an outcome
lets the next sender try, so a message may arrive twice, under the same id, and is never lost.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Awaitable, Sequence
from enum import Enum
from functools import partial
from typing import Protocol

import msgspec

from headgate.core.task_view import snapshot_of
from headgate.storage import audit, queries
from headgate.storage.audit import AuditEntry
from headgate.storage.schema import ALERTS, BODIES, DELIVERY_ROWS, TRIES
from headgate.storage.transaction import Access, Row, Transaction, Value, about
from headgate.storage.unit_of_work import delivery_row, message_id

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
    """A delivery that is due, the host that it goes to, and the project of its task.

    What is about no task has no project.
    """

    id: str
    host: str
    project_id: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """To whom a sender has capacity to send.

    Neither to `busy_hosts` nor to any host at or below one of `busy_sites`; and if `only_hosts` is
    given, to those alone. Of `busy_projects` nothing is sent, of `proven_projects` only to
    `proven_hosts`, and of `slow_projects` nothing to `slow_hosts`.
    """

    busy_hosts: tuple[str, ...] = ()
    busy_sites: tuple[str, ...] = ()
    only_hosts: tuple[str, ...] | None = None
    busy_projects: tuple[str, ...] = ()
    proven_projects: tuple[str, ...] = ()
    proven_hosts: tuple[str, ...] = ()
    slow_projects: tuple[str, ...] = ()
    slow_hosts: tuple[str, ...] = ()


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


# Purging. What has ended goes by age, number and size. What is pending beyond its bounds is given
# up, those first that are due last: they are for receivers that have failed most often, while a
# first try is due at once. Rule: beyond a number or a size it is the projects that have most which
# lose what they have more than others, so whoever floods the store loses its own and nobody else's.

DELIVERED_KEPT_SECONDS = 86_400.0
DEAD_KEPT_SECONDS = 30 * 86_400.0
MAX_DELIVERED = 20_000
MAX_DEAD = 10_000
MAX_DEAD_BYTES = 256 * 2**20
MAX_PENDING = 100_000
MAX_PENDING_BYTES = 2**30
TOO_MANY = "given up: too many webhooks wait to be delivered"

_TOO_OLD = (
    "SELECT id FROM deliveries WHERE state = ? AND ended_at IS NOT NULL AND ended_at < ? LIMIT ?"
)
_BODY = " JOIN delivery_bodies ON delivery_bodies.id = deliveries.id"
_IS_PENDING = "due_at IS NOT NULL"


def _is_ended(state: DeliveryState) -> str:
    return f"state = '{state.value}' AND ended_at IS NOT NULL"


_FORGET_DELIVERIES = (
    about("DELETE FROM deliveries", "id"),
    about("DELETE FROM delivery_bodies", "id"),
    about("DELETE FROM delivery_tries", "id"),
)
_GIVE_UP = "UPDATE deliveries SET state = 'dead', due_at = NULL, ended_at = ?, error = ?"


def purge(transaction: Transaction, now: float) -> int:
    """Give up and forget what is beyond the bounds, and return how many deliveries that is."""
    return _give_up(transaction, now) + _forget(transaction, now)


def _forget(transaction: Transaction, now: float) -> int:
    state, gone = DeliveryState, dict[str, None]()
    for values in (
        (state.DELIVERED.value, now - DELIVERED_KEPT_SECONDS, MAX_PURGED),
        (state.DEAD.value, now - DEAD_KEPT_SECONDS, MAX_PURGED),
    ):
        gone.update((row[0], None) for row in transaction.read(_TOO_OLD, values))
    newest = "ended_at DESC"
    for which, most, is_size in (
        (_is_ended(state.DELIVERED), MAX_DELIVERED, False),
        (_is_ended(state.DEAD), MAX_DEAD, False),
        (_is_ended(state.DEAD), MAX_DEAD_BYTES, True),
    ):
        gone.update(dict.fromkeys(_beyond(transaction, which, newest, most, is_size=is_size)))
    if gone:
        for forget in _FORGET_DELIVERIES:
            transaction.run(forget, list(gone))
    return len(gone)


def _give_up(transaction: Transaction, now: float) -> int:
    gone = dict[str, None]()
    for most, is_size in ((MAX_PENDING, False), (MAX_PENDING_BYTES, True)):
        found = _beyond(transaction, _IS_PENDING, "due_at", most, is_size=is_size)
        gone.update(dict.fromkeys(found))
    for delivery_id in gone:
        transaction.run(f"{_GIVE_UP} WHERE id = ?", (now, TOO_MANY, delivery_id))
    return len(gone)


def _beyond(
    transaction: Transaction, which: str, order: str, most: int, *, is_size: bool
) -> list[str]:
    """Return what is beyond a number or a size in all: the last of the projects that have most."""
    tables, amount = ("deliveries", "COUNT(*)")
    if is_size:
        tables, amount = (f"deliveries{_BODY}", "SUM(octet_length(body))")
    counted = f"SELECT {amount} FROM {tables} WHERE {which}"  # noqa: S608
    amounts = [int(row[0]) for row in transaction.read(f"{counted} GROUP BY project_id")]
    if sum(amounts) <= most:
        return []
    summed = (
        f"SELECT deliveries.id AS id, claimed_by, {amount} OVER"  # noqa: S608
        f" (PARTITION BY project_id ORDER BY {order}, deliveries.id) AS total"
        f" FROM {tables} WHERE {which}"
    )
    sql = f"SELECT id FROM ({summed}) AS summed WHERE total > ? AND claimed_by IS NULL LIMIT ?"  # noqa: S608
    rows = transaction.read(sql, (level(amounts, most), MAX_PURGED))
    return [row[0] for row in rows]


def level(amounts: Sequence[int], most: int) -> int:
    """Return how much each may keep at most, so that all together keep no more than `most`."""
    left = most
    for place, amount in enumerate(sorted(amounts)):
        share = left // (len(amounts) - place)
        if amount > share:
            return share
        left -= amount
    return max(amounts, default=0)


# Signing secrets: the newest, and for a day those that it has replaced. A secret is kept as it is,
# because a signature cannot be made from a hash of it. Whoever can read the database can sign.

PREFIX = "whsec_"
SECRET_BYTES = 32
OVERLAP_SECONDS = 86_400.0
MAX_SECRETS = 8

_LIVE = (
    "SELECT secret, created_at, ends_at FROM webhook_secrets WHERE ends_at IS NULL OR ends_at > ?"
    " ORDER BY CASE WHEN ends_at IS NULL THEN 0 ELSE 1 END, ends_at DESC, created_at DESC"
)
_ADD = "INSERT INTO webhook_secrets (secret, created_at, ends_at) VALUES (?, ?, NULL)"
_RETIRE = "UPDATE webhook_secrets SET ends_at = ? WHERE ends_at IS NULL"
_FORGET = "DELETE FROM webhook_secrets WHERE ends_at <= ?"


def new_secret() -> str:
    """Make a secret that nobody can guess."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def current(
    transaction: Transaction, now: float, *, candidate: str, entry: AuditEntry | None = None
) -> tuple[Secret, ...]:
    """Return the secrets that sign now, the newest first; `candidate` is the first of all."""
    if entry is not None:
        audit.write(transaction, entry, now)
    found = _live(transaction, now)
    if found and found[0].ends_at is None:
        return found
    transaction.run(_ADD, (candidate, now))
    return _live(transaction, now)


def rotate(
    transaction: Transaction, now: float, *, candidate: str, entry: AuditEntry | None = None
) -> tuple[Secret, ...]:
    """Make the candidate the newest secret; those before it sign too for another day."""
    found = _live(transaction, now)
    if candidate in {secret.secret for secret in found}:
        # The reply to the first run got lost.
        return found
    if entry is not None:
        audit.write(transaction, entry, now)
    transaction.run(_RETIRE, (now + OVERLAP_SECONDS,))
    transaction.run(_ADD, (candidate, now))
    transaction.run(_FORGET, (now,))
    found = _live(transaction, now)
    for secret in found[MAX_SECRETS:]:
        transaction.run("DELETE FROM webhook_secrets WHERE secret = ?", (secret.secret,))
    return found[:MAX_SECRETS]


def _live(transaction: Transaction, now: float) -> tuple[Secret, ...]:
    rows = transaction.read(_LIVE, (now,))
    return tuple(Secret(secret=row[0], created_at=row[1], ends_at=row[2]) for row in rows)


# The latest tries of a delivery: one JSON text beside its row. Their number is bounded here, and
# the texts by whoever sends.

_READ = (
    "SELECT created_at, delivery_tries.tries FROM deliveries LEFT JOIN delivery_tries"
    " ON delivery_tries.id = deliveries.id AND filed_at = created_at WHERE deliveries.id = ?"
)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[DeliveryTry, ...])


def note(transaction: Transaction, outcome: TryOutcome, now: float) -> None:
    """Add a try to those of its delivery; the oldest makes room for it."""
    tried = DeliveryTry(
        at=now,
        duration_ms=outcome.duration_ms,
        status=outcome.status,
        # Where something came back, its status and its answer say all that an error could.
        error=outcome.error if outcome.status is None else None,
        answer=outcome.answer,
    )
    for filed_at, text in transaction.read(_READ, (outcome.id,)):
        kept = (*_tries(text), tried)[-MAX_KEPT_TRIES:]
        transaction.insert(TRIES, [(outcome.id, filed_at, _encoder.encode(kept).decode())])


def latest(transaction: Transaction, delivery_id: str) -> tuple[DeliveryTry, ...]:
    """Return the tries of a delivery that are kept, the oldest first."""
    rows = transaction.read(_READ, (delivery_id,))
    return _tries(rows[0][1]) if rows else ()


def _tries(text: str | None) -> tuple[DeliveryTry, ...]:
    return () if text is None else _decoder.decode(text)


_COLUMNS = "id, event, url, state, task_id, tries, created_at, due_at, ended_at, status, error"
_GET = f"SELECT {_COLUMNS} FROM deliveries WHERE id = ?"  # noqa: S608
_DUE = "SELECT id, host, project_id FROM deliveries WHERE due_at IS NOT NULL AND due_at <= ?"
_WANTED = about("SELECT id, event, url, task_id, tries, due_at FROM deliveries", "id")
_KEPT_BODY = "SELECT body FROM delivery_bodies WHERE id = ?"
_ARRIVED = (
    "UPDATE deliveries SET state = 'delivered', due_at = NULL, claimed_by = NULL, ended_at = ?,"
    " tries = tries + 1, status = ?, error = NULL WHERE id = ? AND state <> 'delivered'"
)
_FAILED = (
    "UPDATE deliveries SET state = ?, due_at = ?, claimed_by = NULL, ended_at = ?,"
    " tries = tries + 1, status = ?, error = ?"
    " WHERE id = ? AND claimed_by = ? AND state = 'pending'"
)
_RESTART = (
    "UPDATE deliveries SET state = 'pending', due_at = ?, claimed_by = NULL, ended_at = NULL,"
    " tries = 0, status = NULL, error = NULL WHERE id = ? AND claimed_by IS NULL"
)
_RELEASE = "UPDATE deliveries SET due_at = ?, claimed_by = NULL WHERE due_at IS NOT NULL"
_TOLD = (
    "SELECT limit_amount, told_until FROM budget_alerts"
    " WHERE scope = ? AND unit = ? AND percent = ?"
)


class Deliveries:
    """Deliveries beside the tasks of a store.

    An arrival counts whoever reports it. A failure counts only from the sender that still has the
    claim; another may have tried meanwhile, and its outcome is the later one.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self.now = access.now

    def due(self, choice: Choice = ANYWHERE, *, limit: int) -> Awaitable[list[Candidate]]:
        """Return what is due of a choice, the oldest first."""
        return self._access.ask(partial(due, now=self.now(), choice=choice, limit=limit))

    def claim(self, ids: Sequence[str], *, claimed_by: str, seconds: float) -> Awaitable[Claim]:
        """Claim what is still due of these."""
        operation = partial(
            claim,
            ids=tuple(ids),
            claimed_by=claimed_by,
            seconds=seconds,
            candidate=new_secret(),
        )
        return self._access.run(operation)

    def body(self, message: Message) -> Awaitable[str | None]:
        """Return what is told, as JSON; None if neither it nor the task is kept any more."""
        return self._access.ask(partial(body, message=message))

    def settle(self, outcome: TryOutcome) -> Awaitable[None]:
        """Write what came of a try."""
        return self._access.run(partial(settle, outcome=outcome))

    async def release(self, claimed_by: str | None) -> None:
        """Let what a sender has claimed, or everything, be claimed again at once."""
        await self._access.run(partial(release, claimed_by=claimed_by))

    async def alert(self, alerts: Sequence[Alert], url: str) -> int:
        """File those alerts that were not told yet, and return how many there were."""
        return await self._access.run(partial(alert, alerts=tuple(alerts), url=url))

    async def find(self, query: DeliveryQuery) -> DeliveryPage:
        """List deliveries, newest first."""
        return await self._access.ask(partial(find, query=query))

    def get(self, delivery_id: str) -> Awaitable[Delivery | None]:
        """Return a delivery; None if there is none."""
        return self._access.ask(partial(get, delivery_id=delivery_id))

    async def redeliver(
        self, delivery_id: str, entry: AuditEntry | None = None
    ) -> Delivery | NothingLeft | None:
        """Start over with a delivery, and note who did; None if there is none."""
        return await self._access.run(partial(redeliver, delivery_id=delivery_id, entry=entry))

    async def secrets(self, entry: AuditEntry | None = None) -> tuple[Secret, ...]:
        """Return the secrets that sign now, the newest first; the first is made at need."""
        candidate = new_secret()
        operation = partial(current, candidate=candidate, entry=entry)
        return await self._access.run(operation)

    async def rotate(self, entry: AuditEntry | None = None) -> tuple[Secret, ...]:
        """Make a new secret, and note who did; those before it sign too for another day."""
        candidate = new_secret()
        operation = partial(rotate, candidate=candidate, entry=entry)
        return await self._access.run(operation)

    async def purge(self) -> int:
        """Forget what ended long ago and give up what is too much; return how many, bounded."""
        return await self._access.run(purge)


def due(transaction: Transaction, *, now: float, choice: Choice, limit: int) -> list[Candidate]:
    """Return what is due of a choice, the oldest first."""
    if choice.only_hosts == ():
        return []
    conditions, values = _chosen(choice)
    sql = f"{_DUE}{conditions} ORDER BY due_at LIMIT ?"
    return [Candidate(*row) for row in transaction.read(sql, (now, *values, limit))]


def claim(
    transaction: Transaction,
    now: float,
    *,
    ids: tuple[str, ...],
    claimed_by: str,
    seconds: float,
    candidate: str,
) -> Claim:
    """Claim what is still due of these; `candidate` is the first secret, if there is none.

    A claim whose answer got lost is tried by the next sender when its time is over.
    """
    rows = transaction.read(_WANTED, ids)
    messages = tuple(
        Message(id=row[0], event=row[1], url=row[2], task_id=row[3], tries=row[4])
        for row in rows
        if row[5] is not None and row[5] <= now
    )
    for message in messages:
        transaction.run(
            "UPDATE deliveries SET due_at = ?, claimed_by = ? WHERE id = ?",
            (now + seconds, claimed_by, message.id),
        )
    secrets = current(transaction, now, candidate=candidate)
    return Claim(messages=messages, secrets=tuple(secret.secret for secret in secrets))


def body(transaction: Transaction, *, message: Message) -> str | None:
    """Return what is told: as it was sent before, or else the task as it ended."""
    kept = transaction.read(_KEPT_BODY, (message.id,))
    if kept:
        text: str = kept[0][0]
        return text
    record = queries.get(transaction, message.task_id) if message.task_id else None
    if record is None or not record.is_terminal:
        return None
    return msgspec.json.encode(snapshot_of(record)).decode()


def settle(transaction: Transaction, now: float, *, outcome: TryOutcome) -> None:
    """Write what came of a try."""
    if outcome.has_arrived:
        if transaction.write(_ARRIVED, (now, outcome.status, outcome.id)):
            note(transaction, outcome, now)
            transaction.run("DELETE FROM delivery_bodies WHERE id = ?", (outcome.id,))
        return
    is_dead = outcome.due_at is None
    state = DeliveryState.DEAD if is_dead else DeliveryState.PENDING
    ended_at = now if is_dead else None
    changed = transaction.write(
        _FAILED,
        (
            state.value,
            outcome.due_at,
            ended_at,
            outcome.status,
            outcome.error,
            outcome.id,
            outcome.claimed_by,
        ),
    )
    if not changed:
        return
    note(transaction, outcome, now)
    if outcome.body is not None:
        transaction.insert(BODIES, [(outcome.id, outcome.body)])


def release(transaction: Transaction, now: float, *, claimed_by: str | None) -> None:
    """Make what was claimed due now."""
    if claimed_by is None:
        transaction.run(f"{_RELEASE} AND claimed_by IS NOT NULL", (now,))
    else:
        transaction.run(f"{_RELEASE} AND claimed_by = ?", (now, claimed_by))


def alert(transaction: Transaction, now: float, *, alerts: tuple[Alert, ...], url: str) -> int:
    """File the alerts that were not told yet: the mark and the delivery are one commit."""
    new = [one for one in alerts if not _is_told(transaction, one, now)]
    transaction.insert(
        ALERTS, [(one.scope, one.unit, one.percent, one.limit, one.until) for one in new]
    )
    for one in new:
        filed = delivery_row(one.message_id, event=ALERT_EVENT, url=url, now=now)
        transaction.insert(DELIVERY_ROWS, [filed])
        transaction.insert(BODIES, [(one.message_id, one.body)])
    return len(new)


def find(transaction: Transaction, *, query: DeliveryQuery) -> DeliveryPage:
    """List deliveries, newest first."""
    conditions, values = _conditions(query)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    sql = f"SELECT {_COLUMNS} FROM deliveries{where} ORDER BY id DESC LIMIT ?"  # noqa: S608
    found = [_delivery(row) for row in transaction.read(sql, (*values, query.limit + 1))]
    has_more = len(found) > query.limit
    page = tuple(found[: query.limit])
    return DeliveryPage(deliveries=page, next_before=page[-1].id if has_more else None)


def get(transaction: Transaction, *, delivery_id: str) -> Delivery | None:
    """Return a delivery; None if there is none."""
    rows = transaction.read(_GET, (delivery_id,))
    if not rows:
        return None
    tries = latest(transaction, delivery_id)
    return msgspec.structs.replace(_delivery(rows[0]), latest_tries=tries)


def redeliver(
    transaction: Transaction, now: float, *, delivery_id: str, entry: AuditEntry | None = None
) -> Delivery | NothingLeft | None:
    """Start over with a delivery, if what it tells is still known; one under way goes on."""
    known = get(transaction, delivery_id=delivery_id)
    if known is None:
        return None
    message = Message(id=known.id, event=known.event, url=known.url, task_id=known.task_id)
    if body(transaction, message=message) is None:
        return NothingLeft()
    transaction.run(_RESTART, (now, delivery_id))
    if entry is not None:
        audit.write(transaction, entry, now)
    return get(transaction, delivery_id=delivery_id)


def _is_told(transaction: Transaction, one: Alert, now: float) -> bool:
    rows = transaction.read(_TOLD, (one.scope, one.unit, one.percent))
    if not rows or rows[0][0] != one.limit:
        return False
    return rows[0][1] is None or rows[0][1] > now


def _chosen(choice: Choice) -> tuple[str, list[Value]]:
    parts, values = list[str](), list[Value]()
    for condition, names in (
        ("host NOT IN", choice.busy_hosts),
        ("host IN", choice.only_hosts or ()),
        ("project_id NOT IN", choice.busy_projects),
    ):
        if names:
            parts.append(f" AND {condition} {_list(names)}")
            values.extend(names)
    for projects, word, hosts in (
        (choice.proven_projects, "IN", choice.proven_hosts),
        (choice.slow_projects, "NOT IN", choice.slow_hosts),
    ):
        if projects:
            to_hosts = f" OR host {word} {_list(hosts)}" if hosts else ""
            parts.append(f" AND (project_id NOT IN {_list(projects)}{to_hosts})")
            values.extend((*projects, *hosts))
    for site in choice.busy_sites:
        parts.append(" AND host <> ? AND host NOT LIKE ?")
        values.extend((site, f"%.{site}"))
    return "".join(parts), values


def _list(names: Sequence[str]) -> str:
    return f"({', '.join('?' * len(names))})"


def _conditions(query: DeliveryQuery) -> tuple[list[str], list[Value]]:
    given: tuple[tuple[str, Value], ...] = (
        ("id < ?", query.before),
        ("state = ?", None if query.state is None else query.state.value),
        ("id = ?", None if query.task_id is None else message_id(query.task_id)),
    )
    kept = [(condition, value) for condition, value in given if value is not None]
    return [condition for condition, _ in kept], [value for _, value in kept]


def _delivery(row: Row) -> Delivery:
    return Delivery(
        id=row[0],
        event=row[1],
        url=row[2],
        state=DeliveryState(row[3]),
        task_id=row[4],
        tries=row[5],
        created_at=row[6],
        due_at=row[7],
        ended_at=row[8],
        status=row[9],
        error=row[10],
    )


# Both are counted in an index, however many were delivered.
_PENDING = "SELECT COUNT(*) FROM deliveries WHERE due_at IS NOT NULL"
_DEAD = "SELECT COUNT(*) FROM deliveries WHERE state = 'dead' AND ended_at IS NOT NULL"


class DeliveryCounts:
    """Counts the webhooks that are still to be delivered, and those that were given up."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def read(self) -> dict[str, int]:
        """Return the counts of those that were not delivered."""
        return await self._access.ask(_counts)


def _counts(transaction: Transaction) -> dict[str, int]:
    pending, dead = (transaction.read(sql, ())[0][0] for sql in (_PENDING, _DEAD))
    return {"pending": int(pending), "dead": int(dead)}
