"""The sender: one signed POST over a connection of its own, within bounds on all sides.

It stands on httpcore2 with a network of its own, which looks a host up, has every address judged,
and connects to one that was: the certificate is still checked against the name. There is no proxy,
no redirect, no cookie and no connection that is used twice. Whatever goes wrong is a report.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from email.utils import parsedate_to_datetime
from urllib.parse import unquote_plus, urlsplit

import httpcore2

from headgate.providers.content_coding import ContentCodingError, ContentDecoder, coding_of
from headgate.providers.http_client import BoundedStream
from headgate.redaction import redacted
from headgate.storage.deliveries import MAX_ANSWER_CHARACTERS, Message, SendReport
from headgate.webhooks.guard import (
    Destination,
    ForbiddenAddressError,
    Lookup,
    SystemLookup,
    UrlGuard,
)

USER_AGENT = "headgate-webhooks"
TIMEOUT_SECONDS = 10.0
MAX_ERROR_CHARACTERS = 300
MOST_ADDRESSES = 4
CONNECT_RATIO = 0.8

FORBIDDEN = "the address may not be reached"

_OK, _REDIRECT, _ERROR = 200, 300, 400
_GONE = 410
_ASK_FOR_TIME = frozenset((429, 503))

SocketOption = httpcore2.SOCKET_OPTION


class GuardedNetwork(httpcore2.AnyIOBackend):
    """Opens connections only to addresses that the guard lets through."""

    def __init__(self, guard: UrlGuard, lookup: Lookup, *, connect_seconds: float) -> None:
        self._guard = guard
        self._lookup = lookup
        self._connect_seconds = connect_seconds

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - as the base has it
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Look a host up, have all its addresses judged, and connect to the first that answers."""
        addresses = await self._lookup(host, port)
        self._guard.check_addresses(host, addresses)
        failure: Exception = httpcore2.ConnectError("the host has no address")
        tried = addresses[:MOST_ADDRESSES]
        # One address that is silent must leave time for the next.
        share_seconds = self._connect_seconds / (len(tried) or 1)
        for address in tried:
            try:
                stream = await super().connect_tcp(
                    address, port, share_seconds, local_address, socket_options
                )
                return BoundedStream(stream)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self,
        path: str,  # noqa: ARG002
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - as the base has it
        socket_options: Iterable[SocketOption] | None = None,  # noqa: ARG002
    ) -> httpcore2.AsyncNetworkStream:
        """Refuse: a webhook goes to the network."""
        raise ForbiddenAddressError("a webhook does not go to a socket of this machine")


class WebhookSender:
    """Sends messages to whatever addresses clients have named."""

    def __init__(
        self,
        guard: UrlGuard,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        max_connections: int = 64,
        lookup: Lookup | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._guard = guard
        self._timeout_seconds = timeout_seconds
        self._max_connections = max_connections
        self._lookup = lookup
        self._ssl_context = ssl_context
        self._pool: httpcore2.AsyncConnectionPool | None = None

    async def open(self) -> None:
        """Read the certificates that are trusted, and load what connects; both take a while."""
        self._connections()
        await httpcore2.AnyIOBackend().sleep(0)

    async def close(self) -> None:
        """Close every connection; the next message opens new ones."""
        if self._pool is not None:
            await self._pool.aclose()
            self._pool = None

    async def send(
        self, message: Message, body: bytes, secrets: Sequence[str], *, now: float
    ) -> SendReport:
        """Send a message once, within its time; whatever goes wrong is in the report."""
        try:
            destination = self._guard.destination(message.url)
        except ForbiddenAddressError as error:
            return SendReport(error=str(error), problem=FORBIDDEN, is_final=True)
        headers = _headers(message, destination, body, secrets, now)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await self._post(destination, headers, body)
            seconds = min(READ_SECONDS, self._timeout_seconds)
            said = await beginning_of(response, seconds=seconds)
            return _report(response, without_secrets(said, message.url, secrets), now)
        except ForbiddenAddressError as error:
            return SendReport(error=str(error), problem=FORBIDDEN)
        except TimeoutError:
            problem = f"no answer within {self._timeout_seconds:g} seconds"
            return SendReport(error=problem, problem=problem)
        except (OSError, ssl.SSLError, httpcore2.NetworkError, httpcore2.TimeoutException) as error:
            return _unheard("cannot be reached", error)
        except (httpcore2.ProtocolError, httpcore2.UnsupportedProtocol) as error:
            return _unheard("did not answer in HTTP", error)

    async def _post(
        self, destination: Destination, headers: list[tuple[bytes, bytes]], body: bytes
    ) -> httpcore2.Response:
        url = httpcore2.URL(
            scheme=destination.scheme.encode(),
            host=destination.host.encode(),
            port=destination.port,
            target=destination.target.encode(),
        )
        request = httpcore2.Request("POST", url, headers=headers, content=body)
        return await self._connections().handle_async_request(request)

    def _connections(self) -> httpcore2.AsyncConnectionPool:
        if self._pool is None:
            network = GuardedNetwork(
                self._guard,
                self._lookup or SystemLookup(),
                connect_seconds=self._timeout_seconds * CONNECT_RATIO,
            )
            self._pool = httpcore2.AsyncConnectionPool(
                ssl_context=self._ssl_context or ssl.create_default_context(),
                max_connections=self._max_connections,
                max_keepalive_connections=0,
                http2=False,
                network_backend=network,
            )
        return self._pool


def _headers(
    message: Message, destination: Destination, body: bytes, secrets: Sequence[str], now: float
) -> list[tuple[bytes, bytes]]:
    fields = {
        "host": destination.authority,
        "user-agent": USER_AGENT,
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-headgate-event": message.event,
        **({"x-headgate-task-id": message.task_id} if message.task_id else {}),
        **signature_headers(message.id, body, secrets, now=now),
    }
    return [(name.encode(), value.encode()) for name, value in fields.items()]


def _report(response: httpcore2.Response, said: str, now: float) -> SendReport:
    status = response.status
    answer = cut(said, MAX_ANSWER_CHARACTERS) or None
    if _OK <= status < _REDIRECT:
        return SendReport(status=status, has_arrived=True, answer=answer)
    if _REDIRECT <= status < _ERROR:
        problem = f"answered {status}; redirects are not followed"
        return SendReport(status=status, error=problem, problem=problem, answer=answer)
    problem = f"answered {status}"
    error = _line(f"{problem}: {said}" if said else problem)
    asked = _asked_seconds(response, now) if status in _ASK_FOR_TIME else None
    return SendReport(
        status=status,
        error=error,
        problem=problem,
        is_final=status == _GONE,
        asked_seconds=asked,
        answer=answer,
    )


def _asked_seconds(response: httpcore2.Response, now: float) -> float | None:
    values = [value for name, value in response.headers if name.lower() == b"retry-after"]
    text = values[0].decode("latin-1").strip() if values else ""
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None


def _unheard(problem: str, error: Exception) -> SendReport:
    said = str(error) or type(error).__name__
    return SendReport(error=_line(f"{problem}: {said}"), problem=problem)


def _line(text: str) -> str:
    """Make one short printable line of whatever a stranger has answered."""
    return cut(printable(text), MAX_ERROR_CHARACTERS)


# Signatures as Standard Webhooks has them: an HMAC over the id, the time and the body.
#
# Every secret that is valid now signs, so that a receiver may go on with the old one for a while
# after a rotation. A signature covers the time, so a try has one of its own.

_PREFIX = "whsec_"
_VERSION = "v1"


def signature_headers(
    message_id: str, body: bytes, secrets: Iterable[str], *, now: float
) -> dict[str, str]:
    """Return the headers by which a receiver knows the sender and the message."""
    timestamp = str(int(now))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(_signature(secret, signed) for secret in secrets),
    }


def _signature(secret: str, signed: bytes) -> str:
    digest = hmac.new(_key(secret), signed, hashlib.sha256).digest()
    return f"{_VERSION},{base64.b64encode(digest).decode()}"


def _key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        # Without the cause: it would repeat the secret.
        raise ValueError("a signing secret is not base64") from None


# The response of a receiver: its beginning, for people who look for the reason of a status.
#
# Rule: a response comes from a stranger. It is read for a bounded time and up to a bounded size,
# shown as one printable line, and repeats neither our signing secrets nor what the address had in
# its query, nor anything else that looks like a secret. The status counts whatever becomes of the
# rest.

MAX_READ_BYTES = 4_096
MAX_DECODED = 1 << 20
READ_SECONDS = 1.0
_CUT = "…"

_BREAKS = (
    OSError,
    TimeoutError,
    ContentCodingError,
    ssl.SSLError,
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.TimeoutException,
)


async def beginning_of(response: httpcore2.Response, *, seconds: float = READ_SECONDS) -> str:
    """Read as much of a response as explains a status, and close it; the rest is not read."""
    body = bytearray()
    with suppress(*_BREAKS):
        async with asyncio.timeout(seconds), aclosing(response):
            decoder = ContentDecoder(coding_of(_coding_header(response)), max_bytes=MAX_DECODED)
            async for chunk in response.aiter_stream():
                # One slice of what was not asked for in this form is enough for its beginning.
                body += decoder.feed(chunk)
                if len(body) >= MAX_READ_BYTES or decoder.has_more:
                    break
    return bytes(body[:MAX_READ_BYTES]).decode(errors="replace")


def _coding_header(response: httpcore2.Response) -> dict[str, str]:
    named = [value for name, value in response.headers if name.lower() == b"content-encoding"]
    return {"content-encoding": b",".join(named).decode("latin-1")}


def without_secrets(text: str, url: str, secrets: Sequence[str]) -> str:
    """Return a response on one line, without what its receiver should have kept to itself."""
    return " ".join(printable(redacted(text, (*secrets, *_query_values(url)))).split())


def printable(text: str) -> str:
    """Return a text with a space instead of all that nobody sees."""
    return "".join(mark if mark.isprintable() else " " for mark in text)


def cut(text: str, most: int) -> str:
    """Return a text that is not longer than this."""
    return text if len(text) <= most else text[: most - 1] + _CUT


def _query_values(url: str) -> Iterator[str]:
    for parameter in urlsplit(url).query.split("&"):
        name, sign, value = parameter.partition("=")
        written = value if sign else name
        yield from (written, unquote_plus(written))
