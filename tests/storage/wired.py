"""A store in memory whose every step goes over the wire, as to a process that writes.

Time is virtual all the same, since both ends are here. Operations of tests are made on the spot and
cannot be sent; they run as they are. Rule: an operation of the program must be one that can be.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import FunctionType

from headgate.core.budgets.ledger import Clock
from headgate.storage.memory import MemoryDatabase
from headgate.storage.sql_store import SqlTaskStore, TaskTables, be_here
from headgate.storage.writer import Awaited, InlineWriter, Job, StepWire, perform


class WiredWriter(InlineWriter):
    """Sends jobs and answers as bytes, from this process to itself."""

    def __init__(self, database: MemoryDatabase, tables: TaskTables) -> None:
        super().__init__(database)
        self._tables = tables
        self._near, self._far = StepWire(tables.apply), StepWire(tables.apply)

    def _perform(self, jobs: list[Awaited]) -> None:
        be_here(self._tables)
        if not all(map(_can_be_sent, jobs)):
            super()._perform(jobs)
            return
        sent = self._near.join([self._near.pack(job) for job in jobs])
        received: list[Job] = self._far.unpack(sent)
        perform(self._database, received)
        answers = self._far.pack_answers(received)
        assert self._near.unpack_answers(answers, deque(jobs)) == jobs


def wired_store(database: MemoryDatabase, *, clock: Clock, keeps_ledger: bool) -> SqlTaskStore:
    """Make a store over tables that others may share within this thread."""
    tables = TaskTables(clock=clock, keeps_ledger=keeps_ledger)
    writer = WiredWriter(database, tables)
    return SqlTaskStore(tables, writer, writer)


def _can_be_sent(job: Awaited) -> bool:
    try:
        pickle.dumps(job.work)
    except (AttributeError, TypeError, pickle.PicklingError):
        made = [part for part in _functions(job.work) if "<" in part.__qualname__]
        assert made, "an argument of the operation cannot be sent"
        assert all(not part.__module__.startswith("headgate") for part in made), made
        return False
    return True


def _functions(work: object) -> Iterator[FunctionType]:
    """Go through an operation and the functions that are bound to it."""
    if isinstance(work, partial):
        for part in (work.func, *work.args, *work.keywords.values()):
            yield from _functions(part)
    elif isinstance(work, FunctionType):
        yield work
