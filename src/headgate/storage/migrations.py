"""Numbered migrations: how a database comes to have the tables that this program knows.

Each part of the program has its own numbers, from 1 and without gaps, so that parts can share a
database. Rule: a number that was released is never changed; a further one is added. A database
with a higher number than the program knows is refused, since an older program would write into
tables whose meaning it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headgate.errors import StoreError
from headgate.storage.transaction import Dialect, Transaction

# PostgreSQL has no row to lock before the first table exists. The number is arbitrary.
_ADVISORY_LOCK = 7_203_614_081
# Each schema has its own: who stands still in one keeps nobody from the tables of another.
_LOCK_SCHEMA = (
    "SELECT pg_advisory_xact_lock(CAST(? AS BIGINT) + CASE current_schema() WHEN 'public' THEN 0"
    " ELSE hashtext(current_schema()) END)"
)

_HAS_VERSIONS = {
    Dialect.SQLITE: "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'headgate_schema'",
    # The schema in which the table would be created, and not all that can be seen.
    Dialect.POSTGRES: "SELECT 1 FROM pg_catalog.pg_tables"
    " WHERE schemaname = current_schema() AND tablename = 'headgate_schema'",
}
_CREATE_VERSIONS = (
    "CREATE TABLE IF NOT EXISTS headgate_schema (part TEXT PRIMARY KEY, version INTEGER NOT NULL)"
)
_SET_VERSION = (
    "INSERT INTO headgate_schema (part, version) VALUES (?, ?)"
    " ON CONFLICT (part) DO UPDATE SET version = excluded.version"
)


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a schema: the statements that make it, in each dialect."""

    number: int
    sqlite: tuple[str, ...]
    postgres: tuple[str, ...]

    def statements(self, dialect: Dialect) -> tuple[str, ...]:
        """Return the statements for a database."""
        return self.sqlite if dialect is Dialect.SQLITE else self.postgres


def first_migration(script: str) -> Migration:
    """Return the migration that makes the tables of a script, with `{text}` and `{by_key}`.

    Keys sort by their bytes in both databases, and in SQLite a table may lie by its key.
    """
    return Migration(
        number=1,
        sqlite=statements(script, text="TEXT", by_key="WITHOUT ROWID"),
        postgres=statements(script, text='TEXT COLLATE "C"', by_key=""),
    )


def statements(script: str, **words: str) -> tuple[str, ...]:
    """Return the statements of a script, with the words of a dialect put in."""
    return tuple(statement.strip() for statement in script.format(**words).split(";"))


def migrate(transaction: Transaction, part: str, migrations: Sequence[Migration]) -> int:
    """Bring a part of the schema up to date, and return how many steps that took."""
    if transaction.dialect is Dialect.POSTGRES:
        transaction.run(_LOCK_SCHEMA, (_ADVISORY_LOCK,))
    version = schema_version(transaction, part)
    known = migrations[-1].number
    if version > known:
        raise _too_new(part, version, known)
    missing = [migration for migration in migrations if migration.number > version]
    # Only then: a role that may use the tables need not be one that may create any.
    if missing:
        transaction.run(_CREATE_VERSIONS)
    for migration in missing:
        for statement in migration.statements(transaction.dialect):
            transaction.run(statement)
        transaction.run(_SET_VERSION, (part, migration.number))
    return len(missing)


def schema_version(transaction: Transaction, part: str) -> int:
    """Return the number of the last migration of a part; 0 before the first."""
    if not transaction.read(_HAS_VERSIONS[transaction.dialect]):
        return 0
    rows = transaction.read("SELECT version FROM headgate_schema WHERE part = ?", (part,))
    return int(rows[0][0]) if rows else 0


def _too_new(part: str, version: int, known: int) -> StoreError:
    line = f"the {part} tables are at version {version}, this program knows them up to {known}"
    return StoreError(f"{line}; install a newer headgate")
