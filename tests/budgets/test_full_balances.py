"""The largest balances: every ledger refuses or stops there, and loses neither money nor a call."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from budgets.support import TrackerFactory, assert_ledger_is_right
from budgets.test_conformance_flexible import PROBE, commit, held, refused, request
from headgate.budgets.tracker import LedgerTracker
from headgate.core.budgets.ledger import (
    Adjustment,
    AdjustRequest,
    Balance,
    Flexible,
    SettleRequest,
    Unit,
    exceeded,
)
from headgate.core.budgets.reservations import Call, ReservationState
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.money import MAX_BALANCE, MAX_RESERVATION_MICRO_USD, MAX_RESERVATION_TOKENS

FLOW = Scope("session:eval/workflow:w1")
LARGEST: dict[str, Any] = {
    "micro_usd": int(MAX_RESERVATION_MICRO_USD),
    "tokens": int(MAX_RESERVATION_TOKENS),
}


def of(unit: Unit, amount: int) -> dict[str, Any]:
    return {unit.value: amount}


async def balance(tracker: LedgerTracker, scope: Scope = ROOT) -> Balance:
    return (await tracker.ledger.accounts(scope, most=1))[0].balance


async def fill(tracker: LedgerTracker, scope: Scope = ROOT, *, micro_usd: int, tokens: int) -> None:
    await tracker.ledger.adjust(
        AdjustRequest(
            reservation_id=f"fill {scope}",
            scope=scope,
            call=Adjustment.ADJUST,
            micro_usd=micro_usd,
            tokens=tokens,
        )
    )


@pytest.mark.parametrize("flexible", [None, PROBE, Flexible(kind="k", tokens_at_once=3)], ids=str)
@pytest.mark.parametrize("unit", list(Unit))
async def test_no_more_is_reserved_than_can_be_counted(
    tracker_factory: TrackerFactory, unit: Unit, flexible: Flexible | None
) -> None:
    async with tracker_factory() as tracker:
        first, five, one = [of(unit, amount) for amount in (MAX_BALANCE - 5, 5, 1)]
        await held(tracker, request("a", None, **first))
        await held(tracker, request("b", flexible, **five))
        answer = await refused(tracker, request("c", flexible, **one))
        assert (answer.scope, answer.unit, answer.limit) == (ROOT, unit, MAX_BALANCE)
        assert (answer.requested, answer.may_clear) == (1, True)
        assert "no more than" in str(exceeded(answer))
        await tracker.ledger.settle(SettleRequest(reservation_id="a", call=Call.RELEASE))
        await held(tracker, request("c", flexible, **one))
        await assert_ledger_is_right(tracker)


@pytest.mark.parametrize("below", [0, 1, 10**12], ids=str)
@pytest.mark.parametrize("held_part", [0, 1], ids=["nothing held", "all held"])
async def test_what_is_booked_stops_growing_and_every_call_ends(
    tracker_factory: TrackerFactory, below: int, held_part: int
) -> None:
    async with tracker_factory() as tracker:
        await fill(tracker, micro_usd=MAX_BALANCE - below, tokens=MAX_BALANCE - below)
        asked = {unit: held_part * amount for unit, amount in LARGEST.items()}
        names = [f"r{number}" for number in range(4)]
        for name in names:
            await held(tracker, request(name, None, **asked))
        for name in names:
            await commit(tracker, name, **LARGEST)
            await commit(tracker, name, **LARGEST)
        kept = await balance(tracker)
        assert (kept.reserved_micro_usd, kept.reserved_tokens) == (0, 0)
        for unit, largest in LARGEST.items():
            spent: int = getattr(kept, f"spent_{unit}")
            overrun: int = getattr(kept, f"overrun_{unit}")
            assert spent < MAX_BALANCE + largest
            assert overrun == (0 if held_part else 4 * largest)
        # Its own scope has been charged no less for it, up to where the root stopped.
        await assert_ledger_is_right(tracker)
        entries = await tracker.ledger.journal(ROOT, since=-inf, limit=20)
        assert [entry.call for entry in entries].count(Call.COMMIT) == 4


async def test_an_expired_lease_and_a_late_commit_end_as_well(
    tracker_factory: TrackerFactory,
) -> None:
    async with tracker_factory() as tracker:
        await fill(tracker, micro_usd=MAX_BALANCE, tokens=MAX_BALANCE)
        await held(tracker, request("a", None, dispatched=True, **LARGEST))
        tracker_factory.clock.advance(61)
        await tracker.ledger.sweep()
        answer = await tracker.ledger.settle(SettleRequest(reservation_id="a", call=Call.COMMIT))
        assert answer.state is ReservationState.COMMITTED
        kept = await balance(tracker)
        assert (kept.reserved_micro_usd, kept.reserved_tokens) == (0, 0)
        await assert_ledger_is_right(tracker)


async def test_a_limit_refuses_long_before(tracker_factory: TrackerFactory) -> None:
    async with tracker_factory() as tracker:
        await tracker.set_budget("", "1000000000", limit_tokens=10**15)
        await fill(tracker, micro_usd=MAX_BALANCE, tokens=MAX_BALANCE)
        answer = await refused(tracker, request("a", None, micro_usd=1))
        assert (answer.limit, answer.spent) == (10**15, MAX_BALANCE)
