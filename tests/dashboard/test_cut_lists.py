"""A list that is cut says so, and how many more there are."""

from __future__ import annotations

from pathlib import Path

from dashboard.browser import Browser, serving, submit, text_of
from headgate.dashboard.lists import ROWS

HELD = '[projects.default]\nstatus = "paused"\n'


async def test_a_task_with_many_parents_says_how_many_are_not_listed(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        parents = [await submit(app) for _ in range(23)]
        child = await submit(app, dependsOn=parents)
        text = text_of((await Browser(app).get(f"/ui/tasks/{child}")).body)
    assert text.count(f"{parents[19]} and 3 more") == 3, "why it waits, what happened, the facts"


async def test_overrides_that_are_not_on_the_page_are_on_the_next(tmp_path: Path) -> None:
    names = [f"a{number:02}" for number in range(ROWS + 1)]
    async with serving(tmp_path, "".join(f"[agents.{name}]\n" for name in names)) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/settings")
        for name in names:
            await browser.post(f"/ui/agents/{name}/change", {"status": "paused"})
        pages = [
            text_of((await browser.get(f"/ui/settings{query}")).body).partition("In force Text")[0]
            for query in ("", f"?overrides_from={ROWS}")
        ]
    assert [page.count(".status") for page in pages] == [ROWS, 1]
