"""The routes that tell how the service is: counts, limits, and whether it is alive and ready."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headgate.store import LaneCount, Totals
from headgate.web.answers import Answer, json_answer
from headgate.web.api import Api, LimitsShown
from headgate.web.refusals import Refusal
from headgate.web.requests import Request

OK = 200
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


class AgentCountBody(msgspec.Struct):
    """What one agent has waiting and in flight, over all projects."""

    queued: int = 0
    inflight: int = 0


class QueueBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What waits and runs now; the agent "" has the tasks that any agent may take."""

    total_queued: int
    total_inflight: int
    agents: dict[str, AgentCountBody]


class AgentMetricsBody(msgspec.Struct, kw_only=True, rename="camel"):
    """What has happened to tasks, in all or of one agent."""

    tasks_submitted: int
    tasks_completed: int
    tasks_failed: int
    tasks_cancelled: int
    tasks_rejected: int
    tasks_expired: int
    dispatch_count: int
    avg_dispatch_latency_ms: float


class MetricsBody(AgentMetricsBody, kw_only=True, rename="camel"):
    """What has happened since the store was founded, with the agents that had work lately."""

    agents: dict[str, AgentMetricsBody]


class StatsBody(msgspec.Struct, kw_only=True):
    """The answer of `/scheduler/stats`."""

    queue: QueueBody
    metrics: MetricsBody
    config: LimitsShown


class ReadyBody(msgspec.Struct, kw_only=True):
    """The answer of a node that is well."""

    status: str
    role: str | msgspec.UnsetType = msgspec.UNSET


async def show_stats(api: Api, _: Request, __: str) -> Answer:
    """Answer with what waits, what has happened, and the limits in force."""
    totals = await api.engine.totals()
    stats = StatsBody(queue=_queue(totals.lanes), metrics=_metrics(totals), config=api.limits)
    return json_answer(OK, stats)


async def show_alive(_: Api, __: Request, ___: str) -> Answer:
    """Answer at all."""
    return json_answer(OK, ReadyBody(status="ok"))


async def show_ready(api: Api, _: Request, __: str) -> Answer:
    """Answer whether this node takes and runs tasks."""
    health = api.engine.health()
    if not health.is_ready:
        problem = health.problem or "not ready yet"
        raise Refusal("not_ready", problem, details={"role": health.role})
    return json_answer(OK, ReadyBody(status="ready", role=health.role))


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
        avg_dispatch_latency_ms=round(counts["wait_ms"] / started, 3) if started else 0.0,
    )
