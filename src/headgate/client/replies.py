"""What comes back from a service: an answer of a type, or an error that says whose fault it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from headgate.api.schema.tasks import RefusalBody
from headgate.errors import (
    NotAllowedError,
    RequestRefusedError,
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
)

MAX_ANSWER_BYTES = 64 * 2**20
NOT_REACHED = "unreachable"
NO_ANSWER = "no_answer"

Answered = TypeVar("Answered")

_OK = 200
_REDIRECT = 300
_REFUSED = 400
_NOT_ALLOWED = (401, 403)
_TIMEOUT = 408
_LIMIT = (402, 429)
_FAULT = 500
_DECODER = msgspec.json.Decoder(RefusalBody)


class Reply(NamedTuple):
    """One response; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def read_answer(reply: Reply, kind: type[Answered]) -> Answered:
    """Return the answer of a reply that has one."""
    if kind is bytes:
        return reply.body  # type: ignore[return-value]
    try:
        return msgspec.json.decode(reply.body or b"null", type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        line = f"the answer is not one of a Headgate service of this version: {error}"
        raise ServiceUnavailableError(line, code="bad_answer", status=reply.status) from None


def error_of(reply: Reply) -> ServiceError | None:
    """Return the error that a reply stands for; None if it is an answer."""
    if _OK <= reply.status < _REDIRECT:
        return None
    refusal = _refusal(reply)
    if refusal is None:
        return _foreign(reply)
    return _kind(reply.status)(
        refusal.error,
        code=refusal.code,
        status=reply.status,
        request_id=reply.headers.get("x-request-id") or refusal.request_id,
        details=refusal.details,
        task_id=refusal.task_id or None,
        retry_after_seconds=_retry_after(reply),
    )


def not_reached(url: str, why: object) -> ServiceUnavailableError:
    """Return the error of a connection that could not be made; nothing was sent."""
    line = f"no service answers at {url}: {why}; start one with headgate up, or give its address"
    return ServiceUnavailableError(line, code=NOT_REACHED)


def no_answer(url: str, why: object) -> ServiceUnavailableError:
    """Return the error of a request that may have arrived, and whose answer did not."""
    line = f"{url} gave no answer: {why}; whether the request was carried out is not known"
    return ServiceUnavailableError(line, code=NO_ANSWER)


def _kind(status: int) -> type[ServiceError]:
    if status in _NOT_ALLOWED:
        return NotAllowedError
    if status in _LIMIT:
        return ServiceLimitError
    if status >= _FAULT or status == _TIMEOUT:
        return ServiceUnavailableError
    return RequestRefusedError


def _refusal(reply: Reply) -> RefusalBody | None:
    try:
        return _DECODER.decode(reply.body)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def _foreign(reply: Reply) -> ServiceError:
    """Return the error for a reply that Headgate did not write; a proxy did, or another service."""
    line = f"what serves there answered {reply.status}, and not as Headgate does"
    if _REDIRECT <= reply.status < _REFUSED:
        where = reply.headers.get("location", "another address")
        line = f"it is not there, but at {where}; give that address"
    wait = _retry_after(reply)
    return _kind(reply.status)(
        line, code=f"http_{reply.status}", status=reply.status, retry_after_seconds=wait
    )


def _retry_after(reply: Reply) -> float | None:
    given = reply.headers.get("retry-after", "").strip()
    return float(given) if given.isascii() and given.isdigit() else None
