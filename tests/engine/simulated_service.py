"""The whole engine on a simulated loop: several nodes on one store, clients, faults and crashes.

`run_service` plays one seed: engines on hosts that crash between any two awaits, a store whose
commits are refused or whose replies get lost, clients that submit and cancel. A witness sees each
commit. In the end faults stop, and everything that was acknowledged must come to its end.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from typing import Any

import msgspec

from engine.simulated_work import SimulatedExecutor, Work, by_chance
from engine.simulated_workers import SimulatedWorker
from engine.witness import WatchedDatabase, Witness
from headgate.core.admission import QueueLimits
from headgate.core.budgets.ledger import Ledger, Limit
from headgate.core.budgets.scopes import Scope
from headgate.core.dispatch_state import DispatchSettings
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import Outcome
from headgate.core.money import Tokens
from headgate.core.rate_limits import RateLimit
from headgate.core.retention import Retention
from headgate.core.slots.slot import SlotStanding
from headgate.core.snapshot import Agent, LanePolicy, Project
from headgate.core.task import OnExhausted, OnParentFailure, Submission, Task, Terms
from headgate.engine.engine import Engine, EngineSettings
from headgate.errors import IllegalTransitionError, StoreError
from headgate.executors.executor import WorkOrder
from headgate.storage.memory import MemoryTaskStore
from headgate.storage.store import Queued, TaskQuery, TurnedAway
from headgate.storage.writer import Fault
from headgate.testing import Host, HostCrashedError, SimulatedLoop, simulate
from storage.store_audit import audit

MAX_STEPS = 5_000_000
LAST_SECONDS = 600.0
"""How long everything may take to come to its end once nothing goes wrong any more."""

LAST_WORD_SECONDS = 20.0
"""How long a worker may take to hand in what came of a task that others have ended."""

LATE_SECONDS = 5_000.0
"""A deadline that saves nobody who is forgotten."""

WORKERS = ("a", "b", "made", "a")
"""The agents that workers serve, where there are any."""

SLOTS = ("one", "two")
"""The slots of the provider `p`, where there are any."""

WAYS: tuple[dict[str, Any], ...] = ({}, {"slot": "one"}, {"provider": "p"}, {"provider": "p"})

REQUESTS = RateLimit(kind="target", name="t", unit="requests", most=6, window_seconds=60)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What happens in one simulation."""

    seed: int
    nodes: int = 2
    tasks: int = 40
    crashes: int = 6
    fault_rate: float = 0.03
    lost_answer_rate: float = 0.0
    outages: int = 1
    overruns: bool = False
    slow_replies: bool = False
    workers: int = 0
    has_slots: bool = False
    policy: LanePolicy = LanePolicy.FEWEST_IN_FLIGHT


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came out of one simulation."""

    acknowledged: int
    tasks: int
    attempts: int
    crashes: int
    commits: int
    faults: int
    ended: dict[str, int]
    seconds: float
    problems: tuple[str, ...]


def plan_of(seed: int) -> Plan:
    """Return a plan that is different for each seed."""
    draws = Random(seed)
    return Plan(
        seed=seed,
        nodes=draws.choice([1, 2, 2, 3]),
        tasks=draws.choice([10, 30, 40]),
        crashes=draws.choice([0, 5, 20]),
        fault_rate=draws.choice([0.0, 0.0, 0.0, 0.03, 0.2]),
        lost_answer_rate=draws.choice([0.0, 0.05]),
        outages=draws.choice([0, 0, 1, 3]),
        overruns=draws.random() < 0.3,
        slow_replies=draws.random() < 0.4,
        policy=draws.choice(list(LanePolicy)),
        workers=draws.choice([0, 3, 4]),
        has_slots=draws.random() < 0.5,
    )


def engine_settings(policy: LanePolicy = LanePolicy.FEWEST_IN_FLIGHT) -> EngineSettings:
    """Return a configuration in which every kind of limit is met soon."""
    dispatch_state = DispatchSettings(
        projects=(
            Project(id="x", max_concurrent_agents=None),
            Project(id="y", credit_weight=2.0, max_concurrent_agents=3),
        ),
        agents=(Agent(id="a", agent_type="claude", capacity=2), Agent(id="b", capacity=3)),
        rate_limits=(REQUESTS,),
        lane_policy=policy,
        max_wait_ticks=20,
        max_inflight=6,
        max_per_agent_inflight=1,
        default_tokens=100,
        pull_targets=frozenset({"pull"}),
    )
    return EngineSettings(
        dispatch=dispatch_state,
        limits=QueueLimits(max_queue=30, max_per_agent=10),
        budgets={
            Scope("session:tight"): Limit(limit_tokens=Tokens(1_000)),
            Scope(""): Limit(limit_tokens=Tokens(100_000)),
        },
        capacity=4,
        worker_lease_seconds=8.0,
        retention=Retention(seconds=1e9),
    )


class SimulatedService:
    """Nodes, clients and faults around one store."""

    def __init__(self, loop: SimulatedLoop, plan: Plan) -> None:
        self.loop = loop
        self.plan = plan
        self.settings = self.new_settings()
        self.witness = self.new_witness()
        self.ledger: Ledger | None = None
        self.database = WatchedDatabase()
        self.database.look = self.witness.look
        self.engines: dict[str, Engine] = {}
        self.hosts = [Host(loop, f"h{number}") for number in range(plan.nodes)]
        self.acknowledged: set[str] = set()
        self.executed: Counter[tuple[str, int]] = Counter()
        self.crashes_left = plan.crashes
        self.faults = 0
        self.lost_answers = 0
        self.cut_off: set[str] = set()
        self.is_quiet = False
        self.standings: tuple[SlotStanding, ...] = ()
        self._read_quotas()
        self.workers = [self._worker(agent_id) for agent_id in WORKERS[: plan.workers]]

    def new_settings(self) -> EngineSettings:
        """Return what every node is configured with."""
        return engine_settings(self.plan.policy)

    def new_witness(self) -> Witness:
        """Return who sees every commit."""
        return Witness(self.settings, self.loop.clock)

    async def run(self) -> Report:
        """Play the plan, and return what came of it."""
        keepers = [asyncio.create_task(self._keep(host)) for host in self.hosts]
        keepers += [asyncio.create_task(worker.keep()) for worker in self.workers]
        keepers += [asyncio.create_task(one.stand_still_now_and_then()) for one in self.workers]
        outages = asyncio.create_task(self._have_outages())
        quotas = asyncio.create_task(self._use_up_quotas())
        await asyncio.gather(*(self._be_a_client(number) for number in range(4)))
        await outages
        self.is_quiet = True
        quotas.cancel()
        self._read_quotas()
        for worker in self.workers:
            worker.calm_down()
        ended = await self._wait_for_the_end()
        await asyncio.sleep(LAST_WORD_SECONDS)
        for _ in range(60):
            if self._leading():
                break
            await asyncio.sleep(1.0)
        self._check_states()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)
        self._check_executions()
        return Report(
            acknowledged=len(self.acknowledged),
            tasks=sum(ended.values()),
            attempts=len(self.executed),
            crashes=sum(host.crashes for host in self.hosts),
            commits=self.witness.commits,
            faults=self.faults,
            ended=ended,
            seconds=self.loop.time(),
            problems=tuple(self.witness.problems),
        )

    async def _use_up_quotas(self) -> None:
        while True:
            await asyncio.sleep(self.loop.random.uniform(1, 10))
            held = self.loop.random.choice([(), SLOTS[:1], SLOTS[1:], SLOTS])
            self._read_quotas(*held)

    def _read_quotas(self, *held: str) -> None:
        self.standings = tuple(
            SlotStanding(
                name=name,
                provider="p",
                closure=GateClosure(kind="slot", name=name) if name in held else None,
                percent_used=float(self.loop.random.randrange(100)),
            )
            for name in (SLOTS if self.plan.has_slots else ())
        )
        for engine in self.engines.values():
            engine.dispatcher.set_slots(self.standings)

    def _worker(self, agent_id: str) -> SimulatedWorker:
        return SimulatedWorker(
            self.loop,
            agent_id,
            self._any_engine,
            partial(self.new_executor, "pull"),
            lost_rate=self.plan.lost_answer_rate,
            crashes=self.plan.crashes // 2,
        )

    def _any_engine(self) -> tuple[Host, Engine] | None:
        host = self._any_host()
        return None if host is None else (host, self.engines[host.name])

    def fault(self, host_name: str) -> Fault | None:
        """Say what befalls the next commit of a host."""
        if self.is_quiet:
            return None
        if self.lost_answers:
            self.lost_answers -= 1
            return Fault.REPLY_LOST
        if self.loop.random.random() < self.plan.lost_answer_rate:
            # The transaction is run once more, and the second reply gets lost, too.
            self.faults += 1
            self.lost_answers = 1
            return Fault.REPLY_LOST
        if host_name not in self.cut_off and self.loop.random.random() >= self.plan.fault_rate:
            return None
        self.faults += 1
        return self.loop.random.choice([Fault.REFUSED, Fault.REPLY_LOST])

    def _reply_seconds(self) -> float:
        return self.loop.random.choice([0.0, 0.0, 0.001, 0.02, 0.5])

    async def _have_outages(self) -> None:
        for _ in range(self.plan.outages):
            await asyncio.sleep(self.loop.random.uniform(1, 10))
            # The store is away, or one node cannot reach it for longer than its lease.
            hosts = self.loop.random.choice([self.hosts, self.hosts[:1], self.hosts[-1:]])
            self.cut_off = {host.name for host in hosts}
            await asyncio.sleep(self.loop.random.choice([1.0, 5.0, 25.0]))
            self.cut_off = set()

    async def _keep(self, host: Host) -> None:
        """Start a host again and again."""
        while True:
            life = host.spawn(self._live(host))
            if self.crashes_left and not self.is_quiet:
                self.crashes_left -= 1
                host.crash_after(self.loop.random.choice([9, 40, 150, 600, 2_000]))
            try:
                await life
            except HostCrashedError:
                self.engines.pop(host.name, None)
            await asyncio.sleep(self.loop.random.choice([0.0, 0.5, 4.0, 14.0]))

    async def _live(self, host: Host) -> None:
        store = MemoryTaskStore(
            self.database,
            clock=self.loop.clock,
            is_shared=True,
            keeps_ledger=self.ledger is None,
            faults=partial(self.fault, host.name),
            reply_seconds=self._reply_seconds if self.plan.slow_replies else None,
        )
        executors = {target: self.new_executor(target) for target in ("", "t", "u")}
        draws = self.loop.random
        engine = Engine(store, executors, self.settings, ledger=self.ledger, draws=draws)
        engine.dispatcher.set_slots(self.standings)
        while True:
            try:
                await engine.start()
                break
            except StoreError:
                await asyncio.sleep(0.5)
        engine.dispatcher.set_slots(self.standings)
        self.engines[host.name] = engine
        if self.loop.random.random() < 0.2 and not self.is_quiet:
            await asyncio.sleep(self.loop.random.uniform(1, 20))
            self.engines.pop(host.name)
            await engine.stop(drain_seconds=self.loop.random.choice([0.0, 5.0]))
            return
        await asyncio.Event().wait()

    def work_of(self, _target: str) -> Work:
        """Return what comes of the work of a target."""
        return by_chance(self.loop.random, overruns=self.plan.overruns)

    def new_executor(self, target: str) -> SimulatedExecutor:
        """Return who does the work of a target, and counts how often."""
        chance = self.work_of(target)

        def work(order: WorkOrder) -> tuple[float, Outcome]:
            self.executed[order.task_id, order.attempt] += 1
            seconds, outcome = chance(order)
            time_left = (order.deadline or LATE_SECONDS + self.loop.clock()) - self.loop.clock()
            # Whoever hangs is stopped by a deadline that is near.
            return (seconds if time_left < 100.0 else min(seconds, 9.0)), outcome

        return SimulatedExecutor(work, stop_seconds=0.1)

    async def _be_a_client(self, number: int) -> None:
        share = self.plan.tasks // 4
        draws = self.loop.random
        while share > 0:
            await asyncio.sleep(draws.choice([0.0, 0.05, 1.0, 4.0]))
            batch = min(share, draws.choice([1, 1, 5]))
            share -= batch
            await asyncio.gather(*(self._submit(number) for _ in range(batch)))
            if draws.random() < 0.3:
                await self._cancel()

    async def _submit(self, number: int) -> None:
        while (host := self._any_host()) is None:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        engine = self.engines[host.name]
        task, terms = self.some_work(engine.now())
        submission = Submission(action="work", labels={"client": str(number)})

        async def ask() -> None:
            answer = await engine.submit(task, terms, submission)
            if isinstance(answer, Queued | TurnedAway):
                self.acknowledged.add(answer.record.task.id)

        with suppress(HostCrashedError, StoreError):
            await host.spawn(ask())

    async def _cancel(self) -> None:
        host = self._any_host()
        if host is None or not self.acknowledged:
            return
        task_id = self.loop.random.choice(sorted(self.acknowledged))
        with suppress(HostCrashedError, StoreError, IllegalTransitionError):
            await host.spawn(self.engines[host.name].cancel(task_id))

    def _any_host(self) -> Host | None:
        alive = [host for host in self.hosts if host.name in self.engines]
        return self.loop.random.choice(alive) if alive else None

    def some_work(self, now: float) -> tuple[Task, Terms]:
        """Return a task that a client submits."""
        draws = self.loop.random
        known = sorted(self.acknowledged)
        parents = draws.sample(known[-4:], k=min(len(known), draws.choice([0] * 6 + [1, 2])))
        task = Task(
            project_id=draws.choice(["x", "y"]),
            agent_id=draws.choice([None, None, "a", "b", "made"]),
            priority=draws.choice([0, 0, 1]),
            created_at=now,
            estimate_tokens=draws.choice([None, 50, 400, 2_000]),
            deadline=draws.choice([None, now + 3.0, now + 60.0, now + LATE_SECONDS]),
            not_before=draws.choice([None, None, now + 3.0]),
            target=draws.choice(["", "t", "u", *(["pull", "pull"] if self.workers else [])]),
            scopes=draws.choice([(), ("project:x",), ("session:tight",)]),
            **(draws.choice(WAYS) if self.plan.has_slots else {}),
        )
        terms = Terms(
            max_attempts=draws.choice([1, 3]),
            on_exhausted=draws.choice(list(OnExhausted)),
            on_parent_failure=draws.choice(list(OnParentFailure)),
            depends_on=tuple(parents),
        )
        return task, terms

    async def _wait_for_the_end(self) -> dict[str, int]:
        store = MemoryTaskStore(
            self.database,
            clock=self.loop.clock,
            is_shared=True,
            keeps_ledger=self.ledger is None,
        )
        await store.open()
        last = self.loop.time() + LAST_SECONDS
        while True:
            records = (await store.find(TaskQuery(limit=10_000))).records
            await audit(store)
            if all(record.is_terminal for record in records):
                break
            if self.loop.time() > last:
                left = [record for record in records if not record.is_terminal]
                self.witness.problems.append(f"{len(left)} tasks do not end: {left[:3]}")
                break
            await asyncio.sleep(1.0)
        for record in records:
            was_given = record.progress.slot in SLOTS
            if bool(record.task.provider and record.progress.attempt) is not was_given:
                self.witness.problems.append(f"{record.task.id} has not the slot it was given")
        lost = self.acknowledged - {record.task.id for record in records}
        if lost:
            self.witness.problems.append(f"acknowledged and lost: {sorted(lost)}")
        return dict(Counter(record.task.status.value for record in records))

    def _leading(self) -> list[Engine]:
        return [
            each for each in self.engines.values() if each.dispatcher.dispatch_state is not None
        ]

    def _check_states(self) -> None:
        """Nothing waits and nothing runs, and whoever dispatches knows it."""
        leading = self._leading()
        if len(leading) != 1:
            self.witness.problems.append(f"{len(leading)} nodes dispatch")
        for engine in leading:
            dispatch_state = engine.dispatcher.dispatch_state
            if (
                dispatch_state is None
                or dispatch_state.waiting
                or len(dispatch_state.in_flight)
                or len(dispatch_state.index)
            ):
                self.witness.problems.append("the dispatch state believes in tasks that have ended")
            elif any(entry.inflight for entry in dispatch_state.index.agents):
                self.witness.problems.append("the state believes in permits that were freed")
        for worker in self.workers:
            if worker.worker is not None and len(worker.worker):
                self.witness.problems.append(f"{worker.host.name} still runs something")
        for name, engine in self.engines.items():
            if len(engine.runner):
                self.witness.problems.append(f"{name} still runs {engine.runner.known()}")

    def _check_executions(self) -> None:
        twice = [attempt for attempt, count in self.executed.items() if count > 1]
        if twice:
            self.witness.problems.append(f"executed twice under one lease: {twice}")
        times = [at for at, target in self.witness.starts if target == REQUESTS.name]
        for first in times:
            lately = sum(first <= at < first + REQUESTS.window_seconds for at in times)
            if lately > REQUESTS.most:
                self.witness.problems.append(f"{lately} requests in a window from {first}")


@contextmanager
def seeded_names(seed: int) -> Iterator[None]:
    """Draw ids of tasks and nodes from a seed, so that a run can be repeated."""
    before, os.urandom = os.urandom, Random(seed).randbytes
    try:
        yield
    finally:
        os.urandom = before


def run_service(
    plan: Plan, new_service: Callable[[SimulatedLoop, Plan], SimulatedService] = SimulatedService
) -> Report:
    """Play one plan, and return what came of it."""
    with seeded_names(plan.seed):
        simulation = simulate(
            lambda loop: new_service(loop, plan).run(), seed=plan.seed, max_steps=MAX_STEPS
        )
    return simulation.result
