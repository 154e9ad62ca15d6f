"""What a browser is told whose request cannot be read: in words, and with what helps."""

from __future__ import annotations

import asyncio
import re

import pytest

from api.memory_transport import fed

ACCEPT = b"Accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n"
START = b"GET /ui/tasks HTTP/1.1\r\nHost: localhost\r\n"
COOKIES = "Delete the cookies of this host"
LONG_COOKIE = b"Cookie: a=" + b"x" * 100_000 + b"\r\n\r\n"
STRANGE_COOKIE = b"Cookie: a=\x01\r\n\r\n"
LONG_ADDRESS = b"GET /ui/tasks?text=%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (
    b"x" * 9_000,
    ACCEPT,
)


def answer_to(sent: bytes) -> tuple[int, dict[str, str], str]:
    head, _, body = asyncio.run(fed([sent])).written.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers["connection"] == "close"
    assert headers["content-length"] == str(len(body.encode()))
    return int(first.split()[1]), headers, body


@pytest.mark.parametrize(
    ("sent", "status", "advice"),
    [
        (START + ACCEPT + LONG_COOKIE, 431, COOKIES),
        (START + ACCEPT + STRANGE_COOKIE, 400, COOKIES),
        (LONG_ADDRESS, 414, "Shorten the address"),
    ],
    ids=["a cookie that is too long", "a cookie with a control character", "an address"],
)
def test_a_browser_gets_a_page_that_says_what_to_do(sent: bytes, status: int, advice: str) -> None:
    given, headers, body = answer_to(sent)
    assert given == status
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["content-security-policy"] == "default-src 'none'"
    assert advice in body
    assert headers["x-request-id"] in body
    assert re.search(r"<h1>[A-Z].*\.</h1>", body)


def test_a_program_goes_on_to_get_the_one_shape() -> None:
    for accept in (b"", b"Accept: */*\r\n", b"Accept: application/json\r\n"):
        status, headers, body = answer_to(START + accept + LONG_COOKIE)
        assert (status, headers["content-type"]) == (431, "application/problem+json")
        assert '"code":"head_too_large"' in body


def test_nothing_that_was_sent_is_markup_on_the_page() -> None:
    sent = START + ACCEPT + b"X-Request-Id: <b>x</b>\r\n" + LONG_COOKIE
    assert "<b>" not in answer_to(sent)[2]
