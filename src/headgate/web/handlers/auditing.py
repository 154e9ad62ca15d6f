"""Who asked for a change, for the audit log; and writing an entry that no transaction carries."""

from __future__ import annotations

from headgate.audit import Actor, Detail
from headgate.web.api import Api
from headgate.web.http.requests import Request


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
