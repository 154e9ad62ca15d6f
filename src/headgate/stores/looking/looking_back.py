"""Looking for tasks without an index: from one end on, a bounded part at a time.

There is no index beside the ids, because each costs more than the commit of a task. So a question
looks at a bounded number of tasks, and at a bounded number of bytes where it reads what clients
sent. Rule: a question costs the same whatever the store holds; what it did not come to is left to
the next one, which begins where it ended.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from headgate.databases.transaction import Dialect, Transaction, Value
from headgate.stores.looking.matching import Conditions, columns_of, conditions_of, is_among
from headgate.task_ids import first_id_at
from headgate.task_query import TaskFilter

MAX_ROWS = 20_000
"""How many tasks one question looks at."""

MAX_READ_ROWS = 5_000
MAX_SUBMISSION_BYTES = 32 * 2**20
"""How many tasks, and how much of what clients sent, one question reads that has to read that.

A task that is larger by itself is read by itself.
"""

# Beside the tasks lies an index that has nothing but their ids.
_IDS = "SELECT id FROM task_inputs"
_SIZES = "SELECT id, octet_length(submission) AS size_bytes FROM task_inputs"


class Part(NamedTuple):
    """The tasks that one question looks at: how many, within which ids, and among which.

    They are looked at from the newest back, or forward from the oldest.
    """

    rows: int
    below: str | None
    least: str | None
    above: str | None = None
    is_forward: bool = False
    among: Conditions = ([], [])

    @property
    def order(self) -> str:
        """The order in which tasks are looked at, as SQL."""
        return "ORDER BY id" if self.is_forward else "ORDER BY id DESC"

    def table(self, columns: tuple[str, ...]) -> tuple[str, list[Value]]:
        """Return the part as SQL, with its values, under the name of the whole table."""
        # SQLite compares whole rows with the far end, so the part ends by its number of rows.
        near = self._replace(below=None) if self.is_forward else self._replace(least=None)
        where, values = _within(near)
        part = f"SELECT {', '.join(columns)} FROM tasks{where} {self.order} LIMIT ?"  # noqa: S608
        return f"({part}) AS tasks", [*values, self.rows]


def part_of(
    transaction: Transaction, wanted: TaskFilter, past: str | None, *, is_forward: bool = False
) -> Part:
    """Return what to look at, from past an id on."""
    least = None if wanted.created_after is None else first_id_at(wanted.created_after)
    below = _lowest(None if is_forward else past, wanted.created_before)
    above = past if is_forward else None
    among = is_among(transaction.dialect, wanted.among)
    part = Part(MAX_ROWS, below, least, above, is_forward, among)
    if wanted.reads_submissions:
        return part._replace(rows=max(1, _readable_rows(transaction, part)))
    if (below if is_forward else least) is not None:
        return part._replace(rows=_rows_within(transaction, part))
    return part


def after(transaction: Transaction, part: Part) -> str | None:
    """Return the last id of a part; None if there is no task after it."""
    where, values = _within(part)
    sql = f"{_IDS}{where} {part.order} LIMIT 2 OFFSET ?"
    rows = transaction.read(sql, (*values, max(0, part.rows - 1)))
    return str(rows[0][0]) if len(rows) > 1 else None


def conditions_within(dialect: Dialect, wanted: TaskFilter) -> tuple[Conditions, tuple[str, ...]]:
    """Return the conditions on the tasks of a part, and their columns.

    The part keeps the times, and which tasks can be meant.
    """
    rest = msgspec.structs.replace(wanted, created_before=None, created_after=None, among=None)
    return conditions_of(dialect, rest), columns_of(wanted)


def _lowest(before: str | None, created_before: float | None) -> str | None:
    ends = [before, None if created_before is None else first_id_at(created_before)]
    return min((end for end in ends if end is not None), default=None)


def _within(part: Part) -> tuple[str, list[Value]]:
    ends = (("id < ?", part.below), ("id >= ?", part.least), ("id > ?", part.above))
    conditions = [condition for condition, end in ends if end is not None]
    conditions += part.among[0]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return where, [*(end for _, end in ends if end is not None), *part.among[1]]


def _rows_within(transaction: Transaction, part: Part) -> int:
    where, values = _within(part)
    inner = f"{_IDS}{where} {part.order} LIMIT ?"
    sql = f"SELECT COUNT(*) FROM ({inner}) AS within"  # noqa: S608
    return int(transaction.read(sql, (*values, part.rows))[0][0])


def _readable_rows(transaction: Transaction, part: Part) -> int:
    """Return how many tasks may be looked at until what clients sent becomes too much."""
    where, values = _within(part)
    sizes = f"{_SIZES}{where} {part.order} LIMIT ?"
    sums = f"SELECT SUM(size_bytes) OVER ({part.order}) AS total FROM ({sizes}) AS sizes"  # noqa: S608
    sql = f"SELECT COUNT(*) FROM ({sums}) AS sums WHERE total <= ?"  # noqa: S608
    return int(transaction.read(sql, (*values, MAX_READ_ROWS, MAX_SUBMISSION_BYTES))[0][0])
