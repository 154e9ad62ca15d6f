"""Which part of a node does not do its work, and in which words that is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate.budgets.local import LocalLedger
from headgate.core.budgets.ledger import MAX_ACCOUNTS, Account, Refused, ReserveRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.money import MicroUsd, Tokens
from headgate.engine import external_ledger
from headgate.engine.external_ledger import WatchedLedger
from headgate.engine.supervisor import (
    DISPATCHER_FAILS,
    IS_LOADING,
    LEDGER_FAILS,
    NO_DESCRIPTORS,
    NO_DISPATCHER,
    OK,
    STORE_FAILS,
    judge,
)
from headgate.errors import LedgerUnavailableError

WELL: dict[str, Any] = {
    "phase": "",
    "is_leading": True,
    "is_loaded": True,
    "knows_leader": True,
    "has_fault": False,
    "store_problem": "",
    "dispatcher_problem": "",
    "ledger_problem": "",
    "is_out_of_descriptors": False,
}
AWAY = "connection to db.internal failed"

CASES: list[tuple[dict[str, Any], str, dict[str, str]]] = [
    ({}, "", {}),
    ({"is_leading": False, "is_loaded": False}, "", {}),
    ({"is_loaded": False}, IS_LOADING, {"dispatcher": IS_LOADING}),
    ({"has_fault": True}, DISPATCHER_FAILS, {"dispatcher": DISPATCHER_FAILS}),
    (
        {"has_fault": True, "is_loaded": False},
        DISPATCHER_FAILS,
        {"dispatcher": DISPATCHER_FAILS},
    ),
    (
        {"is_leading": False, "is_loaded": False, "knows_leader": False},
        NO_DISPATCHER,
        {"dispatcher": NO_DISPATCHER},
    ),
    ({"phase": "draining"}, "draining", {}),
    ({"store_problem": AWAY}, STORE_FAILS, {"store": STORE_FAILS}),
    ({"dispatcher_problem": AWAY}, STORE_FAILS, {"store": STORE_FAILS}),
    ({"dispatcher_problem": AWAY, "ledger_problem": AWAY}, LEDGER_FAILS, {"ledger": LEDGER_FAILS}),
    ({"ledger_problem": AWAY}, LEDGER_FAILS, {"ledger": LEDGER_FAILS}),
    ({"is_out_of_descriptors": True}, NO_DESCRIPTORS, {"descriptors": NO_DESCRIPTORS}),
]


@pytest.mark.parametrize(("fields", "problem", "parts"), CASES)
def test_each_part_is_named_and_nothing_of_the_driver_is_told(
    fields: dict[str, Any], problem: str, parts: dict[str, str]
) -> None:
    health = judge(**(WELL | fields))
    assert (health.is_ready, health.problem) == (not problem, problem)
    assert health.parts == {"store": OK, "ledger": OK, "dispatcher": OK, "descriptors": OK} | parts
    assert AWAY not in repr(health)


class Failing(LocalLedger):
    """A ledger that can be away."""

    is_away = False

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        if self.is_away:
            raise LedgerUnavailableError(AWAY)
        return await super().reserve(request)


async def test_the_last_answer_of_a_ledger_tells_whether_it_is_there() -> None:
    ledger = Failing()
    watched = WatchedLedger(ledger)
    await watched.open()
    request = ReserveRequest(
        reservation_id="r",
        scopes=(ROOT,),
        micro_usd=MicroUsd(1),
        tokens=Tokens(1),
        lease_seconds=1.0,
    )
    ledger.is_away = True
    with pytest.raises(LedgerUnavailableError):
        await watched.reserve(request)
    assert watched.problem == AWAY
    accounts: list[Account] = await watched.accounts(ROOT, most=1)
    assert (len(accounts), watched.problem) == (1, "")
    await watched.close()


class Silent(LocalLedger):
    """A ledger that does not answer, and later does."""

    is_silent = True

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        if self.is_silent:
            await asyncio.Event().wait()
        return await super().accounts(scope, most=most)


async def test_a_ledger_that_nobody_uses_is_looked_at_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external_ledger, "ANSWER_SECONDS", 0.02)
    monkeypatch.setattr(external_ledger, "RETRY_SECONDS", 0.01)
    ledger = Silent()
    watched = WatchedLedger(ledger)
    looking = asyncio.create_task(watched.run())
    async with asyncio.timeout(10):
        while not watched.problem:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        ledger.is_silent = False
        while watched.problem:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    looking.cancel()
