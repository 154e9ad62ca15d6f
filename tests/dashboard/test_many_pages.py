"""Many pages that are asked for at once: nobody who submits a task meanwhile waits for them all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dashboard.browser import Browser, serving, submit

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
