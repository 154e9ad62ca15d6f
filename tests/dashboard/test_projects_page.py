"""Projects and agents: shares, lanes, switches, and changes that show their effect."""

from __future__ import annotations

import html
from pathlib import Path
from urllib.parse import quote

import pytest

from api.asgi_client import answer_of
from api.fake_engine import FakeEngine
from dashboard.browser import Browser, quickest, serving, submit, text_of, until
from dashboard.test_login import logged_in, token_of
from headgate.api import status
from headgate.api.app import App
from headgate.storage.store import Totals
from headgate.storage.tokens import Bounds

PROJECTS = """
[projects.search]
credit_weight = 3
max_concurrent_agents = 4

[projects.evals]
credit_weight = 1
status = "paused"

[agents.writer]
capacity = 2
type = "llm"
"""
LOCKED = "[auth]\nrequired = true\n"
HOSTILE = "<script>alert(1)</script>"
ACTIONS: tuple[tuple[str, dict[str, str]], ...] = (
    ("/ui/projects/search/change", {"status": "paused"}),
    ("/ui/projects/search/reset", {}),
    ("/ui/agents/writer/change", {"status": "paused"}),
    ("/ui/agents/writer/reset", {}),
    ("/ui/scheduler/pause", {}),
    ("/ui/scheduler/resume", {}),
)


async def shown(app: App, url: str = "/ui/projects") -> str:
    answer = await Browser(app).get(url)
    assert answer.status == 200, text_of(answer.body)
    return text_of(answer.body)


async def test_a_changed_weight_moves_the_shares_and_is_marked(tmp_path: Path) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/projects/search")
        page, said = await browser.act("/ui/projects/search/change", {"credit_weight": "8"})
        assert said == (
            "Done: project search was changed: Weight 8; its target share was 60 % and is 80 %."
        )
        assert "Weight 8 changed" in text_of(page.body)

        async def has_moved() -> bool:
            return "80 % target" in await shown(app)

        await until(has_moved)
        assert "search 8 changed 0 of 4 0 80 % target" in await shown(app)
        _, said = await browser.act("/ui/projects/search/reset")
        assert said.startswith("Done:"), said
        assert "changed" not in await shown(app)


async def test_only_what_was_changed_is_overridden(tmp_path: Path) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/projects/search")
        fields = {"credit_weight": "3", "max_concurrent_agents": "9", "budget_limit": "1,000"}
        _, said = await browser.act("/ui/projects/search/change", fields)
        changes = "Cap on tasks in flight 9, Token budget 1,000"
        assert said == f"Done: project search was changed: {changes}."
        project = (await answer_of(app, "GET", "/projects/search")).json
        assert sorted(project["overridden"]) == ["budgetLimit", "maxConcurrentAgents"]
        assert (project["maxConcurrentAgents"], project["budgetLimit"]) == (9, 1_000)
        _, said = await browser.act("/ui/projects/search/change", fields)
        assert said == "Done: project search did not change: the form had the present values."
        _, said = await browser.act("/ui/projects/search/change", {**fields, "budget_limit": ""})
        assert said.startswith("Done:"), said
        assert (await answer_of(app, "GET", "/projects/search")).json["budgetLimit"] is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"credit_weight": "much"}, "Weight: must be a number, such as 2 or 0.5."),
        ({"credit_weight": "1_000"}, "Weight: must be a number, such as 2 or 0.5."),
        ({"credit_weight": "\uff11\uff12"}, "Weight: must be a number, such as 2 or 0.5."),
        ({"credit_weight": "1,5"}, "Weight: must be a number, such as 2 or 0.5."),
        ({"credit_weight": "nan"}, "Weight: must be a number, such as 2 or 0.5."),
        ({"credit_weight": "-1"}, "Weight: must not be negative."),
        ({"credit_weight": "1e999"}, "Weight: must be "),
        ({"credit_weight": "0.0000000001"}, "Weight: must be "),
        ({"max_concurrent_agents": "1.5"}, "Cap on tasks in flight: must be a whole number"),
        ({"max_concurrent_agents": "1,5"}, "Cap on tasks in flight: must be a whole number"),
        ({"max_concurrent_agents": "0"}, "Cap on tasks in flight: must be "),
        ({"max_concurrent_agents": "9" * 40}, "Cap on tasks in flight: has too many digits."),
        ({"budget_limit": "-1"}, "Token budget: must not be negative."),
        ({"status": "gone"}, "Status: must be one of active, paused, draining, archived"),
    ],
)
async def test_what_cannot_be_is_said_and_changes_nothing(
    fields: dict[str, str], problem: str, tmp_path: Path
) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/projects/search")
        _, said = await browser.act("/ui/projects/search/change", fields)
        assert said.startswith(f"Not done: {problem}")
        assert (await answer_of(app, "GET", "/projects/search")).json["overridden"] == []


async def test_projects_and_agents_are_paused_drained_and_resumed(tmp_path: Path) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/projects")
        back = {"back": "/ui/projects?find=e"}
        for path, noun in (
            ("/ui/projects/search", "project search"),
            ("/ui/agents/writer", "agent writer"),
        ):
            for status, words in (
                ("paused", "is paused"),
                ("draining", "drains"),
                ("active", "is active"),
            ):
                page, said = await browser.act(f"{path}/change", {"status": status, **back})
                assert said.startswith(f"Done: {noun} {words}"), said
                assert "Find by name" in text_of(page.body)
                kind = path.removeprefix("/ui")
                assert (await answer_of(app, "GET", kind)).json["status"] == status


async def test_the_capacity_of_an_agent_is_changed_and_reset(tmp_path: Path) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/projects")
        _, said = await browser.act("/ui/agents/writer/change", {"capacity": "1,5"})
        assert said.startswith("Not done: Capacity: must be a whole number")
        _, said = await browser.act("/ui/agents/writer/change", {"capacity": "5"})
        assert said.startswith("Done:"), said
        assert "0 of 5 changed" in await shown(app)
        await browser.act("/ui/agents/writer/reset")
        assert "0 of 2 0 yes" in await shown(app)


async def test_everything_is_paused_and_resumed(tmp_path: Path) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/projects")
        _, said = await browser.act("/ui/scheduler/pause")
        assert said.startswith("Done:"), said
        assert (await answer_of(app, "GET", "/scheduler/stats")).json["paused"] is True
        await browser.act("/ui/scheduler/resume")
        assert (await answer_of(app, "GET", "/scheduler/stats")).json["paused"] is False


@pytest.mark.parametrize(
    ("bounds", "own", "shares"),
    [
        (Bounds(), {"search", "evals"}, True),
        (Bounds(project_id="search"), {"search"}, False),
        (Bounds(agent_id="a"), set(), False),
        (Bounds(agent_id="a", project_id="search"), set(), False),
    ],
)
async def test_a_reader_sees_its_own_projects_and_changes_none(
    tmp_path: Path, bounds: Bounds, own: set[str], *, shares: bool
) -> None:
    async with serving(tmp_path, PROJECTS + LOCKED) as (service, app):
        browser = Browser(app)
        token = await token_of(service, "read", "submit", "cancel", bounds=bounds)
        await logged_in(browser, token)
        page = (await browser.get("/ui/projects")).body
        assert (await browser.get("/ui/projects")).status == 200
        assert (b'id="agents-title"' in page, b"/change" in page) == (False, False)
        assert ("target" in text_of(page)) is shares
        headers = {"authorization": f"Bearer {token}"}
        listed = (await answer_of(app, "GET", "/projects", headers=headers)).json["projects"]
        seen = {one["id"] for one in listed}
        assert seen & {"search", "evals"} == own
        assert {one["targetShare"] is not None for one in listed} <= {shares}
        for name in ("search", "evals"):
            status = 200 if name in own else 404
            assert (await browser.get(f"/ui/projects/{name}")).status == status
            answer = await answer_of(app, "GET", f"/projects/{name}", headers=headers)
            assert answer.status == status
            change = await answer_of(app, "PATCH", f"/projects/{name}", b"{}", headers=headers)
            assert change.status == 403
        for url, fields in ACTIONS:
            assert (await browser.post(url, fields)).status == 403


async def test_hostile_names_are_shown_as_text_and_can_be_changed(tmp_path: Path) -> None:
    turned = "עברית/b"
    async with serving(tmp_path, PROJECTS) as (_, app):
        for name in (HOSTILE, turned):
            await submit(app, projectId="evals", agentId=name)
        browser = Browser(app)
        page = (await browser.get("/ui/projects")).body.decode()
        assert HOSTILE not in page
        assert html.escape(HOSTILE) in page
        assert f"<bdi>{turned}</bdi>" in page
        for name in (HOSTILE, turned):
            url = f"/ui/agents/{quote(name, safe='')}/change"
            assert f'action="{url}"' in page
            _, said = await browser.act(url, {"capacity": "3"})
            assert said.startswith("Done: agent "), said
        agents = (await answer_of(app, "GET", "/agents")).json["agents"]
        assert {one["id"]: one["capacity"] for one in agents}[turned] == 3


async def test_a_form_sends_nobody_to_another_page(tmp_path: Path) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        browser = Browser(app)
        await browser.get("/ui/projects")
        for back in ("//evil.example", "https://evil.example/ui/projects", "/ui/projectsx"):
            answer = await browser.post("/ui/scheduler/resume", {"back": back})
            assert answer.headers["location"] == "/ui/projects"


async def test_500_lanes_are_bounded_and_quick(tmp_path: Path) -> None:
    projects = "".join(f'[projects.p{n}]\nstatus = "paused"\n' for n in range(50))
    limits = "[scheduler]\nmax_queue_size = 10000\n"
    async with serving(tmp_path, limits + projects) as (_, app):
        for project in range(50):
            for agent in range(10):
                await submit(app, projectId=f"p{project}", agentId=f"agent-{agent}")
        browser = Browser(app)
        page, took = await quickest(browser, "/ui/projects")
        text = text_of(page)
        assert "1 to 25 of 500" in text
        assert "1 to 25 of 51" in text
        assert len(page.encode()) < 110_000
        assert took < 0.3
        assert "26 to 50 of 500" in await shown(app, "/ui/projects?lanes_from=25")
        assert (await browser.get("/ui/projects?lanes_from=x")).status == 400


async def test_lanes_are_found_however_many_others_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_LANES", 3)
    async with serving(tmp_path, f'{PROJECTS}[projects.last]\nstatus = "paused"\n') as (_, app):
        for number in range(30):
            await submit(app, projectId="evals", agentId=f"agent-{number}")
        await submit(app, projectId="last", agentId="late")
        assert "1 to 25 of 31" in await shown(app)
        assert "26 to 31 of 31" in await shown(app, "/ui/projects?lanes_from=25")
        assert "agent-29" in await shown(app, "/ui/projects?find=agent-29")
        own = await shown(app, "/ui/projects/last")
        assert "late" in own
        assert "Nothing of this project" not in own


async def test_agents_are_found_by_name_and_shown_a_part_at_a_time(tmp_path: Path) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        for number in range(30):
            await submit(app, projectId="evals", agentId=f"agent-{number:02}")
        first = await agents_of(app, "/ui/projects")
        assert "1 to 25 of 31" in first
        assert "writer" in first
        assert "agent-24" not in first
        further = await agents_of(app, "/ui/projects?agents_from=25")
        assert "26 to 31 of 31" in further
        assert "agent-29" in further
        assert "writer" not in further
        found = await agents_of(app, "/ui/projects?find=AGENT-2&agents_from=5")
        assert "6 to 10 of 10" in found
        assert "agent-29" in found


async def test_lanes_are_read_once_for_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, PROJECTS) as (service, app):
        read, reads = service.engine.totals, 0

        async def counted() -> Totals:
            nonlocal reads
            reads += 1
            return await read()

        monkeypatch.setattr(service.engine, "totals", counted)
        for url in ("/ui/projects", "/ui/projects/evals"):
            reads = 0
            assert (await Browser(app).get(url)).status == 200
            assert reads == 1


async def agents_of(app: App, url: str) -> str:
    """Return what a page shows of agents."""
    return text_of((await Browser(app).region(url, "agent-rows")).body)


async def test_where_this_node_does_not_dispatch_waits_and_loads_are_unknown(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, PROJECTS) as (_, app):
        await submit(app, projectId="evals")
        app.api.engine.outlook = FakeEngine().outlook
        assert "evals a 1 unknown 0 unknown unknown" in await shown(app)


async def test_the_effect_on_the_shares_is_seen_with_many_projects(tmp_path: Path) -> None:
    toml = "".join(f"[projects.p{number:02}]\n" for number in range(25))
    async with serving(tmp_path, toml) as (_, app):
        text = (await shown(app, "/ui/projects/p24")).partition("Shares of all projects")[2]
    assert "p24 3.8 % target" in text
    assert "And 6 more projects ." in text
