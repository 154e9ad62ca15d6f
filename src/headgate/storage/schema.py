"""The tables of a task store in SQL.

A row of `tasks` is small and written at every step; what only the executor reads, and may be large,
lies beside it and is written once. That table has an index of its own, with only the ids: where the
rows are the index, SQLite reads the whole of each that it compares. A further index that every step
writes costs more than the commit itself. So there are two beside the keys, which are written at the
begin and at the end, and each task is in one of them: the tasks that have not ended, which are few,
and those that have, in the order in which they go.

`eviction_rank` is set once a task has ended. `evictable_since` is set as long as nothing needs it
then, and holds the time at which it ended. No index has a column that an attempt changes: in
PostgreSQL such a change would be written to every index of the table.
`settled_by` is the node that settled the latest attempt; one that was taken back has none.
"""

from __future__ import annotations

from headgate.core.retention import EVICTION_RANKS
from headgate.core.task import TaskStatus
from headgate.storage.migrations import Migration, first_migration, statements
from headgate.storage.transaction import Insert

TASKS = "tasks"

_TASK_TABLES = """
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


# How many ended tasks are kept, by how they ended, and how far each setting has deleted them.
_RETENTION_CHANGES = """
ALTER TABLE tasks ADD COLUMN eviction_rank INTEGER;
UPDATE tasks SET eviction_rank = CASE state {ranks} END;
DROP INDEX evictable_tasks;
CREATE INDEX ended_tasks ON tasks (eviction_rank, evictable_since) WHERE eviction_rank IS NOT NULL;
CREATE INDEX live_tasks ON tasks (id) WHERE eviction_rank IS NULL;
INSERT INTO counters SELECT 'kept_' || state, COUNT(*) FROM tasks
    WHERE eviction_rank IS NOT NULL GROUP BY state;
CREATE TABLE retention_cuts (
    setting {text} PRIMARY KEY,
    amount DOUBLE PRECISION NOT NULL,
    task_id {text} NOT NULL
) {by_key}
"""


def _retention_statements(*, text: str, by_key: str) -> tuple[str, ...]:
    ranks = " ".join(f"WHEN '{state.value}' THEN {rank}" for state, rank in EVICTION_RANKS.items())
    script = _RETENTION_CHANGES.format(text=text, by_key=by_key, ranks=ranks)
    return tuple(statement.strip() for statement in script.split(";"))


COUNT_QUEUED_OF_PROJECTS = (
    "INSERT INTO counters SELECT 'queued:' || project_id, CAST(SUM(queued) AS BIGINT)"
    " FROM lanes GROUP BY project_id"
)

# Whose claim a settlement is that a ledger outside the store has yet to be told.
_CLAIMED = (
    "ALTER TABLE ledger_outbox ADD COLUMN claimed_for_project TEXT",
    "ALTER TABLE ledger_outbox ADD COLUMN claimed_for_agent TEXT",
)

# Who closed a gate, when, and at which task.
_WHO_CLOSED = (
    "ALTER TABLE gate_closures ADD COLUMN cause TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE gate_closures ADD COLUMN closed_by TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE gate_closures ADD COLUMN task_id TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE gate_closures ADD COLUMN closed_at DOUBLE PRECISION",
)

# What each project has: tasks that wait and those of them that were submitted for later, what its
# unfinished tasks take, and how many ended ones are kept, with what they take and how many of them
# were refused. The index of ended tasks finds those of one project in the order in which they go.
_PROJECT_COUNTS = """
CREATE TABLE project_counts (
    project_id {text} PRIMARY KEY,
    queued BIGINT NOT NULL,
    scheduled BIGINT NOT NULL,
    live_bytes BIGINT NOT NULL,
    ended BIGINT NOT NULL,
    ended_bytes BIGINT NOT NULL,
    refused BIGINT NOT NULL
) {by_key};
ALTER TABLE lanes ADD COLUMN scheduled BIGINT NOT NULL DEFAULT 0;
DELETE FROM counters WHERE substr(name, 1, 7) = 'queued:';
DROP INDEX ended_tasks;
CREATE INDEX ended_tasks ON tasks (eviction_rank, project_id, evictable_since)
    WHERE eviction_rank IS NOT NULL;
{count}
"""

TASK_BYTES = (
    "octet_length(spec) + COALESCE(octet_length(result), 0) + COALESCE(octet_length(error), 0)"
    " + COALESCE((SELECT octet_length(submission) FROM task_inputs AS given"
    " WHERE given.id = tasks.id), 0)"
)
"""What a task takes, as far as its submitter decides: the rest of its row is small."""

COUNT_PROJECTS = (
    "INSERT INTO project_counts (project_id, queued, scheduled, live_bytes, ended, ended_bytes,"  # noqa: S608
    " refused) SELECT project_id,"
    " SUM(CASE WHEN state = 'queued' THEN 1 ELSE 0 END), 0,"
    f" SUM(CASE WHEN eviction_rank IS NULL THEN {TASK_BYTES} ELSE 0 END),"
    " SUM(CASE WHEN eviction_rank IS NULL THEN 0 ELSE 1 END),"
    f" SUM(CASE WHEN eviction_rank IS NULL THEN 0 ELSE {TASK_BYTES} END),"
    f" SUM(CASE WHEN eviction_rank = {EVICTION_RANKS[TaskStatus.REJECTED]} THEN 1 ELSE 0 END)"
    " FROM tasks GROUP BY project_id;"
    "INSERT INTO counters SELECT 'live_bytes', CAST(SUM(live_bytes) AS BIGINT)"
    " FROM project_counts WHERE live_bytes > 0 GROUP BY 1;"
    "INSERT INTO counters SELECT 'ended_bytes', CAST(SUM(ended_bytes) AS BIGINT)"
    " FROM project_counts WHERE ended_bytes > 0 GROUP BY 1"
)

# How many ended calls are kept of a project, and what these take.
_CALL_COUNTS = (
    "ALTER TABLE project_counts ADD COLUMN calls BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE project_counts ADD COLUMN call_bytes BIGINT NOT NULL DEFAULT 0",
)

TASK_MIGRATIONS = (
    Migration(
        number=1,
        sqlite=statements(
            _TASK_TABLES,
            text="TEXT",
            # A number that was read and deleted must not be given again.
            sequence="INTEGER PRIMARY KEY AUTOINCREMENT",
            by_key="WITHOUT ROWID",
        ),
        postgres=statements(
            _TASK_TABLES,
            text='TEXT COLLATE "C"',
            sequence="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
            by_key="",
        ),
    ),
    Migration(
        number=2,
        sqlite=("ALTER TABLE nodes RENAME COLUMN places TO capacity",),
        postgres=("ALTER TABLE nodes RENAME COLUMN places TO capacity",),
    ),
    Migration(
        number=3,
        sqlite=_retention_statements(text="TEXT", by_key="WITHOUT ROWID"),
        postgres=_retention_statements(text='TEXT COLLATE "C"', by_key=""),
    ),
    Migration(number=4, sqlite=(COUNT_QUEUED_OF_PROJECTS,), postgres=(COUNT_QUEUED_OF_PROJECTS,)),
    Migration(number=5, sqlite=_CLAIMED, postgres=_CLAIMED),
    Migration(number=6, sqlite=_WHO_CLOSED, postgres=_WHO_CLOSED),
    Migration(
        number=7,
        sqlite=statements(
            _PROJECT_COUNTS, text="TEXT", by_key="WITHOUT ROWID", count=COUNT_PROJECTS
        ),
        postgres=statements(
            _PROJECT_COUNTS, text='TEXT COLLATE "C"', by_key="", count=COUNT_PROJECTS
        ),
    ),
    Migration(number=8, sqlite=_CALL_COUNTS, postgres=_CALL_COUNTS),
)

_CHANGING = (
    ("agent_id", "TEXT"),
    ("state", "TEXT"),
    ("progress", "TEXT"),
    ("evictable_since", "DOUBLE PRECISION"),
    ("eviction_rank", "INTEGER"),
    ("settled_by", "TEXT"),
    ("error", "TEXT"),
    ("result", "TEXT"),
    ("tokens", "BIGINT"),
    ("micro_usd", "BIGINT"),
)
TASK_COLUMNS = ("id", "project_id", "spec", *(name for name, _ in _CHANGING))

TASK_ROWS = Insert(
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
        ("cause", "TEXT"),
        ("closed_by", "TEXT"),
        ("task_id", "TEXT"),
        ("closed_at", "DOUBLE PRECISION"),
    ),
    key=("kind", "name"),
    updated=("closed_until", "why", "cause", "closed_by", "task_id", "closed_at"),
)
OUTBOX = Insert(
    table="ledger_outbox",
    columns=(
        ("reservation_id", "TEXT"),
        ("call", "TEXT"),
        ("micro_usd", "BIGINT"),
        ("tokens", "BIGINT"),
        ("claimed_for_project", "TEXT"),
        ("claimed_for_agent", "TEXT"),
    ),
    key=("reservation_id",),
    updated=("call", "micro_usd", "tokens", "claimed_for_project", "claimed_for_agent"),
)
CONFIGURED = Insert(table="configured_budgets", columns=(("scope", "TEXT"),))
CUTS = Insert(
    table="retention_cuts",
    columns=(("setting", "TEXT"), ("amount", "DOUBLE PRECISION"), ("task_id", "TEXT")),
    key=("setting",),
    updated=("amount",),
    highest=("task_id",),
)


# The tables of deliveries, of the secrets that sign them, and of budget alerts that were told.
#
# A row of `deliveries` is small; what is sent may be large, lies beside it, and is kept only from
# the first try that failed. What came of its tries lies beside it, too. `due_at` is set while a
# delivery is pending: a claim moves it to the time at which the claim ends.

DELIVERIES = "deliveries"

_DELIVERY_TABLES = """
CREATE TABLE deliveries (
    id {text} PRIMARY KEY,
    task_id {text} NOT NULL,
    event {text} NOT NULL,
    url {text} NOT NULL,
    host {text} NOT NULL,
    state {text} NOT NULL,
    tries INTEGER NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    due_at DOUBLE PRECISION,
    claimed_by {text},
    ended_at DOUBLE PRECISION,
    status INTEGER,
    error {text}
) {by_key};
CREATE INDEX due_deliveries ON deliveries (due_at, host) WHERE due_at IS NOT NULL;
CREATE INDEX ended_deliveries ON deliveries (state, ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE delivery_bodies (
    id {text} PRIMARY KEY,
    body {text} NOT NULL
);
CREATE TABLE webhook_secrets (
    secret {text} PRIMARY KEY,
    created_at DOUBLE PRECISION NOT NULL,
    ends_at DOUBLE PRECISION
) {by_key};
CREATE TABLE budget_alerts (
    scope {text},
    unit {text},
    percent INTEGER,
    limit_amount BIGINT NOT NULL,
    told_until DOUBLE PRECISION,
    PRIMARY KEY (scope, unit, percent)
) {by_key}
"""

# `filed_at` is the `created_at` of the delivery: a message that is filed anew has no tries yet.
_TRIES = """
CREATE TABLE delivery_tries (
    id {text} PRIMARY KEY,
    filed_at DOUBLE PRECISION NOT NULL,
    tries {text} NOT NULL
)
"""

# Whose task a delivery tells of; empty where it is about none, such as a budget alert.
_WHOSE = ("ALTER TABLE deliveries ADD COLUMN project_id TEXT NOT NULL DEFAULT ''",)

DELIVERY_MIGRATIONS = (
    first_migration(_DELIVERY_TABLES),
    Migration(
        number=2,
        sqlite=(_TRIES.format(text="TEXT"),),
        postgres=(_TRIES.format(text='TEXT COLLATE "C"'),),
    ),
    Migration(number=3, sqlite=_WHOSE, postgres=_WHOSE),
)

_COLUMNS = (
    ("id", "TEXT"),
    ("task_id", "TEXT"),
    ("event", "TEXT"),
    ("url", "TEXT"),
    ("host", "TEXT"),
    ("state", "TEXT"),
    ("tries", "INTEGER"),
    ("created_at", "DOUBLE PRECISION"),
    ("due_at", "DOUBLE PRECISION"),
    ("claimed_by", "TEXT"),
    ("ended_at", "DOUBLE PRECISION"),
    ("status", "INTEGER"),
    ("error", "TEXT"),
    ("project_id", "TEXT"),
)

DELIVERY_ROWS = Insert(
    table="deliveries",
    columns=_COLUMNS,
    key=("id",),
    # A task whose id comes again, long after the first was forgotten, is told of anew.
    updated=tuple(name for name, _ in _COLUMNS[1:]),
)
BODIES = Insert(
    table="delivery_bodies",
    columns=(("id", "TEXT"), ("body", "TEXT")),
    key=("id",),
    updated=("body",),
)
TRIES = Insert(
    table="delivery_tries",
    columns=(("id", "TEXT"), ("filed_at", "DOUBLE PRECISION"), ("tries", "TEXT")),
    key=("id",),
    updated=("filed_at", "tries"),
)
ALERTS = Insert(
    table="budget_alerts",
    columns=(
        ("scope", "TEXT"),
        ("unit", "TEXT"),
        ("percent", "INTEGER"),
        ("limit_amount", "BIGINT"),
        ("told_until", "DOUBLE PRECISION"),
    ),
    key=("scope", "unit", "percent"),
    updated=("limit_amount", "told_until"),
)


# The tables of administration: what was changed beside the file, and who changed anything.

ADMINISTRATION = "administration"

_ADMINISTRATION_TABLES = """
CREATE TABLE overrides (
    kind {text},
    name {text},
    key {text},
    value {text} NOT NULL,
    file_value {text} NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    made_by {text} NOT NULL,
    PRIMARY KEY (kind, name, key)
);
CREATE TABLE bulk_retries (
    task_id {text} PRIMARY KEY,
    retried_as {text} NOT NULL,
    is_submitted INTEGER NOT NULL DEFAULT 0,
    at DOUBLE PRECISION NOT NULL
);
CREATE TABLE audit_log (
    seq {sequence},
    id {text} NOT NULL UNIQUE,
    at DOUBLE PRECISION NOT NULL,
    actor {text} NOT NULL,
    token_id {text} NOT NULL,
    action {text} NOT NULL,
    subject {text} NOT NULL,
    detail {text} NOT NULL,
    request_id {text} NOT NULL
)
"""


# Entries of reading, and those of each tenant, are bounded apart from what operators changed.
_AUDIT_SHARES = (
    "ALTER TABLE audit_log ADD COLUMN share TEXT NOT NULL DEFAULT ''",
    "CREATE INDEX audit_log_by_share ON audit_log (share, seq)",
)

ADMINISTRATION_MIGRATIONS = (
    Migration(
        number=1,
        sqlite=statements(
            _ADMINISTRATION_TABLES, text="TEXT", sequence="INTEGER PRIMARY KEY AUTOINCREMENT"
        ),
        postgres=statements(
            _ADMINISTRATION_TABLES,
            text='TEXT COLLATE "C"',
            sequence="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        ),
    ),
    Migration(number=2, sqlite=_AUDIT_SHARES, postgres=_AUDIT_SHARES),
)

OVERRIDES = Insert(
    table="overrides",
    columns=(
        ("kind", "TEXT"),
        ("name", "TEXT"),
        ("key", "TEXT"),
        ("value", "TEXT"),
        ("file_value", "TEXT"),
        ("at", "DOUBLE PRECISION"),
        ("made_by", "TEXT"),
    ),
    key=("kind", "name", "key"),
    updated=("value", "file_value", "at", "made_by"),
)


# The tables of workers: whom each serves, and the tasks that it has.
#
# A worker has a row among the nodes, too, with its capacity and its lease. `offered_until` is when
# its offer lapses, if it makes none anew. What it has is kept apart from the tasks,
# because tasks are not found by their node.

WORKERS = "workers"

_WORKER_TABLES = """
CREATE TABLE workers (
    node_id {text} PRIMARY KEY,
    agent_id {text} NOT NULL,
    lease_seconds DOUBLE PRECISION NOT NULL,
    offered_until DOUBLE PRECISION NOT NULL
) {by_key};
CREATE TABLE worker_tasks (
    node_id {text},
    task_id {text},
    PRIMARY KEY (node_id, task_id)
) {by_key}
"""

WORKER_MIGRATIONS = (first_migration(_WORKER_TABLES),)

WORKER_TASKS = Insert(table="worker_tasks", columns=(("node_id", "TEXT"), ("task_id", "TEXT")))


# What is learned of the cost of work, one row for each kind; `learned` is JSON.

ESTIMATES = "estimates"

_ESTIMATE_TABLES = """
CREATE TABLE estimates (
    project_id {text},
    name {text},
    action {text},
    fed_at DOUBLE PRECISION NOT NULL,
    learned {text} NOT NULL,
    PRIMARY KEY (project_id, name, action)
) {by_key}
"""

ESTIMATE_MIGRATIONS = (first_migration(_ESTIMATE_TABLES),)

ESTIMATE_ROWS = Insert(
    table="estimates",
    columns=(
        ("project_id", "TEXT"),
        ("name", "TEXT"),
        ("action", "TEXT"),
        ("fed_at", "DOUBLE PRECISION"),
        ("learned", "TEXT"),
    ),
    key=("project_id", "name", "action"),
    updated=("fed_at", "learned"),
)
