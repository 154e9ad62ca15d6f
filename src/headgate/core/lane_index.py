"""The lane index: which tasks wait, behind which gates, and which agents could take them.

The dispatcher keeps one between rounds and tells it of every change; `Scheduler.schedule` builds
one from a snapshot. A decision touches only lanes that have work, never the queued tasks behind
their heads, and a closed gate is parked whole. A task that is planned leaves the index; one whose
plan is refused is added again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, islice
from operator import attrgetter
from typing import Protocol

import msgspec

from headgate.core.enums import FastEnum
from headgate.core.gates import (
    ANY_WORKER,
    NODES,
    TASKS,
    Gate,
    GateClosure,
    GatePart,
    GateTable,
    gate_key,
)
from headgate.core.load import LoadRanking, to_micro_weight
from headgate.core.snapshot import (
    MAX_COUNT,
    Agent,
    AgentState,
    LanePolicy,
    SchedulerState,
    is_due,
)
from headgate.core.task import Task, TaskStatus

SLACK = 16

Rank = tuple[float, float, str]
"""What orders the tasks of a lane; the last element is the task's id and makes it unique."""

Entry = tuple[float, float, str, int, Task]
"""A rank, the number of the push, which keeps two versions of one task apart, and the task."""


class Row:
    """Tasks of one gate and class: a sorted list taken from the front, and a heap of latecomers."""

    __slots__ = ("_front", "_late", "_sorted", "gate", "group", "offer", "serial")

    def __init__(self, gate: Gate, group: int, serial: int) -> None:
        self.gate = gate
        self.group = group
        self.serial = serial
        self.offer: Offer | None = None
        self._sorted: list[Entry] = []
        self._front = 0
        self._late: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        yield from self._sorted[self._front :]
        yield from self._late

    def push(self, entry: Entry) -> None:
        """Add an entry, at no cost if it comes after all others."""
        if not self._sorted or self._sorted[-1] < entry:
            self._sorted.append(entry)
        else:
            heappush(self._late, entry)

    def first(self) -> Entry | None:
        """Return the entry that comes first, dead or alive."""
        if self._front == len(self._sorted):
            return self._late[0] if self._late else None
        entry = self._sorted[self._front]
        return self._late[0] if self._late and self._late[0] < entry else entry

    def drop_first(self) -> None:
        """Drop the entry that comes first."""
        if self._late and self.first() is self._late[0]:
            heappop(self._late)
            return
        self._front += 1
        if self._front > SLACK and 2 * self._front > len(self._sorted):
            del self._sorted[: self._front]
            self._front = 0

    def rebuild(self, entries: Iterable[Entry]) -> None:
        """Replace all entries."""
        self._sorted = sorted(entries)
        self._front = 0
        self._late = []


Offer = tuple[float, float, str, int, Row, Entry]
"""The first entry of a row among those of its lane; only the latest offer of a row counts.

A row that goes gives up its offer: each would keep the other, and the tasks that were in the row.
"""


class GroupedHeap:
    """The waiting tasks of one lane, by gate and class, in the order of their ranks.

    `waiting` is shared with the index: a task is alive while `waiting` holds that very object. A
    class is any number that most arrivals are in order within, such as the priority.

    Tasks that arrive in order cost the same whether ten wait or a million: each class of a group is
    a `Row`, appended to at one end and taken from at the other. Removing a task costs nothing at
    once: a dead entry is dropped when it comes to the front, and a lane that is more than half dead
    is rebuilt. A closed gate costs nothing: its tasks stay where they are until it opens.
    """

    __slots__ = ("_entries", "_heads", "_most_heads", "_pushes", "_rows", "_waiting")

    def __init__(self, waiting: dict[str, Task]) -> None:
        self._waiting = waiting
        self._rows: dict[Gate, dict[int, Row]] = {}
        self._heads: list[Offer] = []
        self._most_heads = SLACK
        self._entries = 0
        self._pushes = count()

    def push(self, gate: Gate, group: int, rank: Rank, task: Task) -> None:
        """Add a task; it is offered at once if it is first and the gate is open."""
        row = self._row(gate, group)
        entry = (*rank, next(self._pushes), task)
        row.push(entry)
        self._entries += 1
        if not gate.closed_by and row.first() is entry:
            self._offer(row, entry)

    def load(self, gate: Gate, ranked: Iterable[tuple[int, Rank, Task]]) -> None:
        """Add many tasks of one gate, for less than pushing each."""
        rows: dict[int, list[Entry]] = {}
        for group, rank, task in ranked:
            rows.setdefault(group, []).append((*rank, next(self._pushes), task))
        for group, entries in rows.items():
            row = self._row(gate, group)
            row.rebuild([*row, *entries])
            self._entries += len(entries)
        self.reopen(gate)

    def reopen(self, gate: Gate) -> None:
        """Offer the rows of a gate that has just opened."""
        for row in self._rows[gate].values():
            head = self._head(row)
            if head is not None and not gate.closed_by:
                self._offer(row, head)

    def drop(self, gate: Gate) -> None:
        """Forget a gate behind which nobody waits."""
        for row in self._rows.pop(gate).values():
            row.offer = None
            self._entries -= sum(1 for _ in row)

    def prune(self, alive: int) -> None:
        """Rebuild the rows once the dead outnumber the living."""
        if self._entries <= 2 * alive + SLACK:
            return
        for rows in self._rows.values():
            for group, row in list(rows.items()):
                living = [entry for entry in row if self._waiting.get(entry[2]) is entry[4]]
                row.rebuild(living)
                if not living:
                    row.offer = None
                    del rows[group]
        self._entries = alive

    def peek(self) -> tuple[Entry, Gate] | None:
        """Return the first entry of the open gates, with its gate."""
        heads = self._heads
        while heads:
            offer = heads[0]
            row, entry = offer[4], offer[5]
            if row.offer is not offer or row.gate.closed_by:
                heappop(heads)
            elif self._waiting.get(entry[2]) is entry[4]:
                return entry, row.gate
            elif (head := self._head(row)) is None:
                heappop(heads)
                row.offer = None
                del self._rows[row.gate][row.group]
            else:
                row.offer = (head[0], head[1], head[2], row.serial, row, head)
                heapreplace(heads, row.offer)
        return None

    def firsts(self, most: int) -> Iterator[Task]:
        """Yield the first task behind each gate, open or closed, of so many gates at most."""
        for rows in islice(self._rows.values(), most):
            heads = [head for row in rows.values() if (head := self._head(row)) is not None]
            if heads:
                yield min(heads)[4]

    def pop(self) -> tuple[Entry, Gate] | None:
        """Take out what `peek` returns, and offer the next of its row."""
        head = self.peek()
        if head is None:
            return None
        row = self._heads[0][4]
        row.drop_first()
        self._entries -= 1
        following = row.first()
        if following is None:
            heappop(self._heads)
            row.offer = None
            del self._rows[row.gate][row.group]
        else:
            row.offer = (following[0], following[1], following[2], row.serial, row, following)
            heapreplace(self._heads, row.offer)
        return head

    def _row(self, gate: Gate, group: int) -> Row:
        rows = self._rows.get(gate)
        if rows is None:
            rows = self._rows[gate] = {}
        row = rows.get(group)
        if row is None:
            row = rows[group] = Row(gate, group, next(self._pushes))
        return row

    def _head(self, row: Row) -> Entry | None:
        waiting = self._waiting
        while (entry := row.first()) is not None:
            if waiting.get(entry[2]) is entry[4]:
                return entry
            row.drop_first()
            self._entries -= 1
        return None

    def _offer(self, row: Row, head: Entry) -> None:
        row.offer = (head[0], head[1], head[2], row.serial, row, head)
        heappush(self._heads, row.offer)
        if len(self._heads) > self._most_heads:
            self._drop_old_offers()

    def _drop_old_offers(self) -> None:
        self._heads = [offer for offer in self._heads if offer[4].offer is offer]
        heapify(self._heads)
        self._most_heads = 2 * len(self._heads) + SLACK


NEVER_SERVED = -1
GRANTS_PER_TICK = 1 << 20
"""How many grants of one tick are told apart by the decimals of `served_tick`."""

_ONE_GRANT = 1 / GRANTS_PER_TICK
_LAST_GRANT = 1 - _ONE_GRANT

MAX_GATES_LOOKED_AT = 64
"""How many gates of a lane are looked at for its longest wait; the first came first."""


class LaneKind(FastEnum):
    """What waits in a lane: tasks, calls, or calls that running tasks make.

    Each kind needs other permits, so that none of them stands in the way of another.
    """

    TASKS = "tasks"
    CALLS = "calls"
    CALLS_OF_TASKS = "calls of tasks"


def lane_kind(task: Task) -> LaneKind:
    """Return the kind of lane that a task waits in."""
    if not task.is_call:
        return LaneKind.TASKS
    return LaneKind.CALLS if task.parent_id is None else LaneKind.CALLS_OF_TASKS


class Depth:
    """The weight of all tasks that could start, in millionths; the lanes of an index share one."""

    __slots__ = ("micro",)

    def __init__(self) -> None:
        self.micro = 0


class Lane:
    """The queue of one agent within one project; `owner` None is the project's open lane.

    The calls of an agent wait in a lane of their own, and those that running tasks make in a third.

    It counts only work that could start: tasks behind a closed gate are in neither its depth nor
    its oldest wait, so that parked work cannot make a lane look loaded. `served_tick` is when it
    was last served; the decimals order the grants of one tick.
    """

    __slots__ = (
        "_all",
        "_oldest",
        "_order",
        "_stock",
        "depth_micro",
        "kind",
        "owner",
        "project_id",
        "ready",
        "served_tick",
        "size",
    )

    def __init__(
        self,
        project_id: str,
        owner: str | None,
        waiting: dict[str, Task],
        depth: Depth,
        *,
        tracks_ticks: bool,
        kind: LaneKind = LaneKind.TASKS,
    ) -> None:
        self.project_id = project_id
        self.owner = owner
        self.kind = kind
        self.size = 0
        self.ready = 0
        self.depth_micro = 0
        self._all = depth
        self.served_tick: float = NEVER_SERVED
        self._stock: dict[Gate, list[int]] = {}
        self._order = GroupedHeap(waiting)
        self._oldest = GroupedHeap(waiting) if tracks_ticks else None

    def push(self, gate: Gate, rank: Rank, task: Task) -> None:
        """Take in one task."""
        self._count(gate, task, 1)
        self._order.push(gate, task.priority, rank, task)
        if self._oldest is not None:
            self._oldest.push(gate, 0, _tick_rank(task), task)

    def load(self, gate: Gate, ranked: list[tuple[Rank, Task]]) -> None:
        """Take in many tasks of one gate."""
        for _, task in ranked:
            self._count(gate, task, 1)
        self._order.load(gate, ((task.priority, rank, task) for rank, task in ranked))
        if self._oldest is not None:
            self._oldest.load(gate, ((0, _tick_rank(task), task) for _, task in ranked))

    def forget(self, gate: Gate, task: Task) -> bool:
        """Take one task out, and say whether it was the last of its gate in this lane."""
        if self._count(gate, task, -1):
            # Tasks leave in the order of priority, so this order empties from the middle.
            if self._oldest is not None:
                self._oldest.prune(self.size)
            return False
        self._order.drop(gate)
        if self._oldest is not None:
            self._oldest.drop(gate)
        del self._stock[gate]
        return True

    def prune(self) -> None:
        """Clear out tasks that were removed from the middle, once they are the most of it."""
        self._order.prune(self.size)

    def head(self) -> tuple[Entry, Gate] | None:
        """Return the entry of the task that goes first, with its gate."""
        return self._order.peek()

    def pop(self) -> tuple[Entry, Gate] | None:
        """Take out the entry of the task that goes first, and return it with its gate."""
        return self._order.pop()

    def oldest_tick(self) -> int:
        """Return the tick at which the task that has waited longest was enqueued."""
        head = None if self._oldest is None else self._oldest.peek()
        return 0 if head is None else head[0][4].enqueued_tick

    def longest_wait(self, now: float) -> float | None:
        """Return for how many seconds the task has waited that was queued first.

        Tasks behind closed gates count here: somebody waits for them all the same.
        """
        tasks = () if self._oldest is None else self._oldest.firsts(MAX_GATES_LOOKED_AT)
        return max((waited(task, now) for task in tasks), default=None)

    def behind(self, gate: Gate) -> int:
        """Return how many tasks wait behind a gate."""
        return self._stock[gate][0]

    def waiting_since(self) -> int:
        """Return the tick since which the lane has had work and has not been served."""
        return max(int(self.served_tick), self.oldest_tick())

    def park(self, gate: Gate) -> int:
        """Stop counting the tasks of a gate that closed, and return how many they are."""
        size, depth_micro = self._stock[gate]
        self.ready -= size
        self.depth_micro -= depth_micro
        self._all.micro -= depth_micro
        return size

    def unpark(self, gate: Gate) -> int:
        """Count and offer the tasks of a gate that opened, and return how many they are."""
        size, depth_micro = self._stock[gate]
        self.ready += size
        self.depth_micro += depth_micro
        self._all.micro += depth_micro
        self._order.reopen(gate)
        if self._oldest is not None:
            self._oldest.reopen(gate)
        return size

    def lacking_workers(self) -> int:
        """Return how many tasks are ready, or stopped by nothing but that no worker is free.

        It looks at every gate of the lane, so it is for people, and not for a decision.
        """
        return sum(
            stock[0]
            for gate, stock in self._stock.items()
            if all(part.kind == "worker" for part in gate.closed_by)
        )

    def _count(self, gate: Gate, task: Task, step: int) -> int:
        stock = self._stock.get(gate)
        if stock is None:
            stock = self._stock[gate] = [0, 0]
        # A lane of more weight goes first, so nobody makes its own heavier by a claim.
        weight = min(1.0, task.weight) if task.has_claims else task.weight
        depth_micro = step * to_micro_weight(weight) if self._oldest is not None else 0
        stock[0] += step
        stock[1] += depth_micro
        self.size += step
        if not gate.closed_by:
            self.ready += step
            self.depth_micro += depth_micro
            self._all.micro += depth_micro
        return stock[0]


def waited(task: Task, now: float) -> float:
    """Return for how many seconds a task has waited, not counting the time until its own."""
    return max(0.0, now - max(task.created_at, task.not_before or 0.0))


def _tick_rank(task: Task) -> Rank:
    return (task.enqueued_tick, 0, task.id)


class AgentPermits:
    """An agent, how many permits it has, and how many of them are taken; the pool changes it.

    Whether it would take a task is kept rather than worked out, since every decision asks.
    """

    __slots__ = (
        "agent",
        "inflight",
        "is_free",
        "limited_until",
        "may_pull_open",
        "may_take_open",
        "order",
        "permits",
        "workers",
    )

    def __init__(self, agent: Agent, *, order: int) -> None:
        self.agent = agent
        self.order = order
        self.inflight = 0
        self.permits = 0
        self.limited_until: float | None = None
        self.is_free = False
        self.may_take_open = False
        """Whether it would take an open task now."""
        self.may_pull_open = False
        """Whether one of its workers would take an open task now."""
        self.workers = 0
        """How many permits are free at its workers."""


class _Idlest:
    """Agents that may take a task, the one with the fewest in flight first.

    An entry that is out of date is noticed when it comes to the top.
    """

    __slots__ = ("_heap", "_may_take")

    def __init__(self, may_take: Callable[[AgentPermits], bool]) -> None:
        self._may_take = may_take
        self._heap: list[tuple[int, int, AgentPermits]] = []

    def push(self, entry: AgentPermits, among: Mapping[str, AgentPermits]) -> None:
        heappush(self._heap, (entry.inflight, entry.order, entry))
        if len(self._heap) > 2 * len(among) + SLACK:
            self.rebuild(among)

    def rebuild(self, among: Mapping[str, AgentPermits]) -> None:
        able = (entry for entry in among.values() if self._may_take(entry))
        self._heap = [(entry.inflight, entry.order, entry) for entry in able]
        heapify(self._heap)

    def first(self) -> AgentPermits | None:
        while self._heap:
            inflight, order, entry = self._heap[0]
            may_take = self._may_take(entry)
            if may_take and entry.inflight == inflight:
                return entry
            heappop(self._heap)
            if may_take and entry.inflight > inflight:
                heappush(self._heap, (entry.inflight, order, entry))
        return None


def permits_of(agent: Agent, *, counted: bool) -> int:
    """Return how many tasks the agent may have.

    Where tasks in flight are not counted, only an idle agent takes work, and one task a round.
    """
    if counted:
        return agent.capacity if agent.state in (AgentState.IDLE, AgentState.BUSY) else 0
    return 1 if agent.state is AgentState.IDLE else 0


def first_idle(agents: Iterable[Agent]) -> Iterable[Agent]:
    """Return each agent once, where it is named first, or first named idle if it ever is."""
    chosen: dict[str, Agent] = {}
    for agent in agents:
        known = chosen.get(agent.id)
        if known is None or (known.state is not AgentState.IDLE and agent.state is AgentState.IDLE):
            chosen.pop(agent.id, None)
            chosen[agent.id] = agent
    return chosen.values()


def _as_caller(agent: Agent) -> Agent:
    """Return an agent as far as its calls go, whose number nobody has bounded."""
    return msgspec.structs.replace(agent, capacity=MAX_COUNT, accepts_open=False)


def _moved(entry: AgentPermits, order: int) -> bool:
    before, entry.order = entry.order, order
    return before != order


class AgentPool:
    """All agents in their order; `free` counts those that could take a task.

    `pulling` counts those with a worker that would take an open one.

    An open task goes to the agent with the fewest tasks in flight, then to the one named first. A
    task that is to be pulled goes to such an agent with a free permit at one of its workers.
    """

    __slots__ = (
        "_agents",
        "_counted",
        "_idlest",
        "_idlest_pulling",
        "_limited",
        "_orders",
        "_workers",
        "free",
        "pulling",
    )

    def __init__(self, *, counted: bool) -> None:
        self.free = 0
        self.pulling = 0
        self._counted = counted
        self._agents: dict[str, AgentPermits] = {}
        self._workers: dict[str, int] = {}
        self._idlest = _Idlest(attrgetter("may_take_open"))
        self._idlest_pulling = _Idlest(attrgetter("may_pull_open"))
        self._limited: dict[str, float] = {}
        self._orders = count()

    def __iter__(self) -> Iterator[AgentPermits]:
        return iter(self._agents.values())

    def get(self, agent_id: str) -> AgentPermits | None:
        """Return the agent of this id."""
        return self._agents.get(agent_id)

    def put(self, agent: Agent, *, inflight: int) -> AgentPermits:
        """Add or replace an agent; a known one keeps its position."""
        entry = self._agents.get(agent.id)
        if entry is None:
            entry = self._agents[agent.id] = AgentPermits(agent, order=next(self._orders))
        self._leave(entry)
        entry.agent = agent
        entry.inflight = inflight
        entry.permits = permits_of(agent, counted=self._counted)
        entry.limited_until = self._limited.get(agent.agent_type)
        entry.workers = self._workers.get(agent.id, 0)
        self._return(entry)
        return entry

    def workers(self, agent_id: str) -> int:
        """Return how many permits are free at the workers of an agent."""
        return self._workers.get(agent_id, 0)

    def set_workers(self, agent_id: str, free: int) -> None:
        """Count the permits that are free at the workers of an agent, also of an unknown one."""
        if free:
            self._workers[agent_id] = free
        else:
            self._workers.pop(agent_id, None)
        entry = self._agents.get(agent_id)
        if entry is not None:
            self._leave(entry)
            entry.workers = free
            self._return(entry)

    def arrange(self, first: Iterable[str]) -> list[AgentPermits]:
        """Name these agents first, in this order; return those that have moved."""
        ahead = {name: entry for name in first if (entry := self._agents.get(name)) is not None}
        self._agents = ahead | self._agents
        self._orders = count()
        moved = [entry for entry in self if _moved(entry, next(self._orders))]
        self._idlest.rebuild(self._agents)
        self._idlest_pulling.rebuild(self._agents)
        return moved

    def remove(self, agent_id: str) -> None:
        """Forget an agent; the others keep their order."""
        entry = self._agents.pop(agent_id, None)
        if entry is not None:
            self._leave(entry)

    def limit(self, agent_type: str, until: float | None) -> list[AgentPermits]:
        """Limit a type until a time, or lift its limit with None; return the agents concerned."""
        if until is None:
            self._limited.pop(agent_type, None)
        else:
            self._limited[agent_type] = until
        concerned = [entry for entry in self if entry.agent.agent_type == agent_type]
        for entry in concerned:
            self._leave(entry)
            entry.limited_until = until
            self._return(entry)
        return concerned

    def take_permit(self, entry: AgentPermits) -> None:
        """Count one more task in flight."""
        entry.inflight += 1
        if entry.inflight >= entry.permits:
            self._leave(entry)

    def give_back(self, entry: AgentPermits) -> None:
        """Count one task less in flight."""
        if entry.is_free and not entry.may_take_open:
            # Nothing is ordered by it.
            entry.inflight -= 1
            return
        self._leave(entry)
        entry.inflight -= 1
        self._return(entry)

    def for_open_task(self) -> AgentPermits | None:
        """Return the free agent that would take the next open task."""
        return self._idlest.first()

    def for_open_pull(self) -> AgentPermits | None:
        """Return the free agent whose worker would take the next open task."""
        return self._idlest_pulling.first()

    def _leave(self, entry: AgentPermits) -> None:
        if entry.is_free:
            self.pulling -= entry.may_pull_open
            entry.is_free = entry.may_take_open = entry.may_pull_open = False
            self.free -= 1

    def _return(self, entry: AgentPermits) -> None:
        if entry.inflight >= entry.permits or entry.limited_until is not None:
            return
        entry.is_free = True
        self.free += 1
        if entry.agent.accepts_open:
            entry.may_take_open = True
            self._idlest.push(entry, self._agents)
            if entry.workers:
                entry.may_pull_open = True
                self.pulling += 1
                self._idlest_pulling.push(entry, self._agents)


NODES_SHUT = GateClosure(kind="node", name="", why="every permit of the service is taken")
TASKS_SHUT = GateClosure(kind="task", name="", why="as many tasks are in flight as may be")


class Offers:
    """The permits that are left, and how many tasks are ready for each kind of them.

    Tasks of pull targets run at workers only, calls at their upstream, all others on nodes only,
    and each is a part of every gate: while an agent has no worker with a free permit, what its
    workers are to pull is parked, and so are calls to an upstream that has no permit left. Tasks
    for the nodes are parked for want of a permit only while others could be started. Where nobody
    pulls or calls, a full service simply ends the round, and nothing is parked for it.
    """

    __slots__ = (
        "_pool",
        "are_nodes_shut",
        "are_tasks_shut",
        "called",
        "is_any_shut",
        "nodes_left",
        "plain",
        "pulled",
        "tasks_left",
        "upstreams",
    )

    def __init__(self, pool: AgentPool) -> None:
        self._pool = pool
        self.nodes_left: float = math.inf
        self.tasks_left: float = math.inf
        self.are_nodes_shut = False
        self.are_tasks_shut = False
        self.is_any_shut = True
        self.plain = 0
        self.pulled = 0
        self.called = 0
        self.upstreams: dict[str, int] = {}
        """The permits left at each upstream that has a bound, by the target of its calls."""

    @property
    def has_ready(self) -> bool:
        """Whether anything waits that no gate stops."""
        return self.plain > 0 or self.pulled > 0 or self.called > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing that is ready has a permit to run."""
        if self.called:
            return False
        return self.tasks_left <= 0 or (self.nodes_left <= 0 and not self.pulled)

    @property
    def must_shut_nodes(self) -> bool:
        """Whether tasks without a permit of a node stand in the way of others that have one."""
        return self.nodes_left <= 0 and self.plain > 0 and (self.pulled > 0 or self.called > 0)

    @property
    def must_shut_tasks(self) -> bool:
        """Whether tasks stand in the way of calls, while as many are in flight as may be."""
        return self.tasks_left <= 0 and self.called > 0 and (self.plain > 0 or self.pulled > 0)

    def count(self, gate: Gate, tasks: int) -> None:
        """Count tasks that became ready, or fewer of them."""
        if gate.is_call:
            self.called += tasks
        elif gate.is_pull:
            self.pulled += tasks
        else:
            self.plain += tasks

    def closure(self, part: GatePart) -> GateClosure | None:
        """Return what closes a part of an offered kind; None while it is open."""
        if part == NODES:
            return NODES_SHUT if self.are_nodes_shut else None
        if part == TASKS:
            return TASKS_SHUT if self.are_tasks_shut else None
        if part.kind == "upstream":
            return no_upstream(part.name) if self.upstreams.get(part.name, 1) <= 0 else None
        is_shut = self.is_any_shut if part == ANY_WORKER else not self._pool.workers(part.name)
        return no_worker(part.name) if is_shut else None


def no_worker(agent_id: str) -> GateClosure:
    """Return what closes the gates of tasks that an agent's workers are to pull."""
    return GateClosure(kind="worker", name=agent_id, why="no worker has a free permit")


def no_upstream(target: str) -> GateClosure:
    """Return what closes the gates of calls to an upstream that has no permit left."""
    return GateClosure(kind="upstream", name=target, why="every permit of the upstream is taken")


AgentFor = Callable[[Lane], AgentPermits | None]
"""Names the agent that would take a lane's next task, or None while none is free."""

OPEN_LANE_ORDER = -1
_NEVER_OFFERED = 1 << 62


LaneKey = tuple[float, ...]


class LaneChooser(Protocol):
    """A policy: lanes are offered to it, and it names the one that goes first.

    A chooser is kept between rounds. Whoever changes a lane offers it again; an offer that is out
    of date is noticed when it comes to the top, so that no change has to search for the old one.
    """

    def offer(self, lane: Lane) -> None:
        """Consider a lane that has got work, or an agent, and may now start."""

    def touch(self, lane: Lane) -> None:
        """Consider a lane whose depth or oldest task changed."""

    def ease(self, lane: Lane) -> None:
        """Consider a lane whose agent was free already, and has one task less in flight."""

    def drop(self, lane: Lane) -> None:
        """Forget a lane that is gone."""

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane that goes first among those that could start a task."""


class OfferHeap:
    """Lanes by a key that may have grown since they were offered.

    A key of None means that the lane cannot start anything now. Whoever makes a key smaller, or
    makes a lane able to start again, must offer the lane again.
    """

    __slots__ = ("_heap", "_key", "_most", "_offers")

    def __init__(self, key: Callable[[Lane], LaneKey | None]) -> None:
        # No method of whoever has the heap: each would keep the other, and all that waited here.
        self._key = key
        # The number of the offer keeps a lane apart from an earlier one of the same owner.
        self._heap: list[tuple[LaneKey, int, Lane]] = []
        self._offers = count()
        self._most = SLACK

    def offer(self, lane: Lane) -> None:
        """Add the lane under its present key."""
        key = self._key(lane)
        if key is not None:
            heappush(self._heap, (key, next(self._offers), lane))
        if len(self._heap) > self._most:
            self._rebuild()

    def peek(self) -> Lane | None:
        """Return the lane with the smallest key."""
        first = self.first()
        return None if first is None else first[1]

    def first(self) -> tuple[LaneKey, Lane] | None:
        """Return the lane with the smallest key, and that key."""
        while self._heap:
            offered, _, lane = self._heap[0]
            key = self._key(lane)
            if key == offered:
                return offered, lane
            heappop(self._heap)
            if key is not None and key > offered:
                heappush(self._heap, (key, next(self._offers), lane))
        return None

    def _rebuild(self) -> None:
        lanes = dict.fromkeys(lane for _, _, lane in self._heap)
        keys = ((self._key(lane), next(self._offers), lane) for lane in lanes)
        self._heap = [(key, offer, lane) for key, offer, lane in keys if key is not None]
        heapify(self._heap)
        self._most = 2 * len(self._heap) + SLACK


class FewestInFlight:
    """The lane whose agent has the fewest tasks in flight, then the one served longest ago."""

    __slots__ = ("_agent_for", "_key", "_open", "_pinned")

    def __init__(self, agent_for: AgentFor) -> None:
        self._agent_for = agent_for
        self._key = partial(_inflight_key, agent_for)
        self._pinned = OfferHeap(self._key)
        self._open: Lane | None = None

    def offer(self, lane: Lane) -> None:
        """Consider a lane; the open one is compared afresh each time, as its agent varies."""
        if lane.owner is None:
            self._open = lane
        else:
            self._pinned.offer(lane)

    ease = offer

    def touch(self, lane: Lane) -> None:
        """Neither depth nor age matters here."""

    def drop(self, lane: Lane) -> None:
        """Forget a lane that is gone."""
        if lane is self._open:
            self._open = None

    def best(self, *, tick: int, alpha: float) -> Lane | None:  # noqa: ARG002
        """Return the lane that goes first."""
        pinned, open_lane = self._pinned.peek(), self._open
        if open_lane is None or not open_lane.ready or self._agent_for(open_lane) is None:
            return pinned
        if pinned is None:
            return open_lane
        return min(pinned, open_lane, key=lambda lane: self._key(lane) or ())


def _inflight_key(agent_for: AgentFor, lane: Lane) -> LaneKey | None:
    agent = agent_for(lane) if lane.ready else None
    if agent is None:
        return None
    return (agent.inflight, lane.served_tick, agent.order, lane.owner is None)


class HighestLoad:
    """The lane with the highest load: weighted depth against the age of its oldest task.

    Of equal loads the lane served longest ago goes first, then the one that has waited longest.
    Lanes compete while they have work and an agent of their own to serve them; the open lane, which
    any agent serves, competes while it has work.
    """

    __slots__ = ("_agent_for", "_changed", "_ranking")

    def __init__(self, agent_for: AgentFor) -> None:
        self._agent_for = agent_for
        self._changed: dict[Lane, None] = {}
        self._ranking: LoadRanking[Lane] = LoadRanking()

    def offer(self, lane: Lane) -> None:
        """Consider a lane again at the next choice."""
        self._changed[lane] = None

    touch = offer

    def ease(self, lane: Lane) -> None:
        """How much an agent has in flight does not matter here."""

    def drop(self, lane: Lane) -> None:
        """Forget a lane that is gone."""
        self._changed.pop(lane, None)
        self._ranking.discard(lane)

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane that goes first."""
        self._catch_up()
        lane = self._ranking.best(tick=tick, alpha=alpha)
        if lane is None or self._agent_for(lane) is not None:
            return lane
        # Only the open lane can be first without an agent; the others are asked without it.
        self._ranking.discard(lane)
        second = self._ranking.best(tick=tick, alpha=alpha)
        self._changed[lane] = None
        return second

    def _catch_up(self) -> None:
        for lane in self._changed:
            if lane.owner is None:
                order = OPEN_LANE_ORDER if lane.ready else None
            else:
                agent = self._agent_for(lane) if lane.ready else None
                order = None if agent is None else agent.order
            self._rank(lane, order)
        self._changed.clear()

    def _rank(self, lane: Lane, order: int | None) -> None:
        if order is None:
            self._ranking.discard(lane)
            return
        self._ranking.put(
            lane,
            depth_micro=lane.depth_micro,
            oldest_tick=lane.oldest_tick(),
            last_served=lane.served_tick,
            order=order,
        )


class BoundedWait:
    """A policy under which a lane that has waited `max_wait_ticks` goes before all others."""

    __slots__ = ("_key", "_max_wait_ticks", "_offered", "_open", "_pinned", "_policy")

    def __init__(self, policy: LaneChooser, agent_for: AgentFor, *, max_wait_ticks: int) -> None:
        self._policy = policy
        self._key = partial(_waiting_key, agent_for)
        self._max_wait_ticks = max_wait_ticks
        self._pinned = OfferHeap(self._key)
        self._open: Lane | None = None
        self._offered: dict[Lane, int] = {}

    def offer(self, lane: Lane) -> None:
        """Consider a lane that has got work, or an agent, and may now start."""
        self._policy.offer(lane)
        self._remember(lane)

    def touch(self, lane: Lane) -> None:
        """Consider a lane whose depth or oldest task changed.

        The heap notices by itself when a lane has waited for less long than it was offered with,
        which is what happens whenever a lane is served; only a longer wait is news.
        """
        self._policy.touch(lane)
        offered = self._offered.get(lane, _NEVER_OFFERED)
        # The first comparison is the cheap one: a lane waits at least since it was served.
        if lane.ready and lane.served_tick < offered and lane.waiting_since() < offered:
            self._remember(lane)

    def ease(self, lane: Lane) -> None:
        """Consider a lane whose agent has less in flight; it has waited for as long as before."""
        self._policy.ease(lane)

    def drop(self, lane: Lane) -> None:
        """Forget a lane that is gone."""
        self._policy.drop(lane)
        self._offered.pop(lane, None)
        if lane is self._open:
            self._open = None

    def best(self, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane that has waited too long, or the policy's choice."""
        first, open_lane = self._pinned.first(), self._open
        key = None if open_lane is None else self._key(open_lane)
        if open_lane is not None and key is not None and (first is None or key < first[0]):
            first = key, open_lane
        if first is not None and tick - first[0][0] >= self._max_wait_ticks:
            return first[1]
        return self._policy.best(tick=tick, alpha=alpha)

    def _remember(self, lane: Lane) -> None:
        if lane.owner is None:
            self._open = lane
        else:
            self._offered[lane] = lane.waiting_since()
            self._pinned.offer(lane)


def _waiting_key(agent_for: AgentFor, lane: Lane) -> LaneKey | None:
    agent = agent_for(lane) if lane.ready else None
    if agent is None:
        return None
    order = OPEN_LANE_ORDER if lane.owner is None else agent.order
    return (lane.waiting_since(), order)


def lane_chooser(
    policy: LanePolicy, agent_for: AgentFor, *, max_wait_ticks: int | None
) -> LaneChooser:
    """Return a chooser for the lanes of one project."""
    chooser: LaneChooser = (
        HighestLoad(agent_for) if policy is LanePolicy.HIGHEST_LOAD else FewestInFlight(agent_for)
    )
    if max_wait_ticks is None:
        return chooser
    return BoundedWait(chooser, agent_for, max_wait_ticks=max_wait_ticks)


FEW = 8
"""A lane this many times as large as what is added to it is not worth sorting again."""


class ProjectLanes:
    """The lanes of one project; `ready` counts the tasks that no gate stops.

    Calls that running tasks make have a chooser of their own: a project that is at its cap may
    still start those.
    """

    __slots__ = ("chooser", "lanes", "ready", "tasks_chooser")

    def __init__(self, chooser: LaneChooser | None, tasks_chooser: LaneChooser | None) -> None:
        self.chooser = chooser
        self.tasks_chooser = tasks_chooser
        self.lanes: dict[tuple[LaneKind, str | None], Lane] = {}
        self.ready = 0

    def chooser_of(self, lane: Lane) -> LaneChooser | None:
        """Return the chooser that a lane is offered to."""
        is_of_tasks = lane.kind is LaneKind.CALLS_OF_TASKS
        return self.tasks_chooser if is_of_tasks else self.chooser

    def best(self, *, tick: int, alpha: float, is_held: bool) -> Lane | None:
        """Return the lane that goes first; of a project that is held, only a call of a task may.

        Where both choosers have one, the lane goes first that was served longest ago.
        """
        usual = self.chooser
        lane = None if is_held or usual is None else usual.best(tick=tick, alpha=alpha)
        if self.tasks_chooser is None:
            return lane
        of_task = self.tasks_chooser.best(tick=tick, alpha=alpha)
        if lane is None or of_task is None:
            return lane or of_task
        return min(lane, of_task, key=attrgetter("served_tick"))


class LaneIndex:
    """Waiting tasks by project, lane and gate, with the agents that could take them."""

    def __init__(
        self,
        *,
        policy: LanePolicy | None = None,
        max_wait_ticks: int | None = None,
        priority_ageing_seconds: float = 0.0,
        counts_inflight: bool = False,
        pull_targets: frozenset[str] = frozenset(),
        capped_agents: frozenset[str] = frozenset(),
    ) -> None:
        self.policy = policy
        self.agents = AgentPool(counted=counts_inflight)
        self.callers = AgentPool(counted=True)
        """The agents as far as their calls go that take none of their permits."""
        self.capped_agents = capped_agents
        self.offers = Offers(self.agents)
        self._pull_targets = pull_targets
        self._max_wait_ticks = max_wait_ticks
        self._ageing_seconds = priority_ageing_seconds
        self._tracks_ticks = policy is LanePolicy.HIGHEST_LOAD or max_wait_ticks is not None
        self._waiting: dict[str, Task] = {}
        self._depth = Depth()
        self.gates = GateTable(self.offers.closure)
        self.gate_lanes: dict[Gate, dict[Lane, None]] = {}
        self.projects: dict[str, ProjectLanes] = {}
        self._owned: dict[str, dict[Lane, None]] = {}
        self._served: dict[tuple[str, str | None, LaneKind], float] = {}
        self._latest_served: float = NEVER_SERVED

    @classmethod
    def of(cls, state: SchedulerState) -> LaneIndex:
        """Build the index of a snapshot."""
        index = cls(
            policy=state.lane_policy,
            max_wait_ticks=state.max_wait_ticks,
            priority_ageing_seconds=state.priority_ageing_seconds,
            counts_inflight=state.agent_inflight is not None,
            pull_targets=state.pull_targets,
            capped_agents=state.capped_agents,
        )
        for target, free in state.upstream_permits.items():
            index.set_upstream(target, free)
        for agent_id, free in state.worker_permits.items():
            index.set_workers(agent_id, free)
        index.remember_served(state.lane_served)
        index._load_agents(state)
        for closure in state.closed_gates:
            index.close(closure)
        ready = (task for task in state.tasks if task.status is TaskStatus.READY)
        index.load(task for task in ready if is_due(task, state.now))
        return index

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._waiting

    def __iter__(self) -> Iterator[Task]:
        return iter(self._waiting.values())

    @property
    def depth_micro(self) -> int:
        """The weighted depth of all lanes; 0 where the order of lanes does not ask for ages."""
        return self._depth.micro

    def ready(self, project_id: str) -> int:
        """Return how many tasks of a project no gate stops."""
        project = self.projects.get(project_id)
        return 0 if project is None else project.ready

    def lanes_at(self, target: str) -> dict[Lane, int]:
        """Return how much waits for a target in each lane, but not for a known time.

        It looks at all gates of the target, so it is for people, and not for a decision.
        """
        found: dict[Lane, int] = {}
        for gate in self.gates.of(GatePart("target", target)):
            if any(one.until is not None for one in gate.closed_by.values()):
                continue
            for lane in self.gate_lanes.get(gate, ()):
                found[lane] = found.get(lane, 0) + lane.behind(gate)
        return found

    def gate_of(self, task: Task) -> Gate:
        """Return the gate that the task stands behind."""
        return self.gates.gate(gate_key(task, self._pull_targets))

    def add(self, task: Task) -> None:
        """Queue a task; a task of the same id that waits already is replaced."""
        self.remove(task.id)
        # Each time a task is queued it is a new object, so that what is left of an earlier time
        # cannot come alive again.
        task = msgspec.structs.replace(task)
        gate = self.gate_of(task)
        lane = self._lane(task.project_id, task.agent_id, lane_kind(task))
        was_ready = lane.ready > 0
        self._waiting[task.id] = task
        self.gate_lanes.setdefault(gate, {})[lane] = None
        lane.push(gate, self._rank(task), task)
        if not gate.closed_by:
            self.projects[task.project_id].ready += 1
            self.offers.count(gate, 1)
            self._announce(lane, was_ready=was_ready)

    def load(self, tasks: Iterable[Task]) -> None:
        """Queue many new tasks, for less than adding each."""
        groups: dict[tuple[str, str | None, LaneKind, Gate], list[tuple[Rank, Task]]] = {}
        for task in tasks:
            gate = self.gate_of(task)
            key = (task.project_id, task.agent_id, lane_kind(task), gate)
            groups.setdefault(key, []).append((self._rank(task), task))
            self._waiting[task.id] = task
        for (project_id, owner, kind, gate), ranked in groups.items():
            lane = self._lane(project_id, owner, kind)
            was_ready = lane.ready > 0
            self.gate_lanes.setdefault(gate, {})[lane] = None
            if lane.size > FEW * len(ranked):
                for rank, task in ranked:
                    lane.push(gate, rank, task)
            else:
                lane.load(gate, ranked)
            if not gate.closed_by:
                self.projects[project_id].ready += len(ranked)
                self.offers.count(gate, len(ranked))
                self._announce(lane, was_ready=was_ready)

    def remove(self, task_id: str) -> Task | None:
        """Take a task out, planned, cancelled or expired; None if it does not wait."""
        task = self._waiting.pop(task_id, None)
        if task is not None:
            lane = self.projects[task.project_id].lanes[lane_kind(task), task.agent_id]
            self._leave(lane, self.gate_of(task), task)
            lane.prune()
        return task

    def close(self, closure: GateClosure) -> None:
        """Park every task behind this scope, target or slot."""
        for gate in self.gates.close(closure):
            for lane in self.gate_lanes[gate]:
                project = self.projects[lane.project_id]
                parked = lane.park(gate)
                project.ready -= parked
                self.offers.count(gate, -parked)
                chooser = project.chooser_of(lane)
                if chooser is not None:
                    chooser.touch(lane)

    def open(self, part: GatePart) -> None:
        """Offer again what waited for this scope, target or slot alone."""
        for gate in self.gates.open(part):
            for lane in self.gate_lanes[gate]:
                was_ready = lane.ready > 0
                unparked = lane.unpark(gate)
                self.projects[lane.project_id].ready += unparked
                self.offers.count(gate, unparked)
                self._announce(lane, was_ready=was_ready)

    def set_agent(self, agent: Agent, *, inflight: int = 0) -> None:
        """Add an agent, or replace what is known of it."""
        self.agents.put(agent, inflight=inflight)
        caller = self.callers.get(agent.id)
        if caller is not None:
            self.callers.put(_as_caller(agent), inflight=caller.inflight)
        self._availability_changed(agent.id)

    def set_upstream(self, target: str, free: int) -> None:
        """Count the permits that are left at an upstream."""
        had = self.offers.upstreams.get(target, 1)
        self.offers.upstreams[target] = free
        if free <= 0 < had:
            self.close(no_upstream(target))
        elif had <= 0 < free:
            self.open(GatePart("upstream", target))

    def drop_upstream(self, target: str) -> None:
        """Bound the calls to an upstream no more."""
        if self.offers.upstreams.pop(target, 1) <= 0:
            self.open(GatePart("upstream", target))

    def set_workers(self, agent_id: str, free: int) -> None:
        """Count the permits that are free at the workers of an agent."""
        had = self.agents.workers(agent_id)
        if free == had:
            return
        self.agents.set_workers(agent_id, free)
        if not free:
            self.close(no_worker(agent_id))
        elif not had:
            self.open(GatePart("worker", agent_id))
        self._availability_changed(agent_id)

    def begin_round(self, node_capacity: float) -> bool:
        """Say how many permits the nodes have left; return whether anybody could have one."""
        offers = self.offers
        offers.nodes_left = node_capacity
        if node_capacity > 0 and offers.are_nodes_shut:
            offers.are_nodes_shut = False
            self.open(NODES)
        self._shut_if_need_be()
        return not offers.is_over

    def set_tasks_left(self, left: float) -> None:
        """Say how many more tasks may be in flight; calls are not counted."""
        offers = self.offers
        offers.tasks_left = left
        if left > 0 and offers.are_tasks_shut:
            offers.are_tasks_shut = False
            self.open(TASKS)
        self._shut_if_need_be()

    def give_back_permit(self, agent_id: str, kind: LaneKind = LaneKind.TASKS) -> None:
        """Give back one permit of an agent whose task or call has ended."""
        pool = self.pool(agent_id, kind)
        entry = pool.get(agent_id)
        if entry is not None and entry.inflight > 0:
            was_free = entry.is_free
            pool.give_back(entry)
            self._availability_changed(agent_id, was_free=was_free)

    def take_permit(self, agent_id: str, kind: LaneKind = LaneKind.TASKS) -> None:
        """Count one more task or call in flight of an agent that was found with it."""
        if kind is not LaneKind.TASKS:
            self._ensure_caller(agent_id)
        pool = self.pool(agent_id, kind)
        entry = pool.get(agent_id)
        if entry is not None:
            pool.take_permit(entry)
            self._availability_changed(agent_id)

    def pool(self, agent_id: str, kind: LaneKind) -> AgentPool:
        """Return whose permits a task or call of an agent takes.

        A cap that somebody set on an agent counts its calls as well; the usual one counts tasks.
        """
        if kind is LaneKind.TASKS:
            return self.agents
        is_capped = kind is LaneKind.CALLS and agent_id in self.capped_agents
        return self.agents if is_capped else self.callers

    def _ensure_caller(self, agent_id: str) -> None:
        if self.callers.get(agent_id) is None:
            known = self.agents.get(agent_id)
            agent = Agent(id=agent_id) if known is None else known.agent
            self.callers.put(_as_caller(agent), inflight=0)

    def limit_agent_type(self, agent_type: str, until: float | None) -> None:
        """Stop all agents of a type until a time, or let them go on with None."""
        for pool in (self.agents, self.callers):
            for entry in pool.limit(agent_type, until):
                self._availability_changed(entry.agent.id)

    def agent_for(self, lane: Lane) -> AgentPermits | None:
        """Return the agent that would take the lane's next task, None while none is free."""
        if lane.owner is None:
            head = lane.head() if self.offers.pulled else None
            if head is not None and head[1].is_pull:
                return self.agents.for_open_pull()
            return self.agents.for_open_task()
        entry = self.pool(lane.owner, lane.kind).get(lane.owner)
        return entry if entry is not None and entry.is_free else None

    def choose_lane(
        self, project_id: str, *, tick: int, alpha: float, is_held: bool = False
    ) -> Lane | None:
        """Return the lane of a project that goes first under the policy."""
        project = self.projects.get(project_id)
        if project is None:
            return None
        return project.best(tick=tick, alpha=alpha, is_held=is_held)

    def lane_for(self, project_id: str, agent: Agent) -> Lane | None:
        """Return the lane whose head this agent would take: its own, or the open one."""
        project = self.projects.get(project_id)
        if project is None:
            return None
        owners = (agent.id, None) if agent.accepts_open else (agent.id,)
        lanes = (project.lanes.get((LaneKind.TASKS, owner)) for owner in owners)
        heads = [(head[0][:3], lane) for lane in lanes if lane and (head := lane.head())]
        return min(heads)[1] if heads else None

    def has_lane_for(self, agent: Agent) -> bool:
        """Say whether any lane at all is the agent's own, or open to it."""
        return agent.id in self._owned or (agent.accepts_open and "" in self._owned)

    def has_own_lane(self, agent_id: str) -> bool:
        """Say whether any task waits for this agent alone."""
        return agent_id in self._owned

    def take(self, lane: Lane, agent: AgentPermits, *, tick: int) -> Task:
        """Plan the head of a lane for an agent; it leaves the index."""
        head = lane.pop()
        if head is None:
            problem = f"lane {lane.project_id}/{lane.owner or ''} has no task to take"
            raise LookupError(problem)
        entry, gate = head
        lane.served_tick = self._next_served(tick)
        self.pool(agent.agent.id, lane.kind).take_permit(agent)
        del self._waiting[entry[2]]
        self._leave(lane, gate, entry[4])
        if gate.is_call:
            self.take_upstream(entry[4].target or "")
        else:
            self.offers.tasks_left -= 1
            if gate.is_pull:
                self.set_workers(agent.agent.id, agent.workers - 1)
            else:
                self.offers.nodes_left -= 1
            self._shut_if_need_be()
        if not agent.is_free:
            self._availability_changed(agent.agent.id)
        return entry[4]

    def take_alone(self, call: Task, *, tick: int) -> tuple[AgentPermits, float] | None:
        """Plan a call that does not wait, as if it had been added and was the only one to be ready.

        Return its agent and the tick since which its lane has waited; None if it cannot start. Its
        project must have nothing that waits.
        """
        agent_id, kind = call.agent_id or "", lane_kind(call)
        if self.callers.get(agent_id) is None:
            self._ensure_caller(agent_id)
        pool = self.pool(agent_id, kind)
        agent = pool.get(agent_id)
        if agent is None or not agent.is_free:
            return None
        if not self.gates.is_open(gate_key(call, self._pull_targets)):
            return None
        lane = (call.project_id, call.agent_id, kind)
        waiting_since = max(int(self._served.get(lane, NEVER_SERVED)), call.enqueued_tick)
        self._served[lane] = self._next_served(tick)
        pool.take_permit(agent)
        self.take_upstream(call.target or "")
        if not agent.is_free:
            self._availability_changed(agent_id)
        return agent, waiting_since

    def _next_served(self, tick: int) -> float:
        """Return when the lane is served that is served now.

        A tick has many grants. If all of them had its number, the lanes of a full round would stand
        alike, and the first of them would get whatever is left of it.
        """
        latest = self._latest_served
        if not tick <= latest < tick + 1:
            latest = tick
        elif latest < tick + _LAST_GRANT:
            latest += _ONE_GRANT
        self._latest_served = latest
        return latest

    def served(self) -> dict[str, dict[str, float]]:
        """Return when each lane was last served, as a snapshot has it."""
        ticks = dict(self._served)
        for owned in self._owned.values():
            for lane in owned:
                ticks[lane.project_id, lane.owner, lane.kind] = lane.served_tick
        lanes: dict[str, dict[str, float]] = {}
        for (project_id, owner, kind), tick in ticks.items():
            if tick != NEVER_SERVED and kind is LaneKind.TASKS:
                lanes.setdefault(project_id, {})[owner or ""] = tick
        return lanes

    def remember_served(self, lanes: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from what `served` returned; for an index without tasks."""
        for project_id, owners in lanes.items():
            for owner, tick in owners.items():
                self._served[project_id, owner or None, LaneKind.TASKS] = tick
                self._latest_served = max(self._latest_served, tick)

    def remove_agent(self, agent_id: str) -> None:
        """Drop an agent that will not come back, with what is remembered of its lanes."""
        self.agents.remove(agent_id)
        self.callers.remove(agent_id)
        self._availability_changed(agent_id)
        for key in [key for key in self._served if key[1] == agent_id]:
            del self._served[key]
        for lane in self._owned.get(agent_id, ()):
            lane.served_tick = NEVER_SERVED

    def _load_agents(self, state: SchedulerState) -> None:
        inflight = state.agent_inflight or {}
        for agent in first_idle(state.agents):
            self.set_agent(agent, inflight=inflight.get(agent.id, 0))
        for agent_type, until in state.rate_limited.items():
            self.limit_agent_type(agent_type, until)

    def _rank(self, task: Task) -> Rank:
        # Ageing at a constant rate never reorders two waiting tasks, so the order is fixed when
        # the task arrives: a step of priority is worth as many seconds of earlier creation.
        if self._ageing_seconds:
            return (task.priority * self._ageing_seconds + task.created_at, 0, task.id)
        return (task.priority, 0 if self.policy is None else task.created_at, task.id)

    def goes_before(self, task: Task, other: Task) -> bool:
        """Tell whether a task is in the same lane as another one, and before it."""
        lanes = [(one.project_id, one.agent_id, lane_kind(one)) for one in (task, other)]
        return lanes[0] == lanes[1] and self._rank(task) < self._rank(other)

    def _lane(self, project_id: str, owner: str | None, kind: LaneKind) -> Lane:
        project = self.projects.get(project_id)
        if project is None:
            project = self.projects[project_id] = ProjectLanes(self._new_chooser(), None)
        if kind is not LaneKind.TASKS:
            self._ensure_caller(owner or "")
        if kind is LaneKind.CALLS_OF_TASKS and project.tasks_chooser is None:
            project.tasks_chooser = self._new_chooser()
        lane = project.lanes.get((kind, owner))
        if lane is None:
            lane = Lane(
                project_id,
                owner,
                self._waiting,
                self._depth,
                tracks_ticks=self._tracks_ticks,
                kind=kind,
            )
            lane.served_tick = self._served.pop((project_id, owner, kind), NEVER_SERVED)
            project.lanes[kind, owner] = lane
            self._owned.setdefault(owner or "", {})[lane] = None
        return lane

    def take_upstream(self, target: str) -> None:
        """Take a permit of an upstream."""
        free = self.offers.upstreams.get(target)
        if free is None:
            return
        if free > 1:
            self.offers.upstreams[target] = free - 1
        else:
            self.set_upstream(target, free - 1)

    def give_back_upstream(self, target: str) -> None:
        """Give back a permit of an upstream."""
        free = self.offers.upstreams.get(target)
        if free is None:
            return
        if free > 0:
            self.offers.upstreams[target] = free + 1
        else:
            self.set_upstream(target, free + 1)

    def _new_chooser(self) -> LaneChooser | None:
        if self.policy is None:
            return None
        return lane_chooser(self.policy, self.agent_for, max_wait_ticks=self._max_wait_ticks)

    def _announce(self, lane: Lane, *, was_ready: bool) -> None:
        chooser = self.projects[lane.project_id].chooser_of(lane)
        if chooser is None:
            return
        if was_ready:
            chooser.touch(lane)
        else:
            chooser.offer(lane)

    def _shut_if_need_be(self) -> None:
        if self.offers.must_shut_nodes:
            self.offers.are_nodes_shut = True
            self.close(NODES_SHUT)
        if self.offers.must_shut_tasks:
            self.offers.are_tasks_shut = True
            self.close(TASKS_SHUT)

    def _availability_changed(self, agent_id: str, *, was_free: bool = False) -> None:
        is_any_shut = not self.agents.pulling
        if is_any_shut is not self.offers.is_any_shut:
            self.offers.is_any_shut = is_any_shut
            if is_any_shut:
                self.close(no_worker(""))
            else:
                self.open(ANY_WORKER)
        # Open lanes are not offered again: a chooser asks who is free for them when it chooses.
        for lane in self._owned.get(agent_id, ()):
            chooser = self.projects[lane.project_id].chooser_of(lane)
            if chooser is not None:
                (chooser.ease if was_free else chooser.offer)(lane)

    def _leave(self, lane: Lane, gate: Gate, task: Task) -> None:
        project = self.projects[lane.project_id]
        if not gate.closed_by:
            project.ready -= 1
            self.offers.count(gate, -1)
        if lane.forget(gate, task):
            self._unlink(lane, gate)
        chooser = project.chooser_of(lane)
        if chooser is not None:
            chooser.touch(lane)
        if not lane.size:
            self._drop(lane)

    def _unlink(self, lane: Lane, gate: Gate) -> None:
        lanes = self.gate_lanes[gate]
        del lanes[lane]
        if not lanes:
            del self.gate_lanes[gate]
            self.gates.drop(gate)

    def _drop(self, lane: Lane) -> None:
        if lane.served_tick != NEVER_SERVED:
            self._served[lane.project_id, lane.owner, lane.kind] = lane.served_tick
        owned = self._owned[lane.owner or ""]
        del owned[lane]
        if not owned:
            del self._owned[lane.owner or ""]
        project = self.projects[lane.project_id]
        chooser = project.chooser_of(lane)
        if chooser is not None:
            chooser.drop(lane)
        del project.lanes[lane.kind, lane.owner]
        if not project.lanes:
            del self.projects[lane.project_id]
