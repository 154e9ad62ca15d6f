"""The dispatch state: the dispatcher's picture of everything that waits and runs.

Every change in the store reaches `observe` as a record that carries the whole truth of its attempt,
so a late or repeated one does no harm. `plan` counts what it plans as in flight at once; what the
store refuses is given back. The state may be behind the store, so it only plans: the transaction
that applies the plan enforces the limits. Each class before `DispatchState` keeps one part of the
picture.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import msgspec

from headgate.core.budgets.escrow import NO_AMOUNTS, Amounts
from headgate.core.budgets.ledger import (
    Limit,
    Refused,
    ReserveRequest,
    RoomNeeded,
    Unit,
    exceeded,
)
from headgate.core.budgets.scopes import (
    MAX_REMEMBERED_LENGTH,
    ROOT,
    Scope,
    Tenant,
    ancestors,
    charged_scopes,
)
from headgate.core.call import CALL_PREFIX, CallRecord, CallState
from headgate.core.estimates import (
    DEFAULT_QUANTILE,
    NOTHING,
    Basis,
    Estimates,
    Hold,
    Kind,
    Learned,
    Reserve,
    claimed,
    configured,
    given,
)
from headgate.core.fair_share import ProjectUsage, Turn, UsageRow, is_held
from headgate.core.gates import (
    GateClosure,
    GateKind,
    GatePart,
    GrantPart,
    KindPart,
    RoomPart,
    grant_of,
    kind_part,
    read_kind_part,
    scope_part,
)
from headgate.core.lane_index import Lane, LaneIndex, LaneKind, ProjectLanes, lane_kind, waited
from headgate.core.lifecycle import share_in_usd, share_of_try
from headgate.core.load import MICRO, AdaptiveAlpha, load_score
from headgate.core.money import MicroUsd, Tokens, amount_of
from headgate.core.rate_limits import NoRoom, RateCharge, RateLimit, RateTable
from headgate.core.scheduler import Round, choice_of_one, eligible_turns
from headgate.core.slots.slot import SlotStanding, most_headroom, provider_closure
from headgate.core.snapshot import (
    DEFAULT_TOKENS,
    WORKING,
    Agent,
    AgentState,
    AssignAction,
    LanePolicy,
    Project,
    SchedulerState,
    tokens_charged,
)
from headgate.core.task import (
    DEFAULT_TERMS,
    UPSTREAM_PREFIX,
    WORKER_PREFIX,
    Choice,
    OnExhausted,
    Task,
    TaskRecord,
    TaskStatus,
    Terms,
    kind_of,
    reservation_name,
    sample_of,
    slot_of,
)
from headgate.errors import first_of_kind

PAUSED = "paused by an administrator"
MISSING = "it is not configured; put it back into the file, or cancel the task"


class TargetEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one task of a target costs, as its operator says; None is not said."""

    micro_usd: int | None = None
    tokens: int | None = None

    def amount(self, unit: Unit) -> int | None:
        """Return what is said in one unit."""
        return self.tokens if unit is Unit.TOKENS else self.micro_usd


NO_ESTIMATE = TargetEstimate()


class DispatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to decide, for whom, and with which agents."""

    projects: tuple[Project, ...]
    agents: tuple[Agent, ...] = ()
    rate_limits: tuple[RateLimit, ...] = ()
    lane_policy: LanePolicy = LanePolicy.FEWEST_IN_FLIGHT
    alpha: float = 0.25
    auto_tune: bool = False
    max_wait_ticks: int | None = None
    priority_ageing_seconds: float = 0.0
    default_tokens: int = DEFAULT_TOKENS
    max_inflight: int = 20
    max_per_agent_inflight: int = 10
    max_lag_tokens: int | None = None
    usage_window_hours: int = 24
    pull_targets: frozenset[str] = frozenset()
    paused_targets: tuple[str, ...] = ()
    missing_targets: tuple[str, ...] = ()
    is_paused: bool = False
    set_keys: frozenset[str] | None = None
    """The keys of caps that somebody set, so that a reason can say so; None names no settings."""
    free_targets: frozenset[str] = frozenset()
    target_estimates: Mapping[str, TargetEstimate] = {}
    estimate_quantile: float = DEFAULT_QUANTILE
    reserve: Reserve = Reserve.EXPECTED
    capped_agents: frozenset[str] = frozenset()
    """The agents whose capacity somebody set: their calls count for it as well."""
    is_shared_by_usd: bool = False
    """Whether the shares of projects are counted in micro-dollars, and not in tokens."""
    remote_targets: frozenset[str] = frozenset()
    """The targets whose work goes on without the node that began it."""
    upstream_permits: Mapping[str, int] = {}
    """How many calls may be in flight at an upstream, by the target of its calls."""
    upstream_slots: Mapping[str, tuple[str, ...]] = {}
    """The slots that calls to an upstream may use, by the target of its calls."""
    slot_permits: Mapping[str, int] = {}
    """How many tasks and calls may be in flight with a slot, of those that have such a bound."""

    def new_index(self) -> LaneIndex:
        """Return an index in which nothing waits and nobody works."""
        return LaneIndex(
            policy=self.lane_policy,
            max_wait_ticks=self.max_wait_ticks,
            priority_ageing_seconds=self.priority_ageing_seconds,
            counts_inflight=True,
            pull_targets=self.pull_targets,
            capped_agents=self.capped_agents,
        )

    def pauses(self) -> dict[GatePart, GateClosure]:
        """Return the closures that stand for paused targets, and for those nobody configured.

        Only other settings open them.
        """
        closures = [
            GateClosure(kind="target", name=name, why=PAUSED, cause="operator")
            for name in self.paused_targets
        ]
        closures += [
            GateClosure(kind="target", name=name, why=MISSING, cause="settings")
            for name in self.missing_targets
        ]
        return {closure.part: closure for closure in closures}

    def hold(self, waiting: Waiting, estimates: Estimates) -> Hold:
        """Return what an attempt at a task has to hold."""
        task, terms = waiting.task, waiting.terms
        target = task.target or ""
        said, cost = terms.estimate_micro_usd, terms.cost_micro_usd
        state = claimed if task.has_claims else given
        micro_usd = None if said is None else state(said)
        if cost is not None:
            # It is booked as well, so whoever let it be stated has taken it as given.
            micro_usd = given(cost)
        tokens = None if task.estimate_tokens is None else state(task.estimate_tokens)
        if target in self.free_targets:
            return Hold(micro_usd=micro_usd or NOTHING, tokens=tokens or NOTHING)
        defaults = self.target_estimates.get(target, NO_ESTIMATE)
        return estimates.hold(
            kind_of(task, terms),
            micro_usd=micro_usd,
            tokens=tokens,
            default_micro_usd=configured(defaults.micro_usd),
            default_tokens=configured(defaults.tokens),
            quantile=self.estimate_quantile,
            reserve=self.reserve,
        )


HoldOf = Callable[[], Hold]
"""Says what a call has to hold, by what is known at the moment."""


class KeyChoice(NamedTuple):
    """The slot that a call uses, and the rule that chose it, for people."""

    slot: str
    rule: str


class KeyWait(NamedTuple):
    """Until when a call waits because all open slots are paused for its model, and why."""

    until: float
    why: str


ChooseKey = Callable[[Task, Sequence[SlotStanding], Mapping[str, int], float], KeyChoice | KeyWait]
"""Chooses among the open slots of an upstream for a call, by what is in flight of each."""


class Waiting(msgspec.Struct, frozen=True):
    """A queued task, the conditions of it, and how often it was assigned before.

    A call says itself what it has to hold, by what its request can cost.
    """

    task: Task
    terms: Terms
    attempt: int
    waiting_for: int
    hold: HoldOf | None = None

    def is_after(self, other: Waiting) -> bool:
        """Say whether the task has come further: another attempt, or fewer parents to wait for."""
        if self.attempt != other.attempt:
            return self.attempt > other.attempt
        return self.waiting_for < other.waiting_for


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a plan, with what is to be held; `slot` is set if one was chosen.

    `share_tokens` is what it counts in the share of its project, which is not its budget.
    """

    task: Task
    terms: Terms
    attempt: int
    agent_id: str
    node_id: str
    share_tokens: int
    hold: Hold
    rate_charges: tuple[RateCharge, ...] = ()
    slot: str | None = None
    choice: Choice | None = None
    key_rule: str = ""
    hold_of: HoldOf | None = None

    @property
    def share(self) -> Amounts:
        """What it counts in the share of its project while it runs, in both units of shares."""
        micro_usd = share_in_usd(self.share_tokens, self.hold.micro_usd.amount)
        return Amounts(micro_usd, self.share_tokens)

    @property
    def used_slot(self) -> str | None:
        """The slot that the attempt uses, chosen or named."""
        return self.slot or self.task.slot

    @property
    def charged(self) -> tuple[Scope, ...]:
        """The scopes that its money counts in, root first."""
        return charged_by(self.task.scopes)

    def reservation_id(self, epoch: int) -> str:
        """Return the name of its reservation: a plan that is tried again reserves nothing twice."""
        return reservation_name(self.task.id, self.attempt, epoch)

    def reserve_request(
        self, name: str, *, dispatched: bool, lease_seconds: float | None = None
    ) -> ReserveRequest:
        """Return what the ledger is asked for.

        The ledger of the store needs no lease: the lease of the node is that of the money, since
        whoever settles or recovers the task ends both in one transaction.
        """
        return ReserveRequest(
            reservation_id=name,
            scopes=charged_by(self.task.scopes),
            micro_usd=MicroUsd(self.hold.micro_usd.amount),
            tokens=Tokens(self.hold.tokens.amount),
            lease_seconds=lease_seconds,
            dispatched=dispatched,
            flexible=self.hold.flexible,
        )


def charged_by(scopes: tuple[str, ...]) -> tuple[Scope, ...]:
    """Return the scopes that work in some scopes is charged to, root first."""
    if sum(map(len, scopes)) > MAX_REMEMBERED_LENGTH:
        return charged_scopes(ROOT, [Scope(scope) for scope in scopes])
    return _remembered_charged(scopes)


@lru_cache(maxsize=4_096)
def _remembered_charged(scopes: tuple[str, ...]) -> tuple[Scope, ...]:
    return charged_scopes(ROOT, [Scope(scope) for scope in scopes])


class InFlightAttempt(msgspec.Struct, frozen=True):
    """An attempt in flight: whose it is, where it runs, for how long it may.

    `tokens` is what it counts in the share of its project, `rate_tokens` in rate limits.
    """

    task: Task
    number: int
    agent_id: str
    node_id: str
    tokens: int
    rate_tokens: int = 0
    slot: str | None = None
    attempt_seconds: float | None = None
    reservation_id: str | None = None
    """What its money is held under, once that is known."""

    @property
    def is_at_worker(self) -> bool:
        """Whether a worker of an agent runs it, and not a node of the service."""
        return self.node_id.startswith(WORKER_PREFIX)


class AgentWorkers:
    """The workers of one agent, by how many more tasks each of them takes.

    Which one is next, and how much is free in all, is known without a look at the others: an agent
    may have thousands. Among equals it is the one that has been so for longest.
    """

    __slots__ = ("_by_free", "capacity", "free", "total")

    def __init__(self) -> None:
        self.capacity: dict[str, int] = {}
        self.free = self.total = 0
        self._by_free: dict[int, dict[str, None]] = {}

    def set(self, node_id: str, capacity: int, *, used: int) -> None:
        """Set how many tasks a worker takes."""
        self.drop(node_id, used=used)
        self.capacity[node_id] = capacity
        self.total += capacity
        self._put(node_id, capacity - used)

    def use(self, node_id: str, *, before: int, after: int) -> None:
        """Count the tasks that a worker has."""
        capacity = self.capacity[node_id]
        self._take(node_id, capacity - before)
        self._put(node_id, capacity - after)

    def drop(self, node_id: str, *, used: int) -> None:
        """Forget a worker, if it is known."""
        capacity = self.capacity.pop(node_id, None)
        if capacity is not None:
            self.total -= capacity
            self._take(node_id, capacity - used)

    def next(self) -> str:
        """Return the worker with the most free capacity; there must be one."""
        return next(iter(self._by_free[max(self._by_free)]))

    def _put(self, node_id: str, free: int) -> None:
        self._by_free.setdefault(free, {})[node_id] = None
        self.free += max(0, free)

    def _take(self, node_id: str, free: int) -> None:
        equals = self._by_free[free]
        del equals[node_id]
        if not equals:
            del self._by_free[free]
        self.free -= max(0, free)


class InFlightAttempts:
    """All attempts in flight, with the sums over nodes, projects and slots.

    An attempt counts from its plan until the store says that it is over or never began, so the sums
    are never below the truth. The capacity of a worker serves one agent, and is counted apart from
    that of the nodes. `calls` are in flight as well and count in the sums over projects and slots;
    they are at no node, and whoever goes through the attempts means tasks.
    """

    def __init__(self) -> None:
        self.active: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.capacity: dict[str, int] = {}
        self.by_slot: dict[str, int] = {}
        self._workers: dict[str, AgentWorkers] = {}
        self._agents: dict[str, str] = {}
        self._attempts: dict[str, InFlightAttempt] = {}
        self.calls: dict[str, InFlightAttempt] = {}
        self._used: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._attempts or task_id in self.calls

    def __iter__(self) -> Iterator[InFlightAttempt]:
        return iter(self._attempts.values())

    def all(self) -> Iterator[InFlightAttempt]:
        """Return every attempt, and every call."""
        yield from self._attempts.values()
        yield from self.calls.values()

    def get(self, task_id: str) -> InFlightAttempt | None:
        """Return the attempt that a task or a call is in."""
        return self._attempts.get(task_id) or self.calls.get(task_id)

    def add(self, attempt: InFlightAttempt) -> None:
        """Count an attempt that starts."""
        task, node_id = attempt.task, attempt.node_id
        if task.is_call:
            self.calls[task.id] = attempt
        else:
            self._attempts[task.id] = attempt
            self._use(node_id, 1)
        is_active = task.parent_id is None
        self.active[task.project_id] = self.active.get(task.project_id, 0) + is_active
        self.reserved[task.project_id] = self.reserved.get(task.project_id, 0) + attempt.tokens
        if attempt.slot is not None:
            self.by_slot[attempt.slot] = self.by_slot.get(attempt.slot, 0) + 1

    def name_reservation(self, task_id: str, number: int, reservation_id: str) -> None:
        """Note what the money of an attempt is held under; one that is over is left alone."""
        attempt = self._attempts.get(task_id)
        if attempt is not None and attempt.number == number:
            named = msgspec.structs.replace(attempt, reservation_id=reservation_id)
            self._attempts[task_id] = named

    def remove(self, attempt: InFlightAttempt) -> None:
        """Stop counting an attempt that is over."""
        task, node_id = attempt.task, attempt.node_id
        self.active[task.project_id] -= task.parent_id is None
        self.reserved[task.project_id] -= attempt.tokens
        if attempt.slot is not None:
            self._leave_slot(attempt.slot)
        if task.is_call:
            del self.calls[task.id]
            return
        del self._attempts[task.id]
        self._use(node_id, -1)
        is_known = node_id in self.capacity or node_id in self._agents
        if not self._used[node_id] and not is_known:
            del self._used[node_id]

    def _use(self, node_id: str, tasks: int) -> None:
        before = self._used.get(node_id, 0)
        after = self._used[node_id] = before + tasks
        agent_id = self._agents.get(node_id)
        if agent_id is not None:
            self._workers[agent_id].use(node_id, before=before, after=after)

    def add_tokens(self, task_id: str, tokens: int) -> None:
        """Count what a call of a task in flight used in the share of its project."""
        attempt = self._attempts.get(task_id)
        if attempt is not None:
            self._attempts[task_id] = msgspec.structs.replace(
                attempt, tokens=attempt.tokens + tokens
            )
            self.reserved[attempt.task.project_id] += tokens

    def _leave_slot(self, slot: str) -> None:
        self.by_slot[slot] -= 1
        if not self.by_slot[slot]:
            del self.by_slot[slot]

    def set_node(self, node_id: str, capacity: int) -> None:
        """Set how many tasks a node takes; 0 takes no more, and keeps those it has."""
        self.capacity[node_id] = capacity

    def set_worker(self, node_id: str, capacity: int, *, agent_id: str) -> None:
        """Set how many tasks of its agent a worker takes."""
        self._agents[node_id] = agent_id
        workers = self._workers.setdefault(agent_id, AgentWorkers())
        workers.set(node_id, capacity, used=self._used.get(node_id, 0))

    def agent_of(self, node_id: str) -> str | None:
        """Return the agent that a worker serves; None of a node."""
        return self._agents.get(node_id)

    def drop_node(self, node_id: str) -> None:
        """Forget a node or a worker that is gone."""
        self.capacity.pop(node_id, None)
        agent_id = self._agents.pop(node_id, None)
        if agent_id is not None:
            workers = self._workers[agent_id]
            workers.drop(node_id, used=self._used.get(node_id, 0))
            if not workers.capacity:
                del self._workers[agent_id]
        if not self._used.get(node_id):
            self._used.pop(node_id, None)

    def on_node(self, node_id: str) -> list[str]:
        """Return the tasks that a node has."""
        return [attempt.task.id for attempt in self if attempt.node_id == node_id]

    def on_nodes(self, node_ids: Iterable[str]) -> dict[str, list[str]]:
        """Return the tasks of several nodes, by node."""
        found: dict[str, list[str]] = {node_id: [] for node_id in node_ids}
        for attempt in self:
            if attempt.node_id in found:
                found[attempt.node_id].append(attempt.task.id)
        return found

    def nodes(self) -> set[str]:
        """Return every node that has a task."""
        return {node_id for node_id, used in self._used.items() if used}

    def known_nodes(self) -> set[str]:
        """Return every node and worker with a capacity, used or not."""
        return self.capacity.keys() | self._agents.keys()

    def worker_totals(self) -> tuple[int, int]:
        """Return how many workers there are, and how many tasks they take together."""
        capacity = sum(workers.total for workers in self._workers.values())
        return len(self._agents), capacity

    @property
    def has_workers(self) -> bool:
        """Whether any worker is connected."""
        return bool(self._agents)

    def workers_of(self, agent_id: str) -> dict[str, int]:
        """Return the workers of an agent with their capacity."""
        workers = self._workers.get(agent_id)
        return {} if workers is None else workers.capacity

    def free_at_workers(self, agent_id: str) -> int:
        """Return how many more tasks the workers of an agent take together."""
        workers = self._workers.get(agent_id)
        return 0 if workers is None else workers.free

    def free_by_agent(self) -> dict[str, int]:
        """Return how many more tasks workers take, for each agent that has any."""
        return {agent_id: self.free_at_workers(agent_id) for agent_id in self._workers}

    def total_capacity(self) -> int:
        """Return how many tasks the nodes take together."""
        return sum(self.capacity.values())

    def free_capacity(self) -> int:
        """Return how many more tasks the nodes take together."""
        return sum(max(0, self._free_on(node_id)) for node_id in self.capacity)

    def node_for_next(self, agent_id: str = "") -> str:
        """Return the node, or the worker of an agent, with the most free capacity; there is one."""
        if agent_id:
            return self._workers[agent_id].next()
        return max(self.capacity, key=self._free_on)

    def _free_on(self, node_id: str) -> int:
        return self.capacity[node_id] - self._used.get(node_id, 0)


Key = TypeVar("Key", bound=Hashable)

TIMER_SLACK = 1_024


class Timers(Generic[Key]):
    """Keys by the time at which they fall due; a key has one time.

    The cost depends on what falls due. A timer that was replaced or dropped stays in the heap until
    it comes to the top, or until most of the heap is old and is rebuilt; so memory follows the live
    timers.
    """

    __slots__ = ("_count", "_due", "_heap")

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: Key, at: float) -> None:
        """Let a key fall due at a time, instead of the one it had."""
        if self._due.get(key) == at:
            return
        self._due[key] = at
        self._count += 1
        heappush(self._heap, (at, self._count, key))
        if len(self._heap) > 2 * len(self._due) + TIMER_SLACK:
            self._rebuild()

    def drop(self, key: Key) -> None:
        """Forget a key."""
        self._due.pop(key, None)
        if len(self._heap) > 2 * len(self._due) + TIMER_SLACK:
            self._rebuild()

    def at(self, key: Key) -> float | None:
        """Return when a key falls due."""
        return self._due.get(key)

    def next_at(self) -> float | None:
        """Return when the first key falls due."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at:
                return at
            heappop(self._heap)
        return None

    def pop_due(self, now: float, *, most: int) -> list[Key]:
        """Take out the keys that are due, the earliest first, at most so many."""
        due: list[Key] = []
        while len(due) < most and (at := self.next_at()) is not None and at <= now:
            key = heappop(self._heap)[2]
            del self._due[key]
            due.append(key)
        return due

    def _rebuild(self) -> None:
        self._heap = [(at, number, key) for number, (key, at) in enumerate(self._due.items())]
        self._count = len(self._heap)
        heapify(self._heap)


DEADLINE_GRACE_SECONDS = 5.0
CANCEL_GRACE_SECONDS = 30.0
AGAIN_SECONDS = 1.0
MAX_OVERDUE = 500
MAX_REMEMBERED = 10_000


class WorkerWatch:
    """Keeps the index in line with the free capacity of workers, and times their attempts.

    The service cannot stop what runs at a worker. It tells the worker of a cancel, and the worker
    itself keeps deadlines and the time of an attempt. A worker that does neither has a grace, then
    its attempt is given up. So every attempt at a worker ends: by the worker's report, by the end
    of its lease, or by the end of a grace.
    """

    def __init__(self, index: LaneIndex, in_flight: InFlightAttempts) -> None:
        self.index = index
        self._in_flight = in_flight
        self._overdue: Timers[str] = Timers()
        self._since: dict[str, float] = {}

    def set_node(self, node_id: str, capacity: int, *, agent_id: str, now: float) -> None:
        """Set how many tasks a node takes, or a worker of an agent."""
        if not agent_id:
            self._in_flight.set_node(node_id, capacity)
            return
        if self._in_flight.workers_of(agent_id).get(node_id) == capacity:
            # The news name all workers each time.
            return
        self._in_flight.set_worker(node_id, capacity, agent_id=agent_id)
        self.refresh(agent_id, now)

    def drop_node(self, node_id: str, now: float) -> None:
        """Forget a node or a worker that is gone."""
        agent_id = self._in_flight.agent_of(node_id)
        self._in_flight.drop_node(node_id)
        if agent_id is not None:
            self.refresh(agent_id, now)

    def refresh(self, agent_id: str, now: float) -> None:
        """Have the index know how many more tasks the workers of an agent take."""
        free = self._in_flight.free_at_workers(agent_id)
        if free:
            self._since.pop(agent_id, None)
        elif agent_id not in self._since:
            self._since[agent_id] = now
            if len(self._since) > MAX_REMEMBERED:
                del self._since[next(iter(self._since))]
        self.index.set_workers(agent_id, free)

    def since(self, agent_id: str) -> float | None:
        """Return since when the workers of an agent have had no free capacity, if it had any."""
        return self._since.get(agent_id)

    def start(self, attempt: InFlightAttempt, now: float) -> None:
        """Time an attempt that starts at a worker; others need none of this."""
        if attempt.is_at_worker:
            self._time(attempt, now)
            self.refresh(attempt.agent_id, now)

    def observe(self, attempt: InFlightAttempt, record: TaskRecord, now: float) -> None:
        """Time an attempt by its record, which tells when the worker has begun it."""
        if not attempt.is_at_worker:
            return
        if record.progress.cancel_requested:
            self.cancel(attempt, now)
        elif attempt.attempt_seconds is not None:
            is_running = record.task.status is TaskStatus.RUNNING
            # One that has not begun has all of its time before it.
            began_at = record.progress.started_at if is_running else None
            self._time(attempt, now if began_at is None else began_at)

    def _time(self, attempt: InFlightAttempt, began_at: float) -> None:
        deadline, seconds = attempt.task.deadline, attempt.attempt_seconds
        if seconds is not None:
            over_at = began_at + seconds
            deadline = over_at if deadline is None else min(deadline, over_at)
        if deadline is not None:
            self._overdue.set(attempt.task.id, deadline + DEADLINE_GRACE_SECONDS)

    def cancel(self, attempt: InFlightAttempt, now: float) -> None:
        """Give a worker some time to stop an attempt that somebody wants cancelled."""
        if not attempt.is_at_worker:
            return
        ends_at = now + CANCEL_GRACE_SECONDS
        deadline = attempt.task.deadline
        if deadline is not None:
            ends_at = min(ends_at, deadline + DEADLINE_GRACE_SECONDS)
        known = self._overdue.at(attempt.task.id)
        if known is None or ends_at < known:
            self._overdue.set(attempt.task.id, ends_at)

    def settle(self, attempt: InFlightAttempt, now: float) -> None:
        """Free the capacity of an attempt that is over."""
        if attempt.is_at_worker:
            self._overdue.drop(attempt.task.id)
            self.refresh(attempt.agent_id, now)

    def next_at(self) -> float | None:
        """Return when an attempt has had its time."""
        return self._overdue.next_at()

    def take_overdue(self, now: float) -> list[InFlightAttempt]:
        """Return attempts that had their time; they are due again until they are over."""
        found = []
        for task_id in self._overdue.pop_due(now, most=MAX_OVERDUE):
            attempt = self._in_flight.get(task_id)
            if attempt is not None:
                self._overdue.set(task_id, now + AGAIN_SECONDS)
                found.append(attempt)
        return found


class Closures:
    """Gates closed for a time and gates closed by a standing; keeps the index in line with both.

    A closure for a time ends by itself, or when whoever closed the gate opens it: a budget, a rate
    limit, a pause that a provider asked for. A standing closure says how things are: an
    administrator's pause, a slot without room. Its time is only shown, and only another standing
    ends it. A part is open when neither closes it, and the end of one leaves the other as it is.
    """

    def __init__(self, index: LaneIndex) -> None:
        self.index = index
        self.timed: dict[GatePart, GateClosure] = {}
        self.standing: dict[GatePart, GateClosure] = {}
        self._openings: Timers[GatePart] = Timers()

    def close(self, closure: GateClosure, now: float) -> None:
        """Close a part until its time; one that is closed for longer stays so."""
        part = closure.part
        if closure.until is not None and closure.until <= now:
            return
        known = self.timed.get(part)
        if known is not None and (known.until or 0.0) > (closure.until or 0.0):
            return
        self.timed[part] = closure
        if part not in self.standing:
            self.index.close(closure)
        if closure.until is not None:
            self._openings.set(part, closure.until)

    def open(self, part: GatePart) -> bool:
        """End what closes a part for a time; return whether anything did."""
        self._openings.drop(part)
        if self.timed.pop(part, None) is None:
            return False
        if part not in self.standing:
            self.index.open(part)
        return True

    def set_standing(self, kind: GateKind, closures: Mapping[GatePart, GateClosure]) -> None:
        """Have these and no others of their kind stand, until this is called again."""
        ended = [part for part in self.standing if part.kind == kind and part not in closures]
        for part in ended:
            self.stand(part, None)
        for part, closure in closures.items():
            self.stand(part, closure)

    def stand(self, part: GatePart, closure: GateClosure | None) -> None:
        """Have one closure stand, or none."""
        if closure == self.standing.get(part):
            return
        if closure is not None:
            self.standing[part] = closure
            self.index.close(closure)
            return
        del self.standing[part]
        timed = self.timed.get(part)
        if timed is None:
            self.index.open(part)
        else:
            self.index.close(timed)

    def of(self, part: GatePart) -> list[GateClosure]:
        """Return everything that closes a part, what stands first."""
        found = (self.standing.get(part), self.timed.get(part))
        return [closure for closure in found if closure is not None]

    def all(self) -> list[GateClosure]:
        """Return every closure; a part may have two, what stands first."""
        return [*self.standing.values(), *self.timed.values()]

    def is_closed(self, part: GatePart) -> bool:
        """Say whether anything closes a part."""
        return part in self.standing or part in self.timed

    def shown(self) -> list[GateClosure]:
        """Return one closure for each part that is closed, as the index has it."""
        return list((self.timed | self.standing).values())

    def shown_of(self, parts: Iterable[GatePart]) -> list[GateClosure]:
        """Return the closures of these parts, as the index has them."""
        found = (self.standing.get(part) or self.timed.get(part) for part in parts)
        return [closure for closure in found if closure is not None]

    def recheck_at(self, part: GatePart, at: float) -> None:
        """Have a part fall due at a time or before, though it may open before or stay closed.

        It is no later than it was: others that meet with it now do not prolong the wait of those
        that did before.
        """
        known = self._openings.at(part)
        self._openings.set(part, at if known is None else min(known, at))

    def next_at(self) -> float | None:
        """Return when a part falls due."""
        return self._openings.next_at()

    def pop_due(self, now: float, *, most: int) -> list[GatePart]:
        """Return the parts whose time has come."""
        return self._openings.pop_due(now, most=most)


ROOM_UNKNOWN = "it has not said yet how much it has room for"
ROOM_TAKEN = "it has no room for another task now"
STARTING_SECONDS = 5.0
"""How long a start counts that no target has heard of: one of another node is not told here."""


class TargetRooms:
    """How many more tasks targets could begin that say so, and the gates of those that are full.

    What a target says is out of date as soon as something starts, so each start takes from it until
    it says more. A start takes also from the other targets of its pool, as many as may lose their
    place to it. It counts until the pool knows of it, which what it says may not yet.
    """

    def __init__(self, closures: Closures, in_flight: InFlightAttempts) -> None:
        self._closures = closures
        self._in_flight = in_flight
        self._rooms: dict[str, _TargetRoom] = {}
        self._starting: dict[str, tuple[str, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._rooms)

    def set(
        self,
        target: str,
        free: int | None,
        why: str,
        now: float | None = None,
        *,
        pool: str = "",
        needs: Mapping[str, float] | None = None,
        arrived: Iterable[str] = (),
    ) -> None:
        """Note how many more tasks a target could begin; None if it is not bounded any more.

        `needs` is what one of them takes of a pool that targets share, and `arrived` are the tasks
        that the pool knew before it said this.
        """
        for task_id in arrived:
            self._starting.pop(task_id, None)
        if free is None:
            self._rooms.pop(target, None)
        else:
            room = self._rooms[target] = _TargetRoom(free, why, pool, needs or {})
            free = room.free = free - self._on_the_way(target, room, now)
        if free is None or free > 0:
            self._open(target)
        else:
            self._close(target, now)

    def take(self, target: str, now: float, task_id: str = "") -> bool:
        """Count the start of a task; False if the target has no room, and is closed now."""
        room = self._rooms.get(target)
        if room is None:
            return True
        if room.free <= 0:
            self._close(target, now)
            return False
        room.free -= 1
        if room.pool:
            self._starting[task_id] = target, now
            for other in self._rooms.values():
                if other is not room and other.pool == room.pool:
                    other.free -= _displaced(room.needs, other.needs)
        return True

    def _on_the_way(self, target: str, room: _TargetRoom, now: float | None) -> int:
        """Return how many may lose their place to what its pool may not know of yet."""
        if not room.pool or now is None:
            return 0
        taken = 0
        for task_id, (name, since) in list(self._starting.items()):
            other = self._rooms.get(name)
            if task_id not in self._in_flight or since < now - STARTING_SECONDS or other is None:
                del self._starting[task_id]
            elif name == target:
                taken += 1
            elif other.pool == room.pool:
                taken += _displaced(other.needs, room.needs)
        return taken

    def _close(self, target: str, now: float | None) -> None:
        room = self._rooms.get(target)
        why = (room.why if room is not None else "") or ROOM_TAKEN
        found = self._closures.timed.get(GatePart("target", target))
        since = now if found is None else found.since
        closure = GateClosure(
            kind="target", name=target, why=why, cause="target", by=target, since=since
        )
        if found is None or (found.until is None and found != closure):
            self._closures.close(closure, now or 0.0)

    def _open(self, target: str) -> None:
        found = self._closures.timed.get(GatePart("target", target))
        if found is not None and found.until is None and found.cause == "target":
            self._closures.open(found.part)


class _TargetRoom(msgspec.Struct):
    """What a target said last, less what has started since."""

    free: int
    why: str
    pool: str
    needs: Mapping[str, float]


def _displaced(needs: Mapping[str, float], others: Mapping[str, float]) -> int:
    """Return how many tasks of another target may lose their place to one that starts."""
    shared = (name for name, need in others.items() if need > 0 and name in needs)
    return max((math.ceil(needs[name] / others[name] - 1e-9) for name in shared), default=0)


class SlotGates:
    """The standings of all slots, and the gates of the providers that tasks name.

    The gate of a provider follows from those of its slots, whatever closes them: a used-up quota, a
    pause that the provider asked for, a rate limit, as much in flight as it takes. So a task that
    is planned for a provider can be given a slot.
    """

    def __init__(
        self,
        closures: Closures,
        in_flight: InFlightAttempts,
        upstreams: Mapping[str, Sequence[str]],
        permits: Mapping[str, int],
    ) -> None:
        self.standings: dict[str, SlotStanding] = {}
        self.upstreams = upstreams
        self.permits = permits
        self._closures = closures
        self._in_flight = in_flight
        self._by_provider: dict[str, list[SlotStanding]] = {}
        self._named: set[str] = set()
        self._grants: dict[GrantPart, None] = {}

    def set(self, standings: Sequence[SlotStanding]) -> None:
        """Go by these standings, and no others; their order is that of the file."""
        self.standings = {standing.name: standing for standing in standings}
        self._by_provider = {}
        for standing in self.standings.values():
            self._by_provider.setdefault(standing.provider, []).append(standing)
        for target, slots in self.upstreams.items():
            known = [self.standings[name] for name in slots if name in self.standings]
            self._by_provider[target] = known
        closures = [self._standing_closure(one) for one in self.standings.values()]
        self._closures.set_standing("slot", {one.part: one for one in closures if one is not None})
        for provider in sorted(self._named):
            self._refresh(provider)
        for grant in self._grants:
            self._refresh_grant(grant)

    def track(self, task: Task) -> None:
        """Keep the gates of the provider that a task names, and of what its project may use."""
        if task.slot is None and task.provider is None:
            return
        if task.is_call and task.provider is None:
            # The key of a client, which no settings restrict; there may be any number of them.
            return
        grant = grant_of(task)
        if grant not in self._grants:
            self._grants[grant] = None
            self._refresh_grant(grant)
        provider = grant.provider
        if provider and provider not in self._named:
            self._named.add(provider)
            self._refresh(provider)

    def is_full(self, slot: str) -> bool:
        """Tell whether as much is in flight with a slot as it takes at a time."""
        most = self.permits.get(slot)
        return most is not None and self._in_flight.by_slot.get(slot, 0) >= most

    def count(self, slot: str | None) -> None:
        """Close a slot that is full, and open one that is not, after something began or ended."""
        if slot is None or slot not in self.permits or slot not in self.standings:
            return
        part, closure = _part(slot), self._standing_closure(self.standings[slot])
        if closure != self._closures.standing.get(part):
            self._closures.stand(part, closure)
            self.changed(slot)

    def _standing_closure(self, standing: SlotStanding) -> GateClosure | None:
        if standing.closure is not None or not self.is_full(standing.name):
            return standing.closure
        key = f"slots.{standing.name}.max_inflight = {self.permits[standing.name]}"
        why = f"as much is in flight with it as it takes at a time ({key})"
        return GateClosure(kind="slot", name=standing.name, why=why, cause="settings")

    def changed(self, slot: str) -> None:
        """Look again at the provider of a slot that was closed or opened."""
        standing = self.standings.get(slot)
        if standing is None:
            return
        upstreams = (target for target, slots in self.upstreams.items() if slot in slots)
        for provider in (standing.provider, *upstreams):
            if provider in self._named:
                self._refresh(provider)
                for grant in self._grants:
                    if grant.provider == provider:
                        self._refresh_grant(grant)

    def choose(self, provider: str, project_id: str, *, without: Collection[str]) -> str | None:
        """Return the open slot of a provider with the most headroom that a project may use."""
        return most_headroom(
            [one for one in self._by_provider.get(provider, ()) if one.is_for(project_id)],
            is_closed=lambda slot: self._closures.is_closed(_part(slot)),
            in_flight=self._in_flight.by_slot,
            without=without,
        )

    def open_slots(
        self,
        provider: str,
        project_id: str,
        *,
        without: Collection[str],
        with_full: bool = False,
    ) -> list[SlotStanding]:
        """Return the open slots of an upstream that a project may use, in their order.

        With `with_full` those count as open that only wait for something of theirs to end.
        """
        return [
            one
            for one in self._by_provider.get(provider, ())
            if one.is_for(project_id)
            and one.name not in without
            and not self._is_closed(one, with_full=with_full)
        ]

    def unusable(
        self, provider: str, project_id: str, *, slot: str | None = None
    ) -> list[GateClosure]:
        """Return what closes the slots that a project may use, if none comes back by itself.

        With a `slot` it is about that one alone.
        """
        found = []
        for one in self._by_provider.get(provider, ()):
            if not one.is_for(project_id) or slot not in (None, one.name):
                continue
            timed = self._closures.timed.get(_part(one.name))
            if timed is not None and timed.cause == "credit":
                found.append(timed)
            elif not one.is_unusable:
                return []
            elif one.closure is not None:
                found.append(one.closure)
        return found

    def _is_closed(self, standing: SlotStanding, *, with_full: bool) -> bool:
        part = _part(standing.name)
        if with_full and standing.closure is None:
            return part in self._closures.timed
        return self._closures.is_closed(part)

    def _refresh(self, provider: str) -> None:
        standings = self._by_provider.get(provider, ())
        closure = provider_closure(provider, standings, self._closures_of)
        self._closures.stand(GatePart("provider", provider), closure)

    def _refresh_grant(self, grant: GrantPart) -> None:
        """Close what a project may not use, or of which nothing that it may use is open."""
        why, until = "", None
        project_id = grant.project_id
        if grant.slot:
            standing = self.standings.get(grant.slot)
            if standing is not None and not standing.is_for(project_id):
                why = not_granted(f"slot {grant.slot}", project_id)
        else:
            found = self._by_provider.get(grant.provider, ())
            own = [one for one in found if one.is_for(project_id)]
            if not own and found:
                why = not_granted(f"any slot of {grant.provider}", project_id)
            elif len(own) < len(found):
                closure = provider_closure(grant.provider, own, self._closures_of)
                why, until = ("", None) if closure is None else (closure.why, closure.until)
        closed = (
            GateClosure(kind="grant", name=grant.part.name, until=until, why=why, cause="settings")
            if why
            else None
        )
        self._closures.stand(grant.part, closed)

    def _closures_of(self, slot: str) -> list[GateClosure]:
        return self._closures.of(_part(slot))


def not_granted(what: str, project_id: str) -> str:
    """Say that a project may not use something, and what to do about it."""
    advice = "name it in projects of a [[slots]] entry, or cancel the task"
    return f"project {project_id} may not use {what}; {advice}"


def _part(slot: str) -> GatePart:
    return GatePart("slot", slot)


MAX_SET_ASIDE = 64
"""How many tasks are tried one by one against a scope with a little room, before it is closed.

Projects share them: each has an equal part, and one at least.
"""

ASK_AGAIN_SECONDS = 5.0
"""When money that others have reserved is asked for again: nobody says that they gave it back."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a refused task: end it with an error, close the gate, or set it aside.

    Without any of them the task is set aside.
    """

    error: str | None = None
    closure: GateClosure | None = None


class _Aside(NamedTuple):
    """A task that was set aside, by which refusal, and how much would have to be left for it."""

    task: Task
    refused: Refused
    needed: int

    def behind(self, waiting: Waiting, hold: Hold) -> _Aside | None:
        """Return another one as set aside behind this one, if what refused this one refuses it."""
        refused, estimate = self.refused, hold.estimate(self.refused.unit)
        if refused.kind:
            is_too_many = 0 < estimate.at_once <= refused.live
            is_alike = hold.waiting_kind == refused.kind
            return self._replace(task=waiting.task) if is_alike and is_too_many else None
        needed = _room_needed(hold, refused)
        # Who will not wait, or needs more than there can be, is to be refused at once.
        is_willing = waiting.terms.on_exhausted is OnExhausted.WAIT
        if not is_willing or needed.now < self.needed or needed.alone > refused.limit:
            return None
        asked = msgspec.structs.replace(refused, requested=estimate.amount or needed.now)
        return _Aside(waiting.task, asked, needed.now)


def _room_needed(hold: Hold, refused: Refused) -> RoomNeeded:
    return hold.room_needed(refused.unit, refused.limit, is_shared=refused.reserved > 0)


class Settled(NamedTuple):
    """What the ledger has settled: in which scopes, of which kinds, and whether that left room."""

    scopes: tuple[str, ...]
    kinds: Collection[str] = ()
    has_freed: bool = True


class BudgetParking:
    """Tasks that a budget refused: which wait, behind what, and which can never start.

    A scope without any room is closed whole. A scope with some room may still take smaller tasks,
    so only the refused task is set aside; otherwise one expensive task would block many cheap ones.
    Once a project has as many set aside as it may, the scope is closed for that project alone: what
    one cannot have keeps out no other. All of them come back when the scope may have room: when its
    window frees some, when an attempt that was charged to it ends, and every few seconds while
    somebody else may give money back. A task that asked to be refused does not wait behind a closed
    scope: it is refused by what the scope said last.

    A kind of work of which too little is known waits in the same way, until one of it has ended.
    """

    def __init__(self) -> None:
        self._aside: dict[GatePart, dict[str, _Aside]] = {}
        self._aside_of: dict[GatePart, Counter[str]] = {}
        """How many of them each project has."""

        self._part_of: dict[str, GatePart] = {}
        self._closed: dict[GatePart, dict[GatePart, Refused]] = {}
        self._refused_at: dict[GatePart, float] = {}
        self._unwilling: dict[str, dict[str, None]] = {}
        self.refusals: dict[GatePart, Refused] = {}

    def judge(
        self,
        task: Task,
        refused: Refused,
        terms: Terms,
        *,
        hold: Hold | None = None,
        now: float | None = None,
    ) -> Verdict:
        """Decide what becomes of a task that was refused, by a scope or for want of an estimate.

        Without `hold` it asked for exactly what it was refused.
        """
        part = refusing_part(task, refused)
        is_kind = part.kind == "kind"
        is_willing = is_kind or terms.on_exhausted is OnExhausted.WAIT
        if not refused.may_clear or not is_willing:
            return Verdict(error=refusal_text(task, refused))
        self.refusals[part] = refused
        if now is not None:
            self._refused_at[part] = now
        has_room = is_kind or refused.spent + refused.reserved + refused.overrun < refused.limit
        # A call is of the kind of its model, and other calls behind its gates are not. One of a
        # task stands behind no budget: others of its task may need less than the task has left.
        is_apart = (is_kind and task.is_call) or task.parent_id is not None
        if is_apart or (has_room and self._has_place(part, task.project_id)):
            needed = refused.requested if hold is None else _room_needed(hold, refused).now
            self._set_aside(part, _Aside(task, refused, needed))
            return Verdict()
        is_for_all = is_kind or not has_room
        closed = part if is_for_all else RoomPart(task.project_id, refused.scope).part
        self._closed.setdefault(part, {})[closed] = refused
        closure = closure_of(closed, refused)
        return Verdict(closure=msgspec.structs.replace(closure, task_id=task.id, since=now))

    def _has_place(self, part: GatePart, project_id: str) -> bool:
        """Tell whether another task of a project may be set aside for a scope or a kind."""
        aside = self._aside_of.get(part)
        if aside is None:
            return True
        projects = len(aside) + (project_id not in aside)
        return aside[project_id] < max(1, MAX_SET_ASIDE // projects)

    def refuses(self, waiting: Waiting, hold: Callable[[Waiting], Hold]) -> str | None:
        """Return why a task that will not wait cannot start; None if it may be asked for."""
        if waiting.terms.on_exhausted is not OnExhausted.REJECT:
            return None
        reached = _reached(waiting.task.scopes)
        for scope in reached:
            self._unwilling.setdefault(scope, {})[waiting.task.id] = None
        for scope in sorted(reached):
            refused = self.refusal_behind(scope, waiting.task.project_id)
            if refused is None:
                continue
            used = refused.spent + refused.reserved + refused.overrun
            needed = _room_needed(hold(waiting), refused).now
            if used + needed > refused.limit:
                refused = msgspec.structs.replace(refused, requested=needed)
                return refusal_text(waiting.task, refused)
        return None

    def joins(
        self,
        waiting: Waiting,
        hold: Hold,
        goes_before: Callable[[Task, Task], bool],
    ) -> GatePart | None:
        """Set a task aside that would overtake others, and return behind what.

        It needs what one of them was refused, or more, and does not go before that one in their
        lane. The ledger may have got money back whose end is not heard of here, and would give it
        to whoever asks first; the others are offered again, in order, as soon as it is.
        """
        task = waiting.task
        if not self.refusals or not task.is_bound_by_budgets:
            return None
        for part in self._parts_of(task, hold.waiting_kind if task.is_call else ""):
            for one in self._aside.get(part, {}).values():
                aside = one.behind(waiting, hold)
                if aside is None or goes_before(task, one.task):
                    continue
                if not self._has_place(part, task.project_id):
                    break
                self._set_aside(part, aside)
                return part
        return None

    def is_old(self, part: GatePart, now: float) -> bool:
        """Tell whether a refusal is so old that others may have given money back unheard."""
        return now - self._refused_at.get(part, now) >= ASK_AGAIN_SECONDS

    def _set_aside(self, part: GatePart, aside: _Aside) -> None:
        others = self._aside.setdefault(part, {})
        if aside.task.id not in others:
            self._aside_of.setdefault(part, Counter())[aside.task.project_id] += 1
        others[aside.task.id] = aside
        self._part_of[aside.task.id] = part

    def _parts_of(self, task: Task, kind: str) -> Iterator[GatePart]:
        for scope in sorted(_reached(task.scopes)):
            yield GatePart("scope", scope)
            for unit in Unit:
                yield KindPart(task.project_id, task.target or "", unit.value, scope, kind).part

    def unwilling(self, scope: str) -> list[str]:
        """Return the tasks behind a scope that will not wait for it."""
        return list(self._unwilling.get(scope, ()))

    def closed(self, part: GatePart) -> Iterable[GatePart]:
        """Return what is closed for a scope or a kind: itself, or what it has for one project."""
        return self._closed.get(part, {}).keys()

    def refusal_behind(self, scope: str, project_id: str) -> Refused | None:
        """Return what a scope said last that is closed for a project; None if it is open to it."""
        part = GatePart("scope", scope)
        closed = self._closed.get(part)
        if closed is None:
            return None
        is_for_all = part in closed
        return self.refusals[part] if is_for_all else closed.get(RoomPart(project_id, scope).part)

    def leave(self, part: GatePart) -> list[str]:
        """Take out the tasks that were set aside for a scope or a kind."""
        self.refusals.pop(part, None)
        self._refused_at.pop(part, None)
        self._closed.pop(part, None)
        self._aside_of.pop(part, None)
        tasks = list(self._aside.pop(part, ()))
        for task_id in tasks:
            self._part_of.pop(task_id, None)
        return tasks

    def drop(self, task_id: str, scopes: Iterable[str]) -> None:
        """Forget a task that has ended, or waits no more."""
        self._forget_unwilling(task_id, scopes)
        part = self._part_of.pop(task_id, None)
        if part is None:
            return
        aside, counts = self._aside[part], self._aside_of[part]
        project_id = aside.pop(task_id).task.project_id
        counts[project_id] -= 1
        if not counts[project_id]:
            del counts[project_id]
        if not aside:
            del self._aside[part], self._aside_of[part]
            if part not in self._closed:
                del self.refusals[part]
                self._refused_at.pop(part, None)

    def set_aside(self, part: GatePart) -> int:
        """Return how many tasks were set aside for a scope or a kind."""
        return len(self._aside.get(part, ()))

    def all_aside(self) -> Iterable[str]:
        """Return the tasks that were set aside one by one, for any reason."""
        return self._part_of.keys()

    def refusal_of(self, task_id: str) -> Refused | None:
        """Return what a task that was set aside was refused by."""
        part = self._part_of.get(task_id)
        return None if part is None else self._aside[part][task_id].refused

    def wake(self, settled: Settled) -> list[GatePart]:
        """Return in what there may be room now.

        A scope without a window is asked again in any case: its tasks wait only for what is in
        flight, and are refused for good when nothing is. Of a kind one more is known now, whatever
        its action.
        """
        if not self.refusals:
            return []
        scopes = [GatePart("scope", scope) for scope in sorted(_reached(settled.scopes))]
        refusing = [part for part in scopes if part in self.refusals]
        has_freed = settled.has_freed
        found = [part for part in refusing if has_freed or self.refusals[part].resets_at is None]
        kinds = {_without_action(kind) for kind in settled.kinds if kind}
        return found + [
            part
            for part, refused in self.refusals.items()
            if part.kind == "kind" and _without_action(refused.kind) in kinds
        ]

    def _forget_unwilling(self, task_id: str, scopes: Iterable[str]) -> None:
        if not self._unwilling:
            return
        for scope in _reached(scopes) & self._unwilling.keys():
            tasks = self._unwilling[scope]
            tasks.pop(task_id, None)
            if not tasks:
                del self._unwilling[scope]


def refusal_text(task: Task, refused: Refused) -> str:
    """Say why a task is refused, to everybody who is told of it.

    One that a tenant submitted has the figures of its own budgets alone. That of a call has all:
    whoever shows it leaves out what the reader may not see.
    """
    error = exceeded(refused)
    if task.id.startswith(CALL_PREFIX):
        return error.of_call()
    tenant = Tenant(project_id=task.project_id, agent_id=task.agent_id)
    is_told = not task.has_claims or tenant.may_charge(refused.scope)
    return str(error) if is_told else error.outline


def refusing_part(task: Task, refused: Refused) -> GatePart:
    """Return what stands in the way of a refused task: a scope, or others of its kind."""
    return kind_part(task, refused) if refused.kind else GatePart("scope", refused.scope)


def _without_action(kind: str) -> str:
    return kind.rpartition("/")[0]


def _is_kind_of(part: GatePart, task: Task) -> bool:
    if part.kind != "kind":
        return False
    kind = read_kind_part(part.name)
    return kind[:2] == (task.project_id, task.target or "")


def _reached(scopes: Iterable[str]) -> set[str]:
    return {charged for scope in (ROOT, *scopes) for charged in ancestors(Scope(scope))}


def ask_again_at(refused: Refused, now: float) -> float | None:
    """Return when a scope that refused is asked again by itself; None is never."""
    times = [] if refused.resets_at is None else [float(refused.resets_at)]
    # The others of a kind may have ended before this refusal was heard of.
    if refused.reserved or refused.kind:
        times.append(now + ASK_AGAIN_SECONDS)
    return min(times, default=None)


def closure_of(part: GatePart, refused: Refused) -> GateClosure:
    """Return the closed gate of a scope, of what it has for one project, or of a kind."""
    if refused.kind:
        why = first_of_kind(refused.live, refused.unit.value)
        return GateClosure(
            kind="kind", name=part.name, why=why, cause="budget", by=refused.scope or "root"
        )
    used = refused.spent + refused.reserved + refused.overrun
    unit = refused.unit.value
    most, asked = amount_of(refused.limit, unit), amount_of(refused.requested, unit)
    why = f"{amount_of(used, unit)} of {most} are used or reserved, and {asked} asked for"
    return GateClosure(
        kind=part.kind,
        name=part.name,
        until=refused.resets_at,
        why=f"{why}; it is open to other projects" if part.kind == "room" else why,
        cause="budget",
        by=refused.scope or "root",
    )


MAX_KNOWN_AGENTS = 10_000


class MadeAgents:
    """Agents that nobody declared: their first task makes them, and idle ones are dropped.

    Clients name them, so their number has no bound of its own. Beyond `MAX_KNOWN_AGENTS` those with
    nothing queued and nothing in flight are dropped; the next task makes them again.
    """

    def __init__(self, index: LaneIndex, in_flight: InFlightAttempts, *, capacity: int) -> None:
        self.index = index
        self._in_flight = in_flight
        self._capacity = capacity
        self._made: dict[str, None] = {}
        self._most = MAX_KNOWN_AGENTS

    def __len__(self) -> int:
        return len(self._made)

    def make(self, agent_id: str) -> Agent:
        """Return the agent that a task which names it would bring about."""
        return Agent(id=agent_id, capacity=self._capacity, accepts_open=False)

    def set_capacity(self, capacity: int) -> None:
        """Give all of them, and those to come, this capacity; what is in flight stays."""
        self._capacity = capacity
        for agent_id in self._made:
            self.index.set_agent(self.make(agent_id), inflight=self._inflight(agent_id))

    def declare(self, agent_id: str) -> None:
        """Leave an agent to the configuration, which names it from now on."""
        self._made.pop(agent_id, None)

    def take_over(self, agent_id: str) -> None:
        """Go on with an agent that the configuration names no more, as long as it has work."""
        inflight = self._inflight(agent_id)
        if inflight or self.index.has_own_lane(agent_id):
            self._made[agent_id] = None
            self.index.set_agent(self.make(agent_id), inflight=inflight)
        else:
            self.index.remove_agent(agent_id)

    def _inflight(self, agent_id: str) -> int:
        entry = self.index.agents.get(agent_id)
        return 0 if entry is None else entry.inflight

    def ensure(self, agent_id: str | None) -> None:
        """Make the agent that a task names, unless it is there; it takes only its own tasks."""
        if agent_id is None or self.index.agents.get(agent_id) is not None:
            return
        self.index.set_agent(self.make(agent_id))
        self._made[agent_id] = None
        if len(self._made) > self._most:
            self._forget_idle(agent_id)
            # Where all of them are busy, looking again at each new one would take ever longer.
            self._most = max(MAX_KNOWN_AGENTS, 2 * len(self._made))

    def _forget_idle(self, needed: str) -> None:
        busy = {attempt.agent_id for attempt in self._in_flight.all()} | {needed}
        for agent_id in list(self._made):
            if agent_id not in busy and not self.index.has_own_lane(agent_id):
                del self._made[agent_id]
                self.index.remove_agent(agent_id)


# Statistics of lanes. Their cost grows with the lanes and gates that have work, never with the
# tasks behind them.

MAX_GATES_COUNTED = 2_000
MAX_ASIDE_READ = 2_000
_STOPPED_AGENTS = (AgentState.PAUSED, AgentState.ERROR)


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """A lane that has tasks; an `agent_id` of "" is the open one.

    Tasks that wait for nothing but free capacity are `ready`: none where a gate, a pause or the end
    of the project stops them. `load` compares it with the other lanes of its project that have
    ready tasks; None is none of its own. `longest_wait_seconds` is None where waits are not kept.
    """

    project_id: str
    agent_id: str
    ready: int = 0
    longest_wait_seconds: float | None = None
    load: float | None = None
    lacking_workers: int = 0
    """Those that are ready, and those that only lack a free worker of their agent."""


class _Stopped:
    """The lanes that start nothing, whatever they have, because somebody wants it so."""

    def __init__(self, settings: DispatchSettings) -> None:
        self._is_paused = settings.is_paused
        self._projects = {one.id for one in settings.projects if one.status not in WORKING}
        self._agents = {one.id for one in settings.agents if one.state in _STOPPED_AGENTS}

    def __contains__(self, lane: Lane) -> bool:
        is_stopped = lane.project_id in self._projects or lane.owner in self._agents
        return self._is_paused or is_stopped


def _lane_loads(
    project: ProjectLanes, stopped: _Stopped, *, tick: int, alpha: float
) -> list[tuple[Lane, float | None]]:
    lanes = [lane for lane in project.lanes.values() if lane.kind is LaneKind.TASKS]
    waits = {lane: max(0, tick - lane.oldest_tick()) for lane in lanes}
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


def _stats_of(
    lane: Lane, load: float | None, now: float, aside: float | None, *, is_stopped: bool
) -> LaneStats:
    waits = [wait for wait in (lane.longest_wait(now), aside) if wait is not None]
    return LaneStats(
        project_id=lane.project_id,
        agent_id=lane.owner or "",
        # A lane that could start something has a load, be it 0.
        ready=0 if load is None else lane.ready,
        longest_wait_seconds=max(waits, default=None),
        load=load,
        lacking_workers=0 if is_stopped else lane.lacking_workers(),
    )


IN_FLIGHT = (TaskStatus.ASSIGNED, TaskStatus.RUNNING)
MAX_DUE = 1_000
ASIDE_SECONDS = 60.0

_ORDERS = (
    *("lane_policy", "max_wait_ticks", "priority_ageing_seconds", "pull_targets"),
    "capped_agents",
)
"""What lanes and gates are built by: with another one, all of them are built again."""

_ESTIMATING = ("free_targets", "target_estimates", "estimate_quantile", "reserve")
"""What decides how much a task holds: with another one, what was refused is asked for again."""

MAX_REBUILT = 2_000
"""How many tasks may wait for all lanes to be built again at once; more would take too long."""


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """What fell due: deadlines that passed, tasks that can never start, attempts out of time.

    `expired` are queued tasks, `rejected` has the reason of each, `overdue` are at workers.
    """

    expired: list[str]
    rejected: dict[str, str]
    overdue: list[InFlightAttempt]


class DispatchState:
    """The picture; every method takes the time that it is to be judged at."""

    def __init__(self, settings: DispatchSettings) -> None:
        self.settings = settings
        self._projects = {project.id: project for project in settings.projects}
        self.tick = 0
        self.waiting: dict[str, Waiting] = {}
        self.in_flight = InFlightAttempts()
        self.rate_closed: dict[GatePart, GateClosure] = {}
        self.limited: dict[str, NoRoom] = {}
        self.too_large: dict[str, NoRoom] = {}
        self.key_waits: dict[str, KeyWait] = {}
        self.usage = ProjectUsage(window_hours=settings.usage_window_hours)
        self.rates = RateTable(settings.rate_limits)
        self.parking = BudgetParking()
        self.estimates = Estimates()
        self.tuning = _tuning(settings)
        self.forgiven_now: dict[str, int] = {}
        self.present: list[str] = []
        self.hopeless: dict[str, str] = {}
        self.waiting_calls = 0
        self.choose_key: ChooseKey | None = None
        self._starts: Timers[str] = Timers()
        self._deadlines: Timers[str] = Timers()
        self._lifts: Timers[str] = Timers()
        self.index = settings.new_index()
        self.closures = Closures(self.index)
        self.rooms = TargetRooms(self.closures, self.in_flight)
        for target in sorted(settings.remote_targets):
            self.rooms.set(target, 0, ROOM_UNKNOWN)
        self.slots = SlotGates(
            self.closures, self.in_flight, settings.upstream_slots, settings.slot_permits
        )
        self.workers = WorkerWatch(self.index, self.in_flight)
        for agent in settings.agents:
            self.index.set_agent(agent)
        capacity = settings.max_per_agent_inflight
        self.made_agents = MadeAgents(self.index, self.in_flight, capacity=capacity)
        self.set_pauses(settings.pauses())
        self._set_upstreams({})

    @property
    def waiting_tasks(self) -> int:
        """How many tasks wait; calls are not counted."""
        return len(self.waiting) - self.waiting_calls

    @property
    def alpha(self) -> float:
        """How much depth counts beside age in the load of a lane, as of now."""
        return self.settings.alpha if self.tuning is None else self.tuning.alpha

    def load(
        self,
        records: Iterable[TaskRecord],
        *,
        usage: Iterable[UsageRow],
        rate_counts: Iterable[RateCharge],
        closures: Iterable[GateClosure],
        lane_served: dict[str, dict[str, float]],
        tick: int,
        now: float,
        learned: Iterable[tuple[Kind, Learned]] = (),
    ) -> None:
        """Start from what the store has; only on a new state."""
        self.estimates = Estimates(learned)
        window_hours = self.settings.usage_window_hours
        if self.settings.is_shared_by_usd:
            usage = [msgspec.structs.replace(row, tokens=row.micro_usd) for row in usage]
        self.usage = ProjectUsage(window_hours=window_hours, rows=usage)
        self.rates.load(rate_counts)
        self.tick = tick
        self.index.remember_served(lane_served)
        for closure in closures:
            self.close(closure, now)
        self.load_more(records, now)

    def load_more(self, records: Iterable[TaskRecord], now: float) -> None:
        """Go on loading, where all of it at once would take too long; before any `observe`."""
        for record in records:
            if record.task.status in IN_FLIGHT:
                self._load_attempt(record, now)
            else:
                self.observe(record, now)

    def _load_attempt(self, record: TaskRecord, now: float) -> None:
        task, progress = record.task, record.progress
        agent_id = record.agent_id or task.agent_id or ""
        self.made_agents.ensure(agent_id)
        self.index.take_permit(agent_id)
        attempt = InFlightAttempt(
            task,
            progress.attempt,
            agent_id,
            progress.node_id or "",
            self._in_share(progress.share_tokens, progress.reserved_micro_usd),
            progress.share_tokens,
            slot_of(record),
            record.terms.attempt_seconds,
            progress.reservation_id,
        )
        self.in_flight.add(attempt)
        self.slots.count(attempt.slot)
        self.workers.start(attempt, now)
        self.workers.observe(attempt, record, now)

    # Records that changed: what waits is queued, what is over gives back what it took.

    def observe(self, record: TaskRecord, now: float) -> None:
        """Bring the picture in line with a record; one from before what is known changes nothing.

        Only loading finds attempts that this state has not planned. Later a record of an attempt
        that it does not know is an old one, of an attempt that has ended since.
        """
        task_id, status = record.task.id, record.task.status
        attempt = self.in_flight.get(task_id)
        if attempt is not None and not self._ends(attempt, record, now):
            return
        if status is TaskStatus.QUEUED:
            self._queue(record, now)
        elif status not in IN_FLIGHT:
            self._unqueue(task_id)

    def observe_early(self, task: Task, terms: Terms, now: float) -> bool:
        """Take a task as it will most likely be stored; False if others could start, too."""
        if self.index.offers.has_ready or task.id in self.waiting:
            return False
        if terms.depends_on or task.not_before is not None:
            return False
        queued = msgspec.structs.replace(task, status=TaskStatus.QUEUED, enqueued_tick=self.tick)
        self.observe(TaskRecord(task=queued, terms=terms, agent_id=task.agent_id), now)
        return True

    def observe_call(self, record: TaskRecord, hold: HoldOf, now: float) -> None:
        """Take a call that waits; it is taken out again with `forget`, or by its end."""
        self._queue(record, now, hold)

    def start_call(
        self, task: Task, hold: HoldOf, now: float, *, attempt: int = 0
    ) -> Planned | None:
        """Plan a call at once that nothing else competes with; None if it is to wait for a round.

        It is what `observe_call` and `plan` come to where nothing is ready, so that nobody has to
        be compared with anybody: most calls of a service that keeps up with its work.
        """
        settings = self.settings
        if settings.is_paused or not self._has_to_itself(task):
            return None
        waiting = Waiting(task, DEFAULT_TERMS, attempt, 0, hold)
        if task.provider is not None:
            self.slots.track(task)
        self.made_agents.ensure(task.agent_id)
        taken = self.index.take_alone(task, tick=self.tick)
        if taken is None:
            return None
        agent, waiting_since = taken
        if settings.max_lag_tokens is not None:
            # Whoever is alone is owed nothing that could be forgiven.
            self.present = [task.project_id]
        choice = choice_of_one(
            settings.lane_policy,
            tick=self.tick,
            waiting_since=waiting_since,
            max_wait_ticks=settings.max_wait_ticks,
        )
        self.waiting[task.id] = waiting
        planned = self._plan_attempt(waiting, agent.agent.id, choice, now)
        if planned is None:
            # A rate limit, a full slot or a budget keeps it: it waits here by now.
            self.waiting_calls += 1
        else:
            del self.waiting[task.id]
        return planned

    def _has_to_itself(self, task: Task) -> bool:
        """Tell whether a task would be the only one to be ready, in a project that may start it."""
        index, project_id = self.index, task.project_id
        offers = index.offers
        if offers.has_ready or offers.are_nodes_shut or offers.are_tasks_shut:
            return False
        if project_id in index.projects or task.id in self.waiting:
            return False
        project = self._projects.get(project_id)
        if project is None or project.status not in WORKING:
            return False
        if task.parent_id is not None:
            # Its task counts for the project already.
            return True
        if project.max_concurrent_agents is None and project.budget_limit is None:
            return True
        active = self.in_flight.active.get(project_id, 0)
        used = self.usage.tokens.get(project_id, 0) + self.in_flight.reserved.get(project_id, 0)
        return not is_held(project, active=active, used=used)

    def load_call(self, attempt: InFlightAttempt) -> None:
        """Count a call that an earlier state has started."""
        task = attempt.task
        self.index.take_permit(attempt.agent_id, lane_kind(task))
        self.index.take_upstream(task.target or "")
        self.in_flight.add(attempt)
        self.slots.count(attempt.slot)

    def load_call_elsewhere(self, record: CallRecord) -> None:
        """Count a call that runs at another node, which has planned it before this one led."""
        task = Task(
            id=record.id,
            project_id=record.project_id,
            agent_id=record.agent_id,
            priority=record.priority,
            created_at=record.created_at,
            scopes=record.scopes,
            target=UPSTREAM_PREFIX + record.upstream,
            slot=record.slot,
            is_call=True,
            parent_id=record.task_id,
        )
        tokens = record.reserved_tokens
        counted = self._in_share(tokens, record.reserved_micro_usd)
        self.load_call(InFlightAttempt(task, 1, record.agent_id, "", counted, tokens, record.slot))

    def end_call_elsewhere(self, call_id: str, record: CallRecord | None, now: float) -> None:
        """Free what a call had that ran at another node; without a record its node is gone."""
        attempt = self.in_flight.calls.get(call_id)
        if record is None or attempt is None:
            self.end_call(call_id, now, tokens=0, share=NO_AMOUNTS, is_done=False)
            return
        used = Amounts(record.micro_usd or 0, record.tokens or 0)
        # What a call of a task uses counts for the task alone.
        charged = attempt.tokens if attempt.task.parent_id is None else 0
        share = share_of_try(used, Amounts(charged, charged), record.running_seconds)
        is_done = record.state is CallState.DONE
        self.end_call(call_id, now, tokens=used.tokens, share=share, is_done=is_done)
        self.settled(Settled(record.scopes, (record.kind,)))

    def withdraw_call(self, call_id: str, now: float, share: Amounts = NO_AMOUNTS) -> None:
        """Forget a call as if it had not come: it went away, or goes elsewhere.

        What it has tried counts in the share of its project all the same.
        """
        attempt = self.in_flight.calls.get(call_id)
        if attempt is None:
            self._unqueue(call_id)
        else:
            self._take_back(attempt, now)
            self.usage.add(attempt.task.project_id, now, tokens=self._of_share(share))

    def end_call(
        self,
        call_id: str,
        now: float,
        *,
        tokens: int,
        share: Amounts,
        is_done: bool = True,
    ) -> None:
        """Free what a call had, and count what it used; one that is not in flight is forgotten.

        What a call of a task counts in the `share` of its project comes into that with the end of
        the task. Its money is `settled` later.
        """
        attempt = self.in_flight.calls.get(call_id)
        if attempt is None:
            self._unqueue(call_id)
            return
        self._free_capacity(attempt, now)
        self.tick += 1
        task = attempt.task
        counted = self._of_share(share)
        if task.parent_id is None:
            self.usage.add(task.project_id, now, tokens=counted, completed=int(is_done))
        else:
            self.in_flight.add_tokens(task.parent_id, counted)
        if tokens > attempt.rate_tokens:
            limits = self.rate_limits_on(task, attempt.slot, attempt.agent_id)
            self.rates.count_more(limits, tokens=tokens - attempt.rate_tokens, now=now)

    def forget(self, task_id: str, now: float) -> None:
        """Drop a task that the store no longer has."""
        attempt = self.in_flight.get(task_id)
        if attempt is not None:
            self._free_capacity(attempt, now)
        self._unqueue(task_id)

    def _ends(self, attempt: InFlightAttempt, record: TaskRecord, now: float) -> bool:
        """Say whether a record ends an attempt, and if so settle it."""
        is_before = record.progress.attempt < attempt.number
        if is_before and record.is_terminal:
            self._take_back(attempt, now)
            return True
        is_under_way = record.task.status in IN_FLIGHT and record.progress.attempt == attempt.number
        if is_under_way:
            self.workers.observe(attempt, record, now)
        if is_before or is_under_way:
            return False
        self._settle(attempt, record, now)
        return True

    def _settle(self, attempt: InFlightAttempt, record: TaskRecord, now: float) -> None:
        """Free the capacity of an attempt that is over, count what it used, and learn from it."""
        self._free_capacity(attempt, now)
        self.tick += 1
        task, progress = attempt.task, record.progress
        is_done = record.task.status is TaskStatus.DONE
        share = self._in_share(progress.share_tokens, record.micro_usd or 0)
        self.usage.add(task.project_id, now, tokens=share, completed=int(is_done))
        tokens = progress.reported_tokens or 0
        if progress.is_claimed:
            tokens = min(tokens, progress.share_tokens)
        if tokens > attempt.rate_tokens:
            limits = self.rate_limits_on(task, attempt.slot, attempt.agent_id)
            self.rates.count_more(limits, tokens=tokens - attempt.rate_tokens, now=now)
        booked = record.micro_usd or 0
        sample = sample_of(progress, record.terms, is_done=is_done, booked_micro_usd=booked)
        self.estimates.feed(kind_of(task, record.terms), sample)
        has_freed = (record.tokens or 0) < progress.reserved_tokens or (
            (record.micro_usd or 0) < progress.reserved_micro_usd
        )
        kind = kind_of(task, record.terms).text
        self.settled(Settled(task.scopes, (kind,), has_freed=has_freed))

    def _take_back(self, attempt: InFlightAttempt, now: float) -> None:
        """Undo an attempt that never began."""
        self._free_capacity(attempt, now)
        if attempt.task.parent_id is None:
            self.usage.add(attempt.task.project_id, now, started=-1)

    def _free_capacity(self, attempt: InFlightAttempt, now: float) -> None:
        self.in_flight.remove(attempt)
        self.slots.count(attempt.slot)
        task = attempt.task
        if task.is_call:
            self.index.give_back_upstream(task.target or "")
        self.index.give_back_permit(attempt.agent_id, lane_kind(task))
        if not task.is_call:
            self.workers.settle(attempt, now)

    def _queue(self, record: TaskRecord, now: float, hold: HoldOf | None = None) -> None:
        task, progress = record.task, record.progress
        waiting = Waiting(task, record.terms, progress.attempt, progress.waiting_for, hold)
        known = self.waiting.get(task.id)
        if known is not None and not waiting.is_after(known):
            return
        self.waiting_calls += task.is_call and known is None
        self.waiting[task.id] = waiting
        if task.deadline is not None:
            self._deadlines.set(task.id, task.deadline)
        if task.not_before is not None and task.not_before > now:
            self._starts.set(task.id, task.not_before)
            return
        self._offer(task.id)

    def _offer(self, task_id: str) -> None:
        waiting = self.waiting.get(task_id)
        if waiting is None or waiting.waiting_for:
            return
        self.too_large.pop(task_id, None)
        self.key_waits.pop(task_id, None)
        error = self.parking.refuses(waiting, self._hold)
        if error is not None:
            self.hopeless[task_id] = error
            self.index.remove(task_id)
            return
        task = waiting.task
        self.slots.track(task)
        self.made_agents.ensure(task.agent_id)
        self.index.add(task)

    def _hold(self, waiting: Waiting) -> Hold:
        if waiting.hold is not None:
            return waiting.hold()
        return self.settings.hold(waiting, self.estimates)

    def offer_again(self, task_id: str) -> None:
        """Try a task that a rule had set aside, because the rule has changed."""
        self._starts.drop(task_id)
        self._offer(task_id)

    def _unqueue(self, task_id: str) -> None:
        waiting = self.waiting.pop(task_id, None)
        if waiting is not None:
            self.waiting_calls -= waiting.task.is_call
            self.index.remove(task_id)
            self._starts.drop(task_id)
            self._deadlines.drop(task_id)
            self.parking.drop(task_id, waiting.task.scopes)
            self.too_large.pop(task_id, None)
            self.key_waits.pop(task_id, None)
            self.hopeless.pop(task_id, None)

    # Gates that close and open.

    def close(self, closure: GateClosure, now: float) -> None:
        """Park what stands behind a scope, target or slot, until its time."""
        self.closures.close(closure, now)
        if closure.kind == "slot":
            self.slots.changed(closure.name)

    def open(self, part: GatePart) -> None:
        """Offer again what stood behind a scope, target or slot.

        A scope opens for all projects at once, so that nobody is asked for before the others.
        """
        part = scope_part(part)
        if self.closures.open(part):
            self.rate_closed.pop(part, None)
            if part.kind == "slot":
                self.slots.changed(part.name)
        if part.kind in ("scope", "kind"):
            for closed in self.parking.closed(part):
                self.closures.open(closed)
            for task_id in self.parking.leave(part):
                self._offer(task_id)

    def settled(self, settled: Settled) -> None:
        """Offer again what waits for money where some was settled."""
        for part in self.parking.wake(settled):
            self.open(part)

    def ask_budgets_again(self) -> None:
        """Offer again what waits for any budget, because something may have changed there."""
        for part in list(self.parking.refusals):
            self.open(part)

    def set_pauses(self, pauses: dict[GatePart, GateClosure]) -> None:
        """Park what an administrator has paused, and offer again what is paused no more."""
        self.closures.set_standing("target", pauses)

    def set_slots(self, standings: Iterable[SlotStanding]) -> None:
        """Park what uses slots that have no room, and offer again what uses those that have."""
        self.slots.set(tuple(standings))

    def lift(self, agent_type: str) -> None:
        """Let the agents of a type work again."""
        self._lifts.drop(agent_type)
        self.limited.pop(agent_type, None)
        self.index.limit_agent_type(agent_type, None)

    # Time that passes.

    def next_at(self) -> float | None:
        """Return when something falls due by itself."""
        timers = (self._starts, self._deadlines, self.closures, self._lifts, self.workers)
        times = [at for timer in timers if (at := timer.next_at()) is not None]
        return min(times) if times else None

    def fall_due(self, now: float) -> Due:
        """Let everything due happen; return what the store has to be told of it."""
        self.usage.roll(now)
        for part in self.closures.pop_due(now, most=MAX_DUE):
            self.open(part)
        for agent_type in self._lifts.pop_due(now, most=MAX_DUE):
            self.lift(agent_type)
        for task_id in self._starts.pop_due(now, most=MAX_DUE):
            self._offer(task_id)
        expired = self._deadlines.pop_due(now, most=MAX_DUE)
        # A task stays here until the store says that it ended; until then it is due again.
        for task_id in expired:
            self._deadlines.set(task_id, now + 1.0)
            self.index.remove(task_id)
        rejected, self.hopeless = self.hopeless, {}
        return Due(expired=expired, rejected=rejected, overdue=self.workers.take_overdue(now))

    # Decisions.

    def plan(self, now: float, *, most: int) -> list[Planned]:
        """Decide a round; what is planned is in flight from now on, until it is refused.

        With `most` 0 only calls are planned.
        """
        planned: list[Planned] = []
        while not self.settings.is_paused:
            room = max(0, most - sum(not one.task.is_call for one in planned))
            left = self.settings.max_inflight - len(self.in_flight)
            self.index.set_tasks_left(min(left, room))
            has_capacity = self.index.begin_round(self.in_flight.free_capacity())
            if not len(self.index) or not has_capacity:
                return planned
            state = self.state(now, max_started=room)
            turns = None
            offers = self.index.offers
            # Who waits for a node with free capacity has not left, though it is not asked now.
            if not offers.are_nodes_shut and not offers.are_tasks_shut:
                turns = self._forgive(state, now)
            decided = Round(self.index, state, self._share_of, turns)
            chosen = zip(decided.run(), decided.choices, strict=True)
            accepted = [
                one
                for action, choice in chosen
                if (one := self._plan_action(action, choice, now)) is not None
            ]
            planned += accepted
            # What met a rate limit has left its permit to others, who are asked at once.
            if len(accepted) == len(decided.actions):
                break
        return planned

    def refuse(
        self, planned: Planned, record: TaskRecord | None, refused: Refused | None, now: float
    ) -> str | None:
        """Give back what was planned; return why the task can never start, if it cannot.

        The gate of the scope that refused is parked, or only this task if others may still fit.
        """
        task_id = planned.task.id
        attempt = self.in_flight.get(task_id)
        if attempt is not None and attempt.number == planned.attempt:
            self._take_back(attempt, now)
        own = len(self.rate_limits_on(planned.task, planned.used_slot, planned.agent_id))
        self.rates.take_back(planned.rate_charges, own=own)
        if record is None:
            self._unqueue(task_id)
            return None
        if planned.hold_of is None:
            self.observe(record, now)
        else:
            self.observe_call(record, planned.hold_of, now)
        if refused is None or task_id not in self.waiting:
            return None
        # A call of a task asked for what that lacks.
        hold = planned.hold if planned.task.parent_id is None else None
        verdict = self.parking.judge(planned.task, refused, planned.terms, hold=hold, now=now)
        if verdict.error is not None:
            self.index.remove(task_id)
            return verdict.error
        if verdict.closure is not None:
            self.close(verdict.closure, now)
            if verdict.closure.kind != "kind":
                for unwilling in self.parking.unwilling(refused.scope):
                    self._offer(unwilling)
        else:
            self.index.remove(task_id)
        ask_at = ask_again_at(refused, now)
        if ask_at is not None:
            self.closures.recheck_at(refusing_part(planned.task, refused), ask_at)
        return None

    def state(self, now: float, *, max_started: int | None = None) -> SchedulerState:
        """Return this moment as the decision wants it; at most `max_started` tasks may be added.

        Tasks, agents and gates are in the index.
        """
        settings = self.settings
        total = len(self.in_flight)
        most = settings.max_inflight
        if max_started is not None:
            most = min(most, total + max_started)
        return SchedulerState(
            projects=list(settings.projects),
            tasks=[],
            agents=[],
            project_token_usage=self.usage.tokens,
            project_active_agent_counts=self.in_flight.active,
            tasks_completed_in_window=self.usage.completed,
            charge_in_round=True,
            default_tokens=settings.default_tokens,
            project_reserved=self.in_flight.reserved,
            project_started=self.usage.started,
            # The index has the agents one by one; a round only asks for the sum.
            agent_inflight={"": total},
            max_inflight=most,
            lane_policy=settings.lane_policy,
            tick=self.tick,
            alpha=self.alpha,
            max_wait_ticks=settings.max_wait_ticks,
            max_lag_tokens=settings.max_lag_tokens,
            projects_present=self.present,
            project_forgiven=self.usage.forgiven,
            priority_ageing_seconds=settings.priority_ageing_seconds,
            now=now,
        )

    def _forgive(self, state: SchedulerState, now: float) -> list[Turn] | None:
        """Note which projects take part now, and what those that join are forgiven.

        Return their turns, if that was looked at.
        """
        if state.max_lag_tokens is None:
            return None
        turns = eligible_turns(self.index, state)
        for turn in turns:
            tokens = turn.forgiven - state.project_forgiven.get(turn.project.id, 0)
            if tokens:
                self.usage.add(turn.project.id, now, forgiven=tokens)
                known = self.forgiven_now.get(turn.project.id, 0)
                self.forgiven_now[turn.project.id] = known + tokens
        self.present = [turn.project.id for turn in turns]
        return turns

    def _plan_action(self, action: AssignAction, choice: Choice, now: float) -> Planned | None:
        waiting = self.waiting[action.task_id]
        planned = self._plan_attempt(waiting, action.agent_id, choice, now)
        if planned is not None:
            self._unqueue(action.task_id)
        return planned

    def _plan_attempt(
        self, waiting: Waiting, agent_id: str, choice: Choice, now: float
    ) -> Planned | None:
        task, terms = waiting.task, waiting.terms
        hold = self._hold(waiting) if waiting.hold is None else waiting.hold()
        refusing = self.parking.joins(waiting, hold, self.index.goes_before)
        if refusing is not None:
            self._give_back_permit(agent_id, task, now)
            if self.parking.is_old(refusing, now):
                self.open(refusing)
            return None
        share = self._share_tokens(task)
        is_known = hold.tokens.basis in (Basis.LEARNED, Basis.CONFIGURED)
        tokens = hold.tokens.amount if is_known else share
        slot, key_rule = task.slot, ""
        if task.provider is not None and (slot is None or task.is_call):
            slot, key_rule = self._chosen_slot(task, task.provider, tokens, now)
            if slot is None:
                self._give_back_permit(agent_id, task, now)
                return None
        elif slot is not None and self.slots.is_full(slot):
            # Another of the same round has taken the last permit.
            self._give_back_permit(agent_id, task, now)
            self.index.add(task)
            return None
        limits = self.rate_limits_on(task, slot, agent_id)
        no_room = self.rates.reached(limits, tokens=tokens, now=now) if limits else None
        if no_room is not None:
            self._give_back_permit(agent_id, task, now)
            self._limit(task, no_room, now)
            return None
        # The last question, since it takes what it finds.
        if not task.is_call and self.rooms and not self.rooms.take(task.target or "", now, task.id):
            self._give_back_permit(agent_id, task, now)
            self.index.add(task)
            return None
        if self.tuning is not None:
            wait_ticks = max(0, self.tick - task.enqueued_tick)
            self.tuning = self.tuning.observe(
                agent_id=task.agent_id or "",
                wait_ticks=wait_ticks,
                queue_depth=self.index.depth_micro / MICRO,
            )
        number = waiting.attempt + 1
        node_id = ""
        if not task.is_call:
            is_pull = task.target in self.settings.pull_targets
            node_id = self.in_flight.node_for_next(agent_id if is_pull else "")
        seconds = terms.attempt_seconds
        counted = self._in_share(share, hold.micro_usd.amount)
        attempt = InFlightAttempt(task, number, agent_id, node_id, counted, tokens, slot, seconds)
        self.in_flight.add(attempt)
        self.slots.count(slot)
        if not task.is_call:
            self.workers.start(attempt, now)
        if task.parent_id is None:
            self.usage.add(task.project_id, now, started=1)
        return Planned(
            task=task,
            terms=terms,
            attempt=number,
            agent_id=agent_id,
            node_id=node_id,
            share_tokens=share,
            hold=hold,
            rate_charges=self.rates.count(limits, tokens=tokens, now=now),
            slot=None if task.provider is None else slot,
            choice=choice,
            key_rule=key_rule,
            hold_of=waiting.hold,
        )

    def _in_share(self, tokens: int, micro_usd: int) -> int:
        """Return what work counts in the share of its project, in the unit of the shares."""
        return share_in_usd(tokens, micro_usd) if self.settings.is_shared_by_usd else tokens

    def _of_share(self, share: Amounts) -> int:
        return share.micro_usd if self.settings.is_shared_by_usd else share.tokens

    def _share_of(self, task: Task) -> int:
        """Return what an attempt at a waiting task counts in the share of its project."""
        tokens = self._share_tokens(task)
        if not self.settings.is_shared_by_usd:
            return tokens
        return share_in_usd(tokens, self._hold(self.waiting[task.id]).micro_usd.amount)

    def _share_tokens(self, task: Task) -> int:
        """Return what an attempt at a waiting task counts in the share of its project."""
        learned = 0
        if task.has_claims:
            kind = kind_of(task, self.waiting[task.id].terms)
            learned = self.estimates.median(kind, Unit.TOKENS)
        return tokens_charged(task, self.settings.default_tokens, learned=learned)

    def _give_back_permit(self, agent_id: str, task: Task, now: float) -> None:
        if task.is_call:
            self.index.give_back_upstream(task.target or "")
        self.index.give_back_permit(agent_id, lane_kind(task))
        self.workers.refresh(agent_id, now)

    def _chosen_slot(
        self, task: Task, provider: str, tokens: int, now: float
    ) -> tuple[str | None, str]:
        """Return the slot for a task that leaves it open, and the rule; without, it waits."""
        too_small: dict[str, NoRoom] = {}
        while (choice := self._choose_slot(task, provider, too_small, now)) is not None:
            if isinstance(choice, KeyWait):
                self.key_waits[task.id] = choice
                # Another slot may open before.
                self._starts.set(task.id, min(choice.until, now + ASIDE_SECONDS))
                return None, ""
            slot = choice.slot
            limits = self.rates.limits_on(("slot", slot))
            no_room = self.rates.reached(limits, tokens=tokens, now=now)
            if no_room is None:
                return choice
            if no_room.until is None:
                too_small[slot] = no_room
            else:
                self._close_full(no_room, no_room.until, now)
        if too_small:
            # Others may fit, so it alone waits; another slot of the provider may open before long.
            no_room = next(iter(too_small.values()))
            self._set_aside(task, no_room, now + min(no_room.limit.window_seconds, ASIDE_SECONDS))
        else:
            self.index.add(task)
        return None, ""

    def _choose_slot(
        self, task: Task, provider: str, without: Collection[str], now: float
    ) -> KeyChoice | KeyWait | None:
        if task.is_call and self.choose_key is not None:
            found = self.slots.open_slots(provider, task.project_id, without=without)
            if task.slot is not None:
                found = [one for one in found if one.name == task.slot]
                part = GatePart("slot", task.slot)
                if not (found or without or self.closures.is_closed(part)):
                    # It is not in the settings any more, and no gate would open for it.
                    why = f"slot {task.slot} is not open to it"
                    return KeyWait(now + ASIDE_SECONDS, why)
            return self.choose_key(task, found, self.in_flight.by_slot, now) if found else None
        slot = self.slots.choose(provider, task.project_id, without=without)
        return None if slot is None else KeyChoice(slot, "")

    def rate_limits_on(self, task: Task, slot: str | None, agent_id: str) -> list[RateLimit]:
        """Return every limit that an attempt at a task counts for."""
        if not self.settings.rate_limits:
            return []
        entry = self.index.agents.get(agent_id)
        agent_type = None if entry is None else entry.agent.agent_type
        if task.parent_id is not None:
            # It counts for the type of its agent with its task.
            agent_type = None
        return self.rates.limits_on(
            ("agent_type", agent_type), ("target", task.target), ("slot", slot)
        )

    def _limit(self, task: Task, no_room: NoRoom, now: float) -> None:
        limit, until = no_room.limit, no_room.until
        if until is None:
            # It is larger than the limit. Closing the limit for it would keep all others out, so
            # it alone waits, and is tried again in case that the configuration has changed.
            self._set_aside(task, no_room, now + limit.window_seconds)
            return
        if limit.kind == "agent_type":
            self.limited[limit.name] = no_room
            self.index.limit_agent_type(limit.name, until)
            self._lifts.set(limit.name, until)
        else:
            self._close_full(no_room, until, now)
        self.index.add(task)

    def _set_aside(self, task: Task, no_room: NoRoom, until: float) -> None:
        self.too_large[task.id] = no_room
        self._starts.set(task.id, until)

    def _close_full(self, no_room: NoRoom, until: float, now: float) -> None:
        limit = no_room.limit
        kind: GateKind = "slot" if limit.kind == "slot" else "target"
        closure = GateClosure(
            kind=kind,
            name=limit.name,
            until=until,
            why=no_room.why,
            cause="rate",
            by=limit.name,
            since=now,
        )
        self.rate_closed[closure.part] = closure
        self.close(closure, now)

    # New settings, applied in place without touching waiting tasks one by one. Afterwards the state
    # plans like one made with them from the same records, except for ties between agents that
    # nobody declares. What is in flight stays, even beyond a lowered limit; only new starts obey
    # it. A new order within lanes rebuilds all of them; where many tasks wait, or usage of another
    # period is needed, a new state is made from the store instead.

    def must_be_rebuilt(self, settings: DispatchSettings) -> bool:
        """Tell whether a new state from the store is better, step by step, than a changed one."""
        before = self.settings
        if len(self.waiting) > MAX_REBUILT and _differ(before, settings, *_ORDERS):
            return True
        return _differ(before, settings, "usage_window_hours", "is_shared_by_usd")

    def refit(self, settings: DispatchSettings) -> None:
        """Decide by other settings from now on."""
        before, self.settings = self.settings, settings
        self._projects = {project.id: project for project in settings.projects}
        if _differ(before, settings, *_ORDERS):
            self._rebuild_index()
        if _differ(before, settings, "agents", "max_per_agent_inflight"):
            self._set_agents(before)
        if _differ(before, settings, "upstream_permits", "upstream_slots", "slot_permits"):
            self._set_upstreams(before.upstream_permits)
        for target in sorted(settings.remote_targets ^ before.remote_targets):
            is_known = target in before.remote_targets
            self.rooms.set(target, None if is_known else 0, ROOM_UNKNOWN)
        if _differ(before, settings, "alpha", "auto_tune"):
            self.tuning = _tuning(settings)
        if _differ(before, settings, "rate_limits"):
            self._set_rate_limits()
        if _differ(before, settings, *_ESTIMATING):
            self.ask_budgets_again()
        self.set_pauses(settings.pauses())

    def _set_upstreams(self, before: Mapping[str, int]) -> None:
        """Bound calls by other permits, and let them use other slots; what is in flight counts."""
        permits = self.settings.upstream_permits
        for target in before:
            if target not in permits:
                self.index.drop_upstream(target)
        used = Counter(attempt.task.target or "" for attempt in self.in_flight.calls.values())
        for target, most in permits.items():
            self.index.set_upstream(target, most - used[target])
        self.slots.upstreams = self.settings.upstream_slots
        self.slots.permits = self.settings.slot_permits
        self.slots.set(tuple(self.slots.standings.values()))

    def _rebuild_index(self) -> None:
        old, new = self.index, self.settings.new_index()
        new.remember_served(old.served())
        for entry in old.agents:
            new.set_agent(entry.agent, inflight=0)
            new.set_workers(entry.agent.id, old.agents.workers(entry.agent.id))
        for target, free in old.offers.upstreams.items():
            new.set_upstream(target, free)
        for attempt in self.in_flight.all():
            new.take_permit(attempt.agent_id, lane_kind(attempt.task))
        for agent_type, no_room in self.limited.items():
            new.limit_agent_type(agent_type, no_room.until)
        for closure in self.closures.shown():
            new.close(closure)
        new.load(old)
        self.index = self.workers.index = self.made_agents.index = self.closures.index = new

    def _set_agents(self, before: DispatchSettings) -> None:
        after, index, made = self.settings, self.index, self.made_agents
        if _differ(before, after, "max_per_agent_inflight"):
            made.set_capacity(after.max_per_agent_inflight)
        known = {agent.id: agent for agent in before.agents}
        declared = {agent.id for agent in after.agents}
        for agent in after.agents:
            if known.get(agent.id) != agent:
                entry = index.agents.get(agent.id)
                index.set_agent(agent, inflight=0 if entry is None else entry.inflight)
            made.declare(agent.id)
        for agent_id in known:
            if agent_id not in declared:
                made.take_over(agent_id)
        # A lane is ranked by the position of its agent, so those that moved are ranked again.
        for moved in index.agents.arrange(agent.id for agent in after.agents):
            index.set_agent(moved.agent, inflight=moved.inflight)

    def _set_rate_limits(self) -> None:
        """Count by other limits; who was stopped by one is asked again, and stopped if need be."""
        self.rates.change(self.settings.rate_limits)
        for agent_type in list(self.limited):
            self.lift(agent_type)
        for part, closure in list(self.rate_closed.items()):
            if self.closures.timed.get(part) is closure:
                self.open(part)
        self.rate_closed.clear()
        for task_id in list(self.too_large):
            self.offer_again(task_id)

    # What people ask; nothing changes by it.

    def lane_stats(self, now: float) -> tuple[LaneStats, ...]:
        """Return every lane in which a task waits that is due and needs no parent."""
        aside = self._waits_aside(now)
        stopped = _Stopped(self.settings)
        stats = [
            _stats_of(
                lane,
                load,
                now,
                aside.pop((lane.project_id, lane.owner or ""), None),
                is_stopped=lane in stopped,
            )
            for project in self.index.projects.values()
            for lane, load in _lane_loads(project, stopped, tick=self.tick, alpha=self.alpha)
        ]
        stats += [
            LaneStats(project_id=project_id, agent_id=agent_id, longest_wait_seconds=wait)
            for (project_id, agent_id), wait in aside.items()
        ]
        return tuple(stats)

    def would_hold(self, task_id: str, limits: Mapping[Scope, Limit]) -> Hold | None:
        """Return what the next attempt at a waiting task has to hold; None if nobody knows it.

        A probe holds something only where its unit is limited, by these limits or by one that has
        refused something.
        """
        waiting = self.waiting.get(task_id)
        if waiting is None:
            return None
        task, refusals = waiting.task, self.parking.refusals
        scopes = charged_by(task.scopes)
        own = {GatePart("scope", scope) for scope in scopes}
        limited = {
            refused.unit
            for part, refused in refusals.items()
            if part in own or _is_kind_of(part, task)
        }
        found = [limits[scope] for scope in scopes if scope in limits]
        limited |= {unit for unit in Unit for one in found if one.amount(unit) is not None}
        hold = self._hold(waiting)
        usd, tokens = [
            NOTHING
            if unit not in limited and hold.estimate(unit).basis is Basis.PROBE
            else hold.estimate(unit)
            for unit in (Unit.MICRO_USD, Unit.TOKENS)
        ]
        return Hold(micro_usd=usd, tokens=tokens)

    def waiting_for_scopes(self) -> dict[str, int]:
        """Return how many tasks and calls wait for each budget that has refused some."""
        return {
            part.name: self.parking.set_aside(part) + self._behind(part)
            for part in self.parking.refusals
            if part.kind == "scope"
        }

    def _waits_aside(self, now: float) -> dict[tuple[str, str], float]:
        """Return the longest wait, by lane, of tasks that a budget refused one by one."""
        waits: dict[tuple[str, str], float] = {}
        for task_id in islice(self.parking.all_aside(), MAX_ASIDE_READ):
            task = self.waiting[task_id].task
            key = (task.project_id, task.agent_id or "")
            waits[key] = max(waits.get(key, 0.0), waited(task, now))
        return waits

    def _behind(self, part: GatePart) -> int:
        parts = {part, *self.parking.closed(part)}
        gates = {gate for one in parts for gate in self.index.gates.behind(one)}
        counted = islice(gates, MAX_GATES_COUNTED)
        return sum(lane.behind(gate) for gate in counted for lane in self.index.gate_lanes[gate])


def _tuning(settings: DispatchSettings) -> AdaptiveAlpha | None:
    return AdaptiveAlpha(alpha=settings.alpha) if settings.auto_tune else None


def _differ(before: DispatchSettings, after: DispatchSettings, *names: str) -> bool:
    return any(getattr(before, name) != getattr(after, name) for name in names)
