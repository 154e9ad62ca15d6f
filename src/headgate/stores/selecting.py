"""Many tasks at once: which match a filter, and which of them were tried again already.

A task that a bulk retry takes up gets a row with the id of the new task before that is submitted.
So a retry that is repeated, after a crash or a lost answer, goes on where it was and makes no task
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec

from headgate.core.tasks import TaskStatus
from headgate.databases.transaction import Dialect, Insert, Transaction, Value, about, json_rows
from headgate.stores.task_rows import states_of
from headgate.task_ids import first_id_at

RETRIES_KEPT_SECONDS = 7 * 86_400.0

_TAKEN = Insert(
    table="bulk_retries",
    columns=(("task_id", "TEXT"), ("retried_as", "TEXT"), ("at", "DOUBLE PRECISION")),
    key=("task_id",),
    updated=("task_id",),
)
_FIND = {Dialect.SQLITE: "instr", Dialect.POSTGRES: "strpos"}
# PostgreSQL reads no JSON with the character 0 in it, and a task may have one.
_READABLE = r"CAST(REPLACE(submission, '\u0000', '\u0020') AS json)"
_LABEL = {
    Dialect.SQLITE: "EXISTS (SELECT 1 FROM json_each(submission, '$.labels') AS label"
    " WHERE label.key = ? AND label.value = ?)",
    Dialect.POSTGRES: f"({_READABLE} -> 'labels' ->> ?) = ?",
}
_NOT_RETRIED = (
    "NOT EXISTS (SELECT 1 FROM bulk_retries WHERE task_id = tasks.id AND is_submitted = 1)"
)
_IS_REFUSED_RETRY = {
    Dialect.SQLITE: "json_extract(spec, '$[3].code') IS NOT NULL"
    " AND EXISTS (SELECT 1 FROM task_inputs AS given WHERE given.id = tasks.id"
    " AND json_extract(submission, '$.retryOf') IS NOT NULL)",
    Dialect.POSTGRES: "(CAST(spec AS json) -> 3 ->> 'code') IS NOT NULL"  # noqa: S608
    " AND EXISTS (SELECT 1 FROM task_inputs AS given WHERE given.id = tasks.id"
    f" AND ({_READABLE} ->> 'retryOf') IS NOT NULL)",
}
"""A retry that the full queue turned away; the task that it was made of is there to be retried."""


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks are meant; `label` is a key and its value. None leaves a condition out.

    `is_retry` leaves out what was tried again already, `leaves_out_refused_retries` what is only
    left of an attempt to do so.
    """

    states: tuple[TaskStatus, ...]
    agent_id: str | None = None
    project_id: str | None = None
    target: str | None = None
    label: tuple[str, str] | None = None
    created_before: float | None = None
    created_after: float | None = None
    is_retry: bool = False
    leaves_out_refused_retries: bool = False


def count(transaction: Transaction, *, wanted: TaskFilter) -> int:
    """Return how many tasks match."""
    where, values = _where(transaction.dialect, wanted)
    return int(transaction.read(f"SELECT COUNT(*) FROM tasks WHERE {where}", values)[0][0])  # noqa: S608


def ids(transaction: Transaction, *, wanted: TaskFilter, limit: int) -> list[str]:
    """Return the oldest tasks that match."""
    where, values = _where(transaction.dialect, wanted)
    sql = f"SELECT id FROM tasks WHERE {where} ORDER BY id LIMIT ?"  # noqa: S608
    return [row[0] for row in transaction.read(sql, (*values, limit))]


def take_up(
    transaction: Transaction, now: float, *, pairs: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Note under which ids tasks are tried again; one that was noted before keeps its id."""
    transaction.run("DELETE FROM bulk_retries WHERE at < ?", (now - RETRIES_KEPT_SECONDS,))
    transaction.insert(_TAKEN, [(old, new, now) for old, new in pairs])
    taken = [old for old, _ in pairs]
    sql, parameters = about(
        transaction.dialect, "SELECT task_id, retried_as FROM bulk_retries", "task_id", taken
    )
    return dict(transaction.read(sql, parameters))


def close_up(
    transaction: Transaction, _now: float, *, submitted: Sequence[str], refused: Sequence[str]
) -> None:
    """Note which tasks were taken, and forget those that were not, so that they may be later."""
    transaction.run(_submitted_sql(transaction.dialect), (_texts(submitted),))
    transaction.run(*about(transaction.dialect, "DELETE FROM bulk_retries", "task_id", refused))


@cache
def _submitted_sql(dialect: Dialect) -> str:
    given = dialect.given({"text": "TEXT"})
    return (
        "UPDATE bulk_retries SET is_submitted = 1"  # noqa: S608
        f" WHERE task_id IN (SELECT given.text FROM {given})"
    )


def _texts(texts: Sequence[str]) -> str:
    return json_rows([(text,) for text in texts])


def _where(dialect: Dialect, wanted: TaskFilter) -> tuple[str, list[Value]]:
    conditions = [f"state IN ({', '.join('?' * len(wanted.states))})"]
    values: list[Value] = [*states_of(wanted.states)]
    for condition, value in (
        ("agent_id = ?", wanted.agent_id),
        ("project_id = ?", wanted.project_id),
        ("id < ?", _bound(wanted.created_before)),
        ("id >= ?", _bound(wanted.created_after)),
        # The text of a task is compact JSON, in which a quoted name cannot be part of another.
        (f"{_FIND[dialect]}(spec, ?) > 0", _written_target(wanted.target)),
    ):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if wanted.label is not None:
        inner = f"SELECT id FROM task_inputs WHERE {_LABEL[dialect]}"  # noqa: S608
        conditions.append(f"id IN ({inner})")
        values += wanted.label
    if wanted.is_retry:
        conditions.append(_NOT_RETRIED)
    if wanted.leaves_out_refused_retries:
        conditions.append(f"NOT (state = ? AND {_IS_REFUSED_RETRY[dialect]})")
        values += states_of((TaskStatus.REJECTED,))
    return " AND ".join(conditions), values


def _bound(seconds: float | None) -> str | None:
    return None if seconds is None else first_id_at(seconds)


def _written_target(target: str | None) -> str | None:
    return None if target is None else f'"target":{msgspec.json.encode(target).decode()}'
