"""How long the page before a bulk action counts: as long as a list looks, then a person goes on."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from dashboard.browser import Browser, serving, submit, text_of
from headgate.dashboard import tasks
from headgate.storage import queries

PAUSED = '[projects.default]\nstatus = "paused"\n'


async def test_where_none_was_found_in_time_a_person_counts_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "COUNT_SECONDS", 0.0)
    monkeypatch.setattr(queries, "MAX_READ_ROWS", 2)
    async with serving(tmp_path, PAUSED) as (_, app):
        await submit(app, labels={"kind": "rare"})
        for _ in range(4):
            await submit(app)
        browser, url = Browser(app), "/ui/tasks/cancel?label=kind%3Drare"
        page, counts = "", []
        while url:
            page = (await browser.get(url)).body.decode()
            counts.append(
                re.sub(r".*<p class=\"figure\">(.*?)</p>.*", r"\1", page, flags=re.DOTALL)
            )
            links = re.findall(r'href="([^"]*)"[^>]*>Count further', page)
            url = html.unescape(links[0]) if links else ""
        assert [count.startswith("None so far") for count in counts] == [True, True, False]
        assert counts[-1].startswith("At least 1")
        counted_at = re.findall(r'name="counted_at" value="([^"]*)"', page)[0]
        fields = {"label": "kind=rare", "counted": 1, "counted_at": counted_at, "at_least": "yes"}
        _, said = await browser.act("/ui/tasks/cancel", fields)
        assert said.endswith("Cancelled: 1 task.")


async def test_a_count_that_came_to_the_end_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "COUNT_SECONDS", 0.0)
    monkeypatch.setattr(queries, "MAX_READ_ROWS", 1)
    async with serving(tmp_path, PAUSED) as (_, app):
        oldest = await submit(app)
        await submit(app)
        url = "/ui/tasks/cancel?label=kind"
        assert "None so far" in text_of((await Browser(app).get(url)).body)
        last = await Browser(app).get(f"{url}&before={oldest}")
        assert "None so far" not in text_of(last.body)
        assert (await Browser(app).get(f"{url}&before=nonsense")).status == 400
