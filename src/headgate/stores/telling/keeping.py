"""How much is kept of deliveries: what is forgotten, and what is given up before its time.

Rule: everything has a bound. What has ended goes by age, number and size. What is pending beyond
its bounds is given up, those first that are due last: they are for receivers that have failed most
often, while a first try is due at once.
"""

from __future__ import annotations

from headgate.databases.transaction import Transaction, about
from headgate.deliveries import MAX_PURGED, DeliveryState

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
_COUNT = "SELECT COUNT(*) FROM deliveries WHERE due_at IS NOT NULL"
_DUE_LAST = (
    "SELECT id FROM deliveries WHERE due_at IS NOT NULL AND claimed_by IS NULL"
    " ORDER BY due_at DESC, id DESC LIMIT ?"
)
_BODY_TOO_MUCH = (
    "SELECT id FROM (SELECT deliveries.id AS id, claimed_by, SUM(octet_length(body))"
    " OVER (ORDER BY due_at, deliveries.id) AS total FROM deliveries"
    " JOIN delivery_bodies ON delivery_bodies.id = deliveries.id"
    " WHERE due_at IS NOT NULL) AS summed WHERE total > ? AND claimed_by IS NULL LIMIT ?"
)
_GIVE_UP = "UPDATE deliveries SET state = 'dead', due_at = NULL, ended_at = ?, error = ?"


def purge(transaction: Transaction, now: float) -> int:
    """Give up and forget what is beyond the bounds, and return how many deliveries that is."""
    return _give_up(transaction, now) + _forget(transaction, now)


def _forget(transaction: Transaction, now: float) -> int:
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
        for table in ("deliveries", "delivery_bodies", "delivery_tries"):
            forget = f"DELETE FROM {table}"  # noqa: S608
            transaction.run(*about(transaction.dialect, forget, "id", gone))
    return len(gone)


def _give_up(transaction: Transaction, now: float) -> int:
    ((pending,),) = transaction.read(_COUNT)
    excess = min(MAX_PURGED, max(0, pending - MAX_PENDING))
    rows = transaction.read(_DUE_LAST, (excess,)) if excess else []
    rows += transaction.read(_BODY_TOO_MUCH, (MAX_PENDING_BYTES, MAX_PURGED))
    gone = dict.fromkeys(row[0] for row in rows)
    for delivery_id in gone:
        transaction.run(f"{_GIVE_UP} WHERE id = ?", (now, TOO_MANY, delivery_id))
    return len(gone)
