"""Reading tasks: one by one, in lists, in bulk, counted, and as what a dispatcher starts from.

Beside the ids there is an index of the tasks that have not ended, and one of those that have, by
how they ended. A list of states goes by one of these where they have few tasks. Any other list, and
bulk work, looks at a bounded number of tasks, and costs the same however many are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from headgate.core.fair_share import UsageRow
from headgate.core.gates import GateClosure, GatePart
from headgate.core.rate_limits import RateCharge
from headgate.core.retention import EVICTION_RANKS
from headgate.core.task import TERMINAL, TaskRecord, TaskStatus, is_worker
from headgate.storage import audit, nodes
from headgate.storage.audit import AuditEntry
from headgate.storage.nodes import Kind
from headgate.storage.schema import TASK_COLUMNS
from headgate.storage.store import (
    DISPATCHER,
    MAX_PAGE_BYTES,
    Backlog,
    LaneCount,
    News,
    TaskFilter,
    TaskPage,
    TaskQuery,
    Totals,
    WorkerTotals,
)
from headgate.storage.task_ids import first_id_at
from headgate.storage.transaction import Dialect, Insert, Row, Transaction, Value, about, json_rows
from headgate.storage.unit_of_work import (
    ENDED,
    HAPPENINGS,
    KEPT,
    TICK,
    read_learned,
    read_submissions,
    states_of,
    to_submission,
    to_task_row,
)

_COLUMNS = ", ".join(TASK_COLUMNS)
_CHOSEN = ("agent", "slot")
_GET = f"SELECT {_COLUMNS} FROM tasks WHERE id = ?"  # noqa: S608
_TOLD = (
    f"SELECT seq, kind, task_id, {_COLUMNS} FROM messages LEFT JOIN tasks ON id = task_id"  # noqa: S608
    " WHERE recipient = ? AND seq > ? ORDER BY seq LIMIT ?"
)
_RESULTS = about("SELECT id, result FROM tasks", "id")
_OWNERS = about("SELECT id, agent_id, project_id FROM tasks", "id")
_INPUT = "SELECT submission FROM task_inputs WHERE id = ?"
_LANES = (
    f"SELECT {', '.join(LaneCount.__struct_fields__)} FROM lanes"  # noqa: S608
    " ORDER BY project_id, agent_id"
)
_FORGOTTEN_LANES = (
    f"SELECT project_id, {', '.join(HAPPENINGS)} FROM forgotten_lanes ORDER BY project_id"  # noqa: S608
)
# The condition is that of an index, so what has ended is not even looked at.
BACKLOG = f"SELECT {_COLUMNS} FROM tasks WHERE eviction_rank IS NULL ORDER BY id"  # noqa: S608
_USAGE = (
    "SELECT project_id, hour, tokens, micro_usd, started, completed, forgiven FROM project_usage"
    " ORDER BY project_id, hour"
)
_COUNTERS = "SELECT name, amount FROM counters"
_OPEN_GATE = "DELETE FROM gate_closures WHERE kind = ? AND name = ?"
_CLOSURES = (
    "SELECT kind, name, closed_until, why, cause, closed_by, task_id, closed_at FROM gate_closures"
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
    rows = transaction.read(_OWNERS, task_ids)
    return frozenset(
        task_id
        for task_id, agent, project in rows
        if owner.agent_id in (None, agent) and owner.project_id in (None, project)
    )


def results(transaction: Transaction, *, task_ids: Sequence[str]) -> dict[str, bytes]:
    """Return the results of tasks as JSON; those that have none, or are not there, are left out."""
    found = transaction.read(_RESULTS, task_ids)
    return {task_id: result.encode() for task_id, result in found if result is not None}


def totals(transaction: Transaction) -> Totals:
    """Count what waits, what runs and what has happened."""
    counters = _counters(transaction)
    names = set(Totals.__struct_fields__) & set(counters)
    return Totals(
        lanes=lanes(transaction),
        forgotten=_forgotten_lanes(transaction),
        **{name: counters[name] for name in names},
    )


def lanes(transaction: Transaction) -> tuple[LaneCount, ...]:
    """Return all lanes, by project and agent."""
    return tuple(
        LaneCount(**dict(zip(LaneCount.__struct_fields__, row, strict=True)))
        for row in transaction.read(_LANES)
    )


def _forgotten_lanes(transaction: Transaction) -> tuple[LaneCount, ...]:
    return tuple(
        LaneCount(project_id=row[0], agent_id="", **dict(zip(HAPPENINGS, row[1:], strict=True)))
        for row in transaction.read(_FORGOTTEN_LANES)
    )


def closures(transaction: Transaction, now: float) -> tuple[GateClosure, ...]:
    """Return the gates that are closed now."""
    return _closures(transaction.read(_CLOSURES, (now,)))


def _closures(rows: Iterable[Row]) -> tuple[GateClosure, ...]:
    return tuple(
        GateClosure(
            kind=row[0],
            name=row[1],
            until=row[2],
            why=row[3],
            cause=row[4],
            by=row[5],
            task_id=row[6],
            since=row[7],
        )
        for row in rows
    )


def open_gate(
    transaction: Transaction, now: float, *, part: GatePart, entry: AuditEntry | None = None
) -> bool:
    """Open a part before its time, note who did, and tell the dispatcher; say if it was closed.

    The dispatcher is told in any case: it may have closed the part by itself, for want of budget.
    """
    was_closed = bool(transaction.write(_OPEN_GATE, part))
    nodes.post(transaction, [(DISPATCHER, Kind.OPENED, nodes.part_text(part))])
    if entry is not None:
        audit.write(transaction, entry, now)
    return was_closed


def backlog(transaction: Transaction, now: float) -> Backlog:
    """Return everything that has not ended."""
    rates = transaction.read("SELECT limit_id, bucket, amount FROM rate_counts")
    return Backlog(
        records=tuple([to_task_row(row).record() for row in transaction.read(BACKLOG)]),
        lanes=lanes(transaction),
        usage=_usage(transaction),
        rate_counts=tuple(
            RateCharge(limit_id=limit_id, bucket=bucket, amount=amount)
            for limit_id, bucket, amount in rates
        ),
        closures=closures(transaction, now),
        nodes=nodes.live(transaction, now),
        tick=_counters(transaction).get(TICK, 0),
        learned=read_learned(transaction),
    )


def news(
    transaction: Transaction, now: float, epoch: int, *, seen: int, most: int, all_workers: bool
) -> tuple[News, int]:
    """Look at the tasks that messages name, and at the gates that these may have closed.

    Return the number of the last message, too. All is read in one round trip, but for workers that
    messages name.
    """
    leader, told, live, closed, totals = transaction.read_all(
        [
            (nodes.READ_LEADER, ()),
            (_TOLD, (DISPATCHER, seen, most)),
            nodes.live_statement(now) if all_workers else nodes.live_nodes_statement(now),
            (_CLOSURES, (now,)),
            nodes.worker_totals_statement(now),
        ]
    )
    nodes.check_election(nodes.to_election(leader), epoch, now)
    messages = nodes.to_messages([row[:3] for row in told])
    # A task is read once, however many messages name it.
    named = {row[2]: row[3:] for row, one in zip(told, messages, strict=True) if one.is_of_task}
    changed_workers = [name for name in named if is_worker(name)]
    for name in changed_workers:
        del named[name]
    if all_workers:
        changed_workers = []
    workers = nodes.workers_among(transaction, changed_workers, now)
    found = [to_task_row(row) for row in named.values() if row[0] is not None]
    passed = {part for row in found for part in _gates(row.spec.task.target, row.spec.task.slot)}
    found_news = News(
        records=tuple([row.record() for row in found]),
        gone=tuple([task_id for task_id, row in named.items() if row[0] is None]),
        # Which agent and slot a task had that left them open is not asked when it waits again.
        closures=tuple(
            one
            for one in (_closures(closed) if passed else ())
            if one.part in passed or one.kind in _CHOSEN
        ),
        opened=tuple([nodes.read_part(one.task_id) for one in messages if not one.is_of_task]),
        nodes=(*nodes.to_nodes(live), *workers),
        has_all_workers=all_workers,
        gone_workers=tuple({*changed_workers} - {worker.id for worker in workers}),
        workers=WorkerTotals(*totals[0]),
        has_more=len(messages) == most,
    )
    return found_news, messages[-1].seq if messages else seen


def _counters(transaction: Transaction) -> dict[str, int]:
    return dict(transaction.read(_COUNTERS))


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


# Filters as conditions of SQL, which lists and bulk work share. They are about a table `tasks`, or
# a part of it under that name. What clients sent lies in another table and is asked for row by row,
# after everything that is cheap. What a person looks for is a value, never a pattern or a piece of
# SQL.

Conditions = tuple[list[str], list[Value]]

FIND = {Dialect.SQLITE: "instr", Dialect.POSTGRES: "strpos"}
READABLE = r"CAST(REPLACE(submission, '\u0000', '\u0020') AS json)"
"""A submission as PostgreSQL reads it: no JSON with the character 0, and a task may have one."""

# Both know the letters A to Z only, so that the same text is found in every store.
_LOWER = {Dialect.SQLITE: "lower({})", Dialect.POSTGRES: 'lower({} COLLATE "C")'}
_LABEL = {
    Dialect.SQLITE: "EXISTS (SELECT 1 FROM json_each(submission, '$.labels') AS label"
    " WHERE label.key = ? AND label.value = ?)",
    Dialect.POSTGRES: f"({READABLE} -> 'labels' ->> ?) = ?",
}
_LABEL_KEY = {
    Dialect.SQLITE: "EXISTS (SELECT 1 FROM json_each(submission, '$.labels') AS label"
    " WHERE label.key = ?)",
    Dialect.POSTGRES: f"({READABLE} -> 'labels' ->> ?) IS NOT NULL",
}
_ACTION = {
    Dialect.SQLITE: "json_extract(submission, '$.action')",
    Dialect.POSTGRES: f"({READABLE} ->> 'action')",
}
_LABELS = {
    Dialect.SQLITE: "json_each(submission, '$.labels')",
    Dialect.POSTGRES: f"json_each_text({READABLE} -> 'labels')",
}
_SCOPES = {
    Dialect.SQLITE: "json_each(spec, '$[0].scopes') AS one",
    Dialect.POSTGRES: "json_array_elements_text(CAST(spec AS json) -> 0 -> 'scopes')"
    " AS one (value)",
}
_TEXT_COLUMNS = ("id", "project_id", "agent_id", "error")


def conditions_of(dialect: Dialect, wanted: TaskFilter) -> Conditions:
    """Return the conditions of a filter with their values, the cheap ones first."""
    conditions, values = is_among(dialect, wanted.among)
    if wanted.states:
        conditions.append(f"state IN ({', '.join('?' * len(wanted.states))})")
        values += states_of(wanted.states)
    for condition, value in _simple(FIND[dialect], wanted):
        if value is not None:
            conditions.append(condition)
            values += [value] * condition.count("?")
    if wanted.scope is not None:
        _add(_scope(dialect, wanted.scope), conditions, values)
    if wanted.label is not None:
        _add(_label(dialect, *wanted.label), conditions, values)
    if wanted.text is not None:
        _add(_text(dialect, wanted.text), conditions, values)
    return conditions, values


def is_among(dialect: Dialect, ids: tuple[str, ...] | None) -> Conditions:
    """Return that a task is one of some, which are looked up one by one; None is any."""
    if ids is None:
        return [], []
    given = dialect.given({"id": "TEXT"})
    return [f"id IN (SELECT given.id FROM {given})"], [json_rows([(one,) for one in ids])]  # noqa: S608


def columns_of(wanted: TaskFilter) -> tuple[str, ...]:
    """Return the columns of tasks that these conditions look at."""
    has_text = wanted.text is not None
    used = {
        "id": True,
        "state": bool(wanted.states),
        "agent_id": wanted.agent_id is not None or has_text,
        "project_id": wanted.project_id is not None or has_text,
        "spec": any(
            name is not None for name in (wanted.target, wanted.slot, wanted.provider, wanted.scope)
        ),
        "progress": wanted.slot is not None,
        "error": has_text,
    }
    return tuple(name for name, is_used in used.items() if is_used)


def _simple(find: str, wanted: TaskFilter) -> list[tuple[str, str | None]]:
    in_spec = f"{find}(spec, ?) > 0"
    return [
        ("agent_id = ?", wanted.agent_id),
        ("project_id = ?", wanted.project_id),
        ("id < ?", _first_id(wanted.created_before)),
        ("id >= ?", _first_id(wanted.created_after)),
        (in_spec, _written("target", wanted.target)),
        (in_spec, _written("provider", wanted.provider)),
        (f"({in_spec} OR {find}(progress, ?) > 0)", _written("slot", wanted.slot)),
    ]


def _first_id(seconds: float | None) -> str | None:
    return None if seconds is None else first_id_at(seconds)


def _written(name: str, value: str | None) -> str | None:
    """Return a field as compact JSON has it, where a quoted name cannot be part of another."""
    return None if value is None else f'"{name}":{_json(value)}'


def _scope(dialect: Dialect, scope: str) -> Conditions:
    """Return that a task is charged to a scope, or to one within it; everything is to the root."""
    if not scope:
        return [], []
    find, written = FIND[dialect], _json(scope)[:-1]
    is_within = f"one.value = ? OR {find}(one.value, ?) = 1"
    exact = f"EXISTS (SELECT 1 FROM {_SCOPES[dialect]} WHERE {is_within})"  # noqa: S608
    return [f"({find}(spec, ?) > 0 AND {exact})"], [written, scope, f"{scope}/"]


def _label(dialect: Dialect, key: str, value: str | None) -> Conditions:
    if value is None:
        return _submitted(dialect, _LABEL_KEY[dialect], [key], hint=f"{_json(key)}:")
    hint = f"{_json(key)}:{_json(value)}"
    return _submitted(dialect, _LABEL[dialect], [key, value], hint=hint)


def _text(dialect: Dialect, text: str) -> Conditions:
    find, lower = FIND[dialect], _LOWER[dialect]
    # Only A to Z again, as the databases do.
    wanted = text.encode().lower().decode()

    def has(expression: str) -> str:
        return f"{find}({lower.format(expression)}, ?) > 0"

    labels = f"SELECT 1 FROM {_LABELS[dialect]} AS label"  # noqa: S608
    exact = (
        f"({has(_ACTION[dialect])}"
        f" OR EXISTS ({labels} WHERE {has('label.key')} OR {has('label.value')}))"
    )
    (inner,), inner_values = _submitted(
        dialect, exact, [wanted] * 3, hint=_json(wanted)[1:-1], lower=lower
    )
    columns = [has(column) for column in _TEXT_COLUMNS]
    return [f"({' OR '.join([*columns, inner])})"], [*[wanted] * len(columns), *inner_values]


def _submitted(
    dialect: Dialect, exact: str, values: list[Value], *, hint: str, lower: str = "{}"
) -> Conditions:
    """Return a condition on what a client sent; the JSON is read only if it has the hint in it.

    A subquery with one answer a row, since a planner may turn any other into a look at all rows.
    """
    has_hint = f"{FIND[dialect]}({lower.format('submission')}, ?) > 0"
    case = f"CASE WHEN {has_hint} THEN CASE WHEN {exact} THEN 1 ELSE 0 END ELSE 0 END"
    given = f"SELECT {case} FROM task_inputs AS given WHERE given.id = tasks.id"  # noqa: S608
    return [f"({given}) = 1"], [hint, *values]


def _add(given: Conditions, conditions: list[str], values: list[Value]) -> None:
    conditions += given[0]
    values += given[1]


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


# Scanning from one end on, a bounded number of tasks at a time, and of bytes where it reads what
# clients sent. The next question begins where this one ended.

MAX_ROWS = 20_000
"""How many tasks one question looks at."""

MAX_SORTED_ROWS = 5_000
"""How many tasks are sorted for a list; of ends that are less rare, the newest tasks have some."""

MAX_READ_ROWS = 5_000
MAX_SUBMISSION_BYTES = 4 * 2**20
"""How many tasks, and how much of what clients sent, one question reads that has to read that.

A task that is larger by itself is read by itself.
"""

# Beside the tasks lies an index that has nothing but their ids.
_IDS = "SELECT id FROM task_inputs"
_INDEXED_IDS = "SELECT id FROM tasks"
_SIZES = "SELECT id, octet_length(submission) AS size_bytes FROM task_inputs"
_INDEXED_SIZES = (
    "SELECT id, (SELECT octet_length(submission) FROM task_inputs AS given"
    " WHERE given.id = tasks.id) AS size_bytes FROM tasks"
)
_LIVE = "eviction_rank IS NULL"
_KEPT = about("SELECT COALESCE(SUM(amount), 0) FROM counters", "name")


class Part(NamedTuple):
    """The tasks that one question looks at: how many, within which ids, and among which.

    They are looked at from the newest back, or forward from the oldest. `only` is the condition of
    an index in which all of them are: a list of what waits, or of few failures among a million
    ended tasks, reads nothing else. With `sorts` that index is in another order.
    """

    rows: int
    below: str | None
    least: str | None
    above: str | None = None
    is_forward: bool = False
    among: Conditions = ([], [])
    only: str = ""
    sorts: bool = False

    @property
    def order(self) -> str:
        """The order in which tasks are looked at, as SQL."""
        # Of an expression there is no index, so no planner walks over all ids to save the sorting.
        by = "id || ''" if self.sorts else "id"
        return f"ORDER BY {by}" if self.is_forward else f"ORDER BY {by} DESC"

    @property
    def ids(self) -> str:
        """The ids of all tasks among which these are, as SQL."""
        return _INDEXED_IDS if self.only else _IDS

    @property
    def sizes(self) -> str:
        """The same ids, each with the size of what its client sent."""
        return _INDEXED_SIZES if self.only else _SIZES

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
    part = Part(MAX_ROWS, below, least, above, is_forward, among, *_index_of(transaction, wanted))
    if wanted.reads_submissions:
        return part._replace(rows=max(1, _readable_rows(transaction, part)))
    if (below if is_forward else least) is not None:
        return part._replace(rows=_rows_within(transaction, part))
    return part


def _index_of(transaction: Transaction, wanted: TaskFilter) -> tuple[str, bool]:
    """Return the condition of the index that has all these states, and whether it is to be sorted.

    There is none for all states, nor for an end that most tasks have.
    """
    if not wanted.states or wanted.among is not None:
        return "", False
    if TERMINAL.isdisjoint(wanted.states):
        return _LIVE, False
    if not TERMINAL.issuperset(wanted.states):
        return "", False
    kept = transaction.read(_KEPT, [KEPT[ENDED[status]] for status in wanted.states])[0][0]
    if kept > MAX_SORTED_ROWS:
        return "", False
    ranks = ", ".join(str(EVICTION_RANKS[status]) for status in wanted.states)
    return f"eviction_rank IN ({ranks})", True


def after(transaction: Transaction, part: Part) -> str | None:
    """Return the last id of a part; None if there is no task after it."""
    where, values = _within(part)
    sql = f"{part.ids}{where} {part.order} LIMIT 2 OFFSET ?"
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
    if part.only:
        conditions.append(part.only)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return where, [*(end for _, end in ends if end is not None), *part.among[1]]


def _rows_within(transaction: Transaction, part: Part) -> int:
    where, values = _within(part)
    inner = f"{part.ids}{where} {part.order} LIMIT ?"
    sql = f"SELECT COUNT(*) FROM ({inner}) AS within"  # noqa: S608
    return int(transaction.read(sql, (*values, part.rows))[0][0])


def _readable_rows(transaction: Transaction, part: Part) -> int:
    """Return how many tasks may be looked at until what clients sent becomes too much."""
    where, values = _within(part)
    sizes = f"{part.sizes}{where} {part.order} LIMIT ?"
    sums = f"SELECT SUM(size_bytes) OVER ({part.order}) AS total FROM ({sizes}) AS sizes"  # noqa: S608
    sql = f"SELECT COUNT(*) FROM ({sums}) AS sums WHERE total <= ?"  # noqa: S608
    return int(transaction.read(sql, (*values, MAX_READ_ROWS, MAX_SUBMISSION_BYTES))[0][0])


# Listing tasks, newest or oldest first. Sizes are asked for before anything is read, so that memory
# does not depend on what clients send.

# SQLite reads large rows whole to find its way between them, so no more are looked at than needed.
_SIZES_AT_ONCE = 32

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


# Bulk work. A task that a bulk retry takes up gets a row with the id of the new task before that is
# submitted. So a retry that is repeated, after a crash or a lost answer, goes on where it was and
# makes no task twice.

RETRIES_KEPT_SECONDS = 7 * 86_400.0

_RETRIED_AS = about("SELECT task_id, retried_as FROM bulk_retries", "task_id")
_SUBMITTED = about("UPDATE bulk_retries SET is_submitted = 1", "task_id")
_REFUSED = about("DELETE FROM bulk_retries", "task_id")
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
    conditions, given = conditions_of(transaction.dialect, wanted)
    only, sorts = _index_of(transaction, wanted)
    where, values = _joined(
        transaction.dialect, wanted, ([*conditions, only] if only else conditions, given)
    )
    order = "id || ''" if sorts else "id"
    sql = f"SELECT id FROM tasks WHERE {where} ORDER BY {order} LIMIT ?"  # noqa: S608
    return [row[0] for row in transaction.read(sql, (*values, limit))]


def take_up(
    transaction: Transaction, now: float, *, pairs: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Note under which ids tasks are tried again; one that was noted before keeps its id."""
    transaction.run("DELETE FROM bulk_retries WHERE at < ?", (now - RETRIES_KEPT_SECONDS,))
    transaction.insert(_TAKEN, [(old, new, now) for old, new in pairs])
    taken = [old for old, _ in pairs]
    return dict(transaction.read(_RETRIED_AS, taken))


def close_up(
    transaction: Transaction, _now: float, *, submitted: Sequence[str], refused: Sequence[str]
) -> None:
    """Note which tasks were taken, and forget those that were not, so that they may be later."""
    transaction.run(_SUBMITTED, submitted)
    transaction.run(_REFUSED, refused)


def _joined(dialect: Dialect, wanted: BulkFilter, given: Conditions) -> tuple[str, list[Value]]:
    """Join the conditions of a filter and those of a retry."""
    conditions, values = list(given[0]), list(given[1])
    if wanted.is_retry:
        conditions.append(_NOT_RETRIED)
    if wanted.leaves_out_refused_retries:
        conditions.append(f"NOT (state = ? AND {_IS_REFUSED_RETRY[dialect]})")
        values += states_of((TaskStatus.REJECTED,))
    return " AND ".join(conditions) or "1 = 1", values
