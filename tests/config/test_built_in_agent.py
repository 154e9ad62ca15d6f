"""The built-in agent: open tasks run on a plain service, and its name is nobody else's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from config.running import FAST, WORK, Running, running
from config.test_state import override, situation_of, tables_of
from headgate.config import load_settings
from headgate.core.snapshot import BUILT_IN_AGENT, Agent, AgentState
from headgate.errors import InvalidSettingError
from service.support import Gate

NAMED = f'[agents."{BUILT_IN_AGENT}"]\ncapacity = 3\n'
OPEN = "[agents.crew]\ncapacity = 2\n"
CLOSED = OPEN + "accepts_open = false\n"
NAP = WORK.replace("reload_work:work", "reload_work:nap")
PAUSED = OPEN + "status = 'paused'\n"
DRAINING = OPEN + "status = 'draining'\n"


@pytest.mark.parametrize(
    ("text", "is_there"),
    [("", True), (CLOSED, True), (DRAINING, True), (OPEN, False), (PAUSED, False)],
)
def test_it_is_there_where_no_declared_agent_accepts_open_tasks(text: str, is_there: bool) -> None:
    settings = situation_of(f"[scheduler]\nmax_inflight = 7\n{text}").settings
    found = [agent for agent in settings.core_agents() if agent.id == BUILT_IN_AGENT]
    expected = [Agent(id=BUILT_IN_AGENT, capacity=7, state=AgentState.IDLE)]
    assert found == (expected if is_there else [])


def test_it_comes_back_when_the_last_that_accepts_open_tasks_has_left_the_file() -> None:
    before = situation_of(OPEN)
    drained = before.with_file(tables_of(""))
    patched = before.with_overrides([override(before, "agents", "crew", "accepts_open", False)])
    for after in (drained, patched):
        assert BUILT_IN_AGENT in [agent.id for agent in after.settings.core_agents()]


async def test_a_task_with_only_a_project_runs_on_a_plain_service(tmp_path: Path) -> None:
    async with running(tmp_path, FAST) as service:
        answer = await service.ask("POST", "/tasks", {"projectId": "default", "action": "hello"})
        assert answer.status == 202
        task = await service.ended(answer.json["taskId"])
        assert (task["state"], task["agentId"]) == ("done", BUILT_IN_AGENT)
        (agent,) = (await service.get("/agents"))["agents"]
        assert (agent["id"], agent["capacity"], agent["builtIn"]) == (BUILT_IN_AGENT, 20, True)
        assert (agent["acceptsOpen"], agent["configured"]) == (True, False)
        assert (await service.get(f"/agents/{BUILT_IN_AGENT}")) == agent
        stats = await service.get("/scheduler/stats")
        assert stats["metrics"]["agents"][BUILT_IN_AGENT]["tasksCompleted"] == 1
        counted = f'headgate_agent_tasks_completed_total{{agent="{BUILT_IN_AGENT}"}} 1.0'
        async with asyncio.timeout(10.0):
            while counted.encode() not in (await service.ask("GET", "/metrics")).body:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        page = (await service.ask("GET", "/ui/projects")).body.decode()
        assert "takes tasks that name no agent" in page
        assert f"/ui/agents/{BUILT_IN_AGENT}/change" not in page


async def test_as_many_open_tasks_run_as_may_be_in_flight(tmp_path: Path) -> None:
    limits = "max_inflight = 5\nmax_per_agent_inflight = 2\n"
    async with running(tmp_path, FAST + limits + NAP) as service:
        tasks = [await _open_task(service, seconds=30) for _ in range(6)]
        async with asyncio.timeout(10.0):
            while (await service.get("/scheduler/stats"))["queue"]["totalInflight"] < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (waits,) = await service.why(tasks[-1])
        assert waits.startswith("5 of 5 tasks are in flight")


async def test_it_drains_when_a_reload_declares_an_agent_for_open_tasks(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + NAP) as service:
        gate = Gate(tmp_path / "go on")
        first = await _open_task(service, **gate.params)
        async with asyncio.timeout(30.0):
            while (await service.get(f"/tasks/{first}"))["state"] != "running":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        service.path.write_text(FAST + NAP + OPEN)
        await service.ask("POST", "/scheduler/reload")
        second = await _open_task(service)
        assert (await service.ended(second))["agentId"] == "crew"
        shown = {one["id"]: one for one in (await service.get("/agents"))["agents"]}
        assert (shown[BUILT_IN_AGENT]["status"], shown[BUILT_IN_AGENT]["inflight"]) == (
            "draining",
            1,
        )
        gate.open()
        ended = await service.ended(first)
        assert (ended["state"], ended["agentId"]) == ("done", BUILT_IN_AGENT)
        assert [one["id"] for one in (await service.get("/agents"))["agents"]] == ["crew"]
        service.path.write_text(FAST + NAP)
        await service.ask("POST", "/scheduler/reload")
        assert (await service.ended(await _open_task(service)))["agentId"] == BUILT_IN_AGENT


async def test_nobody_can_submit_to_it_or_work_as_it_or_change_it(tmp_path: Path) -> None:
    async with running(tmp_path, FAST) as service:
        body = {"agentId": BUILT_IN_AGENT, "action": "hello"}
        batch = {"agentId": BUILT_IN_AGENT, "tasks": [{"action": "hello"}]}
        claim = {"capacity": 1, "waitSeconds": 0}
        for method, url, sent in [
            ("POST", "/tasks", body),
            ("POST", "/tasks/batch", batch),
            ("POST", f"/agents/{BUILT_IN_AGENT}/claim", claim),
            (
                "POST",
                "/tokens",
                {"name": "t", "permissions": ["submit"], "agentId": BUILT_IN_AGENT},
            ),
            ("PATCH", f"/agents/{BUILT_IN_AGENT}", {"capacity": 3}),
        ]:
            answer = await service.ask(method, url, sent)
            assert answer.status in (202, 400, 422), (url, answer.body)
            assert b"'built-in' is reserved" in answer.body, (url, answer.body)
        assert (await service.get("/scheduler/stats"))["queue"]["totalQueued"] == 0


def test_nobody_can_declare_it(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(NAMED)
    with pytest.raises(InvalidSettingError, match=r"agents\.built-in: 'built-in' is reserved"):
        load_settings(path, {}, {})


@pytest.mark.parametrize("text", ["", CLOSED])
async def test_an_open_task_that_is_to_be_pulled_says_who_could_pull_it(
    tmp_path: Path, text: str
) -> None:
    async with running(tmp_path, FAST + text) as service:
        task_id = await _open_task(service, target="pull")
        (waits,) = await service.why(task_id)
        assert "no declared agent accepts open tasks" in waits
        assert "[agents.NAME]" in waits


async def _open_task(service: Running, *, target: str | None = None, **params: object) -> str:
    body = {"projectId": "default", "action": "run", "params": params}
    answer = await service.ask("POST", "/tasks", body | ({"target": target} if target else {}))
    assert answer.status == 202, answer.body
    return str(answer.json["taskId"])
