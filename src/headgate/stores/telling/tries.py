"""The latest tries of a delivery: one JSON text beside its row, written with what came of a try.

Rule: the number is bounded here, and the texts by whoever sends.
"""

from __future__ import annotations

import msgspec

from headgate.databases.transaction import Transaction
from headgate.deliveries import MAX_KEPT_TRIES, DeliveryTry, TryOutcome
from headgate.stores.schemas.deliveries import TRIES

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
