"""Every way in which a request is refused, as one shape and one table of codes.

The body of a refusal is `code`, `error`, `retryable`, and `details` where there are any. Programs
go by `code`; `error` is for people and may change, except where a client is known to compare it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from headgate.core.admission import Rejected
from headgate.errors import (
    IllegalMoveError,
    InvalidFieldError,
    InvalidTaskError,
    LimitReachedError,
    NotDispatchingError,
    StoreError,
)

Details = dict[str, str | int | None]
RETRYABLE = frozenset({408, 429, 503})


class Kind(NamedTuple):
    """What a code stands for: a status, and a meaning that the documentation shows."""

    status: int
    meaning: str

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may be taken later."""
        return self.status in RETRYABLE


CODES: dict[str, Kind] = {
    "bad_request": Kind(400, "the request is not HTTP/1.1, or its head or framing is too long"),
    "bad_json": Kind(400, "the body is not a JSON object, or nested too deeply"),
    "missing_field": Kind(400, "a required field is missing"),
    "invalid_field": Kind(400, "a field or a query parameter has a value that is not taken"),
    "unknown_field": Kind(400, "a field is almost one that exists"),
    "unknown_project": Kind(400, "`projectId` names no project of the configuration"),
    "unknown_target": Kind(400, "`target` names no target of the configuration"),
    "unknown_parent": Kind(400, "`dependsOn` names a task that is not known, or not any more"),
    "batch_empty": Kind(400, "the batch has no tasks"),
    "batch_too_large": Kind(400, "the batch has more than 50 tasks"),
    "forbidden_origin": Kind(403, "a page of another site sent the request"),
    "not_found": Kind(404, "there is no such task or address, or not any more"),
    "method_not_allowed": Kind(405, "the address takes other methods; `Allow` names them"),
    "request_timeout": Kind(408, "the body did not arrive in time"),
    "conflict": Kind(409, "the task has ended already"),
    "body_too_large": Kind(413, "the body has more than 1 MiB"),
    "unsupported_media_type": Kind(415, "the body is not JSON, by its own headers"),
    "queue_full": Kind(429, "as many tasks wait as may; the task is stored as rejected"),
    "limit_reached": Kind(429, "there is no room now"),
    "internal": Kind(500, "a fault of the service; its log has the request id"),
    "unavailable": Kind(503, "the store cannot be asked now; nothing was acknowledged"),
    "not_dispatching": Kind(
        503,
        "only the node that dispatches knows, and it was not reached; `details` has its address",
    ),
    "not_ready": Kind(503, "this node cannot take or run tasks now"),
}

RETRY_AFTER_SECONDS = 1


class RefusalBody(msgspec.Struct, kw_only=True, omit_defaults=True, rename="camel"):
    """The JSON of a refusal."""

    code: str
    error: str
    retryable: bool
    details: Details | None = None
    task_id: str | None = None


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault
    """A request that is answered with an error; carries everything of the answer."""

    def __init__(
        self,
        code: str,
        error: str,
        *,
        details: Details | None = None,
        task_id: str | None = None,
        allow: str = "",
        closes: bool = False,
    ) -> None:
        super().__init__(error)
        self.kind = CODES[code]
        self.allow = allow
        self.closes = closes
        self.body = RefusalBody(
            code=code,
            error=error,
            retryable=self.kind.is_retryable,
            details=details,
            task_id=task_id,
        )


def not_found() -> Refusal:
    """Return the answer for a task that is not there."""
    return Refusal("not_found", "task not found")


def queue_full(rejected: Rejected, task_id: str) -> Refusal:
    """Return the answer for a task that was turned away; it is stored under its id."""
    details: Details = {
        "agentId": rejected.agent_id or "",
        "queued": rejected.queued,
        "maxQueue": rejected.max_queue,
        "maxPerAgent": rejected.max_per_agent,
    }
    return Refusal("queue_full", rejected.message, details=details, task_id=task_id)


def refusal_of(error: Exception) -> Refusal:
    """Return the answer for an error; one that is not ours tells nothing of itself."""
    match error:
        case InvalidFieldError():
            return _invalid(error)
        case IllegalMoveError():
            return Refusal("conflict", f"task is already {error.current}")
        case LimitReachedError():
            return Refusal("limit_reached", str(error))
        case NotDispatchingError():
            return Refusal("not_dispatching", str(error), details={"address": error.address})
        case StoreError():
            return Refusal("unavailable", str(error) or "the store cannot be asked now")
        case _:
            return Refusal("internal", "internal error")


def _invalid(error: InvalidFieldError) -> Refusal:
    code = error.code if isinstance(error, InvalidTaskError) else "invalid_field"
    return Refusal(code, str(error), details={"field": error.field} if error.field else None)
