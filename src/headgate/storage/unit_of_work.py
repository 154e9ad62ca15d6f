"""The worksheet: the rows that one transaction works on, and everything it has to write.

A batch of steps first says what it needs, which is read with one statement each. The steps then
change rows in memory, one after the other, and `write` puts all of it back. Everybody who writes
takes the same lock first, so what was read is still so when it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

from headgate.core.budgets.ledger import LedgerState, ReserveRequest, SettleRequest
from headgate.core.budgets.reservations import Call
from headgate.core.gates import GateClosure, GatePart
from headgate.core.money import MicroUsd, Tokens
from headgate.core.task import Submission, is_worker
from headgate.errors import IllegalSettlementError
from headgate.storage import ledger, nodes
from headgate.storage.counters import QUEUED, TICK, Counters
from headgate.storage.delivery_contract import (
    TASK_EVENTS,
    Delivery,
    DeliveryState,
    host_of,
    message_id,
)
from headgate.storage.rows import (
    NOT_SHOWN,
    TaskRow,
    from_task_row,
    submission_text,
    to_submission,
    to_task_row,
)
from headgate.storage.schema import (
    CLOSURES,
    DELIVERIES_DELIVERIES,
    INPUTS,
    OUTBOX,
    PARENTS,
    TASK_COLUMNS,
    TASKS_TASKS,
    WORKER_TASKS,
)
from headgate.storage.store import DISPATCHER
from headgate.storage.transaction import Row, Transaction, about
from headgate.storage.zones import zone

# Rows of unfinished tasks as this process last wrote them, so that they need not be read again.
#
# Only for a store that one process writes to, and even then the database is asked each time
# whether somebody else wrote to it. A transaction takes rows out of the cache and puts them back
# when it has written everything. Rule: what was put back counts once that transaction is known to
# have been committed. If it was not, or nobody knows, its rows are gone from here and are read
# again.

MAX_ROWS = 20_000


class Counted(Protocol):
    """A database that counts the transactions which it began and which it committed."""

    @property
    def begun(self) -> int:
        """How many were begun."""

    @property
    def committed(self) -> int:
        """How many of these are on disk."""


class RowCache:
    """Rows by task id; the oldest make room for new ones."""

    def __init__(self, database: Counted, *, most: int = MAX_ROWS) -> None:
        self._database = database
        self._most = most
        self._rows: dict[str, TaskRow] = {}
        self._written: dict[str, TaskRow] = {}
        self._moment = (0, 0)
        self._connection: Transaction | None = None
        self._version = 0

    def begin(self, transaction: Transaction) -> None:
        """Find out which rows still are as they were, at the start of every step."""
        database = self._database
        moment = (database.begun, database.committed)
        if moment != self._moment:
            self._end(moment)
        version: int = transaction.read("PRAGMA data_version")[0][0]
        # The number means something only on the connection that it comes from.
        if transaction is not self._connection or version != self._version:
            self._rows.clear()
        self._connection, self._version = transaction, version

    def take(self, task_id: str) -> TaskRow | None:
        """Take a row out, if it is here."""
        return self._written.pop(task_id, None) or self._rows.pop(task_id, None)

    def put(self, row: TaskRow) -> None:
        """Put a row in that this transaction has written, or found as it is."""
        self._written[row.id] = row

    def _end(self, moment: tuple[int, int]) -> None:
        begun, committed = self._moment
        if moment == (begun + 1, committed + 1):
            self._rows.update(self._written)
            for task_id in list(islice(self._rows, max(0, len(self._rows) - self._most))):
                del self._rows[task_id]
        self._written.clear()
        self._moment = moment


# Filing: a delivery is written in the transaction of what it tells of.
#
# Rule: a task with a receiver has one delivery, under an id that is made from its own, so whichever
# step ended it, and however often that step is run, the receiver is told of one end.


def row_for_end(row: TaskRow, url: str, now: float) -> Row:
    """Return the row of the delivery that tells of the end of a task."""
    delivery = Delivery(
        id=message_id(row.id),
        event=TASK_EVENTS[row.status.value],
        url=url,
        task_id=row.id,
        created_at=now,
        due_at=now,
    )
    return new_row(delivery)


def new_row(delivery: Delivery) -> Row:
    """Return the row of a delivery that nobody has tried."""
    return (
        delivery.id,
        delivery.task_id,
        delivery.event,
        delivery.url,
        host_of(delivery.url),
        DeliveryState.PENDING.value,
        0,
        delivery.created_at,
        delivery.due_at,
        None,
        None,
        None,
        None,
    )


SHORT_SUBMISSION = 2_000
"""Longer ones are read again rather than kept in memory until the task starts."""

_TAKE_FROM_WORKER = "DELETE FROM worker_tasks WHERE node_id = ? AND task_id = ?"
_TASKS = f"SELECT {', '.join(TASK_COLUMNS)} FROM tasks"  # noqa: S608
_INPUTS = "SELECT id, submission FROM task_inputs"
_PARENTS = "SELECT parent_id, task_id FROM task_parents"
_LANES = "SELECT agent_id, queued FROM lanes"
_COUNTERS = "SELECT name, amount FROM counters WHERE name IN ('queued', 'tick')"


class UnitOfWork:
    """What one transaction has read, and what it will write."""

    def __init__(
        self,
        transaction: Transaction,
        now: float,
        *,
        keeps_books: bool,
        cache: RowCache | None = None,
    ) -> None:
        self.transaction = transaction
        self._cache = cache
        self.now = now
        self.keeps_books = keeps_books
        self.tallies = Counters(now)
        self.books = LedgerState(zone)
        self._rows: dict[str, TaskRow | None] = {}
        self._changed: dict[str, TaskRow] = {}
        self._submissions: dict[str, Submission] = {}
        self._inputs: list[Row] = []
        self._parents: dict[str, list[str]] = {}
        self._closures: dict[GatePart, GateClosure] = {}
        self._outbox: list[Row] = []
        self._deliveries: list[Row] = []
        self._messages: list[tuple[str, nodes.Kind, str]] = []
        self._called: set[str] = set()
        self._given: list[Row] = []
        self._taken: list[Row] = []
        self._queued_before = 0
        self._tick_before = 0
        self._queued_by_agent: dict[str, int] = {}
        self._dispatcher: str | None = None

    def load(self, task_ids: Iterable[str]) -> None:
        """Read the rows of tasks that are not here yet."""
        wanted = [task_id for task_id in dict.fromkeys(task_ids) if task_id not in self._rows]
        if not wanted:
            return
        self._rows.update(dict.fromkeys(wanted))
        if self._cache is not None:
            wanted = self._take_cached(self._cache, wanted)
            if not wanted:
                return
        for row in self.transaction.read(*about(self.transaction.dialect, _TASKS, "id", wanted)):
            self._rows[row[0]] = to_task_row(row)

    def _take_cached(self, cache: RowCache, task_ids: list[str]) -> list[str]:
        """Take rows from the cache, and return which are not in it."""
        missing: list[str] = []
        for task_id in task_ids:
            row = self._rows[task_id] = cache.take(task_id)
            if row is None:
                missing.append(task_id)
            elif row.submission is not None:
                self._submissions[task_id] = row.submission
        return missing

    def load_submissions(self, task_ids: Iterable[str]) -> None:
        """Read what tasks were given to do."""
        wanted = [task_id for task_id in task_ids if task_id not in self._submissions]
        if wanted:
            self._submissions.update(read_submissions(self.transaction, wanted))

    def load_counts(self, agent_ids: Iterable[str]) -> None:
        """Read how many tasks wait, in all and for these agents."""
        of_agents = about(self.transaction.dialect, _LANES, "agent_id", set(agent_ids))
        counters, lanes = self.transaction.read_all([(_COUNTERS, ()), of_agents])
        counts: dict[str, int] = dict(counters)
        self._queued_before = counts.get(QUEUED, 0)
        self._tick_before = counts.get(TICK, 0)
        for agent_id, queued in lanes:
            self._queued_by_agent[agent_id] = self._queued_by_agent.get(agent_id, 0) + queued

    def load_books(self, reserves: Sequence[ReserveRequest], held: Iterable[TaskRow]) -> None:
        """Read the balances and reservations that these requests and tasks in flight touch."""
        if not self.keeps_books:
            return
        settles = [
            SettleRequest(reservation_id=row.progress.reservation_id, call=Call.RELEASE)
            for row in held
            if row.is_in_flight and row.progress.reservation_id
        ]
        if reserves or settles:
            self.books = ledger.load(self.transaction, [*reserves, *settles], self.now)

    def row(self, task_id: str) -> TaskRow | None:
        """Return the row of a task, None if there is none."""
        if task_id not in self._rows:
            self.load([task_id])
        return self._rows[task_id]

    def rows(self, task_ids: Iterable[str]) -> list[TaskRow]:
        """Return the rows of tasks, without those that do not exist."""
        wanted = list(dict.fromkeys(task_ids))
        self.load(wanted)
        return [row for task_id in wanted if (row := self._rows[task_id]) is not None]

    def submission(self, task_id: str) -> Submission:
        """Return what a task was given to do, if it was loaded."""
        return self._submissions.get(task_id, NOT_SHOWN)

    def queued(self) -> int:
        """Return how many tasks wait now."""
        return self._queued_before + self.tallies.counters[QUEUED]

    def queued_for(self, agent_id: str) -> int:
        """Return how many tasks of an agent wait now."""
        added = self.tallies.queued_by_agent.get(agent_id, 0)
        return self._queued_by_agent.get(agent_id, 0) + added

    def tick(self) -> int:
        """Return how many attempts have ended."""
        return self._tick_before + self.tallies.counters.get(TICK, 0)

    def children(self, parents: Sequence[TaskRow]) -> list[tuple[TaskRow, TaskRow]]:
        """Return pairs of a task and one that depends on it, and have their other parents ready."""
        ids = [row.id for row in parents]
        rows = self.transaction.read(*about(self.transaction.dialect, _PARENTS, "parent_id", ids))
        pairs = [(row[0], row[1]) for row in rows]
        pairs += [(parent, child) for parent in ids for child in self._parents.get(parent, ())]
        self.load(child for _, child in pairs)
        found = [(self._rows[parent], self._rows[child]) for parent, child in pairs]
        both = [(parent, child) for parent, child in found if parent and child]
        self.load(name for _, child in both for name in child.spec.terms.depends_on)
        return both

    def add(self, row: TaskRow, submission: Submission) -> None:
        """Store a new task."""
        self._rows[row.id] = row
        self._changed[row.id] = row
        self._submissions[row.id] = submission
        text = submission_text(submission)
        self._inputs.append((row.id, text))
        if len(text) <= SHORT_SUBMISSION:
            row.submission = submission

    def change(self, row: TaskRow) -> None:
        """Have a row written that is not as it was."""
        self._changed[row.id] = row

    def depend(self, row: TaskRow, parent_ids: Iterable[str]) -> None:
        """Store which tasks a new one depends on."""
        for parent_id in parent_ids:
            self._parents.setdefault(parent_id, []).append(row.id)

    def close_gate(self, closure: GateClosure) -> None:
        """Remember a closed gate; one that is closed for longer stays so."""
        known = self._closures.get(closure.part) or _closure(self.transaction, closure.part)
        if known is None or _closes_longer(closure, known):
            self._closures[closure.part] = closure

    def settle_money(self, reservation_id: str | None, *, tokens: int, micro_usd: int) -> None:
        """Book what an attempt cost, here or at the ledger outside; nothing gives it all back."""
        if not reservation_id:
            return
        call = Call.COMMIT if tokens or micro_usd else Call.RELEASE
        if not self.keeps_books:
            self._outbox.append((reservation_id, call.value, micro_usd, tokens))
            return
        request = SettleRequest(
            reservation_id=reservation_id,
            call=call,
            micro_usd=MicroUsd(micro_usd),
            tokens=Tokens(tokens),
        )
        # The books may have closed it, or forgotten it a day after its lease ended: then what was
        # held is booked already, and the task must end all the same.
        with suppress(IllegalSettlementError):
            self.books.settle(request, self.now)

    def mark_dispatched(self, reservation_id: str | None) -> bool:
        """Note that the provider is about to be called; False if the money is not held any more."""
        if not reservation_id or not self.keeps_books:
            return True
        request = SettleRequest(reservation_id=reservation_id, call=Call.DISPATCHED)
        try:
            self.books.settle(request, self.now)
        except IllegalSettlementError:
            return False
        return True

    def tell_receiver(self, row: TaskRow, url: str) -> None:
        """File what tells an address of the end of a task."""
        self._deliveries.append(row_for_end(row, url, self.now))

    def tell(self, node_id: str, kind: nodes.Kind, task_id: str) -> None:
        """Leave a message for a node; a worker looks at the tasks that it has."""
        if is_worker(node_id):
            self._called.add(node_id)
        else:
            self._messages.append((node_id, kind, task_id))

    def give_to_worker(self, node_id: str, task_id: str) -> None:
        """Note that a worker has a task."""
        self._given.append((node_id, task_id))

    def take_from_worker(self, node_id: str, task_id: str) -> None:
        """Note that a worker does not have a task any more."""
        self._taken.append((node_id, task_id))

    def call(self, recipient: str) -> None:
        """Have a recipient look for itself when this is written."""
        self._called.add(recipient)

    def tell_dispatcher(self, rows: Iterable[TaskRow], *, by: str) -> None:
        """Have the dispatcher look at tasks, unless it is the node that changed them.

        While nobody dispatches nobody is told: whoever is elected next reads everything.
        """
        if self._dispatcher is None:
            self._dispatcher = nodes.dispatcher_node(self.transaction)
        if self._dispatcher not in (nodes.NOBODY, by):
            self._messages += [(DISPATCHER, nodes.Kind.CHANGED, row.id) for row in rows]

    def write(self) -> None:
        """Write everything that the steps have changed."""
        transaction = self.transaction
        transaction.insert(TASKS_TASKS, [from_task_row(row) for row in self._changed.values()])
        transaction.insert(INPUTS, self._inputs)
        pairs = [(parent, child) for parent, its in self._parents.items() for child in its]
        transaction.insert(PARENTS, pairs)
        keep_closures(transaction, self._closures.values())
        transaction.insert(OUTBOX, self._outbox)
        if self._deliveries:
            transaction.insert(DELIVERIES_DELIVERIES, self._deliveries)
        self.tallies.write(transaction)
        if self.keeps_books:
            ledger.write(transaction, self.books, self.now)
        if self._messages:
            nodes.post(transaction, self._messages)
        if self._called:
            nodes.call(transaction, self._called)
        if self._taken:
            for pair in self._taken:
                transaction.run(_TAKE_FROM_WORKER, pair)
        transaction.insert(WORKER_TASKS, self._given)
        if self._cache is not None:
            for row in self._rows.values():
                if row is not None and not row.is_terminal:
                    self._cache.put(row)


def read_submissions(transaction: Transaction, task_ids: Sequence[str]) -> dict[str, Submission]:
    """Read what tasks were given to do."""
    rows = transaction.read(*about(transaction.dialect, _INPUTS, "id", task_ids))
    return {task_id: to_submission(text) for task_id, text in rows}


def keep_closures(transaction: Transaction, closures: Iterable[GateClosure]) -> None:
    """Write closed gates, in place of what was known of them."""
    rows = [(closure.kind, closure.name, closure.until, closure.why) for closure in closures]
    transaction.insert(CLOSURES, rows)


def _closure(transaction: Transaction, part: GatePart) -> GateClosure | None:
    sql = "SELECT closed_until, why FROM gate_closures WHERE kind = ? AND name = ?"
    rows = transaction.read(sql, part)
    if not rows:
        return None
    return GateClosure(kind=part.kind, name=part.name, until=rows[0][0], why=rows[0][1])


def _closes_longer(closure: GateClosure, known: GateClosure) -> bool:
    if closure.until is None or known.until is None:
        return closure.until is None
    return closure.until > known.until
