"""Providers that tell a quota with the headers of any answer, and in no other way.

So reading it is a request: the same as a wake, one word in and one token out, unless `quota_url`
names an address whose answer has the headers for nothing. And a wake reads the quota as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC
from typing import NamedTuple

from headgate.core.key_slots.quota import QuotaFailure, QuotaFailureKind, QuotaReport
from headgate.provider import Call, WakeAnswer
from headgate.providers.answers import failure_in
from headgate.providers.rate_headers import Headers
from headgate.providers.slot_client import Reply, SlotClient
from headgate.providers.slot_places import ProviderPlace, wake_content


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
    """Asks a provider for a token, and reads the headers."""

    def __init__(
        self, dialect: Dialect, place: ProviderPlace, *, clock: Callable[[], float]
    ) -> None:
        self._dialect = dialect
        self._place = place
        self._clock = clock
        self._client = SlotClient(place, key_header=dialect.key_header, headers=dialect.headers)

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Send the smallest request there is, or ask `quota_url`, and read the headers."""
        url = self._place.quota_url
        if url is None:
            reply = await self._request(call)
        else:
            reply = await self._client.send(call, "GET", url)
        failure = self._failure(reply, call)
        return failure or self._report(reply) or self._garbage()

    async def wake(self, call: Call) -> WakeAnswer:
        """Send the smallest request there is; its answer tells the quota."""
        reply = await self._request(call)
        failure = self._failure(reply, call)
        return WakeAnswer(failure=failure, report=None if failure else self._report(reply))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _request(self, call: Call) -> Reply | QuotaFailure:
        body = wake_content(self._place)
        return await self._client.send(call, "POST", self._place.request_url or "", body)

    def _failure(self, reply: Reply | QuotaFailure, call: Call) -> QuotaFailure | None:
        if isinstance(reply, QuotaFailure):
            return reply
        now = self._clock()
        failure = failure_in(reply, self._client, call, zone=self._place.zone or UTC, now=now)
        if failure is not None and failure.kind is QuotaFailureKind.GARBAGE and reply.is_success:
            # The headers tell all that there is to know, whatever the body is.
            return None if self._report(reply) else failure
        if failure is None or failure.kind is not QuotaFailureKind.THROTTLED:
            return failure
        until = self._dialect.used_up_until(reply.headers, now)
        if until is None:
            return failure
        kind = QuotaFailureKind.EXHAUSTED
        return QuotaFailure(kind=kind, message=failure.message, code=failure.code, resets_at=until)

    def _report(self, reply: Reply | QuotaFailure) -> QuotaReport | None:
        if isinstance(reply, QuotaFailure):
            return None
        report = self._dialect.rows_of(reply.headers, self._clock())
        return report if report.limits or report.unreadable else None

    def _garbage(self) -> QuotaFailure:
        problem = f"the answer has no headers {self._dialect.headers_begin_with}…"
        return QuotaFailure(
            kind=QuotaFailureKind.GARBAGE, message=f"{problem}, which would tell the quota"
        )
