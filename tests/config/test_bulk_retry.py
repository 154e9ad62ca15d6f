"""Many tasks are tried again into a queue that has no room for all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from config.running import FAST, WORK, Running, running

FILE = FAST.replace("[scheduler]", "[scheduler]\nmax_queue_size = 4") + WORK
STORES = ("memory", "sqlite", "postgres")


def store_url(kind: str, folder: Path, request: pytest.FixtureRequest) -> str:
    urls = {"memory": "memory:", "sqlite": f"sqlite:///{folder}/headgate.db"}
    return urls.get(kind) or str(request.getfixturevalue("postgres_url"))


async def retry(service: Running, **wanted: Any) -> Any:
    response = await service.ask("POST", "/tasks/retry", {"confirm": True, **wanted})
    assert response.status == 200, response.body
    return response.json


async def cancelled(service: Running, count: int) -> None:
    """Leave as many cancelled tasks in the store, four at a time."""
    for _ in range(count // 4):
        for _ in range(4):
            await service.submit()
        await service.ask("POST", "/tasks/cancel", {"confirm": True})


async def live(service: Running) -> int:
    queue = (await service.get("/scheduler/stats"))["queue"]
    return int(queue["totalQueued"]) + int(queue["totalInflight"])


async def finish_queued(service: Running) -> None:
    await service.ask("POST", "/scheduler/resume")
    async with asyncio.timeout(10.0):
        while await live(service):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await service.ask("POST", "/scheduler/pause")


@pytest.mark.parametrize("kind", STORES)
async def test_a_retry_into_a_full_queue_stores_nothing_and_says_what_is_left(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    async with running(tmp_path, FILE, store=store_url(kind, tmp_path, request)) as service:
        await service.ask("POST", "/scheduler/pause")
        await cancelled(service, 12)
        for left in (8, 8):
            answer = await retry(service)
            assert (answer["skipped"], answer["remaining"]) == (0, left)
            assert answer["matched"] == answer["retried"] + left
        assert (await service.get("/tasks?state=rejected"))["tasks"] == []
        for left in (4, 0):
            await finish_queued(service)
            assert await retry(service) == {
                "matched": left + 4,
                "retried": 4,
                "skipped": 0,
                "remaining": left,
            }
        waiting = (await service.get("/tasks?state=queued"))["tasks"]
        done = (await service.get("/tasks?state=done"))["tasks"]
        assert len({task["retryOf"] for task in waiting + done}) == 12


@pytest.mark.parametrize("kind", STORES)
async def test_a_retry_that_was_turned_away_is_not_retried_beside_the_first_task(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    async with running(tmp_path, FILE, store=store_url(kind, tmp_path, request)) as service:
        await service.ask("POST", "/scheduler/pause")
        await cancelled(service, 4)
        ended = (await service.get("/tasks?state=cancelled"))["tasks"][0]["taskId"]
        for _ in range(4):
            await service.submit(params={"text": "a \u0000 in it"})
        assert (await service.ask("POST", f"/tasks/{ended}/retry")).status == 429
        assert (await service.ask("POST", "/tasks", {"agentId": "a", "action": "x"})).status == 429
        # The four that were cancelled, and the new one that was turned away.
        count = await service.ask("POST", "/tasks/retry", {})
        assert count.json["matched"] == 5
        named = await service.ask("POST", "/tasks/retry", {"state": ["rejected"]})
        assert named.json["matched"] == 2
        # What a text says of a label is none, and a text that PostgreSQL cannot read is no hurdle.
        labelled = await service.ask("POST", "/tasks/cancel", {"label": "k=v"})
        assert labelled.json["matched"] == 0
