"""Upstreams that fail: another key, another member, a pause, a circuit; and what is booked."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from gateway.billing_upstream import BillingUpstream, Plan, Request, openai_headers, unified_headers
from gateway.gateway_service import (
    ANTHROPIC_VERSION,
    CHAT,
    MESSAGES,
    OPENAI_KEY,
    RESPONSES,
    UPSTREAMS,
    asking,
    error_of,
    gateway_service,
)
from headgate.core.dispatch_state import ASK_AGAIN_SECONDS
from headgate.gateway import routing
from headgate.gateway.gateway import Patience

KEYS = {"KEY_A": "key-of-a", "KEY_B": "key-of-b"}
SLOTS = """
[[slots]]
name = "a"
provider = "anthropic"
base_url = "{url}"
key_env = "KEY_A"

[[slots]]
name = "b"
provider = "anthropic"
base_url = "{url}"
key_env = "KEY_B"

[upstreams.anthropic]
kind = "anthropic"
base_url = "{url}"
slots = ["a", "b"]
"""
TWO_UPSTREAMS = """
[upstreams.first]
kind = "openai"
base_url = "{openai_url}"
key_env = "KEY_A"

[upstreams.second]
kind = "openai"
base_url = "{openai_url}"
key_env = "KEY_B"

[models.fast]
route = ["first/gpt-5", "second/gpt-5-mini"]
"""
STREAMED = (CHAT, RESPONSES, MESSAGES)


def keyed(upstream: BillingUpstream, key: str) -> int:
    """Return how many requests came with a key."""
    return sum(one.key == KEYS[key] for one in upstream.requests)


@pytest.mark.parametrize("status", [429, 529, 503, 500, 502])
@pytest.mark.parametrize("is_stream", [True, False])
def test_what_fails_before_the_first_byte_goes_to_the_next_key(
    tmp_path: Path, status: int, is_stream: bool
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            gateway.upstream.script.append(Plan(status=status, retry_after="30"))
            answer = await gateway.ask(MESSAGES, is_stream=is_stream)
            assert answer.status_code == 200, answer.text
            assert keyed(gateway.upstream, "KEY_A") == keyed(gateway.upstream, "KEY_B") == 1
            record = await gateway.record(answer)
            assert record.tries == 2
            assert record.tokens == gateway.upstream.bill[-1].tokens
            assert record.slot in ("a", "b")
            assert record.key_rule

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [429, 529, 503, 500])
def test_a_route_goes_on_to_its_next_member(tmp_path: Path, status: int) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=TWO_UPSTREAMS, environ=KEYS) as gateway:
            gateway.upstream.account(KEYS["KEY_A"]).fail(status, retry_after="30")
            answer = await gateway.ask(CHAT, model="fast")
            assert answer.status_code == 200, answer.text
            assert [one.model for one in gateway.upstream.requests] == ["gpt-5", "gpt-5-mini"]
            record = await gateway.record(answer)
            assert (record.upstream, record.upstream_model) == ("second", "gpt-5-mini")
            assert record.tokens == gateway.upstream.bill[-1].tokens

    asyncio.run(scenario())


def test_an_upstream_that_cannot_be_reached_is_passed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        gone = TWO_UPSTREAMS.replace("{openai_url}", "http://127.0.0.1:9/v1", 1)
        async with gateway_service(tmp_path, upstreams=gone, environ=KEYS) as gateway:
            answer = await gateway.ask(CHAT, model="fast")
            assert answer.status_code == 200, answer.text
            answer = await gateway.ask(CHAT, model="first/gpt-5")
            assert answer.status_code == 502
            assert "127.0.0.1:9" in error_of(answer)["message"]
            record = await gateway.record(answer)
            assert record.tokens is None, "nothing was sent"

    asyncio.run(scenario())


def test_a_call_that_a_dying_upstream_took_is_booked_and_goes_nowhere_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with BillingUpstream() as dying:

            def die(_: Request) -> Plan | None:
                if len(dying.requests) == 1:
                    return None
                assert dying._server is not None
                dying._server.close()
                return Plan(fault="drop")

            dying.decide = die
            routes = TWO_UPSTREAMS.replace("{openai_url}", dying.openai_url, 1)
            async with gateway_service(tmp_path, upstreams=routes, environ=KEYS) as gateway:
                assert (await gateway.ask(CHAT, model="fast")).status_code == 200
                answer = await gateway.ask(CHAT, model="fast")
                assert answer.status_code == 502
                assert [len(one.requests) for one in (dying, gateway.upstream)] == [2, 0]
                record = await gateway.record(answer)
                assert record.assumed_tokens > 0
                assert record.assumed_tokens == record.tokens

    asyncio.run(scenario())


def test_both_members_of_one_upstream_are_tried(tmp_path: Path) -> None:
    async def scenario() -> None:
        same = TWO_UPSTREAMS.replace('"second/gpt-5-mini"', '"first/gpt-5-mini"')
        async with gateway_service(tmp_path, upstreams=same, environ=KEYS) as gateway:
            gateway.upstream.decide = lambda one: Plan(status=500) if one.model == "gpt-5" else None
            answer = await gateway.ask(CHAT, model="fast")
            assert answer.status_code == 200, answer.text
            assert gateway.upstream.bill[-1].model == "gpt-5-mini"

    asyncio.run(scenario())


def test_retries_have_a_budget(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            gateway.upstream.decide = lambda _: Plan(status=500)
            first = await gateway.ask(MESSAGES)
            assert first.status_code == 502
            assert len(gateway.upstream.requests) == 2, "each key once"

    asyncio.run(scenario())


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("fault", ["cut", "error-event"])
def test_after_the_first_byte_the_error_goes_through_in_the_stream(
    tmp_path: Path, path: str, fault: Any
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            gateway.upstream.script.append(Plan(fault=fault, message="it broke"))
            answer = await gateway.ask(path, is_stream=True)
            assert answer.status_code == 200
            assert "error" in answer.text
            if fault == "error-event":
                assert "it broke" in answer.text
            assert len(gateway.upstream.requests) == 1
            record = await gateway.record(answer)
            (charge,) = gateway.upstream.bill
            assert record.tokens is not None
            assert record.tokens >= charge.tokens
            assert record.assumed_tokens > 0

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["cut", "drop", "garbage", "no-usage"])
def test_what_nobody_reported_is_assumed(tmp_path: Path, fault: Any) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            gateway.upstream.script.append(Plan(fault=fault))
            answer = await gateway.ask(CHAT)
            assert answer.status_code == (502 if fault in ("cut", "drop") else 200)
            record = await gateway.latest()
            (charge,) = gateway.upstream.bill
            assert record.tokens is not None
            assert record.tokens >= charge.tokens
            assert record.assumed_tokens == record.tokens
            assert record.assumed_micro_usd == record.micro_usd

    asyncio.run(scenario())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_long_answer_without_usage_is_booked_by_its_length(
    tmp_path: Path, is_stream: bool
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            # What is expected is learned from short answers.
            for _ in range(25):
                await gateway.ask(CHAT, max_tokens=20_000)
            gateway.upstream.script.append(Plan(fault="no-usage", text="word " * 3_000))
            answer = await gateway.ask(CHAT, is_stream=is_stream, max_tokens=20_000)
            record = await gateway.record(answer)
            charge = gateway.upstream.bill[-1]
            assert record.tokens is not None
            assert charge.tokens <= record.tokens <= 20_000 + 100

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [408, 504, 524])
def test_where_somebody_stopped_waiting_what_was_held_is_booked(
    tmp_path: Path, status: int
) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            gateway.upstream.script.append(Plan(status=status))
            answer = await gateway.ask(CHAT)
            assert answer.status_code >= 400
            record = await gateway.latest()
            assert record.tokens
            assert record.assumed_tokens == record.tokens
            assert record.tries == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_an_error_of_the_client_is_passed_on_and_costs_nothing(tmp_path: Path, status: int) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            gateway.upstream.script.append(Plan(status=status, message="your own fault"))
            answer = await gateway.ask(MESSAGES)
            assert answer.status_code == status
            assert error_of(answer)["message"] == "your own fault"
            record = await gateway.record(answer)
            assert record.tokens is None
            assert record.tries == 1

    asyncio.run(scenario())


def test_an_error_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:

            async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 400 Bad\r\ncontent-length: 100\r\n\r\n{")
                await writer.drain()
                writer.close()

            server = await asyncio.start_server(cut, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            text = (tmp_path / "headgate.toml").read_text()
            text = text.replace(gateway.upstream.openai_url, f"http://127.0.0.1:{port}/v1")
            (tmp_path / "headgate.toml").write_text(text)
            assert (await gateway.client.post("/scheduler/reload")).status_code == 200
            answer = await gateway.ask(CHAT)
            assert answer.status_code == 400, answer.text
            record = await gateway.record(answer)
            assert record.tokens is None
            server.close()
            await server.wait_closed()

    asyncio.run(scenario())


def test_with_one_key_a_call_waits_as_long_as_its_provider_asks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            for _ in range(3):
                gateway.upstream.account(OPENAI_KEY).fail(429, retry_after="1")
            first = gateway.start(CHAT, "first")
            await gateway.until(lambda: bool(gateway.upstream.requests))
            await gateway.until_waiting()
            began = time.monotonic()
            other = gateway.start(CHAT, "other")
            await gateway.until_waiting(2)
            (why,) = {
                (await gateway.client.get(f"/calls/{one.id}/why")).json()["reasons"][0]["message"]
                for one in gateway.calls.live()
            }
            assert "429" in why
            for one in (first, other):
                assert (await one).status_code == 200
            assert time.monotonic() - began >= 0.9
            assert len(gateway.upstream.bill) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("is_own_key", [True, False])
def test_a_key_whose_rate_is_used_up_rests_before_it_is_refused(
    tmp_path: Path, is_own_key: bool
) -> None:
    async def scenario() -> None:
        headers = {"authorization": "Bearer sk-own"}
        upstreams = UPSTREAMS.replace('key_env = "O_KEY"', "") if is_own_key else UPSTREAMS
        async with gateway_service(tmp_path, upstreams=upstreams) as gateway:
            told = openai_headers(
                requests=10, remaining_requests=0, tokens=1_000, remaining_tokens=500, reset="1s"
            )
            gateway.upstream.script.append(Plan(headers=told))
            assert (await gateway.ask(CHAT, headers=headers)).status_code == 200
            other = {"authorization": "Bearer sk-other"}
            if is_own_key:
                assert (await gateway.ask(CHAT, headers=other)).status_code == 200
            waiting = gateway.start(CHAT, headers=headers)
            await gateway.until_waiting()
            (live,) = gateway.calls.live()
            why = gateway.calls.why(live.id)
            assert why is not None
            assert "nothing left" in why.reasons[0].message
            assert (await waiting).status_code == 200
            assert 429 not in gateway.upstream.account(OPENAI_KEY).statuses

    asyncio.run(scenario())


def test_a_call_that_all_keys_refuse_has_waited_until_its_last_try(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            for key in KEYS.values():
                gateway.upstream.account(key).fail(429, retry_after="1")
            waiting = gateway.start(MESSAGES)
            await gateway.until(lambda: keyed(gateway.upstream, "KEY_B") == 1)
            await gateway.until_waiting()
            (live,) = gateway.calls.live()
            shown = (await gateway.client.get(f"/calls/{live.id}")).json()
            assert not {"startedAt", "waitedMs", "slot", "keyRule"} & set(shown), shown
            why = (await gateway.client.get(f"/calls/{live.id}/why")).json()
            assert "none of its slots is open" in why["reasons"][0]["message"]
            assert not {"slot", "keyRule"} & set(why)
            answer = await waiting
            assert answer.status_code == 200, answer.text
            waited_ms = int(answer.headers["x-headgate-waited-ms"])
            assert waited_ms >= 900
            record = await gateway.record(answer)
            assert record.started_at is not None
            assert round(1_000 * (record.started_at - record.created_at)) == waited_ms
            assert record.slot in ("a", "b")

    asyncio.run(scenario())


def test_a_call_is_refused_at_once_when_no_key_can_come_back_by_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        keys = {"KEY_A": KEYS["KEY_A"]}
        upstreams = SLOTS.replace('key_env = "KEY_A"', 'key_env = "KEY_A"\nenabled = false')
        async with gateway_service(tmp_path, upstreams=upstreams, environ=keys) as gateway:
            slots = gateway.service.api.slots
            await gateway.until(lambda: all(one.standing.closure for one in slots.statuses()))
            async with asyncio.timeout(10.0):
                answer = await gateway.ask(MESSAGES)
            assert answer.status_code == 401, answer.text
            said = error_of(answer)["message"]
            assert said == (
                "upstream 'anthropic' has no key that works: slot a (disabled in the configuration)"
                ", slot b (no key: slots.b.key_env: the variable KEY_B is not set"
                "; set it where the service starts)"
            )
            shown = (await gateway.client.get("/slots/b")).json()
            assert shown["state"] == "no_key"
            assert "waitUntil" not in shown, "a countdown would begin again each minute"
            assert (await gateway.latest()).state.value == "refused"

    asyncio.run(scenario())


def test_a_call_waits_for_a_key_that_was_paused_by_hand(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            for slot in ("a", "b"):
                assert (await gateway.client.post(f"/slots/{slot}/disable")).status_code == 200
            waiting = gateway.start(MESSAGES)
            await gateway.until_waiting()
            assert (await gateway.client.post("/slots/a/enable")).status_code == 200
            assert (await waiting).status_code == 200

    asyncio.run(scenario())


def test_rates_of_the_settings_hold_for_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = '[rate_limits."upstream:openai"]\nkind = "target"\nrequests_per_minute = 2\n'
        async with gateway_service(tmp_path, text) as gateway:
            for _ in range(2):
                assert (await gateway.ask(CHAT)).status_code == 200
            waiting = gateway.start(CHAT)
            await gateway.until_waiting()
            assert (await gateway.ask(MESSAGES)).status_code == 200, "another upstream"
            waiting.cancel()
            await gateway.until_idle()
            assert len(gateway.upstream.bill) == 3

    asyncio.run(scenario())


def test_a_call_to_an_upstream_that_was_taken_out_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=TWO_UPSTREAMS, environ=KEYS) as gateway:
            gateway.upstream.account(KEYS["KEY_A"]).fail(429, retry_after="30")
            waiting = gateway.start(CHAT, model="first/gpt-5")
            await gateway.until(lambda: bool(gateway.upstream.requests))
            await gateway.until_waiting()
            text = (tmp_path / "headgate.toml").read_text()
            text = text.replace("[upstreams.first]", "[upstreams.third]")
            (tmp_path / "headgate.toml").write_text(text.replace('"first/gpt-5", ', ""))
            assert (await gateway.client.post("/scheduler/reload")).status_code == 200
            async with asyncio.timeout(10.0):
                answer = await waiting
            assert answer.status_code == 503, answer.text
            assert "first" in error_of(answer)["message"]

    asyncio.run(scenario())


async def test_an_upstream_that_was_changed_is_forgotten_when_its_last_call_has_ended(
    tmp_path: Path,
) -> None:
    async with gateway_service(tmp_path) as gateway:
        known = gateway.gateway._upstreams.get("openai")
        assert known is not None
        pool, before = known.pool, ref(known)
        del known
        assert (await gateway.ask(CHAT)).status_code == 200
        running = gateway.start(CHAT, "[[until go]]")
        await gateway.until(lambda: pool.in_use == 1)
        path = tmp_path / "headgate.toml"
        path.write_text(path.read_text().replace("max_inflight = 50", "max_inflight = 51"))
        assert (await gateway.client.post("/scheduler/reload")).status_code == 200
        assert (pool.in_use, pool.idle) == (1, 0)
        assert (await gateway.ask(CHAT)).status_code == 200, "others go on with a new pool"
        gateway.upstream.releases.add("go")
        assert (await running).status_code == 200
        assert (pool.in_use, pool.idle) == (0, 0)
        await gateway.until_idle()
        gc.collect()
        assert before() is None


def test_a_key_may_be_limited_more_often_than_a_call_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "MAX_PAUSE_SECONDS", 0.01)

    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            gateway.upstream.account(OPENAI_KEY).fail(429, times=9, retry_after="1")
            answer = await gateway.ask(CHAT)
            assert answer.status_code == 200, answer.text
            record = await gateway.record(answer)
            assert record.tries == 10

    asyncio.run(scenario())


def test_a_circuit_opens_after_failures_and_closes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "CIRCUIT_SECONDS", 0.3)

    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            gateway.upstream.account(OPENAI_KEY).fail(500, times=routing.CIRCUIT_FAILURES)
            for _ in range(routing.CIRCUIT_FAILURES):
                assert (await gateway.ask(CHAT)).status_code == 502
            waiting = gateway.start(CHAT)
            await gateway.until_waiting()
            found = gateway.calls.why(next(iter(gateway.calls.live())).id)
            assert found is not None
            assert "in a row have failed" in found.reasons[0].message
            assert (await gateway.ask(MESSAGES)).status_code == 200, "another upstream"
            assert (await waiting).status_code == 200

    asyncio.run(scenario())


def test_a_session_stays_on_its_key_and_new_ones_go_to_the_soonest_reset(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
            now = time.time()
            soon = unified_headers(
                five_hours=0.2, resets_at=now + 3_600, week_resets_at=now + 7_200
            )
            late = unified_headers(
                five_hours=0.1, resets_at=now + 3_600, week_resets_at=now + 500_000
            )
            gateway.upstream.account(KEYS["KEY_A"]).headers |= late
            gateway.upstream.account(KEYS["KEY_B"]).headers |= soon

            async def slot_of(session: str) -> str | None:
                headers = {"x-claude-code-session-id": session, **ANTHROPIC_VERSION}
                # Long enough for a provider to cache it.
                prompt = f"{session} " + "word " * 3_000
                answer = await gateway.ask(MESSAGES, prompt, headers=headers)
                return (await gateway.record(answer)).slot

            first = await slot_of("one")
            gateway.upstream.account(KEYS["KEY_A" if first == "a" else "KEY_B"]).fail(500)
            other = await slot_of("two")
            assert {first, other} == {"a", "b"}
            # Both windows are known by now.
            assert [await slot_of(f"new {number}") for number in range(4)] == ["b"] * 4
            for _ in range(3):
                assert await slot_of("one") == first
                assert await slot_of("two") == other
            record = await gateway.latest()
            assert "warm" in record.key_rule

    asyncio.run(scenario())


def test_a_client_that_leaves_in_the_middle_is_booked_exactly(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            body = asking(MESSAGES, "[[words 30]] [[pace 0.01]]", is_stream=True)
            async with gateway.client.stream("POST", MESSAGES, json=body) as answer:
                async for _ in answer.aiter_bytes():
                    break
            record = await gateway.record_of_left(answer)
            (charge,) = gateway.upstream.bill
            assert charge.was_told
            assert record.tokens == charge.tokens
            assert record.assumed_tokens == 0
            assert record.state.value == "cancelled"

    asyncio.run(scenario())


def test_a_client_that_leaves_before_the_head_is_booked_exactly(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            leaving = gateway.start(MESSAGES, "[[until go]]")
            await gateway.until(lambda: bool(gateway.upstream.requests))
            leaving.cancel()
            await asyncio.sleep(0.05)
            gateway.upstream.releases.add("go")
            await gateway.until_idle()
            record = await gateway.latest()
            (charge,) = gateway.upstream.bill
            assert record.tokens == charge.tokens
            assert record.state.value == "cancelled"

    asyncio.run(scenario())


def test_a_stream_that_nobody_reads_is_drained_for_a_while_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path) as gateway:
            gateway.gateway.patience = Patience(drain_seconds=0.2)
            gateway.upstream.script.append(Plan(fault="endless"))
            body = asking(MESSAGES, is_stream=True)
            async with gateway.client.stream("POST", MESSAGES, json=body) as answer:
                async for _ in answer.aiter_bytes():
                    break
            record = await gateway.record_of_left(answer)
            assert record.state.value == "failed"
            assert record.assumed_tokens > 0

    asyncio.run(scenario())


def test_a_moved_call_holds_what_the_other_model_costs(tmp_path: Path) -> None:
    async def scenario() -> None:
        prices = """
[prices."gpt-5"]
input = 1.0
output = 1.0
[prices."gpt-5-mini"]
input = 1000.0
output = 1000.0
"""
        text = """
[budgets."project:default"]
limit_usd = "0.05"
reserve = "strict"
"""
        async with gateway_service(
            tmp_path, text, upstreams=TWO_UPSTREAMS, environ=KEYS, prices=prices
        ) as gateway:
            gateway.upstream.account(KEYS["KEY_A"]).fail(500)
            answer = await gateway.ask(CHAT, model="fast")
            assert answer.status_code == 402, answer.text
            assert len(gateway.upstream.requests) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("inflight", [1, 50])
def test_a_call_that_fails_goes_on_with_its_money_before_those_that_wait_for_it(
    tmp_path: Path, inflight: int
) -> None:
    async def scenario() -> None:
        slots = f"{SLOTS}max_inflight = {inflight}\n"
        text = """
[projects.a]
[budgets."project:a"]
limit_usd = "0.00035"
[gateway]
escrow = false
"""
        path, urgent = f"/p/a{MESSAGES}", {"x-headgate-priority": "-1"}
        async with gateway_service(tmp_path, text, upstreams=slots, environ=KEYS) as gateway:
            gateway.upstream.script.append(Plan(status=500, until="go"))
            first = gateway.start(path)
            await gateway.until(lambda: len(gateway.upstream.requests) == 1)
            waits = gateway.start(path, headers=urgent)
            await gateway.until_waiting()
            gateway.upstream.releases.add("go")
            async with asyncio.timeout(ASK_AGAIN_SECONDS / 2):
                assert (await first).status_code == 200
            waits.cancel()

    asyncio.run(scenario())


NONE_LEFT = {
    "anthropic-ratelimit-requests-limit": "10",
    "anthropic-ratelimit-requests-remaining": "0",
    "anthropic-ratelimit-requests-reset": "2099-01-01T00:00:00Z",
}


@pytest.mark.parametrize("status", [200, 429])
async def test_a_rate_of_one_model_closes_no_slot(tmp_path: Path, status: int) -> None:
    one_slot = SLOTS.replace('slots = ["a", "b"]', 'slots = ["a"]')
    async with gateway_service(tmp_path, upstreams=one_slot, environ=KEYS) as gateway:
        limited = Plan(status=status, headers=NONE_LEFT, retry_after="1800")
        gateway.upstream.script.append(limited)
        first = gateway.start(MESSAGES, model="claude-haiku-4-5")
        if status == 200:
            assert (await first).status_code == 200
        else:
            await gateway.until(lambda: len(gateway.upstream.requests) == 1)
            await gateway.until_waiting()
        waiting = gateway.start(MESSAGES, "next", model="claude-haiku-4-5")
        await gateway.until_waiting(1 if status == 200 else 2)
        other = await gateway.ask(MESSAGES, model="claude-sonnet-5")
        assert other.status_code == 200, other.text
        assert (await gateway.record(other)).slot == "a"
        (call_id, *_) = [one.id for one in gateway.calls.live()]
        why = (await gateway.client.get(f"/calls/{call_id}/why")).json()
        assert any("until" in one["message"] for one in why["reasons"]), why
        for one in (first, waiting):
            one.cancel()


async def test_a_rate_of_one_model_sends_it_to_another_key(tmp_path: Path) -> None:
    async with gateway_service(tmp_path, upstreams=SLOTS, environ=KEYS) as gateway:
        gateway.upstream.script.append(Plan(headers=NONE_LEFT))
        used = [(await gateway.record(await gateway.ask(MESSAGES))).slot for _ in range(3)]
        assert used[1] == used[2] != used[0]
