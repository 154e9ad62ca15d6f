"""What tortured runs must look like, read from their stores and their books.

Nothing here asks a run: the rows of its store are held against the marks that its steps left, and
against the books.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from headgate.core.budgets.accounts import Balance
from headgate.core.tasks.task import TaskStatus
from headgate.databases.sqlite import SqliteReader
from headgate.ledger import Audit, Ledger
from headgate.ledgers import sql_upkeep
from headgate.stores.schemas.tasks import TASK_COLUMNS
from headgate.stores.task_rows import TaskRow, to_task_row
from ledgers.support import drift_of

STORE_NAME = "headgate.db"
LEASES_SECONDS = 7_200.0
_TASKS = f"SELECT {', '.join(TASK_COLUMNS)} FROM tasks"
_HAS_TASKS = "SELECT COUNT(*) FROM sqlite_master WHERE name = 'tasks'"


@dataclass
class Remains:
    """What is wrong with what runs left; each list says what, with the names of steps."""

    unexecuted: list[str] = field(default_factory=list)
    ran_again: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)
    done_twice: list[str] = field(default_factory=list)
    unassumed: list[str] = field(default_factory=list)
    overassumed: list[str] = field(default_factory=list)
    misbooked: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    drift: list[str] = field(default_factory=list)
    strange_ends: list[str] = field(default_factory=list)

    def broken(self) -> dict[str, list[str]]:
        """Return the promises by name, each with what breaks it."""
        return {
            "done but not executed": self.unexecuted,
            "ran again after it was done": self.ran_again,
            "changed after it was done": self.changed,
            "without an end": self.unended,
            "done twice": self.done_twice,
            "executed and not booked": self.unassumed,
            "assumed without a cause": self.overassumed,
            "booked wrongly": self.misbooked,
            "money still held": self.leaked,
            "budget drift": self.drift,
            "strange ends": self.strange_ends,
        }

    def is_right(self) -> bool:
        """Tell whether every promise was kept."""
        return not any(self.broken().values())


def marks_in(path: Path) -> Counter[str]:
    """Count the marks of each step."""
    return Counter(path.read_text().split()) if path.exists() else Counter()


def tasks_in(folder: Path) -> list[TaskRow]:
    """Read the tasks of a run; a process that was killed early has left no store."""
    if not (folder / STORE_NAME).exists():
        return []
    reader = SqliteReader(folder / STORE_NAME)
    try:
        transaction = reader.begin()
        if not transaction.read(_HAS_TASKS)[0][0]:
            return []
        return [to_task_row(row) for row in transaction.read(_TASKS)]
    finally:
        reader.close()


class RunAudit:
    """One run over all lives of its processes: what was done once stays as it was.

    A process that is ended interrupts each step once at most, and at most as many as it has
    `places`; so nothing else may be assumed to have cost money.
    """

    def __init__(
        self, folder: Path, marks: Path, names: list[str], costs: list[int], *, places: int
    ) -> None:
        self._folder = folder
        self._marks = marks
        self._names = names
        self._costs = costs
        self._places = places
        self._lives = 0
        self._done: dict[str, tuple[TaskRow, int]] = {}

    def look(self, found: Remains) -> None:
        """Hold what is recorded as done against the marks; called whenever a process has ended."""
        self._lives += 1
        self._look_at_done(found)

    def _look_at_done(self, found: Remains) -> None:
        rows = {row.id: row for row in tasks_in(self._folder)}
        marks = marks_in(self._marks)
        for task_id, (before, _) in self._done.items():
            after = rows.get(task_id)
            if after is None or after.progress != before.progress or after.result != before.result:
                found.changed.append(f"{task_id} became {after and after.progress}")
        for row in rows.values():
            if row.status is TaskStatus.DONE:
                self._look_at(found, row, marks)

    def look_at_end(self, found: Remains) -> tuple[int, int]:
        """Hold a run that is done against its file; return what it has used and what is assumed."""
        self._look_at_done(found)
        rows = tasks_in(self._folder)
        marks = marks_in(self._marks)
        done = Counter(self._number(row) for row in rows if row.status is TaskStatus.DONE)
        assumed: Counter[int] = Counter()
        for row in rows:
            assumed[self._number(row)] += row.progress.assumed_micro_usd
            if not row.is_terminal:
                found.unended.append(f"{row.id} is {row.status.value}")
        for number, (name, cost) in enumerate(zip(self._names, self._costs, strict=True)):
            if done[number] != 1:
                kept = found.done_twice if done[number] else found.unended
                kept.append(f"{name} is done {done[number]} times")
            # Every time that a step has run is booked: as done, or as assumed.
            if marks[name] > done[number] + assumed[number] / cost:
                line = f"{name} has run {marks[name]} times, {assumed[number]} is assumed"
                found.unassumed.append(line)
        self._look_at_assumed(found, assumed)
        used = sum(row.progress.used_micro_usd for row in rows)
        expected = sum(self._costs) + assumed.total()
        if used != expected:
            found.misbooked.append(f"{self._folder.name} used {used} and not {expected}")
        return used, assumed.total()

    def _look_at_assumed(self, found: Remains, assumed: Counter[int]) -> None:
        # The last process came to its own end.
        ended = self._lives - 1
        times = {number: amount / self._costs[number] for number, amount in assumed.items()}
        for number, count in times.items():
            if count > ended or not count.is_integer():
                line = f"{self._names[number]} is assumed {count:g} times, {ended} processes ended"
                found.overassumed.append(line)
        if sum(times.values()) > ended * self._places:
            line = f"{self._folder.name}: {sum(times.values()):g} attempts, {ended} processes ended"
            found.overassumed.append(line)

    def _look_at(self, found: Remains, row: TaskRow, marks: Counter[str]) -> None:
        name = self._names[self._number(row)]
        if not marks[name]:
            found.unexecuted.append(name)
        _, times = self._done.setdefault(row.id, (row, marks[name]))
        if marks[name] != times:
            found.ran_again.append(f"{name} has run {marks[name]} times, done after {times}")

    def _number(self, row: TaskRow) -> int:
        """Return the number of a run of a step, which its id has behind that of the run."""
        return int(row.id.removeprefix(f"{self._folder.name}-").split("-")[0])


def books_of_run(folder: Path) -> Audit:
    """Read the books that a run keeps in its own store."""
    reader = SqliteReader(folder / STORE_NAME)
    try:
        return sql_upkeep.audit(reader.begin())
    finally:
        reader.close()


async def shared_books(ledger: Ledger) -> Audit:
    """Read the books of a ledger whose clock is past the end of every lease."""
    await ledger.open()
    try:
        while await ledger.sweep():
            pass
        return await ledger.audit()
    finally:
        await ledger.close()


def when_leases_have_ended() -> float:
    """Be the clock of such a ledger."""
    return time.time() + LEASES_SECONDS


def look_at_books(found: Remains, audit: Audit, scope: str, used_micro_usd: int) -> None:
    """Hold the books against what the tasks of all runs in a scope have used."""
    found.drift += [f"{key}: {pair}" for key, pair in drift_of(audit).items()]
    total = Balance()
    for (name, _), balance in audit.kept.items():
        if balance.reserved_micro_usd or balance.reserved_tokens:
            found.leaked.append(f"{name or 'root'} has {balance}")
        if name == scope:
            total = total.add(balance)
    booked = total.spent_micro_usd + total.overrun_micro_usd
    if booked != used_micro_usd:
        found.misbooked.append(f"{scope} is booked {booked} and its tasks used {used_micro_usd}")
