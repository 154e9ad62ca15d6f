"""Reading: single tasks, lists, counts, and what a dispatcher starts from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from headgate.core.gates import GateClosure, GatePart
from headgate.core.project_figures import UsageRow
from headgate.core.rate_limits import RateCharge
from headgate.core.records import TaskRecord
from headgate.core.tasks import TERMINAL, TaskStatus
from headgate.databases.transaction import Dialect, Row, Transaction, Value, about, json_rows
from headgate.store import (
    MAX_PAGE_BYTES,
    Backlog,
    LaneCount,
    News,
    TaskPage,
    TaskQuery,
    Totals,
)
from headgate.stores import nodes
from headgate.stores.messages import Message
from headgate.stores.tallies import TICK
from headgate.stores.task_rows import states_of, to_submission, to_task_row
from headgate.stores.task_schema import TASK_COLUMNS
from headgate.stores.worksheet import Worksheet, read_submissions

# SQLite reads large rows whole to find its way between them, so no more are looked at than needed.
_SIZES_AT_ONCE = 32

_COLUMNS = ", ".join(TASK_COLUMNS)
_CHOSEN = ("agent", "slot")
_LIVE_STATES = states_of(tuple(dict.fromkeys(set(TaskStatus) - TERMINAL)))
_GET = f"SELECT {_COLUMNS} FROM tasks WHERE id = ?"  # noqa: S608
_RESULTS = "SELECT id, result FROM tasks"
_OWNERS = "SELECT id, agent_id, project_id FROM tasks"
_ROW_BYTES = (
    "octet_length(spec) + COALESCE(octet_length(error), 0) + COALESCE(octet_length(result), 0)"
)
_INPUT = "SELECT submission FROM task_inputs WHERE id = ?"
_LANES = (
    f"SELECT {', '.join(LaneCount.__struct_fields__)} FROM lanes"  # noqa: S608
    " ORDER BY project_id, agent_id"
)
_USAGE = (
    "SELECT project_id, hour, tokens, micro_usd, started, completed, forgiven FROM project_usage"
    " ORDER BY project_id, hour"
)
_CLOSURES = (
    "SELECT kind, name, closed_until, why FROM gate_closures"
    " WHERE closed_until IS NULL OR closed_until > ? ORDER BY kind, name"
)


def get(transaction: Transaction, task_id: str) -> TaskRecord | None:
    """Return a task with all that is known of it."""
    rows, inputs = transaction.read_all([(_GET, (task_id,)), (_INPUT, (task_id,))])
    if not rows or not inputs:
        return None
    return to_task_row(rows[0]).record(to_submission(inputs[0][0]))


def among(transaction: Transaction, *, task_ids: Sequence[str], owner: TaskQuery) -> frozenset[str]:
    """Return which of these tasks there are of the agent and the project of a query."""
    rows = transaction.read(*about(transaction.dialect, _OWNERS, "id", task_ids))
    return frozenset(
        task_id
        for task_id, agent, project in rows
        if owner.agent_id in (None, agent) and owner.project_id in (None, project)
    )


def results(transaction: Transaction, *, task_ids: Sequence[str]) -> dict[str, bytes]:
    """Return the results of tasks as JSON; those that have none, or are not there, are left out."""
    found = transaction.read(*about(transaction.dialect, _RESULTS, "id", task_ids))
    return {task_id: result.encode() for task_id, result in found if result is not None}


def find(transaction: Transaction, query: TaskQuery) -> TaskPage:
    """List tasks, newest first, as many as fit on one page."""
    listed = _listed(transaction, query)
    ids = _fitting(transaction, listed[: query.limit])
    rows = _read_rows(transaction, ids)
    submissions = read_submissions(transaction, ids)
    return TaskPage(
        # One that was evicted between the questions is no longer there to be listed.
        records=tuple(
            to_task_row(rows[task_id]).record(submissions[task_id])
            for task_id in ids
            if task_id in rows and task_id in submissions
        ),
        next_before=ids[-1] if len(ids) < len(listed) else None,
    )


def totals(transaction: Transaction) -> Totals:
    """Count what waits, what runs and what has happened."""
    counters = _counters(transaction)
    names = set(Totals.__struct_fields__) & set(counters)
    return Totals(lanes=lanes(transaction), **{name: counters[name] for name in names})


def lanes(transaction: Transaction) -> tuple[LaneCount, ...]:
    """Return all lanes, by project and agent."""
    return tuple(
        LaneCount(**dict(zip(LaneCount.__struct_fields__, row, strict=True)))
        for row in transaction.read(_LANES)
    )


def closures(transaction: Transaction, now: float) -> tuple[GateClosure, ...]:
    """Return the gates that are closed now."""
    return tuple(
        GateClosure(kind=kind, name=name, until=until, why=why)
        for kind, name, until, why in transaction.read(_CLOSURES, (now,))
    )


def backlog(transaction: Transaction, now: float) -> Backlog:
    """Return everything that has not ended."""
    marks = ", ".join("?" * len(_LIVE_STATES))
    sql = f"SELECT {_COLUMNS} FROM tasks WHERE state IN ({marks}) ORDER BY id"  # noqa: S608
    rates = transaction.read("SELECT limit_id, bucket, amount FROM rate_counts")
    return Backlog(
        records=tuple([to_task_row(row).record() for row in transaction.read(sql, _LIVE_STATES)]),
        lanes=lanes(transaction),
        usage=_usage(transaction),
        rate_counts=tuple(
            RateCharge(limit_id=limit_id, bucket=bucket, amount=amount)
            for limit_id, bucket, amount in rates
        ),
        closures=closures(transaction, now),
        nodes=nodes.live(transaction, now),
        tick=_counters(transaction).get(TICK, 0),
    )


def news(sheet: Worksheet, received: Iterable[Message]) -> News:
    """Look at the tasks that messages name, and at the gates that these may have closed."""
    transaction, now = sheet.transaction, sheet.now
    task_ids = dict.fromkeys(message.task_id for message in received)
    rows = sheet.rows(task_ids)
    found = {row.id for row in rows}
    passed = {part for row in rows for part in _gates(row.spec.task.target, row.spec.task.slot)}
    closed = closures(transaction, now) if passed else ()
    return News(
        records=tuple([row.record() for row in rows]),
        gone=tuple(task_id for task_id in task_ids if task_id not in found),
        # Which agent and slot a task had that left them open is not asked when it waits again.
        closures=tuple(one for one in closed if one.part in passed or one.kind in _CHOSEN),
        nodes=nodes.live(transaction, now),
        tick=_counters(transaction).get(TICK, 0),
    )


def _listed(transaction: Transaction, query: TaskQuery) -> list[tuple[str, int]]:
    """Return the ids of a page with the sizes of their rows, and of one more if there is one."""
    conditions, values = _conditions(query)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    sql = f"SELECT id, {_ROW_BYTES} FROM tasks{where} ORDER BY id DESC LIMIT ?"  # noqa: S608
    rows = transaction.read(sql, (*values, query.limit + 1))
    return [(task_id, size_bytes) for task_id, size_bytes in rows]


def _fitting(transaction: Transaction, listed: list[tuple[str, int]]) -> list[str]:
    """Return the first ids whose tasks are small enough together, and always one.

    Sizes are asked for before anything is read: memory must not depend on what clients send.
    """
    fitting: list[str] = []
    total_bytes = 0
    for start in range(0, len(listed), _SIZES_AT_ONCE):
        some = listed[start : start + _SIZES_AT_ONCE]
        given_bytes = _submission_bytes(transaction, [task_id for task_id, _ in some])
        for task_id, row_bytes in some:
            total_bytes += row_bytes + given_bytes.get(task_id, 0)
            if fitting and total_bytes > MAX_PAGE_BYTES:
                return fitting
            fitting.append(task_id)
    return fitting


def _submission_bytes(transaction: Transaction, ids: list[str]) -> dict[str, int]:
    sql = _by_id_sql(transaction.dialect, "id, octet_length(submission)", "task_inputs")
    return dict(transaction.read(sql, (json_rows([(task_id,) for task_id in ids]),)))


def _read_rows(transaction: Transaction, ids: list[str]) -> dict[str, Row]:
    sql = _by_id_sql(transaction.dialect, _COLUMNS, "tasks")
    rows = transaction.read(sql, (json_rows([(task_id,) for task_id in ids]),))
    return {row[0]: row for row in rows}


@cache
def _by_id_sql(dialect: Dialect, columns: str, table: str) -> str:
    given = dialect.given({"id": "TEXT"})
    return f"SELECT {columns} FROM {table} WHERE id IN (SELECT given.id FROM {given})"  # noqa: S608


def _conditions(query: TaskQuery) -> tuple[list[str], list[Value]]:
    conditions: list[str] = []
    values: list[Value] = []
    for condition, value in (
        ("id < ?", query.before),
        ("agent_id = ?", query.agent_id),
        ("project_id = ?", query.project_id),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if query.states:
        conditions.append(f"state IN ({', '.join('?' * len(query.states))})")
        values += states_of(query.states)
    return conditions, values


def _counters(transaction: Transaction) -> dict[str, int]:
    return dict(transaction.read("SELECT name, amount FROM counters"))


def _usage(transaction: Transaction) -> tuple[UsageRow, ...]:
    return tuple(
        UsageRow(
            project_id=row[0],
            hour=row[1],
            tokens=row[2],
            micro_usd=row[3],
            started=row[4],
            completed=row[5],
            forgiven=row[6],
        )
        for row in transaction.read(_USAGE)
    )


def _gates(target: str | None, slot: str | None) -> list[GatePart]:
    parts = [] if target is None else [GatePart("target", target)]
    return parts if slot is None else [*parts, GatePart("slot", slot)]
