"""The figures of a desk as the decision wants them, without the tasks, agents and gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.core.decision import eligible_turns
from headgate.core.snapshot import SchedulerState

if TYPE_CHECKING:
    from headgate.core.dispatch.desk import Desk


def state_of(desk: Desk, now: float, *, max_started: int | None) -> SchedulerState:
    """Return the figures of this moment; at most `max_started` tasks may be added to them."""
    settings = desk.settings
    total = len(desk.flights)
    most = settings.max_inflight
    if max_started is not None:
        most = min(most, total + max_started)
    return SchedulerState(
        projects=list(settings.projects),
        tasks=[],
        agents=[],
        project_token_usage=desk.figures.tokens,
        project_active_agent_counts=desk.flights.active,
        tasks_completed_in_window=desk.figures.completed,
        charge_in_round=True,
        default_tokens=settings.default_tokens,
        project_reserved=desk.flights.reserved,
        project_started=desk.figures.started,
        # The index has the agents one by one; a round only asks for the sum.
        agent_inflight={"": total},
        max_inflight=most,
        lane_policy=settings.lane_policy,
        tick=desk.tick,
        alpha=desk.tuning.alpha,
        max_wait_ticks=settings.max_wait_ticks,
        max_lag_tokens=settings.max_lag_tokens,
        projects_present=desk.present,
        project_forgiven=desk.figures.forgiven,
        priority_ageing_seconds=settings.priority_ageing_seconds,
        now=now,
    )


def forgive(desk: Desk, state: SchedulerState, now: float) -> None:
    """Note which projects take part now, and what those that join are forgiven."""
    if state.max_lag_tokens is None:
        return
    turns = eligible_turns(desk.index, state)
    for turn in turns:
        tokens = turn.forgiven - state.project_forgiven.get(turn.project.id, 0)
        if tokens:
            desk.figures.add(turn.project.id, now, forgiven=tokens)
            known = desk.forgiven_now.get(turn.project.id, 0)
            desk.forgiven_now[turn.project.id] = known + tokens
    desk.present = [turn.project.id for turn in turns]
