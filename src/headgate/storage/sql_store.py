"""The task store in a database: steps of concurrent callers share a transaction.

What changes anything goes through one writer, in the order in which it came; what only reads goes
through a reader, which sees everything that was acknowledged before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import count
from math import inf
from typing import Any, Protocol, TypeVar

from headgate.core.budgets.ledger import (
    MAX_ACCOUNTS,
    Account,
    AdjustRequest,
    Audit,
    Clock,
    JournalEntry,
    Limit,
    Refused,
    ReserveRequest,
    SettleRequest,
)
from headgate.core.budgets.reservations import Reservation
from headgate.core.budgets.scopes import ROOT, Scope
from headgate.core.gates import GateClosure, GatePart
from headgate.core.idempotency import KeyRefusal
from headgate.core.retention import Evicted, Retention, RetentionCut
from headgate.core.task import TaskRecord
from headgate.errors import LedgerUnavailableError, StaleEpochError, StoreError, StoreFullError
from headgate.storage import (
    assign,
    call_rows,
    finish,
    ledger,
    maintenance,
    nodes,
    queries,
    schema,
    slot_rows,
    submit,
    task_calls,
    tokens,
    usage,
)
from headgate.storage.assign import collect
from headgate.storage.audit import AuditEntry
from headgate.storage.finish import cancel, settle
from headgate.storage.migrations import migrate, schema_version
from headgate.storage.store import (
    DISPATCHER,
    Assigned,
    Assignment,
    Backlog,
    Beat,
    CancelAnswer,
    Cancellation,
    Collected,
    Election,
    Expiration,
    Heir,
    KeyedAnswer,
    KeyedSubmit,
    Life,
    News,
    NewTask,
    Node,
    NotAssigned,
    Plan,
    Queued,
    Settled,
    Settlement,
    StaleLease,
    TaskPage,
    TaskQuery,
    Totals,
    TurnedAway,
    UnknownParent,
)
from headgate.storage.submit import Keys, new_tasks, submit_keyed, submit_task
from headgate.storage.transaction import Access, Result, Row, Transaction
from headgate.storage.unit_of_work import Disk, RowCache, TaskRow, UnitOfWork
from headgate.storage.workers import WorkerSteps
from headgate.storage.writer import Batch, StandingOrder, Step, StepAnswer, Writer
from headgate.storage.zones import zone

# One batch of steps: whatever callers asked for at the same time, in one transaction.
#
# Steps of all kinds share a unit of work, so that each table is read and written once for all of
# them, however they are mixed. They are applied in the order in which they came.


def apply_steps(work: UnitOfWork, steps: Sequence[Step]) -> list[StepAnswer]:
    """Apply steps in their order; each has an answer of its own."""
    batch = _sorted(steps)
    dead = _load(work, batch)
    epochs: dict[int, StaleEpochError | None] = {}
    keys = Keys(work, batch.keyed) if batch.keyed else None
    answers = [_apply(work, step, dead, epochs, keys) for step in steps]
    work.write()
    if keys is not None:
        keys.write()
    return answers


class _Batch:
    """Steps by their kind."""

    __slots__ = ("keyed", "new", "other", "plans")

    def __init__(self) -> None:
        self.new: list[NewTask] = []
        self.keyed: list[KeyedSubmit] = []
        self.other: list[Settlement | Cancellation] = []
        self.plans: list[Plan] = []


def _sorted(steps: Sequence[Step]) -> _Batch:
    batch = _Batch()
    for step in steps:
        if isinstance(step, NewTask):
            batch.new.append(step)
        elif isinstance(step, Plan):
            batch.plans.append(step)
        elif isinstance(step, KeyedSubmit):
            batch.keyed.append(step)
            batch.new += new_tasks([step])
        else:
            batch.other.append(step)
    return batch


def _load(work: UnitOfWork, batch: _Batch) -> set[str]:
    """Read what steps need, in few round trips; return which nodes of plans are not alive."""
    lines = [line for plan in batch.plans for line in plan.assignments]
    wanted = [line.task_id for line in lines]
    wanted += [step.task_id for step in batch.other]
    for new in batch.new:
        wanted += submit.task_ids(new)
    if batch.new:
        work.disk.look(work.transaction, work.now, batch.new[-1].limits.max_store_bytes)
    planned, leases = {line.node_id for line in lines}, list[Row]()
    work.read(
        [(nodes.leases_statement(planned), leases.extend)] if planned else (),
        work.need_election(),
        work.need_rows(wanted),
        submit.needs(work, batch.new) if batch.new else (),
        work.need_submissions([line.task_id for line in lines if line.starts]),
    )
    rows = work.rows([step.task_id for step in batch.other])
    parents = [parent for row in rows for parent in row.spec.terms.depends_on]
    if parents:
        work.load(parents)
    claims = {
        step.task_id: step.tenant
        for step in batch.other
        if isinstance(step, Settlement) and step.tenant is not None
    }
    reserves = [line.reserve for line in lines if line.reserve is not None]
    work.load_ledger(reserves, rows, claims)
    return nodes.without_lease(leases, planned, work.now)


def _apply(
    work: UnitOfWork,
    step: Step,
    dead: set[str],
    epochs: dict[int, StaleEpochError | None],
    keys: Keys | None,
) -> StepAnswer:
    if isinstance(step, NewTask):
        return submit_task(work, step)
    if isinstance(step, Settlement):
        return settle(work, step)
    if isinstance(step, Cancellation):
        return cancel(work, step)
    if isinstance(step, KeyedSubmit):
        return submit_keyed(work, keys or Keys(work, [step]), step)
    stale = _stale(work, step.epoch, epochs)
    if stale is not None:
        return stale
    return [assign.assign(work, line, dead=dead) for line in step.assignments]


def _stale(
    work: UnitOfWork, epoch: int, known: dict[int, StaleEpochError | None]
) -> StaleEpochError | None:
    if epoch not in known:
        known[epoch] = None
        try:
            nodes.check_election(work.election, epoch, work.now)
        except StaleEpochError as error:
            known[epoch] = error
    return known[epoch]


# The schema of a store: the tables of every subject, each with its own numbered migrations.

PARTS = (
    (ledger.PART, ledger.MIGRATIONS),
    (schema.TASKS, schema.TASK_MIGRATIONS),
    (schema.DELIVERIES, schema.DELIVERY_MIGRATIONS),
    (submit.PART, submit.MIGRATIONS),
    (tokens.PART, tokens.MIGRATIONS),
    (usage.PART, usage.MIGRATIONS),
    (schema.ADMINISTRATION, schema.ADMINISTRATION_MIGRATIONS),
    (schema.WORKERS, schema.WORKER_MIGRATIONS),
    (schema.ESTIMATES, schema.ESTIMATE_MIGRATIONS),
    (slot_rows.PART, slot_rows.MIGRATIONS),
    (call_rows.PART, call_rows.MIGRATIONS),
    (task_calls.PART, task_calls.MIGRATIONS),
)


def migrate_all(transaction: Transaction) -> None:
    """Bring all tables up to date; newer ones than the program's are refused."""
    for part, migrations in PARTS:
        migrate(transaction, part, migrations)


# The tables of a store, from within: what holds for every transaction on them.
#
# Whoever writes keeps one `TaskTables` for as long as it has the database: when it last tidied up,
# which rows it knows, which connection it has looked at.
#
# Rule: tables travel as a name. An operation that is sent to a process which writes is about the
# tables that are there, whatever process it comes from.

Read = TypeVar("Read")

UPKEEP_SECONDS = 60.0


class TaskTables:
    """The tables of tasks, with those of the ledger beside them if it `keeps_ledger`.

    `now` is the clock by which leases and deadlines are judged.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        keeps_ledger: bool = True,
        cache: RowCache | None = None,
    ) -> None:
        self.keeps_ledger = keeps_ledger
        self.now: Clock = time.time if clock is None else clock
        self._cache = cache
        self.disk = Disk()
        self._tidied_at = float("-inf")
        self._purged_up_to = ROOT
        self._held_up_to = ""
        # A database has one transaction object for each of its connections.
        self._checked: Transaction | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _tables_here, ()

    def prepare(self, transaction: Transaction) -> None:
        """Bring the schema up to date; a newer one than the program's is refused."""
        migrate_all(transaction)

    def apply(self, transaction: Transaction, steps: Sequence[Step]) -> Sequence[StepAnswer]:
        """Apply steps in their order; each has an answer of its own."""
        now = self.begin(transaction)
        return apply_steps(self._unit_of_work(transaction, now), steps)

    def run(
        self, operation: Callable[[Transaction, float], Read], transaction: Transaction
    ) -> Read:
        """Run an operation at the time that it is."""
        return operation(transaction, self.begin(transaction))

    def work(self, operation: Callable[[UnitOfWork], Read], transaction: Transaction) -> Read:
        """Run an operation on a unit of work, and write what it has changed."""
        work = self._unit_of_work(transaction, self.begin(transaction))
        result = operation(work)
        work.write()
        return result

    def begin(self, transaction: Transaction) -> float:
        """Make sure that the tables are there and nobody else writes, and return the time."""
        if transaction is not self._checked:
            self._check(transaction)
        if self._cache is not None:
            self._cache.begin(transaction)
        ledger.lock_ledger(transaction)
        now = self.now()
        # Also after a clock that was ahead was set back.
        if abs(now - self._tidied_at) >= UPKEEP_SECONDS:
            self._keep_up(transaction, now)
        return now

    def _unit_of_work(self, transaction: Transaction, now: float) -> UnitOfWork:
        return UnitOfWork(
            transaction, now, keeps_ledger=self.keeps_ledger, disk=self.disk, cache=self._cache
        )

    def _check(self, transaction: Transaction) -> None:
        """Look whether a new connection leads to the tasks: a file or server can be replaced."""
        if not schema_version(transaction, schema.TASKS):
            advice = "put them back, or open the store again to create new ones"
            line = f"the database has no tasks any more, nothing was done; {advice}"
            raise LedgerUnavailableError(line)
        self.prepare(transaction)
        self._checked = transaction

    def _keep_up(self, transaction: Transaction, now: float) -> None:
        # As long as there is more, the next call does the next step; none of them waits long.
        if ledger.tidy(transaction, now) or submit.purge_keys(transaction, now):
            return
        self._tidied_at = now
        self._purged_up_to = ledger.purge_buckets(transaction, now, after=self._purged_up_to)
        self._held_up_to = maintenance.end_orphans(transaction, now, after=self._held_up_to)
        maintenance.purge(transaction, now)


_here: list[TaskTables] = []


def be_here(tables: TaskTables) -> None:
    """Make these the tables that operations from other processes are about."""
    _here[:] = [tables]


def _tables_here() -> TaskTables:
    return _here[0]


ENDLESS_SECONDS = 100 * 365 * 86_400.0

KEPT_PER_LEASE = 3
"""How often a lease is renewed while the loop that should do it is busy."""

SILENT_LEASES = 6
"""For how many leases a loop may show nothing until its own are not renewed any more.

One that is busy with requests shows itself between them. One that hangs for good is given up after
this time and one lease more: a minute and ten seconds for a node at the default, 21 seconds for the
dispatcher.
"""

SOLE_LEASE_SECONDS = 10.0
"""What stands for a lease where one process has the store to itself, and renews those of workers.
A third of it is longer than that process ever waits between two signs."""

MAX_NEWS = 500
"""How many messages the dispatcher is handed at once: their tasks are read without a pause."""

MAX_UNFORGOTTEN = 1_000
FORGET_SECONDS = 1.0
"""How many messages that were seen may be kept, about, and for how long while others come."""


class Reader(Protocol):
    """Answers questions about what has been committed."""

    def start(self) -> None:
        """Begin to take questions."""

    async def close(self) -> None:
        """Answer what was asked, and take no more."""

    def submit(self, question: Callable[[Transaction], Result]) -> asyncio.Future[Result]:
        """Ask a question."""


class SqlTaskStore(WorkerSteps):
    """Tasks in the tables of a database, written by one writer and read by others.

    With a `news_reader` the dispatcher reads what other nodes changed beside all who write.
    """

    def __init__(
        self,
        tables: TaskTables,
        writer: Writer,
        reader: Reader,
        *,
        long_reader: Reader | None = None,
        news_reader: Reader | None = None,
        is_shared: bool = True,
    ) -> None:
        super().__init__()
        self.tables = tables
        # The clock itself: it is asked dozens of times for each task.
        self.now = tables.now
        self.writer = writer
        self.is_shared = is_shared
        self._reader = reader
        self._long_reader = long_reader or reader
        self._news_reader = news_reader
        self._seen: dict[str, int] = {}
        self._forgotten = 0
        self._forgot_at = -inf
        self._forgiveness_numbers = count(1)
        self._inbox_lock = asyncio.Lock()
        self._news_lock = asyncio.Lock()
        # Each kind of step has its own kind of answer, which the types of a batch cannot say.
        self._steps: Batch[Any, Any] = tables.apply

    async def open(self) -> None:
        """Connect, and bring the schema up to date; a newer one than the program's is refused."""
        self.writer.start()
        try:
            await self.writer.submit(self.tables.prepare)
            for reader in self._readers():
                reader.start()
        except BaseException:
            await self.writer.close()
            raise

    async def close(self) -> None:
        """Finish what was asked for, then let go of everything."""
        for reader in self._readers():
            await reader.close()
        await self.writer.close()

    def _readers(self) -> set[Reader]:
        readers = {self._reader, self._long_reader}
        return readers if self._news_reader is None else {*readers, self._news_reader}

    def submit(self, new: NewTask) -> asyncio.Future[Queued | TurnedAway | UnknownParent]:
        """Store a task if it may wait; the same id again gets its answer again."""
        return self.writer.submit_request(self._steps, new)

    def submit_keyed(self, keyed: KeyedSubmit) -> asyncio.Future[KeyedAnswer | KeyRefusal]:
        """Store the tasks of a request and keep the answer; the same key gets its answer again."""
        return self.writer.submit_request(self._steps, keyed)

    def cancel(
        self, task_id: str, *, node_id: str, entry: AuditEntry | None = None
    ) -> Awaitable[CancelAnswer | None]:
        """Cancel what waits, and ask the node of what runs; None if there is no such task."""
        return self.writer.submit_request(self._steps, Cancellation(task_id, node_id, entry))

    def settle(self, settlement: Settlement) -> Awaitable[Settled | StaleLease]:
        """Write the end of an attempt: the outcome, the money, the freed permit, all at once."""
        return self.writer.submit_request(self._steps, settlement)

    def assign(
        self, epoch: int, assignments: Sequence[Assignment]
    ) -> Awaitable[list[Assigned | NotAssigned]]:
        """Take tasks, capacity and money for a plan, each line wholly or not at all."""
        return self.writer.submit_request(self._steps, Plan(epoch, assignments))

    def get(self, task_id: str) -> Awaitable[TaskRecord | None]:
        """Return a task with all that is known of it."""
        return self.ask(partial(queries.get, task_id=task_id))

    async def among(self, task_ids: Sequence[str], owner: TaskQuery) -> frozenset[str]:
        """Return which of these tasks there are of the agent and the project of a query."""
        return await self.ask(partial(queries.among, task_ids=task_ids, owner=owner))

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks, newest first, as many as fit on one page."""
        return await self.ask(partial(queries.find, query=query))

    async def totals(self) -> Totals:
        """Count what waits, what runs and what has happened."""
        return await self.ask(queries.totals)

    async def outbox(self, *, limit: int) -> list[SettleRequest]:
        """Return settlements that a ledger outside the store has yet to be told."""
        return await self.ask(partial(maintenance.unsent, limit=limit))

    async def sent(self, reservation_ids: Sequence[str]) -> None:
        """Forget settlements that the ledger has answered."""
        await self.run(partial(_forget_sent, reservation_ids))

    async def evict(self, retention: Retention, *, limit: int) -> Evicted:
        """Delete ended tasks that nothing needs, up to a number and a size at a time."""
        evict = partial(_evict, self.tables, retention, limit)
        return await self.run(evict)

    async def deleted_by(self, task_id: str) -> RetentionCut | None:
        """Return which setting deleted a task that is not there; None of one that never was."""
        return await self.ask(partial(maintenance.deleted_by, task_id=task_id))

    async def join(self, node: Node, *, lease_seconds: float) -> None:
        """Take up a node; from now on tasks may be assigned to it."""
        join = partial(_join, node, self._lease(lease_seconds), is_sole=not self.is_shared)
        await self._run_first(join)

    async def beat(
        self, node_id: str, *, capacity: int, lease_seconds: float, is_leaving: bool = False
    ) -> Beat:
        """Renew the lease of a node and of everything that it runs."""
        lease_seconds = self._lease(lease_seconds)
        beat = partial(_beat, node_id, capacity, lease_seconds, is_leaving=is_leaving)
        return await self._run_first(beat)

    def keep_alive(self, life: Life | None) -> None:
        """Have leases renewed while this loop is busy, until it has been silent for too long."""
        if life is None:
            self.writer.keep(())
        elif self.is_shared:
            self.writer.keep([*self._kept_leases(life)])
        else:
            # Its own lease does not end, but those of its workers do, and nobody else hears them.
            self.writer.keep([self._standing(_keep_workers, SOLE_LEASE_SECONDS)])

    def _kept_leases(self, life: Life) -> Iterator[StandingOrder]:
        seconds = life.lease_seconds
        yield self._standing(partial(_keep, life.node_id, seconds), seconds)
        if life.epoch is not None:
            seconds = life.dispatcher_lease_seconds
            leading = partial(_keep_leading, life.node_id, life.epoch, seconds)
            yield self._standing(leading, seconds)

    def _standing(
        self, operation: Callable[[Transaction, float], None], lease_seconds: float
    ) -> StandingOrder:
        return StandingOrder(
            operation=partial(self.tables.run, operation),
            every_seconds=lease_seconds / KEPT_PER_LEASE,
            longest_seconds=lease_seconds * SILENT_LEASES,
        )

    async def leave(self, node_id: str) -> None:
        """Take a node out that runs nothing any more."""
        await self.run(partial(_leave, node_id))
        self._seen.pop(node_id, None)

    def watch(self, recipient: str, callback: Callable[[], None]) -> None:
        """Call back when somebody may have been told something; this store has nobody to tell."""

    def unwatch(self, recipient: str | None = None) -> None:
        """Call nobody back any more, or no more for this recipient."""

    async def elect(self, node_id: str, *, lease_seconds: float) -> Election:
        """Become or stay the dispatcher if nobody else is, and return who is."""
        return await self._run_first(partial(_elect, node_id, self._lease(lease_seconds)))

    async def resign(self, node_id: str) -> None:
        """Stop being the dispatcher, so that another need not wait for the lease to end."""
        await self._run_first(partial(_resign, node_id))

    async def collect(self, node_id: str) -> Collected:
        """Start the tasks that are assigned to a node, and return them with what to cancel."""
        return await self._receive(node_id, partial(_collect, node_id))

    async def closures(self) -> tuple[GateClosure, ...]:
        """Return what answers of targets and providers, and words of workers, have closed."""
        return await self.ask(partial(queries.closures, now=self.now()))

    async def open_gate(self, part: GatePart, entry: AuditEntry | None = None) -> bool:
        """Open a part before its time, and note who did; say whether it was closed here."""
        return await self.run(partial(queries.open_gate, part=part, entry=entry))

    async def news(self, epoch: int, *, all_workers: bool = True) -> News:
        """Return what other nodes changed since the last call, and forget that it was news.

        Messages have their numbers from behind the lock. So whoever reads beside it sees all of
        them up to some number, and none that is overtaken by an earlier one.
        """
        if self._news_reader is None:
            return await self._receive(DISPATCHER, partial(_news, epoch, all_workers))
        async with self._news_lock:
            seen = self._seen.get(DISPATCHER, 0)
            self._forget_news(seen)
            question = partial(
                queries.news,
                now=self.now(),
                epoch=epoch,
                seen=seen,
                most=MAX_NEWS,
                all_workers=all_workers,
            )
            news, self._seen[DISPATCHER] = await self._news_reader.submit(question)
            return news

    def _forget_news(self, seen: int) -> None:
        """Have messages forgotten that were seen, when they are many or some time has passed."""
        now, unforgotten = time.monotonic(), seen - self._forgotten
        if not unforgotten:
            return
        if unforgotten >= MAX_UNFORGOTTEN or now - self._forgot_at >= FORGET_SECONDS:
            forgetting = self.writer.submit(partial(self.tables.run, partial(_forget_news, seen)))
            # What cannot be forgotten now is with the next ones.
            forgetting.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._forgotten, self._forgot_at = seen, now

    async def backlog(self, epoch: int) -> Backlog:
        """Return everything that has not ended, to a dispatcher that starts."""
        await self.run(partial(_discard_news, epoch))
        # A long backlog takes seconds. In the writer it would keep leases from being renewed.
        return await self.ask(partial(_backlog, self.tables), is_long=True)

    async def drop(self, epoch: int, drops: Sequence[Expiration]) -> list[TaskRecord]:
        """End queued tasks without running them, and return all that changed."""
        return await self._take_back(epoch, partial(finish.drop, drops=drops))

    async def recover(
        self, epoch: int, task_ids: Sequence[str], *, heir: Heir | None = None
    ) -> list[TaskRecord]:
        """Take tasks back from nodes whose lease has ended, and return all that changed."""
        return await self._take_back(epoch, partial(finish.recover, task_ids=task_ids, heir=heir))

    async def forgive(self, epoch: int, tokens: dict[str, int]) -> None:
        """Remember lag that was forgiven to projects now."""
        forgiveness = assign.Forgiveness(epoch, next(self._forgiveness_numbers), tokens)
        await self.run(partial(_forgive, forgiveness))

    async def set_limits(self, limits: dict[Scope, Limit]) -> tuple[Scope, ...]:
        """Set the budgets that the configuration names, and remove those that it named before."""
        for limit in limits.values():
            zone(limit.window.zone)
        return await self.run(partial(_set_limits, limits, keeps_ledger=self.tables.keeps_ledger))

    def run(self, operation: Callable[[Transaction, float], Result]) -> Awaitable[Result]:
        """Change something, at a time that is given; the answer means that it is on disk."""
        return self.writer.submit(partial(self.tables.run, operation))

    def ask(
        self, question: Callable[[Transaction], Result], *, is_long: bool = False
    ) -> Awaitable[Result]:
        """Read what has been committed; what may take long keeps nobody else waiting."""
        return (self._long_reader if is_long else self._reader).submit(question)

    def _lease(self, seconds: float) -> float:
        # Where nobody else can take over, a process that was held up has lost nothing.
        return seconds if self.is_shared else ENDLESS_SECONDS

    def _run_first(self, operation: Callable[[Transaction, float], Result]) -> Awaitable[Result]:
        return self.writer.submit(partial(self.tables.run, operation), goes_first=True)

    async def _work(
        self, operation: Callable[[UnitOfWork], Result], *, goes_first: bool = False
    ) -> Result:
        work = partial(self.tables.work, operation)
        return await self.writer.submit(work, goes_first=goes_first)

    async def _take_back(
        self, epoch: int, operation: Callable[[UnitOfWork], list[TaskRow]]
    ) -> list[TaskRecord]:
        return await self._work(partial(_take_back, epoch, operation))

    async def _receive(
        self, recipient: str, read: Callable[[int, UnitOfWork], tuple[Result, int]]
    ) -> Result:
        """Read messages; only those of an answer that has arrived are forgotten, by the next call.

        One call at a time: two that run side by side would both be given the same.
        """
        async with self._inbox_lock:
            seen = self._seen.get(recipient, 0)
            result, last = await self._work(partial(read, seen))
            if last != seen:
                self._seen[recipient] = last
            return result


# What is asked of the tables, as functions that can be sent to whoever writes.


def _forget_sent(reservation_ids: Sequence[str], tasks: Transaction, _now: float) -> None:
    maintenance.forget(tasks, reservation_ids)


def _evict(
    tables: TaskTables, retention: Retention, limit: int, tasks: Transaction, now: float
) -> Evicted:
    size = tables.disk.measure(tasks, now, retention.max_store_bytes)
    return maintenance.evict(tasks, now, retention=retention, limit=limit, size=size)


def _join(
    node: Node, lease_seconds: float, tasks: Transaction, now: float, *, is_sole: bool
) -> None:
    if is_sole:
        nodes.forget_others(tasks, node.id)
        nodes.depose_others(tasks, node.id)
    nodes.give_grace(tasks, now)
    nodes.join(tasks, node, now + lease_seconds)


def _beat(
    node_id: str,
    capacity: int,
    lease_seconds: float,
    tasks: Transaction,
    now: float,
    *,
    is_leaving: bool,
) -> Beat:
    return nodes.beat(
        tasks,
        node_id,
        capacity=capacity,
        now=now,
        lease_seconds=lease_seconds,
        is_leaving=is_leaving,
    )


def _keep(node_id: str, lease_seconds: float, tasks: Transaction, now: float) -> None:
    nodes.keep(tasks, node_id, now=now, lease_seconds=lease_seconds)


def _keep_leading(
    node_id: str, epoch: int, lease_seconds: float, tasks: Transaction, now: float
) -> None:
    nodes.keep_leading(tasks, node_id, epoch, now=now, lease_seconds=lease_seconds)


def _keep_workers(tasks: Transaction, now: float) -> None:
    nodes.keep_workers(tasks, now)


def _leave(node_id: str, tasks: Transaction, _now: float) -> None:
    nodes.leave(tasks, node_id)


def _elect(node_id: str, lease_seconds: float, tasks: Transaction, now: float) -> Election:
    return nodes.elect(tasks, node_id, now=now, lease_seconds=lease_seconds)


def _resign(node_id: str, tasks: Transaction, _now: float) -> None:
    nodes.resign(tasks, node_id)


def _discard_news(epoch: int, tasks: Transaction, now: float) -> None:
    nodes.check_epoch(tasks, epoch, now)
    # Whoever is about to read everything needs no message about any of it.
    nodes.discard(tasks, DISPATCHER)


def _backlog(tables: TaskTables, tasks: Transaction) -> Backlog:
    return queries.backlog(tasks, tables.now())


def _forgive(forgiveness: assign.Forgiveness, tasks: Transaction, now: float) -> None:
    nodes.check_epoch(tasks, forgiveness.epoch, now)
    assign.forgive(tasks, forgiveness, now)


def _set_limits(
    limits: dict[Scope, Limit], tasks: Transaction, now: float, *, keeps_ledger: bool
) -> tuple[Scope, ...]:
    return ledger.set_limits(tasks, limits, now, keeps_ledger=keeps_ledger)


def _take_back(
    epoch: int, operation: Callable[[UnitOfWork], list[TaskRow]], work: UnitOfWork
) -> list[TaskRecord]:
    nodes.check_epoch(work.transaction, epoch, work.now)
    return [row.record() for row in operation(work)]


def _news(
    epoch: int,
    all_workers: bool,  # noqa: FBT001 - by place, as all that is sent to whoever writes
    seen: int,
    work: UnitOfWork,
) -> tuple[News, int]:
    nodes.forget(work.transaction, DISPATCHER, seen=seen)
    return queries.news(
        work.transaction, work.now, epoch, seen=seen, most=MAX_NEWS, all_workers=all_workers
    )


def _forget_news(seen: int, tasks: Transaction, _now: float) -> None:
    nodes.forget(tasks, DISPATCHER, seen=seen)


def _collect(node_id: str, seen: int, work: UnitOfWork) -> tuple[Collected, int]:
    statements = [nodes.leases_statement([node_id]), nodes.messages_statement(node_id, seen=seen)]
    leases, messages = work.transaction.read_all(statements)
    if nodes.without_lease(leases, [node_id], work.now):
        return Collected(), seen
    nodes.forget(work.transaction, node_id, seen=seen)
    received = nodes.to_messages(messages)
    return collect(work, node_id, received), received[-1].seq if received else seen


# The ledger of a task store, for whoever asks about budgets and not about tasks.
#
# Money that tasks hold and money that is asked for here lie in the same rows, under the same lock:
# neither can pass a limit because of the other.


class StoreLedger:
    """The ledger that a store keeps; whoever has the store opens and closes it."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self.now = access.now

    async def open(self) -> None:
        """Do nothing: the store is opened by whoever runs the tasks."""

    async def close(self) -> None:
        """Do nothing: the store is closed by whoever runs the tasks."""

    async def set_limit(self, scope: Scope, limit: Limit) -> None:
        """Replace the limit of a scope; one without any amount removes it."""
        zone(limit.window.zone)
        await self._access.run(partial(_set_limit, scope=scope, limit=limit))

    async def create_limit(self, scope: Scope, limit: Limit) -> Limit:
        """Set the limit of a scope that has none, and return the one that is in force then."""
        zone(limit.window.zone)
        return await self._access.run(partial(_create_limit, scope=scope, limit=limit))

    async def reserve(self, request: ReserveRequest) -> Reservation | Refused:
        """Hold the money in all scopes or in none; a known id gets its answer again.

        It is new work: where the disk has no room for that, `StoreFullError` is raised.
        """
        answer = await self._access.run(partial(_reserve, request=request))
        if isinstance(answer, StoreFullError):
            raise answer
        return answer

    async def settle(self, request: SettleRequest) -> Reservation:
        """Apply a further call, or raise `IllegalSettlementError`."""
        answer = await self._access.run(partial(_apply_to_ledger, request=request))
        if isinstance(answer, Refused):
            raise StoreError("the ledger refused a settlement")
        return answer

    async def adjust(self, request: AdjustRequest) -> Reservation:
        """Change a balance by the word of an operator, or raise a `CallerError`."""
        answer = await self._access.run(partial(_apply_to_ledger, request=request))
        if isinstance(answer, Refused):
            raise StoreError("the ledger refused an adjustment")
        return answer

    async def accounts(self, scope: Scope, *, most: int = MAX_ACCOUNTS) -> list[Account]:
        """Return the scope and everything within it that has a limit or a balance."""
        await self._access.run(ledger.expire_due)
        # Many scopes take a while to read, and nobody who writes is to wait for it.
        question = partial(ledger.accounts, scope=scope, now=self.now(), most=most)
        return await self._access.ask(question)

    async def journal(
        self, scope: Scope, *, since: float, until: float = inf, limit: int
    ) -> list[JournalEntry]:
        """Return the latest entries of a time that charge the scope, newest first."""
        question = partial(ledger.journal, scope=scope, since=since, until=until, limit=limit)
        return await self._access.ask(question)

    async def sweep(self) -> int:
        """Expire all leases that are due, and return how many there were."""
        return await self._access.run(ledger.expire_due)

    async def audit(self) -> Audit:
        """Return both sides of the promise that balances equal the journal."""
        return await self._access.ask(ledger.audit, is_long=True)


def _set_limit(transaction: Transaction, now: float, *, scope: Scope, limit: Limit) -> None:
    ledger.set_limit(transaction, scope, limit, now)


def _create_limit(transaction: Transaction, now: float, *, scope: Scope, limit: Limit) -> Limit:
    return ledger.create_limit(transaction, scope, limit, now)


def _reserve(
    transaction: Transaction, now: float, *, request: ReserveRequest
) -> Reservation | Refused | StoreFullError:
    size = transaction.measure(is_limited=False)
    if size.problem:
        # Returned, since to raise it would spoil what others do in the same transaction.
        return StoreFullError(size.problem)
    return _apply_to_ledger(transaction, now, request=request)


def _apply_to_ledger(
    transaction: Transaction, now: float, *, request: ledger.Request
) -> Reservation | Refused:
    (answer,) = ledger.apply_batch(transaction, [request], now)
    if isinstance(answer, Exception):
        try:
            raise answer
        finally:
            # This frame is one of the traceback: the error would keep itself, and all other frames.
            del answer
    return answer
