"""What a tortured store must look like when everything has ended, read from its tables.

Nothing here asks the service: rows are held against what clients were told, against what was
executed, and against the journal of the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from budgets.support import drift_of
from headgate.core.budgets.ledger import EMPTY, Audit, Balance, JournalEntry, Ledger
from headgate.core.budgets.reservations import Call
from headgate.core.budgets.scopes import ROOT
from headgate.core.call import CallRecord, CallState
from headgate.core.task import TaskStatus
from headgate.core.task_view import exact_moment
from headgate.storage import ledger
from headgate.storage.call_rows import is_usage
from headgate.storage.ledger import AMOUNTS, to_entry
from headgate.storage.schema import TASK_COLUMNS
from headgate.storage.sql_store import SqlTaskStore
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import ENDED, TaskRow, to_task_row
from torture.ledger import Findings as LedgerFindings
from torture.ledger import play_back
from torture.service_load import MODELS, End, Memory
from torture.service_tasks import Execution

_JOURNAL = (
    f"SELECT at, reservation_id, call, charges, {', '.join(AMOUNTS)} FROM ledger_journal"
    " ORDER BY seq"
)
_USED = (
    "SELECT project_id, CAST(SUM(tokens) AS BIGINT), CAST(SUM(micro_usd) AS BIGINT)"
    " FROM usage_rows GROUP BY project_id"
)
MOST_ENTRIES = 10_000_000
_ENDS = (Call.COMMIT, Call.RELEASE, Call.EXPIRE)


@dataclass
class Remains:
    """What is wrong in a store at rest; each list names the rows."""

    tasks: int = 0
    attempts: int = 0
    states: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    unexecuted: list[str] = field(default_factory=list)
    executed_twice: list[str] = field(default_factory=list)
    recorded_twice: list[str] = field(default_factory=list)
    stale_results: list[str] = field(default_factory=list)
    overlapping: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    drift: list[str] = field(default_factory=list)
    probes: int = 0
    crowded: list[str] = field(default_factory=list)
    unheld: list[str] = field(default_factory=list)
    highest_ratio: float = 0.0

    def is_right(self) -> bool:
        """Tell whether every promise was kept."""
        return not any(self.broken().values()) and self.highest_ratio <= 1.0

    def broken(self) -> dict[str, list[str]]:
        """Return the promises by name, each with what breaks it."""
        return {
            "acknowledged and lost": self.lost,
            "without an end": self.unended,
            "changed after their end": self.changed,
            "done but not executed": self.unexecuted,
            "attempts executed twice": self.executed_twice,
            "recorded twice": self.recorded_twice,
            "results of another attempt": self.stale_results,
            "under two leases": self.overlapping,
            "capacity leaked": self.leaked,
            "budget drift": self.drift,
            "probes beside another": self.crowded,
            "started at zero": self.unheld,
        }


class LedgerState(NamedTuple):
    """What the ledger says when everything has ended; `lie_outside` if the store has none."""

    journal: list[JournalEntry]
    audit: Audit
    lie_outside: bool = False


async def look(
    store: SqlTaskStore,
    memory: Memory,
    executions: Iterable[Execution],
    limit_of: Callable[[str], int | None],
    *,
    outside: LedgerState | None = None,
) -> Remains:
    """Hold everything in a store at rest against what is known of it."""
    await store.open()
    try:
        return await store.writer.submit(
            lambda transaction: _look(
                transaction, memory, executions, limit_of, outside or _books_in(transaction)
            )
        )
    finally:
        await store.close()


async def ledger_outside(ledger: Ledger) -> LedgerState:
    """Read a ledger whose clock is past the end of every lease."""
    await ledger.open()
    try:
        while await ledger.sweep():
            pass
        journal = await ledger.journal(ROOT, since=0.0, limit=MOST_ENTRIES)
        return LedgerState(journal[::-1], await ledger.audit(), lie_outside=True)
    finally:
        await ledger.close()


def _books_in(transaction: Transaction) -> LedgerState:
    journal = [to_entry(row) for row in transaction.read(_JOURNAL)]
    return LedgerState(journal, ledger.audit(transaction))


def _look(
    transaction: Transaction,
    memory: Memory,
    executions: Iterable[Execution],
    limit_of: Callable[[str], int | None],
    ledger: LedgerState,
) -> Remains:
    found = Remains()
    sql = f"SELECT {', '.join(TASK_COLUMNS)} FROM tasks"
    rows = {row[0]: to_task_row(row) for row in transaction.read(sql)}
    _look_at_tasks(found, rows, memory)
    _look_at_executions(found, rows, Counter(executions))
    _look_at_journal(found, ledger)
    _look_at_probes(found, rows, ledger.journal)
    _look_at_counts(found, transaction, rows)
    _look_at_balances(found, transaction, ledger.audit)
    played = LedgerFindings()
    play_back(ledger.journal, played, limit_of)
    # A journal that was folded cannot be played back; what is left then is where it ended.
    ended = (_ratio(balance, limit_of(scope)) for (scope, _), balance in ledger.audit.kept.items())
    found.highest_ratio = max(played.highest_ratio, *ended)
    return found


def _ratio(balance: Balance, limit: int | None) -> float:
    return max(balance.spent_micro_usd, balance.spent_tokens) / limit if limit else 0.0


def _look_at_tasks(found: Remains, rows: dict[str, TaskRow], memory: Memory) -> None:
    found.tasks = len(rows)
    found.states = dict(Counter(row.status.value for row in rows.values()))
    found.lost = sorted(memory.acknowledged - rows.keys())
    found.unended = sorted(row.id for row in rows.values() if not row.is_terminal)
    for task_id, end in memory.ended.items():
        row = rows.get(task_id)
        if row is not None and end != _end_of(row):
            found.changed.append(f"{task_id}: {end} became {_end_of(row)}")
    for task_id in memory.cancelled:
        row = rows.get(task_id)
        if row is not None and row.status is not TaskStatus.CANCELLED:
            found.changed.append(f"{task_id}: cancelled became {row.status.value}")


def _end_of(row: TaskRow) -> End:
    at = msgspec.to_builtins(exact_moment(row.progress.completed_at or 0.0))
    return End(row.status.value, row.progress.attempt, at)


def _look_at_executions(
    found: Remains, rows: dict[str, TaskRow], executed: Counter[Execution]
) -> None:
    found.executed_twice = [
        f"{each} {times} times" for each, times in executed.items() if times > 1
    ]
    for row in rows.values():
        if row.status is not TaskStatus.DONE:
            continue
        if Execution(row.id, row.progress.attempt) not in executed:
            found.unexecuted.append(row.id)
        if msgspec.json.decode(row.result or "{}").get("attempt") != row.progress.attempt:
            found.stale_results.append(f"{row.id}: {row.result}, attempt {row.progress.attempt}")


def _look_at_journal(found: Remains, ledger: LedgerState) -> None:
    """Have each reservation end once, and each attempt begin after the one before has ended.

    What a crash left held outside the store, and never began, is given back by its lease alone.
    """
    ends: Counter[str] = Counter()
    reserved: Counter[str] = Counter()
    holding: dict[str, str] = {}
    for entry in ledger.journal:
        task_id, name = entry.reservation_id.split(":")[0], entry.reservation_id
        # Calls draw from slices of a budget, which belong to no task and lie side by side.
        is_slice = task_id == "escrow"
        if entry.call is Call.RESERVE:
            reserved[name] += 1
            if task_id in holding and not is_slice and not ledger.lie_outside:
                found.overlapping.append(f"{name} beside {holding[task_id]}")
            holding[task_id] = name
        elif entry.call in _ENDS:
            ends[name] += 1
            holding.pop(task_id, None)
    found.attempts = len(reserved)
    found.recorded_twice = [name for name in reserved if reserved[name] > 1 or ends[name] > 1]
    found.leaked += [f"reservation {name} has no end" for name in reserved if not ends[name]]


def _look_at_probes(
    found: Remains, rows: dict[str, TaskRow], journal: Iterable[JournalEntry]
) -> None:
    """Have work whose price nobody knows run alone in its project, and hold something of a limit.

    The dollars of a model without a price are never learned, so each of its attempts is a probe.
    """
    live: dict[str, set[str]] = {}
    for entry in journal:
        row = rows.get(entry.reservation_id.split(":")[0])
        if row is None or row.spec.terms.estimate_micro_usd is not None:
            continue
        target = row.spec.task.target or ""
        model, name = MODELS.get(target), entry.reservation_id
        probes = live.setdefault(row.project_id, set())
        if entry.call in _ENDS:
            probes.discard(name)
        elif entry.call is Call.RESERVE and model is not None:
            if not entry.delta.reserved_micro_usd:
                found.unheld.append(f"{name} of {target}")
            if not model.startswith("torture-"):
                found.probes += 1
                probes.add(name)
                if len(probes) > 1:
                    found.crowded.append(f"{sorted(probes)} in {row.project_id}")


def _look_at_counts(found: Remains, transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    lanes = transaction.read("SELECT agent_id, project_id, queued, inflight FROM lanes")
    found.leaked += [f"lane {row}" for row in lanes if row[2] or row[3]]
    counters: dict[str, int] = dict(transaction.read("SELECT name, amount FROM counters"))
    if counters.get("queued"):
        found.leaked.append(f"{counters['queued']} are counted as queued")
    counted = Counter(row.status for row in rows.values())
    for status, name in ENDED.items():
        if counters.get(name, 0) != counted[status]:
            found.recorded_twice.append(f"{counters.get(name)} {name}, not {counted[status]}")
    usage = "SELECT CAST(SUM(started) AS BIGINT), CAST(SUM(completed) AS BIGINT) FROM project_usage"
    started, completed = transaction.read(usage)[0]
    # Usage counts calls of no task as well, and the counters do not.
    calls = [call for call in _calls(transaction) if is_usage(call) and call.task_id is None]
    started -= len(calls)
    completed -= sum(call.state is CallState.DONE for call in calls)
    for name, amount in (("started", started), ("completed", completed)):
        if counters.get(name, 0) != amount:
            found.recorded_twice.append(f"{counters.get(name)} {name}, {amount} in usage")
    live = transaction.read("SELECT id, state FROM ledger_reservations WHERE finished_at IS NULL")
    found.leaked += [f"reservation {row} is held" for row in live]
    untold = transaction.read("SELECT reservation_id FROM ledger_outbox")
    found.leaked += [f"settlement {row} was never told" for row in untold]


def _calls(transaction: Transaction) -> Iterator[CallRecord]:
    for (record,) in transaction.read("SELECT record FROM calls"):
        yield msgspec.json.decode(record, type=CallRecord)


def _look_at_balances(found: Remains, transaction: Transaction, audit: Audit) -> None:
    found.drift = [f"{key}: {pair}" for key, pair in drift_of(audit).items()]
    spent: dict[str, Balance] = {}
    for (scope, _), balance in audit.kept.items():
        spent[scope] = spent.get(scope, EMPTY).add(balance)
        if balance.reserved_micro_usd or balance.reserved_tokens:
            found.leaked.append(f"{scope or 'root'} has {balance}")
    for project_id, tokens, micro_usd in transaction.read(_USED):
        booked = spent.get(f"project:{project_id}", EMPTY)
        if (booked.used_tokens, booked.used_micro_usd) != (tokens, micro_usd):
            used = f"{tokens} tokens and {micro_usd}"
            found.drift.append(f"project {project_id} used {used} and is booked {booked}")
