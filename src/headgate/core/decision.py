"""One round of decisions over the lane index.

Without a lane policy the agents are asked in their order, and each takes from the project whose
turn it is: plain fair share. With one, the project comes first, then its lane by the policy, then
the agent of that lane. The state supplies the projects and the figures; tasks, agents, gates and
the history of lanes are in the index.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from headgate.core.fair_share import (
    ShareOrder,
    Turn,
    set_targets,
    total_tokens,
)
from headgate.core.lag import forgiven_lag
from headgate.core.lanes.agent_pool import AgentPlaces
from headgate.core.lanes.index import LaneIndex
from headgate.core.lanes.lane import Lane
from headgate.core.projects import WORKING
from headgate.core.snapshot import AssignAction, LanePolicy, SchedulerState, tokens_charged
from headgate.core.tasks.choice import Choice, LaneRule

SHARE_STEPS = 10_000
"""Shares are noted to the hundredth of a percent."""

_RULES = {
    LanePolicy.FEWEST_IN_FLIGHT: LaneRule.FEWEST_IN_FLIGHT,
    LanePolicy.HIGHEST_LOAD: LaneRule.HIGHEST_LOAD,
}


def decide(index: LaneIndex, state: SchedulerState) -> list[AssignAction]:
    """Plan assignments until nobody who waits can be served; planned tasks leave the index."""
    return Round(index, state).run()


class Round:
    """One round: the plan so far with its grounds, and the figures that it has changed."""

    def __init__(self, index: LaneIndex, state: SchedulerState) -> None:
        self.index = index
        self.state = state
        self.actions: list[AssignAction] = []
        self.choices: list[Choice] = []
        self.turns = eligible_turns(index, state)
        self.inflight = _inflight(state)
        self.global_used = state.global_tokens_used + sum(state.project_reserved.values())
        self.order = ShareOrder(self.turns, total=_total(self.turns, state))
        self._global_budget = math.inf if state.global_budget is None else state.global_budget
        self._max_inflight = math.inf if state.max_inflight is None else state.max_inflight
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
        return (
            not self.index.agents.free
            or self.index.offers.is_over
            or self.inflight >= self._max_inflight
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
            lane = None
            if not turn.is_held:
                lane = self.index.choose_lane(turn.project.id, tick=tick, alpha=alpha)
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

    def _serve(self, agent: AgentPlaces) -> bool:
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

    def _assign(self, turn: Turn, lane: Lane, agent: AgentPlaces) -> None:
        self.choices.append(self._choice(turn, lane))
        task = self.index.take(lane, agent, tick=self.state.tick)
        self.actions.append(AssignAction(agent.agent.id, task.id, task.project_id))
        turn.active += 1
        self.inflight += 1
        if self.state.project_started is not None:
            turn.guaranteed = 1
        tokens = 0
        if self.state.charge_in_round:
            tokens = tokens_charged(task, self.state.default_tokens)
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
