"""The load scheduler: which agent gets the next permit of a shared resource.

Many agents share a few permits, and each has a lane of tasks that wait. Which lane is next is said
by the load function of `headgate.core.load`; this is the door to it for programs of one event loop.

Rule: what goes in comes out. Whoever waits gets a permit or an error; whoever has a permit gives it
back, once; what was held of a budget is booked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from operator import itemgetter
from types import TracebackType
from typing import Any

import msgspec

from headgate.budgets.tracker import BudgetTracker
from headgate.core.load import MICRO, MOST_ALPHA, MOST_UNSAFE_ALPHA, load_score, resolve_alpha
from headgate.core.snapshot import Agent
from headgate.core.task import Task
from headgate.errors import (
    BudgetExceededError,
    CallerError,
    InvalidFieldError,
    InvalidSettingError,
    PermitTimeoutError,
)
from headgate.inprocess.budget import Budget, BudgetReserver, Estimate, Patience
from headgate.inprocess.lanes import AgentStats, Lane, LaneOrder, Waiter
from headgate.inprocess.permits import (
    DEFAULT_EVENTS,
    MAX_EVENTS,
    Grant,
    Permits,
    SharedResource,
    Trace,
    whole_number,
)

DEFAULT_MAX_WAITERS = 10_000


class LoadScheduler:
    """Permits of one resource for agents of one event loop.

    `agents` are those that may ask, as `Agent`, which keeps its `capacity`, or by name, without a
    limit of their own; None lets anybody ask. `max_waiters` bounds how many tasks are queued, and
    how many calls wait for money, together.
    `max_wait_ticks` lets a task that has waited so long go before all others. Alpha above 0.5
    is refused unless `allow_unsafe_alpha`.
    """

    def __init__(
        self,
        agents: Iterable[Agent | str] | None,
        resource: SharedResource,
        *,
        alpha: float | None = None,
        optimize_for: str | None = None,
        auto_tune: bool = False,
        max_waiters: int = DEFAULT_MAX_WAITERS,
        max_wait_ticks: int | None = None,
        budget: Budget | BudgetTracker | str | None = None,
        allow_unsafe_alpha: bool = False,
        trace_events: int = DEFAULT_EVENTS,
    ) -> None:
        if auto_tune and allow_unsafe_alpha:
            problem = "keeps alpha at most 0.5; leave out allow_unsafe_alpha"
            raise InvalidSettingError("auto_tune", problem)
        most = MOST_UNSAFE_ALPHA if allow_unsafe_alpha else MOST_ALPHA
        start = resolve_alpha(alpha=alpha, optimize_for=optimize_for, most=most)
        if max_wait_ticks is not None:
            whole_number("max_wait_ticks", max_wait_ticks)
        self.resource = resource
        self.budget = budget if budget is None or isinstance(budget, Budget) else Budget(budget)
        self.trace = Trace(whole_number("trace_events", trace_events, least=0, most=MAX_EVENTS))
        self._permits = Permits(
            resource,
            LaneOrder(alpha=start, auto_tune=auto_tune, max_wait_ticks=max_wait_ticks),
            self.trace,
            max_waiters=whole_number("max_waiters", max_waiters),
            is_open_to_all=agents is None,
            on_idle=self._check_drained,
        )
        self.reserver = (
            None
            if self.budget is None
            else BudgetReserver(self._permits, self.budget, self._check_drained)
        )
        self._settling = 0
        self._drained: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        for agent in agents or ():
            self.register(agent)
        resource.claim()

    @property
    def alpha(self) -> float:
        """How much depth counts beside age; it moves where `auto_tune` is on."""
        return self._permits.order.alpha

    @property
    def tick(self) -> int:
        """How many permits were released so far."""
        return self._permits.tick

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that may ask."""
        return tuple(self._permits.lanes)

    @property
    def queued(self) -> int:
        """How many tasks are queued, of all agents."""
        return self._permits.totals.queued

    @property
    def waiting_for_budget(self) -> int:
        """How many calls wait for room in a budget, of all agents."""
        return self._permits.totals.waiting_for_budget

    @property
    def is_busy(self) -> bool:
        """Whether anything is queued, waits for money, has a permit, or is still being booked."""
        return bool(self.queued or self.waiting_for_budget) or self._has_work()

    def register(self, agent: Agent | str) -> None:
        """Let one more agent ask."""
        if self.budget is not None:
            self.budget.check_agent(agent if isinstance(agent, str) else agent.id)
        if isinstance(agent, str):
            self._permits.open_lane(agent, None)
        else:
            self._permits.open_lane(agent.id, whole_number("capacity", agent.capacity))

    def unregister(self, agent_id: str) -> None:
        """Forget an agent: who waits is refused, what is queued is dropped, what runs goes on."""
        self._permits.close_lane(agent_id)
        if self.budget is not None:
            self.budget.waiters.wake_all()

    async def submit_task(self, agent_id: str, task: Task) -> None:
        """Queue a task; the agent's next `acquire` serves its oldest."""
        self._permits.submit(agent_id, task)

    def acquire(
        self,
        agent_id: str,
        *,
        task: Task | None = None,
        timeout: float | None = None,
        estimate: Estimate | None = None,
    ) -> Acquisition:
        """Ask for a permit: `async with` holds it for a body, `await` until `release`.

        It serves the agent's oldest submitted task, or `task`, which is queued for it; without
        either it queues a task of weight 1. `estimate` is what the call may cost, for a budget.
        """
        return Acquisition(
            self,
            self._permits,
            self.reserver,
            agent_id,
            task=task,
            timeout=timeout,
            estimate=estimate,
        )

    def acquire_permit(
        self, agent_id: str, *, task: Task | None = None, timeout: float | None = None
    ) -> Acquisition:
        """Ask for a permit as `acquire` does, without money; `acquire_all` holds that itself."""
        return Acquisition(
            self, self._permits, None, agent_id, task=task, timeout=timeout, estimate=None
        )

    def hand_back(self, grant: Grant) -> None:
        """Free a permit that was not used: no tick passes, a submitted task is queued again."""
        self._permits.hand_back(grant)

    async def release(self, grant: Grant, *, error: BaseException | None = None) -> None:
        """Free a permit, then book what its call cost; `error` is what ended it, if anything."""
        self._permits.check_loop()
        budget = self.budget
        if budget is None or grant.held is None:
            self._permits.free(grant)
            return
        self._settling += 1
        try:
            self._permits.free(grant)
            budget.learn(grant, error)
            await grant.settle(error)
            await budget.notify(grant.agent_id, grant.task.scopes)
        finally:
            self._settling -= 1
            budget.waiters.wake()
            self._check_drained()

    async def shutdown(self, timeout: float | None = None) -> int:  # noqa: ASYNC109
        """Refuse whoever waits, wait for those who have permits; return how many still have one.

        What they cost is booked, and a ledger that was opened here is closed, when the last of them
        has ended: also after this has returned because of `timeout`.
        """
        self._permits.close()
        if self.budget is not None:
            self.budget.waiters.wake_all()
        loop = asyncio.get_running_loop()
        if self._closing is None or self._closing.get_loop() is not loop:
            self._closing = loop.create_task(self._close_when_drained())
        await asyncio.wait({self._closing}, timeout=timeout)
        if self._closing.done():
            self._closing.result()
        return self.resource.in_use

    def explain(self) -> Explanation:
        """Return the load of every agent that has anything queued or in flight, highest first."""
        return explained(
            self.resource,
            self._permits.lanes.values(),
            tick=self.tick,
            alpha=self.alpha,
            max_wait_ticks=self._permits.order.max_wait_ticks,
        )

    def stats(self) -> tuple[AgentStats, ...]:
        """Return what each agent got so far."""
        total_micro = sum(lane.counters.granted_micro for lane in self._permits.lanes.values())
        return tuple(lane.stats(total_micro) for lane in self._permits.lanes.values())

    async def _close_when_drained(self) -> None:
        while self._has_work():
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        if self.reserver is not None:
            await self.reserver.budget.leave(self.reserver)

    def _has_work(self) -> bool:
        is_reserving = self.reserver is not None and self.reserver.is_busy
        return is_reserving or self.resource.in_use > 0 or self._settling > 0

    def _check_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not self._has_work():
            self._drained.set_result(None)


# Asking for a permit: `async with scheduler.acquire(...)`, or `await` it and release it yourself.
#
# With a budget, the permit comes first and then the money, so that nothing is held for calls that
# wait. Rule: who does not get both keeps neither. A refused call gives its permit to the next
# before anything else happens, and waits for money without one.


class Acquisition(Waiter):
    """A request for one permit; entering or awaiting it waits for the grant. Use it once."""

    __slots__ = (
        "_agent_id",
        "_estimate",
        "_grant",
        "_is_used",
        "_permits",
        "_reserver",
        "_scheduler",
        "_task",
        "_timeout",
    )

    def __init__(
        self,
        scheduler: LoadScheduler,
        permits: Permits,
        reserver: BudgetReserver | None,
        agent_id: str,
        *,
        task: Task | None,
        timeout: float | None,
        estimate: Estimate | None,
    ) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._permits = permits
        self._reserver = reserver
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
        if self._reserver is not None:
            grant = await self._with_money(self._reserver)
        else:
            granted = self._permits.ask(self, self._agent_id, self._task, self._timeout)
            if granted is None:
                # What `_waited` does, inlined: one coroutine less for each grant.
                try:
                    granted = await self.future
                except BaseException:
                    self._permits.give_up(self)
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
            self._permits.free(grant)
        else:
            await self._scheduler.release(grant, error=error)

    async def _waited(self) -> Grant:
        """Wait for a permit; whoever gives up leaves nothing behind."""
        try:
            outcome = await self.future
        except BaseException:
            self._permits.give_up(self)
            raise
        if isinstance(outcome, Grant):
            return outcome
        raise outcome

    async def _with_money(self, reserver: BudgetReserver) -> Grant:
        reserver.budget.check_agent(self._agent_id)
        patience, waiters = Patience(self._timeout), reserver.budget.waiters
        refused: Grant | None = None
        is_woken = False
        try:
            while True:
                chance = waiters.chances
                try:
                    task = self._task if refused is None else refused.task
                    grant = await self._acquire_permit(task, patience)
                    refusal = await reserver.reserve(grant, self._estimate, patience)
                finally:
                    if is_woken:
                        waiters.tried()
                if refusal is None:
                    return grant
                refused = refused or grant
                # Room that came while the ledger was asked is no reason to wait.
                if is_woken := chance == waiters.chances:
                    await reserver.wait_for_room(refused.lane, refusal, patience)
        except (BudgetExceededError, CallerError):
            raise
        except BaseException:
            # A submitted task left the queue to wait for money; the next who asks may have it.
            if refused is not None:
                self._permits.requeue(refused)
            raise

    async def _acquire_permit(self, task: Task | None, patience: Patience) -> Grant:
        try:
            granted = self._permits.ask(self, self._agent_id, task, patience.left())
            return await self._waited() if granted is None else granted
        except PermitTimeoutError as error:
            raise patience.whole(error) from None


# Permits of several resources at once: a provider and a database and a GPU.
#
# Rule: everybody takes them in the same order, whatever the order in which they are named. Then
# those who wait for each other cannot form a circle, and whoever has the last one in the order is
# waiting for nobody. A permit is not taken outside of this while another is held, or the rule is
# broken.
#
# Money is held once, after the last permit, and nobody waits for it with a permit: who must wait
# gives all of them back and takes them again.


@asynccontextmanager
async def acquire_all(
    schedulers: Iterable[LoadScheduler],
    agent_id: str,
    *,
    task: Task | None = None,
    timeout: float | None = None,  # noqa: ASYNC109  what is held already must be given back
    estimate: Estimate | None = None,
) -> AsyncIterator[dict[str, Grant]]:
    """Hold one permit of each resource while the body runs; the grants come by resource name.

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
    except PermitTimeoutError as error:
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
    reserver = None if payer is None else payer.reserver
    if payer is None or reserver is None:
        return await _acquire_each(ordered, agent_id, task, patience)
    reserver.budget.check_agent(agent_id)
    waiters = reserver.budget.waiters
    is_woken = False
    while True:
        chance = waiters.chances
        try:
            grants = await _acquire_each(ordered, agent_id, task, patience)
            refusal = await _paid(
                ordered,
                grants,
                payer=payer,
                reserver=reserver,
                estimate=estimate,
                patience=patience,
            )
        finally:
            if is_woken:
                waiters.tried()
        if refusal is None:
            return grants
        # Room that came while the ledger was asked is no reason to wait.
        if is_woken := chance == waiters.chances:
            lane = grants[payer.resource.name].lane
            await reserver.wait_for_room(lane, refusal, patience)


async def _acquire_each(
    ordered: list[LoadScheduler], agent_id: str, task: Task | None, patience: Patience
) -> dict[str, Grant]:
    grants: dict[str, Grant] = {}
    try:
        for scheduler in ordered:
            permit = scheduler.acquire_permit(agent_id, task=task, timeout=patience.left())
            grants[scheduler.resource.name] = await permit
    except BaseException:
        _hand_back(ordered, grants)
        raise
    return grants


async def _paid(
    ordered: list[LoadScheduler],
    grants: dict[str, Grant],
    *,
    payer: LoadScheduler,
    reserver: BudgetReserver,
    estimate: Estimate | None,
    patience: Patience,
) -> BudgetExceededError | None:
    try:
        refusal = await reserver.reserve(grants[payer.resource.name], estimate, patience)
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


# Why an agent goes next: the load of every lane at this moment, term by term.
#
# It reads the equation plainly, lane by lane. The order itself is found without looking at all of
# them, and a test holds the two equal.


class LaneLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent stands; `load` is None for one that does not compete, and `reason` says why."""

    agent_id: str
    load: float | None
    queue_depth: float
    oldest_wait_ticks: int
    queued: int
    waiting: int
    waiting_for_budget: int
    in_flight: int
    reason: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Every agent with something to do, in the order in which they would go now.

    That is the highest load first; one whose task has waited for `max_wait_ticks` goes before it.
    """

    resource: str
    capacity: int
    in_use: int
    tick: int
    alpha: float
    lanes: tuple[LaneLoad, ...]

    def __str__(self) -> str:
        used = f"{self.resource}: {self.in_use} of {self.capacity} permits in use"
        lines = [f"{used}, tick {self.tick}, alpha {self.alpha:g}"]
        for lane in self.lanes:
            load = "     " if lane.load is None else f"{lane.load:.3f}"
            lines.append(f"  {load}  {lane.agent_id}: {lane.reason}")
        return "\n".join(lines)


def explained(
    resource: SharedResource,
    lanes: Iterable[Lane],
    *,
    tick: int,
    alpha: float,
    max_wait_ticks: int | None = None,
) -> Explanation:
    """Return the load of each lane that has anything to do."""
    busy = [lane for lane in lanes if not lane.is_idle]
    competing = [lane for lane in busy if lane.is_competing]
    most_depth = max((lane.depth_micro for lane in competing), default=0)
    most_wait = max((_wait(lane, tick) for lane in competing), default=0)
    rows = []
    for lane in busy:
        wait = _wait(lane, tick)
        load = load_score(
            alpha=alpha,
            queue_depth=lane.depth_micro,
            max_queue_depth=most_depth,
            oldest_wait=wait,
            max_oldest_wait=most_wait,
        )
        is_overdue = lane.is_competing and max_wait_ticks is not None and wait >= max_wait_ticks
        row = _row(lane, wait, load if lane.is_competing else None, is_overdue=is_overdue)
        rows.append((_turn(lane, row.load, wait=wait, is_overdue=is_overdue), row))
    rows.sort(key=itemgetter(0))
    return Explanation(
        resource=resource.name,
        capacity=resource.capacity,
        in_use=resource.in_use,
        tick=tick,
        alpha=alpha,
        lanes=tuple(row for _, row in rows),
    )


def _turn(
    lane: Lane, load: float | None, *, wait: int, is_overdue: bool
) -> tuple[bool, int, float, int, int, int]:
    """Return what lanes are sorted by: overdue by age, then load, with the ties of the ranking."""
    head = lane.head() if is_overdue else None
    oldest = 0 if head is None else head.sequence
    if load is None:
        return (True, 0, 1.0, 0, 0, lane.order)
    return (head is None, oldest, -load, lane.served, -wait, lane.order)


def _row(lane: Lane, wait: int, load: float | None, *, is_overdue: bool) -> LaneLoad:
    return LaneLoad(
        agent_id=lane.agent_id,
        load=load,
        queue_depth=lane.depth_micro / MICRO,
        oldest_wait_ticks=wait,
        queued=lane.queued,
        waiting=lane.waiting,
        waiting_for_budget=lane.waiting_for_budget,
        in_flight=lane.in_flight,
        reason=_reason(lane, wait, is_overdue=is_overdue),
    )


def _reason(lane: Lane, wait: int, *, is_overdue: bool) -> str:
    money = f", and {lane.waiting_for_budget} wait for money" if lane.waiting_for_budget else ""
    if is_overdue:
        return f"goes before all others, because the oldest has waited {wait} ticks{money}"
    if lane.is_competing:
        return f"waits with depth {lane.depth_micro / MICRO:g}, the oldest for {wait} ticks{money}"
    if lane.waiting:
        return f"has {lane.in_flight} in flight, as many as the agent may have{money}"
    if lane.queued:
        return f"has {lane.queued} queued, and nobody has asked for a permit{money}"
    return f"has {lane.in_flight} in flight, and nothing queued{money}"


def _wait(lane: Lane, tick: int) -> int:
    head = lane.head()
    return 0 if head is None else tick - head.tick
