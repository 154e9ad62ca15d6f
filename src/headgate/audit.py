"""The contract of the audit log: who changed what, when, and from what to what.

Rule: whatever an administrator changes is written here, in the transaction of the change where the
change is in the store. An entry says nothing that is secret: whoever makes one leaves that out.
"""

from __future__ import annotations

import uuid
from typing import Protocol

import msgspec

MAX_KEPT = 100_000
"""How many entries are kept at most; beyond that the oldest go, whatever their age."""

KEPT_SECONDS = 90 * 86_400.0

Detail = dict[str, object]


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """Who asked for a change: the name of a caller, its token, and the request that it came in.

    What no caller asked for has the name of its cause in parentheses: `(file)`, `(signal)`.
    """

    name: str
    token_id: str = ""
    request_id: str = ""


FILE = Actor(name="(file)")
SIGNAL = Actor(name="(signal)")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change: `action` as `project.patch`, `subject` as the name of what was changed.

    `detail` holds the change itself, usually `{key: {"from": …, "to": …}}`. The id is made by
    whoever writes the entry, so that one that is written twice is there once.
    """

    actor: Actor
    action: str
    subject: str = ""
    detail: Detail = {}
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


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


class AuditLog(Protocol):
    """Keeps entries for 90 days, and at most `MAX_KEPT` of them."""

    async def record(
        self, actor: Actor, action: str, subject: str = "", detail: Detail | None = None
    ) -> None:
        """Write one entry; the answer means that it is on disk."""

    async def page(self, *, before: int | None = None, limit: int = 100) -> AuditPage:
        """Return entries, newest first, from before a number."""
