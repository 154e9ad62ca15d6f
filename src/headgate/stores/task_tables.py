"""The tables of a store, from within: what holds for every transaction on them.

Whoever writes keeps one `TaskTables` for as long as it has the database: when it last tidied up,
which rows it knows, which connection it has looked at.

Rule: tables travel as a name. An operation that is sent to a process which writes is about the
tables that are there, whatever process it comes from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headgate.core.budgets.scopes import ROOT
from headgate.databases.migrations import schema_version
from headgate.databases.transaction import Transaction
from headgate.errors import LedgerUnavailableError
from headgate.ledger import Clock
from headgate.ledgers import sql_books, sql_upkeep
from headgate.stores import upkeep
from headgate.stores.moves import keyed_submits
from headgate.stores.row_cache import RowCache
from headgate.stores.schema import migrate_all
from headgate.stores.schemas import tasks as task_schema
from headgate.stores.steps import Step, StepAnswer, apply_steps
from headgate.stores.worksheet import Worksheet

Result = TypeVar("Result")

UPKEEP_SECONDS = 60.0


class TaskTables:
    """The tables of tasks, with those of the books beside them if it `keeps_books`."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        keeps_books: bool = True,
        cache: RowCache | None = None,
    ) -> None:
        self.keeps_books = keeps_books
        self._clock = time.time if clock is None else clock
        self._cache = cache
        self._tidied_at = float("-inf")
        self._purged_up_to = ROOT
        # A database has one transaction object for each of its connections.
        self._checked: Transaction | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _tables_here, ()

    def now(self) -> float:
        """Return the time by which leases and deadlines are judged."""
        return self._clock()

    def prepare(self, transaction: Transaction) -> None:
        """Bring the schema up to date; a newer one than the program's is refused."""
        migrate_all(transaction)

    def apply(self, transaction: Transaction, steps: Sequence[Step]) -> Sequence[StepAnswer]:
        """Apply steps in their order; each has an answer of its own."""
        now = self.begin(transaction)
        return apply_steps(self._sheet(transaction, now), steps)

    def run(
        self, operation: Callable[[Transaction, float], Result], transaction: Transaction
    ) -> Result:
        """Run an operation at the time that it is."""
        return operation(transaction, self.begin(transaction))

    def work(self, operation: Callable[[Worksheet], Result], transaction: Transaction) -> Result:
        """Run an operation on a worksheet, and write what it has changed."""
        sheet = self._sheet(transaction, self.begin(transaction))
        result = operation(sheet)
        sheet.write()
        return result

    def begin(self, transaction: Transaction) -> float:
        """Make sure that the tables are there and nobody else writes, and return the time."""
        if transaction is not self._checked:
            self._check(transaction)
        if self._cache is not None:
            self._cache.begin(transaction)
        sql_books.lock_books(transaction)
        now = self.now()
        if now - self._tidied_at >= UPKEEP_SECONDS:
            self._keep_up(transaction, now)
        return now

    def _sheet(self, transaction: Transaction, now: float) -> Worksheet:
        return Worksheet(transaction, now, keeps_books=self.keeps_books, cache=self._cache)

    def _check(self, transaction: Transaction) -> None:
        """Look whether a new connection leads to the tasks: a file or server can be replaced."""
        if not schema_version(transaction, task_schema.PART):
            advice = "put them back, or open the store again to found new ones"
            line = f"the database has no tasks any more, nothing was done; {advice}"
            raise LedgerUnavailableError(line)
        self.prepare(transaction)
        self._checked = transaction

    def _keep_up(self, transaction: Transaction, now: float) -> None:
        # As long as there is more, the next call does the next step; none of them waits long.
        if sql_upkeep.tidy(transaction, now) or keyed_submits.purge(transaction, now):
            return
        self._tidied_at = now
        self._purged_up_to = sql_upkeep.purge_buckets(transaction, now, after=self._purged_up_to)
        upkeep.purge(transaction, now)


_here: list[TaskTables] = []


def be_here(tables: TaskTables) -> None:
    """Make these the tables that operations from other processes are about."""
    _here[:] = [tables]


def _tables_here() -> TaskTables:
    return _here[0]
