"""The routes that tell how the service is: counts, limits, and whether it is alive and ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Literal

import msgspec

from headgate.api.api import Api, Route
from headgate.api.callers import Caller, own
from headgate.api.calls import live_counts
from headgate.api.errors import ApiError
from headgate.api.http.request import Request
from headgate.api.http.response import Response, json_response
from headgate.api.http.slices import in_slices
from headgate.api.schema.admin import LaneBody, LaneListBody
from headgate.api.schema.tasks import (
    AgentCountBody,
    AgentMetricsBody,
    MetricsBody,
    QueueBody,
    ReadyBody,
    RecentBody,
    StatsBody,
    StoppedBody,
    StoreBody,
)
from headgate.api.slots import known_closures, shown_closures
from headgate.api.submission import check_unknown
from headgate.core.dispatch_state import LaneStats
from headgate.core.retention import StoreSize
from headgate.core.snapshot import ProjectStatus, Standing
from headgate.core.text import Steps, named_like
from headgate.engine.history import RECENT_SECONDS, Step
from headgate.metrics import CONTENT_TYPE
from headgate.storage.store import LaneCount, Totals

OK = 200
ROUND_DIGITS = 3
MAX_AGENTS = 200
MAX_STOPPED = 100
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
_happenings = attrgetter(*_HAPPENINGS)


async def show_stats(api: Api, request: Request, _: str) -> Response:
    """Answer with what waits, what has happened, and the limits in force."""
    return json_response(OK, await stats_body(api, request.caller))


async def stats_body(api: Api, caller: Caller) -> StatsBody:
    """Return what waits, what has happened, and the limits in force, as far as it is one's own."""
    totals = await in_slices(own_totals(await api.engine.totals(), caller))
    return StatsBody(
        queue=await in_slices(_queue(totals.lanes)),
        metrics=await in_slices(_metrics(totals)),
        config=api.limits,
        paused=api.is_paused,
        stopped=list(islice(_stopped(api, caller), MAX_STOPPED)),
        closures=None if caller.is_bound else len(shown_closures(await known_closures(api))),
        recent=_recent_body(recent_step(api, caller)),
        store=None if caller.is_bound else store_body(api.engine.reaper.size),
        calls=live_counts(api, caller),
    )


def _stopped(api: Api, caller: Caller) -> Iterator[StoppedBody]:
    """Give what is paused or drains, as far as it is one's own."""
    settings, is_all = api.config.settings, not caller.is_bound
    for project_id, project in settings.projects.items():
        if is_all or caller.project_id == project_id:
            yield from _if_stopped("project", project_id, project.status)
    for agent_id, agent in settings.agents.items():
        if is_all or caller.agent_id == agent_id:
            yield from _if_stopped("agent", agent_id, agent.status)
    for name, target in settings.targets.items() if is_all else ():
        yield from _if_stopped("target", name, target.status)


def _if_stopped(
    kind: Literal["project", "agent", "target"], name: str, status: ProjectStatus | Standing
) -> Iterator[StoppedBody]:
    if status.value in ("paused", "draining"):
        yield StoppedBody(kind=kind, name=name, status=status.value)


def store_body(size: StoreSize | None) -> StoreBody | None:
    """Return how large the store is; None before that is known."""
    if size is None:
        return None
    return StoreBody(
        used_bytes=size.used_bytes,
        free_bytes=size.free_bytes,
        room_bytes=size.room_bytes,
        max_bytes=size.max_bytes,
        problem=size.problem or None,
    )


def recent_step(api: Api, caller: Caller) -> Step | None:
    """Return what happened in the last minutes; None where nobody knows, or to whoever is bound."""
    if caller.is_bound:
        return None
    return api.engine.history.recent(RECENT_SECONDS)


def _recent_body(step: Step | None) -> RecentBody | None:
    if step is None:
        return None
    wait = step.wait_average_seconds
    return RecentBody(
        seconds=round(step.seconds, ROUND_DIGITS),
        dispatch_count=step.started,
        average_wait_seconds=None if wait is None else round(wait, ROUND_DIGITS),
    )


async def show_alive(_: Api, __: Request, ___: str) -> Response:
    """Answer at all."""
    return json_response(OK, ReadyBody(status="ok"))


async def show_ready(api: Api, _: Request, __: str) -> Response:
    """Answer whether this node takes and runs tasks."""
    health = api.engine.health()
    if not health.is_ready:
        problem = health.problem or "not ready yet"
        raise ApiError("not_ready", problem, details={"role": health.role, **health.parts})
    status = "degraded" if health.shortage else "ready"
    return json_response(
        OK, ReadyBody(status=status, role=health.role, paused=api.is_paused, **health.parts)
    )


def own_totals(totals: Totals, caller: Caller) -> Steps[Totals]:
    """Return the counts of what belongs to the caller; of whoever is bound, those of its lanes."""
    if not caller.is_bound:
        return totals
    lanes = yield from _own_lanes(totals.lanes, caller)
    forgotten = yield from _own_lanes(totals.forgotten, caller)
    sums = yield from _sums([*lanes, *forgotten])
    return Totals(lanes=tuple(lanes), forgotten=tuple(forgotten), **sums)


def _own_lanes(lanes: Iterable[LaneCount], caller: Caller) -> Steps[list[LaneCount]]:
    own = []
    for lane in lanes:
        if caller.owns(agent_id=lane.agent_id, project_id=lane.project_id):
            own.append(lane)
        yield
    return own


def _queue(lanes: Iterable[LaneCount]) -> Steps[QueueBody]:
    agents: dict[str, AgentCountBody] = {}
    queued = inflight = 0
    for lane in lanes:
        if lane.queued or lane.inflight:
            count = agents.setdefault(lane.agent_id, AgentCountBody())
            count.queued += lane.queued
            count.inflight += lane.inflight
            queued += lane.queued
            inflight += lane.inflight
        yield
    return QueueBody(total_queued=queued, total_inflight=inflight, agents=agents)


def _metrics(totals: Totals) -> Steps[MetricsBody]:
    by_agent: dict[str, list[LaneCount]] = {}
    started = Counter[str]()
    for lane in totals.lanes:
        by_agent.setdefault(lane.agent_id, []).append(lane)
        started[lane.agent_id] += lane.started
        yield
    busiest = sorted([(-count, name) for name, count in started.items()])[:MAX_AGENTS]
    agents = {}
    for _, name in busiest:
        agents[name] = _agent_metrics((yield from _sums(by_agent.pop(name))))
    if by_agent:
        rest = (lane for lanes in by_agent.values() for lane in lanes)
        agents[OTHER_AGENTS] = _agent_metrics((yield from _sums(rest)))
    whole = _agent_metrics({name: getattr(totals, name) for name in _HAPPENINGS})
    return MetricsBody(**msgspec.structs.asdict(whole), agents=agents)


def _sums(lanes: Iterable[LaneCount]) -> Steps[dict[str, int]]:
    sums = dict.fromkeys(_HAPPENINGS, 0)
    for lane in lanes:
        for name, count in zip(_HAPPENINGS, _happenings(lane), strict=True):
            sums[name] += count
        yield
    return sums


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


# `GET /scheduler/lanes`: where tasks wait, for how long, and how loaded each lane is.
#
# Counts are the store's; load and wait are known to the node that dispatches, and left open at any
# other. Rule: however many lanes there are, the answer is bounded, says how many there are, and is
# narrowed before it is cut.

MAX_LANES = 1_000
LANES_QUERY = ("projectId", "find")


class LaneQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which lanes are listed: those of a project, those with a text in their names, from which on.

    None is any project, and an empty text is in every name.
    """

    project_id: str | None = None
    find: str = ""
    first: int = 0
    most: int | None = None


async def show_lanes(api: Api, request: Request, _: str) -> Response:
    """Answer with the lanes that have work."""
    given = request.query()
    check_unknown(given, LANES_QUERY)
    query = LaneQuery(
        project_id=own("projectId", given.get("projectId") or None, request.caller.project_id),
        find=given.get("find", ""),
        most=MAX_LANES,
    )
    steps = lane_list(api, await api.engine.totals(), request.caller, query)
    return json_response(OK, await in_slices(steps))


def lane_list(api: Api, totals: Totals, caller: Caller, query: LaneQuery) -> Steps[LaneListBody]:
    """Return the lanes that have work and belong to the caller, the longest wait first."""
    found = api.engine.outlook.lanes(api.engine.now())
    yield
    known = {(one.project_id, one.agent_id): one for one in found or ()}
    lanes = []
    for lane in totals.lanes:
        yield
        if not (lane.queued or lane.inflight) or query.project_id not in (None, lane.project_id):
            continue
        is_own = caller.owns(agent_id=lane.agent_id, project_id=lane.project_id)
        if is_own and named_like((lane,), query.find, _names):
            stats = known.get((lane.project_id, lane.agent_id))
            lanes.append((_order(lane, stats), lane, stats))
    lanes.sort(key=itemgetter(0))
    end = None if query.most is None else query.first + query.most
    bodies = []
    # Only what is shown is made a body of: there may be thousands.
    for _, lane, stats in lanes[query.first : end]:
        bodies.append(_body(lane, stats, is_known=found is not None))
        yield
    return LaneListBody(
        lanes=bodies,
        count=len(lanes),
        strategy=api.limits.strategy,
    )


def _names(lane: LaneCount) -> tuple[str, str]:
    return lane.project_id, lane.agent_id


def _order(lane: LaneCount, stats: LaneStats | None) -> tuple[float, int, int, str, str]:
    wait = None if stats is None else stats.longest_wait_seconds
    return -(wait or 0.0), -lane.queued, -lane.inflight, lane.project_id, lane.agent_id


def _body(lane: LaneCount, stats: LaneStats | None, *, is_known: bool) -> LaneBody:
    # A lane that is known to have no stats has only tasks that wait for a time or a parent.
    ready = 0 if is_known else None
    wait = None if stats is None else stats.longest_wait_seconds
    return LaneBody(
        project_id=lane.project_id,
        agent_id=lane.agent_id,
        queued=lane.queued,
        inflight=lane.inflight,
        ready=ready if stats is None else stats.ready,
        oldest_wait_seconds=None if wait is None else round(wait, 3),
        load=None if stats is None or stats.load is None else round(stats.load, 6),
    )


# `GET /metrics`: the metrics of this node in the text format of Prometheus.


async def show_metrics(api: Api, request: Request, _: str) -> Response:
    """Answer with all metrics; they name every agent, so a bound token does not read them."""
    if request.caller.is_bound:
        raise ApiError("forbidden", "metrics name every agent; use a token that is not bound")
    return Response(OK, await api.metrics.text(), (), CONTENT_TYPE)


ROUTES = (
    Route(
        "GET",
        "/scheduler/stats",
        show_stats,
        "show counts and limits",
        "read",
        responses={200: StatsBody},
    ),
    Route(
        "GET",
        "/scheduler/lanes",
        show_lanes,
        "show where tasks wait",
        "read",
        responses={200: LaneListBody},
        query=LANES_QUERY,
        errors=("unknown_field",),
    ),
    Route(
        "GET",
        "/metrics",
        show_metrics,
        "show the metrics of this node to Prometheus",
        "read",
        responses={OK: "text/plain"},
    ),
    Route(
        "GET",
        "/livez",
        show_alive,
        "check that the process serves",
        None,
        responses={200: ReadyBody},
    ),
    Route(
        "GET",
        "/readyz",
        show_ready,
        "check whether this node accepts and runs tasks",
        None,
        responses={200: ReadyBody},
        errors=("not_ready",),
    ),
)
