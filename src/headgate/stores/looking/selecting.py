"""Many tasks at once: which match a filter, and which of them were tried again already.

A task that a bulk retry takes up gets a row with the id of the new task before that is submitted.
So a retry that is repeated, after a crash or a lost answer, goes on where it was and makes no task
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from headgate.core.tasks.task import TaskStatus
from headgate.databases.transaction import Dialect, Insert, Transaction, Value, about, json_rows
from headgate.stores.looking.looking_back import after, conditions_within, part_of
from headgate.stores.looking.matching import READABLE, Conditions, conditions_of
from headgate.stores.task_rows import states_of
from headgate.task_query import TaskFilter

RETRIES_KEPT_SECONDS = 7 * 86_400.0

_TAKEN = Insert(
    table="bulk_retries",
    columns=(("task_id", "TEXT"), ("retried_as", "TEXT"), ("at", "DOUBLE PRECISION")),
    key=("task_id",),
    updated=("task_id",),
)
_NOT_RETRIED = (
    "NOT EXISTS (SELECT 1 FROM bulk_retries WHERE task_id = tasks.id AND is_submitted = 1)"
)
_RETRY_COLUMNS = ("id", "state", "spec")
_IS_REFUSED_RETRY = {
    Dialect.SQLITE: "json_extract(spec, '$[3].code') IS NOT NULL"
    " AND EXISTS (SELECT 1 FROM task_inputs AS given WHERE given.id = tasks.id"
    " AND json_extract(submission, '$.retryOf') IS NOT NULL)",
    Dialect.POSTGRES: "(CAST(spec AS json) -> 3 ->> 'code') IS NOT NULL"  # noqa: S608
    " AND EXISTS (SELECT 1 FROM task_inputs AS given WHERE given.id = tasks.id"
    f" AND ({READABLE} ->> 'retryOf') IS NOT NULL)",
}
"""A retry that the full queue turned away; the task that it was made of is there to be retried."""


class BulkFilter(TaskFilter, frozen=True, kw_only=True):
    """Which tasks are worked on.

    `is_retry` leaves out what was tried again already, `leaves_out_refused_retries` what is only
    left of an attempt to do so.
    """

    is_retry: bool = False
    leaves_out_refused_retries: bool = False


def count_part(
    transaction: Transaction, *, wanted: BulkFilter, before: str | None = None
) -> tuple[int, str | None]:
    """Count the tasks of one part that match; return from before which id the next part goes on."""
    part = part_of(transaction, wanted, before)
    (conditions, values), columns = conditions_within(transaction.dialect, wanted)
    table, bounds = part.table(
        tuple(
            dict.fromkeys(
                (*columns, *(_RETRY_COLUMNS if wanted.leaves_out_refused_retries else ()))
            )
        )
    )
    where, values = _joined(transaction.dialect, wanted, (conditions, values))
    sql = f"SELECT COUNT(*) FROM {table} WHERE {where}"  # noqa: S608
    found = transaction.read(sql, (*bounds, *values))[0][0]
    return int(found), after(transaction, part)


def ids(transaction: Transaction, *, wanted: BulkFilter, limit: int) -> list[str]:
    """Return the oldest tasks that match."""
    conditions = conditions_of(transaction.dialect, wanted)
    where, values = _joined(transaction.dialect, wanted, conditions)
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


def _joined(dialect: Dialect, wanted: BulkFilter, given: Conditions) -> tuple[str, list[Value]]:
    """Join the conditions of a filter and those of a retry."""
    conditions, values = list(given[0]), list(given[1])
    if wanted.is_retry:
        conditions.append(_NOT_RETRIED)
    if wanted.leaves_out_refused_retries:
        conditions.append(f"NOT (state = ? AND {_IS_REFUSED_RETRY[dialect]})")
        values += states_of((TaskStatus.REJECTED,))
    return " AND ".join(conditions) or "1 = 1", values
