"""Calls that wait: kept alive in their own protocol, with their place, in a fair order."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path

import httpx2
import pytest

from gateway.gateway_service import (
    CHAT,
    MESSAGES,
    OPENAI_KEY,
    RESPONSES,
    GatewayService,
    asking,
    error_of,
    gateway_service,
)
from gateway.test_gateway_isolation import token
from headgate.core.gates import GatePart
from headgate.gateway.gateway import Patience

COMPLETIONS = "/v1/completions"
STREAMED = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
QUICK = Patience(open_seconds=0.02, keep_alive_seconds=0.02)
OPENINGS = {
    CHAT: "chat.completion.chunk",
    COMPLETIONS: "text_completion",
    RESPONSES: "response.created",
    MESSAGES: "message_start",
}


async def hold_upstream(gateway: GatewayService, path: str) -> asyncio.Task[httpx2.Response]:
    """Make the one call that may run run, until `go` is released."""
    first = gateway.start(path, "[[until go]]")
    await gateway.until(lambda: bool(gateway.upstream.requests))
    return first


@pytest.mark.parametrize("path", STREAMED)
def test_a_call_waits_for_the_upstream_and_is_then_served(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            first = await hold_upstream(gateway, path)
            second = gateway.start(path, "second")
            await gateway.until_waiting()
            assert len(gateway.upstream.requests) == 1
            gateway.upstream.releases.add("go")
            assert (await first).status_code == 200
            answer = await second
            assert answer.status_code == 200
            assert int(answer.headers["x-headgate-waited-ms"]) > 0

    asyncio.run(scenario())


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_that_waits_is_kept_alive_in_its_protocol(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            gateway.gateway.patience = QUICK
            first = await hold_upstream(gateway, path)
            body = asking(path, "second", is_stream=True, store=False)
            pieces: list[str] = []
            async with gateway.client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert answer.headers["x-headgate-call-id"]
                async for piece in answer.aiter_text():
                    pieces.append(piece)
                    if len(pieces) == 3:
                        assert OPENINGS[path] in pieces[0]
                        assert len(gateway.upstream.requests) == 1, "it still waits"
                        gateway.upstream.releases.add("go")
            await first
            assert "42" in "".join(pieces)
            assert "".join(pieces).count("message_start") <= 2
            record = await gateway.record(answer)
            assert record.tokens == gateway.upstream.bill[-1].tokens
            assert record.state.value == "done"

    asyncio.run(scenario())


@pytest.mark.parametrize("path", STREAMED)
def test_a_wait_that_is_given_up_ends_in_the_stream_with_the_reason(
    tmp_path: Path, path: str
) -> None:
    async def scenario() -> None:
        text = "[gateway]\nmax_wait_seconds = 0.3\n"
        async with gateway_service(tmp_path, text, inflight=1) as gateway:
            gateway.gateway.patience = QUICK
            first = await hold_upstream(gateway, path)
            answer = await gateway.ask(path, "second", is_stream=True, store=False)
            assert answer.status_code == 200
            assert "; position 1 among the waiting calls of its agent" in answer.text
            events = [
                json.loads(line.removeprefix("data: "))
                for line in answer.text.splitlines()
                if line.startswith("data: {")
            ]
            if path == RESPONSES:
                assert events[-1]["type"] == "response.failed"
                assert len({one["response"]["id"] for one in events}) == 1
                numbers = [one["sequence_number"] for one in events]
                assert numbers == list(range(len(numbers)))
            else:
                assert "waited" in events[-1]["error"]["message"]
            gateway.upstream.releases.add("go")
            await first
            record = await gateway.record(answer)
            assert record.state.value == "refused"
            assert record.tokens is None

    asyncio.run(scenario())


def test_a_call_without_a_stream_is_asked_to_come_back_and_keeps_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = "[gateway]\nhold_seconds = 0.05\n"
        async with gateway_service(tmp_path, text, inflight=1) as gateway:
            first = await hold_upstream(gateway, CHAT)
            answer = await gateway.ask(CHAT, "early")
            assert answer.status_code == 429, answer.text
            assert "; position 1 among" in error_of(answer)["message"]
            assert 1 <= int(answer.headers["retry-after"]) <= 55
            call_id = answer.headers["x-headgate-call-id"]
            waiting = {"max_tokens": 50}
            late = asyncio.create_task(
                gateway.ask(CHAT, "late", is_stream=True, headers={"x-session-id": "s"}, **waiting)
            )
            await gateway.until_waiting()
            early = gateway.start(CHAT, "early")
            await gateway.until_waiting(2)
            came_back = next(one for one in gateway.calls.live() if one.id == call_id)
            others = [one for one in gateway.calls.live() if one.id != call_id]
            assert all(came_back.created_at <= one.created_at for one in others[1:])
            gateway.upstream.releases.add("go")
            await first
            answers = [await early, await late]
            assert [one.status_code for one in answers] == [200, 200]
            order = [
                request.fields["messages"][0]["content"] for request in gateway.upstream.requests
            ]
            assert order[1:] == ["early", "late"]
            assert answers[0].headers["x-headgate-call-id"] == call_id

    asyncio.run(scenario())


@pytest.mark.parametrize("is_stream", [True, False])
async def test_whoever_waits_in_vain_is_told_for_how_much_longer(
    tmp_path: Path, *, is_stream: bool
) -> None:
    text = "[gateway]\nhold_seconds = 0.2\nmax_wait_seconds = 0.3\n"
    async with gateway_service(tmp_path, text) as gateway:
        gateway.gateway.patience = QUICK
        gateway.upstream.account(OPENAI_KEY).fail(429, retry_after="3000")
        answer = await gateway.ask(CHAT, is_stream=is_stream)
        assert "; position 1 among the waiting calls of its agent, about " in answer.text
        assert re.search("about (50 min|49 min [0-9]+ s) to go", answer.text), answer.text


@pytest.mark.parametrize("of", ["agents", "projects"])
async def test_the_expected_time_counts_what_others_are_given_first(
    tmp_path: Path, of: str
) -> None:
    names = "bcdef"
    projects = "".join(f"[projects.{name}]\n" for name in names) if of == "projects" else ""
    async with gateway_service(tmp_path, projects, inflight=1) as gateway:
        first = await hold_upstream(gateway, CHAT)
        waiting = []
        for count, name in enumerate(names, 1):
            path = f"/p/{name}{CHAT}" if projects else f"/p/default/{name}{CHAT}"
            waiting.append(gateway.start(path, f"[[until {name}]]"))
            await gateway.until_waiting(count)
        gateway.upstream.releases.add("go")
        assert (await first).status_code == 200
        # Now it is known how long one takes.
        await gateway.until_waiting(len(names) - 1)
        left = [one for one in gateway.calls.live() if one.state.value == "waiting"]
        left.sort(key=lambda one: one.created_at)
        whys = [(await gateway.client.get(f"/calls/{one.id}/why")).json() for one in left]
        assert [one["position"] for one in whys] == [1] * len(left)
        pace = whys[0]["expectedSeconds"]
        assert [one["expectedSeconds"] / pace for one in whys] == pytest.approx([1, 2, 3, 4])
        gateway.upstream.releases.update(names)
        assert {(await one).status_code for one in waiting} == {200}


async def test_a_call_waits_across_a_five_hour_reset_if_its_client_does(tmp_path: Path) -> None:
    """Its provider is asked again after an hour: somebody may have paid for more."""
    hours = 5
    async with gateway_service(tmp_path) as gateway:
        gateway.gateway.patience = QUICK
        for _ in range(hours):
            gateway.upstream.account(OPENAI_KEY).fail(429, retry_after=str(hours * 3_600))
        call = gateway.start(CHAT, is_stream=True)
        for hour in range(1, hours + 1):
            await gateway.until(partial(_is_refused, gateway, hour))
            (record,) = gateway.calls.live()
            why = (await gateway.client.get(f"/calls/{record.id}/why")).json()
            assert 3_000 < why["expectedSeconds"] <= 3_600
            gateway.calls.open(GatePart("slot", "openai/gpt-5"))
        answer = await call
        assert (answer.status_code, answer.text.count("[DONE]")) == (200, 1)
        assert (await gateway.record(answer)).tries == hours + 1


def _is_refused(gateway: GatewayService, times: int) -> bool:
    return len(gateway.upstream.requests) == times and gateway.waiting == 1


def test_a_wait_has_an_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = "[gateway]\nmax_wait_seconds = 0.05\n"
        async with gateway_service(tmp_path, text, inflight=1) as gateway:
            first = await hold_upstream(gateway, MESSAGES)
            answer = await gateway.ask(MESSAGES, "second")
            assert answer.status_code == 503
            assert "waited for 0.05 s" in error_of(answer)["message"]
            gateway.upstream.releases.add("go")
            assert (await first).status_code == 200
            assert len(gateway.upstream.requests) == 1

    asyncio.run(scenario())


def test_what_a_call_waits_for_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            first = await hold_upstream(gateway, MESSAGES)
            others = [gateway.start(MESSAGES, "same") for _ in range(2)]
            await gateway.until_waiting(2)
            found = [
                (await gateway.client.get(f"/calls/{one.id}/why")).json()
                for one in gateway.calls.live()
                if one.state.value == "waiting"
            ]
            assert sorted(one["position"] for one in found) == [1, 2]
            assert all(one["reasons"] for one in found)
            assert "upstream" in found[0]["reasons"][0]["message"]
            gateway.upstream.releases.add("go")
            for one in (first, *others):
                assert (await one).status_code == 200

    asyncio.run(scenario())


def test_a_client_that_leaves_while_it_waits_keeps_its_place_for_a_retry(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            first = await hold_upstream(gateway, MESSAGES)
            leaving = gateway.start(MESSAGES, "mine")
            await gateway.until_waiting()
            (mine,) = [one.id for one in gateway.calls.live() if one.state.value == "waiting"]
            leaving.cancel()
            await gateway.until_waiting(0)
            other = gateway.start(MESSAGES, "other")
            await gateway.until_waiting()
            again = gateway.start(MESSAGES, "mine")
            await gateway.until_waiting(2)
            gateway.upstream.releases.add("go")
            answers = [await one for one in (first, again, other)]
            assert [one.status_code for one in answers] == [200, 200, 200]
            assert answers[1].headers["x-headgate-call-id"] == mine
            said = [one.fields["messages"][0]["content"] for one in gateway.upstream.requests]
            assert said[1:] == ["mine", "other"]
            assert len(gateway.upstream.bill) == 3, "it was sent once"

    asyncio.run(scenario())


def test_an_equal_call_beside_an_open_one_is_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            first = await hold_upstream(gateway, MESSAGES)
            others = [gateway.start(MESSAGES, "same") for _ in range(3)]
            await gateway.until_waiting(3)
            assert len({one.id for one in gateway.calls.live()}) == 4
            gateway.upstream.releases.add("go")
            for one in (first, *others):
                assert (await one).status_code == 200
            assert len(gateway.upstream.bill) == 4

    asyncio.run(scenario())


async def test_the_place_of_another_token_cannot_be_taken(tmp_path: Path) -> None:
    text = "[projects.a]\n[projects.b]\n[gateway]\nhold_seconds = 0.05\n"
    async with gateway_service(tmp_path, text, inflight=1) as gateway:
        first = await hold_upstream(gateway, MESSAGES)
        mine = await token(gateway, "a")
        others = [(await token(gateway, one), MESSAGES) for one in ("a", "b")]
        others += [({}, f"/p/{one}{MESSAGES}") for one in ("a", "b")]
        answers = [
            await gateway.ask(path, "mine", headers=headers)
            for headers, path in ((mine, MESSAGES), *others)
        ]
        assert {one.status_code for one in answers} == {429}
        assert len({one.headers["x-headgate-call-id"] for one in answers}) == len(answers)
        again = await gateway.ask(MESSAGES, "mine", headers=mine)
        assert again.headers["x-headgate-call-id"] == answers[0].headers["x-headgate-call-id"]
        gateway.upstream.releases.add("go")
        await first


def test_the_lower_priority_number_goes_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            first = await hold_upstream(gateway, MESSAGES)
            others = []
            for number, priority in enumerate((5, 0, 3)):
                headers = {"x-headgate-priority": str(priority), "x-headgate-agent": "one"}
                others.append(gateway.start(MESSAGES, f"p{priority}", headers=headers))
                await gateway.until_waiting(number + 1)
            gateway.upstream.releases.add("go")
            for one in (first, *others):
                assert (await one).status_code == 200
            said = [one.fields["messages"][0]["content"] for one in gateway.upstream.requests]
            assert said[1:] == ["p0", "p3", "p5"]

    asyncio.run(scenario())


def test_projects_share_a_saturated_upstream_by_their_weights(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = "[projects.a]\ncredit_weight = 3\n[projects.b]\ncredit_weight = 1\n"
        async with gateway_service(tmp_path, text, inflight=2) as gateway:
            first = [gateway.start(MESSAGES, "[[until go]]") for _ in range(2)]
            await gateway.until(lambda: len(gateway.upstream.requests) == 2)
            calls = [
                gateway.start(f"/p/{project}{MESSAGES}", "[[words 20]]")
                for project in "ab"
                for _ in range(160)
            ]
            await gateway.until_waiting(320)
            gateway.upstream.releases.add("go")
            for one in (*first, *calls):
                assert (await one).status_code == 200
            ended = [one for one in gateway.calls.latest() if one.project_id in "ab"]
            # As long as both have something to do.
            begun = sorted(ended, key=lambda one: one.started_at or 0.0)[:200]
            share = sum(one.project_id == "a" for one in begun) / len(begun)
            assert share == pytest.approx(0.75, abs=0.0375)

    asyncio.run(scenario())


def test_a_stop_lets_running_calls_end_and_tells_those_that_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway_service(tmp_path, inflight=1) as gateway:
            first = await hold_upstream(gateway, MESSAGES)
            second = gateway.start(MESSAGES, "second")
            await gateway.until_waiting()
            closing = asyncio.create_task(gateway.gateway.drain(10.0))
            answer = await second
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert (await gateway.ask(MESSAGES, "third")).status_code == 503
            gateway.upstream.releases.add("go")
            assert (await first).status_code == 200
            await closing
            record = await gateway.record(await first)
            assert record.tokens == gateway.upstream.bill[0].tokens

    asyncio.run(scenario())
