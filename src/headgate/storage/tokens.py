"""The contract of tokens: who may ask the service for what, and for whom alone.

A token is a text that only its owner has: `hg_`, its id, `_`, its secret. The id is for people and
logs. The secret has 192 random bits, is shown once and kept nowhere: what is stored is its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from functools import lru_cache, partial
from typing import Literal

import msgspec

from headgate.core.budgets.scopes import Scope, Tenant, parse_scope
from headgate.errors import (
    InvalidFieldError,
    InvalidScopeError,
    LimitReachedError,
    NameTakenError,
)
from headgate.storage import audit
from headgate.storage.audit import AuditEntry
from headgate.storage.migrations import Migration
from headgate.storage.transaction import Access, Row, Transaction

Permission = Literal["submit", "read", "cancel", "admin"]

PERMISSIONS: tuple[Permission, ...] = ("submit", "read", "cancel", "admin")
MAX_TOKENS = 1_000
"""How many tokens may be good at a time."""

MAX_NAME_LENGTH = 64
FIRST_NAME = "first"
NO_OWN_BUDGET = (
    "no budget can have the name of this agent: names of budgets are made of letters, digits and"
    " . _ @ + - only"
)

_ID_BYTES = 6
_SECRET_BYTES = 24
_TEXT = re.compile(rf"hg_([0-9a-f]{{{2 * _ID_BYTES}}})_([0-9a-f]{{{2 * _SECRET_BYTES}}})")


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """For whom alone somebody acts; None is not bound.

    `least_priority` is the most urgent priority that its tasks may have; lower goes first.
    """

    agent_id: str | None = None
    project_id: str | None = None
    least_priority: int | None = None

    @property
    def is_bound(self) -> bool:
        """Whether not everything belongs to it."""
        return self.agent_id is not None or self.project_id is not None

    def has(self, *, agent_id: str | None, project_id: str) -> bool:
        """Tell whether something of this agent and project belongs to it."""
        if self.project_id is not None and project_id != self.project_id:
            return False
        return self.agent_id is None or agent_id == self.agent_id

    @property
    def own_name(self) -> str:
        """The name of the budget that would hold all that is its own; empty is the root."""
        parts = (("project", self.project_id), ("agent", self.agent_id))
        return "/".join(f"{kind}:{name}" for kind, name in parts if name is not None)

    @property
    def own_scope(self) -> Scope | None:
        """The budget that holds all that is its own; the root of whoever is not bound.

        An agent may have any name and a budget may not: where it cannot have this one, it is None.
        """
        return _scope_or_none(self.own_name)

    @property
    def agent_scope(self) -> Scope | None:
        """The budget that its agent's work is always charged to, beside that of the project."""
        return None if self.agent_id is None else self.own_scope

    @property
    def tenant(self) -> Tenant:
        """Who states an amount of money under these bounds."""
        return Tenant(project_id=self.project_id, agent_id=self.agent_id)

    def may_charge(self, scope: Scope) -> bool:
        """Tell whether a budget is its own."""
        return self.tenant.may_charge(scope)


UNBOUND = Bounds()


@lru_cache(maxsize=MAX_TOKENS)
def _scope_or_none(name: str) -> Scope | None:
    try:
        return parse_scope(name)
    except InvalidScopeError:
        return None


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token as people see it; times are Unix seconds."""

    id: str
    name: str
    permissions: tuple[Permission, ...]
    bounds: Bounds = UNBOUND
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_good(self, now: float) -> bool:
        """Tell whether the token opens anything now."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class KeptToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it is stored."""

    token: Token
    secret_hash: str

    def is_opened_by(self, secret: str) -> bool:
        """Compare a secret, in a time that tells nothing of where they differ."""
        return hmac.compare_digest(self.secret_hash, hash_of(secret))


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that was just made, with the text that is shown this once."""

    kept: KeptToken
    text: str


def new_token(
    *,
    name: str,
    permissions: tuple[Permission, ...],
    now: float,
    bounds: Bounds = UNBOUND,
    expires_at: float | None = None,
) -> NewToken:
    """Make a token, or raise `InvalidFieldError`; nothing is kept yet."""
    check_name(name)
    _check_permissions(permissions, bounds)
    if expires_at is not None and expires_at <= now:
        raise InvalidFieldError("expiresAt", "is in the past; name a later time, or none")
    token_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_hex(_SECRET_BYTES)
    token = Token(
        id=token_id,
        name=name,
        permissions=tuple(one for one in PERMISSIONS if one in permissions),
        bounds=bounds,
        created_at=now,
        expires_at=expires_at,
    )
    kept = KeptToken(token=token, secret_hash=hash_of(secret))
    return NewToken(kept=kept, text=f"hg_{token_id}_{secret}")


def first_token(now: float, *, text: str | None = None) -> NewToken:
    """Make the first token of a store; with a text, the one that an earlier start began to make."""
    new = new_token(name=FIRST_NAME, permissions=PERMISSIONS, now=now)
    read = None if text is None else read_token(text)
    if text is None or read is None:
        return new
    token = msgspec.structs.replace(new.kept.token, id=read[0])
    return NewToken(kept=KeptToken(token=token, secret_hash=hash_of(read[1])), text=text)


def read_token(text: str) -> tuple[str, str] | None:
    """Return the id and the secret of a text; None if it is no token."""
    match = _TEXT.fullmatch(text)
    return None if match is None else (match[1], match[2])


def hash_of(secret: str) -> str:
    """Return what is stored of a secret; it is random, so a plain hash tells nothing of it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def check_name(name: str) -> None:
    """Refuse a name that could not be shown."""
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable() or name != name.strip():
        problem = f"a name has 1 to {MAX_NAME_LENGTH} printable characters, no space at its ends"
        raise InvalidFieldError("name", problem)


def _check_permissions(permissions: tuple[Permission, ...], bounds: Bounds) -> None:
    if not permissions:
        raise InvalidFieldError("permissions", f"name one or more of {', '.join(PERMISSIONS)}")
    if "admin" in permissions and bounds.is_bound:
        problem = "admin is for the whole service; leave out admin, or agent and project"
        raise InvalidFieldError("permissions", problem)


# Tokens in the store: their table, and functions on a transaction.
#
# A token that was revoked or has expired stays in the list until its place is needed. Rule: a row
# leaves only for another one, so an empty table means that there never was a token.

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
_NAMESAKE = f"SELECT id FROM tokens WHERE name = ? AND {_IS_GOOD} LIMIT 1"  # noqa: S608
_MAKE_ROOM = (
    "DELETE FROM tokens WHERE id IN (SELECT id FROM tokens"  # noqa: S608
    f" WHERE NOT ({_IS_GOOD}) ORDER BY created_at LIMIT ?)"
)
_REVOKE = "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"


def create_first(transaction: Transaction, now: float, *, kept: KeptToken) -> bool:
    """Keep the first token; the same one again is still the first."""
    rows = transaction.read("SELECT id FROM tokens LIMIT 2")
    if not rows:
        add(transaction, now, kept=kept)
    return not rows or rows == [(kept.token.id,)]


def add(
    transaction: Transaction, now: float, *, kept: KeptToken, entry: AuditEntry | None = None
) -> None:
    """Keep a token, in the place of one that is over if need be; no other good one has its name."""
    if get(transaction, kept.token.id) is not None:
        return
    ((total, good),) = transaction.read(_COUNT, (now,))
    if good >= MAX_TOKENS:
        problem = f"{good} tokens are good, and no more may be; revoke some that nobody uses"
        raise LimitReachedError(problem)
    namesakes = transaction.read(_NAMESAKE, (kept.token.name, now))
    if namesakes:
        raise NameTakenError(name=kept.token.name, token_id=namesakes[0][0])
    if total >= MAX_TOKENS:
        transaction.run(_MAKE_ROOM, (now, total - MAX_TOKENS + 1))
    transaction.run(_INSERT, _row(kept))
    if entry is not None:
        audit.write(transaction, entry, now)


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
        audit.write(transaction, entry, now)
    kept = get(transaction, token_id)
    return None if kept is None else kept.token


class TokenStore:
    """The tokens of a store; every method may raise `StoreUnavailableError`."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def now(self) -> float:
        """Return the time by which tokens expire."""
        return self._access.now()

    async def create_first(self, kept: KeptToken) -> bool:
        """Keep the first token of a store; False if there ever was one."""
        return await self._access.run(partial(create_first, kept=kept))

    async def add(self, kept: KeptToken, entry: AuditEntry | None = None) -> None:
        """Keep a token, and who made it.

        `LimitReachedError` if as many are good as may be, `NameTakenError` if one has its name.
        """
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
