"""Tokens in the store: their table, and functions on a transaction.

A token that was revoked or has expired stays in the list until its place is needed. Rule: a row
leaves only for another one, so an empty table means that there never was a token.
"""

from __future__ import annotations

from functools import partial

from headgate.audit import AuditEntry
from headgate.databases.access import Access
from headgate.databases.migrations import Migration
from headgate.databases.transaction import Row, Transaction
from headgate.errors import LimitReachedError
from headgate.stores.administering import audit_trail
from headgate.tokens import MAX_TOKENS, Bounds, KeptToken, Token

PART = "tokens"

_TABLE = """
CREATE TABLE tokens (
    id {text} PRIMARY KEY,
    name {text} NOT NULL,
    permissions {text} NOT NULL,
    secret_hash {text} NOT NULL,
    agent_id {text},
    project_id {text},
    least_priority BIGINT,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION,
    revoked_at DOUBLE PRECISION
)
"""
MIGRATIONS = (
    Migration(
        number=1,
        sqlite=(_TABLE.format(text="TEXT"),),
        postgres=(_TABLE.format(text='TEXT COLLATE "C"'),),
    ),
)

_COLUMNS = (
    "id, name, permissions, agent_id, project_id, least_priority, created_at, expires_at,"
    " revoked_at, secret_hash"
)
_INSERT = f"INSERT INTO tokens ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
_GET = f"SELECT {_COLUMNS} FROM tokens WHERE id = ?"  # noqa: S608
_LIST = f"SELECT {_COLUMNS} FROM tokens ORDER BY created_at DESC, id"  # noqa: S608
_IS_GOOD = "revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)"
_COUNT = f"SELECT COUNT(*), COUNT(CASE WHEN {_IS_GOOD} THEN 1 END) FROM tokens"  # noqa: S608
_MAKE_ROOM = (
    "DELETE FROM tokens WHERE id IN (SELECT id FROM tokens"  # noqa: S608
    f" WHERE NOT ({_IS_GOOD}) ORDER BY created_at LIMIT ?)"
)
_REVOKE = "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"


def found(transaction: Transaction, now: float, *, kept: KeptToken) -> bool:
    """Keep the first token; the same one again is still the first."""
    rows = transaction.read("SELECT id FROM tokens LIMIT 2")
    if not rows:
        add(transaction, now, kept=kept)
    return not rows or rows == [(kept.token.id,)]


def add(
    transaction: Transaction, now: float, *, kept: KeptToken, entry: AuditEntry | None = None
) -> None:
    """Keep a token, in the place of one that is over if need be."""
    if get(transaction, kept.token.id) is not None:
        return
    ((total, good),) = transaction.read(_COUNT, (now,))
    if good >= MAX_TOKENS:
        problem = f"{good} tokens are good, and no more may be; revoke some that nobody uses"
        raise LimitReachedError(problem)
    if total >= MAX_TOKENS:
        transaction.run(_MAKE_ROOM, (now, total - MAX_TOKENS + 1))
    transaction.run(_INSERT, _row(kept))
    if entry is not None:
        audit_trail.write(transaction, entry, now)


def get(transaction: Transaction, token_id: str) -> KeptToken | None:
    """Return a token; None if there is none."""
    rows = transaction.read(_GET, (token_id,))
    return _kept(rows[0]) if rows else None


def listed(transaction: Transaction) -> list[Token]:
    """Return all tokens that are remembered, the newest first."""
    return [_kept(row).token for row in transaction.read(_LIST)]


def revoke(
    transaction: Transaction, now: float, *, token_id: str, entry: AuditEntry | None = None
) -> Token | None:
    """End a token for good; one that was revoked before stays as it was."""
    if transaction.write(_REVOKE, (now, token_id)) and entry is not None:
        audit_trail.write(transaction, entry, now)
    kept = get(transaction, token_id)
    return None if kept is None else kept.token


class SqlTokens:
    """The tokens of a store."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def now(self) -> float:
        """Return the time by which tokens expire."""
        return self._access.now()

    async def found(self, kept: KeptToken) -> bool:
        """Keep the first token of a store; False if there ever was one."""
        return await self._access.run(partial(found, kept=kept))

    async def add(self, kept: KeptToken, entry: AuditEntry | None = None) -> None:
        """Keep a token, and who made it; `LimitReachedError` if as many are good as may be."""
        await self._access.run(partial(add, kept=kept, entry=entry))

    async def get(self, token_id: str) -> KeptToken | None:
        """Return a token; None if there is none."""
        return await self._access.ask(partial(get, token_id=token_id))

    async def list(self) -> list[Token]:
        """Return all tokens that are remembered, the newest first."""
        return await self._access.ask(listed)

    async def revoke(self, token_id: str, entry: AuditEntry | None = None) -> Token | None:
        """End a token for good, note who did, and return it; None if there is none."""
        return await self._access.run(partial(revoke, token_id=token_id, entry=entry))


def _row(kept: KeptToken) -> Row:
    token, bounds = kept.token, kept.token.bounds
    return (
        token.id,
        token.name,
        ",".join(token.permissions),
        bounds.agent_id,
        bounds.project_id,
        bounds.least_priority,
        token.created_at,
        token.expires_at,
        token.revoked_at,
        kept.secret_hash,
    )


def _kept(row: Row) -> KeptToken:
    token = Token(
        id=row[0],
        name=row[1],
        permissions=tuple(row[2].split(",")),
        bounds=Bounds(agent_id=row[3], project_id=row[4], least_priority=row[5]),
        created_at=row[6],
        expires_at=row[7],
        revoked_at=row[8],
    )
    return KeptToken(token=token, secret_hash=row[9])
