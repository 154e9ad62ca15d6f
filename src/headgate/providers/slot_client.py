"""Requests of one slot: bounded in size and time, recorded in the trail, reported without secrets.

Nothing that a provider does raises anything here. What stops a request from being answered is a
`QuotaFailure` of its kind, and all text that leaves this module has the key, and whatever else is
secret about the endpoint, taken out.
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
from headgate.providers.content_coding import ContentCodingError
from headgate.providers.endpoints import KEY_PLACEHOLDER, ProviderEndpoint
from headgate.providers.http_client import NOT_SENDABLE, HttpClient, explained, read_body
from headgate.providers.http_headers import HEADER_VALUE, SECRET_NAME, retry_after_seconds
from headgate.providers.provider import Call, RequestFailed, RequestSent, ResponseReceived
from headgate.redaction import hidden_address, redacted

MAX_RESPONSE_BYTES = 64 << 10
MAX_LOGGED_CHARACTERS = 4_096
MAX_LINE_CHARACTERS = 500
MAX_CONNECTIONS = 2


class SlotResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response; the names of its headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """Whether the request was carried out, as far as HTTP can tell."""
        return httpx2.codes.is_success(self.status)


class SlotClient:
    """Sends the requests of one slot to its endpoint."""

    def __init__(
        self,
        endpoint: ProviderEndpoint,
        *,
        key_header: tuple[str, str] = ("authorization", f"Bearer {KEY_PLACEHOLDER}"),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        configured = {name.lower(): value for name, value in endpoint.headers.items()}
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
        self._secrets = (*endpoint.secrets, *_secrets_of(configured))
        self._endpoint = endpoint
        self._client: HttpClient | None = None

    async def send(
        self, call: Call, method: str, url: str, body: bytes | None = None
    ) -> SlotResponse | QuotaFailure:
        """Send a request and return its whole response, of any status, or why there is none."""
        if not call.key or not HEADER_VALUE.fullmatch(call.key):
            problem = "the key is empty" if not call.key else "the key is not printable ASCII"
            return QuotaFailure(kind=QuotaFailureKind.REFUSED, message=f"{problem}; look at it")
        shown = _TrailedRequest(call, method, self.clean(hidden_address(url), call), self)
        shown.begin(body)
        try:
            async with asyncio.timeout(self._endpoint.timeout_seconds):
                response = await self._receive(call, method, url, body)
        except asyncio.CancelledError:
            shown.fail("the request was cancelled")
            raise
        except (
            TimeoutError,
            ssl.SSLError,
            ContentCodingError,
            httpx2.RequestError,
            *NOT_SENDABLE,
        ) as error:
            return shown.failed(self._failure_of(error, call))
        if isinstance(response, QuotaFailure):
            return shown.failed(response)
        shown.received(response)
        return response

    def clean(self, text: str, call: Call) -> str:
        """Return a text of any length without secrets."""
        return redacted(text, (call.key, *self._secrets))

    def line(self, text: str, call: Call) -> str:
        """Return a text without secrets, on one line that is short enough for an error."""
        # The secrets go first: one that is cut in two would not be found.
        line = " ".join(self.clean(text[:MAX_RESPONSE_BYTES], call).split())
        return line if len(line) <= MAX_LINE_CHARACTERS else line[: MAX_LINE_CHARACTERS - 1] + "…"

    def document(self, response: SlotResponse, call: Call) -> object | QuotaFailure:
        """Return what a response says, decoded and with no secret in any of its texts."""
        try:
            return self._cleaned(msgspec.json.decode(response.body), call)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            problem = (
                f"the answer is not JSON: {self.line(_text(response.body), call) or '(empty)'}"
            )
            return QuotaFailure(
                kind=QuotaFailureKind.GARBAGE, message=problem[:MAX_LINE_CHARACTERS]
            )

    async def ask(
        self,
        call: Call,
        *,
        method: str,
        url: str,
        body: bytes | None = None,
        zone: tzinfo,
        clock: Callable[[], float],
    ) -> SlotResponse | QuotaFailure:
        """Send a request, and return the response of a provider that has carried it out."""
        response = await self.send(call, method, url, body)
        if isinstance(response, QuotaFailure):
            return response
        return self.failure_in(response, call, zone=zone, now=clock()) or response

    def failure_in(
        self, response: SlotResponse, call: Call, *, zone: tzinfo, now: float
    ) -> QuotaFailure | None:
        """Return the failure that a response stands for; None if the request was carried out.

        A code that says that the quota is used up wins over the status, because one comes with 429
        or even with 200. Otherwise a status that is no success decides, then the code of the body.
        """
        document = self.document(response, call)
        details = None if isinstance(document, QuotaFailure) else error_details(document)
        used_up = None if details is None else self._used_up(details, call, zone)
        if used_up is not None:
            return used_up
        if response.is_success:
            return self._failure_despite_success(response, document, call, zone)
        message = (
            _redirected(response) or (details.message if details else "") or _body_of(response)
        )
        told = self.line(message, call) or "(no body)"
        failure = failure_of(
            response.status, f"the provider answered {response.status}: {told}", zone
        )
        seconds = retry_after_seconds(response.headers, now=now)
        return msgspec.structs.replace(failure, retry_after_seconds=seconds)

    def _used_up(self, details: ErrorDetails, call: Call, zone: tzinfo) -> QuotaFailure | None:
        message = self.line(details.message, call)
        if isinstance(details.code, str) and details.code in USED_UP_CODES:
            return QuotaFailure(kind=QuotaFailureKind.EXHAUSTED, message=message)
        failure = failure_of(details.code, message, zone)
        return failure if failure.code in EXHAUSTION_CODES else None

    def _failure_despite_success(
        self, response: SlotResponse, document: object, call: Call, zone: tzinfo
    ) -> QuotaFailure | None:
        if isinstance(document, QuotaFailure):
            # Whoever reads nothing from a body needs none; one that is no JSON is somebody else's.
            return document if response.body else None
        if not isinstance(document, dict):
            return None
        if not document.get("error") and document.get("success") is not False:
            return None
        details = error_details(document) or ErrorDetails()
        problem = f"the provider answered with an error: {self.line(details.message, call)}"
        failure = failure_of(details.code, problem, zone)
        if failure.code is not None:
            return failure
        return QuotaFailure(kind=QuotaFailureKind.REJECTED, message=problem)

    async def close(self) -> None:
        """Close every connection; a further request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _receive(
        self, call: Call, method: str, url: str, body: bytes | None
    ) -> SlotResponse | QuotaFailure:
        headers = {n: v.replace(KEY_PLACEHOLDER, call.key) for n, v in self._headers.items()}
        response = await self._connected().send(method, url, headers, body)
        try:
            content = await read_body(response, MAX_RESPONSE_BYTES)
        finally:
            await response.aclose()
        if content is None:
            problem = f"the answer is larger than {MAX_RESPONSE_BYTES} bytes"
            kind, code = QuotaFailureKind.GARBAGE, response.status_code
            return QuotaFailure(kind=kind, message=problem, code=code)
        found = {name.lower(): value for name, value in response.headers.items()}
        return SlotResponse(status=response.status_code, headers=found, body=content)

    def _connected(self) -> HttpClient:
        if self._client is None:
            seconds = self._endpoint.connect_timeout_seconds
            self._client = HttpClient(
                max_connections=MAX_CONNECTIONS, connect_timeout_seconds=seconds
            )
        return self._client

    def _failure_of(self, error: Exception, call: Call) -> QuotaFailure:
        kind, problem = _kind_of(error)
        if isinstance(error, TimeoutError):
            problem = f"{problem} within {self._endpoint.timeout_seconds:g} seconds"
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


class _TrailedRequest:
    """One request and what came of it, as the trail is shown."""

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
        self._call.trail.sent(RequestSent(**self._common, body=self._logged(body)))

    def received(self, response: SlotResponse) -> None:
        self._call.trail.received(
            ResponseReceived(
                **self._common,
                status=response.status,
                duration_ms=self._duration_ms(),
                body=self._logged(response.body),
            )
        )

    def failed(self, failure: QuotaFailure) -> QuotaFailure:
        self.fail(failure.message, failure.code)
        return failure

    def fail(self, problem: str, status: int | None = None) -> None:
        self._call.trail.failed(
            RequestFailed(
                **self._common, error=problem, duration_ms=self._duration_ms(), status=status
            )
        )

    def _logged(self, body: bytes | None) -> str | None:
        if body is None:
            return None
        return self._client.clean(_text(body), self._call)[:MAX_LOGGED_CHARACTERS]

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
    ((ContentCodingError,), QuotaFailureKind.GARBAGE, "the answer cannot be read"),
    ((httpx2.ConnectError,), QuotaFailureKind.UNREACHABLE, "the provider cannot be reached"),
    ((Exception,), QuotaFailureKind.UNREACHABLE, "the connection to the provider was lost"),
)
"""What there may be instead of a response; the first that fits."""


def _kind_of(error: Exception) -> tuple[QuotaFailureKind, str]:
    """Return the kind of a failure before there was a response, and the words for it."""
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


# Error bodies

USED_UP_CODES = frozenset({"insufficient_quota"})
"""Codes in words that say that there is nothing left, without saying until when."""

_REDIRECTS = range(300, 400)


class ErrorDetails(NamedTuple):
    """What the body of a refusal says: a code, in digits or in words, and a message."""

    code: object = None
    message: str = ""


def error_details(document: object) -> ErrorDetails | None:
    """Return what `{"error": {"code", "message"}}` or `{"code", "msg"}` says; None if neither."""
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    if isinstance(error, dict):
        return ErrorDetails(
            error.get("code") or error.get("type"), _error_text(error.get("message"))
        )
    if error is not None and error is not False:
        return ErrorDetails(document.get("code"), _error_text(error))
    if "code" not in document:
        return None
    return ErrorDetails(
        document["code"], _error_text(document.get("msg") or document.get("message"))
    )


def _redirected(response: SlotResponse) -> str:
    """Say where a redirect leads, without the query, which may hold anything."""
    location = response.headers.get("location")
    if response.status not in _REDIRECTS or location is None:
        return ""
    try:
        parts = urlsplit(location)
        where = f"{parts.scheme}://{parts.hostname}{parts.path}" if parts.hostname else parts.path
    except ValueError:
        where = "an address that cannot be read"
    return f"it points to {where}, and redirects are not followed; configure the address itself"


def _body_of(response: SlotResponse) -> str:
    return response.body.decode(errors="replace")


def _error_text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
