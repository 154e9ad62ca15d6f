"""The reasons of a round: for every task that waits, each rule that keeps it waiting.

The rules are asked from the widest to the narrowest, and the first that holds is the one worth
telling. A task that nothing forbids waits because other work went first.
"""

from __future__ import annotations

from collections.abc import Iterator

from headgate.core.decision import Round
from headgate.core.fair_share import Turn
from headgate.core.holds import (
    AgentFull,
    AgentUnavailable,
    GateClosed,
    GlobalBudgetExhausted,
    Hold,
    InflightCapReached,
    LaneBehind,
    NoIdleAgent,
    NotYetDue,
    ProjectBudgetExhausted,
    ProjectConcurrencyReached,
    ProjectNotActive,
    ProjectUnknown,
    RateLimited,
)
from headgate.core.lanes.agent_pool import AgentPlaces
from headgate.core.lanes.index import LaneIndex
from headgate.core.projects import WORKING
from headgate.core.snapshot import SchedulerState, is_due
from headgate.core.tasks.task import Task


class Explanation:
    """What a finished round says about the tasks that it did not plan."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._index = LaneIndex.of(state)
        # Who was free is asked before the round: an agent that the round itself filled is not
        # a reason, the work that went first is.
        self._free_before = {entry.agent.id for entry in self._index.agents if entry.is_free}
        self._open_hold = _why_nobody_is_free(self._index, self._free_before)
        self._round = Round(self._index, state)
        self.actions = self._round.run()
        self._planned = {action.task_id for action in self.actions}
        self._turns = {turn.project.id: turn for turn in self._round.turns}
        self._projects = {project.id: project for project in state.projects}

    def is_waiting(self, task: Task) -> bool:
        """Say whether the round left this READY task without an agent."""
        return task.id not in self._planned

    def holds(self, task: Task) -> tuple[Hold, ...]:
        """Return every rule that keeps the task waiting, widest first; never empty."""
        found = tuple(self._limits_of_all()) + tuple(self._limits_of_task(task))
        if found:
            return found
        return (self._behind(task),)

    def _limits_of_all(self) -> Iterator[Hold]:
        budget, cap = self._state.global_budget, self._state.max_inflight
        if budget is not None and self._round.is_over_global_budget:
            yield GlobalBudgetExhausted(used=self._round.global_used, limit=budget)
        if cap is not None and self._round.is_at_inflight_cap:
            yield InflightCapReached(inflight=self._round.inflight, limit=cap)

    def _limits_of_task(self, task: Task) -> Iterator[Hold]:
        yield from self._project_holds(task)
        if task.not_before is not None and not is_due(task, self._state.now):
            yield NotYetDue(until=task.not_before)
        yield from self._gate_holds(task)
        yield from self._agent_holds(task)

    def _project_holds(self, task: Task) -> Iterator[Hold]:
        project = self._projects.get(task.project_id)
        if project is None:
            yield ProjectUnknown(project_id=task.project_id)
            return
        if project.status not in WORKING:
            yield ProjectNotActive(project_id=project.id, status=project.status.value)
        turn = self._turns.get(project.id) or Turn(project, order=0, state=self._state)
        if project.budget_limit is not None and turn.is_over_budget:
            yield ProjectBudgetExhausted(
                project_id=project.id, used=turn.used, limit=project.budget_limit
            )
        if project.max_concurrent_agents is not None and turn.is_at_cap:
            yield ProjectConcurrencyReached(
                project_id=project.id, active=turn.active, limit=project.max_concurrent_agents
            )

    def _gate_holds(self, task: Task) -> Iterator[Hold]:
        if task.id not in self._index:
            return
        for closure in sorted(self._index.gate_of(task).closed_by.values(), key=lambda c: c.part):
            yield GateClosed(
                kind=closure.kind, name=closure.name, until=closure.until, why=closure.why
            )

    def _agent_holds(self, task: Task) -> Iterator[Hold]:
        if task.agent_id is not None:
            yield from self._own_agent_holds(task.agent_id)
            return
        if self._open_hold is not None:
            yield self._open_hold

    def _own_agent_holds(self, agent_id: str) -> Iterator[Hold]:
        entry = self._index.agents.get(agent_id)
        if entry is None:
            yield AgentUnavailable(agent_id=agent_id, state="unknown")
        elif agent_id not in self._free_before:
            yield _why_not_free(entry)

    def _behind(self, task: Task) -> LaneBehind:
        return LaneBehind(
            project_id=task.project_id,
            agent=task.agent_id if task.agent_id is not None else "any agent",
            given_first=len(self.actions),
        )


def _why_nobody_is_free(index: LaneIndex, free: set[str]) -> Hold | None:
    """Return what keeps open tasks from being taken by anybody, None if somebody is free."""
    takers = [entry for entry in index.agents if entry.agent.accepts_open]
    if any(entry.agent.id in free for entry in takers):
        return None
    limited = [entry for entry in takers if _has_room(entry)]
    return _soonest(limited) if limited else NoIdleAgent()


def _has_room(entry: AgentPlaces) -> bool:
    return entry.limited_until is not None and entry.inflight < entry.places


def _soonest(limited: list[AgentPlaces]) -> RateLimited:
    first = min(limited, key=lambda entry: (entry.limited_until or 0.0, entry.order))
    return RateLimited(agent_type=first.agent.agent_type, until=first.limited_until or 0.0)


def _why_not_free(entry: AgentPlaces) -> Hold:
    if _has_room(entry):
        return _soonest([entry])
    if entry.places:
        return AgentFull(agent_id=entry.agent.id, inflight=entry.inflight, capacity=entry.places)
    return AgentUnavailable(agent_id=entry.agent.id, state=entry.agent.state.value)
