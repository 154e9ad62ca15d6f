"""SQLite without a file: what it keeps, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headgate.errors import LedgerUnavailableError, StoreError
from headgate.storage.memory import MemoryDatabase
from headgate.storage.transaction import Dialect, Insert

WORDS = Insert(
    table="words",
    columns=(("word", "TEXT"), ("uses", "INTEGER")),
    key=("word",),
    updated=("uses",),
)


def with_words(*words: str) -> MemoryDatabase:
    database = MemoryDatabase()
    transaction = database.begin()
    transaction.run("CREATE TABLE words (word TEXT PRIMARY KEY, uses INTEGER)")
    transaction.insert(WORDS, [(word, 1) for word in words])
    database.commit()
    return database


def words_of(database: MemoryDatabase) -> list[str]:
    rows = database.begin().read("SELECT word FROM words ORDER BY word")
    database.rollback()
    return [row[0] for row in rows]


def test_what_is_committed_outlives_a_close() -> None:
    database = with_words("gate")
    database.close()
    assert words_of(database) == ["gate"]


@pytest.mark.parametrize("end", [MemoryDatabase.rollback, MemoryDatabase.close])
def test_what_is_not_committed_is_undone(end: Callable[[MemoryDatabase], None]) -> None:
    database = with_words("gate")
    database.begin().insert(WORDS, [("lock", 1)])
    end(database)
    assert words_of(database) == ["gate"]


def test_two_databases_have_nothing_in_common() -> None:
    with_words("gate")
    assert words_of(with_words("weir")) == ["weir"]


def test_it_speaks_the_dialect_of_the_file() -> None:
    assert MemoryDatabase().begin().dialect is Dialect.SQLITE


def test_a_mistake_in_a_statement_is_no_reason_to_try_again() -> None:
    with pytest.raises(StoreError, match="nowhere") as caught:
        MemoryDatabase().begin().read("SELECT * FROM nowhere")
    assert not isinstance(caught.value, LedgerUnavailableError)


def test_ending_what_has_not_begun_is_harmless() -> None:
    database = with_words("gate")
    database.rollback()
    database.close()
    assert words_of(database) == ["gate"]
