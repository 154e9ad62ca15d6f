"""The task store in a database: steps of concurrent callers share a transaction.

What changes anything goes through one writer, in the order in which it came; what only reads goes
through a reader, which sees everything that was acknowledged before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from headgate.core.accounts import Limit
from headgate.core.books import SettleRequest
from headgate.core.records import TaskRecord
from headgate.core.scopes import ROOT, Scope
from headgate.core.submit_keys import KeyRefusal
from headgate.databases.access import Result
from headgate.databases.jobs import Batch, Writer
from headgate.databases.migrations import schema_version
from headgate.databases.transaction import Transaction
from headgate.errors import LedgerUnavailableError
from headgate.ledger import Clock
from headgate.ledgers import sql_books, sql_upkeep
from headgate.ledgers.zones import zone
from headgate.store import (
    DISPATCHER,
    Assigned,
    Assignment,
    Backlog,
    Beat,
    CancelAnswer,
    Collected,
    Drop,
    Election,
    KeyedAnswer,
    KeyedSubmit,
    News,
    NewTask,
    Node,
    NotAssigned,
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
from headgate.stores import (
    configured,
    election,
    forgiving,
    keyed_submits,
    messages,
    nodes,
    outbox,
    reading,
    taking_back,
    task_schema,
    upkeep,
)
from headgate.stores.assigning import Plan
from headgate.stores.cancelling import Cancellation
from headgate.stores.collecting import collect
from headgate.stores.row_cache import RowCache
from headgate.stores.schema import migrate_all
from headgate.stores.steps import Step, StepAnswer, apply_steps
from headgate.stores.worker_steps import WorkerSteps
from headgate.stores.worksheet import Worksheet

UPKEEP_SECONDS = 60.0
ENDLESS_SECONDS = 100 * 365 * 86_400.0
MAX_MESSAGES = 10_000


class Reader(Protocol):
    """Answers questions about what has been committed."""

    def start(self) -> None:
        """Begin to take questions."""

    async def close(self) -> None:
        """Answer what was asked, and take no more."""

    def submit(self, question: Callable[[Transaction], Result]) -> asyncio.Future[Result]:
        """Ask a question."""


class SqlTaskStore(WorkerSteps):
    """Tasks in SQLite or PostgreSQL, with the books beside them if it `keeps_books`."""

    def __init__(
        self,
        writer: Writer,
        reader: Reader,
        *,
        clock: Clock | None = None,
        keeps_books: bool = True,
        is_shared: bool = True,
        cache: RowCache | None = None,
    ) -> None:
        self._cache = cache
        self.writer = writer
        self.keeps_books = keeps_books
        self.is_shared = is_shared
        self._reader = reader
        self._clock = time.time if clock is None else clock
        self._tidied_at = float("-inf")
        self._purged_up_to = ROOT
        self._seen: dict[str, int] = {}
        self._pardons = count(1)
        self._inbox_lock = asyncio.Lock()
        # Each kind of step has its own kind of answer, which the types of a batch cannot say.
        self._steps: Batch[Any, Any] = self._apply
        # A database has one transaction object for each of its connections.
        self._checked: Transaction | None = None

    def now(self) -> float:
        """Return the time by which this store judges leases and deadlines."""
        return self._clock()

    async def open(self) -> None:
        """Connect, and bring the schema up to date; a newer one than the program's is refused."""
        self.writer.start()
        try:
            await self.writer.submit(self._prepare)
            self._reader.start()
        except BaseException:
            await self.writer.close()
            raise

    async def close(self) -> None:
        """Finish what was asked for, then let go of everything."""
        await self._reader.close()
        await self.writer.close()

    def submit(self, new: NewTask) -> asyncio.Future[Queued | TurnedAway | UnknownParent]:
        """Store a task if it may wait; the same id again gets its answer again."""
        return self.writer.submit_request(self._steps, new)

    def submit_keyed(self, keyed: KeyedSubmit) -> asyncio.Future[KeyedAnswer | KeyRefusal]:
        """Store the tasks of a request and keep the answer; the same key gets its answer again."""
        return self.writer.submit_request(self._steps, keyed)

    async def cancel(self, task_id: str, *, node_id: str) -> CancelAnswer | None:
        """Cancel what waits, and ask the node of what runs; None if there is no such task."""
        request = Cancellation(task_id, node_id)
        answer: CancelAnswer | None = await self.writer.submit_request(self._steps, request)
        return answer

    async def settle(self, settlement: Settlement) -> Settled | StaleLease:
        """Write the end of an attempt: the outcome, the money, the freed place, all at once."""
        answer: Settled | StaleLease = await self.writer.submit_request(self._steps, settlement)
        return answer

    async def assign(
        self, epoch: int, assignments: Sequence[Assignment]
    ) -> list[Assigned | NotAssigned]:
        """Take tasks, capacity and money for a plan, each line wholly or not at all."""
        answers: list[Assigned | NotAssigned] = await self.writer.submit_request(
            self._steps, Plan(epoch, assignments)
        )
        return answers

    async def get(self, task_id: str) -> TaskRecord | None:
        """Return a task with all that is known of it."""
        return await self.ask(lambda tasks: reading.get(tasks, task_id))

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks, newest first, as many as fit on one page."""
        return await self.ask(lambda tasks: reading.find(tasks, query))

    async def totals(self) -> Totals:
        """Count what waits, what runs and what has happened."""
        return await self.ask(reading.totals)

    async def outbox(self, *, limit: int) -> list[SettleRequest]:
        """Return settlements that a ledger outside the store has yet to be told."""
        return await self.ask(lambda tasks: outbox.unsent(tasks, limit=limit))

    async def sent(self, reservation_ids: Sequence[str]) -> None:
        """Forget settlements that the ledger has answered."""
        await self.run(lambda tasks, _now: outbox.forget(tasks, reservation_ids))

    async def evict(self, *, completed_before: float, limit: int) -> int:
        """Forget ended tasks that nothing needs, oldest first, and return how many."""
        return await self.run(
            lambda tasks, _now: upkeep.evict(tasks, completed_before=completed_before, limit=limit)
        )

    async def join(self, node: Node, *, lease_seconds: float) -> None:
        """Take up a node; from now on tasks may be assigned to it."""

        def write(tasks: Transaction, now: float) -> None:
            if not self.is_shared:
                nodes.forget_others(tasks, node.id)
                election.depose_others(tasks, node.id)
            nodes.give_grace(tasks, now)
            nodes.join(tasks, node, now + self._lease(lease_seconds))

        await self._run_first(write)

    async def beat(self, node_id: str, *, places: int, lease_seconds: float) -> Beat:
        """Renew the lease of a node and of everything that it runs."""
        return await self._run_first(
            lambda tasks, now: nodes.beat(
                tasks,
                node_id,
                places=places,
                now=now,
                lease_seconds=self._lease(lease_seconds),
            )
        )

    async def leave(self, node_id: str) -> None:
        """Take a node out that runs nothing any more."""
        await self.run(lambda tasks, _now: nodes.leave(tasks, node_id))
        self._seen.pop(node_id, None)

    def watch(self, recipient: str, callback: Callable[[], None]) -> None:
        """Call back when somebody may have been told something; this store has nobody to tell."""

    def unwatch(self, recipient: str | None = None) -> None:
        """Call nobody back any more, or no more for this recipient."""

    async def elect(self, node_id: str, *, lease_seconds: float) -> Election:
        """Become or stay the dispatcher if nobody else is, and return who is."""
        lease_seconds = self._lease(lease_seconds)
        return await self._run_first(
            lambda tasks, now: election.elect(tasks, node_id, now=now, lease_seconds=lease_seconds)
        )

    async def resign(self, node_id: str) -> None:
        """Stop being the dispatcher, so that another need not wait for the lease to end."""
        await self._run_first(lambda tasks, _now: election.resign(tasks, node_id))

    async def collect(self, node_id: str) -> Collected:
        """Start the tasks that are assigned to a node, and return them with what to cancel."""
        return await self._receive(node_id, self._collect)

    async def news(self, epoch: int) -> News:
        """Return what other nodes changed since the last call, and forget that it was news."""

        def read(
            sheet: Worksheet, _recipient: str, seen: int
        ) -> tuple[News, list[messages.Message]]:
            election.check_epoch(sheet.transaction, epoch, sheet.now)
            received = _take(sheet, DISPATCHER, seen)
            return reading.news(sheet, received), received

        return await self._receive(DISPATCHER, read)

    async def backlog(self, epoch: int) -> Backlog:
        """Return everything that has not ended, to a dispatcher that starts."""

        def prepare(tasks: Transaction, now: float) -> None:
            election.check_epoch(tasks, epoch, now)
            # Whoever is about to read everything needs no message about any of it.
            messages.discard(tasks, DISPATCHER)

        await self.run(prepare)
        # A long backlog takes seconds. In the writer it would keep leases from being renewed.
        return await self.ask(lambda tasks: reading.backlog(tasks, self.now()))

    async def drop(self, epoch: int, drops: Sequence[Drop]) -> list[TaskRecord]:
        """End queued tasks without running them, and return all that changed."""
        return await self._take_back(epoch, lambda sheet: taking_back.drop(sheet, drops))

    async def recover(self, epoch: int, task_ids: Sequence[str]) -> list[TaskRecord]:
        """Take tasks back from nodes whose lease has ended, and return all that changed."""
        return await self._take_back(epoch, lambda sheet: taking_back.recover(sheet, task_ids))

    async def forgive(self, epoch: int, tokens: dict[str, int]) -> None:
        """Remember lag that was forgiven to projects now."""
        pardon = forgiving.Pardon(epoch, next(self._pardons), tokens)

        def write(tasks: Transaction, now: float) -> None:
            election.check_epoch(tasks, epoch, now)
            forgiving.forgive(tasks, pardon, now)

        await self.run(write)

    async def set_limits(self, limits: dict[Scope, Limit]) -> tuple[Scope, ...]:
        """Set the budgets that the configuration names, and remove those that it named before."""
        for limit in limits.values():
            zone(limit.window.zone)
        return await self.run(
            lambda tasks, _now: configured.set_limits(tasks, limits, keeps_books=self.keeps_books)
        )

    def _lease(self, seconds: float) -> float:
        # Where nobody else can take over, a process that was held up has lost nothing.
        return seconds if self.is_shared else ENDLESS_SECONDS

    async def run(self, operation: Callable[[Transaction, float], Result]) -> Result:
        """Change something; the answer means that it is on disk."""
        return await self.writer.submit(lambda tasks: operation(tasks, self._begin(tasks)))

    async def ask(self, question: Callable[[Transaction], Result]) -> Result:
        """Read what has been committed."""
        return await self._reader.submit(question)

    async def _run_first(self, operation: Callable[[Transaction, float], Result]) -> Result:
        return await self.writer.submit(
            lambda tasks: operation(tasks, self._begin(tasks)), goes_first=True
        )

    async def _take_back(
        self, epoch: int, operation: Callable[[Worksheet], list[Any]]
    ) -> list[TaskRecord]:
        def write(tasks: Transaction, now: float) -> list[TaskRecord]:
            election.check_epoch(tasks, epoch, now)
            sheet = self._sheet(tasks, now)
            records = [row.record() for row in operation(sheet)]
            sheet.write()
            return records

        return await self.run(write)

    async def _receive(
        self,
        recipient: str,
        read: Callable[[Worksheet, str, int], tuple[Result, list[messages.Message]]],
    ) -> Result:
        """Read messages; only those of an answer that has arrived are forgotten, by the next call.

        One call at a time: two that run side by side would both be given the same.
        """
        async with self._inbox_lock:
            seen = self._seen.get(recipient, 0)

            def write(tasks: Transaction, now: float) -> tuple[Result, list[messages.Message]]:
                sheet = self._sheet(tasks, now)
                answer = read(sheet, recipient, seen)
                sheet.write()
                return answer

            result, received = await self.run(write)
            if received:
                self._seen[recipient] = received[-1].seq
            return result

    def _collect(
        self, sheet: Worksheet, node_id: str, seen: int
    ) -> tuple[Collected, list[messages.Message]]:
        if nodes.lease_ended(sheet.transaction, [node_id], sheet.now):
            return Collected(), []
        received = _take(sheet, node_id, seen)
        return collect(sheet, node_id, received), received

    def _apply(self, transaction: Transaction, steps: Sequence[Step]) -> Sequence[StepAnswer]:
        now = self._begin(transaction)
        return apply_steps(self._sheet(transaction, now), steps)

    def _prepare(self, transaction: Transaction) -> None:
        migrate_all(transaction)

    def _sheet(self, transaction: Transaction, now: float) -> Worksheet:
        return Worksheet(transaction, now, keeps_books=self.keeps_books, cache=self._cache)

    def _begin(self, transaction: Transaction) -> float:
        if transaction is not self._checked:
            self._check_tables(transaction)
        if self._cache is not None:
            self._cache.begin(transaction)
        sql_books.lock_books(transaction)
        now = self.now()
        if now - self._tidied_at >= UPKEEP_SECONDS:
            self._keep_up(transaction, now)
        return now

    def _check_tables(self, transaction: Transaction) -> None:
        """Look whether a new connection leads to the tasks: a file or server can be replaced."""
        if not schema_version(transaction, task_schema.PART):
            advice = "put them back, or open the store again to found new ones"
            line = f"the database has no tasks any more, nothing was done; {advice}"
            raise LedgerUnavailableError(line)
        self._prepare(transaction)
        self._checked = transaction

    def _keep_up(self, transaction: Transaction, now: float) -> None:
        # As long as there is more, the next call does the next step; none of them waits long.
        if sql_upkeep.tidy(transaction, now) or keyed_submits.purge(transaction, now):
            return
        self._tidied_at = now
        self._purged_up_to = sql_upkeep.purge_buckets(transaction, now, after=self._purged_up_to)
        upkeep.purge(transaction, now)


def _take(sheet: Worksheet, recipient: str, seen: int) -> list[messages.Message]:
    return messages.take(sheet.transaction, recipient, seen=seen, limit=MAX_MESSAGES)
