"""The audit of a task store: everything that is counted is counted again from the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from budgets.support import drift_of
from headgate.core.call import CallRecord, CallState
from headgate.core.retention import EVICTION_RANKS, StoredResult, evictable_at
from headgate.core.task import TaskStatus, is_worker
from headgate.storage import ledger
from headgate.storage.call_rows import is_usage
from headgate.storage.queries import totals
from headgate.storage.schema import TASK_BYTES, TASK_COLUMNS
from headgate.storage.sql_store import SqlTaskStore
from headgate.storage.transaction import Transaction
from headgate.storage.unit_of_work import HAPPENINGS, KEPT, TaskRow, to_task_row

RESERVATION_OF = {TaskStatus.ASSIGNED: "held", TaskStatus.RUNNING: "dispatched"}
ENDED = {
    "completed": TaskStatus.DONE,
    "failed": TaskStatus.FAILED,
    "cancelled": TaskStatus.CANCELLED,
    "rejected": TaskStatus.REJECTED,
}


async def audit(store: SqlTaskStore, *, has_evicted: bool = False) -> None:
    """Hold lanes, counters, dependants and reservations against the rows of the tasks."""
    checks: list[Callable[[Transaction, dict[str, TaskRow]], None]] = [
        _audit_lanes,
        _audit_projects,
        _audit_leases,
        _audit_workers,
        _audit_dependants,
        _audit_side_tables,
        _audit_assumptions,
        _audit_kept,
    ]
    if not has_evicted:
        checks += [_audit_counters, _audit_usage]
    if store.tables.keeps_ledger:
        checks.append(_audit_ledger)

    def check(transaction: Transaction) -> None:
        sql = f"SELECT {', '.join(TASK_COLUMNS)} FROM tasks"
        rows = {row[0]: to_task_row(row) for row in transaction.read(sql)}
        since: dict[str, float | None] = dict(
            transaction.read("SELECT id, evictable_since FROM tasks")
        )
        assert since == {row.id: _retained_until(row) for row in rows.values()}
        for each in checks:
            each(transaction, rows)

    await store.writer.submit(check)


def _audit_workers(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    """What a worker is noted to have is what is in flight there."""
    noted = set(transaction.read("SELECT node_id, task_id FROM worker_tasks"))
    placed = {(row.progress.node_id, row.id) for row in rows.values() if row.is_in_flight}
    assert noted == {pair for pair in placed if is_worker(pair[0])}


def _audit_assumptions(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    """What is assumed is a part of what is booked."""
    for progress in (row.progress for row in rows.values()):
        assert 0 <= progress.assumed_tokens <= progress.used_tokens
        assert 0 <= progress.assumed_micro_usd <= progress.used_micro_usd
    columns = "tokens, assumed_tokens, micro_usd, assumed_micro_usd"
    for tokens, assumed_tokens, micro_usd, assumed in transaction.read(
        f"SELECT {columns} FROM usage_rows"
    ):
        assert 0 <= assumed_tokens <= tokens
        assert 0 <= assumed <= micro_usd
    columns = "micro_usd, assumed_micro_usd, priced_micro_usd"
    for micro_usd, assumed, priced in transaction.read(f"SELECT {columns} FROM usage_totals"):
        assert 0 <= assumed + priced <= micro_usd


def _retained_until(row: TaskRow) -> float | None:
    progress = row.progress
    result = StoredResult(
        status=row.status, completed_at=progress.completed_at, dependants=progress.dependants
    )
    return evictable_at(result, retention_seconds=0.0)


def _audit_lanes(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    queued = Counter(
        (row.spec.task.agent_id or "", row.project_id)
        for row in rows.values()
        if row.status is TaskStatus.QUEUED
    )
    inflight = Counter(
        (row.agent_id or "", row.project_id) for row in rows.values() if row.is_in_flight
    )
    kept = transaction.read("SELECT agent_id, project_id, queued, inflight FROM lanes")
    assert {(row[0], row[1]): row[2] for row in kept if row[2]} == dict(queued)
    assert {(row[0], row[1]): row[3] for row in kept if row[3]} == dict(inflight)
    total = transaction.read("SELECT amount FROM counters WHERE name = 'queued'")
    assert sum(row[0] for row in total) == queued.total()
    scheduled = Counter(
        (row.spec.task.agent_id or "", row.project_id)
        for row in rows.values()
        if row.status is TaskStatus.QUEUED and row.is_scheduled
    )
    kept = transaction.read("SELECT agent_id, project_id, scheduled FROM lanes")
    assert {(row[0], row[1]): row[2] for row in kept if row[2]} == dict(scheduled)


def _audit_projects(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    """What is counted of a project is what its rows say, to the byte."""
    sizes: dict[str, int] = dict(transaction.read(f"SELECT id, {TASK_BYTES} FROM tasks"))
    expected: dict[str, list[int]] = {}
    for row in rows.values():
        sums = expected.setdefault(row.project_id, [0] * 8)
        is_queued = row.status is TaskStatus.QUEUED
        sums[0] += is_queued
        sums[1] += is_queued and row.is_scheduled
        sums[2] += 0 if row.is_terminal else row.submitted_bytes
        sums[3] += row.is_terminal
        sums[4] += sizes[row.id] if row.is_terminal else 0
        sums[5] += row.status is TaskStatus.REJECTED
    for project_id, size_bytes in transaction.read(
        "SELECT project_id, octet_length(record) FROM calls"
    ):
        sums = expected.setdefault(project_id, [0] * 8)
        sums[6] += 1
        sums[7] += size_bytes
    columns = "project_id, queued, scheduled, live_bytes, ended, ended_bytes, refused"
    columns += ", calls, call_bytes"
    found = transaction.read(f"SELECT {columns} FROM project_counts")
    assert {row[0]: list(row[1:]) for row in found if any(row[1:])} == expected
    counters: dict[str, int] = dict(transaction.read("SELECT name, amount FROM counters"))
    for place, name in (
        (0, "queued"),
        (1, "scheduled"),
        (2, "live_bytes"),
        (4, "ended_bytes"),
        (7, "call_bytes"),
    ):
        assert counters.get(name, 0) == sum(sums[place] for sums in expected.values()), name


def _audit_leases(_transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    for row in rows.values():
        assert (row.progress.node_id is not None) == row.is_in_flight, row.id
        assert (row.progress.completed_at is not None) == row.is_terminal, row.id
        assert row.progress.waiting_for == 0 or not row.is_in_flight, row.id


def _audit_dependants(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    pairs = transaction.read("SELECT parent_id, task_id FROM task_parents")
    waiting: Counter[str] = Counter()
    dependants: Counter[str] = Counter()
    for parent_id, task_id in pairs:
        if not rows[task_id].is_terminal:
            # A result that is needed is still there.
            dependants[parent_id] += 1
            waiting[task_id] += not rows[parent_id].is_terminal
    for row in rows.values():
        assert row.progress.dependants == dependants[row.id], row.id
        if not row.is_terminal:
            assert row.progress.waiting_for == waiting[row.id], row.id


def _audit_side_tables(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    inputs = {row[0] for row in transaction.read("SELECT id FROM task_inputs")}
    assert inputs == set(rows)
    pairs = transaction.read("SELECT parent_id, task_id FROM task_parents")
    assert {name for pair in pairs for name in pair} <= set(rows)


def _audit_usage(transaction: Transaction, _: dict[str, TaskRow]) -> None:
    """Whoever reports usage and whoever reckons shares have added up the same.

    What nobody reported counts in a share by its weight or its time, and only there.
    """
    (used,) = transaction.read(
        "SELECT CAST(SUM(micro_usd) AS BIGINT), CAST(SUM(attempts + calls) AS BIGINT),"
        " CAST(SUM(tokens - assumed_tokens) AS BIGINT), CAST(SUM(tokens) AS BIGINT)"
        " FROM usage_rows"
    )
    sums = "SELECT CAST(SUM(micro_usd) AS BIGINT), CAST(SUM(tokens) AS BIGINT) FROM project_usage"
    ((shared_micro_usd, shared_tokens),) = transaction.read(sums)
    ticks = transaction.read("SELECT amount FROM counters WHERE name = 'tick'")
    assert (used[1] or 0) == (ticks[0][0] if ticks else 0)
    assert (used[0] or 0) <= (shared_micro_usd or 0)
    assert (used[2] or 0) <= (shared_tokens or 0)
    (in_all,) = transaction.read(
        "SELECT CAST(SUM(micro_usd) AS BIGINT), CAST(SUM(tokens) AS BIGINT) FROM usage_totals"
    )
    assert in_all == (used[0], used[3])


def _audit_counters(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    counted = totals(transaction)
    states = Counter(row.status for row in rows.values())
    for name, status in ENDED.items():
        assert getattr(counted, name) == states[status], name
    assert counted.submitted == sum(row.spec.rejected is None for row in rows.values())
    usage = transaction.read("SELECT started, completed FROM project_usage")
    calls = [
        msgspec.json.decode(row[0], type=CallRecord)
        for row in transaction.read("SELECT record FROM calls WHERE task_id IS NULL")
    ]
    begun = [call for call in calls if is_usage(call)]
    done = [call for call in begun if call.state is CallState.DONE]
    assert counted.started + len(begun) == sum(row[0] for row in usage)
    assert counted.completed + len(done) == sum(row[1] for row in usage)
    for name in HAPPENINGS:
        lanes = [*counted.lanes, *counted.forgotten]
        assert getattr(counted, name) == sum(getattr(lane, name) for lane in lanes), name


def _audit_ledger(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    drift = drift_of(ledger.audit(transaction))
    assert drift == {}
    live: dict[str | None, str] = dict(
        transaction.read("SELECT id, state FROM ledger_reservations WHERE finished_at IS NULL")
    )
    held = {
        row.progress.reservation_id: RESERVATION_OF[row.status]
        for row in rows.values()
        if row.is_in_flight
    }
    assert live == held
    reserved = transaction.read(
        "SELECT SUM(reserved_tokens), SUM(reserved_micro_usd) FROM ledger_balances WHERE scope = ''"
    )[0]
    flying = [row.progress for row in rows.values() if row.is_in_flight]
    assert tuple(int(amount or 0) for amount in reserved) == (
        sum(progress.reserved_tokens for progress in flying),
        sum(progress.reserved_micro_usd for progress in flying),
    )


def _audit_kept(transaction: Transaction, rows: dict[str, TaskRow]) -> None:
    """What is counted as kept is what is there of each end, and exactly that has a rank."""
    counters: dict[str, int] = dict(transaction.read("SELECT name, amount FROM counters"))
    kept = Counter(f"kept_{row.status.value}" for row in rows.values() if row.is_terminal)
    assert {name: counters.get(name, 0) for name in KEPT.values()} == {
        name: kept[name] for name in KEPT.values()
    }
    ranks: dict[str, int | None] = dict(transaction.read("SELECT id, eviction_rank FROM tasks"))
    assert ranks == {row.id: EVICTION_RANKS.get(row.status) for row in rows.values()}
