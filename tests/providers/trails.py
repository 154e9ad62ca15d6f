"""A trail that keeps what it is shown, and calls that are shown to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from headgate.core.slots.quota import QuotaFailure, QuotaReport
from headgate.providers.endpoints import ProviderEndpoint
from headgate.providers.provider import (
    Call,
    Provider,
    RequestFailed,
    RequestSent,
    ResponseReceived,
    build_provider,
)
from headgate.testing import FakeProvider, VirtualClock

KEY = "sk-test-0123456789abcdef"
CLOCK = VirtualClock()
NOW = CLOCK()

HTTP_JSON_POINTERS = {"percent_pointer": "/quota/percent", "reset_pointer": "/quota/resetsAt"}


class KeptTrail:
    """Keeps everything, in its order."""

    def __init__(self) -> None:
        self.told: list[RequestSent | ResponseReceived | RequestFailed] = []

    def sent(self, request: RequestSent) -> None:
        self.told.append(request)

    def received(self, response: ResponseReceived) -> None:
        self.told.append(response)

    def failed(self, failure: RequestFailed) -> None:
        self.told.append(failure)

    @property
    def text(self) -> str:
        return msgspec.json.encode(self.told).decode()


def call(trail: KeptTrail | None = None, key: str = KEY) -> Call:
    return Call(key=key, action="background-quota-poll", flow_id="f-1", trail=trail or KeptTrail())


def endpoint_at(name: str, address: str, **fields: object) -> ProviderEndpoint:
    """Return the endpoint of a fake provider, for a provider of this name."""
    given: dict[str, object] = {"base_url": address, "timeout_seconds": 5.0}
    if name == "http-json":
        given |= HTTP_JSON_POINTERS
        given |= {"quota_url": f"{address}/quota", "model": "any"}
        given |= {"request_url": f"{address}/v1/chat/completions"}
    return msgspec.convert(given | fields, ProviderEndpoint)


@asynccontextmanager
async def provider_at(name: str, address: str, **fields: object) -> AsyncIterator[Provider]:
    """Give a provider that asks at an address, by the clock of the tests."""
    provider = build_provider(name, endpoint_at(name, address, **fields), clock=CLOCK)
    try:
        yield provider
    finally:
        await provider.close()


@asynccontextmanager
async def faked(name: str, fake: FakeProvider, **fields: object) -> AsyncIterator[Provider]:
    """Give a provider that asks a fake one."""
    async with fake, provider_at(name, fake.address, **fields) as provider:
        yield provider


async def failure_of(provider: Provider, trail: KeptTrail | None = None) -> QuotaFailure:
    found = await provider.read_quota(call(trail))
    assert isinstance(found, QuotaFailure), found
    return found


async def report_of(provider: Provider) -> QuotaReport:
    found = await provider.read_quota(call())
    assert isinstance(found, QuotaReport), found
    return found


async def first_request(fake: FakeProvider) -> None:
    """Wait until somebody has asked."""
    async with asyncio.timeout(10):
        while not fake.seen:  # noqa: ASYNC110 - it comes from another connection
            await asyncio.sleep(0.001)
