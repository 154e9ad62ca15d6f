"""A simulated fleet: projects that submit, agents that run, and the real decision between them.

It keeps one lane index between rounds as the dispatcher does, and nothing in it is random beyond
its seed. Use it to see what a configuration does to shares and waits before money is spent on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

import msgspec

from headgate.core.gates import GateClosure
from headgate.core.lane_index import LaneIndex
from headgate.core.scheduler import decide, eligible_turns
from headgate.core.snapshot import Agent, AssignAction, Project, SchedulerState, tokens_charged
from headgate.core.task import Task

WorkFactory = Callable[[random.Random], Task]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """How one project behaves: what it keeps queued, what its tasks are like, when it is there.

    `make` returns a task without an id; the fleet numbers it. A project is absent, neither queueing
    nor served, in the rounds for which `present` says no.
    """

    project: Project
    make: WorkFactory
    backlog: int = 20
    fails: bool = False
    rounds: Callable[[random.Random], int] = lambda _: 1
    present: Callable[[int], bool] = lambda _: True


class Running(msgspec.Struct, frozen=True, order=True):
    """A task in flight, in the order in which the tasks end."""

    ends_round: int
    number: int
    action: AssignAction
    tokens: int


class SimulatedFleet:
    """Runs rounds of submit, decide, run and settle over one lane index.

    `options` is a snapshot whose optional fields say how to decide; the fleet fills in the rest.
    """

    def __init__(
        self,
        workloads: list[Workload],
        agents: list[Agent],
        options: SchedulerState,
        *,
        seed: int = 0,
    ) -> None:
        self.workloads = {workload.project.id: workload for workload in workloads}
        self.agents = agents
        self.options = options
        self.round = 0
        self.tick = 0
        self.used: dict[str, int] = dict.fromkeys(self.workloads, 0)
        self.reserved: dict[str, int] = dict.fromkeys(self.workloads, 0)
        self.active: dict[str, int] = dict.fromkeys(self.workloads, 0)
        self.started: dict[str, int] = dict.fromkeys(self.workloads, 0)
        self.completed: dict[str, int] = dict.fromkeys(self.workloads, 0)
        self.forgiven: dict[str, int] = dict.fromkeys(self.workloads, 0)
        self.present: list[str] = []
        self.closed: dict[str, GateClosure] = {}
        self.grants: list[AssignAction] = []
        self.index = LaneIndex(
            policy=options.lane_policy,
            max_wait_ticks=options.max_wait_ticks,
            priority_ageing_seconds=options.priority_ageing_seconds,
            counts_inflight=True,
        )
        for agent in agents:
            self.index.set_agent(agent)
        self._random = random.Random(seed)  # noqa: S311
        self.queued: dict[str, int] = dict.fromkeys(self.workloads, 0)
        self.waited: dict[str, list[int]] = {name: [] for name in self.workloads}
        self._running: list[Running] = []
        self._number = self._starts = 0
        self._tasks: dict[str, Task] = {}
        self._granted: list[tuple[AssignAction, int]] = []

    def step(self) -> list[AssignAction]:
        """Run one round, and return what it gave out."""
        self.round += 1
        self._settle()
        self._submit()
        if not self.index.agents.free:
            return []
        state = self.figures()
        if state.max_lag_tokens is not None:
            turns = eligible_turns(self.index, state)
            self.forgiven |= {turn.project.id: turn.forgiven for turn in turns}
            self.present = [turn.project.id for turn in turns]
            state = self.figures()
        actions = decide(self.index, state)
        for action in actions:
            self._start(action)
        self.grants += actions
        self._close_exhausted()
        return actions

    def figures(self) -> SchedulerState:
        """Return the figures of this moment, without tasks and agents: those are in the index."""
        return replace(
            self.options,
            projects=[w.project for w in self.workloads.values() if w.present(self.round)],
            project_token_usage=dict(self.used),
            project_reserved=dict(self.reserved),
            project_active_agent_counts=dict(self.active),
            tasks_completed_in_window=dict(self.completed),
            project_started=None if self.options.project_started is None else dict(self.started),
            project_forgiven=dict(self.forgiven),
            projects_present=list(self.present),
            agent_inflight={entry.agent.id: entry.inflight for entry in self.index.agents},
            tick=self.tick,
            now=float(self.round),
        )

    def snapshot(self) -> SchedulerState:
        """Return everything, tasks and agents included, as `Scheduler.explain` takes it."""
        return replace(
            self.figures(),
            tasks=list(self.index),
            agents=self.agents,
            lane_served=self.index.served(),
            closed_gates=list(self.closed.values()),
        )

    def target_shares(self) -> dict[str, float]:
        """Return the share of each project that could be given something now."""
        turns = eligible_turns(self.index, self.figures())
        return {turn.project.id: turn.target for turn in turns}

    def recent_shares(self, grants: int) -> dict[str, float]:
        """Return the share of the tokens that the last grants went with."""
        tokens = dict.fromkeys(self.workloads, 0)
        for action, charged in self._granted[-grants:]:
            tokens[action.project_id] += charged
        total = sum(tokens.values()) or 1
        return {name: used / total for name, used in tokens.items()}

    def _settle(self) -> None:
        while self._running and self._running[0].ends_round <= self.round:
            done = heappop(self._running)
            project_id = done.action.project_id
            self.tick += 1
            self.reserved[project_id] -= done.tokens
            self.used[project_id] += done.tokens
            self.active[project_id] -= 1
            self.completed[project_id] += not self.workloads[project_id].fails
            self.index.give_back_permit(done.action.agent_id)
            del self._tasks[done.action.task_id]

    def _submit(self) -> None:
        for project_id, workload in self.workloads.items():
            if not workload.present(self.round):
                continue
            for _ in range(workload.backlog - self.queued[project_id]):
                self._number += 1
                task = msgspec.structs.replace(
                    workload.make(self._random),
                    id=f"t{self._number:07}",
                    project_id=project_id,
                    created_at=float(self.round),
                    enqueued_tick=self.tick,
                    scopes=(budget_scope(project_id),),
                )
                self._tasks[task.id] = task
                self.queued[project_id] += 1
                self.index.add(task)

    def _start(self, action: AssignAction) -> None:
        workload = self.workloads[action.project_id]
        task = self._tasks[action.task_id]
        tokens = tokens_charged(task, self.options.default_tokens)
        self.queued[action.project_id] -= 1
        self.waited[action.project_id].append(self.round - int(task.created_at))
        self._granted.append((action, tokens))
        self.reserved[action.project_id] += tokens
        self.active[action.project_id] += 1
        self.started[action.project_id] += 1
        self._starts += 1
        ends = self.round + max(1, workload.rounds(self._random))
        heappush(self._running, Running(ends, self._starts, action, tokens))

    def _close_exhausted(self) -> None:
        for project_id, workload in self.workloads.items():
            limit = workload.project.budget_limit
            if limit is not None and self.used[project_id] + self.reserved[project_id] >= limit:
                scope = budget_scope(project_id)
                self.closed[scope] = GateClosure(kind="scope", name=scope, why="budget used up")
                self.index.close(self.closed[scope])


def budget_scope(project_id: str) -> str:
    """Return the scope that holds a project's budget."""
    return f"project:{project_id}"
