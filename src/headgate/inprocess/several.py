"""Places of several resources at once: a provider and a database and a GPU.

Rule: everybody takes them in the same order, whatever the order in which they are named. Then those
who wait for each other cannot form a circle, and whoever has the last one in the order is waiting
for nobody. A place is not taken outside of this while another is held, or the rule is broken.

Money is held once, after the last place, and nobody waits for it with a place: who must wait gives
all of them back and takes them again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType

from headgate.core.tasks.task import Task
from headgate.errors import BudgetExceededError, InvalidFieldError, PlaceTimeoutError
from headgate.inprocess.budget import Estimate
from headgate.inprocess.funding import Funding, Patience
from headgate.inprocess.grants import Grant
from headgate.inprocess.scheduler import LoadScheduler


@asynccontextmanager
async def acquire_all(
    schedulers: Iterable[LoadScheduler],
    agent_id: str,
    *,
    task: Task | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  what is held already must be given back
    estimate: Estimate | None = None,
) -> AsyncIterator[dict[str, Grant]]:
    """Hold one place of each resource while the body runs; the grants come by resource name.

    `timeout` is for all of them together. Who does not get all keeps none. At most one of the
    schedulers may have a budget: `estimate` is what the whole costs, and is held there once.
    """
    ordered = _in_order(schedulers)
    payer = _payer(ordered)
    patience = Patience(timeout)
    try:
        grants = await _acquired(
            ordered, payer, agent_id, task=task, estimate=estimate, patience=patience
        )
    except PlaceTimeoutError as error:
        raise patience.whole(error) from None
    async with AsyncExitStack() as stack:
        for scheduler in ordered:
            stack.push_async_exit(partial(_release, scheduler, grants[scheduler.resource.name]))
        yield grants


async def _acquired(
    ordered: list[LoadScheduler],
    payer: LoadScheduler | None,
    agent_id: str,
    *,
    task: Task | None,
    estimate: Estimate | None,
    patience: Patience,
) -> dict[str, Grant]:
    funding = None if payer is None else payer.funding
    if payer is None or funding is None:
        return await _places_of(ordered, agent_id, task, patience)
    funding.budget.check_agent(agent_id)
    parking = funding.budget.parking
    is_woken = False
    while True:
        occasion = parking.occasions
        try:
            grants = await _places_of(ordered, agent_id, task, patience)
            refusal = await _paid(
                ordered, grants, payer=payer, funding=funding, estimate=estimate, patience=patience
            )
        finally:
            if is_woken:
                parking.tried()
        if refusal is None:
            return grants
        # Room that came while the ledger was asked is no reason to wait.
        if is_woken := occasion == parking.occasions:
            lane = grants[payer.resource.name].lane
            await funding.wait_for_room(lane, refusal, patience)


async def _places_of(
    ordered: list[LoadScheduler], agent_id: str, task: Task | None, patience: Patience
) -> dict[str, Grant]:
    grants: dict[str, Grant] = {}
    try:
        for scheduler in ordered:
            place = scheduler.acquire_place(agent_id, task=task, timeout=patience.left())
            grants[scheduler.resource.name] = await place
    except BaseException:
        _hand_back(ordered, grants)
        raise
    return grants


async def _paid(
    ordered: list[LoadScheduler],
    grants: dict[str, Grant],
    *,
    payer: LoadScheduler,
    funding: Funding,
    estimate: Estimate | None,
    patience: Patience,
) -> BudgetExceededError | None:
    try:
        refusal = await funding.hold(grants[payer.resource.name], estimate, patience)
    except BaseException:
        _hand_back(ordered, grants)
        raise
    if refusal is not None:
        _hand_back(ordered, grants)
    return refusal


def _hand_back(ordered: list[LoadScheduler], grants: dict[str, Grant]) -> None:
    for scheduler in reversed(ordered):
        grant = grants.get(scheduler.resource.name)
        if grant is not None:
            scheduler.hand_back(grant)


async def _release(
    scheduler: LoadScheduler,
    grant: Grant,
    _kind: type[BaseException] | None,
    error: BaseException | None,
    _trace: TracebackType | None,
) -> None:
    await scheduler.release(grant, error=error)


def _payer(ordered: list[LoadScheduler]) -> LoadScheduler | None:
    """Return the scheduler that holds the money; with two of them a call would be paid twice."""
    payers = [scheduler for scheduler in ordered if scheduler.budget is not None]
    if len(payers) > 1:
        names = ", ".join(scheduler.resource.name for scheduler in payers)
        problem = f"more than one has a budget ({names}); a call is paid once, keep one of them"
        raise InvalidFieldError("schedulers", problem)
    return payers[0] if payers else None


def _in_order(schedulers: Iterable[LoadScheduler]) -> list[LoadScheduler]:
    """Sort by the names of the resources, which must differ: they are the order."""
    ordered = sorted(schedulers, key=lambda scheduler: scheduler.resource.name)
    names = [scheduler.resource.name for scheduler in ordered]
    if len(set(names)) < len(names):
        raise InvalidFieldError("schedulers", f"two resources have one name: {', '.join(names)}")
    return ordered
