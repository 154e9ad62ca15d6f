"""Why one task waits: every rule that keeps it waiting, who has what it waits for, and until when.

The rules are those of a round over this task alone, with everything else as it is; a task that
such a round would start waits only because others go first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

import msgspec
from msgspec.structs import replace as replaced

from headgate.core.budgets.ledger import Refused
from headgate.core.budgets.scopes import ROOT, Scope, is_within
from headgate.core.dispatch_state import DispatchState, InFlightAttempt, Waiting
from headgate.core.fair_share import WaitingLane, expected_rank
from headgate.core.gates import (
    GatePart,
    gate_key,
    gate_parts,
    kind_part,
    known_by_name,
    read_grant_part,
    read_kind_part,
    scope_part,
)
from headgate.core.lane_index import LaneKind, lane_kind
from headgate.core.reasons import (
    AgentFull,
    AgentUnavailable,
    BudgetShort,
    Cap,
    EverythingPaused,
    FirstOfKind,
    GateClosed,
    GlobalBudgetExhausted,
    InflightCapReached,
    LaneBehind,
    Lasting,
    NoAgentPulls,
    NodesFull,
    NoIdleAgent,
    NoWorker,
    ParentsPending,
    ProjectBudgetExhausted,
    ProjectConcurrencyReached,
    Reason,
    UpstreamFull,
    WorkersFull,
    expiry_warning,
)
from headgate.core.scheduler import Explanation
from headgate.core.snapshot import BUILT_IN_AGENT, WORKING, Agent
from headgate.core.task import UPSTREAM_PREFIX, Task, is_worker

MAX_HOLDERS = 10
MAX_TAKERS = 5

IsHolder = Callable[[InFlightAttempt], bool]
MayRead = Callable[[Scope], bool]


class TaskReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """One rule that keeps a task waiting; `held_by` names tasks in flight that have what it needs.

    `held_by_others` counts those that belong to others than whoever asks; they are not named.
    `warning` is there if the task expires before the rule lets it go.
    """

    detail: Reason
    message: str
    until: float | None = None
    held_by: tuple[str, ...] = ()
    held_by_others: int = 0
    warning: str = ""


def _is_anybodys(_: InFlightAttempt) -> bool:
    return True


def _is_read_by_all(_: Scope) -> bool:
    return True


def without_figures(reason: Reason, may_read: MayRead) -> Reason:
    """Return a reason that says which budget has no room and until when, and nothing else of it."""
    match reason:
        case GateClosed(kind="scope", name=name, until=until):
            scope = Scope(name)
        case BudgetShort(scope=name, until=until):
            scope = Scope(name)
        case GlobalBudgetExhausted():
            scope, until = ROOT, None
        case ProjectBudgetExhausted(project_id=project_id):
            scope, until = Scope(f"project:{project_id}"), None
        case _:
            return reason
    if may_read(scope):
        return reason
    return GateClosed(kind="scope", name=scope, until=until, why="it has no room for this task")


def reasons(
    dispatch_state: DispatchState,
    task_id: str,
    now: float,
    is_own: IsHolder = _is_anybodys,
    may_read: MayRead = _is_read_by_all,
) -> tuple[TaskReason, ...]:
    """Return every rule that keeps a queued task waiting; empty if nobody knows it.

    What lasts longest comes first: that all capacity is taken just now is true of nearly everything
    that waits, and is over in a moment. `is_own` tells which tasks in flight may be named,
    `may_read` of which budgets the figures.
    """
    waiting = dispatch_state.waiting.get(task_id)
    if waiting is None:
        return ()
    found = [
        *_own_reasons(dispatch_state, task_id, waiting),
        *_round_reasons(dispatch_state, waiting, now),
    ]
    if not found:
        found = [_behind(dispatch_state, waiting)]
    found.sort(key=_lasting)
    deadline = waiting.task.deadline
    shown = [without_figures(one, may_read) for one in found]
    return tuple(_task_reason(dispatch_state, one, is_own, deadline) for one in shown)


def warning_at_submit(dispatch_state: DispatchState, task: Task) -> str:
    """Say of a task that is about to be submitted that it expires before its gate opens.

    Only what is closed by now counts, so this costs as little as a submit may.
    """
    if task.deadline is None:
        return ""
    parts = gate_parts(gate_key(task, dispatch_state.settings.pull_targets))
    closures = [one for part in parts for one in dispatch_state.closures.of(part)]
    latest = max(closures, key=lambda one: (one.until or 0.0, one.kind, one.name), default=None)
    if latest is None:
        return ""
    (latest,) = known_by_name((latest,))
    reason = GateClosed(kind=latest.kind, name=latest.name, until=latest.until, why=latest.why)
    return expiry_warning(reason, task.deadline)


LANES_SECONDS = 1.0
"""For how long it is remembered who waits for an upstream: thousands of calls may ask at a time."""
MAX_RANKED_LANES = 256
"""Where calls wait in more lanes nobody is told a rank: each call would look at all of them."""

LaneKey = tuple[str, str | None, LaneKind]


class WaitingLanes:
    """The lanes in which calls wait for each upstream, as they were within the last second."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, dict[LaneKey, WaitingLane] | None]] = {}

    def of(
        self, dispatch_state: DispatchState, target: str, now: float
    ) -> dict[LaneKey, WaitingLane] | None:
        """Return the lanes of an upstream; None if they are too many to be ranked."""
        looked_at, lanes = self._known.get(target, (-math.inf, None))
        if 0 <= now - looked_at < LANES_SECONDS:
            return lanes
        found = dispatch_state.index.lanes_at(target)
        lanes = None
        if len(found) <= MAX_RANKED_LANES:
            lanes = {
                (lane.project_id, lane.owner, lane.kind): WaitingLane(
                    lane.project_id, waiting, (lane.served_tick, -(lane.longest_wait(now) or 0.0))
                )
                for lane, waiting in found.items()
            }
        self._known[target] = (now, lanes)
        return lanes


def start_rank(
    dispatch_state: DispatchState, call: Task, position: int, lanes: Mapping[LaneKey, WaitingLane]
) -> int:
    """Return at which start at its upstream a call has its turn, the first is 1.

    `position` is its place among the calls of its lane that wait for this upstream.
    """
    key = (call.project_id, call.agent_id, lane_kind(call))
    projects = dispatch_state.settings.projects
    weights = {one.id: one.credit_weight for one in projects if one.status in WORKING}
    own = lanes.get(key) or WaitingLane(call.project_id, position, (0.0, 0.0))
    others = [one for name, one in lanes.items() if name != key and one.project_id in weights]
    return expected_rank(position, own, others, weights)


def _lasting(reason: Reason) -> Lasting:
    """Return what ends a reason; a gate that closed without a time waits for somebody."""
    if isinstance(reason, GateClosed) and reason.until is None:
        return Lasting.SOMEBODY_ACTS
    return reason.lasts


def _own_reasons(dispatch_state: DispatchState, task_id: str, waiting: Waiting) -> list[Reason]:
    found: list[Reason] = [EverythingPaused()] if dispatch_state.settings.is_paused else []
    if waiting.waiting_for:
        found.append(ParentsPending(count=waiting.waiting_for, parents=waiting.terms.depends_on))
    refused = dispatch_state.parking.refusal_of(task_id)
    if refused is not None and refused.kind:
        found.append(_first_of_kind(kind_part(waiting.task, refused), refused))
    elif refused is not None:
        used = refused.spent + refused.reserved + refused.overrun
        found.append(
            BudgetShort(
                scope=refused.scope,
                unit=refused.unit.value,
                room=refused.limit - used,
                requested=refused.requested,
                until=refused.resets_at,
            )
        )
    no_room = dispatch_state.too_large.get(task_id)
    if no_room is not None:
        limit = no_room.limit
        why = f"{limit.most} {limit.unit} in {limit.window_seconds} seconds can never take it"
        found.append(GateClosed(kind=limit.kind, name=limit.name, why=why))
    key_wait = dispatch_state.key_waits.get(task_id)
    if key_wait is not None:
        name = waiting.task.provider or ""
        found.append(GateClosed(kind="provider", name=name, until=key_wait.until, why=key_wait.why))
    return found


def _round_reasons(dispatch_state: DispatchState, waiting: Waiting, now: float) -> list[Reason]:
    pool = dispatch_state.index.agents
    limited = ((name, room.until) for name, room in dispatch_state.limited.items())
    agents = [entry.agent for entry in pool]
    own = waiting.task.agent_id
    # An agent that no configuration names comes about with the first task that may start.
    if own is not None and pool.get(own) is None:
        agents.append(dispatch_state.made_agents.make(own))
    is_pull = waiting.task.target in dispatch_state.settings.pull_targets
    state = replace(
        dispatch_state.state(
            now, max_started=None if is_pull else dispatch_state.in_flight.free_capacity()
        ),
        tasks=[waiting.task],
        agents=agents,
        agent_inflight={entry.agent.id: entry.inflight for entry in pool},
        closed_gates=dispatch_state.closures.shown_of(
            gate_parts(gate_key(waiting.task, dispatch_state.settings.pull_targets))
        ),
        rate_limited={name: until for name, until in limited if until is not None},
        pull_targets=dispatch_state.settings.pull_targets,
        worker_permits=dispatch_state.in_flight.free_by_agent(),
        upstream_permits={
            target: max(0, free) for target, free in dispatch_state.index.offers.upstreams.items()
        },
        capped_agents=dispatch_state.settings.capped_agents,
    )
    explanation = Explanation(state)
    if not explanation.is_waiting(waiting.task):
        return []
    found = (one for one in explanation.reasons_of(waiting.task) if not isinstance(one, LaneBehind))
    return [told for one in found for told in _told(dispatch_state, one, is_pull=is_pull)]


CapReason = TypeVar("CapReason", bound=Cap)


def _with_setting(
    dispatch_state: DispatchState, reason: CapReason, key: str, value: int
) -> CapReason:
    """Name the setting that a reason follows from, where there are settings."""
    set_keys = dispatch_state.settings.set_keys
    if set_keys is None:
        return reason
    return replaced(reason, setting=f"{key} = {value}", is_default=key not in set_keys)


def _with_capacity(dispatch_state: DispatchState, reason: AgentFull) -> AgentFull:
    own = f"agents.{reason.agent_id}.capacity"
    is_own = own in (dispatch_state.settings.set_keys or ())
    key = own if is_own else "scheduler.max_per_agent_inflight"
    return _with_setting(dispatch_state, reason, key, reason.capacity)


def _capacity_reasons(dispatch_state: DispatchState, *, is_pull: bool) -> list[Reason]:
    """Return which of the two caps on everything is reached, or that both are."""
    found: list[Reason] = []
    in_flight, most = dispatch_state.in_flight, dispatch_state.settings.max_inflight
    if len(in_flight) >= most:
        cap = InflightCapReached(inflight=len(in_flight), limit=most)
        found.append(_with_setting(dispatch_state, cap, "scheduler.max_inflight", most))
    if not is_pull and not in_flight.free_capacity():
        nodes, capacity = len(in_flight.capacity), in_flight.total_capacity()
        full = NodesFull(nodes=nodes, capacity=capacity)
        # Nodes have files of their own, so the value is known only where there is one.
        if nodes == 1:
            full = _with_setting(dispatch_state, full, "scheduler.worker_count", capacity)
        found.append(full)
    return found


def _accept_open(dispatch_state: DispatchState) -> list[Agent]:
    """Return the declared agents that accept open tasks; the built-in one is nobody's to start."""
    agents = dispatch_state.settings.agents
    return [agent for agent in agents if agent.accepts_open and agent.id != BUILT_IN_AGENT]


def _taker_reasons(dispatch_state: DispatchState) -> list[Reason]:
    """Say why no agent takes an open task, of each where there are few."""
    takers = _accept_open(dispatch_state)
    if not takers:
        # The built-in agent has as many permits as may be in flight, and that reason is told.
        return [] if BUILT_IN_AGENT in _open_agents(dispatch_state) else [NoIdleAgent()]
    pool = dispatch_state.index.agents
    working = [entry for agent in takers if (entry := pool.get(agent.id)) and entry.permits]
    if len(working or takers) > MAX_TAKERS:
        return [NoIdleAgent()]
    if not working:
        return [AgentUnavailable(agent_id=one.id, state=one.state.value) for one in takers]
    full = (
        AgentFull(agent_id=one.agent.id, inflight=one.inflight, capacity=one.permits)
        for one in working
    )
    return [_with_capacity(dispatch_state, one) for one in full]


def _told(dispatch_state: DispatchState, reason: Reason, *, is_pull: bool) -> list[Reason]:
    """Return a reason with all that is known of it; what two things close is two reasons."""
    match reason:
        case GateClosed(kind="kind", name=name):
            part = GatePart("kind", name)
            return [_first_of_kind(part, dispatch_state.parking.refusals.get(part))]
        case GateClosed(kind="room", name=name):
            return [replaced(reason, kind="scope", name=scope_part(GatePart("room", name)).name)]
        case InflightCapReached():
            return _capacity_reasons(dispatch_state, is_pull=is_pull)
        case ProjectConcurrencyReached(project_id=project_id, limit=limit):
            key = f"projects.{project_id}.max_concurrent_agents"
            return [_with_setting(dispatch_state, reason, key, limit)]
        case AgentFull():
            return [_with_capacity(dispatch_state, reason)]
        case GateClosed(kind="upstream", name=target):
            return [_upstream_reason(dispatch_state, target)]
        case NoIdleAgent():
            return _taker_reasons(dispatch_state)
        case GateClosed(kind="worker", name="") if not _accept_open(dispatch_state):
            return [NoAgentPulls()]
        case GateClosed(kind="worker"):
            return [_worker_reason(dispatch_state, reason)]
        case GateClosed(kind="grant", name=name):
            grant = read_grant_part(name)
            kind_name = ("slot", grant.slot) if grant.slot else ("provider", grant.provider)
            return [replaced(reason, kind=kind_name[0], name=kind_name[1])]
        case GateClosed(kind="slot" | "target" as kind, name=name):
            found = dispatch_state.closures.of(GatePart(kind, name))
            if kind == "slot" and found:
                # An exhausted key is often limited as well; what opens last is what it waits for.
                found = [max(found, key=attrgetter("opens_at"))]
            return [
                _slot_reason(dispatch_state, replaced(reason, until=one.until, why=one.why))
                for one in found
            ]
        case _:
            return [reason]


def _upstream_reason(dispatch_state: DispatchState, target: str) -> UpstreamFull:
    name = target.removeprefix(UPSTREAM_PREFIX)
    limit = dispatch_state.settings.upstream_permits.get(target, 0)
    calls = dispatch_state.in_flight.calls.values()
    inflight = sum(one.task.target == target for one in calls)
    full = UpstreamFull(upstream=name, inflight=inflight, limit=limit)
    return _with_setting(dispatch_state, full, f"upstreams.{name}.max_inflight", limit)


def _first_of_kind(part: GatePart, refused: Refused | None) -> FirstOfKind:
    kind = read_kind_part(part.name)
    return FirstOfKind(
        project_id=kind.project_id,
        target=kind.target,
        in_flight=1 if refused is None else refused.live,
        unit=kind.unit,
    )


def _slot_reason(dispatch_state: DispatchState, reason: GateClosed) -> GateClosed:
    standing = dispatch_state.slots.standings.get(reason.name) if reason.kind == "slot" else None
    if standing is None:
        return reason
    return replaced(reason, percent_used=standing.percent_used, resets_at=standing.resets_at)


def _worker_reason(dispatch_state: DispatchState, reason: GateClosed) -> Reason:
    """Say of a gate that is closed for want of a worker which it is."""
    since = dispatch_state.workers.since(reason.name) if reason.name else None
    owners = [reason.name] if reason.name else _open_agents(dispatch_state)
    capacity = sum(
        sum(dispatch_state.in_flight.workers_of(agent_id).values()) for agent_id in owners
    )
    is_full = capacity and not any(
        dispatch_state.in_flight.free_at_workers(agent_id) for agent_id in owners
    )
    if is_full:
        return WorkersFull(agent_id=reason.name, capacity=capacity, since=since)
    return NoWorker(agent_id=reason.name, since=since)


def _open_agents(dispatch_state: DispatchState) -> list[str]:
    return [entry.agent.id for entry in dispatch_state.index.agents if entry.agent.accepts_open]


def _behind(dispatch_state: DispatchState, waiting: Waiting) -> Reason:
    task = waiting.task
    ahead = max(0, dispatch_state.index.ready(task.project_id) - 1)
    return LaneBehind(
        project_id=task.project_id, agent=task.agent_id or "any agent", given_first=ahead
    )


def _task_reason(
    dispatch_state: DispatchState, reason: Reason, is_own: IsHolder, deadline: float | None
) -> TaskReason:
    is_holder = _holder_test(reason)
    holders = (
        [attempt for attempt in dispatch_state.in_flight.all() if is_holder(attempt)]
        if is_holder
        else []
    )
    held_by = [attempt.task.id for attempt in holders if is_own(attempt)]
    return TaskReason(
        detail=reason,
        message=reason.message,
        until=getattr(reason, "until", None),
        held_by=tuple(sorted(held_by)[:MAX_HOLDERS]),
        held_by_others=len(holders) - len(held_by),
        warning=expiry_warning(reason, deadline),
    )


def _holder_test(reason: Reason) -> IsHolder | None:
    """Return how to tell which tasks in flight have what the reason is about."""
    match reason:
        case AgentFull():
            return lambda attempt: attempt.agent_id == reason.agent_id
        case ProjectConcurrencyReached():
            return lambda attempt: attempt.task.project_id == reason.project_id
        case UpstreamFull():
            return lambda attempt: attempt.task.target == f"{UPSTREAM_PREFIX}{reason.upstream}"
        case InflightCapReached():
            return lambda attempt: not attempt.task.is_call
        case NodesFull():
            return lambda attempt: not attempt.task.is_call and not is_worker(attempt.node_id)
        case WorkersFull():
            return lambda attempt: (
                is_worker(attempt.node_id) and reason.agent_id in ("", attempt.agent_id)
            )
        case FirstOfKind():
            return lambda attempt: (
                attempt.task.project_id == reason.project_id
                and (attempt.task.target or "") == reason.target
            )
        case GateClosed(kind="scope", name=scope) | BudgetShort(scope=scope):
            return lambda attempt: _is_charged(attempt, scope)
        case _:
            return None


def _is_charged(attempt: InFlightAttempt, scope: str) -> bool:
    return not scope or any(is_within(Scope(own), Scope(scope)) for own in attempt.task.scopes)
