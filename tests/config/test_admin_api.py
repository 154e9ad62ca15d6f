"""Administration over HTTP: what is shown, what is changed, how long that holds, who did it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from config.running import FAST, WORK, Running, running
from config.test_slots_and_tasks import slot

SECRET = """
[targets.web]
kind = "http"
url = "http://127.0.0.1:9/run"
headers = { authorization = "Bearer canary-secret" }
status = "paused"

[targets.shell]
kind = "command"
command = ["true"]
env = { KEY = "canary-secret" }
"""
PROJECTS = "[projects.a]\ncredit_weight = 2.0\n[agents.coder]\ncapacity = 3\n"
FILE = FAST + WORK + PROJECTS


async def patch(service: Running, url: str, **fields: Any) -> Any:
    response = await service.ask("PATCH", url, fields)
    assert response.status == 200, response.body
    return response.json


async def test_a_project_is_shown_as_it_is_in_force(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        assert await service.get("/projects/a") == {
            "id": "a",
            "name": "",
            "creditWeight": 2.0,
            "maxConcurrentAgents": None,
            "budgetLimit": None,
            "status": "active",
            "queued": 0,
            "inflight": 0,
            "configured": True,
            "overridden": [],
            "targetShare": 0.666667,
            "actualShare": 0.0,
            "deficit": 0.666667,
            "tokens": 0,
        }
        names = [one["id"] for one in (await service.get("/projects"))["projects"]]
        assert names == ["a", "default"]


async def test_a_change_holds_over_reloads_until_the_file_changes_that_key(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        changed = await patch(service, "/projects/a", creditWeight=5, status="paused")
        assert (changed["creditWeight"], changed["status"]) == (5.0, "paused")
        assert changed["overridden"] == ["creditWeight", "status"]
        service.path.write_text(FILE.replace("capacity = 3", "capacity = 4"))
        await service.ask("POST", "/scheduler/reload")
        assert (await service.get("/projects/a"))["creditWeight"] == 5.0
        service.path.write_text(FILE.replace("credit_weight = 2.0", "credit_weight = 3.0"))
        await service.ask("POST", "/scheduler/reload")
        shown = await service.get("/projects/a")
        assert (shown["creditWeight"], shown["overridden"]) == (3.0, ["status"])


async def test_a_change_is_there_after_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/headgate.db"
    async with running(tmp_path, FILE, store=store) as service:
        await patch(service, "/projects/a", status="paused")
        await service.ask("POST", "/scheduler/pause")
    async with running(tmp_path, FILE, store=store) as service:
        assert (await service.get("/projects/a"))["status"] == "paused"
        assert (await service.get("/scheduler/stats"))["paused"] is True
        await service.ask("POST", "/scheduler/resume")
    async with running(tmp_path, FILE.replace("= 2.0", "= 2.5"), store=store) as service:
        assert (await service.get("/projects/a"))["status"] == "paused"
        assert (await service.get("/scheduler/stats"))["paused"] is False


async def test_a_field_that_is_reset_is_as_the_file_says_again(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await patch(service, "/projects/a", creditWeight=5, maxConcurrentAgents=9)
        changed = await patch(service, "/projects/a", reset=["creditWeight"])
        assert (changed["creditWeight"], changed["overridden"]) == (2.0, ["maxConcurrentAgents"])
        gone = await patch(service, "/projects/a", maxConcurrentAgents=None)
        assert gone["maxConcurrentAgents"] is None


async def test_a_paused_project_holds_its_tasks_and_why_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await patch(service, "/projects/a", status="paused")
        waiting = await service.submit(projectId="a")
        assert "project a is paused" in await service.why(waiting)
        await patch(service, "/projects/a", status="active")
        assert (await service.ended(waiting))["state"] == "done"


async def test_a_paused_agent_holds_its_tasks_also_one_that_nobody_declared(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        for name in ("coder", "guest"):
            changed = await patch(service, f"/agents/{name}", status="paused")
            assert changed["status"] == "paused"
            waiting = await service.submit(agentId=name)
            assert f"agent {name} is paused" in await service.why(waiting)
            await patch(service, f"/agents/{name}", status="active")
            assert (await service.ended(waiting))["state"] == "done"
        agents = {one["id"]: one for one in (await service.get("/agents"))["agents"]}
        assert agents["coder"]["capacity"] == 3
        assert (agents["guest"]["configured"], agents["guest"]["acceptsOpen"]) == (False, False)


async def test_a_paused_target_holds_its_tasks(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await patch(service, "/targets/work", status="paused")
        waiting = await service.submit()
        assert "target work is closed: paused by an administrator" in await service.why(waiting)
        await patch(service, "/targets/work", status="active")
        assert (await service.ended(waiting))["state"] == "done"


@pytest.mark.parametrize(
    ("url", "task", "noun"),
    [
        ("/projects/a", {"projectId": "a"}, "project 'a'"),
        ("/agents/coder", {"agentId": "coder"}, "agent 'coder'"),
        ("/targets/work", {"target": "work"}, "target 'work'"),
    ],
)
async def test_what_drains_takes_no_new_tasks(
    tmp_path: Path, url: str, task: dict[str, str], noun: str
) -> None:
    async with running(tmp_path, FILE) as service:
        await patch(service, url, status="draining")
        body = {"agentId": "a", "action": "run", **task}
        response = await service.ask("POST", "/tasks", body)
        assert (response.status, response.problem["code"]) == (409, "draining")
        assert response.problem["error"] == f"{noun} is draining and takes no new tasks"


async def test_the_switch_pauses_everything_and_the_service_stays_ready(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        assert (await service.ask("POST", "/scheduler/pause")).json == {"paused": True}
        waiting = await service.submit()
        line = "the service is paused; headgate service resume ends this"
        assert line in await service.why(waiting)
        ready = await service.get("/readyz")
        assert (ready["status"], ready["paused"]) == ("ready", True)
        assert (await service.ask("POST", "/scheduler/resume")).json == {"paused": False}
        assert (await service.ended(waiting))["state"] == "done"


async def test_targets_are_shown_without_their_secrets(tmp_path: Path) -> None:
    async with running(tmp_path, FILE + SECRET) as service:
        response = await service.ask("GET", "/targets")
        assert b"canary" not in response.body
        shown = {one["id"]: one for one in response.json["targets"]}
        assert (shown["web"]["headers"], shown["web"]["status"]) == (["authorization"], "paused")
        assert shown["shell"]["env"] == ["KEY"]
        assert shown["work"]["default"] is True


async def test_a_budget_is_set_changed_and_taken_away(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        task = {"scopes": ["session:s"], "estimate": {"tokens": 50}, "onExhausted": "reject"}
        shown = await patch(service, "/budgets?scope=session:s", limitTokens=10, window="day")
        assert shown["budgets"] == [
            {
                "scope": "session:s",
                "limitUsd": None,
                "limitTokens": 10,
                "window": "day",
                "overridden": ["limitTokens", "window"],
                "closures": [],
                "reserve": None,
            }
        ]
        assert (await service.ended(await service.submit(**task)))["state"] == "rejected"
        await patch(service, "/budgets?scope=session:s", limitTokens=100)
        assert (await service.ended(await service.submit(**task)))["state"] == "done"
        gone = await patch(service, "/budgets?scope=session:s", reset=["limitTokens", "window"])
        assert gone == {"budgets": []}
        root = await patch(service, "/budgets?scope=", limitUsd="1.50")
        assert [(one["scope"], one["limitUsd"]) for one in root["budgets"]] == [("", "1.50")]


@pytest.mark.parametrize(
    ("url", "body", "status", "line"),
    [
        ("/projects/none", {"status": "paused"}, 404, "there is no project 'none'"),
        ("/targets/none", {"status": "paused"}, 404, "there is no target 'none'"),
        ("/projects/a", {"creditWeight": -1}, 400, "projects.a.credit_weight: must be a number"),
        ("/projects/a", {"status": "gone"}, 400, "field 'status'"),
        ("/projects/a", {"creditweight": 1}, 400, "did you mean creditWeight?"),
        ("/agents/coder", {"capacity": 0}, 400, "agents.coder.capacity: must be a whole number"),
        ("/agents/%00", {"capacity": 1}, 400, "a name has 1 to 128 characters"),
        ("/projects/a", {"reset": ["name"]}, 400, "field 'reset': 'name' is none of creditWeight"),
        ("/budgets", {"limitTokens": 1}, 400, "missing required field 'scope'"),
        ("/budgets?scope=a", {"limitTokens": 1}, 400, "scope"),
        ("/budgets?scope=session:s", {"window": "x"}, 400, "limits nothing; write limit_usd"),
        ("/budgets?scope=session:s", {"reserve": "x"}, 400, "field 'reserve'"),
        ("/projects/a", "[]", 400, "the body must be a JSON object"),
    ],
)
async def test_a_change_that_cannot_be_made_is_refused_in_one_line(
    tmp_path: Path, url: str, body: object, status: int, line: str
) -> None:
    async with running(tmp_path, FILE) as service:
        before = service.service.config.state
        response = await service.ask("PATCH", url, body)
        assert response.status == status, response.body
        assert line in response.problem["error"]
        assert "\n" not in response.problem["error"]
        assert service.service.config.state is before


async def test_every_change_is_written_down_with_who_made_it(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await patch(service, "/projects/a", creditWeight=5)
        await service.ask("POST", "/scheduler/pause")
        service.path.write_text(FILE.replace("capacity = 3", "capacity = 4"))
        await service.ask("POST", "/scheduler/reload")
        await service.ask("POST", "/tasks/cancel", {"confirm": True})
        page = await service.get("/audit")
        assert [(one["action"], one["subject"]) for one in page["entries"]] == [
            ("tasks.cancel", ""),
            ("settings.reload", ""),
            ("scheduler.pause", ""),
            ("project.patch", "a"),
        ]
        first = page["entries"][-1]
        assert first["detail"] == {"projects.a.credit_weight": {"from": 2.0, "to": 5.0}}
        assert (first["actor"], bool(first["requestId"])) == ("local", True)


async def test_the_cancel_of_one_task_is_written_down(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("POST", "/scheduler/pause")
        task_id = await service.submit()
        assert (await service.ask("POST", f"/tasks/{task_id}/cancel")).status == 200
        (entry, *_) = (await service.get("/audit"))["entries"]
        assert (entry["action"], entry["subject"]) == ("task.cancel", task_id)
        assert (entry["actor"], bool(entry["requestId"])) == ("local", True)
        # Nobody cancels a task that had ended, or one that never was.
        await service.ask("POST", f"/tasks/{task_id}/cancel")
        await service.ask("POST", "/tasks/tsk_none/cancel")
        found = [one["action"] for one in (await service.get("/audit"))["entries"]]
        assert found.count("task.cancel") == 1


async def test_stats_count_what_keeps_tasks_from_starting(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        stats = await service.get("/scheduler/stats")
        assert (stats["paused"], stats["closures"]) == (False, 0)
        await patch(service, "/targets/work", status="paused")
        await service.ask("POST", "/scheduler/pause")
        stats = await service.get("/scheduler/stats")
        assert (stats["paused"], stats["closures"]) == (True, len(await closures(service)))


async def closures(service: Running) -> list[Any]:
    found: list[Any] = (await service.get("/closures"))["closures"]
    return found


async def test_the_times_of_reasons_are_iso_8601(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        later = "2999-01-31T12:00:00Z"
        waiting = await service.submit(notBefore=later)
        await service.why(waiting)
        (reason,) = (await service.get(f"/tasks/{waiting}/why"))["reasons"]
        assert (reason["until"], reason["detail"]["until"]) == (later, later)


MODELS = """
[upstreams.local]
kind = "openai"
base_url = "http://127.0.0.1:9/v1"
models = ["local-*"]

[models.fast]
route = ["anthropic/claude-sonnet-4-5", "local/local-large"]

[prices."local-*"]
input = 1.0
output = 2.5
"""


async def test_models_are_told_with_their_route_and_price(tmp_path: Path) -> None:
    async with running(tmp_path, FAST + WORK + MODELS) as service:
        found = {one["name"]: one for one in (await service.get("/models"))["models"]}
        assert list(found) == ["fast", "local-*", "*"]
        assert found["*"]["route"] == ["anthropic/*", "openai/*"], "what the settings do not name"
        assert found["fast"]["route"] == ["anthropic/claude-sonnet-4-5", "local/local-large"]
        assert found["fast"]["isAlias"] is True
        assert float(found["fast"]["inputUsdPerMillion"]) > 0
        shown = await service.get("/models/local-small")
        assert shown == {
            "name": "local-small",
            "route": ["local/local-small"],
            "inputUsdPerMillion": "1.00",
            "outputUsdPerMillion": "2.50",
        }
        prefixed = await service.get("/models/local%2Fwhatever")
        assert prefixed["route"] == ["local/whatever"]
        assert "inputUsdPerMillion" not in prefixed


async def test_the_audit_log_is_read_page_by_page(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        for weight in range(1, 6):
            await patch(service, "/projects/a", creditWeight=weight)
        seen: list[int] = []
        cursor = ""
        while True:
            page = await service.get(f"/audit?limit=2{cursor}")
            seen += [one["seq"] for one in page["entries"]]
            if "nextCursor" not in page:
                break
            cursor = f"&cursor={page['nextCursor']}"
        assert seen == sorted(seen, reverse=True)
        assert len(seen) == 5
        for wrong in ("limit=0", "limit=x", "cursor=x", "limt=1"):
            assert (await service.ask("GET", f"/audit?{wrong}")).status == 400


async def test_a_retry_makes_a_new_task_and_leaves_the_old_one_alone(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        first = await service.submit(
            projectId="a",
            params={"x": 1},
            labels={"k": "v"},
            priority=3,
            deadline="2100-01-01T00:00:00Z",
        )
        old = await service.ended(first)
        response = await service.ask("POST", f"/tasks/{first}/retry")
        assert response.status == 202
        new = await service.ended(response.json["taskId"])
        assert (new["retryOf"], new["params"], new["labels"]) == (first, {"x": 1}, {"k": "v"})
        assert (new["projectId"], new["priority"], new["agentId"]) == ("a", 3, "a")
        assert ("deadline" in old, "deadline" in new) == (True, False)
        assert await service.get(f"/tasks/{first}") == old


async def test_a_task_that_has_not_ended_is_not_retried(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("POST", "/scheduler/pause")
        waiting = await service.submit()
        response = await service.ask("POST", f"/tasks/{waiting}/retry")
        assert (response.status, response.problem["code"]) == (409, "conflict")
        assert (await service.ask("POST", "/tasks/none/retry")).status == 404


async def test_a_retry_drops_the_parents_and_obeys_the_queue(tmp_path: Path) -> None:
    async with running(tmp_path, FILE + "") as service:
        parent = await service.submit()
        child = await service.submit(dependsOn=[parent])
        await service.ended(child)
        response = await service.ask("POST", f"/tasks/{child}/retry")
        assert "dependsOn" not in await service.get(f"/tasks/{response.json['taskId']}")
        await service.ask("POST", "/scheduler/pause")
        service.path.write_text(FILE.replace("[scheduler]", "[scheduler]\nmax_queue_size = 1"))
        await service.ask("POST", "/scheduler/reload")
        await service.submit()
        response = await service.ask("POST", f"/tasks/{child}/retry")
        assert (response.status, response.problem["code"]) == (429, "queue_full")


async def test_the_share_of_the_queue_is_changed_while_the_service_runs(tmp_path: Path) -> None:
    text = FILE.replace("[scheduler]", "[scheduler]\nmax_queue_size = 10\nqueue_share = SHARE")
    async with running(tmp_path, text.replace("SHARE", "1")) as service:
        await service.ask("POST", "/scheduler/pause")
        for _ in range(5):
            await service.submit(projectId="a")
        task = {"action": "x", "projectId": "a", "agentId": "w"}
        refused = await service.ask("POST", "/tasks", task)
        assert refused.status == 429
        assert refused.problem["details"]["limit"] == "project"
        assert (await service.get("/scheduler/stats"))["config"]["queueShare"] == 1
        service.path.write_text(text.replace("SHARE", "1.5"))
        await service.ask("POST", "/scheduler/reload")
        await service.submit(projectId="a")
        assert (await service.ask("POST", "/tasks", task)).problem["details"]["maxPerProject"] == 6
        assert (await service.get("/scheduler/stats"))["config"]["queueShare"] == 1.5


async def test_a_bulk_cancel_counts_first_and_then_cancels_what_matches(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("POST", "/scheduler/pause")
        mine = [await service.submit(projectId="a", labels={"run": "7"}) for _ in range(5)]
        other = await service.submit(projectId="a", labels={"run": "8"})
        wanted = {"projectId": "a", "label": "run=7", "target": "work"}
        assert (await service.ask("POST", "/tasks/cancel", wanted)).json["matched"] == 5
        assert (await service.get(f"/tasks/{mine[0]}"))["state"] == "queued"
        part = await service.ask("POST", "/tasks/cancel", {**wanted, "confirm": True, "limit": 2})
        assert part.json == {"matched": 5, "cancelled": 2, "skipped": 0, "remaining": 3}
        rest = await service.ask("POST", "/tasks/cancel", {**wanted, "confirm": True})
        assert rest.json == {"matched": 3, "cancelled": 3, "skipped": 0, "remaining": 0}
        assert (await service.get(f"/tasks/{other}"))["state"] == "queued"


async def test_a_bulk_retry_that_is_repeated_makes_no_task_twice(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("POST", "/scheduler/pause")
        for _ in range(4):
            await service.submit(projectId="a")
        await service.ask("POST", "/tasks/cancel", {"confirm": True})
        wanted = {"projectId": "a", "confirm": True}
        part = await service.ask("POST", "/tasks/retry", {**wanted, "limit": 3})
        assert part.json == {"matched": 4, "retried": 3, "skipped": 0, "remaining": 1}
        rest = await service.ask("POST", "/tasks/retry", wanted)
        assert rest.json == {"matched": 1, "retried": 1, "skipped": 0, "remaining": 0}
        assert (await service.ask("POST", "/tasks/retry", wanted)).json["matched"] == 0
        waiting = (await service.get("/tasks?state=queued"))["tasks"]
        assert len({task["retryOf"] for task in waiting}) == 4


async def test_a_bulk_retry_stops_at_a_full_queue_and_goes_on_later(tmp_path: Path) -> None:
    text = FILE.replace("[scheduler]", "[scheduler]\nmax_queue_size = 3")
    async with running(tmp_path, text) as service:
        await service.ask("POST", "/scheduler/pause")
        for _ in range(2):
            for _ in range(3):
                await service.submit()
            await service.ask("POST", "/tasks/cancel", {"confirm": True})
        wanted = {"state": ["cancelled"], "confirm": True}
        first = (await service.ask("POST", "/tasks/retry", wanted)).json
        assert (first["matched"], first["retried"]) == (6, 3)
        await service.ask("POST", "/scheduler/resume")
        async with asyncio.timeout(10.0):
            while (await service.get("/scheduler/stats"))["queue"]["totalQueued"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        second = (await service.ask("POST", "/tasks/retry", wanted)).json
        assert (second["matched"], second["retried"]) == (3, 3)


@pytest.mark.parametrize(
    ("url", "body", "line"),
    [
        ("/tasks/cancel", {"state": ["done"]}, "field 'state': 'done' is none of queued"),
        ("/tasks/retry", {"state": ["queued"]}, "field 'state': 'queued' is none of done"),
        ("/tasks/cancel", {"label": "=x"}, "field 'label': is written as key=value"),
        ("/tasks/cancel", {"limit": 0}, "field 'limit': must be a number from 1 to"),
        ("/tasks/cancel", {"createdAfter": "2026-01-01T00:00:00"}, "needs a time zone"),
        ("/tasks/cancel", {"agentID": "x"}, "did you mean agentId?"),
    ],
)
async def test_a_filter_that_cannot_be_meant_is_refused(
    tmp_path: Path, url: str, body: object, line: str
) -> None:
    async with running(tmp_path, FILE) as service:
        response = await service.ask("POST", url, body)
        assert response.status == 400
        assert line in response.problem["error"]


async def test_a_filter_by_time_takes_what_was_created_then(tmp_path: Path) -> None:
    async with running(tmp_path, FILE) as service:
        await service.ask("POST", "/scheduler/pause")
        task = await service.get(f"/tasks/{await service.submit()}")
        for field, matched in (("createdAfter", 1), ("createdBefore", 0)):
            body = {field: task["createdAt"]}
            assert (await service.ask("POST", "/tasks/cancel", body)).json["matched"] == matched


async def test_a_target_has_another_slot_and_estimate_until_the_file_says_otherwise(
    tmp_path: Path,
) -> None:
    file = FILE + slot(tmp_path, "spare", key="k-1")
    async with running(tmp_path, file) as service:
        changed = await patch(
            service, "/targets/work", slot="spare", estimateUsd="0.02", estimateTokens=500
        )
        assert (changed["slot"], changed["estimateUsd"]) == ("spare", "0.02")
        assert sorted(changed["overridden"]) == ["estimateTokens", "estimateUsd", "slot"]
        task_id = await service.submit(target="work")
        assert (await service.ended(task_id))["slot"] == "spare"
        reset = await patch(service, "/targets/work", reset=["slot", "estimateUsd"])
        assert (reset["slot"], reset["estimateTokens"]) == (None, 500)
        refused = await service.ask("PATCH", "/targets/work", {"slot": "nobody"})
        assert (refused.status, (await service.get("/targets/work"))["slot"]) == (400, None)


async def test_a_slot_takes_as_many_tasks_as_was_set_beside_the_file(tmp_path: Path) -> None:
    file = FILE + slot(tmp_path, "spare", key="k-1")
    async with running(tmp_path, file) as service:
        assert "maxInflight" not in await service.get("/slots/spare")
        changed = await patch(service, "/slots/spare", maxInflight=1)
        assert (changed["maxInflight"], changed["overridden"]) == (1, ["maxInflight"])
        first = await service.submit(slot="spare", params={"seconds": 60})
        async with asyncio.timeout(30.0):
            while (await service.get(f"/tasks/{first}"))["state"] != "running":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        second = await service.submit(slot="spare")
        (why,) = await service.why(second)
        assert "spare" in why
        await patch(service, "/slots/spare", maxInflight=2)
        assert (await service.ended(second))["state"] == "done"
        assert "maxInflight" not in await patch(service, "/slots/spare", reset=["maxInflight"])
        refused = await service.ask("PATCH", "/slots/spare", {"maxInflight": 0})
        assert refused.status == 400
        unknown = await service.ask("PATCH", "/slots/nobody", {"maxInflight": 1})
        assert unknown.status == 404
