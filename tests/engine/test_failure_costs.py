"""What a failed attempt books: by what was reported, how it ended, and what its target says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.one_service import Service, play
from engine.simulated_work import FOREVER_SECONDS, always
from headgate.core.lifecycle import (
    NOTHING_USED,
    Cancelled,
    Failed,
    Limited,
    Outcome,
    Succeeded,
    Usage,
)
from headgate.core.task import TaskRecord
from headgate.engine.workers import Claim, Report
from headgate.executors.targets import CallableTarget, HttpTarget, PullTarget, Target, free_failures

ESTIMATE = 50_000
PULL: dict[str, Any] = {"pull_targets": frozenset({"pull"}), "worker_lease_seconds": 30.0}
FREE: dict[str, Any] = {"free_failures": frozenset({"t", "pull"})}

REPORTED: list[tuple[Outcome, tuple[int, int], tuple[int, int]]] = [
    # What was reported; what is booked, and how much of it is assumed: at the defaults, and where
    # failures are not booked.
    (Failed(error="x"), (ESTIMATE, ESTIMATE), (0, 0)),
    (Failed(error="x", usage=Usage(micro_usd=7)), (7, 0), (7, 0)),
    (Failed(error="x", usage=Usage(tokens=7)), (ESTIMATE, ESTIMATE), (ESTIMATE, ESTIMATE)),
    (Failed(error="x", usage=NOTHING_USED), (0, 0), (0, 0)),
    (Failed(error="x", is_cut=True), (ESTIMATE, ESTIMATE), (ESTIMATE, ESTIMATE)),
    (Cancelled(), (ESTIMATE, ESTIMATE), (ESTIMATE, ESTIMATE)),
    (Succeeded(usage=Usage(micro_usd=7)), (7, 0), (7, 0)),
]


def booked(record: TaskRecord) -> tuple[int, int]:
    return record.progress.used_micro_usd, record.progress.assumed_micro_usd


async def one(service: Service) -> TaskRecord:
    task_id = await service.submit(target="t", estimate_micro_usd=ESTIMATE, attempt_seconds=60.0)
    return await service.ended(task_id)


@pytest.mark.parametrize(("outcome", "usual", "free"), REPORTED)
def test_what_an_executor_reports_is_booked(
    outcome: Outcome, usual: tuple[int, int], free: tuple[int, int]
) -> None:
    assert booked(play(one, always(1.0, outcome))) == usual
    assert booked(play(one, always(1.0, outcome), **FREE)) == free


def test_an_attempt_that_ran_out_of_time_books_its_estimate_whatever_is_set() -> None:
    for fields in ({}, FREE):
        record = play(one, always(FOREVER_SECONDS), **fields)
        assert booked(record) == (ESTIMATE, ESTIMATE)


def test_the_cost_that_a_task_fixes_is_not_booked_for_a_free_failure() -> None:
    async def scenario(service: Service) -> TaskRecord:
        return await service.ended(await service.submit(target="t", cost_micro_usd=ESTIMATE))

    failed = Failed(error="x")
    assert booked(play(scenario, always(1.0, failed))) == (ESTIMATE, 0)
    assert booked(play(scenario, always(1.0, failed), **FREE)) == (0, 0)


@pytest.mark.parametrize(
    ("outcome", "usual", "free"), [row for row in REPORTED if not isinstance(row[0], Cancelled)]
)
def test_what_a_worker_reports_is_booked(
    outcome: Outcome, usual: tuple[int, int], free: tuple[int, int]
) -> None:
    async def scenario(service: Service) -> TaskRecord:
        workers = service.engine.workers
        worker_id, _ = await workers.claim(
            Claim(agent_id="a", worker_id=None, capacity=1, running={})
        )
        task_id = await service.submit(
            agent_id="a", target="pull", estimate_micro_usd=ESTIMATE, max_attempts=1
        )
        claim = Claim(agent_id="a", worker_id=worker_id, capacity=1, running={}, wait_seconds=5.0)
        _, orders = await workers.claim(claim)
        assert [record.task.id for record in orders.tasks] == [task_id]
        await workers.settle(
            Report(record=orders.tasks[0], worker_id=worker_id, attempt=1, outcome=outcome)
        )
        return await service.ended(task_id)

    assert booked(play(scenario, **PULL)) == usual
    assert booked(play(scenario, **PULL, **FREE)) == free


def test_a_pause_costs_nothing() -> None:
    async def scenario(service: Service) -> TaskRecord:
        task_id = await service.submit(target="t", estimate_micro_usd=ESTIMATE)
        await service.running(task_id)
        return await service.ended(task_id)

    outcomes: Iterator[Outcome] = iter(
        [Limited(retry_after_seconds=1.0), Succeeded(usage=Usage(micro_usd=7))]
    )
    assert booked(play(scenario, lambda _order: (1.0, next(outcomes)))) == (7, 0)


def test_the_targets_whose_failures_are_free_say_so() -> None:
    targets: dict[str, Target] = {
        "a": HttpTarget(book_failures=False),
        "b": HttpTarget(book_failures=True),
        "c": CallableTarget(entry_point="m:f"),
        "d": PullTarget(book_failures=False),
    }
    assert free_failures(targets) == {"a", "d"}
