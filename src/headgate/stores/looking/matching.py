"""Which tasks match a filter, as conditions of SQL that lists and bulk work share.

They are about a table `tasks` with its columns, or a part of it under that name. What clients sent
lies in another table; it is asked for row by row, after everything that is cheap, so that a
question costs what the rows cost that it looks at. Rule: what a person looks for is a value, and
never a pattern or a piece of SQL.
"""

from __future__ import annotations

import msgspec

from headgate.databases.transaction import Dialect, Value, json_rows
from headgate.stores.task_rows import states_of
from headgate.task_ids import first_id_at
from headgate.task_query import TaskFilter

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
