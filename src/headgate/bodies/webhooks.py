"""The JSON of webhooks that a service and its clients exchange, as one struct for each body.

Both sides import them, so they cannot drift apart.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec


class DeliveryTryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One try of a webhook, at the time at which it ended: a status, or why there is none."""

    at: datetime
    duration_ms: int
    status: int | None = None
    error: str | None = None
    answer: str | None = None


class DeliveryBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One webhook: what it tells to whom, how often it was tried, and what came of the last try.

    `due_at` is there while it is pending; while it is being sent, it is when that is given up.
    `latest_tries`, the oldest first, are there where one webhook is asked for, and not in lists.
    """

    id: str
    event: str
    state: Literal["pending", "delivered", "dead"]
    url: str
    task_id: str | None = None
    tries: int
    created_at: datetime
    due_at: datetime | None = None
    ended_at: datetime | None = None
    status: int | None = None
    error: str | None = None
    latest_tries: tuple[DeliveryTryBody, ...] = ()


class DeliveryListBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """One page of webhooks; `next_cursor` is there if there is a further page."""

    webhooks: list[DeliveryBody]
    count: int
    next_cursor: str | None = None


class PingBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The address that is to get a message which says nothing."""

    url: str


class PingedBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """What became of a ping: the status that came back, or why there is none."""

    delivered: bool
    status: int | None = None
    error: str | None = None


class SecretBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """A signing secret; one with `ends_at` was replaced and signs until then."""

    secret: str
    created_at: datetime
    ends_at: datetime | None = None


class SecretListBody(msgspec.Struct, kw_only=True, rename="camel"):
    """The secrets that sign now, the newest first."""

    secrets: list[SecretBody]
