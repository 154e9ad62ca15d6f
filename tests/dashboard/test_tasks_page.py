"""The list of tasks: filters that live in the address, pages, rows, and work on many tasks."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from api.asgi_client import answer_of
from dashboard.browser import Browser, serving, submit, text_of
from dashboard.test_login import token_of
from headgate.api.app import App
from headgate.api.auth import AuthRules
from headgate.dashboard import tasks
from headgate.dashboard.page import Form
from headgate.dashboard.tasks import Filters, filters_of
from headgate.storage import queries
from headgate.storage.tokens import Bounds

HELD = """
[projects.default]
status = "paused"
[projects.other]
status = "paused"
"""
"""Nothing starts, so that what is submitted stays as it is."""


def listed(body: bytes) -> list[str]:
    return re.findall(r'data-label="Task"><a href="/ui/tasks/([^"]+)"', body.decode())


async def shown(app: App, query: str = "") -> list[str]:
    page = await Browser(app).get(f"/ui/tasks{query}")
    assert page.status == 200, page.body
    return listed(page.body)


async def test_filters_combine_and_stay_in_the_form(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        one = await submit(app, action="Read Mail", labels={"run": "7"})
        two = await submit(app, agentId="b", projectId="other", labels={"run": "8"})
        assert await shown(app) == [two, one]
        for query, found in (
            ("?state=queued", [two, one]),
            ("?state=queued,running&state=failed", [two, one]),
            ("?state=done", []),
            ("?project=other", [two]),
            ("?agent=a", [one]),
            ("?label=run", [two, one]),
            ("?label=run%3D7", [one]),
            ("?text=read+mail", [one]),
            ("?text=read+mail&agent=b", []),
            ("?target=nowhere", []),
            ("?since=2020-01-01T00:00", [two, one]),
            ("?until=2020-01-01T00:00:30", []),
            ("?since=2020-01-01T00:00:00%2B01:00", [two, one]),
        ):
            assert await shown(app, query) == found, query
        page = await Browser(app).get("/ui/tasks?text=read+mail&state=queued&agent=a")
        assert b'name="text" value="read mail"' in page.body
        assert b'value="queued" checked' in page.body


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("2026-01-31T12:00", "2026-01-31T12:00"),
        ("2026-01-31T12:00:30", "2026-01-31T12:00:30"),
        ("2026-01-31T12:00:00Z", "2026-01-31T12:00:00"),
        ("2026-01-31T12:00:00+01:00", "2026-01-31T11:00:00"),
        ("yesterday", ""),
        ("2026-02-31T12:00", ""),
    ],
)
def test_a_time_is_written_as_its_field_takes_it(given: str, written: str) -> None:
    assert Filters(texts={"since": given}).field("since") == written


async def test_an_error_stands_below_the_action_of_its_task(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        task_id = await submit(app, labels={"run": "7"})
        page = (await Browser(app).get("/ui/tasks")).body.decode()
        assert 'class="error"' not in page
        assert f'<code class="id" title="{task_id}">{task_id[:8]}…{task_id[-6:]}</code>' in page
        assert (await answer_of(app, "POST", f"/tasks/{task_id}/cancel")).status == 200
        await submit(app, dependsOn=[task_id])
        assert 'class="error"' in (await Browser(app).get("/ui/tasks")).body.decode()


def test_each_filter_can_be_taken_away_by_itself() -> None:
    filters = Filters(states=("queued", "done"), texts={"agent": "a&b", "text": "x"})
    assert filters.url() == "/ui/tasks?state=queued&state=done&agent=a%26b&text=x"
    assert [chip.without for chip in filters.chips()] == [
        "/ui/tasks?state=done&agent=a%26b&text=x",
        "/ui/tasks?state=queued&agent=a%26b&text=x",
        "/ui/tasks?state=queued&state=done&text=x",
        "/ui/tasks?state=queued&state=done&agent=a%26b",
    ]
    assert Filters(texts={"agent": "a"}).url(agent="b") == "/ui/tasks?agent=b"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?state=nothing", "is not a list of"),
        ("?state=nothing", "State: 'nothing' is not a list of"),
        ("?since=yesterday", "Submitted since (UTC): is written as 2026-01-31T12:00"),
        ("?until=2026-02-30T12:00", "Submitted before (UTC): is written as 2026-01-31T12:00"),
        ("?scope=my+team", "Budget: 'my team' is not a part"),
        ("?label=%3D7", "Label: is written as key=value"),
        ("?text=%00", "Text: must be 1 to 200 printable characters"),
        ("?project=%07", "Project: must be printable"),
        ("?before=%2F", "must be the id of a task"),
        ("?before=xx", "must be the id of a task"),
        ("?agent=" + "a" * 200, "Agent: has 200 characters, at most 128"),
    ],
)
async def test_a_filter_that_cannot_be_read_is_told_beside_the_form(
    query: str, said: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as (_, app):
        page = await Browser(app).get(f"/ui/tasks{query}")
    text = text_of(page.body)
    assert page.status == 400
    assert said in text
    assert "Correct the filter above" in text
    assert b'action="/ui/tasks"' in page.body


@pytest.mark.parametrize(
    "since",
    [
        "9999-12-31T23:59:59-14:00",
        "0001-01-01T00:00:00+14:00",
        "2016-12-31T23:59:60Z",
        "2026-01-31T12:00",
    ],
)
@pytest.mark.parametrize("path", ["/ui/tasks", "/ui/tasks/cancel"])
async def test_a_time_at_the_edge_is_looked_for_or_refused(
    path: str, since: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as (_, app):
        page = await Browser(app).get(f"{path}?since={quote(since)}")
    assert page.status in (200, 400)


async def test_pages_lead_to_older_tasks_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PAGE_ROWS", 2)
    async with serving(tmp_path, HELD) as (_, app):
        made = [await submit(app) for _ in range(5)][::-1]
        browser, url, seen = Browser(app), "/ui/tasks?state=queued", []
        pages = [url]
        while url:
            body = (await browser.get(url)).body
            seen.append(listed(body))
            url = address(body, "next")
            pages.append(url)
        assert seen == [made[:2], made[2:4], made[4:]]
        last = (await browser.get(pages[2])).body
        assert listed((await browser.get(address(last, "prev"))).body) == made[2:4]
        assert b">Newest</a>" in last
        second = (await browser.get(pages[1])).body
        assert b">Newest</a>" in second
        assert not address(second, "prev")


def address(body: bytes, relation: str) -> str:
    found = re.search(rf'rel="{relation}" href="([^"]+)"', body.decode())
    return "" if found is None else found[1].replace("&amp;", "&")


def test_the_way_back_is_bounded() -> None:
    filters = Filters()
    for number in range(40):
        url = filters.older(f"tsk_{number}")
        query = url.partition("?")[2]
        pairs = dict(pair.split("=") for pair in query.split("&"))
        filters = filters_of(
            Form({name: [value.replace("%2C", ",")] for name, value in pairs.items()})
        )
    assert len(filters.via) == tasks.MAX_VIA


async def test_a_search_that_finds_little_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_READ_ROWS", 2)
    monkeypatch.setattr("headgate.dashboard.tasks.LOOK_SECONDS", 0.0)
    async with serving(tmp_path, HELD) as (_, app):
        oldest = await submit(app, action="needle")
        for _ in range(3):
            await submit(app)
        body = (await Browser(app).get("/ui/tasks?text=needle")).body
        text = text_of(body)
        assert "Nothing matches so far. Searched back to" in text
        assert "Search further" in text
        assert "No task matches" not in text
        further = (await Browser(app).get(address(body, "next"))).body
        assert listed(further) == [oldest]


async def test_a_search_goes_on_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_READ_ROWS", 2)
    monkeypatch.setattr("headgate.dashboard.tasks.LOOK_SECONDS", 60.0)
    async with serving(tmp_path, HELD) as (_, app):
        oldest = await submit(app, action="needle")
        for _ in range(5):
            await submit(app)
        assert await shown(app, "?text=needle") == [oldest]


async def test_many_are_cancelled_after_a_count_and_only_those(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        for number in range(3):
            await submit(app, labels={"run": str(number)}, agentId="b" if number else "a")
        browser = Browser(app)
        question = await browser.get("/ui/tasks/cancel?agent=b")
        assert "2 tasks" in text_of(question.body)
        assert len(await shown(app, "?state=queued")) == 3
        page, said = await browser.act("/ui/tasks/cancel", asked(question.body))
        assert said == "Done: Cancelled: 2 tasks."
        assert len(listed(page.body)) == 2
        assert len(await shown(app, "?state=queued")) == 1
        log = (await answer_of(app, "GET", "/audit")).json["entries"]
        assert (log[0]["action"], log[0]["detail"]["cancelled"]) == ("tasks.cancel", 2)
        question = await browser.get("/ui/tasks/retry?agent=b")
        assert "2 tasks" in text_of(question.body)
        _, said = await browser.act("/ui/tasks/retry", asked(question.body))
        assert said == "Done: Tried again: 2 tasks."
        assert len(await shown(app, "?state=queued&agent=b")) == 2
        assert "No task matches" in text_of((await browser.get("/ui/tasks/retry?agent=b")).body)


def asked(body: bytes) -> dict[str, str]:
    """Return what the form of a question sends."""
    fields = re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', body.decode())
    return {name: value for name, value in fields if name not in ("csrf", "next")}


async def test_tasks_that_come_after_the_count_are_left_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        counted = [await submit(app) for _ in range(3)]
        browser = Browser(app)
        form = asked((await browser.get("/ui/tasks/cancel")).body)
        await asyncio.sleep(0.002)  # Ids know milliseconds.
        later = [await submit(app) for _ in range(5)]
        _, said = await browser.act("/ui/tasks/cancel", form)
        assert said == "Done: Cancelled: 3 tasks."
        assert await shown(app, "?state=cancelled") == counted[::-1]
        assert await shown(app, "?state=queued") == later[::-1]


async def test_where_more_match_than_were_shown_it_is_asked_again(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        first, second = await submit(app), await submit(app)
        await answer_of(app, "POST", f"/tasks/{first}/cancel")
        browser = Browser(app)
        form = asked((await browser.get("/ui/tasks/retry")).body)
        assert form["counted"] == "1"
        await answer_of(app, "POST", f"/tasks/{second}/cancel")
        page, said = await browser.act("/ui/tasks/retry", form)
        assert said == "Not done: More tasks match than the 1 that were shown."
        assert "2 tasks" in text_of(page.body)
        assert await shown(app, "?state=queued") == []
        assert (await browser.act("/ui/tasks/retry", asked(page.body)))[1].endswith("2 tasks.")


async def test_nothing_is_done_to_tasks_that_nobody_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        task = await submit(app)
        browser = Browser(app)
        good = asked((await browser.get("/ui/tasks/cancel")).body)
        for form in ({}, {**good, "counted": "0"}, {**good, "counted_at": "2099-01-01T00:00"}):
            page, said = await browser.act("/ui/tasks/cancel", form)
            assert "Look at the number first" in said
            assert "1 task" in text_of(page.body)
        assert await shown(app, "?state=queued") == [task]


async def test_a_filter_of_states_that_nothing_can_be_done_to_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        await submit(app)
        browser = Browser(app)
        assert (await browser.get("/ui/tasks/cancel?state=done")).status == 409
        _, said = await browser.act("/ui/tasks/cancel", {"state": "done"})
        assert "Not done: no task in these states can be worked on" in said
        page = (await browser.get("/ui/tasks?state=queued")).body
        assert b'href="/ui/tasks/cancel?state=queued"' in page
        assert b"/ui/tasks/retry" not in page


async def test_a_read_only_dashboard_offers_no_work_on_many(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD + '[dashboard]\nmode = "read-only"\n') as (_, app):
        await submit(app)
        page = (await Browser(app).get("/ui/tasks")).body
        assert b"/ui/tasks/cancel" not in page
        assert (await Browser(app).get("/ui/tasks/cancel")).status == 403


async def test_a_bound_token_sees_and_changes_only_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (service, app):
        own, others = await submit(app), await submit(app, agentId="b", action="secret work")
        token = await token_of(service, "read", "cancel", "submit", bounds=Bounds(agent_id="a"))
        app.api.auth.rules = AuthRules(needs_token=True)
        browser = Browser(app)
        browser.cookies["headgate_token"] = token
        assert listed((await browser.get("/ui/tasks")).body) == [own]
        assert listed((await browser.get("/ui/tasks?text=secret")).body) == []
        refused = await browser.get("/ui/tasks?agent=b")
        assert (refused.status, listed(refused.body)) == (400, [])
        assert "the token is for" in text_of(refused.body)
        for path in ("", "/raw"):
            assert (await browser.get(f"/ui/tasks/{others}{path}")).status == 404
            assert (await browser.get(f"/ui/tasks/{own}{path}")).status == 200
        assert (await browser.post(f"/ui/tasks/{others}/cancel")).status == 404
        question = await browser.get("/ui/tasks/cancel")
        assert "1 task" in text_of(question.body)
        _, said = await browser.act("/ui/tasks/cancel", asked(question.body))
        assert said == "Done: Cancelled: 1 task."
        record = await service.engine.get(others)
        assert record is not None
        assert record.task.status.value == "queued"


async def test_a_question_counts_by_the_state_that_is_meant(tmp_path: Path) -> None:
    async with serving(tmp_path, HELD) as (_, app):
        await submit(app)
        await submit(app)
        one = text_of((await Browser(app).get("/ui/tasks/cancel?state=queued")).body)
        all_states = text_of((await Browser(app).get("/ui/tasks/cancel")).body)
    assert "2 queued tasks Waiting tasks do not start." in one
    assert "this applies to all tasks. 2 tasks that are queued, assigned or running" in all_states
