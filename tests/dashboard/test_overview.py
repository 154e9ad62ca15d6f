"""The overview: what needs attention on top, the figures of now, and who gets what."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from api.asgi_client import Client, answer_of
from api.fake_engine import health
from dashboard.browser import Browser, serving, submit, text_of, until
from dashboard.test_webhooks_page import ALLOWED, end, file
from headgate.config.settings import DashboardMode
from headgate.core.money import MICRO_PER_USD
from headgate.dashboard.dashboard import Dashboard
from headgate.dashboard.overview import DAY_SECONDS
from headgate.engine.history import Step

PAUSED = """
[projects.search]
credit_weight = 3
status = "paused"

[projects.evals]

[projects.crawl]
status = "draining"
"""
NOTHING = "\N{EN DASH}"


async def overview(app: object) -> str:
    return text_of((await Browser(app).get("/")).body)  # type: ignore[arg-type]


async def test_a_newcomer_behind_a_proxy_gets_the_address_of_the_proxy(tmp_path: Path) -> None:
    toml = '[auth]\nallowed_hosts = ["gate.example"]\n'
    async with serving(tmp_path, toml) as (_, app):
        page = await Browser(app).get("/", host="gate.example", x_forwarded_proto="https")
    assert "curl -s https://gate.example/tasks" in text_of(page.body)


async def test_what_is_paused_is_on_top(tmp_path: Path) -> None:
    async with serving(tmp_path, PAUSED) as (_, app):
        text = await overview(app)
        attention = text[text.index("Needs attention") : text.index("Queued")]
        assert "Project search is paused: its tasks wait." in attention
        assert "Project crawl is draining: it takes no new tasks." in attention
        assert "evals" not in attention
        paused = await answer_of(app, "POST", "/scheduler/pause")
        assert paused.status == 200
        attention = (await overview(app)).partition("Queued")[0]
        assert attention.index("Everything is paused") < attention.index("Project search")


async def test_a_rolling_window_frees_room_bit_by_bit_and_never_resets(tmp_path: Path) -> None:
    toml = '[budgets.root]\nlimit_usd = "1"\nwindow = "rolling:5h"\n'
    spend = b'{"id": "r1", "scope": "session:eval", "usd": "1"}'
    async with serving(tmp_path, toml) as (_, app):
        assert (await answer_of(app, "POST", "/budgets/reserve", spend)).status == 200
        assert (await answer_of(app, "POST", "/budgets/commit", spend)).status == 200
        text = await overview(app)
    notices, _, figures = text.partition("Queued")
    assert "$0.00 of $1.00 left. More room in" in notices
    assert figures.count("more room in") == 2
    assert "resets" not in text
    assert "Ends" not in notices


async def test_a_webhook_that_was_given_up_is_on_top_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    async with serving(tmp_path, ALLOWED) as (service, app):
        (webhook_id,) = await file(service, 1)
        await end(service, webhook_id, has_arrived=False, status=410, error="answered 410")
        assert "1 webhook was given up since yesterday" in await overview(app)
        ahead[0] = DAY_SECONDS
        assert "given up" not in await overview(app)
        kept = (await Browser(app).get("/ui/webhooks?state=dead")).body.decode()
        assert webhook_id in kept


@pytest.mark.parametrize(
    ("parts", "problem", "lines"),
    [
        (
            {"store": "ok", "ledger": "it is away", "dispatcher": "ok"},
            "it is away",
            ["The ledger has a problem. It is away."],
        ),
        (
            {"store": "ok", "ledger": "ok", "dispatcher": "ok"},
            "draining",
            ["This node does not accept or run tasks now. Draining."],
        ),
    ],
)
async def test_a_part_that_fails_is_on_top(
    parts: dict[str, str], problem: str, lines: list[str]
) -> None:
    client = drawn_client()
    client.engine.state = health(is_ready=False, problem=problem, parts=parts)
    text = await overview(client.app)
    for line in lines:
        assert line in text
    assert text.count("✕\ufe0e problem") == len(lines)


def drawn_client(mode: DashboardMode = "on") -> Client:
    client = Client()
    client.app.serve_pages(Dashboard(client.app.api, mode))
    return client


async def test_without_a_ledger_the_rest_is_shown_all_the_same() -> None:
    text = await overview(drawn_client().app)
    assert f"Spent {NOTHING} unknown while the ledger does not answer" in text
    assert "They are unknown while the ledger does not answer." in text


async def test_what_holds_the_longest_wait_is_in_dollars_with_its_time(tmp_path: Path) -> None:
    toml = '[budgets."project:default"]\nlimit_usd = "0.5"\nwindow = "day"\n'
    spend = b'{"id": "r1", "scope": "project:default", "usd": "0.5"}'
    async with serving(tmp_path, toml) as (_, app):
        assert (await answer_of(app, "POST", "/budgets/reserve", spend)).status == 200
        await submit(app, estimate={"usd": "0.25"})

        async def is_refused() -> bool:
            return "$0.25 asked for" in await overview(app)

        await until(is_refused)
        page = (await Browser(app).get("/")).body
    held = text_of(page).partition("Waiting longest")[2]
    assert "$0.50 of $0.50 are used or reserved, and $0.25 asked for" in held
    assert "micro-dollars" not in held
    assert re.search(r"until 20\S+ 00:00:00 UTC \( in [^)]+\) \.", held)
    assert b"<time" in page.partition(b"Waiting longest")[2].partition(b'class="reasons"')[2]


async def test_the_figures_of_now_are_those_of_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path, PAUSED) as (service, app):
        for _ in range(3):
            await submit(app, projectId="search")
        done = await submit(app, projectId="evals")

        async def has_ended() -> bool:
            return bool((await answer_of(app, "GET", f"/tasks/{done}")).json["state"] == "done")

        await until(has_ended)
        service.engine.history.run_once()
        text = await overview(app)
        assert "Queued 3 of 1,000" in text
        assert "In flight 0 of 20" in text
        assert "0 failed in" in text
        assert "The last hour in steps of five minutes" in text
        figures = (await Browser(app).get("/ui/history")).json
    assert (figures["queued"], figures["inflight"]) == ([3], [0])
    assert figures["completed"][0] > 0
    assert figures["stepSeconds"] == 5.0


async def test_the_charts_ask_for_an_hour_or_a_day(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, app):
        history = service.engine.history
        history.hour.extend(Step(at=at) for at in (100.0, 105.0, 300.0))
        history.day.append(
            Step(at=60.0, seconds=60.0, completed=30, spent_micro_usd=MICRO_PER_USD // 2)
        )
        hour = (await Browser(app).get("/ui/history?range=hour")).json
        day = (await Browser(app).get("/ui/history?range=day")).json
        wrong = await Browser(app).get("/ui/history?range=year")
    assert hour["at"] == [100.0, 105.0, 110.0, 300.0]
    assert hour["queued"] == [0, 0, None, 0]
    assert (day["completed"], day["stepSeconds"]) == ([30.0], 60.0)
    assert day["spentUsd"] == [0.5], "money is counted by step, from the first on"
    assert wrong.status == 400


async def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    hostile = "session:%3Cimg%20src=x%20onerror=alert(1)%3E"
    async with serving(tmp_path, PAUSED) as (_, app):
        await submit(app, projectId="search", agentId=name)
        limit = b'{"limitUsd": "0"}'
        await answer_of(app, "PATCH", f"/budgets?scope={hostile}", limit)
        page = (await Browser(app).get("/")).body.decode()
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)" in page
