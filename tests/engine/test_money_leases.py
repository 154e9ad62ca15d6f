"""How long money is held: as long as somebody holds the task, however long that is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.one_service import Service, play
from engine.simulated_work import FOREVER_SECONDS, SimulatedExecutor, always
from engine.test_settlement_outbox import ShakyLedger
from headgate.core.budgets.ledger import Balance, Clock, Refused, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import ROOT
from headgate.core.lifecycle import Succeeded, Usage
from headgate.core.task import TaskStatus
from headgate.engine.engine import Engine
from headgate.engine.external_ledger import LEASE_SECONDS, LeaseRenewer
from headgate.engine.workers import Claim
from headgate.errors import LedgerUnavailableError
from headgate.storage import ledger as ledger_rows
from headgate.storage.transaction import Transaction
from headgate.testing import Host

HOURS = 3_600.0
A_WHILE_SECONDS = 15 * LEASE_SECONDS
USED = Succeeded(usage=Usage(tokens=60, micro_usd=0))
HELD, BOOKED, ASSUMED, NOTHING = (0, 100), (60, 0), (100, 0), (0, 0)
"""Tokens spent and reserved: while a task holds its estimate, and after its end."""

PULL: dict[str, Any] = {"pull_targets": frozenset({"pull"}), "worker_lease_seconds": 30.0}


def outside(clock: Clock) -> ShakyLedger:
    """Return a ledger outside the store."""
    return ShakyLedger(clock=clock)


IN_AND_OUT = pytest.mark.parametrize(
    "new_ledger", [None, outside], ids=["in the store", "outside the store"]
)


def shaky(service: Service) -> ShakyLedger:
    assert isinstance(service.ledger, ShakyLedger)
    return service.ledger


async def books(service: Service) -> tuple[int, int]:
    """Return the tokens that are spent and reserved in all, wherever the ledger is."""
    if service.ledger is not None:
        balance = (await service.ledger.accounts(ROOT, most=1))[0].balance
    else:

        def read(transaction: Transaction) -> Balance:
            return ledger_rows.accounts(transaction, ROOT, service.now(), most=1)[0].balance

        store = service.new_store()
        await store.open()
        balance = await store.writer.submit(read)
    return balance.spent_tokens, balance.reserved_tokens


async def settles(service: Service, expected: tuple[int, int], *, within_seconds: float) -> float:
    """Wait for the books to come to this, and return how long that took."""
    began = service.now()
    async with asyncio.timeout(within_seconds):
        while await books(service) != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    return service.now() - began


def crash(service: Service, host: Host, engine: Engine) -> None:
    """End a node as `kill -9` does."""
    host.crash()
    service.engines.remove(engine)


@IN_AND_OUT
def test_a_task_that_runs_for_three_hours_holds_its_money_for_as_long(
    new_ledger: Callable[[Clock], ShakyLedger] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops look less often here, since three hours of them are many steps."""
    monkeypatch.setattr("headgate.engine.external_ledger.PAUSE_SECONDS", 10.0)
    monkeypatch.setattr("headgate.engine.node.DISPATCHER_LEASE_SECONDS", 60.0)
    monkeypatch.setattr("headgate.engine.dispatcher.NEWS_SECONDS", 10.0)

    async def scenario(service: Service) -> None:
        task_id = await service.submit()
        await service.running(task_id)
        for _ in range(6):
            await asyncio.sleep(HOURS / 2 - 1.0)
            assert await books(service) == HELD
        record = await service.ended(task_id)
        assert (record.task.status, record.progress.assumed_tokens) == (TaskStatus.DONE, 0)
        await settles(service, BOOKED, within_seconds=15.0)

    play(
        scenario,
        always(3 * HOURS, USED),
        new_ledger=new_ledger,
        node_lease_seconds=60.0,
        tick_seconds=10.0,
    )


@IN_AND_OUT
def test_a_node_that_dies_gives_up_its_money_with_its_lease(
    new_ledger: Callable[[Clock], ShakyLedger] | None,
) -> None:
    """The task has hours left to run, and no deadline."""

    async def scenario(service: Service) -> None:
        host = Host(service.loop, "doomed")
        doomed = await service.start_another(host)
        await asyncio.sleep(5.0)
        task_ids = [await service.submit(attempt_seconds=9 * HOURS) for _ in range(4)]
        executor = doomed.executors[""]
        assert isinstance(executor, SimulatedExecutor)
        await asyncio.sleep(2.0)
        lost = [order.task_id for order in executor.orders]
        assert 0 < len(lost) < 4
        crash(service, host, doomed)
        lease_seconds = service.settings.node_lease_seconds
        expected = (100 * len(lost), 400)  # assumed, and held again by the next attempts
        assert await settles(service, expected, within_seconds=60.0) <= lease_seconds + 3.0
        for task_id in task_ids:
            await service.engine.cancel(task_id)

    play(scenario, always(FOREVER_SECONDS), new_ledger=new_ledger)


@IN_AND_OUT
def test_the_next_dispatcher_keeps_the_money_of_what_runs(
    new_ledger: Callable[[Clock], ShakyLedger] | None,
) -> None:
    async def scenario(service: Service) -> None:
        host = Host(service.loop, "doomed")
        first = await service.start_another(host)
        await service.engine.node.end()
        await asyncio.sleep(5.0)
        assert first.dispatcher.is_leading
        second = await service.start_another()
        await asyncio.sleep(5.0)
        for _ in range(2):
            await service.submit()
        await asyncio.sleep(5.0)
        executor = second.executors[""]
        assert isinstance(executor, SimulatedExecutor)
        (order,) = executor.orders
        crash(service, host, first)
        await asyncio.sleep(A_WHILE_SECONDS - 60.0)
        assert second.dispatcher.is_leading
        assert await books(service) == (100, 200), "the other attempt is lost, and tried again"
        record = await service.ended(order.task_id)
        assert (record.progress.attempt, record.progress.assumed_tokens) == (1, 0)
        await settles(service, (100 + 2 * 60, 0), within_seconds=120.0)

    play(scenario, always(A_WHILE_SECONDS, USED), new_ledger=new_ledger)


@IN_AND_OUT
def test_money_of_a_pull_worker_is_held_while_the_worker_lives(
    new_ledger: Callable[[Clock], ShakyLedger] | None,
) -> None:
    async def scenario(service: Service) -> None:
        workers, running = service.engine.workers, dict[str, int]()

        async def claim(worker_id: str | None) -> str:
            claim = Claim(
                agent_id="a", worker_id=worker_id, capacity=1, running=running, wait_seconds=5.0
            )
            name, orders = await workers.claim(claim)
            running.update({one.task.id: one.progress.attempt for one in orders.tasks})
            return name

        worker_id = await claim(None)
        task_id = await service.submit(agent_id="a", target="pull")
        await claim(worker_id)
        assert list(running) == [task_id]
        for _ in range(int(A_WHILE_SECONDS / 10.0)):
            await asyncio.sleep(10.0)
            assert not (await workers.beat(worker_id, "a", running)).lost
        assert await books(service) == HELD
        assert await settles(service, ASSUMED, within_seconds=60.0) <= 33.0
        assert (await service.get(task_id)).task.status is TaskStatus.QUEUED

    play(scenario, new_ledger=new_ledger, **PULL)


@pytest.mark.parametrize(
    ("away_seconds", "meanwhile"), [(LEASE_SECONDS / 2, HELD), (3 * LEASE_SECONDS, ASSUMED)]
)
def test_money_is_assumed_only_if_the_ledger_is_away_for_longer_than_the_lease(
    away_seconds: float, meanwhile: tuple[int, int]
) -> None:
    """Its commit, however late, corrects what was assumed."""

    async def scenario(service: Service) -> None:
        task_id = await service.submit()
        await service.running(task_id)
        await asyncio.sleep(A_WHILE_SECONDS)
        # Work that waits for money has the dispatcher read everything anew, again and again.
        other = await service.submit(not_before=service.now() + 1.0)
        shaky(service).is_away = True
        await asyncio.sleep(away_seconds)
        with capture_logs() as lines:
            shaky(service).is_away = False
            await asyncio.sleep(5.0)
            await service.engine.cancel(other)
            await asyncio.sleep(2 * LEASE_SECONDS)
        warned = [line["reservations"] for line in lines if "lease of money" in line["event"]]
        assert warned == ([] if meanwhile == HELD else [1])
        spent, reserved = await books(service)
        assert (spent - 100, reserved) == meanwhile, "the cancelled one is assumed in full"
        record = await service.ended(task_id, within_seconds=HOURS)
        assert record.task.status is TaskStatus.DONE
        await settles(service, (160, 0), within_seconds=5.0)

    play(scenario, always(HOURS / 2, USED), new_ledger=outside)


@IN_AND_OUT
@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_that_come_back_late_go_on_and_book_once(
    new_ledger: Callable[[Clock], ShakyLedger] | None, nodes: int
) -> None:
    """Neither store nor ledger was to be reached for longer than any lease.

    A ledger outside has assumed the money meanwhile; the settlement corrects it.
    """

    async def scenario(service: Service) -> None:
        for _ in range(nodes - 1):
            await service.start_another()
        await asyncio.sleep(5.0)
        task_ids = [await service.submit() for _ in range(4)]
        await asyncio.sleep(5.0)
        assert [len(engine.runner) for engine in service.engines] == [4 // nodes] * nodes
        before = [engine.node.node_id for engine in service.engines]
        service.away = set(range(nodes))
        if service.ledger is not None:
            shaky(service).is_away = True
        await asyncio.sleep(3 * LEASE_SECONDS)
        service.away = set()
        if service.ledger is not None:
            shaky(service).is_away = False
        for task_id in task_ids:
            record = await service.ended(task_id, within_seconds=HOURS)
            progress = record.progress
            assert (record.task.status, progress.attempt, progress.losses) == (
                TaskStatus.DONE,
                1,
                0,
            )
            assert (progress.used_tokens, progress.assumed_tokens) == (60, 0)
        assert [engine.node.node_id for engine in service.engines] == before
        await settles(service, (240, 0), within_seconds=15.0)

    play(scenario, always(4 * LEASE_SECONDS, USED), new_ledger=new_ledger, capacity=4)


def test_money_of_a_service_that_is_gone_is_assumed_when_its_lease_ends() -> None:
    """And what was held for work that nobody began is given back."""

    async def scenario(service: Service) -> None:
        task_id = await service.submit(attempt_seconds=9 * HOURS)
        await service.running(task_id)
        settle = shaky(service).settle

        async def never_dispatched(request: SettleRequest) -> Reservation:
            if request.call is Call.DISPATCHED:
                await asyncio.Event().wait()
            return await settle(request)

        shaky(service).settle = never_dispatched  # type: ignore[method-assign]
        await service.submit(attempt_seconds=9 * HOURS)
        await asyncio.sleep(1.0)
        assert await books(service) == (0, 200)
        service.engine.runner.abandon()
        service.away.add(0)
        await service.engine._supervisor.stop()
        assert await settles(service, ASSUMED, within_seconds=600.0) <= LEASE_SECONDS + 1.0
        shaky(service).settle = settle  # type: ignore[method-assign]
        service.away.clear()

    play(scenario, always(FOREVER_SECONDS), new_ledger=outside)


def test_a_node_that_drains_for_long_keeps_the_money_of_what_it_runs() -> None:
    async def scenario(service: Service) -> None:
        task_id = await service.submit()
        await service.running(task_id)
        draining = asyncio.create_task(service.engine.drain(drain_seconds=HOURS))
        await asyncio.sleep(A_WHILE_SECONDS - 60.0)
        assert await books(service) == HELD
        await draining
        assert await books(service) == BOOKED

    play(scenario, always(A_WHILE_SECONDS, USED), new_ledger=outside)


def test_leases_are_renewed_together_and_only_those_that_are_held() -> None:
    async def main(service: Service) -> None:
        asked: list[list[str]] = [[]]
        fate: dict[str, type[Exception]] = {"away": LedgerUnavailableError}

        class Books(ShakyLedger):
            async def settle(self, request: SettleRequest) -> Reservation:
                asked[-1].append(request.reservation_id)
                if request.reservation_id in fate:
                    raise fate[request.reservation_id]("it is away")
                return await super().settle(request)

        held = {f"task:{number}" for number in range(2_500)}

        async def holds() -> set[str]:
            return set(held)

        renewer = LeaseRenewer(Books(clock=service.loop.clock), holds)
        with capture_logs() as lines:
            assert await renewer.run_once(), "ids that the ledger does not have are its business"
        assert [line.get("reservations") for line in lines] == [2_500]
        assert len(asked[0]) == len(set(asked[0])) == 2_500
        asked.append([])
        held = {"task:7", "away", "new"}
        assert not await renewer.run_once()
        assert sorted(asked[-1]) == ["away", "new"]

    play(main)


def test_a_crash_between_the_money_and_the_assignment_frees_the_money_soon() -> None:
    async def scenario(service: Service) -> None:
        host = Host(service.loop, "doomed")
        await service.engine.node.end()
        doomed = await service.start_another(host)
        await asyncio.sleep(5.0)
        assert doomed.dispatcher.is_leading
        reserve, reserved = shaky(service).reserve, asyncio.Event()

        async def then_crash(request: ReserveRequest) -> Reservation | Refused:
            answer = await reserve(request)
            reserved.set()
            await asyncio.Event().wait()
            return answer

        shaky(service).reserve = then_crash  # type: ignore[method-assign]
        await service.submit()
        await reserved.wait()
        crash(service, host, doomed)
        assert await books(service) == HELD
        assert await settles(service, NOTHING, within_seconds=600.0) <= LEASE_SECONDS + 1.0

    play(scenario, always(1.0, USED), new_ledger=outside)
