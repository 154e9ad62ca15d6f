"""Reading a request: its headers, its body within bounds, its query."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

import httptools

from headgate.api.callers import LOCAL, Caller
from headgate.api.errors import ApiError, invalid_field
from headgate.api.shares import Holder, Seat, address_key
from headgate.storage.writer import asker, askers

MAX_BODY_BYTES = 1024 * 1024
BODY_SECONDS = 30.0
MAX_QUERY_FIELDS = 32
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
"""How many entries a page has: unless it is asked for, and at most."""

_NUMBER = re.compile(r"[0-9]{1,6}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
# curl says this of any body that it is given without a type.
_TAKEN_TYPES = (b"application/json", b"text/json", b"application/x-www-form-urlencoded")
_CHARSET = re.compile(rb";\s*charset=\"?([^\s;\"]*)", re.IGNORECASE)
_TAKEN_CHARSETS = (b"utf-8", b"utf8", b"us-ascii", b"ascii", b"")


def request_ids() -> Iterator[bytes]:
    """Make ids for requests that bring none; no other process makes the same."""
    start = os.urandom(6).hex().encode()
    return (b"%b-%x" % (start, number) for number in count(1))


def sent_request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the client's own id for its request; empty if there is none that can be echoed."""
    for name, value in headers:
        if name == b"x-request-id":
            return bytes(value) if _REQUEST_ID.fullmatch(value) else b""
    return b""


class ClientGoneError(Exception):
    """The client closed the connection before it had sent its request."""


Kept = dict[str, Any]
"""What parts of the application have learned from a head, by their names."""


class Request:
    """One HTTP request. What is asked for is looked up when it is asked for."""

    __slots__ = ("_first", "_receive", "_scope", "caller", "kept", "method", "request_id")

    def __init__(self, scope: Any, receive: Any) -> None:  # noqa: ANN401 - as ASGI has it
        self._scope = scope
        self._receive = receive
        self._first: dict[bytes, bytes] | None = None
        """The first header of each name."""

        kept: Kept | None = scope.get("headgate.kept")
        self.kept: Kept = {} if kept is None else kept
        """What was learned from the head: it is there again when the client repeats the head."""

        self.method: str = scope["method"]
        self.request_id: bytes = b""
        self.caller = LOCAL

    def with_authorization(self, authorization: bytes) -> Request:
        """Return the same request as if it had been sent with this header, or with none."""
        headers = [one for one in self._scope["headers"] if one[0] != b"authorization"]
        if authorization:
            headers.append((b"authorization", authorization))
        changed = {**self._scope, "headers": headers, "headgate.kept": None}
        request = Request(changed, self._receive)
        request.request_id = self.request_id
        return request

    def identify(self, caller: Caller) -> None:
        """Note who sends the request: from now on the connection counts for that caller."""
        self.caller = caller
        # Its questions to the store take turns with those of other callers.
        who = caller.token_id or self.peer
        asker.set(who)
        askers.note(who)
        seat = self.seat
        if seat is not None:
            seat.identify(caller.token_id, is_trusted=caller.is_trusted)

    @property
    def seat(self) -> Seat | None:
        """What the connection of the request has in hand; None under another server."""
        seat: Seat | None = self._scope.get("headgate.seat")
        return seat

    @property
    def holder(self) -> Holder:
        """For whom counts what the request takes."""
        caller = self.caller
        return Holder(caller.token_id or address_key(self.peer), caller.is_trusted)

    @property
    def path(self) -> str:
        """The path, decoded."""
        return str(self._scope["path"])

    @property
    def peer(self) -> str:
        """The address that the request came from; empty where it is not known."""
        client = self._scope.get("client")
        return str(client[0]) if client else ""

    @property
    def is_secure(self) -> bool:
        """Whether the client came over HTTPS, as the first proxy on its way says."""
        return self.header(b"x-forwarded-proto").partition(b",")[0].strip().lower() == b"https"

    @property
    def served_at(self) -> str:
        """The address that the request came to, for a client so old that it names no host."""
        server = self._scope.get("server")
        if not server:
            return "localhost"
        host, port = server
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def address(self) -> str:
        """The address under which the client reached the service."""
        host = self.identity()[0].decode("latin-1") or self.served_at
        return f"{'https' if self.is_secure else 'http'}://{host}"

    def header(self, name: bytes) -> bytes:
        """Return the first header of this name; empty if there is none."""
        first = self._first
        if first is None:
            kept = self.kept
            first = kept.get("first")
            if first is None:
                first = kept["first"] = dict(reversed(self._scope["headers"]))
            self._first = first
        return first.get(name, b"")

    def identity(self) -> tuple[bytes, bytes, bytes]:
        """Return the headers Host, Origin and Authorization; empty where there is none."""
        host = origin = authorization = b""
        for name, value in self._scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"authorization":
                authorization = value
            elif name == b"origin":
                origin = value
        return host, origin, authorization

    def headers(self, name: bytes) -> list[bytes]:
        """Return all headers of this name."""
        return [value for given, value in self._scope["headers"] if given == name]

    def sent_request_id(self) -> bytes:
        """Return the client's own id for the request, if it can be echoed."""
        given = self.header(b"x-request-id")
        return given if given and _REQUEST_ID.fullmatch(given) else b""

    def segments(self) -> list[str]:
        """Return the parts of the path, each decoded by itself: %2F does not split one."""
        raw: bytes = self._scope.get("raw_path") or self._scope["path"].encode()
        return [unquote(part) for part in raw.partition(b"?")[0].decode("latin-1").split("/")[1:]]

    def raw_path(self) -> str:
        """Return the path as it was sent, where %2F is a part of a name."""
        raw: bytes = self._scope.get("raw_path") or quote(self._scope["path"]).encode()
        return raw.partition(b"?")[0].decode("latin-1")

    def query_string(self) -> str:
        """Return the query as it was sent."""
        return str(self._scope["query_string"].decode("latin-1"))

    def query(self) -> dict[str, str]:
        """Return the query; of a name that is given twice, the last."""
        text = self.query_string()
        try:
            return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS))
        except ValueError:
            raise ApiError("invalid_field", "the query has too many fields") from None

    async def json_body(self) -> bytes:
        """Return the whole body, or refuse it as too large, too slow or of another type."""
        self._check_headers()
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body: bytes = message.get("body", b"")
        if message.get("more_body", False):
            return await self._rest_of_body(body)
        if len(body) > MAX_BODY_BYTES:
            raise too_large()
        return body

    async def whole_body(self) -> bytes:
        """Return the whole body, of any type; the connection has bounded it."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body: bytes = message.get("body", b"")
        return await self._rest_of_body(body) if message.get("more_body", False) else body

    def body_at_once(self) -> bytes | None:
        """Return the whole body where it has come with the request; None if it is to be awaited."""
        take = self._scope.get("headgate.take")
        body: bytes | None = None if take is None else take()
        return body

    def all_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Return all headers, their names in lower case."""
        headers: Sequence[tuple[bytes, bytes]] = self._scope["headers"]
        return headers

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Have something called once when the client has gone; never under another server."""
        watch = self._scope.get("headgate.when_gone")
        if watch is not None:
            watch(callback)

    def let_go_of_body(self) -> None:
        """Count the body as not held any more, because it is kept elsewhere or not at all."""
        self.count_body(0)

    def count_body(self, size: int) -> None:
        """Count so many bytes as held from now on for the body."""
        count = self._scope.get("headgate.count_body")
        if count is not None:
            count(size)

    @property
    def answer(self) -> Callable[[int, Sequence[tuple[bytes, bytes]], bytes], None] | None:
        """What takes a whole answer at once; None under another server."""
        answer: Callable[[int, Sequence[tuple[bytes, bytes]], bytes], None] | None
        answer = self._scope.get("headgate.answer")
        return answer

    async def gone(self) -> None:
        """Wait until the client has closed the connection; what it still sends is not read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _check_headers(self) -> None:
        for name, value in self._scope["headers"]:
            if name == b"content-length":
                _check_length(value)
            elif name == b"content-type":
                _check_type(value)
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise ApiError("unsupported_media_type", "send the body uncompressed", closes=True)

    async def _rest_of_body(self, first: bytes) -> bytes:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._collect(first)
        except TimeoutError:
            message = f"the body did not arrive within {BODY_SECONDS:.0f} seconds"
            raise ApiError("request_timeout", message, closes=True) from None

    async def _collect(self, first: bytes) -> bytes:
        parts, size, has_more = [first], len(first), True
        while has_more:
            if size > MAX_BODY_BYTES:
                raise too_large()
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            has_more = message.get("more_body", False)
        if size > MAX_BODY_BYTES:
            raise too_large()
        return b"".join(parts)


def read_limit(given: dict[str, str]) -> int:
    """Return how many entries a page is to have."""
    text = given.get("limit", "")
    if not text:
        return DEFAULT_LIMIT
    if _NUMBER.fullmatch(text) is None or not 1 <= int(text) <= MAX_LIMIT:
        raise invalid_field("limit", f"must be a number from 1 to {MAX_LIMIT}")
    return int(text)


def _check_length(value: bytes) -> None:
    if len(value) > len(str(MAX_BODY_BYTES)) or (value.isdigit() and int(value) > MAX_BODY_BYTES):
        raise too_large()


def _check_type(value: bytes) -> None:
    kind = value.partition(b";")[0].strip().lower()
    if kind and kind not in _TAKEN_TYPES and not kind.endswith(b"+json"):
        raise ApiError("unsupported_media_type", "send application/json", closes=True)
    charset = _CHARSET.search(value)
    if charset is not None and charset[1].lower() not in _TAKEN_CHARSETS:
        raise ApiError("unsupported_media_type", "send the body in UTF-8", closes=True)


def too_large(most: int = MAX_BODY_BYTES) -> ApiError:
    """Return the answer to a body of more than the limit."""
    # The rest of the body is not read, so nothing after it could be understood.
    message = f"the body has more than {most} bytes"
    return ApiError("body_too_large", message, closes=True)


# What the head of a request says of its sender and of its body, before any body is read.
#
# Rule: what two readers could read in two ways is refused: there is one Host, one Authorization,
# one X-Api-Key, no coding of the body but chunks, and the address names no other host.

MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 100

_VERSIONS = ("1.0", "1.1")
_NO_VERSION = "0.0"
_ONCE = (b"host", b"authorization", b"x-api-key", b"transfer-encoding")


class Head(NamedTuple):
    """The part of a head that decides whether its body is read; empty is not given."""

    url: bytes
    host: bytes
    origin: bytes
    authorization: bytes
    api_key: bytes
    length: int
    has_body: bool
    expectation: bytes


def read_head(url: bytes, headers: Sequence[tuple[bytes, bytes]], version: str) -> Head:
    """Read a head, or refuse one that is too large or may be read in two ways."""
    if version not in _VERSIONS:
        raise unreadable(version)
    if len(url) > MAX_URL_BYTES:
        raise ApiError("uri_too_long", f"the address has more than {MAX_URL_BYTES} bytes")
    if len(headers) > MAX_HEADERS:
        raise ApiError("head_too_large", f"the request has more than {MAX_HEADERS} headers")
    found = dict(headers)
    if len(found) != len(headers):
        _check_once([name for name, _ in headers])
    host = found.get(b"host", b"")
    if not host and version == "1.1":
        raise ApiError("bad_request", "the request has no Host header")
    if url[:1] != b"/":
        _check_address(url, host)
    coding = found.get(b"transfer-encoding")
    if coding is not None and coding.strip().lower() != b"chunked":
        raise ApiError("bad_request", "the request has another Transfer-Encoding than chunked")
    length = int(found.get(b"content-length", b"0"))
    return Head(
        url,
        host,
        found.get(b"origin", b""),
        found.get(b"authorization", b""),
        found.get(b"x-api-key", b""),
        length,
        length > 0 or coding is not None,
        found.get(b"expect", b""),
    )


def unreadable(version: str) -> ApiError:
    """Return the answer to what cannot be read; the version is what came of it so far."""
    if version in (*_VERSIONS, _NO_VERSION):
        return ApiError("bad_request", "this is not HTTP/1.1")
    line = f"HTTP/{version} is not spoken here; send HTTP/1.1"
    return ApiError("version_not_supported", line)


def _check_once(names: list[bytes]) -> None:
    for name in _ONCE:
        if names.count(name) > 1:
            raise ApiError("bad_request", f"the request has more than one {name.decode()} header")


def _check_address(url: bytes, host: bytes) -> None:
    """Refuse a whole address of another host than the Host header names."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise ApiError("bad_request", "the address cannot be read") from None
    # The parser takes the brackets from an IPv6 address.
    name: bytes = parsed.host or b""
    if b":" in name:
        name = b"[%b]" % name
    named = b"%b:%d" % (name, parsed.port) if parsed.port else name
    if named.lower() != host.lower():
        raise ApiError("bad_request", "the address names another host than the Host header")
