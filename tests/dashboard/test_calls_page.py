"""The pages of calls: what waits and why, what runs, what has ended, and all of one call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dashboard.browser import Browser, serving, text_of
from dashboard.test_login import token_of
from gateway.billing_upstream import BillingUpstream
from gateway.gateway_service import CHAT, MESSAGES, GatewayService, gateway_service
from headgate.api.auth import AuthRules
from headgate.dashboard.calls import expected_words
from headgate.errors import NotDispatchingError
from headgate.storage.tokens import Bounds

PROJECTS = """
[projects.search]
[projects.poor]

[budgets."project:poor"]
limit_usd = "0"
"""
SEARCH = {"x-headgate-project": "search", "x-headgate-agent": "coder"}
POOR = {"x-headgate-project": "poor"}
HELD = "[[until go]]"


async def page_text(gateway: GatewayService, path: str = "/ui/calls") -> str:
    """Return what a person reads on a page."""
    answer = await gateway.client.get(path)
    assert answer.status_code == 200, answer.text
    return text_of(answer.text)


async def listed(gateway: GatewayService, query: str = "") -> list[str]:
    """Return the calls on the page, in their order."""
    answer = await gateway.client.get(f"/ui/calls{query}")
    assert answer.status_code == 200, answer.text
    return re.findall(r'data-label="Call"><a href="/ui/calls/([^"]+)"', answer.text)


def run(
    folder: Path, scenario: Callable[[GatewayService], Awaitable[None]], **options: Any
) -> None:
    """Run a service with projects, and something on it."""

    async def whole() -> None:
        async with gateway_service(folder, PROJECTS, **options) as gateway:
            await scenario(gateway)

    asyncio.run(whole())


@asynccontextmanager
async def one_runs_and_one_waits(gateway: GatewayService) -> AsyncIterator[None]:
    """Have one call run and one wait for it, until the end."""
    first = gateway.start(CHAT, HELD)
    await gateway.until(lambda: len(gateway.calls) == 1)
    second = gateway.start(CHAT, HELD, headers=SEARCH)
    await gateway.until_waiting()
    try:
        yield
    finally:
        gateway.upstream.releases.add("go")
        await asyncio.gather(first, second)


def test_an_empty_page_says_how_to_point_a_client_here(tmp_path: Path) -> None:
    async def scenario(gateway: GatewayService) -> None:
        text = await page_text(gateway)
        assert f"ANTHROPIC_BASE_URL=http://127.0.0.1:{gateway.port}" in text
        assert f"OPENAI_BASE_URL=http://127.0.0.1:{gateway.port}/v1" in text
        assert "No call matches" in await page_text(gateway, "/ui/calls?state=done")

    run(tmp_path, scenario)


def test_what_waits_has_its_reason_and_what_runs_what_it_holds(tmp_path: Path) -> None:
    async def scenario(gateway: GatewayService) -> None:
        async with one_runs_and_one_waits(gateway):
            text = await page_text(gateway)
            assert "number 1 of its agent" in text
            assert "upstreams.openai.max_inflight = 1 was set" in text
            assert (await page_text(gateway, "/ui/calls?state=waiting")).count("call-") == 1
            assert len(await listed(gateway)) == 2
            overview = await page_text(gateway, "/")
            assert "Calls 1 1 waiting" in overview
            (waiting,) = await listed(gateway, "?state=waiting")
            text = await page_text(gateway, f"/ui/calls/{waiting}")
            assert "Why it waits" in text
            assert "It is number 1 among the waiting calls of its agent." in text

    run(tmp_path, scenario, inflight=1)


def test_what_has_ended_is_listed_newest_first_and_filtered(tmp_path: Path) -> None:
    async def scenario(gateway: GatewayService) -> None:
        chat = (await gateway.record(await gateway.ask(CHAT))).id
        claude = (await gateway.record(await gateway.ask(MESSAGES, headers=SEARCH))).id
        assert (await gateway.ask(CHAT, headers=POOR)).status_code == 402
        refused = (await gateway.latest()).id
        for query, found in (
            ("", [refused, claude, chat]),
            ("?state=done", [claude, chat]),
            ("?state=refused", [refused]),
            ("?state=waiting", []),
            ("?project=search", [claude]),
            ("?agent=coder", [claude]),
            ("?model=gpt-5", [refused, chat]),
            ("?upstream=anthropic", [claude]),
            ("?since=2020-01-01T00:00", [refused, claude, chat]),
            ("?until=2020-01-01T00:00", []),
            (f"?before={claude}", [chat]),
        ):
            assert await listed(gateway, query) == found, query
        assert "$0.0" in await page_text(gateway, "/")

    run(tmp_path, scenario)


def test_a_filter_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    async def scenario(gateway: GatewayService) -> None:
        for query, word in (
            ("state=gone", "State"),
            ("since=yesterday", "Arrived since"),
            ("before=tsk_1", "before"),
            ("model=a%0Ab", "Model"),
        ):
            answer = await gateway.client.get(f"/ui/calls?{query}")
            assert answer.status_code == 400, query
            assert word in text_of(answer.text), query

    run(tmp_path, scenario)


def test_pages_of_calls_lead_back_and_forth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.dashboard.calls.PAGE_ROWS", 2)

    async def scenario(gateway: GatewayService) -> None:
        ids = [(await gateway.record(await gateway.ask(CHAT))).id for _ in range(3)]
        page = (await gateway.client.get("/ui/calls")).text
        (older,) = re.findall(r'rel="next" href="([^"]+)"', page)
        assert await listed(gateway, older.removeprefix("/ui/calls").replace("&amp;", "&")) == [
            ids[0]
        ]

    run(tmp_path, scenario)


def test_a_call_has_all_of_its_record(tmp_path: Path) -> None:
    async def scenario(gateway: GatewayService) -> None:
        record = await gateway.record(await gateway.ask(CHAT, headers=SEARCH, is_stream=True))
        text = await page_text(gateway, f"/ui/calls/{record.id}")
        for word in ("search", "coder", "gpt-5", "openai", "streamed", "project:search"):
            assert word in text, word
        assert f"Output in all {record.output_tokens}" in text
        assert "The client got 200." in text
        raw = (await gateway.client.get(f"/ui/calls/{record.id}/raw")).json()
        assert raw["callId"] == record.id
        assert raw["usage"]["tokens"] == record.tokens
        assert (await gateway.client.get("/ui/calls/call-none")).status_code == 404
        assert (await gateway.client.get("/ui/calls/..%2f")).status_code == 404

    run(tmp_path, scenario)


def test_a_refused_call_says_which_budget_it_was(tmp_path: Path) -> None:
    async def scenario(gateway: GatewayService) -> None:
        await gateway.ask(CHAT, headers=POOR)
        text = await page_text(gateway, f"/ui/calls/{(await gateway.latest()).id}")
        assert "refused" in text
        assert "project:poor" in text

    run(tmp_path, scenario)


def test_a_bound_token_sees_calls_of_its_own_alone(tmp_path: Path) -> None:
    async def scenario(gateway: GatewayService) -> None:
        other = (await gateway.record(await gateway.ask(CHAT))).id
        own = (await gateway.record(await gateway.ask(CHAT, headers=SEARCH))).id
        service = gateway.service
        bounds = Bounds(project_id="search")
        token = await token_of(service, "read", bounds=bounds)
        service.api.auth.rules = AuthRules(needs_token=True)
        gateway.client.cookies.set("headgate_token", token)
        assert await listed(gateway) == [own]
        assert (await gateway.client.get(f"/ui/calls/{other}")).status_code == 404
        assert (await gateway.client.get("/ui/calls?project=default")).status_code == 400

    run(tmp_path, scenario)


def test_a_node_that_does_not_dispatch_says_so_and_shows_what_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(gateway: GatewayService) -> None:
        ended = (await gateway.record(await gateway.ask(CHAT))).id
        dispatcher = gateway.service.engine.dispatcher
        monkeypatch.setattr(type(dispatcher), "is_leading", property(lambda _: False))
        assert await listed(gateway) == [ended]
        assert "Waiting and running calls are unknown now" in await page_text(gateway)
        assert "known at the node that dispatches" in await page_text(gateway, "/")
        assert str(NotDispatchingError("")) not in await page_text(gateway)

    run(tmp_path, scenario)


def test_what_a_model_is_called_is_shown_and_never_obeyed(tmp_path: Path) -> None:
    async def scenario(gateway: GatewayService) -> None:
        await gateway.ask(CHAT, model="<script>alert(1)</script>")
        page = (await gateway.client.get("/ui/calls")).text
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert" in page

    run(tmp_path, scenario, upstream=BillingUpstream())


def test_how_long_it_takes_is_only_said_where_it_is_known() -> None:
    assert expected_words(None) == ""
    assert expected_words(90.0) == "about 1 min 30 s"


async def test_a_service_without_calls_yet_has_the_page(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        page = await Browser(app).get("/ui/calls")
        assert page.status == 200
        assert "There are no calls" in text_of(page.body)
