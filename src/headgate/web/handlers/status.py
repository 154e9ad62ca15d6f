"""The routes that tell how the service is: counts, limits, and whether it is alive and ready."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headgate.bodies.tasks import (
    AgentCountBody,
    AgentMetricsBody,
    LatelyBody,
    MetricsBody,
    QueueBody,
    ReadyBody,
    StatsBody,
)
from headgate.runtime.looking.history import LATELY_SECONDS, Step
from headgate.store import LaneCount, Totals
from headgate.web.api import Api
from headgate.web.callers import Caller
from headgate.web.http.answers import Answer, json_answer
from headgate.web.http.requests import Request
from headgate.web.refusals import Refusal

OK = 200
ROUND_DIGITS = 3
MAX_AGENTS = 200
OTHER_AGENTS = "other"
"""Beyond the busiest agents, all others are counted as one."""

_HAPPENINGS = (
    "submitted",
    "completed",
    "failed",
    "cancelled",
    "rejected",
    "expired",
    "started",
    "wait_ms",
)


async def show_stats(api: Api, request: Request, _: str) -> Answer:
    """Answer with what waits, what has happened, and the limits in force."""
    return json_answer(OK, await stats_body(api, request.caller))


async def stats_body(api: Api, caller: Caller) -> StatsBody:
    """Return what waits, what has happened, and the limits in force, as far as it is one's own."""
    totals = own_totals(await api.engine.totals(), caller)
    return StatsBody(
        queue=_queue(totals.lanes),
        metrics=_metrics(totals),
        config=api.limits,
        paused=api.is_paused,
        lately=_lately_body(lately(api, caller)),
    )


def lately(api: Api, caller: Caller) -> Step | None:
    """Return what happened in the last minutes; None where nobody knows, or to whoever is bound."""
    if api.history is None or caller.is_bound:
        return None
    return api.history.lately(LATELY_SECONDS)


def _lately_body(step: Step | None) -> LatelyBody | None:
    if step is None:
        return None
    wait = step.wait_average_seconds
    return LatelyBody(
        seconds=round(step.seconds, ROUND_DIGITS),
        dispatch_count=step.started,
        average_wait_seconds=None if wait is None else round(wait, ROUND_DIGITS),
    )


async def show_alive(_: Api, __: Request, ___: str) -> Answer:
    """Answer at all."""
    return json_answer(OK, ReadyBody(status="ok"))


async def show_ready(api: Api, _: Request, __: str) -> Answer:
    """Answer whether this node takes and runs tasks."""
    health = api.engine.health()
    if not health.is_ready:
        problem = health.problem or "not ready yet"
        raise Refusal("not_ready", problem, details={"role": health.role, **health.parts})
    return json_answer(
        OK, ReadyBody(status="ready", role=health.role, paused=api.is_paused, **health.parts)
    )


def own_totals(totals: Totals, caller: Caller) -> Totals:
    """Return the counts of what belongs to the caller; of whoever is bound, those of its lanes."""
    if not caller.is_bound:
        return totals
    lanes = tuple(
        lane
        for lane in totals.lanes
        if caller.owns(agent_id=lane.agent_id, project_id=lane.project_id)
    )
    return Totals(lanes=lanes, **_sums(list(lanes)))


def _queue(lanes: tuple[LaneCount, ...]) -> QueueBody:
    agents: dict[str, AgentCountBody] = {}
    for lane in lanes:
        count = agents.setdefault(lane.agent_id, AgentCountBody())
        count.queued += lane.queued
        count.inflight += lane.inflight
    return QueueBody(
        total_queued=sum(count.queued for count in agents.values()),
        total_inflight=sum(count.inflight for count in agents.values()),
        agents={name: count for name, count in agents.items() if count.queued or count.inflight},
    )


def _metrics(totals: Totals) -> MetricsBody:
    agents = {name: _agent_metrics(_sums(lanes)) for name, lanes in _by_agent(totals.lanes)}
    whole = _agent_metrics({name: getattr(totals, name) for name in _HAPPENINGS})
    return MetricsBody(**msgspec.structs.asdict(whole), agents=agents)


def _by_agent(lanes: tuple[LaneCount, ...]) -> Iterator[tuple[str, list[LaneCount]]]:
    by_agent: dict[str, list[LaneCount]] = {}
    for lane in lanes:
        by_agent.setdefault(lane.agent_id, []).append(lane)
    busiest = sorted(by_agent.items(), key=lambda item: -sum(lane.started for lane in item[1]))
    yield from busiest[:MAX_AGENTS]
    rest = [lane for _, lanes in busiest[MAX_AGENTS:] for lane in lanes]
    if rest:
        yield OTHER_AGENTS, rest


def _sums(lanes: list[LaneCount]) -> dict[str, int]:
    return {name: sum(getattr(lane, name) for lane in lanes) for name in _HAPPENINGS}


def _agent_metrics(counts: dict[str, int]) -> AgentMetricsBody:
    started = counts["started"]
    return AgentMetricsBody(
        tasks_submitted=counts["submitted"],
        tasks_completed=counts["completed"],
        tasks_failed=counts["failed"],
        tasks_cancelled=counts["cancelled"],
        tasks_rejected=counts["rejected"],
        tasks_expired=counts["expired"],
        dispatch_count=started,
        avg_dispatch_latency_ms=round(counts["wait_ms"] / started, ROUND_DIGITS)
        if started
        else 0.0,
    )
