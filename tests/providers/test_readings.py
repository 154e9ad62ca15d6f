"""What providers read of a key that is cold, warm and used up, and what they send for it."""

from __future__ import annotations

import pytest

from executors.endpoint import reply, reply_json, running_endpoint
from headgate.core.slots.quota import (
    CREDIT_LIMIT,
    RATE_LIMIT,
    TOKENS_LIMIT,
    QuotaFailureKind,
    QuotaLimit,
    QuotaReport,
    driving_limit,
)
from headgate.providers.provider import Provider
from headgate.testing import FakeProvider
from providers.trails import CLOCK, KEY, NOW, call, failure_of, faked, provider_at, report_of

FIVE_HOURS_MS = 5 * 3_600_000
NOW_MS = round(NOW * 1_000)
JSON_NAMES = ("zai", "http-json")
HEADER_NAMES = ("anthropic", "openai")


async def driving(provider: Provider) -> QuotaLimit:
    row = driving_limit(await report_of(provider))
    assert isinstance(row, QuotaLimit), row
    return row


@pytest.mark.parametrize("name", JSON_NAMES)
async def test_a_poll_leaves_a_cold_key_cold_and_a_wake_opens_a_window(name: str) -> None:
    fake = FakeProvider(clock=CLOCK)
    async with faked(name, fake) as provider:
        cold = await driving(provider)
        assert (cold.next_reset_epoch_ms, cold.percent_used) == (None, 0)
        assert (await provider.wake(call())).failure is None
        warm = await driving(provider)
    assert warm.next_reset_epoch_ms == NOW_MS + FIVE_HOURS_MS
    assert warm.percent_used == 1
    assert (len(fake.requests("quota")), len(fake.requests("request"))) == (2, 1)


@pytest.mark.parametrize("name", HEADER_NAMES)
async def test_where_headers_tell_the_quota_a_poll_is_a_request_and_a_wake_a_reading(
    name: str,
) -> None:
    fake = FakeProvider(clock=CLOCK, percent=41)
    async with faked(name, fake) as provider:
        polled = await driving(provider)
        woken = await provider.wake(call())
    assert polled.percent_used == pytest.approx(42)
    assert polled.next_reset_epoch_ms == NOW_MS + FIVE_HOURS_MS
    assert woken.report is not None
    row = driving_limit(woken.report)
    assert isinstance(row, QuotaLimit)
    assert row.percent_used == pytest.approx(43)
    assert len(fake.requests("request")) == 2


async def test_the_rows_of_zai_are_all_kept_and_the_tokens_row_drives() -> None:
    async with faked("zai", FakeProvider(clock=CLOCK)) as provider:
        report = await report_of(provider)
    assert [row.type for row in report.limits] == ["TIME_LIMIT", TOKENS_LIMIT]
    assert report.level == "pro"
    assert report.limits[0].next_reset_epoch_ms is not None


async def test_credits_are_read_as_tokens_are() -> None:
    fake = FakeProvider(clock=CLOCK, has_credits=True, is_warm=True)
    async with faked("zai", fake) as provider:
        row = await driving(provider)
    assert (row.type, row.unit) == (CREDIT_LIMIT, 3)
    assert row.next_reset_epoch_ms == NOW_MS + FIVE_HOURS_MS


@pytest.mark.parametrize("name", [*JSON_NAMES, *HEADER_NAMES])
async def test_a_wake_of_a_used_up_key_says_that_it_is(name: str) -> None:
    fake = FakeProvider(clock=CLOCK, percent=100, is_warm=True)
    async with faked(name, fake) as provider:
        failure = (await provider.wake(call())).failure
    assert failure is not None
    assert failure.kind is QuotaFailureKind.EXHAUSTED
    expected = NOW + 5 * 3_600 if name in ("zai", "anthropic") else None
    assert failure.resets_at == expected


async def test_what_zai_is_sent() -> None:
    async with (
        running_endpoint(reply_json({})) as endpoint,
        provider_at("zai", endpoint.url) as provider,
    ):
        await provider.read_quota(call())
        await provider.wake(call())
    quota, wake = endpoint.seen
    assert (quota.method, quota.path) == ("GET", "/api/monitor/usage/quota/limit")
    assert quota.headers["authorization"] == f"Bearer {KEY}"
    assert quota.headers["accept-language"] == "en-US"
    assert quota.headers["content-type"] == "application/json"
    assert (wake.method, wake.path) == ("POST", "/api/coding/paas/v4/chat/completions")
    assert wake.json["max_tokens"] == 1
    assert wake.json["model"] == "glm-4-flash"
    assert len(wake.json["messages"][0]["content"].split()) == 1


async def test_what_anthropic_is_sent() -> None:
    async with (
        running_endpoint(reply_json({})) as endpoint,
        provider_at("anthropic", endpoint.url, model="a-model") as provider,
    ):
        await provider.wake(call())
    [wake] = endpoint.seen
    assert (wake.method, wake.path) == ("POST", "/v1/messages")
    assert wake.headers["x-api-key"] == KEY
    assert wake.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in wake.headers
    assert (wake.json["model"], wake.json["max_tokens"]) == ("a-model", 1)


async def test_a_configured_header_with_the_key_replaces_the_default_one() -> None:
    headers = {"Authorization": "Bearer {key}", "X-Team": "blue"}
    async with (
        running_endpoint(reply_json({})) as endpoint,
        provider_at("anthropic", endpoint.url, headers=headers) as provider,
    ):
        await provider.wake(call())
    [wake] = endpoint.seen
    assert wake.headers["authorization"] == f"Bearer {KEY}"
    assert wake.headers["x-team"] == "blue"
    assert "x-api-key" not in wake.headers


@pytest.mark.parametrize("name", ["zai", "anthropic", "openai", "http-json"])
async def test_a_configured_body_is_sent_as_it_is(name: str) -> None:
    body = '{"model": "x",  "input": "hi", "max_output_tokens": 16}'
    async with running_endpoint(reply_json({})) as endpoint:
        fields = {"request_url": f"{endpoint.url}/own?path=1", "wake_body": body}
        async with provider_at(name, endpoint.url, **fields) as provider:
            await provider.wake(call())
    [wake] = endpoint.seen
    assert (wake.path, wake.body.decode()) == ("/own?path=1", body)


async def test_headers_may_be_read_at_an_address_that_costs_nothing() -> None:
    headers = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "45"}
    answer = reply(200, b"[]", **headers)
    async with running_endpoint(answer) as endpoint:
        fields = {"quota_url": f"{endpoint.url}/v1/models"}
        async with provider_at("openai", endpoint.url, **fields) as provider:
            report = await report_of(provider)
    [seen] = endpoint.seen
    assert (seen.method, seen.path, seen.body) == ("GET", "/v1/models", b"")
    assert report == QuotaReport(
        limits=(
            QuotaLimit(type=RATE_LIMIT, unit="requests", usage=60, remaining=45, current_value=15),
        )
    )


@pytest.mark.parametrize("name", HEADER_NAMES)
async def test_an_answer_without_the_headers_tells_no_quota_but_is_a_wake(name: str) -> None:
    async with (
        running_endpoint(reply_json({})) as endpoint,
        provider_at(name, endpoint.url) as provider,
    ):
        failure = await failure_of(provider)
        woken = await provider.wake(call())
    assert failure.kind is QuotaFailureKind.GARBAGE
    assert "ratelimit-" in failure.message
    assert (woken.failure, woken.report) == (None, None)


POINTED: list[tuple[object, dict[str, str], float | None, float | None]] = [
    # answer                                   pointers                       percent   reset
    ({"p": 42},                                {"percent_pointer": "/p"},        42.0, None),
    ({"p": "42.5%"},                           {"percent_pointer": "/p"},        42.5, None),
    ({"p": None},                              {"percent_pointer": "/p"},        None, None),
    ({"a": [{"b/c": 7}]},                      {"percent_pointer": "/a/0/b~1c"},  7.0, None),
    (7,                                        {"percent_pointer": ""},           7.0, None),
    ({"u": 0.25},                              {"used_pointer": "/u"},           25.0, None),
    ({"u": 30, "l": 120},                      {"used_pointer": "/u", "limit_pointer": "/l"},
                                                                                 25.0, None),
    ({"u": 30, "l": 0},                        {"used_pointer": "/u", "limit_pointer": "/l"},
                                                                                 None, None),
    ({"p": 1, "r": NOW + 60},                  {"percent_pointer": "/p", "reset_pointer": "/r"},
                                                                                  1.0, NOW + 60),
    ({"p": 1, "r": None},                      {"percent_pointer": "/p", "reset_pointer": "/r"},
                                                                                  1.0, None),
    ({"p": 1},                                 {"percent_pointer": "/p", "reset_pointer": "/r"},
                                                                                  1.0, None),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "pointers", "percent", "resets_at"), POINTED)
async def test_pointers_find_the_figures(
    answer: object, pointers: dict[str, str], percent: float | None, resets_at: float | None
) -> None:
    none = {"percent_pointer": None, "reset_pointer": None}
    async with (
        running_endpoint(reply_json(answer)) as endpoint,
        provider_at("http-json", endpoint.url, **{**none, **pointers}) as provider,
    ):
        row = await driving(provider)
    assert row.percent_used == percent
    assert row.next_reset_epoch_ms == (None if resets_at is None else round(resets_at * 1_000))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({}, "it has nothing at '/p' (percent_pointer)"),
        ({"p": True}, "what is at '/p' (percent_pointer) is no number"),
        ({"p": "many"}, "what is at '/p' (percent_pointer) is no number"),
        ({"p": -1}, "what is at '/p' (percent_pointer) is no number"),
        ({"p": 1, "r": "soon"}, "what is at '/r' (reset_pointer) is no time"),
        ({"p": 1, "r": []}, "what is at '/r' (reset_pointer) is no time"),
    ],
)
async def test_what_pointers_do_not_find_is_named(answer: object, problem: str) -> None:
    fields = {"percent_pointer": "/p", "reset_pointer": "/r"}
    async with (
        running_endpoint(reply_json(answer)) as endpoint,
        provider_at("http-json", endpoint.url, **fields) as provider,
    ):
        found = await failure_of(provider)
    assert found.kind is QuotaFailureKind.GARBAGE
    assert problem in found.message


async def test_an_answer_of_unfathomable_depth_is_garbage() -> None:
    body = b"[" * 30_000 + b"]" * 30_000
    async with (
        running_endpoint(reply(200, body)) as endpoint,
        provider_at("zai", endpoint.url) as provider,
    ):
        found = await failure_of(provider)
    assert found.kind is QuotaFailureKind.GARBAGE
    assert len(found.message) <= 500


async def test_a_closed_provider_can_be_asked_again() -> None:
    fake = FakeProvider(clock=CLOCK)
    async with faked("zai", fake) as provider:
        await provider.close()
        first = await report_of(provider)
        await provider.close()
        assert await report_of(provider) == first
