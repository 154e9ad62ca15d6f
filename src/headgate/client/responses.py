"""What comes back from a service: a body of some type, or an error that says whose fault it is.

Also the rule whether a request that failed is sent again, and when.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from headgate.api.schema.tasks import ErrorBody
from headgate.client.requests import Call
from headgate.core.retries import Backoff
from headgate.errors import (
    NotAllowedError,
    RequestRefusedError,
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
    TaskDeletedError,
)

MAX_RESPONSE_BYTES = 64 * 2**20
NOT_REACHED = "unreachable"
NO_RESPONSE = "no_answer"
DELETED = "task_deleted"
IN_PROGRAMS = "url= (server= of an SDK's client) or HEADGATE_URL"
IN_COMMANDS = "--data, --url or HEADGATE_URL"
"""What names a service."""

LONGEST_PAUSE_SECONDS = 30.0
BACKOFF = Backoff(base_seconds=0.25, max_seconds=8.0)

Body = TypeVar("Body")

_OK = 200
_REDIRECT = 300
_REFUSED = 400
_NOT_ALLOWED = (401, 403)
_TIMEOUT = 408
_LIMIT = (402, 429, 507)
_FAULT = 500
_NO_BUDGET = 402
_PASSING = (502, 503, 504)
_REFUSALS = msgspec.json.Decoder(ErrorBody)


class Response(NamedTuple):
    """One response; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def read_body(response: Response, kind: type[Body]) -> Body:
    """Return the body of a response, or raise the error that it stands for."""
    error = error_of(response)
    if error is not None:
        raise error
    if kind is bytes:
        return response.body  # type: ignore[return-value]
    try:
        return msgspec.json.decode(response.body or b"null", type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as problem:
        line = f"the answer is not one of a Headgate service of this version: {problem}"
        raise ServiceUnavailableError(line, code="bad_answer", status=response.status) from None


def error_of(response: Response) -> ServiceError | None:
    """Return the error that a response stands for; None if it is none."""
    if _OK <= response.status < _REDIRECT:
        return None
    api_error = _refusal(response)
    if api_error is None:
        return _foreign_error(response)
    kind = TaskDeletedError if api_error.code == DELETED else _error_type(response.status)
    return kind(
        api_error.detail or api_error.error,
        code=api_error.code,
        status=response.status,
        request_id=response.headers.get("x-request-id") or api_error.request_id,
        details=api_error.details,
        task_id=api_error.task_id or None,
        retry_after_seconds=_retry_after(response),
    )


def not_reached(url: str, why: object) -> ServiceUnavailableError:
    """Return the error of a connection that could not be made; nothing was sent."""
    advice = f"start one with headgate up, or name another with {IN_PROGRAMS}"
    line = f"no service answers at {url}: {why}; {advice}"
    return ServiceUnavailableError(line, code=NOT_REACHED)


def no_response(url: str, why: object) -> ServiceUnavailableError:
    """Return the error of a request that may have arrived, and whose answer did not."""
    line = f"{url} gave no answer: {why}; whether the request was carried out is not known"
    return ServiceUnavailableError(line, code=NO_RESPONSE)


def _error_type(status: int) -> type[ServiceError]:
    if status in _NOT_ALLOWED:
        return NotAllowedError
    if status in _LIMIT:
        return ServiceLimitError
    if status >= _FAULT or status == _TIMEOUT:
        return ServiceUnavailableError
    return RequestRefusedError


def _refusal(response: Response) -> ErrorBody | None:
    try:
        return _REFUSALS.decode(response.body)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def _foreign_error(response: Response) -> ServiceError:
    """Return the error of a response that a proxy or another service wrote."""
    line = f"what serves there answered {response.status}, and not as Headgate does"
    if _REDIRECT <= response.status < _REFUSED:
        where = response.headers.get("location", "another address")
        line = f"it is not there, but at {where}; give that address"
    wait = _retry_after(response)
    return _error_type(response.status)(
        line, code=f"http_{response.status}", status=response.status, retry_after_seconds=wait
    )


def _retry_after(response: Response) -> float | None:
    given = response.headers.get("retry-after", "").strip()
    return float(given) if given.isascii() and given.isdigit() else None


def pause_seconds(call: Call[Any], error: ServiceError, attempt: int) -> float | None:
    """Return how long to wait before a call is sent again; None if it is not to be."""
    if not _may_help(call, error):
        return None
    drawn = BACKOFF.seconds(attempt, draw=random.random())  # noqa: S311 - spreads load, no secret
    wanted = max(drawn, error.retry_after_seconds or 0.0)
    return wanted if wanted <= LONGEST_PAUSE_SECONDS else None


def _may_help(call: Call[Any], error: ServiceError) -> bool:
    # A budget does not fill up again within seconds, as a queue empties.
    is_full = isinstance(error, ServiceLimitError) and error.status != _NO_BUDGET
    if is_full or error.code == NOT_REACHED:
        return True
    is_passing = error.status == 0 or error.status in _PASSING
    return call.is_repeatable and is_passing and isinstance(error, ServiceUnavailableError)
