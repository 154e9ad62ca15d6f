"""Two nodes on one PostgreSQL: a call is decided in one place, whichever node it came to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from gateway.billing_upstream import BillingUpstream
from gateway.gateway_service import ANTHROPIC_KEY, CHAT, MESSAGES, asking
from headgate.storage.call_rows import LOST
from service.support import ServiceProcess, running_service, wait_until

SETTINGS = """
[scheduler]
node_lease_seconds = 2.0

[upstreams.anthropic]
kind = "anthropic"
base_url = "{url}"
models = ["claude-*"]
max_inflight = 1

[upstreams.openai]
kind = "openai"
base_url = "{openai_url}"

[projects.team]

[budgets."project:team"]
limit_usd = "1"

[prices."*"]
input = 1.0
output = 2.0
"""
KEY = {"authorization": f"Bearer {ANTHROPIC_KEY}"}


@contextmanager
def two_nodes(
    folder: Path, store: str, upstream: BillingUpstream
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Run two nodes in front of a provider; the first one decides."""
    path = folder / "headgate.toml"
    path.write_text(SETTINGS.format(url=upstream.url, openai_url=upstream.openai_url))
    arguments = ("--store", store, "--config", str(path))
    for name in ("first", "second"):
        (folder / name).mkdir()
    with running_service(folder / "first", *arguments) as first:
        wait_until(first.is_ready, seconds=20.0, what=first.output)
        with running_service(folder / "second", *arguments) as second:
            wait_until(second.is_ready, seconds=20.0, what=second.output)
            assert second.ask("GET", "/readyz").body["role"] == "node"
            yield first, second


async def test_a_call_to_any_node_is_decided_by_one(tmp_path: Path, postgres_url: str) -> None:
    """Whole and streamed answers come back through the other node, and the books are one."""
    async with BillingUpstream() as upstream, httpx2.AsyncClient(timeout=30.0) as client:
        stack = two_nodes(tmp_path, postgres_url, upstream)
        first, second = await asyncio.to_thread(stack.__enter__)
        try:
            for node in (first, second):
                for is_stream in (False, True):
                    for path in (CHAT, MESSAGES):
                        answer = await client.post(
                            f"{node.address}/p/team{path}",
                            json=asking(path, is_stream=is_stream),
                            headers=KEY,
                        )
                        assert answer.status_code == 200, answer.text
                        assert answer.headers["x-headgate-call-id"].startswith("call-")
                        assert "42" in answer.text
            billed = sum(one.input_tokens + one.output_tokens for one in upstream.bill)
            assert len(upstream.bill) == 8
            for node in (first, second):
                status = await client.get(f"{node.address}/budgets/status?scope=project:team")
                booked = status.json()["spentTokens"] + status.json()["overrunTokens"]
                assert booked == billed
            refused = await client.post(
                f"{second.address}/p/nobody{CHAT}", json=asking(CHAT), headers=KEY
            )
            assert refused.status_code == 400
            assert "nobody" in refused.json()["error"]["message"]
        finally:
            await asyncio.to_thread(stack.__exit__, None, None, None)


async def test_the_permits_of_an_upstream_hold_over_all_nodes(
    tmp_path: Path, postgres_url: str
) -> None:
    async with BillingUpstream() as upstream, httpx2.AsyncClient(timeout=30.0) as client:
        stack = two_nodes(tmp_path, postgres_url, upstream)
        nodes = await asyncio.to_thread(stack.__enter__)
        try:
            answers = await asyncio.gather(
                *[
                    client.post(
                        f"{nodes[number % 2].address}{MESSAGES}",
                        json=asking(MESSAGES, f"[[delay 0.05]] {number}"),
                        headers=KEY,
                    )
                    for number in range(12)
                ]
            )
            assert {answer.status_code for answer in answers} == {200}
            assert upstream.accounts[ANTHROPIC_KEY].most_running == 1
        finally:
            await asyncio.to_thread(stack.__exit__, None, None, None)


def waiting_at(node: ServiceProcess) -> int:
    """Return how many calls wait."""
    return len(node.ask("GET", "/calls?state=waiting").body["calls"])


def noted_in(url: str) -> bool:
    """Tell whether the store knows of a call that runs."""
    with psycopg.connect(url) as connection:
        return bool(connection.execute("SELECT 1 FROM running_calls").fetchall())


def assumed_usd(metrics: str) -> float:
    """Return the assumed dollars of all projects together."""
    lines = [one for one in metrics.splitlines() if one.startswith("headgate_spend_usd_total{")]
    return sum(float(one.rpartition(" ")[2]) for one in lines if 'kind="assumed"' in one)


async def test_a_leader_that_is_killed_takes_its_calls_along_and_no_money_is_lost(
    tmp_path: Path, postgres_url: str
) -> None:
    async with BillingUpstream() as upstream, httpx2.AsyncClient(timeout=60.0) as client:
        stack = two_nodes(tmp_path, postgres_url, upstream)
        first, second = await asyncio.to_thread(stack.__enter__)

        def ask(prompt: str) -> asyncio.Task[httpx2.Response]:
            body = asking(MESSAGES, prompt)
            path = f"{second.address}/p/team{MESSAGES}"
            return asyncio.create_task(client.post(path, json=body, headers=KEY))

        async def status(node: ServiceProcess) -> dict[str, Any]:
            path = f"{node.address}/budgets/status?scope=project:team"
            found: dict[str, Any] = (await client.get(path)).json()
            return found

        try:
            assert (await ask("first")).status_code == 200
            running = ask("[[until never]] runs")
            await asyncio.to_thread(wait_until, lambda: len(upstream.requests) == 2, seconds=20.0)
            waiting = ask("waits behind it")

            await asyncio.to_thread(wait_until, lambda: waiting_at(first) == 1, seconds=20.0)
            # Whoever asks has what was spent so far written; a crash would book it with its slice.
            assert (await status(first))["spentTokens"] == upstream.bill[0].tokens
            await asyncio.to_thread(wait_until, lambda: noted_in(postgres_url), seconds=20.0)
            await asyncio.to_thread(first.kill)
            told = []
            for one in (running, waiting):
                answer = await one
                assert answer.status_code == 503, answer.text
                assert int(answer.headers["retry-after"]) <= 55
                assert answer.headers["x-should-retry"] == "true"
                assert "its outcome is unknown" in answer.json()["error"]["message"]
                told.append(answer.headers["x-headgate-call-id"])

            def leads() -> object:
                return second.ask("GET", "/readyz").body.get("role") == "dispatcher"

            await asyncio.to_thread(wait_until, leads, seconds=30.0)
            path = f"/calls/{told[0]}"

            def is_listed() -> bool:
                return bool(second.ask("GET", path).body.get("state") == "failed")

            await asyncio.to_thread(wait_until, is_listed, seconds=30.0)
            lost = second.ask("GET", path).body
            assert lost["error"] == LOST
            assert lost["usage"]["tokens"] == lost["usage"]["assumedTokens"] > 0
            assert "a call was lost" in second.output()
            metrics = (await client.get(f"{second.address}/metrics")).text
            assert assumed_usd(metrics) == float(lost["usage"]["assumedUsd"]) > 0
            again = await ask("goes on")
            assert again.status_code == 200, "the permit of what was lost is free"
            held = ask("[[until later]] holds the permit")
            await asyncio.to_thread(wait_until, lambda: len(upstream.requests) == 4, seconds=20.0)
            late = ask("[[mark late]]")
            await asyncio.to_thread(wait_until, lambda: waiting_at(second) == 1, seconds=20.0)
            retry = ask("waits behind it")
            await asyncio.to_thread(wait_until, lambda: waiting_at(second) == 2, seconds=20.0)
            upstream.releases.add("later")
            assert [(await one).status_code for one in (held, late, retry)] == [200] * 3
            assert upstream.bill[-1].mark == "late", "what comes again has its position"
            billed = sum(one.tokens for one in upstream.bill if one.end == "whole")
            found = await status(second)
            assert float(found["reservedUsd"]) > 0, "what was lost may have been billed"
            async with asyncio.timeout(20.0):
                while found["spentTokens"] + found["overrunTokens"] != billed:
                    found = await status(second)
        finally:
            await asyncio.to_thread(stack.__exit__, None, None, None)


async def test_a_leader_that_is_stopped_and_closes_nothing_loses_its_calls_like_one_that_is_killed(
    tmp_path: Path, postgres_url: str
) -> None:
    async with BillingUpstream() as upstream, httpx2.AsyncClient(timeout=60.0) as client:
        stack = two_nodes(tmp_path, postgres_url, upstream)
        first, second = await asyncio.to_thread(stack.__enter__)

        def ask(path: str, *, is_stream: bool = False) -> asyncio.Task[httpx2.Response]:
            prompt = "[[words 1000]] [[pace 0.1]]" if is_stream else "[[until never]]"
            body = asking(path, prompt, is_stream=is_stream)
            return asyncio.create_task(
                client.post(f"{second.address}/p/team{path}", json=body, headers=KEY)
            )

        stopped: list[int] = []
        try:
            opened = ask(CHAT, is_stream=True)
            await asyncio.to_thread(wait_until, lambda: len(upstream.requests) == 1, seconds=20.0)
            running = ask(MESSAGES)
            await asyncio.to_thread(wait_until, lambda: len(upstream.requests) == 2, seconds=20.0)
            waiting = ask(MESSAGES)
            await asyncio.to_thread(wait_until, lambda: waiting_at(first) == 1, seconds=20.0)
            for pid in first.pids:
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
            async with asyncio.timeout(40.0):
                for one in (running, waiting):
                    answer = await one
                    assert answer.status_code == 503, answer.text
                    assert int(answer.headers["retry-after"]) <= 55
                    assert "its outcome is unknown" in answer.json()["error"]["message"]
                with pytest.raises(httpx2.RemoteProtocolError):
                    await opened
            assert second.ask("GET", "/readyz").body["role"] == "dispatcher"
            again = await client.post(f"{second.address}{CHAT}", json=asking(CHAT), headers=KEY)
            assert again.status_code == 200, again.text
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            await asyncio.to_thread(stack.__exit__, None, None, None)
