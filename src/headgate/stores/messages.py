"""Messages between nodes: which tasks the dispatcher or another node is to look at.

A message carries no facts, only the id of a task whose row has them; so it does no harm when one
comes twice, and the reader takes the row for what it is by then.

Rule: a message is forgotten only when its reader shows that it has the answer it came with. A
reply can get lost after the commit, and what was deleted with it would be missed for good. So a
reader hands in the last number that it has seen, and what is beyond that is read again.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from headgate.databases.transaction import Dialect, Insert, Transaction

CHANNEL = "headgate"
"""Where PostgreSQL tells all nodes at once; what it says is the recipient."""

MAX_TAKEN = 1_000

_POST = Insert(
    table="messages", columns=(("recipient", "TEXT"), ("kind", "TEXT"), ("task_id", "TEXT"))
)
_NOTIFY = f"SELECT pg_notify('{CHANNEL}', ?)"
_FORGET = "DELETE FROM messages WHERE recipient = ? AND seq <= ?"
_READ = (
    "SELECT seq, kind, task_id FROM messages WHERE recipient = ? AND seq > ? ORDER BY seq LIMIT ?"
)


class Kind(Enum):
    """What there is to see at the task that a message names."""

    CHANGED = "changed"
    ASSIGNED = "assigned"
    CANCELLED = "cancelled"


class Message(NamedTuple):
    """One hint; its number grows from each message to the next, whoever they are for."""

    seq: int
    kind: Kind
    task_id: str


def post(transaction: Transaction, rows: Iterable[tuple[str, Kind, str]]) -> None:
    """Leave messages, each for a recipient; PostgreSQL tells them when the transaction commits."""
    # A task that changed more than once in a transaction is still looked at once.
    distinct = dict.fromkeys(rows)
    transaction.insert(_POST, [(recipient, kind.value, task) for recipient, kind, task in distinct])
    call(transaction, {row[0] for row in distinct})


def call(transaction: Transaction, recipients: Iterable[str]) -> None:
    """Have recipients look for themselves; only PostgreSQL has anybody to tell."""
    if transaction.dialect is Dialect.POSTGRES:
        for recipient in sorted(recipients):
            transaction.run(_NOTIFY, (recipient,))


def take(
    transaction: Transaction, recipient: str, *, seen: int, limit: int = MAX_TAKEN
) -> list[Message]:
    """Forget messages up to the number `seen`, and return the next ones in their order."""
    transaction.run(_FORGET, (recipient, seen))
    rows = transaction.read(_READ, (recipient, seen, limit))
    return [Message(seq, Kind(kind), task_id) for seq, kind, task_id in rows]


def discard(transaction: Transaction, recipient: str) -> None:
    """Forget all messages for a recipient that reads everything anew, or that is gone."""
    transaction.run("DELETE FROM messages WHERE recipient = ?", (recipient,))
