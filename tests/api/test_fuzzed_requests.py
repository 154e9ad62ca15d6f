"""Whole requests made of noise, on a real connection: each answer is one of those described."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.memory_transport import fed
from headgate.api.errors import CODES

REFUSED = {kind.status for kind in CODES.values()}
TAKEN = {200, 202, 204}
SHAPE = {"code", "error", "retryable", "details", "requestId"} | {
    "type",
    "title",
    "status",
    "detail",
    "instance",
}

METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE", b"x"])
PATHS = st.one_of(
    st.sampled_from([b"/tasks", b"/tasks/batch", b"/tasks/tsk_1/cancel", b"/scheduler/stats"]),
    st.binary(max_size=30).map(lambda noise: b"/tasks/" + noise),
    st.text(max_size=30).map(lambda text: b"/tasks?" + text.encode()),
    st.sampled_from([b"*", b"//", b"http://other/tasks", b"/%ff%00", b"/tasks?limit=%00"]),
)
NAMES = st.sampled_from(
    [
        b"Host",
        b"Content-Type",
        b"Content-Length",
        b"Content-Encoding",
        b"Transfer-Encoding",
        b"Expect",
        b"Connection",
        b"Upgrade",
        b"Origin",
        b"Authorization",
        b"Idempotency-Key",
        b"X-Request-Id",
        b"X-Headgate-Forwarded",
    ]
)
VALUES = st.one_of(
    st.binary(max_size=40).filter(lambda value: b"\r" not in value and b"\n" not in value),
    st.sampled_from([b"", b"chunked", b"application/json", b"100-continue", b"close", b"gzip"]),
    st.integers(-1, 10**20).map(lambda number: str(number).encode()),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["agentId", "action", "tasks", "params", "labels", "deadline", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
BODIES = st.one_of(
    st.binary(max_size=120),
    JSON.map(lambda value: json.dumps(value).encode()),
    JSON.map(lambda value: json.dumps(value).encode()[:-1]),
    st.integers(1, 2_000).map(lambda depth: b'{"params":' + b"[" * depth),
)
REQUESTS = st.builds(
    lambda method, path, headers, body, has_length: (
        b"%b %b HTTP/1.1\r\n" % (method, path)
        + b"".join([b"%b: %b\r\n" % header for header in headers])
        + (b"Content-Length: %d\r\n" % len(body) if has_length else b"")
        + b"\r\n"
        + body
    ),
    METHODS,
    PATHS,
    st.lists(st.tuples(NAMES, VALUES), max_size=6),
    BODIES,
    st.booleans(),
)


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def answers_in(written: bytes, *, has_heads_only: bool) -> list[Answered]:
    """Read what was written as answers; anything else in it is a mistake."""
    answers = []
    while written:
        head, _, written = written.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(line.lower().split(": ", 1) for line in lines)
        # What could not be read is not known to be a HEAD, and its answer is the last one anyway.
        has_body = not has_heads_only or headers.get("connection") == "close"
        length = int(headers.get("content-length", "0")) if has_body else 0
        if status != "100":
            answers.append(Answered(int(status), headers, written[:length]))
        written = written[length:]
    return answers


@settings(deadline=None, max_examples=250)
@given(REQUESTS)
@example(b"POST /tasks HTTP/1.1\r\nIdempotency-Key: \xff\r\nContent-Length: 2\r\n\r\n{}")
@example(b"GET /tasks HTTP/1.1\r\nX-Request-Id: \xff\r\n\r\n")
@example(b"POST /tasks HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
def test_whatever_is_sent_the_answers_are_those_described(request: bytes) -> None:
    written = asyncio.run(fed([request])).written
    for answer in answers_in(written, has_heads_only=request.startswith(b"HEAD ")):
        check(answer)


def check(answer: Answered) -> None:
    assert answer.status in TAKEN | REFUSED
    assert answer.status != 500
    if answer.status in TAKEN or not answer.body:
        return
    body: dict[str, Any] = json.loads(answer.body)
    assert answer.headers["content-type"] == "application/problem+json"
    assert set(body) - {"taskId"} == SHAPE
    assert body["status"] == CODES[body["code"]].status == answer.status
    assert body["requestId"].lower() == answer.headers["x-request-id"]
    assert isinstance(body["details"], dict)
    assert "Traceback" not in body["error"]
