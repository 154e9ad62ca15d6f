"""What the answer of a provider says when it is no: the kind of a failure, and its message.

A code that says that the quota is used up wins over the status, because one comes with 429 or even
with 200. Otherwise a status that is no success decides, and then the code of the body.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import tzinfo
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from headgate.core.key_slots.quota import (
    EXHAUSTION_CODES,
    QuotaFailure,
    QuotaFailureKind,
    failure_of,
)
from headgate.http_headers import retry_after_seconds
from headgate.provider import Call
from headgate.providers.slot_client import Reply, SlotClient

USED_UP_CODES = frozenset({"insufficient_quota"})
"""Codes in words that say that there is nothing left, without saying until when."""

_REDIRECTS = range(300, 400)


class Said(NamedTuple):
    """What the body of a refusal says: a code, in digits or in words, and a message."""

    code: object = None
    message: str = ""


def said_in(document: object) -> Said | None:
    """Return what `{"error": {"code", "message"}}` or `{"code", "msg"}` says; None if neither."""
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    if isinstance(error, dict):
        return Said(error.get("code") or error.get("type"), _text(error.get("message")))
    if error is not None and error is not False:
        return Said(document.get("code"), _text(error))
    if "code" not in document:
        return None
    return Said(document["code"], _text(document.get("msg") or document.get("message")))


async def asked(
    client: SlotClient,
    call: Call,
    *,
    method: str,
    url: str,
    body: bytes | None = None,
    zone: tzinfo,
    clock: Callable[[], float],
) -> Reply | QuotaFailure:
    """Send a request, and return the answer of a provider that has carried it out."""
    reply = await client.send(call, method, url, body)
    if isinstance(reply, QuotaFailure):
        return reply
    return failure_in(reply, client, call, zone=zone, now=clock()) or reply


def failure_in(
    reply: Reply, client: SlotClient, call: Call, *, zone: tzinfo, now: float
) -> QuotaFailure | None:
    """Return the failure that an answer stands for; None if the request was carried out."""
    document = client.document(reply, call)
    said = None if isinstance(document, QuotaFailure) else said_in(document)
    used_up = None if said is None else _used_up(said, client, call, zone)
    if used_up is not None:
        return used_up
    if reply.is_success:
        return _failure_despite_success(reply, document, client, call, zone)
    message = _redirected(reply) or (said.message if said else "") or _body_of(reply)
    told = client.line(message, call) or "(no body)"
    failure = failure_of(reply.status, f"the provider answered {reply.status}: {told}", zone)
    seconds = retry_after_seconds(reply.headers, now=now)
    return msgspec.structs.replace(failure, retry_after_seconds=seconds)


def _used_up(said: Said, client: SlotClient, call: Call, zone: tzinfo) -> QuotaFailure | None:
    message = client.line(said.message, call)
    if isinstance(said.code, str) and said.code in USED_UP_CODES:
        return QuotaFailure(kind=QuotaFailureKind.EXHAUSTED, message=message)
    failure = failure_of(said.code, message, zone)
    return failure if failure.code in EXHAUSTION_CODES else None


def _failure_despite_success(
    reply: Reply, document: object, client: SlotClient, call: Call, zone: tzinfo
) -> QuotaFailure | None:
    if isinstance(document, QuotaFailure):
        # Whoever reads nothing from a body needs none; one that is no JSON is somebody else's.
        return document if reply.body else None
    if not isinstance(document, dict):
        return None
    if not document.get("error") and document.get("success") is not False:
        return None
    said = said_in(document) or Said()
    problem = f"the provider answered with an error: {client.line(said.message, call)}"
    failure = failure_of(said.code, problem, zone)
    if failure.code is not None:
        return failure
    return QuotaFailure(kind=QuotaFailureKind.REJECTED, message=problem)


def _redirected(reply: Reply) -> str:
    """Say where a redirect leads, without the query, which may hold anything."""
    location = reply.headers.get("location")
    if reply.status not in _REDIRECTS or location is None:
        return ""
    try:
        parts = urlsplit(location)
        place = f"{parts.scheme}://{parts.hostname}{parts.path}" if parts.hostname else parts.path
    except ValueError:
        place = "an address that cannot be read"
    return f"it points to {place}, and redirects are not followed; configure the address itself"


def _body_of(reply: Reply) -> str:
    return reply.body.decode(errors="replace")


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
