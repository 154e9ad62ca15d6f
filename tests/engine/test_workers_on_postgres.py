"""Workers of a service of two nodes: whichever they ask, what was decided reaches them."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine.one_service import dispatch_settings
from headgate.core.lifecycle import Succeeded
from headgate.core.task import Submission, Task, TaskStatus, Terms
from headgate.engine.engine import Engine, EngineSettings
from headgate.engine.workers import Claim, Report
from headgate.storage.postgres import PostgresTaskStore
from headgate.storage.store import Queued, StaleLease

SETTINGS = EngineSettings(dispatch=dispatch_settings(pull_targets=frozenset({"pull"})))
SOON_SECONDS = 8.0
"""Less than the time after which a claim that waits looks by itself."""


async def submit(engine: Engine) -> str:
    task = Task(project_id="x", agent_id="a", target="pull", created_at=engine.now())
    answer = await engine.submit(task, Terms(), Submission(action="work"))
    assert isinstance(answer, Queued)
    return answer.record.task.id


def claim(worker_id: str | None, wait_seconds: float) -> Claim:
    return Claim(
        agent_id="a", worker_id=worker_id, capacity=2, running={}, wait_seconds=wait_seconds
    )


async def play(url: str) -> None:
    leader = Engine(PostgresTaskStore(url), {}, SETTINGS)
    other = Engine(PostgresTaskStore(url), {}, SETTINGS)
    await leader.start()
    await other.start()
    try:
        assert leader.dispatcher.is_leading
        worker_id, _ = await other.workers.claim(claim(None, 0.0))
        waiting = asyncio.create_task(other.workers.claim(claim(worker_id, 20.0)))
        await asyncio.sleep(1.0)
        task_id = await submit(leader)
        started = time.monotonic()
        _, orders = await waiting
        assert [record.task.id for record in orders.tasks] == [task_id]
        assert time.monotonic() - started < SOON_SECONDS

        for engine in (other, leader):
            record = await engine.get(task_id)
            assert record is not None
            report = Report(record=record, worker_id=worker_id, attempt=1, outcome=Succeeded())
            settled = await engine.workers.settle(report)
            assert not isinstance(settled, StaleLease)
            assert settled.task.status is TaskStatus.DONE
        async with asyncio.timeout(SOON_SECONDS):
            while _flights(leader):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    finally:
        for engine in (other, leader):
            await engine.stop(drain_seconds=0.0)


def _flights(engine: Engine) -> int:
    dispatch_state = engine.dispatcher.dispatch_state
    return 1 if dispatch_state is None else len(dispatch_state.in_flight)


@pytest.mark.timeout(60)
def test_a_claim_that_waits_at_one_node_is_called_by_the_other(postgres_url: str) -> None:
    asyncio.run(play(postgres_url))
