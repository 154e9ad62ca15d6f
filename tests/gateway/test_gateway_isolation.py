"""What lies behind the key of the service belongs to all tenants, and to none of them alone."""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import httpx2
import pytest

from gateway.billing_upstream import Plan
from gateway.gateway_service import (
    ANTHROPIC_KEY,
    ANTHROPIC_VERSION,
    CHAT,
    MESSAGES,
    OPENAI_KEY,
    RESPONSES,
    UPSTREAMS,
    GatewayService,
    asking,
    gateway_service,
)
from gateway.test_task_calls import PLAIN, ended, token_of
from headgate.config.settings import Settings
from headgate.config.slot_keys import SlotKeys
from headgate.core.task import TaskStatus
from headgate.gateway import routing
from headgate.gateway.gateway import StoredResponse, StoredResponses
from headgate.gateway.routing import CIRCUIT_FAILURES, MAX_CIRCUIT_SECONDS
from headgate.storage.tokens import Bounds, Permission, new_token

TENANTS = """
[auth]
required = true

[projects.a]
[projects.b]

[projects.careful]
reserve = "strict"
"""


async def token(
    gateway: GatewayService, project_id: str | None, agent_id: str | None = None
) -> dict[str, str]:
    """Return the header of a new token; one for the project '' is an operator's."""
    now = gateway.service.engine.now()
    permissions: tuple[Permission, ...] = ("submit", "read")
    permissions += ("admin",) if project_id == "" else ()
    bounds = Bounds(project_id=project_id or None, agent_id=agent_id)
    new = new_token(name=secrets.token_hex(4), permissions=permissions, now=now, bounds=bounds)
    await gateway.service.api.tokens.add(new.kept)
    return {"authorization": f"Bearer {new.text}"}


async def stored(gateway: GatewayService, headers: dict[str, str]) -> str:
    answer = await gateway.client.post(RESPONSES, json=asking(RESPONSES), headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def test_a_tenant_reads_and_deletes_its_own_stored_responses_alone(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS) as gateway:
        one, other = await token(gateway, "a"), await token(gateway, "b")
        mine = await stored(gateway, one)
        path = f"{RESPONSES}/{mine}"
        for method in ("GET", "DELETE"):
            refused = await gateway.client.request(method, path, headers=other)
            assert refused.status_code == 404, refused.text
            assert "project 'b' has made no response" in refused.json()["error"]["message"]
        continued = await gateway.ask(RESPONSES, headers=other, previous_response_id=mine)
        assert continued.status_code == 404, continued.text
        assert len(gateway.upstream.bill) == 1, "nothing was sent"
        own = await gateway.ask(RESPONSES, headers=one, previous_response_id=mine)
        assert own.status_code == 200, own.text
        assert (await gateway.client.get(path, headers=one)).status_code == 200
        assert (await gateway.client.delete(path, headers=one)).status_code == 200


async def test_a_token_of_an_agent_has_no_stored_responses_of_other_agents(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS) as gateway:
        ann = await token(gateway, "a", "ann")
        project, ben = await token(gateway, "a"), await token(gateway, "a", "ben")
        everywhere = await token(gateway, None, "ben") | {"x-headgate-project": "a"}
        mine = await stored(gateway, ann)
        for others in (ben, everywhere):
            for method in ("GET", "DELETE"):
                path = f"{RESPONSES}/{mine}"
                refused = await gateway.client.request(method, path, headers=others)
                assert refused.status_code == 404, refused.text
            continued = await gateway.ask(RESPONSES, headers=others, previous_response_id=mine)
            assert continued.status_code == 404, continued.text
        assert len(gateway.upstream.bill) == 1, "nothing was sent"
        for headers in (ann, project):
            own = await gateway.ask(RESPONSES, headers=headers, previous_response_id=mine)
            assert own.status_code == 200, own.text


async def test_the_key_of_the_service_opens_no_other_address_to_a_tenant(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS) as gateway:
        bound = await token(gateway, "b")
        sent = len(gateway.upstream.requests)
        for path in (
            "/upstreams/openai/v1/organization/admin_api_keys",
            "/upstreams/openai/v1/files",
        ):
            answer = await gateway.client.get(path, headers=bound)
            assert answer.status_code == 403, (path, answer.text)
            assert "key of your own" in answer.text
        for path in (f"{RESPONSES}/resp_unknown", f"{RESPONSES}/resp_unknown/input_items"):
            answer = await gateway.client.get(path, headers=bound)
            assert answer.status_code == 404, (path, answer.text)
        assert len(gateway.upstream.requests) == sent, "nothing was sent"


REFERENCES: list[tuple[str, dict[str, Any]]] = [
    (RESPONSES, {"conversation": "conv_1"}),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}),
    (RESPONSES, {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"file": {"file_id": "file-1"}}]}]}),
    (MESSAGES, {"container": "container_1"}),
]


@pytest.mark.parametrize(("path", "fields"), REFERENCES)
async def test_a_tenant_reaches_no_stored_object_with_the_key_of_the_service(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    body = asking(path) | fields
    async with gateway_service(tmp_path, TENANTS) as gateway:
        bound = await token(gateway, "b")
        refused = await gateway.client.post(path, json=body, headers=bound)
        assert refused.status_code == 403, refused.text
        assert "key of your own" in refused.json()["error"]["message"]
        assert not gateway.upstream.requests, "nothing was sent"
        operator = await token(gateway, "")
        assert (await gateway.client.post(path, json=body, headers=operator)).status_code == 200
    own = UPSTREAMS.replace('key_env = "A_KEY"\n', "").replace('key_env = "O_KEY"\n', "")
    text = TENANTS + '[gateway]\npassthrough_keys = "always"\n'
    async with gateway_service(tmp_path, text, upstreams=own, environ={}) as gateway:
        bound = await token(gateway, "b")
        headers = bound | {"x-api-key": "sk-own-key-of-this-tenant"}
        assert (await gateway.client.post(path, json=body, headers=headers)).status_code == 200


async def test_what_nobody_can_bound_is_refused_where_budgets_are_strict(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS.replace("required = true", "")) as gateway:
        answer = await gateway.client.post(
            "/upstreams/openai/v1/batches",
            json={"input_file_id": "file"},
            headers={"x-headgate-project": "careful"},
        )
        assert answer.status_code == 400
        assert "strict" in answer.text
        plain: httpx2.Response = await gateway.client.post(
            f"/p/careful{CHAT}", json=asking(CHAT, service_tier="default")
        )
        assert plain.status_code == 200, plain.text


async def test_a_limit_of_one_model_closes_no_other(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS) as gateway:
        one, other = await token(gateway, "a"), await token(gateway, "b")
        gateway.upstream.account(OPENAI_KEY).fail(429, retry_after="3600")
        limited = gateway.start(CHAT, headers=one, model="gpt-small")
        await gateway.until(lambda: bool(gateway.upstream.requests))
        await gateway.until_waiting()
        answer = await gateway.ask(CHAT, headers=other, model="gpt-5")
        assert answer.status_code == 200, answer.text
        assert (await gateway.record(answer)).slot is None, "it is the key of everybody"
        same = gateway.start(CHAT, headers=other, model="gpt-small")
        await gateway.until_waiting(2)
        for waiting in (limited, same):
            waiting.cancel()


async def test_what_is_passed_on_opens_no_circuit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "CIRCUIT_SECONDS", MAX_CIRCUIT_SECONDS)
    async with gateway_service(tmp_path) as gateway:
        gateway.upstream.account(ANTHROPIC_KEY).fail(500, times=CIRCUIT_FAILURES + 1)
        for _ in range(CIRCUIT_FAILURES + 1):
            path = f"/upstreams/anthropic{CHAT}"
            answer = await gateway.client.post(path, json=asking(CHAT))
            assert answer.status_code >= 500, answer.text
        answer = await gateway.ask(MESSAGES)
        assert int(answer.headers["x-headgate-waited-ms"]) < 1_000 * MAX_CIRCUIT_SECONDS / 2
        assert answer.status_code == 200


@pytest.mark.parametrize("sender", ["two tokens", "two tasks", "an agent's token and its tasks"])
async def test_one_tenant_closes_no_upstream_with_two_senders(
    tmp_path: Path, sender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "CIRCUIT_SECONDS", MAX_CIRCUIT_SECONDS)
    async with gateway_service(tmp_path, TENANTS + CALLS_OF_TASKS) as gateway:
        gateway.service.engine.node.address = f"http://127.0.0.1:{gateway.port}"
        gateway.upstream.decide = lambda one: Plan(status=500) if b"BAD" in one.body else None
        tokens = [await token(gateway, "a"), await token(gateway, "a")]
        if sender == "two tokens":
            for number in range(CIRCUIT_FAILURES + 1):
                failed = await gateway.ask(CHAT, f"BAD {number}", headers=tokens[number % 2])
                assert failed.status_code == 502, failed.text
        else:
            calls = [{"prompt": f"BAD {number}"} for number in range(CIRCUIT_FAILURES)]
            project = "a"
            if sender == "an agent's token and its tasks":
                own = await token(gateway, None, "ann")
                failed = await gateway.ask(CHAT, "BAD", headers=own)
                assert failed.status_code == 502, failed.text
                tokens, project = [own, own], "b"
            for one in tokens:
                body: dict[str, object] = {"action": "work", "projectId": project}
                body["target"] = "plain"
                body["params"] = {"calls": calls}
                sent = await gateway.client.post("/tasks", json=body, headers=one)
                assert sent.status_code == 202, sent.text
                record = await ended(gateway, sent.json()["taskId"])
                assert record.task.status is TaskStatus.DONE, record.error
        assert len(gateway.upstream.requests) > CIRCUIT_FAILURES
        answer = await gateway.ask(CHAT, headers=await token(gateway, "b"))
        assert answer.status_code == 200, answer.text
        assert int(answer.headers["x-headgate-waited-ms"]) < 1_000 * MAX_CIRCUIT_SECONDS / 2


async def test_a_call_that_fails_counts_in_the_share_of_its_project(tmp_path: Path) -> None:
    file = tmp_path / "shares.db"
    async with gateway_service(tmp_path, TENANTS, store=f"sqlite:///{file}") as gateway:
        gateway.upstream.decide = lambda _: Plan(status=500)
        failed = await gateway.ask(CHAT, headers=await token(gateway, "a"))
        assert failed.status_code == 502, failed.text
        record = await gateway.record(failed)
        assert not record.tokens
        state = gateway.calls._state()
        assert state is not None
        counted = state.usage.tokens["a"]
        assert counted > 0
        asked = "SELECT tokens FROM project_usage WHERE project_id = 'a'"
        with apsw.Connection(str(file)) as stored:
            assert stored.execute(asked).fetchall() == [(counted,)]


CALLS_OF_TASKS = """
[targets.plain]
kind = "callable"
entry_point = "gateway.test_task_calls:agent"
gateway = true
"""
TWO_MEMBERS = """
[models.either]
route = ["openai/gpt-bad", "openai/gpt-good"]
"""


async def test_a_tenant_whose_calls_fail_leaves_the_others_their_retries(tmp_path: Path) -> None:
    upstreams = UPSTREAMS + TWO_MEMBERS
    async with gateway_service(tmp_path, TENANTS, upstreams=upstreams) as gateway:
        gateway.upstream.decide = lambda one: Plan(status=500) if one.model == "gpt-bad" else None
        one, other = await token(gateway, "a"), await token(gateway, "b")
        statuses = [
            (await gateway.ask(CHAT, str(number), headers=one, model="either")).status_code
            for number in range(2 * int(routing.FIRST_RETRY_CREDIT))
        ]
        assert statuses[0] == 200
        assert statuses[-1] == 502, "its retries are used up"
        assert (await gateway.ask(CHAT, headers=one)).status_code == 200, "it is not the upstream"
        answer = await gateway.ask(CHAT, headers=other, model="either")
        assert answer.status_code == 200, answer.text


def test_the_budgets_of_retries_are_of_a_bounded_number_of_tenants() -> None:
    upstreams = routing.Upstreams(Settings(), {}, SlotKeys(Settings(), {}))
    for number in range(2 * routing.MAX_TENANTS):
        upstreams.call_begins(f"project:{number}")
    assert len(upstreams._retry_credit) == routing.MAX_TENANTS
    assert upstreams.may_retry(f"project:{2 * routing.MAX_TENANTS - 1}")
    assert not upstreams.may_retry("project:0")


@pytest.mark.parametrize("each", [2, 2_500])
async def test_a_busy_tenant_has_no_other_lose_its_stored_responses(
    tmp_path: Path, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are pushed out of memory are found in the store."""
    monkeypatch.setattr("headgate.gateway.gateway.MAX_STORED", 4)
    monkeypatch.setattr("headgate.gateway.gateway.MAX_STORED_EACH", each)
    async with gateway_service(tmp_path, TENANTS) as gateway:
        one, busy = await token(gateway, "a"), await token(gateway, "b")
        mine = [await stored(gateway, one) for _ in range(3)]
        theirs = [await stored(gateway, busy) for _ in range(9)]
        memory = gateway.gateway._stored
        assert len(memory) <= 4
        kept = memory.get(mine[-1])
        assert kept is not None, "it has a part of the memory"
        assert kept.project_id == "a"
        assert memory.get(theirs[0]) is None
        await gateway.calls.settled(seconds=20.0)
        for headers, ids in ((one, mine), (busy, theirs)):
            for response_id in ids:
                path = f"{RESPONSES}/{response_id}"
                assert (await gateway.client.get(path, headers=headers)).status_code == 200
        for response_id in mine:
            refused = await gateway.client.delete(f"{RESPONSES}/{response_id}", headers=busy)
            assert refused.status_code == 404, refused.text
        own = await gateway.ask(RESPONSES, headers=one, previous_response_id=mine[0])
        assert own.status_code == 200, own.text


async def test_an_operator_is_told_whose_a_stored_response_is(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS.replace("required = true", "")) as gateway:
        made = await gateway.ask(f"/p/a{RESPONSES}")
        response_id = made.json()["id"]
        other = await gateway.client.get(f"/p/b{RESPONSES}/{response_id}")
        assert other.status_code == 404
        assert "/p/a/v1" in other.text
        assert (await gateway.client.get(f"/p/a{RESPONSES}/{response_id}")).status_code == 200


async def test_what_was_learned_and_whose_responses_are_survive_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'headgate.db'}"
    key = {"authorization": "Bearer sk-of-a-client-0001"}
    free = UPSTREAMS.replace('key_env = "A_KEY"\n', "")
    prompt = "a rather long prompt of many words " * 200
    async with gateway_service(tmp_path, TENANTS, upstreams=free, store=store) as gateway:
        one = await token(gateway, "a")
        own = {"x-api-key": key["authorization"].removeprefix("Bearer "), **one}
        mine = await stored(gateway, one)
        first = await gateway.ask(MESSAGES, prompt, headers=own)
        assert first.status_code == 200, first.text
        name = (await gateway.record(first)).slot
        billed = gateway.upstream.bill[-1].input_tokens
    async with gateway_service(tmp_path, TENANTS, upstreams=free, store=store) as gateway:
        other = await token(gateway, "b")
        refused = await gateway.ask(RESPONSES, headers=other, previous_response_id=mine)
        assert refused.status_code == 404, refused.text
        again = await gateway.ask(MESSAGES, prompt, headers=own)
        record = await gateway.record(again)
        assert record.slot == name, "the name of its key is the same"
        held = record.reserved_tokens - 100
        assert abs(held - billed) <= 0.5 * abs(record.prompt_chars / 4 - billed) + 1


async def test_the_length_of_one_of_several_answers_survives_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'headgate.db'}"
    usage = {"prompt_tokens": 10, "completion_tokens": 4_000, "total_tokens": 4_010}
    held: list[int] = []
    for _ in range(2):
        async with gateway_service(tmp_path, store=store) as gateway:
            if not held:
                gateway.upstream.script.append(Plan(usage=usage))
                await gateway.record(await gateway.ask(CHAT, n=4, max_tokens=1_000))
            gateway.upstream.script.append(Plan(usage=usage))
            answer = await gateway.ask(CHAT, n=4, max_tokens=None)
            held.append((await gateway.record(answer)).reserved_tokens)
    assert held[0] == held[1]


@pytest.mark.parametrize("answers", [10**18, 10**30, 1e300])
async def test_a_call_for_any_number_of_answers_is_kept(tmp_path: Path, answers: float) -> None:
    store = f"sqlite:///{tmp_path / 'headgate.db'}"
    async with gateway_service(tmp_path, store=store) as gateway:
        for count in (answers, 1):
            answer = await gateway.ask(CHAT, n=count, max_tokens=None)
            record = await gateway.record(answer)
            call_store = gateway.service.engine.call_store
            assert call_store is not None
            assert await call_store.get(record.id) == record


PATHS = ("/p/a/upstreams/openai/v1", "/p/a/agent-7/upstreams/openai/v1", "/upstreams/openai/v1")


async def test_an_upstream_is_reached_under_the_prefix_of_a_project(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS.replace("required = true", "")) as gateway:
        found = []
        for path in PATHS:
            answer = await gateway.client.post(f"{path}/chat/completions", json=asking(CHAT))
            assert answer.status_code == 200, answer.text
            record = await gateway.record(answer)
            found.append((record.project_id, record.agent_id))
        assert found[:2] == [("a", found[2][1]), ("a", "agent-7")]
        assert found[2][0] == "default"


EXHAUSTED = """
[projects.a]

[budgets."project:a"]
limit_usd = "0.000001"
"""


async def test_what_is_free_needs_no_budget(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, EXHAUSTED) as gateway:
        refused = await gateway.ask(f"/p/a{CHAT}")
        assert refused.status_code == 402, refused.text
        made = await gateway.ask(RESPONSES)
        response_id = made.json()["id"]
        gateway.gateway._stored = StoredResponses()
        gateway.gateway._stored.note(response_id, StoredResponse("a", "api"))
        for path in (f"/p/a{RESPONSES}/{response_id}", "/p/a/v1/models"):
            answer = await gateway.client.get(path)
            assert answer.status_code == 200, (path, answer.text)
        counted = await gateway.client.post(
            "/p/a/v1/messages/count_tokens", json=asking(MESSAGES), headers=ANTHROPIC_VERSION
        )
        assert counted.status_code == 200, counted.text
        assert (await gateway.status("project:a"))["spentUsd"] in ("0", "0.00", 0)


async def test_no_rate_left_on_one_model_closes_no_other(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS.replace("required = true", "")) as gateway:
        none_left = {
            "x-ratelimit-limit-requests": "10",
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "30m",
        }
        gateway.upstream.script.append(Plan(headers=none_left))
        assert (await gateway.ask(CHAT, model="gpt-5-mini")).status_code == 200
        assert (await gateway.ask(CHAT, model="gpt-5")).status_code == 200
        waiting = gateway.start(CHAT, model="gpt-5-mini")
        await gateway.until_waiting()
        waiting.cancel()


def in_hand_are_more(gateway: GatewayService, count: int) -> bool:
    return gateway.gateway.in_hand > count


async def test_the_tasks_of_a_project_have_one_share_of_the_calls_together(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, TENANTS + PLAIN) as gateway:
        gateway.service.engine.node.address = f"http://127.0.0.1:{gateway.port}"
        one, other = await token(gateway, "a"), await token(gateway, "b")
        gateway.gateway._in_hand.most = 32
        holds = {"calls": [{"prompt": "[[until later]]"}]}
        keys = []
        for number in range(4):
            body = {"action": "call", "target": "plain", "agentId": f"a{number}", "params": holds}
            taken = await gateway.client.post("/tasks", json=body, headers=one)
            await gateway.until(partial(in_hand_are_more, gateway, number))
            keys.append({"x-api-key": await token_of(gateway, taken.json()["taskId"])})
        calls = [
            gateway.start(CHAT, "[[until later]]", headers=keys[number % 4]) for number in range(40)
        ]
        await gateway.until(
            lambda: sum(call.done() for call in calls) + gateway.gateway.in_hand == 44
        )
        honest = gateway.start(CHAT, "[[until later]]", headers=other)
        before = gateway.gateway.in_hand
        await gateway.until(lambda: honest.done() or gateway.gateway.in_hand > before)
        assert not honest.done(), honest.result().text
        gateway.upstream.releases.add("later")
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200, 429}
        assert (await honest).status_code == 200


TWO_KEYS = """
[[slots]]
name = "of-a"
provider = "openai"
base_url = "{openai_url}"
key_env = "A_KEY"
projects = ["a"]

[[slots]]
name = "of-b"
provider = "openai"
base_url = "{openai_url}"
key_env = "B_KEY"
projects = ["b"]

[upstreams.openai]
kind = "openai"
base_url = "{openai_url}"
slots = ["of-b", "of-a"]
"""


async def test_models_are_listed_once_and_with_no_key_of_another_project(tmp_path: Path) -> None:
    """A key may see models that nobody else is to know of, and each question counts at it."""
    environ = {"A_KEY": "sk-a", "B_KEY": "sk-b"}
    async with gateway_service(tmp_path, TENANTS, upstreams=TWO_KEYS, environ=environ) as gateway:
        tokens = {name: await token(gateway, name) for name in ("a", "b", "careful")}
        for name in ("a", "b"):
            asked = [gateway.client.get("/v1/models", headers=tokens[name]) for _ in range(8)]
            answers = await asyncio.gather(*asked)
            assert {answer.status_code for answer in answers} == {200}
        keys = [one.key for one in gateway.upstream.requests if one.path == "/v1/models"]
        assert keys == ["sk-a", "sk-b"]
        refused = await gateway.client.get("/v1/models", headers=tokens["careful"])
        assert refused.status_code == 401, refused.text
        assert "B_KEY" not in refused.text
        assert [one.key for one in gateway.upstream.requests] == keys
