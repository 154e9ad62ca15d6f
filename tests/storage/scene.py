"""What the tests of task stores share: a place for stores, and a scene with a dispatcher on it.

A scene ends with an audit: whatever a test did, the counts must equal the rows and the ledger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from headgate.core.admission import QueueLimits
from headgate.core.budgets.ledger import Clock, Limit, ReserveRequest
from headgate.core.budgets.scopes import ROOT, Scope, Tenant
from headgate.core.gates import GateClosure
from headgate.core.lifecycle import Finish, TryAgain, Usage
from headgate.core.money import Tokens
from headgate.core.rate_limits import RateCharge
from headgate.core.task import Lease, Submission, Task, TaskRecord, TaskStatus, Terms
from headgate.storage.memory import MemoryDatabase, MemoryTaskStore
from headgate.storage.postgres import PostgresTaskStore
from headgate.storage.sql_store import SqlTaskStore
from headgate.storage.sqlite import SqliteTaskStore
from headgate.storage.store import (
    Assigned,
    Assignment,
    NewTask,
    Node,
    NotAssigned,
    Queued,
    Settled,
    Settlement,
    StaleLease,
    TaskQuery,
    TurnedAway,
    UnknownParent,
)
from headgate.testing import VirtualClock
from storage.store_audit import audit
from storage.wired import wired_store

STORES = ("memory", "wired", "sqlite", "postgres")
HERE = "n1"
AWAY = "n2"
LEASE_SECONDS = 10.0
NO_LIMITS = QueueLimits(max_queue=None, max_per_agent=None)
DONE = Finish(status=TaskStatus.DONE)
FAILED = Finish(status=TaskStatus.FAILED, error="it broke")
AGAIN = TryAgain(not_before=None, failures=1, error="once more")
COST = Usage(tokens=70, micro_usd=7)


class Place:
    """Where tasks are kept; stores that are made here share them, and a clock."""

    def __init__(self, kind: str, make: Callable[[Clock, bool], SqlTaskStore]) -> None:
        self.kind = kind
        self.clock = VirtualClock()
        self._make = make

    def store(self, *, keeps_ledger: bool = True) -> SqlTaskStore:
        """Make a store here that several nodes share; it is not open yet."""
        store = self._make(self.clock, keeps_ledger)
        store.is_shared = True
        return store

    @asynccontextmanager
    async def scene(
        self, *, keeps_ledger: bool = True, evicts: bool = False
    ) -> AsyncIterator[Scene]:
        """Open a store with one node that dispatches, and audit it at the end."""
        store = self.store(keeps_ledger=keeps_ledger)
        await store.open()
        try:
            scene = Scene(self, store)
            await scene.start()
            yield scene
            await audit(store, has_evicted=evicts)
        finally:
            await store.close()


class Scene:
    """A store, a node that dispatches, and shorthands for every step of a task."""

    def __init__(self, place: Place, store: SqlTaskStore) -> None:
        self.place = place
        self.store = store
        self.clock = place.clock
        self.epoch = 0

    async def start(self) -> None:
        """Join as the first node, and be elected."""
        await self.store.join(Node(id=HERE, capacity=8), lease_seconds=LEASE_SECONDS)
        await self.elect()

    async def elect(self) -> None:
        """Be elected, again if need be."""
        elected = await self.store.elect(HERE, lease_seconds=LEASE_SECONDS)
        assert elected.node_id == HERE
        self.epoch = elected.epoch

    async def let_time_pass(self, seconds: float) -> None:
        """Let time pass, and renew what has to be renewed on this node."""
        self.clock.advance(seconds)
        beat = await self.store.beat(HERE, capacity=8, lease_seconds=LEASE_SECONDS)
        if not beat.is_alive:
            await self.store.join(Node(id=HERE, capacity=8), lease_seconds=LEASE_SECONDS)
        await self.elect()

    def new(
        self,
        task_id: str,
        *,
        agent_id: str | None = "coder",
        project_id: str = "search",
        depends_on: tuple[str, ...] = (),
        terms: Terms | None = None,
        limits: QueueLimits = NO_LIMITS,
        node_id: str = HERE,
        submission: Submission | None = None,
        not_before: float | None = None,
        deadline: float | None = None,
        provider: str | None = None,
        scopes: tuple[str, ...] = ("session:s",),
    ) -> NewTask:
        """Make a task to be submitted."""
        task = Task(
            id=task_id,
            project_id=project_id,
            agent_id=agent_id,
            created_at=self.clock(),
            not_before=not_before,
            deadline=deadline,
            scopes=scopes,
            target="browser",
            provider=provider,
        )
        return NewTask(
            task=task,
            terms=msgspec.structs.replace(terms or Terms(), depends_on=depends_on),
            submission=submission or Submission(action="click"),
            limits=limits,
            node_id=node_id,
        )

    async def ask(self, new: NewTask) -> Queued | TurnedAway | UnknownParent:
        """Submit a task, whatever comes of it."""
        return await self.store.submit(new)

    async def submit(self, task_id: str, **fields: object) -> TaskRecord:
        """Submit a task that is taken."""
        answer = await self.store.submit(self.new(task_id, **fields))  # type: ignore[arg-type]
        assert isinstance(answer, Queued), answer
        return answer.record

    def line(
        self,
        task_id: str,
        *,
        attempt: int = 1,
        node_id: str = HERE,
        agent_id: str = "coder",
        tokens: int = 100,
        micro_usd: int = 10,
        tick: int = 0,
        rate_charges: tuple[RateCharge, ...] = (),
        reserves: bool = True,
        slot: str | None = None,
    ) -> Assignment:
        """Make a line of a plan; on this node the task starts at once."""
        reservation_id, starts = f"{task_id}:{attempt}:{self.epoch}", node_id == HERE
        reserve = ReserveRequest(
            reservation_id=reservation_id,
            scopes=(ROOT, Scope("project:search"), Scope("session:s")),
            micro_usd=micro_usd,  # type: ignore[arg-type]
            tokens=tokens,  # type: ignore[arg-type]
            lease_seconds=None,
            dispatched=starts,
        )
        return Assignment(
            task_id=task_id,
            attempt=attempt,
            agent_id=agent_id,
            node_id=node_id,
            starts=starts,
            reservation_id=reservation_id,
            share_tokens=tokens,
            tokens=tokens,
            micro_usd=micro_usd,
            reserve=reserve if reserves else None,
            rate_charges=rate_charges,
            tick=tick,
            slot=slot,
        )

    async def plan(self, *lines: Assignment) -> list[Assigned | NotAssigned]:
        """Have a plan applied."""
        return await self.store.assign(self.epoch, lines)

    async def assign(self, task_id: str, **fields: object) -> TaskRecord:
        """Have one task assigned that can be."""
        answers = await self.plan(self.line(task_id, **fields))  # type: ignore[arg-type]
        assert isinstance(answers[0], Assigned), answers[0]
        return answers[0].record

    async def run(self, task_id: str, **fields: object) -> TaskRecord:
        """Submit a task and start it here."""
        await self.submit(task_id, **fields)
        return await self.assign(task_id)

    def settlement(
        self,
        task_id: str,
        step: Finish | TryAgain = DONE,
        *,
        attempt: int = 1,
        node_id: str = HERE,
        cost: Usage = COST,
        result: msgspec.Raw | None = None,
        closure: GateClosure | None = None,
        tenant: Tenant | None = None,
    ) -> Settlement:
        """Make the end of an attempt."""
        return Settlement(
            task_id=task_id,
            lease=Lease(node_id=node_id, attempt=attempt),
            step=step,
            cost=cost,
            result=None if result is None else bytes(result).decode(),
            tenant=tenant,
            closure=closure,
        )

    async def settle(
        self, task_id: str, step: Finish | TryAgain = DONE, **fields: object
    ) -> tuple[TaskRecord, ...]:
        """Settle an attempt whose lease is good."""
        settlement = self.settlement(task_id, step, **fields)  # type: ignore[arg-type]
        answer = await self.store.settle(settlement)
        assert isinstance(answer, Settled), answer
        return answer.records

    async def cancel(self, task_id: str, *, node_id: str = HERE) -> tuple[TaskRecord, ...]:
        """Cancel a task that is there."""
        answer = await self.store.cancel(task_id, node_id=node_id)
        assert answer is not None
        return answer.records

    async def is_stale(self, settlement: Settlement) -> bool:
        """Tell whether a settlement is refused."""
        return isinstance(await self.store.settle(settlement), StaleLease)

    async def get(self, task_id: str) -> TaskRecord:
        """Read a task that is there."""
        record = await self.store.get(task_id)
        assert record is not None
        return record

    async def found(self, query: TaskQuery) -> tuple[TaskRecord, ...]:
        """List tasks that fit on one page."""
        return (await self.store.find(query)).records

    async def state(self, task_id: str) -> str:
        """Read the state of a task; `gone` if there is none."""
        record = await self.store.get(task_id)
        return "gone" if record is None else record.task.status.value

    async def states(self, *task_ids: str) -> list[str]:
        """Read the states of tasks."""
        return [await self.state(task_id) for task_id in task_ids]

    async def join_away(self) -> None:
        """Take up a second node."""
        await self.store.join(Node(id=AWAY, capacity=8), lease_seconds=LEASE_SECONDS)

    async def set_limit(self, scope: str, tokens: int) -> None:
        """Limit the tokens of a scope."""
        await self.store.set_limits({Scope(scope): Limit(limit_tokens=Tokens(tokens))})

    async def lane(self, agent_id: str = "coder", project_id: str = "search") -> tuple[int, int]:
        """Read how many tasks of a lane wait and are in flight."""
        for lane in (await self.store.totals()).lanes:
            if (lane.agent_id, lane.project_id) == (agent_id, project_id):
                return lane.queued, lane.inflight
        return 0, 0


def ids(records: Sequence[TaskRecord]) -> list[str]:
    """Return whose records these are."""
    return [record.task.id for record in records]


def fresh_place(kind: str, request: pytest.FixtureRequest) -> Place:
    """Make a place that nobody has written to."""
    if kind == "memory":
        database = MemoryDatabase()
        return Place(
            kind, lambda clock, ledger: MemoryTaskStore(database, clock=clock, keeps_ledger=ledger)
        )
    if kind == "wired":
        shared = MemoryDatabase()
        return Place(
            kind, lambda clock, ledger: wired_store(shared, clock=clock, keeps_ledger=ledger)
        )
    if kind == "sqlite":
        path = request.getfixturevalue("tmp_path") / "tasks.db"
        return Place(
            kind, lambda clock, ledger: SqliteTaskStore(path, clock=clock, keeps_ledger=ledger)
        )
    url = request.getfixturevalue("postgres_url")
    return Place(
        kind, lambda clock, ledger: PostgresTaskStore(url, clock=clock, keeps_ledger=ledger)
    )
