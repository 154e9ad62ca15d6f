"""Many pages that are asked for at once: nobody who submits a task meanwhile waits for them all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dashboard.browser import Browser, serving, submit
from dashboard.test_login import LOCKED, token_of
from headgate.api.shares import Seat

PAGES = 60


@pytest.mark.parametrize("headers", [{}, {"hx_request": "true", "hx_target": "no-such-region"}])
async def test_a_submit_is_not_behind_all_pages_that_were_asked_for_before(
    headers: dict[str, str], tmp_path: Path
) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/tasks", **headers)
        asked = (browser.get("/ui/tasks", **headers) for _ in range(PAGES))
        pages = [asyncio.create_task(one) for one in asked]
        await asyncio.sleep(0)
        await submit(app)
        assert not all(page.done() for page in pages)
        assert {(await page).status for page in pages} == {200}


async def test_a_page_is_not_behind_all_those_that_another_has_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path, LOCKED) as (service, app):
        greedy, modest = Browser(app), Browser(app)
        for browser in (greedy, modest):
            await browser.get("/ui/login")
            await browser.post("/ui/login", {"token": await token_of(service, "read")})
        pages = [asyncio.create_task(greedy.get("/ui/tasks")) for _ in range(PAGES)]
        await asyncio.sleep(0)
        assert (await modest.get("/ui/tasks")).status == 200
        assert sum(page.done() for page in pages) < PAGES // 2
        assert {(await page).status for page in pages} == {200}


async def test_a_drawing_takes_the_time_of_whoever_asks_for_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, app):
        seat = Seat(app.shares, "127.0.0.1", lambda: None)

        async def seated(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {"headgate.seat": seat}, receive, send)

        await Browser(seated).region("/ui/tasks", "rows")  # type: ignore[arg-type]
        assert app.shares.turns.backlog_seconds > 0
