"""What all handlers share: the engine, the rules for submissions, the limits to show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from headgate.administration import Administration
from headgate.administration.bulk import BulkWork
from headgate.audit import AuditLog
from headgate.bodies.tasks import LimitsShown
from headgate.intake import Intake
from headgate.metrics.service import ServiceMetrics
from headgate.runtime.key_slots.slots import Slots, SlotStatus
from headgate.runtime.looking.history import History
from headgate.runtime.looking.outlook import Outlook
from headgate.runtime.pull_workers import PullWorkers
from headgate.runtime.telling.webhooks import Webhooks
from headgate.telemetry import Telemetry
from headgate.tokens import Tokens
from headgate.tracker import LedgerTracker
from headgate.usage_report import UsageReports
from headgate.web.callers import Permission
from headgate.web.entrance import Entrance
from headgate.web.forwarding import Forwarder
from headgate.web.http.answers import Answer
from headgate.web.http.requests import Request
from headgate.web.service import TaskService


class Api:
    """The state behind the routes; a reload puts another `intake` and other `limits` in place."""

    def __init__(self, engine: TaskService, intake: Intake, limits: LimitsShown) -> None:
        self.engine = engine
        self.intake = intake
        self.limits = limits
        self.forwarder = Forwarder()
        self.routes: tuple[Route, ...] = ()
        self.openapi: bytes | None = None
        self.entrance = Entrance()
        self.tokens: Tokens | None = None
        self.tracker: LedgerTracker | None = None
        self.usage: UsageReports | None = None
        self.audit: AuditLog | None = None
        self.administration: Administration | None = None
        self.bulk: BulkWork | None = None
        self.is_paused = False
        self.webhooks: Webhooks | None = None
        self.streams = 0
        self.telemetry: Telemetry | None = None
        self.workers: PullWorkers | None = None
        self.slots: Slots | None = None
        self.warming: set[asyncio.Task[SlotStatus]] = set()
        self.metrics: ServiceMetrics | None = None
        self.outlook: Outlook | None = None
        self.history: History | None = None


Handler = Callable[[Api, Request, str], Awaitable[Answer]]
"""Answers a request; the text is what stands for `{id}` in the path, empty where it has none."""


class Route(NamedTuple):
    """One method on one path, where `{id}` stands for the id of a task or the name of a thing.

    `needs` is the permission that a caller must have; None is free to all. The rest describes the
    route to programs: the struct of its body, what each status carries (a struct, or a media type
    where it is not JSON), its query parameters, the codes with which it refuses beyond those that
    its kind of route may answer with (see `headgate.web.handlers.openapi`), and the headers that it
    reads.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    needs: Permission | None = "admin"
    takes: type[msgspec.Struct] | None = None
    answers: Mapping[int, type[msgspec.Struct] | str] = MappingProxyType({})
    query: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
