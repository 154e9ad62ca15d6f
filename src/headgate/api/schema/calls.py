"""The JSON of calls through the gateway: one, a page of them, and why one waits."""

from __future__ import annotations

from datetime import datetime

import msgspec

from headgate.api.schema.tasks import ReasonBody
from headgate.core.call import CallState


class CallTokensBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """The tokens of a call as its upstream reported them; what is left out it did not say."""

    input_tokens: int | None = None
    """All tokens of the prompt."""
    cached_tokens: int | None = None
    """Those that came from a cache."""
    cache_write_tokens: int | None = None
    """Those that went into a cache."""
    output_tokens: int | None = None
    """Tokens of the answer."""
    reasoning_tokens: int | None = None
    """Those of them spent on reasoning."""


class CallAmountBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Tokens and dollars of a call; the assumed ones are the part that nobody reported, if any."""

    tokens: int
    usd: str
    assumed_tokens: int = 0
    """The part of the tokens that nobody reported."""
    assumed_usd: str | None = None
    """The part of the dollars that nobody reported."""
    basis: str = ""
    """Where a reserved amount comes from: `given` by the length that the request allows, `learned`
    from answers, or a `probe`."""


class CallBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The JSON of a call. Times are RFC 3339 in UTC, and what is not set is left out."""

    call_id: str
    state: CallState
    """`waiting`, `running`, `done`, `failed`, `refused` or `cancelled`."""
    project_id: str
    agent_id: str
    model: str
    """The model that the client asked for."""
    upstream: str = ""
    """Where it went, or is to go."""
    upstream_model: str = ""
    """The model that was sent there, if an alias named another."""
    protocol: str = ""
    """`chat`, `completions`, `responses`, `embeddings`, `messages`, `count_tokens` or `other`."""
    is_stream: bool = False
    """Whether the client asked for a stream."""
    priority: int = 0
    scopes: tuple[str, ...] = ()
    """The budgets that it is charged to, beside the root."""
    client: str = ""
    """The program that sent it, if it says so."""
    session: str = ""
    """A short hash of the session of its client."""
    token_id: str = ""
    task_id: str | None = None
    """The running task that made the call."""
    created_at: datetime
    """When it came."""
    started_at: datetime | None = None
    """When its last try had its permits and its money; left out while it waits."""
    first_byte_at: datetime | None = None
    """When the first byte of the answer came."""
    ended_at: datetime | None = None
    waited_ms: int | None = None
    """How long it waited before its last try; left out while it waits."""
    slot: str | None = None
    """The name of the key that it used; left out while it waits."""
    key_rule: str = ""
    """Why it got that key."""
    status: int | None = None
    """The HTTP status that the client got."""
    error: str | None = None
    tries: int = 0
    """How many requests were sent upstream."""
    max_tokens: int | None = None
    """What the setting `clamp` lowered the length of the answer to."""
    reported: CallTokensBody = CallTokensBody()
    """The tokens that the upstream reported."""
    reserved: CallAmountBody | None = None
    """What was reserved for it."""
    usage: CallAmountBody | None = None
    """What it was booked at. A call with a `taskId` is booked by its task."""
    is_unpriced: bool = False
    """Whether nobody knows the price of the model."""


class CallListBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of calls; `next_cursor` is there if there is a further page."""

    calls: list[CallBody]
    """The calls, newest first."""
    count: int
    next_cursor: str | None = None


class CallWhyBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Every reason why a call waits; a call that does not wait has none."""

    call_id: str
    state: CallState
    reasons: tuple[ReasonBody, ...] = ()
    """Every reason why the call waits."""
    position: int | None = None
    """Its position among the waiting calls of its agent, from 1."""
    expected_seconds: float | None = None
    """About how long it still has to wait, if Headgate can compute it."""
    slot: str | None = None
    """The name of its key."""
    key_rule: str = ""
    """Why it got that key."""
    error: str | None = None
    """Why it was refused or failed."""
