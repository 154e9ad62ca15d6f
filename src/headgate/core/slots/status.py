"""The JSON of slots that a service, its clients and its commands exchange.

Times are RFC 3339. What is not known is left out.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

SlotState = Literal["unknown", "cold", "open", "exhausted", "paused", "disabled"]
LogPhase = Literal["request", "response", "error", "event"]


class QuotaLimitBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One row of what the provider tells."""

    type: str
    unit: int | str | None = None
    number: float | None = None
    percent_used: float | None = None
    resets_at: datetime | None = None


class NextWakeBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The wake that comes first, and why: a mode, or the retry of one that is being confirmed."""

    at: datetime
    mode: str
    reason: str


class LoopBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """How one loop of a slot is doing on this node."""

    last_step_at: datetime | None = None
    restarts: int = 0
    problem: str = ""


class SlotBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """Everything about a slot: `wait_reason` says why its tasks wait, if they do.

    `state` is `cold` while no window is open, and `unknown` before the first reading. A slot that
    is not `enabled` is neither polled nor woken, one without `wakes_enabled` is only polled;
    `disabled_reason` says why, unless no mode was configured. `last_error` is what went wrong at
    the last poll, or when the key was refused, which counts as one of `poll_errors`.
    """

    name: str
    provider: str
    state: SlotState
    enabled: bool
    percent_used: float | None = None
    resets_at: datetime | None = None
    read_at: datetime | None = None
    level: str | None = None
    limits: list[QuotaLimitBody]
    wait_reason: str = ""
    wait_until: datetime | None = None
    wake_modes: list[str]
    wakes_enabled: bool
    next_wake: NextWakeBody | None = None
    wake_pending: bool
    last_wake_at: datetime | None = None
    last_confirmed_at: datetime | None = None
    wake_errors: int
    poll_errors: int
    last_error: str = ""
    last_poll_at: datetime | None = None
    next_poll_at: datetime | None = None
    disabled_reason: str = ""
    wake_loop: LoopBody | None = None
    quota_loop: LoopBody | None = None


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log of slots, as it is written to the file and told.

    Lines of one request have a `flow_id` in common.
    """

    ts: str
    slot: str
    action: str
    phase: LogPhase
    method: str | None = None
    url: str | None = None
    flow_id: str | None = None
    status: int | None = None
    request_body: str | None = None
    response_body: str | None = None
    error: str | None = None
    details: dict[str, Any] | None = None
    duration_ms: float | None = None


class SlotLogBody(msgspec.Struct, kw_only=True):
    """The latest lines of a slot, oldest first."""

    lines: list[LogLine]
    count: int


class SlotListBody(msgspec.Struct, kw_only=True):
    """All slots, in the order of the file."""

    slots: list[SlotBody]
    count: int
