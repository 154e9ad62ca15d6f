"""The tables of deliveries, of the secrets that sign them, and of budget alerts that were told.

A row of `deliveries` is small; what is sent may be large, lies beside it, and is kept only from the
first try that failed. What came of its tries lies beside it, too. `due_at` is set while a delivery
is pending: a claim moves it to the time at which the claim ends.
"""

from __future__ import annotations

from headgate.databases.migrations import Migration, first_migration
from headgate.databases.transaction import Insert

PART = "deliveries"

_TABLES = """
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

MIGRATIONS = (
    first_migration(_TABLES),
    Migration(
        number=2,
        sqlite=(_TRIES.format(text="TEXT"),),
        postgres=(_TRIES.format(text='TEXT COLLATE "C"'),),
    ),
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
)

DELIVERIES = Insert(
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
