"""The tasks of a run as its folder has them, read while another process may write to it.

Rule: looking changes nothing. A store is asked in one transaction that only reads; of a journal the
last line may be half written, and is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headgate.core.budgets.ledger import Balance
from headgate.core.budgets.scopes import Scope
from headgate.errors import HeadgateError, StoreError
from headgate.storage import ledger, queries
from headgate.storage.sqlite import ReadOnlyReader, SqliteReader
from headgate.storage.store import TaskQuery
from headgate.storage.transaction import Transaction
from headgate.workflow.backend import StepTask
from headgate.workflow.local_backend import step_task
from headgate.workflow.remote_journal import Ended, Entry, Sent, Taken, queued_task
from headgate.workflow.run_folder import JOURNAL, STORE, Run
from headgate.workflow.step_requests import result_value

PAGE = 1_000
_entries: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)


class RecordedTasks(Protocol):
    """What was done so far."""

    def tasks(self) -> Iterator[StepTask]:
        """Give every task, of every generation."""

    def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        """Return the results of tasks that are done, in their order."""

    def balance(self, scope: str, now: float) -> Balance | None:
        """Return what a scope of the run's own ledger has spent and holds; None if not known."""


class NoTasks:
    """A run that has not even begun."""

    def tasks(self) -> Iterator[StepTask]:
        """Give nothing."""
        return iter(())

    def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        """Return nothing."""
        return [None] * len(tasks)

    def balance(self, scope: str, now: float) -> Balance | None:  # noqa: ARG002
        """Return nothing."""
        return None


class StoredTasks:
    """The tasks in the store of a run."""

    def __init__(self, transaction: Transaction, run_id: str) -> None:
        self._transaction = transaction
        self._run_id = run_id

    def tasks(self) -> Iterator[StepTask]:
        """Give every task, page by page."""
        before: str | None = None
        while True:
            page = queries.find(self._transaction, TaskQuery(before=before, limit=PAGE))
            for record in page.records:
                yield step_task(record, self._run_id)
            before = page.next_before
            if before is None:
                return

    def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        """Return the results of tasks that are done, in their order."""
        names = [task.task_id for task in tasks]
        found = queries.results(self._transaction, task_ids=names)
        return [result_value(found.get(name)) for name in names]

    def balance(self, scope: str, now: float) -> Balance | None:
        """Return what a scope has spent and holds."""
        return ledger.accounts(self._transaction, Scope(scope), now, most=1)[0].balance


class JournalTasks:
    """The tasks in the journal of a run on a service; of one that goes on, only that it was taken.

    Of results only the offsets are kept, as in the journal itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sent: dict[str, Sent] = {}
        self._tasks: dict[tuple[int, int], StepTask] = {}
        self._offsets: dict[tuple[int, int], tuple[int, int]] = {}
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._note(_entry(line, path), offset, len(line))
                offset += len(line)

    def tasks(self) -> Iterator[StepTask]:
        """Give every task, of every generation."""
        return iter(self._tasks.values())

    def results(self, tasks: Sequence[StepTask]) -> list[Any]:
        """Return the results of tasks that are done, in their order."""
        with self._path.open("rb") as file:
            found = []
            for task in tasks:
                offset, size = self._offsets[task.number, task.generation]
                file.seek(offset)
                entry = _entry(file.read(size), self._path)
                found.append(result_value(entry.result if isinstance(entry, Ended) else None))
        return found

    def balance(self, scope: str, now: float) -> Balance | None:  # noqa: ARG002
        """Return nothing: the service has the ledger."""
        return None

    def _note(self, entry: Entry, offset: int, size: int) -> None:
        match entry:
            case Sent(key=key):
                self._sent[key] = entry
            case Taken(key=key, task_ids=task_ids) if key in self._sent:
                for order, task_id in zip(self._sent.pop(key).orders, task_ids, strict=False):
                    if task_id:
                        task = queued_task(order, task_id)
                        self._tasks.setdefault((order.number, order.generation), task)
            case Ended(task=task):
                self._tasks[task.number, task.generation] = task
                self._offsets[task.number, task.generation] = (offset, size)


@contextmanager
def recorded_tasks(path: Path, run_id: str) -> Iterator[RecordedTasks]:
    """Open what the folder of a run has of its tasks."""
    store, journal = path / STORE, path / JOURNAL
    if journal.exists():
        try:
            yield JournalTasks(journal)
        except OSError as error:
            problem = f"{journal} cannot be read: {error.strerror}"
            raise StoreError(problem) from None
    elif store.exists():
        with _reading(store) as transaction:
            has_tables = transaction.read(_TABLES)
            yield StoredTasks(transaction, run_id) if has_tables else NoTasks()
    else:
        yield NoTasks()


def last_event_at(tasks: Iterable[StepTask]) -> float:
    """Return when any of these began or ended last."""
    times = (task.completed_at or task.started_at or 0.0 for task in tasks)
    return max(times, default=0.0)


def left_at(run: Run) -> float:
    """Return when a process that was killed last wrote anything of a run, as its tasks tell."""
    try:
        with recorded_tasks(run.path, run.id) as recorded:
            return last_event_at(recorded.tasks())
    except HeadgateError:
        # Whoever opens it next is told what is wrong.
        return 0.0


_TABLES = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'task_inputs'"


@contextmanager
def _reading(store: Path) -> Iterator[Transaction]:
    is_writable = os.access(store.parent, os.W_OK)
    reader = SqliteReader(store) if is_writable else ReadOnlyReader(store)
    try:
        yield reader.begin()
    finally:
        reader.rollback()
        reader.close()


def _entry(line: bytes, path: Path) -> Entry:
    try:
        return _entries.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        problem = f"{path} is damaged: a line is none of a journal"
        raise StoreError(problem) from None
