"""The trace that a submit belongs to: as the client says, or a new one where spans are made."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headgate.core.tasks.trace_context import read_traceparent
from headgate.errors import InvalidTaskError
from headgate.intake import Draft
from headgate.web.api import Api
from headgate.web.http.requests import Request

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
