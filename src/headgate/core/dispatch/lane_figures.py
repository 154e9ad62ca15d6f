"""What people ask about lanes and budgets that is known at the desk alone.

Rule: the cost grows with the lanes and gates that have work, never with the tasks behind them, and
nothing changes by looking.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from headgate.core.dispatch.desk import Desk
from headgate.core.dispatch.desk_settings import DeskSettings
from headgate.core.gates import GatePart
from headgate.core.lanes.index import LaneIndex, ProjectLanes
from headgate.core.lanes.lane import Lane, waited
from headgate.core.load import load_score
from headgate.core.projects import WORKING, AgentState

MAX_GATES_COUNTED = 2_000
MAX_ASIDE_LOOKED_AT = 2_000
_HELD_AGENTS = (AgentState.PAUSED, AgentState.ERROR)


class LaneFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A lane that has tasks; an `agent_id` of "" is the open one.

    Tasks that nothing but a free place holds are `ready`: none where a gate, a pause or the end of
    the project holds them. `load` compares it with the other lanes of its project that have ready
    tasks; None is none of its own. `longest_wait_seconds` is None where waits are not kept.
    """

    project_id: str
    agent_id: str
    ready: int = 0
    longest_wait_seconds: float | None = None
    load: float | None = None


def lane_figures(desk: Desk, now: float) -> tuple[LaneFigure, ...]:
    """Return every lane in which a task waits that is due and needs no parent."""
    aside = _waits_aside(desk, now)
    stopped = _Stopped(desk.settings)
    figures = [
        _figure(lane, load, now, aside.pop((lane.project_id, lane.owner or ""), None))
        for project in desk.index.projects.values()
        for lane, load in _loads(project, stopped, tick=desk.tick, alpha=desk.tuning.alpha)
    ]
    figures += [
        LaneFigure(project_id=project_id, agent_id=agent_id, longest_wait_seconds=wait)
        for (project_id, agent_id), wait in aside.items()
    ]
    return tuple(figures)


def waiting_for_scopes(desk: Desk) -> dict[str, int]:
    """Return how many tasks wait for each budget that has refused some."""
    return {
        scope: desk.parking.set_aside(scope) + _behind(desk.index, GatePart("scope", scope))
        for scope in desk.parking.refusals
    }


class _Stopped:
    """The lanes that start nothing, whatever they hold, because somebody wants it so."""

    def __init__(self, settings: DeskSettings) -> None:
        self._is_paused = settings.is_paused
        self._projects = {one.id for one in settings.projects if one.status not in WORKING}
        self._agents = {one.id for one in settings.agents if one.state in _HELD_AGENTS}

    def __contains__(self, lane: Lane) -> bool:
        is_held = lane.project_id in self._projects or lane.owner in self._agents
        return self._is_paused or is_held


def _figure(lane: Lane, load: float | None, now: float, aside: float | None) -> LaneFigure:
    waits = [wait for wait in (lane.longest_wait(now), aside) if wait is not None]
    return LaneFigure(
        project_id=lane.project_id,
        agent_id=lane.owner or "",
        # A lane that could start something has a load, be it 0.
        ready=0 if load is None else lane.ready,
        longest_wait_seconds=max(waits, default=None),
        load=load,
    )


def _waits_aside(desk: Desk, now: float) -> dict[tuple[str, str], float]:
    """Return the longest wait, by lane, of tasks that a budget refused one by one."""
    waits: dict[tuple[str, str], float] = {}
    for task_id in islice(desk.parking.all_aside(), MAX_ASIDE_LOOKED_AT):
        task = desk.waiting[task_id].task
        key = (task.project_id, task.agent_id or "")
        waits[key] = max(waits.get(key, 0.0), waited(task, now))
    return waits


def _behind(index: LaneIndex, part: GatePart) -> int:
    gates = islice(index.gates.behind(part), MAX_GATES_COUNTED)
    return sum(lane.behind(gate) for gate in gates for lane in index.gate_lanes[gate])


def _loads(
    project: ProjectLanes, stopped: _Stopped, *, tick: int, alpha: float
) -> list[tuple[Lane, float | None]]:
    waits = {lane: max(0, tick - lane.oldest_tick()) for lane in project.lanes.values()}
    competing = {lane for lane in waits if lane.ready and lane not in stopped}
    deepest = max((lane.depth_micro for lane in competing), default=0)
    longest = max((waits[lane] for lane in competing), default=0)
    return [
        (
            lane,
            load_score(
                alpha=alpha,
                queue_depth=lane.depth_micro,
                max_queue_depth=deepest,
                oldest_wait=waits[lane],
                max_oldest_wait=longest,
            )
            if lane in competing
            else None,
        )
        for lane in waits
    ]
