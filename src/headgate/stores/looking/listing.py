"""Lists of tasks, newest or oldest first: what matches, page by page.

Rule: sizes are asked for before anything is read, so that memory does not depend on what clients
send.
"""

from __future__ import annotations

from functools import cache

from headgate.databases.transaction import Dialect, Row, Transaction, json_rows
from headgate.store import MAX_PAGE_BYTES
from headgate.stores.looking.looking_back import Part, after, conditions_within, part_of
from headgate.stores.schemas.tasks import TASK_COLUMNS
from headgate.stores.task_rows import to_task_row
from headgate.stores.worksheet import read_submissions
from headgate.task_query import TaskPage, TaskQuery

# SQLite reads large rows whole to find its way between them, so no more are looked at than needed.
_SIZES_AT_ONCE = 32

_COLUMNS = ", ".join(TASK_COLUMNS)
_ROW_BYTES = (
    "octet_length(spec) + octet_length(progress)"
    " + COALESCE(octet_length(error), 0) + COALESCE(octet_length(result), 0)"
)


def find(transaction: Transaction, query: TaskQuery) -> TaskPage:
    """List tasks, as many as fit on one page."""
    part = part_of(transaction, query, query.before, is_forward=query.is_oldest_first)
    listed = _listed(transaction, query, part)
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
        next_before=ids[-1] if len(ids) < len(listed) else after(transaction, part),
    )


def _listed(transaction: Transaction, query: TaskQuery, part: Part) -> list[tuple[str, int]]:
    """Return the ids of a page with the sizes of their rows, and of one more if there is one."""
    (conditions, values), columns = conditions_within(transaction.dialect, query)
    table, bounds = part.table((*columns, f"{_ROW_BYTES} AS size_bytes"))
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    sql = f"SELECT id, size_bytes FROM {table}{where} {part.order} LIMIT ?"  # noqa: S608
    rows = transaction.read(sql, (*bounds, *values, query.limit + 1))
    return [(task_id, size_bytes) for task_id, size_bytes in rows]


def _fitting(transaction: Transaction, listed: list[tuple[str, int]]) -> list[str]:
    """Return the first ids whose tasks are small enough together, and always one."""
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
