"""What is in flight is found however much waits behind it, on every node."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.running import Running, running
from dashboard.browser import Browser, text_of, until
from headgate.core.task import TaskStatus
from headgate.engine import engine
from headgate.storage import queries
from headgate.storage.store import TaskQuery

RUNNING = (TaskStatus.ASSIGNED, TaskStatus.RUNNING)
SLOW = """
[scheduler]
max_inflight = 2

[projects.other]

[targets.slow]
kind = "command"
command = ["sleep", "60"]
default = true
"""
WAITING = 12


@pytest.fixture(autouse=True)
def a_look_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at few rows, and once, as a list does on a store that is large."""
    monkeypatch.setattr(queries, "MAX_ROWS", 3)
    monkeypatch.setattr(queries, "MAX_READ_ROWS", 3)
    monkeypatch.setattr("headgate.dashboard.tasks.LOOK_SECONDS", 0.0)


async def two_that_run(one: Running) -> list[str]:
    """Have two tasks run and others wait, and return those that run, the newest first."""
    first = await one.submit(agentId="a", labels={"kind": "rare"})
    second = await one.submit(agentId="b", projectId="other")

    async def both_run() -> bool:
        tasks = [await one.get(f"/tasks/{task}") for task in (first, second)]
        return [task["state"] for task in tasks] == ["running"] * 2

    await until(both_run)
    for _ in range(WAITING):
        await one.submit(agentId="c")
    return [second, first]


async def test_the_node_that_dispatches_knows_what_is_in_flight(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as one:
        newest, oldest = await two_that_run(one)
        find = one.service.engine.find

        async def found(**fields: object) -> list[str]:
            page = await find(TaskQuery(**fields))  # type: ignore[arg-type]
            assert page.next_before is None or len(page.records) == fields.get("limit")
            return [record.task.id for record in page.records]

        assert await found(states=RUNNING) == [newest, oldest]
        assert await found(states=(TaskStatus.ASSIGNED,)) == []
        assert await found(states=RUNNING, is_oldest_first=True) == [oldest, newest]
        assert await found(states=RUNNING, limit=1) == [newest]
        assert await found(states=RUNNING, limit=1, before=newest) == [oldest]
        assert await found(states=RUNNING, agent_id="a") == [oldest]
        assert await found(states=RUNNING, project_id="other") == [newest]
        assert await found(states=RUNNING, label=("kind", "rare")) == [oldest]
        assert await found(states=RUNNING, created_after=4e9) == []


async def test_the_pages_that_lead_to_what_runs_show_it(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as one:
        for task in await two_that_run(one):
            for url in ("?state=running", "?state=assigned&state=running"):
                page = (await Browser(one.app).get(f"/ui/tasks{url}")).body.decode()
                assert f"/ui/tasks/{task}" in page
        asked = await Browser(one.app).get("/ui/tasks/cancel?state=running")
        assert "2 running tasks" in text_of(asked.body)


async def test_a_node_that_does_not_dispatch_looks_on_until_it_has_them(tmp_path: Path) -> None:
    async with running(tmp_path, SLOW) as one:
        newest, oldest = await two_that_run(one)
        for query, found in (
            (TaskQuery(states=RUNNING), [newest, oldest]),
            (TaskQuery(states=RUNNING, agent_id="a"), [oldest]),
            (TaskQuery(states=RUNNING, project_id="other"), [newest]),
            (TaskQuery(states=RUNNING, project_id="nobody"), []),
            (TaskQuery(states=RUNNING, limit=1), [newest]),
        ):
            page = await one.service.engine._find_in_flight(query)
            assert [record.task.id for record in page.records] == found, query
            assert (page.next_before is None) == (query.limit > 1)


async def test_a_node_that_looks_on_ends_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, SLOW) as one:
        await two_that_run(one)
        monkeypatch.setattr(engine, "LOOK_ON_SECONDS", 0.0)
        page = await one.service.engine._find_in_flight(TaskQuery(states=RUNNING))
        assert page.records == ()
        assert page.next_before is not None
