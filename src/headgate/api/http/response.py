"""What goes back to a client: a status, a JSON body, and the few headers around them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from html import escape
from typing import NamedTuple

import msgspec

from headgate.api.errors import RETRY_AFTER_SECONDS, ApiError

Headers = tuple[tuple[bytes, bytes], ...]

_ENCODER = msgspec.json.Encoder()
_UNAUTHORIZED = 401
_TOO_MANY = 429
_UNAVAILABLE = 503
_NO_STORAGE = 507
_JSON = b"application/json"
PROBLEM_JSON = b"application/problem+json"
_RETRY_AFTER = (b"retry-after", str(RETRY_AFTER_SECONDS).encode())
_BEARER = (b"www-authenticate", b'Bearer realm="headgate"')
_CLOSE = (b"connection", b"close")


class Response(NamedTuple):
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


def json_response(status: int, body: object, headers: Headers = ()) -> Response:
    """Return a response with a struct or a mapping as its JSON."""
    return Response(status, _ENCODER.encode(body), headers)


def error_response(api_error: ApiError, request_id: bytes) -> Response:
    """Return the response for an error, under the id of its request."""
    status = api_error.kind.status
    headers: list[tuple[bytes, bytes]] = []
    if status in (_TOO_MANY, _UNAVAILABLE, _NO_STORAGE):
        headers.append(_RETRY_AFTER)
    if status == _UNAUTHORIZED:
        headers.append(_BEARER)
    if api_error.allow:
        headers.append((b"allow", api_error.allow.encode()))
    if api_error.closes:
        headers.append(_CLOSE)
    body = api_error.body_of(request_id.decode("ascii"))
    return Response(status, _ENCODER.encode(body), tuple(headers), PROBLEM_JSON)


# Pages for people whose request could not be read, or came under a name that is not served.
#
# No handler answers these: nobody knows who asks, and nothing else can be loaded. Rule: whoever
# says to take HTML is a person with a browser, and is told what to do; nothing that was sent is
# repeated.

HTML = b"text/html; charset=utf-8"

_HEADERS: Headers = (
    (b"content-security-policy", b"default-src 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)
_COOKIES = (
    "A browser sends all cookies that it keeps for a host, also those of other services there."
    " Delete the cookies of this host in its settings, then load the page again."
)
ORIGIN_ADVICE = (
    "If this was a page of the service itself, the proxy before it changes the Host header, or says"
    " X-Forwarded-Proto: https of pages that are opened over HTTP: have it pass the Host header on,"
    " and say how the page was opened; or name the address that you opened in auth.allowed_origins."
)
"""What to do where the Origin of a page is not the address that the service is asked under."""

_HOSTS = (
    "Open the service under one of its own names. If you did, and a proxy stands before it: have it"
    " pass the Host header on, and name that host in auth.allowed_hosts."
)
_ADVICE = {
    "bad_request": _COOKIES,
    "head_too_large": _COOKIES,
    "forbidden_origin": ORIGIN_ADVICE,
    "wrong_host": _HOSTS,
    "version_not_supported": "Have the proxy before this service speak HTTP/1.1 to it.",
    "uri_too_long": "Shorten the address: take a filter away, or look for less text.",
}
_DEFAULT_ADVICE = "Wait a moment, then load the page again."
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
</head>
<body>
<h1>{problem}.</h1>
<p>{advice}</p>
<p>Code <code>{code}</code>, request <code>{request_id}</code>.</p>
</body>
</html>
"""


def takes_html(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tell whether the headers that came so far are those of a browser that shows a page."""
    return any(name == b"accept" and b"text/html" in value.lower() for name, value in headers)


def plain_page(api_error: ApiError, request_id: bytes) -> Response:
    """Return the page that tells a person of an error."""
    response, body = error_response(api_error, request_id), api_error.body
    text = _PAGE.format(
        title=escape(f"{body.title} · Headgate"),
        problem=escape(f"{body.error[:1].upper()}{body.error[1:]}"),
        advice=_ADVICE.get(body.code, _DEFAULT_ADVICE),
        code=escape(body.code),
        request_id=escape(request_id.decode()),
    )
    headers = (*response.headers, *_HEADERS)
    return response._replace(body=text.encode(), headers=headers, content_type=HTML)
