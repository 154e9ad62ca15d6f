"""`GET /scheduler/lanes`, on a service that runs: counts, waits, loads, and what is one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.asgi_client import answer_of
from dashboard.browser import serving, submit, until
from dashboard.test_login import token_of
from headgate.api import status
from headgate.storage.tokens import UNBOUND, Bounds

PAUSED = """
[scheduler]
strategy = "load"

[projects.search]
status = "paused"

[projects.evals]
status = "paused"
"""


FULL = """
[scheduler]
strategy = "load"
max_inflight = 1

[projects.search]
[projects.other]

[targets.slow]
kind = "command"
command = ["sleep", "60"]
kill_grace_seconds = 0.1
default = true
"""


STOPPED = """
[projects.evals]
status = "paused"
[projects.search]
status = "draining"
[projects.old]
status = "archived"
[agents.a]
status = "draining"
[agents.b]
status = "paused"
[agents.c]
[targets.echo]
kind = "command"
command = ["cat"]
status = "paused"
"""


@pytest.mark.parametrize(
    ("bounds", "names"),
    [
        (UNBOUND, ["evals", "search", "a", "b", "echo"]),
        (Bounds(project_id="search"), ["search"]),
        (Bounds(agent_id="b"), ["b"]),
        (Bounds(agent_id="b", project_id="search"), ["search", "b"]),
        (Bounds(agent_id="b", project_id="evals"), ["evals", "b"]),
        (Bounds(agent_id="other", project_id="search"), ["search"]),
    ],
)
async def test_stats_name_what_is_paused_or_drains_and_is_ones_own(
    tmp_path: Path, bounds: Bounds, names: list[str]
) -> None:
    async with serving(tmp_path, STOPPED) as (service, app):
        headers = {"authorization": f"Bearer {await token_of(service, 'read', bounds=bounds)}"}
        stats = (await answer_of(app, "GET", "/scheduler/stats", headers=headers)).json
        assert [one["name"] for one in stats["stopped"]] == names


async def test_tasks_of_a_paused_project_wait_and_are_not_ready(tmp_path: Path) -> None:
    async with serving(tmp_path, PAUSED) as (_, app):
        await submit(app, projectId="search", agentId="a")
        (lane,) = (await answer_of(app, "GET", "/scheduler/lanes")).json["lanes"]
        assert (lane["queued"], lane["ready"], lane["load"]) == (1, 0, None)


async def test_lanes_have_counts_waits_and_loads(tmp_path: Path) -> None:
    async with serving(tmp_path, FULL) as (_, app):
        running = await submit(app, projectId="other", agentId="c")
        for agent in ("a", "a", "a", "b"):
            await submit(app, projectId="search", agentId=agent)

        async def are_seen() -> bool:
            answer = (await answer_of(app, "GET", "/scheduler/lanes")).json
            return bool([lane["ready"] for lane in answer["lanes"]] == [3, 1, 0])

        await until(are_seen)
        answer = (await answer_of(app, "GET", "/scheduler/lanes")).json
        assert (answer["count"], answer["strategy"]) == (3, "load")
        deep = answer["lanes"][0]
        assert (deep["projectId"], deep["agentId"], deep["queued"]) == ("search", "a", 3)
        assert (deep["inflight"], deep["oldestWaitSeconds"] >= 0) == (0, True)
        loads = [lane["load"] for lane in answer["lanes"]]
        assert loads[0] > loads[1]
        assert loads[2] is None
        await answer_of(app, "POST", f"/tasks/{running}/cancel")


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


async def test_a_list_that_is_cut_says_how_many_there_are_and_is_narrowed_before_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_LANES", 3)
    async with serving(tmp_path, PAUSED) as (_, app):
        for number in range(5):
            await submit(app, projectId="search", agentId=f"agent-{number}")
        await submit(app, projectId="evals", agentId="last")

        async def listed(query: str) -> tuple[list[str], int]:
            answer = (await answer_of(app, "GET", f"/scheduler/lanes{query}")).json
            return [lane["agentId"] for lane in answer["lanes"]], answer["count"]

        names, count = await listed("")
        assert (len(names), count) == (3, 6)
        assert await listed("?projectId=evals") == (["last"], 1)
        assert await listed("?find=AGENT-4") == (["agent-4"], 1)
        assert await listed("?projectId=evals&find=agent") == ([], 0)
        answer = await answer_of(app, "GET", "/scheduler/lanes?project=evals")
        assert (answer.status, answer.problem["code"]) == (400, "unknown_field")


async def test_a_bound_token_narrows_to_its_own_alone(tmp_path: Path) -> None:
    toml = f"{PAUSED}[auth]\nrequired = true\n"
    async with serving(tmp_path, toml) as (service, app):
        own = await token_of(service, "read", bounds=Bounds(project_id="evals"))
        headers = {"authorization": f"Bearer {own}"}
        url = "/scheduler/lanes?projectId=search"
        assert (await answer_of(app, "GET", url, headers=headers)).status == 403
