"""A call with its turn that waits for its money: for how long, and when it asks again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from headgate.core.budgets.ledger import Ledger, ReserveRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.call import CallRecord, CallState
from headgate.core.dispatch_state import Planned, Settled
from headgate.core.estimates import Basis, Estimate, Hold
from headgate.core.task import Terms
from headgate.engine.call_registry import ADMIT_SECONDS, CallDraft, Calls, LiveCall, Route
from headgate.errors import LedgerUnavailableError, StoreFullError, StoreUnavailableError
from headgate.storage.call_rows import CallStore, SliceAnswer, SliceTurn
from headgate.storage.writer import asker
from headgate.testing import SimulatedLoop, simulate

HOLD = Hold(
    micro_usd=Estimate(amount=100, basis=Basis.GIVEN), tokens=Estimate(amount=10, basis=Basis.GIVEN)
)


class _Store(CallStore):
    """A store that is away until a time."""

    def __init__(self, loop: SimulatedLoop, until: float, error: type[Exception]) -> None:
        self._loop, self._until, self._error = loop, until, error
        self.askers: set[str] = set()

    def check(self) -> None:
        self.askers.add(asker.get())
        if self._loop.time() < self._until:
            raise self._error("gone")

    async def turn(self, turn: SliceTurn) -> SliceAnswer:
        self.check()
        return SliceAnswer(held=turn.in_flight.plus(turn.wanted))


class _Ledger:
    """The ledger of that store."""

    def __init__(self, store: _Store) -> None:
        self._store = store
        self.names: set[str] = set()

    async def reserve(self, request: ReserveRequest) -> Reservation:
        self.names.add(request.reservation_id)
        self._store.check()
        return Reservation(
            id=request.reservation_id,
            charges=(),
            micro_usd=request.micro_usd,
            tokens=request.tokens,
            lease_until=0.0,
        )


def admitted_after(
    seconds: float, *, has_escrow: bool, error: type[Exception] = StoreUnavailableError
) -> float:
    """Return after how long a call has its money where the store is away for some seconds."""

    async def main(loop: SimulatedLoop) -> float:
        store = _Store(loop, seconds, error)
        ledger = _Ledger(store)
        calls = _calls(loop, store, ledger)
        assert calls.escrow is not None
        calls.escrow.is_on = has_escrow
        call = _waiting(calls)
        asker.set("tenant")
        try:
            assert await calls.admit(call) is not None
        finally:
            assert asker.get() == "tenant"
            assert store.askers == {""}, "its permit is not kept while others of the tenant write"
            for turning in calls.escrow._turning:
                turning.cancel()
            assert len(ledger.names) <= 1, "it is reserved once, however often it is asked for"
        return loop.time()

    return simulate(main).result


def _calls(
    loop: SimulatedLoop,
    store: CallStore,
    ledger: object,
    settled: Callable[[Settled], None] = lambda _: None,
) -> Calls:
    return Calls(
        cast("Ledger", ledger),
        store,
        tasks=cast("Any", None),
        now=loop.clock,
        new_id=lambda: "task-1",
        state=lambda: None,
        wake=lambda: None,
        is_ledger_outside=False,
        settled=settled,
        leads=lambda: True,
        may_grant=lambda: True,
        node_id=lambda: "one",
    )


def _waiting(calls: Calls) -> LiveCall:
    record = CallRecord(
        id="call-1",
        project_id="default",
        agent_id="coder",
        model="large",
        upstream="anthropic",
        state=CallState.WAITING,
    )
    route = Route("anthropic", "large", slot="key-1")
    call = calls.enter(CallDraft(record=record, route=route, hold=lambda: HOLD, estimate_tokens=10))
    call.turn.set_result(
        Planned(
            task=call.task,
            terms=Terms(),
            attempt=1,
            agent_id="coder",
            node_id="one",
            share_tokens=10,
            hold=HOLD,
        )
    )
    return call


@pytest.mark.parametrize("has_escrow", [True, False], ids=["escrow", "one by one"])
def test_a_call_outlasts_an_outage_of_ten_seconds(*, has_escrow: bool) -> None:
    assert 10.0 <= admitted_after(10.0, has_escrow=has_escrow) < 11.0


@pytest.mark.parametrize("has_escrow", [True, False], ids=["escrow", "one by one"])
def test_a_longer_outage_ends_a_call(*, has_escrow: bool) -> None:
    with pytest.raises(LedgerUnavailableError, match=f"for {ADMIT_SECONDS:g} s"):
        admitted_after(ADMIT_SECONDS + 1, has_escrow=has_escrow)


def test_a_call_has_a_permit_from_its_turn_to_its_end() -> None:
    async def main(loop: SimulatedLoop) -> None:
        calls = _calls(loop, _Store(loop, 0.0, StoreUnavailableError), None)
        call = _waiting(calls)
        assert call.has_permit()
        calls.move(call, call.route)
        assert not call.has_permit(), "it waits again"
        call.turn.set_result(cast("Any", None))
        assert call.has_permit()
        calls.hand_over(call)
        assert not call.has_permit()

    simulate(main)


def test_a_full_disk_is_told_of_at_once() -> None:
    with pytest.raises(StoreFullError):
        admitted_after(10.0, has_escrow=False, error=StoreFullError)
