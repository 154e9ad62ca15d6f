"""What tortured runs must look like, read from their stores and their ledger.

Nothing here asks a run: the rows of its tasks, in its own store or in that of a service, are held
against the marks that its steps left, and against the ledger.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from budgets.support import drift_of
from headgate.core.budgets.ledger import Audit, Balance, Ledger
from headgate.core.task import TaskStatus
from headgate.storage import ledger
from headgate.storage.schema import TASK_COLUMNS
from headgate.storage.sqlite import SqliteReader
from headgate.storage.unit_of_work import TaskRow, to_task_row

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
    over_limit: list[str] = field(default_factory=list)
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
            "limit exceeded": self.over_limit,
            "strange ends": self.strange_ends,
        }

    def is_right(self) -> bool:
        """Tell whether every promise was kept."""
        return not any(self.broken().values())


def marks_in(path: Path) -> Counter[str]:
    """Count the marks of each step."""
    return Counter(path.read_text().split()) if path.exists() else Counter()


class StepRow(NamedTuple):
    """A task, and the number of the run of a step that it was made for."""

    number: int
    row: TaskRow


def tasks_in(folder: Path) -> list[StepRow]:
    """Read the tasks of a run; a process that was killed early has left no store."""
    # The id of a task has the number behind the id of its run.
    own = f"{folder.name}-"
    rows = rows_in(folder)
    return [StepRow(int(row.id.removeprefix(own).split("-")[0]), row) for row in rows]


def rows_in(folder: Path) -> list[TaskRow]:
    """Read all tasks of the store in a folder."""
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
    `permits`; so nothing else may be assumed to have cost money. `tasks` reads the tasks as they
    stand. Without `costs` nobody has said what the steps cost.
    """

    def __init__(
        self,
        run_id: str,
        tasks: Callable[[], list[StepRow]],
        marks: Path,
        names: list[str],
        costs: list[int],
        *,
        permits: int,
    ) -> None:
        self._run_id = run_id
        self._tasks = tasks
        self._marks = marks
        self._names = names
        self._costs = costs
        self._permits = permits
        self._lives = 0
        self._done: dict[str, tuple[TaskRow, int]] = {}

    def look(self, found: Remains) -> None:
        """Hold what is recorded as done against the marks; called whenever a process has ended."""
        self._lives += 1
        self._look_at_done(found)

    def _look_at_done(self, found: Remains) -> None:
        tasks = {task.row.id: task for task in self._tasks()}
        marks = marks_in(self._marks)
        for task_id, (before, _) in self._done.items():
            task = tasks.get(task_id)
            after = None if task is None else task.row
            if after is None or after.progress != before.progress or after.result != before.result:
                found.changed.append(f"{task_id} became {after and after.progress}")
        for number, row in tasks.values():
            if row.status is TaskStatus.DONE:
                self._look_at(found, number, row, marks)

    def look_at_end(self, found: Remains, *, service_ends: int = 0) -> tuple[int, int]:
        """Hold a run that is done against its file; return what it has used and what is assumed.

        A service that was ended meanwhile has interrupted steps as well.
        """
        self._look_at_done(found)
        tasks = self._tasks()
        if not self._costs:
            return self._look_at_unknown(found, tasks)
        marks = marks_in(self._marks)
        done = Counter(number for number, row in tasks if row.status is TaskStatus.DONE)
        assumed: Counter[int] = Counter()
        for number, row in tasks:
            assumed[number] += row.progress.assumed_micro_usd
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
        # The last process came to its own end.
        self._look_at_assumed(found, assumed, ended=self._lives - 1 + service_ends)
        used = sum(row.progress.used_micro_usd for _, row in tasks)
        expected = sum(self._costs) + assumed.total()
        if used != expected:
            found.misbooked.append(f"{self._run_id} used {used} and not {expected}")
        return used, assumed.total()

    def _look_at_unknown(self, found: Remains, tasks: list[StepRow]) -> tuple[int, int]:
        """Look at steps whose cost nobody knew: each time that one has run is booked somehow."""
        marks = marks_in(self._marks)
        done = Counter(number for number, row in tasks if row.status is TaskStatus.DONE)
        assumed: Counter[int] = Counter()
        for number, row in tasks:
            assumed[number] += row.progress.assumed_micro_usd
            if row.status is TaskStatus.DONE and not row.progress.reported_micro_usd:
                found.misbooked.append(f"{row.id} is done without its cost")
        for number, name in enumerate(self._names):
            if done[number] > 1:
                found.done_twice.append(f"{name} is done {done[number]} times")
            if marks[name] > done[number] and not assumed[number]:
                found.unassumed.append(f"{name} has run {marks[name]} times, nothing is assumed")
        return sum(row.progress.used_micro_usd for _, row in tasks), assumed.total()

    def _look_at_assumed(self, found: Remains, assumed: Counter[int], *, ended: int) -> None:
        times = {number: amount / self._costs[number] for number, amount in assumed.items()}
        for number, count in times.items():
            if count > ended or not count.is_integer():
                line = f"{self._names[number]} is assumed {count:g} times, {ended} processes ended"
                found.overassumed.append(line)
        if sum(times.values()) > ended * self._permits:
            line = f"{self._run_id}: {sum(times.values()):g} attempts, {ended} processes ended"
            found.overassumed.append(line)

    def _look_at(self, found: Remains, number: int, row: TaskRow, marks: Counter[str]) -> None:
        name = self._names[number]
        if not marks[name]:
            found.unexecuted.append(name)
        _, times = self._done.setdefault(row.id, (row, marks[name]))
        if marks[name] != times:
            found.ran_again.append(f"{name} has run {marks[name]} times, done after {times}")


def ledger_in(folder: Path) -> Audit:
    """Read the ledger that is kept in the store in a folder."""
    reader = SqliteReader(folder / STORE_NAME)
    try:
        return ledger.audit(reader.begin())
    finally:
        reader.close()


async def shared_ledger(ledger: Ledger) -> Audit:
    """Read a ledger whose clock is past the end of every lease."""
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


def look_at_ledger(
    found: Remains, audit: Audit, scope: str, used_micro_usd: int, *, limit_micro_usd: int
) -> Balance:
    """Compare the ledger with its limit, and with what the tasks of all runs in a scope have used.

    What an attempt has cost above what it held is overrun; nothing else may be above the limit.
    """
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
    if total.spent_micro_usd > limit_micro_usd:
        found.over_limit.append(f"{scope} has spent {total.spent_micro_usd} of {limit_micro_usd}")
    return total
