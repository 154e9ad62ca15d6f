"""Calls through the gateway: whose they are, where they go, what comes back."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest

from gateway.billing_upstream import BillingUpstream
from gateway.gateway_service import (
    ANTHROPIC_KEY,
    ANTHROPIC_VERSION,
    CHAT,
    CODEX,
    MESSAGES,
    OPENAI_KEY,
    RESPONSES,
    UPSTREAMS,
    GatewayService,
    asking,
    error_of,
    gateway_service,
)
from headgate.storage.tokens import Bounds, Permission, new_token

COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
EVERY_PATH = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, MESSAGES)
STREAMED = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
TEXT = "The answer is 42."
OWN_KEY = "sk-own-of-a-client"
ALIASES = """
[models.fast]
route = ["openai/gpt-5-mini", "anthropic/claude-haiku-4-5"]
"""
NO_KEYS = """
[upstreams.anthropic]
kind = "anthropic"
base_url = "{url}"

[upstreams.openai]
kind = "openai"
base_url = "{openai_url}"
"""

BY_PATTERN = NO_KEYS.replace('"{url}"', '"{url}"\nmodels = ["claude-*"]').replace(
    '"{openai_url}"', '"{openai_url}"\nmodels = ["gpt-*"]'
)


async def make_token(gateway: GatewayService, **bounds: Any) -> str:
    """Return a new token."""
    now = gateway.service.engine.now()
    permissions: tuple[Permission, ...] = ("submit", "read")
    new = new_token(
        name=secrets.token_hex(4), permissions=permissions, now=now, bounds=Bounds(**bounds)
    )
    await gateway.service.api.tokens.add(new.kept)
    return new.text


@pytest.mark.parametrize("path", EVERY_PATH)
def test_every_protocol_is_answered_and_booked(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            answer = await gateway.ask(path)
            assert answer.status_code == 200, answer.text
            record = await gateway.record(answer)
            (charge,) = gateway.upstream.bill
            assert record.tokens == charge.tokens
            assert record.input_tokens == charge.input_tokens
            assert record.output_tokens == charge.output_tokens
            assert record.assumed_tokens == 0
            assert record.state.value == "done"
            assert answer.headers["x-headgate-cost-usd"]
            assert int(answer.headers["x-headgate-waited-ms"]) >= 0

    asyncio.run(scenario())


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_is_passed_on_and_booked(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            answer = await gateway.ask(path, is_stream=True)
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert "42" in answer.text
            record = await gateway.record(answer)
            (charge,) = gateway.upstream.bill
            assert charge.was_told
            assert record.tokens == charge.tokens
            assert record.assumed_tokens == 0
            if path == CHAT:
                assert '"usage":{' not in answer.text, "it was asked for here, not by the client"

    asyncio.run(scenario())


def test_the_variables_of_the_providers_are_enough(tmp_path: Path) -> None:
    async def scenario() -> None:
        environ = {"ANTHROPIC_API_KEY": "sk-ant-1", "OPENAI_API_KEY": "sk-2"}
        only_urls = NO_KEYS.replace("base_url", "key_env = 'ANTHROPIC_API_KEY'\nbase_url", 1)
        only_urls = only_urls.replace(
            'base_url = "{openai_url}"', "key_env = 'OPENAI_API_KEY'\nbase_url = '{openai_url}'"
        )
        async with gateway_service(tmp_path, upstreams=only_urls, environ=environ) as gateway:
            for path in (CHAT, MESSAGES):
                answer = await gateway.ask(path, headers={"authorization": "Bearer any"})
                assert answer.status_code == 200, answer.text
            assert set(gateway.upstream.accounts) == {"sk-ant-1", "sk-2"}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "header"),
    [
        (CHAT, {"authorization": f"Bearer {OWN_KEY}"}),
        (MESSAGES, {"x-api-key": OWN_KEY}),
        (MESSAGES, {"authorization": f"Bearer {OWN_KEY}"}),
    ],
)
def test_without_a_key_of_its_own_an_upstream_gets_the_clients(
    tmp_path: Path, path: str, header: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=NO_KEYS) as gateway:
            answer = await gateway.ask(path, headers=header)
            assert answer.status_code == 200, answer.text
            assert set(gateway.upstream.accounts) == {OWN_KEY}
            (request,) = gateway.upstream.requests
            assert {name: request.headers[name] for name in header} == header
            record = await gateway.record(answer)
            assert record.slot is not None
            assert record.slot.startswith("key-")
            assert OWN_KEY not in record.slot

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["never", "loopback"])
def test_the_key_of_a_client_stays_here_unless_it_may_pass(tmp_path: Path, mode: str) -> None:
    async def scenario() -> None:
        text = f'[gateway]\npassthrough_keys = "{mode}"\n'
        server = '[server]\nhost = "0.0.0.0"\n[auth]\nallowed_hosts = ["127.0.0.1"]\n'
        text += server if mode == "loopback" else ""
        async with gateway_service(tmp_path, text, upstreams=NO_KEYS) as gateway:
            token = await make_token(gateway)
            headers = {"authorization": f"Bearer {token}", "x-api-key": OWN_KEY}
            answer = await gateway.ask(CHAT, headers=headers)
            assert answer.status_code == 401, answer.text
            assert "no key" in error_of(answer)["message"]
            assert not gateway.upstream.requests

    asyncio.run(scenario())


def test_a_configured_key_wins_over_that_of_a_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            await gateway.ask(CHAT, headers={"authorization": f"Bearer {OWN_KEY}"})
            await gateway.ask(MESSAGES, headers={"x-api-key": OWN_KEY})
            assert set(gateway.upstream.accounts) == {ANTHROPIC_KEY, OPENAI_KEY}
            for request in gateway.upstream.requests:
                assert OWN_KEY not in repr(request.headers)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_valid", [True, False])
@pytest.mark.parametrize("upstreams", [NO_KEYS, UPSTREAMS])
def test_a_token_of_headgate_never_goes_upstream(
    tmp_path: Path, upstreams: str, is_valid: bool
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=upstreams) as gateway:
            token = await make_token(gateway)
            given = token if is_valid else token[:-4] + "zzzz"
            for headers in (
                {"authorization": f"Bearer {given}"},
                {"x-api-key": given},
                {"authorization": f"Bearer {OWN_KEY}", "x-session-id": given},
            ):
                await gateway.ask(CHAT, headers=headers)
            for request in gateway.upstream.requests:
                assert given not in repr(request.headers) + request.target

    asyncio.run(scenario())


def test_a_token_that_nobody_made_is_refused_in_the_shape_of_the_protocol(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            headers = {"x-api-key": "hg_000000000000_nobody"}
            answer = await gateway.ask(MESSAGES, headers=headers)
            assert answer.status_code == 401
            assert error_of(answer)["type"] == "authentication_error"
            answer = await gateway.ask(CHAT, headers=headers)
            assert error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["x-should-retry"] == "false"
            assert not gateway.upstream.requests

    asyncio.run(scenario())


def test_a_repeated_head_is_judged_by_what_holds_now(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, environ={}) as gateway:
            token = await make_token(gateway)
            of_token = {"x-api-key": token, "authorization": f"Bearer {OWN_KEY}"}
            own = {"x-api-key": OWN_KEY}
            for headers in (of_token, own):
                for length in (2, 2, 30):
                    answer = await gateway.ask(MESSAGES, "x" * length, headers=headers)
                    assert answer.status_code == 200, answer.text
                    assert bool((await gateway.record(answer)).token_id) is (headers is of_token)
            assert (await gateway.client.delete(f"/tokens/{token.split('_')[1]}")).is_success
            assert (await gateway.ask(MESSAGES, headers=of_token)).status_code == 401
            assert (await gateway.ask(MESSAGES, headers=own)).status_code == 200
            path = tmp_path / "headgate.toml"
            path.write_text('[gateway]\npassthrough_keys = "never"\n' + path.read_text())
            assert (await gateway.client.post("/scheduler/reload")).status_code == 200
            assert (await gateway.ask(MESSAGES, headers=own)).status_code == 401

    asyncio.run(scenario())


def test_who_makes_a_call_is_said_by_token_then_path_then_headers(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = "[projects.a]\n[projects.b]\n"
        async with gateway_service(tmp_path, text) as gateway:
            agent = {"user-agent": "claude-cli/2.0 (external, cli)"}
            record = await gateway.record(await gateway.ask(MESSAGES, headers=agent))
            assert (record.project_id, record.agent_id) == ("default", "claude-code")
            named = {"x-headgate-project": "b", "x-headgate-agent": "bob"}
            named |= {"x-headgate-scope": "project:b/run:x", "x-headgate-priority": "3"}
            record = await gateway.record(await gateway.ask(MESSAGES, headers=named))
            assert (record.project_id, record.agent_id) == ("b", "bob")
            assert record.scopes == ("project:b", "project:b/run:x")
            assert record.priority == 3
            del named["x-headgate-scope"]
            answer = await gateway.ask(f"/p/a/ann{MESSAGES}", headers=named)
            assert answer.status_code == 200, answer.text
            record = await gateway.record(answer)
            assert (record.project_id, record.agent_id) == ("a", "ann")
            token = await make_token(gateway, project_id="b")
            bound = {"x-api-key": token}
            record = await gateway.record(await gateway.ask(MESSAGES, headers=bound))
            assert record.project_id == "b"
            assert record.token_id
            answer = await gateway.ask(f"/p/a{MESSAGES}", headers=bound)
            assert answer.status_code == 403
            assert error_of(answer)["type"] == "permission_error"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (
            *("/p/zzz/v1/messages", {}, 400),
            "path prefix /p/zzz: there is no project 'zzz'; there are: default",
        ),
        ("/v1/chat/completions", {"model": "claude-sonnet-5"}, 400, "/v1/messages"),
        ("/v1/messages", {"model": "gpt-5"}, 400, "/v1/chat/completions"),
        ("/v1/messages", {"model": ""}, 400, "model"),
        ("/v1/messages", {"model": "a\nb"}, 400, "model"),
        ("/v1/messages", {"model": "a" * 3_000}, 400, "model"),
        ("/v1/nothing", {}, 404, "/v1/nothing"),
        ("/upstreams/none/v1/x", {}, 404, "anthropic, openai"),
    ],
)
def test_what_cannot_be_routed_is_refused_with_a_reason(
    tmp_path: Path, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=BY_PATTERN) as gateway:
            headers = ANTHROPIC_VERSION if "messages" in path else {}
            answer = await gateway.ask(path, headers=headers, **body)
            assert answer.status_code == status, answer.text
            assert said in error_of(answer)["message"]
            assert answer.headers["x-should-retry"] == "false"
            assert not gateway.upstream.requests

    asyncio.run(scenario())


def test_a_model_that_no_upstream_takes_is_not_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=BY_PATTERN) as gateway:
            answer = await gateway.ask(CHAT, model="mystery-1")
            assert answer.status_code == 404, answer.text
            assert error_of(answer)["code"] == "model_not_found"
            assert "mystery-1" in error_of(answer)["message"]

    asyncio.run(scenario())


def test_an_alias_goes_to_its_first_member_that_speaks_the_protocol(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, ALIASES) as gateway:
            for path, name in ((CHAT, "gpt-5-mini"), (MESSAGES, "claude-haiku-4-5")):
                answer = await gateway.ask(path, model="fast")
                assert answer.status_code == 200, answer.text
                assert gateway.upstream.bill[-1].model == name
                record = await gateway.record(answer)
                assert (record.model, record.upstream_model) == ("fast", name)

    asyncio.run(scenario())


def test_models_are_listed_in_both_shapes_with_aliases(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, ALIASES) as gateway:
            answer = await gateway.client.get("/v1/models")
            listed = answer.json()
            assert listed["object"] == "list"
            names = [one["id"] for one in listed["data"]]
            assert names[0] == "fast"
            assert set(gateway.upstream.models) <= set(names)
            assert len(names) == len(set(names))
            answer = await gateway.client.get("/v1/models?limit=1000", headers=ANTHROPIC_VERSION)
            listed = answer.json()
            assert listed["has_more"] is False
            assert "claude-sonnet-5" in [one["id"] for one in listed["data"]]
            asked = [one for one in gateway.upstream.requests if one.path == "/v1/models"]
            assert {one.key for one in asked} == {ANTHROPIC_KEY, OPENAI_KEY}
            await gateway.client.get("/v1/models")
            again = [one for one in gateway.upstream.requests if one.path == "/v1/models"]
            assert len(again) == len(asked), "what a provider listed is kept for a while"

    asyncio.run(scenario())


def test_one_model_is_shown_by_its_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, ALIASES) as gateway:
            answer = await gateway.client.get("/v1/models/gpt-5")
            assert answer.json()["id"] == "gpt-5"
            assert answer.json()["object"] == "model"
            answer = await gateway.client.get("/v1/models/fast", headers=ANTHROPIC_VERSION)
            assert answer.json()["type"] == "model"
            answer = await gateway.client.get("/v1/models/nothing")
            assert answer.status_code == 404
            assert error_of(answer)["code"] == "model_not_found"

    asyncio.run(scenario())


def test_models_are_listed_while_the_upstream_is_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        gone = """
[upstreams.openai]
kind = "openai"
base_url = "http://127.0.0.1:9/v1"
key_env = "O_KEY"
models = ["gpt-5", "gpt-*"]
"""
        async with gateway_service(tmp_path, ALIASES, upstreams=gone) as gateway:
            answer = await gateway.client.get("/v1/models")
            assert answer.status_code == 200
            assert [one["id"] for one in answer.json()["data"]] == ["fast", "gpt-5"]

    asyncio.run(scenario())


def test_probes_and_upgrades_are_answered_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, "[projects.a]\n") as gateway:
            for path in ("/", "/api/hello", "/p/a", "/p/a/", "/p/a/bob/api/hello"):
                answer = await gateway.client.head(path)
                assert answer.status_code == 200, path
            upgrade = {"connection": "upgrade", "upgrade": "websocket"}
            answer = await gateway.client.get(RESPONSES, headers=upgrade)
            assert answer.status_code == 426
            assert not gateway.upstream.requests

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "must end in /v1, as in OPENAI_BASE_URL={}/v1"),
        ("/p/default/chat/completions", "must end in /v1, as in OPENAI_BASE_URL={}/p/default/v1"),
        ("/v1/v1/messages", "must not end in /v1, as in ANTHROPIC_BASE_URL={}"),
    ],
)
def test_a_wrong_base_url_is_named_instead_of_the_key(
    tmp_path: Path, path: str, advice: str
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            headers = {"authorization": "Bearer any"}
            answer = await gateway.client.post(path, json={"model": "gpt-5"}, headers=headers)
            assert answer.status_code == 404, answer.text
            message = answer.json()["error"]["message"]
            assert message.endswith(advice.format(f"http://127.0.0.1:{gateway.port}"))

    asyncio.run(scenario())


def test_a_stored_response_is_read_and_deleted_where_it_lies(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            made = (await gateway.ask(RESPONSES)).json()
            answer = await gateway.client.get(f"{RESPONSES}/{made['id']}")
            assert answer.json()["id"] == made["id"]
            answer = await gateway.client.delete(f"{RESPONSES}/{made['id']}")
            assert answer.json()["deleted"] is True
            answer = await gateway.client.get(f"{RESPONSES}/{made['id']}")
            assert answer.status_code == 404
            assert len(gateway.upstream.bill) == 1
            record = await gateway.record(answer)
            assert not record.tokens

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/upstreams/openai/images/generations", "other"),
        ("/upstreams/openai/chat/completions", "chat"),
        ("/upstreams/anthropic/v1/messages", "messages"),
    ],
)
def test_other_paths_of_an_upstream_are_passed_through_and_booked(
    tmp_path: Path, path: str, kind: str
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            answer = await gateway.ask(path)
            assert answer.status_code == 200, answer.text
            (charge,) = gateway.upstream.bill
            record = await gateway.record(answer)
            assert record.protocol == kind
            assert record.tokens == charge.tokens

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/upstreams/openai/../x", "/upstreams/openai/%2e%2e/x"])
def test_no_path_leaves_the_upstream(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            host = f"127.0.0.1:{gateway.port}"
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            line = await reader.readline()
            writer.close()
            assert b" 404 " in line
            assert not gateway.upstream.requests

    asyncio.run(scenario())


def test_counting_tokens_is_free(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            answer = await gateway.client.post(
                "/v1/messages/count_tokens", json=asking(MESSAGES), headers=ANTHROPIC_VERSION
            )
            assert answer.json()["input_tokens"] > 0
            assert not gateway.upstream.bill
            record = await gateway.record(answer)
            assert not record.tokens
            assert not record.micro_usd

    asyncio.run(scenario())


def test_only_headers_that_belong_upstream_go_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            beta = {"anthropic-beta": "a-1,b-2", **ANTHROPIC_VERSION, **CODEX}
            private = {"x-headgate-project": "default", "cookie": "a=b", "x-private": "1"}
            answer = await gateway.ask(f"{MESSAGES}?beta=true", headers=beta | private)
            assert answer.status_code == 200, answer.text
            (request,) = gateway.upstream.requests
            assert request.target == "/v1/messages?beta=true"
            for name, value in beta.items():
                assert request.headers[name] == value
            assert not private.keys() & request.headers.keys()
            assert answer.headers["request-id"].startswith("req_")

    asyncio.run(scenario())


def test_a_refused_key_shows_nothing_of_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        upstream = BillingUpstream("another-key")
        async with gateway_service(tmp_path, upstream=upstream) as gateway:
            for path in (CHAT, MESSAGES):
                answer = await gateway.ask(path)
                assert answer.status_code == 401, answer.text
                assert "sk-" not in answer.text

    asyncio.run(scenario())


def test_the_gateway_can_be_switched_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, "[gateway]\nenabled = false\n") as gateway:
            answer = await gateway.ask(CHAT)
            assert answer.status_code == 404
            assert not gateway.upstream.requests

    asyncio.run(scenario())


async def test_models_that_nobody_can_list_are_no_empty_list(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, environ={}) as gateway:
        answer = await gateway.client.get("/v1/models")
        assert answer.status_code == 401
        assert "set O_KEY where Headgate runs" in error_of(answer)["message"]
        own = {"authorization": "Bearer sk-own-key"}
        listed = await gateway.client.get("/v1/models", headers=own)
        assert {one["id"] for one in listed.json()["data"]} == set(gateway.upstream.models)
    gone = UPSTREAMS.replace("{openai_url}", "http://127.0.0.1:9/v1")
    async with gateway_service(tmp_path, upstreams=gone) as gateway:
        answer = await gateway.client.get("/v1/models")
        assert answer.status_code == 502
        assert "models = [...] in [upstreams.openai]" in error_of(answer)["message"]
