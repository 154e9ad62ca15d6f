"""The money for a place: held once the place is there, and in bounded time.

Rule: who does not get the money keeps no place. A ledger that does not answer is waited for until
the caller's deadline, or for so long as a settlement may take; the place goes to the next then, and
whatever the ledger holds all the same is given back without anybody waiting for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from headgate.errors import (
    BudgetExceededError,
    CallerError,
    HeadgateError,
    LedgerUnavailableError,
    PlaceTimeoutError,
)
from headgate.inprocess.budget import Budget, Estimate
from headgate.inprocess.grants import Grant
from headgate.inprocess.lanes import Lane
from headgate.inprocess.places import Places, unknown_agent

ANSWER_SECONDS = 10.0
LEAST_ANSWER_SECONDS = 1.0
"""What the ledger has also where less is left: a place that came in time is not lost to that."""


class Patience:
    """How long somebody waits in all, for places and money."""

    __slots__ = ("_loop", "deadline", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self.timeout = timeout
        self.deadline = None if timeout is None else self._loop.time() + timeout

    def left(self) -> float | None:
        """Return the seconds that are left, None without a limit."""
        return None if self.deadline is None else max(self.deadline - self._loop.time(), 0.0)

    def answer_seconds(self) -> float:
        """Return how long a ledger may take."""
        left = self.left()
        return (
            ANSWER_SECONDS if left is None else max(min(left, ANSWER_SECONDS), LEAST_ANSWER_SECONDS)
        )

    def whole(self, error: PlaceTimeoutError) -> PlaceTimeoutError:
        """Return the error of one wait as that of all of them: it names the time in all."""
        if self.timeout is None or error.timeout == self.timeout:
            return error
        return PlaceTimeoutError(
            error.resource, error.agent_id, self.timeout, agents_most=error.agents_most
        )


class Funding:
    """Money for the places of one scheduler; `on_idle` hears when nothing is under way."""

    def __init__(self, places: Places, budget: Budget, on_idle: Callable[[], None]) -> None:
        self.budget = budget
        self._places = places
        self._on_idle = on_idle
        self._unfinished: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be given back."""
        return bool(self._unfinished)

    async def hold(
        self, grant: Grant, estimate: Estimate | None, patience: Patience
    ) -> BudgetExceededError | None:
        """Hold the money for a grant, or free its place; return a refusal that waiting may end."""
        self.budget.join(self)
        holding = asyncio.create_task(self.budget.hold_for(grant, estimate))
        try:
            await asyncio.wait({holding}, timeout=patience.answer_seconds())
        except asyncio.CancelledError:
            self._abandon(grant, holding)
            raise
        if not holding.done():
            self._abandon(grant, holding)
            raise self._unanswered(grant, patience)
        return self._outcome(grant, holding)

    async def wait_for_room(
        self, lane: Lane, refusal: BudgetExceededError, patience: Patience
    ) -> None:
        """Wait until asking again makes sense, counted among those who wait."""
        self._places.park(lane)
        try:
            async with asyncio.timeout_at(patience.deadline):
                await self.budget.parking.wait(refusal)
        except TimeoutError:
            resource, timeout = self._places.resource.name, patience.timeout or 0.0
            raise PlaceTimeoutError(resource, lane.agent_id, timeout) from refusal
        finally:
            self._places.unpark(lane)
        if not lane.is_known:
            self.budget.parking.tried()
            raise unknown_agent(lane.agent_id)

    def _outcome(self, grant: Grant, holding: asyncio.Task[None]) -> BudgetExceededError | None:
        try:
            holding.result()
        except BudgetExceededError as refusal:
            self._places.refuse(grant)
            if self.budget.mode != "wait" or not refusal.may_clear:
                raise
            return refusal
        except CallerError:
            # A task that cannot be booked would come to everybody who asks after this one.
            self._places.refuse(grant)
            raise
        except BaseException:
            self._places.hand_back(grant)
            raise
        return None

    def _abandon(self, grant: Grant, holding: asyncio.Task[None]) -> None:
        holding.cancel()
        task = asyncio.create_task(self._give_back(grant, holding))
        self._unfinished.add(task)
        task.add_done_callback(self._finished)
        self._places.hand_back(grant)

    async def _give_back(self, grant: Grant, holding: asyncio.Task[None]) -> None:
        await asyncio.wait({holding})
        if not holding.cancelled() and holding.exception() is None:
            grant.not_charged()
            with suppress(HeadgateError):
                await grant.settle(None)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._unfinished.discard(task)
        self.budget.parking.wake()
        self._on_idle()

    def _unanswered(self, grant: Grant, patience: Patience) -> HeadgateError:
        left = patience.left()
        if left is None or left > 0:
            problem = f"the ledger did not answer within {ANSWER_SECONDS:g} seconds"
            return LedgerUnavailableError(problem)
        resource, timeout = self._places.resource.name, patience.timeout or 0.0
        return PlaceTimeoutError(resource, grant.agent_id, timeout)
