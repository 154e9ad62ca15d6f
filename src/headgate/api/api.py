"""What all handlers share: the engine, the rules for submissions, the limits to show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from headgate.api.auth import Authenticator
from headgate.api.bulk import BulkWork
from headgate.api.forwarding import Forwarder
from headgate.api.http.request import Request
from headgate.api.http.response import Answer
from headgate.api.schema.tasks import LimitsShown
from headgate.api.submission import SubmissionParser
from headgate.budgets.tracker import LedgerTracker
from headgate.config.reload import LiveConfig
from headgate.core.idempotency import InvalidEntry, KeyRefusal, SubmitKey
from headgate.core.task import Draft, Submission, Task, TaskRecord, Terms, read_traceparent
from headgate.engine.engine import Outlook
from headgate.engine.events import EventFeed
from headgate.engine.history import History
from headgate.engine.slots.slot import SlotStatus
from headgate.engine.slots.slots import Slots
from headgate.engine.webhooks import Webhooks
from headgate.engine.workers import PullWorkers
from headgate.errors import InvalidTaskError
from headgate.metrics import ServiceMetrics
from headgate.storage.audit import Actor, AuditLog, Detail
from headgate.storage.store import (
    KeyedAnswer,
    Queued,
    TaskPage,
    TaskQuery,
    Totals,
    TurnedAway,
    UnknownParent,
)
from headgate.storage.tokens import UNBOUND, Bounds, Permission, Tokens
from headgate.storage.usage import UsageReports
from headgate.telemetry import Telemetry

# What the API asks of the engine.


class HealthReport(Protocol):
    """Whether this node can do its work, as what, and what is wrong."""

    @property
    def is_ready(self) -> bool:
        """Whether tasks are taken and run now."""

    @property
    def role(self) -> str:
        """What this node does among others."""

    @property
    def problem(self) -> str:
        """What keeps it from being ready; empty if nothing does."""

    @property
    def parts(self) -> dict[str, str]:
        """The store, the ledger and the dispatcher, each with its problem or `ok`."""


class TaskService(Protocol):
    """Takes tasks and tells what became of them.

    Every method may raise `StoreUnavailableError`.
    """

    def now(self) -> float:
        """Return the time by which deadlines are judged."""

    def submit(
        self, task: Task, terms: Terms, submission: Submission
    ) -> Awaitable[Queued | TurnedAway | UnknownParent]:
        """Take a task without an id; the answer means that it is on disk."""

    def submit_keyed(
        self, key: SubmitKey, drafts: Sequence[tuple[Task, Terms, Submission] | InvalidEntry]
    ) -> Awaitable[KeyedAnswer | KeyRefusal]:
        """Take the tasks of a request once, or return what became of them the first time."""

    async def cancel(self, task_id: str) -> TaskRecord | None:
        """Cancel a task, and wait a while for it to stop; `IllegalTransitionError` if it ended."""

    async def get(self, task_id: str) -> TaskRecord | None:
        """Return a task; None if there is no such task."""

    async def within(self, task_ids: Sequence[str], bounds: Bounds) -> frozenset[str]:
        """Return which of these tasks are there and within the bounds."""

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks, newest first, as many as fit on one page."""

    async def totals(self) -> Totals:
        """Count what waits, runs and has happened."""

    async def why(self, task_id: str, bounds: Bounds = UNBOUND) -> msgspec.Struct | None:
        """Return every rule that keeps a task waiting; None if there is no such task.

        Of the tasks that hold it, those outside the bounds are counted and not named.
        """

    def events(self) -> EventFeed:
        """Return what happens to tasks; `NotDispatchingError` where this node does not see it."""

    def health(self) -> HealthReport:
        """Say whether this node can do its work."""


class Api:
    """The state behind the routes; a reload puts another `intake` and other `limits` in place."""

    def __init__(self, engine: TaskService, intake: SubmissionParser, limits: LimitsShown) -> None:
        self.engine = engine
        self.intake = intake
        self.limits = limits
        self.forwarder = Forwarder()
        self.routes: tuple[Route, ...] = ()
        self.openapi: bytes | None = None
        self.entrance = Authenticator()
        self.tokens: Tokens | None = None
        self.tracker: LedgerTracker | None = None
        self.usage: UsageReports | None = None
        self.audit: AuditLog | None = None
        self.administration: LiveConfig | None = None
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


# Who asked for a change, for the audit log; and writing an entry that no transaction carries.


def actor_of(request: Request) -> Actor:
    """Return who sent a request, as the audit log keeps it."""
    caller = request.caller
    request_id = request.request_id.decode("ascii", "replace")
    return Actor(name=caller.name, token_id=caller.token_id, request_id=request_id)


async def record(
    api: Api, request: Request, action: str, subject: str = "", detail: Detail | None = None
) -> None:
    """Write an entry for a change that was just made; a service without a log keeps none."""
    if api.audit is not None:
        await api.audit.record(actor_of(request), action, subject, detail)


# The trace that a submit belongs to: as the client says, or a new one where spans are made.

_TRACEPARENT = b"traceparent"


def traced(api: Api, request: Request, draft: Draft) -> Draft:
    """Return a draft that goes on in the trace of its request."""
    traceparent = _traceparent(api, request)
    return draft if traceparent is None else _with(draft, traceparent)


def traced_all(
    api: Api, request: Request, entries: Iterable[Draft | InvalidTaskError]
) -> list[Draft | InvalidTaskError]:
    """Return drafts that all go on in the trace of their request."""
    traceparent = _traceparent(api, request)
    if traceparent is None:
        return list(entries)
    return [_with(one, traceparent) if isinstance(one, Draft) else one for one in entries]


def _traceparent(api: Api, request: Request) -> str | None:
    sent = request.header(_TRACEPARENT)
    given = read_traceparent(sent.decode("latin-1")) if sent else None
    return given if api.telemetry is None else api.telemetry.submitted(given)


def _with(draft: Draft, traceparent: str) -> Draft:
    submission = msgspec.structs.replace(draft.submission, traceparent=traceparent)
    return draft._replace(submission=submission)
