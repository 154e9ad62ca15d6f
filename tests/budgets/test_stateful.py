"""Any sequence of calls, from two trackers, leaves the ledger as a plain model has it.

The last tests are tests of the tests: ledgers with a planted bug, which the machine must catch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest

from budgets.ledger_machine import check_against_the_model
from budgets.servers import ValkeyServer
from budgets.support import TrackerFactory, local_factory, placed_factory
from headgate.budgets.local import LocalLedger
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import Clock, Refused, ReserveRequest, first_refusal
from headgate.core.budgets.reservations import Reservation

pytestmark = pytest.mark.hypothesis


def test_the_ledger_in_memory_does_what_the_model_does() -> None:
    check_against_the_model(local_factory, examples=60)


def test_the_sqlite_ledger_does_what_the_model_does(tmp_path: Path) -> None:
    numbers = count()

    def fresh() -> TrackerFactory:
        path = str(tmp_path / f"{next(numbers)}.db")
        return placed_factory("sqlite", "SqliteBudgetTracker", path, path)

    check_against_the_model(fresh, examples=25)


def test_the_redis_ledger_does_what_the_model_does(valkey: ValkeyServer) -> None:
    def fresh() -> TrackerFactory:
        valkey.flush()
        return placed_factory("redis", "RedisBudgetTracker", valkey.url, valkey.url)

    check_against_the_model(fresh, examples=30)


class ReadsThenWrites(LocalLedger):
    """Checks the limits, and books in a second step: what every naive tracker does."""

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        if request.reservation_id in self._state.reservations:
            return await super().reserve(request)
        accounts = [(await self.accounts(scope))[0] for scope in request.scopes]
        refused = first_refusal(
            accounts, micro_usd=request.micro_usd, tokens=request.tokens, now=self.now()
        )
        await asyncio.sleep(0)
        if refused is not None:
            return refused
        return await self._book_without_looking(request)

    async def _book_without_looking(self, request: ReserveRequest) -> Reservation | Refused:
        limits = self._state.limits
        self._state.limits = {
            scope: msgspec.structs.replace(limit, limit_micro_usd=None, limit_tokens=None)
            for scope, limit in limits.items()
        }
        try:
            return await super().reserve(request)
        finally:
            self._state.limits = limits


class LeaksOnExpiry(LocalLedger):
    """Ends leases without giving the money back."""

    def _expire(self, now: float) -> int:
        before = {scope: dict(buckets) for scope, buckets in self._state.balances.items()}
        expired = super()._expire(now)
        self._state.balances = before
        return expired


class ForgetsTheId(LocalLedger):
    """Books a repeated reserve again, as a client that retries without an id does."""

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        self._state.drop([request.reservation_id])
        return await super().reserve(request)


def planted(ledger_type: Callable[..., LocalLedger]) -> Callable[[], TrackerFactory]:
    def fresh() -> TrackerFactory:
        ledgers: list[LocalLedger] = []

        def make(clock: Clock) -> LedgerTracker:
            if not ledgers:
                ledgers.append(ledger_type(clock=clock))
            return LedgerTracker(ledgers[0])

        return TrackerFactory("planted", make)

    return fresh


@pytest.mark.parametrize("ledger_type", [ReadsThenWrites, LeaksOnExpiry, ForgetsTheId])
def test_a_planted_bug_is_caught(ledger_type: Callable[..., LocalLedger]) -> None:
    with pytest.raises(AssertionError):
        check_against_the_model(planted(ledger_type), examples=500, shrinks=False)
