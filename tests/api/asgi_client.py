"""A client that calls an ASGI application directly, one request at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from api.fake_app import fake_app
from api.fake_engine import FakeEngine
from headgate.api.app import App
from headgate.api.errors import CODES
from headgate.api.submission import SubmissionParser

HOST = (b"host", b"127.0.0.1:7420")


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> dict[str, Any]:
        """What Headgate says of a refusal; that it is one of the one shape is checked here."""
        assert self.headers["content-type"] == "application/problem+json"
        body: dict[str, Any] = self.json
        members = [body.pop(name) for name in ("type", "title", "status", "instance")]
        assert body.pop("detail").startswith(body["error"])
        request_id = body.pop("requestId")
        assert request_id == self.headers["x-request-id"]
        assert members == [
            f"urn:headgate:error:{body['code']}",
            CODES[body["code"]].title,
            self.status,
            f"urn:headgate:request:{request_id}",
        ]
        return body


class Client:
    """Sends requests to an application; `engine` is what is behind it."""

    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine()
        self.app: App = fake_app(
            self.engine,
            SubmissionParser(
                projects=["search"], targets={"browser": None}, default_target="browser"
            ),
        )

    def get(self, url: str) -> Response:
        return self.request("GET", url)

    def post(self, url: str, body: object = None, **headers: str) -> Response:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", url, sent, headers=headers)

    def request(
        self,
        method: str,
        url: str,
        *parts: bytes,
        headers: dict[str, str] | None = None,
        disconnects: bool = False,
    ) -> Response:
        """Send a request whose body comes in these parts."""
        return asyncio.run(
            answer_of(self.app, method, url, *parts, headers=headers, disconnects=disconnects)
        )


async def answer_of(
    app: App,
    method: str,
    url: str,
    *parts: bytes,
    headers: dict[str, str] | None = None,
    disconnects: bool = False,
) -> Response:
    """Send a request whose body comes in these parts, within a loop that runs already."""
    pieces = parts or (b"",)
    messages = [
        {"type": "http.request", "body": piece, "more_body": disconnects or n < len(pieces)}
        for n, piece in enumerate(pieces, start=1)
    ]
    unread: Iterator[dict[str, Any]] = iter([*messages, {"type": "http.disconnect"}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return next(unread)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope_of(method, url, headers or {}), receive, send)
    if not sent:
        return Response(0, {}, b"")
    start, end = sent
    answered = {name.decode(): value.decode() for name, value in start["headers"]}
    assert answered["content-length"] == str(len(end["body"]))
    return Response(start["status"], answered, end["body"])


def scope_of(method: str, url: str, headers: dict[str, str]) -> dict[str, Any]:
    raw_path, _, query = url.partition("?")
    return {
        "type": "http",
        "method": method,
        "path": unquote(raw_path),
        "raw_path": raw_path.encode(),
        "query_string": query.encode(),
        "headers": [
            HOST,
            *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()),
        ],
    }
