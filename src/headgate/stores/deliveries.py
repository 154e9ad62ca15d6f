"""Deliveries in the database of the tasks: what is due, who has claimed it, what came of it.

Rule: an arrival counts whoever reports it. A failure counts only from the sender that still holds
the claim; another may have tried meanwhile, and its outcome is the later one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from headgate.databases.access import Access
from headgate.databases.transaction import Row, Transaction, Value, about
from headgate.deliveries import (
    ALERT_EVENT,
    MAX_PURGED,
    Alert,
    Candidate,
    Claim,
    Delivery,
    DeliveryPage,
    DeliveryQuery,
    DeliveryState,
    Message,
    NothingLeft,
    Secret,
    TryOutcome,
    message_id,
)
from headgate.stores import reading, webhook_secrets
from headgate.stores.delivery_schema import ALERTS, BODIES, DELIVERIES
from headgate.stores.filing import new_row
from headgate.task_snapshot import snapshot_of

DELIVERED_KEPT_SECONDS = 86_400.0
DEAD_KEPT_SECONDS = 30 * 86_400.0
MAX_DELIVERED = 20_000
MAX_DEAD = 10_000
MAX_DEAD_BYTES = 256 * 2**20

_COLUMNS = "id, event, url, state, task_id, tries, created_at, due_at, ended_at, status, error"
_GET = f"SELECT {_COLUMNS} FROM deliveries WHERE id = ?"  # noqa: S608
_DUE = "SELECT id, host FROM deliveries WHERE due_at IS NOT NULL AND due_at <= ?"
_WANTED = "SELECT id, event, url, task_id, tries, due_at FROM deliveries"
_BODY = "SELECT body FROM delivery_bodies WHERE id = ?"
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
_TOO_OLD = (
    "SELECT id FROM deliveries WHERE state = ? AND ended_at IS NOT NULL AND ended_at < ? LIMIT ?"
)
_TOO_MANY = (
    "SELECT id FROM deliveries WHERE state = ? AND ended_at IS NOT NULL"
    " ORDER BY ended_at DESC LIMIT ? OFFSET ?"
)
_TOO_LARGE = (
    "SELECT id FROM (SELECT deliveries.id AS id, SUM(octet_length(body))"
    " OVER (ORDER BY ended_at DESC, deliveries.id) AS total FROM deliveries"
    " JOIN delivery_bodies ON delivery_bodies.id = deliveries.id"
    " WHERE state = 'dead' AND ended_at IS NOT NULL) AS summed WHERE total > ? LIMIT ?"
)


class SqlDeliveries:
    """Deliveries beside the tasks of a store."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def now(self) -> float:
        """Return the time by which deliveries are due."""
        return self._access.now()

    async def due(self, *, busy_hosts: Iterable[str], limit: int) -> list[Candidate]:
        """Return what is due, the oldest first, without what goes to these hosts."""
        question = partial(due, now=self.now(), busy_hosts=tuple(busy_hosts), limit=limit)
        return await self._access.ask(question)

    async def claim(self, ids: Sequence[str], *, claimed_by: str, seconds: float) -> Claim:
        """Claim what is still due of these."""
        operation = partial(
            claim,
            ids=tuple(ids),
            claimed_by=claimed_by,
            seconds=seconds,
            candidate=webhook_secrets.new_secret(),
        )
        return await self._access.run(operation)

    async def body(self, message: Message) -> str | None:
        """Return what is told, as JSON; None if neither it nor the task is kept any more."""
        return await self._access.ask(partial(body, message=message))

    async def settle(self, outcome: TryOutcome) -> None:
        """Write what came of a try."""
        await self._access.run(partial(settle, outcome=outcome))

    async def release(self, claimed_by: str | None) -> None:
        """Let what a sender has claimed, or everything, be claimed again at once."""
        await self._access.run(partial(release, claimed_by=claimed_by))

    async def alert(self, alerts: Sequence[Alert], url: str) -> int:
        """File those alerts that were not told yet, and return how many there were."""
        return await self._access.run(partial(alert, alerts=tuple(alerts), url=url))

    async def find(self, query: DeliveryQuery) -> DeliveryPage:
        """List deliveries, newest first."""
        return await self._access.ask(partial(find, query=query))

    async def get(self, delivery_id: str) -> Delivery | None:
        """Return a delivery; None if there is none."""
        return await self._access.ask(partial(get, delivery_id=delivery_id))

    async def redeliver(self, delivery_id: str) -> Delivery | NothingLeft | None:
        """Start over with a delivery; None if there is none."""
        return await self._access.run(partial(redeliver, delivery_id=delivery_id))

    async def secrets(self) -> tuple[Secret, ...]:
        """Return the secrets that sign now, the newest first; the first is made at need."""
        candidate = webhook_secrets.new_secret()
        return await self._access.run(partial(webhook_secrets.current, candidate=candidate))

    async def rotate(self) -> tuple[Secret, ...]:
        """Make a new secret; those before it sign too for another day."""
        candidate = webhook_secrets.new_secret()
        return await self._access.run(partial(webhook_secrets.rotate, candidate=candidate))

    async def purge(self) -> int:
        """Forget what ended long ago, a bounded number, and return how many."""
        return await self._access.run(purge)


def due(
    transaction: Transaction, *, now: float, busy_hosts: tuple[str, ...], limit: int
) -> list[Candidate]:
    """Return what is due, the oldest first, without what goes to busy hosts."""
    marks = ", ".join("?" * len(busy_hosts))
    others = f" AND host NOT IN ({marks})" if busy_hosts else ""
    sql = f"{_DUE}{others} ORDER BY due_at LIMIT ?"
    return [Candidate(*row) for row in transaction.read(sql, (now, *busy_hosts, limit))]


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
    rows = transaction.read(*about(transaction.dialect, _WANTED, "id", ids))
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
    secrets = webhook_secrets.current(transaction, now, candidate=candidate)
    return Claim(messages=messages, secrets=tuple(secret.secret for secret in secrets))


def body(transaction: Transaction, *, message: Message) -> str | None:
    """Return what is told: as it was sent before, or else the task as it ended."""
    kept = transaction.read(_BODY, (message.id,))
    if kept:
        text: str = kept[0][0]
        return text
    record = reading.get(transaction, message.task_id) if message.task_id else None
    if record is None or not record.is_terminal:
        return None
    return msgspec.json.encode(snapshot_of(record)).decode()


def settle(transaction: Transaction, now: float, *, outcome: TryOutcome) -> None:
    """Write what came of a try."""
    if outcome.has_arrived:
        if transaction.write(_ARRIVED, (now, outcome.status, outcome.id)):
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
    if changed and outcome.body is not None:
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
        delivery = Delivery(
            id=one.message_id, event=ALERT_EVENT, url=url, created_at=now, due_at=now
        )
        transaction.insert(DELIVERIES, [new_row(delivery)])
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
    return _delivery(rows[0]) if rows else None


def redeliver(
    transaction: Transaction, now: float, *, delivery_id: str
) -> Delivery | NothingLeft | None:
    """Start over with a delivery, if what it tells is still known; one under way goes on."""
    known = get(transaction, delivery_id=delivery_id)
    if known is None:
        return None
    message = Message(id=known.id, event=known.event, url=known.url, task_id=known.task_id)
    if body(transaction, message=message) is None:
        return NothingLeft()
    transaction.run(_RESTART, (now, delivery_id))
    return get(transaction, delivery_id=delivery_id)


def purge(transaction: Transaction, now: float) -> int:
    """Forget deliveries that ended long ago, or are too many or too large together."""
    state, gone = DeliveryState, dict[str, None]()
    for sql, values in (
        (_TOO_OLD, (state.DELIVERED.value, now - DELIVERED_KEPT_SECONDS, MAX_PURGED)),
        (_TOO_OLD, (state.DEAD.value, now - DEAD_KEPT_SECONDS, MAX_PURGED)),
        (_TOO_MANY, (state.DELIVERED.value, MAX_PURGED, MAX_DELIVERED)),
        (_TOO_MANY, (state.DEAD.value, MAX_PURGED, MAX_DEAD)),
        (_TOO_LARGE, (MAX_DEAD_BYTES, MAX_PURGED)),
    ):
        gone.update((row[0], None) for row in transaction.read(sql, values))
    if gone:
        for forget in ("DELETE FROM deliveries", "DELETE FROM delivery_bodies"):
            transaction.run(*about(transaction.dialect, forget, "id", gone))
    return len(gone)


def _is_told(transaction: Transaction, one: Alert, now: float) -> bool:
    rows = transaction.read(_TOLD, (one.scope, one.unit, one.percent))
    if not rows or rows[0][0] != one.limit:
        return False
    return rows[0][1] is None or rows[0][1] > now


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
