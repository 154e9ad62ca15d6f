"""A service of one or more nodes on the simulated loop, for tests of single rules.

Every test ends with an audit: whatever happened, counts and books equal the rows of the tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

from engine.simulated_work import SimulatedExecutor, Work, always
from headgate.core.admission import QueueLimits
from headgate.core.budgets.ledger import Ledger
from headgate.core.dispatch_state import DispatchSettings
from headgate.core.lifecycle import RetryPolicy
from headgate.core.retention import Retention
from headgate.core.snapshot import Agent, Project
from headgate.core.task import Submission, Task, TaskRecord, Terms
from headgate.engine.engine import Engine, EngineSettings
from headgate.storage.memory import MemoryDatabase, MemoryTaskStore
from headgate.storage.store import Queued
from headgate.storage.writer import Fault
from headgate.testing import Host, SimulatedLoop, simulate
from storage.store_audit import audit

T = TypeVar("T")
TERMS = frozenset(Terms.__struct_fields__)
LOOK_SECONDS = 0.05
NEVER_EVICTED_SECONDS = 1e9


def dispatch_settings(**fields: Any) -> DispatchSettings:
    """Return settings under which a test meets no limit that it does not name."""
    values: dict[str, Any] = {
        "projects": (
            Project(id="x", max_concurrent_agents=None),
            Project(id="y", max_concurrent_agents=None),
        ),
        "agents": (Agent(id="any", capacity=1_000),),
        "max_inflight": 1_000,
        "max_per_agent_inflight": 1_000,
        "default_tokens": 100,
    }
    return DispatchSettings(**(values | fields))


class Service:
    """Nodes on one database, their executor, and what a client would do."""

    def __init__(self, loop: SimulatedLoop, work: Work, **fields: Any) -> None:
        self.loop = loop
        self.executor = SimulatedExecutor(work, stop_seconds=fields.pop("stop_seconds", 0.0))
        new_ledger = fields.pop("new_ledger", None)
        self.ledger: Ledger | None = None if new_ledger is None else new_ledger(loop.clock)
        self.database = MemoryDatabase()
        self.fault: Callable[[], Fault | None] = lambda: None
        self.away: set[int] = set()
        self._numbers = count()
        dispatch_state = {
            name: fields.pop(name) for name in DispatchSettings.__struct_fields__ if name in fields
        }
        fields.setdefault("limits", QueueLimits(max_queue=None, max_per_agent=None))
        fields.setdefault("retention", Retention(seconds=NEVER_EVICTED_SECONDS))
        fields.setdefault("capacity", 1_000)
        fields.setdefault("policy", RetryPolicy())
        self.settings = EngineSettings(dispatch=dispatch_settings(**dispatch_state), **fields)
        self.engines: list[Engine] = []
        self.engine = self.new_engine()

    def new_store(self) -> MemoryTaskStore:
        """Return another store on the same database; those in `away` cannot reach it."""
        number = next(self._numbers)
        return MemoryTaskStore(
            self.database,
            clock=self.loop.clock,
            is_shared=True,
            keeps_ledger=self.ledger is None,
            faults=lambda: Fault.REFUSED if number in self.away else self.fault(),
        )

    def new_engine(self, executor: SimulatedExecutor | None = None) -> Engine:
        """Return another node; all of them do their work with one executor unless it is named."""
        shared = executor or self.executor
        executors = {"": shared, "t": shared, "u": shared}
        store = self.new_store()
        engine = Engine(store, executors, self.settings, ledger=self.ledger, draws=self.loop.random)
        self.engines.append(engine)
        return engine

    async def start_another(self, host: Host | None = None) -> Engine:
        """Start one more node, on a host that may crash if one is named."""
        engine = self.new_engine(SimulatedExecutor(self.executor.work))
        await (engine.start() if host is None else host.spawn(engine.start()))
        return engine

    async def submit(self, **fields: Any) -> str:
        """Submit a task, and return its id once it is acknowledged."""
        terms = {name: fields.pop(name) for name in TERMS if name in fields}
        fields.setdefault("project_id", "x")
        fields.setdefault("target", "")
        task = Task(created_at=self.now(), **({"estimate_tokens": 100} | fields))
        answer = await self.engine.submit(task, Terms(**terms), Submission(action="work"))
        assert isinstance(answer, Queued)
        return answer.record.task.id

    async def get(self, task_id: str) -> TaskRecord:
        """Return a task as it is now."""
        record = await self.engine.store.get(task_id)
        assert record is not None
        return record

    async def ended(self, task_id: str, *, within_seconds: float = 600.0) -> TaskRecord:
        """Return a task when it has ended."""
        async with asyncio.timeout(within_seconds):
            while not (record := await self.get(task_id)).is_terminal:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
        return record

    async def running(self, task_id: str, *, within_seconds: float = 60.0) -> None:
        """Wait until the executor is at work on a task."""
        async with asyncio.timeout(within_seconds):
            while task_id not in self.ordered():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)

    def ordered(self) -> list[str]:
        """Return the tasks that the executor was given, in their order."""
        return [order.task_id for order in self.executor.orders]

    def now(self) -> float:
        """Return the time of day."""
        return self.loop.clock()

    async def audit(self) -> None:
        """Hold what is counted against the rows."""
        store = self.new_store()
        await store.open()
        has_evicted = self.settings.retention.seconds < NEVER_EVICTED_SECONDS
        await audit(store, has_evicted=has_evicted)


Scenario = Callable[[Service], Coroutine[Any, Any, T]]


def play(
    scenario: Scenario[T], work: Work | None = None, *, seed: int | None = 0, **fields: Any
) -> T:
    """Start a service, let a scenario happen to it, stop it and audit what is left."""

    async def main(loop: SimulatedLoop) -> T:
        service = Service(loop, work or always(1.0), **fields)
        await service.engine.start()
        result = await scenario(service)
        service.fault = lambda: None
        for engine in service.engines:
            await engine.stop(drain_seconds=0.0)
        await service.audit()
        return result

    return simulate(main, seed=seed, max_steps=3_000_000).result
