"""The tables of a ledger in SQL.

Each index costs more than the commit itself, so there is one beside the keys: the leases that are
still running. Reservations that ended are found through the journal, which is in order of time.
"""

from __future__ import annotations

from headgate.databases.migrations import Migration
from headgate.databases.transaction import Insert

PART = "ledger"

AMOUNTS = (
    "spent_micro_usd",
    "reserved_micro_usd",
    "overrun_micro_usd",
    "spent_tokens",
    "reserved_tokens",
    "overrun_tokens",
)
RESERVATION = (
    "id",
    "state",
    "lease_until",
    "charges",
    "micro_usd",
    "tokens",
    "dispatched_at_once",
    "actual_micro_usd",
    "actual_tokens",
)

_TABLES = """
CREATE TABLE ledger_limits (
    scope {text} PRIMARY KEY,
    limit_micro_usd BIGINT,
    limit_tokens BIGINT,
    time_window {text} NOT NULL
) {by_key};
CREATE TABLE ledger_balances (
    scope {text},
    bucket_start BIGINT,
    {amounts},
    PRIMARY KEY (scope, bucket_start)
) {by_key};
CREATE TABLE ledger_reservations (
    id {text} PRIMARY KEY,
    state {text} NOT NULL,
    lease_until DOUBLE PRECISION NOT NULL,
    charges {text} NOT NULL,
    micro_usd BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    dispatched_at_once INTEGER NOT NULL,
    actual_micro_usd BIGINT,
    actual_tokens BIGINT,
    finished_at DOUBLE PRECISION
) {by_key};
CREATE INDEX ledger_leases ON ledger_reservations (lease_until) WHERE finished_at IS NULL;
CREATE TABLE ledger_journal (
    seq {sequence},
    at DOUBLE PRECISION NOT NULL,
    reservation_id {text} NOT NULL,
    call {text} NOT NULL,
    charges {text} NOT NULL,
    {amounts}
);
CREATE TABLE ledger_checkpoint (
    scope {text},
    bucket_start BIGINT,
    {amounts},
    PRIMARY KEY (scope, bucket_start)
) {by_key};
INSERT INTO ledger_balances VALUES ('', 0, 0, 0, 0, 0, 0, 0)
"""
_AMOUNT_COLUMNS = ", ".join(f"{name} BIGINT NOT NULL" for name in AMOUNTS)


def _statements(*, text: str, sequence: str, by_key: str) -> tuple[str, ...]:
    script = _TABLES.format(text=text, sequence=sequence, by_key=by_key, amounts=_AMOUNT_COLUMNS)
    return tuple(statement.strip() for statement in script.split(";"))


MIGRATIONS = (
    Migration(
        number=1,
        sqlite=_statements(text="TEXT", sequence="INTEGER PRIMARY KEY", by_key="WITHOUT ROWID"),
        postgres=_statements(
            text='TEXT COLLATE "C"',
            sequence="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
            by_key="",
        ),
    ),
)

_AMOUNT_TYPES = tuple((name, "BIGINT") for name in AMOUNTS)

BALANCES = Insert(
    table="ledger_balances",
    columns=(("scope", "TEXT"), ("bucket_start", "BIGINT"), *_AMOUNT_TYPES),
    key=("scope", "bucket_start"),
    updated=AMOUNTS,
)
RESERVATIONS = Insert(
    table="ledger_reservations",
    columns=(
        ("id", "TEXT"),
        ("state", "TEXT"),
        ("lease_until", "DOUBLE PRECISION"),
        ("charges", "TEXT"),
        ("micro_usd", "BIGINT"),
        ("tokens", "BIGINT"),
        ("dispatched_at_once", "INTEGER"),
        ("actual_micro_usd", "BIGINT"),
        ("actual_tokens", "BIGINT"),
        ("finished_at", "DOUBLE PRECISION"),
    ),
    key=("id",),
    updated=("state", "lease_until", "actual_micro_usd", "actual_tokens", "finished_at"),
)
JOURNAL = Insert(
    table="ledger_journal",
    columns=(
        ("at", "DOUBLE PRECISION"),
        ("reservation_id", "TEXT"),
        ("call", "TEXT"),
        ("charges", "TEXT"),
        *_AMOUNT_TYPES,
    ),
)
