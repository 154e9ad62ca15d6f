"""A task whose cost is fixed: held before, booked as such after, whatever the work reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.one_service import Service, play
from engine.simulated_work import FOREVER_SECONDS, always, in_turn
from headgate.core.dispatch_state import TargetEstimate
from headgate.core.lifecycle import NOTHING_USED, Failed, Limited, Outcome, Succeeded, Usage
from headgate.core.task import TaskRecord, TaskStatus
from headgate.engine.workers import Claim, Report

DEFAULT = {"": TargetEstimate(micro_usd=5)}
COST = 70_000
PULL: dict[str, Any] = {"pull_targets": frozenset({"pull"}), "worker_lease_seconds": 30.0}


def booked(record: TaskRecord) -> tuple[int, int]:
    return record.progress.used_micro_usd, record.progress.assumed_micro_usd


async def one(service: Service) -> TaskRecord:
    return await service.ended(await service.submit(cost_micro_usd=COST))


@pytest.mark.parametrize(
    ("outcome", "micro_usd"),
    [
        (Succeeded(), COST),
        (Succeeded(usage=Usage(tokens=3, micro_usd=1)), COST),
        (Succeeded(usage=NOTHING_USED), COST),
        (Failed(error="it broke"), COST),
        (Failed(error="it broke", usage=Usage(micro_usd=9)), COST),
        (Failed(error="nobody there", usage=NOTHING_USED), 0),
    ],
)
def test_an_attempt_that_ends_by_itself_costs_what_was_said_and_nothing_is_assumed(
    outcome: Outcome, micro_usd: int
) -> None:
    assert booked(play(one, always(1.0, outcome))) == (micro_usd, 0)


def test_the_cost_is_held_before() -> None:
    async def scenario(service: Service) -> int:
        task_id = await service.submit(cost_micro_usd=COST)
        await service.running(task_id)
        held = (await service.get(task_id)).progress.reserved_micro_usd
        await service.engine.cancel_soon(task_id)
        await service.ended(task_id)
        return held

    assert play(scenario, always(FOREVER_SECONDS), target_estimates=DEFAULT) == COST


@pytest.mark.parametrize("usd", [0, COST])
def test_what_is_held_by_default_is_for_tasks_that_say_no_cost(usd: int) -> None:
    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit(cost_micro_usd=usd))

    assert booked(play(scenario, always(1.0), target_estimates=DEFAULT)) == (usd, 0)


def test_each_attempt_costs_it_again_and_a_pause_costs_nothing() -> None:
    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit(cost_micro_usd=COST, max_attempts=2))

    failed = Failed(error="again", is_transient=True)
    work = in_turn((1.0, Limited(retry_after_seconds=1.0)), (1.0, failed), (1.0, Succeeded()))
    assert booked(play(scenario, work)) == (2 * COST, 0)


def test_an_attempt_that_was_stopped_is_assumed_to_have_cost_it() -> None:
    async def scenario(service: Service) -> TaskRecord:
        task_id = await service.submit(cost_micro_usd=COST, attempt_seconds=2.0)
        return await service.ended(task_id)

    assert booked(play(scenario, always(FOREVER_SECONDS))) == (COST, COST)


def test_a_result_that_is_too_large_costs_it_whatever_was_reported() -> None:
    async def scenario(service: Service) -> TaskRecord:
        service.engine.runner.settlements.max_result_bytes = 0
        return await one(service)

    free = Succeeded(result=msgspec.Raw(b"1"), usage=NOTHING_USED)
    record = play(scenario, always(1.0, free))
    assert (record.task.status, *booked(record)) == (TaskStatus.FAILED, COST, 0)


@pytest.mark.parametrize(
    ("outcome", "micro_usd"),
    [(Succeeded(usage=Usage(micro_usd=1)), COST), (Failed(error="x", usage=NOTHING_USED), 0)],
)
def test_work_at_a_worker_costs_what_was_said(outcome: Succeeded | Failed, micro_usd: int) -> None:
    async def scenario(service: Service) -> TaskRecord:
        workers = service.engine.workers
        claim = Claim(agent_id="a", worker_id=None, capacity=1, running={})
        worker_id, _ = await workers.claim(claim)
        task_id = await service.submit(agent_id="a", target="pull", cost_micro_usd=COST)
        claim = Claim(agent_id="a", worker_id=worker_id, capacity=1, running={}, wait_seconds=5.0)
        _, orders = await workers.claim(claim)
        assert [record.task.id for record in orders.tasks] == [task_id]
        await workers.settle(
            Report(record=orders.tasks[0], worker_id=worker_id, attempt=1, outcome=outcome)
        )
        return await service.ended(task_id)

    assert booked(play(scenario, **PULL)) == (micro_usd, 0)
