"""Budgets: the tree with its bars, rates and parents, the journal, and limits that are changed."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from api.asgi_client import Response, answer_of
from dashboard.browser import Browser, quickest, serving, submit, text_of, until
from dashboard.test_login import logged_in, token_of
from headgate.api.app import App
from headgate.storage.tokens import Bounds

BUDGETS = """
[budgets.root]
limit_usd = "10"
window = "day"

[budgets."session:eval"]
limit_usd = "1"
limit_tokens = 1000

[projects.search]
[projects.crawl]
budget_limit = 500
"""
LOCKED = "[auth]\nrequired = true\n"
EVAL = "/ui/budgets?scope=session%3Aeval"
ACTIONS = (
    ("/ui/budgets/limit", {"scope": "session:eval", "limit_usd": "5", "window": "none"}),
    ("/ui/budgets/decide", {"scope": "root", "action": "accept", "id": "a", "reason": "b"}),
    ("/ui/budgets/remove", {"scope": "session:eval"}),
    ("/ui/budgets/reset", {"scope": "session:eval"}),
)


async def book(app: App, verb: str, **fields: object) -> Response:
    answer = await answer_of(app, "POST", f"/budgets/{verb}", json.dumps(fields).encode())
    assert answer.status == 200, answer.body
    return answer


async def spend(app: App, name: str, scope: str, usd: str, actual: str, tokens: int = 0) -> None:
    await book(app, "reserve", id=name, scope=scope, usd=usd, tokens=tokens, dispatched=True)
    await book(app, "commit", id=name, scope=scope, usd=actual, tokens=tokens)


async def shown(app: App, url: str = "/ui/budgets") -> str:
    answer = await Browser(app).get(url)
    assert answer.status == 200, text_of(answer.body)
    return text_of(answer.body)


async def budget_of(app: App, scope: str) -> dict[str, object]:
    listed = (await answer_of(app, "GET", "/budgets")).json["budgets"]
    return next((one for one in listed if one["scope"] == scope), {})


@pytest.mark.parametrize(
    ("window", "words"),
    [
        ("rolling:1h", "over any hour"),
        ("rolling:24h", "over any 24 hours"),
        ("none", "in all"),
        ("week@Europe/Berlin", "by the week, by the clock of Europe/Berlin"),
    ],
)
async def test_the_window_of_a_budget_is_said_in_words(
    tmp_path: Path, window: str, words: str
) -> None:
    toml = f'[budgets."session:w"]\nlimit_usd = "1"\nwindow = "{window}"\n'
    async with serving(tmp_path, toml) as (_, app):
        assert words in await shown(app)


SILENT = """
[projects.search]
[budgets."project:search"]
limit_usd = "10"

[targets.quiet]
kind = "command"
command = ["sh", "-c", "true"]

[targets.exact]
kind = "command"
command = [
    "sh", "-c", 'echo "$0"',
    '{"model": "gpt-4o", "usage": {"prompt_tokens": 1000, "completion_tokens": 0}}',
]
"""


async def test_work_that_reports_nothing_is_seen_and_what_work_costs_is_listed(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, SILENT) as (_, app):

        async def run(target: str) -> str:
            task_id = await submit(app, projectId="search", target=target)

            async def has_run() -> bool:
                state = (await answer_of(app, "GET", f"/tasks/{task_id}")).json["state"]
                return bool(state == "done")

            await until(has_run)
            return task_id

        quiet = [await run("quiet") for _ in range(3)]
        task = (await answer_of(app, "GET", f"/tasks/{quiet[0]}")).json
        (held,) = task["held"]
        assert (held["basis"], held["amount"], task["unpriced"]) == ("probe", 1.0, True)
        page = text_of((await Browser(app).get(f"/ui/tasks/{quiet[0]}")).body)
        assert "Reserved $1.00, a probe: the cost of this kind of work is unknown." in page
        assert "unpriced" in page
        await run("exact")
        overview = text_of((await Browser(app).get("/")).body)
        assert "quiet reports no dollars in project search" in overview
        assert 'Add estimate_usd = … to [targets."quiet"]' in overview
        metrics = (await answer_of(app, "GET", "/metrics")).body.decode()
        assert 'headgate_silent_kinds{project="search",target="quiet",unit="usd"} 1.0\n' in metrics
        budgets = await shown(app)
        assert "What work costs" in budgets
        assert "reports nothing" in budgets
        assert "at most $0.0025, 1 sample" in budgets
        listed = (await answer_of(app, "GET", "/estimates?projectId=search")).json
        assert (listed["quantile"], listed["reserve"]) == (0.95, "expected")
        known = {(one["target"], one.get("action")): one["usd"] for one in listed["kinds"]}
        assert known["quiet", "x"] == {"samples": 0, "silent": True}
        exact = {"samples": 1, "usual": 0.0025, "largest": 0.0025, "holds": 0.01}
        assert known["exact", "x"] == known["exact", None] == exact


@pytest.mark.parametrize(
    ("bounds", "query", "status"),
    [
        (Bounds(project_id="search"), "", 200),
        (Bounds(project_id="search"), "?projectId=search", 200),
        (Bounds(project_id="search"), "?projectId=crawl", 403),
        (Bounds(agent_id="a"), "", 403),
        (Bounds(), "?projectId=crawl", 200),
        (Bounds(), "?project=crawl", 400),
    ],
)
async def test_whose_estimates_a_token_reads(
    tmp_path: Path, bounds: Bounds, query: str, status: int
) -> None:
    async with serving(tmp_path, BUDGETS + LOCKED) as (service, app):
        token = await token_of(service, "read", bounds=bounds)
        headers = {"authorization": f"Bearer {token}"}
        answer = await answer_of(app, "GET", f"/estimates{query}", headers=headers)
        assert answer.status == status, answer.body


async def test_tasks_that_wait_for_a_budget_are_counted_and_start_when_it_is_raised(
    tmp_path: Path,
) -> None:
    toml = '[projects.search]\n[budgets."project:search"]\nlimit_usd = "1"\nwindow = "day"\n'
    async with serving(tmp_path, toml) as (_, app):
        await spend(app, "r1", "project:search", "1", "1")
        task = await submit(app, projectId="search", estimate={"usd": "0.50"})

        async def waits() -> bool:
            return "1 task or call waits" in await shown(app)

        await until(waits)
        page = (await Browser(app).get("/ui/budgets")).body.decode()
        assert 'href="/ui/tasks?state=queued&amp;scope=project%3Asearch">task</a> or' in page
        waiting = text_of((await Browser(app).get(f"/ui/tasks/{task}")).body)
        assert "It would reserve $0.50, the estimate that it came with" in waiting
        await submit(app, notBefore="2099-01-01T00:00:00Z")
        listed = (await Browser(app).get("/ui/tasks?state=queued&scope=project:search")).body
        assert (listed.count(b'data-label="Task"'), task.encode() in listed) == (1, True)
        status = (await answer_of(app, "GET", "/budgets/status?scope=project:search")).json
        assert status["waiting"] == 1
        browser = Browser(app)
        await browser.get("/ui/budgets?scope=project:search")
        fields = {"scope": "project:search", "limit_usd": "5", "window": "day"}
        await browser.act("/ui/budgets/limit", fields)

        async def has_run() -> bool:
            return bool((await answer_of(app, "GET", f"/tasks/{task}")).json["state"] == "done")

        await until(has_run)
        text = await shown(app, "/ui/budgets?scope=project:search")
        assert f"{task[:8]}…{task[-6:]} attempt 1" in text
        assert "booked" in text
        page = (await Browser(app).get("/ui/budgets?scope=project:search")).body.decode()
        assert f'title="{task}:1:1"' in page
        assert 'title="commit">booked' in page


async def test_a_budget_is_made_removed_and_said_by_the_file_again(tmp_path: Path) -> None:
    async with serving(tmp_path, BUDGETS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/budgets")
        fields = {"scope": "Team:ops", "limit_usd": "", "limit_tokens": "700", "window": "week"}
        page, said = await browser.act("/ui/budgets/limit", fields)
        assert said.startswith("Done: the budget of team:ops is set")
        assert "Budget of team:ops" in text_of(page.body)
        assert "earlier spending inside the new window counts" in text_of(page.body)
        made = await budget_of(app, "team:ops")
        assert (made["limitUsd"], made["limitTokens"], made["window"]) == (None, 700, "week")
        await browser.act("/ui/budgets/remove", {"scope": "session:eval"})
        assert await budget_of(app, "session:eval") == {}
        await browser.act("/ui/budgets/limit", {"scope": "session:eval", "limit_usd": "3"})
        _, said = await browser.act("/ui/budgets/reset", {"scope": "session:eval"})
        assert said.startswith("Done:"), said
        assert (await budget_of(app, "session:eval"))["limitUsd"] == "1.00"
        await browser.act("/ui/budgets/limit", {"scope": "root", "limit_usd": "20"})
        assert (await budget_of(app, ""))["limitUsd"] == "20.00"


async def test_what_is_claimed_is_shown_and_decided_with_a_reason(tmp_path: Path) -> None:
    async with serving(tmp_path, BUDGETS + LOCKED) as (service, app):
        mine = await token_of(service, "submit", bounds=Bounds(project_id="search"))
        for verb, usd in (("reserve", "0"), ("commit", "12")):
            body = json.dumps({"id": "r", "scope": "project:search", "usd": usd}).encode()
            headers = {"authorization": f"Bearer {mine}"}
            await answer_of(app, "POST", f"/budgets/{verb}", body, headers=headers)
        browser = Browser(app)
        await logged_in(browser, await token_of(service))
        assert "$12.00 claimed beyond a limit" in text_of((await browser.get("/")).body)
        assert "$12.00 claimed and not accepted." in text_of(
            (await browser.get("/ui/budgets")).body
        )
        page = await browser.get("/ui/budgets?scope=")
        assert "Claimed and not accepted" in text_of(page.body)
        fields = {"scope": "root", "action": "reject", "id": "d1", "reason": ""}
        _, said = await browser.act("/ui/budgets/decide", fields)
        assert said.startswith("Not done:"), said
        page, said = await browser.act("/ui/budgets/decide", fields | {"reason": "a lie"})
        assert said == "Done: what was claimed of the whole service is rejected."
        assert "Claimed and not accepted" not in text_of(page.body)
        assert "rejected" in text_of(page.body)


async def test_the_token_budget_of_a_project_is_changed_with_the_project(tmp_path: Path) -> None:
    async with serving(tmp_path, BUDGETS) as (_, app):
        browser = Browser(app)
        page = await browser.get("/ui/budgets?scope=project:crawl")
        assert "This is the budget_limit of the project" in text_of(page.body)
        await browser.act("/ui/budgets/limit", {"scope": "project:crawl", "limit_tokens": "900"})
        assert (await answer_of(app, "GET", "/projects/crawl")).json["budgetLimit"] == 900
        fields = {"scope": "project:crawl", "limit_usd": "3", "limit_tokens": "900"}
        _, said = await browser.act("/ui/budgets/limit", fields)
        assert said.startswith("Not done:")
        assert "remove that limit" in said
        await browser.act("/ui/budgets/remove", {"scope": "project:crawl"})
        assert (await answer_of(app, "GET", "/projects/crawl")).json["budgetLimit"] is None


async def test_a_global_budget_is_changed_in_the_file(tmp_path: Path) -> None:
    async with serving(tmp_path, "[scheduler]\nglobal_budget = 1000\n") as (_, app):
        assert "scheduler.global_budget of the settings file" in await shown(
            app, "/ui/budgets?scope="
        )
        browser = Browser(app)
        await browser.get("/ui/budgets")
        _, said = await browser.act("/ui/budgets/limit", {"scope": "root", "limit_usd": "3"})
        assert said.startswith("Not done:")
        assert "keep one of them" in said


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"limit_usd": "", "limit_tokens": ""}, "give dollars, tokens or both."),
        ({"window": "week"}, "give dollars, tokens or both."),
        ({"limit_usd": "many"}, "Dollars: must be an amount, such as 12.50, without $."),
        ({"limit_usd": "1,5"}, "Dollars: must be an amount, such as 12.50, without $."),
        ({"limit_usd": "1_000"}, "Dollars: must be an amount, such as 12.50, without $."),
        ({"limit_usd": "-3"}, "Dollars: must not be negative."),
        ({"limit_usd": "0.0000001"}, "Dollars: is finer than a micro-dollar"),
        ({"limit_usd": "9e12"}, "Dollars: is more than $1000000000.00"),
        ({"limit_tokens": "1.5"}, "Tokens: must be a whole number, such as 1500 or 1,500."),
        ({"limit_tokens": "1,2,3"}, "Tokens: must be a whole number, such as 1500 or 1,500."),
        ({"limit_tokens": "-1"}, "Tokens: must not be negative."),
        ({"limit_usd": "1", "window": "fortnight"}, "Window: 'fortnight' is no window"),
        ({"limit_usd": "1", "window": "day@Nowhere/At-All"}, "Window: "),
        ({"limit_usd": "1", "scope": "<script>"}, "Scope: '<script>' is not a part"),
    ],
)
async def test_what_cannot_be_is_said_and_changes_nothing(
    fields: dict[str, str], problem: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, BUDGETS) as (_, app):
        before = (await answer_of(app, "GET", "/budgets")).json
        browser = Browser(app)
        await browser.get("/ui/budgets")
        sent = {"scope": "session:eval", "back": "/ui/budgets", **fields}
        _, said = await browser.act("/ui/budgets/limit", sent)
        assert said.startswith(f"Not done: {problem}")
        assert "limit_" not in said
        assert (await answer_of(app, "GET", "/budgets")).json == before


@pytest.mark.parametrize("scope", ["my team", "", "x" * 60_000, "a:b/\u202e"])
async def test_a_scope_that_is_none_leads_back_to_its_form_with_what_was_typed(
    tmp_path: Path, scope: str
) -> None:
    async with serving(tmp_path, BUDGETS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/budgets")
        typed = {"scope": scope, "limit_usd": "12", "limit_tokens": "7", "window": "week"}
        page, said = await browser.act("/ui/budgets/limit", typed)
        assert page.status == 200
        assert said.startswith("Not done: Scope: ")
        body = page.body.decode()
        assert text_of(body).count(said.removeprefix("Not done: ")) == 1
        form = body.partition('<details class="sheet" id="new-budget" open>')[2]
        for name, value in {**typed, "scope": scope[:200]}.items():
            given = re.search(rf'<input name="{name}"[^>]* value="([^"]*)"', form)
            assert given is not None
            assert html.unescape(given[1]) == value


async def test_the_journal_of_a_scope_is_paged(tmp_path: Path) -> None:
    async with serving(tmp_path, BUDGETS) as (_, app):
        for number in range(60):
            await spend(app, f"r{number:02d}", "session:eval", "0.01", "0.01", 1)
        await spend(app, "other", "team:x", "0.01", "0.01")
        browser = Browser(app)
        page = (await browser.get(EVAL)).body.decode()
        assert page.count('data-label="When"') == 50
        assert ":r59" in page
        assert ":r10" not in page
        assert "+$0.01 +1 tokens" in text_of(page)
        assert ":other" not in page
        following = page.partition('rel="next" href="')[2].partition('"')[0].replace("&amp;", "&")
        second = (await browser.get(following)).body.decode()
        assert ":r59" not in second
        third = second.partition('rel="next" href="')[2].partition('"')[0].replace("&amp;", "&")
        last = (await browser.get(third)).body.decode()
        assert ":r00" in last
        assert 'rel="next"' not in last
        assert (await browser.get(f"{EVAL}&cursor=x")).status == 400


async def test_scopes_are_found_by_a_part_of_their_name(tmp_path: Path) -> None:
    async with serving(tmp_path, BUDGETS) as (_, app):
        text = await shown(app, "/ui/budgets?find=EVAL")
        assert "session:eval" in text
        assert "project:crawl" not in text
        assert "No scope has this name." in await shown(app, "/ui/budgets?find=zzz")


async def test_a_bound_token_sees_its_own_budgets_and_changes_none(tmp_path: Path) -> None:
    async with serving(tmp_path, BUDGETS + LOCKED) as (service, app):
        admin = {"authorization": f"Bearer {await token_of(service)}"}
        for scope in ("project:search/session:s", "project:crawl", "team:secret"):
            body = {"id": "r", "scope": scope, "usd": "0.10", "also": ["team:secret"]}
            sent = json.dumps(body).encode()
            answer = await answer_of(app, "POST", "/budgets/reserve", sent, headers=admin)
            assert answer.status == 200
        browser = Browser(app)
        token = await token_of(service, "read", "submit", bounds=Bounds(project_id="search"))
        await logged_in(browser, token)
        for url in ("/ui/budgets", "/ui/budgets?scope=project:search/session:s"):
            page = (await browser.get(url)).body.decode().partition("<main")[2]
            text = text_of(page)
            assert "project:search" in text
            assert "secret" not in text
            assert "crawl" not in text
            assert "$10.00" not in text
            assert '<form method="post"' not in page
        for scope in ("project:crawl", "team:secret"):
            assert (await browser.get(f"/ui/budgets?scope={scope}")).status == 403
        for url, fields in ACTIONS:
            assert (await browser.post(url, fields)).status == 403


async def test_hostile_texts_are_shown_as_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\u202e"[:25]
    async with serving(tmp_path, BUDGETS) as (_, app):
        await spend(app, name, "session:eval", "0.01", "0.01")
        page = (await Browser(app).get(EVAL)).body.decode()
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert(1)" in page
        found = await Browser(app).get("/ui/budgets?find=%3Cscript%3Ealert(1)%3C/script%3E")
        assert b"<script>alert" not in found.body
        wrong = await Browser(app).get("/ui/budgets?scope=%3Cscript%3E")
        assert wrong.status == 400
        assert b"<script>" not in wrong.body.partition(b"<main")[2]


async def test_1000_scopes_are_bounded_and_quick(tmp_path: Path) -> None:
    limits = "".join(
        f'[budgets."team:t{n % 20}/session:s{n}"]\nlimit_usd = "1"\n' for n in range(1_000)
    )
    async with serving(tmp_path, limits) as (service, app):
        tracker = service.api.tracker
        assert tracker is not None
        for number in range(1_000):
            scope = f"team:t{number % 20}/session:s{number}"
            await tracker.reserve(scope, "1" if number % 3 else "0.5", lease_seconds=3_600)
        browser = Browser(app)
        page, took = await quickest(browser, "/ui/budgets")
        text = text_of(page)
        assert "1 to 25 of 1,021" in text
        assert "And 656 more below." in text
        assert len(page.encode()) < 110_000
        assert took < 0.3
        assert "1,001 to 1,021 of 1,021" in await shown(app, "/ui/budgets?from=1000")
        assert "1 to 25 of 50" in await shown(app, "/ui/budgets?scope=team%3At0")


@pytest.mark.parametrize("given", ["0.0000001", "0.0000019", "1e-7"])
async def test_a_limit_finer_than_the_books_is_refused_and_not_rounded(
    given: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/budgets")
        fields = {"scope": "session:s", "limit_usd": given, "window": "none"}
        _, said = await browser.act("/ui/budgets/limit", fields)
        assert "at most six decimals" in said
        status = await answer_of(app, "GET", "/budgets/status?scope=session:s")
        assert status.json.get("limitUsd") is None
        _, said = await browser.act("/ui/budgets/limit", {**fields, "limit_usd": "0.0000010"})
        assert "is set" in said
