"""Asking for a place: `async with scheduler.acquire(...)`, or `await` it and release it yourself.

With a budget, the place comes first and then the money, so that nothing is held for calls that
wait. Rule: who does not get both keeps neither. A refused call gives its place to the next before
anything else happens, and waits for money without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headgate.core.tasks import Task
from headgate.errors import BudgetExceededError, InvalidFieldError, PlaceTimeoutError
from headgate.inprocess.budget import Budget, Estimate
from headgate.inprocess.grants import Grant
from headgate.inprocess.lanes import Waiter
from headgate.inprocess.places import Places

if TYPE_CHECKING:
    from headgate.inprocess.scheduler import LoadScheduler


class Acquisition(Waiter):
    """A request for one place; entering or awaiting it waits for the grant. Use it once."""

    __slots__ = (
        "_agent_id",
        "_estimate",
        "_grant",
        "_is_used",
        "_places",
        "_scheduler",
        "_task",
        "_timeout",
    )

    def __init__(
        self,
        scheduler: LoadScheduler,
        places: Places,
        agent_id: str,
        *,
        task: Task | None,
        timeout: float | None,
        estimate: Estimate | None,
    ) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._places = places
        self._agent_id = agent_id
        self._task = task
        self._timeout = timeout
        self._estimate = estimate
        self._grant: Grant | None = None
        self._is_used = False

    def __await__(self) -> Generator[Any, None, Grant]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Grant:
        if self._is_used:
            raise InvalidFieldError("acquire", "was entered or awaited before; call it again")
        self._is_used = True
        budget = self._scheduler.budget
        if budget is not None:
            grant = await self._with_money(budget)
        else:
            places = self._places
            granted = places.ask(self, self._agent_id, self._task, self._timeout)
            grant = await places.wait(self) if granted is None else granted
        self._grant = grant
        return grant

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        grant = self._grant
        if grant is None:
            return
        if grant.held is None:
            self._places.free(grant)
        else:
            await self._scheduler.release(grant, error=error)

    async def _with_money(self, budget: Budget) -> Grant:
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        refused: Grant | None = None
        try:
            while True:
                task = self._task if refused is None else refused.task
                left = None if deadline is None else max(deadline - loop.time(), 0.0)
                granted = self._places.ask(self, self._agent_id, task, left)
                grant = await self._places.wait(self) if granted is None else granted
                refusal = await self._fund(budget, grant)
                if refusal is None:
                    return grant
                refused = refused or grant
                await self._wait_for_room(budget, refusal, deadline)
        except (asyncio.CancelledError, PlaceTimeoutError):
            # A submitted task left the queue to wait for money; the next who asks may have it.
            if refused is not None:
                self._places.requeue(refused)
            raise

    async def _fund(self, budget: Budget, grant: Grant) -> BudgetExceededError | None:
        """Hold the money for a grant, or free its place; return a refusal that waiting may end."""
        try:
            await budget.hold_for(grant, self._estimate)
        except BudgetExceededError as refusal:
            self._places.refuse(grant)
            if budget.mode != "wait" or not refusal.may_clear:
                raise
            return refusal
        except asyncio.CancelledError:
            self._places.hand_back(grant)
            raise
        except BaseException:
            self._places.refuse(grant)
            raise
        return None

    async def _wait_for_room(
        self, budget: Budget, refusal: BudgetExceededError, deadline: float | None
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await budget.parking.wait(refusal)
        except TimeoutError:
            timeout = self._timeout or 0.0
            resource = self._scheduler.resource.name
            raise PlaceTimeoutError(resource, self._agent_id, timeout) from refusal
