"""The tables of administration: what was changed beside the file, and who changed anything."""

from __future__ import annotations

from headgate.databases.migrations import Migration
from headgate.databases.transaction import Insert

PART = "administration"

_TABLES = """
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


def _statements(*, text: str, sequence: str) -> tuple[str, ...]:
    script = _TABLES.format(text=text, sequence=sequence)
    return tuple(statement.strip() for statement in script.split(";"))


MIGRATIONS = (
    Migration(
        number=1,
        sqlite=_statements(text="TEXT", sequence="INTEGER PRIMARY KEY AUTOINCREMENT"),
        postgres=_statements(
            text='TEXT COLLATE "C"',
            sequence="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        ),
    ),
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
