"""Numbered migrations: each once, in order, and never backwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headgate.errors import StoreError
from headgate.storage.migrations import Migration, migrate, schema_version
from headgate.storage.sqlite import SqliteDatabase
from headgate.storage.transaction import Transaction


def step(number: int, *statements: str) -> Migration:
    return Migration(number=number, sqlite=statements, postgres=statements)


FIRST = step(1, "CREATE TABLE fruits (name TEXT)", "INSERT INTO fruits VALUES ('apple')")
SECOND = step(2, "ALTER TABLE fruits ADD COLUMN color TEXT")
BROKEN = step(3, "INSERT INTO fruits VALUES ('plum', 'blue')", "INSERT INTO nowhere VALUES (1)")


@contextmanager
def transaction_on(path: Path) -> Iterator[Transaction]:
    database = SqliteDatabase(path)
    try:
        yield database.begin()
        database.commit()
    finally:
        database.rollback()
        database.close()


def test_migrations_are_applied_in_order_and_each_once(tmp_path: Path) -> None:
    path = tmp_path / "schema.db"
    with transaction_on(path) as transaction:
        assert migrate(transaction, "fruit", [FIRST]) == 1
    with transaction_on(path) as transaction:
        assert migrate(transaction, "fruit", [FIRST, SECOND]) == 1
    with transaction_on(path) as transaction:
        assert migrate(transaction, "fruit", [FIRST, SECOND]) == 0
        assert schema_version(transaction, "fruit") == 2
        assert transaction.read("SELECT name, color FROM fruits") == [("apple", None)]


def test_parts_that_share_a_database_count_for_themselves(tmp_path: Path) -> None:
    with transaction_on(tmp_path / "schema.db") as transaction:
        migrate(transaction, "fruit", [FIRST, SECOND])
        assert schema_version(transaction, "tree") == 0
        assert migrate(transaction, "tree", [step(1, "CREATE TABLE trees (name TEXT)")]) == 1


def test_a_database_without_any_part_is_before_the_first_number(tmp_path: Path) -> None:
    with transaction_on(tmp_path / "schema.db") as transaction:
        assert schema_version(transaction, "fruit") == 0


def test_a_database_newer_than_the_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "schema.db"
    with transaction_on(path) as transaction:
        migrate(transaction, "fruit", [FIRST, SECOND])
    with (
        transaction_on(path) as transaction,
        pytest.raises(StoreError, match=r"version 2, this program knows .* 1; install a newer"),
    ):
        migrate(transaction, "fruit", [FIRST])
    with transaction_on(path) as transaction:
        assert schema_version(transaction, "fruit") == 2


def test_a_migration_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "schema.db"
    with transaction_on(path) as transaction:
        migrate(transaction, "fruit", [FIRST, SECOND])
    with pytest.raises(StoreError, match="nowhere"), transaction_on(path) as transaction:
        migrate(transaction, "fruit", [FIRST, SECOND, BROKEN])
    with transaction_on(path) as transaction:
        assert schema_version(transaction, "fruit") == 2
        assert transaction.read("SELECT COUNT(*) FROM fruits") == [(1,)]
