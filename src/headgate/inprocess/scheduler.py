"""The load scheduler: which agent gets the next place of a shared resource.

Many agents share a few places, and each has a lane of tasks that wait. Which lane is next is said
by the load function of `headgate.core.load`; this is the door to it for programs of one event loop.

Rule: what goes in comes out. Whoever waits gets a place or an error; whoever has a place gives it
back, once; what was held of a budget is booked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from headgate.budget_tracker import BudgetTracker
from headgate.core.load import MOST_ALPHA, MOST_UNSAFE_ALPHA, resolve_alpha
from headgate.core.projects import Agent
from headgate.core.tasks.task import Task
from headgate.errors import InvalidSettingError
from headgate.inprocess.acquiring import Acquisition
from headgate.inprocess.budget import Budget, Estimate
from headgate.inprocess.explaining import Explanation, explained
from headgate.inprocess.figures import AgentFigures, figures_of
from headgate.inprocess.funding import Funding
from headgate.inprocess.grants import Grant
from headgate.inprocess.lane_order import LaneOrder
from headgate.inprocess.places import Places
from headgate.inprocess.resource import SharedResource, whole_number
from headgate.inprocess.trace import DEFAULT_EVENTS, MAX_EVENTS, Trace

DEFAULT_MAX_WAITERS = 10_000


class LoadScheduler:
    """Places of one resource for agents of one event loop.

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
        self._places = Places(
            resource,
            LaneOrder(alpha=start, auto_tune=auto_tune, max_wait_ticks=max_wait_ticks),
            self.trace,
            max_waiters=whole_number("max_waiters", max_waiters),
            is_open_to_all=agents is None,
            on_idle=self._check_drained,
        )
        self.funding = (
            None if self.budget is None else Funding(self._places, self.budget, self._check_drained)
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
        return self._places.order.alpha

    @property
    def tick(self) -> int:
        """How many places were released so far."""
        return self._places.tick

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that may ask."""
        return tuple(self._places.lanes)

    @property
    def queued(self) -> int:
        """How many tasks are queued, of all agents."""
        return self._places.totals.queued

    @property
    def parked(self) -> int:
        """How many calls wait for room in a budget, of all agents."""
        return self._places.totals.parked

    @property
    def is_busy(self) -> bool:
        """Whether anything is queued, waits for money, has a place, or is still being booked."""
        return bool(self.queued or self.parked) or self._has_work()

    def register(self, agent: Agent | str) -> None:
        """Let one more agent ask."""
        if self.budget is not None:
            self.budget.check_agent(agent if isinstance(agent, str) else agent.id)
        if isinstance(agent, str):
            self._places.open_lane(agent, None)
        else:
            self._places.open_lane(agent.id, whole_number("capacity", agent.capacity))

    def unregister(self, agent_id: str) -> None:
        """Forget an agent: who waits is refused, what is queued is dropped, what runs goes on."""
        self._places.close_lane(agent_id)
        if self.budget is not None:
            self.budget.parking.wake_all()

    async def submit_task(self, agent_id: str, task: Task) -> None:
        """Queue a task; the agent's next `acquire` serves its oldest."""
        self._places.submit(agent_id, task)

    def acquire(
        self,
        agent_id: str,
        *,
        task: Task | None = None,
        timeout: float | None = None,
        estimate: Estimate | None = None,
    ) -> Acquisition:
        """Ask for a place: `async with` holds it for a body, `await` until `release`.

        It serves the agent's oldest submitted task, or `task`, which is queued for it; without
        either it queues a task of weight 1. `estimate` is what the call may cost, for a budget.
        """
        return Acquisition(
            self,
            self._places,
            self.funding,
            agent_id,
            task=task,
            timeout=timeout,
            estimate=estimate,
        )

    def acquire_place(
        self, agent_id: str, *, task: Task | None = None, timeout: float | None = None
    ) -> Acquisition:
        """Ask for a place as `acquire` does, without money; `acquire_all` holds that itself."""
        return Acquisition(
            self, self._places, None, agent_id, task=task, timeout=timeout, estimate=None
        )

    def hand_back(self, grant: Grant) -> None:
        """Free a place that was not used: that is no tick, and a submitted task is queued again."""
        self._places.hand_back(grant)

    async def release(self, grant: Grant, *, error: BaseException | None = None) -> None:
        """Free a place, and then book what its call cost; `error` is what ended it, if anything."""
        self._places.check_loop()
        budget = self.budget
        if budget is None or grant.held is None:
            self._places.free(grant)
            return
        self._settling += 1
        try:
            self._places.free(grant)
            await grant.settle(error)
            await budget.tell(grant.agent_id, grant.task.scopes)
        finally:
            self._settling -= 1
            budget.parking.wake()
            self._check_drained()

    async def shutdown(self, timeout: float | None = None) -> int:  # noqa: ASYNC109
        """Refuse whoever waits, wait for those who have places; return how many still have one.

        What they cost is booked, and books that were opened here are closed, when the last of them
        has ended: also after this has returned because of `timeout`.
        """
        self._places.close()
        if self.budget is not None:
            self.budget.parking.wake_all()
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
            self._places.lanes.values(),
            tick=self.tick,
            alpha=self.alpha,
            max_wait_ticks=self._places.order.max_wait_ticks,
        )

    def figures(self) -> tuple[AgentFigures, ...]:
        """Return what each agent got so far."""
        total_micro = sum(lane.tally.granted_micro for lane in self._places.lanes.values())
        return tuple(
            figures_of(
                lane.agent_id,
                lane.tally,
                queued=lane.queued,
                parked=lane.parked,
                in_flight=lane.in_flight,
                total_micro=total_micro,
            )
            for lane in self._places.lanes.values()
        )

    async def _close_when_drained(self) -> None:
        while self._has_work():
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        if self.funding is not None:
            await self.funding.budget.leave(self.funding)

    def _has_work(self) -> bool:
        is_funding = self.funding is not None and self.funding.is_busy
        return is_funding or self.resource.in_use > 0 or self._settling > 0

    def _check_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not self._has_work():
            self._drained.set_result(None)
