"""Lifecycles through a proxy that loses replies, and a count of what ended up in the ledger.

A caller whose reply was lost makes the same call again, under the same id, until it is answered.
Rule: whatever was lost, each amount is booked once, and the repeated call gets the answer that the
lost one had.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from budgets.fault_proxy import FaultProxy
from headgate.budgets.tracker import LedgerTracker, ReservationToken
from headgate.errors import LedgerUnavailableError

Result = TypeVar("Result")

SCOPES = ("session:a/workflow:w1", "session:a/workflow:w2", "session:b", "")
LEASE_SECONDS = 3_600.0
MOST_TRIES = 200
# Lets the server be reached again before the next try; faults hit about one call in three.
PAUSE_SECONDS = 0.001


@dataclass
class Outcome:
    """What the callers know, to be held against the ledger."""

    lifecycles: int = 0
    calls: int = 0
    unacknowledged: int = 0
    wrong_answers: list[str] = field(default_factory=list)
    spent_micro_usd: int = 0
    overrun_micro_usd: int = 0
    reserved_micro_usd: int = 0

    async def insist(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make a call until it is answered."""
        self.calls += 1
        for _ in range(MOST_TRIES):
            try:
                return await call()
            except LedgerUnavailableError:
                self.unacknowledged += 1
                await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError(f"no answer in {MOST_TRIES} tries")


async def lose_replies(
    tracker: LedgerTracker, proxy: FaultProxy, *, drops: int, callers: int, seed: int
) -> Outcome:
    """Run lifecycles until so many replies were lost."""
    outcome = Outcome()

    async def caller(number: int) -> None:
        source = random.Random(f"{seed}:{number}")
        while proxy.dropped_replies < drops:
            outcome.lifecycles += 1
            await _lifecycle(tracker, outcome, source, f"c{number}-{outcome.lifecycles}")

    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(caller(number))
    return outcome


async def _lifecycle(
    tracker: LedgerTracker, outcome: Outcome, source: random.Random, name: str
) -> None:
    held, actual = source.randint(1, 9_999), source.randint(0, 9_999)
    scope, at_once = source.choice(SCOPES), source.random() < 0.5

    async def reserve() -> ReservationToken:
        return await tracker.reserve(
            scope,
            f"0.{held:06}",
            reservation_id=name,
            lease_seconds=LEASE_SECONDS,
            dispatched=at_once,
        )

    token = await outcome.insist(reserve)
    _expect(outcome, name, token.state.value, "dispatched" if at_once else "held")
    if source.random() < 0.3:
        sent = await outcome.insist(lambda: tracker.dispatched(name))
        _expect(outcome, name, sent.state.value, "dispatched")
    if source.random() < 0.2:
        await outcome.insist(lambda: tracker.extend(name, LEASE_SECONDS))
    ending = source.random()
    if ending < 0.7:
        await outcome.insist(lambda: tracker.commit(name, f"0.{actual:06}"))
        outcome.spent_micro_usd += min(held, actual)
        outcome.overrun_micro_usd += max(0, actual - held)
        final = "committed"
    elif ending < 0.9:
        await outcome.insist(lambda: tracker.release(name))
        final = "released"
    else:
        outcome.reserved_micro_usd += held
        final = "held or dispatched"
    again = await outcome.insist(reserve)
    _expect(outcome, name, again.state.value, final)


def _expect(outcome: Outcome, name: str, found: str, wanted: str) -> None:
    if found not in wanted.split(" or "):
        outcome.wrong_answers.append(f"{name} is {found}, not {wanted}")
