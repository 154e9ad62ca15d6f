"""Requests of one slot: bounded in size and time, shown to the trail, never told with a secret.

Rule: nothing that a provider does raises anything here. What stops a request from being answered
is a `QuotaFailure` of its kind, and everything that leaves this module as text has the key, and
whatever else is secret about the place, taken out.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from datetime import tzinfo
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx2
import msgspec

from headgate.core.slots.quota import EXHAUSTION_CODES, QuotaFailure, QuotaFailureKind, failure_of
from headgate.providers.endpoints import KEY_PLACEHOLDER, ProviderEndpoint
from headgate.providers.http_headers import HEADER_VALUE, SECRET_NAME, retry_after_seconds
from headgate.providers.provider import Answered, Call, Sent, Unanswered
from headgate.providers.transport import NOT_SENDABLE, HttpClient, explained, read_body
from headgate.redaction import hidden_address, redacted

MAX_ANSWER_BYTES = 64 << 10
MAX_TOLD_CHARACTERS = 4_096
MAX_LINE_CHARACTERS = 500
MAX_CONNECTIONS = 2


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the request was carried out, as far as HTTP can tell."""
        return httpx2.codes.is_success(self.status)


class SlotClient:
    """Sends the requests of one slot to its place."""

    def __init__(
        self,
        place: ProviderEndpoint,
        *,
        key_header: tuple[str, str] = ("authorization", f"Bearer {KEY_PLACEHOLDER}"),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        configured = {name.lower(): value for name, value in place.headers.items()}
        has_own_key = any(KEY_PLACEHOLDER in value for value in configured.values())
        own = {} if has_own_key else dict((key_header,))
        self._headers = {
            "accept": "application/json",
            "accept-encoding": "identity",
            "content-type": "application/json",
            **(headers or {}),
            **own,
            **configured,
        }
        self._secrets = (*place.secrets, *_secrets_of(configured))
        self._place = place
        self._client: HttpClient | None = None

    async def send(
        self, call: Call, method: str, url: str, body: bytes | None = None
    ) -> Reply | QuotaFailure:
        """Send a request and return its whole answer, whatever the status, or why there is none."""
        if not call.key or not HEADER_VALUE.fullmatch(call.key):
            problem = "the key is empty" if not call.key else "the key is not printable ASCII"
            return QuotaFailure(kind=QuotaFailureKind.REFUSED, message=f"{problem}; look at it")
        exchange = _Exchange(call, method, self.clean(hidden_address(url), call), self)
        exchange.begin(body)
        try:
            async with asyncio.timeout(self._place.timeout_seconds):
                reply = await self._answer(call, method, url, body)
        except asyncio.CancelledError:
            exchange.fail("the request was cancelled")
            raise
        except (TimeoutError, ssl.SSLError, httpx2.RequestError, *NOT_SENDABLE) as error:
            return exchange.failed(self._failure_of(error, call))
        if isinstance(reply, QuotaFailure):
            return exchange.failed(reply)
        exchange.answer(reply)
        return reply

    def clean(self, text: str, call: Call) -> str:
        """Return a text of any length without secrets."""
        return redacted(text, (call.key, *self._secrets))

    def line(self, text: str, call: Call) -> str:
        """Return a text without secrets, on one line that is short enough for an error."""
        # The secrets go first: one that is cut in two would not be found.
        line = " ".join(self.clean(text[:MAX_ANSWER_BYTES], call).split())
        return line if len(line) <= MAX_LINE_CHARACTERS else line[: MAX_LINE_CHARACTERS - 1] + "…"

    def document(self, reply: Reply, call: Call) -> object | QuotaFailure:
        """Return what an answer says, decoded and with no secret in any of its texts."""
        try:
            return self._cleaned(msgspec.json.decode(reply.body), call)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            problem = f"the answer is not JSON: {self.line(_text(reply.body), call) or '(empty)'}"
            return QuotaFailure(
                kind=QuotaFailureKind.GARBAGE, message=problem[:MAX_LINE_CHARACTERS]
            )

    async def close(self) -> None:
        """Close every connection; a further request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _answer(
        self, call: Call, method: str, url: str, body: bytes | None
    ) -> Reply | QuotaFailure:
        headers = {n: v.replace(KEY_PLACEHOLDER, call.key) for n, v in self._headers.items()}
        response = await self._connected().send(method, url, headers, body)
        try:
            content = await read_body(response, MAX_ANSWER_BYTES)
        finally:
            await response.aclose()
        if content is None:
            problem = f"the answer is larger than {MAX_ANSWER_BYTES} bytes"
            kind, code = QuotaFailureKind.GARBAGE, response.status_code
            return QuotaFailure(kind=kind, message=problem, code=code)
        found = {name.lower(): value for name, value in response.headers.items()}
        return Reply(status=response.status_code, headers=found, body=content)

    def _connected(self) -> HttpClient:
        if self._client is None:
            seconds = self._place.connect_timeout_seconds
            self._client = HttpClient(
                max_connections=MAX_CONNECTIONS, connect_timeout_seconds=seconds
            )
        return self._client

    def _failure_of(self, error: Exception, call: Call) -> QuotaFailure:
        kind, problem = _kind_of(error)
        if isinstance(error, TimeoutError):
            problem = f"{problem} within {self._place.timeout_seconds:g} seconds"
        elif not isinstance(error, httpx2.TimeoutException):
            problem = f"{problem}: {self.line(explained(error), call)}"
        return QuotaFailure(kind=kind, message=problem[:MAX_LINE_CHARACTERS])

    def _cleaned(self, value: object, call: Call) -> object:
        if isinstance(value, str):
            return self.clean(value, call)
        if isinstance(value, list):
            return [self._cleaned(one, call) for one in value]
        if isinstance(value, dict):
            return {self.clean(k, call): self._cleaned(v, call) for k, v in value.items()}
        return value


class _Exchange:
    """One request and what came of it, as the trail is told."""

    def __init__(self, call: Call, method: str, url: str, client: SlotClient) -> None:
        self._call = call
        self._client = client
        self._common = {
            "flow_id": call.flow_id,
            "action": call.action,
            "method": method,
            "url": url,
        }
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()

    def begin(self, body: bytes | None) -> None:
        self._call.trail.sent(Sent(**self._common, body=self._told(body)))

    def answer(self, reply: Reply) -> None:
        self._call.trail.answered(
            Answered(
                **self._common,
                status=reply.status,
                duration_ms=self._duration_ms(),
                body=self._told(reply.body),
            )
        )

    def failed(self, failure: QuotaFailure) -> QuotaFailure:
        self.fail(failure.message, failure.code)
        return failure

    def fail(self, problem: str, status: int | None = None) -> None:
        self._call.trail.failed(
            Unanswered(
                **self._common, error=problem, duration_ms=self._duration_ms(), status=status
            )
        )

    def _told(self, body: bytes | None) -> str | None:
        if body is None:
            return None
        return self._client.clean(_text(body), self._call)[:MAX_TOLD_CHARACTERS]

    def _duration_ms(self) -> float:
        return round(1_000 * (self._loop.time() - self._started), 3)


_KINDS: tuple[tuple[tuple[type[Exception], ...], QuotaFailureKind, str], ...] = (
    (
        (httpx2.ConnectTimeout,),
        QuotaFailureKind.TIMEOUT,
        "the provider could not be connected to in time",
    ),
    (
        (TimeoutError, httpx2.TimeoutException),
        QuotaFailureKind.TIMEOUT,
        "the provider did not answer",
    ),
    (NOT_SENDABLE, QuotaFailureKind.REJECTED, "the request cannot be sent"),
    ((httpx2.DecodingError,), QuotaFailureKind.GARBAGE, "the answer cannot be read"),
    ((httpx2.ConnectError,), QuotaFailureKind.UNREACHABLE, "the provider cannot be reached"),
    ((Exception,), QuotaFailureKind.UNREACHABLE, "the connection to the provider was lost"),
)
"""What there may be instead of an answer; the first that fits."""


def _kind_of(error: Exception) -> tuple[QuotaFailureKind, str]:
    """Return the kind of a failure before there was an answer, and the words for it."""
    if _is_of_tls(error):
        return QuotaFailureKind.UNREACHABLE, "no secure connection to the provider"
    return next((kind, words) for errors, kind, words in _KINDS if isinstance(error, errors))


def _is_of_tls(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _secrets_of(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is secret about configured headers, behind a scheme such as Bearer."""
    values = (value for name, value in headers.items() if SECRET_NAME.search(name))
    return tuple(value.rpartition(" ")[2] for value in values if KEY_PLACEHOLDER not in value)


def _text(body: bytes) -> str:
    return body.decode(errors="replace")


# What the answer of a provider says when it is no: the kind of a failure, and its message.
#
# A code that says that the quota is used up wins over the status, because one comes with 429 or
# even with 200. Otherwise a status that is no success decides, and then the code of the body.

USED_UP_CODES = frozenset({"insufficient_quota"})
"""Codes in words that say that there is nothing left, without saying until when."""

_REDIRECTS = range(300, 400)


class Said(NamedTuple):
    """What the body of a refusal says: a code, in digits or in words, and a message."""

    code: object = None
    message: str = ""


def said_in(document: object) -> Said | None:
    """Return what `{"error": {"code", "message"}}` or `{"code", "msg"}` says; None if neither."""
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    if isinstance(error, dict):
        return Said(error.get("code") or error.get("type"), _error_text(error.get("message")))
    if error is not None and error is not False:
        return Said(document.get("code"), _error_text(error))
    if "code" not in document:
        return None
    return Said(document["code"], _error_text(document.get("msg") or document.get("message")))


async def asked(
    client: SlotClient,
    call: Call,
    *,
    method: str,
    url: str,
    body: bytes | None = None,
    zone: tzinfo,
    clock: Callable[[], float],
) -> Reply | QuotaFailure:
    """Send a request, and return the answer of a provider that has carried it out."""
    reply = await client.send(call, method, url, body)
    if isinstance(reply, QuotaFailure):
        return reply
    return failure_in(reply, client, call, zone=zone, now=clock()) or reply


def failure_in(
    reply: Reply, client: SlotClient, call: Call, *, zone: tzinfo, now: float
) -> QuotaFailure | None:
    """Return the failure that an answer stands for; None if the request was carried out."""
    document = client.document(reply, call)
    said = None if isinstance(document, QuotaFailure) else said_in(document)
    used_up = None if said is None else _used_up(said, client, call, zone)
    if used_up is not None:
        return used_up
    if reply.is_success:
        return _failure_despite_success(reply, document, client, call, zone)
    message = _redirected(reply) or (said.message if said else "") or _body_of(reply)
    told = client.line(message, call) or "(no body)"
    failure = failure_of(reply.status, f"the provider answered {reply.status}: {told}", zone)
    seconds = retry_after_seconds(reply.headers, now=now)
    return msgspec.structs.replace(failure, retry_after_seconds=seconds)


def _used_up(said: Said, client: SlotClient, call: Call, zone: tzinfo) -> QuotaFailure | None:
    message = client.line(said.message, call)
    if isinstance(said.code, str) and said.code in USED_UP_CODES:
        return QuotaFailure(kind=QuotaFailureKind.EXHAUSTED, message=message)
    failure = failure_of(said.code, message, zone)
    return failure if failure.code in EXHAUSTION_CODES else None


def _failure_despite_success(
    reply: Reply, document: object, client: SlotClient, call: Call, zone: tzinfo
) -> QuotaFailure | None:
    if isinstance(document, QuotaFailure):
        # Whoever reads nothing from a body needs none; one that is no JSON is somebody else's.
        return document if reply.body else None
    if not isinstance(document, dict):
        return None
    if not document.get("error") and document.get("success") is not False:
        return None
    said = said_in(document) or Said()
    problem = f"the provider answered with an error: {client.line(said.message, call)}"
    failure = failure_of(said.code, problem, zone)
    if failure.code is not None:
        return failure
    return QuotaFailure(kind=QuotaFailureKind.REJECTED, message=problem)


def _redirected(reply: Reply) -> str:
    """Say where a redirect leads, without the query, which may hold anything."""
    location = reply.headers.get("location")
    if reply.status not in _REDIRECTS or location is None:
        return ""
    try:
        parts = urlsplit(location)
        place = f"{parts.scheme}://{parts.hostname}{parts.path}" if parts.hostname else parts.path
    except ValueError:
        place = "an address that cannot be read"
    return f"it points to {place}, and redirects are not followed; configure the address itself"


def _body_of(reply: Reply) -> str:
    return reply.body.decode(errors="replace")


def _error_text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
