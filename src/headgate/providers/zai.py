"""The coding plan of z.ai: an address tells the quota for nothing, a chat completion opens it.

The envelope of an answer has a code of its own, which counts as much as the status does. Times
in messages are those of Beijing, where they have no offset.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC

import msgspec

from headgate.core.key_slots.quota import QuotaFailure, QuotaReport, read_quota
from headgate.provider import Call, WakeAnswer
from headgate.providers.answers import asked
from headgate.providers.slot_client import Reply, SlotClient
from headgate.providers.slot_places import ProviderPlace, wake_content


class ZaiProvider:
    """Asks z.ai, or whoever answers as it does."""

    def __init__(self, place: ProviderPlace, *, clock: Callable[[], float]) -> None:
        self._place = place
        self._zone = place.zone or UTC
        self._clock = clock
        self._client = SlotClient(place, headers={"accept-language": "en-US"})

    async def read_quota(self, call: Call) -> QuotaReport | QuotaFailure:
        """Ask for the limits of the key, which uses up nothing."""
        reply = await self._asked(call, "GET", self._place.quota_url)
        if isinstance(reply, QuotaFailure):
            return reply
        document = self._client.document(reply, call)
        if isinstance(document, QuotaFailure):
            return document
        found = read_quota(document, self._zone)
        if isinstance(found, QuotaFailure):
            told = self._client.line(found.message, call)
            return msgspec.structs.replace(found, message=told)
        return found

    async def wake(self, call: Call) -> WakeAnswer:
        """Send one word, to be answered with one token."""
        body = wake_content(self._place)
        reply = await self._asked(call, "POST", self._place.request_url, body)
        return WakeAnswer(failure=reply if isinstance(reply, QuotaFailure) else None)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _asked(
        self, call: Call, method: str, url: str | None, body: bytes | None = None
    ) -> Reply | QuotaFailure:
        return await asked(
            self._client,
            call,
            method=method,
            url=url or "",
            body=body,
            zone=self._zone,
            clock=self._clock,
        )
