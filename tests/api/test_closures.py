"""What is closed: shown where the thing is shown, with who closed it, and opened by an operator."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from api.test_workers_api import OneCaller
from config.running import FAST, Running, running
from executors.endpoint import Endpoint, reply, reply_json, running_endpoint
from headgate.api.callers import LOCAL, Caller
from headgate.errors import InvalidSettingError
from headgate.storage.tokens import Bounds

A_DAY = 86_400


def settings(folder: Path, endpoint: Endpoint | None = None) -> str:
    (folder / "key").write_text("sk-key")
    (folder / "key").chmod(0o600)
    address = "http://127.0.0.1:9" if endpoint is None else endpoint.url
    return f"""{FAST}
[projects.alpha]
[projects.beta]

[[slots]]
name = "shared"
provider = "openai"
key_file = "{folder / "key"}"

[[slots]]
name = "grant"
provider = "anthropic"
key_file = "{folder / "key"}"
projects = ["alpha"]

[targets.model]
kind = "http"
url = "{address}/v1/work"
headers = {{ authorization = "Bearer {{slot.key}}" }}
slot = "shared"

[targets.plain]
kind = "http"
url = "{address}/work"
"""


def as_caller(service: Running, permissions: set[str], **bounds: Any) -> None:
    caller = Caller(name="it", permissions=frozenset(permissions), bounds=Bounds(**bounds))
    service.app.api.auth = OneCaller(caller)


async def closed(service: Running) -> list[dict[str, Any]]:
    """Return what is closed, once something is."""
    async with asyncio.timeout(10.0):
        while not (found := (await service.get("/closures"))["closures"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return list(found)


async def slot(service: Running, name: str = "shared") -> dict[str, Any]:
    return dict(await service.get(f"/slots/{name}"))


async def post(service: Running, url: str, **body: object) -> dict[str, Any]:
    response = await service.ask("POST", url, body)
    assert response.status == 200, response.body
    return dict(response.json)


def seconds(since: str, until: str) -> float:
    return (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds()


async def test_a_worker_that_says_a_day_pauses_its_own_agent_and_no_slot(tmp_path: Path) -> None:
    async with running(tmp_path, settings(tmp_path)) as service:
        task_id = await service.submit(agentId="coder", target="pull", slot="shared")
        as_caller(service, {"submit", "read"}, agent_id="coder")
        worker: dict[str, object] = {}
        tasks: list[object] = []
        while not tasks:
            claim = await post(service, "/agents/coder/claim", waitSeconds=5, **worker)
            worker, tasks = {"workerId": claim["workerId"]}, claim["tasks"]
        pause = {"error": "429", "retryAfterSeconds": A_DAY}
        await post(service, f"/tasks/{task_id}/fail", attempt=1, **worker, **pause)
        shared = await slot(service)
        assert (shared["state"], shared.get("closures")) == ("unknown", None)
        service.app.api.auth = OneCaller(LOCAL)
        (closure,) = await closed(service)
        assert (closure["kind"], closure["name"], closure["cause"]) == ("agent", "coder", "worker")
        assert (closure["by"], closure["taskId"]) == (worker["workerId"], task_id)
        assert seconds(closure["since"], closure["until"]) == A_DAY
        assert (await service.get("/agents/coder"))["closures"] == [closure]
        opened = await post(service, "/closures/open", kind="agent", name="coder")
        assert opened == {"closures": [], "count": 0}
        again = await post(service, "/agents/coder/claim", waitSeconds=5, **worker)
        assert [task["taskId"] for task in again["tasks"]] == [task_id]
        (entry, *_) = (await service.get("/audit"))["entries"]
        assert (entry["action"], entry["subject"], entry["actor"]) == (
            "agent.open",
            "coder",
            "local",
        )


async def test_an_answer_of_the_provider_closes_its_slot_and_the_slot_says_so(
    tmp_path: Path,
) -> None:
    limited = reply(429, b"secret of another", Retry_After=str(A_DAY))
    async with (
        running_endpoint(limited) as there,
        running(tmp_path, settings(tmp_path, there)) as service,
    ):
        task_id = await service.submit(target="model", projectId="alpha")
        (closure,) = await closed(service)
        assert (closure["kind"], closure["cause"], closure["by"]) == (
            "slot",
            "provider",
            "model",
        )
        assert (closure["name"], closure["taskId"]) == ("shared", task_id)
        assert seconds(closure["since"], closure["until"]) == 3_600
        assert closure["why"] == "executor returned 429", "others are not told of its answer"
        shared = await slot(service)
        assert (shared["state"], shared["closures"]) == ("closed", [closure])
        assert (shared["waitReason"], shared["waitUntil"]) == (
            closure["why"],
            closure["until"],
        )
        assert 'headgate_slot_closed{slot="shared"} 1.0' in str(
            (await service.ask("GET", "/metrics")).body
        )
        as_caller(service, {"read"}, project_id="beta")
        seen = await slot(service)
        assert seen["state"] == "closed"
        assert "secret of another" not in str(seen)
        assert task_id not in str(seen)
        service.app.api.auth = OneCaller(LOCAL)
        there.answer = reply_json({"ok": True})
        await post(service, "/closures/open", kind="slot", name="shared")
        assert (await service.ended(task_id))["state"] == "done"
        assert (await slot(service))["state"] == "unknown"


async def test_a_target_closes_itself_whatever_slot_a_task_names(tmp_path: Path) -> None:
    limited = reply(429, b"", Retry_After=str(A_DAY))
    async with (
        running_endpoint(limited) as there,
        running(tmp_path, settings(tmp_path, there)) as service,
    ):
        task_id = await service.submit(target="plain", slot="shared")
        (closure,) = await closed(service)
        assert (closure["kind"], closure["name"], closure["cause"]) == (
            "target",
            "plain",
            "target",
        )
        assert seconds(closure["since"], closure["until"]) == 3_600
        assert (await service.get("/targets/plain"))["closures"] == [closure]
        assert (await slot(service))["state"] == "unknown"
        there.answer = reply_json({"ok": True})
        await post(service, "/closures/open", kind="target", name="plain")
        assert (await service.ended(task_id))["state"] == "done"


async def test_a_budget_without_room_says_so_where_it_is_shown(tmp_path: Path) -> None:
    budget = '[budgets."project:alpha"]\nlimit_tokens = 10\nwindow = "day"\n'
    async with running(tmp_path, settings(tmp_path) + budget) as service:
        await post(service, "/scheduler/pause")
        spent = {"scope": "project:alpha", "tokens": 10}
        held = await service.ask("POST", "/budgets/reserve", spent | {"id": "r"})
        assert held.status in (200, 201), held.body
        await service.submit(projectId="alpha", target="plain", estimate={"tokens": 5})
        await post(service, "/scheduler/resume")
        (closure,) = await closed(service)
        assert (closure["kind"], closure["name"], closure["cause"]) == (
            "scope",
            "project:alpha",
            "budget",
        )
        assert datetime.fromisoformat(closure["since"]) > datetime.now(UTC) - timedelta(minutes=1)
        status = await service.get("/budgets/status?scope=project:alpha")
        assert [one["name"] for one in status["closures"]] == ["project:alpha"]
        listed = {one["scope"]: one for one in (await service.get("/budgets"))["budgets"]}
        assert [one["cause"] for one in listed["project:alpha"]["closures"]] == ["budget"]
        await post(service, "/closures/open", kind="budget", name="project:alpha")
        assert [one["kind"] for one in await closed(service)] == ["scope"], "it has no room yet"


async def test_a_slot_of_other_projects_is_not_there(tmp_path: Path) -> None:
    async with running(tmp_path, settings(tmp_path)) as service:
        names = {one["name"]: one.get("projects") for one in (await service.get("/slots"))["slots"]}
        assert names == {"shared": None, "grant": ["alpha"]}
        for project, own in (("alpha", ["shared", "grant"]), ("beta", ["shared"])):
            as_caller(service, {"read", "submit"}, project_id=project)
            assert [one["name"] for one in (await service.get("/slots"))["slots"]] == own
            shown = await service.ask("GET", "/slots/grant")
            assert shown.status == (200 if "grant" in own else 404)
            body = {"action": "x", "projectId": project, "slot": "grant", "target": "plain"}
            sent = await service.ask("POST", "/tasks", body | {"agentId": "a"})
            assert sent.status == (202 if "grant" in own else 400), sent.body


async def test_a_reload_that_keeps_a_slot_to_others_holds_tasks_that_wait(tmp_path: Path) -> None:
    async with running_endpoint(reply_json({"ok": True})) as there:
        text = settings(tmp_path, there)
        async with running(tmp_path, text) as service:
            await post(service, "/scheduler/pause")
            task_id = await service.submit(target="plain", slot="grant", projectId="alpha")
            service.path.write_text(text.replace('projects = ["alpha"]', 'projects = ["beta"]'))
            await post(service, "/scheduler/reload")
            await post(service, "/scheduler/resume")
            (why,) = await service.why(task_id)
            assert "project alpha may not use slot grant" in why
            assert not there.seen
            assert (await service.ask("POST", f"/tasks/{task_id}/cancel")).status == 200
            retried = await service.ask("POST", f"/tasks/{task_id}/retry")
            assert retried.json["code"] == "unknown_slot", "a retry is judged like a submit"


@pytest.mark.parametrize(
    ("projects", "problem"),
    [('["nowhere"]', "there is no project 'nowhere'"), ("[]", "slots.grant.projects")],
)
async def test_a_slot_for_a_project_that_is_not_there_is_refused(
    tmp_path: Path, projects: str, problem: str
) -> None:
    text = settings(tmp_path).replace('["alpha"]', projects)
    with pytest.raises(InvalidSettingError) as caught:
        async with running(tmp_path, text):
            pass
    assert problem in str(caught.value)
    assert str(caught.value).startswith("slots.grant.projects")
