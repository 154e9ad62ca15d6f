"""`GET /scheduler/lanes`, on a service that runs: counts, waits, loads, and what is one's own."""

from __future__ import annotations

from pathlib import Path

from dashboard.browser import serving, submit, until
from dashboard.test_login import token_of
from headgate.tokens import Bounds
from web.asgi_client import answer_of

PAUSED = """
[scheduler]
strategy = "load"

[projects.search]
status = "paused"

[projects.evals]
status = "paused"
"""


async def test_lanes_have_counts_waits_and_loads(tmp_path: Path) -> None:
    async with serving(tmp_path, PAUSED) as (_, app):
        for agent in ("a", "a", "a", "b"):
            await submit(app, projectId="search", agentId=agent)

        async def are_seen() -> bool:
            answer = (await answer_of(app, "GET", "/scheduler/lanes")).json
            return bool([lane["ready"] for lane in answer["lanes"]] == [3, 1])

        await until(are_seen)
        answer = (await answer_of(app, "GET", "/scheduler/lanes")).json
        assert (answer["count"], answer["strategy"]) == (2, "load")
        deep = answer["lanes"][0]
        assert (deep["projectId"], deep["agentId"], deep["queued"]) == ("search", "a", 3)
        assert (deep["inflight"], deep["oldestWaitSeconds"] >= 0) == (0, True)
        loads = [lane["load"] for lane in answer["lanes"]]
        assert loads[0] > loads[1]


async def test_a_bound_token_sees_its_own_lanes(tmp_path: Path) -> None:
    toml = f"{PAUSED}[auth]\nrequired = true\n"
    async with serving(tmp_path, toml) as (service, app):
        admin = {"authorization": f"Bearer {await token_of(service)}"}
        for project in ("search", "evals"):
            await submit(app, headers=admin, projectId=project)
        own = await token_of(service, "read", bounds=Bounds(project_id="evals"))
        headers = {"authorization": f"Bearer {own}"}
        answer = (await answer_of(app, "GET", "/scheduler/lanes", headers=headers)).json
        assert [lane["projectId"] for lane in answer["lanes"]] == ["evals"]
        answer = (await answer_of(app, "GET", "/projects", headers=headers)).json
        assert [one["id"] for one in answer["projects"]] == ["evals"]
        assert answer["projects"][0]["actualShare"] is None
