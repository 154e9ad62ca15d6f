"""When calls that a budget refused ask again: once the budget has changed, and not before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest

from core.dispatch_model import state_of
from headgate.budgets.local import LocalLedger
from headgate.core.budgets.ledger import Limit, Refused, ReserveRequest
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import Scope
from headgate.core.call import CallRecord, CallState
from headgate.core.dispatch_state import DispatchState, Settled
from headgate.core.estimates import NOTHING, Estimate, Hold, Kind
from headgate.core.estimates import PROBE as UNKNOWN
from headgate.core.estimates import given as given_amount
from headgate.core.money import MicroUsd
from headgate.core.snapshot import Project
from headgate.engine.call_registry import CallDraft, CallEnd, Calls, LiveCall, Route
from headgate.storage.call_rows import CallStore, EndedCall, SettleAnswer
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

    async def finish(self, ended: Sequence[EndedCall]) -> list[SettleAnswer]:
        settle = [one.settle for one in ended]
        return [None if one is None else await self._ledger.settle(one) for one in settle]


class _Gateway:
    """Calls that wait for their turn and for their money, as those of clients do."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.ledger = _Ledger(loop)
        self.state: DispatchState = state_of(
            projects=tuple(Project(id=name, max_concurrent_agents=None) for name in SCOPES)
        )
        self.calls = Calls(
            self.ledger,
            _Store(self.ledger),
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
            record=record, route=Route("u", model), hold=lambda: hold, estimate_tokens=10
        )
        call = self.calls.enter(draft)
        task = asyncio.create_task(self._ask(call))
        self.asking.add(task)
        await asyncio.sleep(0.1)
        return call

    async def _ask(self, call: LiveCall) -> None:
        while not call.is_over:
            await call.turn
            if await self.calls.admit(call) is not None:
                return

    async def end(self, call: LiveCall, micro_usd: int) -> None:
        self.calls.end(call, CallEnd(state=CallState.DONE, micro_usd=micro_usd, tokens=0))
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
