"""The log of requests, for whoever looks for a fault: a line each, at the level debug.

Rule: a line has neither the query nor any header, so that no token can get into it.
"""

from __future__ import annotations

import time
from typing import Any

import structlog

log = structlog.get_logger("headgate.web")


class RequestLog:
    """An application around the application; it is only there while such lines are wanted."""

    def __init__(self, app: Any) -> None:  # noqa: ANN401 - an ASGI application
        self._app = app
        self.meet = getattr(app, "meet", None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        """Have a request answered, and say how."""
        started = time.perf_counter()
        head: dict[str, Any] = {}

        async def noting(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            log.debug(
                "request",
                method=scope.get("method"),
                path=scope.get("path"),
                status=head.get("status"),
                request_id=_request_id(head),
                ms=round((time.perf_counter() - started) * 1_000, 3),
            )


def _request_id(head: dict[str, Any]) -> str | None:
    for name, value in head.get("headers", ()):
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return None
