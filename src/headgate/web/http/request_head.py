"""What the head of a request says of its sender and of its body, before any body is read.

Rule: what two readers could read in two ways is refused: there is one Host, one Authorization, and
the address names no other host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import httptools

from headgate.web.refusals import Refusal

MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 100

_VERSIONS = ("1.0", "1.1")
_NO_VERSION = "0.0"
_ONCE = (b"host", b"authorization")


class Head(NamedTuple):
    """The part of a head that decides whether its body is read; empty is not given."""

    url: bytes
    host: bytes
    origin: bytes
    authorization: bytes
    length: int
    has_body: bool
    expectation: bytes


def read_head(url: bytes, headers: Sequence[tuple[bytes, bytes]], version: str) -> Head:
    """Read a head, or refuse one that is too large or may be read in two ways."""
    if version not in _VERSIONS:
        raise unreadable(version)
    if len(url) > MAX_URL_BYTES:
        raise Refusal("uri_too_long", f"the address has more than {MAX_URL_BYTES} bytes")
    if len(headers) > MAX_HEADERS:
        raise Refusal("head_too_large", f"the request has more than {MAX_HEADERS} headers")
    found = dict(headers)
    if len(found) != len(headers):
        _check_once([name for name, _ in headers])
    host = found.get(b"host", b"")
    if not host and version == "1.1":
        raise Refusal("bad_request", "the request has no Host header")
    if url[:1] != b"/":
        _check_address(url, host)
    length = int(found.get(b"content-length", b"0"))
    return Head(
        url,
        host,
        found.get(b"origin", b""),
        found.get(b"authorization", b""),
        length,
        length > 0 or b"transfer-encoding" in found,
        found.get(b"expect", b""),
    )


def unreadable(version: str) -> Refusal:
    """Return the answer to what cannot be read; the version is what came of it so far."""
    if version in (*_VERSIONS, _NO_VERSION):
        return Refusal("bad_request", "this is not HTTP/1.1")
    line = f"HTTP/{version} is not spoken here; send HTTP/1.1"
    return Refusal("version_not_supported", line)


def _check_once(names: list[bytes]) -> None:
    for name in _ONCE:
        if names.count(name) > 1:
            raise Refusal("bad_request", f"the request has more than one {name.decode()} header")


def _check_address(url: bytes, host: bytes) -> None:
    """Refuse a whole address of another host than the Host header names."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise Refusal("bad_request", "the address cannot be read") from None
    # The parser takes the brackets from an IPv6 address.
    name: bytes = parsed.host or b""
    if b":" in name:
        name = b"[%b]" % name
    named = b"%b:%d" % (name, parsed.port) if parsed.port else name
    if named.lower() != host.lower():
        raise Refusal("bad_request", "the address names another host than the Host header")
