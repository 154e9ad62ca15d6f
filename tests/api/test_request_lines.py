"""Request lines and headers: which are read, and that anything else is refused and the end."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.memory_transport import fed
from api.test_fuzzed_requests import Answered, answers_in, check

HOST = b"Host: localhost\r\n"
ALIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
OTHER_VERSIONS = (b"0.9", b"1.2", b"2.0", b"3.0", b"9.9")
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"

METHODS = st.sampled_from([b"GET", b"HEAD", b"POST", b"OPTIONS", b"PRI", b"M-SEARCH", b"get", b""])
GAPS = st.sampled_from([b" ", b" ", b" ", b"  ", b"\t", b"", b"\r", b"\n", b"\x00"])
TARGETS = st.one_of(
    st.sampled_from([b"/livez", b"/livez", b"/tasks", b"*", b"localhost:80", b"//", b"/%", b"?"]),
    st.binary(max_size=20).map(lambda noise: b"/" + noise),
)
PROTOCOLS = st.one_of(
    st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"http/1.1", b"HTTP/1", b"HTTPS/1.1"]),
    st.sampled_from([b"HTTP/01.1", b"HTTP/1.10", b"HTTP/-1.1", b"HTTP/1,1", b"HTTP/ 1.1", b""]),
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: b"HTTP/%d.%d" % pair),
)
ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b" \r\n", b"\r\r\n", b""])
LINES = st.builds(
    lambda *parts: b"".join(parts), METHODS, GAPS, TARGETS, GAPS, PROTOCOLS, ENDS
) | st.binary(max_size=60)
NAMES = st.sampled_from(
    [b"Host", b"host", b"Connection", b"Content-Length", b"Transfer-Encoding", b"Upgrade", b"Te"]
) | st.binary(max_size=12)
VALUES = st.sampled_from(
    [b"localhost", b"close", b"0", b"1", b"+1", b"0x1", b"chunked", b"gzip, chunked", b"h2c"]
) | st.binary(max_size=20)
COLONS = st.sampled_from([b": ", b": ", b": ", b":", b" :", b":\t", b"", b": \r\n "])
HEADERS = st.builds(lambda *parts: b"".join(parts), NAMES, COLONS, VALUES, ENDS)
HEADS = st.builds(
    lambda line, headers, end: line + HOST + b"".join(headers) + end,
    LINES,
    st.lists(HEADERS, max_size=4),
    ENDS,
)
UNREAD = ("bad_request", "version_not_supported", "head_too_large")
READ = re.compile(rb"(?:\r\n)*[A-Z-]+ +[^ \r\n]+ +HTTP/1\.[01] *\r\n")
"""What is a request line; the parser passes over further spaces in it, and lines before it."""


def answers_to(*pieces: bytes) -> list[Answered]:
    return answers_in(asyncio.run(fed(list(pieces))).written, has_heads_only=False)


def is_unread(answer: Answered) -> bool:
    return answer.status >= 400 and bool(answer.body) and json.loads(answer.body)["code"] in UNREAD


@pytest.mark.parametrize("headers", [HOST, HOST + UPGRADE, HOST + b"Content-Length: 5\r\n"])
@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_another_version_is_refused_by_its_head_and_the_connection_ends(
    version: bytes, headers: bytes
) -> None:
    (answer,) = answers_to(b"GET /livez HTTP/%b\r\n%b\r\n" % (version, headers), ALIVE)
    assert answer.status == 505
    assert answer.headers["connection"] == "close"
    assert b'"code":"version_not_supported"' in answer.body
    assert b"send HTTP/1.1" in answer.body
    check(answer)


@pytest.mark.parametrize("line", [b"GET /livez\r\n", b"PRI * HTTP/2.0\r\n"])
def test_a_line_without_a_version_and_the_preface_of_http_2_are_other_versions(line: bytes) -> None:
    (answer,) = answers_to(line + b"\r\n", b"SM\r\n\r\n")
    assert (answer.status, answer.headers["connection"]) == (505, "close")


@pytest.mark.parametrize(
    "line",
    [
        b"hello\r\n",
        b"GET\r\n",
        b"get /livez HTTP/1.1\r\n",
        b"GET /livez http/1.1\r\n",
        b"GET /livez HTTP/1\r\n",
        b"GET /livez HTTP/11.1\r\n",
        b"GET /livez HTTPS/1.1\r\n",
        b"GET /livez HTTP/1.1\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
def test_what_is_no_request_line_is_a_bad_request_and_the_connection_ends(line: bytes) -> None:
    (answer,) = answers_to(line + HOST + b"\r\n", ALIVE)
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    check(answer)


def test_another_version_after_a_good_request_ends_the_connection_too() -> None:
    first, last = answers_to(ALIVE, b"GET /livez HTTP/2.0\r\n" + HOST + b"\r\n", ALIVE)
    assert (first.status, last.status) == (200, 505)


def test_a_browser_is_told_of_another_version_on_a_page() -> None:
    (answer,) = answers_to(b"GET / HTTP/2.0\r\n" + HOST + b"Accept: text/html\r\n\r\n")
    assert answer.status == 505
    assert b"Wait a moment" not in answer.body
    assert b"proxy" in answer.body


@settings(deadline=None, max_examples=600)
@given(HEADS, st.integers(0, 80))
@example(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: +1\r\n\r\n", 0)
def test_only_a_whole_request_line_is_read_wherever_its_bytes_are_cut(
    head: bytes, place: int
) -> None:
    whole = answers_to(head, b"\r\n\r\n")
    for answer in whole:
        check(answer)
        if is_unread(answer):
            assert answer.headers["connection"] == "close"
    if whole and not is_unread(whole[0]):
        assert READ.match(head), head
    in_pieces = answers_to(head[:place], head[place:], b"\r\n\r\n")
    assert [one.status for one in in_pieces] == [one.status for one in whole]
