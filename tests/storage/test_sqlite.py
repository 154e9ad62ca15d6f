"""The SQLite database: how the file is made, and what goes wrong with files."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from headgate.errors import InvalidSettingError, LedgerUnavailableError, StoreError
from headgate.storage.sqlite import SqliteDatabase
from headgate.storage.transaction import Insert

WORDS = Insert(
    table="words",
    columns=(("word", "TEXT"), ("uses", "BIGINT")),
    key=("word",),
    updated=("uses",),
)


def test_a_new_file_is_for_its_owner_alone_and_so_are_those_beside_it(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "ledger.db")
    database.begin().run("CREATE TABLE words (word TEXT PRIMARY KEY, uses INTEGER)")
    database.commit()
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("ledger.db", "ledger.db-wal", "ledger.db-shm"), "0o600")
    database.close()


def test_every_commit_is_on_disk_before_it_is_answered(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "ledger.db")
    transaction = database.begin()
    assert transaction.read("PRAGMA journal_mode") == [("wal",)]
    assert transaction.read("PRAGMA synchronous") == [(2,)]
    assert transaction.read("PRAGMA fullfsync") == [(1,)]
    database.close()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingError, match=r"the folder .*nowhere does not exist"):
        SqliteDatabase(tmp_path / "nowhere" / "ledger.db").begin()


def test_a_folder_that_is_a_file_and_a_link_that_leads_to_itself_are_unavailable(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop.db").symlink_to(tmp_path / "loop.db")
    for path in (tmp_path / "file" / "ledger.db", tmp_path / "loop.db"):
        with pytest.raises(LedgerUnavailableError, match="cannot be opened"):
            SqliteDatabase(path).begin()


def test_a_link_to_a_file_that_is_not_there_yet_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "ledger.db")
    database = SqliteDatabase(tmp_path / "link.db")
    database.begin()
    database.close()
    assert (tmp_path / "ledger.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", [":memory:", Path(":memory:"), "./:memory:"])
def test_a_ledger_in_memory_is_refused_before_a_file_of_that_name_is_made(
    path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidSettingError, match=r"^path: .* use memory: for a ledger without a"):
        SqliteDatabase(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_text("this is not the ledger that you are looking for, " * 40)
    with pytest.raises(LedgerUnavailableError, match="not a database"):
        SqliteDatabase(path).begin()


def test_a_lock_held_too_long_makes_the_ledger_unavailable_until_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    database = SqliteDatabase(path, busy_timeout_seconds=0.02)
    database.begin()
    database.commit()
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerUnavailableError, match="locked by another process"):
        database.begin()
    other.execute("ROLLBACK")
    other.close()
    database.begin()
    database.close()


def test_a_full_disk_undoes_the_transaction_and_room_heals_it(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "ledger.db")
    transaction = database.begin()
    transaction.run("CREATE TABLE words (word TEXT PRIMARY KEY, uses INTEGER)")
    database.commit()
    transaction = database.begin()
    transaction.read("PRAGMA max_page_count = 8")
    rows = [(f"{number:0200}", number) for number in range(1_000)]
    with pytest.raises(LedgerUnavailableError, match="disk is full"):
        transaction.insert(WORDS, rows)
    database.rollback()
    transaction = database.begin()
    assert transaction.read("SELECT COUNT(*) FROM words") == [(0,)]
    transaction.read("PRAGMA max_page_count = 100000")
    transaction.insert(WORDS, rows)
    database.commit()
    assert database.begin().read("SELECT COUNT(*) FROM words") == [(1_000,)]
    database.close()


@pytest.mark.parametrize("count", [0, 1, 3, 64, 65, 200])
def test_many_rows_are_inserted_whatever_their_number(tmp_path: Path, count: int) -> None:
    database = SqliteDatabase(tmp_path / "ledger.db")
    transaction = database.begin()
    transaction.run("CREATE TABLE words (word TEXT PRIMARY KEY, uses INTEGER)")
    transaction.insert(WORDS, [(str(number), 1) for number in range(count)])
    transaction.insert(WORDS, [(str(number), 2) for number in range(count)])
    assert transaction.read("SELECT COUNT(*), COALESCE(SUM(uses), 0) FROM words") == [
        (count, 2 * count)
    ]
    database.close()


def test_a_mistake_in_a_statement_is_no_reason_to_try_again(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "ledger.db")
    with pytest.raises(StoreError, match="nowhere") as caught:
        database.begin().read("SELECT * FROM nowhere")
    assert not isinstance(caught.value, LedgerUnavailableError)
    database.close()
