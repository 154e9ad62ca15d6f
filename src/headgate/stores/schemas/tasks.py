"""The tables of a task store in SQL.

A row of `tasks` is small and written at every step; what only the executor reads, and may be large,
lies beside it and is written once. That table has an index of its own, with only the ids: where the
rows are the index, SQLite reads the whole of each that it compares. Every further index costs more
than the commit itself, so there is one beside the keys: the ended tasks that nothing needs.

`evictable_since` is set as long as that is so, and holds the time at which the task ended.
`settled_by` is the node that settled the latest attempt; one that was taken back has none.
"""

from __future__ import annotations

from headgate.databases.migrations import Migration
from headgate.databases.transaction import Insert

PART = "tasks"

_TABLES = """
CREATE TABLE tasks (
    id {text} PRIMARY KEY,
    project_id {text} NOT NULL,
    agent_id {text},
    state {text} NOT NULL,
    spec {text} NOT NULL,
    progress {text} NOT NULL,
    evictable_since DOUBLE PRECISION,
    settled_by {text},
    error {text},
    result {text},
    tokens BIGINT,
    micro_usd BIGINT
) {by_key};
CREATE INDEX evictable_tasks ON tasks (evictable_since) WHERE evictable_since IS NOT NULL;
CREATE TABLE task_inputs (
    id {text} PRIMARY KEY,
    submission {text} NOT NULL
);
CREATE TABLE task_parents (
    parent_id {text},
    task_id {text},
    PRIMARY KEY (parent_id, task_id)
) {by_key};
CREATE TABLE lanes (
    agent_id {text},
    project_id {text},
    queued BIGINT NOT NULL,
    inflight BIGINT NOT NULL,
    submitted BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    cancelled BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    expired BIGINT NOT NULL,
    started BIGINT NOT NULL,
    wait_ms BIGINT NOT NULL,
    served_tick BIGINT NOT NULL,
    PRIMARY KEY (agent_id, project_id)
) {by_key};
CREATE TABLE counters (
    name {text} PRIMARY KEY,
    amount BIGINT NOT NULL
) {by_key};
CREATE TABLE project_usage (
    project_id {text},
    hour BIGINT,
    tokens BIGINT NOT NULL,
    micro_usd BIGINT NOT NULL,
    started BIGINT NOT NULL,
    completed BIGINT NOT NULL,
    forgiven BIGINT NOT NULL,
    PRIMARY KEY (project_id, hour)
) {by_key};
CREATE TABLE rate_counts (
    limit_id {text},
    bucket BIGINT,
    amount BIGINT NOT NULL,
    PRIMARY KEY (limit_id, bucket)
) {by_key};
CREATE TABLE gate_closures (
    kind {text},
    name {text},
    closed_until DOUBLE PRECISION,
    why {text} NOT NULL,
    PRIMARY KEY (kind, name)
) {by_key};
CREATE TABLE nodes (
    id {text} PRIMARY KEY,
    places INTEGER NOT NULL,
    address {text} NOT NULL,
    lease_until DOUBLE PRECISION NOT NULL
) {by_key};
CREATE TABLE dispatcher (
    only_row INTEGER PRIMARY KEY,
    node_id {text} NOT NULL,
    epoch BIGINT NOT NULL,
    lease_until DOUBLE PRECISION NOT NULL,
    address {text} NOT NULL
);
CREATE TABLE messages (
    seq {sequence},
    recipient {text} NOT NULL,
    kind {text} NOT NULL,
    task_id {text} NOT NULL
);
CREATE TABLE configured_budgets (
    scope {text} PRIMARY KEY
) {by_key};
CREATE TABLE ledger_outbox (
    reservation_id {text} PRIMARY KEY,
    call {text} NOT NULL,
    micro_usd BIGINT NOT NULL,
    tokens BIGINT NOT NULL
) {by_key}
"""


def _statements(*, text: str, sequence: str, by_key: str) -> tuple[str, ...]:
    script = _TABLES.format(text=text, sequence=sequence, by_key=by_key)
    return tuple(statement.strip() for statement in script.split(";"))


MIGRATIONS = (
    Migration(
        number=1,
        sqlite=_statements(
            text="TEXT",
            # A number that was read and deleted must not be given again.
            sequence="INTEGER PRIMARY KEY AUTOINCREMENT",
            by_key="WITHOUT ROWID",
        ),
        postgres=_statements(
            text='TEXT COLLATE "C"',
            sequence="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
            by_key="",
        ),
    ),
)

_CHANGING = (
    ("agent_id", "TEXT"),
    ("state", "TEXT"),
    ("progress", "TEXT"),
    ("evictable_since", "DOUBLE PRECISION"),
    ("settled_by", "TEXT"),
    ("error", "TEXT"),
    ("result", "TEXT"),
    ("tokens", "BIGINT"),
    ("micro_usd", "BIGINT"),
)
TASK_COLUMNS = ("id", "project_id", "spec", *(name for name, _ in _CHANGING))

TASKS = Insert(
    table="tasks",
    columns=(("id", "TEXT"), ("project_id", "TEXT"), ("spec", "TEXT"), *_CHANGING),
    key=("id",),
    updated=tuple(name for name, _ in _CHANGING),
)
INPUTS = Insert(
    table="task_inputs",
    columns=(("id", "TEXT"), ("submission", "TEXT")),
    key=("id",),
    updated=("submission",),
)
PARENTS = Insert(table="task_parents", columns=(("parent_id", "TEXT"), ("task_id", "TEXT")))
CLOSURES = Insert(
    table="gate_closures",
    columns=(
        ("kind", "TEXT"),
        ("name", "TEXT"),
        ("closed_until", "DOUBLE PRECISION"),
        ("why", "TEXT"),
    ),
    key=("kind", "name"),
    updated=("closed_until", "why"),
)
OUTBOX = Insert(
    table="ledger_outbox",
    columns=(
        ("reservation_id", "TEXT"),
        ("call", "TEXT"),
        ("micro_usd", "BIGINT"),
        ("tokens", "BIGINT"),
    ),
    key=("reservation_id",),
    updated=("call", "micro_usd", "tokens"),
)
CONFIGURED = Insert(table="configured_budgets", columns=(("scope", "TEXT"),))
