"""Nodes: one dispatches, all run tasks, and none writes with a lease that has ended."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from engine.one_service import Service, play
from engine.simulated_work import DONE, FOREVER_SECONDS, always, in_turn
from headgate.core.task import TaskRecord, TaskStatus
from headgate.engine.engine import Engine
from headgate.storage.store import Settlement, StaleLease
from headgate.storage.writer import Fault
from headgate.testing import Host, HostCrashedError


def dispatchers(*engines: Engine) -> list[Engine]:
    return [engine for engine in engines if engine.dispatcher.is_leading]


async def until(service: Service, engine: Engine, *, within_seconds: float) -> float:
    """Wait until a node dispatches, and return how long that took."""
    started = service.now()
    async with asyncio.timeout(within_seconds):
        while engine.dispatcher.dispatch_state is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return service.now() - started


def test_one_of_two_nodes_dispatches_and_both_run_tasks() -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        await asyncio.sleep(10)
        assert dispatchers(service.engine, other) == [service.engine]
        tasks = [await service.submit() for _ in range(20)]
        for task_id in tasks:
            assert (await service.ended(task_id)).task.status is TaskStatus.DONE
        ran_here, ran_there = len(service.ordered()), len(other_orders(other))
        assert (ran_here, ran_there) == (10, 10)

    play(scenario, capacity=20)


def other_orders(engine: Engine) -> list[str]:
    executor = engine.executors[""]
    return [order.task_id for order in executor.orders]  # type: ignore[attr-defined]


async def at_work(engine: Engine, orders: int) -> None:
    """Wait until a node has begun so many tasks."""
    async with asyncio.timeout(20):
        while len(other_orders(engine)) < orders:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_what_another_node_is_asked_for_is_decided_and_told_back() -> None:
    async def scenario(service: Service) -> None:
        first = service.engine
        service.engine = await service.start_another()
        task_id = await service.submit()
        assert (await service.ended(task_id, within_seconds=10)).task.status is TaskStatus.DONE
        service.engine = first

    play(scenario)


def test_a_task_is_cancelled_from_a_node_that_does_not_run_it() -> None:
    async def scenario(service: Service) -> None:
        other = await service.start_another()
        task_id = await service.submit()
        await service.running(task_id)
        record = await other.cancel(task_id)
        assert record is not None
        assert record.task.status is TaskStatus.CANCELLED
        assert service.executor.stopped == [task_id]

    async def only_here(service: Service) -> None:
        await scenario(service)

    play(only_here, always(FOREVER_SECONDS), max_inflight=1)


def test_another_node_takes_over_within_five_seconds_of_a_crash() -> None:
    async def scenario(service: Service) -> float:
        host = Host(service.loop, "first")
        await service.engine.stop(drain_seconds=0)
        service.engines.clear()
        crashing = await service.start_another(host)
        service.engines.clear()
        service.engine = await service.start_another()
        await until(service, crashing, within_seconds=5)
        host.crash()
        seconds = await until(service, service.engine, within_seconds=10)
        record = await service.ended(await service.submit(), within_seconds=5)
        assert record.task.status is TaskStatus.DONE
        return seconds

    assert play(scenario) <= 5.0


def test_a_node_that_leaves_hands_over_at_once() -> None:
    async def scenario(service: Service) -> float:
        other = await service.start_another()
        service.engines.remove(service.engine)
        await service.engine.stop(drain_seconds=0)
        service.engine = other
        return await until(service, other, within_seconds=10)

    assert play(scenario) <= 1.0


def test_the_only_node_dispatches_until_it_is_drained_or_another_one_joins() -> None:
    async def scenario(service: Service) -> None:
        await service.running(await service.submit())
        first = service.engine
        draining = asyncio.create_task(first.drain(drain_seconds=60.0))
        await asyncio.sleep(20)
        assert dispatchers(first) == [first]
        queued = await service.submit()
        service.engine = await service.start_another()
        assert await until(service, service.engine, within_seconds=10) <= 2.0
        assert dispatchers(*service.engines) == [service.engine]
        assert (await service.ended(queued)).task.status is TaskStatus.DONE
        assert queued not in service.ordered(), "a node that leaves starts nothing"
        await draining

    play(scenario, always(30.0))


def test_of_nodes_that_leave_at_once_one_dispatches_until_it_is_drained() -> None:
    """Whichever is left with work alone, also after the other one has gone."""

    async def scenario(service: Service) -> None:
        other = await service.start_another()
        await service.running(await service.submit())
        await service.submit()
        await at_work(other, 1)
        first = service.engine
        service.engines.clear()
        leaving = [
            asyncio.create_task(node.drain(drain_seconds=seconds))
            for node, seconds in ((first, 10.0), (other, 60.0))
        ]
        await asyncio.sleep(5)
        assert len(dispatchers(first, other)) == 1
        await leaving[0]
        await first.close()
        await asyncio.sleep(5)
        assert dispatchers(other) == [other]
        await leaving[1]
        assert not other.dispatcher.is_leading
        await other.close()

    play(scenario, always(30.0), capacity=1)


@pytest.mark.parametrize("seed", range(5))
def test_tasks_of_a_lost_node_are_taken_back_and_run_elsewhere(seed: int) -> None:
    async def scenario(service: Service) -> None:
        host = Host(service.loop, "lost")
        lost = await service.start_another(host)
        service.engines.remove(lost)
        tasks = [await service.submit() for _ in range(10)]
        await at_work(lost, 5)
        host.crash()
        crashed_at = service.now()
        service.executor.work = always(1.0)
        records = [await service.ended(task_id) for task_id in tasks]
        assert {record.task.status for record in records} == {TaskStatus.DONE}
        assert sum(record.progress.losses for record in records) == 5
        assert service.now() - crashed_at <= 40
        counts = Counter(record.progress.attempt for record in records)
        assert counts == {1: 5, 2: 5}

    play(scenario, always(30.0), capacity=5, seed=seed)


def test_a_busy_dispatcher_hears_of_lost_nodes_too() -> None:
    """Work that never pauses leaves no quiet moment to look around."""

    async def scenario(service: Service) -> None:
        host = Host(service.loop, "lost")
        lost = await service.start_another(host)
        service.engines.remove(lost)
        tasks = [await service.submit() for _ in range(4)]
        await at_work(lost, 1)
        stuck = other_orders(lost)[0]
        service.executor.work = always(0.1)
        host.crash()
        busy = asyncio.create_task(keep_busy(service))
        record = await service.ended(stuck, within_seconds=60)
        assert record.task.status is TaskStatus.DONE
        busy.cancel()
        for task_id in tasks:
            await service.ended(task_id)

    async def keep_busy(service: Service) -> None:
        while True:
            await service.submit()
            await asyncio.sleep(0.3)

    play(scenario, always(20.0), capacity=2, max_inflight=4)


def test_news_in_many_parts_is_read_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.storage.sql_store.MAX_NEWS", 2)

    async def scenario(service: Service) -> float:
        leader, service.engine = service.engine, await service.start_another()
        assert leader.dispatcher.is_leading
        started = service.now()
        task_ids = [await service.submit() for _ in range(40)]
        for task_id in task_ids:
            await service.ended(task_id)
        return service.now() - started

    # Each pause would be a second, and there are twenty parts.
    assert play(scenario, always(0.5)) < 10.0


def test_a_restarted_process_takes_back_what_it_was_running_at_once() -> None:
    async def scenario(service: Service) -> float:
        await service.engine.stop(drain_seconds=0)
        service.engines.clear()
        host = Host(service.loop, "only")
        service.engine = await service.start_another(host)
        service.executor.work = always(1.0)
        task_id = await service.submit()
        await asyncio.sleep(1)
        host.crash()
        service.engines.clear()
        await asyncio.sleep(service.settings.node_lease_seconds + 1)
        service.engine = await service.start_another()
        started = service.now()
        await service.ended(task_id)
        return service.now() - started

    assert play(scenario, always(FOREVER_SECONDS)) <= 2.0


def test_a_node_that_was_away_past_its_lease_changes_nothing_and_comes_back_as_new() -> None:
    async def scenario(service: Service) -> None:
        first = service.engine
        other = await service.start_another()
        task_id = await service.submit()
        await service.running(task_id)
        before = first.node.node_id
        # The node cannot reach the store for longer than its lease; the other one can.
        service.away = {0}
        await asyncio.sleep(40)
        service.away = set()
        service.engine = other
        record = await service.ended(task_id)
        assert (record.task.status, record.progress.attempt) == (TaskStatus.DONE, 2)
        await asyncio.sleep(5)
        assert first.node.node_id != before
        assert len(first.runner) == 0
        assert (await service.engine.totals()).completed == 1
        assert dispatchers(first, other) == [other]

    play(scenario, in_turn((20.0, DONE), (20.0, DONE)), max_inflight=1)


def test_a_task_started_by_a_lost_answer_runs_though_another_node_dispatches_by_then() -> None:
    async def scenario(service: Service) -> None:
        first = service.engine
        other = await service.start_another()
        store = first.store
        assign = store.assign

        async def lost(*args: object) -> object:
            left = [Fault.REPLY_LOST, Fault.REPLY_LOST]
            service.fault = lambda: left.pop() if left else None
            store.assign = assign  # type: ignore[method-assign]
            try:
                return await assign(*args)  # type: ignore[arg-type]
            finally:
                service.away = {0}

        store.assign = lost  # type: ignore[method-assign, assignment]
        # Not due yet: a task that is due is assigned in the transaction that stores it.
        task_id = await service.submit(not_before=service.now() + 1)
        await until(service, other, within_seconds=8)
        service.away = set()
        record = await service.ended(task_id, within_seconds=15)
        assert (record.task.status, record.progress.attempt) == (TaskStatus.DONE, 1)
        assert service.ordered() == [task_id]

    play(scenario)


def test_a_settlement_with_an_old_lease_changes_nothing() -> None:
    settlements: list[Settlement] = []

    async def scenario(service: Service) -> TaskRecord:
        store = service.engine.store
        settle = store.settle

        async def noted(settlement: Settlement) -> object:
            settlements.append(settlement)
            return await settle(settlement)

        store.settle = noted  # type: ignore[method-assign, assignment]
        task_id = await service.submit()
        await service.ended(task_id)
        before = await service.get(task_id)
        old = settlements[0]
        stale = msgspec.structs.replace(old.lease, attempt=0)
        again = await settle(msgspec.structs.replace(old, lease=stale))
        assert isinstance(again, StaleLease)
        stranger = msgspec.structs.replace(old.lease, node_id="somebody else")
        again = await settle(msgspec.structs.replace(old, lease=stranger))
        assert isinstance(again, StaleLease)
        assert await service.get(task_id) == before
        return before

    assert play(scenario).task.status is TaskStatus.DONE


def test_waiting_for_work_on_a_crashed_host_ends_with_the_host() -> None:
    async def scenario(service: Service) -> None:
        host = Host(service.loop, "gone")
        engine = await service.start_another(host)
        service.engines.remove(engine)
        asking = host.spawn(engine.totals())
        host.crash()
        with pytest.raises(HostCrashedError):
            await asking

    play(scenario)


def test_orders_that_never_end_keep_no_sign_of_life_waiting() -> None:
    async def scenario(service: Service) -> None:
        life = service.engine.node
        signs = []

        async def sign() -> None:
            signs.append(service.now())

        async def fetch() -> None:
            await asyncio.sleep(0.01)

        life.run_once, life.fetch = sign, fetch  # type: ignore[method-assign]
        life._has_orders.set()
        running = asyncio.create_task(life.run())
        await asyncio.sleep(30)
        running.cancel()
        assert len(signs) >= 10

    play(scenario)
