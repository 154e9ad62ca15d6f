"""The secrets that sign webhooks: the newest, and for a day those that it has replaced.

A secret is kept as it is, because a signature cannot be made from a hash of it. Whoever can read
the database can sign.
"""

from __future__ import annotations

import base64
import secrets

from headgate.audit import AuditEntry
from headgate.databases.transaction import Transaction
from headgate.deliveries import Secret
from headgate.stores.administering import audit_trail

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
        audit_trail.write(transaction, entry, now)
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
        audit_trail.write(transaction, entry, now)
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
