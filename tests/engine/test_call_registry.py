"""Calls beside a ledger and a store: when they ask for money again, and what their tries count."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from core.dispatch_model import state_of
from headgate.budgets.local import LocalLedger
from headgate.core.budgets.escrow import Amounts
from headgate.core.budgets.ledger import Limit, Refused, ReserveRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import Scope
from headgate.core.call import CallRecord, CallState
from headgate.core.dispatch_state import DispatchState, Settled
from headgate.core.estimates import NOTHING, Estimate, Hold, Kind
from headgate.core.estimates import PROBE as UNKNOWN
from headgate.core.estimates import given as given_amount
from headgate.core.fair_share import UsageRow
from headgate.core.money import MicroUsd, Tokens
from headgate.core.snapshot import Project
from headgate.engine.call_registry import CallDraft, CallEnd, Calls, LiveCall, Route
from headgate.storage.call_rows import (
    CallStore,
    EndedCall,
    SettleAnswer,
    SliceAnswer,
    SliceTurn,
)
from headgate.testing import SimulatedLoop, simulate

LIMIT = Limit(limit_micro_usd=MicroUsd(100))
SCOPES = {name: Scope(f"project:{name}") for name in ("a", "b")}


class _Ledger(LocalLedger):
    """A ledger that takes a moment, and counts who has asked it."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__(clock=loop.clock)
        self.asked: Counter[str] = Counter()

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        self.asked[request.reservation_id.partition(":")[0]] += 1
        answer = await super().reserve(request)
        await asyncio.sleep(0.01)
        return answer


class _Store(CallStore):
    """The store of that ledger."""

    def __init__(self, ledger: _Ledger) -> None:
        self._ledger = ledger
        self.told: list[EndedCall] = []

    async def finish(self, ended: Sequence[EndedCall]) -> list[SettleAnswer]:
        self.told += ended
        settle = [one.settle for one in ended]
        return [None if one is None else await self._ledger.settle(one) for one in settle]

    async def turn(self, turn: SliceTurn) -> SliceAnswer:
        request = ReserveRequest(
            reservation_id=turn.new,
            scopes=turn.scopes,
            micro_usd=MicroUsd(turn.least.micro_usd),
            tokens=Tokens(0),
            lease_seconds=turn.lease_seconds,
            dispatched=True,
        )
        answer = await self._ledger.reserve(request)
        has_it = isinstance(answer, Reservation)
        return SliceAnswer(
            held=turn.in_flight.plus(turn.least if has_it else Amounts()), is_near=True
        )


class _Gateway:
    """Calls that wait for their turn and for their money, as those of clients do."""

    def __init__(self, loop: SimulatedLoop, **settings: Any) -> None:
        self.ledger = _Ledger(loop)
        self.store = _Store(self.ledger)
        projects = tuple(Project(id=name, max_concurrent_agents=None) for name in SCOPES)
        self.state: DispatchState = state_of(projects=projects, **settings)
        self.calls = Calls(
            self.ledger,
            self.store,
            tasks=cast("Any", None),
            now=loop.clock,
            new_id=lambda: "task-1",
            state=lambda: self.state,
            wake=lambda: None,
            is_ledger_outside=False,
            settled=self.settled,
            leads=lambda: True,
            may_grant=lambda: True,
            node_id=lambda: "one",
        )
        assert self.calls.escrow is not None
        self.calls.escrow.is_on = False
        self.asking: set[asyncio.Task[None]] = set()

    def settled(self, settled: Settled) -> None:
        self.state.settled(settled)
        self.calls.plan(self.state)

    async def enter(self, name: str, amount: Estimate, model: str = "m") -> LiveCall:
        """Have a call come, whose project is the first letter of its name; it asks by itself."""
        project = name[0]
        record = CallRecord(
            id=name,
            project_id=project,
            agent_id="coder",
            model=model,
            upstream="u",
            scopes=(SCOPES[project],),
        )
        hold = Hold(micro_usd=amount, tokens=NOTHING, kind=Kind(project, model).text)
        draft = CallDraft(
            record=record, route=Route("u", model), hold=lambda: hold, estimate_tokens=100
        )
        call = self.calls.enter(draft)
        self.ask(call)
        await asyncio.sleep(0.1)
        return call

    def ask(self, call: LiveCall) -> None:
        self.asking.add(asyncio.create_task(self._ask(call)))

    async def _ask(self, call: LiveCall) -> None:
        while not call.is_over:
            await call.turn
            if await self.calls.admit(call) is not None:
                return

    async def end(self, call: LiveCall, micro_usd: int, tokens: int = 0) -> None:
        self.calls.end(call, CallEnd(state=CallState.DONE, micro_usd=micro_usd, tokens=tokens))
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (given_amount(100), [("b1", "m")]),
        (UNKNOWN, [("b1", "m"), ("a3", "n")]),
    ],
    ids=["for room", "for the first of its kind"],
)
def test_a_call_asks_its_budget_again_once_that_has_changed(
    first: Estimate, others: list[tuple[str, str]]
) -> None:
    """Neither another budget nor another kind of work is what it waits for."""

    async def main(loop: SimulatedLoop) -> None:
        gateway = _Gateway(loop)
        for scope in SCOPES.values():
            await gateway.ledger.set_limit(scope, LIMIT)
        holder = await gateway.enter("a1", first)
        waiting = await gateway.enter("a2", first)
        for name, model in others:
            other = await gateway.enter(name, given_amount(10), model)
            # All of it: nothing comes back to the budget.
            await gateway.end(other, 10)
        assert gateway.ledger.asked["a2"] == 1
        await gateway.end(holder, 0)
        assert gateway.ledger.asked["a2"] == 2
        assert waiting.record.state is CallState.RUNNING

    simulate(main)


def test_a_call_asks_again_if_its_budget_changed_while_it_was_refused() -> None:
    async def main(loop: SimulatedLoop) -> None:
        gateway = _Gateway(loop)
        await gateway.ledger.set_limit(SCOPES["a"], LIMIT)
        holder = await gateway.enter("a1", given_amount(100))
        entering = asyncio.create_task(gateway.enter("a2", given_amount(100)))
        await asyncio.sleep(0.005)
        assert gateway.ledger.asked["a2"] == 1
        await gateway.end(holder, 0)
        waiting = await entering
        assert gateway.ledger.asked["a2"] == 2
        assert waiting.record.state is CallState.RUNNING

    simulate(main)


def test_a_call_asks_again_once_what_another_drew_is_given_back() -> None:
    """The slice that it drew from still has it, and need not be turned first."""

    async def main(loop: SimulatedLoop) -> None:
        gateway = _Gateway(loop)
        escrow = gateway.calls.escrow
        assert escrow is not None
        escrow.is_on = True
        await gateway.ledger.set_limit(SCOPES["a"], LIMIT)
        holder = await gateway.enter("a1", given_amount(100))
        waiting = await gateway.enter("a2", given_amount(100))
        assert (holder.draw is not None, waiting.record.state) == (True, CallState.WAITING)
        gateway.calls.end(holder, CallEnd(state=CallState.FAILED))
        await asyncio.sleep(0.1)
        assert waiting.record.state is CallState.RUNNING

    simulate(main)


@pytest.mark.parametrize("is_shared_by_usd", [False, True])
def test_every_try_counts_in_the_share_by_the_time_it_had_its_permit(
    *, is_shared_by_usd: bool
) -> None:
    """The store is told the same, so that a dispatcher which is started anew knows it as well."""

    async def main(loop: SimulatedLoop) -> None:
        gateway = _Gateway(loop, is_shared_by_usd=is_shared_by_usd)
        done = await gateway.enter("a1", given_amount(100))
        await gateway.end(done, 30, tokens=30)
        call = await gateway.enter("a2", given_amount(100))
        for upstream, seconds in (("v", 0.5), ("w", 0.25)):
            gateway.calls.move(call, Route(upstream, "m"))
            # It waits for a while, without a permit.
            await asyncio.sleep(10.0)
            gateway.ask(call)
            await asyncio.sleep(seconds)
        gateway.calls.end(call, CallEnd(state=CallState.FAILED))
        await asyncio.sleep(0.1)
        first = math.ceil(100 * 0.09)
        assert gateway.state.usage.tokens["a"] == 30 + first + 50 + 25
        shares = [one.share for one in gateway.store.told]
        assert shares[1] == Amounts(first + 75, first + 75)
        row = UsageRow(project_id="a", hour=0, tokens=sum(one.tokens for one in shares))
        row = msgspec.structs.replace(row, micro_usd=sum(one.micro_usd for one in shares))
        anew = state_of(is_shared_by_usd=is_shared_by_usd)
        anew.load(
            (), usage=[row], rate_counts=(), closures=(), lane_served={}, tick=0, now=loop.time()
        )
        assert anew.usage.tokens == gateway.state.usage.tokens

    simulate(main)
