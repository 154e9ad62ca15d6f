"""Keys that a provider refuses: which answer disables a slot, and where the call goes then."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.billing_upstream import BillingUpstream, Plan
from gateway.gateway_service import (
    ANTHROPIC_VERSION,
    CHAT,
    MESSAGES,
    GatewayService,
    asking,
    error_of,
    gateway_service,
)
from gateway.test_task_calls import ended
from headgate.engine.slots.slot import KeySlot
from headgate.errors import StoreUnavailableError
from headgate.providers.provider import refuses_key

KEYS = {"FIRST_KEY": "wrong-key-of-first", "SECOND_KEY": "good-key-of-second"}
SLOTS = """
[[slots]]
name = "first"
provider = "anthropic"
base_url = "{url}"
key_env = "FIRST_KEY"

[[slots]]
name = "second"
provider = "anthropic"
base_url = "{url}"
key_env = "SECOND_KEY"

[upstreams.house]
kind = "anthropic"
base_url = "{url}"
slots = ["first", "second"]
"""


async def states(gateway: GatewayService) -> dict[str, str]:
    found = (await gateway.client.get("/slots")).json()["slots"]
    return {one["name"]: one["state"] for one in found}


def sent_with(gateway: GatewayService, variable: str) -> int:
    return sum(one.key == KEYS[variable] for one in gateway.upstream.requests)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_refused_key_disables_its_slot_and_the_call_goes_on_with_the_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], is_stream: bool
) -> None:
    async def scenario() -> None:
        upstream = BillingUpstream(KEYS["SECOND_KEY"])
        async with gateway_service(
            tmp_path, upstreams=SLOTS, environ=KEYS, upstream=upstream
        ) as gateway:
            for _ in range(3):
                answer = await gateway.ask(MESSAGES, is_stream=is_stream)
                assert answer.status_code == 200, answer.text
                assert (await gateway.record(answer)).slot == "second"
            assert sent_with(gateway, "FIRST_KEY") == 1
            shown = (await gateway.client.get("/slots/first")).json()
            assert shown["state"] == "disabled"
            assert "FIRST_KEY" in json.dumps(shown)
            assert len(gateway.upstream.bill) == 3

    asyncio.run(scenario())
    printed = "".join(capfd.readouterr())
    said = [line for line in printed.splitlines() if "auto-disabled" in line]
    assert len(said) == 1
    assert "slot first" in said[0]
    assert "FIRST_KEY" in said[0]
    assert KEYS["FIRST_KEY"] not in printed


def test_a_client_is_told_of_every_slot_once_no_key_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        upstream = BillingUpstream("another-key")
        async with gateway_service(
            tmp_path, upstreams=SLOTS, environ=KEYS, upstream=upstream
        ) as gateway:
            for _ in range(2):
                answer = await gateway.ask(MESSAGES)
                assert answer.status_code == 401, answer.text
                assert answer.headers["x-should-retry"] == "false"
                said = error_of(answer)["message"]
                for part in ("house", "slot first", "FIRST_KEY", "slot second", "SECOND_KEY"):
                    assert part in said, said
                assert not any(key in answer.text for key in KEYS.values())
            assert len(gateway.upstream.requests) == 2
            assert not gateway.upstream.bill

    asyncio.run(scenario())


def test_a_call_whose_key_is_refused_waits_for_a_key_that_is_paused(tmp_path: Path) -> None:
    async def scenario() -> None:
        upstream = BillingUpstream(KEYS["SECOND_KEY"])
        async with gateway_service(
            tmp_path, upstreams=SLOTS, environ=KEYS, upstream=upstream
        ) as gateway:
            await gateway.client.post("/slots/second/disable")
            waiting = gateway.start(MESSAGES)
            await gateway.until(lambda: sent_with(gateway, "FIRST_KEY") == 1)
            await gateway.until_waiting()
            await gateway.client.post("/slots/second/enable")
            assert (await waiting).status_code == 200

    asyncio.run(scenario())


def test_a_refused_key_that_was_replaced_meanwhile_does_not_disable_the_new_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "first.key"
    file.write_text(KEYS["FIRST_KEY"])
    file.chmod(0o600)
    upstreams = SLOTS.replace('key_env = "FIRST_KEY"', f'key_file = "{file}"')

    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=upstreams, environ=KEYS) as gateway:
            old = gateway.upstream.account(KEYS["FIRST_KEY"])
            old.script.append(Plan(status=401, until="replaced"))
            asking = gateway.start(MESSAGES)
            await gateway.until(lambda: sent_with(gateway, "FIRST_KEY") == 1)
            file.write_text("new-key-of-first")
            gateway.upstream.releases.add("replaced")
            answer = await asking
            assert answer.status_code == 200, answer.text
            assert (await gateway.record(answer)).slot == "second"
            assert "disabled" not in (await states(gateway)).values()

    asyncio.run(scenario())


def test_a_403_moves_the_call_on_and_disables_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            gateway.upstream.account(KEYS["FIRST_KEY"]).fail(403)
            answer = await gateway.ask(MESSAGES)
            assert answer.status_code == 200, answer.text
            assert (await gateway.record(answer)).slot == "second"
            for key in KEYS.values():
                gateway.upstream.account(key).fail(403)
            answer = await gateway.ask(MESSAGES)
            assert answer.status_code == 403, answer.text
            said = error_of(answer)["message"]
            assert "slot first (FIRST_KEY)" in said
            assert "slot second (SECOND_KEY)" in said
            assert "disabled" not in (await states(gateway)).values()
            assert (await gateway.ask(MESSAGES)).status_code == 200

    asyncio.run(scenario())


def test_a_403_that_refuses_the_key_itself_disables_its_slot(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            revoked = Plan(status=403, message="OAuth token has been revoked. Please log in.")
            gateway.upstream.account(KEYS["FIRST_KEY"]).script.append(revoked)
            assert (await gateway.ask(MESSAGES)).status_code == 200
            assert (await states(gateway))["first"] == "disabled"

    asyncio.run(scenario())


def test_what_is_passed_on_unread_disables_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object, connection: Any) -> None:
        connection.send_json(401, {"error": {"type": "authentication_error", "message": "no"}})

    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            monkeypatch.setattr(gateway.upstream, "_answer_free", refuse)
            answer = await gateway.client.post("/upstreams/house/v1/other", json={})
            assert answer.status_code == 401, answer.text
            assert len(gateway.upstream.requests) == 2
            assert "disabled" not in (await states(gateway)).values()

    asyncio.run(scenario())


def test_a_refused_key_of_a_client_changes_nothing_for_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        keyless = '[upstreams.house]\nkind = "openai"\nbase_url = "{openai_url}"\n'
        async with gateway_service(tmp_path, upstreams=keyless, environ={}) as gateway:
            gateway.upstream.account("sk-own-refused").script.append(
                Plan(status=401, message="Incorrect API key provided.")
            )
            refused = {"authorization": "Bearer sk-own-refused"}
            answer = await gateway.ask(CHAT, headers=refused)
            assert answer.status_code == 401, answer.text
            assert error_of(answer)["message"] == "Incorrect API key provided."
            for own in ("sk-own-refused", "sk-own-good"):
                headers = {"authorization": f"Bearer {own}"}
                assert (await gateway.ask(CHAT, headers=headers)).status_code == 200

    asyncio.run(scenario())


async def test_a_model_that_a_key_may_not_use_disables_no_slot(tmp_path: Path) -> None:
    said = "key not allowed to access model. Tried to access claude-sonnet-5"
    fields = {"type": "key_model_access_denied", "param": "model", "code": "401"}
    async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
        gateway.upstream.decide = lambda _: Plan(status=401, message=said, error=fields)
        answer = await gateway.ask(MESSAGES)
        assert answer.status_code == 401, answer.text
        assert "may not be allowed" in error_of(answer)["message"]
        assert "disabled" not in (await states(gateway)).values()


async def test_a_provider_behind_an_upstream_that_refuses_its_key_disables_no_slot(
    tmp_path: Path,
) -> None:
    """OpenRouter names whom it asked: that one does not take its key, and others may answer."""
    fields = {"code": 401, "metadata": {"provider_name": "DeepSeek"}}
    plan = Plan(status=401, message="Provider returned error", error=fields)
    async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
        gateway.upstream.decide = lambda one: plan if one.model == "refused" else None
        answer = await gateway.ask(MESSAGES, model="refused")
        assert answer.status_code == 401, answer.text
        assert "DeepSeek" in error_of(answer)["message"]
        assert len(gateway.upstream.requests) == len(KEYS)
        assert "disabled" not in (await states(gateway)).values()
        assert (await gateway.ask(MESSAGES)).status_code == 200


def test_the_only_key_of_an_upstream_is_named_by_its_variable(tmp_path: Path) -> None:
    async def scenario() -> None:
        upstream = BillingUpstream("another-key")
        async with gateway_service(tmp_path, upstream=upstream) as gateway:
            said = "Incorrect API key: sk-op******0002"
            gateway.upstream.script.append(Plan(status=401, message=said))
            for path, variable in ((CHAT, "O_KEY"), (MESSAGES, "A_KEY")):
                answer = await gateway.ask(path)
                assert answer.status_code == 401, answer.text
                assert variable in error_of(answer)["message"]
                assert "0002" not in answer.text
                assert (await gateway.latest()).state.value == "failed"

    asyncio.run(scenario())


def test_a_refused_key_is_told_also_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        upstream = BillingUpstream("another-key")
        async with gateway_service(
            tmp_path, upstreams=SLOTS, environ=KEYS, upstream=upstream
        ) as gateway:

            async def away(*_: object) -> None:
                raise StoreUnavailableError("the store is away")

            monkeypatch.setattr(KeySlot, "refuse_key", away)
            answer = await gateway.ask(MESSAGES)
            assert answer.status_code == 401, answer.text
            for slot in ("slot first (FIRST_KEY)", "slot second (SECOND_KEY)"):
                assert slot in error_of(answer)["message"]
            assert len(gateway.upstream.requests) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["refused", "failing", "disabled"])
async def test_models_are_listed_with_the_next_key_where_the_first_one_does_not_work(
    tmp_path: Path, fault: str
) -> None:
    good = (KEYS["SECOND_KEY"],) if fault == "refused" else ()
    async with gateway_service(
        tmp_path, upstreams=SLOTS, environ=KEYS, upstream=BillingUpstream(*good)
    ) as gateway:
        if fault == "failing":
            gateway.upstream.list_faults[KEYS["FIRST_KEY"]] = 503
        elif fault == "disabled":
            await gateway.client.post("/slots/first/disable")
        answer = await gateway.client.get("/v1/models", headers=ANTHROPIC_VERSION)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == len(gateway.upstream.models)
        assert sent_with(gateway, "FIRST_KEY") == (fault != "disabled")
        assert sent_with(gateway, "SECOND_KEY") == 1


@pytest.mark.parametrize("own", [{}, {"authorization": "Bearer sk-own"}])
def test_a_key_that_is_none_is_told_for_what_it_is(tmp_path: Path, own: dict[str, str]) -> None:
    async def scenario() -> None:
        async with gateway_service(
            tmp_path, environ={"O_KEY": "sk-\N{HORIZONTAL ELLIPSIS}"}
        ) as gateway:
            for answer in (
                await gateway.ask(CHAT, headers=own),
                await gateway.client.get("/v1/models", headers=own),
            ):
                assert answer.status_code == 401, answer.text
                said = error_of(answer)["message"]
                assert "the variable O_KEY does not hold just a key" in said
                assert "send your own" not in said
            assert not gateway.upstream.requests

    asyncio.run(scenario())


TARGET = """
[targets.model]
kind = "http"
url = "{url}/v1/messages"
provider = "anthropic"
body = "input"
[targets.model.headers]
x-api-key = "{slot.key}"
anthropic-version = "2023-06-01"
"""


async def test_a_key_that_is_refused_to_a_task_disables_its_slot_too(tmp_path: Path) -> None:
    text = SLOTS + TARGET
    async with gateway_service(
        tmp_path, upstreams=text, environ=KEYS, upstream=BillingUpstream(KEYS["SECOND_KEY"])
    ) as gateway:
        wanted = {"target": "model", "projectId": "default", "input": asking(MESSAGES)}
        ends = []
        for _ in range(3):
            answer = await gateway.client.post("/tasks", json=wanted)
            assert answer.status_code == 202, answer.text
            ends.append(await ended(gateway, answer.json()["taskId"]))
            # The task has ended when the slot may still be on its way to the store.
            await gateway.until(lambda: not gateway.service.api.slots._refusing)
        assert [one.task.status.value for one in ends] == ["failed", "done", "done"]
        assert "401" in (ends[0].error or "")
        assert sent_with(gateway, "FIRST_KEY") == 1
        assert (await states(gateway))["first"] == "disabled"
        shown = (await gateway.client.get("/slots/first")).json()
        assert "FIRST_KEY" in json.dumps(shown)


SAID = [
    (401, {}, "", True),
    (401, {"type": "authentication_error"}, "invalid x-api-key", True),
    (401, {"code": "invalid_api_key"}, "Incorrect API key provided: sk-abc.", True),
    (401, {"code": "mismatched_organization"}, "OpenAI-Organization header should match", False),
    (401, {}, "You have insufficient permissions for this operation. Missing scopes: a.b", False),
    (
        401,
        {"type": "key_model_access_denied", "param": "model", "code": "401"},
        "key not allowed to access model. This key can only access models=['a']. Tried to access b",
        False,
    ),
    (401, {"type": "team_model_access_denied", "code": "401"}, "Team not allowed", False),
    (
        401,
        {"type": "authentication_error"},
        "OAuth authentication is currently not supported.",
        False,
    ),
    (401, {}, "You must be verified to use the model `gpt-5`", False),
    (401, {"metadata": {"provider_name": "DeepSeek"}}, "Provider returned error", False),
    (403, {"metadata": {"provider_name": "DeepSeek"}}, "This organization is disabled.", False),
    (403, {}, "", False),
    (403, {"type": "permission_error"}, "Your API key does not have permission to use it", False),
    (403, {"code": "model_not_found"}, "Project p does not have access to model m", False),
    (403, {"code": "unsupported_country_region_territory"}, "Country not supported", False),
    (403, {}, "Your chosen model requires moderation and your input was flagged", False),
    (403, {}, "This token is disabled for the model m", False),
    (403, {}, "Flagged: my account has been suspended", False),
    (403, {"type": "permission_error"}, "OAuth token has been revoked.", True),
    (403, {}, "This organization has been disabled.", True),
    (403, {"code": "account_deactivated"}, "deactivated", True),
    (403, {"code": "1112"}, "locked", True),
    (403, {"code": 1112}, "locked", True),
    (400, {"code": "invalid_api_key"}, "API key not valid.", False),
    (429, {}, "Your account has been suspended", False),
]


@pytest.mark.parametrize(("status", "fields", "message", "is_refused"), SAID)
def test_an_answer_refuses_a_key_if_it_is_about_the_key(
    status: int, fields: dict[str, object], message: str, is_refused: bool
) -> None:
    body = json.dumps({"error": {"message": message, **fields}}).encode()
    assert refuses_key(status, body) is is_refused


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"error": "x"}', b"[" * 9_000, b'{"error": {"code": []}}']
)
def test_a_body_that_says_nothing_leaves_it_to_the_status(body: bytes) -> None:
    assert refuses_key(401, body)
    assert not refuses_key(403, body)
