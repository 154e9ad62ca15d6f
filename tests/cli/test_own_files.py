"""Commands that write files do not write over what a service lives from."""

from __future__ import annotations

import os
from pathlib import Path

import apsw
import pytest

from headgate.cli.main import run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Give a data directory with a store, a lock and a token."""
    directory = tmp_path / "data"
    directory.mkdir()
    found(directory / "headgate.db")
    for name in ("headgate.db-wal", "headgate.db-shm", "headgate.lock", "token", "token.previous"):
        (directory / name).write_bytes(b"")
    return directory


def found(path: Path) -> None:
    with apsw.Connection(str(path)) as connection:
        connection.execute("CREATE TABLE headgate_schema (part TEXT, version INTEGER)")
        connection.execute("INSERT INTO headgate_schema VALUES ('tasks', 1)")
    connection.close()


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "headgate.db",
        "headgate.db-wal",
        "headgate.db-shm",
        "headgate.db-journal",
        "headgate.lock",
        "token",
        "token.previous",
    ],
)
def test_a_backup_never_takes_the_place_of_a_file_of_the_service(
    data: Path, name: str, is_there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    target = data / name
    if not is_there and name != "headgate.db":
        target.unlink(missing_ok=True)
    before = target.stat().st_ino if target.exists() else None
    assert run(["backup", str(target), "--data", str(data), "--force"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"headgate: FILE: {target} belongs to the service")
    assert printed.count("\n") == 1
    assert (target.stat().st_ino if target.exists() else None) == before


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_backup_is_not_fooled_by_another_name_of_the_store(data: Path, link: object) -> None:
    other = data.parent / "other.db"
    assert callable(link)
    link(data / "headgate.db", other)
    for target in (other, data / ".." / "data" / "headgate.db"):
        assert run(["backup", str(target), "--data", str(data), "--force"]) == 2
    assert other.samefile(data / "headgate.db")


def test_a_backup_may_lie_beside_the_store(data: Path) -> None:
    for _ in range(2):
        assert run(["backup", str(data / "copy.db"), "--data", str(data), "--force"]) == 0


@pytest.mark.parametrize("link", [None, os.link, os.symlink])
def test_a_store_is_not_restored_from_itself(
    data: Path, link: object, capsys: pytest.CaptureFixture[str]
) -> None:
    store = data / "headgate.db"
    copy = store
    if callable(link):
        copy = data.parent / "copy.db"
        link(store, copy)
    assert run(["restore", str(copy), "--data", str(data), "--force"]) == 2
    assert "is the store itself" in capsys.readouterr().err
    assert store.is_file()
    assert list(data.glob("*before*")) == []
