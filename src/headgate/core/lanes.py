"""Lanes: where the tasks of one agent in one project wait.

A lane counts only work that could start: tasks behind a closed gate are in neither its depth nor
its oldest wait, so that parked work cannot make a lane look loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, islice
from operator import attrgetter

from headgate.core.gates import ANY_WORKER, NODES, Gate, GateClosure, GatePart
from headgate.core.load import to_micro_weight
from headgate.core.snapshot import Agent, AgentState
from headgate.core.task import Task

# The waiting tasks of a lane in order, in groups that can be switched off whole.
#
# It answers one question, which task comes first among the open gates, and it keeps three rules.
# Tasks that arrive in order cost the same whether ten wait or a million: each class of a group is
# a row that is appended to at one end and taken from at the other. Removing a task costs nothing
# at once: a dead entry is dropped when it comes to the front, and a lane that is more than half
# dead is rebuilt. A closed gate costs nothing: its tasks stay where they are until it opens.

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
"""The first entry of a row among those of its lane; only the latest offer of a row counts."""


class GroupedHeap:
    """The waiting tasks of one lane, by gate and class, in the order of their ranks.

    `waiting` is shared with the index: a task is alive while `waiting` holds that very object.
    A class is any number that most arrivals are in order within, such as the priority.
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
MAX_GATES_LOOKED_AT = 64
"""How many gates of a lane are looked at for its longest wait; the first came first."""


class Lane:
    """The queue of one agent within one project; `owner` None is the project's open lane."""

    __slots__ = (
        "_oldest",
        "_order",
        "_stock",
        "depth_micro",
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
        *,
        tracks_ticks: bool,
    ) -> None:
        self.project_id = project_id
        self.owner = owner
        self.size = 0
        self.ready = 0
        self.depth_micro = 0
        self.served_tick = NEVER_SERVED
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
        return max(self.served_tick, self.oldest_tick())

    def park(self, gate: Gate) -> int:
        """Stop counting the tasks of a gate that closed, and return how many they are."""
        size, depth_micro = self._stock[gate]
        self.ready -= size
        self.depth_micro -= depth_micro
        return size

    def unpark(self, gate: Gate) -> int:
        """Count and offer the tasks of a gate that opened, and return how many they are."""
        size, depth_micro = self._stock[gate]
        self.ready += size
        self.depth_micro += depth_micro
        self._order.reopen(gate)
        if self._oldest is not None:
            self._oldest.reopen(gate)
        return size

    def _count(self, gate: Gate, task: Task, step: int) -> int:
        stock = self._stock.get(gate)
        if stock is None:
            stock = self._stock[gate] = [0, 0]
        depth_micro = step * to_micro_weight(task.weight) if self._oldest is not None else 0
        stock[0] += step
        stock[1] += depth_micro
        self.size += step
        if not gate.closed_by:
            self.ready += step
            self.depth_micro += depth_micro
        return stock[0]


def waited(task: Task, now: float) -> float:
    """Return for how many seconds a task has waited, not counting the time until its own."""
    return max(0.0, now - max(task.created_at, task.not_before or 0.0))


def _tick_rank(task: Task) -> Rank:
    return (task.enqueued_tick, 0, task.id)


# The agents of the index: whose places are free, and who would take an open task.
#
# An open task goes to the agent with the fewest tasks in flight, then to the one named first. One
# that is to be pulled goes to such an agent with a free place at one of its workers.


class AgentPermits:
    """An agent, how many places it has, and how many of them are taken; the pool changes it.

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
        "places",
        "workers",
    )

    def __init__(self, agent: Agent, *, order: int) -> None:
        self.agent = agent
        self.order = order
        self.inflight = 0
        self.places = 0
        self.limited_until: float | None = None
        self.is_free = False
        self.may_take_open = False
        """Whether it would take an open task now."""
        self.may_pull_open = False
        """Whether one of its workers would take an open task now."""
        self.workers = 0
        """How many places are free at its workers."""


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


def places_of(agent: Agent, *, counted: bool) -> int:
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


def _moved(entry: AgentPermits, order: int) -> bool:
    before, entry.order = entry.order, order
    return before != order


class AgentPool:
    """All agents in their order; `free` counts those that could take a task.

    `pulling` counts those with a worker that would take an open one.
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
        """Add or replace an agent; a known one keeps its place in the order."""
        entry = self._agents.get(agent.id)
        if entry is None:
            entry = self._agents[agent.id] = AgentPermits(agent, order=next(self._orders))
        self._leave(entry)
        entry.agent = agent
        entry.inflight = inflight
        entry.places = places_of(agent, counted=self._counted)
        entry.limited_until = self._limited.get(agent.agent_type)
        entry.workers = self._workers.get(agent.id, 0)
        self._return(entry)
        return entry

    def workers(self, agent_id: str) -> int:
        """Return how many places are free at the workers of an agent."""
        return self._workers.get(agent_id, 0)

    def set_workers(self, agent_id: str, free: int) -> None:
        """Count the places that are free at the workers of an agent, also of an unknown one."""
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
        """Name these agents first, in this order; return those that have another place now."""
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

    def take_place(self, entry: AgentPermits) -> None:
        """Count one more task in flight."""
        entry.inflight += 1
        if entry.inflight >= entry.places:
            self._leave(entry)

    def give_back(self, entry: AgentPermits) -> None:
        """Count one task less in flight."""
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
        if entry.inflight >= entry.places or entry.limited_until is not None:
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


# Offers: where tasks could run now, on the nodes of the service and at the workers of agents.
#
# Tasks of pull targets run at workers only, all others on nodes only. Either is a part of every
# gate: while an agent has no worker with a free place, what its workers are to pull is parked.
#
# Rule: tasks for the nodes are parked for want of a place only while others could be pulled. Where
# nobody pulls, a full service is simply the end of the round, and nothing is parked for it.

NODES_SHUT = GateClosure(kind="node", name="", why="every place of the service is taken")


class Offers:
    """The places that are left, and how many tasks are ready for either kind of them."""

    __slots__ = ("_pool", "are_nodes_shut", "is_any_shut", "nodes_left", "plain", "pulled")

    def __init__(self, pool: AgentPool) -> None:
        self._pool = pool
        self.nodes_left: float = math.inf
        self.are_nodes_shut = False
        self.is_any_shut = True
        self.plain = 0
        self.pulled = 0

    @property
    def has_ready(self) -> bool:
        """Whether anything waits that no gate holds."""
        return self.plain > 0 or self.pulled > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing that is ready has a place to run."""
        return self.nodes_left <= 0 and not self.pulled

    @property
    def must_shut_nodes(self) -> bool:
        """Whether tasks without a place stand in the way of others that have one."""
        return self.nodes_left <= 0 and self.plain > 0 and self.pulled > 0

    def count(self, gate: Gate, tasks: int) -> None:
        """Count tasks that became ready, or fewer of them."""
        if gate.is_pull:
            self.pulled += tasks
        else:
            self.plain += tasks

    def closure(self, part: GatePart) -> GateClosure | None:
        """Return what closes a part of an offered kind; None while it is open."""
        if part == NODES:
            return NODES_SHUT if self.are_nodes_shut else None
        is_shut = self.is_any_shut if part == ANY_WORKER else not self._pool.workers(part.name)
        return no_worker(part.name) if is_shut else None


def no_worker(agent_id: str) -> GateClosure:
    """Return what closes the gates of tasks that an agent's workers are to pull."""
    return GateClosure(kind="worker", name=agent_id, why="no worker has a free place")
