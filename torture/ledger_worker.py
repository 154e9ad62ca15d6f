"""One of the processes that hammer a tree of scopes, until it is killed.

It works in the round that the parent says is current. A round is a session with small limits; the
next one begins when this one is nearly used up, so that admissions and refusals stay mixed.
"""

from __future__ import annotations

import asyncio
import random
from ctypes import c_long
from enum import IntEnum
from typing import TYPE_CHECKING

from headgate.budgets.connect import connect_budget
from headgate.budgets.tracker import LedgerTracker, ReservationToken
from headgate.errors import BudgetExceededError, IllegalSettlementError, LedgerUnavailableError

if TYPE_CHECKING:
    from ctypes import Array

CALLERS = 3
WORKFLOWS = 3
LONGEST_LEASE_SECONDS = 0.6
MOST_MICRO_USD = 40


class Count(IntEnum):
    """The positions of a worker's counters; the memory is shared with the parent."""

    OPERATIONS = 0
    REFUSALS = 1
    LATE = 2
    UNAVAILABLE = 3
    VIOLATIONS = 4


def session_of(number: int) -> str:
    """Name the session of a round."""
    return f"session:round-{number}"


def work(url: str, seed: int, counts: Array[c_long], current: c_long) -> None:
    """Hammer the ledger for ever."""
    asyncio.run(_work(url, seed, counts, current))


async def _work(url: str, seed: int, counts: Array[c_long], current: c_long) -> None:
    async with connect_budget(url) as tracker, asyncio.TaskGroup() as group:
        for number in range(CALLERS):
            source = random.Random(f"{seed}:{number}")
            group.create_task(_Caller(tracker, source, counts, current).run())


class _Caller:
    def __init__(
        self,
        tracker: LedgerTracker,
        source: random.Random,
        counts: Array[c_long],
        current: c_long,
    ) -> None:
        self._tracker = tracker
        self._random = source
        self._counts = counts
        self._current = current

    async def run(self) -> None:
        while True:
            try:
                await self._lifecycle()
            except BudgetExceededError:
                self._counts[Count.REFUSALS] += 1
                await asyncio.sleep(0.002)
            except IllegalSettlementError:
                # The lease ended first: a slow machine, or an extension that came too late.
                self._counts[Count.LATE] += 1
            except LedgerUnavailableError:
                self._counts[Count.UNAVAILABLE] += 1
                await asyncio.sleep(0.01)

    async def _lifecycle(self) -> None:
        session = session_of(self._current.value)
        held = self._random.randint(0, MOST_MICRO_USD)
        token = await self._tracker.reserve(
            f"{session}/workflow:w{self._random.randrange(WORKFLOWS)}",
            f"0.{held:06}",
            tokens=self._random.randint(0, 40),
            lease_seconds=self._random.uniform(0.05, LONGEST_LEASE_SECONDS),
            dispatched=self._random.random() < 0.3,
        )
        self._counts[Count.OPERATIONS] += 1
        if self._random.random() < 0.25:
            await self._check(session)
        await self._go_on(token, held)

    async def _go_on(self, token: ReservationToken, held: int) -> None:
        """Take some of the further steps, and leave a few reservations to their lease."""
        if self._random.random() < 0.3:
            await self._tracker.dispatched(token)
            self._counts[Count.OPERATIONS] += 1
        if self._random.random() < 0.2:
            await self._tracker.extend(token, LONGEST_LEASE_SECONDS)
            self._counts[Count.OPERATIONS] += 1
        ending = self._random.random()
        if ending < 0.05:
            return
        if ending < 0.35:
            await self._tracker.release(token)
        else:
            # One in twenty costs more than was held.
            most = held * 2 if self._random.random() < 0.05 else held
            actual = self._random.randint(0, most)
            await self._tracker.commit(token, f"0.{actual:06}", tokens=self._random.randint(0, 30))
        self._counts[Count.OPERATIONS] += 1

    async def _check(self, session: str) -> None:
        """Look at the session after an admission; an overrun may pass a limit, the rest may not."""
        status = await self._tracker.status(session)
        for scope in (status, *status.children):
            if scope.limit_micro_usd is None or scope.limit_tokens is None:
                self._counts[Count.VIOLATIONS] += 1
                continue
            usd = scope.spent_micro_usd + scope.reserved_micro_usd
            tokens = scope.spent_tokens + scope.reserved_tokens
            is_over_usd = usd > scope.limit_micro_usd and not scope.overrun_micro_usd
            is_over_tokens = tokens > scope.limit_tokens and not scope.overrun_tokens
            self._counts[Count.VIOLATIONS] += is_over_usd + is_over_tokens
