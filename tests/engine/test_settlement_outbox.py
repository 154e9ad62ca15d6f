"""A ledger outside the store: money is held there first, and settled from the outbox."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from structlog.testing import capture_logs

from engine.one_service import Service, play
from engine.simulated_work import FOREVER_SECONDS, always
from headgate.budgets.local import LocalLedger
from headgate.core.budgets.ledger import Clock, Limit, Refused, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call, Reservation
from headgate.core.budgets.scopes import Scope
from headgate.core.lifecycle import Succeeded, Usage
from headgate.core.money import Tokens
from headgate.core.task import TaskStatus
from headgate.errors import IllegalMoveError, LedgerUnavailableError, StaleEpochError

S = Scope("session:s")
BUDGETS = {S: Limit(limit_tokens=Tokens(200))}
USED = Succeeded(usage=Usage(tokens=60, micro_usd=0))


class ShakyLedger(LocalLedger):
    """Books that can be away for a while."""

    is_away = False

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold money, or raise."""
        await self._reach()
        return await super().reserve(request)

    async def settle(self, request: SettleRequest) -> Reservation:
        """Settle, or raise."""
        await self._reach()
        return await super().settle(request)

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        if self.is_away:
            raise LedgerUnavailableError("the ledger is away; try again later")


def new_ledger(clock: Clock) -> ShakyLedger:
    return ShakyLedger(clock=clock)


def ledger_of(service: Service) -> ShakyLedger:
    assert isinstance(service.ledger, ShakyLedger)
    return service.ledger


async def spent(service: Service) -> tuple[int, int]:
    (account,) = await ledger_of(service).accounts(S, most=1)
    return account.balance.spent_tokens, account.balance.reserved_tokens


def test_every_attempt_is_held_first_and_settled_in_the_end() -> None:
    async def scenario(service: Service) -> None:
        task_id = await service.submit(scopes=(S,))
        await service.running(task_id)
        assert await spent(service) == (0, 100)
        await service.ended(task_id)
        await asyncio.sleep(1)
        assert await spent(service) == (60, 0)

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_a_node_that_stops_has_told_the_ledger_of_all_that_has_ended() -> None:
    """Nobody may come after it: a run of a workflow is a node that ends with its last task."""

    async def scenario(service: Service) -> None:
        task_id = await service.submit(scopes=(S,))
        await service.running(task_id)
        await service.engine.stop(drain_seconds=10.0)
        await ledger_of(service).open()
        assert await spent(service) == (60, 0)

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_a_node_that_stops_does_not_wait_for_a_ledger_that_is_away() -> None:
    async def scenario(service: Service) -> None:
        task_id = await service.submit(scopes=(S,))
        await service.running(task_id)
        ledger_of(service).is_away = True
        began = service.now()
        await service.engine.stop(drain_seconds=10.0)
        assert service.now() - began < 15.0
        ledger_of(service).is_away = False
        other = await service.start_another()
        await asyncio.sleep(1)
        assert await spent(service) == (60, 0)
        await other.stop(drain_seconds=0.0)

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_a_ledger_that_is_away_is_logged_once_and_once_more_when_it_is_back() -> None:
    async def scenario(service: Service) -> list[str]:
        first = await service.submit(scopes=(S,))
        await service.running(first)
        ledger_of(service).is_away = True
        with capture_logs() as lines:
            await asyncio.sleep(20)
            ledger_of(service).is_away = False
            await asyncio.sleep(5)
        return [line["event"] for line in lines if "settlements" in line["event"]]

    told = play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)
    assert told == ["settlements wait for the ledger", "the ledger is told of settlements again"]


@pytest.mark.parametrize(
    ("away_seconds", "is_hurried"), [(5.0, False), (60.0, True), (60.0, False)]
)
def test_a_node_that_may_wait_tells_the_ledger_when_it_is_back_unless_somebody_is_in_a_hurry(
    away_seconds: float, is_hurried: bool
) -> None:
    async def scenario(service: Service) -> tuple[float, int]:
        task_id = await service.submit(scopes=(S,))
        await service.running(task_id)
        ledger = ledger_of(service)
        ledger.is_away = True
        await service.ended(task_id)
        loop, began = asyncio.get_running_loop(), service.now()
        loop.call_later(away_seconds, setattr, ledger, "is_away", False)
        if is_hurried:
            loop.call_later(2.0, service.engine.hurry)
        await service.engine.drain(drain_seconds=0.0, settle_seconds=30.0)
        left = await service.engine.store.outbox(limit=10)
        await service.engine.close()
        return service.now() - began, len(left)

    seconds, left = play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)
    if is_hurried:
        assert (round(seconds) <= 3, left) == (True, 1)
    else:
        assert (round(seconds) >= min(away_seconds, 30.0), left) == (True, int(away_seconds > 30.0))


def test_money_is_only_held_until_the_work_starts_and_dispatched_before_it() -> None:
    async def scenario(service: Service) -> None:
        ledger = ledger_of(service)
        settle, states = ledger.settle, []

        async def watched(request: SettleRequest) -> Reservation:
            if request.call is Call.DISPATCHED:
                states.append(len(service.ordered()))
            return await settle(request)

        ledger.settle = watched  # type: ignore[method-assign]
        task_id = await service.submit(scopes=(S,))
        await service.ended(task_id)
        assert states == [0], "the books were told before the executor got the order"

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_work_whose_money_is_not_held_any_more_is_not_started_and_tried_again() -> None:
    async def scenario(service: Service) -> None:
        ledger = ledger_of(service)
        settle = ledger.settle
        refused: list[str] = []

        async def once_expired(request: SettleRequest) -> Reservation:
            if request.call is Call.DISPATCHED and not refused:
                refused.append(request.reservation_id)
                await settle(SettleRequest(reservation_id=refused[0], call=Call.RELEASE))
            return await settle(request)

        ledger.settle = once_expired  # type: ignore[method-assign]
        task_id = await service.submit(scopes=(S,))
        record = await service.ended(task_id)
        assert (record.task.status, record.progress.attempt) == (TaskStatus.DONE, 2)
        assert service.ordered() == [task_id]
        await asyncio.sleep(1)
        assert await spent(service) == (60, 0)

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_a_budget_outside_the_store_is_never_passed_and_those_who_wait_get_what_is_freed() -> None:
    async def scenario(service: Service) -> None:
        tasks = [await service.submit(scopes=(S,)) for _ in range(4)]
        records = [await service.ended(task_id) for task_id in tasks]
        states = Counter(record.task.status for record in records)
        assert states == {TaskStatus.DONE: 2, TaskStatus.REJECTED: 2}
        assert await spent(service) == (120, 0)

    play(scenario, always(3.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_what_is_given_back_outside_starts_those_who_wait() -> None:
    async def scenario(service: Service) -> float:
        started = service.now()
        tasks = [await service.submit(scopes=(S,)) for _ in range(4)]
        for task_id in tasks:
            assert (await service.ended(task_id)).task.status is TaskStatus.DONE
        return service.now() - started

    cheap = Succeeded(usage=Usage(tokens=1, micro_usd=0))
    assert play(scenario, always(3.0, cheap), budgets=BUDGETS, new_ledger=new_ledger) <= 20


def test_a_ledger_that_is_away_grants_nothing_and_loses_no_settlement() -> None:
    async def scenario(service: Service) -> None:
        first = await service.submit(scopes=(S,))
        await service.running(first)
        ledger_of(service).is_away = True
        second = await service.submit(scopes=(S,))
        await asyncio.sleep(10)
        assert (await service.get(first)).task.status is TaskStatus.DONE
        assert service.ordered() == [first]
        ledger_of(service).is_away = False
        await service.ended(second)
        await asyncio.sleep(2)
        assert await spent(service) == (120, 0)

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_a_settlement_that_cannot_be_told_keeps_no_other_from_being_told() -> None:
    async def scenario(service: Service) -> None:
        ledger = ledger_of(service)
        settle, stuck = ledger.settle, set[str]()

        async def refusing(request: SettleRequest) -> Reservation:
            if request.call is Call.COMMIT and (not stuck or request.reservation_id in stuck):
                stuck.add(request.reservation_id)
                raise LedgerUnavailableError("this one cannot be told")
            return await settle(request)

        ledger.settle = refusing  # type: ignore[method-assign]
        tasks = [await service.submit(scopes=(S,)) for _ in range(2)]
        for task_id in tasks:
            await service.ended(task_id)
        await asyncio.sleep(5)
        assert await spent(service) == (60, 100), "one is told, the other still held"
        ledger.settle = settle  # type: ignore[method-assign]
        await asyncio.sleep(5)
        assert await spent(service) == (120, 0)

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_a_settlement_that_the_books_refuse_for_good_is_let_go() -> None:
    async def scenario(service: Service) -> None:
        ledger = ledger_of(service)
        settle, calls = ledger.settle, Counter[str]()

        async def forgetful(request: SettleRequest) -> Reservation:
            if request.call is Call.COMMIT:
                calls[request.reservation_id] += 1
                raise IllegalMoveError("reservation", "released", "committed", ())
            return await settle(request)

        ledger.settle = forgetful  # type: ignore[method-assign]
        await service.ended(await service.submit(scopes=(S,)))
        await asyncio.sleep(5)
        assert list(calls.values()) == [1], "it is not said again"
        assert await service.engine.store.outbox(limit=10) == []

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


def test_money_held_for_a_plan_of_an_epoch_that_is_over_is_given_back() -> None:
    async def scenario(service: Service) -> None:
        store = service.engine.store
        assign = store.assign

        async def stale(*_args: object) -> object:
            store.assign = assign  # type: ignore[method-assign]
            await store.resign(service.engine.node.node_id)
            raise StaleEpochError("another node dispatches")

        store.assign = stale  # type: ignore[method-assign, assignment]
        task_id = await service.submit(scopes=(S,))
        assert (await service.ended(task_id)).task.status is TaskStatus.DONE
        await asyncio.sleep(1)
        assert await spent(service) == (60, 0)

    play(scenario, always(1.0, USED), budgets=BUDGETS, new_ledger=new_ledger)


@pytest.mark.parametrize("steps", range(0, 30, 3))
def test_a_task_cancelled_while_its_money_is_being_held_gets_it_back(steps: int) -> None:
    async def scenario(service: Service) -> None:
        task_id = await service.submit(scopes=(S,))
        for _ in range(steps):
            await asyncio.sleep(0.001)
        record = await service.engine.cancel(task_id)
        assert record is not None
        assert record.task.status is TaskStatus.CANCELLED
        await asyncio.sleep(2)
        _, reserved = await spent(service)
        assert reserved == 0
        assert service.engine.health().is_ready

    work = always(FOREVER_SECONDS)
    play(scenario, work, budgets=BUDGETS, new_ledger=new_ledger, seed=steps)
