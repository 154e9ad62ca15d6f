"""The contract of the audit log: who changed what, when, and from what to what.

Rule: whatever an administrator changes is written here, in the transaction of the change where the
change is in the store. An entry says nothing that is secret: whoever makes one leaves that out.
"""

from __future__ import annotations

import uuid
from functools import partial

import msgspec

from headgate.storage.transaction import Access, Row, Transaction

MAX_KEPT = 100_000
"""How many changes are kept at most; beyond that the oldest go, whatever their age."""

MAX_READS_KEPT = 1_000
"""How many entries of reading are kept; they are bounded apart, so that no flood of them makes
changes go."""

MAX_KEPT_OF_TENANT = 1_000
"""How many entries are kept of one token without `admin`: it pushes out its own, and no other."""

KEPT_SECONDS = 90 * 86_400.0

Detail = dict[str, object]


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """Who asked for a change: the name of a caller, its token, and the request that it came in.

    What no caller asked for has the name of its cause in parentheses: `(file)`, `(signal)`. One
    that `is_tenant` has a token without `admin`.
    """

    name: str
    token_id: str = ""
    request_id: str = ""
    is_tenant: bool = False


FILE = Actor(name="(file)")
SIGNAL = Actor(name="(signal)")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change: `action` as `project.patch`, `subject` as the name of what was changed.

    `detail` holds the change itself, usually `{key: {"from": …, "to": …}}`. What `is_read` changed
    nothing: somebody was shown a secret. The id is made by whoever writes the entry, so that one
    that is written twice is there once.
    """

    actor: Actor
    action: str
    subject: str = ""
    detail: Detail = {}
    is_read: bool = False
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def share(self) -> tuple[str, int]:
        """Which entries it is counted with, and how many of these are kept."""
        if self.is_read:
            return "reads", MAX_READS_KEPT
        if self.actor.is_tenant:
            return f"token {self.actor.token_id}", MAX_KEPT_OF_TENANT
        return "", MAX_KEPT


class AuditRow(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An entry as it is kept; `seq` grows with every entry, `at` is in Unix seconds."""

    seq: int
    at: float
    actor: str
    token_id: str = ""
    action: str
    subject: str = ""
    detail: msgspec.Raw = msgspec.Raw(b"{}")
    request_id: str = ""


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """Entries, newest first; `next_before` is the `before` of the next page, None at the end."""

    rows: tuple[AuditRow, ...]
    next_before: int | None = None


# The audit log as rows of the store.
#
# `write` is a function on a transaction, so that a change and its entry are one commit. Old entries
# go when a new one is written: who changes nothing keeps nothing that grows.

MAX_TEXT = 256
MAX_DETAIL_BYTES = 16_384
TOO_LARGE: Detail = {"note": "the change is too large to be kept here"}

_WRITE = (
    "INSERT INTO audit_log (id, at, actor, token_id, action, subject, detail, request_id, share)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
)
_READ = (
    "SELECT seq, at, actor, token_id, action, subject, detail, request_id FROM audit_log"
    " WHERE at >= ? AND seq < ? ORDER BY seq DESC LIMIT ?"
)
_PURGE_OLD = "DELETE FROM audit_log WHERE at < ?"
_PURGE_MANY = (
    "DELETE FROM audit_log WHERE share = ? AND seq <= (SELECT seq FROM audit_log"
    " WHERE share = ? ORDER BY seq DESC LIMIT 1 OFFSET ?)"
)
_NO_END = 2**62


class AuditLog:
    """The audit log of a store: 90 days of entries, and of each share of them so many at most."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def record(
        self, actor: Actor, action: str, subject: str = "", detail: Detail | None = None
    ) -> None:
        """Write one entry; the answer means that it is on disk."""
        await self.write(
            AuditEntry(actor=actor, action=action, subject=subject, detail=detail or {})
        )

    async def write(self, entry: AuditEntry) -> None:
        """Write an entry, once however often; the answer means that it is on disk."""
        await self._access.run(partial(_write_one, entry=entry))

    async def page(self, *, before: int | None = None, limit: int = 100) -> AuditPage:
        """Return entries, newest first, from before a number."""
        since = self._access.now() - KEPT_SECONDS
        return await self._access.ask(partial(read, before=before, limit=limit, since=since))


def write(transaction: Transaction, entry: AuditEntry, now: float) -> None:
    """Write an entry in the transaction of the change; the same entry again changes nothing."""
    detail = msgspec.json.encode(entry.detail)
    if len(detail) > MAX_DETAIL_BYTES:
        detail = msgspec.json.encode(TOO_LARGE)
    actor = entry.actor
    texts = (actor.name, actor.token_id, entry.action, entry.subject)
    kept = [_kept(text) for text in texts]
    share, most = entry.share
    row: Row = (entry.id, now, *kept, detail.decode(), _kept(actor.request_id), share)
    transaction.run(_WRITE, row)
    transaction.run(_PURGE_OLD, (now - KEPT_SECONDS,))
    transaction.run(_PURGE_MANY, (share, share, most))


def read(transaction: Transaction, *, before: int | None, limit: int, since: float) -> AuditPage:
    """Return entries, newest first, from before a number and not older than a time."""
    end = _NO_END if before is None else before
    rows = transaction.read(_READ, (since, end, limit + 1))
    found = tuple(
        AuditRow(
            seq=row[0],
            at=row[1],
            actor=row[2],
            token_id=row[3],
            action=row[4],
            subject=row[5],
            detail=msgspec.Raw(row[6]),
            request_id=row[7],
        )
        for row in rows[:limit]
    )
    return AuditPage(rows=found, next_before=found[-1].seq if len(rows) > limit else None)


def _write_one(transaction: Transaction, now: float, *, entry: AuditEntry) -> None:
    write(transaction, entry, now)


def _kept(text: str) -> str:
    # PostgreSQL takes no null characters, and a name of any length is of no use here.
    return text[:MAX_TEXT].replace("\0", "")
