"""The reaper: results are kept for their time, and as long as somebody needs them."""

from __future__ import annotations

import asyncio

import pytest

from engine.one_service import Service, play
from engine.simulated_work import always
from headgate.core.retention import Retention
from headgate.engine import reaper
from headgate.engine.reaper import Reaper
from headgate.storage.store import TaskQuery
from headgate.storage.writer import Fault


def test_a_result_is_there_for_its_time_and_then_gone() -> None:
    async def scenario(service: Service) -> None:
        task_id = await service.submit()
        await service.ended(task_id)
        await asyncio.sleep(58)
        assert await service.engine.get(task_id) is not None
        await asyncio.sleep(4)
        assert await service.engine.get(task_id) is None

    play(scenario, retention=Retention(seconds=60.0))


def test_a_result_that_others_depend_on_is_kept() -> None:
    async def scenario(service: Service) -> None:
        parent = await service.submit()
        child = await service.submit(depends_on=(parent,), not_before=service.now() + 100)
        await service.ended(parent)
        await asyncio.sleep(60)
        assert await service.engine.get(parent) is not None
        await service.ended(child)

    play(scenario, retention=Retention(seconds=30.0))


def test_results_go_a_bounded_number_at_a_time_with_short_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaper, "MAX_EVICTED", 3)

    async def scenario(service: Service) -> None:
        tasks = [await service.submit() for _ in range(10)]
        for task_id in tasks:
            await service.ended(task_id)
        await asyncio.sleep(5)
        other = Reaper(service.engine.store, Retention(seconds=1.0))
        assert [(await other.run_once()).tasks for _ in range(5)] == [3, 3, 3, 1, 0]
        running = asyncio.create_task(other.run())
        await asyncio.sleep(1)
        running.cancel()
        assert (await service.engine.find(TaskQuery())).records == ()

    play(scenario, always(0.1), retention=Retention(seconds=1e6))


def test_a_store_that_is_away_is_tried_again() -> None:
    async def scenario(service: Service) -> None:
        task_id = await service.submit()
        await service.ended(task_id)
        service.fault = lambda: Fault.REFUSED
        await asyncio.sleep(20)
        service.fault = lambda: None
        await asyncio.sleep(3)
        assert await service.engine.get(task_id) is None

    play(scenario, retention=Retention(seconds=5.0))
