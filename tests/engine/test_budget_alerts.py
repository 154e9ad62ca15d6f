"""Budget alerts: noticed where tasks are dispatched, told once in a window, whoever notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
import structlog

from engine.one_service import Service, play
from engine.simulated_work import always
from headgate.budgets.local import LocalLedger
from headgate.core.budgets.ledger import Limit, Refused, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.budgets.windows import parse_window
from headgate.core.lifecycle import Succeeded, Usage
from headgate.core.money import MicroUsd, Tokens
from headgate.engine.budget_alerts import BudgetAlerts, LedgerAccounts
from headgate.storage.deliveries import Deliveries, DeliveryQuery, Message
from headgate.storage.maintenance import SqlAccounts
from headgate.storage.memory import MemoryTaskStore
from headgate.storage.writer import Fault
from headgate.testing import SimulatedLoop, simulate

S = Scope("session:s")
URL = "http://alerts.example/"
USED = always(0.1, Succeeded(usage=Usage(tokens=60, micro_usd=0)))


def limits(window: str = "none") -> dict[Scope, Limit]:
    return {S: Limit(limit_tokens=Tokens(200), window=parse_window(window))}


class Watch:
    """A node's look at budgets, and what came of it."""

    def __init__(self, service: Service, *, leads: bool = True) -> None:
        store = service.new_store()
        self._store = store
        self.deliveries = Deliveries(store)
        self.filed = 0
        ledger = service.ledger
        accounts = SqlAccounts(store) if ledger is None else LedgerAccounts(ledger)
        self.loop = BudgetAlerts(
            self.deliveries, accounts.after, url=URL, leads=lambda: leads, filed=self._count
        )

    def _count(self) -> None:
        self.filed += 1

    async def open(self) -> Watch:
        await self._store.open()
        return self

    async def told(self) -> list[dict[str, object]]:
        """Return the bodies of all alerts, the oldest first."""
        found = (await self.deliveries.find(DeliveryQuery())).deliveries
        assert {one.url for one in found} <= {URL}
        texts = [
            await self.deliveries.body(Message(id=one.id, event=one.event, url=one.url))
            for one in reversed(found)
        ]
        return [msgspec.json.decode(text) for text in texts if text is not None]


async def spend(service: Service, tasks: int) -> None:
    for _ in range(tasks):
        await service.ended(await service.submit(scopes=(S,), estimate_tokens=60))


@pytest.mark.parametrize("new_ledger", [None, lambda clock: LocalLedger(clock=clock)])
def test_each_share_is_told_of_once(new_ledger: Callable[..., LocalLedger] | None) -> None:
    async def scenario(service: Service) -> None:
        watch = await Watch(service).open()
        await spend(service, 1)
        await asyncio.sleep(1)
        assert await watch.loop.run_once() == 0
        await spend(service, 1)
        await asyncio.sleep(1)
        assert [await watch.loop.run_once() for _ in range(3)] == [1, 0, 0]
        await spend(service, 1)
        await asyncio.sleep(1)
        assert await watch.loop.run_once() == 1
        other = await Watch(service).open()
        assert await other.loop.run_once() == 0, "after a restart, or on another node"
        told = await watch.told()
        assert [one["percent"] for one in told] == [50, 80]
        assert told[1] == {
            "event": "budget.alert",
            "scope": "session:s",
            "percent": 80,
            "limit": {"tokens": 200},
            "used": {"tokens": 180},
            "window": "none",
            "noticedAt": told[1]["noticedAt"],
        }
        assert watch.filed == 2

    play(scenario, USED, budgets=limits(), new_ledger=new_ledger)


def test_nodes_that_notice_at_once_tell_it_once() -> None:
    async def scenario(service: Service) -> None:
        await spend(service, 2)
        watches = [await Watch(service).open() for _ in range(4)]
        filed = await asyncio.gather(*(watch.loop.run_once() for watch in watches))
        assert sorted(filed) == [0, 0, 0, 1]

    play(scenario, USED, budgets=limits())


def test_a_node_that_does_not_dispatch_looks_at_nothing() -> None:
    async def scenario(service: Service) -> None:
        await spend(service, 2)
        watch = await Watch(service, leads=False).open()
        assert await watch.loop.run_once() == 0

    play(scenario, USED, budgets=limits())


@pytest.mark.parametrize(("window", "seconds"), [("day", 86_400), ("rolling:24h", 90_001)])
def test_a_new_window_is_told_of_anew(window: str, seconds: float) -> None:
    async def scenario(loop: SimulatedLoop) -> None:
        ledger, store = LocalLedger(clock=loop.clock), MemoryTaskStore(clock=loop.clock)
        await store.open()
        await ledger.set_limit(S, limits(window)[S])
        deliveries = Deliveries(store)
        accounts = LedgerAccounts(ledger)
        watch = BudgetAlerts(
            deliveries, accounts.after, url=URL, leads=lambda: True, filed=lambda: None
        )
        for number in range(3):
            request = ReserveRequest(
                reservation_id=f"r{number}",
                scopes=(ROOT, S),
                micro_usd=MicroUsd(0),
                tokens=Tokens(120),
                lease_seconds=60.0,
            )
            assert not isinstance(await ledger.reserve(request), Refused)
            assert await watch.run_once() == 0, "what is only held is not told of"
            commit = SettleRequest(
                reservation_id=f"r{number}", call=Call.COMMIT, tokens=Tokens(120)
            )
            await ledger.settle(commit)
            assert [await watch.run_once() for _ in range(2)] == [1, 0]
            await asyncio.sleep(seconds)
            assert await watch.run_once() == 0

    simulate(scenario)


def test_the_root_and_many_scopes_are_looked_at_page_by_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headgate.storage.maintenance.MOST_READ", 2)
    scopes = [Scope(f"session:s{number}") for number in range(7)]
    budgets = {scope: Limit(limit_tokens=Tokens(60)) for scope in [*scopes, ROOT]}
    budgets[ROOT] = Limit(limit_tokens=Tokens(600))

    async def scenario(service: Service) -> None:
        for scope in scopes:
            await service.ended(await service.submit(scopes=(scope,), estimate_tokens=60))
        watch = await Watch(service).open()
        assert await watch.loop.run_once() == 3 * 7 + 1
        assert {one["scope"] for one in await watch.told()} == {*scopes, "root"}

    play(scenario, USED, budgets=budgets)


def test_more_scopes_than_one_look_takes_are_looked_at_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headgate.storage.maintenance.MOST_READ", 2)
    monkeypatch.setattr("headgate.engine.budget_alerts.MAX_PAGES", 2)
    scopes = [Scope(f"session:s{number}") for number in range(9)]
    budgets = {scope: Limit(limit_tokens=Tokens(120)) for scope in scopes}

    async def scenario(service: Service) -> None:
        for scope in scopes:
            await service.ended(await service.submit(scopes=(scope,), estimate_tokens=60))
        watch = await Watch(service).open()
        assert [await watch.loop.run_once() for _ in range(4)] == [4, 4, 1, 0]
        await service.ended(await service.submit(scopes=(scopes[0],), estimate_tokens=60))
        filed = [await watch.loop.run_once() for _ in range(3)]
        assert sum(filed) == 2, "and then from the first one on again"

    play(scenario, USED, budgets=budgets)


def test_a_store_that_is_away_delays_an_alert() -> None:
    async def scenario(service: Service) -> None:
        await spend(service, 2)
        watch = await Watch(service).open()
        service.fault = lambda: Fault.REFUSED
        with structlog.testing.capture_logs() as lines:
            running = asyncio.create_task(watch.loop.run())
            await asyncio.sleep(60)
        service.fault = lambda: None
        assert await watch.told() == []
        complaints = [line for line in lines if line["event"] == "budgets were not looked at"]
        assert len(complaints) == 1, "one outage is one line"
        await asyncio.sleep(6)
        assert len(await watch.told()) == 1
        running.cancel()

    play(scenario, USED, budgets=limits())
