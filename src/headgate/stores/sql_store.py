"""The task store in a database: steps of concurrent callers share a transaction.

What changes anything goes through one writer, in the order in which it came; what only reads goes
through a reader, which sees everything that was acknowledged before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol

from headgate.core.budgets.accounts import Limit
from headgate.core.budgets.books import SettleRequest
from headgate.core.budgets.scopes import Scope
from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.submit_keys import KeyRefusal
from headgate.databases.access import Result
from headgate.databases.awaited import Writer
from headgate.databases.jobs import Batch
from headgate.databases.transaction import Transaction
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
    Totals,
    TurnedAway,
    UnknownParent,
)
from headgate.stores import election, messages, nodes, outbox, upkeep
from headgate.stores.administering import configured
from headgate.stores.looking import listing, reading
from headgate.stores.moves import forgiving, taking_back
from headgate.stores.moves.assigning import Plan
from headgate.stores.moves.cancelling import Cancellation
from headgate.stores.moves.collecting import collect
from headgate.stores.task_rows import TaskRow
from headgate.stores.task_tables import TaskTables
from headgate.stores.workers.steps import WorkerSteps
from headgate.stores.worksheet import Worksheet
from headgate.task_query import TaskPage, TaskQuery

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
    """Tasks in the tables of a database, written by one writer and read by others."""

    def __init__(
        self,
        tables: TaskTables,
        writer: Writer,
        reader: Reader,
        *,
        long_reader: Reader | None = None,
        is_shared: bool = True,
    ) -> None:
        self.tables = tables
        self.writer = writer
        self.is_shared = is_shared
        self._reader = reader
        self._long_reader = long_reader or reader
        self._seen: dict[str, int] = {}
        self._pardons = count(1)
        self._inbox_lock = asyncio.Lock()
        # Each kind of step has its own kind of answer, which the types of a batch cannot say.
        self._steps: Batch[Any, Any] = tables.apply

    def now(self) -> float:
        """Return the time by which this store judges leases and deadlines."""
        return self.tables.now()

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
        return {self._reader, self._long_reader}

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
        return await self.ask(partial(reading.get, task_id=task_id))

    async def among(self, task_ids: Sequence[str], owner: TaskQuery) -> frozenset[str]:
        """Return which of these tasks there are of the agent and the project of a query."""
        return await self.ask(partial(reading.among, task_ids=task_ids, owner=owner))

    async def find(self, query: TaskQuery) -> TaskPage:
        """List tasks, newest first, as many as fit on one page."""
        return await self.ask(partial(listing.find, query=query))

    async def totals(self) -> Totals:
        """Count what waits, what runs and what has happened."""
        return await self.ask(reading.totals)

    async def outbox(self, *, limit: int) -> list[SettleRequest]:
        """Return settlements that a ledger outside the store has yet to be told."""
        return await self.ask(partial(outbox.unsent, limit=limit))

    async def sent(self, reservation_ids: Sequence[str]) -> None:
        """Forget settlements that the ledger has answered."""
        await self.run(partial(_forget_sent, reservation_ids))

    async def evict(self, *, completed_before: float, limit: int) -> int:
        """Forget ended tasks that nothing needs, oldest first, and return how many."""
        return await self.run(partial(_evict, completed_before, limit))

    async def join(self, node: Node, *, lease_seconds: float) -> None:
        """Take up a node; from now on tasks may be assigned to it."""
        join = partial(_join, node, self._lease(lease_seconds), is_sole=not self.is_shared)
        await self._run_first(join)

    async def beat(self, node_id: str, *, places: int, lease_seconds: float) -> Beat:
        """Renew the lease of a node and of everything that it runs."""
        return await self._run_first(partial(_beat, node_id, places, self._lease(lease_seconds)))

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

    async def news(self, epoch: int) -> News:
        """Return what other nodes changed since the last call, and forget that it was news."""
        return await self._receive(DISPATCHER, partial(_news, epoch))

    async def backlog(self, epoch: int) -> Backlog:
        """Return everything that has not ended, to a dispatcher that starts."""
        await self.run(partial(_discard_news, epoch))
        # A long backlog takes seconds. In the writer it would keep leases from being renewed.
        return await self.ask(partial(_backlog, self.tables), is_long=True)

    async def drop(self, epoch: int, drops: Sequence[Drop]) -> list[TaskRecord]:
        """End queued tasks without running them, and return all that changed."""
        return await self._take_back(epoch, partial(taking_back.drop, drops=drops))

    async def recover(self, epoch: int, task_ids: Sequence[str]) -> list[TaskRecord]:
        """Take tasks back from nodes whose lease has ended, and return all that changed."""
        return await self._take_back(epoch, partial(taking_back.recover, task_ids=task_ids))

    async def forgive(self, epoch: int, tokens: dict[str, int]) -> None:
        """Remember lag that was forgiven to projects now."""
        pardon = forgiving.Pardon(epoch, next(self._pardons), tokens)
        await self.run(partial(_forgive, pardon))

    async def set_limits(self, limits: dict[Scope, Limit]) -> tuple[Scope, ...]:
        """Set the budgets that the configuration names, and remove those that it named before."""
        for limit in limits.values():
            zone(limit.window.zone)
        return await self.run(partial(_set_limits, limits, keeps_books=self.tables.keeps_books))

    async def run(self, operation: Callable[[Transaction, float], Result]) -> Result:
        """Change something, at a time that is given; the answer means that it is on disk."""
        return await self.writer.submit(partial(self.tables.run, operation))

    async def ask(
        self, question: Callable[[Transaction], Result], *, is_long: bool = False
    ) -> Result:
        """Read what has been committed; what may take long keeps nobody else waiting."""
        return await (self._long_reader if is_long else self._reader).submit(question)

    def _lease(self, seconds: float) -> float:
        # Where nobody else can take over, a process that was held up has lost nothing.
        return seconds if self.is_shared else ENDLESS_SECONDS

    async def _run_first(self, operation: Callable[[Transaction, float], Result]) -> Result:
        return await self.writer.submit(partial(self.tables.run, operation), goes_first=True)

    async def _work(
        self, operation: Callable[[Worksheet], Result], *, goes_first: bool = False
    ) -> Result:
        work = partial(self.tables.work, operation)
        return await self.writer.submit(work, goes_first=goes_first)

    async def _take_back(
        self, epoch: int, operation: Callable[[Worksheet], list[TaskRow]]
    ) -> list[TaskRecord]:
        return await self._work(partial(_take_back, epoch, operation))

    async def _receive(
        self, recipient: str, read: Callable[[int, Worksheet], tuple[Result, int]]
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
    outbox.forget(tasks, reservation_ids)


def _evict(completed_before: float, limit: int, tasks: Transaction, _now: float) -> int:
    return upkeep.evict(tasks, completed_before=completed_before, limit=limit)


def _join(
    node: Node, lease_seconds: float, tasks: Transaction, now: float, *, is_sole: bool
) -> None:
    if is_sole:
        nodes.forget_others(tasks, node.id)
        election.depose_others(tasks, node.id)
    nodes.give_grace(tasks, now)
    nodes.join(tasks, node, now + lease_seconds)


def _beat(node_id: str, places: int, lease_seconds: float, tasks: Transaction, now: float) -> Beat:
    return nodes.beat(tasks, node_id, places=places, now=now, lease_seconds=lease_seconds)


def _leave(node_id: str, tasks: Transaction, _now: float) -> None:
    nodes.leave(tasks, node_id)


def _elect(node_id: str, lease_seconds: float, tasks: Transaction, now: float) -> Election:
    return election.elect(tasks, node_id, now=now, lease_seconds=lease_seconds)


def _resign(node_id: str, tasks: Transaction, _now: float) -> None:
    election.resign(tasks, node_id)


def _discard_news(epoch: int, tasks: Transaction, now: float) -> None:
    election.check_epoch(tasks, epoch, now)
    # Whoever is about to read everything needs no message about any of it.
    messages.discard(tasks, DISPATCHER)


def _backlog(tables: TaskTables, tasks: Transaction) -> Backlog:
    return reading.backlog(tasks, tables.now())


def _forgive(pardon: forgiving.Pardon, tasks: Transaction, now: float) -> None:
    election.check_epoch(tasks, pardon.epoch, now)
    forgiving.forgive(tasks, pardon, now)


def _set_limits(
    limits: dict[Scope, Limit], tasks: Transaction, _now: float, *, keeps_books: bool
) -> tuple[Scope, ...]:
    return configured.set_limits(tasks, limits, keeps_books=keeps_books)


def _take_back(
    epoch: int, operation: Callable[[Worksheet], list[TaskRow]], sheet: Worksheet
) -> list[TaskRecord]:
    election.check_epoch(sheet.transaction, epoch, sheet.now)
    return [row.record() for row in operation(sheet)]


def _news(epoch: int, seen: int, sheet: Worksheet) -> tuple[News, int]:
    election.check_epoch(sheet.transaction, epoch, sheet.now)
    received = _take(sheet, DISPATCHER, seen)
    return reading.news(sheet, received), received[-1].seq if received else seen


def _collect(node_id: str, seen: int, sheet: Worksheet) -> tuple[Collected, int]:
    if nodes.lease_ended(sheet.transaction, [node_id], sheet.now):
        return Collected(), seen
    received = _take(sheet, node_id, seen)
    return collect(sheet, node_id, received), received[-1].seq if received else seen


def _take(sheet: Worksheet, recipient: str, seen: int) -> list[messages.Message]:
    return messages.take(sheet.transaction, recipient, seen=seen, limit=MAX_MESSAGES)
