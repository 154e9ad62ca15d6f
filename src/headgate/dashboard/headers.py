"""The headers of every page: what it may load, who may frame it, and that nobody keeps it."""

from __future__ import annotations

import gzip
import re
from urllib.parse import quote

from headgate.web.http.answers import Answer, Headers
from headgate.web.http.requests import Request

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

PAGE_HEADERS: Headers = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)

HTML = b"text/html; charset=utf-8"
SEE_OTHER = 303
PERMANENT_REDIRECT = 308
NO_CONTENT = 204
COMPRESSION = 5
LEAST_COMPRESSED_BYTES = 1_000

_GZIP = (b"gzip", b"x-gzip", b"*")
"""The names of what a page is compressed with, the most exact first."""

_WEIGHT = re.compile(rb"(?:q=(?:0\.[0-9]*[1-9][0-9]*|1(?:\.0*)?))?")
"""A weight above nothing; without one it is 1."""

_KEPT_IN_ADDRESS = "/?&=%:~@+,;!*'()$-._#"


def page_answer(status: int, text: str, headers: Headers = ()) -> Answer:
    """Return a page, or a region of one."""
    return Answer(status, text.encode("utf-8", "replace"), (*PAGE_HEADERS, *headers), HTML)


def compressed(answer: Answer, request: Request) -> Answer:
    """Return a page as small as the browser takes it.

    A page has the secret of its visitor in it beside texts of others, and its size tells of both.
    No other site learns that size: its requests come without the cookies, and so get no page.
    """
    if len(answer.body) <= LEAST_COMPRESSED_BYTES:
        return answer
    headers: Headers = (*answer.headers, (b"vary", b"accept-encoding"))
    if not takes_gzip(request.header(b"accept-encoding")):
        return answer._replace(headers=headers)
    return answer._replace(
        body=gzipped(answer.body), headers=(*headers, (b"content-encoding", b"gzip"))
    )


def gzipped(content: bytes) -> bytes:
    """Return a content as it is sent to whoever takes gzip; the same gives the same."""
    return gzip.compress(content, COMPRESSION, mtime=0)


def takes_gzip(accepted: bytes) -> bool:
    """Tell whether an Accept-Encoding takes gzip, by the weight that it gives it."""
    weights = {}
    for wish in accepted.lower().split(b","):
        coding, _, parameter = wish.partition(b";")
        weights[coding.strip()] = _WEIGHT.fullmatch(parameter.strip()) is not None
    return next((weights[coding] for coding in _GZIP if coding in weights), False)


def redirect(
    to: str, headers: Headers = (), *, is_fragment: bool = False, status: int = SEE_OTHER
) -> Answer:
    """Return what sends a browser to another page; a script is told in a header of its own."""
    place = quote(to, safe=_KEPT_IN_ADDRESS).encode("ascii")
    if is_fragment:
        return Answer(NO_CONTENT, b"", ((b"hx-redirect", place), *PAGE_HEADERS, *headers))
    return Answer(status, b"", ((b"location", place), *PAGE_HEADERS, *headers))
