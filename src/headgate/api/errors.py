"""Every error that the API answers with, as one shape and one table of codes.

The body of an error is `code`, `error`, `retryable`, `details` and `requestId`, and beside them
the members of problem details (RFC 9457). Programs go by `code`; `error` is for people and may
change, except where a client is known to compare it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from headgate.api.schema.tasks import Details, ErrorBody
from headgate.core.admission import Rejected
from headgate.core.money import plain_usd
from headgate.core.retention import A_DAY_SECONDS, BY_AGE, BY_SIZE, RetentionCut
from headgate.core.task_view import exact_moment
from headgate.errors import (
    BudgetExceededError,
    BudgetMismatchError,
    IllegalMoveError,
    InvalidFieldError,
    InvalidTaskError,
    LimitReachedError,
    NameTakenError,
    NotDispatchingError,
    NotTakingWorkError,
    SlotNotFoundError,
    SlotUnavailableError,
    StaleWorkerError,
    StoreError,
    StoreFullError,
    UnfitValueError,
    WindowOpenError,
    to_tenant,
    utc_time,
)
from headgate.storage.task_ids import seconds_of

RETRYABLE = frozenset({408, 429, 503, 507})


class Kind(NamedTuple):
    """What a code stands for: a status, and a meaning that the documentation shows."""

    status: int
    meaning: str

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may be taken later."""
        return self.status in RETRYABLE

    @property
    def title(self) -> str:
        """The meaning as plain text."""
        return self.meaning.replace("`", "")


CODES: dict[str, Kind] = {
    "bad_request": Kind(400, "the request is not HTTP/1.1, or its framing is too long"),
    "bad_json": Kind(400, "the body is not a JSON object, or nested too deeply"),
    "missing_field": Kind(400, "a required field is missing"),
    "invalid_field": Kind(400, "a field or a query parameter has a value that is not accepted"),
    "unknown_field": Kind(400, "a field has a name that is almost a known one"),
    "unknown_project": Kind(400, "`projectId` names no project of the configuration"),
    "unknown_target": Kind(400, "`target` names no target of the configuration"),
    "unknown_slot": Kind(400, "`slot` names no slot of the configuration"),
    "unknown_provider": Kind(
        400, "`provider` names a provider without a slot in the configuration"
    ),
    "unknown_parent": Kind(400, "`dependsOn` names a task that does not exist or was deleted"),
    "batch_empty": Kind(400, "the batch has no tasks"),
    "batch_too_large": Kind(400, "the batch has more than 50 tasks"),
    "unauthorized": Kind(401, "the token is missing, unknown, expired or revoked"),
    "budget_exceeded": Kind(402, "a budget has no room for the amount; `details` has its amounts"),
    "forbidden": Kind(403, "the token does not allow this, or is for another agent or project"),
    "forbidden_origin": Kind(403, "a page of another site sent the request"),
    "not_found": Kind(404, "there is no such task or address"),
    "method_not_allowed": Kind(405, "the address has other methods; `Allow` names them"),
    "request_timeout": Kind(408, "the body did not arrive in time"),
    "conflict": Kind(
        409, "the task has already ended, or has not ended yet, or the webhook was deleted"
    ),
    "draining": Kind(409, "the project, agent or target accepts no new tasks"),
    "reservation_conflict": Kind(
        409,
        "this step is illegal in the reservation's state, or its id was used with other amounts",
    ),
    "budget_mismatch": Kind(
        409, "the scope already has different limits; `details` has them as `existing`"
    ),
    "name_taken": Kind(409, "another token already has this name; `details` has its `id`"),
    "window_open": Kind(409, "the window of the slot is open; `details` has when it resets"),
    "slot_unavailable": Kind(409, "the slot sends nothing now; `details` has the reason"),
    "stale_lease": Kind(409, "the attempt no longer belongs to this worker; stop it"),
    "stale_worker": Kind(
        410, "the worker is no longer known; stop its tasks and claim without a worker id"
    ),
    "task_deleted": Kind(
        410,
        "the task ended and was deleted; `details` has the `setting` that deleted it, and `cut`",
    ),
    "body_too_large": Kind(413, "the body is too large"),
    "uri_too_long": Kind(414, "the address has more than 8 KiB"),
    "unsupported_media_type": Kind(415, "the body has a type that the service does not accept"),
    "expectation_failed": Kind(417, "`Expect` has a value other than 100-continue"),
    "wrong_host": Kind(421, "the Host header names no host of this service"),
    "invalid_settings": Kind(422, "the settings file cannot be used; nothing has changed"),
    "idempotency_mismatch": Kind(422, "the `Idempotency-Key` was used with a different request"),
    "queue_full": Kind(
        429, "the queue is full; if the answer has a `taskId`, the task is stored as rejected"
    ),
    "limit_reached": Kind(429, "there is no room now"),
    "idempotency_full": Kind(429, "the store of idempotency keys is full; nothing was stored"),
    "head_too_large": Kind(431, "the head has more than 64 KiB, or more than 100 headers"),
    "internal": Kind(500, "a bug in the service; its log has the request id"),
    "unavailable": Kind(503, "the store is unavailable now; nothing was acknowledged"),
    "not_dispatching": Kind(
        503,
        "only the dispatcher can answer, and it was not reached; `details` has its address",
    ),
    "not_ready": Kind(503, "this node cannot accept or run tasks now"),
    "store_full": Kind(507, "the store has no room for new work; nothing was stored"),
    "version_not_supported": Kind(505, "the request has a version other than HTTP/1.0 and 1.1"),
}

STORE_FAILS = "the store is unavailable now; try again later"
STORE_FULL = (
    "the disk of the store is full, and nothing was stored; free some space on it, or try again"
    " later: ended tasks are being deleted"
)
RETRY_AFTER_SECONDS = 1
TYPE_PREFIX = "urn:headgate:error:"
INSTANCE_PREFIX = "urn:headgate:request:"


class ApiError(Exception):
    """A request that is answered with an error; carries everything of the response."""

    def __init__(
        self,
        code: str,
        error: str,
        *,
        detail: str | None = None,
        details: Details | None = None,
        task_id: str | None = None,
        allow: str = "",
        closes: bool = False,
    ) -> None:
        super().__init__(error)
        self.kind = CODES[code]
        self.allow = allow
        self.closes = closes
        self.body = ErrorBody(
            code=code,
            error=error,
            retryable=self.kind.is_retryable,
            details=details or {},
            task_id=task_id or msgspec.UNSET,
            type=f"{TYPE_PREFIX}{code}",
            title=self.kind.title,
            status=self.kind.status,
            detail=detail or error,
        )

    def body_of(self, request_id: str) -> ErrorBody:
        """Return the body for one request."""
        instance = f"{INSTANCE_PREFIX}{request_id}"
        return msgspec.structs.replace(self.body, request_id=request_id, instance=instance)


def invalid_field(field: str, problem: str) -> ApiError:
    """Return the error for a field or a query parameter that cannot be used."""
    return ApiError("invalid_field", f"field '{field}': {problem}", details={"field": field})


def not_found() -> ApiError:
    """Return the error for a task that is not there."""
    return ApiError("not_found", "task not found")


def task_deleted(task_id: str, cut: RetentionCut) -> ApiError:
    """Return the error for a task that was deleted; it says which setting to raise."""
    cut_at = seconds_of(cut.task_id) or 0.0
    rule = f"{cut.value:,.0f} ended tasks are kept at most"
    if cut.setting == BY_AGE:
        rule = f"ended tasks are kept for {_days_or_seconds(cut.value)}"
    elif cut.setting == BY_SIZE:
        rule = "the store needed its room"
    advice = "raise that to keep later ones longer"
    if cut.setting == BY_SIZE and not cut.value:
        advice = "give it a larger disk to keep later ones longer"
    line = (
        f"task {task_id} was deleted: {rule} (scheduler.{cut.setting} ="
        f" {cut.value:.15g}); {advice}. Tasks submitted up to {utc_time(cut_at)} are"
        " gone, except failures that are still listed"
    )
    details: Details = {
        "setting": f"scheduler.{cut.setting}",
        "value": f"{cut.value:.15g}",
        "cut": exact_moment(cut_at).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
    return ApiError("task_deleted", line, details=details, task_id=task_id)


def _days_or_seconds(seconds: float) -> str:
    days = seconds / A_DAY_SECONDS
    return f"{days:g} days" if days >= 1 and days == int(days) else f"{seconds:g} seconds"


def queue_full(rejected: Rejected, task_id: str | None) -> ApiError:
    """Return the error for a task that was turned away; it is stored if it has an id."""
    details: Details = {
        "limit": rejected.limit.value,
        "projectId": rejected.project_id or "",
        "agentId": rejected.agent_id or "",
        "queued": rejected.queued,
        "maxQueue": rejected.max_queue,
        "maxPerProject": rejected.max_per_project,
        "maxPerAgent": rejected.max_per_agent,
        "maxScheduled": rejected.max_scheduled,
        "queueShare": rejected.queue_share,
    }
    return ApiError(
        rejected.code,
        rejected.message,
        detail=f"{rejected.message}: {rejected.advice}",
        details=details,
        task_id=task_id,
    )


def unknown_parent(parent_id: str) -> ApiError:
    """Return the error for a task that depends on one that is not there."""
    message = f"unknown task '{parent_id}' in 'dependsOn'"
    return ApiError("unknown_parent", message, details={"field": "dependsOn"})


def api_error_of(error: Exception) -> ApiError:
    """Return what a client is told of an exception; of one that is not ours, nothing."""
    match error:
        case InvalidFieldError():
            return _invalid(error)
        case IllegalMoveError() | StaleWorkerError() | BudgetMismatchError():
            return _conflict(error)
        case NameTakenError():
            return ApiError("name_taken", str(error), details={"id": error.token_id})
        case SlotNotFoundError():
            return ApiError("not_found", str(error))
        case LimitReachedError():
            return _no_room(error)
        case StoreError():
            return _outage(error)
        case _:
            return ApiError("internal", "internal error")


def _conflict(error: IllegalMoveError | StaleWorkerError | BudgetMismatchError) -> ApiError:
    if isinstance(error, BudgetMismatchError):
        limits: Details = {
            "scope": error.scope,
            "existing": error.existing,
            "wanted": error.wanted,
        }
        return ApiError("budget_mismatch", str(error), details=limits)
    if isinstance(error, StaleWorkerError):
        return ApiError("stale_worker", str(error))
    return ApiError("conflict", f"task is already {error.current}")


def _no_room(error: LimitReachedError) -> ApiError:
    match error:
        case BudgetExceededError():
            return ApiError("budget_exceeded", str(error), details=_exceeded(error))
        case WindowOpenError():
            open_until: Details = {"slot": error.name, "resetsAt": _time(error.resets_at)}
            return ApiError("window_open", str(error), details=open_until)
        case SlotUnavailableError():
            why: Details = {
                "slot": error.name,
                "reason": error.reason,
                "until": _time(error.until),
            }
            return ApiError("slot_unavailable", str(error), details=why)
        case _:
            return ApiError("limit_reached", str(error))


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else str(msgspec.to_builtins(exact_moment(seconds)))


def _outage(error: StoreError) -> ApiError:
    if isinstance(error, UnfitValueError):
        return ApiError("invalid_field", "a value has something in it that cannot be kept")
    if isinstance(error, NotDispatchingError):
        return ApiError("not_dispatching", str(error), details={"address": error.address})
    if isinstance(error, StoreFullError):
        return ApiError("store_full", STORE_FULL)
    # What a driver says may name hosts and paths; only what this program says of itself is told.
    return ApiError(
        "unavailable", str(error) if isinstance(error, NotTakingWorkError) else STORE_FAILS
    )


def no_room_for_tenant(error: BudgetExceededError, *, may_read: bool) -> ApiError:
    """Return the error for a budget without room whose limit the caller cannot change.

    It has no figures unless the caller `may_read` them.
    """
    if may_read:
        return ApiError("budget_exceeded", to_tenant(str(error)), details=_exceeded(error))
    details: Details = {
        "scope": error.scope,
        "unit": "usd" if error.unit == "micro_usd" else "tokens",
        "resetsAt": _time(error.resets_at),
        "mayClear": error.may_clear,
    }
    return ApiError("budget_exceeded", to_tenant(error.outline), details=details)


def _exceeded(error: BudgetExceededError) -> Details:
    is_money = error.unit == "micro_usd"
    amounts = {
        "limit": error.limit,
        "used": error.spent + error.reserved + error.overrun,
        "spent": error.spent,
        "reserved": error.reserved,
        "overrun": error.overrun,
        "requested": error.requested,
    }
    return {
        "scope": error.scope,
        "unit": "usd" if is_money else "tokens",
        **{name: plain_usd(amount) if is_money else amount for name, amount in amounts.items()},
        "resetsAt": _time(error.resets_at),
        "mayClear": error.may_clear,
    }


def _invalid(error: InvalidFieldError) -> ApiError:
    code = error.code if isinstance(error, InvalidTaskError) else "invalid_field"
    return ApiError(code, str(error), details={"field": error.field} if error.field else None)
