"""Reading: single tasks, counts, and what a dispatcher starts from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headgate.core.dispatch.project_figures import UsageRow
from headgate.core.gates import GateClosure, GatePart
from headgate.core.rate_limits import RateCharge
from headgate.core.tasks.records import TaskRecord
from headgate.core.tasks.task import TERMINAL, TaskStatus
from headgate.databases.transaction import Transaction, about
from headgate.store import Backlog, LaneCount, News, Totals
from headgate.stores import nodes
from headgate.stores.messages import Message
from headgate.stores.schemas.tasks import TASK_COLUMNS
from headgate.stores.tallies import TICK
from headgate.stores.task_rows import states_of, to_submission, to_task_row
from headgate.stores.worksheet import Worksheet
from headgate.task_query import TaskQuery

_COLUMNS = ", ".join(TASK_COLUMNS)
_CHOSEN = ("agent", "slot")
_LIVE_STATES = states_of(tuple(dict.fromkeys(set(TaskStatus) - TERMINAL)))
_GET = f"SELECT {_COLUMNS} FROM tasks WHERE id = ?"  # noqa: S608
_RESULTS = "SELECT id, result FROM tasks"
_OWNERS = "SELECT id, agent_id, project_id FROM tasks"
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
