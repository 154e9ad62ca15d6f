"""Any address that tells a quota in JSON: pointers find how much is used, and when it resets.

A percentage is a number from 0 to 100. What is used is a share of what `limit_pointer` finds; if
that is left out, a share of one. See `headgate.providers.reset_times` for how times are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC

from headgate.core.key_slots.quota import QuotaFailure, QuotaFailureKind, QuotaLimit, QuotaReport
from headgate.core.texts.json_pointer import found_at, parsed_pointer
from headgate.provider import Call, WakeAnswer
from headgate.providers.answers import asked
from headgate.providers.reset_times import epoch_ms, reset_time
from headgate.providers.slot_client import SlotClient
from headgate.providers.slot_places import ProviderPlace, wake_content

QUOTA_LIMIT = "QUOTA_LIMIT"
"""The type of the one row that such a provider has."""


class HttpJsonProvider:
    """Asks an address of the configuration, and reads what the pointers find."""

    def __init__(self, place: ProviderPlace, *, clock: Callable[[], float]) -> None:
        self._place = place
        self._zone = place.zone or UTC
        self._clock = clock
        self._client = SlotClient(place)

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Ask the address that tells the quota."""
        url = self._place.quota_url or ""
        reply = await asked(
            self._client, call, method="GET", url=url, zone=self._zone, clock=self._clock
        )
        if isinstance(reply, QuotaFailure):
            return reply
        document = self._client.document(reply, call)
        if isinstance(document, QuotaFailure):
            return document
        try:
            return self._read(document)
        except ValueError as error:
            message = self._client.line(f"the answer cannot be used: {error}", call)
            return QuotaFailure(kind=QuotaFailureKind.GARBAGE, message=message)

    async def wake(self, call: Call) -> WakeAnswer:
        """Send the configured request."""
        url = self._place.request_url
        if url is None or (self._place.wake_body is None and self._place.model is None):
            problem = "the slot has no request_url, or neither wake_body nor wake_model"
            return WakeAnswer(failure=_rejected(problem))
        body = wake_content(self._place)
        reply = await asked(
            self._client, call, method="POST", url=url, body=body, zone=self._zone,
            clock=self._clock,
        )  # fmt: skip
        return WakeAnswer(failure=reply if isinstance(reply, QuotaFailure) else None)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _read(self, document: object) -> QuotaReport:
        place = self._place
        resets_at = self._resets_at(document, place.reset_pointer)
        row = QuotaLimit(
            type=QUOTA_LIMIT,
            percentage=_number_at(document, place.percent_pointer, "percent_pointer"),
            current_value=_number_at(document, place.used_pointer, "used_pointer"),
            usage=_allowance(document, place),
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


def _allowance(document: object, place: ProviderPlace) -> float | None:
    if place.used_pointer is None:
        return None
    if place.limit_pointer is None:
        return 1.0
    return _number_at(document, place.limit_pointer, "limit_pointer")


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
