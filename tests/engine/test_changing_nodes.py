"""Nodes that come, fall silent or know other targets, and budgets that leave the configuration."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from engine.one_service import Service, play
from engine.simulated_work import always
from engine.test_settlement_outbox import new_ledger, spent
from headgate.core.budgets.ledger import Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.lifecycle import Succeeded, Usage
from headgate.core.money import Tokens
from headgate.core.task import TaskStatus
from headgate.storage.memory import MemoryTaskStore
from headgate.storage.store import Assigned, Assignment, NotAssigned

S = Scope("session:s")
LARGE = {S: Limit(limit_tokens=Tokens(100_000))}
USED = Succeeded(usage=Usage(tokens=60, micro_usd=0))
LEASE_SECONDS = 10.0


def count_assigns(service: Service) -> Counter[str]:
    """Count the plans that are offered to the store, and the lines that it does not take."""
    counts: Counter[str] = Counter()
    store = service.engine.store
    assert isinstance(store, MemoryTaskStore)
    assign = store.assign

    async def counted(
        epoch: int, assignments: Sequence[Assignment]
    ) -> list[Assigned | NotAssigned]:
        await asyncio.sleep(0.002)
        answers = await assign(epoch, assignments)
        counts["plans"] += 1
        counts["refused"] += sum(isinstance(answer, NotAssigned) for answer in answers)
        return answers

    store.assign = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("is_outside", [False, True], ids=["store's books", "outside books"])
def test_a_node_that_fell_silent_costs_few_plans_and_every_task_is_paid(is_outside: bool) -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        await asyncio.sleep(2)
        await other._supervisor.stop()
        await asyncio.sleep(LEASE_SECONDS - 0.2)
        service.engine.dispatcher._news_seconds = 1_000.0
        await asyncio.sleep(0.5)
        counts = count_assigns(service)
        tasks = [await service.submit(scopes=(S,)) for _ in range(8)]
        records = [await service.ended(task_id) for task_id in tasks]
        assert {record.task.status for record in records} == {TaskStatus.DONE}
        assert counts["plans"] < 20, counts
        await asyncio.sleep(3)
        if is_outside:
            assert await spent(service) == (8 * 60, 0)

    ledger: dict[str, Any] = {"new_ledger": new_ledger} if is_outside else {}
    play(
        scenario,
        always(1.0, USED),
        budgets=LARGE,
        capacity=10,
        node_lease_seconds=LEASE_SECONDS,
        **ledger,
    )


def test_a_new_node_is_given_work_within_two_seconds_whatever_the_tick() -> None:
    async def scenario(service: Service) -> float:
        tasks = [await service.submit() for _ in range(4)]
        await asyncio.sleep(1)
        started = service.now()
        await service.start_another()
        while len(service.engine.runner) + len(service.engines[1].runner) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        waited = service.now() - started
        for task_id in tasks:
            await service.ended(task_id)
        return waited

    assert play(scenario, always(30.0), capacity=2, tick_seconds=60.0) <= 2.0


def test_a_target_that_one_node_lacks_does_not_fail_the_task() -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        del other.executors["t"]  # type: ignore[attr-defined]
        await asyncio.sleep(2)
        tasks = [await service.submit(target="t") for _ in range(6)]
        records = [await service.ended(task_id) for task_id in tasks]
        assert {record.task.status for record in records} == {TaskStatus.DONE}

    play(scenario, always(0.5), capacity=4)


@pytest.mark.parametrize("is_outside", [False, True], ids=["store's books", "outside books"])
def test_a_budget_that_left_the_configuration_is_not_in_force(is_outside: bool) -> None:
    async def scenario(service: Service) -> None:
        store = service.engine.store
        by_hand = Scope("session:by-hand")
        if service.ledger is not None:
            await service.ledger.set_limit(by_hand, Limit(limit_tokens=Tokens(1)))
        left_out = await store.set_limits({Scope("session:new"): Limit(limit_tokens=Tokens(5))})
        assert left_out == (S,)
        assert await store.set_limits({Scope("session:new"): Limit(limit_tokens=Tokens(5))}) == ()
        if service.ledger is None:
            task_id = await service.submit(scopes=(S,))
            assert (await service.ended(task_id)).task.status is TaskStatus.DONE

    ledger: dict[str, Any] = {"new_ledger": new_ledger} if is_outside else {}
    play(scenario, always(1.0), budgets={S: Limit(limit_tokens=Tokens(1))}, **ledger)
