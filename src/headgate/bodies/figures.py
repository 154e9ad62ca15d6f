"""The JSON of figures that a service shows: lanes, and the journal of a budget."""

from __future__ import annotations

from datetime import datetime

import msgspec


class LaneBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What one agent has in one project; the agent "" is the lane that any agent may take from.

    `ready`, `oldest_wait_seconds` and `load` are known at the node that dispatches. A lane whose
    tasks all wait for something else has no load.
    """

    project_id: str
    agent_id: str
    queued: int
    inflight: int
    ready: int | None = None
    oldest_wait_seconds: float | None = None
    load: float | None = None


class LaneListBody(msgspec.Struct, kw_only=True):
    """The lanes with work, the longest wait first; `count` is all that match, listed or not."""

    lanes: list[LaneBody]
    count: int
    strategy: str


class JournalEntryBody(msgspec.Struct, kw_only=True, rename="camel"):
    """One change of the books: what it added to each of `scopes`; amounts may be negative."""

    at: datetime
    reservation_id: str
    call: str
    scopes: list[str]
    spent_usd: str
    reserved_usd: str
    overrun_usd: str
    spent_tokens: int
    reserved_tokens: int
    overrun_tokens: int


class JournalBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of changes, newest first; `next_cursor` is there if there is a further page."""

    scope: str
    entries: list[JournalEntryBody]
    count: int
    next_cursor: str | None = None
