"""The lane index: who waits, behind what, and who could serve them.

The dispatcher keeps one between rounds and tells it of every change; `Scheduler.schedule` builds
one from a snapshot. A decision then touches only lanes that have work, never the queued tasks
behind their heads, and a closed gate is parked whole. A task that is planned leaves the index;
one whose plan is refused is added again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from headgate.core.gates import ANY_WORKER, NODES, Gate, GateClosure, GatePart, GateTable, gate_key
from headgate.core.lane_policy import LaneChooser, lane_chooser
from headgate.core.lanes import (
    NEVER_SERVED,
    NODES_SHUT,
    AgentPermits,
    AgentPool,
    Lane,
    Offers,
    Rank,
    first_idle,
    no_worker,
)
from headgate.core.snapshot import Agent, LanePolicy, SchedulerState, is_due
from headgate.core.task import Task, TaskStatus

FEW = 8
"""A lane this many times as large as what is added to it is not worth sorting again."""


class ProjectLanes:
    """The lanes of one project; `ready` counts the tasks that no gate holds."""

    __slots__ = ("chooser", "lanes", "ready")

    def __init__(self, chooser: LaneChooser | None) -> None:
        self.chooser = chooser
        self.lanes: dict[str | None, Lane] = {}
        self.ready = 0


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
    ) -> None:
        self.policy = policy
        self.agents = AgentPool(counted=counts_inflight)
        self.offers = Offers(self.agents)
        self._pull_targets = pull_targets
        self._max_wait_ticks = max_wait_ticks
        self._ageing_seconds = priority_ageing_seconds
        self._tracks_ticks = policy is LanePolicy.HIGHEST_LOAD or max_wait_ticks is not None
        self._waiting: dict[str, Task] = {}
        self.gates = GateTable(self.offers.closure)
        self.gate_lanes: dict[Gate, dict[Lane, None]] = {}
        self.projects: dict[str, ProjectLanes] = {}
        self._owned: dict[str, dict[Lane, None]] = {}
        self._served: dict[tuple[str, str | None], int] = {}

    @classmethod
    def of(cls, state: SchedulerState) -> LaneIndex:
        """Build the index of a snapshot."""
        index = cls(
            policy=state.lane_policy,
            max_wait_ticks=state.max_wait_ticks,
            priority_ageing_seconds=state.priority_ageing_seconds,
            counts_inflight=state.agent_inflight is not None,
            pull_targets=state.pull_targets,
        )
        for agent_id, free in state.worker_places.items():
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

    def ready(self, project_id: str) -> int:
        """Return how many tasks of a project no gate holds."""
        project = self.projects.get(project_id)
        return 0 if project is None else project.ready

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
        lane = self._lane(task.project_id, task.agent_id)
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
        groups: dict[tuple[str, str | None, Gate], list[tuple[Rank, Task]]] = {}
        for task in tasks:
            gate = self.gate_of(task)
            group = groups.setdefault((task.project_id, task.agent_id, gate), [])
            group.append((self._rank(task), task))
            self._waiting[task.id] = task
        for (project_id, owner, gate), ranked in groups.items():
            lane = self._lane(project_id, owner)
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
            lane = self.projects[task.project_id].lanes[task.agent_id]
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
                if project.chooser is not None:
                    project.chooser.touch(lane)

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
        self._availability_changed(agent.id)

    def set_workers(self, agent_id: str, free: int) -> None:
        """Count the places that are free at the workers of an agent."""
        had = self.agents.workers(agent_id)
        if free == had:
            return
        self.agents.set_workers(agent_id, free)
        if not free:
            self.close(no_worker(agent_id))
        elif not had:
            self.open(GatePart("worker", agent_id))
        self._availability_changed(agent_id)

    def begin_round(self, node_places: float) -> bool:
        """Say how many places the nodes have left; return whether anybody could have one."""
        offers = self.offers
        offers.nodes_left = node_places
        if node_places > 0 and offers.are_nodes_shut:
            offers.are_nodes_shut = False
            self.open(NODES)
        self._shut_nodes_if_need_be()
        return not offers.is_over

    def free_place(self, agent_id: str) -> None:
        """Give back one place of an agent whose task has ended."""
        entry = self.agents.get(agent_id)
        if entry is not None and entry.inflight > 0:
            was_free = entry.is_free
            self.agents.give_back(entry)
            self._availability_changed(agent_id, was_free=was_free)

    def take_place(self, agent_id: str) -> None:
        """Count one more task in flight of an agent that was found with it."""
        entry = self.agents.get(agent_id)
        if entry is not None:
            self.agents.take_place(entry)
            self._availability_changed(agent_id)

    def limit_agent_type(self, agent_type: str, until: float | None) -> None:
        """Hold all agents of a type until a time, or release them with None."""
        for entry in self.agents.limit(agent_type, until):
            self._availability_changed(entry.agent.id)

    def agent_for(self, lane: Lane) -> AgentPermits | None:
        """Return the agent that would take the lane's next task, None while none is free."""
        if lane.owner is None:
            head = lane.head() if self.offers.pulled else None
            if head is not None and head[1].is_pull:
                return self.agents.for_open_pull()
            return self.agents.for_open_task()
        entry = self.agents.get(lane.owner)
        return entry if entry is not None and entry.is_free else None

    def choose_lane(self, project_id: str, *, tick: int, alpha: float) -> Lane | None:
        """Return the lane of a project that goes first under the policy."""
        project = self.projects.get(project_id)
        if project is None or project.chooser is None:
            return None
        return project.chooser.best(tick=tick, alpha=alpha)

    def lane_for(self, project_id: str, agent: Agent) -> Lane | None:
        """Return the lane whose head this agent would take: its own, or the open one."""
        project = self.projects.get(project_id)
        if project is None:
            return None
        owners = (agent.id, None) if agent.accepts_open else (agent.id,)
        lanes = (project.lanes.get(owner) for owner in owners)
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
        lane.served_tick = tick
        self.agents.take_place(agent)
        del self._waiting[entry[2]]
        self._leave(lane, gate, entry[4])
        if gate.is_pull:
            self.set_workers(agent.agent.id, agent.workers - 1)
        else:
            self.offers.nodes_left -= 1
            self._shut_nodes_if_need_be()
        if not agent.is_free:
            self._availability_changed(agent.agent.id)
        return entry[4]

    def served(self) -> dict[str, dict[str, int]]:
        """Return when each lane was last served, as a snapshot has it."""
        ticks = dict(self._served)
        for owned in self._owned.values():
            ticks.update(((lane.project_id, lane.owner), lane.served_tick) for lane in owned)
        lanes: dict[str, dict[str, int]] = {}
        for (project_id, owner), tick in ticks.items():
            if tick != NEVER_SERVED:
                lanes.setdefault(project_id, {})[owner or ""] = tick
        return lanes

    def remember_served(self, lanes: Mapping[str, Mapping[str, int]]) -> None:
        """Go on from what `served` returned; for an index without tasks."""
        for project_id, owners in lanes.items():
            for owner, tick in owners.items():
                self._served[project_id, owner or None] = tick

    def remove_agent(self, agent_id: str) -> None:
        """Drop an agent that will not come back, with what is remembered of its lanes."""
        self.agents.remove(agent_id)
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

    def _lane(self, project_id: str, owner: str | None) -> Lane:
        project = self.projects.get(project_id)
        if project is None:
            project = self.projects[project_id] = ProjectLanes(self._new_chooser())
        lane = project.lanes.get(owner)
        if lane is None:
            lane = Lane(project_id, owner, self._waiting, tracks_ticks=self._tracks_ticks)
            lane.served_tick = self._served.pop((project_id, owner), NEVER_SERVED)
            project.lanes[owner] = lane
            self._owned.setdefault(owner or "", {})[lane] = None
        return lane

    def _new_chooser(self) -> LaneChooser | None:
        if self.policy is None:
            return None
        return lane_chooser(self.policy, self.agent_for, max_wait_ticks=self._max_wait_ticks)

    def _announce(self, lane: Lane, *, was_ready: bool) -> None:
        chooser = self.projects[lane.project_id].chooser
        if chooser is None:
            return
        if was_ready:
            chooser.touch(lane)
        else:
            chooser.offer(lane)

    def _shut_nodes_if_need_be(self) -> None:
        if self.offers.must_shut_nodes:
            self.offers.are_nodes_shut = True
            self.close(NODES_SHUT)

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
            chooser = self.projects[lane.project_id].chooser
            if chooser is not None:
                (chooser.ease if was_free else chooser.offer)(lane)

    def _leave(self, lane: Lane, gate: Gate, task: Task) -> None:
        project = self.projects[lane.project_id]
        if not gate.closed_by:
            project.ready -= 1
            self.offers.count(gate, -1)
        if lane.forget(gate, task):
            self._unlink(lane, gate)
        if project.chooser is not None:
            project.chooser.touch(lane)
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
            self._served[lane.project_id, lane.owner] = lane.served_tick
        owned = self._owned[lane.owner or ""]
        del owned[lane]
        if not owned:
            del self._owned[lane.owner or ""]
        project = self.projects[lane.project_id]
        if project.chooser is not None:
            project.chooser.drop(lane)
        del project.lanes[lane.owner]
        if not project.lanes:
            del self.projects[lane.project_id]
