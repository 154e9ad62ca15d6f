"""No key is told to anybody: not to the trail, not in a failure, not in a reading."""

from __future__ import annotations

import asyncio
import string
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executors.endpoint import reply, running_endpoint
from headgate.providers.provider import build_provider
from headgate.testing import FakeProvider
from providers.trails import (
    CLOCK,
    KEY,
    KeptTrail,
    call,
    endpoint_at,
    failure_of,
    faked,
    provider_at,
)

keys = st.text(string.ascii_letters + string.digits + "-_./+=~:\"'\\%&", min_size=8, max_size=60)
statuses = st.sampled_from([200, 302, 400, 401, 403, 408, 429, 500, 503])
names = st.sampled_from(["zai", "anthropic", "openai", "http-json"])


def answers(key: str, status: int, shape: int) -> bytes:
    """Write an answer that has the key in it, wherever a text may be."""
    document: object = [
        {
            "code": status,
            "msg": f"bad key {key} third-one other-secret-value",
            "success": False,
            key: key,
        },
        {"error": {"code": key, "message": f"Authorization: Bearer {key}"}},
        {"code": 200, "success": True, "data": {"level": key, "limits": [{"type": key}, {key: 1}]}},
        {"error": {"code": "1316", "message": f"{key} until 2026-02-01 00:00:00"}},
        {"quota": {"percent": key, "resetsAt": key}},
    ][shape % 5]
    body = f"<b>{key}</b>".encode() if shape == 5 else msgspec.json.encode(document)
    location = f"https://user:{quote(key)}@example.com/{quote(key)}?key={quote(key)}"
    return reply(status, body, Location=location, X_Echo=key)


@given(key=keys, status=statuses, shape=st.integers(0, 5), name=names)
@settings(deadline=None, max_examples=60)
def test_a_key_that_comes_back_is_told_to_nobody(
    key: str, status: int, shape: int, name: str
) -> None:
    async def ask() -> None:
        trail = KeptTrail()
        async with running_endpoint(answers(key, status, shape)) as endpoint:
            headers = {"x-one": "{key}", "x-token": "other-secret-value", "x-two": "third-one"}
            asked = endpoint_at(name, endpoint.url, headers=headers, secrets=("third-one",))
            provider = build_provider(name, asked, clock=CLOCK)
            try:
                found = await provider.read_quota(call(trail, key))
                woken = await provider.wake(call(trail, key))
            finally:
                await provider.close()
        told = trail.text + msgspec.json.encode((found, woken)).decode()
        for form in {key, quote(key), quote(key, safe=""), msgspec.json.encode(key).decode()[1:-1]}:
            assert form not in told
        assert "other-secret-value" not in told
        assert "third-one" not in told
        assert len(trail.told) == 4

    asyncio.run(ask())


async def test_a_key_in_an_address_is_not_shown() -> None:
    async with running_endpoint(reply(200, b"{}")) as endpoint:
        url = f"{endpoint.url}/quota?api_key={KEY}&k=another-secret&page=2"
        trail = KeptTrail()
        async with provider_at("http-json", endpoint.url, quota_url=url) as provider:
            await provider.read_quota(call(trail, KEY))
    assert endpoint.seen[0].path.endswith("&page=2")
    assert KEY in endpoint.seen[0].path
    assert KEY not in trail.text
    assert "another-secret" not in trail.text
    # Any parameter may be a secret, whatever it is called.
    assert "page=***" in trail.text


@pytest.mark.parametrize("kind", ["drop", "timeout", "huge", "redirect"])
async def test_a_request_without_an_answer_is_told_without_the_key(kind: str) -> None:
    fake = FakeProvider(clock=CLOCK)
    trail = KeptTrail()
    async with faked("zai", fake, timeout_seconds=0.2) as provider:
        fake.next(kind, message=KEY)  # type: ignore[arg-type]
        found = await failure_of(provider, trail)
    assert KEY not in trail.text
    assert KEY not in found.message
    assert "authorization" not in trail.text.lower()


async def test_a_long_body_is_cut_only_after_its_secrets_are_taken_out() -> None:
    # The key lies across the point at which what is told of a body ends.
    body = b"x" * 4_090 + KEY.encode() + b"x" * 100
    async with running_endpoint(reply(500, body)) as endpoint:
        trail = KeptTrail()
        async with provider_at("zai", endpoint.url) as provider:
            found = await failure_of(provider, trail)
    assert KEY[:6] not in trail.text
    assert len(found.message) <= 600
