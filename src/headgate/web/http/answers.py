"""What goes back to a client: a status, a JSON body, and the few headers around them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple

import msgspec

from headgate.web.refusals import RETRY_AFTER_SECONDS, Refusal

Headers = tuple[tuple[bytes, bytes], ...]

_ENCODER = msgspec.json.Encoder()
_UNAUTHORIZED = 401
_TOO_MANY = 429
_UNAVAILABLE = 503
_JSON = b"application/json"
PROBLEM_JSON = b"application/problem+json"
_RETRY_AFTER = (b"retry-after", str(RETRY_AFTER_SECONDS).encode())
_BEARER = (b"www-authenticate", b'Bearer realm="headgate"')
_CLOSE = (b"connection", b"close")


class Answer(NamedTuple):
    """One HTTP response; with a `stream`, its pieces are sent as they come, and `body` is not."""

    status: int
    body: bytes
    headers: Headers = ()
    content_type: bytes = _JSON
    stream: AsyncGenerator[bytes, None] | None = None

    def head(self, request_id: bytes) -> list[tuple[bytes, bytes]]:
        """Return all headers of the response."""
        kind = (b"content-type", self.content_type)
        if self.stream is not None:
            return [kind, (b"x-request-id", request_id), *self.headers]
        length = (b"content-length", b"%d" % len(self.body))
        if not self.body:
            return [length, (b"x-request-id", request_id), *self.headers]
        return [kind, length, (b"x-request-id", request_id), *self.headers]


def json_answer(status: int, body: object, headers: Headers = ()) -> Answer:
    """Return an answer with a struct or a mapping as its JSON."""
    return Answer(status, _ENCODER.encode(body), headers)


def refusal_answer(refusal: Refusal, request_id: bytes) -> Answer:
    """Return the answer that a refusal stands for, under the id of its request."""
    status = refusal.kind.status
    headers: list[tuple[bytes, bytes]] = []
    if status in (_TOO_MANY, _UNAVAILABLE):
        headers.append(_RETRY_AFTER)
    if status == _UNAUTHORIZED:
        headers.append(_BEARER)
    if refusal.allow:
        headers.append((b"allow", refusal.allow.encode()))
    if refusal.closes:
        headers.append(_CLOSE)
    body = refusal.body_of(request_id.decode("ascii"))
    return Answer(status, _ENCODER.encode(body), tuple(headers), PROBLEM_JSON)
