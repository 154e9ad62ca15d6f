"""Keys that have too little for a request: no credit, or not so much at a time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.billing_upstream import Plan, Request
from gateway.gateway_service import (
    CHAT,
    CODEX,
    ENVIRON,
    LOOK_SECONDS,
    MESSAGES,
    OPENAI_KEY,
    RESPONSES,
    UPSTREAMS,
    GatewayService,
    error_of,
    gateway_service,
)
from gateway.test_gateway_faults import KEYS, SLOTS, TWO_UPSTREAMS, keyed
from headgate.core.gates import GatePart
from headgate.gateway import routing
from headgate.providers.provider import Shortage, shortage_of, told_to_others

TOO_LARGE = (
    "Request too large for gpt-5 in organization org-abcdefgh on tokens per min (TPM):"
    " Limit 30000, Requested 61337. The input or output tokens must be reduced in order to run"
    " successfully."
)
REACHED = (
    "Rate limit reached for gpt-5 in organization org-abcdefgh on tokens per min (TPM):"
    " Limit 30000, Used 29937, Requested 385. Please try again in 644ms."
)
NO_QUOTA = "You exceeded your current quota, please check your plan and billing details."
QUOTA_FIELDS = {"type": "insufficient_quota", "code": "insufficient_quota"}
LOW_BALANCE = (
    "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to"
    " upgrade or purchase credits."
)
FEWER_TOKENS = (
    "This request requires more credits, or fewer max_tokens. You requested up to 65536 tokens,"
    " but can only afford 3395."
)
OF_ONE_PROVIDER = {
    "code": 402,
    "metadata": {"provider_name": "DeepSeek", "raw": '{"error":"Insufficient Balance"}'},
}
"""How OpenRouter names whom it asked: that one has no credit, and its own account has."""

NO_CREDIT = (
    Plan(status=429, message=NO_QUOTA, error=QUOTA_FIELDS),
    Plan(status=402, message="Insufficient Balance"),
    Plan(status=400, message=LOW_BALANCE),
)


def big_only(plan: Plan) -> Any:
    """Have requests fail that are marked as big."""

    def decide(one: Request) -> Plan | None:
        return plan if b"BIG" in one.body else None

    return decide


async def closures(gateway: GatewayService) -> list[Any]:
    """Return what is closed, as operators see it."""
    found: list[Any] = (await gateway.client.get("/closures")).json()["closures"]
    return found


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_request_that_is_too_large_for_a_key_closes_it_for_nobody(
    tmp_path: Path, path: str
) -> None:
    async with gateway_service(tmp_path) as gateway:
        gateway.upstream.decide = big_only(Plan(status=429, message=TOO_LARGE))
        async with asyncio.timeout(5):
            answer = await gateway.ask(path, "BIG")
        assert answer.status_code == 413, answer.text
        assert answer.headers["x-should-retry"] == "false"
        assert "Request too large for gpt-5" in error_of(answer)["message"]
        assert not await closures(gateway)
        assert (await gateway.ask(path, "small")).status_code == 200
        assert not (await gateway.record(answer)).tokens


async def test_a_request_that_is_too_large_for_one_key_goes_to_the_next(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, upstreams=TWO_UPSTREAMS, environ=KEYS) as gateway:
        plan = Plan(status=429, message=TOO_LARGE)
        gateway.upstream.decide = lambda one: plan if one.model == "gpt-5" else None
        answer = await gateway.ask(CHAT, model="fast")
        assert answer.status_code == 200, answer.text
        assert gateway.upstream.bill[-1].model == "gpt-5-mini"


async def test_a_wait_for_a_rate_says_what_the_provider_said_and_not_of_whom(
    tmp_path: Path,
) -> None:
    async with gateway_service(tmp_path) as gateway:
        said = f"{REACHED} {OPENAI_KEY} " + "x" * 2_000
        gateway.upstream.script.append(Plan(status=429, retry_after="1", message=said))
        waiting = gateway.start(CHAT)
        await gateway.until(lambda: len(gateway.upstream.requests) == 1)
        await gateway.until_waiting()
        (live,) = gateway.calls.live()
        why = gateway.calls.why(live.id)
        assert why is not None
        message = why.reasons[0].message
        assert "tokens per min (TPM): Limit 30000" in message
        for hidden in (OPENAI_KEY, "org-abcdefgh", "Requested"):
            assert hidden not in message
        assert len(message) < 600
        assert (await waiting).status_code == 200


@pytest.mark.parametrize("plan", NO_CREDIT)
async def test_a_key_without_credit_is_closed_and_the_next_member_answers(
    tmp_path: Path, plan: Plan
) -> None:
    async with gateway_service(tmp_path, upstreams=TWO_UPSTREAMS, environ=KEYS) as gateway:
        gateway.upstream.account(KEYS["KEY_A"]).script.append(plan)
        for _ in range(2):
            answer = await gateway.ask(CHAT, model="fast")
            assert answer.status_code == 200, answer.text
        assert keyed(gateway.upstream, "KEY_A") == 1
        (closed,) = await closures(gateway)
        assert (closed["kind"], closed["cause"]) == ("target", "credit")
        assert plan.message in closed["why"]


async def test_a_slot_without_credit_is_closed_and_says_so(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
        plan = Plan(status=400, message=LOW_BALANCE)
        gateway.upstream.account(KEYS["KEY_A"]).script.append(plan)
        for _ in range(3):
            assert (await gateway.ask(MESSAGES)).status_code == 200
        assert keyed(gateway.upstream, "KEY_A") == 1
        shown = json.dumps((await gateway.client.get("/slots/a")).json())
        assert "credit balance is too low" in shown


@pytest.mark.parametrize("upstreams", [UPSTREAMS, SLOTS], ids=["key", "slots"])
async def test_a_provider_behind_an_upstream_without_credit_closes_nothing(
    tmp_path: Path, upstreams: str
) -> None:
    environ = {**ENVIRON, **KEYS}
    async with gateway_service(tmp_path, upstreams=upstreams, environ=environ) as gateway:
        plan = Plan(status=402, message="Provider returned error", error=OF_ONE_PROVIDER)
        gateway.upstream.decide = big_only(plan)
        path = MESSAGES if upstreams is SLOTS else CHAT
        refused = await gateway.ask(path, "BIG")
        assert refused.status_code == 402, refused.text
        assert refused.headers["x-should-retry"] == "false"
        assert "DeepSeek: Provider returned error" in error_of(refused)["message"]
        assert not await closures(gateway)
        async with asyncio.timeout(5):
            assert (await gateway.ask(path, "small")).status_code == 200


OF_PROVIDER = {"code": 429, "metadata": {"provider_name": "DeepSeek"}}
LIMITED_BEHIND = [
    (429, "2", {}, 2.0),
    (429, None, {}, routing.MAX_PROVIDER_PAUSE_SECONDS),
    (429, "3600", {}, routing.MAX_PROVIDER_PAUSE_SECONDS),
    (429, "2", {"anthropic-ratelimit-unified-status": "rejected"}, 2.0),
    (503, "2", {}, 2.0),
]


@pytest.mark.parametrize(("status", "retry_after", "headers", "seconds"), LIMITED_BEHIND)
async def test_a_limit_of_a_provider_behind_an_upstream_is_about_its_model_alone(
    tmp_path: Path, status: int, retry_after: str | None, headers: dict[str, str], seconds: float
) -> None:
    async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
        if headers:
            headers |= {"anthropic-ratelimit-unified-reset": str(int(time.time()) + 3_600)}
        plan = Plan(
            status=status,
            retry_after=retry_after,
            headers=headers,
            message="Provider returned error",
            error=OF_PROVIDER,
        )
        gateway.upstream.decide = lambda one: plan if one.model == "limited" else None
        waiting = gateway.start(MESSAGES, model="limited")
        await gateway.until(lambda: len(gateway.upstream.requests) == 2)
        await gateway.until_waiting()
        now = gateway.service.engine.now()
        for slot in ("a", "b"):
            pause = gateway.gateway.sessions.paused(slot, "limited", now)
            assert pause is not None
            assert seconds - 1 < pause.until - now <= seconds
            assert "DeepSeek: Provider returned error" in pause.why
            assert "resetsAt" not in (await gateway.client.get(f"/slots/{slot}")).json()
        assert not await closures(gateway)
        upstream = gateway.gateway._upstreams.get("anthropic")
        assert upstream is not None
        assert not upstream.limited_hits, "the next pause of a key is not longer for it"
        async with asyncio.timeout(1):
            assert (await gateway.ask(MESSAGES)).status_code == 200
        waiting.cancel()


@pytest.mark.parametrize("plan", NO_CREDIT)
async def test_where_no_key_has_credit_calls_are_refused_at_once(
    tmp_path: Path, plan: Plan
) -> None:
    async with gateway_service(tmp_path) as gateway:
        gateway.upstream.decide = lambda _: plan
        for client in ({}, CODEX):
            async with asyncio.timeout(5):
                answer = await gateway.ask(CHAT, headers=client)
            assert answer.status_code == (400 if client else 402), answer.text
            assert answer.headers["x-should-retry"] == "false"
            assert plan.message in error_of(answer)["message"]
        assert len(gateway.upstream.requests) == 1, "its key is closed"
        gateway.upstream.decide = lambda _: None
        (closed,) = await closures(gateway)
        opening = {"kind": "target", "name": closed["name"]}
        opened = await gateway.client.post("/closures/open", json=opening)
        assert opened.status_code == 200, opened.text
        assert (await gateway.ask(CHAT)).status_code == 200


async def test_a_key_that_is_opened_at_another_node_stays_open(tmp_path: Path) -> None:
    async with gateway_service(tmp_path) as gateway:
        gateway.upstream.script.append(NO_CREDIT[0])
        assert (await gateway.ask(CHAT)).status_code == 402
        (closed,) = await closures(gateway)
        engine = gateway.service.engine
        # What another node does, which does not decide.
        await engine.store.open_gate(GatePart("target", closed["name"]))
        engine.dispatcher.refresh()
        async with asyncio.timeout(5):
            while await closures(gateway):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
        engine.dispatcher._start_anew()
        assert (await gateway.ask(CHAT)).status_code == 200
        assert not await closures(gateway)


async def test_whoever_waits_for_a_key_is_refused_when_it_has_no_credit(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, inflight=1) as gateway:
        plan = Plan(status=429, message=NO_QUOTA, error=QUOTA_FIELDS, until="go")
        gateway.upstream.script.append(plan)
        first = gateway.start(CHAT)
        await gateway.until(lambda: len(gateway.upstream.requests) == 1)
        second = gateway.start(CHAT, "waits")
        await gateway.until_waiting()
        gateway.upstream.releases.add("go")
        for one in (first, second):
            async with asyncio.timeout(5):
                answer = await one
            assert answer.status_code == 402, answer.text
        assert len(gateway.upstream.requests) == 1


async def test_a_key_without_credit_is_tried_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "NO_CREDIT_SECONDS", 0.2)
    async with gateway_service(tmp_path) as gateway:
        gateway.upstream.script.append(NO_CREDIT[1])
        assert (await gateway.ask(CHAT)).status_code == 402
        async with asyncio.timeout(5):
            while await closures(gateway):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
        assert (await gateway.ask(CHAT)).status_code == 200


async def test_the_own_key_of_a_client_is_closed_for_nobody(tmp_path: Path) -> None:
    upstreams = UPSTREAMS.replace('key_env = "O_KEY"', "")
    async with gateway_service(tmp_path, upstreams=upstreams) as gateway:
        gateway.upstream.script.append(NO_CREDIT[0])
        own = {"authorization": "Bearer sk-own"}
        answer = await gateway.ask(CHAT, headers=own)
        assert answer.status_code == 402, answer.text
        assert not await closures(gateway)
        assert (await gateway.ask(CHAT, headers=own)).status_code == 200


async def test_a_field_that_is_named_like_an_error_closes_nothing(tmp_path: Path) -> None:
    async with gateway_service(tmp_path) as gateway:
        said = f"{LOW_BALANCE}: Extra inputs are not permitted"
        gateway.upstream.script.append(Plan(status=400, message=said))
        assert (await gateway.ask(CHAT)).status_code == 400
        assert not await closures(gateway)
        assert (await gateway.ask(CHAT)).status_code == 200


async def test_a_model_that_is_named_like_an_error_closes_nothing(tmp_path: Path) -> None:
    model = "Your credit balance is too low"
    async with gateway_service(tmp_path) as gateway:
        said = f"{model} is not a valid model ID"
        gateway.upstream.script.append(Plan(status=400, message=said))
        assert (await gateway.ask(CHAT, model=model)).status_code == 400
        assert not await closures(gateway)


SAID = [
    (429, {"type": "tokens", "code": "rate_limit_exceeded"}, TOO_LARGE, Shortage.REQUEST),
    (429, {"type": "tokens", "code": "rate_limit_exceeded"}, REACHED, None),
    (429, {}, "Limit: 6000, Requested: 6001", Shortage.REQUEST),
    (429, {}, "Extra usage is required for long context requests.", Shortage.REQUEST),
    (429, QUOTA_FIELDS, NO_QUOTA, Shortage.CREDIT),
    (429, {}, NO_QUOTA, Shortage.CREDIT),
    (429, {"code": 429, "status": "RESOURCE_EXHAUSTED"}, NO_QUOTA, None),
    (429, {"code": "1113"}, "Insufficient balance or no resource package", Shortage.CREDIT),
    (429, {"code": "1302"}, "High concurrency", None),
    (429, {}, "", None),
    (402, {}, "", Shortage.CREDIT),
    (402, {"code": "invalid_request_error"}, "Insufficient Balance", Shortage.CREDIT),
    (402, {"code": 402}, FEWER_TOKENS, Shortage.REQUEST),
    (402, OF_ONE_PROVIDER, "Provider returned error", Shortage.PROVIDER),
    (402, OF_ONE_PROVIDER, FEWER_TOKENS, Shortage.REQUEST),
    (402, {"code": 402, "metadata": {"provider_name": None}}, "", Shortage.CREDIT),
    (402, {"code": 402, "metadata": "DeepSeek"}, "", Shortage.CREDIT),
    (429, {**OF_ONE_PROVIDER, **QUOTA_FIELDS}, NO_QUOTA, Shortage.PROVIDER),
    (400, OF_ONE_PROVIDER, "Insufficient balance", Shortage.PROVIDER),
    (402, {"code": 402}, "Prompt tokens limit exceeded: 230799 > 91442.", Shortage.REQUEST),
    (402, {"code": "budget_exceeded"}, "Budget project:a has 5 left", Shortage.REQUEST),
    (400, {"type": "invalid_request_error"}, LOW_BALANCE, Shortage.CREDIT),
    (400, {"type": "invalid_request_error"}, "max_tokens: must be positive", None),
    (400, {}, "m: Your credit balance is too low", None),
    (400, {}, f"{LOW_BALANCE}: Extra inputs are not permitted", None),
    (400, {}, "Insufficient credits.0.x: Input should be a valid string", None),
    (403, {}, "Key limit exceeded: Extra inputs are not permitted", None),
    (400, {"code": "Arrearage"}, "Access denied", Shortage.CREDIT),
    (403, {"code": 403}, "Key limit exceeded (monthly limit).", Shortage.CREDIT),
    (403, {}, "Your API key does not have permission to use it", None),
    (401, QUOTA_FIELDS, NO_QUOTA, None),
    (500, QUOTA_FIELDS, NO_QUOTA, None),
]


@pytest.mark.parametrize(("status", "fields", "message", "shortage"), SAID)
def test_an_answer_tells_of_what_a_key_has_too_little(
    status: int, fields: dict[str, object], message: str, shortage: Shortage | None
) -> None:
    body = json.dumps({"error": {"message": message, **fields}}).encode()
    assert shortage_of(status, body, model="gpt-5") is shortage


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"error": "x"}', b'{"error": {"code": []}}'])
def test_an_answer_without_words_says_nothing_to_others(body: bytes) -> None:
    assert told_to_others(body) == ""
    assert shortage_of(429, body, model="gpt-5") is None
