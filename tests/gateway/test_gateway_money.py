"""Budgets in front of models: what is refused, in which words, and what answers tell of them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.billing_upstream import Plan
from gateway.gateway_service import (
    ANTHROPIC_VERSION,
    CHAT,
    CODEX,
    MESSAGES,
    OPENAI_KEY,
    RESPONSES,
    GatewayService,
    asking,
    error_of,
    gateway_service,
    usd,
)
from headgate.core.dispatch_state import ASK_AGAIN_SECONDS
from headgate.gateway.gateway import Patience
from headgate.providers.prices import PriceList
from headgate.storage.tokens import Bounds, new_token
from service.support import ECHO_TARGET

PATHS = (CHAT, RESPONSES, MESSAGES)
LIMITED = """
[projects.a]
[budgets."project:a"]
limit_usd = "1"
"""
DAILY = LIMITED + 'window = "day"\n[gateway]\nmax_wait_seconds = {seconds}\n'


def budget(limit: str, more: str = "") -> str:
    """Return the settings of a project with a budget."""
    return f'[projects.a]\n[budgets."project:a"]\nlimit_usd = "{limit}"\n{more}\n'


async def spend(gateway: GatewayService, amount: str, scope: str = "project:a") -> None:
    """Book something on the budget of project a, or another."""
    held = {"id": "r-1", "scope": scope, "usd": amount}
    for step in ("reserve", "commit"):
        answer = await gateway.client.post(f"/budgets/{step}", json=held)
        assert answer.status_code < 300, answer.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_call_without_room_is_refused_in_its_protocol(
    tmp_path: Path, path: str, is_stream: bool
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, LIMITED) as gateway:
            await spend(gateway, "0.99")
            fields: dict[str, Any] = {
                "max_output_tokens" if path == RESPONSES else "max_tokens": 8_000
            }
            answer = await gateway.ask(f"/p/a{path}", is_stream=is_stream, **fields)
            assert answer.status_code == 402, answer.text
            assert answer.headers["x-should-retry"] == "false"
            assert answer.headers["x-headgate-call-id"]
            error = error_of(answer)
            if path == MESSAGES:
                assert error["type"] == "billing_error"
            else:
                assert error["type"] == "insufficient_quota"
                assert error["code"] == "budget_exceeded"
            assert "project:a" in error["message"]
            for figure in ("$0.99", "$1.00", "$0.016"):
                assert figure in error["message"]
            assert not gateway.upstream.requests
            record = await gateway.record(answer)
            assert record.state.value == "refused"
            assert record.tokens is None

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_codex_is_told_of_a_limit_and_of_its_reset(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, DAILY.format(seconds=0.2)) as gateway:
            await spend(gateway, "0.99995")
            answer = await gateway.ask(f"/p/a{path}", headers=CODEX, max_tokens=100)
            assert answer.status_code == 400, answer.text
            error = error_of(answer)
            assert error["type"] == "usage_limit_reached"
            midnight = (int(time.time()) // 86_400 + 1) * 86_400
            assert abs(error["resets_at"] - midnight) <= 86_400
            assert "project:a" in error["message"]
            assert "UTC" in error["message"], "when it frees"
            assert answer.headers["x-should-retry"] == "false"
            answer = await gateway.ask(f"/p/a{path}", headers=CODEX, max_tokens=100)
            assert float(answer.headers["x-headgate-remaining-usd"]) == 0.00005
            assert answer.headers["x-codex-primary-used-percent"] == "100.0"
            assert answer.headers["x-codex-primary-window-minutes"] == "1440"
            assert abs(int(answer.headers["x-codex-primary-reset-at"]) - midnight) <= 86_400

    asyncio.run(scenario())


def test_where_a_budget_resets_in_time_the_call_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, DAILY.format(seconds=604800)) as gateway:
            await spend(gateway, "0.99995")
            waiting = gateway.start(f"/p/a{MESSAGES}")
            await gateway.until_waiting()
            (call,) = gateway.calls.live()
            found = (await gateway.client.get(f"/calls/{call.id}/why")).json()
            assert "project:a" in found["reasons"][0]["message"]
            assert found["expectedSeconds"] > 0
            text = (tmp_path / "headgate.toml").read_text()
            (tmp_path / "headgate.toml").write_text(
                text.replace('limit_usd = "1"', 'limit_usd = "2"')
            )
            assert (await gateway.client.post("/scheduler/reload")).status_code == 200
            assert (await waiting).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("first", ["", "/p/a"])
def test_a_model_whose_calls_are_known_to_cost_more_than_the_limit_is_refused(
    tmp_path: Path, first: str
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, "[projects.a]\n") as gateway:
            # Another project, or the same one before it had a budget, has called the model.
            answer = await gateway.ask(f"{first}{CHAT}")
            assert answer.status_code == 200, answer.text
            cost = await gateway.record(answer)
            assert cost.micro_usd
            tiny = f"{cost.micro_usd / 4_000_000:.6f}"
            limit = {"limitUsd": tiny, "window": "day"}
            scope = {"scope": "session:tiny"}
            changed = await gateway.client.patch("/budgets", params=scope, json=limit)
            assert changed.status_code == 200, changed.text
            headers = {"x-headgate-scope": "session:tiny"}
            answer = await gateway.ask(f"/p/a{CHAT}", headers=headers)
            assert answer.status_code == 402, answer.text
            assert "session:tiny" in error_of(answer)["message"]
            assert len(gateway.upstream.requests) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_a_model_without_a_price_is_refused_where_dollars_are_limited(
    tmp_path: Path, path: str
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, budget("5"), prices="") as gateway:
            answer = await gateway.ask(f"/p/a{path}", model="mystery-9")
            assert answer.status_code == 400, answer.text
            message = error_of(answer)["message"]
            assert "mystery-9" in message
            assert "project:a" in message
            assert "did you mean" not in message
            assert not gateway.upstream.requests
            answer = await gateway.ask(path, model="mystery-9")
            assert answer.status_code == 200, "nothing is limited there"
            record = await gateway.record(answer)
            assert record.is_unpriced
            assert record.tokens == gateway.upstream.bill[-1].tokens

    asyncio.run(scenario())


def test_what_answers_cost_and_what_is_left_stands_in_their_headers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, budget("5")) as gateway:
            await gateway.ask(f"/p/a{MESSAGES}", "[[delay 0.05]]")
            answer = await gateway.ask(f"/p/a{MESSAGES}", "[[delay 0.05]]")
            record = await gateway.record(answer)
            assert usd(float(answer.headers["x-headgate-cost-usd"])) == record.micro_usd
            assert 4.0 < float(answer.headers["x-headgate-remaining-usd"]) <= 5.0
            answer = await gateway.ask(MESSAGES, "[[delay 0.05]]")
            assert "x-headgate-remaining-usd" not in answer.headers, "nothing is limited"
            streamed = await gateway.ask(f"/p/a{MESSAGES}", is_stream=True)
            assert "x-headgate-cost-usd" not in streamed.headers, "nobody knows it yet"
            assert float(streamed.headers["x-headgate-remaining-usd"]) <= 5.0

    asyncio.run(scenario())


def test_codex_sees_the_windows_of_its_budgets(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = budget("5", 'window = "rolling:5h"')
        text += '[budgets."project:a/agent:codex"]\nlimit_usd = "1"\nwindow = "week"\n'
        async with gateway_service(tmp_path, text) as gateway:
            headers = CODEX | {"x-headgate-scope": "project:a/agent:codex"}
            path = f"/p/a{RESPONSES}"
            answer = await gateway.ask(path, "[[delay 0.05]]", headers=headers)
            assert answer.status_code == 200, answer.text
            minutes = {
                answer.headers[f"x-codex-{name}-window-minutes"]
                for name in ("primary", "secondary")
            }
            assert minutes == {"300", "10080"}
            assert 0 <= float(answer.headers["x-codex-primary-used-percent"]) <= 100
            assert (
                "x-codex-primary-window-minutes"
                not in (await gateway.ask(path, headers=headers | {"user-agent": "other"})).headers
            )

    asyncio.run(scenario())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["strict", "expected"])
async def test_a_request_without_a_length_is_not_told_to_lower_it(
    tmp_path: Path, path: str, mode: str
) -> None:
    async with gateway_service(tmp_path, budget("0.0000001", f'reserve = "{mode}"')) as gateway:
        field = "max_output_tokens" if path == RESPONSES else "max_tokens"
        length: dict[str, Any] = {field: None}
        answer = await gateway.ask(f"/p/a{path}", **length)
        assert answer.status_code == 402, answer.text
        message = error_of(answer)["message"]
        either = "max_completion_tokens or max_tokens"
        assert f"set {either if path == CHAT else field}" in message
        assert "lower" not in message
        model = (await gateway.record(answer)).model
        window = PriceList().context_window(model)
        assert (f"sets none, so {window:,} tokens are reserved" in message) is (mode == "strict")
        length[field] = 100
        answer = await gateway.ask(f"/p/a{path}", **length)
        assert "lower max_tokens" in error_of(answer)["message"]


def test_a_strict_budget_is_not_passed_by_calls_side_by_side(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = budget("0.01", 'reserve = "strict"')
        async with gateway_service(tmp_path, text) as gateway:
            calls = [
                gateway.start(f"/p/a{CHAT}", f"{number} [[words 90]]", max_tokens=90)
                for number in range(60)
            ]
            answers = [await one for one in calls]
            codes = {one.status_code for one in answers}
            assert codes == {200, 402}
            status = await gateway.status("project:a")
            assert float(status["overrunUsd"]) == 0.0
            assert float(status["reservedUsd"]) == 0.0
            assert float(status["spentUsd"]) <= 0.01
            billed = sum(one.input_tokens + 2 * one.output_tokens for one in gateway.upstream.bill)
            assert usd(float(status["spentUsd"])) == pytest.approx(billed, abs=2)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("where", "is_strict"),
    [("project", True), ("parent budget", True), ("header", True), ("gateway", True), ("", False)],
)
def test_who_may_ask_for_strict_calls(tmp_path: Path, where: str, is_strict: bool) -> None:
    async def scenario() -> None:
        strict = 'reserve = "strict"\n'
        text = f"[projects.a]\n{strict if where == 'project' else ''}"
        text += '[budgets."project:a"]\nlimit_usd = "5"\n'
        text += strict if where == "parent budget" else ""
        text += f"[gateway]\n{strict}" if where == "gateway" else ""
        headers = {"x-headgate-scope": "project:a/run:1"}
        headers |= {"x-headgate-reserve": "strict"} if where == "header" else {}
        async with gateway_service(tmp_path, text) as gateway:
            answer = await gateway.ask(f"/p/a{CHAT}", headers=headers, max_tokens=100)
            assert answer.status_code == 200, answer.text
            record = await gateway.record(answer)
            # A strict call holds more than its prompt and its answer can be.
            assert (record.reserved_tokens > 500) is is_strict

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("scopes", "warning"),
    [
        ("session:nigthly", "did you mean session:nightly?"),
        ("session:nightly, team:x", "Budget 'team:x' is not defined, so nothing limits it."),
        ("session:nightly", None),
        ("session:nightly/run:1", None),
        ("project:a/run:1", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_warns_of_budgets_that_nobody_has_defined(
    tmp_path: Path, scopes: str, warning: str | None, is_stream: bool
) -> None:
    async def scenario() -> None:
        text = '[projects.a]\n[budgets."session:nightly"]\nlimit_usd = "5"\n'
        async with gateway_service(tmp_path, text) as gateway:
            headers = {"x-headgate-scope": scopes}
            for _ in range(2):
                answer = await gateway.ask(f"/p/a{CHAT}", headers=headers, is_stream=is_stream)
                assert answer.status_code == 200, answer.text
                said = answer.headers.get("x-headgate-warning")
                assert (said is None) == (warning is None)
                assert (said or "").endswith(warning or "")

    asyncio.run(scenario())


def test_a_bound_token_hears_of_its_own_budgets_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = '[projects.a]\n[agents.b]\n[budgets."session:nightly"]\nlimit_usd = "5"\n'
        async with gateway_service(tmp_path, text) as gateway:
            bounds = Bounds(agent_id="b")
            new = new_token(name="t", permissions=("submit",), now=time.time(), bounds=bounds)
            await gateway.service.api.tokens.add(new.kept)
            for scope, line in (
                ("agent:b", None),
                ("agent:b/x:y", "Budget 'agent:b/x:y' is not defined, so nothing limits it."),
            ):
                headers = {"authorization": f"Bearer {new.text}", "x-headgate-scope": scope}
                answer = await gateway.ask(CHAT, headers=headers)
                assert answer.status_code == 200, answer.text
                assert answer.headers.get("x-headgate-warning") == line

    asyncio.run(scenario())


def test_a_header_cannot_ask_for_less_care(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, budget("5", 'reserve = "strict"')) as gateway:
            headers = {"x-headgate-reserve": "expected"}
            answer = await gateway.ask(f"/p/a{CHAT}", headers=headers, max_tokens=100)
            assert (await gateway.record(answer)).reserved_tokens > 500

    asyncio.run(scenario())


def test_a_budget_is_made_strict_while_the_service_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, budget("5")) as gateway:
            for reserve, basis in (("strict", "given"), (None, "learned")):
                change = {"reserve": reserve}
                answer = await gateway.client.patch("/budgets?scope=project:a", json=change)
                assert answer.status_code == 200, answer.text
                answer = await gateway.ask(f"/p/a{CHAT}", max_tokens=50_000)
                assert (await gateway.record(answer)).reserved_basis == basis

    asyncio.run(scenario())


def test_a_strict_call_that_nobody_can_bound_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, budget("5", 'reserve = "strict"')) as gateway:
            tools = [{"type": "web_search_20250305", "name": "web_search"}]
            answer = await gateway.ask(f"/p/a{MESSAGES}", tools=tools)
            assert answer.status_code == 400, answer.text
            assert "max_uses" in error_of(answer)["message"]
            answer = await gateway.ask(f"/p/a{MESSAGES}", MAX_TOKENS=100_000)
            assert answer.status_code == 400, answer.text
            assert "MAX_TOKENS" in error_of(answer)["message"]
            assert not gateway.upstream.requests
            assert (await gateway.ask(MESSAGES, MAX_TOKENS=100_000)).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_a_strict_call_may_be_shortened_to_what_is_left(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        text = budget("0.005", 'reserve = "strict"\n[gateway]\nclamp = true')
        limit: dict[str, Any] = {"max_tokens": 50_000}
        if path == RESPONSES:
            limit = {"max_output_tokens": 50_000}
        async with gateway_service(tmp_path, text) as gateway:
            answer = await gateway.ask(f"/p/a{path}", **limit)
            assert answer.status_code == 200, answer.text
            lowered = int(answer.headers["x-headgate-max-tokens"])
            assert 0 < lowered < 5_000
            (request,) = gateway.upstream.requests
            assert request.max_tokens == lowered
            record = await gateway.record(answer)
            assert record.reserved_micro_usd <= usd(0.005)
            assert record.reserved_basis == "given"
            answer = await gateway.ask(path)
            assert "x-headgate-max-tokens" not in answer.headers

    asyncio.run(scenario())


async def test_a_stream_that_is_open_by_then_is_shortened_where_people_see_it(
    tmp_path: Path,
) -> None:
    text = budget("0.005", 'reserve = "strict"\n[gateway]\nclamp = true')
    async with gateway_service(tmp_path, text, inflight=1) as gateway:
        gateway.gateway.patience = Patience(open_seconds=0.01)
        first = gateway.start(CHAT, "[[until go]]")
        await gateway.until(lambda: bool(gateway.upstream.requests))
        body = asking(CHAT, is_stream=True, max_tokens=50_000)
        async with gateway.client.stream("POST", f"/p/a{CHAT}", json=body) as answer:
            gateway.upstream.releases.add("go")
            await answer.aread()
        assert (await first).status_code == 200
        assert "x-headgate-max-tokens" not in answer.headers, "they were sent before"
        lowered = gateway.upstream.requests[-1].max_tokens
        assert lowered is not None
        assert lowered < 5_000
        call_id = answer.headers["x-headgate-call-id"]
        shown = (await gateway.client.get(f"/calls/{call_id}")).json()
        assert shown["maxTokens"] == lowered


def test_a_strict_call_is_shortened_although_a_task_waits_for_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = budget("0.15", f'window = "day"\n[gateway]\nclamp = true\n{ECHO_TARGET}')
        async with gateway_service(tmp_path, text) as gateway:
            await spend(gateway, "0.1")
            task = {"projectId": "a", "agentId": "w", "action": "x", "estimate": {"usd": "0.1"}}
            waiting = (await gateway.client.post("/tasks", json=task)).json()["taskId"]
            state = gateway.service.engine.dispatcher.dispatch_state
            assert state is not None
            await gateway.until(lambda: waiting in state.parking.all_aside())
            strict = {"x-headgate-reserve": "strict"}
            async with asyncio.timeout(ASK_AGAIN_SECONDS / 2):
                answer = await gateway.ask(f"/p/a{CHAT}", headers=strict, max_tokens=60_000)
            assert answer.status_code == 200, answer.text
            assert 0 < int(answer.headers["x-headgate-max-tokens"]) < 50_000

    asyncio.run(scenario())


def test_nothing_is_shortened_unless_the_settings_say_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, budget("0.005", 'reserve = "strict"')) as gateway:
            answer = await gateway.ask(f"/p/a{CHAT}", max_tokens=50_000)
            assert answer.status_code == 402, answer.text

    asyncio.run(scenario())


def test_caches_and_thoughts_are_booked_as_they_are_billed(tmp_path: Path) -> None:
    async def scenario() -> None:
        prices = """
[prices."*"]
input = 10.0
output = 20.0
cached_input = 1.0
cache_write = 12.5
"""
        system = [{"type": "text", "text": "long " * 900, "cache_control": {"type": "ephemeral"}}]
        async with gateway_service(tmp_path, budget("5"), prices=prices) as gateway:
            for name in ("cache_write_tokens", "cached_tokens"):
                answer = await gateway.ask(f"/p/a{MESSAGES}", "[[think 20]]", system=system)
                assert answer.status_code == 200, answer.text
                record = await gateway.record(answer)
                charge = gateway.upstream.bill[-1]
                assert getattr(record, name) == getattr(charge, name) > 500
                plain = charge.input_tokens - charge.cached_tokens - charge.cache_write_tokens
                cost = 10.0 * plain + charge.cached_tokens + 12.5 * charge.cache_write_tokens
                assert record.micro_usd == pytest.approx(cost + 20.0 * charge.output_tokens, abs=2)
                assert record.assumed_micro_usd == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": -5, "output_tokens": -7},
        {"input_tokens": 10**30, "output_tokens": 1},
        {"input_tokens": "many", "output_tokens": None},
        {},
    ],
)
def test_a_usage_that_cannot_be_is_not_believed(tmp_path: Path, usage: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, budget("5")) as gateway:
            for is_stream in (False, True):
                gateway.upstream.script.append(Plan(usage=usage))
                answer = await gateway.ask(f"/p/a{MESSAGES}", is_stream=is_stream)
                assert answer.status_code == 200
                record = await gateway.record(answer)
                assert record.tokens is not None
                assert record.tokens >= gateway.upstream.bill[-1].tokens
                assert record.assumed_tokens > 0
            status = await gateway.status("project:a")
            assert float(status["reservedUsd"]) == 0.0

    asyncio.run(scenario())


def test_a_call_that_waits_for_a_provider_holds_no_money(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = budget("0.00035", "[gateway]\nescrow = false")
        async with gateway_service(tmp_path, text) as gateway:
            gateway.upstream.account(OPENAI_KEY).fail(429, retry_after="30")
            waiting = gateway.start(f"/p/a{CHAT}", max_tokens=100)
            await gateway.until(lambda: bool(gateway.upstream.requests))
            await gateway.until_waiting()
            async with asyncio.timeout(10.0):
                answer = await gateway.ask(f"/p/a{MESSAGES}", max_tokens=100)
            assert answer.status_code == 200, answer.text
            waiting.cancel()
            await gateway.until_idle()
            status = await gateway.status("project:a")
            assert float(status["reservedUsd"]) == 0.0

    asyncio.run(scenario())


def test_money_that_a_call_gives_back_goes_to_those_that_wait_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = budget("0.00035", "[gateway]\nescrow = false")
        async with gateway_service(tmp_path, text) as gateway:
            limited = Plan(status=429, retry_after="30", until="go")
            gateway.upstream.account(OPENAI_KEY).script.append(limited)
            first = gateway.start(f"/p/a{CHAT}", max_tokens=100)
            await gateway.until(lambda: bool(gateway.upstream.requests))
            second = gateway.start(f"/p/a{MESSAGES}", max_tokens=100)
            await gateway.until_waiting()
            gateway.upstream.releases.add("go")
            async with asyncio.timeout(ASK_AGAIN_SECONDS / 2):
                assert (await second).status_code == 200
            first.cancel()

    asyncio.run(scenario())


async def bound_token(gateway: GatewayService, bounds: Bounds | None = None) -> str:
    """Return a token that is for project a alone, or has other bounds."""
    now = gateway.service.engine.now()
    bounds = bounds or Bounds(project_id="a")
    new = new_token(name="t", permissions=("submit", "read"), now=now, bounds=bounds)
    await gateway.service.api.tokens.add(new.kept)
    return new.text


def test_a_bound_token_is_told_the_figures_of_its_own_budget(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, LIMITED) as gateway:
            await spend(gateway, "0.99")
            headers = ANTHROPIC_VERSION | {"x-api-key": await bound_token(gateway)}
            answer = await gateway.ask(f"/p/a{MESSAGES}", headers=headers, max_tokens=8_000)
            assert answer.status_code == 402, answer.text
            message = error_of(answer)["message"]
            assert message.startswith("Budget exceeded: spent $0.9900 of $1.0000 limit; $0.")
            figures = "$0.01 left (scope project:a, $0.00 reserved)"
            assert figures in message
            assert "ask an operator for a higher limit" in message
            call_id = answer.headers["x-headgate-call-id"]
            why = (await gateway.client.get(f"/calls/{call_id}/why")).json()
            assert why["state"] == "refused"
            assert "raise the limit" in why["error"]

    asyncio.run(scenario())


async def test_calls_of_an_agents_token_use_up_its_own_budget(tmp_path: Path) -> None:
    text = '[projects.a]\n[budgets."project:a/agent:pr-7"]\nlimit_usd = "0.0005"\n'
    async with gateway_service(tmp_path, text) as gateway:
        bounds = Bounds(project_id="a", agent_id="pr-7")
        headers = ANTHROPIC_VERSION | {"x-api-key": await bound_token(gateway, bounds)}
        assert (await gateway.ask(MESSAGES, headers=headers)).status_code == 200
        books = await gateway.status("project:a/agent:pr-7")
        assert float(books["spentUsd"]) > 0
        await spend(gateway, books["remainingUsd"], "project:a/agent:pr-7")
        refused = await gateway.ask(MESSAGES, headers=headers)
        assert refused.status_code == 402, refused.text
        assert "scope project:a/agent:pr-7" in error_of(refused)["message"]
        assert gateway.service.api.shares.scopes.count("the project a") == 0, "it named none"
        assert (await gateway.ask(f"/p/a{MESSAGES}", headers=ANTHROPIC_VERSION)).status_code == 200


def test_a_budget_that_resets_later_than_a_call_may_wait_names_the_setting(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, DAILY.format(seconds=2)) as gateway:
            await spend(gateway, "0.99995")
            answer = await gateway.ask(f"/p/a{MESSAGES}", max_tokens=100)
            assert answer.status_code == 402, answer.text
            message = error_of(answer)["message"]
            assert "a call waits at most 2 s (gateway.max_wait_seconds = 2)" in message

    asyncio.run(scenario())


def test_a_bound_token_is_not_told_the_figures_of_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = '[projects.a]\n[budgets.root]\nlimit_usd = "0.000001"\n'
        async with gateway_service(tmp_path, text) as gateway:
            headers = ANTHROPIC_VERSION | {"x-api-key": await bound_token(gateway)}
            await gateway.ask(f"/p/a{MESSAGES}", headers=headers)
            answer = await gateway.ask(f"/p/a{MESSAGES}", headers=headers)
            assert answer.status_code == 402, answer.text
            assert "$" not in error_of(answer)["message"]
            record = await gateway.record(answer)
            assert "$0.000001" in (record.error or ""), "the operator sees them"
            assert "x-headgate-remaining-usd" not in answer.headers

    asyncio.run(scenario())
