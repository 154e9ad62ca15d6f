"""The providers of keys: how each tells the quota of a key, and what wakes its window.

| provider | where the quota is |
| --- | --- |
| z.ai | at an address that costs nothing |
| Anthropic, OpenAI | in the headers of any response |
| `http-json` | in the JSON of an address of the configuration, found by pointers |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, tzinfo
from typing import NamedTuple

import msgspec

from headgate.core.slots.quota import (
    RATE_LIMIT,
    UNIFIED_LIMIT,
    QuotaFailure,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    WakeAnswer,
    read_quota,
)
from headgate.core.text import found_at, parsed_pointer
from headgate.providers.endpoints import KEY_PLACEHOLDER, ProviderEndpoint
from headgate.providers.provider import Call
from headgate.providers.slot_client import SlotClient, SlotResponse

Headers = Mapping[str, str]

_TOO_MANY = 429


class ZaiProvider:
    """Asks z.ai for the quota of a coding plan, or whoever answers as z.ai does.

    An address tells the quota for nothing, and a chat completion opens the window. The envelope of
    a response has a code of its own, which counts as much as the status does. Times in messages are
    those of Beijing where they have no offset.
    """

    def __init__(self, endpoint: ProviderEndpoint, *, clock: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._zone = endpoint.zone or UTC
        self._clock = clock
        self._client = SlotClient(endpoint, headers={"accept-language": "en-US"})

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Ask for the limits of the key, which uses up nothing."""
        response = await self._asked(call, "GET", self._endpoint.quota_url)
        if isinstance(response, QuotaFailure):
            return response
        document = self._client.document(response, call)
        if isinstance(document, QuotaFailure):
            return document
        found = read_quota(document, self._zone)
        if isinstance(found, QuotaFailure):
            told = self._client.line(found.message, call)
            return msgspec.structs.replace(found, message=told)
        return found

    def read_response(
        self, status: int, headers: Headers, now: float
    ) -> QuotaReport | QuotaFailure | None:
        """Return None: a response to a request says nothing of the quota."""

    async def wake(self, call: Call) -> WakeAnswer:
        """Send one word, to be answered with one token."""
        body = self._endpoint.wake_content()
        response = await self._asked(call, "POST", self._endpoint.request_url, body)
        return WakeAnswer(failure=response if isinstance(response, QuotaFailure) else None)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _asked(
        self, call: Call, method: str, url: str | None, body: bytes | None = None
    ) -> SlotResponse | QuotaFailure:
        return await self._client.ask(
            call,
            method=method,
            url=url or "",
            body=body,
            zone=self._zone,
            clock=self._clock,
        )


QUOTA_LIMIT = "QUOTA_LIMIT"
"""The type of the one row that such a provider has."""


class HttpJsonProvider:
    """Asks an address of the configuration, and reads what the pointers find.

    A percentage is a number from 0 to 100. What is used is a share of what `limit_pointer` finds;
    if that is left out, a share of one.
    """

    def __init__(self, endpoint: ProviderEndpoint, *, clock: Callable[[], float]) -> None:
        self._endpoint = endpoint
        self._zone = endpoint.zone or UTC
        self._clock = clock
        self._client = SlotClient(endpoint)

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Ask the address that tells the quota."""
        url = self._endpoint.quota_url or ""
        response = await self._client.ask(
            call, method="GET", url=url, zone=self._zone, clock=self._clock
        )
        if isinstance(response, QuotaFailure):
            return response
        document = self._client.document(response, call)
        if isinstance(document, QuotaFailure):
            return document
        try:
            return self._read(document)
        except ValueError as error:
            message = self._client.line(f"the answer cannot be used: {error}", call)
            return QuotaFailure(kind=QuotaFailureKind.GARBAGE, message=message)

    def read_response(
        self, status: int, headers: Headers, now: float
    ) -> QuotaReport | QuotaFailure | None:
        """Return None: where the quota is in a response is not configured."""

    async def wake(self, call: Call) -> WakeAnswer:
        """Send the configured request."""
        url = self._endpoint.request_url
        if url is None or (self._endpoint.wake_body is None and self._endpoint.model is None):
            problem = "the slot has no request_url, or neither wake_body nor wake_model"
            return WakeAnswer(failure=_rejected(problem))
        body = self._endpoint.wake_content()
        response = await self._client.ask(
call, method="POST", url=url, body=body, zone=self._zone,
            clock=self._clock,
        )  # fmt: skip
        return WakeAnswer(failure=response if isinstance(response, QuotaFailure) else None)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _read(self, document: object) -> QuotaReport:
        endpoint = self._endpoint
        resets_at = self._resets_at(document, endpoint.reset_pointer)
        row = QuotaLimit(
            type=QUOTA_LIMIT,
            percentage=_number_at(document, endpoint.percent_pointer, "percent_pointer"),
            current_value=_number_at(document, endpoint.used_pointer, "used_pointer"),
            usage=_allowance(document, endpoint),
            next_reset_epoch_ms=epoch_ms(resets_at),
        )
        return QuotaReport(limits=(row,))

    def _resets_at(self, document: object, pointer: str | None) -> float | None:
        if pointer is None:
            return None
        try:
            value = found_at(document, parsed_pointer(pointer, setting="reset_pointer"))
        except LookupError:
            return None
        try:
            return reset_time(value, now=self._clock(), zone=self._zone)
        except ValueError:
            problem = f"what is at {pointer!r} (reset_pointer) is no time"
            raise ValueError(problem) from None


def _allowance(document: object, endpoint: ProviderEndpoint) -> float | None:
    if endpoint.used_pointer is None:
        return None
    if endpoint.limit_pointer is None:
        return 1.0
    return _number_at(document, endpoint.limit_pointer, "limit_pointer")


def _number_at(document: object, pointer: str | None, field: str) -> float | None:
    """Return the number at a pointer, None for `null`; what is not there or no number, ValueError.

    Without the figure a slot has no standing, while a reset that is not there means something.
    """
    if pointer is None:
        return None
    try:
        value = found_at(document, parsed_pointer(pointer, setting=field))
    except LookupError:
        problem = f"it has nothing at {pointer!r} ({field})"
        raise ValueError(problem) from None
    number = _number(value)
    if number is None and value is not None:
        problem = f"what is at {pointer!r} ({field}) is no number"
        raise ValueError(problem)
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value.strip().removesuffix("%") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _rejected(problem: str) -> QuotaFailure:
    return QuotaFailure(kind=QuotaFailureKind.REJECTED, message=problem)


class Dialect(NamedTuple):
    """How one provider speaks: what goes with a request, and what its headers say.

    `rows_of` reads the limits; `used_up_until` says of a refusal whether it is one of a window
    that is used up, and gives the Unix second of its end.
    """

    headers_begin_with: str
    key_header: tuple[str, str]
    headers: Mapping[str, str]
    rows_of: Callable[[Headers, float], QuotaReport]
    used_up_until: Callable[[Headers, float], float | None]


class HeaderQuotaProvider:
    """Speaks to a provider that tells its quota only in the headers of a response.

    Any response tells it: those of real traffic, that of a wake, and that of `quota_url`, an
    address whose answer has the headers for nothing. To poll without one takes a request, the same
    as a wake: one word in and one token out. A slot does so only if its settings say so.
    """

    def __init__(
        self, dialect: Dialect, endpoint: ProviderEndpoint, *, clock: Callable[[], float]
    ) -> None:
        self._dialect = dialect
        self._endpoint = endpoint
        self._clock = clock
        self._client = SlotClient(endpoint, key_header=dialect.key_header, headers=dialect.headers)

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Send the smallest request there is, or ask `quota_url`, and read the headers."""
        url = self._endpoint.quota_url
        if url is None:
            response = await self._request(call)
        else:
            response = await self._client.send(call, "GET", url)
        failure = self._failure(response, call)
        return failure or self._report(response) or self._garbage()

    def read_response(
        self, status: int, headers: Headers, now: float
    ) -> QuotaReport | QuotaFailure | None:
        """Read the headers; a refusal may say that a window is used up."""
        until = self._dialect.used_up_until(headers, now) if status == _TOO_MANY else None
        if until is not None:
            message = f"the provider answered {status}, and that a window is used up"
            return QuotaFailure(
                kind=QuotaFailureKind.EXHAUSTED, message=message, code=status, resets_at=until
            )
        report = self._dialect.rows_of(headers, now)
        return report if report.limits else None

    async def wake(self, call: Call) -> WakeAnswer:
        """Send the smallest request there is; its response tells the quota."""
        response = await self._request(call)
        failure = self._failure(response, call)
        return WakeAnswer(failure=failure, report=None if failure else self._report(response))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _request(self, call: Call) -> SlotResponse | QuotaFailure:
        body = self._endpoint.wake_content()
        return await self._client.send(call, "POST", self._endpoint.request_url or "", body)

    def _failure(self, response: SlotResponse | QuotaFailure, call: Call) -> QuotaFailure | None:
        if isinstance(response, QuotaFailure):
            return response
        now = self._clock()
        failure = self._client.failure_in(response, call, zone=self._endpoint.zone or UTC, now=now)
        if failure is not None and failure.kind is QuotaFailureKind.GARBAGE and response.is_success:
            # The headers tell all that there is to know, whatever the body is.
            return None if self._report(response) else failure
        if failure is None or failure.kind is not QuotaFailureKind.THROTTLED:
            return failure
        until = self._dialect.used_up_until(response.headers, now)
        if until is None:
            return failure
        kind = QuotaFailureKind.EXHAUSTED
        return QuotaFailure(kind=kind, message=failure.message, code=failure.code, resets_at=until)

    def _report(self, response: SlotResponse | QuotaFailure) -> QuotaReport | None:
        if isinstance(response, QuotaFailure):
            return None
        report = self._dialect.rows_of(response.headers, self._clock())
        return report if report.limits or report.unreadable else None

    def _garbage(self) -> QuotaFailure:
        problem = f"the answer has no headers {self._dialect.headers_begin_with}…"
        return QuotaFailure(
            kind=QuotaFailureKind.GARBAGE, message=f"{problem}, which would tell the quota"
        )


class RateRows:
    """Collects the rows of a quota from the headers of one response.

    Each provider has its names; a limit, what remains and a time are read alike. A header that
    makes no sense is named and left out, and the others still count.
    """

    def __init__(self, headers: Headers, *, now: float) -> None:
        self._headers = headers
        self._now = now
        self._rows: list[QuotaLimit] = []
        self._unreadable: list[str] = []

    def add_rate(self, unit: str, *, limit: str, remaining: str, reset: str) -> None:
        """Add a row from the three headers of these names, if it says how much is left."""
        allowed, left = self.number(limit), self.number(remaining)
        if left is None:
            return
        row = QuotaLimit(
            type=RATE_LIMIT,
            unit=unit,
            usage=allowed,
            remaining=left,
            current_value=None if allowed is None else max(allowed - left, 0.0),
            percentage=100.0 if left == 0 else None,
            next_reset_epoch_ms=epoch_ms(self.time(reset)),
        )
        self.add(row)

    def add(self, row: QuotaLimit) -> None:
        """Add a row."""
        self._rows.append(row)

    def number(self, name: str) -> float | None:
        """Return a header as a number; below zero it means that there is no such limit."""
        text = self._headers.get(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self._unreadable.append(f"{name} is no number")
            return None
        return number if number >= 0 else None

    def time(self, name: str) -> float | None:
        """Return a header as a Unix second."""
        try:
            return reset_time(self._headers.get(name), now=self._now, zone=UTC)
        except ValueError:
            self._unreadable.append(f"{name} is no time")
            return None

    def report(self) -> QuotaReport:
        """Return all rows, in the order in which they were added."""
        return QuotaReport(limits=tuple(self._rows), unreadable=tuple(self._unreadable))


# Rate-limit headers of Anthropic. A plan has windows of five hours and seven days, as shares of
# one: `…-unified-5h-utilization`, with `-reset` and `-status`. A key of the API has rates:
# `…-tokens-limit`, `-remaining` and `-reset`, and the same for requests, input and output tokens.
# The windows of a plan come first.

API_VERSION = "2023-06-01"
MAX_WINDOWS = 16

_ANTHROPIC_PREFIX = "anthropic-ratelimit-"
_ANTHROPIC_RATES = ("tokens", "input-tokens", "output-tokens", "requests")
_WINDOW = re.compile(
    rf"{_ANTHROPIC_PREFIX}unified-(([0-9]{{1,3}})([a-z])[0-9a-z_]{{0,12}})-utilization"
)
_UNIT_HOURS = {"h": 1, "d": 24, "w": 168}
_REJECTED = "rejected"
_FULL_PERCENT = 100.0


def anthropic_rows_of(headers: Headers, now: float) -> QuotaReport:
    """Return the windows of the plan, the shortest first, and the rates of the key."""
    rows = RateRows(headers, now=now)
    for window in _windows(headers):
        _add_window(rows, headers, window)
    for rate in _ANTHROPIC_RATES:
        limit, remaining, reset = (
            f"{_ANTHROPIC_PREFIX}{rate}-{part}" for part in ("limit", "remaining", "reset")
        )
        rows.add_rate(rate, limit=limit, remaining=remaining, reset=reset)
    return rows.report()


def anthropic_used_up_until(headers: Headers, now: float) -> float | None:
    """Return when the last of the windows that refuse requests resets; None if none refuses."""
    rows = RateRows(headers, now=now)
    refusing = [name for name in ("", *_windows(headers)) if _status(headers, name) == _REJECTED]
    # All windows must have room, so the latest of the resets is the one that counts.
    times = [rows.time(_name(window, "reset")) for window in refusing]
    return max((time for time in times if time is not None), default=None)


def _add_window(rows: RateRows, headers: Headers, window: str) -> None:
    share = rows.number(_name(window, "utilization"))
    if share is None:
        return
    percentage = _FULL_PERCENT * share
    if _status(headers, window) == _REJECTED:
        percentage = max(percentage, _FULL_PERCENT)
    rows.add(
        QuotaLimit(
            type=UNIFIED_LIMIT,
            unit=window,
            percentage=percentage,
            next_reset_epoch_ms=epoch_ms(rows.time(_name(window, "reset"))),
        )
    )


def _windows(headers: Headers) -> list[str]:
    """Return the names of windows, the shortest first, as `5h` and `7d`."""
    found = [match for name in headers if (match := _WINDOW.fullmatch(name)) is not None]
    found.sort(key=lambda match: (int(match[2]) * _UNIT_HOURS.get(match[3], 1), match[1]))
    return [match[1] for match in found[:MAX_WINDOWS]]


def _status(headers: Headers, window: str) -> str:
    return headers.get(_name(window, "status"), "").strip().lower()


def _name(window: str, part: str) -> str:
    return (
        f"{_ANTHROPIC_PREFIX}unified-{window}-{part}"
        if window
        else f"{_ANTHROPIC_PREFIX}unified-{part}"
    )


ANTHROPIC = Dialect(
    headers_begin_with=_ANTHROPIC_PREFIX,
    key_header=("x-api-key", KEY_PLACEHOLDER),
    headers={"anthropic-version": API_VERSION},
    rows_of=anthropic_rows_of,
    used_up_until=anthropic_used_up_until,
)


# Rate-limit headers of OpenAI: `x-ratelimit-limit-tokens`, `-remaining-` and `-reset-`, and the
# same for requests; a reset is a duration such as `6m0s`. Many others send the same headers, some
# with plain seconds.

_OPENAI_PREFIX = "x-ratelimit-"
_OPENAI_RATES = ("tokens", "requests")


def openai_rows_of(headers: Headers, now: float) -> QuotaReport:
    """Return the rates of the key."""
    rows = RateRows(headers, now=now)
    for rate in _OPENAI_RATES:
        limit, remaining, reset = (
            f"{_OPENAI_PREFIX}{part}-{rate}" for part in ("limit", "remaining", "reset")
        )
        rows.add_rate(rate, limit=limit, remaining=remaining, reset=reset)
    return rows.report()


def openai_used_up_until(headers: Headers, now: float) -> float | None:  # noqa: ARG001 - as a dialect has it
    """Return None: no header tells a window that is used up from a rate that was too high."""
    return None


OPENAI = Dialect(
    headers_begin_with=_OPENAI_PREFIX,
    key_header=("authorization", f"Bearer {KEY_PLACEHOLDER}"),
    headers={},
    rows_of=openai_rows_of,
    used_up_until=openai_used_up_until,
)


# Times of resets, in all the ways in which providers write them.

FIRST_EPOCH_SECONDS = 100_000_000
"""The third of March 1973; no window is three years long, and none ended before this."""
FIRST_EPOCH_MS = 100_000_000_000
LAST_EPOCH_SECONDS = 253_402_300_799

_UNIT_SECONDS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "us": 0.000_001}
_UNIT_SECONDS |= {"µs": 0.000_001, "ns": 0.000_000_001}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ms|us|µs|ns|[dhms])")
_DURATION = re.compile(f"(?:{_PART.pattern})+")
_MAX_TEXT = 64
_TOO_LARGE = 10**18


def duration_seconds(text: str) -> float | None:
    """Read a duration such as `6m0s`; None if it is none."""
    if len(text) > _MAX_TEXT or not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _PART.findall(text))


def reset_time(value: object, *, now: float, zone: tzinfo) -> float | None:
    """Return the Unix second of a reset; None if no window is open. What is neither, ValueError.

    | value | meaning |
    | --- | --- |
    | nothing, `null`, an empty string, 0 or less | no window is open |
    | a number below 100,000,000 | seconds from now |
    | a number below 100,000,000,000 | seconds since 1970 |
    | a larger number | milliseconds since 1970 |
    | a string with a number | the same as the number |
    | `6m0s`, `1h30m`, `12ms` | a duration from now |
    | `2026-02-14T09:30:00Z` | ISO 8601; without an offset, in the provider's zone |
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return _in_text(value.strip(), now=now, zone=zone)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is no time")
    # A whole number may have more digits than a time can, and than can be divided.
    return _in_number(min(value, _TOO_LARGE), now=now)


def _in_text(text: str, *, now: float, zone: tzinfo) -> float | None:
    seconds = duration_seconds(text)
    if seconds is not None:
        return _checked(now + seconds)
    try:
        return _in_number(float(text), now=now)
    except ValueError:
        pass
    found = datetime.fromisoformat(text[:_MAX_TEXT])
    try:
        return _checked((found if found.tzinfo else found.replace(tzinfo=zone)).timestamp())
    except OverflowError:
        raise ValueError("is no time") from None


def _in_number(number: float, *, now: float) -> float | None:
    if math.isnan(number):
        raise ValueError("is no time")
    if number <= 0:
        return None
    if number < FIRST_EPOCH_SECONDS:
        return _checked(now + number)
    return _checked(number if number < FIRST_EPOCH_MS else number / 1_000)


def _checked(seconds: float) -> float:
    if not 0 < seconds <= LAST_EPOCH_SECONDS:
        raise ValueError("is no time")
    return seconds


def epoch_ms(seconds: float | None) -> int | None:
    """Return a Unix second as a row of a quota has it."""
    return None if seconds is None else round(seconds * 1_000)
