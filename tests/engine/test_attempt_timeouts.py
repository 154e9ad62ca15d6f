"""The time of one attempt: whoever runs it stops it then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.one_service import Service, play
from engine.simulated_work import DONE, FOREVER_SECONDS, always, in_turn
from engine.simulated_workers import SimulatedClient
from headgate.client.worker import ServiceConnection, Worker
from headgate.core.dispatch_state import DEADLINE_GRACE_SECONDS
from headgate.core.lifecycle import Failed, Succeeded, Usage
from headgate.core.task import TaskRecord, TaskStatus
from headgate.engine.engine import Engine
from headgate.engine.workers import Claim
from headgate.testing import Host

PULL: dict[str, Any] = {"pull_targets": frozenset({"pull"}), "worker_lease_seconds": 30.0}


@pytest.mark.parametrize("stop_seconds", [0.0, 0.5])
def test_an_attempt_that_takes_too_long_is_stopped_and_booked_as_held(stop_seconds: float) -> None:
    async def scenario(service: Service) -> tuple[TaskRecord, float]:
        started = service.now()
        task_id = await service.submit(attempt_seconds=30.0, estimate_micro_usd=70_000)
        record = await service.ended(task_id)
        assert service.executor.stopped == [task_id]
        return record, service.now() - started

    record, seconds = play(scenario, always(FOREVER_SECONDS), stop_seconds=stop_seconds)
    assert (record.task.status, record.error) == (TaskStatus.FAILED, "timed out after 30 s")
    assert 30 <= seconds <= 30.2 + stop_seconds
    progress = record.progress
    assert (record.tokens, record.micro_usd) == (100, 70_000)
    assert (progress.assumed_tokens, progress.assumed_micro_usd) == (100, 70_000)


def test_each_attempt_has_its_whole_time_and_a_timeout_is_tried_again() -> None:
    async def scenario(service: Service) -> TaskRecord:
        task_id = await service.submit(
            attempt_seconds=4.0, max_attempts=3, estimate_micro_usd=1_000
        )
        return await service.ended(task_id)

    known = Succeeded(usage=Usage(tokens=7, micro_usd=5))
    record = play(scenario, in_turn((FOREVER_SECONDS, DONE), (FOREVER_SECONDS, DONE), (3.0, known)))
    assert (record.task.status, record.progress.failures) == (TaskStatus.DONE, 2)
    progress = record.progress
    assert (progress.used_tokens, progress.used_micro_usd) == (207, 2_005)
    assert (progress.assumed_tokens, progress.assumed_micro_usd) == (200, 2_000)


@pytest.mark.parametrize(
    ("deadline_seconds", "attempt_seconds", "error"),
    [
        (5.0, 60.0, "deadline exceeded while running"),
        (60.0, 5.0, "timed out after 5 s"),
        (None, 0.25, "timed out after 0.25 s"),
    ],
)
def test_whichever_comes_first_ends_the_attempt(
    deadline_seconds: float | None, attempt_seconds: float, error: str
) -> None:
    async def scenario(service: Service) -> tuple[TaskRecord, float]:
        started = service.now()
        deadline = None if deadline_seconds is None else started + deadline_seconds
        task_id = await service.submit(deadline=deadline, attempt_seconds=attempt_seconds)
        return await service.ended(task_id), service.now() - started

    record, seconds = play(scenario, always(FOREVER_SECONDS))
    assert record.error == error
    assert seconds <= min(attempt_seconds, deadline_seconds or attempt_seconds) + 0.2


def test_an_attempt_that_ends_in_time_is_not_touched() -> None:
    async def scenario(service: Service) -> TaskRecord:
        record = await service.ended(await service.submit(attempt_seconds=5.0))
        await asyncio.sleep(10.0)
        return record

    record = play(scenario, always(4.9))
    assert (record.task.status, record.progress.assumed_tokens) == (TaskStatus.DONE, 0)


def test_the_deadline_still_counts_while_a_timed_out_task_waits_for_its_next_try() -> None:
    async def scenario(service: Service) -> TaskRecord:
        task_id = await service.submit(
            deadline=service.now() + 5.0, attempt_seconds=4.9, max_attempts=9
        )
        return await service.ended(task_id)

    record = play(scenario, always(FOREVER_SECONDS))
    assert record.error in ("deadline exceeded while queued", "deadline exceeded while running")


async def claimed(service: Service, worker_id: str | None, running: dict[str, int]) -> str:
    """Claim as the worker of agent a would, and note what it was given."""
    claim = Claim(
        agent_id="a", worker_id=worker_id, capacity=1, running=dict(running), wait_seconds=5.0
    )
    name, orders = await service.engine.workers.claim(claim)
    running.update({one.task.id: one.progress.attempt for one in orders.tasks})
    return name


def test_a_worker_that_does_not_stop_in_time_loses_the_attempt_and_it_is_tried_again() -> None:
    async def scenario(service: Service) -> None:
        running: dict[str, int] = {}
        worker_id = await claimed(service, None, running)
        task_id = await service.submit(
            agent_id="a", target="pull", attempt_seconds=10.0, max_attempts=2
        )
        await claimed(service, worker_id, running)
        assert running == {task_id: 1}
        began = service.now()
        lost: tuple[str, ...] = ()
        while not lost:
            await asyncio.sleep(1.0)
            lost = (await service.engine.workers.beat(worker_id, "a", running)).lost
        assert 10.0 <= service.now() - began <= 12.0 + DEADLINE_GRACE_SECONDS
        record = await service.get(task_id)
        assert record.error == "timed out after 10 s"
        assert (record.progress.failures, record.progress.assumed_tokens) == (1, 100)

    play(scenario, **PULL)


def test_the_time_of_an_attempt_at_a_worker_begins_when_the_worker_takes_it() -> None:
    async def scenario(service: Service) -> None:
        running: dict[str, int] = {}
        worker_id = await claimed(service, None, running)
        task_id = await service.submit(agent_id="a", target="pull", attempt_seconds=10.0)
        for _ in range(20):
            # Signs of life alone: the worker has not come for it yet.
            await asyncio.sleep(1.0)
            await service.engine.workers.beat(worker_id, "a", running)
        assert (await service.get(task_id)).task.status is TaskStatus.ASSIGNED
        await claimed(service, worker_id, running)
        began = service.now()
        while not (record := await service.get(task_id)).is_terminal:
            await asyncio.sleep(1.0)
            await service.engine.workers.beat(worker_id, "a", running)
        assert record.error == "timed out after 10 s"
        assert 10.0 <= service.now() - began <= 12.0 + DEADLINE_GRACE_SECONDS

    play(scenario, **PULL)


@pytest.mark.parametrize(
    ("deadline_seconds", "error"),
    [(None, "timed out after 3 s"), (2.0, "deadline exceeded while running")],
)
def test_a_worker_of_ours_keeps_the_time_of_an_attempt_by_itself(
    deadline_seconds: float | None, error: str
) -> None:
    async def scenario(service: Service) -> None:
        host = Host(service.loop, "machine")

        def pick() -> tuple[Host, Engine]:
            return host, service.engine

        client = SimulatedClient(service.loop.random, pick, lost_rate=0.0)
        line = ServiceConnection(client, "a", notify=lambda _line: None)
        worker = Worker(line, service.executor, agent_id="a", capacity=1, clock=service.loop.clock)
        working = asyncio.create_task(worker.run())
        deadline = None if deadline_seconds is None else service.now() + deadline_seconds
        began = service.now()
        task_id = await service.submit(
            agent_id="a", target="pull", attempt_seconds=3.0, deadline=deadline
        )
        record = await service.ended(task_id)
        assert (record.error, service.executor.stopped) == (error, [task_id])
        assert service.now() - began <= 3.5, "before the service loses patience"
        assert record.progress.assumed_tokens == 100
        worker.drain()
        await working

    play(scenario, always(FOREVER_SECONDS), **PULL)


def test_a_failure_of_the_work_itself_is_told_and_not_the_time() -> None:
    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit(attempt_seconds=5.0))

    record = play(scenario, always(1.0, Failed(error="it broke", usage=Usage(tokens=3))))
    assert (record.error, record.tokens, record.progress.assumed_tokens) == ("it broke", 3, 0)
