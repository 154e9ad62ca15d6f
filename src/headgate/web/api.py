"""What all handlers share: the engine, the rules for submissions, the limits to show."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from headgate.intake import Intake
from headgate.web.answers import Answer
from headgate.web.callers import Permission
from headgate.web.forwarding import Forwarder
from headgate.web.requests import Request
from headgate.web.service import TaskService


class LimitsShown(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The limits in force, as `/scheduler/stats` shows them; a limit of None is none."""

    strategy: str = "fair-fifo"
    max_queue_size: int | None = 1000
    max_per_agent: int | None = 100
    max_inflight: int | None = 20
    max_per_agent_inflight: int | None = 10
    result_ttl_seconds: float = msgspec.field(default=300, name="resultTTLSec")
    worker_count: int = 20

    def __post_init__(self) -> None:
        # Clients that count seconds in whole numbers cannot read 300.0.
        seconds = self.result_ttl_seconds
        if seconds == int(seconds):
            msgspec.structs.force_setattr(self, "result_ttl_seconds", int(seconds))


class Api:
    """The state behind the routes; a reload puts another `intake` and other `limits` in place."""

    def __init__(self, engine: TaskService, intake: Intake, limits: LimitsShown) -> None:
        self.engine = engine
        self.intake = intake
        self.limits = limits
        self.forwarder = Forwarder()


Handler = Callable[[Api, Request, str], Awaitable[Answer]]
"""Answers a request; the text is what stands for `{id}` in the path, empty where it has none."""


class Route(NamedTuple):
    """One method on one path, where `{id}` stands for the id of a task or the name of a thing.

    `needs` is the permission that a caller must have; None is free to all. The rest describes the
    route to programs: the struct of its body, what each status carries (a struct, or a media type
    where it is not JSON), its query parameters, and the codes with which it refuses beyond those
    that every route may answer with.
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
