"""A response that a provider keeps is asked for where it is, with the key that made it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.billing_upstream import BillingUpstream, Plan
from gateway.gateway_service import RESPONSES, GatewayService, error_of, gateway_service, usd
from headgate.gateway.gateway import StoredResponses

KEYS = {"ONE_KEY": "sk-of-organization-one", "TWO_KEY": "sk-of-organization-two"}
NAMES = {key: name for name, key in zip(("one", "two"), KEYS.values(), strict=True)}
SLOTS = """
[[slots]]
name = "one"
provider = "openai"
base_url = "{openai_url}"
key_env = "ONE_KEY"

[[slots]]
name = "two"
provider = "openai"
base_url = "{openai_url}"
key_env = "TWO_KEY"

[projects.a]
[budgets."project:a"]
limit_usd = "500"
"""
HOUSE = """
[upstreams.house]
kind = "openai"
base_url = "{openai_url}"
slots = ["one", "two"]
"""
TWO_UPSTREAMS = """
[upstreams.first]
kind = "openai"
base_url = "{openai_url}"
key_env = "ONE_KEY"

[upstreams.second]
kind = "openai"
base_url = "{openai_url}"
slots = ["two"]

[models.either]
route = ["first/gpt-5", "second/gpt-5"]

[models.other]
route = ["second/gpt-5", "first/gpt-5"]
"""


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[GatewayService]:
    async with gateway_service(folder, upstreams=SLOTS + HOUSE, environ=KEYS) as gateway:
        yield gateway


def sent_with(gateway: GatewayService) -> list[str]:
    """Return the slots whose keys were sent, the first request first."""
    return [NAMES[one.key] for one in gateway.upstream.requests]


async def made_with(gateway: GatewayService, slot: str) -> str:
    """Have a response made with a key, and return its id."""
    other = "two" if slot == "one" else "one"
    await gateway.client.post(f"/slots/{other}/disable")
    answer = await gateway.ask(RESPONSES)
    assert answer.status_code == 200, answer.text
    await gateway.client.post(f"/slots/{other}/enable")
    assert sent_with(gateway)[-1] == slot
    return str(answer.json()["id"])


@pytest.mark.parametrize("is_remembered", [True, False])
@pytest.mark.parametrize("slot", ["one", "two"])
async def test_what_names_a_stored_response_goes_with_the_key_that_made_it(
    tmp_path: Path, slot: str, is_remembered: bool
) -> None:
    async with house(tmp_path) as gateway:
        response_id = await made_with(gateway, slot)
        if not is_remembered:
            await gateway.calls.settled(seconds=20.0)
            gateway.gateway._stored = StoredResponses()
        for number in range(3):
            answer = await gateway.ask(RESPONSES, f"{number}", previous_response_id=response_id)
            assert answer.status_code == 200, answer.text
            record = await gateway.record(answer)
            assert record.slot == slot
            assert "the response that the call names" in record.key_rule
        path = f"{RESPONSES}/{response_id}"
        assert (await gateway.client.get(path)).status_code == 200
        assert (await gateway.client.delete(path)).status_code == 200
        assert set(sent_with(gateway)) == {slot}


async def test_a_call_waits_for_the_key_that_keeps_its_response(tmp_path: Path) -> None:
    async with house(tmp_path) as gateway:
        response_id = await made_with(gateway, "two")
        await gateway.client.post("/slots/two/disable")
        path = f"{RESPONSES}/{response_id}"
        waiting = gateway.start(RESPONSES, previous_response_id=response_id)
        shown = asyncio.create_task(gateway.client.get(path))
        await gateway.until_waiting(2)
        for live in gateway.calls.live():
            why = gateway.calls.why(live.id)
            assert why is not None
            assert "two" in why.reasons[0].message
        assert (await gateway.ask(RESPONSES, "another")).status_code == 200
        assert sent_with(gateway)[-1] == "one", "others are not kept waiting"
        await gateway.client.post("/slots/two/enable")
        assert (await waiting).status_code == 200
        assert (await shown).status_code == 200


async def test_a_call_waits_while_its_key_has_nothing_left_for_the_model(tmp_path: Path) -> None:
    async with house(tmp_path) as gateway:
        response_id = await made_with(gateway, "one")
        gateway.upstream.account(KEYS["ONE_KEY"]).fail(429, retry_after="1")
        answer = await gateway.ask(RESPONSES, previous_response_id=response_id)
        assert answer.status_code == 200, answer.text
        assert sent_with(gateway) == ["one", "one", "one"]


async def test_a_key_that_fails_has_a_follow_up_tried_with_no_other(tmp_path: Path) -> None:
    async with house(tmp_path) as gateway:
        response_id = await made_with(gateway, "one")
        for status, told in ((500, 502), (403, 403)):
            gateway.upstream.account(KEYS["ONE_KEY"]).fail(status)
            answer = await gateway.ask(RESPONSES, previous_response_id=response_id)
            assert answer.status_code == told, answer.text
        gateway.upstream.script.append(Plan(status=402, message="Insufficient Balance"))
        for _ in range(2):
            answer = await gateway.ask(RESPONSES, previous_response_id=response_id)
            assert answer.status_code == 402, answer.text
            assert "no key that works" in error_of(answer)["message"] or "answer" in answer.text
        assert set(sent_with(gateway)) == {"one"}


async def test_a_response_in_the_background_is_corrected_by_its_own_key(tmp_path: Path) -> None:
    async with house(tmp_path) as gateway:
        await gateway.client.post("/slots/one/disable")
        asked: dict[str, Any] = {"background": True, "max_output_tokens": 1_000}
        queued = await gateway.ask(f"/p/a{RESPONSES}", **asked)
        assert queued.json()["status"] == "queued"
        assert (await gateway.record(queued)).assumed_tokens
        await gateway.client.post("/slots/one/enable")
        shown = await gateway.client.get(f"/p/a{RESPONSES}/{queued.json()['id']}")
        assert shown.status_code == 200, shown.text
        status = await gateway.status("project:a")
        billed = gateway.upstream.bill
        assert usd(float(status["reservedUsd"])) == 0
        assert usd(float(status["spentUsd"])) == sum(
            one.input_tokens + 2 * one.output_tokens for one in billed
        )


async def test_a_response_is_asked_for_at_the_upstream_that_keeps_it(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, upstreams=SLOTS + TWO_UPSTREAMS, environ=KEYS) as gateway:
        made = await gateway.ask(RESPONSES, model="other")
        assert (await gateway.record(made)).upstream == "second"
        response_id = made.json()["id"]
        answer = await gateway.ask(RESPONSES, model="either", previous_response_id=response_id)
        assert answer.status_code == 200, answer.text
        assert (await gateway.record(answer)).upstream == "second"
        path = f"{RESPONSES}/{response_id}"
        assert (await gateway.client.get(path)).status_code == 200
        assert (await gateway.client.delete(path)).status_code == 200
        assert set(sent_with(gateway)) == {"two"}


async def test_a_key_that_is_taken_out_keeps_nobody_waiting(tmp_path: Path) -> None:
    upstream = BillingUpstream()
    async with gateway_service(
        tmp_path, upstreams=SLOTS + HOUSE, environ=KEYS, upstream=upstream
    ) as gateway:
        response_id = await made_with(gateway, "two")
        await gateway.client.post("/slots/two/disable")
        waiting = gateway.start(RESPONSES, previous_response_id=response_id)
        await gateway.until_waiting()
        path = tmp_path / "headgate.toml"
        path.write_text(path.read_text().replace('["one", "two"]', '["one"]'))
        assert (await gateway.client.post("/scheduler/reload")).status_code == 200
        refused: httpx2.Response = await waiting
        assert refused.status_code == 503, refused.text
        assert "slot 'two'" in error_of(refused)["message"]
        later = await gateway.ask(RESPONSES, previous_response_id=response_id)
        assert later.status_code == 400, "its provider says that it does not know the response"
