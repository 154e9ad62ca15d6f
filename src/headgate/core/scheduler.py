"""The one decision function of Headgate, and its reasons.

`Scheduler.schedule` is deterministic and touches nothing: the same snapshot gives the same plan,
and its argument is left as it was. `Round` makes the decisions over the lane index, and
`Explanation` says why each remaining task waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from headgate.core.fair_share import ShareOrder, Turn, forgiven_lag, set_targets, total_tokens
from headgate.core.lane_index import AgentPermits, Lane, LaneIndex, LaneKind, lane_kind
from headgate.core.reasons import (
    AgentFull,
    AgentUnavailable,
    GateClosed,
    GlobalBudgetExhausted,
    InflightCapReached,
    LaneBehind,
    NoIdleAgent,
    NotYetDue,
    ProjectBudgetExhausted,
    ProjectConcurrencyReached,
    ProjectNotActive,
    ProjectUnknown,
    RateLimited,
    Reason,
)
from headgate.core.snapshot import (
    WORKING,
    AssignAction,
    LanePolicy,
    SchedulerState,
    check_snapshot,
    is_due,
    tokens_charged,
)
from headgate.core.task import Choice, LaneRule, Task, TaskStatus

SHARE_STEPS = 10_000
"""Shares are noted to the hundredth of a percent."""

_RULES = {
    LanePolicy.FEWEST_IN_FLIGHT: LaneRule.FEWEST_IN_FLIGHT,
    LanePolicy.HIGHEST_LOAD: LaneRule.HIGHEST_LOAD,
}
_ALONE = {policy: Choice(lanes=1, rule=rule, ready=1) for policy, rule in _RULES.items()}
_OVERDUE_ALONE = Choice(lanes=1, rule=LaneRule.LONGEST_WAIT, ready=1)


def decide(index: LaneIndex, state: SchedulerState) -> list[AssignAction]:
    """Plan assignments until nobody who waits can be served; planned tasks leave the index."""
    return Round(index, state).run()


class Round:
    """One round: the plan so far with its grounds, and the usage that it has changed.

    Without a lane policy the agents are asked in their order, and each takes from the project whose
    turn it is: plain fair share. With one, the project comes first, then its lane by the policy,
    then the agent of that lane. The state has the projects and their usage; tasks, agents, gates
    and the history of lanes are in the index. `charge` says what a task counts in the share of its
    project, where more is known of it than itself says, and `turns` are those of the state, where
    somebody has looked at them.
    """

    def __init__(
        self,
        index: LaneIndex,
        state: SchedulerState,
        charge: Callable[[Task], int] | None = None,
        turns: list[Turn] | None = None,
    ) -> None:
        self.index = index
        self.state = state
        self._charge = charge
        self.actions: list[AssignAction] = []
        self.choices: list[Choice] = []
        self.turns = eligible_turns(index, state) if turns is None else turns
        self.inflight = _inflight(state)
        self.global_used = state.global_tokens_used + sum(state.project_reserved.values())
        self.order = ShareOrder(self.turns, total=_total(self.turns, state))
        self._global_budget = math.inf if state.global_budget is None else state.global_budget
        self._max_inflight = math.inf if state.max_inflight is None else state.max_inflight
        index.set_tasks_left(self._max_inflight - self.inflight)
        self._usual_rule = LaneRule.AGENT_IN_TURN if index.policy is None else _RULES[index.policy]

    @property
    def is_over_global_budget(self) -> bool:
        """Whether the global budget is used up."""
        return self.global_used >= self._global_budget

    @property
    def is_at_inflight_cap(self) -> bool:
        """Whether as many tasks are in flight as may be."""
        return self.inflight >= self._max_inflight

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be given to anybody."""
        offers = self.index.offers
        return (
            (not self.index.agents.free and not offers.called)
            or offers.is_over
            or self.global_used >= self._global_budget
        )

    def run(self) -> list[AssignAction]:
        """Make all assignments of the round."""
        if self.index.policy is None:
            self._agents_in_turn()
        else:
            self._projects_in_turn()
        return self.actions

    def _projects_in_turn(self) -> None:
        tick, alpha = self.state.tick, self.state.alpha
        while not self.is_over and (turn := self.order.first()) is not None:
            lane = self.index.choose_lane(
                turn.project.id, tick=tick, alpha=alpha, is_held=turn.is_held
            )
            agent = None if lane is None else self.index.agent_for(lane)
            if lane is None or agent is None:
                # A project that is refused once is refused for the rest of the round: its usage
                # and its agents only grow, and its lanes only empty.
                self.order.leave(turn)
            else:
                self._assign(turn, lane, agent)

    def _agents_in_turn(self) -> None:
        free = (entry for entry in self.index.agents if entry.is_free)
        waiting = deque(entry for entry in free if self.index.has_lane_for(entry.agent))
        while waiting and not self.is_over:
            agent = waiting.popleft()
            if self._serve(agent) and agent.is_free:
                waiting.append(agent)

    def _serve(self, agent: AgentPermits) -> bool:
        """Give an agent the task of the first project in turn that has one for it."""
        passed_over: list[Turn] = []
        lane = None
        while lane is None and (turn := self.order.first()) is not None:
            if not turn.is_held:
                lane = self.index.lane_for(turn.project.id, agent.agent)
            if lane is not None:
                self._assign(turn, lane, agent)
                continue
            self.order.leave(turn)
            if self.index.ready(turn.project.id):
                passed_over.append(turn)
        for turn in passed_over:
            self.order.put_back(turn)
        return lane is not None

    def _assign(self, turn: Turn, lane: Lane, agent: AgentPermits) -> None:
        self.choices.append(self._choice(turn, lane))
        task = self.index.take(lane, agent, tick=self.state.tick)
        self.actions.append(AssignAction(agent.agent.id, task.id, task.project_id))
        if lane.kind is not LaneKind.CALLS_OF_TASKS:
            # The task that makes a call is active already.
            turn.active += 1
            self.inflight += lane.kind is LaneKind.TASKS
            if self.state.project_started is not None:
                turn.guaranteed = 1
        tokens = 0
        if self.state.charge_in_round:
            charge = self._charge
            default = self.state.default_tokens
            tokens = tokens_charged(task, default) if charge is None else charge(task)
        self.global_used += tokens
        self.order.charge(turn, tokens)

    def _choice(self, turn: Turn, lane: Lane) -> Choice:
        lanes = len(self.index.projects[lane.project_id].lanes)
        projects, rule = len(self.turns), self._rule(lane)
        if projects == 1:
            return Choice(lanes=lanes, rule=rule, ready=lane.ready)
        return Choice(
            projects=projects,
            target_share=_noted(turn.target),
            actual_share=_noted(self.order.share_of(turn)),
            is_guaranteed=not turn.guaranteed,
            lanes=lanes,
            rule=rule,
            ready=lane.ready,
        )

    def _rule(self, lane: Lane) -> LaneRule:
        most = self.state.max_wait_ticks
        if most is None or self.index.policy is None:
            return self._usual_rule
        is_overdue = self.state.tick - lane.waiting_since() >= most
        return LaneRule.LONGEST_WAIT if is_overdue else self._usual_rule


def choice_of_one(
    policy: LanePolicy, *, tick: int, waiting_since: float, max_wait_ticks: int | None
) -> Choice:
    """Return how the one lane was chosen in which anything was ready."""
    is_overdue = max_wait_ticks is not None and tick - waiting_since >= max_wait_ticks
    return _OVERDUE_ALONE if is_overdue else _ALONE[policy]


def eligible_turns(index: LaneIndex, state: SchedulerState) -> list[Turn]:
    """Return the active projects with work, with their targets and what they are forgiven."""
    turns = [
        Turn(project, order=order, state=state)
        for order, project in enumerate(state.projects)
        if index.ready(project.id) and project.status in WORKING
    ]
    set_targets(turns)
    if state.max_lag_tokens is not None:
        _forgive(turns, state.projects_present or (), state.max_lag_tokens)
    return turns


def _forgive(turns: list[Turn], present: Iterable[str], max_lag_tokens: int) -> None:
    stayed = frozenset(present)
    joins = [turn.project.id not in stayed for turn in turns]
    if not any(joins):
        return
    forgiven = forgiven_lag(
        [turn.used + turn.forgiven for turn in turns],
        [turn.target for turn in turns],
        joins=joins,
        max_lag_tokens=max_lag_tokens,
    )
    for turn, tokens in zip(turns, forgiven, strict=True):
        turn.forgiven += tokens


def _noted(share: float) -> float:
    # Every start is noted, and rounding to decimals takes more than twice as long as this.
    return round(share * SHARE_STEPS) / SHARE_STEPS


def _total(turns: list[Turn], state: SchedulerState) -> int:
    # Tokens of projects that are not in the round would stretch every share, and let the heaviest
    # project take grants in a row until it had caught up with them. Bounding the lag therefore
    # means sharing only what the projects of the round have used.
    if state.max_lag_tokens is None:
        return total_tokens(state) + sum(turn.forgiven for turn in turns)
    return sum(turn.used + turn.forgiven for turn in turns)


def _inflight(state: SchedulerState) -> int:
    counts = state.agent_inflight
    if counts is None:
        counts = state.project_active_agent_counts
    return sum(counts.values())


class Explanation:
    """What a finished round says about the tasks that it did not plan.

    A waiting task gets each rule that keeps it waiting, from the widest to the narrowest; the first
    is the one worth telling. A task that nothing forbids waits because other work went first.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._index = LaneIndex.of(state)
        # Who was free is asked before the round: an agent that the round itself filled is not
        # a reason, the work that went first is.
        self._free_before = {entry.agent.id for entry in self._index.agents if entry.is_free}
        self._open_reason = _why_nobody_is_free(self._index, self._free_before)
        self._round = Round(self._index, state)
        self.actions = self._round.run()
        self._planned = {action.task_id for action in self.actions}
        self._turns = {turn.project.id: turn for turn in self._round.turns}
        self._projects = {project.id: project for project in state.projects}

    def is_waiting(self, task: Task) -> bool:
        """Say whether the round left this READY task without an agent."""
        return task.id not in self._planned

    def reasons_of(self, task: Task) -> tuple[Reason, ...]:
        """Return every rule that keeps the task waiting, widest first; never empty."""
        found = tuple(self._limits_of_all(task)) + tuple(self._limits_of_task(task))
        if found:
            return found
        return (self._behind(task),)

    def _limits_of_all(self, task: Task) -> Iterator[Reason]:
        budget, cap = self._state.global_budget, self._state.max_inflight
        if budget is not None and self._round.is_over_global_budget:
            yield GlobalBudgetExhausted(used=self._round.global_used, limit=budget)
        if cap is not None and self._round.is_at_inflight_cap and not task.is_call:
            yield InflightCapReached(inflight=self._round.inflight, limit=cap)

    def _limits_of_task(self, task: Task) -> Iterator[Reason]:
        yield from self._project_reasons(task)
        if task.not_before is not None and not is_due(task, self._state.now):
            yield NotYetDue(until=task.not_before)
        yield from self._gate_reasons(task)
        yield from self._agent_reasons(task)

    def _project_reasons(self, task: Task) -> Iterator[Reason]:
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
        cap = project.max_concurrent_agents
        if cap is not None and task.parent_id is None and turn.is_at_cap:
            yield ProjectConcurrencyReached(project_id=project.id, active=turn.active, limit=cap)

    def _gate_reasons(self, task: Task) -> Iterator[Reason]:
        if task.id not in self._index:
            return
        for closure in sorted(self._index.gate_of(task).closed_by.values(), key=lambda c: c.part):
            yield GateClosed(
                kind=closure.kind, name=closure.name, until=closure.until, why=closure.why
            )

    def _agent_reasons(self, task: Task) -> Iterator[Reason]:
        if task.agent_id is not None:
            yield from self._own_agent_reasons(task.agent_id, task)
            return
        if self._open_reason is not None:
            yield self._open_reason

    def _own_agent_reasons(self, agent_id: str, task: Task) -> Iterator[Reason]:
        pool = self._index.pool(agent_id, lane_kind(task))
        entry = pool.get(agent_id)
        if pool is self._index.callers:
            # Nobody bounds these, so only a pause or a rate limit keeps them.
            if entry is not None and not entry.is_free:
                yield _why_not_free(entry)
            return
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


def _why_nobody_is_free(index: LaneIndex, free: set[str]) -> Reason | None:
    """Return what keeps open tasks from being taken by anybody, None if somebody is free."""
    takers = [entry for entry in index.agents if entry.agent.accepts_open]
    if any(entry.agent.id in free for entry in takers):
        return None
    limited = [entry for entry in takers if _has_room(entry)]
    return _soonest(limited) if limited else NoIdleAgent()


def _has_room(entry: AgentPermits) -> bool:
    return entry.limited_until is not None and entry.inflight < entry.permits


def _soonest(limited: list[AgentPermits]) -> RateLimited:
    first = min(limited, key=lambda entry: (entry.limited_until or 0.0, entry.order))
    return RateLimited(agent_type=first.agent.agent_type, until=first.limited_until or 0.0)


def _why_not_free(entry: AgentPermits) -> Reason:
    if _has_room(entry):
        return _soonest([entry])
    if entry.permits:
        return AgentFull(agent_id=entry.agent.id, inflight=entry.inflight, capacity=entry.permits)
    return AgentUnavailable(agent_id=entry.agent.id, state=entry.agent.state.value)


class Scheduler:
    """Fair share between projects, a policy between lanes, priority between tasks."""

    @staticmethod
    def schedule(state: SchedulerState) -> list[AssignAction]:
        """Return which idle agent is to run which READY task."""
        check_snapshot(state)
        return decide(LaneIndex.of(state), state)

    @staticmethod
    def explain(state: SchedulerState) -> dict[str, Reason]:
        """Return, for every READY task that got no agent, the first rule that held it."""
        return {task_id: reasons[0] for task_id, reasons in Scheduler.explain_all(state).items()}

    @staticmethod
    def explain_all(state: SchedulerState) -> dict[str, tuple[Reason, ...]]:
        """Return all rules that keep each READY task without an agent waiting, widest first."""
        check_snapshot(state)
        explanation = Explanation(state)
        ready = sorted(
            (task for task in state.tasks if task.status is TaskStatus.READY),
            key=lambda task: task.id,
        )
        return {
            task.id: explanation.reasons_of(task) for task in ready if explanation.is_waiting(task)
        }

    @staticmethod
    def forgive(state: SchedulerState) -> dict[str, int]:
        """Return the tokens of lag that `max_lag_tokens` newly forgives each project.

        Add them to `project_forgiven` of the next snapshot, and let them leave the window as
        usage of this moment would.
        """
        check_snapshot(state)
        forgiven = {
            turn.project.id: turn.forgiven - state.project_forgiven.get(turn.project.id, 0)
            for turn in eligible_turns(LaneIndex.of(state), state)
        }
        return {project_id: tokens for project_id, tokens in forgiven.items() if tokens}
