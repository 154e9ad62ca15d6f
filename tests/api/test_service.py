"""The API over the real engine: what is submitted runs, and its story is told right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from api.asgi_client import Response, answer_of
from headgate.api.app import App
from headgate.api.http.request import MAX_BODY_BYTES
from headgate.app import build_app, build_service
from headgate.config import load_settings
from headgate.storage.store import MAX_PAGE_BYTES

Scenario = Callable[[App], Awaitable[None]]
LOOKS = 500


@asynccontextmanager
async def service(data: Path, **settings: object) -> AsyncIterator[App]:
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    loaded = load_settings(None, {}, flags)
    built = build_service(loaded, data=data, environ={})
    await built.engine.start()
    try:
        yield build_app(built)
    finally:
        await built.engine.stop(drain_seconds=1.0)


@pytest.fixture(params=["memory:", None], ids=["memory", "sqlite"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Run a scenario against a service on each of the stores that need no server."""

    def serve_for(scenario: Scenario, **settings: object) -> None:
        store = {} if request.param is None else {"store__url": request.param}

        async def main() -> None:
            async with asyncio.timeout(30), service(tmp_path, **store, **settings) as app:
                await scenario(app)

        asyncio.run(main())

    return serve_for


async def post(app: App, url: str, body: object = None) -> Response:
    return await answer_of(app, "POST", url, json.dumps(body).encode())


async def ended(app: App, task_id: str) -> Any:
    """Look at a task until it has ended."""
    for _ in range(LOOKS):
        task = (await answer_of(app, "GET", f"/tasks/{task_id}")).json
        if task["state"] not in {"queued", "assigned", "running"}:
            return task
        await asyncio.sleep(0.01)
    pytest.fail(f"{task_id} has not ended")


def test_a_task_runs_to_done_with_its_params_input_and_labels(run: Callable[..., None]) -> None:
    async def scenario(app: App) -> None:
        given = {"params": {"name": "world"}, "input": [1, None], "labels": {"team": "x"}}
        answer = await post(app, "/tasks", {"agentId": "a", "action": "hello", **given})
        assert (answer.status, answer.json["position"]) == (202, 1)
        task = await ended(app, answer.json["taskId"])
        assert task["state"] == "done"
        assert {name: task[name] for name in given} == given
        assert task["attempt"] == 1
        assert task["latencyMs"] >= 0
        listed = (await answer_of(app, "GET", "/tasks?state=done&agentId=a")).json
        assert listed["tasks"] == [task]

    run(scenario)


def test_a_batch_of_dependants_runs_after_its_parent(run: Callable[..., None]) -> None:
    async def scenario(app: App) -> None:
        parent = (await post(app, "/tasks", {"agentId": "a", "action": "x"})).json["taskId"]
        tasks = [{"action": "x", "dependsOn": [parent]}, {"action": "x", "dependsOn": ["tsk_no"]}]
        batch = (await post(app, "/tasks/batch", {"agentId": "b", "tasks": tasks})).json
        assert batch["submitted"] == 1
        assert batch["tasks"][1]["code"] == "unknown_parent"
        assert (await ended(app, batch["tasks"][0]["taskId"]))["state"] == "done"

    run(scenario)


def test_a_task_that_waits_says_why_and_can_be_cancelled_once(run: Callable[..., None]) -> None:
    async def scenario(app: App) -> None:
        body = {"agentId": "a", "action": "x", "notBefore": "2100-01-01T00:00:00Z"}
        task_id = (await post(app, "/tasks", body)).json["taskId"]
        why = (await answer_of(app, "GET", f"/tasks/{task_id}/why")).json
        assert why["reasons"], why
        answer = await post(app, f"/tasks/{task_id}/cancel")
        assert (answer.status, answer.json) == (200, {"status": "cancelled", "taskId": task_id})
        assert (await ended(app, task_id))["state"] == "cancelled"
        assert (await post(app, f"/tasks/{task_id}/cancel")).status == 409

    run(scenario)


def test_a_task_beyond_what_may_wait_is_rejected_and_kept_as_such(
    run: Callable[..., None],
) -> None:
    async def scenario(app: App) -> None:
        body = {"agentId": "a", "action": "x", "notBefore": "2100-01-01T00:00:00Z"}
        assert (await post(app, "/tasks", body)).status == 202
        answer = await post(app, "/tasks", {**body, "input": "x" * 10_000})
        assert answer.status == 429
        assert answer.json["details"]["limit"] == "scheduled"
        task = await ended(app, answer.json["taskId"])
        assert (task["state"], task["error"]) == ("rejected", answer.json["error"])
        assert "input" not in task
        again = await post(app, f"/tasks/{task['taskId']}/retry", {})
        assert (again.status, again.json["code"]) == (409, "conflict")
        assert "send it again" in again.json["error"]
        stats = (await answer_of(app, "GET", "/scheduler/stats")).json
        assert stats["queue"]["agents"] == {"a": {"queued": 1, "inflight": 0}}
        assert stats["metrics"]["tasksRejected"] == 1
        assert stats["config"]["maxScheduled"] == 1
        assert stats["store"]["usedBytes"] > 0

    run(scenario, scheduler__max_scheduled=1)


def test_a_page_of_large_tasks_ends_early_and_the_next_one_goes_on(
    run: Callable[..., None],
) -> None:
    async def scenario(app: App) -> None:
        body = {"agentId": "a", "action": "x", "notBefore": "2100-01-01T00:00:00Z"}
        work = {**body, "input": "x" * (MAX_PAGE_BYTES // 4 - 1_000)}
        sent = [(await post(app, "/tasks", work)).json["taskId"] for _ in range(9)]
        found, cursor, pages = [], "", 0
        while pages == 0 or cursor:
            answer = await answer_of(app, "GET", f"/tasks?limit=1000&cursor={cursor}")
            assert len(answer.body) < MAX_PAGE_BYTES + MAX_BODY_BYTES
            found += [task["taskId"] for task in answer.json["tasks"]]
            cursor, pages = answer.json.get("nextCursor", ""), pages + 1
        assert (found, pages) == (sent[::-1], 3)

    run(scenario)
