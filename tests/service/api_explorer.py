"""Requests made from `/openapi.json`, right ones and wrong ones, sent to a real service.

Rule: whatever comes back is what the description says: a status of it, a media type of it, a body
of its shape, and never a fault.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headgate.api.api import Route
from headgate.api.app import ROUTES

WITHOUT_END = frozenset({"/events", "/tasks/{id}/events"})
"""Streams: an answer takes as long as the client stays."""

EXPLORED = tuple(route for route in ROUTES if route.path not in WITHOUT_END)
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
ANSWER_SECONDS = 30.0

_CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


class Explorer:
    """Sends requests to a service, and holds the answers against its own description."""

    def __init__(self, address: str, *, token: str = "") -> None:
        self._schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
        self._address = address
        self._session = requests.Session()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.statuses: Counter[int] = Counter()

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def explore(
        self,
        route: Route,
        mode: GenerationMode,
        *,
        examples: int,
        name: str | None = None,
        body: object = None,
    ) -> Counter[int]:
        """Send so many requests to a route, or fewer where there are no more, and count answers.

        With a `name`, all of them are about the thing of this name; with a `body`, all have it.
        """
        statuses: Counter[int] = Counter()
        if mode is GenerationMode.NEGATIVE and not _can_be_wrong(route):
            return statuses
        operation = self._schema[route.path][route.method]
        fixed: dict[str, Any] = {} if name is None else {"path_parameters": {"id": name}}
        if body is not None:
            fixed |= {"body": body, "media_type": "application/json"}
        strategy = operation.as_strategy(generation_mode=mode, **fixed)

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def check(case: Any) -> None:
            statuses[self._check(case)] += 1

        check()
        self.statuses += statuses
        return statuses

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request that must be taken, and return the body of the answer."""
        response = self.send(method, path, body)
        assert response.ok, response.text
        return response.json()

    def send(self, method: str, path: str, body: Any = None) -> requests.Response:
        """Send one request."""
        return self._session.request(
            method, self._address + path, json=body, headers=self._headers, timeout=ANSWER_SECONDS
        )

    def _check(self, case: Any) -> int:
        if isinstance(case.body, dict) and isinstance(case.body.get("waitSeconds"), int | float):
            # A claim that is right would wait for as long as it says.
            case.body["waitSeconds"] = 0
        response = case.call(session=self._session, headers=self._headers, timeout=ANSWER_SECONDS)
        case.validate_response(response, checks=_CHECKS)
        return int(response.status_code)


def _can_be_wrong(route: Route) -> bool:
    """Tell whether a request may be wrong otherwise than in its path or method."""
    return bool(route.query or route.headers or route.body is not None)
