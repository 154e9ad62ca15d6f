"""Every way in which a provider can fail, over real HTTP: each is a value of its own kind."""

from __future__ import annotations

import asyncio
import ssl
from email.utils import formatdate

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executors.endpoint import free_port, reply, reply_json, running_endpoint
from executors.test_http import own_certificate
from headgate.core.slots.quota import QuotaFailure, QuotaFailureKind, QuotaReport
from headgate.providers.provider import RequestFailed, RequestSent, ResponseReceived, build_provider
from headgate.testing import FakeProvider
from headgate.testing.fake_provider import FakeKind
from providers.trails import (
    CLOCK,
    KEY,
    NOW,
    KeptTrail,
    call,
    endpoint_at,
    failure_of,
    faked,
    first_request,
    provider_at,
)

__all__ = ["own_certificate"]

NAMES = ("zai", "anthropic", "openai", "http-json")
every_provider = pytest.mark.parametrize("name", NAMES)

KINDS: list[tuple[FakeKind, QuotaFailureKind]] = [
    ("401", QuotaFailureKind.REFUSED),
    ("403", QuotaFailureKind.REFUSED),
    ("404", QuotaFailureKind.REJECTED),
    ("408", QuotaFailureKind.TIMEOUT),
    ("429", QuotaFailureKind.THROTTLED),
    ("500", QuotaFailureKind.SERVER_ERROR),
    ("503", QuotaFailureKind.SERVER_ERROR),
    ("exhausted", QuotaFailureKind.EXHAUSTED),
    ("garbage", QuotaFailureKind.GARBAGE),
    ("huge", QuotaFailureKind.GARBAGE),
    ("redirect", QuotaFailureKind.REJECTED),
    ("drop", QuotaFailureKind.UNREACHABLE),
]


def fake(**options: float) -> FakeProvider:
    return FakeProvider(clock=CLOCK, percent=options.get("percent", 0.0))


@every_provider
async def test_each_failure_has_its_kind_for_polls_and_wakes(name: str) -> None:
    provider = fake()
    async with faked(name, provider) as asked:
        for kind, expected in KINDS:
            provider.next(kind, times=2)
            found = await failure_of(asked)
            assert found.kind is expected, (kind, found)
            assert found.message, kind
            woken = await asked.wake(call())
            assert woken.failure is not None, kind
            assert (woken.failure.kind, woken.report) == (expected, None)


@every_provider
async def test_a_pause_is_told_as_it_was_asked_for(name: str) -> None:
    provider = fake()
    asked_for: list[tuple[str | int | None, float | None]] = [
        (120, 120.0),
        ("0.5", 0.5),
        (0, 0.0),
        (None, None),
        ("soon", None),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
    ]
    async with faked(name, provider) as asked:
        for sent, expected in asked_for:
            provider.next("429", retry_after=sent)
            found = await failure_of(asked)
            assert (found.kind, found.retry_after_seconds) == (QuotaFailureKind.THROTTLED, expected)


@every_provider
async def test_an_answer_that_does_not_come_is_a_timeout(name: str) -> None:
    provider = fake()
    async with faked(name, provider, timeout_seconds=0.1) as asked:
        provider.next("timeout")
        trail = KeptTrail()
        found = await failure_of(asked, trail)
    assert found.kind is QuotaFailureKind.TIMEOUT
    assert found.message == "the provider did not answer within 0.1 seconds"
    sent, failed = trail.told
    assert isinstance(sent, RequestSent)
    assert isinstance(failed, RequestFailed)
    assert (failed.flow_id, failed.error) == (sent.flow_id, found.message)
    assert 100 <= failed.duration_ms < 60_000


async def test_nobody_at_an_address_is_unreachable() -> None:
    async with provider_at("zai", f"http://127.0.0.1:{free_port()}") as asked:
        found = await failure_of(asked)
    assert found.kind is QuotaFailureKind.UNREACHABLE
    assert found.message.startswith("the provider cannot be reached: ")


async def test_a_certificate_that_nobody_vouches_for_is_told_apart(
    own_certificate: ssl.SSLContext,
) -> None:
    async with (
        running_endpoint(reply(200), context=own_certificate) as endpoint,
        provider_at("zai", f"https://127.0.0.1:{endpoint.port}") as asked,
    ):
        found = await failure_of(asked)
    assert found.kind is QuotaFailureKind.UNREACHABLE
    assert found.message.startswith("no secure connection to the provider: ")
    assert endpoint.seen == []


@pytest.mark.parametrize("status", [200, 429])
@pytest.mark.parametrize("code", [1308, 1310, 1316])
async def test_a_used_up_key_is_exhausted_whatever_the_status(status: int, code: int) -> None:
    body = b'{"error": {"code": "%d", "message": "Your limit will reset at 2026-01-01 13:00:00"}}'
    answer = reply(status, body % code, Retry_After="5")
    async with (
        running_endpoint(answer) as endpoint,
        provider_at("zai", endpoint.url) as asked,
    ):
        polled = await failure_of(asked)
        woken = await asked.wake(call())
    assert polled == woken.failure
    assert (polled.kind, polled.code) == (QuotaFailureKind.EXHAUSTED, code)
    # The provider writes the time of Beijing: 05:00 in UTC.
    assert polled.resets_at == NOW + 5 * 3_600


async def test_a_refusal_in_an_envelope_counts_as_one() -> None:
    body = b'{"code": 401, "msg": "token expired or incorrect", "success": false}'
    async with (
        running_endpoint(reply(200, body)) as endpoint,
        provider_at("zai", endpoint.url) as asked,
    ):
        polled = await failure_of(asked)
        woken = await asked.wake(call())
    assert polled.kind is QuotaFailureKind.REFUSED
    assert polled == woken.failure
    assert "token expired or incorrect" in polled.message


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("1001", QuotaFailureKind.REFUSED),
        ("1302", QuotaFailureKind.THROTTLED),
        ("1211", QuotaFailureKind.REJECTED),
        ("overloaded", QuotaFailureKind.REJECTED),
    ],
)
async def test_an_error_that_comes_as_a_success_is_an_error(
    code: str, kind: QuotaFailureKind
) -> None:
    answer = reply_json({"error": {"code": code, "message": "this is why"}})
    async with (
        running_endpoint(answer) as endpoint,
        provider_at("zai", endpoint.url) as asked,
    ):
        woken = await asked.wake(call())
    assert woken.failure is not None
    assert woken.failure.kind is kind
    assert woken.failure.message == "the provider answered with an error: this is why"


async def test_a_redirect_is_not_followed_and_says_where_it_leads() -> None:
    async with running_endpoint() as elsewhere:
        location = f"http://user:pass@127.0.0.1:{elsewhere.port}/login?token=abcdef"
        async with (
            running_endpoint(reply(302, Location=location)) as endpoint,
            provider_at("zai", endpoint.url) as asked,
        ):
            found = await failure_of(asked)
    assert elsewhere.seen == []
    assert "it points to http://127.0.0.1/login, and redirects are not followed" in found.message
    assert "abcdef" not in found.message
    assert "pass" not in found.message


async def test_an_answer_in_the_wrong_shape_says_what_is_wrong() -> None:
    provider = fake()
    async with faked("zai", provider) as asked:
        provider.next("wrong-shape")
        found = await failure_of(asked)
    assert found.kind is QuotaFailureKind.GARBAGE
    assert "limits" in found.message


async def test_a_key_that_no_header_can_carry_is_refused_without_a_request() -> None:
    provider = fake()
    async with faked("zai", provider) as asked:
        for key in ("", "with\nline", "clé", " spaced "):
            trail = KeptTrail()
            found = await asked.read_quota(call(trail, key))
            assert getattr(found, "kind", None) is QuotaFailureKind.REFUSED
            assert trail.told == []
    assert not provider.seen


async def test_a_call_that_is_cancelled_is_told_and_stays_cancelled() -> None:
    provider = fake()
    trail = KeptTrail()
    async with faked("zai", provider) as asked:
        provider.next("timeout")
        task = asyncio.create_task(asked.read_quota(call(trail)))
        await first_request(provider)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert isinstance(trail.told[-1], RequestFailed)


async def test_the_trail_sees_a_request_before_it_leaves_and_its_answer() -> None:
    provider = fake()
    trail = KeptTrail()
    async with faked("zai", provider) as asked:
        provider.next("503", message="down for today")
        await asked.wake(call(trail))
    sent, answered = trail.told
    assert isinstance(sent, RequestSent)
    assert isinstance(answered, ResponseReceived)
    endpoint = endpoint_at("zai", provider.address)
    assert sent.url == f"{endpoint.base_url}/api/coding/paas/v4/chat/completions"
    assert (sent.method, sent.action, sent.flow_id) == ("POST", "background-quota-poll", "f-1")
    assert '"max_tokens":1' in (sent.body or "")
    assert (answered.status, answered.flow_id) == (503, sent.flow_id)
    assert "down for today" in (answered.body or "")
    assert answered.duration_ms >= 0
    assert KEY not in trail.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("code", "error", "type", "message", "msg", "success", "data", "limits", "quota")
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(document=json_values, status=st.sampled_from([200, 204, 400, 429, 500]))
@settings(deadline=None, max_examples=60)
def test_no_document_raises_out_of_a_provider(document: object, status: int) -> None:
    async def ask() -> None:
        async with running_endpoint(reply(status, msgspec.json.encode(document))) as endpoint:
            for name in NAMES:
                async with provider_at(name, endpoint.url) as provider:
                    await provider.read_quota(call())
                    await provider.wake(call())

    asyncio.run(ask())


@every_provider
@pytest.mark.parametrize("code", [[1], {"a": 1}, None, True, "insufficient_quota"])
async def test_a_code_may_be_anything(name: str, code: object) -> None:
    for document in ({"code": code}, {"error": {"code": code}}):
        found = await _failure_after(name, reply_json(document, status=400))
        used_up = code == "insufficient_quota"
        assert (found.kind is QuotaFailureKind.EXHAUSTED) == used_up


@every_provider
@pytest.mark.parametrize("status", [200, 202, 204])
async def test_a_wake_that_is_answered_with_nothing_was_carried_out(name: str, status: int) -> None:
    async with running_endpoint(reply(status)) as endpoint:
        provider = build_provider(name, endpoint_at(name, endpoint.url), clock=CLOCK)
        woken = await provider.wake(call())
        found = await failure_of(provider)
        await provider.close()
    assert woken.failure is None
    assert found.kind is QuotaFailureKind.GARBAGE


async def test_headers_tell_a_quota_whatever_the_body_is() -> None:
    headers = {"anthropic-ratelimit-unified-5h-utilization": "0.07"}
    async with running_endpoint(reply(200, b"ok", **headers)) as endpoint:
        url = f"{endpoint.url}/quota"
        async with provider_at("anthropic", endpoint.url, quota_url=url) as provider:
            found = await provider.read_quota(call())
    assert isinstance(found, QuotaReport)
    assert found.limits[0].percentage == pytest.approx(7)


@pytest.mark.parametrize("coding", ["gzip", "gzip, gzip", "br"])
async def test_an_answer_that_cannot_be_decoded_is_garbage(coding: str) -> None:
    found = await _failure_after("zai", reply(200, b"{}", Content_Encoding=coding))
    assert found.kind is QuotaFailureKind.GARBAGE
    assert found.message.startswith("the answer cannot be read: it")


@pytest.mark.parametrize("name", ["zai", "http-json"])
async def test_a_quota_in_a_body_needs_json(name: str) -> None:
    found = await _failure_after(name, reply(200, b"ok"))
    assert found.kind is QuotaFailureKind.GARBAGE
    assert found.message.startswith("the answer is not JSON: ok")


async def _failure_after(name: str, answer: bytes) -> QuotaFailure:
    async with running_endpoint(answer) as endpoint:
        provider = build_provider(name, endpoint_at(name, endpoint.url), clock=CLOCK)
        found = await failure_of(provider)
        await provider.close()
    return found
