"""A task that expires before what it waits for: its submit, `why` and its page say so."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from api.asgi_client import answer_of
from config.running import FAST, WORK, Running, running

FILE = f"""
{FAST}
{WORK}
[projects.evals]
budget_limit = 500
"""
WARNED = "before the window of budget project:evals opens at"


def in_minutes(minutes: float) -> str:
    return (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()


async def use_up(service: Running) -> None:
    """Use up the budget of a day, and have the service notice it."""
    spent = {"id": "spent", "scope": "project:evals", "tokens": 500}
    for call in ("reserve", "commit"):
        assert (await service.ask("POST", f"/budgets/{call}", spent)).status == 200
    await service.why(await service.submit(projectId="evals", estimate={"tokens": 300}))


async def submitted(service: Running, key: str = "", **fields: Any) -> dict[str, Any]:
    body = {"agentId": "a", "action": "run", "projectId": "evals", "estimate": {"tokens": 300}}
    headers = {"idempotency-key": key} if key else {}
    sent = json.dumps(body | fields).encode()
    response = await answer_of(service.app, "POST", "/tasks", sent, headers=headers)
    assert response.status == 202, response.body
    answer: dict[str, Any] = response.json
    return answer


@pytest.mark.parametrize("key", ["", "once"])
async def test_a_task_that_expires_before_its_budget_opens_is_told_so(
    tmp_path: Path, key: str
) -> None:
    async with running(tmp_path, FILE) as service:
        await use_up(service)
        deadline = in_minutes(15)
        answer = await submitted(service, key, deadline=deadline)
        assert WARNED in answer["warning"]
        if key:
            assert await submitted(service, key, deadline=deadline) == answer
        task_id = answer["taskId"]
        (reason,) = (await service.get(f"/tasks/{task_id}/why"))["reasons"]
        assert reason["warning"] == answer["warning"]
        page = await service.ask("GET", f"/ui/tasks/{task_id}")
        assert WARNED in page.body.decode()


@pytest.mark.parametrize("fields", [{}, {"deadline": in_minutes(26 * 60)}])
async def test_a_task_that_can_wait_is_not_warned(tmp_path: Path, fields: dict[str, str]) -> None:
    async with running(tmp_path, FILE) as service:
        await use_up(service)
        answer = await submitted(service, **fields)
        assert set(answer) == {"taskId", "state", "position", "createdAt"}
        (reason,) = (await service.get(f"/tasks/{answer['taskId']}/why"))["reasons"]
        assert "warning" not in reason
        batch = await service.ask("POST", "/tasks/batch", {"agentId": "a", "tasks": [BATCHED]})
        assert WARNED in batch.json["tasks"][0]["warning"]


BATCHED = {"action": "run", "projectId": "evals", "deadline": in_minutes(15)}
