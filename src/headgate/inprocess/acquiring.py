"""Asking for a place: `async with scheduler.acquire(...)`, or `await` it and release it yourself.

With a budget, the place comes first and then the money, so that nothing is held for calls that
wait. Rule: who does not get both keeps neither. A refused call gives its place to the next before
anything else happens, and waits for money without one.
"""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headgate.core.tasks.task import Task
from headgate.errors import (
    BudgetExceededError,
    CallerError,
    InvalidFieldError,
    PlaceTimeoutError,
)
from headgate.inprocess.budget import Estimate
from headgate.inprocess.funding import Funding, Patience
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
        "_funding",
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
        funding: Funding | None,
        agent_id: str,
        *,
        task: Task | None,
        timeout: float | None,
        estimate: Estimate | None,
    ) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._places = places
        self._funding = funding
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
        if self._funding is not None:
            grant = await self._with_money(self._funding)
        else:
            granted = self._places.ask(self, self._agent_id, self._task, self._timeout)
            if granted is None:
                # What `_waited` does, in place: one coroutine less for each grant.
                try:
                    granted = await self.future
                except BaseException:
                    self._places.give_up(self)
                    raise
                if type(granted) is not Grant:
                    raise granted
            grant = granted
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

    async def _waited(self) -> Grant:
        """Wait for a place; whoever gives up leaves nothing behind."""
        try:
            outcome = await self.future
        except BaseException:
            self._places.give_up(self)
            raise
        if isinstance(outcome, Grant):
            return outcome
        raise outcome

    async def _with_money(self, funding: Funding) -> Grant:
        funding.budget.check_agent(self._agent_id)
        patience, parking = Patience(self._timeout), funding.budget.parking
        refused: Grant | None = None
        is_woken = False
        try:
            while True:
                occasion = parking.occasions
                try:
                    task = self._task if refused is None else refused.task
                    grant = await self._placed(task, patience)
                    refusal = await funding.hold(grant, self._estimate, patience)
                finally:
                    if is_woken:
                        parking.tried()
                if refusal is None:
                    return grant
                refused = refused or grant
                # Room that came while the ledger was asked is no reason to wait.
                if is_woken := occasion == parking.occasions:
                    await funding.wait_for_room(refused.lane, refusal, patience)
        except (BudgetExceededError, CallerError):
            raise
        except BaseException:
            # A submitted task left the queue to wait for money; the next who asks may have it.
            if refused is not None:
                self._places.requeue(refused)
            raise

    async def _placed(self, task: Task | None, patience: Patience) -> Grant:
        try:
            granted = self._places.ask(self, self._agent_id, task, patience.left())
            return await self._waited() if granted is None else granted
        except PlaceTimeoutError as error:
            raise patience.whole(error) from None
