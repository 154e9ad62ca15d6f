"""A call through the gateway, from its arrival to its end, as people see it.

A call is no task: nothing is written while it waits or runs. The same record is what the engine
keeps of it in memory, what the store has of it once it has ended, and what `GET /calls` shows.
"""

from __future__ import annotations

import msgspec

from headgate.core.enums import LenientEnum
from headgate.core.estimates import Kind

CALL_PREFIX = "call-"
"""How the id of every call begins."""


class CallState(LenientEnum):
    """Where a call is on its way."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """Whether nothing can happen to the call any more."""
        return self is not CallState.WAITING and self is not CallState.RUNNING


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call through the gateway, as people see it; times are Unix seconds, money micro-dollars.

    `model` is what the client asked for, `upstream_model` what was sent upstream if an alias named
    another. `started_at` is when its last try had its permits and its money. `slot` is the name of
    a key, never the key, and `key_rule` a sentence that says why it was that one. `status` is what
    the client got, `tries` how many requests were sent upstream. `tokens` and `micro_usd` are what
    was booked, and the assumed amounts the part of it that nobody reported. `reserved_basis` is the
    `Basis` of what was reserved. `task_id` is the running task whose call it is. `max_tokens` is
    what the length of its answer was lowered to. `prompt_chars` is the size of a prompt whose
    tokens say something of others, `answers` how many were asked for, and `response_id` the name
    under which its provider keeps the response. `reservation_id` is set while a response is made in
    the background: what it held is booked until somebody says its cost.
    """

    id: str
    project_id: str
    agent_id: str
    model: str
    upstream: str = ""
    upstream_model: str = ""
    protocol: str = ""
    state: CallState = CallState.WAITING
    is_stream: bool = False
    priority: int = 0
    scopes: tuple[str, ...] = ()
    client: str = ""
    session: str = ""
    token_id: str = ""
    task_id: str | None = None
    created_at: float = 0.0
    started_at: float | None = None
    first_byte_at: float | None = None
    ended_at: float | None = None
    slot: str | None = None
    key_rule: str = ""
    status: int | None = None
    error: str | None = None
    tries: int = 0
    input_tokens: int | None = None
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    reserved_tokens: int = 0
    reserved_micro_usd: int = 0
    reserved_basis: str = ""
    tokens: int | None = None
    micro_usd: int | None = None
    assumed_tokens: int = 0
    assumed_micro_usd: int = 0
    is_unpriced: bool = False
    prompt_chars: int = 0
    answers: int = 1
    max_tokens: int | None = None
    response_id: str = ""
    reservation_id: str = ""

    @property
    def kind(self) -> str:
        """The kind of work that it is, for what is learned of its cost."""
        return Kind(self.project_id, self.upstream_model or self.model).text

    @property
    def running_seconds(self) -> float:
        """For how long its last try has had its permits, once it has ended."""
        if self.started_at is None or self.ended_at is None:
            return 0.0
        return self.ended_at - self.started_at
