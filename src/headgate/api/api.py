"""What all handlers share: the engine, the rules for submissions, the limits to show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from headgate.api.auth import Authenticator
from headgate.api.bulk import BulkWork
from headgate.api.forwarding import Forwarder
from headgate.api.http.request import Request
from headgate.api.http.response import Response
from headgate.api.http.slices import SharedAnswers
from headgate.api.schema.tasks import LimitsBody
from headgate.api.shares import Shares
from headgate.api.submission import SubmissionParser
from headgate.budgets.tracker import DefinedBudgets, LedgerTracker
from headgate.config.reload import LiveConfig
from headgate.engine.engine import Engine
from headgate.engine.slots.slot import SlotStatus
from headgate.engine.slots.slots import Slots
from headgate.engine.webhooks import Webhooks
from headgate.metrics import ServiceMetrics
from headgate.providers.prices import PriceList
from headgate.storage.audit import Actor, AuditLog, Detail
from headgate.storage.tokens import Permission, TokenStore
from headgate.storage.usage import UsageReports
from headgate.telemetry import Telemetry


class Api:
    """What the handlers share. A reload replaces `submission_parser`, `limits` and `is_paused`."""

    def __init__(
        self,
        *,
        engine: Engine,
        config: LiveConfig,
        submission_parser: SubmissionParser,
        limits: LimitsBody,
        auth: Authenticator,
        tokens: TokenStore,
        audit: AuditLog,
        bulk: BulkWork,
        tracker: LedgerTracker,
        usage: UsageReports,
        prices: PriceList,
        slots: Slots,
        webhooks: Webhooks | None,
        metrics: ServiceMetrics,
        shares: Shares,
        telemetry: Telemetry | None,
    ) -> None:
        """Take all parts; without `webhooks` none are sent, without `telemetry` no span is made."""
        self.engine = engine
        self.config = config
        self.submission_parser = submission_parser
        self.limits = limits
        self.auth = auth
        self.tokens = tokens
        self.audit = audit
        self.bulk = bulk
        self.tracker = tracker
        self.defined_budgets = DefinedBudgets(tracker)
        self.usage = usage
        self.prices = prices
        self.slots = slots
        self.webhooks = webhooks
        self.metrics = metrics
        self.shares = shares
        self.telemetry = telemetry
        self.forwarder = Forwarder()
        self.shared_answers: SharedAnswers[Response] = SharedAnswers()
        self.warming: set[asyncio.Task[SlotStatus]] = set()
        self.is_paused = False

    async def record(
        self, request: Request, action: str, subject: str = "", detail: Detail | None = None
    ) -> None:
        """Write an audit entry for a change that was just made and that no transaction carries."""
        await self.audit.record(actor_of(request), action, subject, detail)


Handler = Callable[[Api, Request, str], Awaitable[Response]]
"""Answers a request; the text is what stands for `{id}` in the path, empty where it has none."""


class Route(NamedTuple):
    """One method on one path, where `{id}` stands for the id of a task or the name of a thing.

    `needs` is the permission that a caller must have; None is free to all. The rest describes the
    route to programs: the struct of its body, what each status carries (a struct, or a media type
    where it is not JSON), its query parameters, the codes of its errors beyond those of its kind of
    route (see `headgate.api.openapi`), and the headers that it reads.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    needs: Permission | None = "admin"
    body: type[msgspec.Struct] | None = None
    responses: Mapping[int, type[msgspec.Struct] | str] = MappingProxyType({})
    query: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()


def actor_of(request: Request) -> Actor:
    """Return who sent a request, as the audit log keeps it."""
    caller = request.caller
    request_id = request.request_id.decode("ascii", "replace")
    return Actor(
        name=caller.name,
        token_id=caller.token_id,
        request_id=request_id,
        is_tenant=not caller.is_trusted,
    )
